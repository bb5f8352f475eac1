"""The plan of a local run: what each process runs, in which environment, and with which network."""

from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.plan import plan_faults, plan_rank
from mlbench_cli.model.spec import RunSpec

SPEC = RunSpec(
    *("x-2", "local", "local", "custom", "custom", ("prog", "{rank}/{hosts}", "{run_id}", "{backend}"), "gloo", 2),
    parameters={"b": 1, "a": "x"},
    seed=7,
    timeout=90.0,
)


# --- parts that all engines share ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "local", "node", "role"),
    [(0, "0", "0", None), (3, "1", "1", None), (4, "0", "2", "server"), (5, "0", "3", "server")],
)
def test_servers_are_workers_of_one_process_after_the_others(
    rank: int, local: str, node: str, role: str | None
) -> None:
    spec = replace(SPEC, processes_per_worker=2, method={"name": "ps", "servers": "2"})
    environment = plan_rank(spec, rank)["environment"]
    assert (environment["LOCAL_RANK"], environment["NODE_RANK"], environment.get("MLBENCH_ROLE")) == (local, node, role)


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
    assert (plan["from_start"], plan["seed"]) == (from_start, 7)
