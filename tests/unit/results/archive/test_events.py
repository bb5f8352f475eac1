"""What is read of the events in logs, field by field, and what becomes of malformed ones."""

import math
from typing import Any

import pytest

from mlbench_cli.results.archive.evidence import (
    parse_metric,
    parse_phase,
    parse_result,
    read_amount,
)
from mlbench_cli.util.times import MAX_SECONDS
from tests.unit.results.runs import START, event

METRIC: dict[str, Any] = {"rank": 1, "time": START, "name": "loss", "value": 0.5}


# --- metrics and phases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True),
        ({"value": "nan"}, True),
        ({"value": "-inf"}, True),
        ({"value": "many"}, False),
        ({"value": None}, False),
        ({"value": math.inf}, True),
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


def metric(rank: int, at: float, value: Any = 1.0, name: str = "loss", **more: Any) -> str:
    return event("metric", rank, at, name=name, value=value, **more)


# --- a program that only reports a metric ---------------------------------------------------------------------------
