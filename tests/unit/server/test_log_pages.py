"""Pages of a log: their ends, streams, and lines that are shown or left out."""

from pathlib import Path

import pytest

from mlbench_cli.server.log_pages import MAX_LINE, Stream, has_streams, read_page
from mlbench_cli.storage.run_folder import STATE_FOLDER, STDERR_INDEX
from task_images.contract import format_event

METRIC = format_event({"v": 1, "event": "metric", "rank": 0, "time": 1.0, "name": "loss", "value": 0.5})


def write_log(folder: Path, data: bytes, index: bytes | None = None) -> Path:
    path = folder / "logs" / "rank-0.log"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    if index is not None:
        (folder / STATE_FOLDER).mkdir(exist_ok=True)
        (folder / STATE_FOLDER / f"{STDERR_INDEX}0").write_bytes(index)
    return path


def test_a_missing_log_is_an_empty_page(tmp_path: Path) -> None:
    page = read_page(tmp_path / "logs" / "rank-0.log", 5)
    assert page.to_dict() == {"offset": 0, "end": 0, "size": 0, "before": None, "lines": (), "cut": None}


def test_a_page_ends_with_a_line(tmp_path: Path) -> None:
    path = write_log(tmp_path, b"one\ntwo\nthree\n")
    first = read_page(path, 0, limit=9)
    assert (first.lines, first.end, first.before) == (("one", "two"), 8, None)
    second = read_page(path, first.end, limit=9)
    assert (second.lines, second.end, second.size, second.before) == (("three",), 14, 14, 0)


def test_an_offset_inside_a_line_begins_at_the_next_line(tmp_path: Path) -> None:
    path = write_log(tmp_path, b"one\ntwo\nthree\n")
    assert [read_page(path, offset).lines[0] for offset in (0, 1, 3, 4, 5)] == ["one", "two", "two", "two", "three"]
    beyond = read_page(path, 99)
    assert (beyond.offset, beyond.end, beyond.lines) == (14, 14, ())


def test_the_two_bytes_of_a_windows_line_end_stay_together(tmp_path: Path) -> None:
    path = write_log(tmp_path, b"one\r\ntwo\r\n")
    first = read_page(path, 0, limit=4)
    assert (first.lines, first.end) == (("one",), 5)
    assert read_page(path, 4).lines == ("two",)


def test_where_an_incomplete_last_line_begins_is_known(tmp_path: Path) -> None:
    """So that a page that follows the log replaces it instead of repeating it."""
    path = write_log(tmp_path, b"one\ntw")
    assert (read_page(path, 0).lines, read_page(path, 0).cut) == (("one", "tw"), 4)
    path.write_bytes(b"one\ntwo\n")
    assert read_page(path, 0).cut is None
    assert read_page(path, 0, limit=4).cut is None
    path.write_bytes(b"one\n" + METRIC.encode())
    assert (read_page(path, 0).lines, read_page(path, 0).cut) == (("one",), None)


def test_lines_with_events_are_shown_only_raw(tmp_path: Path) -> None:
    path = write_log(tmp_path, f"one\n{METRIC}\nprogress {METRIC}\n@mlbench is a word\n".encode())
    assert read_page(path, 0).lines == ("one", "progress", "@mlbench is a word")
    assert read_page(path, 0, raw=True).lines == ("one", METRIC, f"progress {METRIC}", "@mlbench is a word")


def test_a_long_line_is_cut_and_its_length_is_shown(tmp_path: Path) -> None:
    path = write_log(tmp_path, b"x" * MAX_LINE + b"\n" + b"y" * (MAX_LINE + 1) + b"\n")
    whole, cut = read_page(path, 0).lines
    assert whole == "x" * MAX_LINE
    assert cut == "y" * MAX_LINE + f"… ({MAX_LINE + 1} characters)"


@pytest.mark.parametrize(
    ("stream", "lines"),
    [
        (Stream.BOTH, ("out 1", "err 1", "out 2", "err 2")),
        (Stream.OUTPUT, ("out 1", "out 2")),
        (Stream.ERRORS, ("err 1", "err 2")),
    ],
)
def test_a_log_is_split_into_its_streams(tmp_path: Path, stream: Stream, lines: tuple[str, ...]) -> None:
    path = write_log(tmp_path, b"out 1\nerr 1\nout 2\nerr 2\n", b"6 6\n18 6\n")
    page = read_page(path, 0, stream=stream)
    assert (page.lines, page.size) == (lines, 6 * len(lines))
    assert read_page(path, 6, stream=stream).lines == lines[1:]
    assert read_page(path, -1, stream=stream).lines == lines
    assert has_streams(path)


def test_without_an_index_everything_is_standard_output(tmp_path: Path) -> None:
    path = write_log(tmp_path, b"one\ntwo\n")
    assert read_page(path, 0, stream=Stream.OUTPUT).lines == ("one", "two")
    assert read_page(path, 0, stream=Stream.ERRORS).lines == ()
    assert not has_streams(path)


def test_an_entry_of_the_index_that_is_still_being_written_is_ignored(tmp_path: Path) -> None:
    path = write_log(tmp_path, b"out 1\nerr 1\nout 2\n", b"6 6\nx y\n12")
    assert read_page(path, 0, stream=Stream.ERRORS).lines == ("err 1",)
    assert read_page(path, 0, stream=Stream.OUTPUT).lines == ("out 1", "out 2")


def test_a_line_that_is_longer_than_a_page_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_cli.server.log_pages.MAX_LINE_BYTES", 45)
    path = write_log(tmp_path, b"x" * 50 + b"\ntwo\nthree\n")
    page = read_page(path, 0, limit=10)
    assert (page.lines, page.offset, page.end) == (("x" * 50,), 0, 51)
    assert read_page(path, page.end, limit=9).lines == ("two",)


def test_a_line_that_is_too_long_is_cut_into_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_cli.server.log_pages.MAX_LINE_BYTES", 20)
    path = write_log(tmp_path, bytes(range(97, 123)) * 3 + b"\nend\n")
    first = read_page(path, 0, limit=10)
    assert (first.end, len(first.lines[0])) == (30, 30)
    second = read_page(path, first.end, limit=10)
    assert (second.offset, second.end) == (30, 60)
    assert (first.lines[0] + second.lines[0])[:28] == "abcdefghijklmnopqrstuvwxyzab"
    third = read_page(path, second.end, limit=10)
    assert (third.offset, third.end, third.size) == (60, 83, 83)
    assert third.lines == ("ijklmnopqrstuvwxyz", "end")


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path: Path) -> None:
    assert read_page(write_log(tmp_path, b"a\xffb\n"), 0).lines == ("a\ufffdb",)


def test_the_last_page_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = write_log(tmp_path, b"".join(b"line %d\r" % number for number in range(10)))
    page = read_page(path, -1, limit=20)
    assert page.lines == ("line 8", "line 9")
    assert (page.offset, page.end, page.before) == (56, 70, 36)
