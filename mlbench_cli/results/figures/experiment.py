"""The charts of an experiment: values over the number of workers, and time against price, or values against bytes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from mlbench_cli.results.analysis.experiment_table import Cell, Row, list_offers, worker_counts
from mlbench_cli.results.analysis.figures import SECONDS
from mlbench_cli.results.analysis.numbers import format_factor
from mlbench_cli.results.analysis.stats import MIN_RUNS
from mlbench_cli.results.figures import chart
from mlbench_cli.results.figures.chart import PUBLISHED, Axis, Chart, Kind, guide
from mlbench_cli.results.figures.files import Sheet, write_sheets
from mlbench_cli.util.front import find_front

PANEL, NETWORK = "task", "network"


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
    return any(cell.value is not None for cell in row.cells.values())


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
    speedups = {workers: row.speedup(workers) for workers in row.cells if row.source is None}
    best = max((found.mean for found in speedups.values() if found is not None), default=0.0)
    for workers, cell in sorted(row.cells.items()):
        if cell.value is None:
            continue
        found, ends = speedups.get(workers), _range(cell)
        point: chart.Row = {"series": label, "x": workers, "y": cell.value.mean}
        point |= {"few": cell.deviation is None and len(cell.runs) < MIN_RUNS, "style": PUBLISHED if row.source else ""}
        point |= {"note": format_factor(found) if found and found.mean == best and best > 1 else ""}
        yield {**point, "low": ends[0], "high": ends[1]} if ends else point


def _range(cell: Cell) -> tuple[float, float] | None:
    """The interval of a cell, or the deviation that was published with it."""
    if cell.value is None:
        return None
    if cell.deviation is not None:
        return cell.value.mean - cell.deviation, cell.value.mean + cell.deviation
    return None if cell.value.low is None or cell.value.high is None else (cell.value.low, cell.value.high)


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
        if any(cell.sent and cell.value for cell in row.cells.values()):
            places.setdefault((row.settings.get(PANEL, ""), row.settings.get(NETWORK, ""), row.unit), []).append(row)
    for (task, network, unit), members in places.items():
        several = len(worker_counts(members)) > 1
        points: list[chart.Row] = []
        for row in members:
            label = ", ".join(value for key, value in row.settings.items() if key not in (PANEL, NETWORK, "series"))
            points += [
                {
                    "series": unit,
                    "x": cell.sent / 1e6,
                    "y": cell.value.mean,
                    "note": f"{label}, {workers}" if several else label,
                }
                for workers, cell in sorted(row.cells.items())
                if cell.value is not None and cell.sent
            ]
        title = ", ".join(word for word in (task, network) if word)
        yield Chart(
            "pareto",
            title,
            Axis("MB sent by rank 0", is_log=True),
            Axis(unit, is_log=unit == SECONDS),
            tuple(points),
            Kind.DOTS,
        )


def draw_front(offers: Iterable[tuple[float, float]]) -> list[chart.Row]:
    """A staircase through the (cost, time) pairs that no other pair dominates."""
    front = find_front(offers, lambda offer: offer)
    corners = front[:1]
    for before, after in pairwise(front):
        corners += [(after[0], before[1]), after]
    return guide("nothing is faster and cheaper", corners)
