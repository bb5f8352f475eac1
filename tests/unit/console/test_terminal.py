"""What is drawn for terminals: colors of cells and of progress, widths of tables, and one line that is redrawn."""

import io
import re
import signal
import threading
from collections.abc import Callable

import pytest

from mlbench_cli.console.terminal import ERASE, LiveLine, print_table
from mlbench_cli.model.run import Outcome

GREEN, YELLOW, RED = "32", "33", "31"


@pytest.fixture(autouse=True)
def colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLORTERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def table(*rows: list[str], width: int = 80, wrap: bool = False, numeric: tuple[bool, ...] = (False, False)) -> str:
    stream = io.StringIO()
    widths = [max(len(row[index]) for row in (["NAME", "STATE"], *rows)) for index in range(2)]
    print_table(stream, width, ["NAME", "STATE"], rows, widths, numeric, wrap=wrap)
    return stream.getvalue()


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "color"),
    [
        *((word, GREEN) for word in ("goal_reached", "completed", "budget_spent", "ok", "ready", "succeeded")),
        *((word, YELLOW) for word in ("goal_missed", "cancelled", "missing")),
        *((word, RED) for word in ("failed", "deadline", "never_started", "lost")),
        ("running", None),
        ("failed once", None),
    ],
)
def test_a_state_has_the_color_of_its_kind(word: str, color: str | None) -> None:
    found = re.search(rf"\x1b\[(\d+)m{word}", table(["a", word]))
    assert (found[1] if found else None) == color


def test_every_outcome_has_a_color() -> None:
    assert all("\x1b[3" in table(["a", outcome.value]).splitlines()[1] for outcome in Outcome)


def test_cells_stand_in_columns_two_spaces_apart() -> None:
    lines = plain(table(["a", "1"], ["long", "23"], numeric=(False, True))).splitlines()
    assert [line.rstrip() for line in lines] == ["NAME  STATE", "a         1", "long     23"]
    assert "\x1b[1m" in table().splitlines()[0]  # the head is bold


def test_only_the_last_cell_may_wrap() -> None:
    stream = io.StringIO()
    print_table(stream, 14, ["NAME", "STATE"], [["a", "one two three"]], [4, 7], [False, False], wrap=True)
    assert [line.rstrip() for line in plain(stream.getvalue()).splitlines()] == [
        "NAME  STATE", "a     one two", "      three"
    ]  # fmt: skip
    stream = io.StringIO()
    print_table(stream, 14, ["NAME", "STATE"], [["a", "one two three"]], [4, 7], [False, False])
    assert [line.rstrip() for line in plain(stream.getvalue()).splitlines()] == ["NAME  STATE", "a     one tw…"]


def test_what_looks_like_markup_is_text() -> None:
    assert "[bold]x[/bold] :smile:" in plain(table(["[bold]x[/bold] :smile:", "1"]))


# --- the live line ----------------------------------------------------------------------------------------------------


class Screen:
    """A terminal of some columns, and the line on it."""

    def __init__(self, columns: int = 20) -> None:
        self.columns, self.stream = columns, io.StringIO()
        self.line = LiveLine(self.stream, lambda: self.columns)

    @property
    def written(self) -> str:
        """What was written since the last look, without colors."""
        text = self.stream.getvalue()
        self.stream.seek(0)
        self.stream.truncate()
        return plain(text)


def fixed(text: str) -> Callable[[int], str]:
    return lambda width: text


def test_a_line_is_redrawn_only_if_it_changes() -> None:
    screen = Screen()
    screen.line.update(fixed("one"))
    assert screen.written == f"\r{ERASE}one\r"
    screen.line.update(fixed("one"))
    assert screen.written == ""
    screen.columns = 30
    screen.line.update(fixed("one"))
    assert screen.written == f"\r{ERASE}one\r"
    screen.line.close()


def test_a_line_leaves_the_last_column_free() -> None:
    screen = Screen(10)
    screen.line.update(lambda width: f"{width}" + "x" * 20)
    assert screen.written == f"\r{ERASE}9xxxxxxx…\r"
    screen.line.close()
    assert screen.written == f"\r{ERASE}"
    screen.line.close()
    assert screen.written == ""  # it is closed already


def test_lines_above_push_the_live_one_down() -> None:
    screen = Screen()
    screen.line.update(fixed("live"))
    _ = screen.written
    screen.line.print_above("above")
    screen.line.print_above("more\n")
    assert screen.written == f"\r{ERASE}above\n\r{ERASE}live\r\r{ERASE}more\n\r{ERASE}live\r"
    screen.line.close()
    _ = screen.written
    screen.line.print_above("after")
    assert screen.written == f"\r{ERASE}after\n"


@pytest.mark.parametrize(
    ("text", "bold", "cyan"),
    [
        ("demo: training, about 5 s left", "demo:", " about 5 s left"),
        ("demo: training, almost done [==>]", "demo:", "almost done"),
        ("demo: training, 1 min left [==>]", "demo:", " 1 min left"),
        ("training, left over", None, None),
    ],
)
def test_name_and_time_left_stand_out(text: str, bold: str | None, cyan: str | None) -> None:
    screen = Screen(60)
    screen.line.update(fixed(text))
    painted = screen.stream.getvalue()
    screen.line.close()
    found = [re.findall(rf"\x1b\[{code}m([^\x1b]*)", painted) for code in ("1", "36")]
    assert found == [[bold] if bold else [], [cyan] if cyan else []]


def test_the_handler_of_resizing_is_restored_and_called() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGWINCH, lambda number, frame: called.append(number))
    try:
        screen = Screen()
        screen.line.update(lambda width: f"{width} columns")
        _ = screen.written
        screen.columns = 30
        signal.raise_signal(signal.SIGWINCH)
        assert screen.written == f"\r{ERASE}29 columns\r"
        assert called == [signal.SIGWINCH]
        screen.line.close()
        signal.raise_signal(signal.SIGWINCH)
        assert called == [signal.SIGWINCH] * 2
        assert screen.written == f"\r{ERASE}"
    finally:
        signal.signal(signal.SIGWINCH, before)


def test_another_thread_leaves_the_handler_alone() -> None:
    before = signal.getsignal(signal.SIGWINCH)
    screen = Screen()
    thread = threading.Thread(target=screen.line.update, args=(fixed("x"),))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGWINCH) is before
    assert screen.written == f"\r{ERASE}x\r"
    screen.line.close()
