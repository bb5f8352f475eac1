"""The plans of agents, as engines of machines share them."""

from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.placement import share_nodes
from mlbench_cli.engines.plan import make_plan, plan_faults
from mlbench_cli.model.cluster_details import MachineDetails
from mlbench_cli.model.spec import RunSpec

SPEC = RunSpec("x-3", "c", "hosts", "custom", "custom", ("true",), "gloo", 3)

DETAILS = MachineDetails(folder="/f", python="/opt/python", interface="ib0", env={"A": "details", "B": "details"})


@pytest.mark.parametrize(
    ("preset", "launcher", "only"), [("tiny", (), True), ("tiny", ("apptainer",), False), ("custom", (), False)]
)
def test_a_task_of_the_catalog_runs_only_installed_code_unless_it_is_in_a_container(
    preset: str, launcher: tuple[str, ...], only: bool
) -> None:
    spec = replace(SPEC, task="mnist", preset=preset)
    assert make_plan(spec, DETAILS, share_nodes(spec), lock="take", launcher=launcher)["installed_code_only"] is only


def test_agents_get_the_variables_of_the_run_and_time_for_nodes_that_may_be_absent() -> None:
    spec = replace(SPEC, env={"A": "run", "WORLD_SIZE": "9"}, absent_seconds=900.0)
    plan = make_plan(spec, DETAILS, share_nodes(spec), lock="take")
    assert [plan["environment"][name] for name in ("A", "B", "WORLD_SIZE")] == ["run", "details", "3"]
    assert plan["meeting_seconds"] > 900


@pytest.mark.parametrize(
    ("changes", "from_start"),
    [
        ({}, True),
        ({"task": "mnist", "preset": "tiny"}, True),
        ({"task": "mnist", "preset": "tiny", "parameters": {"goal_full": 9}}, False),
        ({"task": "mnist", "preset": "open", "parameters": {"goal_full": 9}}, True),
    ],
)
def test_faults_of_a_training_count_from_its_first_update(changes: dict[str, Any], from_start: bool) -> None:
    plan = plan_faults(replace(SPEC, faults="at 9s kill rank 1", **changes))
    assert plan is not None
    assert plan["from_start"] is from_start
