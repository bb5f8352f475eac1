"""The timeline of a run with faults: how the ranks spent every second, and when faults occurred."""

from mlbench_cli.model.faults import FaultKind
from mlbench_cli.results.analysis.numbers import SECONDS
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.figures.chart import Axis, Chart, Kind, Row

MAX_RANKS = 64
MARK_SHARE = 0.004  # share of the wall time: width of an instantaneous fault
# Label and color of a part (archive/conditions.py).
_PARTS = {
    "useful": ("useful work", "compute"),
    "startup": ("start-up", "other"),
    "lost": ("lost work", "communication"),
    "detection": ("until detected", "fifth"),
    "restart": ("restart and loading", "data"),
}


def draw_faults(archive: Archive, key: str) -> Chart:
    """The timeline of a run with a record of faults."""
    facts, spec = archive.result["faults"], archive.run["spec"]
    each = int(spec.get("processes_per_worker", 1))
    ranks = range(min(int(spec["workers"]) * each, MAX_RANKS))
    rows = [
        (rank, _span(label, rank, begin, end))
        for part, (label, _) in _PARTS.items()
        for name, begin, end in facts["timeline"]
        if name == part
        for rank in ranks
    ]
    wall = float(facts["wall_seconds"])
    for kind in FaultKind:
        rows += [
            (rank, _span(f"fault: {kind}", rank, begin, min(wall, max(end or begin, begin + MARK_SHARE * wall))))
            for name, target, begin, end in facts["events"]
            if name == kind
            for rank in ranks
            if target is None or (rank // each if kind.targets_worker else rank) == target
        ]
    return Chart(
        key,
        f"{archive.result['run']}: ranks and faults over time",
        Axis("rank"),
        Axis("seconds", SECONDS, from_zero=True),
        tuple(row for _, row in sorted(rows, key=lambda each: each[0])),
        Kind.SPANS,
        "" if facts["script"] is None else f"Faults: {facts['script']}; policy: {facts['policy']}.",
        {**dict(_PARTS.values()), **{f"fault: {kind}": "first" for kind in FaultKind}},
    )


def _span(series: str, rank: int, begin: float, end: float) -> Row:
    return {"series": series, "x": f"rank {rank}", "y": end - begin, "low": begin, "high": end}
