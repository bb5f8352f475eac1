"""What a person and a program are shown: tables, words, errors, progress."""

import contextlib
import fcntl
import io
import os
import re
import signal
import struct
import termios

import pytest

from mlbench_cli import console
from mlbench_cli.errors import Interrupted, MlbenchError, Stopped, UsageError

ROWS = [["demo-1", 1, "goal_reached", 0.61234, None], ["demo-16", 16, "failed", 123.0, True]]
HEADERS = ["RUN", "WORKERS", "OUTCOME", "SECONDS", "KEPT"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_table() -> None:
    assert console.format_table(HEADERS, ROWS).splitlines() == [
        "RUN      WORKERS  OUTCOME       SECONDS  KEPT",
        "demo-1         1  goal_reached    0.612  -",
        "demo-16       16  failed            123  yes",
    ]


def test_columns_are_dropped_then_cut() -> None:
    narrow = console.format_table(HEADERS, ROWS, width=40, droppable=["KEPT", "SECONDS"])
    assert narrow.splitlines()[0] == "RUN      WORKERS  OUTCOME       SECONDS"
    narrower = console.format_table(HEADERS, ROWS, width=28, droppable=["KEPT", "SECONDS"])
    assert narrower.splitlines()[1] == "demo-1         1  goal_reac…"
    assert max(map(len, narrower.splitlines())) <= 28


def test_the_last_column_goes_on_below() -> None:
    rows = [["epochs", "the longest time that is trained, in passes over the data"]]
    assert console.format_table(["NAME", "MEANING"], rows, width=40, wrap=True).splitlines() == [
        "NAME    MEANING",
        "epochs  the longest time that is",
        "        trained, in passes over the data",
    ]


def test_nothing_is_cut_in_a_pipe() -> None:
    assert "x" * 500 in console.format_table(["A"], [["x" * 500]])


def test_foreign_text_stays_text() -> None:
    evil = "[red]x[/red]\x1b[2J\r\nroot\u202e"
    line = console.format_table(["A"], [[evil]]).splitlines()[1]
    assert line == "[red]x[/red]\\x1b[2J  root\\u202e"


def test_wide_characters_take_two_columns() -> None:
    lines = console.format_table(["A", "B"], [["日本", "x"], ["ab", "y"]]).splitlines()
    assert lines == ["A     B", "日本  x", "ab    y"]


def on_terminal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Terminal:
    """Both standard streams are one terminal of 60 columns."""
    terminal = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "60", **environment}.items():
        monkeypatch.setenv(name, value)
    return terminal


def test_a_terminal_gets_a_table_of_the_same_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    console.out_table(HEADERS, ROWS)
    painted = terminal.getvalue()
    assert "\x1b[32mgoal_reached" in painted
    assert "\x1b[31mfailed" in painted
    shown = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", painted).splitlines()]
    assert shown == console.format_table(HEADERS, ROWS).splitlines()


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colors_only_if_wanted(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    terminal = on_terminal(monkeypatch)
    console.show_error(UsageError("no"))
    assert terminal.getvalue() == "\x1b[31mError: \x1b[0mno\n"
    terminal = on_terminal(monkeypatch, **environment)
    console.show_error(UsageError("no"))
    console.out_table(HEADERS, ROWS)
    assert "\x1b[3" not in terminal.getvalue()
    assert "goal_reached" in terminal.getvalue()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_the_exception_tree_is_the_table_of_exit_codes() -> None:
    from mlbench_cli.commands import EXIT_CODES

    declared: list[type[MlbenchError]] = [MlbenchError, *MlbenchError.__subclasses__()]
    kinds = [kind for kind in [*declared, *Stopped.__subclasses__()] if kind.__module__ == "mlbench_cli.errors"]
    tree = {kind.exit_code: kind.code for kind in kinds}
    assert set(tree) | {0, 141} == set(EXIT_CODES)  # 141: SIGPIPE, which is no error
    assert len(tree) == len(set(tree.values())) == 13


# --- progress --------------------------------------------------------------------------------------------------------


def screen(written: str, columns: int) -> list[str]:
    """What a terminal shows after this: it knows line ends, carriage returns and erasing from the cursor on."""
    cells: dict[tuple[int, int], str] = {}
    row = column = 0
    for piece in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.|\n", re.sub(r"\x1b\[[0-9;]*m", "", written)):
        if piece == "\x1b[J":
            cells = {place: cell for place, cell in cells.items() if place < (row, column)}
        elif piece == "\r":
            column = 0
        elif piece == "\n":
            row, column = row + 1, 0
        else:
            assert column < columns, "the line would wrap"
            cells[row, column] = piece
            column += 1
    rows = range(max((place[0] for place in cells), default=-1) + 1)
    return ["".join(cells.get((row, column), " ") for column in range(columns)).rstrip() for row in rows]


def test_progress_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    line = console.ProgressLine()
    line.update("x" * 100)
    assert screen(terminal.getvalue(), 60) == ["x" * 58 + "…"]
    assert terminal.getvalue().endswith("\r")  # where erasing begins, also if a narrower terminal wraps the line
    line.update("done\n[bold]")
    assert screen(terminal.getvalue(), 60) == ["done [bold]"]
    line.print_above("a log line")
    line.update(lambda width: f"{width} columns")
    assert screen(terminal.getvalue(), 60) == ["a log line", "59 columns"]
    line.close()
    line.close()
    assert screen(terminal.getvalue(), 60) == ["a log line"]


def test_a_resized_terminal_is_drawn_anew() -> None:
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = pytest.MonkeyPatch()
    environment.setenv("TERM", "xterm")
    environment.delenv("COLUMNS", raising=False)
    with os.fdopen(follower, "w") as stream:
        line = console.ProgressLine(stream)
        line.update(lambda width: f"{width} columns")
        before = signal.getsignal(signal.SIGWINCH)
        fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
        os.kill(os.getpid(), signal.SIGWINCH)
        line.close()
        assert signal.getsignal(signal.SIGWINCH) != before
    written = ""
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while data := os.read(leader, 4096):
            written += data.decode()
    os.close(leader)
    environment.undo()
    assert written.index("79 columns") < written.index("29 columns")
    assert written.endswith("\r\x1b[J")


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    line = console.ProgressLine(interval=3600)
    line.update("one")
    line.update("two")
    line.close()
    assert capsys.readouterr().err == "one\n"
    line = console.ProgressLine(interval=0)
    line.update("one")
    line.update("two")
    assert capsys.readouterr().err == "one\ntwo\n"


# --- questions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "agreed"), [("y\n", True), ("YES\n", True), ("\n", False), ("no\n", False), ("", False)]
)
def test_the_default_is_no(answer: str, agreed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", Terminal())
    if agreed:
        console.confirm("Remove it?", yes=False)
        return
    with pytest.raises(Interrupted, match="nothing was done"):
        console.confirm("Remove it?", yes=False)
