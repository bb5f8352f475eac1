"""The figures of a campaign: grouped bars of throughput with error bars, and time against price."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_cli.results.analysis.campaign import Row, list_offers, worker_counts
from mlbench_cli.results.figures.style import COLORS, MARKERS, style, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 12  # rows in one panel; nobody can distinguish more
PANEL = "task"


def draw_campaign(title: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write throughput.png/svg and pareto.png/svg into `folder`; the paths. Nothing for rows without a value."""
    written = []
    with style():
        panels = split_panels(rows)
        if panels:
            written += _write(_bars(title, panels), folder / "throughput")
        if any(row.source is None and row.is_rate and _has_value(row) for row in rows):
            written += _write(_pareto(title, rows), folder / "pareto")
    return written


def _write(figure: "Figure", stem: Path) -> list[Path]:
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return write(figure, stem)


def _has_value(row: Row) -> bool:
    return any(cell.value is not None for cell in row.cells.values())


def split_panels(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that may stand side by side: one panel for each task and unit, of at most MAX_BARS rows."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if _has_value(row):
            panels.setdefault((row.settings.get(PANEL, ""), row.unit), []).append(row)
    return [
        (f"{task}, {unit}" if task else unit, members[start : start + MAX_BARS])
        for (task, unit), members in panels.items()
        for start in range(0, len(members), MAX_BARS)
    ]


def _bars(title: str, panels: Sequence[tuple[str, list[Row]]]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.4 * len(panels) + 0.4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    axes = figure.subplots(len(panels), 1, squeeze=False)
    for (name, rows), row_of_axes in zip(panels, axes, strict=True):
        _panel(row_of_axes[0], name, rows)
    return figure


def _panel(axes: "Axes", name: str, rows: Sequence[Row]) -> None:
    counts = worker_counts(rows)
    width = 0.8 / len(rows)
    best: tuple[float, float, float] | None = None  # speed-up, x, height
    for number, row in enumerate(rows):
        for at, count in enumerate(counts):
            cell = row.cells.get(count)
            if cell is None or cell.value is None:
                continue
            x = at - 0.4 + width * (number + 0.5)
            margin = cell.deviation if cell.deviation is not None else cell.value.margin
            axes.bar(
                x,
                cell.value.mean,
                width * 0.92,
                color=COLORS[number % len(COLORS)],
                hatch="//" if row.source or number >= len(COLORS) else None,
                yerr=margin,
                error_kw={"elinewidth": 1.0, "capsize": 2.0},
                label=_short_label(row) if at == _first_column(row, counts) else None,
            )
            speedup = row.speedup(count)
            top = cell.value.mean + (margin or 0.0)
            if speedup is not None and row.source is None and (best is None or speedup.mean > best[0]):
                best = (speedup.mean, x, top)
    if best is not None:
        axes.annotate(
            f"{best[0]:.2f}×", (best[1], best[2]), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9
        )
    axes.set_title(name)
    axes.set_xticks(range(len(counts)), [f"{count} worker{'s' if count > 1 else ''}" for count in counts])
    axes.margins(y=0.12)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _first_column(row: Row, counts: Sequence[int]) -> int:
    return next(at for at, count in enumerate(counts) if count in row.cells and row.cells[count].value is not None)


def _short_label(row: Row) -> str:
    """What sets a row apart inside its panel."""
    words = [value for key, value in row.settings.items() if key not in (PANEL, "source") and value]
    return ", ".join([*words, *([row.source] if row.source else [])]) or row.label


def _pareto(title: str, rows: Sequence[Row]) -> "Figure":
    from matplotlib.figure import Figure

    offers, unit = list_offers(rows)
    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.subplots()
    labels = list(dict.fromkeys(offer.label for offer in offers))
    for number, label in enumerate(labels):
        own = [offer for offer in offers if offer.label == label]
        color = COLORS[number % len(COLORS)]
        marker = MARKERS[number % len(MARKERS)]
        costs, seconds = [offer.cost for offer in own], [offer.seconds for offer in own]
        axes.plot(costs, seconds, marker=marker, linestyle=":", color=color, label=label, markersize=6)
        for offer in own:
            axes.annotate(
                str(offer.workers), (offer.cost, offer.seconds), xytext=(5, 4), textcoords="offset points", fontsize=8
            )
    front = sorted((offer.cost, offer.seconds) for offer in offers if offer.is_on_front)
    axes.plot(
        [cost for cost, _ in front],
        [seconds for _, seconds in front],
        drawstyle="steps-post",
        color="#444444",
        linewidth=1.2,
        label="nothing is faster and cheaper",
        zorder=0,
    )
    axes.set_title(f"{title}: time against cost; numbers are workers")
    axes.set_xlabel(f"{unit} for 1 000 units")
    axes.set_ylabel("seconds for 1 000 units")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure
