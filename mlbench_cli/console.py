"""Talking to a person or a program: stdout is the answer, as text or as one JSON document; stderr is everything else.

Foreign text (a cloud's message, a task's words) is printed as it is but for control characters: nothing here
interprets markup.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from mlbench_cli.errors import Explanation, Interrupted, Stopped, UsageError

SCHEMA_VERSION = 1
DEFAULT_WIDTH = 80
MIN_WRAPPED = 24  # columns of a wrapped column; narrower is not read with pleasure
COLOURS = {"red": 31, "green": 32, "yellow": 33, "bold": 1}
# How a table on a terminal paints a cell that is exactly this word.
CELL_COLOURS = {
    "goal_reached": "green",
    "completed": "green",
    "budget_spent": "green",
    "ok": "green",
    "ready": "green",
    "succeeded": "green",
    "goal_missed": "yellow",
    "cancelled": "yellow",
    "missing": "yellow",
    "failed": "red",
    "deadline": "red",
    "never_started": "red",
    "lost": "red",
}


# --- the answer: stdout ---------------------------------------------------------------------------------------------


def out(text: str) -> None:
    sys.stdout.write(text + "\n")


def out_json(document: Mapping[str, Any]) -> None:
    """One JSON document, with its schema_version."""
    out(json.dumps({"schema_version": SCHEMA_VERSION, **document}, indent=2, allow_nan=False, default=str))


def out_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, droppable: Sequence[str] = (), wrap: bool = False
) -> None:
    """Print a table; on a terminal it is fitted to the width, in a pipe every cell is whole."""
    width = terminal_width(sys.stdout) if is_terminal(sys.stdout) else None
    out(format_table(headers, rows, width=width, droppable=droppable, wrap=wrap, colour=_colourful(sys.stdout)))


def format_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    width: int | None = None,
    droppable: Sequence[str] = (),
    wrap: bool = False,
    colour: bool = False,
) -> str:
    """Columns two spaces apart, without a box; numbers to the right; None is "-".

    Where `width` does not suffice, the `droppable` columns go first, in that order; then the last column goes on in
    further lines if it may `wrap`; then the widest are cut.
    """
    columns = [[header, *(_cell(row[index]) for row in rows)] for index, header in enumerate(headers)]
    numeric = [_is_numeric([row[index] for row in rows]) for index in range(len(headers))]
    keep = list(range(len(headers)))
    widths = [max(map(display_width, column)) for column in columns]

    def total() -> int:
        return sum(widths[index] for index in keep) + 2 * (len(keep) - 1)

    for header in droppable:
        if width is None or total() <= width:
            break
        keep.remove(list(headers).index(header))
    if wrap and width is not None and total() > width:
        widths[keep[-1]] = max(MIN_WRAPPED, widths[keep[-1]] - (total() - width))
    while width is not None and total() > width:
        widest = max(keep, key=lambda index: widths[index])
        if widths[widest] <= 8:
            break
        widths[widest] = max(8, widths[widest] - (total() - width))
    lines = []
    for number in range(len(rows) + 1):
        texts = [columns[index][number] for index in keep]
        rest = _wrapped(texts[-1], widths[keep[-1]]) if wrap else texts[-1:]
        texts[-1] = rest.pop(0)
        cells = [
            _padded(text, widths[index], numeric[index], colour and number > 0)
            for text, index in zip(texts, keep, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
        lines += [" " * (total() - widths[keep[-1]]) + text for text in rest]
    return "\n".join(lines)


def display_width(text: str) -> int:
    """Columns that `text` takes on a terminal: wide East Asian characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def clean(text: str, *, keep: str = "") -> str:
    """`text` without control characters, which could move a terminal's cursor or forge lines. `keep` are allowed."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else " " if character.isspace() else "�"
        for character in text
    )


def _wrapped(text: str, width: int) -> list[str]:
    if display_width(text) <= width:
        return [text]
    import textwrap

    return [cut(piece, width) for piece in textwrap.wrap(text, width)] or [""]


def _is_numeric(values: Sequence[object]) -> bool:
    kinds = {type(value) for value in values if value is not None}
    return bool(kinds) and kinds <= {int, float}


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return clean(str(value))


def _padded(text: str, width: int, right: bool, colour: bool) -> str:
    text = cut(text, width)
    padding = " " * (width - display_width(text))
    if colour and text in CELL_COLOURS:
        text = _painted(text, CELL_COLOURS[text])
    return padding + text if right else text + padding


# --- everything else: stderr ----------------------------------------------------------------------------------------


def note(text: str) -> None:
    sys.stderr.write(clean(text, keep="\n\t") + "\n")
    sys.stderr.flush()


def warn(text: str) -> None:
    note(f"Warning: {text}")


def show_error(error: Explanation, *, as_json: bool = False) -> None:
    """The paragraph of an error on stderr, or its document on stdout."""
    if as_json:
        out(json.dumps(error.to_dict(), indent=2, default=str))
        sys.stdout.flush()
        return
    label = "" if isinstance(error, Stopped) else "Error: "  # a wanted stop is no error
    if label and _colourful(sys.stderr):
        label = _painted("Error:", "red") + " "
    sys.stderr.write(f"{label}{clean(error.message, keep=chr(10))}\n")
    if error.hint:
        sys.stderr.write(f"Next: {clean(error.hint, keep=chr(10))}\n")
    sys.stderr.flush()


class ProgressLine:
    """What is going on, on stderr: one line that is rewritten on a terminal, else a plain line every `interval` s."""

    def __init__(self, stream: TextIO | None = None, *, interval: float = 10.0) -> None:
        self._stream = stream or sys.stderr
        self._live = is_terminal(self._stream)
        self._interval = interval
        self._written = float("-inf")
        self._shown = ""

    def update(self, text: str) -> None:
        now = time.monotonic()
        if self._live:
            text = cut(clean(text), terminal_width(self._stream) - 1)
            rest = " " * max(0, display_width(self._shown) - display_width(text))
            if text != self._shown:
                self._stream.write(f"\r{text}{rest}")
                self._stream.flush()
            self._shown = text
        elif now - self._written >= self._interval:
            note(text)
            self._written = now

    def close(self) -> None:
        """Leave the terminal with an empty line to write on; what was shown is gone."""
        if self._shown:
            self._stream.write(f"\r{' ' * display_width(self._shown)}\r")
            self._stream.flush()
            self._shown = ""


# --- questions ------------------------------------------------------------------------------------------------------


def interactive() -> bool:
    """Whether there is a person to ask: questions go to stderr, answers come from stdin."""
    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


def ask(question: str) -> str:
    """The line that a person answers. Raises Interrupted at the end of input (Ctrl-D)."""
    try:
        sys.stderr.write(clean(question, keep="\n"))
        sys.stderr.flush()
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        raise
    if not line:
        sys.stderr.write("\n")
        raise Interrupted("No answer was given; nothing was done.")
    return line.strip()


def confirm(question: str, *, yes: bool, flag: str = "--yes") -> None:
    """Return if the person, or `yes`, agrees; the default is No. Without a terminal the flag is the only way."""
    if yes:
        return
    if not interactive():
        raise UsageError(f"{question} There is no terminal to ask on.", hint=f"Add {flag} to agree beforehand.")
    if ask(f"{question} [y/N] ").lower() not in ("y", "yes"):
        raise Interrupted("Not confirmed; nothing was done.")


# --- words ----------------------------------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """Seconds as a person says them: "850 ms", "12.3 s", "4 min 05 s", "2 h", "3 d 4 h"."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds >= 59.95:
        seconds = round(seconds)
    for large, name, small, unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= large:
            count, rest = divmod(round(seconds / small), large // small)
            return f"{count} {name}" + (f" {rest} {unit}" if rest else "")
    return f"{seconds:.1f} s"


def ago(moment: str) -> str:
    """An RFC 3339 time as a person says it: "just now", "4 min ago"."""
    from datetime import UTC, datetime

    seconds = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    if seconds < 60:
        return "just now"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


def size(count: float) -> str:
    """Bytes as a person says them: "980 B", "1.4 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# --- terminals ------------------------------------------------------------------------------------------------------


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # closed, or none at all
        return False


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal behind `stream`; COLUMNS goes first, as everywhere."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError):
        return DEFAULT_WIDTH


def _colourful(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _painted(text: str, colour: str) -> str:
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def cut(text: str, width: int) -> str:
    """`text` in at most `width` columns; an ellipsis stands for what is left out."""
    if display_width(text) <= width:
        return text
    while text and display_width(text) > width - 1:
        text = text[:-1]
    return text + "…"
