"""How `mlbench logs` writes lines of ranks: prefixes, times, events, and bytes that a terminal must not get."""

import io
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.commands.logs import Printer, _document, _show_queues, format_moment
from mlbench_cli.console import Format
from mlbench_cli.errors import UsageError
from mlbench_cli.runs.log_reader import LogEntry
from task_images.contract import format_event

Captured = pytest.CaptureFixture[str]
EVENT = format_event({"v": 1, "event": "phase", "rank": 0, "time": 1.5, "phase": "training"}).encode() + b"\n"
MOMENT = 1_767_225_600.1239  # 2026-01-01T00:00:00.123Z


def written(*lines: Any, **options: Any) -> bytes:
    """What is printed of lines: a text of rank 0, or the arguments of `write`."""
    stream = io.BytesIO()
    printer = Printer(stream, **{"prefixed": False, "raw": False, "timestamps": False, **options})
    for line in lines:
        printer.write(*((0, line) if isinstance(line, bytes) else line))
    return stream.getvalue()


@pytest.fixture(autouse=True)
def not_on_github(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


@pytest.mark.parametrize(
    ("moment", "is_exact", "text"),
    [
        (MOMENT, True, b"2026-01-01T00:00:00.123Z "),
        (MOMENT, False, b"~2026-01-01T00:00:00Z    "),
        (0.0, True, b"1970-01-01T00:00:00.000Z "),
        (None, True, b"-                        "),
        (-0.1, True, b"-                        "),
        (253_402_300_799.0, True, b"9999-12-31T23:59:59.000Z "),
        (253_402_300_800.0, True, b"-                        "),
    ],
)
def test_a_time_has_25_columns(moment: float | None, is_exact: bool, text: bytes) -> None:
    assert format_moment(moment, is_exact) == text
    assert len(text) == 25


def test_a_line_of_one_rank_is_written_byte_for_byte() -> None:
    assert written(b"caf\xe9\x1b[31m\r\n", b"no end") == b"caf\xe9\x1b[31m\r\nno end"


def test_lines_of_several_ranks_have_prefixes_and_ends() -> None:
    assert written((0, b"a\n"), (11, b"no end"), (2, b"c\n"), prefixed=True) == b"[0] a\n[11] no end\n[2] c\n"


def test_times_come_behind_the_rank() -> None:
    lines = ((0, b"a\n", MOMENT, True), (1, b"b", None, False))
    assert written(*lines, prefixed=True, timestamps=True) == (
        b"[0] 2026-01-01T00:00:00.123Z a\n[1] -                        b\n"
    )
    assert written((1, b"b"), timestamps=True) == b"-                        b\n"


def test_events_are_left_out_unless_everything_is_asked_for() -> None:
    assert written(b"a\n", EVENT, b"b\n") == b"a\nb\n"
    assert written(EVENT, prefixed=True) == b""
    assert written(EVENT, raw=True) == EVENT
    assert written(EVENT, raw=True, is_terminal=True) == EVENT


def test_a_terminal_gets_no_control_characters() -> None:
    assert written(b"\ta\x1b[31mb\xe9\n", is_terminal=True) == "\ta\\x1b[31mb\ufffd\n".encode()
    assert written(b"a\x1b[31m\n", is_terminal=True, raw=True) == b"a\x1b[31m\n"


def test_a_runner_gets_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert written(b"::set-env name=x::\xe9\n") == b"\\::set-env name=x::\xe9\n"
    assert written(b"::set-env\n", raw=True) == b"::set-env\n"


def test_a_new_line_has_the_time_of_now_unless_it_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: MOMENT)
    stream = io.BytesIO()
    printer = Printer(stream, prefixed=False, raw=True, timestamps=True)
    printer.write_new(0, b"a\n")
    printer.write_new(0, EVENT)
    assert stream.getvalue() == b"~2026-01-01T00:00:00Z    a\n1970-01-01T00:00:01.500Z " + EVENT


@pytest.mark.parametrize(
    ("entry", "raw", "text", "time"),
    [
        (LogEntry(1, MOMENT, True, b"caf\xe9\n"), False, "caf\ufffd\n", "2026-01-01T00:00:00.123Z"),
        (LogEntry(0, None, False, b"a"), False, "a", None),
        (LogEntry(0, 0.0, False, b""), True, "", "1970-01-01T00:00:00.000Z"),
        (LogEntry(0, None, True, EVENT), False, "", None),
        (LogEntry(0, None, True, EVENT), True, EVENT.decode(), None),
    ],
)
def test_the_document_of_a_line(entry: LogEntry, raw: bool, text: str, time: str | None) -> None:
    document = {"rank": entry.rank, "text": text, "time": time, "time_is_exact": entry.is_exact}
    assert _document(entry, raw) == document


def test_logs_of_queues(capsys: Captured) -> None:
    experiments: list[Any] = [
        SimpleNamespace(name="a", read_queue_log=lambda: ["one\x1b", "two"]),
        SimpleNamespace(name="b", read_queue_log=list),
    ]
    _show_queues(experiments, Format.text)
    printed = capsys.readouterr()
    assert printed.out == "one\\x1b\ntwo\n"
    assert printed.err == "b has no queue log: it ran attached to mlbench run.\n"
    _show_queues(experiments, Format.json)
    assert '"experiment": "b"' in capsys.readouterr().out
    with pytest.raises(UsageError, match="--queue needs an experiment"):
        _show_queues([], Format.text)
