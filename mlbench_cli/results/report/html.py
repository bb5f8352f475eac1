"""A report as one HTML file that needs no network: everything is inside, and a policy forbids all else."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_cli import __version__
from mlbench_cli.results.report.model import Figure, Report
from mlbench_cli.results.report.svg import render_svg

if TYPE_CHECKING:
    from jinja2 import Environment

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


def render_html(report: Report) -> str:
    """The page. The same report gives the same bytes."""
    from markupsafe import Markup

    environment = make_environment()
    style = f"{read_asset('vendored/uPlot.min.css')}\n{read_asset('page.css')}"
    library, script = read_asset("vendored/uPlot.iife.min.js"), read_asset("figures.js")
    return environment.get_template("page.html.j2").render(
        report=report,
        svgs={figure.key: Markup(render_svg(figure)) for figure in report.figures},
        policy=_policy([style], [library, script]),
        style=Markup(style),
        library=Markup(library),
        script=Markup(script),
        licence=read_asset("vendored/LICENSE.uPlot"),
        version=__version__,
    )


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


def format_json(figure: Figure) -> str:
    """The figure's JSON for a script element: no "<", so that nothing in it can end the element."""
    from markupsafe import Markup

    text = json.dumps(figure.to_dict(), allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def rows_of(figure: Figure) -> FigureRows:
    """The data of a figure as a table: at most MAX_ROWS rows, and how many more exist."""
    rows = list(figure.rows())
    return FigureRows(rows[:MAX_ROWS], max(0, len(rows) - MAX_ROWS), any(row[3] is not None for row in rows))


def format_number(value: float | None) -> str:
    """Five significant digits; a dash for None."""
    return "–" if value is None else f"{value:.5g}"


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """The content security policy that allows exactly these texts. uPlot sets styles by script, which is allowed."""
    sources = {"style-src": styles, "script-src": scripts}
    words = [[name, *(f"'sha256-{_digest(text)}'" for text in texts)] for name, texts in sources.items()]
    allowed = "; ".join(" ".join(each) for each in words)
    return f"default-src 'none'; {allowed}; img-src data:; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
