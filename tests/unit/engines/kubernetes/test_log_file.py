"""The copy of a log on disk: its position, where it resumes, and what is taken out of it."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.logs import (
    LogFile,
    Position,
    read_position,
    samples_file,
)

WORKER, RANK = 3, 6


def stamp(second: int, fraction: str = "000000000") -> str:
    return f"2027-01-15T08:00:{second:02d}.{fraction}Z"


def write(folder: Path, *lines: tuple[str, bytes], pod: str = "u", force: bool = True) -> Position:
    with closing(LogFile(folder, WORKER, RANK)) as log:
        log.start(pod)
        for moment, text in lines:
            log.take(moment, text)
        log.save(force)
        return log.position


def said(**fields: Any) -> bytes:
    return b"@mlbench-worker " + json.dumps({"worker": WORKER, **fields}).encode()


def text_of(folder: Path) -> bytes:
    return (folder / "logs" / f"rank-{RANK}.log").read_bytes()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"offset": 1, "unknown": 2}', '"text"'])
def test_a_position_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    assert read_position(tmp_path / "nothing") is None
    (tmp_path / "position").write_text(text)
    assert read_position(tmp_path / "position") is None


# --- where it resumes ------------------------------------------------------------------------------------------------


def resume(folder: Path, exact: bool, *lines: tuple[str, bytes]) -> tuple[str | None, int, str]:
    write(folder, *lines)
    with closing(LogFile(folder, WORKER, RANK)) as log:
        return log.resume(exact)


@pytest.mark.parametrize(
    ("moments", "since", "skip"),
    [
        # Half a second before the newest line, because the two streams may be out of order by so much.
        ([stamp(5, "700000000")], "2027-01-15T08:00:05Z", 1),
        ([stamp(5, "500000000")], "2027-01-15T08:00:05Z", 1),
        ([stamp(5, "400000000")], "2027-01-15T08:00:04Z", 1),
        ([stamp(3), stamp(4), stamp(5, "400000000")], "2027-01-15T08:00:04Z", 2),
        ([stamp(5, "900000000"), stamp(5, "800000000")], "2027-01-15T08:00:05Z", 2),
        (["2027-01-15T08:00:05Z"], "2027-01-15T08:00:04Z", 1),
        (["2027-01-15T09:00:05.9+01:00"], "2027-01-15T09:00:05+01:00", 1),
    ],
)
def test_a_copy_resumes_at_a_second_and_skips_what_it_has(
    tmp_path: Path, moments: list[str], since: str, skip: int
) -> None:
    assert resume(tmp_path, True, *((moment, b"x") for moment in moments)) == (since, skip, "")


# --- what workers say in their logs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b'@mlbench-worker {"worker": 4, "exit_code": 0}',
        b'@mlbench-worker {"worker": 3}',
        b'@mlbench-worker {"worker": 3, "exit_code"',
        b'@mlbench-sample {"worker": 4, "sample": {"cpu": 1}}',
        b'@mlbench-sample {"worker": 3, "sample": 5}',
        b'@mlbench-sample {"worker": 3}',
    ],
)
def test_what_is_not_this_workers_word_stays_in_the_log(tmp_path: Path, line: bytes) -> None:
    position = write(tmp_path, (stamp(1), line))
    assert text_of(tmp_path) == line + b"\n"
    assert (position.summary, position.begun, position.sampled) == (None, False, 0)
    assert samples_file(tmp_path, RANK).read_bytes() == b""


@pytest.mark.parametrize(
    ("lines", "gaps"),
    [
        ([said(began=1), said(exit_code=0, told_begin=True)], []),
        ([said(exit_code=0, told_begin=True)], [0]),  # the node had deleted the first lines
        ([said(exit_code=0)], []),  # of a worker.sh that does not say when it begins
    ],
)
def test_a_log_whose_beginning_was_not_seen_has_a_gap(tmp_path: Path, lines: list[bytes], gaps: list[int]) -> None:
    assert write(tmp_path, *((stamp(1), line) for line in lines)).gaps == gaps


# --- small things ----------------------------------------------------------------------------------------------------
