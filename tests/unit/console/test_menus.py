"""A line that is edited and a menu that is searched: what each key does, and what is drawn in a width and height."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from mlbench_cli.console import prompts
from mlbench_cli.console.prompts import Keyboard, _Editor, _Menu
from mlbench_cli.util.text import Option

# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], list[str]]:
    """Returns the names of the keys whose bytes arrive together."""
    monkeypatch.setattr(prompts, "ESCAPE_SECONDS", 0.0)

    def read(data: bytes) -> list[str]:
        reading, writing = os.pipe()
        os.write(writing, data)
        os.close(writing)
        keyboard = os.fdopen(reading)
        monkeypatch.setattr(sys, "stdin", keyboard)
        found, keys = [], Keyboard()
        try:
            while True:
                found.append(keys.read_key())
        except EOFError:
            return found
        finally:
            keyboard.close()

    return read


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"a\xc3\xa9 ", ["a", "é", " "]),
        (b"\r\n", ["enter", "enter"]),
        (b"\x7f\x08\x04\t", ["backspace", "backspace", "eof", "down"]),
        (b"\x01\x05\x02\x06\x0e\x10", ["home", "end", "left", "right", "down", "up"]),
        (b"\x15\x0b\x17", ["kill", "kill end", "kill word"]),
        (b"\x1b[A\x1bOA\x1b[B\x1bOB", ["up", "up", "down", "down"]),
        (b"\x1b[C\x1bOC\x1b[D\x1bOD", ["right", "right", "left", "left"]),
        (b"\x1b[H\x1bOH\x1b[1~\x1b[F\x1bOF\x1b[4~", ["home", "home", "home", "end", "end", "end"]),
        (b"\x1b[3~\x1b[5~\x1b[6~", ["delete", "page up", "page down"]),
        (b"\x1b[15~x", ["", "x"]),  # F5
        (b"\x1bx\x07", ["", ""]),  # Alt-x and a bell
    ],
)
def test_the_bytes_of_keys(press: Callable[[bytes], list[str]], data: bytes, keys: list[str]) -> None:
    assert press(data) == keys


# --- a line -----------------------------------------------------------------------------------------------------------


def edit(*keys: str) -> str:
    """The line, with the cursor as "|"."""
    editor = _Editor("? ", lambda: 80)
    for key in keys:
        for part in [key] if key in ACTIONS else key:
            editor.take(part)
    return f"{editor.line[: editor.place]}|{editor.line[editor.place :]}"


ACTIONS = ("left", "right", "home", "end", "backspace", "delete", "kill", "kill end", "kill word", "", "escape", "up")


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (("abc",), "abc|"),
        (("abc", "left", "X"), "abX|c"),
        (("abc", "left", "left", "left", "left", "X"), "X|abc"),
        (("abc", "right", "right"), "abc|"),
        (("abc", "home"), "|abc"),
        (("abc", "home", "right"), "a|bc"),
        (("abc", "home", "end"), "abc|"),
        (("abc", "left", "backspace"), "a|c"),
        (("abc", "home", "backspace"), "|abc"),
        (("abc", "home", "delete"), "|bc"),
        (("abc", "delete"), "abc|"),
        (("abc", "left", "kill"), "|c"),
        (("abc", "left", "kill end"), "ab|"),
        (("one two", "kill word"), "one |"),
        (("one two ", "kill word"), "one |"),
        (("one two", "left", "kill word"), "one |o"),
        (("one", "kill word"), "|"),
        (("abc", "", "escape", "up"), "abc|"),
    ],
)
def test_the_keys_of_a_line(keys: tuple[str, ...], line: str) -> None:
    assert edit(*keys) == line


@pytest.mark.parametrize(
    ("line", "place", "drawn"),
    [
        ("abc", 3, "? abc"),
        ("abc", 1, "? abc\x1b[2D"),
        ("0123456789abcdef", 16, "? 0123456789abcdef"),
        ("0123456789abcdefg", 17, "? 123456789abcdefg"),
        ("0123456789abcdefgh", 0, "? 0123456789abcdefg\x1b[17D"),
        ("日本日本日本日本日本", 10, "? 日本日本日本日本"),
    ],
)
def test_a_long_answer_is_scrolled_to_the_cursor(
    monkeypatch: pytest.MonkeyPatch, line: str, place: int, drawn: str
) -> None:
    """Of 20 columns the question takes two, and one is left for the cursor."""
    put: list[str] = []
    monkeypatch.setattr(prompts, "_put", put.append)
    editor = _Editor("? ", lambda: 20)
    editor.line, editor.place = line, place
    editor.draw()
    assert put == [f"\r\x1b[J{drawn}"]


class Typing:
    """A keyboard with keys that were pressed before, and what is put on the terminal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.put: list[str] = []
        self.keys: list[str] = []
        monkeypatch.setattr(prompts, "_put", self.put.append)
        monkeypatch.setattr(prompts, "_keys", lambda redraw: nullcontext(self))

    def read_key(self) -> str:
        return self.keys.pop(0)

    def edit(self, *keys: str, back: bool = False) -> str | None:
        self.keys = list(keys)
        return prompts.edit_line("? ", lambda: 80, back)

    def choose(self, *keys: str, back: bool = False) -> int | None:
        self.keys = list(keys)
        return prompts.choose("Task", OPTIONS, 2, lambda: (80, 24), back)


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Typing:
    return Typing(monkeypatch)


def test_a_line_ends_with_enter(typing: Typing) -> None:
    assert typing.edit("a", "b", "left", "c", "enter", "d") == "acb"
    assert typing.put[0] == "\r\x1b[J? "
    assert typing.put[-2:] == ["\r\x1b[J? acb\x1b[1D", "\n"]


def test_the_end_of_input_deletes_unless_the_line_is_empty(typing: Typing) -> None:
    assert typing.edit("a", "b", "home", "eof", "enter") == "b"
    with pytest.raises(EOFError):
        typing.edit("a", "backspace", "eof")
    assert typing.put[-1] == "\n"


def test_escape_leads_back_only_if_there_is_a_question_before(typing: Typing) -> None:
    assert typing.edit("a", "escape", back=True) is None
    assert typing.put[-1] == "\r\x1b[J"
    assert typing.edit("a", "escape", "enter") == "a"
    assert typing.choose("escape", back=True) is None
    assert typing.put[-1] == "\r\x1b[J"
    assert typing.choose("down", "escape", "enter") == 3


def test_a_choice_ends_with_enter_and_is_kept_on_the_screen(typing: Typing) -> None:
    assert typing.choose("enter") == 2
    assert typing.put[-2:] == ["\r\x1b[J", "Task: gpt\n"]
    drawn = typing.put[0]
    assert drawn.startswith("\r\x1b[J")
    assert drawn.endswith("\x1b[5A\r")  # back over the five options to the title
    assert drawn.count("\n") == 5


def test_nothing_is_chosen_while_nothing_matches(typing: Typing) -> None:
    assert typing.choose("b", "x", "enter", "backspace", "enter") == 3
    with pytest.raises(EOFError):
        typing.choose("eof")


# --- a menu -----------------------------------------------------------------------------------------------------------

OPTIONS = [
    Option("digits_resnet", "small"),
    Option("resnet", "large", "needs a GPU"),
    Option("gpt", "a model of Text"),
    Option("bert", "another of text"),
    Option("allreduce"),
]


def menu(*keys: str, options: list[Option] = OPTIONS, default: int = 2, back: bool = False) -> _Menu:
    made = _Menu("Task", options, default, lambda: (80, 24), back)
    for key in keys:
        for part in [key] if key in (*ACTIONS, "down", "page up", "page down") else key:
            made.take(part)
    return made


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ((), "gpt"),
        (("down",), "bert"),
        (("up",), "resnet"),
        (("down", "down", "down"), "digits_resnet"),
        (("up", "up", "up"), "allreduce"),
        (("home",), "digits_resnet"),
        (("page up",), "digits_resnet"),
        (("end",), "allreduce"),
        (("page down",), "allreduce"),
        (("resnet",), "resnet"),  # the whole name comes before one that contains it
        (("re",), "resnet"),  # and the beginning of a name, too
        (("RES",), "resnet"),
        (("e",), "digits_resnet"),
        (("e", "down"), "resnet"),
        (("text",), "gpt"),
        (("text", "down"), "bert"),
        (("text", "down", "down"), "gpt"),
        (("xyz", "down"), "gpt"),
        (("ber", "kill"), "gpt"),
        (("ber", "backspace", "backspace", "backspace"), "gpt"),
        (("berx", "backspace"), "bert"),
    ],
)
def test_the_keys_of_a_menu(keys: tuple[str, ...], name: str) -> None:
    assert OPTIONS[menu(*keys).chosen].name == name


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("res", [0, 1]),
        ("E", [0, 1, 3, 4]),
        ("text", [2, 3]),
        ("small", [0]),
        ("gpu", []),
    ],
)
def test_a_menu_is_searched_by_names_and_then_by_notes(typed: str, shown: list[int]) -> None:
    found = menu(typed)
    assert found.shown == shown
    assert found.is_lost is not bool(shown)


def lines(made: _Menu, width: int = 79, rows: int = 24) -> list[str]:
    return [line.plain for line in made._lines(width, rows)]


def test_a_menu_has_aligned_names_warnings_and_notes() -> None:
    assert lines(menu()) == [
        "Task: arrow keys or letters, then Enter",
        "  digits_resnet               small",
        "  resnet         needs a GPU  large",
        "> gpt                         (default) a model of Text",
        "  bert                        another of text",
        "  allreduce",
    ]


def test_a_menu_of_one_option_names_no_default() -> None:
    assert lines(menu(options=[Option("gpt", "a model")], default=0))[1:] == ["> gpt  a model"]


@pytest.mark.parametrize(
    ("keys", "title"),
    [
        ((), "Task: arrow keys or letters, then Enter; Esc: back"),
        (("res",), "Task: res"),
        (("xyz",), 'Task: nothing matches "xyz"'),
    ],
)
def test_the_title_of_a_menu_says_what_is_searched(keys: tuple[str, ...], title: str) -> None:
    assert lines(menu(*keys, back=True))[0] == title


@pytest.mark.parametrize(
    ("rows", "chosen", "names"),
    [
        (24, 5, range(10)),
        (13, 5, range(10)),
        (12, 0, range(9)),
        (12, 9, range(1, 10)),
        (8, 0, range(5)),
        (8, 5, range(3, 8)),
        (8, 9, range(5, 10)),
        (4, 5, range(4, 7)),
        (1, 9, range(7, 10)),
    ],
)
def test_a_menu_is_scrolled_to_what_is_chosen(rows: int, chosen: int, names: range) -> None:
    made = menu(options=[Option(f"o{number}") for number in range(10)], default=0)
    made.chosen = chosen
    shown = lines(made, rows=rows)[1:]
    assert [line[2:].split()[0] for line in shown] == [f"o{number}" for number in names]
    assert [line.startswith(">") for line in shown] == [number == chosen for number in names]


def test_a_line_of_a_menu_is_cut_to_the_width_and_cleaned() -> None:
    made = menu(options=[Option("a", "b\x1b[31m" + "c" * 90), Option("b")], default=1)
    line = lines(made, 20)[1]
    assert line == "  a  b\\x1b[31mccccc…"
    assert len(line) == 20


def test_the_chosen_option_and_warnings_are_colored() -> None:
    title, *found = menu()._lines(79, 24)
    assert [(span.start, span.end, span.style) for span in title.spans] == [(0, 5, "bold")]
    assert [(span.start, span.end, span.style) for span in found[1].spans] == [(17, 28, "yellow")]
    assert found[1].plain[17:28] == "needs a GPU"
    assert next((span.start, span.end, span.style) for span in found[2].spans) == (0, 15, "bold cyan")
