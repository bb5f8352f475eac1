"""The head of a run in its pod: what clients read, what outlives the workers, and what is said if it is missing."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.head import STILL_SECONDS
from mlbench_cli.engines.follow import UNREACHABLE, read_log, watch
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.errors import CredentialError
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import KubernetesOptions
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.runs import supervise
from mlbench_cli.storage.store import Store
from tests.contract.engines.kubernetes.test_engine import a_run, put_pod, submit
from tests.contract.local_runs import until
from tests.fakes.kube_api import Fault, KubeApi
from tests.fakes.kubelet import Kubelet

ALL = KubernetesOptions(collect="all")


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "home").mkdir()
    store = Store(tmp_path / "home")
    yield store
    store.close()


def record(store: Store, script: str, **options: Any) -> Run:
    return store.record_run(a_run(store.folder, argv=("sh", "-c", script), **{"kubernetes": ALL, **options}).spec)


def head_of(server: KubeApi) -> str:
    """The pod of the head that runs now."""
    pods, _ = server.list_objects("pods", {}, "")
    heads = [pod for pod in pods if pod["metadata"]["labels"]["mlbench/role"] == "head"]
    return next((str(pod["metadata"]["name"]) for pod in heads if pod["status"]["phase"] == "Running"), "")


def test_another_head_takes_over_and_nothing_is_lost(server: KubeApi, store: Store, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"seq 3000; while [ ! -e {gate} ]; do sleep 0.05; done; seq 3000; echo $RANK > $MLBENCH_OUTPUT_DIR/f"
    run = record(store, script)
    with Kubelet(server, tmp_path / "pods") as kubelet:
        submit(server, run)
        engine = KubernetesEngine(server.access)
        assert next(read_log(engine, run, 1, follow=True)).text == b"1\n"
        first = until(lambda: head_of(server))
        os.kill(kubelet.process_of(first), signal.SIGKILL)
        until(lambda: server.objects["pods", first]["status"]["phase"] == "Failed")
        gate.touch()
        finished = supervise.follow(run, engine, store)
        assert finished.outcome == "completed"
    whole = b"".join(b"%d\n" % number for _ in range(2) for number in range(1, 3001))
    assert [(run.folder / f"logs/rank-{rank}.log").read_bytes() for rank in (0, 1)] == [whole] * 2
    assert [(run.folder / f"output/rank-{rank}/f").read_text() for rank in (0, 1)] == ["0\n", "1\n"]
    assert find_problems(run.folder) == []


def test_the_job_of_a_run_that_has_completed_does_not_fail(
    server: KubeApi, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its results are here before the cluster sees that its pods have ended: monitoring alerts on failed
    Jobs."""
    monkeypatch.setattr("tests.fakes.kubelet.LOOK_SECONDS", 3.0)
    run = record(store, "echo done")
    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        assert supervise.follow(run, KubernetesEngine(server.access), store).outcome == "completed"
        until(lambda: "conditions" in server.objects["jobs", "r-2"]["status"])
    assert [item["type"] for item in server.objects["jobs", "r-2"]["status"]["conditions"]] == ["Complete"]


@pytest.mark.parametrize("ends", ["while it runs", "before all have come"])
def test_the_job_of_a_stopped_run_ends_and_so_expires(server: KubeApi, store: Store, tmp_path: Path, ends: str) -> None:
    runs = ends == "while it runs"
    run = record(store, "echo half > $MLBENCH_OUTPUT_DIR/f; echo begun; exec sleep 600")
    (tmp_path / "pods").mkdir()
    (tmp_path / "pods" / "down").write_text("" if runs else "1")
    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        engine = KubernetesEngine(server.access)
        until(lambda: head_of(server))
        if runs:
            assert next(read_log(engine, run, 1, follow=True)).text == b"begun\n"
        engine.cancel(run)
        finished = supervise.follow(run, engine, store)
        until(lambda: "conditions" in server.objects["jobs", "r-2"]["status"])
    job = server.objects["jobs", "r-2"]
    assert [item["type"] for item in job["status"]["conditions"]] == ["Failed"]
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    assert (finished.outcome, [finding.code for finding in finished.findings]) == ("canceled", [])
    assert not runs or (run.folder / "output/rank-1/f").read_text() == "half\n"
    assert find_problems(run.folder) == []


def test_whoever_follows_a_deleted_run_reads_nothing_of_the_next_one_by_its_name(
    server: KubeApi, store: Store, tmp_path: Path
) -> None:
    first = record(store, "echo first; sleep 600")
    second = a_run(tmp_path / "second", argv=("sh", "-c", "echo the second one; sleep 600"))
    with Kubelet(server, tmp_path / "pods"):
        submit(server, first)
        engine = KubernetesEngine(server.access)
        assert next(read_log(engine, first, 0, follow=True)).text == b"first\n"
        server.remove("jobs", "r-2")
        submit(server, second)
        other = KubernetesEngine(server.access)
        assert next(read_log(other, second, 0, follow=True)).text == b"the second one\n"
        assert supervise.follow(first, engine, store).outcome == "lost"
        assert other.look(second).ended is None
        assert (first.folder / "logs/rank-0.log").read_bytes() == b"first\n"
        other.delete(second, force=True)


def test_workers_are_not_lost_while_their_head_stands_still(server: KubeApi, store: Store, tmp_path: Path) -> None:
    """For minutes, as its virtual machine does when it is moved: no worker can give it a sign of life."""
    gate, run = tmp_path / "gate", record(store, f"echo begun; while [ ! -e {tmp_path / 'gate'} ]; do sleep 0.05; done")
    with Kubelet(server, tmp_path / "pods") as kubelet:
        submit(server, run)
        engine = KubernetesEngine(server.access)
        for rank in (0, 1):
            assert next(read_log(engine, run, rank, follow=True)).text == b"begun\n"
        until(lambda: all(worker.phase == "running" for worker in engine.look(run).workers))  # later than its log
        head = until(lambda: head_of(server))
        os.killpg(kubelet.process_of(head), signal.SIGSTOP)
        time.sleep(STILL_SECONDS + 1)
        folder = tmp_path / "pods" / head / "results/run"
        for path in (folder / "head.lock", *folder.glob("nodes/*/.state/beat")):  # as if it had been for minutes
            os.utime(path, (path.stat().st_mtime - 300,) * 2)
        seen = engine.look(run)
        assert (seen.ended, [worker.phase for worker in seen.workers]) == (None, ["running"] * 2)
        os.killpg(kubelet.process_of(head), signal.SIGCONT)
        until(lambda: (folder / "head.lock").stat().st_mtime > time.time() - 10)
        assert engine.look(run).ended is None
        gate.touch()
        assert supervise.follow(run, engine, store).outcome == "completed"


def test_who_never_saw_the_workers_knows_that_the_queue_took_their_machines(
    server: KubeApi, store: Store, tmp_path: Path
) -> None:
    run = record(store, "echo begun; sleep 60", kubernetes=KubernetesOptions(queue="team"))
    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        _let_kueue(server, suspend=True, why=("QuotaReserved", "False", "LocalQueue team doesn't exist"))
        queued = KubernetesEngine(server.access).look(run).findings
        _let_kueue(server, suspend=False)
        assert next(read_log(KubernetesEngine(server.access), run, 0, follow=True)).text == b"begun\n"
        _let_kueue(server, suspend=True, why=("Evicted", "True", "Preempted to accommodate a workload"))
        seen = until(lambda: (seen := KubernetesEngine(server.access).look(run)).ended and seen)
    assert [(finding.code, "LocalQueue team doesn't exist" in finding.summary) for finding in queued] == [
        ("queued", True)
    ]
    assert [finding.code for finding in seen.findings] == ["preempted"]
    assert "Preempted to accommodate a workload" in seen.findings[0].summary


def _let_kueue(server: KubeApi, *, suspend: bool, why: tuple[str, str, str] = ("Admitted", "True", "")) -> None:
    """Let Kueue hold the run's Job back, or release it, for a reason: type, status and message of a condition."""
    job = server.objects["jobs", "r-2"]
    server.groups = {"kueue.x-k8s.io": "v1beta2"}
    metadata = {"name": "job-r-2", "labels": {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}}
    condition = dict(zip(("type", "status", "message"), why, strict=True))
    server.put("workloads", {"metadata": metadata, "status": {"conditions": [condition]}})
    server.put("jobs", {**job, "spec": {**job["spec"], "suspend": suspend}})


@pytest.mark.slow
def test_connections_that_are_cut_are_made_again(server: KubeApi, store: Store, tmp_path: Path) -> None:
    run = record(store, "seq 20000; head -c 3000000 /dev/urandom > $MLBENCH_OUTPUT_DIR/f", workers=1, name="r-2")
    server.faults += [Fault("GET .*/exec", cut=cut) for cut in (100, 3000, 90_000, 500_000, 1_000_000)]
    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        finished = supervise.follow(run, KubernetesEngine(server.access), store)
    assert finished.outcome == "completed"
    assert not server.faults[-1].times
    assert (run.folder / "logs/rank-0.log").read_bytes() == b"".join(b"%d\n" % n for n in range(1, 20001))
    assert (run.folder / "output/rank-0/f").stat().st_size == 3_000_000


@pytest.mark.slow
def test_results_outlive_the_workers_until_a_client_has_them(server: KubeApi, store: Store, tmp_path: Path) -> None:
    run = record(store, "echo kept; echo $RANK > $MLBENCH_OUTPUT_DIR/f")
    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        until(lambda: server.objects["jobs", "r-2"].get("status", {}).get("conditions"))
        for worker in (0, 1):
            server.remove("pods", f"r-2-{worker}-x")
        engine = KubernetesEngine(server.access)
        assert until(lambda: engine.kept_until(run))
        finished = supervise.follow(run, engine, store)
        assert finished.outcome == "completed"
        until(lambda: ("jobs", "r-2-head") not in server.objects)
        assert engine.kept_until(run) is None
    assert (run.folder / "logs/rank-1.log").read_bytes() == b"kept\n"
    assert (run.folder / "output/rank-1/f").read_text() == "1\n"


@pytest.mark.slow
def test_a_head_that_is_gone_for_good_is_a_finding(server: KubeApi, store: Store, tmp_path: Path) -> None:
    run = record(store, "echo lost")
    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        until(lambda: server.objects["jobs", "r-2"].get("status", {}).get("conditions"))
        server.remove("jobs", "r-2-head")
        finished = supervise.follow(run, KubernetesEngine(server.access), store)
    assert "results_lost" in {finding.code for finding in finished.findings}
    assert (run.folder / "logs/rank-0.log").read_bytes() == b"lost\n"  # as the API gives it


def test_what_survivors_still_have_comes_home_without_a_head(server: KubeApi, store: Store, tmp_path: Path) -> None:
    """The head's node went away with a worker's, and there is no room for another head."""
    gate, said = tmp_path / "gate", tmp_path / "pods/r-2-1-x/results/run/nodes/1/logs/rank-1.log"
    waiting = f"echo before; while [ ! -e {gate} ]; do sleep 0.05; done"
    run = record(store, f"{waiting}; printf 'after \\377\\n'; echo $RANK > $MLBENCH_OUTPUT_DIR/f; exec sleep 600")
    with Kubelet(server, tmp_path / "pods") as kubelet:
        submit(server, run)
        engine = KubernetesEngine(server.access)
        assert next(read_log(engine, run, 1, follow=True)).text == b"before\n"
        (tmp_path / "pods/down").write_text("0")
        kubelet.lose(until(lambda: head_of(server)))
        gate.touch()
        until(lambda: b"after" in said.read_bytes())
        kubelet.lose("r-2-0-x")
        finished = supervise.follow(run, engine, store)
    assert finished.outcome == "failed"
    assert {"node_lost", "results_lost"} <= {finding.code for finding in finished.findings}
    assert (run.folder / "logs/rank-1.log").read_bytes() == b"before\nafter \xff\n"
    assert (run.folder / "output/rank-1/f").read_text() == "1\n"
    assert find_problems(run.folder) == []


def test_a_run_without_python_keeps_what_it_printed_until_it_was_canceled(
    server: KubeApi, store: Store, tmp_path: Path
) -> None:
    """Its pods' logs go with the pods, and nobody else has them."""
    run = record(store, "echo $RANK; exec sleep 600")
    with Kubelet(server, tmp_path / "pods", has_python=False):
        submit(server, run)
        until(lambda: len(server.logs) == 3 and all(server.logs[f"r-2-{worker}-x"] for worker in (0, 1)))
        engine = KubernetesEngine(server.access)
        engine.cancel(run)
        assert supervise.follow(run, engine, store).outcome == "canceled"
    assert [(run.folder / f"logs/rank-{rank}.log").read_bytes() for rank in (0, 1)] == [b"0\n", b"1\n"]


def test_an_image_without_python_runs_its_command_and_that_is_said(
    server: KubeApi, store: Store, tmp_path: Path
) -> None:
    script = "echo $RANK of $WORLD_SIZE; echo 'OSError: [Errno 98] Address already in use' >&2; exit $RANK"
    run = record(store, script)
    with Kubelet(server, tmp_path / "pods", has_python=False):
        submit(server, run)
        finished = supervise.follow(run, KubernetesEngine(server.access), store)
    assert finished.outcome == "failed"
    (found,) = [finding for finding in finished.findings if finding.code == "results_lost"]
    assert "Python" in found.summary
    assert "Python" in str(found.hint)
    assert (run.folder / "logs/rank-1.log").read_bytes().startswith(b"1 of 2\n")
    assert "port_in_use" in [finding.code for finding in finished.findings]  # as the log says


def test_what_a_node_says_instead_of_a_log_is_not_taken_for_the_log(
    server: KubeApi, store: Store, tmp_path: Path
) -> None:
    words = "unable to retrieve container logs for containerd://9943"
    run = record(store, f"[ $RANK = 0 ] || echo a line; echo '{words}'; exit 1")
    with Kubelet(server, tmp_path / "pods", has_python=False):
        submit(server, run)
        finished = supervise.follow(run, KubernetesEngine(server.access), store)
    (found,) = [finding for finding in finished.findings if finding.code == "results_lost"]
    assert f"The node could not give the log: {words}" in found.summary
    assert all(words not in str(finding.evidence) for finding in finished.findings)
    assert not (run.folder / "logs/rank-0.log").exists()
    assert (run.folder / "logs/rank-1.log").read_bytes() == b"a line\n"


def test_a_client_that_may_not_read_logs_is_told_so_where_nothing_else_has_them(
    server: KubeApi, store: Store, tmp_path: Path
) -> None:
    run = record(store, "echo a line; exit 1")
    words = 'pods "x" is forbidden: User "me" cannot get resource "pods/log" in API group "" in the namespace "team"'
    server.faults.append(Fault("GET .*/log", times=1000, status=403, message=words))
    with Kubelet(server, tmp_path / "pods", has_python=False):
        submit(server, run)
        finished = supervise.follow(run, KubernetesEngine(server.access), store)
    (found,) = [finding for finding in finished.findings if finding.code == "results_lost"]
    assert "the right to get pods/log" in found.summary
    assert "--verb=get --resource=pods/log" in str(found.hint)


@pytest.mark.parametrize(
    ("status", "words", "hint"),
    [
        (403, 'pods "x" is forbidden: User "me" cannot get resource "pods/exec"', "--resource=pods/exec"),
        (400, 'admission webhook "validate.kyverno.svc-fail" denied the request: exec is not allowed', "exception"),
    ],
)
def test_a_client_that_may_not_exec_is_told_what_to_ask_for(
    server: KubeApi, store: Store, tmp_path: Path, status: int, words: str, hint: str
) -> None:
    run = record(store, "sleep 600")
    server.faults.append(Fault("GET .*/exec", times=1000, status=status, message=words))
    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        observations, codes = watch(KubernetesEngine(server.access), run), set[str]()
        with pytest.raises(CredentialError) as caught:
            codes.update(finding.code for seen in observations for finding in seen.findings)
        assert hint in str(caught.value.hint)
        assert UNREACHABLE not in codes


def test_why_a_head_does_not_start_is_told_while_the_workers_run(server: KubeApi, store: Store) -> None:
    """Else a detached run would lose its results when the workers give up."""
    run = record(store, "sleep 600")
    submit(server, run)
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    for worker in range(2):
        put_pod(server, worker, phase="Running", containerStatuses=[{"name": "main", "state": running}])
    engine = KubernetesEngine(server.access)
    assert engine.look(run).findings == ()
    refused = 'Error creating: pods "r-2-head-" is forbidden: exceeded quota: team, requested: pods=1, used: pods=2'
    head = {"uid": server.objects["jobs", "r-2-head"]["metadata"]["uid"]}
    event = {"metadata": {"name": "e"}, "type": "Warning", "reason": "FailedCreate", "message": refused}
    server.put("events", {**event, "involvedObject": head})
    (found,) = engine.look(run).findings
    assert found.code == "head_missing"
    assert "exceeded quota: team" in found.summary
    assert not found.permanent


def test_workers_that_cannot_connect_to_the_head_are_told(server: KubeApi, store: Store, tmp_path: Path) -> None:
    """As in a namespace whose policy denies everything that is not allowed."""
    run = record(store, "true")
    with Kubelet(server, tmp_path / "pods", head_host="unknown.invalid"):
        submit(server, run)
        engine = KubernetesEngine(server.access)
        until(lambda: {worker.phase for worker in engine.look(run).workers} == {"running"})
        assert engine.look(run).findings == ()
        server.ahead = 120.0
        [finding] = until(lambda: engine.look(run).findings)
        assert (finding.code, finding.permanent) == ("head_not_reached", False)
        assert finding.summary.endswith(": 0, 1 (of 2).")
