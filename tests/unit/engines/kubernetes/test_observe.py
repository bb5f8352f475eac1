"""One observation after another: what is asked of the cluster, what is remembered, and what lasts."""

import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.engines.kubernetes import observe as observing
from mlbench_cli.engines.kubernetes.keeper import Keeper, KeptResults, KeptWorker
from mlbench_cli.engines.kubernetes.logs import LogFile
from mlbench_cli.engines.kubernetes.observe import RunObserver, _parse_marker, known_gaps, known_summaries
from mlbench_cli.engines.kubernetes.workers import INDEX_LABEL, worker_states
from mlbench_cli.kube.api import AccessDenied, ApiError
from mlbench_cli.model.run import Ending, Finding, Run
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from tests.unit.engines.kubernetes.memory_api import MemoryApi
from tests.unit.engines.kubernetes.test_worker_states import MOMENT, RUNNING, SCHEDULED, a_pod, ended, is_

JOB, EVENTS, NODES = "/apis/batch/v1/namespaces/team/jobs/x-2", "/api/v1/namespaces/team/events", "/api/v1/nodes"
SPEC = RunSpec("x-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2, processes_per_worker=2, timeout=60.0)


class Cluster(MemoryApi):
    """A cluster with the run's Job, whose pods have logs."""

    def __init__(self, **logs: str) -> None:
        super().__init__({JOB: {"metadata": {"name": "x-2"}, "spec": {}}, EVENTS: {"items": []}, NODES: {"items": []}})
        self.logs = logs
        self.tails: list[tuple[str, int]] = []

    def stream(self, path: str, **params: Any) -> BytesIO:
        """The log of a pod."""
        name = path.split("/")[-2]
        assert (params["container"], params["limitBytes"]) == ("main", 64 << 10)
        self.tails.append((name, params["tailLines"]))
        return BytesIO(self.logs.get(name, "").encode())


def observer(cluster: MemoryApi, folder: Path, keeper: Any = None, **options: Any) -> RunObserver:
    spec = RunSpec(**{**vars(SPEC), "kubernetes": KubernetesOptions(**options)})
    run = Run("abc", spec, folder, "2027-01-15T08:00:00Z")
    return RunObserver(cluster.api, "team", run, [0, 2], cast(Keeper, keeper))


# --- what is asked ---------------------------------------------------------------------------------------------------


def asked(cluster: MemoryApi) -> list[str]:
    """The lists that were asked for, besides the Job."""
    short = {f"GET {EVENTS}": "events", f"GET {NODES}": "nodes"}
    found = [short[call] for call in cluster.calls if call in short]
    cluster.calls.clear()
    return found


def on(node: str | None, pod: dict[str, Any]) -> dict[str, Any]:
    return {**pod, "spec": {"nodeName": node} if node else {}}


def test_events_and_nodes_are_asked_for_only_when_they_can_matter(tmp_path: Path) -> None:
    cluster = Cluster()
    seen = observer(cluster, tmp_path)
    pending, running = a_pod(None, "Pending", (SCHEDULED,)), a_pod(RUNNING)

    def look(*pods: dict[str, Any]) -> list[str]:
        seen.refresh(dict(enumerate(pods)))
        return asked(cluster)

    assert look(on("n1", running)) == ["events", "nodes"]  # a pod is missing
    assert look(on("n1", running), on("n2", pending)) == ["events", "nodes"]
    # A pod without a node: what an autoscaler says of it is asked for, too.
    assert look(on("n1", running), on(None, pending)) == ["events", "events", "events", "nodes"]
    # All run: the nodes once more for their places in the network, then nothing.
    assert look(on("n1", running), on("n2", running)) == ["nodes"]
    assert look(on("n1", running), on("n2", running)) == []
    silent = a_pod(RUNNING, conditions=(is_("Ready", "False"),))
    assert look(on("n1", running), on("n2", silent)) == ["nodes"]
    assert look(on("n1", running), on("n2", a_pod(ended(3), "Failed"))) == ["nodes"]
    assert look(on("n1", running), on("n2", a_pod(ended(0), "Succeeded"))) == []


def test_nodes_that_are_known_are_not_asked_for_again(tmp_path: Path) -> None:
    cluster = Cluster()
    labels = {"topology.kubernetes.io/zone": "z"}
    cluster.objects[NODES] = {"items": [{"metadata": {"name": name, "labels": labels}} for name in ("n1", "n2")]}
    seen = observer(cluster, tmp_path)
    seen.refresh({0: on("n1", a_pod(RUNNING))})
    asked(cluster)
    pods = {0: on("n1", a_pod(RUNNING)), 1: on("n2", a_pod(RUNNING))}
    seen.refresh(pods)
    assert asked(cluster) == []
    assert seen.observation(pods, {}).topology == {"n1": {"zone": "z"}, "n2": {"zone": "z"}}


def test_a_run_without_a_job_asks_for_nothing_more(tmp_path: Path) -> None:
    cluster = Cluster()
    del cluster.objects[JOB]
    seen = observer(cluster, tmp_path)
    seen.refresh({})
    assert (seen.job, asked(cluster)) == (None, [])


@pytest.mark.parametrize(
    ("error", "times"), [(AccessDenied("forbidden", status=403), 1), (ApiError("busy", status=500), 2)]
)
def test_a_list_that_may_not_be_read_is_asked_for_once(tmp_path: Path, error: ApiError, times: int) -> None:
    cluster = Cluster()
    cluster.answers[f"GET {NODES}"] = [error, error]
    seen = observer(cluster, tmp_path)
    for _ in range(2):
        seen.refresh({})
    assert asked(cluster).count("nodes") == times


def test_a_list_that_may_not_be_read_leaves_the_others(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.answers[f"GET {EVENTS}"] = [AccessDenied("forbidden", status=403)]
    seen = observer(cluster, tmp_path)
    for _ in range(2):
        seen.refresh({})
    assert asked(cluster) == ["events", "nodes", "nodes"]


# --- last words ------------------------------------------------------------------------------------------------------

SAID = '@mlbench-worker {"worker": 0, "exit_code": 0, "held": true}'


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (SAID, {"worker": 0, "exit_code": 0, "held": True}),
        (f"half a line{SAID}", {"worker": 0, "exit_code": 0, "held": True}),
        ('@mlbench-worker {"worker": 1, "exit_code": 0}', None),
        ('@mlbench-worker {"worker": 0}', None),
        ('@mlbench-worker {"worker": 0, "exit', None),
        ("exit_code 0", None),
        ("", None),
    ],
)
def test_a_last_word_is_found_in_the_last_line_of_a_log(text: str, summary: dict[str, Any] | None) -> None:
    assert _parse_marker(text, 0) == summary


def test_running_workers_that_hold_are_asked_for_their_last_word(tmp_path: Path) -> None:
    cluster = Cluster(x=SAID)
    pods = {0: a_pod(RUNNING), 1: a_pod(RUNNING)}
    assert observer(cluster, tmp_path).probe(pods, {}) == {0: {"worker": 0, "exit_code": 0, "held": True}}
    assert cluster.tails == [("x", 1)]  # only the holder's
    observer(cluster, tmp_path, collect="all").probe(pods, {})
    assert len(cluster.tails) == 3
    observer(cluster, tmp_path).probe(pods, {0: {"exit_code": 0}})
    observer(cluster, tmp_path).probe({0: a_pod(ended(0), "Succeeded")}, {})
    observer(cluster, tmp_path).probe({}, {})
    assert len(cluster.tails) == 3


def test_a_log_that_cannot_be_read_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()

    def fail(path: str, **_: Any) -> BytesIO:
        raise ApiError("gone", status=404)

    monkeypatch.setattr(cluster, "stream", fail)
    assert observer(cluster, tmp_path).probe({0: a_pod(RUNNING)}, {}) == {}


KEPT = KeptResults("k", None, {0: KeptWorker({"exit_code": 3}), 1: KeptWorker({}), 7: KeptWorker({"exit_code": 0})})


@pytest.mark.parametrize(
    ("pods", "summaries", "is_over", "found"),
    [
        ({}, {}, True, {0: {"exit_code": 3}}),
        ({}, {}, False, {}),
        ({}, {0: {"exit_code": 0}}, True, {}),
        ({0: a_pod(RUNNING, gone=True)}, {}, True, {0: {"exit_code": 3}}),
        ({0: a_pod(ended(0), "Succeeded")}, {}, True, {}),
    ],
)
def test_the_keeper_has_the_last_words_of_workers_that_are_gone(
    tmp_path: Path, pods: Any, summaries: Any, is_over: bool, found: Any
) -> None:
    cluster = Cluster()
    conditions = [is_("Failed")] if is_over else []
    cluster.objects[JOB] = {"metadata": {"name": "x-2"}, "spec": {}, "status": {"conditions": conditions}}
    keeper = SimpleNamespace(read=lambda patience: KEPT)
    seen = observer(cluster, tmp_path, keeper)
    seen.refresh(pods)
    assert seen.probe(pods, summaries) == found


def test_a_keeper_that_does_not_answer_is_asked_again_later(tmp_path: Path) -> None:
    def fail(patience: float) -> None:
        raise ApiError("busy", status=500)

    cluster = Cluster()
    cluster.objects[JOB]["status"] = {"conditions": [is_("Complete")]}
    seen = observer(cluster, tmp_path, SimpleNamespace(read=fail))
    seen.refresh({})
    assert seen.probe({}, {}) == {}


def test_what_was_copied_of_logs_has_last_words_and_gaps(tmp_path: Path) -> None:
    run = Run("abc", SPEC, tmp_path, "2027")
    log = LogFile(tmp_path, 1, 2)
    log.note_gap()
    log.take("2027-01-15T08:00:05Z", b'@mlbench-worker {"worker": 1, "exit_code": 3}')
    log.save()
    log.close()
    assert known_summaries(run, [0, 2]) == {1: {"worker": 1, "exit_code": 3}}
    (finding,) = known_gaps(run, [0, 2])
    assert finding.evidence == {"missing_before_byte": {"logs/rank-2.log": [0]}}
    assert (known_summaries(run, [0]), known_gaps(run, [0])) == ({}, [])


# --- observations ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [MOMENT]
    monkeypatch.setattr(observing, "time", SimpleNamespace(time=lambda: now[0]))
    return now


def test_workers_are_named_by_their_first_ranks(tmp_path: Path, clock: list[float]) -> None:
    seen = observer(Cluster(), tmp_path)
    labels = [{INDEX_LABEL: str(worker)} for worker in (0, 1)]
    pods = {0: a_pod(RUNNING, labels=labels[0]), 1: a_pod(ended(3, "Error"), "Failed", labels=labels[1])}
    seen.refresh(pods)
    found = seen.observation(pods, {})
    assert [(worker.rank, worker.phase) for worker in found.workers] == [(0, "running"), (2, "failed")]
    assert (found.first_failed, found.ended, found.time) == (2, None, MOMENT)
    assert [finding.code for finding in found.findings] == ["rank_crashed"]


def test_a_failure_ends_the_run_when_the_others_had_time_to_end(tmp_path: Path, clock: list[float]) -> None:
    seen = observer(Cluster(), tmp_path)
    pods = {0: a_pod(RUNNING), 1: a_pod(ended(3, "Error"), "Failed")}
    seen.refresh(pods)
    clock[0] = MOMENT + 50.5 + 75
    assert seen.observation(pods, {}).ended is None
    clock[0] += 0.1
    assert seen.observation(pods, {}).ended is Ending.FAILED


@pytest.mark.parametrize(("code", "seconds"), [("unschedulable", 60.0), ("image_not_found", 15.0)])
def test_a_problem_is_permanent_when_it_has_lasted(tmp_path: Path, code: str, seconds: float) -> None:
    seen = observer(Cluster(), tmp_path)
    problem, passing = Finding(code, "x", permanent=True), Finding("pending", "y")

    def is_permanent(now: float) -> list[bool]:
        return [finding.permanent for finding in seen._confirm_lasting([problem, passing], now)]

    assert is_permanent(100.0) == [False, False]
    assert is_permanent(100.0 + seconds - 0.1) == [False, False]
    assert is_permanent(100.0 + seconds) == [True, False]
    assert seen._confirm_lasting([], 200.0) == []
    assert is_permanent(201.0) == [False, False]  # it had gone in between


def test_the_ends_of_logs_are_read_once_of_the_first_and_three_more(tmp_path: Path) -> None:
    cluster = Cluster(**{f"p{number}": f"line of {number}" for number in range(6)})
    names = ("x-6", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 6)
    seen = RunObserver(cluster.api, "team", Run("abc", RunSpec(*names), tmp_path, "2027"), range(6))
    pods = {number: a_pod(ended(3), "Failed") for number in range(6)}
    for number, pod in pods.items():
        pod["metadata"]["name"] = f"p{number}"
    states = worker_states(6, pods, {})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("copied\n")
    found = seen._last_lines(states, 4, pods)
    assert found == {4: "line of 4", 0: "line of 0", 1: "copied", 2: "line of 2"}
    assert cluster.tails == [("p4", 40), ("p0", 40), ("p2", 40)]
    assert seen._last_lines(states, 4, pods) == found
    assert len(cluster.tails) == 3


def test_a_run_that_a_client_has_stopped_needs_no_diagnosis(tmp_path: Path, clock: list[float]) -> None:
    cluster = Cluster()
    cluster.objects[JOB]["metadata"]["annotations"] = {"mlbench/stopped": "cancelled 2027"}
    seen = observer(cluster, tmp_path)
    pods = {0: a_pod(ended(3), "Failed")}
    seen.refresh(pods)
    found = seen.observation(pods, {})
    assert (found.ended, found.findings) == (Ending.CANCELLED, ())


def test_a_deadline_and_a_refused_network_are_findings(tmp_path: Path, clock: list[float]) -> None:
    cluster = Cluster()
    note = {"state": "refused", "time": 1, "holder": "me", "problem": "slow"}
    cluster.objects[JOB]["metadata"]["annotations"] = {"mlbench/network": json.dumps(note)}
    cluster.objects[JOB]["status"] = {"startTime": "2027-01-15T07:58:59Z"}
    seen = observer(cluster, tmp_path)
    seen.refresh({})
    found = seen.observation({}, {})
    assert found.ended is Ending.DEADLINE
    assert [finding.code for finding in found.findings] == ["network_not_as_asked", "deadline"]
