"""Tables of commands on narrow terminals: every column that may be dropped is a column of its table."""

import ast
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

import mlbench_cli
from mlbench_cli import console
from mlbench_cli.app import run

ROOT = Path(mlbench_cli.__file__).parent


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


Values = Mapping[str, Sequence[ast.AST]]


def list_values(statements: Iterable[ast.AST]) -> Values:
    """The values assigned to each variable or to its items; in a tuple of targets the value of its own place."""
    found: dict[str, list[ast.AST]] = {}
    for node in statements:
        if isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found.setdefault(node.target.id, []).append(node.value)
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(node.value)
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                found.setdefault(target.value.id, []).append(target.slice)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for each, value in zip(target.elts, node.value.elts, strict=True):
                    if isinstance(each, ast.Name):
                        found.setdefault(each.id, []).append(value)
    return found


def names_in(node: ast.AST, values: Values) -> set[str]:
    """The texts in an expression, and in all that is assigned to the variables in it."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [node]
    while waiting:
        for inner in ast.walk(waiting.pop()):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                found.add(inner.value)
            elif isinstance(inner, ast.JoinedStr):
                found.add(ast.unparse(inner))
            elif isinstance(inner, ast.Name) and inner.id not in seen:
                seen.add(inner.id)
                waiting += values.get(inner.id, ())
    return found


TABLES = [
    (path.stem, call, {**list_values(module.body), **list_values(ast.walk(function))})
    for path in sorted((ROOT / "commands").rglob("*.py"))
    for module in [ast.parse(path.read_text("utf-8"))]
    for function in module.body
    if isinstance(function, ast.FunctionDef)
    for call in ast.walk(function)
    if isinstance(call, ast.Call) and any(word.arg == "droppable" for word in call.keywords)
]


@pytest.mark.parametrize(
    ("call", "values"),
    [table[1:] for table in TABLES],
    ids=[f"{name}-{number}" for number, (name, *_) in enumerate(TABLES)],
)
def test_every_droppable_column_is_a_column_of_its_table(call: ast.Call, values: Values) -> None:
    """A column that is misspelled would fail only on a terminal that is too narrow for the table."""
    (droppable,) = (word.value for word in call.keywords if word.arg == "droppable")
    columns, dropped = names_in(call.args[0], values), names_in(droppable, values)
    assert dropped
    assert dropped <= columns


def test_tables_of_all_commands_are_found() -> None:
    assert len(TABLES) >= 15
    assert {"config", "tasks", "methods", "pins", "plan", "predict", "_status"} <= {name for name, *_ in TABLES}


def show(monkeypatch: pytest.MonkeyPatch, columns: int, *words: str) -> list[str]:
    """The lines that a command prints on a terminal without colors."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(list(words)) == 0
    return terminal.getvalue().splitlines()


def test_settings_lose_their_meaning_before_their_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    heads = [show(monkeypatch, columns, "config")[0].split() for columns in (300, 120, 20)]
    assert heads == [
        ["KEY", "VALUE", "FROM", "VARIABLE", "MEANING"],
        ["KEY", "VALUE", "FROM", "VARIABLE"],
        ["KEY", "VALUE", "FROM"],
    ]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("methods",), ["METHOD", "WHAT", "IT", "DOES"]),
        (("pins",), ["GROUP", "PART", "KUBERNETES", "VERSION"]),
        (("tasks",), ["TASK", "TITLE"]),
    ],
)
def test_a_narrow_terminal_keeps_what_a_row_is_about(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], kept: list[str]
) -> None:
    lines = show(monkeypatch, 30, *words)
    shown = [word.removesuffix("…") for word in lines[0].split()]
    assert len(shown) == len(kept)
    assert all(whole.startswith(word) for word, whole in zip(shown, kept, strict=True))
    assert all(console.display_width(line) <= 4 * console.MIN_COLUMN + 6 for line in lines)
