"""What a series takes from archives, which runs it puts together, and its table, by hand."""

import csv
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.series import Measurement, Series, collect, describe, drop_duplicates, measure
from mlbench_cli.results.archive.reader import Archive


def archive(path: Path, run: str = "run-2", spec: dict[str, Any] | None = None, **result: Any) -> Archive:
    """A run with the evidence of `path` and some fields of its result replaced."""
    found = Archive.open(path)
    found.run["id"] = found.run["name"] = run
    found.run["spec"].update(spec or {})
    found.result.update(result)  # type: ignore[typeddict-item]
    return found


def timings(**parts: float) -> dict[str, dict[str, float]]:
    return {name: {"min": 0.0, "mean": 99.0, "max": 99.0, "rank0": value} for name, value in parts.items()}


def wall(seconds: float | None) -> dict[str, float | None]:
    return {"wall": seconds, "training": None}


# --- one archive ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "seconds", "parts"),
    [
        ({"task_seconds": wall(10.0), "timings": timings(forward=6.0)}, 10.0, {"forward": 6.0, "other": 4.0}),
        (
            {"task_seconds": wall(10.0), "timings": timings(forward=6.0, other=3.0)},
            10.0,
            {"forward": 6.0, "other": 4.0},
        ),
        ({"task_seconds": wall(5.0), "timings": timings(forward=6.0)}, 6.0, {"forward": 6.0, "other": 0.0}),
        ({"task_seconds": wall(None), "timings": timings(forward=6.0)}, 6.0, {"forward": 6.0, "other": 0.0}),
        ({"task_seconds": wall(None), "timings": {}, "wall_seconds": 8.0}, 8.0, {"other": 8.0}),
        ({"task_seconds": wall(None), "timings": {}, "wall_seconds": None}, 0.0, {"other": 0.0}),
        ({"task_seconds": wall(5.0), "timings": timings(unknown=6.0)}, 5.0, {"other": 5.0}),
        ({"task_seconds": wall(1e200), "timings": {}}, 1e100, {"other": 1e100}),
    ],
)
def test_the_parts_of_a_time_add_up_to_what_the_task_measured(
    sealed: Path, result: dict[str, Any], seconds: float, parts: dict[str, float]
) -> None:
    found = measure(archive(sealed, **result))
    assert (found.seconds, found.parts) == (seconds, parts)


@pytest.mark.parametrize(
    ("result", "rate"),
    [
        ({"task_seconds": wall(10.0), "timings": timings(validation=2.0), "samples": 400}, 50.0),
        ({"task_seconds": wall(10.0), "timings": timings(data_wait=2.0), "samples": 400}, 40.0),
        ({"task_seconds": wall(10.0), "timings": {}, "samples": None}, None),
        ({"task_seconds": wall(10.0), "timings": {}, "samples": 0}, None),
        ({"task_seconds": wall(2.0), "timings": timings(validation=2.0), "samples": 400}, None),
        ({"task_seconds": wall(None), "timings": {}, "samples": 400}, None),
    ],
)
def test_throughput_counts_waiting_for_data_and_leaves_validation_out(
    sealed: Path, result: dict[str, Any], rate: float | None
) -> None:
    assert measure(archive(sealed, **result)).throughput == rate


GOAL: dict[str, Any] = {
    "metric": "m",
    "comparison": "<=",
    "threshold": 3.0,
    "kind": "full",
    "wording": "m <= 3",
    "value": 2.9,
    "last": 2.5,
    "reached": True,
    "seconds": None,
}


@pytest.mark.parametrize(
    ("goal", "value"), [(GOAL, 2.5), ({**GOAL, "last": None}, 2.9), ({**GOAL, "last": None, "value": None}, None)]
)
def test_the_value_is_that_at_the_end_of_the_training(sealed: Path, goal: dict[str, Any], value: float | None) -> None:
    assert measure(archive(sealed, goal=goal)).value == value
    assert measure(archive(sealed, goal=None)).value is None


@pytest.mark.parametrize(
    ("past_goal", "goal", "race"),
    [
        (True, GOAL, (2.5, 3.0)),
        (False, GOAL, None),
        ("yes", GOAL, None),
        (True, {**GOAL, "comparison": ">="}, None),
        (True, {**GOAL, "last": None}, None),
        (True, None, None),
    ],
)
def test_only_a_run_that_trains_past_a_goal_below_races(
    sealed: Path, past_goal: object, goal: dict[str, Any] | None, race: tuple[float, float] | None
) -> None:
    spec = {"parameters": {"past_goal": past_goal}}
    assert measure(archive(sealed, spec=spec, goal=goal)).race == race


@pytest.mark.parametrize(
    ("details", "compiling"),
    [
        ({"compile_seconds": 4}, 4.0),
        ({"compile_seconds": 0.0}, 0.0),
        ({"compile_seconds": 400.0}, 100.0),
        ({"compile_seconds": -1.0}, None),
        ({"compile_seconds": "long"}, None),
        ({}, None),
    ],
)
def test_compiling_is_a_part_of_the_time(sealed: Path, details: dict[str, Any], compiling: float | None) -> None:
    assert measure(archive(sealed, details=details)).compiling == compiling


@pytest.mark.parametrize(
    ("details", "parts", "size", "hides"),
    [
        ({"communication": {"messages": 5}}, {"backward": 2.0}, 2, True),
        ({"communication": {"messages": 5}}, {"backward": 2.0, "communication": 1.0}, 2, False),
        ({"communication": {"messages": 5}}, {"backward": 2.0}, 1, False),
        ({"communication": {"messages": 0}}, {"backward": 2.0}, 2, False),
        ({"communication": {"messages": "x"}}, {"backward": 2.0}, 2, False),
        ({"communication": 5}, {"backward": 2.0}, 2, False),
        ({}, {"backward": 2.0}, 2, False),
    ],
)
def test_gradients_that_travel_during_the_backward_pass_have_no_part(
    sealed: Path, details: dict[str, Any], parts: dict[str, float], size: int, hides: bool
) -> None:
    found = measure(archive(sealed, details=details, timings=timings(**parts), world_size=size))
    assert found.hides is hides


NETWORK: dict[str, Any] = {
    "asked": None,
    "method": "none",
    "networks": 2,
    "rtt_seconds": 1e-3,
    "alone_bits_per_second": 2e9,
    "together_bits_per_second": 1e9,
}


@pytest.mark.parametrize(
    ("network", "found"),
    [
        (NETWORK, (1e9, 1e-3)),
        ({**NETWORK, "together_bits_per_second": None}, (2e9, 1e-3)),
        ({**NETWORK, "networks": 1}, (None, None)),
        ({**NETWORK, "networks": None}, (None, None)),
        (None, (None, None)),
    ],
)
def test_a_network_is_measured_between_several_network_stacks(
    sealed: Path, network: dict[str, Any] | None, found: tuple[float | None, float | None]
) -> None:
    measured = measure(archive(sealed, network=network))
    assert (measured.goodput, measured.round_trip) == found


@pytest.mark.parametrize(
    ("outcome", "goal", "counted", "good"),
    [
        ("goal_reached", GOAL, "goal_reached", True),
        ("goal_missed", GOAL, "goal_missed", False),
        ("budget_spent", GOAL, "budget_spent", True),
        ("completed", None, "completed", True),
        ("completed", GOAL, "goal_missed", False),
        ("failed", None, "failed", False),
        ("stopped", None, "stopped", False),
    ],
)
def test_a_run_that_did_not_prove_its_goal_has_missed_it(
    sealed: Path, outcome: str, goal: dict[str, Any] | None, counted: str, good: bool
) -> None:
    found = measure(archive(sealed, outcome=outcome, goal=goal))
    assert (found.outcome, found.good) == (counted, good)


def test_an_archive_counts_once_and_two_versions_of_a_run_are_refused(sealed: Path) -> None:
    one, same, other = archive(sealed, "a"), archive(sealed, "a"), archive(sealed, "b")
    assert drop_duplicates([one, same, other, one]) == [one, other]
    changed = archive(sealed, "a", wall_seconds=1.0)
    with pytest.raises(UsageError, match="are archives of one run, a, but differ"):
        drop_duplicates([one, other, changed])


# --- several archives -----------------------------------------------------------------------------------------------


def table(found: Series) -> list[dict[str, str]]:
    return list(csv.DictReader(found.to_csv().splitlines()))


def sized(path: Path, run: str, workers: int, seconds: float, **more: Any) -> Archive:
    return archive(path, run, workers=workers, task_seconds=wall(seconds), timings={}, **more)


def test_the_whole_table_of_a_series(sealed: Path) -> None:
    """Two runs of one worker with 100 s on average, and one of 4 with 40 s: 2.5 times as fast."""
    runs = [sized(sealed, "a", 1, 90.0), sized(sealed, "b", 1, 110.0), sized(sealed, "c", 4, 40.0)]
    runs.append(sized(sealed, "d", 4, 10.0, outcome="goal_missed"))
    [one, four] = table(collect(runs))
    empty = dict.fromkeys(
        ("network", "network_bits_per_second", "network_rtt_seconds", "conditions", "speedup_low", "speedup_high"), ""
    )
    parts = dict.fromkeys(
        f"{name}_seconds"
        for name in ("data_wait", "preprocessing", "forward", "loss", "backward", "communication", "optimizer")
    )
    zero = dict.fromkeys((*parts, "metrics_seconds", "validation_seconds"), "0")
    same = {
        "task": "unknown-task",
        "group": "gloo",
        "backend": "gloo",
        "device": "cpu",
        "preset": "spec",
        "synthetic": "no",
        "functional_only": "no",
        "metric": "Prec@1",
        "metric_mean": "80.5",
        "goal": runs[0].result["goal"]["wording"],  # type: ignore[index]
    }
    assert one == {
        **same,
        **empty,
        **zero,
        "workers": "1",
        "runs": "2",
        "runs_left_out": "0",
        "outcomes": "goal_reached",
        # t(0.975, 1) = 12.7062 standard errors of 10 s
        "seconds_mean": "100",
        "seconds_low": "-27.062",
        "seconds_high": "227.062",
        "seconds_min": "90",
        "seconds_max": "110",
        "other_seconds": "100",
        "baseline_workers": "1",
        "baseline_seconds": "100",
        "speedup": "1",
        "efficiency": "1",
        "price_index": "1",
        "metric_low": "80.5",
        "metric_high": "80.5",
        "samples_per_second": "517.172",
        "samples_per_second_low": one["samples_per_second_low"],
        "samples_per_second_high": one["samples_per_second_high"],
        "archives": "a b",
    }
    assert four == {
        **same,
        **empty,
        **zero,
        "workers": "4",
        "runs": "1",
        "runs_left_out": "1",
        "outcomes": "goal_missed goal_reached",
        "seconds_mean": "40",
        "seconds_low": "",
        "seconds_high": "",
        "seconds_min": "40",
        "seconds_max": "40",
        "other_seconds": "40",
        "baseline_workers": "1",
        "baseline_seconds": "100",
        "speedup": "2.5",
        # 4 workers for 2.5 times the speed: 1.6 times the price in 0.4 of the time, whose product is 0.64
        "efficiency": "0.625",
        "price_index": "0.64",
        "metric_low": "",
        "metric_high": "",
        "samples_per_second": "1280",
        "samples_per_second_low": "",
        "samples_per_second_high": "",
        "archives": "c d",
    }


def test_a_table_says_what_was_synthetic_functional_or_crowded(sealed: Path) -> None:
    known = {"measured": True, "labels": [], "contended": None, "quota_limited": None}
    conditions = {
        **known,
        "labels": ["shared", "crowded"],
        "shared": {"reason": "x", "figures": {}},
        "crowded": {"reason": "x", "figures": {}},
    }
    odd = archive(sealed, "a", {"functional_only": "x"}, synthetic=True, network=NETWORK, conditions=conditions)
    [row] = table(collect([odd]))
    assert [row[name] for name in ("synthetic", "functional_only", "conditions")] == ["yes", "yes", "crowded shared"]
    assert [row["network_bits_per_second"], row["network_rtt_seconds"]] == ["1e+09", "0.001"]


@pytest.mark.parametrize(
    ("outcomes", "share"),
    [
        (("goal_reached", "goal_missed"), "1 of 2 reached it"),
        (("completed", "failed", "failed"), "1 of 3 ended"),
        (("goal_reached", "goal_reached"), ""),
        (("goal_missed", "failed"), ""),
    ],
)
def test_a_point_says_how_many_of_its_runs_count(sealed: Path, outcomes: tuple[str, ...], share: str) -> None:
    goal = GOAL if outcomes[0].startswith("goal") else None
    runs = [archive(sealed, str(number), outcome=each, goal=goal) for number, each in enumerate(outcomes)]
    [group] = collect(runs).groups
    [point] = group.points
    assert point.share == share
    assert len(point.shown) == (sum(each.endswith(("reached", "completed")) for each in outcomes) or len(outcomes))


def test_a_mean_needs_a_value_of_every_run(sealed: Path) -> None:
    runs = [archive(sealed, "a", samples=900), archive(sealed, "b", samples=None)]
    [group] = collect(runs).groups
    assert group.points[0].throughput is None
    [group] = collect(runs[:1]).groups
    assert group.points[0].throughput is not None


def test_the_baseline_is_the_smallest_size_with_enough_successful_runs(sealed: Path) -> None:
    runs = [sized(sealed, "a", 1, 100.0), sized(sealed, "b", 2, 60.0), sized(sealed, "c", 2, 60.0)]
    runs += [sized(sealed, "d", 4, 30.0), sized(sealed, "e", 4, 30.0)]
    [group] = collect(runs, min_runs=2).groups
    assert group.baseline is group.points[1]
    assert [found.mean if (found := group.speedup(point)) else None for point in group.points] == [None, 1.0, 2.0]
    assert group.has_speedup
    [alone] = collect(runs[:3], min_runs=2).groups
    assert not alone.has_speedup
    [failed] = collect([sized(sealed, "a", 1, 100.0, outcome="failed"), runs[1]]).groups
    assert failed.baseline is failed.points[1]


def test_runs_with_a_time_to_spend_have_no_speed_up(sealed: Path) -> None:
    runs = [archive(sealed, str(workers), workers=workers, outcome="budget_spent") for workers in (1, 2)]
    [group] = collect(runs).groups
    assert (group.after_time, group.baseline, group.speedup(group.points[1])) == (True, None, None)


def test_groups_are_sorted_and_named_by_what_varies(sealed: Path) -> None:
    runs = [
        archive(sealed, "a", {"task": "b-task", "backend": "mpi"}),
        archive(sealed, "b", {"task": "a-task", "backend": "nccl"}),
        archive(sealed, "c", {"task": "a-task", "backend": "gloo", "parameters": {"batch_size": 64}}),
    ]
    found = collect(runs)
    assert found.tasks == ["a-task", "b-task"]
    assert [(group.task, group.label) for group in found.groups] == [
        ("a-task", "gloo, batch_size=64"),
        ("a-task", "nccl, batch_size=128, goal_full=80.0, goal_light=70.0"),
        ("b-task", "mpi, batch_size=128, goal_full=80.0, goal_light=70.0"),
    ]
    assert "task" not in found.common
    assert "backend" not in found.common
    assert found.common["device"] == "cpu"
    assert found.bad == []
    assert collect([]).common == {}


def test_a_run_that_failed_before_it_reported_its_goal_joins_its_like(sealed: Path) -> None:
    silent = {"goal": None, "data": None, "task_seconds": wall(None), "timings": {}, "samples": None}
    early = archive(sealed, "0-first", outcome="failed", **silent)
    found = collect([early, archive(sealed, "z")])
    [group] = found.groups
    assert (len(group.points[0].good), [run.name for run in found.bad]) == (1, ["0-first"])
    other = archive(sealed, "0-first", {"backend": "mpi"}, outcome="failed", **silent)
    assert len(collect([other, archive(sealed, "z")]).groups) == 2
    finished = archive(sealed, "0-first", outcome="completed", **silent)
    assert len(collect([finished, archive(sealed, "z")]).groups) == 2


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("goal", "", ""),
        ("machine", "unknown", "machine unknown"),
        ("parameter rate", "0.5", "rate=0.5"),
        ("parameter text", "x" * 41, "text=" + "x" * 39 + "…"),
        ("setting engine", "local", "engine=local"),
        ("setting goal", "light", ""),
        ("method", "bsp", "bsp"),
        ("method", "task's own", "task's own method"),
        ("preset", "legacy", "preset legacy"),
        ("preset", "custom", ""),
        ("cluster", "local", "on this machine"),
        ("cluster", "gke/n1", "gke/n1"),
        ("code", "abc", "code abc"),
        ("image", "y" * 50, "image " + "y" * 39 + "…"),
        ("data", "digits", "data digits"),
        ("division", "closed", "closed division"),
        ("division", "none", "no division"),
        ("judge", "3", "judge 3"),
        ("processes_per_worker", "1", "1 process per worker"),
        ("processes_per_worker", "2", "2 processes per worker"),
        ("gpus_per_worker", "1", "1 GPU per worker"),
        ("gpus_per_worker", "8", "8 GPUs per worker"),
        ("cpus", "1", "1 CPU per rank"),
        ("cpus", "0.5", "0.5 CPUs per rank"),
        ("goal", "m <= 3", "goal m <= 3"),
        ("metric", "loss", ""),
        ("budget", "60", "60 s to spend"),
        ("network", "1gbit", "1gbit"),
    ],
)
def test_a_fact_in_a_few_words(name: str, value: str, text: str) -> None:
    assert describe(name, value) == text


def test_a_series_is_a_table_in_a_notebook(sealed: Path) -> None:
    html = collect([archive(sealed, "a"), archive(sealed, "b", {"backend": "mpi"})])._repr_html_()
    assert html.count("<tr>") == 3
    assert html.startswith("<table><thead><tr><th>task</th><th>group</th>")


def test_a_run_without_a_result_is_measured_as_a_whole(sealed: Path) -> None:
    found: Measurement = measure(archive(sealed, task_seconds=wall(None), timings={}))
    assert found.whole_run
    assert not measure(archive(sealed)).whole_run
