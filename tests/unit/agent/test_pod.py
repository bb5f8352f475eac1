"""The agent of a pod: what it makes of worker.sh's variables, and with which exit code it ends."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent import machine, pod
from mlbench_cli.agent.node import NodeAgent
from mlbench_cli.agent.pod import EXIT_PEER_LOST, PodAgent, make_plan

FAULTS = {"script": None, "seed": 0, "policy": "fail", "checkpoint_every": 1, "detect_seconds": None, "ranks": 4}


def variables(work: Path, **changes: str) -> dict[str, str]:
    return {
        "NODE_RANK": "1",
        "MLBENCH_WORK_DIR": str(work),
        "MLBENCH_WORKERS": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MLBENCH_RUN_ID": "p-1",
        "MLBENCH_TIMEOUT": "90",
        "MLBENCH_HOSTS": "p-1-0.p-1,p-1-1.p-1",
        "MLBENCH_FAULTS": json.dumps(FAULTS),
        "MLBENCH_AGENT_PORT": "29700",
        "MLBENCH_KEEPER_TOKEN": "the-jobs-uid",
        "MLBENCH_BACKEND": "gloo",
        "MASTER_ADDR": "p-1-0.p-1",
        **changes,
    }


@pytest.fixture
def conducted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PodAgent]]:
    """The agents that `main` makes, which start nothing."""
    found: list[PodAgent] = []

    def conduct(self: PodAgent) -> int:
        found.append(self)
        return 0

    monkeypatch.setattr(PodAgent, "conduct", conduct)
    monkeypatch.setattr(machine, "keep_only", lambda *descriptors: None)
    yield found
    for agent in found:
        agent.selector.close()


def start(monkeypatch: pytest.MonkeyPatch, work: Path, **changes: str) -> int:
    for name, value in variables(work, **changes).items():
        monkeypatch.setenv(name, value)
    return pod.main(["true"])


def test_the_first_start_in_a_pod_finds_no_folder_and_makes_its_own(
    monkeypatch: pytest.MonkeyPatch, conducted: list[PodAgent], tmp_path: Path
) -> None:
    assert start(monkeypatch, tmp_path) == 0
    assert (conducted[0].folder, conducted[0].run_folder) == (f"{tmp_path}/agent/nodes/1", f"{tmp_path}/agent")
    assert (tmp_path / "agent/nodes/1/.state").stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(tmp_path / "output")) == ["rank-2", "rank-3"]


def test_a_container_that_is_started_again_sees_nothing_of_the_agent_before(
    monkeypatch: pytest.MonkeyPatch, conducted: list[PodAgent], tmp_path: Path
) -> None:
    """Its rendezvous names a hub that may be gone, and its mark of a cancellation would end the run."""
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/cancel").touch()
    (tmp_path / "agent/rendezvous.json").write_text("{}")
    assert start(monkeypatch, tmp_path, NODE_RANK="0") == 0
    assert os.listdir(tmp_path / "agent") == ["nodes"]


def test_all_pods_but_the_first_know_from_the_start_where_the_first_is(
    monkeypatch: pytest.MonkeyPatch, conducted: list[PodAgent], tmp_path: Path
) -> None:
    start(monkeypatch, tmp_path / "1")
    note = json.loads((tmp_path / "1/agent/rendezvous.json").read_text())
    assert note == {"addresses": ["p-1-0.p-1"], "port": 29700, "token": "the-jobs-uid"}
    start(monkeypatch, tmp_path / "0", NODE_RANK="0")
    assert not (tmp_path / "0/agent/rendezvous.json").exists()


def test_each_pod_has_the_ranks_of_its_worker(tmp_path: Path) -> None:
    plan = make_plan(variables(tmp_path), ["true"])
    ranks = [[rank["environment"] for rank in node["ranks"]] for node in plan["nodes"]]
    numbers = [[(own["RANK"], own["LOCAL_RANK"], own["NODE_RANK"]) for own in node] for node in ranks]
    assert numbers == [[("0", "0", "0"), ("1", "1", "0")], [("2", "0", "1"), ("3", "1", "1")]]
    assert [own["MLBENCH_OUTPUT_DIR"] for own in ranks[1]] == [f"{tmp_path}/output/rank-{rank}" for rank in (2, 3)]
    assert [node["name"] for node in plan["nodes"]] == ["p-1-0.p-1", "p-1-1.p-1"]
    assert plan["timeout"] == 90.0
    assert plan["environment"] == {"MLBENCH_BACKEND": "gloo"}  # and no variable that is not there


def test_the_only_rank_of_a_pod_writes_into_the_folder_of_the_output(tmp_path: Path) -> None:
    plan = make_plan(variables(tmp_path, LOCAL_WORLD_SIZE="1"), ["true"])
    assert plan["nodes"][1]["ranks"][0]["environment"]["MLBENCH_OUTPUT_DIR"] == f"{tmp_path}/output"
    assert plan["nodes"][1]["ranks"][0]["rank"] == 1


def test_names_that_are_not_as_many_as_the_workers_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        make_plan(variables(tmp_path, MLBENCH_HOSTS="p-1-0.p-1"), ["true"])


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ({"ended": "exited"}, 0, 0),
        ({"ended": "exited"}, 137, 0),  # a rank that was killed was left out of the run
        ({"ended": "failed"}, 3, 3),
        ({"ended": "failed"}, 0, 1),  # a rank of another pod failed
        ({"ended": "cancelled"}, 0, 1),
        ({"ended": "never_started", "start_problem": "node 0 could not be reached"}, 0, EXIT_PEER_LOST),
    ],
)
def test_a_pod_succeeds_only_with_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path,
    state: dict[str, Any], code: int, expected: int,
) -> None:  # fmt: skip
    (tmp_path / "agent/nodes/0/.state").mkdir(parents=True)
    plan = make_plan(variables(tmp_path), ["true"])
    agent = PodAgent(f"{tmp_path}/agent/nodes/0", f"{tmp_path}/agent", 0, plan)
    agent.state.update(state)  # type: ignore[typeddict-item]
    monkeypatch.setattr(NodeAgent, "conduct", lambda self: code)
    assert agent.conduct() == expected
    is_told = "mlbench: the ranks did not start: node 0 could not be reached\n" in capfd.readouterr().err
    assert is_told is (expected == EXIT_PEER_LOST)
    agent.selector.close()


def test_the_record_of_faults_goes_where_worker_sh_packs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = make_plan(variables(tmp_path), ["true"])
    monkeypatch.setenv("MLBENCH_WORK_DIR", str(tmp_path))
    for node in (0, 1):
        place = tmp_path / f"agent/nodes/{node}"
        (place / ".state").mkdir(parents=True)
        (place / "faults.json").write_text("{}")
        agent = PodAgent(str(place), f"{tmp_path}/agent", node, plan)
        agent._pack()
        agent.selector.close()
    assert (tmp_path / "faults.json").exists()
    assert (tmp_path / "agent/nodes/1/faults.json").exists()  # only node 0's is the run's


def test_the_plan_of_pods_is_a_plan_of_machines(tmp_path: Path) -> None:
    environ = variables(tmp_path, LOCAL_WORLD_SIZE="1", MLBENCH_PARAMETERS="{}", OTHER="not passed on")
    plan = make_plan(environ, ["python", "train.py"])
    ranks = [
        {
            "rank": rank,
            "argv": ["python", "train.py"],
            "environment": {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "NODE_RANK": str(rank),
                "MLBENCH_OUTPUT_DIR": f"{tmp_path}/output",
            },
        }
        for rank in range(2)
    ]
    assert plan == {
        "kind": "PodsRun",
        "schema_version": 1,
        "name": "p-1",
        "spec_hash": "",
        "timeout": 90.0,
        "gpus_per_worker": 0,
        "environment": {"MLBENCH_PARAMETERS": "{}", "MLBENCH_BACKEND": "gloo"},
        "defaults": {},
        "faults": FAULTS,
        "nodes": [
            {"name": f"p-1-{rank}.p-1", "address": None, "workers": [rank], "ranks": [ranks[rank]]} for rank in range(2)
        ],
        "python": sys.executable,
        "installed_code_only": False,
        "launcher": [],
        "interface": None,
        "interface_variables": [],
        "meeting_seconds": 600.0,
        "lease_seconds": None,
        "grace": 5.0,
        "lock": "no promise",
        "hub": {"port": 29700, "token": "the-jobs-uid"},
    }


def test_a_pod_writes_its_ranks_words_to_its_own_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The kubelet keeps them; there is no file in which standard error could be noted."""
    (tmp_path / "agent/nodes/0/.state").mkdir(parents=True)
    agent = PodAgent(f"{tmp_path}/agent/nodes/0", f"{tmp_path}/agent", 0, make_plan(variables(tmp_path), ["true"]))
    log = agent._open_log(agent.ranks[0])
    os.write(log, b"said\n")
    os.close(log)
    assert capfd.readouterr().out == "said\n"
    assert (agent.divides_streams, agent.outlives_nodes) == (False, False)
    agent.selector.close()
