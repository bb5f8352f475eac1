"""The copy of a log on disk: its position, where it resumes, and what is taken out of it."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.logs import (
    LogFile,
    Position,
    _parse_stamp,
    _split,
    last_lines,
    log_gap,
    position_file,
    read_position,
    samples_file,
    times_file,
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


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_position_is_on_disk_and_is_read_again(tmp_path: Path) -> None:
    written = write(tmp_path, (stamp(1), b"one"), (stamp(2), b"two"), (stamp(2), b"three"))
    position = read_position(position_file(tmp_path, RANK))
    assert position == written
    assert position is not None
    assert (position.offset, position.pod, position.last, position.newest) == (14, "u", stamp(2), stamp(2))
    assert position.counts == {"2027-01-15T08:00:01": 1, "2027-01-15T08:00:02": 2}
    assert (position.complete, position.begun, position.gaps, position.summary) == (False, False, [], None)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"offset": 1, "unknown": 2}', '"text"'])
def test_a_position_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    assert read_position(tmp_path / "nothing") is None
    (tmp_path / "position").write_text(text)
    assert read_position(tmp_path / "position") is None


def test_what_was_written_after_the_position_is_cut_off(tmp_path: Path) -> None:
    write(tmp_path, (stamp(1), b"one"))
    with open(tmp_path / "logs" / f"rank-{RANK}.log", "ab") as file:
        file.write(b"half a li")
    write(tmp_path, (stamp(2), b"two"))
    assert text_of(tmp_path) == b"one\ntwo\n"


@pytest.mark.parametrize("missing", ["log", "samples"])
def test_a_copy_that_lacks_something_is_made_anew(tmp_path: Path, missing: str) -> None:
    sample = b'@mlbench-sample {"worker": 3, "sample": {"cpu": 1}}'
    write(tmp_path, (stamp(1), b"one"), (stamp(1), sample))
    path = tmp_path / "logs" / f"rank-{RANK}.log" if missing == "log" else samples_file(tmp_path, RANK)
    path.unlink()
    with closing(LogFile(tmp_path, WORKER, RANK)) as log:
        assert log.position == Position()
    assert text_of(tmp_path) == b""


def test_only_the_last_seconds_are_counted(tmp_path: Path) -> None:
    position = write(tmp_path, *((stamp(second), b"x") for second in range(10)))
    assert list(position.counts) == [f"2027-01-15T08:00:{second:02d}" for second in (6, 7, 8, 9)]


def test_a_new_pod_has_a_new_log_that_is_appended(tmp_path: Path) -> None:
    write(tmp_path, (stamp(5), b"one"))
    same = write(tmp_path, pod="u")
    assert (same.last, same.counts) == (stamp(5), {"2027-01-15T08:00:05": 1})
    other = write(tmp_path, (stamp(1), b"two"), pod="v")
    assert (other.last, other.newest, other.counts) == (stamp(1), stamp(1), {"2027-01-15T08:00:01": 1})
    assert text_of(tmp_path) == b"one\ntwo\n"


# --- where it resumes ------------------------------------------------------------------------------------------------


def resume(folder: Path, exact: bool, *lines: tuple[str, bytes]) -> tuple[str | None, int, str]:
    write(folder, *lines)
    with closing(LogFile(folder, WORKER, RANK)) as log:
        return log.resume(exact)


def test_an_empty_copy_begins_at_the_beginning(tmp_path: Path) -> None:
    assert resume(tmp_path, True) == (None, 0, "")
    assert resume(tmp_path, False) == (None, 0, "")


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


def test_without_the_lines_that_it_has_a_copy_resumes_after_its_newest_line(tmp_path: Path) -> None:
    lines = ((stamp(5, "900000000"), b"x"), (stamp(5, "800000000"), b"y"))
    assert resume(tmp_path, False, *lines) == ("2027-01-15T08:00:05Z", 0, stamp(5, "900000000"))


# --- what workers say in their logs ----------------------------------------------------------------------------------


def test_first_and_last_words_are_no_lines_of_the_log(tmp_path: Path) -> None:
    end = said(exit_code=3, reason="exited")
    position = write(tmp_path, (stamp(1), said(began=1)), (stamp(2), b"one"), (stamp(3), b"half" + end))
    assert text_of(tmp_path) == b"one\nhalf"
    assert (position.begun, position.summary) == (True, {"worker": WORKER, "exit_code": 3, "reason": "exited"})
    assert position.gaps == []


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


def test_a_gap_is_noted_once_in_each_place(tmp_path: Path) -> None:
    with closing(LogFile(tmp_path, WORKER, RANK)) as log:
        log.take(stamp(1), b"one")
        log.note_gap()
        log.note_gap()
        log.take(stamp(2), b"two")
        log.note_gap()
        assert log.position.gaps == [4, 8]


def test_samples_have_a_file_of_their_own(tmp_path: Path) -> None:
    sample = b'@mlbench-sample {"worker": 3, "sample": {"cpu": 1.5}}'
    position = write(tmp_path, (stamp(1), b"half" + sample), (stamp(1), b" a line"))
    assert text_of(tmp_path) == b"half a line\n"
    assert rows(samples_file(tmp_path, RANK)) == [{"cpu": 1.5}]
    assert position.sampled == len(b'{"cpu":1.5}\n')


def test_the_size_of_a_log_is_noted_once_a_second(tmp_path: Path) -> None:
    moment = 1_800_000_000.0  # 2027-01-15T08:00:00Z
    with closing(LogFile(tmp_path, WORKER, RANK)) as log:
        for second, text in ((1, b"one"), (1, b"two"), (2, b"three"), (4, b"four")):
            log.take(stamp(second, "500000000"), text)
        log.finish()
        log.finish()
        assert log.position.complete
        assert log.position.timed == times_file(tmp_path, RANK).stat().st_size
    row = {"kind": "log", "rank": RANK}
    assert rows(times_file(tmp_path, RANK)) == [
        {"time": moment + 1.5, **row, "log_bytes": 8},
        {"time": moment + 2.5, **row, "log_bytes": 14},
        {"time": moment + 4.5, **row, "log_bytes": 19},
    ]


@pytest.mark.parametrize(("truncated", "gaps"), [(True, [9]), (False, [])])
def test_a_whole_log_takes_the_place_of_the_copy(tmp_path: Path, truncated: bool, gaps: list[int]) -> None:
    write(tmp_path, (stamp(1), b"one"))
    (tmp_path / "part").write_bytes(b"one\ntwo..")
    with closing(LogFile(tmp_path, WORKER, RANK)) as log:
        log.note_gap()
        log.replace(tmp_path / "part", truncated, {"exit_code": 0})
        log.take(stamp(2), b"!")
    position = read_position(position_file(tmp_path, RANK))
    assert position is not None
    assert (position.offset, position.complete, position.begun, position.gaps) == (9, True, True, gaps)
    assert position.summary == {"exit_code": 0}
    assert text_of(tmp_path) == b"one\ntwo..!\n"


def test_a_replacement_without_a_last_word_keeps_the_known_one(tmp_path: Path) -> None:
    write(tmp_path, (stamp(1), said(exit_code=3)))
    (tmp_path / "part").write_bytes(b"")
    with closing(LogFile(tmp_path, WORKER, RANK)) as log:
        log.replace(tmp_path / "part", False, {})
        assert log.position.summary == {"worker": WORKER, "exit_code": 3}


# --- small things ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b"2027-01-15T08:00:05.1Z text and more", ("2027-01-15T08:00:05.1Z", b"text and more")),
        (b"2027-01-15T08:00:05Z ", ("2027-01-15T08:00:05Z", b"")),
        (b"2027-01-15T08:00:05 text", ("", b"2027-01-15T08:00:05 text")),  # without a zone it is none of the kubelet's
        (b"2027-01-15 08:00:05Z text", ("", b"2027-01-15 08:00:05Z text")),
        (b"yyyy-01-15T08:00:05Z text", ("", b"yyyy-01-15T08:00:05Z text")),
        (b"failed to try resolving symlinks in path", ("", b"failed to try resolving symlinks in path")),
        (b"", ("", b"")),
    ],
)
def test_a_line_is_split_into_time_stamp_and_text(line: bytes, parts: tuple[str, bytes]) -> None:
    assert _split(line) == parts


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (stamp(5, "250000000"), 1_800_000_005.25),
        ("2027-01-15T09:00:05+01:00", 1_800_000_005.0),
        ("", None),
        ("x", None),
    ],
)
def test_time_stamps_in_seconds(text: str, seconds: float | None) -> None:
    assert _parse_stamp(text) == seconds


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(50)) + b"\xff")
    assert last_lines(path, 2) == "49\n\ufffd"
    assert last_lines(path).splitlines()[0] == "11"
    assert last_lines(tmp_path / "nothing") == ""


@pytest.mark.parametrize(
    ("gaps", "late", "words", "evidence"),
    [
        (
            {1: [0, 7]},
            (),
            "The log of worker 1 has gaps: the node had already deleted them, or is gone.",
            {"missing_before_byte": {"logs/rank-2.log": [0, 7]}},
        ),
        (
            {},
            (0,),
            "The log of worker 0 has gaps: its last lines did not arrive in time.",
            {"missing_before_byte": {}, "unfinished": ["logs/rank-0.log"]},
        ),
        (
            {2: [5], 1: [3]},
            (0, 1),
            "The log of worker 0 has gaps: its last lines did not arrive in time. (And of 2 others.)",
            {
                "missing_before_byte": {"logs/rank-2.log": [3], "logs/rank-4.log": [5]},
                "unfinished": ["logs/rank-0.log", "logs/rank-2.log"],
            },
        ),
    ],
)
def test_the_finding_on_gaps(gaps: dict[int, list[int]], late: tuple[int, ...], words: str, evidence: Any) -> None:
    (finding,) = log_gap(gaps, [0, 2, 4], late)
    assert (finding.code, finding.summary, finding.evidence) == ("log_gap", words, evidence)
    assert list(finding.evidence["missing_before_byte"]) == sorted(finding.evidence["missing_before_byte"])


def test_evidence_of_gaps_names_a_hundred_workers_at_most() -> None:
    assert log_gap({}, []) == []
    (finding,) = log_gap({number: [0] for number in range(150)}, range(150), range(150))
    assert "(And of 149 others.)" in finding.summary
    assert [len(finding.evidence[key]) for key in ("missing_before_byte", "unfinished")] == [100, 100]
