"""Write a report: the page, and the CSV data of its figures next to it."""

from pathlib import Path
from urllib.parse import quote

from mlbench_cli.errors import UsageError
from mlbench_cli.results.archive import layout
from mlbench_cli.results.figures.chart import to_csv
from mlbench_cli.results.report.html import render_html
from mlbench_cli.results.report.markdown import render_markdown
from mlbench_cli.results.report.model import Report
from mlbench_cli.util import files

SUFFIXES = (".html", ".htm", ".md", ".markdown")


def check_target(path: Path) -> None:
    """Raise UsageError if a report cannot be written there."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f'"{path}" is not a report name: it must end in {" or ".join(SUFFIXES)}.',
            hint="mlbench report OUT.html",
        )
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", hint=f"mlbench report {path / 'report.html'}")


def write_report(report: Report, path: Path) -> list[Path]:
    """Write the page in the format of its suffix, and the numbers next to it: NAME-data/results.csv with a row for each
    configuration, and FIGURE.csv; returns the written paths."""
    check_target(path)
    is_markdown = path.suffix.lower() in SUFFIXES[2:]
    data = path.with_name(f"{path.stem}-data")
    text = render_markdown(report) if is_markdown else render_html(report, quote(data.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"The folder {path.parent} cannot be created: {error.strerror}.") from None
    with layout.naming_file_on_os_error(path, "written"):
        tables = {"results": report.csv} | {figure.key: to_csv([figure]) for figure in report.figures}
        data.mkdir(exist_ok=True)
        written = [data / f"{name}.csv" for name in tables]
        for target, table in zip(written, tables.values(), strict=True):
            files.write_atomically(target, table.encode())
        files.write_atomically(path, text.encode())
    return [path, *written]
