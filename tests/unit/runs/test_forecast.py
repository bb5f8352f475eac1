"""How long the rest of an experiment takes and what it costs, and when a limit stops it."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.forecast import Budget, Forecast, History, RunEstimate, forecast
from mlbench_cli.storage.store import Store

SPEC = RunSpec("x-2", "c", "kubernetes", "mnist", "tiny", ("true",), "gloo", 2, timeout=600.0)
CLOUD = Cluster("c", "gke", details={"plan": {"price_per_hour": 36.0, "currency": "USD"}})


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(Store(tmp_path))


def test_nothing_is_expected_of_a_run_like_none_before(history: History) -> None:
    assert history.estimate(SPEC, CLOUD) == RunEstimate(None, None)
    history.add(SPEC, 100.0)
    for changes in ({"task": "other"}, {"preset": "spec"}, {"workers": 4}, {"cluster": "d"}, {"device": "gpu"}):
        assert history.estimate(replace(SPEC, **changes), CLOUD) == RunEstimate(None, None)


def test_a_run_takes_as_long_as_its_repeats_on_average_and_costs_the_planned_price(history: History) -> None:
    history.add(SPEC, 100.0)
    history.add(replace(SPEC, name="y-2", seed=7), 300.0)
    assert history.estimate(replace(SPEC, seed=1), CLOUD) == RunEstimate(200.0, 2.0)  # 36 an hour, for 200 s


def test_runs_with_other_parameters_count_only_where_no_repeat_is_known(history: History) -> None:
    other = replace(SPEC, parameters={"batch_size": 8})
    history.add(other, 50.0)
    assert history.estimate(SPEC, CLOUD).seconds == 50.0
    history.add(SPEC, 100.0)
    assert history.estimate(SPEC, CLOUD).seconds == 100.0
    assert history.estimate(replace(SPEC, parameters={"batch_size": 9}), CLOUD).seconds == 75.0


@pytest.mark.parametrize(
    ("cluster", "price"),
    [
        (LOCAL, 0.0),
        (Cluster("c", "attached"), None),
        (Cluster("c", "gke", details={"plan": {"price_per_hour": None}}), None),
        (Cluster("c", "gke", details={"plan": {"price_per_hour": 7.2}}), 0.2),
    ],
)
def test_the_price_of_a_run_is_known_on_this_machine_and_on_planned_clusters(
    history: History, cluster: Cluster, price: float | None
) -> None:
    history.add(SPEC, 100.0)
    assert history.estimate(SPEC, cluster).price == (None if price is None else pytest.approx(price))


def test_runs_are_predicted_only_if_none_is_known(tmp_path: Path) -> None:
    history = History(Store(tmp_path), lambda spec, cluster: 10.0 * spec.workers)
    assert history.estimate(SPEC, CLOUD) == RunEstimate(20.0, 0.2)
    history.add(SPEC, 100.0)
    assert history.estimate(SPEC, CLOUD).seconds == 100.0


def test_a_forecast_adds_up_what_is_known() -> None:
    remaining = [(SPEC, RunEstimate(10.0, 0.5)), (SPEC, RunEstimate(20.0, 1.0)), (SPEC, RunEstimate(None, None))]
    assert forecast(remaining, 5) == Forecast(5, 3, 30.0, 1.5, unknown=1, ceiling=1800.0)
    assert forecast([(SPEC, RunEstimate(10.0, 0.5)), (SPEC, RunEstimate(5.0, None))], 2).price is None
    assert forecast([], 2) == Forecast(2, 0, 0, 0, unknown=0, ceiling=0)


@pytest.mark.parametrize(
    ("budget", "estimate", "words"),
    [
        (Budget(None, None, 1e9, 1e9), RunEstimate(1e9, 1e9), None),
        (Budget(3600.0, None, 1800.0), RunEstimate(1799.0, None), None),
        (Budget(3600.0, None, 1800.0), RunEstimate(1800.0, None), "0.50 of 1 hours are used up"),
        (Budget(3600.0, None, 3599.0), RunEstimate(None, None), None),
        (Budget(3600.0, None, 3600.0), RunEstimate(None, None), "1.00 of 1 hours are used up"),
        (Budget(None, 5.0, 0.0, 3.0), RunEstimate(1.0, 1.99), None),
        (Budget(None, 5.0, 0.0, 3.0), RunEstimate(1.0, 2.0), "3.00 of a budget of 5 is used up"),
        (Budget(None, 5.0, 0.0, 5.0), RunEstimate(None, None), "5.00 of a budget of 5 is used up"),
    ],
)
def test_a_run_that_would_exceed_a_limit_does_not_start(
    budget: Budget, estimate: RunEstimate, words: str | None
) -> None:
    assert budget.refusal(estimate) == words


def test_what_runs_took_is_added_up() -> None:
    budget = Budget(100.0, 10.0)
    budget.spend(40.0, 1.5)
    budget.spend(20.0, 0.25)
    assert (budget.spent_seconds, budget.spent_cost) == (60.0, 1.75)
