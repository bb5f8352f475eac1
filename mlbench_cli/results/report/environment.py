"""What templates of pages are rendered with: Jinja, and texts of this package. Loads no figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_cli.results.analysis.numbers import format_change, format_estimate, format_goal, format_value, unit_of
from mlbench_cli.results.analysis.statistics import Estimate, EstimateDocument

if TYPE_CHECKING:
    from jinja2 import Environment

    from mlbench_cli.results.figures.model import Figure

FOLDER = Path(__file__).parent
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
    environment.filters["rows_of"] = rows_of
    environment.filters["measured"] = format_value
    environment.filters["unit_of"] = unit_of
    environment.filters["goal"] = format_goal
    environment.filters["estimate"] = _show_estimate
    environment.filters["change"] = _show_change
    return environment


def _show_estimate(document: EstimateDocument | None, unit: str = "") -> str:
    return format_estimate(None if document is None else Estimate.from_dict(document), unit)


def _show_change(row: Mapping[str, Any], unit: str, is_time: bool) -> str:
    """The last cell of a row of a comparison."""
    a, b, found = (None if row[key] is None else Estimate.from_dict(row[key]) for key in ("a", "b", "ratio"))
    return format_change(a, b, found, unit, row["higher_is_better"], is_time=is_time)


def rows_of(figure: "Figure") -> FigureRows:
    """The data of a figure as a table: at most MAX_ROWS rows, and how many more exist."""
    rows = list(figure.rows())
    return FigureRows(rows[:MAX_ROWS], max(0, len(rows) - MAX_ROWS), any(row[3] is not None for row in rows))
