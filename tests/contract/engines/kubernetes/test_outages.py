"""A cluster that does not answer for a while is no end of a run, and a node that does not answer is not the cluster."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.follow import UNREACHABLE, read_log, watch
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.errors import CredentialError, UnreachableError
from mlbench_cli.kube.api import NodeUnreachable, ServerUnreachable
from mlbench_cli.model.run import Ending, Outcome, Run
from mlbench_cli.model.spec import KubernetesOptions
from mlbench_cli.runs import supervise
from mlbench_cli.storage.store import Store
from tests.contract.engines.kubernetes.test_engine import RUNNING, a_run, put_pod, submit, terminated_pod
from tests.fakes.kube_api import Fault, KubeApi
from tests.fakes.kubelet import Kubelet


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    monkeypatch.setattr("mlbench_cli.kube.api.RETRY_SECONDS", 0.5)
    monkeypatch.setattr("mlbench_cli.engines.kubernetes.head.WATCH_RETRY_SECONDS", 0.2)
    monkeypatch.setattr("mlbench_cli.engines.follow.SHORT_SECONDS", 0.2)
    with KubeApi() as server:
        yield server


def start_run(server: KubeApi, folder: Path) -> Run:
    """A run whose two workers run."""
    run = a_run(folder)
    submit(server, run)
    for worker in (0, 1):
        put_pod(server, worker, **RUNNING)
    return run


def codes(observation: object) -> list[str]:
    return [finding.code for finding in observation.findings]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("code", ["pod_deleted", "drained"])
def test_a_pod_that_is_taken_away_is_no_canceled_run(server: KubeApi, tmp_path: Path, code: str) -> None:
    """Its agent only knows that it got SIGTERM."""
    run = a_run(tmp_path / "run", argv=("sleep", "600"))
    pod, is_gone = f"{run.name}-1-x", False
    with Kubelet(server, tmp_path / "pods") as kubelet:
        submit(server, run)
        with closing(watch(KubernetesEngine(server.access), run)) as observations:
            for seen in observations:
                if not is_gone and all(worker.phase == "running" for worker in seen.workers):
                    kubelet.evict(pod) if code == "drained" else server.remove("pods", pod)
                    is_gone = True
    assert (seen.ended, codes(seen)) == (Ending.FAILED, [code])


def test_a_pod_that_is_taken_away_before_the_others_are_there_ends_the_run(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", argv=("sleep", "600"))
    is_gone = False
    (tmp_path / "pods").mkdir()
    (tmp_path / "pods" / "down").write_text("1")
    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        with closing(watch(KubernetesEngine(server.access), run)) as observations:
            for seen in observations:
                if not is_gone and seen.workers[0].reason == "waiting for the other machines":
                    server.remove("pods", f"{run.name}-0-x")
                    is_gone = True
    assert (seen.ended, codes(seen)) == (Ending.FAILED, ["pod_deleted"])


def test_a_run_is_followed_through_an_outage_of_the_api_server_and_its_log_is_whole(
    server: KubeApi, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    script = f"echo before; while [ ! -e {gate} ]; do sleep 0.05; done; echo after; echo $RANK > $MLBENCH_OUTPUT_DIR/f"
    run = a_run(tmp_path / "run", argv=("sh", "-c", script), kubernetes=KubernetesOptions(collect="all"))
    engine = KubernetesEngine(server.access)
    is_silent = False
    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        with closing(watch(engine, run)) as observations:
            for seen in observations:
                if not server.is_down and not is_silent and (run.folder / "logs/rank-1.log").exists():
                    server.is_down = True
                elif UNREACHABLE in codes(seen) and not is_silent:
                    is_silent = True
                    assert seen.ended is None
                    assert "retrying for 15 min" in seen.findings[0].summary
                    gate.touch()  # the run ends meanwhile
                    time.sleep(3)
                    server.is_down = False
        assert is_silent
        assert (seen.ended, codes(seen)) == (Ending.EXITED, [])
        engine.head(run).fetch()
    assert [(run.folder / f"logs/rank-{rank}.log").read_bytes() for rank in (0, 1)] == [b"before\nafter\n"] * 2
    assert [(run.folder / f"output/rank-{rank}/f").read_text() for rank in (0, 1)] == ["0\n", "1\n"]


@pytest.mark.slow
def test_a_follower_of_a_log_reads_all_of_it_beyond_an_outage_and_is_told(server: KubeApi, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"echo one; while [ ! -e {gate} ]; do sleep 0.05; done; echo two"
    run = a_run(tmp_path / "run", workers=1, name="r-2", argv=("sh", "-c", script))
    told: list[str] = []

    def come_back(text: str) -> None:
        told.append(text)
        gate.touch()
        server.is_down = False

    lines = []
    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        for line in read_log(KubernetesEngine(server.access), run, 0, follow=True, report=come_back):
            lines.append(line.text)
            if line.text == b"one\n":
                server.is_down = True
    assert lines == [b"one\n", b"two\n"]
    assert len(told) == 1
    assert "does not answer" in told[0]


def test_a_silence_beyond_the_limit_ends_the_following_but_not_the_run(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path)
    submit(server, run)
    put_pod(server, 0, **RUNNING)
    monkeypatch.setenv("MLBENCH_UNREACHABLE_TIMEOUT", "1s")
    server.is_down = True
    with pytest.raises(UnreachableError) as caught:
        list(watch(KubernetesEngine(server.access), run))
    assert caught.value.exit_code == 10


def test_a_server_that_starts_and_refuses_everybody_is_waited_for(server: KubeApi, tmp_path: Path) -> None:
    """An API server answers 403 until it has read its roles."""
    run = a_run(tmp_path)
    submit(server, run)
    put_pod(server, 0, **terminated_pod(0))
    put_pod(server, 1, **terminated_pod(0))
    for worker in (0, 1):
        server.write(f"r-2-{worker}-x")
    server.faults += [Fault("GET .*/jobs/r-2", times=3, status=503), Fault("GET .*/jobs/r-2", times=2, status=403)]
    seen = list(watch(KubernetesEngine(server.access), run))[-1]
    assert seen.ended is Ending.EXITED


def test_a_server_that_was_restarted_between_two_requests_may_refuse_at_first(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has seen it away: the first that is seen of it is a 403."""
    monkeypatch.setattr("mlbench_cli.engines.kubernetes.observe.SLOW_POLL", 0.5)
    run = start_run(server, tmp_path)
    is_refused = False
    with closing(watch(KubernetesEngine(server.access), run)) as observations:
        for seen in observations:
            if not is_refused and all(worker.phase == "running" for worker in seen.workers):
                is_refused = True
                server.faults.append(Fault("GET .*/jobs/r-2", times=2, status=403))
            elif is_refused and not server.faults[-1].times:
                for worker in (0, 1):
                    put_pod(server, worker, **terminated_pod(0))
                    server.write(f"r-2-{worker}-x")
    assert seen.ended is Ending.EXITED


@pytest.mark.parametrize(("status", "least", "most"), [({"phase": "Pending"}, 5, 1000), (RUNNING, 1, 3)])
def test_the_job_is_asked_about_often_only_until_all_workers_run(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], least: int, most: int
) -> None:
    monkeypatch.setattr("mlbench_cli.engines.kubernetes.observe.QUICK_POLL", 0.05)
    monkeypatch.setattr("mlbench_cli.engines.kubernetes.observe.SLOW_POLL", 1000.0)
    run = a_run(tmp_path)
    submit(server, run)
    for worker in (0, 1):
        put_pod(server, worker, **status)
    before = sum(count for request, count in server.requests.items() if request.endswith("/jobs/r-2"))
    with closing(watch(KubernetesEngine(server.access), run)) as observations:
        for _ in range(8):
            next(observations)
    after = sum(count for request, count in server.requests.items() if request.endswith("/jobs/r-2"))
    assert least <= after - before <= most


def test_a_refusal_without_an_outage_is_one(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    submit(server, run)
    server.faults.append(Fault("GET .*/jobs/r-2", times=1000, status=403))
    with pytest.raises(CredentialError):
        list(watch(KubernetesEngine(server.access), run))


@pytest.mark.slow
def test_results_are_fetched_when_the_server_is_back(server: KubeApi, tmp_path: Path) -> None:
    """The server goes away between the end of the run and the transfer of its results."""
    (tmp_path / "home").mkdir()
    store = Store(tmp_path / "home")
    run = store.record_run(a_run(tmp_path, workers=1, argv=("echo", "a line")).spec)
    told: list[str] = []

    def notice(text: str) -> None:
        told.append(text)
        server.is_down = False

    def go_away(_: object) -> None:
        if server.objects["jobs", "r-2"].get("status", {}).get("conditions"):
            server.is_down = True
            threading.Timer(4.0, lambda: setattr(server, "is_down", False)).start()

    with Kubelet(server, tmp_path / "pods"):
        submit(server, run)
        finished = supervise.follow(run, KubernetesEngine(server.access), store, notice=notice, report=go_away)
    assert finished.outcome is Outcome.COMPLETED
    assert (run.folder / "logs/rank-0.log").read_bytes() == b"a line\n"
    store.close()


def test_a_node_that_does_not_answer_is_told_from_a_server_that_does_not(server: KubeApi) -> None:
    server.put("pods", {"metadata": {"name": "p"}, "spec": {"nodeName": "n1"}, "status": {}})
    server.dead_nodes.add("n1")
    with server.access.client() as api:
        with pytest.raises(NodeUnreachable) as caught:
            api.stream("/api/v1/namespaces/default/pods/p/log", read_seconds=5)
        assert not isinstance(caught.value, UnreachableError)
        with pytest.raises(NodeUnreachable):
            api.open_websocket("/api/v1/namespaces/default/pods/p/exec", [("command", "true")], ["v4.channel.k8s.io"])
        server.is_down = True
        with pytest.raises(ServerUnreachable):
            api.stream("/api/v1/namespaces/default/pods/p/log", read_seconds=5)
