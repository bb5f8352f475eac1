"""The timeline of a run with faults: how ranks spent every second, and the times of faults."""

from mlbench_cli.model.faults import FaultKind
from mlbench_cli.results.analysis.numbers import SECONDS
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.model import Axis, Figure, Kind, Line, Scale

MAX_RANKS = 64
MARK_SHARE = 0.004  # share of the wall time: width of an instantaneous fault
# Label and color of a part (archive/faults.py).
_PARTS = {
    "useful": ("useful work", "compute"),
    "startup": ("start-up", "other"),
    "lost": ("lost work", "communication"),
    "detection": ("until detected", "servers"),
    "restart": ("restart and loading", "data"),
}


def draw_faults(archive: Archive, key: str) -> Figure:
    """The timeline of a run with a record of faults ."""
    facts, spec = archive.result["faults"], archive.run["spec"]
    each = int(spec.get("processes_per_worker", 1))
    ranks = min(int(spec["workers"]) * each, MAX_RANKS)
    lines = []
    for part, (label, color) in _PARTS.items():
        spans = [(begin, end) for name, begin, end in facts["timeline"] if name == part]
        lines.append(Line.of_spans(label, color, [(rank, begin, end) for rank in range(ranks) for begin, end in spans]))
    wall = float(facts["wall_seconds"])
    for kind in FaultKind:
        struck = [
            (rank, begin, min(wall, max(end if end is not None else begin, begin + MARK_SHARE * wall)))
            for name, target, begin, end in facts["events"]
            if name == kind
            for rank in range(ranks)
            if target is None or (rank // each if kind.targets_worker else rank) == target
        ]
        lines.append(Line.of_spans(f"fault: {kind}", "step", struck))
    lanes = Axis("rank", Scale.CATEGORIES, categories=tuple(f"rank {rank}" for rank in range(ranks)))
    return Figure(
        key,
        f"{archive.result['run']}: ranks and faults over time",
        lanes,
        Axis("seconds", from_zero=True, unit=SECONDS),
        tuple(line for line in lines if line.xs),
        caption="" if facts["script"] is None else f"Faults: {facts['script']}; policy: {facts['policy']}.",
        kind=Kind.SPANS,
    )
