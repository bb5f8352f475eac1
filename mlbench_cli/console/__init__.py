"""Terminal output: the answer goes to stdout as text or as one JSON document, everything else to stderr.

Untrusted text (messages of clouds and tasks) is printed with control characters escaped, and no markup is interpreted.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import Any, NamedTuple, TextIO, TypeVar

from mlbench_cli.console import prompts
from mlbench_cli.console.terminal import LiveLine, print_table
from mlbench_cli.errors import Explanation, Interrupted, Stopped, UsageError
from mlbench_cli.util.text import Option as Option
from mlbench_cli.util.text import ago as ago
from mlbench_cli.util.text import clean as clean
from mlbench_cli.util.text import cut as cut
from mlbench_cli.util.text import disarm_commands as disarm_commands
from mlbench_cli.util.text import display_width as display_width
from mlbench_cli.util.text import duration as duration
from mlbench_cli.util.text import fit_parts as fit_parts
from mlbench_cli.util.text import fold as fold
from mlbench_cli.util.text import rough_duration as rough_duration
from mlbench_cli.util.text import significant as significant
from mlbench_cli.util.text import size as size
from mlbench_cli.util.text import wrap as wrap_text

SCHEMA_VERSION = 1
DEFAULT_WIDTH = 80
DEFAULT_HEIGHT = 24
MIN_WRAPPED = 24  # columns of a wrapped column; narrower ones are hard to read
T = TypeVar("T")
# Seconds before a bar is shown on a terminal and in a pipe, and between two updates.
LIVE_DELAY, PIPE_DELAY, REDRAW = 1.0, 10.0, 0.3
BAR = 20  # columns of a bar
MIN_COLUMN = 8  # columns below which a truncated column is useless


class Format(StrEnum):
    """How a command prints its answer (`-o`)."""

    text = "text"
    json = "json"


# --- the answer: stdout ---------------------------------------------------------------------------------------------


def out(text: str, *, raw: bool = False) -> None:
    """Print one or more lines of the answer on stdout. On a terminal they are broken between words, unless they are
    `raw`: YAML, JSON, a table, the log of a program."""
    with _bar_hidden():
        sys.stdout.write((_guard(text) if raw else _fold(_guard(text), sys.stdout)) + "\n")


def out_command(command: str) -> None:
    """Print a workflow command of GitHub's runner, which `out` would escape."""
    sys.stdout.write(clean(command).replace("##[", "#\\#[") + "\n")


def out_json(document: Mapping[str, Any], error: Explanation | None = None) -> None:
    """Print one JSON document with its schema_version on stdout, with the `error` that the command then raises."""
    failed = {} if error is None else error.to_dict()
    whole = {"schema_version": SCHEMA_VERSION, **document, **failed}
    out(json.dumps(whole, indent=2, allow_nan=False, default=str), raw=True)
    if error is not None:
        error.is_printed = True


def out_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, droppable: Sequence[str] = (), wrap: bool = False
) -> None:
    """Print a table; on a terminal it is fitted to the width, in a pipe cells are not truncated."""
    if not is_terminal(sys.stdout):
        out(format_table(headers, rows, droppable=droppable, wrap=wrap), raw=True)
        return
    width = terminal_width(sys.stdout)
    if _is_dumb():
        out(format_table(headers, rows, width=width, droppable=droppable, wrap=wrap), raw=True)
        return
    layout = _lay_out(headers, rows, width, droppable, wrap)
    sys.stdout.flush()
    print_table(sys.stdout, width, layout.headers, layout.rows, layout.widths, layout.numeric, wrap=wrap)


def is_too_wide(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> bool:
    """Whether stdout is a terminal that is narrower than the table."""
    return is_terminal(sys.stdout) and _lay_out(headers, rows, None, (), False).total > terminal_width(sys.stdout)


def format_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    width: int | None = None,
    droppable: Sequence[str] = (),
    wrap: bool = False,
) -> str:
    """A table without a box: columns two spaces apart, numbers right-aligned, "-" for None.

    Of the `droppable` columns, those without any value are left out; the others, too, in that order, if the table is
    wider than `width` columns; then the last column is wrapped if `wrap` allows it, and the widest are truncated.
    """
    layout = _lay_out(headers, rows, width, droppable, wrap)
    lines = []
    for row in (layout.headers, *layout.rows):
        texts = list(row)
        rest = wrap_text(texts[-1], layout.widths[-1]) if wrap else texts[-1:]
        texts[-1] = rest.pop(0)
        cells = map(_pad, texts, layout.widths, layout.numeric)
        lines.append("  ".join(cells).rstrip())
        lines += [" " * (layout.total - layout.widths[-1]) + text for text in rest]
    return "\n".join(lines)


class _Layout(NamedTuple):
    """The formatted cells of the visible columns and the width of each column."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    widths: Sequence[int]
    numeric: Sequence[bool]

    @property
    def total(self) -> int:
        return sum(self.widths) + 2 * (len(self.widths) - 1)


def _lay_out(
    headers: Sequence[str], rows: Sequence[Sequence[object]], width: int | None, droppable: Sequence[str], wrap: bool
) -> _Layout:
    columns = [[header, *(_cell(row[index]) for row in rows)] for index, header in enumerate(headers)]
    numeric = [_is_numeric([row[index] for row in rows]) for index in range(len(headers))]
    empty = [header for header in droppable if rows and all(row[headers.index(header)] is None for row in rows)]
    keep = [index for index, header in enumerate(headers) if header not in empty]
    widths = [max(map(display_width, column)) for column in columns]

    def total() -> int:
        return sum(widths[index] for index in keep) + 2 * (len(keep) - 1)

    for header in (header for header in droppable if header not in empty):
        if width is None or total() <= width:
            break
        keep.remove(list(headers).index(header))
    if wrap and width is not None and total() > width:
        widths[keep[-1]] = max(MIN_WRAPPED, widths[keep[-1]] - (total() - width))
    while width is not None and total() > width:
        widest = max(keep, key=lambda index: widths[index])
        if widths[widest] <= MIN_COLUMN:
            break
        widths[widest] = max(MIN_COLUMN, widths[widest] - (total() - width))
    return _Layout(
        headers=[headers[index] for index in keep],
        rows=[[columns[index][number] for index in keep] for number in range(1, len(rows) + 1)],
        widths=[widths[index] for index in keep],
        numeric=[numeric[index] for index in keep],
    )


def _is_numeric(values: Sequence[object]) -> bool:
    kinds = {type(value) for value in values if value is not None}
    return bool(kinds) and kinds <= {int, float}


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return significant(value)
    return clean(str(value))


def _pad(text: str, width: int, right: bool) -> str:
    text = cut(text, width)
    padding = " " * (width - display_width(text))
    return padding + text if right else text + padding


# --- everything else: stderr ----------------------------------------------------------------------------------------


_is_quiet = False


def be_quiet() -> None:
    """From now on, print errors and answers only: no notes, warnings and progress."""
    global _is_quiet
    _is_quiet = True


def is_quiet() -> bool:
    """Whether this command prints errors and answers only."""
    return _is_quiet


def note(text: str, *, error: bool = False) -> None:
    """Print one or more lines on stderr with control characters escaped. An `error` is printed in a quiet command, too.
    On a terminal, lines are broken between words."""
    if _is_quiet and not error:
        return
    try:
        with _bar_hidden():
            sys.stderr.write(_fold(_guard(text), sys.stderr) + "\n")
            sys.stderr.flush()
    except BrokenPipeError:  # stderr was closed; the run that this command follows continues
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def next_step(*commands: str, error: bool = False) -> None:
    """Print the commands that usually follow: each on a line of its own, and complete, so that it can be pasted."""
    for command in commands:
        note(f"Next: {command}", error=error)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    note(f"Warning: {text}")


def show_error(error: Explanation, *, as_json: bool = False) -> None:
    """Print an error on stderr or as a JSON document on stdout. A requested stop is not shown as an error."""
    if as_json:
        if not error.is_printed:
            out(json.dumps(error.to_dict(), indent=2, default=str), raw=True)
        sys.stdout.flush()
        return
    label = "" if isinstance(error, Stopped) else "Error: "
    folded = _fold(f"{label}{_guard(error.message)}", sys.stderr)  # before the color, which takes no columns
    sys.stderr.write(f"{_color_red(label) if label else ''}{folded.removeprefix(label)}\n")
    if error.hint:
        sys.stderr.write(f"{_fold(f'Next: {_guard(error.hint)}', sys.stderr)}\n")
    sys.stderr.flush()


def is_on_github() -> bool:
    """Whether the output goes to GitHub's runner, which executes workflow commands in it."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def _guard(text: str) -> str:
    """Lines without terminal escapes and workflow commands. Callers remove newlines from untrusted values, because
    here they cannot be told from our own."""
    shown = clean(text, keep="\n\t")
    return disarm_commands(shown) if is_on_github() else shown


def _fold(text: str, stream: TextIO) -> str:
    """The lines as they fit into a terminal, which itself breaks them anywhere; unchanged in a pipe."""
    if not is_terminal(stream):
        return text
    width = terminal_width(stream)
    return "\n".join(fold(line, width) for line in text.split("\n"))


class ProgressLine:
    """Progress on stderr: one line that is redrawn on a terminal, otherwise a plain line every `interval` seconds."""

    def __init__(self, stream: TextIO | None = None, *, interval: float = 10.0) -> None:
        self._stream = stream or sys.stderr
        self.is_live = is_terminal(self._stream) and not _is_dumb()
        self._interval = interval
        self._written = float("-inf")
        self._live: LiveLine | None = None

    def update(self, line: str | Callable[[int | None], str]) -> None:
        """Show a text, or the result of calling `line` with the number of columns (None: unlimited)."""
        if _is_quiet:
            return
        if self.is_live:
            self._open().update((lambda width: line) if isinstance(line, str) else line)
            return
        now = time.monotonic()
        if now - self._written >= self._interval:
            note(line if isinstance(line, str) else line(None))
            self._written = now

    def print_above(self, text: str) -> None:
        """Print permanent lines above the live line."""
        if self._live is None:
            note(text.removesuffix("\n"))
        else:
            self._live.print_above(_fold(_guard(text), self._stream))

    def close(self) -> None:
        """Erase the live line."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def _open(self) -> LiveLine:
        if self._live is None:
            self._live = LiveLine(self._stream, lambda: terminal_width(self._stream))
        return self._live


class Busy:
    """Progress of long work on stderr: after a second a bar with the current item, the elapsed time and the time left
    at the current speed; in a pipe a line every 10 s."""

    def __init__(self, title: str, total: int | None = None) -> None:
        self._title, self._total = title, total
        self._now, self._done, self._done_at = "", 0, 0.0
        self._line = ProgressLine()
        self._over = threading.Event()
        self._begun = time.monotonic()
        self._lock = threading.RLock()  # of the terminal

    def __enter__(self) -> "Busy":
        _bars.append(self)
        delay = LIVE_DELAY if self._line.is_live else PIPE_DELAY
        self._thread = threading.Thread(target=self._show, args=(delay,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        _bars.remove(self)
        self._over.set()
        self._thread.join()
        self._line.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the line inside the block."""
        with self._lock:
            self._line.close()
            yield

    def step(self, now: str, done: int) -> None:
        """Report that `done` items of the total are complete and that `now` is in progress."""
        self._now, self._done, self._done_at = now, done, time.monotonic() - self._begun

    def _show(self, delay: float) -> None:
        while not self._over.wait(delay):
            with self._lock:
                self._line.update(self._words)
            delay = REDRAW

    def _words(self, columns: int | None) -> str:
        passed = time.monotonic() - self._begun
        parts = [self._title + ":"]
        if self._total:
            parts.append(f"{draw_bar(self._done / self._total)} {self._done} of {self._total}")
        if self._now:
            parts.append(self._now)
        left = ""
        if self._total and self._done >= 2:  # a single item is no basis for an estimate
            rest = self._done_at / self._done * (self._total - self._done) - (passed - self._done_at)
            left = f", about {rough_duration(max(1.0, rest))} left"
        return f"{' '.join(parts)}, {duration(passed)}{left}"


def draw_bar(share: float) -> str:
    """A bar of BAR columns of which `share` (0 to 1) is full."""
    full = round(BAR * share)
    return f"[{'#' * full}{'.' * (BAR - full)}]"


_bars: list[Busy] = []


def _bar_hidden() -> AbstractContextManager[None]:
    return _bars[-1].hidden() if _bars else nullcontext()


def track(title: str, items: Sequence[T]) -> Iterator[T]:
    """Iterate over the items with a progress bar on stderr if they take long."""
    with Busy(title, len(items) if len(items) > 1 else None) as busy:
        for number, item in enumerate(items):
            busy.step(str(item), number)
            yield item


# --- questions ------------------------------------------------------------------------------------------------------


def interactive() -> bool:
    """Whether a person can be asked: stdin and stderr are terminals."""
    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


class Back(Exception):
    """The person asked to return to the previous question (Esc)."""


def ask(question: str, *, back: bool = False) -> str:
    """Ask for a line of text. Raises Interrupted at the end of input (Ctrl-D), and Back for Esc if `back` is set."""
    with _asking():
        return _read_line(_guard(question), back).strip()


def choose(title: str, options: Sequence[Option], default: int, *, back: bool = False) -> int:
    """Ask for one of the options by arrow keys, by name or, on a dumb terminal, by number; returns its index. Raises
    Back for Esc if `back` is set."""
    if not _has_keys():
        return _choose_by_number(title, options, default)

    def measure() -> tuple[int, int]:
        return terminal_width(sys.stderr), terminal_height(sys.stderr)

    with _asking():
        chosen = prompts.choose(title, options, default, measure, back)
    if chosen is None:
        raise Back
    return chosen


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        raise
    except EOFError:
        raise Interrupted("No answer was given; nothing was done.") from None


def _read_line(question: str, back: bool) -> str:
    *above, last = question.split("\n")
    if above:
        note("\n".join(above))
    if _has_keys():
        line = prompts.edit_line(last, lambda: terminal_width(sys.stderr), back)
        if line is None:
            raise Back
        return line
    sys.stderr.write(last)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        sys.stderr.write("\n")
        raise EOFError
    return line


def _choose_by_number(title: str, options: Sequence[Option], default: int) -> int:
    note(f"{title}:\n")
    longest = max(display_width(option.name) for option in options)
    for index, option in enumerate(options):
        name = option.name + " " * (longest - display_width(option.name))
        notes = "  ".join(part for part in (option.warning, option.note) if part)
        note(cut(f"[{index:>2}]  {name}  {notes}".rstrip(), terminal_width(sys.stderr)))
    names = [option.name for option in options]
    while True:
        answer = ask(f"\n{title} [{names[default]}]: ") or names[default]
        if answer in names:
            return names.index(answer)
        if answer.isascii() and answer.isdecimal() and int(answer) < len(names):
            return int(answer)
        note(f"Answer with a name, or a number from 0 to {len(names) - 1}.")


def confirm(question: str, *, yes: bool, flag: str = "--yes") -> None:
    """Return if `yes` is set or the person confirms; the default is No. Without a terminal, the flag is required."""
    if yes:
        return
    if not interactive():
        raise UsageError(f"{question} There is no terminal to ask on.", hint=f"Add {flag} to the command.")
    if display_width(f"{question} [y/N] ") >= terminal_width(sys.stderr):  # the line editor needs all of its line
        note(question)
        question = "Yes or no?"
    if ask(f"{question} [y/N] ").lower() not in ("y", "yes"):
        raise Interrupted("Not confirmed; nothing was done.")


# --- terminals ------------------------------------------------------------------------------------------------------


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is an open terminal."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # closed or missing
        return False


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal behind `stream`; COLUMNS takes precedence."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError):
        return DEFAULT_WIDTH


def terminal_height(stream: TextIO) -> int:
    """Rows of the terminal behind `stream`."""
    try:
        return os.get_terminal_size(stream.fileno()).lines or DEFAULT_HEIGHT
    except (OSError, ValueError):
        return DEFAULT_HEIGHT


def _is_dumb() -> bool:
    """Whether the terminal lacks escape sequences."""
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


def _has_keys() -> bool:
    """Whether single keys can be read: a real terminal on both streams."""
    if _is_dumb() or not interactive():
        return False
    try:
        return os.isatty(sys.stdin.fileno()) and os.isatty(sys.stderr.fileno())
    except (OSError, ValueError):
        return False


def _color_red(label: str) -> str:
    if not is_terminal(sys.stderr) or _is_dumb() or os.environ.get("NO_COLOR"):
        return label
    return f"\x1b[31m{label}\x1b[0m"
