"""The table of an experiment: rows of settings by number of workers, with mean, interval, speed-up and efficiency.

From the measurements of series.py to rows to texts. A speed-up is only given beside a baseline of one worker that was
measured in the same experiment, by the same settings, or by the same settings but for the method if a method has none
of its own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.figures import COST, SECONDS, SENT, SUCCESSFUL, THROUGHPUT
from mlbench_cli.results.analysis.numbers import (
    format_estimate,
    format_factor,
    format_percent,
    format_share,
    format_value,
)
from mlbench_cli.results.analysis.published import PublishedSeries
from mlbench_cli.results.analysis.series import Measurement, Point, relate_runs
from mlbench_cli.results.analysis.stats import Estimate, Ratio, ratio
from mlbench_cli.util.csv_text import format_csv

METHOD = "method"
NO_COMMUNICATION = "noop"
GOAL = "goal"


@dataclass(frozen=True)
class Cell:
    """One row at one number of workers: the runs, of which the `good` ones have the row's figure, or a published figure
    with its deviation. `value` is None if no run has the figure."""

    value: Estimate | None
    point: Point | None = None
    problems: tuple[str, ...] = ()
    deviation: float | None = None

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of all runs."""
        return tuple(run.name for run in self._all)

    @property
    def seconds(self) -> float | None:
        """Mean seconds of the runs, the failed ones included."""
        return _mean(run.get("run") for run in self._all)

    @property
    def price(self) -> float | None:
        """Mean price of the runs, the failed ones included; None if it is not known."""
        return _mean(run.get(COST) for run in self._all)

    @property
    def sent(self) -> float | None:
        """Mean bytes that rank 0 sent, by its method's count; None if it is not known."""
        return None if self.point is None else _mean(run.get(SENT) for run in self.point.good)

    @property
    def _all(self) -> tuple[Measurement, ...]:
        return () if self.point is None else (*self.point.good, *self.point.bad)


@dataclass(frozen=True)
class Row:
    """One combination of settings, and the `figure` that it shows of its runs. `source` is None for the experiment's
    own rows, else who published it."""

    settings: Mapping[str, str]
    figure: str
    unit: str
    cells: Mapping[int, Cell]
    source: str | None = None
    baseline: Cell | None = None
    exposed: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_rate(self) -> bool:
        """Whether its figures are rates, of which more is better, and neither seconds nor what a training reached."""
        return self.unit.endswith(("/s", "_per_second"))

    @property
    def label(self) -> str:
        """The settings in a few words, for legends."""
        return ", ".join(value for value in self.settings.values() if value) or "run"

    def speedup(self, workers: int) -> Ratio | None:
        """Relative to one worker; None without a baseline or a value."""
        cell, base = self.cells.get(workers), self.baseline
        if workers == 1 or not (self.unit == SECONDS or self.is_rate):
            return None
        if cell is None or base is None or cell.value is None or base.value is None:
            return None
        if cell.point is not None and base.point is not None:
            found = relate_runs(base.point.good, cell.point.good, self.figure)
        else:
            found = ratio([base.value.mean], [cell.value.mean])
        return None if found is None else found.inverse if self.unit == SECONDS else found

    def efficiency(self, workers: int) -> float | None:
        """Speed-up by number of workers; 1.0 is perfect scaling, None without a baseline of one worker."""
        found = self.speedup(workers)
        return None if found is None else found.mean / workers


def name_settings(runs: Sequence[tuple[str, Mapping[str, str]]]) -> list[dict[str, str]]:
    """The settings that distinguish the rows of runs, from their tasks and the points of their experiment: the task,
    the entry of the file (if several entries have the same task), the cluster, and the values of the matrix."""
    entries: dict[str, set[str]] = {}
    for task, point in runs:
        entries.setdefault(task, set()).add(point.get("runs", ""))
    has_series = any(len(found) > 1 for found in entries.values())
    named = []
    for task, point in runs:
        settings = {"task": task, **({"series": point.get("runs", "")} if has_series else {})}
        settings |= {"cluster": point["cluster"]} if "cluster" in point else {}
        rest = {
            key.removeprefix("set."): value for key, value in point.items() if key not in ("runs", "cluster", "seed")
        }
        named.append({**settings, **rest})
    return named


def make_rows(
    runs: Iterable[tuple[Mapping[str, str], Measurement]],
    metric: str | None = None,
    published: Sequence[PublishedSeries] = (),
) -> list[Row]:
    """The experiment's rows in order of appearance, from the settings of each run and its numbers; then published rows.

    `metric` names the figure that is shown: default is the throughput, else SECONDS, the time to the goal if there is
    one. GOAL is the last value of the goal's metric. The runs are the unit of the interval. The blocks of one run share
    its process and machine state, so they are no repeats: one run has no interval.
    """
    grouped: dict[tuple[tuple[str, str], ...], list[Measurement]] = {}
    for settings, run in runs:
        grouped.setdefault(tuple(settings.items()), []).append(run)
    rows = [_make_row(dict(settings), found, metric) for settings, found in grouped.items()]
    return [_complete(row, rows) for row in rows] + [_published_row(series) for series in published]


def _make_row(settings: Mapping[str, str], runs: Sequence[Measurement], metric: str | None) -> Row:
    named = [_figure_of(run, metric) for run in runs]
    name = next((name for name, run in zip(named, runs, strict=True) if _find_problem(run, name) is None), named[0])
    found = next((run.figures[name] for run in runs if name in run.figures), None)
    unit = SECONDS if name == SECONDS else found.unit if found is not None and name == THROUGHPUT else name
    cells = {}
    for workers in sorted({run.workers for run in runs}):
        problems = [(run, _find_problem(run, name)) for run in runs if run.workers == workers]
        good = tuple(run for run, problem in problems if problem is None)
        point = Point(workers, good, tuple(run for run, problem in problems if problem is not None))
        texts = tuple(f"{run.name}: {problem}" for run, problem in problems if problem)
        cells[workers] = Cell(point.estimates[name] if good else None, point, texts)
    return Row(settings, name, unit if any(cell.value for cell in cells.values()) else "", cells)


def _figure_of(run: Measurement, metric: str | None) -> str:
    """The name of the figure that a run is valued by."""
    if metric == GOAL and run.metric:
        return run.metric
    return metric or (THROUGHPUT if THROUGHPUT in run.figures else SECONDS)


def _find_problem(run: Measurement, name: str) -> str | None:
    """Why a run has no value of that name; None if it has one."""
    if run.outcome not in (*SUCCESSFUL, "goal_missed") or (name == SECONDS and run.outcome == "goal_missed"):
        return run.summary
    return None if name in run.figures else f"it did not report {name}"


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return math.fsum(found) / len(found) if found else None


def _complete(row: Row, rows: Sequence[Row]) -> Row:
    """The row with its baseline and, beside a row without communication, the share of time that is exposed."""
    peers = [other for other in rows if other.figure == row.figure and _without_method(other) == _without_method(row)]
    own = row.cells.get(1)
    baselines = [own, *(other.cells.get(1) for other in peers)]
    baseline = next((cell for cell in baselines if cell is not None and cell.value is not None), None)
    silent = next((other for other in peers if other.settings.get(METHOD) == NO_COMMUNICATION), None)
    exposed = {}
    if silent is not None and silent is not row and row.is_rate:
        for workers, cell in row.cells.items():
            other = silent.cells.get(workers)
            if workers > 1 and cell.value and other and other.value:
                exposed[workers] = 1 - cell.value.mean / other.value.mean
    return replace(row, baseline=baseline, exposed=exposed)


def _without_method(row: Row) -> dict[str, str]:
    return {key: value for key, value in row.settings.items() if key != METHOD}


def _published_row(series: PublishedSeries) -> Row:
    cells = {rate.workers: Cell(Estimate(1, rate.rate), deviation=rate.deviation) for rate in series.rates}
    settings = {"task": series.model, "network": series.network, METHOD: series.method, "source": series.source}
    return Row(settings, THROUGHPUT, f"{series.unit}/s", cells, series.source, cells.get(1))


# --- texts ----------------------------------------------------------------------------------------------------------


def worker_counts(rows: Iterable[Row]) -> list[int]:
    """Every number of workers that any row has, ascending."""
    return sorted({workers for row in rows for workers in row.cells})


def setting_names(rows: Iterable[Row]) -> list[str]:
    """Every setting that any row has, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.settings))


def to_markdown(title: str, rows: Sequence[Row]) -> str:
    """A table: settings, then for each number of workers mean and interval, speed-up and efficiency."""
    names, counts = setting_names(rows), worker_counts(rows)
    head = [*names, "unit", *(f"{count} worker{'s' if count > 1 else ''}" for count in counts)]
    several = [count for count in counts if count > 1]
    has_speedup = any(row.speedup(count) is not None for row in rows for count in several)
    if has_speedup:
        head += [f"{what} {count}" for count in several for what in ("speed-up", "efficiency")]
    has_exposed = any(row.exposed for row in rows)
    if has_exposed:
        head += [f"exposed {count}" for count in several]
    has_sent = any(cell.sent for row in rows for cell in row.cells.values())
    if has_sent:
        head += [f"MB sent {count}" for count in several]
    lines = [f"# {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [row.settings.get(name, "") for name in names] + [row.unit]
        cells += [_value_text(row.cells.get(count)) for count in counts]
        for count in several if has_speedup else ():
            speedup, efficiency = row.speedup(count), row.efficiency(count)
            cells += ["" if speedup is None else format_factor(speedup)]
            cells += ["" if efficiency is None else format_percent(efficiency)]
        if has_exposed:
            shares = (row.exposed.get(count) for count in several)
            cells += ["" if share is None else format_share(share) for share in shares]
        if has_sent:
            sent = (cell.sent if (cell := row.cells.get(count)) else None for count in several)
            cells += ["" if count is None else format_value(count / 1e6) for count in sent]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    lines += ["", *_notes(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = [
        "Geometric means of runs, with the 95 % interval (Student's t) of three runs or more in parentheses. The timed "
        "blocks of one run are not repeats."
    ]
    if any(cell.deviation is not None for row in rows for cell in row.cells.values()):
        notes.append("Published rates: mean ± standard deviation of the source; other machines, other software.")
    if any(row.exposed for row in rows):
        notes.append("exposed: share of the time beyond that of the method `noop`, which sends nothing.")
    if any(cell.sent for row in rows for cell in row.cells.values()):
        notes.append("MB sent: by rank 0, as its method counts them.")
    problems = [problem for row in rows for cell in row.cells.values() for problem in cell.problems]
    return [" ".join(notes), *(["", "Failed:", "", *(f"- {problem}" for problem in problems)] if problems else [])]


def _value_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.value is None:
        return "failed"
    if cell.deviation is not None:
        return f"{format_value(cell.value.mean)} ± {format_value(cell.deviation)}"
    return format_estimate(cell.value)


def to_csv(rows: Sequence[Row]) -> str:
    """One line per row and number of workers: the settings, then the results."""
    names = setting_names(rows)
    found = ("value", "low", "high", "deviation", "unit", "speedup", "efficiency", "exposed")
    rest = ("seconds", "price", "sent_bytes", "runs", "failed")
    table: list[list[object]] = [[*names, "published", "workers", *found, *rest]]
    for row in rows:
        for workers, cell in row.cells.items():
            value, speedup = cell.value, row.speedup(workers)
            table.append(
                [
                    *(row.settings.get(name, "") for name in names),
                    row.source or "",
                    workers,
                    *((value.mean, value.low, value.high) if value else (None, None, None)),
                    cell.deviation,
                    row.unit,
                    speedup.mean if speedup else None,
                    row.efficiency(workers),
                    row.exposed.get(workers),
                    cell.seconds,
                    cell.price,
                    cell.sent,
                    " ".join(cell.runs),
                    len(cell.problems),
                ]
            )
    return format_csv(table)


def to_document(rows: Sequence[Row]) -> list[JsonObject]:
    """The rows as plain values."""
    return [
        {
            "settings": dict(row.settings),
            "published": row.source,
            "unit": row.unit,
            "cells": [
                {
                    "workers": workers,
                    "value": cell.value.to_dict() if cell.value else None,
                    "deviation": cell.deviation,
                    "speedup": found.to_dict() if (found := row.speedup(workers)) else None,
                    "efficiency": row.efficiency(workers),
                    "exposed_share": row.exposed.get(workers),
                    "seconds": cell.seconds,
                    "price": cell.price,
                    "sent_bytes": cell.sent,
                    "runs": list(cell.runs),
                    "problems": list(cell.problems),
                }
                for workers, cell in row.cells.items()
            ],
        }
        for row in rows
    ]


# --- time against price ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """One cell as a choice: seconds for 1 000 units, and what they cost: money, or seconds of workers."""

    label: str
    workers: int
    seconds: float
    cost: float


def list_offers(rows: Sequence[Row]) -> tuple[list[Offer], str]:
    """Choices of the experiment's own rows and the unit of their cost: money if every cell has a price, and seconds of
    workers otherwise."""
    cells = [(row, *each) for row in rows if row.source is None and row.is_rate for each in row.cells.items()]
    cells = [(row, workers, cell) for row, workers, cell in cells if cell.value is not None and cell.value.mean > 0]
    priced = bool(cells) and all(cell.price is not None and cell.seconds for *_, cell in cells)
    offers = []
    for row, workers, cell in cells:
        assert cell.value is not None
        seconds = 1000 / cell.value.mean
        cost = seconds * workers
        if priced and cell.price is not None and cell.seconds:
            cost = seconds * cell.price / cell.seconds
        offers.append(Offer(row.label, workers, seconds, cost))
    return offers, "price" if priced else "seconds of workers"
