"""Following a run on a cluster: how often it is looked at, what is news, when the cluster is silent, and how it ends.

Time passes only where the engine waits.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.engines.kubernetes import engine as kubernetes
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import RequestRejected, ServerUnreachable
from mlbench_cli.model.run import Ending, Observation, Run, WorkerState
from mlbench_cli.model.spec import RunSpec
from tests.fakes.clock import Clock

SPEC = RunSpec("x-2", "far", "kubernetes", "custom", "custom", ("true",), "gloo", 2)
WAITING = Observation(1.0, (WorkerState(0), WorkerState(1)))
RUNNING = Observation(2.0, (WorkerState(0, "running"), WorkerState(1, "running")))
EXITED = Observation(3.0, (WorkerState(0, "succeeded"), WorkerState(1, "succeeded")), ended=Ending.EXITED)
JOB: dict[str, Any] = {"metadata": {"name": "x-2"}, "spec": {}}


class Time(Clock):
    """Also the CPU time of the thread, and the time of day."""

    cpu = 0.0

    def thread_time(self) -> float:
        return self.cpu

    def time(self) -> float:
        return 1e9 + self.now


class Lab:
    """An engine whose observer sees what a test sets, and what was asked of it, with the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, spec: RunSpec = SPEC) -> None:
        self.clock = Time(0.0)
        monkeypatch.setattr(kubernetes, "time", self.clock)
        monkeypatch.setattr("mlbench_cli.model.silence.time", self.clock)
        self.seen: Observation = WAITING
        self.by_worker: dict[int, Any] = {}
        self.said: dict[int, Any] = {}
        self.probed: dict[int, Any] = {}
        self.errors: list[Exception] = []
        self.refreshed: list[float] = []
        self.summaries: list[Mapping[int, Any]] = []
        self.calls: list[str] = []
        self.version = 1
        self.work = 0.0  # CPU seconds of an observation
        self.job: dict[str, Any] | None = JOB
        self.run = Run("abc", spec, folder, "2027-01-15T08:00:00.000Z")
        (folder / "manifests").mkdir()
        api = SimpleNamespace(server_ahead=5.0)
        access = SimpleNamespace(namespace="team", client=lambda **_: nullcontext(api))
        self.engine = KubernetesEngine(cast(Access, access))
        monkeypatch.setattr(self.engine, "_observer", lambda *_: self)
        monkeypatch.setattr(self.engine, "_drop_chaos", lambda *_: self.calls.append("chaos"))
        monkeypatch.setattr(kubernetes, "RunFollower", lambda *_: self.following)
        watch = SimpleNamespace(wait=self.wait, version=self.version)
        self.following: Any = SimpleNamespace(
            watch=watch, pods=lambda: self.by_worker, summaries=lambda: self.said, users=0,
            collector=SimpleNamespace(gaps={}), close=lambda: self.calls.append("close"),
        )  # fmt: skip

    def wait(self, _: int, seconds: float) -> None:
        self.clock.now += seconds
        self.following.watch.version = self.version

    # --- as an observer ---

    def pods(self) -> dict[int, Any]:
        return self.by_worker

    def refresh(self, _: object) -> None:
        self.refreshed.append(self.clock.now)
        if self.errors:
            raise self.errors.pop(0)

    def probe(self, _: object, known: Mapping[int, Any]) -> dict[int, Any]:
        return {worker: summary for worker, summary in self.probed.items() if worker not in known}

    def observation(self, _: object, summaries: Mapping[int, Any]) -> Observation:
        self.clock.cpu += self.work
        self.summaries.append(summaries)
        return replace(self.seen, time=self.clock.now)

    def until(self, second: float) -> list[Observation]:
        """The observations up to that second."""
        found = []
        with closing(self.engine.watch(self.run)) as observations:
            for observation in observations:
                found.append(observation)
                if self.clock.now >= second:
                    break
        return found


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lab:
    return Lab(monkeypatch, tmp_path)


def pod(phase: str) -> dict[str, Any]:
    return {"status": {"phase": phase}}


def test_while_workers_start_the_job_is_looked_at_every_two_seconds(lab: Lab) -> None:
    found = lab.until(6.0)
    # The first look, and that of the watch; then one observation a second without news.
    assert lab.refreshed == [0.0, 0.0, 2.0, 4.0, 6.0]
    assert [observation.time for observation in found] == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert lab.calls == ["close"]


@pytest.mark.parametrize(
    ("phases", "refreshed"),
    [
        (("Running", "Running"), [0.0, 0.0, 10.0, 20.0]),
        (("Running", "Pending"), [0.0, *(2.0 * number for number in range(11))]),
        (("Running",), [0.0, *(2.0 * number for number in range(11))]),
    ],
)
def test_when_all_run_the_job_is_looked_at_every_ten_seconds(
    lab: Lab, phases: tuple[str, ...], refreshed: list[float]
) -> None:
    lab.by_worker = dict(enumerate(map(pod, phases)))
    lab.until(20.0)
    assert lab.refreshed == refreshed


def test_news_is_told_at_once(lab: Lab) -> None:
    """A change of a pod, or a worker's last word."""
    times: list[float] = []
    with closing(lab.engine.watch(lab.run)) as observations:
        for observation in observations:
            times.append(observation.time)
            if len(times) == 2:
                lab.version = 2
            elif len(times) == 3:
                lab.said = {0: {"exit_code": 0}}
            elif len(times) == 5:
                break
    assert times == [0.0, 0.0, 0.25, 0.5, 1.5]


@pytest.mark.parametrize(("listed", "second"), [(4.0, 4.0), (29.75, 29.75), (1e9, 30.0)])
def test_nothing_is_observed_before_the_pods_are_listed(lab: Lab, listed: float, second: float) -> None:
    """Or for half a minute: until then nobody knows whether there are any."""
    lab.following.watch.version = lab.version = 0
    wait = lab.following.watch.wait

    def wait_for_list(version: int, seconds: float) -> None:
        lab.version = 1 if lab.clock.now + seconds >= listed else 0
        wait(version, seconds)

    lab.following.watch.wait = wait_for_list
    with closing(lab.engine.watch(lab.run)) as observations:
        assert [next(observations).time for _ in range(2)] == [0.0, second]
    assert lab.refreshed[:3] == [0.0, 0.0, 2.0]  # the Job is looked at meanwhile


def test_a_silence_before_the_first_list_is_told(lab: Lab) -> None:
    lab.following.watch.version = lab.version = 0
    observations: Iterator[Observation] = lab.engine.watch(lab.run)
    next(observations)
    lab.errors = away(10_000)
    found = []
    while lab.clock.now < 12:
        found.append(next(observations))
    assert [finding.code for finding in found[-1].findings] == ["unreachable"]


def test_an_observation_that_takes_long_is_followed_by_a_rest(lab: Lab) -> None:
    """Fifteen times as long: a thousand pods always have news."""
    lab.work = 0.2
    times = [observation.time for observation in lab.until(9.0)]
    assert times == pytest.approx([0.0, 0.0, 3.25, 6.5, 9.75])


def test_last_words_are_asked_for_once_and_kept(lab: Lab) -> None:
    lab.probed = {0: {"exit_code": 3}}
    lab.said = {1: {"exit_code": 0}}
    lab.until(0.5)
    assert lab.summaries[-1] == {0: {"exit_code": 3}, 1: {"exit_code": 0}}
    lab.said = {0: {"exit_code": 4}, 1: {"exit_code": 0}}  # as its log says in the end
    lab.probed = {}
    lab.until(lab.clock.now + 0.5)
    assert lab.summaries[-1] == lab.said


def test_the_end_is_looked_at_once_more_and_is_the_last_observation(lab: Lab) -> None:
    with closing(lab.engine.watch(lab.run)) as observations:
        assert next(observations).ended is None
        lab.seen = EXITED
        last = list(observations)
    assert [observation.ended for observation in last] == [Ending.EXITED]
    assert len(lab.refreshed) == 3  # the Job may have newer information
    assert lab.calls == ["chaos", "close"]


def test_a_run_that_had_ended_before_is_not_followed(lab: Lab) -> None:
    lab.seen = EXITED
    assert [observation.ended for observation in lab.until(9.0)] == [Ending.EXITED]
    assert (lab.refreshed, lab.calls) == ([0.0], [])


def test_a_run_without_a_job_has_ended(lab: Lab) -> None:
    lab.job = None
    assert [observation.ended for observation in lab.until(9.0)] == [Ending.LOST]


# --- clusters that do not answer ------------------------------------------------------------------------------------


def away(count: int) -> list[Exception]:
    return [ServerUnreachable("No answer.") for _ in range(count)]


def codes(observations: list[Observation]) -> list[list[str]]:
    return [[finding.code for finding in observation.findings] for observation in observations]


def test_a_cluster_that_is_silent_at_first_is_asked_again(lab: Lab) -> None:
    lab.errors = away(3)
    found = lab.until(1.5)
    assert [(len(observation.workers), observation.ended) for observation in found[:3]] == [(2, None)] * 3
    assert [worker.rank for worker in found[0].workers] == [0, 1]
    assert lab.refreshed[:4] == [0.0, 0.5, 1.0, 1.5]  # half a second apart at first


def test_the_last_observation_stands_while_the_cluster_is_silent(lab: Lab) -> None:
    lab.seen = RUNNING
    observations: Iterator[Observation] = lab.engine.watch(lab.run)
    assert [next(observations).time for _ in range(2)] == [0.0, 0.0]
    lab.errors = away(10_000)
    found = []
    while lab.clock.now < 20:
        found.append(next(observations))
    assert [[worker.phase for worker in observation.workers] for observation in found[2:]] == [
        ["running", "running"]
    ] * len(found[2:])
    told = [code for code in codes(found) if code]
    assert told == [["unreachable"]] * len(told)
    assert 8 <= len(told) <= 11  # each second, from ten seconds of silence on
    attempts = [moment for moment in lab.refreshed if moment > 2]
    assert attempts[:4] == [2.5, 3.0, 3.5, 4.0]
    assert attempts[-1] - attempts[-2] >= 1.5  # a tenth of the silence
    lab.errors = []
    while lab.clock.now < 25:
        found.append(next(observations))
    assert codes(found)[-1] == []


def test_a_silence_that_lasts_ends_the_following(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_UNREACHABLE_TIMEOUT", "30s")
    lab.errors = [*away(1000)]
    with pytest.raises(ServerUnreachable, match="No answer"):
        lab.until(100.0)
    assert 30 <= lab.clock.now < 35


def test_what_the_server_refuses_is_an_error(lab: Lab) -> None:
    lab.errors = [RequestRejected("It is invalid.", status=422)]
    with pytest.raises(RequestRejected):
        lab.until(1.0)


# --- networks -------------------------------------------------------------------------------------------------------


class Gate:
    """Keeps when it was asked to go on; refuses the network the `refusing`th time."""

    def __init__(self, refusing: int = 0) -> None:
        self.refusing, self.is_refused = refusing, False
        self.asked: list[tuple[Any, float]] = []
        self.closed = False

    def advance(self, job: Any, _: object, server_time: float) -> None:
        self.asked.append((job, server_time))
        self.is_refused = len(self.asked) == self.refusing

    def close(self) -> None:
        self.closed = True


def with_gate(lab: Lab, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> list[tuple[Any, ...]]:
    """What was stopped."""
    stopped: list[tuple[Any, ...]] = []
    monkeypatch.setattr(lab.engine, "_gate", lambda _: gate)
    monkeypatch.setattr(lab.engine, "_stop", lambda _, run, word: stopped.append((run.name, word)))
    return stopped


def test_the_network_is_shaped_on_the_clusters_time(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    stopped = with_gate(lab, monkeypatch, gate)
    lab.until(1.0)
    assert gate.asked[0] == (JOB, 1e9 + 5.0)
    assert gate.asked[-1] == (JOB, 1e9 + 6.0)
    assert (stopped, gate.closed) == ([], True)


def test_a_run_whose_network_is_refused_is_stopped(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(refusing=2)
    stopped = with_gate(lab, monkeypatch, gate)
    lab.until(1.0)
    assert stopped == [("x-2", Ending.NEVER_STARTED)]
    assert lab.refreshed == [0.0, 0.0, 0.25]  # to see that it was stopped


@pytest.mark.parametrize(
    "job",
    [
        {**JOB, "status": {"conditions": [{"type": "Complete", "status": "True"}]}},
        {"metadata": {"annotations": {"mlbench/stopped": "cancelled 2027"}}},
    ],
)
def test_the_network_of_a_run_that_is_over_is_left_alone(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, job: dict[str, Any]
) -> None:
    gate = Gate()
    with_gate(lab, monkeypatch, gate)
    lab.job = job
    lab.until(1.0)
    assert gate.asked == []


# --- several users --------------------------------------------------------------------------------------------------


def test_what_follows_a_run_is_shared_and_closed_by_the_last(lab: Lab) -> None:
    with lab.engine._following(lab.run) as one:
        with lab.engine._following(lab.run) as other:
            assert (one is other, one.users) == (True, 2)
        assert lab.calls == []
    assert lab.calls == ["close"]
    with lab.engine._following(lab.run) as again:
        assert again.users == 1
