"""Prompts on a terminal: a line editor and a menu with arrow keys.

Prompts go to stderr, keys come from stdin. Both functions raise EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C,
and restore the modes of the terminal.
"""

import codecs
import math
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlbench_cli.console.terminal import ERASE, console_on, load_rich
from mlbench_cli.util import text
from mlbench_cli.util.text import Option

ESCAPE_SECONDS = 0.05  # within which the rest of a key's bytes follow its ESC
SIGNAL_SECONDS = 0.5  # longest delay of a signal that arrives just before a wait
_SEQUENCES = {
    "[A": "up",
    "OA": "up",
    "[B": "down",
    "OB": "down",
    "[C": "right",
    "OC": "right",
    "[D": "left",
    "OD": "left",
    "[H": "home",
    "OH": "home",
    "[1~": "home",
    "[F": "end",
    "OF": "end",
    "[4~": "end",
    "[3~": "delete",
    "[5~": "page up",
    "[6~": "page down",
}
_CONTROLS = {
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x01": "home",
    "\x05": "end",
    "\x02": "left",
    "\x06": "right",
    "\x04": "eof",
    "\x15": "kill",
    "\x0b": "kill end",
    "\x17": "kill word",
    "\x0e": "down",
    "\x10": "up",
    "\t": "down",
}


class Keyboard:
    """The keys that a person presses: names such as "up" and "enter", or the character itself."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def read_key(self) -> str:
        """Wait for the next key; "" for an unknown one."""
        character = self._next(None)
        if character != "\x1b":
            return _CONTROLS.get(character, character if character.isprintable() else "")
        sequence = self._next(ESCAPE_SECONDS)
        if sequence not in ("[", "O"):
            return "" if sequence else "escape"
        while True:
            following = self._next(ESCAPE_SECONDS)
            sequence += following
            if not following or following.isalpha() or following == "~":
                return _SEQUENCES.get(sequence, "")

    def _next(self, seconds: float | None) -> str:
        """The next character; "" when none comes within `seconds`."""
        while not self._pending:
            if not self._wait(seconds):
                return ""
            data = os.read(self._file, 1)  # one byte: type-ahead belongs to the next prompt
            if not data:
                raise EOFError
            self._pending = self._decoder.decode(data)
        character, self._pending = self._pending[0], self._pending[1:]
        return character

    def _wait(self, seconds: float | None) -> bool:
        """Whether input arrives within `seconds`. Waits in short intervals, because a signal that arrives just before
        `select` does not interrupt it."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            left = max(0.0, end - time.monotonic())
            ready, _, _ = select.select([self._file], [], [], min(left, SIGNAL_SECONDS))
            if ready or left <= SIGNAL_SECONDS:
                return bool(ready)


@contextmanager
def _keys(redraw: Callable[[], None]) -> Iterator[Keyboard]:
    """The keyboard with echo and line mode off; `redraw` is called when the terminal is resized."""
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGWINCH, lambda *_: redraw()) if main else None
    try:
        tty.setcbreak(file, termios.TCSANOW)  # not TCSAFLUSH, which discards type-ahead
        yield Keyboard()
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
        if main:
            signal.signal(signal.SIGWINCH, handler or signal.SIG_DFL)


def _put(data: str) -> None:
    """Write to stderr without its buffer, so that the handler of a signal may write too."""
    sys.stderr.flush()
    left = data.encode(sys.stderr.encoding or "utf-8", "replace")
    while left:
        left = left[os.write(sys.stderr.fileno(), left) :]


# --- a line ---------------------------------------------------------------------------------------------------------


class _Editor:
    def __init__(self, question: str, width: Callable[[], int]) -> None:
        self.question = question
        self.width = width
        self.line = ""
        self.place = 0

    def take(self, key: str) -> None:
        line, place = self.line, self.place
        if key in ("left", "right"):
            self.place = max(0, min(len(line), place + (1 if key == "right" else -1)))
        elif key in ("home", "end"):
            self.place = 0 if key == "home" else len(line)
        elif key == "backspace" and place:
            self.line, self.place = line[: place - 1] + line[place:], place - 1
        elif key == "delete":
            self.line = line[:place] + line[place + 1 :]
        elif key == "kill":
            self.line, self.place = line[place:], 0
        elif key == "kill end":
            self.line = line[:place]
        elif key == "kill word":
            kept = line[:place].rstrip().rpartition(" ")
            start = len(kept[0]) + len(kept[1])
            self.line, self.place = line[:start] + line[place:], start
        elif len(key) == 1:
            self.line, self.place = line[:place] + key + line[place:], place + 1

    def draw(self) -> None:
        """Draw question and answer on one line; a long answer is scrolled to the cursor."""
        room = max(8, self.width() - text.display_width(self.question) - 1)
        start = 0
        while text.display_width(self.line[start : self.place]) >= room:
            start += 1
        shown = self.line[start:]
        while text.display_width(shown) > room:
            shown = shown[:-1]
        behind = text.display_width(shown) - text.display_width(self.line[start : self.place])
        _put(f"\r{ERASE}{self.question}{shown}" + (f"\x1b[{behind}D" if behind > 0 else ""))


def edit_line(question: str, width: Callable[[], int], back: bool = False) -> str | None:
    """The line typed after `question` without its newline; None for Esc if `back` is set."""
    editor = _Editor(question, width)
    with _keys(editor.draw) as keyboard:
        editor.draw()
        while True:
            key = keyboard.read_key()
            if key == "enter":
                _put("\n")
                return editor.line
            if key == "escape" and back:
                _put(f"\r{ERASE}")
                return None
            if key == "eof":
                if not editor.line:
                    _put("\n")
                    raise EOFError
                key = "delete"
            editor.take(key)
            editor.draw()


# --- a menu ---------------------------------------------------------------------------------------------------------


class _Menu:
    """Options filtered by the text typed so far. `chosen` is an index into all options."""

    def __init__(
        self, title: str, options: Sequence[Option], default: int, size: Callable[[], tuple[int, int]], back: bool
    ) -> None:
        self.title = title
        self.options = options
        self.default = self.chosen = default
        self.typed = ""
        self.size = size
        self.back = back

    def take(self, key: str) -> None:
        shown = self.shown
        if key in ("up", "down", "home", "page up", "end", "page down"):
            if shown:
                place = shown.index(self.chosen)
                steps = {"up": place - 1, "down": place + 1, "home": 0, "page up": 0}
                self.chosen = shown[steps.get(key, len(shown) - 1) % len(shown)]
        elif key == "backspace":
            self._search(self.typed[:-1])
        elif key == "kill":
            self._search("")
        elif len(key) == 1:
            self._search(self.typed + key)

    @property
    def shown(self) -> list[int]:
        """Indexes of the options whose name, or else note, contains the typed text."""
        wanted = self.typed.lower()
        numbers = range(len(self.options))
        named = [number for number in numbers if wanted in self.options[number].name.lower()]
        return named or [number for number in numbers if wanted in self.options[number].note.lower()]

    @property
    def is_lost(self) -> bool:
        """Whether no option matches the typed text."""
        return not self.shown

    def _search(self, typed: str) -> None:
        """Choose the option with this name, else one that starts with it, else one that contains it."""
        self.typed = typed
        wanted, shown = typed.lower(), self.shown
        if not typed:
            self.chosen = self.default
        elif shown:
            names = {number: self.options[number].name.lower() for number in shown}
            self.chosen = min(shown, key=lambda number: (names[number] != wanted, not names[number].startswith(wanted)))

    def draw(self) -> None:
        columns, rows = self.size()
        lines = self._lines(columns - 1, rows)
        console = console_on(sys.stderr, columns)
        with console.capture() as capture:
            for number, line in enumerate(lines):
                console.print(line, end="\n" if number < len(lines) - 1 else "", soft_wrap=True)
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        _put(f"\r{ERASE}{capture.get()}{up}\r")

    def _lines(self, width: int, rows: int) -> list[Any]:
        found = self.shown
        count = max(3, min(len(found), rows - 3))
        first = max(0, min(found.index(self.chosen) - count // 2, len(found) - count)) if found else 0
        hint = "arrow keys or letters, then Enter" + ("; Esc: back" if self.back else "")
        hint = f'nothing matches "{self.typed}"' if self.is_lost else self.typed or hint
        title = load_rich().text.Text(text.cut(f"{self.title}: {hint}", width))
        title.stylize("bold", 0, len(self.title) + 1)
        return [title, *(self._line(number, width) for number in found[first : first + count])]

    def _line(self, number: int, width: int) -> Any:
        option, is_chosen = self.options[number], number == self.chosen
        names, warnings = (
            max(text.display_width(value) for value in values)
            for values in ([item.name for item in self.options], [item.warning for item in self.options])
        )
        name = option.name + " " * (names - text.display_width(option.name) + 2)
        warning = option.warning + " " * (warnings - text.display_width(option.warning) + 2 * bool(warnings))
        default = "(default) " if number == self.default and len(self.options) > 1 else ""
        line = f"{'>' if is_chosen else ' '} {name}{warning}{default}{option.note}".rstrip()
        painted = load_rich().text.Text(text.cut(text.clean(line), width))
        if is_chosen:
            painted.stylize("bold cyan", 0, 2 + names)
        painted.stylize("yellow", 4 + names, 4 + names + warnings)
        return painted


def choose(
    title: str, options: Sequence[Option], default: int, size: Callable[[], tuple[int, int]], back: bool = False
) -> int | None:
    """The index of the chosen option; None for Esc if `back` is set. `size` returns columns and rows of the
    terminal."""
    menu = _Menu(title, options, default, size, back)
    with _keys(menu.draw) as keyboard:
        menu.draw()
        try:
            while True:
                key = keyboard.read_key()
                if key == "enter" and not menu.is_lost:
                    break
                if key == "eof":
                    raise EOFError
                if key == "escape" and back:
                    return None
                menu.take(key)
                menu.draw()
        finally:
            _put(f"\r{ERASE}")
        _put(f"{title}: {options[menu.chosen].name}\n")
        return menu.chosen
