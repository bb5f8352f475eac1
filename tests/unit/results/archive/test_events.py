"""What is read of the events in logs, field by field, and what becomes of malformed ones."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from mlbench_cli.model.goals import Goal
from mlbench_cli.results.archive.events import (
    GoalWatcher,
    LogCounts,
    LogFacts,
    ReportedFacts,
    collect_events,
    parse_metric,
    parse_phase,
    parse_result,
    read_amount,
)
from mlbench_cli.util.times import MAX_SECONDS, timestamp
from tests.unit.results.runs import START, event

METRIC: dict[str, Any] = {"rank": 1, "time": START, "name": "loss", "value": 0.5}


# --- metrics and phases ---------------------------------------------------------------------------------------------


def test_a_metric_keeps_what_belongs_to_it() -> None:
    more = {"epoch": 1, "step": 2.5, "seconds": 3, "unit": "%", "other": 4}
    assert parse_metric({**METRIC, **more}) == {
        "rank": 1,
        "time": timestamp(START),
        "name": "loss",
        "value": 0.5,
        "epoch": 1,
        "step": 2.5,
        "seconds": 3,
        "unit": "%",
    }
    assert parse_metric({**METRIC, "epoch": "1", "step": math.nan, "seconds": True, "unit": 5}) == {
        "rank": 1,
        "time": timestamp(START),
        "name": "loss",
        "value": 0.5,
    }


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True),
        ({"value": "nan"}, True),
        ({"value": "-inf"}, True),
        ({"value": "many"}, False),
        ({"value": None}, False),
        ({"value": math.inf}, False),
        ({"value": True}, False),
        ({"name": ""}, False),
        ({"name": 5}, False),
        ({"time": 0.0}, True),
        ({"time": -0.1}, False),
        ({"time": MAX_SECONDS}, True),
        ({"time": MAX_SECONDS + 1}, False),
    ],
)
def test_a_metric_needs_a_name_a_value_and_a_time(change: dict[str, Any], valid: bool) -> None:
    assert (parse_metric({**METRIC, **change}) is not None) is valid


@pytest.mark.parametrize(
    ("phase", "before", "found"),
    [
        (
            {"phase": "training", "epoch": 1, "epochs": 3, "step": 5, "steps": 9, "x": 1},
            {},
            {"phase": "training", "epoch": 1, "epochs": 3, "step": 5, "steps": 9},
        ),
        # Epochs are kept, steps are not: they belong to the epoch.
        (
            {"phase": "validation"},
            {"epoch": 1, "epochs": 3, "step": 5},
            {"phase": "validation", "epoch": 1, "epochs": 3},
        ),
        ({"phase": "training", "epoch": 2}, {"epoch": 1, "epochs": 3}, {"phase": "training", "epoch": 2, "epochs": 3}),
        ({"phase": "x" * 50, "epoch": math.nan}, {}, {"phase": "x" * 40}),
        ({"phase": ""}, {"phase": "loading"}, {"phase": "loading"}),
        ({"phase": 5}, {"phase": "loading"}, {"phase": "loading"}),
    ],
)
def test_a_phase_keeps_the_epochs_of_the_one_before(
    phase: dict[str, Any], before: dict[str, Any], found: dict[str, Any]
) -> None:
    assert parse_phase(phase, before) == found


@pytest.mark.parametrize(
    ("value", "amount"),
    [(0, 0), (1.5, 1.5), (-0.1, None), (True, None), (math.inf, None), ("1", None), (None, None)],
)
def test_an_amount_is_a_finite_number_from_0_on(value: Any, amount: float | None) -> None:
    assert read_amount(value) == amount


# --- results --------------------------------------------------------------------------------------------------------

SPREAD = {"min": 1.0, "mean": 2.0, "max": 3.0, "rank0": 2.0}
GOAL: dict[str, Any] = {
    "metric": "loss",
    "comparison": "<=",
    "threshold": 3.0,
    "kind": "full",
    "value": 2.9,
    "last": 2.5,
}
EMPTY: dict[str, Any] = {
    **dict.fromkeys(("goal", "budget_seconds", "wall_seconds", "training_seconds", "updates", "samples", "epochs")),
    "timings": {},
    "synthetic": False,
    "data": None,
    "data_identity": None,
    "details": {},
}


def test_a_result_has_every_field() -> None:
    numbers = {"budget_seconds": 60, "wall_seconds": 59.5, "training_seconds": 50.0}
    counts = {"updates": 400, "samples": 51200, "epochs": 3}
    identity = {"counts": {"train": 5, "x": -1}, "digest": "sha256:ab", "official": True, "reason": "a\nb", "y": 1}
    details = {"a": 1, "b": math.nan}
    given = {"outcome": "goal_reached", "goal": GOAL, **numbers, **counts, "timings": {"loss": {**SPREAD, "more": 1}}}
    given |= {"synthetic": True, "data": "digits\n", "data_identity": identity, "details": details}
    found = parse_result(given)
    assert found is not None
    assert found.pop("details") == {"a": 1, "b": "nan"}
    assert found == {
        "outcome": "goal_reached",
        **numbers,
        **counts,
        "timings": {"loss": SPREAD},
        "synthetic": True,
        "goal": {**GOAL},
        "data": "digits",
        "data_identity": {"counts": {"train": 5}, "digest": "sha256:ab", "official": True, "reason": "a b"},
    }


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"wall_seconds": -1}, "wall_seconds", None),
        ({"updates": "many"}, "updates", None),
        ({"timings": {"loss": {**SPREAD, "max": None}, "x": 5}}, "timings", {}),
        ({"timings": [1]}, "timings", {}),
        ({"synthetic": "yes"}, "synthetic", False),
        ({"data": 5}, "data", None),
        ({"details": [1]}, "details", {}),
        ({"goal": {**GOAL, "comparison": "=="}}, "goal", None),
        ({"goal": {**GOAL, "metric": " \n"}}, "goal", None),
        (
            {"goal": {**GOAL, "kind": "other", "value": "x", "last": math.nan}},
            "goal",
            {**GOAL, **dict.fromkeys(("kind", "value", "last"))},
        ),
        ({"data_identity": "official"}, "data_identity", None),
        (
            {"data_identity": {"official": "yes", "counts": 5, "digest": 5}},
            "data_identity",
            {"counts": {}, "digest": None, "official": None, "reason": None},
        ),
    ],
)
def test_a_malformed_field_of_a_result_is_not_reported(change: dict[str, Any], field: str, value: Any) -> None:
    found = parse_result({"outcome": "completed", **change})
    assert found == {**EMPTY, "outcome": "completed", field: value}
    assert parse_result({**change, "outcome": "won"}) is None


# --- logs -----------------------------------------------------------------------------------------------------------


def collect(
    logs: Mapping[int, Sequence[str]], size: int = 2, **options: Any
) -> tuple[ReportedFacts, list[dict[str, Any]]]:
    """What the logs say, and the lines of metrics.jsonl."""
    lines: list[bytes] = []
    files = {rank: partial(io.BytesIO, "".join(f"{line}\n" for line in rows).encode()) for rank, rows in logs.items()}
    found = collect_events(files, size, lines.append, **options)
    return found, [json.loads(line) for line in lines]


def metric(rank: int, at: float, value: Any = 1.0, name: str = "loss", **more: Any) -> str:
    return event("metric", rank, at, name=name, value=value, **more)


def test_only_rank_0_speaks_for_the_run() -> None:
    logs = {
        0: [metric(0, 1, 5.0), metric(0, 2, 4.0), metric(0, 3, "nan"), event("phase", 0, 4, phase="a")],
        1: [metric(1, 1, 9.0), event("phase", 1, 9, phase="b"), metric(0, 9, 99.0), event("network", 1, 9)],
    }
    found, lines = collect(logs)
    assert (found.metrics, found.phase, found.probes, found.result) == ({"loss": 4.0}, {"phase": "a"}, [], None)
    assert [(line["rank"], line["value"]) for line in lines] == [(0, 5.0), (0, 4.0), (0, "nan"), (1, 9.0), (0, 99.0)]


def test_the_last_valid_result_counts() -> None:
    logs = {
        0: [
            event("result", 0, 5, outcome="completed", wall_seconds=5.0),
            event("result", 0, 6, outcome="goal_missed", wall_seconds=6.0),
            event("result", 0, 7, outcome="won", wall_seconds=7.0),
        ],
        1: [event("result", 1, 8, outcome="completed"), event("result", 0, 8, outcome="completed")],
    }
    found, _ = collect(logs)
    assert found.result is not None
    assert (found.result["outcome"], found.result["wall_seconds"], found.is_watched) == ("goal_missed", 6.0, False)


def test_events_of_ranks_that_do_not_exist_or_write_elsewhere_are_foreign() -> None:
    logs = {0: [metric(0, 1), metric(2, 1), metric(1, 1)]}
    found, lines = collect(logs)
    assert (found.logs[0].foreign, len(lines)) == (1, 2)
    found, lines = collect(logs, writers=lambda number: [number])
    assert (found.logs[0].foreign, len(lines)) == (2, 1)


def test_environments_are_put_together_by_rank() -> None:
    logs = {0: [event("environment", 0, 1, cpu="a"), event("environment", 0, 2, cpu="b", cores=2)]}
    logs[1] = [event("environment", 1, 1, cpu="c")]
    found, _ = collect(logs)
    assert {rank: facts["cpu"] for rank, facts in found.environments.items()} == {0: "b", 1: "c"}
    assert found.environments[0]["cores"] == 2


def test_names_and_probes_are_bounded() -> None:
    many = [metric(0, 1, name=f"m{number}") for number in range(1001)] + [
        metric(0, 2, 7.0, "m0"),
        metric(0, 2, 7.0, "y"),
    ]
    found, _ = collect({0: [*many, *(event("network", 0, 3, stage=str(number)) for number in range(10))]})
    assert (len(found.metrics), found.metrics["m0"], "m999" in found.metrics, "y" in found.metrics) == (
        *(1000, 7.0, True),
        False,
    )
    assert [probe["stage"] for probe in found.probes] == [str(number) for number in range(8)]


def test_times_of_a_log_are_the_first_the_last_and_the_largest_step_back() -> None:
    facts = LogFacts(LogCounts())
    for rank, at in ((0, 10.0), (1, 3.0), (0, 8.0), (1, 20.0), (0, 9.0)):
        facts.take({"event": "metric", "rank": rank, "time": at, "seconds": at if rank == 0 else 99.0})
    assert (facts.first, facts.last, facts.backward, facts.last_seconds) == (3.0, 20.0, 2.0, 9.0)
    assert not facts.is_measured_late
    facts.take({"event": "result", "rank": 0, "time": 21.0})
    facts.take({"event": "metric", "rank": 1, "time": 22.0})
    assert not facts.is_measured_late
    facts.take({"event": "metric", "rank": 0, "time": 22.0, "seconds": None})
    assert (facts.is_measured_late, facts.last_seconds) == (True, 9.0)
    facts.take({"event": "result", "rank": 0, "time": 23.0})
    assert not facts.is_measured_late


# --- a program that only reports a metric ---------------------------------------------------------------------------


def watch(*values: Any, comparison: str = "<=", started: bool = True, name: str = "loss") -> dict[str, Any] | None:
    watcher = GoalWatcher(Goal("loss", comparison, 3.0), "light", timestamp(START) if started else None)
    for number, value in enumerate(values):
        watcher.take({"name": name, "value": value, "time": timestamp(START + 10 * (number + 1))})
    found = watcher.result()
    return None if found is None else dict(found)


def test_a_watched_metric_that_meets_its_goal_is_a_result() -> None:
    found = watch(5.0, 2.9, 2.0, 4.0)
    assert found is not None
    assert (found["outcome"], found["wall_seconds"]) == ("goal_reached", 20.0)
    assert found["goal"] == {
        "metric": "loss",
        "comparison": "<=",
        "threshold": 3.0,
        "kind": "light",
        "value": 2.9,
        "last": 4.0,
    }


@pytest.mark.parametrize(("comparison", "best"), [("<=", 4.0), (">=", 2.5)])
def test_a_watched_metric_that_misses_its_goal_has_its_best_value(comparison: str, best: float) -> None:
    values = (5.0, 4.0, 6.0, "nan") if comparison == "<=" else (1.0, 2.5, 2.0, "nan")
    found = watch(*values, comparison=comparison)
    assert found is not None
    assert (found["outcome"], found["goal"]["value"], found["goal"]["last"]) == ("goal_missed", best, values[2])
    assert found["wall_seconds"] == 30.0


def test_a_watched_program_that_reports_nothing_has_no_result() -> None:
    assert watch() is None
    assert watch("nan") is None
    assert watch(1.0, name="other") is None
    unstarted = watch(1.0, started=False)
    assert unstarted is not None
    assert unstarted["wall_seconds"] is None
