"""The figure of provisioning time: what of a cluster was asked for, waited for and ready when, one bar per resource.

All clusters of a figure share its axis of time, so that providers can be compared. Its numbers are in a CSV beside it.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_cli import files
from mlbench_cli.cluster_details import ClusterDetails
from mlbench_cli.errors import UsageError
from mlbench_cli.model import Cluster
from mlbench_cli.results.archive import layout
from mlbench_cli.results.figures.style import style, write
from mlbench_cli.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "provisioning"
# Of Okabe and Ito's palette: what the cloud takes blue, what is left to mlbench vermilion.
ASKING, WAITING, WAS_THERE = "#D55E00", "#56B4E9", "#dddddd"
ROW, HEAD = 0.24, 0.62  # inches: of a resource, and of what is above and below each cluster's
_WIDTH, _TOP, _FOOT = 11.0, 0.95, 0.45
MAX_LETTERS = 38
FIELDS = ("cluster", "provider", "phase", "kind", "resource", "adopted", "began", "accepted", "ended", "waited")


def draw(clusters: Sequence[Cluster], folder: Path) -> list[Path]:
    """Draw the making and, if it is known, the removal of clusters into `folder`; the paths that were written.

    Takes records as the store and the journal have them. Raises UsageError if one tells of no times.
    """
    for cluster in clusters:
        if not list_times(cluster, "making") and not list_times(cluster, "removal"):
            raise UsageError(
                f'Of the cluster "{cluster.name}" no times are known: it was not made from here.',
                hint="mlbench list-clusters",
            )
    with layout.naming_file_on_os_error(folder, "written"), style():
        folder.mkdir(parents=True, exist_ok=True)
        written = write(_figure(clusters), folder / NAME)
        table = folder / f"{NAME}.csv"
        files.write_atomically(table, to_csv(clusters).encode())
    return [*written, table]


def to_csv(clusters: Sequence[Cluster]) -> str:
    """One row per resource and phase, in seconds since the making, or the removal, began; empty: not come to."""
    text = io.StringIO()
    table = csv.DictWriter(text, FIELDS, lineterminator="\n")
    table.writeheader()
    for cluster in clusters:
        for phase in ("making", "removal"):
            for line in list_times(cluster, phase):
                facts = {"cluster": cluster.name, "provider": cluster.provider, "phase": phase}
                times = asdict(line) | {"adopted": line.is_adopted}
                table.writerow({**facts, **{key: times[key] for key in FIELDS if key not in facts}})
    return text.getvalue()


@dataclass(frozen=True)
class ResourceTimes:
    """When a resource was asked for, accepted and ready or gone, in seconds since the cluster's making, or removal,
    began. None: not come to."""

    kind: str
    resource: str
    title: str  # without the cluster's name, which stands above
    is_adopted: bool
    began: float
    accepted: float | None
    ended: float | None
    waited: float

    @property
    def end(self) -> float:
        """When it ended, or how far it is known to have come."""
        return self.began + self.waited if self.ended is None else self.ended


def list_times(cluster: Cluster, phase: str) -> list[ResourceTimes]:
    """The resources of a cluster's record in the phase "making" or "removal", as far as times are known."""
    details = ClusterDetails.of(cluster)
    entries = details.provisioning if phase == "making" else details.removal
    return [
        ResourceTimes(
            entry["kind"],
            entry["name"],
            shorten(f"{entry['kind']}  {_short(entry['name'], cluster)}".strip(), MAX_LETTERS),
            bool(entry.get("adopted")),
            float(entry["began"]),
            entry.get("accepted"),
            entry["ready"] if phase == "making" else entry["gone"],
            round(sum(wait["seconds"] for wait in entry["waits"]), 3),
        )
        for entry in entries
        if entry["began"] is not None
    ]


# --- the figure -------------------------------------------------------------------------------------------------------


def _figure(clusters: Sequence[Cluster]) -> "Figure":
    """A row of panels for each cluster: its making, and its removal if one of them was removed."""
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

    phases = [phase for phase in ("making", "removal") if any(list_times(cluster, phase) for cluster in clusters)]
    spans = {phase: max(line.end for cluster in clusters for line in list_times(cluster, phase)) for phase in phases}
    rows = [max(len(list_times(cluster, phase)) for phase in phases) for cluster in clusters]
    height = _TOP + _FOOT + sum(HEAD + ROW * count for count in rows)
    figure = Figure(figsize=(_WIDTH, height))
    # The panels' widths follow the times, so that a second is as long in both.
    shares = [max(spans[phase], 0.35 * max(spans.values())) for phase in phases]
    grid = GridSpec(
        *(len(clusters), len(phases), figure),
        left=0.25,
        right=0.98,
        top=1 - (_TOP + 0.25) / height,
        bottom=_FOOT / height,
        height_ratios=[ROW * count + 0.06 for count in rows],
        width_ratios=shares,
        hspace=HEAD * len(rows) / (sum(rows) * ROW),
        wspace=0.05,
    )
    for row, cluster in enumerate(clusters):
        for column, phase in enumerate(phases):
            axes = figure.add_subplot(grid[row, column])
            last = row == len(clusters) - 1
            _panel(axes, cluster, phase, spans[phase], named=column == 0, last=last)
    figure.text(0.012, 1 - 0.12 / height, "Provisioning time", va="top", fontsize=13, fontweight="bold")
    _legend(figure, height)
    return figure


def _panel(axes: "Axes", cluster: Cluster, phase: str, span: float, *, named: bool, last: bool) -> None:
    lines = list_times(cluster, phase)
    unit, word = _unit(span)
    order = list_times(cluster, "making") or lines
    places = {(line.kind, line.resource): place for place, line in enumerate(order)}
    titles = {(line.kind, line.resource): line.title for line in (*order, *lines)}
    for line in lines:
        place = places.setdefault((line.kind, line.resource), len(places))
        _bar(axes, place, line, unit, span)
    axes.set_ylim(max(len(places), 1) - 0.4, -0.6)
    axes.set_xlim(0, span * 1.16 / unit)
    names = [titles[key] for key in places]
    axes.set_yticks(range(len(places)), names if named else [""] * len(places), fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    if last:
        axes.set_xlabel(f"{word} since {'its making' if phase == 'making' else 'its removal'} began")
    else:
        axes.tick_params(axis="x", labelbottom=False)
    axes.set_title(_title(cluster, phase), fontsize=9.5, pad=5)
    if not lines:
        axes.text(0.02, 0.5, "not begun", transform=axes.transAxes, va="center", color="#666666", fontsize=8.5)


def _bar(axes: "Axes", place: int, line: ResourceTimes, unit: float, span: float) -> None:
    """From the first request over its acceptance to the end; a bar that is open at its end has not come to it."""
    began, end = line.began / unit, line.end / unit
    waited = min(line.waited / unit, end - began)
    if line.is_adopted:
        axes.barh(place, max(end - began, span / unit / 300), 0.62, began, color=WAS_THERE, hatch="////")
    else:
        axes.barh(place, max(end - began, span / unit / 300), 0.62, began, color=ASKING)
        axes.barh(place, waited, 0.62, end - waited, color=WAITING)
    if line.ended is None:
        axes.barh(place, span / unit * 0.05, 0.62, end, color="white", edgecolor=WAITING, hatch="////", linewidth=0)
        text = "not yet"
    else:
        axes.plot([end, end], [place - 0.31, place + 0.31], color="#222222", linewidth=1.4, solid_capstyle="butt")
        text = "was there" if line.is_adopted else _seconds(line.ended - line.began)
    axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _title(cluster: Cluster, phase: str) -> str:
    lines = list_times(cluster, phase)
    moments = [line.ended for line in lines if line.ended is not None]
    whole = _seconds(max(moments)) if lines and len(moments) == len(lines) else None
    if phase == "removal":
        return f"Removal: {whole}" if whole else "Removal"
    details = ClusterDetails.of(cluster)
    gpus = f" with {details.gpus_per_node} × {details.gpu} each" if details.gpu else ""
    machines = f"{details.nodes} × {details.machine_type}{gpus}" if details.machine_type else ""
    facts = [cluster.provider, details.location, machines]
    label = " (functional only)" if details.functional_only else ""
    ready = f": ready after {whole}" if whole else ": not ready"
    return f"{cluster.name}{ready}\n{', '.join(str(fact) for fact in facts if fact)}{label}"


def _short(name: str, cluster: Cluster) -> str:
    """A resource's name without the cluster's, which stands above."""
    left = name.replace(cluster.name, "").strip("/-=")
    return "" if left.startswith("mlbench") else left  # as what mlbench makes one of is called


def _legend(figure: "Figure", height: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=ASKING, label="asking for it, and looking"),
        Patch(facecolor=WAITING, label="waiting for the cloud"),
        Patch(facecolor=WAS_THERE, hatch="////", label="was there before"),
        Line2D([], [], color="#222222", linewidth=1.4, label="ready, or gone"),
    ]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.007, 1 - 0.36 / height), ncols=4, fontsize=8.5)


def _unit(span: float) -> tuple[float, str]:
    return (60.0, "minutes") if span > 180 else (1.0, "seconds")


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
