"""`mlbench compare`: results beside a baseline."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.api.sources import find_at
from mlbench_cli.commands._archives import Across, Unproven, open_archives
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._repeats import LEGEND
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.goals import BEST
from mlbench_cli.results.analysis.comparability import check_words
from mlbench_cli.results.analysis.compare import (
    Comparison,
    Row,
    Values,
    compare_cells,
    describe_cell,
    find_metric,
    make_document,
)
from mlbench_cli.results.analysis.numbers import TOO_FEW_RUNS, format_estimate
from mlbench_cli.results.analysis.stats import MIN_RUNS
from mlbench_cli.results.archive.bundle import is_zip_name
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.text import list_some


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="the baseline: a run, the common name of repeats, or the folder or zip of a run",
            autocompletion=complete_names,
        ),
    ],
    others: Annotated[
        list[str],
        typer.Argument(metavar="B...", help="results, each to compare with A", autocompletion=complete_names),
    ],
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME", help="figure to compare, e.g. accuracy; default: all"),
    ] = None,
    across: Across = None,
    unproven: Unproven = False,
    output: Output = Format.text,
) -> None:
    """Compare results with a baseline: the differences in their settings, and the ratios of their figures.

    Of repeats (mlbench run --repeat) geometric means are compared, with their 95 % intervals; fewer than three on a
    side give no verdict. Two versions of your own program are compared as before and after. Experiments of several
    sizes or settings are compared cell by cell. mlbench gate fails a build if results got worse.
    """
    accepted = check_words(across or ())
    others = list(dict.fromkeys(others))
    found: list[tuple[Values, Comparison]] = []
    alone: list[str] = []
    with ExitStack() as stack:
        a = open_archives(_archives(first), stack, unproven=unproven)
        for other in others:
            b = open_archives(_archives(other), stack, unproven=unproven)
            cells, without = compare_cells(a, b, (_name(first, a), _name(other, b)), accepted)
            found += cells.items()
            alone += without
    if metric is not None:
        found = [(values, each.reduce_to(str(find_metric(each.rows, metric)))) for values, each in found]
    titles = [_title(each, values, len(others) > 1) for values, each in found]
    if output == Format.json:
        console.out_json(make_document(found, alone))
    else:
        for number, (title, (_, comparison)) in enumerate(zip(titles, found, strict=True)):
            if title:
                console.out(f"{chr(10) if number else ''}{title}")
            _show(comparison)
    if alone:
        console.warn(f"Omitted, because only one side has it: {'; '.join(dict.fromkeys(alone))}.")


def _title(found: Comparison, values: Values, has_several: bool) -> str:
    """What a table compares if there are several: "new against old, 2 workers"."""
    sides = f"{found.b} against {found.a}" if has_several else ""
    return ", ".join(filter(None, (sides, describe_cell(values))))


def _warn(found: Comparison) -> None:
    """The obstacles, one warning for each word of --across; nothing follows from two tasks."""
    by_word: dict[str, list[str]] = {}
    runs: dict[str, list[str]] = {}  # what is wrong with runs -> sentences
    for obstacle in found.obstacles:
        if obstacle.word:
            by_word.setdefault(obstacle.word, []).append(obstacle.text)
        else:
            runs.setdefault(obstacle.reason, []).append(obstacle.text)
    if "task" in by_word:
        by_word = {"task": by_word["task"][:1]}
    for word, texts in by_word.items():
        if len(texts) == 1 and texts[0] in (found.verdict or ""):
            console.warn(f"Accept this difference with --across {word}.")
            continue
        more = f" So do {len(texts) - 1} more of this kind." if len(texts) > 1 else ""
        console.warn(f"{texts[0]}{more} Accept it with --across {word}.")
    for texts in runs.values():
        console.warn(texts[0] if len(texts) == 1 else f"{len(texts)} runs: {texts[0]}")


def _archives(word: str) -> list[Path]:
    """The folders of the run, or of the repeats, of that name; else the path. A word with "/" or ".zip" is a path."""
    client, path = api.Client(), Path(word)
    if "/" in word or is_zip_name(path):
        return client.find_archives([word])
    try:
        runs = client.select([word], repeats=True).runs
    except NotFoundError:
        if path.exists():
            return find_at(path)
        raise
    if path.exists():
        console.note(f'"{word}" means the run of that name; for the folder, use ./{word}')
    return [run.results for run in runs]


def _name(word: str, archives: Sequence[Archive]) -> str:
    return word if len(archives) > 1 else archives[0].name


def _format_setting(value: object) -> str | None:
    """A setting as people write it: a command line, a list of values; "-" for none."""
    if isinstance(value, list | tuple):
        words = list(map(str, value))
        return shlex.join(words) if all(isinstance(item, str) for item in value) else ", ".join(words)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return None if value is None or value == "" else str(value)


def _repeats_another(row: Row, rows: Mapping[str, Row]) -> bool:
    """Whether the row says the same as another: the whole run of a command, or a best value that was the last."""
    other = rows.get("seconds" if row.name == "run" else row.name.removesuffix(BEST))
    return other is not None and other is not row and (row.a, row.b) == (other.a, other.b)


def _lack_runs(found: Comparison) -> bool:
    """Whether no row has an interval because there were too few runs, which is said once for all of them."""
    notes = {row.change.note for row in found.rows.values() if row.ratio is not None}
    return notes == {TOO_FEW_RUNS}


def _cells(row: Row, lacks_runs: bool, *, with_intervals: bool = True) -> list[str]:
    means = [
        format_estimate(side, unit, with_interval=with_intervals)
        for side, unit in ((row.a, row.other_unit or row.unit), (row.b, row.unit))
    ]
    sides = [diverged or mean for diverged, mean in zip(row.diverged, means, strict=True)]
    return [row.name, *sides, row.change.difference if lacks_runs and row.ratio else row.words]


def _show(found: Comparison) -> None:
    if found.verdict:
        console.out(found.verdict)
    lacks_runs = _lack_runs(found)
    figures = [
        row
        for row in found.rows.values()
        if (row.a or row.b or any(row.diverged)) and not _repeats_another(row, found.rows)
    ]
    tables = (
        ("TIME", [row for row in figures if row.is_time]),
        ("FIGURE", [row for row in figures if not row.is_time and not row.is_metric]),
        ("METRIC", [row for row in figures if row.is_metric]),
    )
    for number, (title, rows) in enumerate((title, rows) for title, rows in tables if rows):
        if number or found.verdict:
            console.out("")
        headers = [title, found.a, found.b, "CHANGE"]
        cells = [_cells(row, lacks_runs) for row in rows]
        if console.is_too_wide(headers, cells):  # the interval of the ratio matters most
            cells = [_cells(row, lacks_runs, with_intervals=False) for row in rows]
        console.out_table(headers, cells, wrap=True)
    if lacks_runs and not (found.verdict or "").startswith("Too few"):
        console.note(f"Too few runs for an interval of the change: each side needs at least {MIN_RUNS}.")
    if found.differences:
        console.out("")
        has_one_task = "task" not in found.differences
        settings = [
            ["command" if name == "argv" else name, _format_setting(a), _format_setting(b)]
            for name, (a, b) in found.differences.items()
            if has_one_task or not name.startswith("parameters.")  # those of two tasks have nothing in common
        ]
        console.out_table(["DIFFERENCE", found.a, found.b], settings, wrap=True)
    _warn(found)
    if found.excluded:
        ended = [f"{name} ({how})" for name, how in found.excluded.items()]
        console.warn(f"Left out of all figures: {list_some(ended)}.")
    if found.energy_sources:
        console.note(f"Energy by {'; '.join(found.energy_sources)}. Per sample: mean power over samples per second.")
    if found.sessions.warning:
        console.warn(found.sessions.warning)
    if max(len(found.sessions.a), len(found.sessions.b)) > 1:
        console.note(f"{LEGEND}\nSessions: {found.sessions.note}.")
