"""How clusters were made and removed, as figures of a report: for each resource when it was asked for and ready."""

from collections.abc import Iterator, Sequence

from mlbench_cli.model import Cluster
from mlbench_cli.results.figures.provisioning import ResourceTimes, list_times
from mlbench_cli.results.report.model import Axis, Figure, Kind, Line, Scale

PHASES = {"making": "made", "removal": "removed"}


def provisioning_figures(clusters: Sequence[Cluster]) -> Iterator[Figure]:
    """A figure for the making and one for the removal of each cluster, as far as their times are known."""
    for number, cluster in enumerate(clusters):
        for phase, word in PHASES.items():
            rows = list_times(cluster, phase)
            if rows:
                yield _figure(f"cluster{number}-{phase}", f"How {cluster.name} was {word}", rows)


def _figure(key: str, title: str, rows: Sequence[ResourceTimes]) -> Figure:
    xs = tuple(float(index) for index in range(len(rows)))
    lines = (
        Line("before its turn", xs, tuple(row.began for row in rows), is_blank=True),
        Line("asking for it, and looking", xs, tuple(_asking(row) for row in rows)),
        Line("waiting for the cloud", xs, tuple(0.0 if row.is_adopted else _waiting(row) for row in rows)),
        Line("was there before", xs, tuple(row.end - row.began if row.is_adopted else 0.0 for row in rows)),
    )
    open_ones = [row.title for row in rows if row.ended is None]
    notes = (f"Not come to an end: {', '.join(open_ones)}.",) if open_ones else ()
    axis = Axis("resource", Scale.CATEGORIES, categories=tuple(row.title for row in rows))
    seconds = Axis("seconds since it began", from_zero=True)
    shown = tuple(line for line in lines if line.is_blank or any(line.ys))
    caption = "A bar begins when the resource was first asked for, and ends when it was ready, or gone."
    return Figure(key, title, axis, seconds, shown, caption, Kind.STACK, notes)


def _asking(row: ResourceTimes) -> float:
    return 0.0 if row.is_adopted else max(0.0, row.end - row.began - row.waited)


def _waiting(row: ResourceTimes) -> float:
    return min(row.waited, row.end - row.began)
