"""The Jinja environment of page templates, and assets of this package. Does not load the figures."""

from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_cli.results.analysis.numbers import format_estimate, format_goal, format_value, unit_of
from mlbench_cli.results.analysis.stats import Estimate, EstimateDocument

if TYPE_CHECKING:
    from jinja2 import Environment

    from mlbench_cli.results.figures.chart import Chart
    from mlbench_cli.results.report.model import RowPlot

FOLDER = Path(__file__).parent
MAX_ROWS = 400  # rows of a chart's table; the CSV has all


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
    environment.filters["rows_of"] = _list_rows
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


def _list_rows(chart: "Chart") -> dict[str, Any]:
    """The rows of a chart for its table: at most MAX_ROWS, how many more there are, and whether any has an interval."""
    left = max(0, len(chart.rows) - MAX_ROWS)
    return {"shown": chart.rows[:MAX_ROWS], "left": left, "intervals": any("low" in row for row in chart.rows)}
