"""Output for terminals, drawn by rich: tables, and one live line that survives resizing."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any, TextIO

from mlbench_cli.util import text

# Styles of cells with exactly this text.
CELL_STYLES = {
    **dict.fromkeys(("goal_reached", "completed", "budget_spent", "ok", "ready", "succeeded"), "green"),
    **dict.fromkeys(("goal_missed", "canceled", "missing"), "yellow"),
    **dict.fromkeys(("failed", "deadline", "never_started", "lost"), "red"),
}
# Erases from the cursor to the end of the screen.
ERASE = "\x1b[J"


@cache
def load_rich() -> Any:
    """rich, for terminals only: importing it takes 20 ms."""
    import rich.console
    import rich.table
    import rich.text

    return rich


def console_on(stream: TextIO, width: int) -> Any:
    """A console of rich without markup that respects NO_COLOR and TERM."""
    return load_rich().console.Console(
        file=stream, width=width, force_terminal=True, markup=False, highlight=False, emoji=False, legacy_windows=False
    )


def print_table(
    stream: TextIO,
    width: int,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    numeric: Sequence[bool],
    *,
    wrap: bool = False,
) -> None:
    """Print cells in columns of the given widths, two spaces apart; longer cells are cut, the last may wrap."""
    rich = load_rich()
    table = rich.table.Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, header in enumerate(headers):
        last = index == len(headers) - 1
        table.add_column(
            rich.text.Text(header),
            width=None if last else widths[index],  # rich before 15 adds the gap to it, too
            max_width=widths[index],
            justify="right" if numeric[index] else "left",
            no_wrap=not (wrap and last),
            overflow="fold" if wrap and last else "ellipsis",
        )
    for row in rows:
        table.add_row(*(rich.text.Text(cell, style=CELL_STYLES.get(cell, "")) for cell in row))
    console_on(stream, max(width, sum(widths) + 2 * len(widths))).print(table, soft_wrap=False)


class LiveLine:
    """One line at the bottom of a terminal that is redrawn in place, and when the terminal is resized.

    The cursor stays at the start of the line. A terminal that wraps the line when it becomes narrower keeps the cursor
    there, so erasing from the cursor removes all of it.
    """

    def __init__(self, stream: TextIO, width: Callable[[], int]) -> None:
        self._stream = stream
        self._width = width
        self._line: Callable[[int], str] | None = None
        self._shown: tuple[str, int] | None = None
        self._handler: Any = None
        self._watches = False

    def update(self, line: Callable[[int], str]) -> None:
        """Show the result of calling `line` with the number of columns; called again on resizing."""
        self._line = line
        self._watch_size()
        self._draw()

    def print_above(self, words: str) -> None:
        """Write whole lines above the live one."""
        self._write("\r" + ERASE + words + ("" if words.endswith("\n") else "\n"))
        self._shown = None
        self._draw()

    def close(self) -> None:
        """Erase the line and restore the handler of resizing."""
        if self._shown is not None:
            self._write("\r" + ERASE)
        self._line, self._shown = None, None
        if self._watches:
            self._watches = False
            signal.signal(signal.SIGWINCH, self._handler)

    def _draw(self) -> None:
        if self._line is None:
            return
        width = self._width()
        shown = (text.cut(text.clean(self._line(width - 1)), width - 1), width)
        if shown != self._shown:
            self._shown = shown
            self._write("\r" + ERASE + self._paint(shown[0], width) + "\r")

    def _paint(self, line: str, width: int) -> str:
        painted = load_rich().text.Text(line, no_wrap=True, overflow="crop", end="")
        painted.highlight_regex(r"^[^ ]+:", "bold")
        painted.highlight_regex(r"[^,]* left(?= \[|$)|almost done(?= \[|$)", "cyan")
        console = console_on(self._stream, width)
        with console.capture() as capture:
            console.print(painted, end="", soft_wrap=True)
        return str(capture.get())

    def _watch_size(self) -> None:
        if self._watches or threading.current_thread() is not threading.main_thread():
            return
        self._handler = signal.signal(signal.SIGWINCH, self._on_resize) or signal.SIG_DFL
        self._watches = True

    def _on_resize(self, number: int, frame: FrameType | None) -> None:
        self._shown = None
        with suppress(OSError):
            self._draw()
        if callable(self._handler):
            self._handler(number, frame)

    def _write(self, data: str) -> None:
        # Bypasses the stream's buffer: the signal handler must not interrupt a write into it.
        try:
            number = self._stream.fileno()
        except (OSError, ValueError):  # no file descriptor
            self._stream.write(data)
            return
        self._stream.flush()
        left = data.encode(self._stream.encoding or "utf-8", "replace")
        while left:
            left = left[os.write(number, left) :]
