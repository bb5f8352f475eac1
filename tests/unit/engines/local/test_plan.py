"""The plan of a local run: what each process runs, in which environment, and with which network."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent.agent import AT_START
from mlbench_cli.agent.lock import LockHolder
from mlbench_cli.engines.environment import contract_environment, plan_faults, plan_rank, thread_variables
from mlbench_cli.engines.local import machine_lock
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.engines.local.machine_lock import acquire_machine
from mlbench_cli.engines.local.state import abandon
from mlbench_cli.errors import DeadlineError
from mlbench_cli.model.run import Run
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


def test_the_plan_of_a_plain_run() -> None:
    def rank(number: int) -> dict[str, Any]:
        return {
            "rank": number,
            "argv": ["prog", f"{number}/localhost,localhost", "x-2", "gloo"],
            "environment": {
                "RANK": str(number),
                "LOCAL_RANK": "0",
                "NODE_RANK": str(number),
                "MLBENCH_OUTPUT_DIR": f"output/rank-{number}",
            },
        }

    assert plan_of() == {
        "kind": "LocalRun",
        "schema_version": 1,
        "name": "x-2",
        "spec_hash": SPEC.hash,
        "timeout": 90.0,
        "gpus_per_worker": 0,
        "environment": {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": AT_START,
            "MLBENCH_RUN_ID": "x-2",
            "MLBENCH_BACKEND": "gloo",
            "MLBENCH_HOSTS": "localhost,localhost",
            "MLBENCH_DEVICE": "cpu",
            "MLBENCH_GOAL": "full",
            "MLBENCH_DATA_DIR": "",
            "MLBENCH_SEED": "7",
            "MLBENCH_PARAMETERS": '{"a":"x","b":1}',
            "PYTHONUNBUFFERED": "1",
        },
        "defaults": {"OMP_NUM_THREADS": AT_START, "GLOO_SOCKET_IFNAME": "lo"},
        "ranks": [rank(0), rank(1)],
    }


@pytest.mark.parametrize(
    ("backend", "defaults"),
    [("gloo", {"GLOO_SOCKET_IFNAME": "lo"}), ("nccl", {"NCCL_SOCKET_IFNAME": "lo"}), ("mpi", {}), ("ucc", {})],
)
def test_ranks_of_this_machine_communicate_through_its_loopback(backend: str, defaults: dict[str, str]) -> None:
    assert plan_of(backend=backend, cpus=4.0)["defaults"] == defaults


def test_a_shaped_network_has_an_address_for_each_worker() -> None:
    plan = plan_of(network="1gbit")
    assert (plan["network"], plan["workers"]) == ("1gbit", 2)
    environment = plan["environment"]
    assert environment["MASTER_ADDR"] == "10.77.0.1"
    assert environment["MLBENCH_HOSTS"] == "10.77.0.1,10.77.0.2"
    assert (environment["MLBENCH_NETWORK"], environment["GLOO_SOCKET_IFNAME"]) == ("1gbit", "eth0")
    assert not any(name.startswith("NCCL") for name in environment)
    assert plan["ranks"][1]["argv"][1] == "1/10.77.0.1,10.77.0.2"
    assert "NCCL_HOSTID" not in plan["ranks"][0]["environment"]


def test_nccl_uses_the_shaped_network_because_every_worker_is_a_host_to_it() -> None:
    plan = plan_of(network="1gbit", backend="nccl", device="gpu", gpus_per_worker=2, processes_per_worker=2)
    assert {name: value for name, value in plan["environment"].items() if name.startswith("NCCL")} == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_NET": "Socket",
        "NCCL_MNNVL_ENABLE": "0",
    }
    assert [rank["environment"]["NCCL_HOSTID"] for rank in plan["ranks"]] == [
        *("worker-0", "worker-0", "worker-1", "worker-1")
    ]
    assert plan["gpus_per_worker"] == 2


@pytest.mark.parametrize("changes", [{"network": "model:1gbit"}, {"network": "1gbit", "workers": 1}, {}])
def test_other_runs_have_no_shaped_network(changes: dict[str, Any]) -> None:
    plan = plan_of(**changes)
    assert not {"network", "workers"} & set(plan)
    assert plan["environment"]["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(("device", "gpus", "found"), [("gpu", 2, 2), ("cpu", 2, 0)])
def test_gpus_are_given_only_to_runs_on_gpus(device: str, gpus: int, found: int) -> None:
    assert plan_of(device=device, gpus_per_worker=gpus)["gpus_per_worker"] == found


# --- parts that all engines share ------------------------------------------------------------------------------------


def test_the_contract_holds_more_for_runs_that_ask_for_more() -> None:
    full = replace(
        SPEC,
        data_dir="/data",
        goal="light",
        device="gpu",
        processes_per_worker=2,
        task_path="/tasks",
        calibrate=True,
        method={"name": "ps", "servers": "3"},
    )
    found = contract_environment(full, None, "m1", "5000")
    assert "MLBENCH_HOSTS" not in found
    assert (
        found.items()
        >= {
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "m1",
            "MASTER_PORT": "5000",
            "MLBENCH_DATA_DIR": "/data",
            "MLBENCH_GOAL": "light",
            "MLBENCH_DEVICE": "gpu",
            "MLBENCH_TASK_PATH": "/tasks",
            "MLBENCH_CALIBRATE": "1",
            "MLBENCH_METHOD": '{"name":"ps","servers":"3"}',
            "MLBENCH_SERVERS": "3",
        }.items()
    )
    plain = contract_environment(SPEC, "a,b", "m1", "5000")
    assert plain["MLBENCH_HOSTS"] == "a,b"
    assert not {"MLBENCH_TASK_PATH", "MLBENCH_CALIBRATE", "MLBENCH_METHOD", "MLBENCH_SERVERS"} & set(plain)


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


def test_only_the_first_rank_runs_a_command_that_starts_the_others() -> None:
    spec = replace(SPEC, run_on_all=False)
    assert plan_rank(spec, 0)["argv"] == list(SPEC.argv)
    assert plan_rank(spec, 1)["argv"] is None
    assert plan_of(run_on_all=False)["ranks"][1]["argv"] is None


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


def test_runs_without_faults_have_no_plan_of_them() -> None:
    assert plan_faults(SPEC) is None
    assert "faults" not in plan_of()
    assert "pin" not in plan_of()
    found = plan_of(detect_seconds=9.0, pin=True)
    assert found["pin"] is True
    assert found["faults"]["policy"] == "fail"
    assert found["faults"]["detect_seconds"] == 9.0


# --- waiting for the machine -----------------------------------------------------------------------------------------


class Lock:
    """A lock that others have until `free_at`, on a clock that only sleeping moves."""

    free_at = 0.0
    now = 1000.0
    holders: tuple[LockHolder | None, ...] = (None,)

    def __init__(self, mode: str, name: str, timeout: float) -> None:
        self.mode, self.given_up = mode, ""

    def acquire(self) -> bool:
        return Lock.now >= Lock.free_at

    def read_holder(self) -> LockHolder | None:
        return Lock.holders[min(int(Lock.now - 1000.0) // 10, len(Lock.holders) - 1)]

    def give_up(self, reason: str) -> None:
        self.given_up = reason


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> type[Lock]:
    Lock.now, Lock.free_at, Lock.holders = 1000.0, 0.0, (None,)

    def sleep(seconds: float) -> None:
        Lock.now += 0.5

    monkeypatch.setattr(machine_lock, "MachineLock", Lock)
    monkeypatch.setattr(machine_lock, "time", SimpleNamespace(monotonic=lambda: Lock.now, sleep=sleep))
    return Lock


def wait(folder: Path, **changes: Any) -> tuple[Any, list[str]]:
    (folder / ".state").mkdir(exist_ok=True)
    told: list[str] = []
    run = Run("abc", replace(SPEC, **changes), folder, "2027")
    return acquire_machine(run, report=told.append), told


@pytest.mark.parametrize(("shares", "mode"), [(False, "take"), (True, "share")])
def test_a_free_machine_is_taken_or_shared_at_once(tmp_path: Path, lock: type[Lock], shares: bool, mode: str) -> None:
    found, told = wait(tmp_path, share_machine=shares)
    assert (found.mode, told, lock.now) == (mode, [], 1000.0)


def test_a_machine_that_is_free_in_a_moment_is_not_worth_telling(tmp_path: Path, lock: type[Lock]) -> None:
    lock.free_at = 1001.0
    assert wait(tmp_path)[1] == []
    assert not (tmp_path / ".state" / "in_line.json").exists()


def test_who_has_the_machine_is_told_once_for_each(tmp_path: Path, lock: type[Lock]) -> None:
    lock.free_at = 1040.0
    ann, bob = LockHolder("a-1", "ann", 990.0, 60.0), LockHolder("b-1", "bob", 1010.0, 60.0)
    lock.holders = (ann, ann, bob, None)
    found, told = wait(tmp_path)
    assert (found.given_up, len(told)) == ("", 2)
    assert told[0].startswith("x-2 is waiting for this machine: ")
    assert "Timeout 1 min 29 s (--timeout)" in told[0]
    assert ("a-1" in told[0], "b-1" in told[1]) == (True, True)
    assert (tmp_path / ".state" / "in_line.json").exists()


def test_a_run_waits_as_long_as_its_timeout(tmp_path: Path, lock: type[Lock]) -> None:
    lock.free_at = 1e9
    with pytest.raises(DeadlineError, match='The run "x-2" waited 1 min 30 s for this machine'):
        wait(tmp_path)
    assert lock.now == 1090.0


def test_a_run_that_was_cancelled_stops_waiting(tmp_path: Path, lock: type[Lock]) -> None:
    lock.free_at = 1e9
    (tmp_path / ".state").mkdir()
    abandon(Run("abc", SPEC, tmp_path, "2027"))
    found, told = wait(tmp_path)
    assert (found.given_up, told) == ("another process started, canceled or deleted this run", [])
