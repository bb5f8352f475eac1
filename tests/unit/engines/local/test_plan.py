"""The plan of a local run: what each process runs, in which environment, and with which network."""

from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.engines.environment import plan_faults, plan_rank, thread_variables
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.model.spec import RunSpec

SPEC = RunSpec(
    *("x-2", "local", "local", "custom", "custom", ("prog", "{rank}/{hosts}", "{run_id}", "{backend}"), "gloo", 2),
    parameters={"b": 1, "a": "x"},
    seed=7,
    timeout=90.0,
)


def plan_of(**changes: Any) -> dict[str, Any]:
    (document,) = LocalEngine().render(replace(SPEC, **changes)).documents
    return dict(document)


# --- the whole plan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "defaults"),
    [("gloo", {"GLOO_SOCKET_IFNAME": "lo"}), ("nccl", {"NCCL_SOCKET_IFNAME": "lo"}), ("mpi", {}), ("ucc", {})],
)
def test_ranks_of_this_machine_communicate_through_its_loopback(backend: str, defaults: dict[str, str]) -> None:
    assert plan_of(backend=backend, cpus=4.0)["defaults"] == defaults


@pytest.mark.parametrize("changes", [{"network": "model:1gbit"}, {"network": "1gbit", "workers": 1}, {}])
def test_other_runs_have_no_shaped_network(changes: dict[str, Any]) -> None:
    plan = plan_of(**changes)
    assert not {"network", "workers"} & set(plan)
    assert plan["environment"]["MASTER_ADDR"] == "127.0.0.1"


# --- parts that all engines share ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "processes", "threads"), [(None, 1, None), (4.0, 1, "4"), (4.0, 2, "2"), (5.5, 2, "2"), (1.0, 4, "1")]
)
def test_threads_of_a_rank_are_its_share_of_the_cpus(cpus: float | None, processes: int, threads: str | None) -> None:
    spec = replace(SPEC, cpus=cpus, processes_per_worker=processes)
    assert thread_variables(spec) == ({} if threads is None else {"OMP_NUM_THREADS": threads})
    plan = plan_of(cpus=cpus, processes_per_worker=processes)
    assert plan["environment"].get("OMP_NUM_THREADS") == threads
    assert ("OMP_NUM_THREADS" in plan["defaults"]) is (threads is None)


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
    assert plan["from_start"] is from_start


# --- waiting for the machine -----------------------------------------------------------------------------------------
