"""Notebook representations of API objects: HTML without scripts, all text escaped."""

from dataclasses import dataclass, replace
from html import escape

from mlbench_cli.results.analysis.notebook import display_table
from mlbench_cli.results.figures.look import STYLE
from mlbench_cli.results.figures.model import Figure
from mlbench_cli.results.figures.svg import render_svg
from mlbench_cli.results.report.model import Report


@dataclass(frozen=True)
class NotebookFigure(Figure):
    """A figure shown as a picture in notebooks."""

    def _repr_html_(self) -> str:
        return _display_figure(self)


@dataclass(frozen=True)
class NotebookReport(Report):
    """A report shown in notebooks, without interaction."""

    def _repr_html_(self) -> str:
        return _display_report(self)


def make_displayable(report: Report) -> NotebookReport:
    """The same report, with notebook representations of itself and its figures."""
    sections = tuple(
        replace(section, figures=tuple(NotebookFigure(**vars(figure)) for figure in section.figures))
        for section in report.sections
    )
    return NotebookReport(**{**vars(report), "sections": sections})


def _display_figure(figure: Figure) -> str:
    """The figure as a picture with its title and caption."""
    caption = f"<br><small>{escape(figure.caption)}</small>" if figure.caption else ""
    title = f"<figcaption>{escape(figure.title)}{caption}</figcaption>"
    return f"<style>{STYLE.read_text('utf-8')}</style><figure>{title}{render_svg(figure)}</figure>"


def _display_report(report: Report) -> str:
    """The headline, warnings, and all sections with tables and figures."""
    parts = [f"<h3>{escape(report.title)}</h3>", *(f"<p>{escape(line)}</p>" for line in report.headline)]
    parts += [f"<p>⚠ {escape(line)}</p>" for line in report.warnings]
    for section in report.sections:
        parts.append(f"<h4>{escape(section.heading)}</h4>")
        parts += [display_table(table.head, table.rows) for table in section.tables]
        parts += [_display_figure(figure) for figure in section.figures]
    return "".join(parts)
