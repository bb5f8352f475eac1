"""What a series takes from archives, which runs it puts together, and its table, by hand."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.analysis.comparability import describe
from mlbench_cli.results.analysis.series import collect, measure
from mlbench_cli.results.archive.files import Archive


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
        ({"task_seconds": wall(None), "timings": {}, "wall_seconds": 8.0}, 8.0, {}),
        ({"task_seconds": wall(None), "timings": {}, "wall_seconds": None}, 0.0, {}),
        ({"task_seconds": wall(5.0), "timings": timings(unknown=6.0)}, 5.0, {"other": 5.0}),
        ({"task_seconds": wall(1e200), "timings": {}}, 1e100, {}),
    ],
)
def test_the_parts_of_a_time_add_up_to_what_the_task_measured(
    sealed: Path, result: dict[str, Any], seconds: float, parts: dict[str, float]
) -> None:
    found = measure(archive(sealed, **result))
    known = {name: found.get(name) for name in ("forward", "other") if name in found.figures}
    assert (found.seconds, known) == (seconds, parts)


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
    assert measure(archive(sealed, **result)).get("throughput") == rate


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
    left = measure(archive(sealed, details=details)).get("seconds without compiling")
    assert left == (None if compiling is None else 100.0 - compiling)


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
    assert (measured.get("network bandwidth"), measured.get("network round trip")) == found


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


# --- several archives -----------------------------------------------------------------------------------------------


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
