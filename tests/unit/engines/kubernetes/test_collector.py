"""The collector of logs: when it asks again, what ends a log, what it gives up for, and what another process has done.

Time passes only where the collector waits, so each request is known with its moment.
"""

import errno
import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import urllib3

from mlbench_cli.engines.kubernetes import collector as module
from mlbench_cli.engines.kubernetes.collector import INSTALL_SECONDS, LogCollector
from mlbench_cli.engines.kubernetes.logs import LogFile, position_file, read_position
from mlbench_cli.kube.api import ApiError, ServerUnreachable
from mlbench_cli.kube.watch import GONE
from tests.fakes.clock import Clock

BEGIN = 1000.0
RUNNING = {"running": {"startedAt": "2027-01-15T08:00:00Z"}}
WAITING = {"waiting": {"reason": "ContainerCreating"}}
ENDED = {"terminated": {"exitCode": 0, "startedAt": "2027-01-15T08:00:00Z"}}
NEVER_STARTED = {"terminated": {"exitCode": 128, "reason": "StartError"}}
CUT_OFF = [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]


def line(text: str, second: int = 0) -> bytes:
    return f"2027-01-15T08:00:{second:02d}.000000000Z {text}\n".encode()


def last_word(worker: int = 0) -> bytes:
    return line(f'@mlbench-worker {{"worker":{worker},"exit_code":0}}', 9)


def unreachable(**details: Any) -> ServerUnreachable:
    error = ServerUnreachable("The server does not answer.")
    error.details.update(details)
    return error


def rejected(status: int) -> ApiError:
    return ApiError(f"The server says {status}.", status=status)


class Condition(threading.Condition):
    """Waits by moving the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.now += timeout or 0.0
        return False

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self._clock.now += timeout or 0.0
        return predicate()


class Answer:
    """The lines of a container's log as the API server streams them."""

    def __init__(self, *chunks: bytes | Exception) -> None:
        self.chunks, self.closed = chunks, False

    def stream(self, _: int) -> Iterator[bytes]:
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def close(self) -> None:
        self.closed = True


class Server:
    """Gives the prepared answers in turn, and keeps what was asked for."""

    def __init__(self, clock: Clock, *answers: bytes | Exception) -> None:
        self._clock, self._answers = clock, list(answers)
        self.asked: list[tuple[float, str, Any]] = []
        self.closed = 0

    def stream(self, path: str, **options: Any) -> Answer:
        self.asked.append((round(self._clock.now - BEGIN, 3), path, options["follow"]))
        answer = self._answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return Answer(answer)

    def close(self) -> None:
        self.closed += 1

    @property
    def moments(self) -> list[float]:
        """When it was asked, in seconds."""
        return [moment for moment, _, _ in self.asked]


def pod(state: Any = RUNNING, worker: int = 0, conditions: Any = (), **status: Any) -> dict[str, Any]:
    containers = [{"name": "main", "state": state}]
    return {
        "metadata": {"name": f"r-{worker}", "uid": f"u{worker}", "labels": {}},
        "status": {"phase": "Running", "containerStatuses": containers, "conditions": conditions, **status},
    }


class Lab:
    """A collector of the logs of `pods`, whose folder is empty."""

    def __init__(
        self, folder: Path, clock: Clock, *answers: bytes | Exception, pods: Any = None, ranks: Any = (0,)
    ) -> None:
        self.folder, self.clock, self.is_over = folder, clock, False
        self.server = Server(clock, *answers)
        self.pods: dict[int, Any] = {0: pod()} if pods is None else pods
        access = SimpleNamespace(client=lambda: self.server)
        self.collector = LogCollector(cast(Any, access), "team", folder, ranks, lambda: self.pods, lambda: self.is_over)
        self.collector._changed = Condition(clock)

    def run(self) -> LogCollector:
        """Copy until all is complete or it gives up."""
        self.collector.start()
        self.collector._threads[0].join(20)
        assert not self.collector._threads[0].is_alive()
        return self.collector

    def text(self, rank: int = 0) -> bytes:
        return (self.folder / "logs" / f"rank-{rank}.log").read_bytes()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(BEGIN)
    monkeypatch.setattr(module, "time", found)
    return found


# --- when it asks again ---------------------------------------------------------------------------------------------


def test_a_stream_that_ended_is_reopened_after_a_moment(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, b"", b"", b"", line("one", 1) + last_word())
    assert lab.run().complete(0)
    assert lab.server.moments == [0.0, 0.3, 0.6, 0.9]
    assert {(path, follow) for _, path, follow in lab.server.asked} == {("/api/v1/namespaces/team/pods/r-0/log", True)}
    assert lab.collector.summary(0) == {"worker": 0, "exit_code": 0}
    assert lab.text() == b"one\n"


def test_pauses_double_up_to_five_seconds_and_an_answer_ends_them(tmp_path: Path, clock: Clock) -> None:
    silent = [unreachable() for _ in range(6)]
    lab = Lab(tmp_path, clock, *silent, b"", unreachable(), last_word())
    assert lab.run().complete(0)
    # 0.6, 1.2, 2.4, 4.8, 5 and 5 seconds; 0.3 after the answer; and 0.6 once more.
    assert lab.server.moments == [0.0, 0.6, 1.8, 4.2, 9.0, 14.0, 19.0, 19.3, 19.9]


def test_the_server_says_when_to_ask_again(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, unreachable(retry_after=7.5), unreachable(retry_after=None), last_word())
    lab.run()
    assert lab.server.moments == [0.0, 7.5, 8.7]


@pytest.mark.parametrize(
    "broken", [ConnectionResetError(errno.ECONNRESET, "reset"), urllib3.exceptions.ProtocolError("cut")]
)
def test_a_broken_stream_is_reopened(tmp_path: Path, clock: Clock, broken: Exception) -> None:
    lab = Lab(tmp_path, clock, b"", last_word())
    answers = iter([Answer(line("one"), broken), Answer(line("one"), line("two", 1), last_word())])
    lab.server.stream = lambda *_, **__: next(answers)  # type: ignore[method-assign]
    assert lab.run().failure is None
    assert lab.text() == b"one\ntwo\n"
    assert lab.collector.gaps == {}


def follow(lab: Lab, monkeypatch: pytest.MonkeyPatch, *, threads: int, followed: int) -> set[tuple[str, Any]]:
    monkeypatch.setattr(module, "THREADS", threads)
    monkeypatch.setattr(module, "FOLLOWED", followed)
    lab.run()
    return {(path.split("/")[-2], follow) for _, path, follow in lab.server.asked}


def test_of_many_logs_only_the_first_are_followed(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = {0: pod(), 1: pod(worker=1)}
    # Worker 0, worker 1, then worker 0 again until its end, and worker 1 half a minute later.
    lab = Lab(tmp_path, clock, b"", b"", b"", last_word(), last_word(1), pods=pods, ranks=(0, 1))
    assert follow(lab, monkeypatch, threads=1, followed=1) == {("r-0", True), ("r-1", None)}
    assert lab.server.moments == [0.0, 0.0, 0.3, 0.6, 30.0]


def test_few_logs_are_all_followed(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, clock, b"", last_word())
    assert follow(lab, monkeypatch, threads=1, followed=0) == {("r-0", True)}
    assert lab.server.moments == [0.0, 0.3]


# --- what it gives up for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
def test_missing_rights_are_a_failure_at_once(tmp_path: Path, clock: Clock, status: int) -> None:
    error = rejected(status)
    lab = Lab(tmp_path, clock, error)
    assert lab.run().failure is error
    assert lab.server.moments == [0.0]
    assert not lab.collector.complete(0)


@pytest.mark.parametrize("status", [404, 409, 500])
def test_other_statuses_are_none(tmp_path: Path, clock: Clock, status: int) -> None:
    lab = Lab(tmp_path, clock, rejected(status), last_word())
    assert lab.run().failure is None
    assert lab.collector.complete(0)


def test_a_server_that_has_just_come_back_may_refuse_for_a_minute(tmp_path: Path, clock: Clock) -> None:
    """It rejects everybody until it has read its roles."""
    lab = Lab(tmp_path, clock, unreachable(), *(rejected(403) for _ in range(30)))
    assert lab.run().failure is not None
    *_, before, last = lab.server.moments
    assert before <= 60 < last


def test_a_minute_after_trouble_is_still_within_it(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, unreachable(retry_after=60.0), rejected(403), last_word())
    assert lab.run().failure is None
    assert lab.server.moments == [0.0, 60.0, 61.2]


def test_refusals_are_borne_after_a_broken_stream_too(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock)
    answers: list[Any] = [Answer(ConnectionResetError(errno.ECONNRESET, "reset")), rejected(401), Answer(last_word())]

    def stream(*_: Any, **__: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    lab.server.stream = stream  # type: ignore[method-assign]
    assert lab.run().failure is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_takes_nothing_is_a_failure(tmp_path: Path, clock: Clock, number: int) -> None:
    lab = Lab(tmp_path, clock)
    error = OSError(number, "no")
    lab.server.stream = lambda *_, **__: Answer(error)  # type: ignore[method-assign]
    assert lab.run().failure is error


# --- what ends a log ------------------------------------------------------------------------------------------------


def sweep(lab: Lab) -> LogCollector:
    assert lab.collector.sweep([0]) is True
    return lab.collector


def test_a_pod_that_has_not_started_is_not_asked(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, pods={0: pod(WAITING, phase="Pending")})
    assert not sweep(lab).complete(0)
    assert lab.server.asked == []
    assert not (tmp_path / "logs").exists()


def test_a_missing_pod_has_no_log_once_the_run_is_over(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, pods={})
    assert not sweep(lab).complete(0)
    lab.is_over = True
    assert sweep(lab).complete(0)
    assert (lab.server.asked, lab.text(), lab.collector.gaps) == ([], b"", {})


def test_a_sweep_does_not_wait_for_further_lines(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, line("one"))
    assert not sweep(lab).complete(0)
    assert lab.server.asked == [(0.0, "/api/v1/namespaces/team/pods/r-0/log", None)]
    assert lab.text() == b"one\n"


def test_a_complete_log_is_not_read_again(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, last_word())
    assert sweep(lab).complete(0)
    assert sweep(lab).complete(0)
    assert len(lab.server.asked) == 1


def test_the_log_of_an_ended_pod_is_read_to_its_end(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, line("one") + b"2027-01-15T08:00:01.000000000Z no line end", pods={0: pod(ENDED)})
    assert lab.run().complete(0)
    assert lab.server.asked[0][2] is None  # nothing to follow
    assert (lab.text(), lab.collector.summary(0), lab.collector.gaps) == (b"one\nno line end", None, {})


TROUBLES = {
    "an ended pod that is gone has lost its last lines": (pod(ENDED), rejected(404), True, [0]),
    "an ended pod without a container has lost its last lines": (pod(ENDED), rejected(400), True, [0]),
    "a container that never started wrote nothing": (pod(NEVER_STARTED), rejected(400), True, []),
    "a running pod that is gone may come back": (pod(), rejected(404), False, []),
    "a container that is about to run": (pod(), rejected(400), False, []),
    "a pod that was deleted": ({**pod(), GONE: True}, rejected(404), True, [0]),
    "a pod given up with its node, which answers nothing": (pod(conditions=CUT_OFF), rejected(500), True, [0]),
}


@pytest.mark.parametrize(("given", "error", "complete", "gaps"), TROUBLES.values(), ids=[*TROUBLES])
def test_a_log_that_cannot_be_had(
    tmp_path: Path, clock: Clock, given: Any, error: ApiError, complete: bool, gaps: list[int]
) -> None:
    lab = Lab(tmp_path, clock, error, pods={0: given})
    assert sweep(lab).complete(0) is complete
    assert lab.collector.gaps == ({0: gaps} if gaps else {})
    position = read_position(position_file(tmp_path, 0))
    assert (position is not None) is complete
    if position is not None:
        assert (position.complete, position.gaps, position.pod) == (True, gaps, "u0")


@pytest.mark.parametrize("status", [401, 403, 409, 500])
def test_another_error_of_the_server_is_no_end(tmp_path: Path, clock: Clock, status: int) -> None:
    lab = Lab(tmp_path, clock, rejected(status), pods={0: pod(ENDED)})
    with pytest.raises(ApiError):
        sweep(lab)
    assert not lab.collector.complete(0)


@pytest.mark.parametrize(("conditions", "complete"), [(CUT_OFF, True), ([], False)])
def test_a_stream_that_breaks_ends_the_log_only_where_the_node_is_given_up(
    tmp_path: Path, clock: Clock, conditions: Any, complete: bool
) -> None:
    lab = Lab(tmp_path, clock, pods={0: pod(ENDED, conditions=conditions)})
    lab.server.stream = lambda *_, **__: Answer(line("one"), ConnectionResetError())  # type: ignore[method-assign]
    assert sweep(lab).complete(0) is complete
    assert lab.collector.gaps == ({0: [4]} if complete else {})


# --- several processes ----------------------------------------------------------------------------------------------


def locked(folder: Path) -> Any:
    """Another process's lock."""
    (folder / ".state").mkdir(parents=True, exist_ok=True)
    file = open(folder / ".state" / "logs.lock", "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def test_what_another_process_has_copied_is_read_from_the_folder(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, ranks=(0, 4))
    assert (lab.collector.summary(1), lab.collector.complete(1), lab.collector.gaps) == (None, False, {})
    with closing(LogFile(tmp_path, 1, 4)) as log:
        log.take("2027-01-15T08:00:00Z", b"one")
        log.note_gap()
        log.save()
    assert (lab.collector.complete(1), lab.collector.gaps) == (False, {1: [4]})
    with closing(LogFile(tmp_path, 1, 4)) as log:
        log.take("2027-01-15T08:00:01Z", b'@mlbench-worker {"worker":1,"exit_code":3}')
        log.finish()
    assert lab.collector.summary(1) == {"worker": 1, "exit_code": 3}
    position_file(tmp_path, 4).unlink()
    assert lab.collector.complete(1)  # and stays so
    assert not lab.collector.complete(0)


def test_a_sweep_leaves_the_logs_to_the_process_that_copies(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, last_word())
    with locked(tmp_path):
        assert lab.collector.sweep([0]) is False
    assert lab.server.asked == []
    assert sweep(lab).complete(0)
    assert sweep(lab)  # it has released its own lock


def test_the_next_process_waits_for_its_turn_and_skips_what_is_complete(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    with closing(LogFile(tmp_path, 0, 0)) as log:
        log.finish()
    lab = Lab(tmp_path, clock, last_word(1), pods={0: pod(), 1: pod(worker=1)}, ranks=(0, 4))
    lock = locked(tmp_path)
    tries: list[float] = []
    wait = lab.collector._sleep

    def sleep(seconds: float) -> bool:
        tries.append(seconds)
        if len(tries) == 3:
            lock.close()
        return wait(seconds)

    lab.collector._sleep = sleep  # type: ignore[method-assign]
    lab.run()
    assert tries == [0.3, 0.3, 0.3]
    assert [path.split("/")[-2] for _, path, _ in lab.server.asked] == ["r-1"]
    assert lab.collector.sweep([0, 1])  # its lock is free again


def test_the_process_that_copies_knows_its_own_progress(tmp_path: Path, clock: Clock) -> None:
    """It does not read the folder, which need not exist before."""
    lab = Lab(tmp_path / "new" / "run", clock, b"", last_word())
    stream = lab.server.stream
    found: list[Any] = []

    def look(path: str, **options: Any) -> Answer:
        with closing(LogFile(lab.folder, 0, 0)) as log:
            log.note_gap()
            log.save()
        found.append((lab.collector.gaps, lab.collector.summary(0), lab.collector.gaps))
        position_file(lab.folder, 0).unlink()
        return stream(path, **options)

    lab.server.stream = look  # type: ignore[method-assign]
    lab.run()
    assert found == [({}, None, {})] * 2
    with closing(LogFile(lab.folder, 1, 9)) as log:
        log.note_gap()
        log.save()
    lab.collector._ranks = [0, 9]
    assert not lab.collector.complete(1)
    assert lab.collector.gaps == {1: [0]}  # now others may copy, and it looks again


def test_a_collector_that_is_closed_waits_no_longer(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, last_word())
    with locked(tmp_path):
        lab.collector.close()
        lab.run()
    assert lab.server.asked == []
    assert lab.server.closed == 1


def test_a_closed_collector_copies_nothing_more(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock, last_word(), pods={0: pod(ENDED)})
    lab.collector.close()
    assert not sweep(lab).complete(0)
    assert lab.server.asked == []


class Copy:
    """One reading of a log."""

    stops = 0

    def stop(self) -> None:
        self.stops += 1


def test_closing_stops_all_readings(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock)
    copies = Copy(), Copy()
    lab.collector._copying.update({cast(Any, copies[0]): 0, cast(Any, copies[1]): 1})
    lab.collector.close()
    assert [copy.stops for copy in copies] == [1, 1]


# --- a log that comes from elsewhere --------------------------------------------------------------------------------


@pytest.mark.parametrize(("truncated", "gaps"), [(False, {}), (True, {0: [8]})])
def test_a_whole_log_is_installed_in_place_of_the_copy(
    tmp_path: Path, clock: Clock, truncated: bool, gaps: dict[int, list[int]]
) -> None:
    lab = Lab(tmp_path, clock, rejected(404), pods={0: pod(conditions=CUT_OFF)}, ranks=(0, 4))
    with closing(LogFile(tmp_path, 0, 0)) as log:
        log.note_gap()
        log.save()
    assert lab.collector.summary(0) is None
    assert lab.collector.gaps == {0: [0]}
    copies = Copy(), Copy()
    lab.collector._copying.update({cast(Any, copies[0]): 0, cast(Any, copies[1]): 1})
    part = tmp_path / "part"
    part.write_bytes(b"one\ntwo\n")
    assert lab.collector.install(0, part, truncated, {"exit_code": 3}) is True
    assert (lab.text(), lab.collector.summary(0), lab.collector.gaps) == (b"one\ntwo\n", {"exit_code": 3}, gaps)
    assert lab.collector.complete(0)
    assert [copy.stops for copy in copies] == [1, 0]
    assert lab.collector.sweep([0])
    assert lab.server.asked == []


def test_installing_waits_a_minute_for_another_process(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock)
    part = tmp_path / "part"
    part.write_bytes(b"one\n")
    with locked(tmp_path):
        assert lab.collector.install(0, part, False, {}) is False
    assert INSTALL_SECONDS <= clock.now - BEGIN < INSTALL_SECONDS + 0.31
    assert part.exists()
    assert not lab.collector.complete(0)


def test_installing_goes_on_when_the_other_process_has_ended(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock)
    part = tmp_path / "part"
    part.write_bytes(b"one\n")
    lock = locked(tmp_path)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        lock.close()

    clock.sleep = sleep  # type: ignore[method-assign]
    assert lab.collector.install(0, part, False, {}) is True
    assert clock.now - BEGIN == pytest.approx(0.3)


def test_the_process_that_copies_needs_no_second_lock(tmp_path: Path, clock: Clock) -> None:
    lab = Lab(tmp_path, clock)
    lab.collector._leading = True
    part = tmp_path / "part"
    part.write_bytes(b"one\n")
    with locked(tmp_path):  # its own
        assert lab.collector.install(0, part, False, {}) is True
    assert clock.now == BEGIN
    assert lab.collector.complete(0)
