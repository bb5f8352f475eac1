"""The table of what users rely on names tests that exist, each row at least one."""

import ast
import re

from tests.documentation import ROOT

PAGE = ROOT / "docs/development/behaviours.md"
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_each_row_names_a_test_that_exists() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| a user relies on", "| ---"))]
    lost = [row for row in rows if not NAMED.search(row) or not all(map(_exists, NAMED.findall(row)))]
    assert lost == []
    assert len(rows) == len(set(rows)) > 100


def _exists(named: tuple[str, str]) -> bool:
    path, name = named
    file = ROOT / "tests" / path
    functions = ast.parse(file.read_text("utf-8")).body if file.is_file() else []
    return any(isinstance(each, ast.FunctionDef) and each.name == name for each in functions)
