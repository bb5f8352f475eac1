"""The table of an experiment: rows of settings by number of workers, with mean, interval, speed-up and efficiency.

Pure: from results to rows to texts. A speed-up is only given beside a baseline of one worker that was measured in the
same experiment, by the same settings, or by the same settings but for the method if a method has none of its own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis import figures
from mlbench_cli.results.analysis.figures import COST, SUCCESSFUL, THROUGHPUT
from mlbench_cli.results.analysis.numbers import (
    format_estimate,
    format_factor,
    format_percent,
    format_share,
    format_value,
)
from mlbench_cli.results.analysis.rates import PublishedSeries
from mlbench_cli.results.analysis.sessions import Moment, find_sessions, moment_of, relate
from mlbench_cli.results.analysis.stats import Estimate, Ratio, estimate, ratio
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.util.csv_text import format_csv

METHOD = "method"
NO_COMMUNICATION = "noop"
SECONDS = "seconds"
GOAL = "goal"


@dataclass(frozen=True)
class Sample:
    """One run that ended. `value` is None if it failed; `problem` then says why.

    settings   what sets the run's row apart, by name
    price      of the run; None if it is not known
    sent       bytes that rank 0 sent by its method's count; None if it is not known
    moment     when and where it was measured; None: independent of the others
    """

    run: str
    settings: Mapping[str, str]
    workers: int
    value: float | None
    unit: str
    seconds: float | None = None
    price: float | None = None
    problem: str | None = None
    sent: float | None = None
    moment: Moment | None = None


@dataclass(frozen=True)
class Cell:
    """One row at one number of workers. `value` is None if no run succeeded."""

    workers: int
    value: Estimate | None
    runs: tuple[str, ...]
    problems: tuple[str, ...] = ()
    seconds: float | None = None
    price: float | None = None
    deviation: float | None = None
    sent: float | None = None
    samples: tuple[Sample, ...] = ()  # of the runs that have a value

    @property
    def values(self) -> list[float]:
        """The values of its runs; of a published one its mean."""
        found = [sample.value for sample in self.samples if sample.value is not None]
        return found or ([self.value.mean] if self.value else [])


@dataclass(frozen=True)
class Row:
    """One combination of settings. `source` is None for the experiment's own rows, else who published it."""

    settings: Mapping[str, str]
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
        if cell is None or base is None or workers == 1 or not (self.unit == SECONDS or self.is_rate):
            return None
        moments = [[sample.moment for sample in side.samples if sample.moment] for side in (base, cell)]
        if all(moments) and [len(side) for side in moments] == [len(base.samples), len(cell.samples)]:
            found = relate(base.values, cell.values, find_sessions(*moments))
        else:
            found = ratio(base.values, cell.values)
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


def read_sample(
    run: str, settings: Mapping[str, str], workers: int, archive: Archive, metric: str | None = None
) -> Sample:
    """A run with its value: the requested figure, else its throughput, else its seconds.

    SECONDS is the time to the goal if there is one, and GOAL the last value of the goal's metric.
    """
    result, found = archive.result, figures.figures(archive)
    facts: dict[str, Any] = {
        "seconds": result["wall_seconds"],
        "sent": _sent_bytes(result),
        "moment": moment_of(archive),
    }
    facts["price"] = found[COST].value if COST in found else None
    outcome, summary = figures.outcome_of(result), str(result["summary"])
    goal = result["goal"]
    name = metric or (THROUGHPUT if THROUGHPUT in found else SECONDS)
    name = str(goal["metric"]) if name == GOAL and goal else name
    if outcome not in (*SUCCESSFUL, "goal_missed") or (name == SECONDS and outcome == "goal_missed"):
        return Sample(run, settings, workers, None, "", problem=summary, **facts)
    if name not in found:
        return Sample(run, settings, workers, None, name, problem=f"it did not report {name}", **facts)
    unit = SECONDS if name == SECONDS else found[name].unit if name == THROUGHPUT else name
    return Sample(run, settings, workers, found[name].value, unit, **facts)


def _sent_bytes(result: Mapping[str, Any]) -> float | None:
    communication = (result.get("details") or {}).get("communication")
    counts = communication if isinstance(communication, Mapping) else {}
    sent = counts.get("wire_bytes", counts.get("bytes"))
    return float(sent) if is_finite_number(sent) else None


def make_rows(samples: Iterable[Sample], published: Sequence[PublishedSeries] = ()) -> list[Row]:
    """The experiment's rows in order of appearance, then published rows.

    The runs are the unit of the interval. The blocks of one run share its process and machine state, so they are no
    repeats: one run has no interval.
    """
    grouped: dict[tuple[tuple[str, str], ...], dict[int, list[Sample]]] = {}
    for sample in samples:
        grouped.setdefault(tuple(sample.settings.items()), {}).setdefault(sample.workers, []).append(sample)
    rows = [
        Row(
            dict(settings),
            next((one.unit for found in by_workers.values() for one in found if one.value is not None), ""),
            {workers: _cell(workers, found) for workers, found in sorted(by_workers.items())},
        )
        for settings, by_workers in grouped.items()
    ]
    return [_complete(row, rows) for row in rows] + [_published_row(series) for series in published]


def _cell(workers: int, samples: Sequence[Sample]) -> Cell:
    good = [sample for sample in samples if sample.value is not None]
    values = [sample.value for sample in good if sample.value is not None]
    prices = [sample.price for sample in samples if sample.price is not None]
    seconds = [sample.seconds for sample in samples if sample.seconds is not None]
    sent = [sample.sent for sample in good if sample.sent is not None]
    return Cell(
        workers,
        estimate(values) if values else None,
        tuple(sample.run for sample in samples),
        tuple(f"{sample.run}: {sample.problem}" for sample in samples if sample.problem),
        math.fsum(seconds) / len(seconds) if seconds else None,
        math.fsum(prices) / len(prices) if prices else None,
        sent=math.fsum(sent) / len(sent) if sent else None,
        samples=tuple(good),
    )


def _complete(row: Row, rows: Sequence[Row]) -> Row:
    """The row with its baseline and, beside a row without communication, the share of time that is exposed."""
    peers = [other for other in rows if _without_method(other) == _without_method(row)]
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
    return Row(row.settings, row.unit, row.cells, row.source, baseline, exposed)


def _without_method(row: Row) -> dict[str, str]:
    return {key: value for key, value in row.settings.items() if key != METHOD}


def _published_row(series: PublishedSeries) -> Row:
    cells = {
        rate.workers: Cell(rate.workers, Estimate(1, rate.rate), (), deviation=rate.deviation) for rate in series.rates
    }
    settings = {"task": series.model, "network": series.network, METHOD: series.method, "source": series.source}
    return Row(settings, f"{series.unit}/s", cells, series.source, cells.get(1))


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
    cells = [(row, cell) for row in rows if row.source is None and row.is_rate for cell in row.cells.values()]
    cells = [(row, cell) for row, cell in cells if cell.value is not None and cell.value.mean > 0]
    priced = bool(cells) and all(cell.price is not None and cell.seconds for _, cell in cells)
    offers = []
    for row, cell in cells:
        assert cell.value is not None
        seconds = 1000 / cell.value.mean
        cost = seconds * cell.workers
        if priced and cell.price is not None and cell.seconds:
            cost = seconds * cell.price / cell.seconds
        offers.append(Offer(row.label, cell.workers, seconds, cost))
    return offers, "price" if priced else "seconds of workers"
