"""The figures of an experiment: values over the number of workers, and time against price, or values against bytes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from mlbench_cli.results.analysis.experiment_table import SECONDS, Cell, Row, list_offers, worker_counts
from mlbench_cli.results.analysis.numbers import format_factor
from mlbench_cli.results.analysis.stats import MIN_RUNS
from mlbench_cli.results.figures.look import MAX_LOOKS, Look, choose_shared_looks, look_of
from mlbench_cli.results.figures.model import MAX_SERIES, Axis, Figure, Line, Scale, Sheet, choose_divider
from mlbench_cli.results.figures.png import write_sheets
from mlbench_cli.util.front import find_front

PANEL, NETWORK = "task", "network"


def draw_experiment(title: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write throughput.png/svg and pareto.png/svg into `folder`; the paths. Nothing for rows without a value."""
    panels = split_panels(rows)
    sheets = [Sheet("throughput", title, tuple(_figure(name, members) for name, members in panels))] if panels else []
    if any(row.source is None and row.is_rate and _has_value(row) for row in rows):
        sheets.append(Sheet("pareto", f"{title}: time against cost", (_pareto(rows),), "The numbers are workers."))
    elif by_bytes := tuple(_by_bytes(rows)):
        note = "The numbers are workers." if len(worker_counts(rows)) > 1 else ""
        sheets.append(Sheet("pareto", f"{title}: against bytes sent", by_bytes, note))
    return write_sheets(sheets, folder)


def _has_value(row: Row) -> bool:
    return any(cell.value is not None for cell in row.cells.values())


def _has_sent(row: Row) -> bool:
    return any(cell.sent and cell.value for cell in row.cells.values())


def split_panels(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that may stand side by side: one panel for each task and unit."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if _has_value(row):
            panels.setdefault((row.settings.get(PANEL, ""), row.unit), []).append(row)
    return [(f"{task}, {unit}" if task else unit, members) for (task, unit), members in panels.items()]


def _figure(name: str, rows: Sequence[Row]) -> Figure:
    own, published = ([row for row in rows if bool(row.source) is known] for known in (False, True))
    lines = [_place(_line(row, look), *words) for row, look, *words in _arrange(own)]
    looks = [(line.color, line.shape) for line in lines]
    free = [look for look in map(look_of, range(MAX_LOOKS)) if look not in looks] or [look_of(0)]
    lines += [replace(_line(row, free[index % len(free)]), panel="published") for index, row in enumerate(published)]
    x = Axis("workers", Scale.LOG2, ticks=tuple(map(float, worker_counts(rows))))
    return Figure(name, name, x, Axis(rows[0].unit, from_zero=True), tuple(lines))


def _arrange(rows: Sequence[Row]) -> Iterator[tuple[Row, Look, str, str]]:
    """Each row with its look, the title of its small multiple, and what sets it apart there."""
    names = [key for key in dict.fromkeys(key for row in rows for key in row.settings) if key != PANEL]
    divider = choose_divider(names, [row.settings for row in rows]) if len(rows) > MAX_SERIES else ""
    shorts = [_short_label(row, divider) for row in rows]
    looks = choose_shared_looks(shorts, [row.settings.get("method", "") for row in rows])
    panels = [row.settings.get(divider, "") if divider else "measured" for row in rows]
    return zip(rows, looks, panels, shorts, strict=True)


def _place(line: Line, panel: str, short: str) -> Line:
    return replace(line, panel=panel, short=short)


def _line(row: Row, look: Look) -> Line:
    cells = [cell for _, cell in sorted(row.cells.items()) if cell.value is not None]
    ends = [_range(cell) for cell in cells]
    speedups = [None if row.source else row.speedup(cell.workers) for cell in cells]
    best = max((found.mean for found in speedups if found is not None), default=None)
    return Line(
        _short_label(row),
        tuple(float(cell.workers) for cell in cells),
        tuple(cell.value.mean if cell.value else None for cell in cells),
        tuple(end and end[0] for end in ends) if any(ends) else (),
        tuple(end and end[1] for end in ends) if any(ends) else (),
        reference=row.source is not None,
        few=tuple(cell.deviation is None and len(cell.runs) < MIN_RUNS for cell in cells),
        notes=tuple(format_factor(found) if found and found.mean == best and best > 1 else "" for found in speedups),
        color=look[0],
        shape=look[1],
    )


def _range(cell: Cell) -> tuple[float, float] | None:
    """The published deviation around the mean, else what is known of the spread of own runs."""
    assert cell.value is not None
    if cell.deviation is not None:
        return cell.value.mean - cell.deviation, cell.value.mean + cell.deviation
    return None if cell.value.low is None or cell.value.high is None else (cell.value.low, cell.value.high)


def _short_label(row: Row, divider: str = "") -> str:
    """What sets a row apart inside its panel."""
    words = [value for key, value in row.settings.items() if key not in (PANEL, "source", divider) and value]
    return ", ".join([*words, *([row.source] if row.source else [])]) or row.label


def _pareto(rows: Sequence[Row]) -> Figure:
    offers, unit = list_offers(rows)
    return Figure(
        "pareto",
        "Time against cost",
        Axis(f"{unit} for 1,000 units", from_zero=True),
        Axis("seconds for 1,000 units", from_zero=True),
        (*_offer_lines(rows), draw_front((offer.cost, offer.seconds) for offer in offers)),
    )


def _by_bytes(rows: Sequence[Row]) -> Iterator[Figure]:
    """What each row reached, or the time it took, against what it sent to get there: a figure for each task and
    network, with the rest of the settings beside the points."""
    places: dict[tuple[str, str, str], list[Row]] = {}
    for row in filter(_has_sent, rows):
        places.setdefault((row.settings.get(PANEL, ""), row.settings.get(NETWORK, ""), row.unit), []).append(row)
    for (task, network, unit), members in places.items():
        several = len(worker_counts(members)) > 1
        lines = []
        for row in members:
            label = ", ".join(value for key, value in row.settings.items() if key not in (PANEL, NETWORK, "series"))
            for workers, cell in sorted(row.cells.items()):
                if cell.value is not None and cell.sent:
                    note = f"{label}, {workers}" if several else label
                    lines.append(Line("", (cell.sent / 1e6,), (cell.value.mean,), notes=(note,), color="step"))
        title = ", ".join(word for word in (task, network) if word)
        y = Axis(unit, Scale.LOG10) if unit == SECONDS else Axis(unit)
        yield Figure(title, title, Axis("MB sent by rank 0", Scale.LOG10), y, tuple(lines))


def _offer_lines(rows: Sequence[Row]) -> Iterator[Line]:
    offers, _ = list_offers(rows)
    for index, label in enumerate(dict.fromkeys(offer.label for offer in offers)):
        own = sorted((offer for offer in offers if offer.label == label), key=lambda offer: offer.workers)
        color, shape = look_of(index)
        costs, seconds = tuple(offer.cost for offer in own), tuple(offer.seconds for offer in own)
        notes = tuple(str(offer.workers) for offer in own)
        yield Line(label, costs, seconds, notes=notes, color=color, shape=shape)


def draw_front(offers: Iterable[tuple[float, float]]) -> Line:
    """A staircase through the (cost, time) pairs that no other one beats: cheaper costs time only at the next offer."""
    front = find_front(offers, lambda offer: offer)
    corners = front[:1]
    for before, after in pairwise(front):
        corners += [(after[0], before[1]), after]
    xs, ys = zip(*corners, strict=True)
    return Line("nothing is faster and cheaper", xs, ys, reference=True)
