"""The templates of a report, and how a report is written: the page or Markdown, and the CSV of its charts next to it.

The page is one self-contained file: the style is inlined, and a policy blocks everything else.
"""

import base64
import hashlib
import re
import shlex
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mlbench_cli import __version__
from mlbench_cli.errors import UsageError, naming_file_on_os_error
from mlbench_cli.results.analysis.compare import be
from mlbench_cli.results.analysis.numbers import format_estimate, format_goal, format_percent, format_value, unit_of
from mlbench_cli.results.analysis.stats import Estimate, EstimateDocument
from mlbench_cli.results.figures.chart import Chart, to_csv
from mlbench_cli.results.figures.files import STYLE
from mlbench_cli.results.figures.svg import Spent, render_spent, render_svg
from mlbench_cli.results.report.facts import Facts
from mlbench_cli.util import files
from mlbench_cli.util.text import list_some

FOLDER = Path(__file__).parent
SUFFIXES = (".html", ".htm", ".md", ".markdown")
MAX_ROWS = 400  # rows of a chart's table; the CSV has all
MAX_BYTES = 60_000  # of Markdown: GitHub's limit for a comment is 65,536
# With brackets escaped, parentheses and "!" are plain text; "_" inside a word is, too.
_SPECIAL = re.compile(r"([\\`*{}\[\]#|~@]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))")
_CUT = "\n\n*The rest is in the HTML report.*\n"
_NO_FORMS = "base-uri 'none'; form-action 'none'"
# Icon paths on a 16 x 16 grid, so that tones are not told apart by color alone.
_ICONS = {
    "good": "M3 8.5 6.5 12 13 4.5",
    "warn": "M8 2 15 14H1ZM8 6.5v3.5M8 12v.5",
    "bad": "M4 4 12 12M12 4 4 12",
}


@cache
def read_asset(name: str) -> str:
    """A file of this package as text."""
    return (FOLDER / name).read_text("utf-8")


def check_target(path: Path, sources: Sequence[str] = ()) -> None:
    """Raise UsageError if a report about `sources` cannot be written there."""
    is_folder = path.is_dir()
    if is_folder or path.suffix.lower() not in SUFFIXES:
        problem = "is a folder" if is_folder else "is not a report name"
        target = path / "report.html" if is_folder and sources else f"{path}.html"
        raise UsageError(
            f'"{path}" {problem}: the name of a report must end in .html or .md.',
            hint=shlex.join(["mlbench", "report", str(target), *(sources or [str(path)])]),
        )


def write_report(report: Facts, path: Path) -> list[Path]:
    """Write the page in the format of its suffix, and the numbers next to it: NAME-data/results.csv with a row for each
    configuration, and a CSV for each chart; returns the written paths."""
    check_target(path)
    data = path.with_name(f"{path.stem}-data")
    is_page = path.suffix.lower() in SUFFIXES[:2]
    text = render_html(report, quote(data.name)) if is_page else render_markdown(report)
    with naming_file_on_os_error(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = {"results": report["csv"]} | {key: to_csv([chart]) for key, chart in report["charts"].items()}
        data.mkdir(exist_ok=True)
        written = [data / f"{name}.csv" for name in tables]
        for target, table in zip(written, tables.values(), strict=True):
            files.write_atomically(target, table.encode())
        files.write_atomically(path, text.encode())
    return [path, *written]


def render_html(report: Facts, data: str = "") -> str:
    """The page; equal reports give equal bytes. `data` is the folder of the CSV files, next to the page."""
    return render_page(make_environment(), "report.html.j2", report=report, data=data)


def render_page(environment: Environment, template: str, *sheets: str, **values: Any) -> str:
    """A page without scripts, in one file: its policy allows the style sheet alone, that of reports with `sheets`."""
    style = "\n".join([STYLE.read_text("utf-8"), read_asset("page.css"), *sheets])
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; {_NO_FORMS}"
    page = environment.get_template(template)
    return page.render(policy=policy, style=Markup(style), version=__version__, **values)


def render_markdown(report: Facts, *, limit: int = MAX_BYTES) -> str:
    """The report for a pull request, in at most `limit` bytes, cut between sections. Untrusted text is escaped."""
    environment = make_environment().overlay(
        finalize=lambda value: value if isinstance(value, Markup) else Markup(escape(str(value)))
    )
    text = re.sub(r"\n{3,}", "\n\n", environment.get_template("report.md.j2").render(report=report).strip()) + "\n"
    first, *sections = re.split(r"(?m)^(?=## )", text)
    for number, section in enumerate(sections):
        is_last = number == len(sections) - 1
        if len(f"{first}{section}{'' if is_last else _CUT}".encode()) > limit:
            return first.rstrip() + _CUT
        first += section
    return first


def escape(text: str) -> str:
    """Untrusted text on one line, escaped for Markdown and HTML."""
    plain = re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", plain)


@cache
def make_environment(*folders: Path) -> Environment:
    """Jinja with escaping and strict undefined names, for the templates of this package and of `folders`."""
    environment = Environment(
        loader=FileSystemLoader([*folders, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bare": partial(format_estimate, with_interval=False),
        "be": be,
        "begin": lambda text: f"T{text[1:]}" if text.startswith("the ") else text,
        "drawn": _draw_row,
        "estimate": _show_estimate,
        "goal": partial(format_goal, in_words=True),
        "icon": _draw_icon,
        "mean": format_estimate,
        "measured": format_value,
        "percent": format_percent,
        "rows_of": _list_rows,
        "some": list_some,
        "svg": _draw,
        "swatch": _draw_swatch,
        "unit_of": unit_of,
    }
    return environment


def _draw(chart: Chart) -> str:
    return Markup(render_svg(chart))


def _draw_icon(tone: str) -> str:
    path = _ICONS.get(str(tone))
    if path is None:
        return ""
    return Markup(f'<svg class="i" viewBox="0 0 16 16" aria-hidden="true"><path d="{path}"/></svg>')


def _draw_row(plot: dict[str, Any]) -> str:
    spent = [
        Spent(each["name"], each["color"], each["begin"], each["share"], format_value(each["seconds"], "s"))
        for each in plot["spent"]
    ]
    return Markup(render_spent(spent, plot["low"], plot["high"], plot["ideal"]))


def _draw_swatch(color: str) -> str:
    return Markup(f'<svg aria-hidden="true"><rect class="c-{color}" width="22" height="12"/></svg>')  # a word of ours


def _show_estimate(document: EstimateDocument | None, unit: str = "") -> str:
    return format_estimate(None if document is None else Estimate.from_dict(document), unit)


def _list_rows(chart: Chart) -> dict[str, Any]:
    """The rows of a chart for its table: at most MAX_ROWS, how many more there are, and whether any has an interval."""
    left = max(0, len(chart.rows) - MAX_ROWS)
    return {"shown": chart.rows[:MAX_ROWS], "left": left, "intervals": any("low" in row for row in chart.rows)}
