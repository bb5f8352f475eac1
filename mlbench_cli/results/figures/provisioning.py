"""Timelines of creating and deleting clusters: when each resource was requested, waited for and ready."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.analysis.numbers import SECONDS, format_value
from mlbench_cli.results.figures.model import Axis, Figure, Kind, Line, Scale, Sheet
from mlbench_cli.results.figures.png import write_sheets
from mlbench_cli.util.csv_text import format_csv
from mlbench_cli.util.text import shorten

NAME = "provisioning"
PHASES = {"making": "made", "removal": "removed"}
MAX_LETTERS = 38
FIELDS = ("cluster", "provider", "phase", "kind", "resource", "adopted", "began", "accepted", "ended", "waited")


def draw(clusters: Sequence[Cluster], folder: Path) -> list[Path]:
    """Draw the creation and, if known, the deletion of clusters into `folder`; returns the written paths.

    Raises UsageError for a cluster without recorded times.
    """
    for cluster in clusters:
        if not list_times(cluster, "making") and not list_times(cluster, "removal"):
            raise UsageError(
                f'Of the cluster "{cluster.name}" no times are known: it was not created on this machine.',
                hint="mlbench list-clusters",
            )
    sheet = Sheet(NAME, "Provisioning time", tuple(provisioning_figures(clusters)))
    return write_sheets([sheet], folder, {f"{NAME}.csv": to_csv(clusters)})


def provisioning_figures(clusters: Sequence[Cluster]) -> Iterator[Figure]:
    """Figures of the creation and deletion of each cluster, as far as times are known."""
    for number, cluster in enumerate(clusters):
        for phase, word in PHASES.items():
            rows = list_times(cluster, phase)
            if rows:
                title = f"How {cluster.name} was {word}: {_sum_up(cluster, phase, rows)}"
                yield _figure(f"cluster{number}-{phase}", title, rows)


def to_csv(clusters: Sequence[Cluster]) -> str:
    """A row per resource and phase, in seconds since the start of the creation or deletion; empty: not reached."""
    rows: list[Sequence[object]] = [FIELDS]
    for cluster in clusters:
        for phase in PHASES:
            for line in list_times(cluster, phase):
                facts = {"cluster": cluster.name, "provider": cluster.provider, "phase": phase}
                times = asdict(line) | {"adopted": line.is_adopted}
                rows.append([{**times, **facts}[key] for key in FIELDS])
    return format_csv(rows)


@dataclass(frozen=True)
class ResourceTimes:
    """When a resource was requested, accepted and ready or gone, in seconds since the start of the creation or
    deletion. None: not reached."""

    kind: str
    resource: str
    title: str  # without the cluster's name, which is in the title
    is_adopted: bool
    began: float
    accepted: float | None
    ended: float | None
    waited: float

    @property
    def end(self) -> float:
        """The end, or the last known time."""
        return self.began + self.waited if self.ended is None else self.ended


def list_times(cluster: Cluster, phase: str) -> list[ResourceTimes]:
    """The resources with known times in a cluster's record for the phase "making" or "removal"."""
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


def _figure(key: str, title: str, rows: Sequence[ResourceTimes]) -> Figure:
    parts = (
        ("requests and polling", "overlap", [(row.began, row.end - _waited(row), row) for row in rows]),
        ("waiting for the cloud", "local", [(row.end - _waited(row), row.end, row) for row in rows]),
    )
    lines = [
        _line(label, color, [(index, *span) for index, span in enumerate(spans) if not span[2].is_adopted])
        for label, color, spans in parts
    ]
    there = [(index, row.began, row.end, row) for index, row in enumerate(rows) if row.is_adopted]
    lines.append(_line("was there before", "other", there))
    open_ones = [row.title for row in rows if row.ended is None]
    notes = (f"Unfinished: {', '.join(open_ones)}.",) if open_ones else ()
    axis = Axis("resource", Scale.CATEGORIES, categories=tuple(row.title for row in rows))
    seconds = Axis("seconds since it began", from_zero=True, unit=SECONDS)
    caption = "A bar starts with the first request for a resource and ends when it was ready, or deleted."
    return Figure(key, title, axis, seconds, tuple(line for line in lines if line.xs), caption, Kind.SPANS, notes)


def _line(label: str, color: str, spans: Sequence[tuple[int, float, float, ResourceTimes]]) -> Line:
    notes = ("not yet" if row.ended is None else "was there" if row.is_adopted else "" for *_, row in spans)
    return Line.of_spans(label, color, [span[:3] for span in spans], tuple(notes))


def _waited(row: ResourceTimes) -> float:
    return min(row.waited, row.end - row.began)


def _sum_up(cluster: Cluster, phase: str, rows: Sequence[ResourceTimes]) -> str:
    """ "ready after 7 min 02 s, gke, europe-west1-b, 2 × g2-standard-8"."""
    moments = [row.ended for row in rows if row.ended is not None]
    is_done = len(moments) == len(rows)
    whole = format_value(max(moments), SECONDS) if is_done else ""
    if phase == "removal":
        return f"gone after {whole}" if is_done else "not gone"
    details = ClusterDetails.of(cluster)
    gpus = f" with {details.gpus_per_node} × {details.gpu} each" if details.gpu else ""
    machines = f"{details.nodes} × {details.machine_type}{gpus}" if details.machine_type else ""
    label = "functional only" if details.functional_only else ""
    facts = [f"ready after {whole}" if is_done else "not ready", cluster.provider, details.location, machines, label]
    return ", ".join(str(fact) for fact in facts if fact)


def _short(name: str, cluster: Cluster) -> str:
    """A resource's name without the cluster's, which is in the title."""
    left = name.replace(cluster.name, "").strip("/-=")
    return "" if left.startswith("mlbench") else left  # as what mlbench makes one of is called
