"""A report as Markdown for pull requests: headline, warnings, tables, and the figures as tables.

Untrusted text is escaped, so that it cannot become Markdown or HTML.
"""

import re
from collections.abc import Iterator, Sequence

from mlbench_cli.results.analysis.numbers import format_value
from mlbench_cli.results.figures.chart import Chart
from mlbench_cli.results.report.model import Report, Section

MAX_BYTES = 60_000  # GitHub's limit for a comment is 65,536
MAX_ROWS = 24  # of a chart that is written as a table
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
    charts = [chart for chart in section.figures if len(chart.rows) <= MAX_ROWS]
    for chart in charts:
        yield from _chart(chart)
    left = len(section.figures) - len(charts)
    if left:
        yield f"*{left} figures over time are in the HTML report.*"


def _chart(chart: Chart) -> Iterator[str]:
    """The rows of a chart."""
    rows = [(row["series"], _text(row["x"]), format_value(row["y"], chart.y.unit)) for row in chart.rows]
    yield f"<details><summary>{escape(chart.title)} ({escape(chart.y.label)})</summary>"
    yield _table(("series", chart.x.label, chart.y.label), rows, (1, 2))
    yield "</details>"


def _text(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.9g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int]) -> str:
    marks = ["---:" if index in numeric else "---" for index in range(len(head))]
    lines = [[escape(cell) for cell in head], marks, *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
