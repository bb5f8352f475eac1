"""The table of an experiment as Markdown, CSV and JSON, and its charts: values over the number of workers, and time
against price, or values against bytes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.figures import COST, SECONDS, SENT
from mlbench_cli.results.analysis.numbers import (
    format_estimate,
    format_factor,
    format_percent,
    format_share,
    format_value,
)
from mlbench_cli.results.analysis.series import Point, Row
from mlbench_cli.results.analysis.stats import MIN_RUNS, Estimate
from mlbench_cli.results.figures import chart
from mlbench_cli.results.figures.chart import PUBLISHED, Axis, Chart, Kind, guide
from mlbench_cli.results.figures.files import Sheet, write_sheets
from mlbench_cli.util.csv_text import format_csv
from mlbench_cli.util.front import find_front
from mlbench_cli.util.text import counted

PANEL, NETWORK = "task", "network"


# --- table ------------------------------------------------------------------------------------------------------------


def worker_counts(rows: Iterable[Row]) -> list[int]:
    """Every number of workers that any row has, ascending."""
    return sorted({workers for row in rows for workers in row.points})


def setting_names(rows: Iterable[Row]) -> list[str]:
    """Every setting that any row has, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.settings))


def to_markdown(title: str, rows: Sequence[Row]) -> str:
    """A table: settings, then for each number of workers mean and interval, speedup and efficiency."""
    names, counts = setting_names(rows), worker_counts(rows)
    head = [*names, "unit", *(counted(count, "worker") for count in counts)]
    several = [count for count in counts if count > 1]
    has_speedup = any(row.speedup(count) is not None for row in rows for count in several)
    if has_speedup:
        head += [f"{what} {count}" for count in several for what in ("speedup", "efficiency")]
    has_exposed = any(row.exposed for row in rows)
    if has_exposed:
        head += [f"exposed {count}" for count in several]
    has_sent = any(_sent(row, count) for row in rows for count in row.points)
    if has_sent:
        head += [f"MB sent {count}" for count in several]
    lines = [f"# {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [row.settings.get(name, "") for name in names] + [row.unit]
        cells += [_value_text(row, count) for count in counts]
        for count in several if has_speedup else ():
            speedup, efficiency = row.speedup(count), row.efficiency(count)
            cells += ["" if speedup is None else format_factor(speedup)]
            cells += ["" if efficiency is None else format_percent(efficiency)]
        if has_exposed:
            shares = (row.exposed.get(count) for count in several)
            cells += ["" if share is None else format_share(share) for share in shares]
        if has_sent:
            sent = (_sent(row, count) for count in several)
            cells += ["" if count is None else format_value(count / 1e6) for count in sent]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    lines += ["", *_notes(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = [
        "Geometric means of runs, with the 95 % interval (Student's t) of three runs or more in parentheses. The timed "
        "blocks of one run are not repeats."
    ]
    if any(point.deviation is not None for row in rows for point in row.points.values()):
        notes.append("Published rates: mean ± standard deviation of the source; other machines, other software.")
    if any(row.exposed for row in rows):
        notes.append("exposed: share of the time beyond that of the method `noop`, which sends nothing.")
    if any(_sent(row, count) for row in rows for count in row.points):
        notes.append("MB sent: by rank 0, as its method counts them.")
    problems = [problem for row in rows for count in row.points for problem in row.problems(count)]
    return [" ".join(notes), *(["", "Failed:", "", *(f"- {problem}" for problem in problems)] if problems else [])]


def _value_text(row: Row, workers: int) -> str:
    if workers not in row.points:
        return ""
    value, deviation = row.value(workers), row.points[workers].deviation
    if value is None:
        return "failed"
    if deviation is not None:
        return f"{format_value(value.mean)} ± {format_value(deviation)}"
    return format_estimate(value)


def _sent(row: Row, workers: int) -> float | None:
    """Mean bytes that rank 0 sent, by its method's count; None if it is not known."""
    point = row.points.get(workers)
    return _mean(point.estimates.get(SENT)) if point is not None and point.good else None


def _of_successes(point: Point) -> dict[str, Estimate]:
    """The figures of runs that succeeded, as in `status`: a row may also have a value of those that missed the goal."""
    good = tuple(run for run in (*point.good, *point.bad) if run.good)
    return Point(point.workers, good).estimates if good else {}


def _mean(found: Estimate | None) -> float | None:
    return None if found is None else found.mean


def to_csv(rows: Sequence[Row]) -> str:
    """One line per row and number of workers: the settings, then the results."""
    names = setting_names(rows)
    plain = ("seconds", "price", "sent_bytes")
    found = ("value", "low", "high", "deviation", "unit", "speedup", "efficiency", "exposed", *plain, "runs", "failed")
    table: list[list[object]] = [[*names, "published", "workers", *found]]
    for row in to_document(rows):
        for cell in row["cells"]:
            value = cell["value"] or {}
            table.append(
                [
                    *(row["settings"].get(name, "") for name in names),
                    row["published"] or "",
                    cell["workers"],
                    *(value.get(name) for name in ("mean", "low", "high")),
                    cell["deviation"],
                    row["unit"],
                    cell["speedup"] and cell["speedup"]["mean"],
                    cell["efficiency"],
                    cell["exposed_share"],
                    *(cell[name] for name in plain),
                    " ".join(cell["runs"]),
                    len(cell["problems"]),
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
                    "value": value.to_dict() if (value := row.value(workers)) else None,
                    "deviation": point.deviation,
                    "speedup": found.to_dict() if (found := row.speedup(workers)) else None,
                    "efficiency": row.efficiency(workers),
                    "exposed_share": row.exposed.get(workers),
                    "seconds": _mean(_of_successes(point).get(SECONDS)),
                    "price": _mean(_of_successes(point).get(COST)),
                    "sent_bytes": _sent(row, workers),
                    "runs": [run.name for run in (*point.good, *point.bad)],
                    "problems": row.problems(workers),
                }
                for workers, point in row.points.items()
            ],
        }
        for row in rows
    ]


# --- charts -----------------------------------------------------------------------------------------------------------


def draw_experiment(title: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write throughput and pareto as png, svg and csv into `folder`; the paths. Nothing for rows without a value."""
    charts = [_over_workers(name, members) for name, members in split_panels(rows)]
    sheets = [Sheet("throughput", title, tuple(charts))] if charts else []
    if any(row.source is None and row.is_rate and _has_value(row) for row in rows):
        sheets.append(Sheet("pareto", f"{title}: time against cost", (_pareto(rows),), "The numbers are workers."))
    elif by_bytes := tuple(_by_bytes(rows)):
        note = "The numbers are workers." if len(worker_counts(rows)) > 1 else ""
        sheets.append(Sheet("pareto", f"{title}: against bytes sent", by_bytes, note))
    return write_sheets(sheets, folder)


def _has_value(row: Row) -> bool:
    return any(row.value(workers) is not None for workers in row.points)


def split_panels(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that may stand side by side: one panel for each task and unit."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if _has_value(row):
            panels.setdefault((row.settings.get(PANEL, ""), row.unit), []).append(row)
    return [(f"{task}, {unit}" if task else unit, members) for (task, unit), members in panels.items()]


def _over_workers(name: str, rows: Sequence[Row]) -> Chart:
    found = tuple(each for row in rows for each in _line(row))
    return Chart(
        "throughput", name, Axis("workers", is_log=True, at_values=True), Axis(rows[0].unit, from_zero=True), found
    )


def _line(row: Row) -> Iterator[chart.Row]:
    words = [value for key, value in row.settings.items() if key not in (PANEL, "source") and value]
    label = ", ".join([*words, *([row.source] if row.source else [])]) or row.label
    speedups = {workers: row.speedup(workers) for workers in row.points if row.source is None}
    best = max((found.mean for found in speedups.values() if found is not None), default=0.0)
    for workers, point in sorted(row.points.items()):
        value = row.value(workers)
        if value is None:
            continue
        found, low, high = speedups.get(workers), value.low, value.high
        if point.deviation is not None:  # published with the value
            low, high = value.mean - point.deviation, value.mean + point.deviation
        drawn: chart.Row = {"series": label, "x": workers, "y": value.mean}
        few = point.deviation is None and len(point.good) + len(point.bad) < MIN_RUNS
        drawn |= {"few": few, "style": PUBLISHED if row.source else ""}
        drawn |= {"note": format_factor(found) if found and found.mean == best and best > 1 else ""}
        yield drawn if low is None or high is None else {**drawn, "low": low, "high": high}


class Offer(NamedTuple):
    """One point as a choice: seconds for 1,000 units, and what they cost: money, or seconds of workers."""

    label: str
    workers: int
    seconds: float
    cost: float


def list_offers(rows: Sequence[Row]) -> tuple[list[Offer], str]:
    """Choices of the experiment's own rows and the unit of their cost: money if every point has a price, and seconds of
    workers otherwise."""
    known = [
        (row, point, 1000 / value.mean, _mean(point.estimates.get(COST)), _mean(point.estimates.get("run")))
        for row in rows
        if row.source is None and row.is_rate
        for workers, point in row.points.items()
        if (value := row.value(workers)) is not None and value.mean > 0
    ]
    has_prices = bool(known) and all(price is not None and spent for *_, price, spent in known)
    return [
        Offer(
            row.label,
            point.workers,
            seconds,
            seconds * price / spent if has_prices and price is not None and spent else seconds * point.workers,
        )
        for row, point, seconds, price, spent in known
    ], "price" if has_prices else "seconds of workers"


def _pareto(rows: Sequence[Row]) -> Chart:
    offers, unit = list_offers(rows)
    points: list[chart.Row] = [
        {"series": offer.label, "x": offer.cost, "y": offer.seconds, "note": str(offer.workers)} for offer in offers
    ]
    points += draw_front((offer.cost, offer.seconds) for offer in offers)
    axes = Axis(f"{unit} for 1,000 units", from_zero=True), Axis("seconds for 1,000 units", from_zero=True)
    return Chart("pareto", "Time against cost", *axes, tuple(points), Kind.DOTS)


def _by_bytes(rows: Sequence[Row]) -> Iterator[Chart]:
    """What each row reached, or the time it took, against the bytes that it sent: a chart for each task and network,
    with the rest of the settings beside the points."""
    places: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if any(_sent(row, workers) and row.value(workers) for workers in row.points):
            places.setdefault((row.settings.get(PANEL, ""), row.settings.get(NETWORK, ""), row.unit), []).append(row)
    for (task, network, unit), members in places.items():
        several = len(worker_counts(members)) > 1
        points: list[chart.Row] = []
        for row in members:
            label = ", ".join(value for key, value in row.settings.items() if key not in (PANEL, NETWORK, "series"))
            points += [
                {"series": unit, "x": sent / 1e6, "y": value.mean, "note": f"{label}, {workers}" if several else label}
                for workers in sorted(row.points)
                if (value := row.value(workers)) is not None and (sent := _sent(row, workers))
            ]
        title = ", ".join(word for word in (task, network) if word)
        x, y = Axis("MB sent by rank 0", is_log=True), Axis(unit, is_log=unit == SECONDS)
        yield Chart("pareto", title, x, y, tuple(points), Kind.DOTS)


def draw_front(offers: Iterable[tuple[float, float]]) -> list[chart.Row]:
    """A staircase through the (cost, time) pairs that no other pair dominates."""
    front = find_front(offers, lambda offer: offer)
    corners = front[:1]
    for before, after in pairwise(front):
        corners += [(after[0], before[1]), after]
    return guide("nothing is faster and cheaper", corners)
