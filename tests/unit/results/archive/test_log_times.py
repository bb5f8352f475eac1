"""When the lines of a log were written: exact for events, bounded by samples for the others, unknown without either."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbench_cli.results.archive.log_times import LogSizes, read_log_sizes, split_blocks
from task_images import contract


def event(moment: float, rank: int = 0) -> bytes:
    record = {"v": contract.VERSION, "event": "phase", "rank": rank, "time": moment, "phase": "training"}
    return contract.PREFIX.encode() + json.dumps(record).encode() + b"\n"


def times(lines: list[bytes], sizes: LogSizes | None = None) -> list[tuple[float | None, bool]]:
    """Time and exactness of each line."""
    blocks = list(split_blocks(0, lines, sizes))
    assert [line for block in blocks for line in block.lines] == lines
    return [(block.time, block.is_exact) for block in blocks for _ in block.lines]


def test_a_line_was_written_before_the_sample_that_found_it() -> None:
    assert times([b"a\n", b"b\n", b"c\n", b"d\n"], LogSizes([4, 6], [10.0, 11.0])) == [
        (10.0, False),
        (10.0, False),
        (11.0, False),
        (11.0, False),  # behind the last sample: not before the line above it
    ]


def test_an_event_has_its_own_time_and_bounds_the_lines_before_it() -> None:
    found = times([b"a\n", event(10.25), b"b\n", event(10.5), b"c\n"], LogSizes([1000], [11.0]))
    assert found == [(10.25, False), (10.25, True), (10.5, False), (10.5, True), (11.0, False)]


def test_without_samples_lines_have_the_time_of_the_event_before() -> None:
    assert times([b"a\n", event(10.25), b"b\n"]) == [(None, False), (10.25, True), (10.25, False)]
    assert times([b"a\n", b"b"]) == [(None, False), (None, False)]


@pytest.mark.parametrize("claim", [event(99.0), event(1e17), event(-5.0), event(10.5, rank=3), b"@mlbench {nonsense\n"])
def test_what_cannot_be_is_no_time(claim: bytes) -> None:
    assert times([b"a\n", claim, b"b\n"], LogSizes([1000], [11.0])) == [(11.0, False)] * 3


def test_sizes_come_from_samples_of_either_form(tmp_path: Path) -> None:
    path = tmp_path / "resources.jsonl"
    rows = [
        {"time": 10.0, "rank": 0, "log_bytes": 5},
        {"time": "1970-01-01T00:00:11.000Z", "rank": 0, "log_bytes": 9},
        {"time": 11.5, "rank": 0, "log_bytes": 9},
        {"time": 12.0, "rank": 1, "log_bytes": 3},
        {"time": "soon", "rank": 1, "log_bytes": 4},
        {"time": 13.0, "rank": 1},
        {"time": 14.0, "rank": True, "log_bytes": "x"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn "log_bytes"')
    assert read_log_sizes(tmp_path) == {0: LogSizes([5, 9], [10.0, 11.0]), 1: LogSizes([3], [12.0])}
    assert read_log_sizes(tmp_path / "nothing") == {}


lines = st.lists(
    st.one_of(st.sampled_from([b"a\n", b"bc\n", b"@mlbench {\n", b"\xff"]), st.builds(event, st.floats(0, 100))),
    max_size=20,
)
samples = st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 100)), max_size=6).map(sorted)


@given(lines, samples)
def test_no_line_is_lost_and_times_never_go_back(text: list[bytes], marks: list[tuple[int, float]]) -> None:
    sizes = LogSizes([offset for offset, _ in marks], sorted(time for _, time in marks))
    known = [time for time, _ in times(text, sizes) if time is not None]
    assert known == sorted(known)
