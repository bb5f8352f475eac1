"""Predictions under faults: the replay and the formula agree where the formula holds, and bad input is named."""

import random

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.simulator import faults
from mlbench_cli.simulator.faults import FaultRates, parse_rates, predict_faults, replay


def test_the_replay_agrees_with_the_formula_where_faults_are_rare() -> None:
    for item in predict_faults(FaultRates(mtbf=6000, checkpoint=1, restart=30)):
        assert abs(item.formula - item.replayed) < 0.01
        assert item.low <= item.replayed <= item.high


def test_the_best_interval_is_no_worse_than_half_and_twice_of_it() -> None:
    half, best, twice = predict_faults(FaultRates(mtbf=600, checkpoint=1, restart=30))
    assert best.is_best
    assert best.replayed >= max(half.replayed, twice.replayed) - 0.005


def test_checkpoints_that_are_never_reached_keep_nothing() -> None:
    assert replay(FaultRates(10, 1, 5), 1e6, 1e4, random.Random(1)) < 0.01


@pytest.mark.parametrize(
    "text", ["mtbf=10m", "often", "mtbf=0s,checkpoint=1s,restart=1s", "mtbf=x,checkpoint=1s,restart=1s"]
)
def test_bad_rates(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rates(text)


def test_what_a_run_measured_may_be_left_out() -> None:
    assert parse_rates("mtbf=10m", {"checkpoint": 0.1, "restart": 3.0}) == FaultRates(600, 0.1, 3.0)


def test_an_interval_of_ones_own_is_predicted_beside_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "REPLAYS", 40)
    rates = parse_rates(" mtbf=10m, checkpoint=1s,restart=30s,interval=2m")
    assert rates == FaultRates(600.0, 1.0, 30.0, 120.0)
    found = predict_faults(rates)
    assert [item.interval for item in found] == sorted(item.interval for item in found)
    assert [item.is_best for item in found if item.interval == 120.0] == [False]
    assert len(found) == 4
    assert [item.is_best for item in found].count(True) == 1


def test_half_and_twice_the_best_interval_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "REPLAYS", 40)
    half, best, twice = predict_faults(FaultRates(mtbf=600, checkpoint=1, restart=30))
    assert (half.interval, twice.interval) == (best.interval / 2, best.interval * 2)
    assert predict_faults(FaultRates(mtbf=600, checkpoint=1, restart=30)) == [half, best, twice]  # the same each time


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mtbf=10m,checkpoint=1s", "says no restart."),
        ("interval=1m", "says no mtbf and no checkpoint and no restart."),
        ("mtbf=10m,checkpoint=1s,restart=1s,interval=0s", "mtbf and interval must be above 0"),
        ("mtbf", '"mtbf" is not one of mtbf=..., checkpoint=..., restart=..., interval=...'),
        ("mttr=1s", '"mttr=1s" is not one of'),
    ],
)
def test_what_is_missing_or_unknown_in_rates_is_named(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rates(text)
    assert reason in caught.value.message
    assert "mtbf=10m" in str(caught.value.hint)


def test_checkpoints_and_restarts_may_cost_nothing() -> None:
    assert parse_rates("mtbf=10m,checkpoint=0s,restart=0s") == FaultRates(600.0, 0.0, 0.0)


def test_a_run_without_a_fault_loses_only_its_checkpoints() -> None:
    """Of 100 s, ten intervals of 9 s are trained and ten checkpoints of 1 s are written."""
    rates = FaultRates(mtbf=1e12, checkpoint=1.0, restart=30.0)
    assert replay(rates, 9.0, 100.0, random.Random(1)) == pytest.approx(0.9)
    # What was trained since the last checkpoint counts at the end of a run.
    assert replay(rates, 9.0, 105.0, random.Random(1)) == pytest.approx(95 / 105)
