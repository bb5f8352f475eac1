"""Faults in pods: worker.sh starts the agent that the run's ConfigMap brings, in processes that stand for the pods."""

import base64
import json
import os
import signal
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.machine import free_port
from mlbench_cli.engines.environment import plan_faults
from mlbench_cli.engines.fetch import unpack
from mlbench_cli.engines.kubernetes.fetch import split_output
from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.fault_options import check_faults
from tests.contract.engines.kubernetes.test_worker_script import Worker
from tests.contract.local_runs import processes_below, until

SECOND_TRY = 'test -n "$MLBENCH_ATTEMPT" && exit 0; exec sleep 60'


def a_spec(script: str, workers: int, **changes: Any) -> RunSpec:
    fields: dict[str, Any] = {"task": "custom", "preset": "custom", "backend": "gloo", "image": "image:1", **changes}
    argv = ("sh", "-c", script)
    return RunSpec(name="r", cluster="c", engine="kubernetes", argv=argv, workers=workers, timeout=60.0, **fields)


class Pods:
    """The workers of a run as processes of this machine, made from the run's own objects."""

    def __init__(self, folder: Path, script: str, workers: int = 2, **changes: Any) -> None:
        self.folder = folder
        self.spec = a_spec(script, workers, **changes)
        check_faults(self.spec)
        documents = {document["kind"]: document for document in reversed(manifests(self.spec, "default"))}
        (folder / "agent.zip").write_bytes(base64.b64decode(documents["ConfigMap"]["binaryData"]["agent.zip"]))
        (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
        environ = {item["name"]: item["value"].replace("$$", "$") for item in container["env"] if "value" in item}
        assert {item["name"] for item in container["env"] if "valueFrom" in item} == {"MLBENCH_KEEPER_TOKEN"}
        words = [word.replace("$$", "$") for word in container["args"]]  # as the kubelet does
        environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MLBENCH_AGENT": str(folder / "agent.zip"),
            "MLBENCH_AGENT_PORT": str(free_port()),
            "MLBENCH_KEEPER_TOKEN": "token",
            "MLBENCH_KEEPER": "",
            "HOME": str(folder),
            "MLBENCH_HOLD": "0",
        }
        own = {"MLBENCH_WORK_DIR", "MLBENCH_TERMINATION_LOG", "PATH"}
        shared = {name: value for name, value in environ.items() if name not in own}
        self.workers = [
            Worker(["sh"], folder / str(number), *words, **shared, JOB_COMPLETION_INDEX=str(number))
            for number in range(workers)
        ]

    def end(self) -> list[tuple[int, str]]:
        """Exit code and log of each worker."""
        return [worker.end()[:2] for worker in self.workers]

    def read_record(self) -> dict[str, Any]:
        """faults.json, as the archive of worker 0 brings it home."""
        with tarfile.open(self.folder / "0" / "archive.tar") as archive:
            assert "faults.json" in archive.getnames()
        home = self.folder / "home"
        home.mkdir()
        part, split = self.folder / "0" / "archive.tar", partial(split_output, ranks=self.spec.ranks_of(0))
        unpack(part, home, split, home / "resources.jsonl", marker=home / "fetched", first=True)
        record: dict[str, Any] = json.loads((home / "faults.json").read_bytes())
        return record


def test_a_rank_killed_in_another_pod_starts_all_ranks_again(tmp_path: Path) -> None:
    script = f"echo $MLBENCH_ATTEMPT:$MASTER_PORT; touch $MLBENCH_OUTPUT_DIR/$RANK; {SECOND_TRY}"
    pods = Pods(tmp_path, script, faults="at 0.3s kill rank 1", on_failure="restart")
    ends = pods.end()
    assert [code for code, _ in ends] == [0, 0]
    (last,) = {log.split()[-1] for _, log in ends}  # the second attempt meets at one port, too
    assert last.startswith("1:")
    record = pods.read_record()
    assert [(attempt["rank"], attempt["why"]) for attempt in record["attempts"]] == [(1, "killed"), (None, None)]
    assert [event["problem"] for event in record["events"]] == [None]
    assert [path.name for path in (tmp_path / "home/output/rank-0").iterdir()] == ["0"]


def test_shrinking_ends_well_although_a_rank_was_left_out(tmp_path: Path) -> None:
    task = {"task": "digits_resnet", "preset": "tiny", "parameters": {"batch_size": 2}}
    script = f'echo $RANK of $WORLD_SIZE; test -z "$MLBENCH_ATTEMPT" || echo $MLBENCH_PARAMETERS; {SECOND_TRY}'
    pods = Pods(tmp_path, script, workers=3, faults="at 1s kill rank 0", on_failure="shrink", **task)
    ends = pods.end()
    assert [code for code, _ in ends] == [0, 0, 0]
    last = [log.splitlines()[-2:] for _, log in ends]  # a rank may be killed before its first line
    assert last[:2] == [[f"{rank} of 2", '{"batch_size":3}'] for rank in (0, 1)]
    assert "of 2" not in ends[2][1]


def test_several_processes_of_a_pod(tmp_path: Path) -> None:
    script = f"echo $RANK $LOCAL_RANK $NODE_RANK {{rank}} >$MLBENCH_OUTPUT_DIR/who; {SECOND_TRY}"
    pods = Pods(tmp_path, script, processes_per_worker=2, faults="at 0.3s kill rank 3", on_failure="restart")
    assert [code for code, _ in pods.end()] == [0, 0]
    assert (tmp_path / "1/output/rank-3/who").read_text() == "3 1 1 3\n"
    assert pods.read_record()["attempts"][0]["why"] == "killed"


def test_without_a_policy_the_pod_fails_by_its_rank(tmp_path: Path) -> None:
    pods = Pods(tmp_path, "exec sleep 60", faults="at 0.3s kill rank 1")
    (first, _), (second, _) = pods.end()
    assert second == 137
    assert first != 0


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_gone_takes_the_others_along(tmp_path: Path, node: int) -> None:
    pods = Pods(tmp_path, "sleep 77 & sleep 77", faults=f"at 0.3s node {node} gone")
    ends = pods.end()
    assert ends[node][0] == 137
    assert all(code for code, _ in ends)
    until(lambda: not processes_below(str(tmp_path)))


def test_a_stopped_rank_is_found(tmp_path: Path) -> None:
    pods = Pods(tmp_path, SECOND_TRY, faults="at 0.3s stop rank 1", on_failure="restart", detect_seconds=1.0)
    assert [code for code, _ in pods.end()] == [0, 0]
    assert pods.read_record()["attempts"][0]["why"] == "stopped"


@pytest.mark.parametrize("number", [0, 1])
def test_a_pod_that_is_deleted_ends_the_run_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    script = 'touch "$MLBENCH_OUTPUT_DIR/up"; exec sleep 77'
    pods = Pods(tmp_path, script, faults="at 0.5s for 60s stop rank 0", on_failure="restart")
    until(lambda: all((tmp_path / f"{each}/output/up").exists() for each in (0, 1)))
    pods.workers[number].process.send_signal(signal.SIGTERM)
    assert all(code for code, _ in pods.end())
    until(lambda: not processes_below(str(tmp_path)))


def test_a_pod_whose_peer_never_comes_says_so(tmp_path: Path) -> None:
    environment = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK"), "0"),
        "LOCAL_WORLD_SIZE": "1",
        "MLBENCH_WORKERS": "2",
        "MLBENCH_WORK_DIR": str(tmp_path),
        "MLBENCH_RUN_ID": "r",
        "MLBENCH_TIMEOUT": "60",
        "MLBENCH_HOSTS": "r-0.r,r-1.r",
        "MLBENCH_FAULTS": json.dumps(plan_faults(a_spec("true", 2, on_failure="restart"))),
        "MLBENCH_AGENT_PORT": str(free_port()),
        "MLBENCH_KEEPER_TOKEN": "token",
        "MLBENCH_BACKEND": "gloo",
    }
    code = "from mlbench_cli.agent import pod; pod.MEETING_SECONDS = 1.0; raise SystemExit(pod.main(['true']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 75, done.stderr
    assert "the ranks did not start: nodes 1 did not report within 1 s" in done.stderr


def test_an_image_without_python_says_so(tmp_path: Path) -> None:
    for name in ("sh", "sleep", "date", "mkdir", "rm", "tail", "tar", "sha256sum", "wc", "mv", "cat", "tr", "setsid"):
        found = next(path for path in (Path("/usr/bin", name), Path("/bin", name)) if path.exists())
        (tmp_path / "bin").mkdir(exist_ok=True)
        os.symlink(found, tmp_path / "bin" / name)
    worker = Worker(
        ["/bin/sh"], tmp_path / "0", "true", PATH=str(tmp_path / "bin"), MLBENCH_FAULTS="{}", MLBENCH_KEEPER=""
    )
    code, log, _ = worker.end()
    assert code == 78
    assert "need Python" in log


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"faults": "at 1s link 1 down"}, "links cannot be changed on Kubernetes"),
        ({"faults": "at 1s for 5s slow storage of rank 1 to 5MB/s"}, "storage cannot be slowed on Kubernetes"),
        ({"faults": "at 1s node 1 gone", "on_failure": "restart"}, "its Job fails"),
        ({"on_failure": "replace"}, "with your own command, a rank that loses another one ends"),
    ],
)
def test_what_pods_cannot_do_is_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Pods(tmp_path, "true", **options)
