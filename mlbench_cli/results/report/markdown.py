"""A report as Markdown for pull requests: headline, warnings, tables, and the figures as tables.

Untrusted text is escaped, so that it cannot become Markdown or HTML.
"""

import re
from collections.abc import Iterator, Sequence

from mlbench_cli.results.analysis.numbers import format_value
from mlbench_cli.results.figures.model import Figure, Scale
from mlbench_cli.results.report.model import Report, ReportTable, Section

MAX_BYTES = 60_000  # GitHub's limit for a comment is 65,536
MAX_FIGURE_ROWS = 24
# With brackets escaped, parentheses and "!" are plain text; "_" inside a word is, too.
_SPECIAL = re.compile(r"([\\`*{}\[\]#|~@]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))")
_CUT = "\n\n*The rest is in the HTML report.*\n"


def render_markdown(report: Report, *, limit: int = MAX_BYTES) -> str:
    """The report in at most `limit` bytes, cut between sections."""
    begin = [f"# {escape(report.title)}", escape(report.context), *(f"**{escape(line)}**" for line in report.headline)]
    if report.warnings:
        begin.append("\n".join(f"> {escape(line)}" for line in report.warnings))
    text = "\n\n".join(begin) + "\n"
    for section in report.sections:
        more = "\n" + "\n\n".join(_section(section)) + "\n"
        if len((text + more + _CUT).encode()) > limit:
            return text + _CUT
        text += more
    return text


def escape(text: str) -> str:
    """Untrusted text on one line, escaped for Markdown and HTML."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", plain)


def _section(section: Section) -> Iterator[str]:
    yield f"## {escape(section.heading)}"
    yield from map(escape, section.paragraphs)
    for note in section.notes:
        command = f" Next: {escape(note.command)}" if note.command else ""
        yield f"- **{escape(note.lead)}** {escape(note.text)}{command}".rstrip()
    for table in section.tables:
        yield f"**{escape(table.title)}**"
        yield _table(table.head, table.rows, table.numeric)
    if section.commands:
        fence = "```"
        yield "\n".join((fence, *(" ".join(line.replace("`", "'").split()) for line in section.commands), fence))
    figures = [figure for figure in section.figures if figure.x.scale is Scale.CATEGORIES or len(_xs(figure)) <= 12]
    for figure in figures:
        yield from _figure(figure)
    left = len(section.figures) - len(figures)
    if left:
        yield f"*{left} figures over time are in the HTML report.*"


def _figure(figure: Figure) -> Iterator[str]:
    """A figure as a table with a row per x and a column per line."""
    xs = _xs(figure)
    head = (figure.x.label, *(line.label for line in figure.lines))
    columns = [dict(zip(line.xs, line.ys, strict=True)) for line in figure.lines]
    rows = [
        (figure.name_x(x), *(format_value(column.get(x), figure.y.unit) for column in columns))
        for x in xs[:MAX_FIGURE_ROWS]
    ]
    table = ReportTable(figure.title, head, tuple(rows), tuple(range(len(head))))
    yield f"<details><summary>{escape(figure.title)} ({escape(figure.y.label)})</summary>"
    yield _table(table.head, table.rows, table.numeric)
    yield "</details>"


def _xs(figure: Figure) -> list[float]:
    return sorted({x for line in figure.lines for x in line.xs})


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int]) -> str:
    marks = ["---:" if index in numeric else "---" for index in range(len(head))]
    lines = [[escape(cell) for cell in head], marks, *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
