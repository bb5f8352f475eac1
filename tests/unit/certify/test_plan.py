"""What a plan says before nodes are measured."""

import pytest

from mlbench_cli.certify.plan import Plan, make_plan
from mlbench_cli.tasks.catalog import load_catalog


def plan(preset: str, nodes: int, per_node: int) -> Plan:
    parameters = load_catalog()["certify"].resolve(preset)
    return make_plan(parameters, nodes, per_node, gpu=True, one_machine=False, per_hour=4.0)


def test_hours_are_those_of_all_devices_and_the_price_that_of_the_cluster() -> None:
    found = plan("spec", 4, 8)
    text = found.describe("lab", "quick")
    assert f"{4 * 8 * found.seconds / 3600:.2f} device-hours, ${4 * found.seconds / 3600:.2f}" in text


def test_a_budget_leaves_time_for_all_that_follows_a_confirmation() -> None:
    whole = plan("soak", 4, 8)
    later = sum(2 * whole.stages[name] for name in ("drift", "collectives", "training")) + whole.stages["soak"]
    budget = whole.seconds + 600
    assert whole.within(budget).confirmed == pytest.approx(max(0.0, min(whole.confirmed, budget - later - 30)), abs=1)
    assert 0 < whole.within(budget).confirmed < whole.confirmed
    quick = plan("spec", 4, 8)
    assert quick.timeout > quick.seconds + quick.confirmed
