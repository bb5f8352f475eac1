"""Published results of MLBench 3, and the figures that show them beside measured ones."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from mlbench_cli.results.analysis.series import Measurement, group_runs
from mlbench_cli.results.figures.model import Axis, Figure, Kind, Line, Scale
from mlbench_cli.results.figures.published import published_lines, published_phases, published_sources, read_published
from mlbench_cli.results.figures.scaling import Job, scaling_figures, split_jobs
from tests.unit.results.figures.test_scaling import OWN, jobs, run

CIFAR = "cifar10_resnet20"


def published_job(*runs: Measurement, prices: Mapping[str, float] | None = None) -> Job:
    [job] = split_jobs(group_runs(runs), dict(prices or {}))
    return job


def figures(*runs: Measurement, prices: Mapping[str, float] | None = None) -> dict[str, Figure]:
    return {each.key.removeprefix("job1-"): each for each in scaling_figures(published_job(*runs, prices=prices), 1)}


def points(line: Line) -> list[tuple[float, float | None]]:
    return list(zip(line.xs, line.ys, strict=True))


# --- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [CIFAR, f"{CIFAR}_ddp", f"{CIFAR}_tensorflow"])
def test_variants_of_a_task_have_its_published_lines_and_say_what_was_read_off_plots(task: str) -> None:
    found = {line.label: line for line in published_lines(task, "seconds")}
    assert list(found) == [
        *("published: CPU, 2019 ≈", "published: K80, 2019 ≈", "published: K80, TensorFlow, 2019 ≈"),
        *("published: T4, 2020 ≈", "published: CPU to 70 %, 2018", "published: CPU, 2018"),
    ]
    assert points(found["published: T4, 2020 ≈"]) == [(1, 251.0), (2, 153.0), (4, 121.5), (8, 84.7), (16, 114.5)]
    assert all(line.reference for line in found.values())


def test_other_tasks_and_metrics_have_no_published_lines() -> None:
    assert list(published_lines("digits_resnet", "seconds")) == []
    assert list(published_lines(CIFAR, "cost")) == []
    assert list(published_phases("digits_resnet")) == []
    assert published_sources("digits_resnet") == []


def test_published_phases_are_in_the_order_of_a_step() -> None:
    [(variant, counts, lines)] = published_phases("wmt16_gnmt")
    assert (variant, counts) == ("NCCL, T4, 2020", [1, 2, 4, 8, 16])
    assert [(line.label, line.color, line.ys[1]) for line in lines] == [
        ("forward", "compute", 1380.0),
        ("loss", "compute", 9950.0),
        ("backward", "compute", 25100.0),
        ("optimizer", "compute", 195.0),
        ("communication", "communication", 6520.0),
    ]
    assert all(line.xs == (0.0, 1.0, 2.0, 3.0, 4.0) for line in lines)


def test_where_only_communication_is_known_the_rest_of_the_time_is_all_else() -> None:
    found = {variant: (counts, lines) for variant, counts, lines in published_phases("epsilon_logistic_regression")}
    assert list(found) == ["GLOO, 2020", "MPI, 2020"]  # other variants have no phases
    counts, lines = found["GLOO, 2020"]
    assert counts == [1, 2, 4, 8, 16, 32]
    assert [(line.label, line.color) for line in lines] == [("communication", "communication"), ("all else", "other")]
    assert lines[1].ys == pytest.approx((22.8, 34.4 - 21, 23.3 - 16.6, 17.7 - 14.4, 20.9 - 18.9, 46.2 - 44))


def test_where_computing_is_known_nothing_else_is_made_up() -> None:
    [(variant, _, lines)] = published_phases(CIFAR)
    assert (variant, [line.label for line in lines]) == ("T4, 2020", ["compute", "communication"])


def test_each_source_of_a_task_is_named_once() -> None:
    sources = published_sources(f"{CIFAR}_ddp")
    assert sources == published_sources(CIFAR)
    assert len(sources) == len(set(sources)) > 1
    assert set(sources) == {item.source for item in read_published() if item.task == CIFAR}


# --- beside measured results ----------------------------------------------------------------------------------------


def test_published_lines_have_looks_that_no_measured_series_has(measured: Measurement) -> None:
    runs = [
        run(measured, f"{method}{k}", k, 100.0 / k, task=CIFAR, method=method)
        for method in ("bsp", "wfbp")
        for k in (1, 2)
    ]
    time = figures(*runs)["time"]
    own, others = ([line for line in time.lines if line.reference is known] for known in (False, True))
    assert [line.label for line in own] == ["bsp", "wfbp"]
    assert len(others) == 6
    assert all(line.panel == "published" for line in others)
    looks = [(line.color, line.shape) for line in time.lines]
    assert len(set(looks)) == len(looks)
    assert time.x.ticks == (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    assert time.y.scale is Scale.LOG10


def test_a_job_without_a_goal_has_no_published_times(measured: Measurement) -> None:
    runs = [run(measured, str(k), k, 100.0 / k, task=CIFAR, goal="", metric="") for k in (1, 2)]
    found = figures(*runs)
    assert [line.label for line in found["time"].lines] == [OWN]
    assert "node-hours" not in found
    assert "final-error" not in found


def test_node_hours_are_workers_times_hours(measured: Measurement) -> None:
    runs = [run(measured, str(k), k, 7200.0 / k, task=CIFAR) for k in (1, 4)]
    runs.append(run(measured, "bad", 2, 1.0, task=CIFAR, outcome="failed"))
    found = figures(*runs)["node-hours"]
    assert (found.y.label, found.y.scale, found.caption) == ("hours", Scale.LOG10, "Workers times hours to the goal.")
    assert points(found.lines[0]) == [(1, 2.0), (4, 2.0)]
    assert [line.label for line in found.lines[1:]] == ["published: CPU, 2018", "published: CPU to 70 %, 2018"]
    assert "node-hours" not in figures(*(run(measured, str(k), k, 60.0, task="wmt16_gnmt") for k in (1, 4)))


def test_a_final_error_is_what_is_missing_from_100_percent(measured: Measurement) -> None:
    """80, 81 and 82 % leave 19 %; with Student's t of 4.303 for 3 values ± 2.48."""
    runs = [run(measured, f"a{value}", 1, 100.0, task=CIFAR, value=value) for value in (80.0, 81.0, 82.0)]
    runs.append(run(measured, "b", 2, 50.0, task=CIFAR, value=90.0))
    found = figures(*runs)["final-error"]
    line = found.lines[0]
    assert points(line) == [(1, 19.0), (2, 10.0)]
    assert [line.low[0], line.high[0]] == pytest.approx([16.516, 21.484], abs=1e-3)
    assert (found.y.label, found.y.from_zero) == ("error, %", True)
    assert found.caption.startswith("100 % minus Prec@1: here at the goal or the end of the budget; published values")
    loss = [run(measured, str(k), k, 100.0, task=CIFAR, metric="val_loss") for k in (1, 2)]
    assert "final-error" not in figures(*loss)


def test_published_phases_have_their_own_figures(measured: Measurement) -> None:
    found = figures(*(run(measured, str(k), k, 60.0, task="epsilon_logistic_regression") for k in (1, 4)))
    first, second = (found[f"published-phases-{number}"] for number in (0, 1))
    assert first.title == "Published time by phase: GLOO, 2020"
    assert second.title == "Published time by phase: MPI, 2020"
    assert (first.kind, first.x.categories[:2]) == (Kind.BARS, ("1 worker", "2 workers"))
    assert first.y == Axis("seconds", from_zero=True, unit="s")
    assert first.caption == "Published by the original MLBench, from other machines and other software."


@pytest.mark.parametrize(
    ("key", "count"),
    [("speedup", 2), ("compute-speedup", 2), ("communication", 1), ("cost", 1), ("price-index", 2), ("time", 1)],
)
def test_each_figure_has_the_published_values_of_its_own_quantity(measured: Measurement, key: str, count: int) -> None:
    """With the ideal line of speed-ups, and the limit of price indices."""
    runs = [run(measured, str(k), k, 100.0 / k, task="wmt16_gnmt") for k in (1, 2)]
    found = figures(*runs, prices={"1": 1.0, "2": 2.0})[key]
    others = [line.label for line in found.lines if line.reference]
    assert len(others) == count
    assert (
        others[0] == f"published: NCCL, T4, 2020{'' if key in ('speedup', 'compute-speedup', 'price-index') else ' ≈'}"
    )


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "seconds to the goal"),
        ({"metric": ""}, "seconds of the task"),
        ({"measure": "whole run"}, "seconds of the run"),
        ({"outcome": "budget_spent"}, "time budget in seconds"),
        ({"outcome": "budget_spent", "measure": "whole run"}, "time budget in seconds"),
        ({"metric": "", "measure": "whole run"}, "seconds of the run"),
    ],
)
def test_a_job_says_what_its_time_is(measured: Measurement, changes: dict[str, Any], what: str) -> None:
    [job] = jobs(run(measured, "a", 1, 100.0, **changes))
    assert job.what == what


def test_jobs_of_one_task_are_named_by_what_they_trained(measured: Measurement) -> None:
    found = jobs(
        run(measured, "a", 1, 100.0),
        run(measured, "b", 1, 100.0, synthetic="synthetic data"),
        run(measured, "c", 1, 100.0, preset="tiny", label="functional only", budget="60"),
        run(measured, "d", 1, 100.0, task="other"),
    )
    assert sorted(job.name for job in found) == [
        "other",
        "unknown-task (spec, Prec@1 >= 80)",
        "unknown-task (spec, Prec@1 >= 80, synthetic data)",
        "unknown-task (tiny, Prec@1 >= 80, functional only, 60)",
    ]


def test_seven_series_share_a_plot_and_eight_are_divided_by_a_setting(measured: Measurement) -> None:
    networks = ("", "1gbit")
    runs = [
        run(measured, f"{method}-{network}", 1, 100.0, method=method, network=network)
        for network in networks
        for method in ("bsp", "wfbp", "mgwfbp", "topk")
    ]
    [eight] = jobs(*runs)
    assert sorted(set(eight.places)) == sorted(
        (panel, method) for panel in ("no network", "1gbit") for method in ("bsp", "wfbp", "mgwfbp", "topk")
    )
    assert len(set(eight.looks)) == 4  # a method looks the same in both panels
    [seven] = jobs(*runs[:-1])
    assert {panel for panel, _ in seven.places} == {"measured"}


def test_eight_unknown_methods_stay_in_one_panel_without_a_title(measured: Measurement) -> None:
    [job] = jobs(*(run(measured, f"m{number}", 1, 100.0, method=f"m{number}") for number in range(8)))
    assert job.places == [("", f"m{number}") for number in range(8)]
    assert len(set(job.looks)) == 8


def test_methods_are_divided_by_family_and_neighbors_share_a_panel_of_seven(measured: Measurement) -> None:
    step, overlap = ("bsp",), ("bytescheduler", "dear", "fusion", "mgwfbp", "optfusion", "wfbp")
    [job] = jobs(*(run(measured, method, 1, 100.0, method=method) for method in (*step, *overlap, "eftopk", "topk")))
    found: dict[str, list[str]] = {}
    for panel, name in job.places:
        found.setdefault(panel, []).append(name)
    assert found == {
        "after the backward pass, during the backward pass": [*step, *overlap],
        "only the largest numbers": ["eftopk", "topk"],
    }


# In the order in which they are told: the name of the setting, a value, and the label that it gives.
TELLING = (
    *(("method", "bsp", "bsp"), ("network", "1gbit", "1gbit"), ("backend", "mpi", "mpi"), ("device", "gpu", "gpu")),
    *(("cluster", "gke/x", "gke/x"), ("processes_per_worker", 2, "2 processes per worker")),
    *(("gpus_per_worker", 4, "4 GPUs per worker"), ("cpus", 7.0, "7 CPUs per rank"), ("machine", "EPYC", "EPYC")),
    *(("framework", "jax 1", "jax 1"), ("image", "sha256:0f", "image sha256:0f"), ("code", "c0de", "code c0de")),
    ("division", "open", "open division"),
)


@pytest.mark.parametrize(("first", "second"), [*pairwise(TELLING)], ids=lambda fact: fact[0])
def test_of_settings_that_tell_series_apart_alike_the_more_telling_one_is_named(
    measured: Measurement, first: tuple[str, Any, str], second: tuple[str, Any, str]
) -> None:
    changed = {name: value for name, value, _ in (first, second)}
    [job] = jobs(run(measured, "a", 1, 100.0), run(measured, "b", 1, 100.0, **changed))
    labels = [group.label for group in job.groups]
    assert first[2] in labels
    assert not any(second[2] in label for label in labels)


def test_computing_is_forward_loss_backward_and_optimizer(measured: Measurement) -> None:
    """30 s on one worker, and 10 s on two."""
    one = {"forward": 8.0, "loss": 16.0, "backward": 4.0, "optimizer": 2.0, "metrics": 50.0, "communication": 20.0}
    two = {"forward": 1.0, "loss": 1.0, "backward": 1.0, "optimizer": 7.0, "validation": 5.0, "communication": 45.0}
    runs = [run(measured, "a", 1, 100.0, parts=one), run(measured, "b", 2, 60.0, parts=two)]
    [job] = jobs(*runs)
    found = {each.key: each for each in scaling_figures(job, 0)}["job0-compute-speedup"]
    assert points(found.lines[0]) == [(1, 1.0), (2, pytest.approx(3.0))]
