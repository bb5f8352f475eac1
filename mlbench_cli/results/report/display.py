"""How objects of the API look in a notebook: HTML without scripts, every text escaped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from mlbench_cli.results.report.environment import format_number
from mlbench_cli.results.report.model import Figure, Report
from mlbench_cli.results.report.svg import render_svg

MAX_ROWS = 20
_STYLE = (
    "<style>.mlbench svg{max-width:640px}.mlbench svg text{font:12px sans-serif;fill:currentColor}"
    ".mlbench .grid{stroke:#8884}.mlbench .axis{stroke:#888;fill:none}.mlbench .middle{text-anchor:middle}"
    ".mlbench .end{text-anchor:end}.mlbench figcaption{font-weight:600}</style>"
)


@dataclass(frozen=True)
class NotebookFigure(Figure):
    """A figure that a notebook shows as a picture."""

    def _repr_html_(self) -> str:
        return _display_figure(self)


@dataclass(frozen=True)
class NotebookReport(Report):
    """A report that a notebook shows, with everything but interaction."""

    def _repr_html_(self) -> str:
        return _display_report(self)


def make_displayable(report: Report) -> NotebookReport:
    """The same report, which shows itself in notebooks, and so does each of its figures."""
    sections = tuple(
        replace(section, figures=tuple(NotebookFigure(**vars(figure)) for figure in section.figures))
        for section in report.sections
    )
    return NotebookReport(**{**vars(report), "sections": sections})


def display_table(head: Sequence[str], rows: Iterable[Sequence[object]], total: int | None = None) -> str:
    """A table of the first MAX_ROWS rows; `total` says how many there are if `rows` are not all."""
    shown: list[Sequence[object]] = []
    count = 0
    for row in rows:
        count += 1
        if count <= MAX_ROWS:
            shown.append(row)
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in shown)
    left = max(0, (total or count) - len(shown))
    more = f"<p>{left} more rows</p>" if left else ""
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{more}"


def _display_figure(figure: Figure) -> str:
    """The figure as a picture with its title and caption."""
    caption = f"<br><small>{escape(figure.caption)}</small>" if figure.caption else ""
    title = f"<figcaption>{escape(figure.title)}{caption}</figcaption>"
    return f'{_STYLE}<figure class="mlbench">{title}{render_svg(figure)}</figure>'


def _display_report(report: Report) -> str:
    """Headline, warnings, and tables and figures of every section."""
    parts = [f"<h3>{escape(report.title)}</h3>", *(f"<p>{escape(line)}</p>" for line in report.headline)]
    parts += [f"<p>⚠ {escape(line)}</p>" for line in report.warnings]
    for section in report.sections:
        parts.append(f"<h4>{escape(section.heading)}</h4>")
        parts += [display_table(table.head, table.rows) for table in section.tables]
        parts += [_display_figure(figure) for figure in section.figures]
    return "".join(parts)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return format_number(value) if isinstance(value, float) else escape(str(value))
