"""Writing a report: the page, and the data of its figures beside it."""

import csv
import io
from pathlib import Path

from mlbench_cli import files
from mlbench_cli.errors import UsageError
from mlbench_cli.results.archive import layout
from mlbench_cli.results.report.html import render_html
from mlbench_cli.results.report.markdown import render_markdown
from mlbench_cli.results.report.model import Figure, Report

SUFFIXES = (".html", ".htm", ".md", ".markdown")


def check_target(path: Path) -> None:
    """Raise UsageError if a report cannot be written there."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f'"{path}" is no name for a report: it ends in none of {", ".join(SUFFIXES)}.',
            hint="mlbench report OUT.html",
        )
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", hint=f"mlbench report {path / 'report.html'}")


def write_report(report: Report, path: Path) -> list[Path]:
    """Write the page by its suffix, and NAME-data/FIGURE.csv beside it; the paths that were written."""
    check_target(path)
    is_markdown = path.suffix.lower() in SUFFIXES[2:]
    text = render_markdown(report) if is_markdown else render_html(report)
    data = path.with_name(f"{path.stem}-data")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"The folder {path.parent} cannot be made: {error.strerror}.") from None
    with layout.naming_file_on_os_error(path, "written"):
        if report.figures:
            data.mkdir(exist_ok=True)
        written = [data / f"{figure.key}.csv" for figure in report.figures]
        for figure, target in zip(report.figures, written, strict=True):
            files.write_atomically(target, figure_csv(figure).encode())
        files.write_atomically(path, text.encode())
    return [path, *written]


def figure_csv(figure: Figure) -> str:
    """One line per point: line, x, y and the ends of its interval, empty if unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["line", _plain_cell(figure.x.label), _plain_cell(figure.y.label), "low", "high"])
    for line, x, *values in figure.rows():
        writer.writerow(
            [_plain_cell(line), _plain_cell(x), *("" if value is None else repr(value) for value in values)]
        )
    return text.getvalue()


def _plain_cell(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
