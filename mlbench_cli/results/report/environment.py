"""What templates of pages are rendered with: Jinja, and texts of this package. Loads no figures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

    from mlbench_cli.results.report.model import Figure

FOLDER = Path(__file__).parent
VENDORED = FOLDER / "vendored"
MAX_ROWS = 400  # of a figure's table; all are in the CSV

_Row = tuple[str, str, float | None, float | None, float | None]


@dataclass(frozen=True)
class FigureRows:
    """The numbers of a figure for its table."""

    shown: Sequence[_Row]
    left: int
    has_interval: bool


@cache
def read_asset(name: str) -> str:
    """A file of this package as text."""
    return (FOLDER / name).read_text("utf-8")


@cache
def make_environment(*folders: Path) -> "Environment":
    """Jinja with escaping on and an error for every unknown name; templates of this package and of `folders`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([*folders, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure_json"] = format_json
    environment.filters["rows_of"] = rows_of
    environment.filters["number"] = format_number
    return environment


def format_json(figure: "Figure") -> str:
    """The figure's JSON for a script element: no "<", so that nothing in it can end the element."""
    from markupsafe import Markup

    text = json.dumps(figure.to_dict(), allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def rows_of(figure: "Figure") -> FigureRows:
    """The data of a figure as a table: at most MAX_ROWS rows, and how many more exist."""
    rows = list(figure.rows())
    return FigureRows(rows[:MAX_ROWS], max(0, len(rows) - MAX_ROWS), any(row[3] is not None for row in rows))


def format_number(value: float | None) -> str:
    """Five significant digits; a dash for None."""
    return "–" if value is None else f"{value:.5g}"
