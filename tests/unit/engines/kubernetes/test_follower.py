"""Following one run: its pods by worker, whether more will come, last words, and a cluster that is silent."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.engines.kubernetes import follower as module
from mlbench_cli.engines.kubernetes.follower import RunFollower
from mlbench_cli.engines.kubernetes.manifests import STOPPED_ANNOTATION
from mlbench_cli.engines.kubernetes.workers import INDEX_LABEL
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import AccessDenied, ApiError, ObjectNotFound, ServerUnreachable
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import RunSpec
from tests.fakes.clock import Clock

RUNNING: dict[str, Any] = {"metadata": {"name": "r-2"}, "spec": {}, "status": {"active": 2}}
COMPLETE = {**RUNNING, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
FAILED = {**RUNNING, "status": {"conditions": [{"type": "Failed", "status": "True"}]}}
STOPPED = {**RUNNING, "metadata": {"name": "r-2", "annotations": {STOPPED_ANNOTATION: "cancelled by somebody"}}}


class Watch:
    """The pods as they are now, and what was asked of the watch."""

    def __init__(self) -> None:
        self.version, self.listed, self.reads = 1, 0.0, 0
        self.found: list[Any] = []
        self.silent_since: float | None = None
        self.trouble: Any = None
        self.failure: Exception | None = None
        self.calls: list[str] = []

    def pods(self) -> list[Any]:
        self.reads += 1
        return self.found

    def relist(self) -> None:
        self.calls.append("relist")

    def wait(self, version: int, seconds: float) -> None:
        assert (version, seconds) == (-1, 0)
        if self.failure:
            raise self.failure

    def close(self) -> None:
        self.calls.append("close watch")


class Collector:
    """Logs whose last words a test sets."""

    def __init__(self, calls: list[str]) -> None:
        self.said: dict[int, Any] = {}
        self.failure: Exception | None = None
        self.calls = calls

    def start(self) -> None:
        self.calls.append("start")

    def summary(self, worker: int) -> Any:
        return self.said.get(worker)

    def wait(self, seconds: float) -> None:
        self.calls.append(f"wait {seconds:g}")

    def close(self) -> None:
        self.calls.append("close collector")


class Lab:
    """A follower of a run with two workers. `jobs` are what looks at its Job give, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.watch, self.clock = Watch(), Clock(1000.0)
        self.collector = Collector(self.watch.calls)
        self.jobs: list[Any] = []
        self.asked: list[float] = []
        self.made: list[Any] = []
        monkeypatch.setattr(module, "time", self.clock)
        monkeypatch.setattr("mlbench_cli.model.silence.time", self.clock)
        monkeypatch.setattr(module, "read_job", self._read_job)
        monkeypatch.setattr(module, "PodWatch", lambda *given: self._make(given, self.watch))
        monkeypatch.setattr(module, "LogCollector", lambda *given: self._make(given[:4], self.collector))
        api = SimpleNamespace(close=lambda: self.watch.calls.append("close api"))
        self.access = cast(Access, SimpleNamespace(client=lambda: api))
        run = Run("abc", RunSpec("r-2", "far", "kubernetes", "custom", "custom", ("true",), "gloo", 2), folder, "2027")
        self.follower = RunFollower(self.access, "team", run, [0, 4])

    def _make(self, given: Any, made: Any) -> Any:
        self.made.append(given)
        return made

    def _read_job(self, _: Any, namespace: str, spec: RunSpec) -> Any:
        assert (namespace, spec.name) == ("team", "r-2")
        self.asked.append(self.clock.now - 1000)
        found = self.jobs.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lab:
    return Lab(monkeypatch, tmp_path)


def test_the_pods_and_logs_of_the_run_are_followed(lab: Lab, tmp_path: Path) -> None:
    assert lab.made == [(lab.access, "team", "mlbench/run=r-2"), (lab.access, "team", tmp_path, [0, 4])]
    assert lab.watch.calls == ["start"]
    assert (lab.follower.workers, lab.follower.users) == (2, 0)


def pod(index: str, created: str) -> dict[str, Any]:
    return {"metadata": {"name": created, "labels": {INDEX_LABEL: index}, "creationTimestamp": created}}


def test_the_newest_pod_of_each_worker_is_found_once_for_each_change(lab: Lab) -> None:
    lab.watch.found = [pod("1", "2027-02"), pod("1", "2027-01"), pod("0", "2027-01")]
    assert {worker: found["metadata"]["name"] for worker, found in lab.follower.pods().items()} == {
        0: "2027-01",
        1: "2027-02",
    }
    lab.watch.found = []
    assert len(lab.follower.pods()) == 2
    assert lab.watch.reads == 1
    lab.watch.version = 2
    assert lab.follower.pods() == {}


@pytest.mark.parametrize("job", [COMPLETE, FAILED, STOPPED, ObjectNotFound("gone", status=404)])
def test_a_run_is_over_once_its_pods_were_listed_after_its_end(lab: Lab, job: Any) -> None:
    lab.jobs = [job]
    lab.watch.listed = 999.0
    assert not lab.follower.over()
    assert lab.watch.calls == ["start", "relist"]
    for listed, over in ((1000.0, False), (1000.1, True)):
        lab.watch.listed = listed
        assert lab.follower.over() is over
    assert lab.asked == [0.0]  # the Job was asked once


@pytest.mark.parametrize("answer", [RUNNING, ServerUnreachable("away"), AccessDenied("no", status=403)])
def test_a_job_that_goes_on_is_looked_at_every_five_seconds(lab: Lab, answer: Any) -> None:
    lab.jobs = [answer, answer, COMPLETE]
    for second in (0.0, 1.0, 4.9, 5.0, 9.0, 10.0, 10.1):
        lab.clock.now = 1000.0 + second
        lab.watch.listed = lab.clock.now - 0.05
        assert lab.follower.over() is (second == 10.1)
    assert lab.asked == [0.0, 5.0, 10.0]


def test_other_errors_of_the_server_are_not_hidden(lab: Lab) -> None:
    lab.jobs = [ApiError("It is confused.", status=500)]
    with pytest.raises(ApiError, match="confused"):
        lab.follower.over()


def test_last_words_by_worker(lab: Lab) -> None:
    assert lab.follower.summaries() == {}
    lab.collector.said = {1: {"exit_code": 0}, 2: {"exit_code": 1}}
    assert lab.follower.summaries() == {1: {"exit_code": 0}}


def test_waiting_ends_with_what_ended_the_watch_or_the_copying(lab: Lab) -> None:
    lab.follower.wait(3.0)
    assert lab.watch.calls == ["start", "wait 3"]
    lab.collector.failure = OSError("The disk is full.")
    with pytest.raises(OSError, match="disk"):
        lab.follower.wait(3.0)
    lab.watch.failure = ApiError("It says no.", status=403)
    with pytest.raises(ApiError, match="says no"):
        lab.follower.wait(3.0)
    assert lab.watch.calls == ["start", "wait 3"]


def test_a_silent_cluster_is_told_once_and_borne_for_a_while(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    lab.watch.silent_since, lab.watch.trouble = 1000.0, ServerUnreachable("No answer.")
    for second in (1.0, 9.9, 10.0, 20.0):
        lab.clock.now = 1000.0 + second
        lab.follower.wait(1.0, told.append)
        assert len(told) == (second >= 10)
    assert told[0].startswith("No answer.")
    # An answer ends the silence; the next one is told again.
    lab.watch.silent_since = lab.watch.trouble = None
    lab.follower.wait(1.0, told.append)
    lab.watch.silent_since, lab.watch.trouble = 1020.0, ServerUnreachable("No answer again.")
    lab.clock.now = 1031.0
    lab.follower.wait(1.0, told.append)
    assert len(told) == 2
    lab.clock.now = 1020.0 + 900.0
    with pytest.raises(ServerUnreachable, match="again"):
        lab.follower.wait(1.0, told.append)


def test_closing_ends_everything_the_copying_first(lab: Lab) -> None:
    lab.follower.close()
    assert lab.watch.calls == ["start", "close collector", "close watch", "close api"]
