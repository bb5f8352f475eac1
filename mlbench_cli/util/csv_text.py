"""CSV files. There is one writer, which escapes cells that a spreadsheet would evaluate as formulas."""

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def format_csv(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV. Text that a spreadsheet would evaluate is prefixed with an apostrophe; numbers stay numbers."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_guard(cell) for cell in row] for row in rows)
    return text.getvalue()


def read_table(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file that belongs to mlbench, by column. Lines that begin with # are about its origin."""
    return csv.DictReader(line for line in path.read_text("utf-8").splitlines() if not line.startswith("#"))


def _guard(cell: object) -> object:
    if isinstance(cell, str) and "\r" in cell:  # Python before 3.13 leaves it unquoted, and it would begin a row
        cell = cell.replace("\r\n", "\n").replace("\r", "\n")
    if not isinstance(cell, str) or not cell.lstrip(" ").startswith(_FORMULA) or _is_number(cell):
        return cell
    return f"'{cell}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
