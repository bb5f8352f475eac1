"""Following a growing file: whole lines as they come, each with the place behind it."""

import time
from pathlib import Path

import pytest

from mlbench_cli.engines.base import Cursor
from mlbench_cli.engines.follow import Silence, follow_log, read_log
from mlbench_cli.errors import NotFoundError, UnreachableError
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import RunSpec
from tests.fakes.engine import FakeEngine

SPEC = RunSpec("demo-1", "c", "local", "custom", "custom", ("true",), "gloo", 1)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "logs").mkdir()
    return Run("1", SPEC, tmp_path, "2026-01-01T00:00:00Z")


def test_lines_come_whole_and_once(run: Run) -> None:
    path, steps = run.folder / "logs" / "rank-0.log", [b"one\ntw", b"o\nth", b"r", b"ee", b"", b"\nlast"]

    def write() -> None:
        with open(path, "ab") as file:
            file.write(steps.pop(0))

    lines = [(line.text, line.cursor.offset) for line in follow_log(run, 0, None, lambda: not steps, write)]
    assert lines == [(b"one\n", 4), (b"two\n", 8), (b"three\n", 14), (b"last", 18)]


def test_a_line_without_its_end_is_given_when_the_rank_has_ended(run: Run) -> None:
    (run.folder / "logs" / "rank-0.log").write_bytes(b"one\ntwo\nlast")
    assert [line.text for line in follow_log(run, 0, Cursor(4), lambda: False)] == [b"two\n"]
    assert [line.text for line in follow_log(run, 0, Cursor(4), lambda: True)] == [b"two\n", b"last"]
    assert [line.text for line in follow_log(run, 0, Cursor(10), lambda: True)] == [b"st"]


def test_what_was_written_just_before_the_end_was_noticed_is_given(run: Run) -> None:
    path = run.folder / "logs" / "rank-0.log"
    path.write_bytes(b"one\n")
    looks = 0

    def has_ended() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            with open(path, "ab") as file:
                file.write(b"last\n")
        return looks >= 2

    assert [line.text for line in follow_log(run, 0, None, has_ended, lambda: None)] == [b"one\n", b"last\n"]


def test_what_is_not_there(run: Run) -> None:
    assert list(follow_log(run, 0, None, lambda: True)) == []
    with pytest.raises(NotFoundError, match="no rank 1, only 0 to 0"):
        read_log(FakeEngine(), run, 1)


def test_each_silence_of_a_cluster_is_told_once() -> None:
    silence, told = Silence(), list[str]()
    for _ in range(2):
        silence.tolerate(UnreachableError("It does not answer."), begun=time.monotonic() - 60)
        silence.tell(told.append)
        silence.tell(told.append)
        silence.end()
    assert len(told) == 2
