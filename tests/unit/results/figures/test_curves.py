"""What figures over time show of metrics, samples, steps and stages: every point by hand."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.model.goals import Goal
from mlbench_cli.results.analysis.tables import MetricPoint, ResourceSample
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.curves import (
    MAX_OTHER,
    MAX_RANKS,
    MAX_RUNS,
    LatestSamples,
    RunData,
    live_figures,
    metric_figures,
    resource_figures,
    step_figures,
    timeline_figure,
    use_now,
)
from mlbench_cli.results.figures.faults import draw_faults
from mlbench_cli.results.figures.model import Figure, Kind, Scale, Spread

LOSS: dict[str, Any] = {"name": "train_loss", "rank": 0}
GOAL = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0}


def run_of(
    name: str = "r",
    metrics: list[dict[str, Any]] | None = None,
    phases: list[tuple[Any, ...]] | None = None,
    created: str = "2026-01-01T00:00:00Z",
    task: str = "t",
    **result: Any,
) -> RunData:
    """A run with these rows of metrics and these phases of rank 0: (time, phase, epoch, step)."""
    fields: dict[str, Any] = {
        "workers": 2,
        "world_size": 2,
        "goal": None,
        "timings": {},
        "started": None,
        "wall_seconds": 10.0,
    }
    events = [
        {"event": "phase", "rank": 0, "time": at, "phase": phase, "epoch": epoch, "step": step}
        for at, phase, epoch, step in phases or []
    ]
    events += [{"event": "phase", "rank": 1, "time": 0.0, "phase": "training"}, {"event": "metric", "rank": 0}]
    archive = SimpleNamespace(
        run={"name": name, "created": created, "spec": {"task": task}},
        result={"finished": "2026-01-01T00:01:00Z", "task_seconds": {"wall": None}, **fields, **result},
        metrics=lambda: iter(metrics or []),
        events=lambda rank: iter(events),
    )
    return RunData(cast(Archive, archive))


def row(at: float, value: Any, name: str = "train_loss", rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"time": at, "rank": rank, "name": name, "value": value, **more}


def lines_of(figure: Figure) -> dict[str, tuple[tuple[float, ...], tuple[float | None, ...]]]:
    return {line.label: (line.xs, line.ys) for line in figure.lines}


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_become_figures_of_losses_the_goal_rates_and_others() -> None:
    names = ("train_loss", "val_loss", "val_Prec@1", "learning_rate", "grad_norm")
    rows = [row(1.0, 5.0, name, seconds=0.5) for name in names] + [row(1.0, 5.0, "other", rank=1)]
    found = list(metric_figures([run_of(metrics=rows, goal=GOAL)], "p-"))
    assert [(figure.key, figure.title, figure.y.label) for figure in found] == [
        ("p-loss", "Loss over time", "loss"),
        ("p-goal-metric", "Prec@1 over time", "Prec@1"),
        ("p-learning-rate", "Learning rate over time", "learning rate"),
        ("p-metric-0", "grad_norm over time", "grad_norm"),
    ]
    assert lines_of(found[0]) == {"r: train_loss": ((0.5,), (5.0,)), "r: val_loss": ((0.5,), (5.0,))}
    assert [(line.panel, line.short) for line in found[0].lines] == [("train_loss", "r"), ("val_loss", "r")]
    assert lines_of(found[1]) == {"r": ((0.5,), (5.0,)), "goal: 80": ((0.0, 0.5), (80.0, 80.0))}
    assert [line.reference for line in found[1].lines] == [False, True]
    assert found[1].y.unit == "%"
    assert {figure.x.label for figure in found} == {"seconds of training"}
    assert {figure.x.from_zero for figure in found} == {True}
    assert len(list(metric_figures([run_of(metrics=rows, goal=GOAL)], "", with_others=False))) == 2


def test_a_loss_that_is_the_goal_is_drawn_once() -> None:
    goal = {"metric": "val_loss", "comparison": "<=", "threshold": 3.0}
    found = list(metric_figures([run_of(metrics=[row(1.0, 5.0, "val_loss")], goal=goal)], ""))
    assert [figure.key for figure in found] == ["goal-metric"]


def test_further_metrics_have_a_figure_each_up_to_a_limit() -> None:
    rows = [row(1.0, 1.0, f"m{number}") for number in range(MAX_OTHER + 1)]
    found = list(metric_figures([run_of(metrics=rows)], "x-"))
    assert [figure.key for figure in found] == [f"x-metric-{number}" for number in range(MAX_OTHER)]


@pytest.mark.parametrize(
    ("phases", "xs"),
    [([(100.0, "loading", 0, 0), (103.0, "training", 0, 0)], (2.0, 4.0)), ([], (0.0, 2.0))],
)
def test_points_without_seconds_of_training_count_from_its_start_or_the_first_point(
    phases: list[tuple[Any, ...]], xs: tuple[float, ...]
) -> None:
    rows = [row(105.0, 1.0, seconds=1.0), row(107.0, "nan")]
    [figure] = metric_figures([run_of(metrics=rows, phases=phases)], "")
    assert lines_of(figure) == {"r": (xs, (1.0, None))}
    assert figure.x.label == "seconds since training began"


def test_only_the_first_runs_are_drawn_and_the_caption_says_so() -> None:
    runs = [run_of(f"r{number}", [row(1.0, 1.0, seconds=1.0)], workers=1 + number) for number in range(MAX_RUNS + 1)]
    [figure] = metric_figures(runs, "")
    assert len(figure.lines) == MAX_RUNS
    assert figure.caption == f"The first {MAX_RUNS} of {MAX_RUNS + 1} runs."
    assert [line.panel for line in figure.lines][:2] == ["1 worker", "2 workers"]
    [fewer] = metric_figures(runs[:MAX_RUNS], "")
    assert fewer.caption == ""
    [alike] = metric_figures([run_of("a", [row(1.0, 1.0)]), run_of("b", [row(1.0, 1.0)])], "")
    assert [line.panel for line in alike.lines] == ["", ""]


def test_measurements_of_collectives_have_no_curves() -> None:
    assert list(metric_figures([run_of(metrics=[row(1.0, 1.0)], task="allreduce")], "")) == []


def test_a_run_in_progress_has_a_figure_for_each_metric_and_a_line_for_each_rank() -> None:
    points = [MetricPoint("r", 9, rank, 10.0 + rank, "val_loss", float(rank)) for rank in (1, 0)]
    points += [MetricPoint("r", 9, rank, 20.0, "lr", 0.5) for rank in range(MAX_RANKS + 2)]
    points.append(MetricPoint("r", 9, 0, 12.0, "val_loss", float("inf")))
    loss, rate = live_figures(points, Goal("val_loss", "<=", 3.0))
    assert (loss.key, loss.title, loss.x.label) == ("val_loss", "val_loss over time", "seconds since the first value")
    assert lines_of(loss) == {
        "rank 0": ((-1.0, 1.0), (0.0, None)),
        "rank 1": ((0.0,), (1.0,)),
        "goal: 3": ((0.0, 1.0), (3.0, 3.0)),
    }
    assert list(lines_of(rate)) == [f"rank {rank}" for rank in range(MAX_RANKS)]
    assert [len(figure.lines) for figure in live_figures(points, None)] == [2, MAX_RANKS]


# --- samples --------------------------------------------------------------------------------------------------------


def sampled(*samples: ResourceSample) -> LatestSamples:
    return LatestSamples.of("run", samples)


def test_resources_are_amounts_or_rates_in_the_units_of_their_axes() -> None:
    counters = {"cpu_seconds": 4.0, "received_bytes": 3e6, "sent_bytes": 1e6, "read_bytes": 2e6, "write_bytes": 2e6}
    amounts = {"rss_bytes": 2.0**31, "gpu_percent": 50.0, "gpu_memory_bytes": 2.0**30, "gpu_watts": 300.0}
    zero = dict.fromkeys(counters, 0.0)
    run = sampled(ResourceSample("run", 0, 100.0, **zero, **amounts), ResourceSample("run", 0, 102.0, **counters))
    found = {figure.key: figure for figure in resource_figures([run], "")}
    assert {key: (each.title, each.y.label, each.lines[0].xs, each.lines[0].ys) for key, each in found.items()} == {
        "cpu": ("CPU in use per rank", "cores", (2.0,), (2.0,)),
        "memory": ("Memory per rank", "GiB", (0.0,), (2.0,)),
        "network": ("Network traffic per rank", "MB/s, both ways", (2.0,), (2.0,)),
        "disk": ("Disk traffic per rank", "MB/s, both ways", (2.0,), (2.0,)),
        "gpu": ("GPU utilization per rank", "%", (0.0,), (50.0,)),
        "gpu-memory": ("GPU memory per rank", "GiB", (0.0,), (1.0,)),
        "gpu-power": ("GPU power per rank", "W", (0.0,), (300.0,)),
    }
    assert {(each.kind, each.x.label, each.x.from_zero, each.y.from_zero) for each in found.values()} == {
        (Kind.STEPS, "seconds since the start of the run", True, True)
    }
    [line] = found["cpu"].lines
    assert (line.label, line.panel, line.short) == ("run, rank 0", "run", "rank 0")
    assert use_now(run) == {
        0: {
            "cpu": 2.0,
            "memory": 2.0,
            "network": 2.0,
            "disk": 2.0,
            "gpu": 50.0,
            "gpu-memory": 1.0,
            "gpu-power": 300.0,
        }
    }


def test_resources_that_were_not_used_have_no_figure() -> None:
    idle = [ResourceSample("run", 0, float(at), cpu_seconds=5.0, rss_bytes=1.0) for at in range(3)]
    assert [figure.key for figure in resource_figures([sampled(*idle)], "p-")] == ["p-memory"]
    assert list(resource_figures([sampled()], "")) == []
    assert use_now(sampled()) == {}


def test_a_counter_that_falls_is_no_negative_rate_and_equal_times_are_passed_over() -> None:
    values = ((0.0, 0.0), (1.0, 5.0), (1.0, 9.0), (2.0, 3.0), (4.0, 7.0))
    run = sampled(*(ResourceSample("run", 0, at, cpu_seconds=value) for at, value in values))
    [figure] = resource_figures([run], "")
    assert lines_of(figure) == {"run, rank 0": ((1.0, 2.0, 4.0), (5.0, 0.0, 2.0))}


def test_traffic_of_one_direction_counts_where_the_other_is_unknown() -> None:
    run = sampled(
        ResourceSample("run", 0, 0.0, received_bytes=1e6),
        ResourceSample("run", 0, 1.0, cpu_seconds=1.0),
        ResourceSample("run", 0, 2.0, received_bytes=3e6, sent_bytes=2e6),
    )
    [figure] = resource_figures([run], "")
    assert lines_of(figure) == {"run, rank 0": ((2.0,), (2.0,))}


def test_ranks_are_in_order_and_share_the_first_time() -> None:
    run = sampled(ResourceSample("run", 1, 12.0, rss_bytes=2.0**30), ResourceSample("run", 0, 10.0, rss_bytes=2.0**30))
    [figure] = resource_figures([run], "", "seconds ago")
    assert lines_of(figure) == {"run, rank 0": ((0.0,), (1.0,)), "run, rank 1": ((2.0,), (1.0,))}
    assert figure.x.label == "seconds ago"


@pytest.mark.parametrize(("ranks", "lines"), [(16, 16), (17, 3)])
def test_many_ranks_are_drawn_by_their_spread(ranks: int, lines: int) -> None:
    samples = [
        ResourceSample("run", rank, at, rss_bytes=2.0**30 * (rank + at / 60)) for rank in range(ranks) for at in (0, 60)
    ]
    [figure] = resource_figures([sampled(*samples)], "")
    assert len(figure.lines) == lines
    if lines == 3:
        xs = (0.5, 59.5)  # 60 intervals of a second
        assert lines_of(figure) == {
            "run, least of 17 ranks": (xs, (0.0, 1.0)),
            "run, median of 17 ranks": (xs, (8.0, 9.0)),
            "run, greatest of 17 ranks": (xs, (16.0, 17.0)),
        }
        assert (figure.lines[0].panel, figure.lines[0].short) == ("run", "least of 17 ranks")


@pytest.mark.parametrize(
    ("ranks", "seconds", "samples", "only_first"),
    [
        (16, 36_000.0, 60, False),
        (17, None, 6, False),
        (17, 600.0, 6, False),  # a figure has 60 intervals: 10 s each
        (17, 601.0, 5, False),  # every twelfth: the next number that divides a block of 60
        (17, 1800.0, 2, False),
        (17, 1801.0, 1, True),
    ],
)
def test_of_many_ranks_a_part_of_the_samples_is_read(
    ranks: int, seconds: float | None, samples: int, only_first: bool
) -> None:
    asked = []

    def list_rows(*, only_first: bool) -> list[dict[str, Any]]:
        asked.append(only_first)
        count = 1 if only_first else 60
        times, values = [100.0 + second for second in range(count)], [2.0**30 * second for second in range(count)]
        block = {"kind": "samples", "rank": 1, "time": {"values": times}, "rss_bytes": {"values": values}}
        return [block, {"time": 90.0, "rank": 0, "rss_bytes": 1.0}, {"time": 90.0, "kind": "machine"}]

    run = run_of(world_size=ranks, wall_seconds=seconds)
    cast(Any, run.archive).samples = list_rows
    found = run.resources
    assert asked == [only_first]
    assert sorted(found) == [0, 1]
    points = found[1].points(["rss_bytes"])
    assert (len(points), points[0]) == (samples, (100.0, 0.0))
    assert all(value == 2.0**30 * (time - 100.0) for time, value in points)
    assert found[0].points(["rss_bytes"]) == [(90.0, 1.0)]


# --- steps, ranks and stages ----------------------------------------------------------------------------------------


def test_step_times_are_means_between_reports_within_an_epoch() -> None:
    phases = [
        *((0.0, "training", 0, 0), (1.0, "training", 0, 10), (4.0, "training", 0, 20)),
        *((9.0, "training", 1, 21), (9.5, "training", 1, 31)),  # a new epoch: validation lies between
        *((10.0, "validation", 1, 31), (20.0, "training", 1, 41), (20.0, "training", 1, 51)),
        *((30.0, "training", 1, 51), (30.5, "training", 1, None), (31.0, "training", 1, 61)),
    ]
    [figure] = step_figures([run_of(phases=phases, world_size=1)], "p-")
    assert lines_of(figure) == {"r": ((50.0, 100.0, 300.0), (1 / 3, 2 / 3, 1.0))}
    assert (figure.key, figure.kind, figure.x.scale, figure.x.label) == (
        *("p-steps", Kind.STEPS, Scale.LOG10),
        "milliseconds per step",
    )
    assert figure.caption.endswith("within an epoch, weighted by steps.")


def test_a_step_time_counts_for_as_many_steps_as_it_covers() -> None:
    phases = [(0.0, "training", 0, 0), (1.0, "training", 0, 1), (2.5, "training", 0, 4)]
    [figure] = step_figures([run_of(phases=phases, world_size=1)], "")
    assert lines_of(figure) == {"r": ((500.0, 1000.0), (0.75, 1.0))}
    assert list(step_figures([run_of(phases=phases[:2], world_size=1)], "")) == []  # one is no distribution


def test_ranks_are_compared_by_phase_from_the_fastest_to_the_slowest() -> None:
    spread = {"min": 1.0, "mean": 2.0, "max": 4.0, "rank0": 2.0}
    runs = [
        run_of("a", timings={"data_wait": spread, "forward": spread}),
        run_of("b", timings={"forward": {**spread, "mean": 3.0}}, workers=4),
        run_of("alone", timings={"other": spread}, world_size=1),
    ]
    [figure] = step_figures(runs, "p-")
    assert (figure.key, figure.kind) == ("p-ranks", Kind.RANGES)
    assert figure.x.categories == ("data wait", "forward")
    assert list(figure.rows()) == [
        ("a", "data wait", 2.0, 1.0, 4.0),
        ("a", "forward", 2.0, 1.0, 4.0),
        ("b", "forward", 3.0, 1.0, 4.0),
    ]
    assert [line.panel for line in figure.lines] == ["2 workers", "4 workers"]
    assert {line.spread for line in figure.lines} == {Spread.INTERVAL}
    assert list(step_figures(runs[2:], "")) == []


BEGIN = 1767225600.0  # 2026-01-01T00:00:00Z


def test_a_timeline_is_from_the_request_to_the_archive() -> None:
    full = run_of(
        "full",
        phases=[(BEGIN + 7, "loading", None, None), (BEGIN + 12, "training", 0, 0)],
        started="2026-01-01T00:00:05Z",
        task_seconds={"wall": 30.0},
    )
    silent = run_of("silent", created="2026-01-01T00:00:50Z")
    figure = timeline_figure([full, silent], "k")
    assert figure is not None
    assert figure.x.categories == ("full", "silent")
    assert {label: ys for label, (_, ys) in lines_of(figure).items()} == {
        "waiting to start": (5.0, 0.0),
        "starting": (2.0, 0.0),
        "loading": (5.0, 0.0),
        "training and validation": (30.0, 10.0),
        "ending": (18.0, 0.0),
    }
    assert [line.color for line in figure.lines] == ["other", "evaluation", "data", "compute", "engine"]
    assert (figure.key, figure.kind) == ("k", Kind.BARS)


def test_a_stage_never_ends_before_it_began_nor_after_the_run() -> None:
    late = run_of(phases=[(BEGIN + 50, "training", 0, 0)], task_seconds={"wall": 100.0})
    figure = timeline_figure([late], "k")
    assert figure is not None
    assert {label: ys for label, (_, ys) in lines_of(figure).items()} == {
        "starting": (50.0,),
        "training and validation": (10.0,),
    }
    untrained = timeline_figure([run_of(started="2026-01-01T00:00:05Z", task_seconds={"wall": 3.0})], "k")
    assert untrained is not None
    assert {label: ys for label, (_, ys) in lines_of(untrained).items()} == {
        "waiting to start": (5.0,),
        "training and validation": (55.0,),
    }
    assert timeline_figure([run_of(created="2026-01-01T00:01:00Z")], "k") is None
    assert timeline_figure([], "k") is None


# --- faults ---------------------------------------------------------------------------------------------------------


def faulty(workers: int = 2, processes: int = 2, script: str | None = "s.txt", **facts: Any) -> Figure:
    document = {
        "script": script,
        "policy": "restart",
        "wall_seconds": 100.0,
        "timeline": [],
        "events": [],
        **facts,
    }
    archive = SimpleNamespace(
        run={"spec": {"workers": workers, "processes_per_worker": processes}},
        result={"run": "r", "faults": document},
    )
    return draw_faults(cast(Archive, archive), "k")


def spans(figure: Figure) -> dict[str, list[tuple[float, float | None, float | None]]]:
    return {
        line.label: [(x, low, high) for x, low, high in zip(line.xs, line.low, line.high, strict=True)]
        for line in figure.lines
    }


def test_every_rank_has_the_parts_of_the_time_and_the_faults_that_struck_it() -> None:
    figure = faulty(
        timeline=[("startup", 0.0, 5.0), ("useful", 5.0, 40.0), ("lost", 40.0, 50.0), ("useful", 50.0, 100.0)],
        events=[("kill", 1, 50.0, None), ("slow", 2, 60.0, 80.0), ("node", 1, 99.9, None), ("disk", None, 10.0, 20.0)],
    )
    assert (figure.key, figure.kind, figure.title) == ("k", Kind.SPANS, "r: ranks and faults over time")
    assert figure.x.categories == ("rank 0", "rank 1", "rank 2", "rank 3")
    assert figure.caption == "Faults: s.txt; policy: restart."
    found = spans(figure)
    assert found["useful work"] == [(float(rank), *span) for rank in range(4) for span in ((5.0, 40.0), (50.0, 100.0))]
    assert found["start-up"] == [(float(rank), 0.0, 5.0) for rank in range(4)]
    assert found["lost work"] == [(float(rank), 40.0, 50.0) for rank in range(4)]
    assert [(line.label, line.color) for line in figure.lines[:3]] == [
        *(("useful work", "compute"), ("start-up", "other"), ("lost work", "communication")),
    ]
    assert found["fault: kill"] == [(1.0, 50.0, 50.4)]  # an instant is drawn as 0.4 % of the time
    assert found["fault: slow"] == [(2.0, 60.0, 80.0)]
    assert found["fault: node"] == [(2.0, 99.9, 100.0), (3.0, 99.9, 100.0)]  # both ranks of worker 1, not past the end
    assert found["fault: disk"] == [(float(rank), 10.0, 20.0) for rank in range(4)]
    assert {line.color for line in figure.lines[3:]} == {"step"}


def test_a_run_without_a_script_has_no_caption_and_at_most_64_ranks_are_drawn() -> None:
    assert faulty(script=None).caption == ""
    assert len(faulty(workers=40, processes=2).x.categories) == 64
    assert len(faulty(workers=2, processes=3).x.categories) == 6
    assert faulty().lines == ()
