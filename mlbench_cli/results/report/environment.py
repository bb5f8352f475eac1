"""The Jinja environment of page templates, and assets of this package. Does not load the figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_cli.results.analysis.numbers import format_estimate, format_goal, format_value, unit_of
from mlbench_cli.results.analysis.stats import Estimate, EstimateDocument

if TYPE_CHECKING:
    from jinja2 import Environment

    from mlbench_cli.results.figures.model import Figure
    from mlbench_cli.results.report.model import RowPlot

FOLDER = Path(__file__).parent
MAX_ROWS = 400  # rows of a figure's table; the CSV has all

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
    """Jinja with escaping and strict undefined names, for the templates of this package and of `folders`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([*folders, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["rows_of"] = rows_of
    environment.filters["drawn"] = _draw_row
    environment.filters["swatch"] = _draw_swatch
    environment.filters["icon"] = _draw_icon
    environment.filters["measured"] = format_value
    environment.filters["unit_of"] = unit_of
    environment.filters["goal"] = partial(format_goal, in_words=True)
    environment.filters["estimate"] = _show_estimate
    return environment


# Icon paths on a 16 x 16 grid, so that tones are not told apart by color alone.
_ICONS = {
    "good": "M3 8.5 6.5 12 13 4.5",
    "warn": "M8 2 15 14H1ZM8 6.5v3.5M8 12v.5",
    "bad": "M4 4 12 12M12 4 4 12",
}


def _draw_icon(tone: str) -> str:
    from markupsafe import Markup

    path = _ICONS.get(str(tone))
    if path is None:
        return ""
    return Markup(f'<svg class="i" viewBox="0 0 16 16" aria-hidden="true"><path d="{path}"/></svg>')


def _draw_row(plot: "RowPlot") -> str:
    from markupsafe import Markup

    from mlbench_cli.results.figures.svg import render_spent

    return Markup(render_spent(*plot))


def _draw_swatch(color: str) -> str:
    from markupsafe import Markup

    return Markup(f'<svg aria-hidden="true"><rect class="c-{color}" width="22" height="12"/></svg>')  # a word of ours


def _show_estimate(document: EstimateDocument | None, unit: str = "") -> str:
    return format_estimate(None if document is None else Estimate.from_dict(document), unit)


def rows_of(figure: "Figure") -> FigureRows:
    """The data of a figure as a table of at most MAX_ROWS rows, and the number of further rows."""
    rows = list(figure.rows())
    return FigureRows(rows[:MAX_ROWS], max(0, len(rows) - MAX_ROWS), any(row[3] is not None for row in rows))
