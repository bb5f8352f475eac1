"""Predictions under faults: the replay and the formula agree where the formula holds, and bad input is named."""

import random

import pytest

from mlbench_cli.errors import UsageError
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
