"""How long a command waits for the lock of a run's folder, when it says so, and when it gives up; on a clock of the
tests."""

import fcntl
import time
from pathlib import Path

import pytest

from mlbench_cli.errors import DeadlineError
from mlbench_cli.storage.run_folder import LOCK_SECONDS, RunFolder


class Lock:
    """A lock that another process holds for some seconds, and a clock that only pauses move."""

    def __init__(self, seconds: float) -> None:
        self.now, self.until = 100.0, 100.0 + seconds
        self.pauses: list[float] = []
        self.modes: list[int] = []

    def flock(self, descriptor: int, mode: int) -> None:
        self.modes.append(mode)
        if self.now < self.until:
            raise BlockingIOError

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds if self.now < 110 else 10.0  # long waits in few steps


def hold(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Lock:
    lock = Lock(seconds)
    monkeypatch.setattr(fcntl, "flock", lock.flock)
    monkeypatch.setattr(time, "sleep", lock.sleep)
    monkeypatch.setattr(time, "monotonic", lambda: lock.now)
    return lock


@pytest.mark.parametrize(("seconds", "notices"), [(0.0, 0), (0.9, 0), (1.2, 1), (60.0, 1)])
def test_a_wait_is_reported_once_if_it_takes_more_than_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, notices: int
) -> None:
    lock, said = hold(monkeypatch, seconds), list[str]()
    with RunFolder(tmp_path / "new").lock(notice=said.append):
        assert lock.now >= lock.until
    assert (
        said
        == [f"Another mlbench command is completing this run; waiting for it at most {LOCK_SECONDS:g} s."] * notices
    )
    assert all(0 < pause <= 0.1 for pause in lock.pauses)
    assert set(lock.modes) == {fcntl.LOCK_EX | fcntl.LOCK_NB}


def test_a_wait_without_a_listener_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = hold(monkeypatch, 5.0)
    with RunFolder(tmp_path).lock():
        assert lock.now >= lock.until


@pytest.mark.parametrize(("seconds", "is_given_up"), [(LOCK_SECONDS - 20, False), (LOCK_SECONDS + 20, True)])
def test_a_lock_is_given_up_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, is_given_up: bool
) -> None:
    lock = hold(monkeypatch, seconds)
    if not is_given_up:
        with RunFolder(tmp_path).lock():
            return
    with pytest.raises(DeadlineError) as caught, RunFolder(tmp_path).lock():
        pytest.fail("the lock was given twice")
    assert caught.value.message == f"Another mlbench command has been working on {tmp_path} for {LOCK_SECONDS:g} s."
    assert LOCK_SECONDS <= lock.now - 100 < LOCK_SECONDS + 20
