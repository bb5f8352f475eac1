"""Match the runs of two results with several sizes or settings.

The runs of a side that differ in nothing that an experiment varies on purpose are repeats of one another: a cell. Cells
of both sides with the same values are compared; those that only one side has are left out, by name.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.comparability import WORKERS, key_of
from mlbench_cli.results.analysis.compare import Comparison, compare
from mlbench_cli.results.analysis.gate import GateResult
from mlbench_cli.results.analysis.series import describe
from mlbench_cli.results.analysis.verdict import find_worst
from mlbench_cli.results.archive.reader import Archive

# Settings that sizes and the matrix of an experiment vary, besides parameters.
_AXES = (
    *("task", "preset", "backend", "device", "processes_per_worker", "gpus_per_worker", "cpus"),
    *("method", "network"),
)
_ENTRIES = ("parameter ", "setting ")

Values = tuple[tuple[str, str], ...]  # name and value of each axis that varies


@dataclass(frozen=True)
class Pair:
    """The runs of both sides with equal `values`; no values if neither side varies anything."""

    values: Values
    a: tuple[Archive, ...]
    b: tuple[Archive, ...]

    @property
    def label(self) -> str:
        """ "2 workers, backend mpi"; empty without values."""
        return describe_cell(self.values)


def pair_cells(a: Sequence[Archive], b: Sequence[Archive]) -> tuple[list[Pair], list[str]]:
    """The pairs in the order of A's runs, and the labels of cells that one side lacks.

    Raises UsageError if no cell of A is one of B.
    """
    axes = dict.fromkeys([*_varying_axes(a), *_varying_axes(b)])
    ours, theirs = _cells(a, axes), _cells(b, axes)
    pairs = [Pair(values, tuple(ours[values]), tuple(theirs[values])) for values in ours if values in theirs]
    alone = [f"{describe_cell(values)} (A only)" for values in ours if values not in theirs]
    alone += [f"{describe_cell(values)} (B only)" for values in theirs if values not in ours]
    if not pairs:
        raise UsageError(
            f"A and B have no size or setting in common: {'; '.join(alone)}.",
            hint="To compare them anyway, name single runs.",
        )
    return pairs, alone


def compare_cells(
    a: Sequence[Archive], b: Sequence[Archive], names: tuple[str, str] | None = None, across: Collection[str] = ()
) -> tuple[dict[Values, Comparison], list[str]]:
    """The comparison of each cell that both sides have, and the labels of cells that one side lacks.

    What `mlbench compare`, the API and the dashboard show. Raises UsageError if the sides have no cell in common.
    """
    pairs, alone = pair_cells(a, b)
    return {pair.values: compare(pair.a, pair.b, names, across) for pair in pairs}, alone


def make_document(
    found: Mapping[Values, Comparison], gates: Mapping[Values, GateResult], alone: Sequence[str]
) -> JsonObject:
    """A single comparison as is; several as a list, each with the values of its cell."""
    each = {
        values: {**comparison.to_dict(), "gate": gates[values].to_dict() if values in gates else None}
        for values, comparison in found.items()
    }
    if list(each) == [()]:
        return each[()]
    comparisons = [{"cell": dict(values), **document} for values, document in each.items()]
    verdict = str(find_worst(gate.verdict for gate in gates.values())) if gates else None
    return {"schema_version": 1, "comparisons": comparisons, "left_out": list(alone), "verdict": verdict}


def describe_cell(values: Values) -> str:
    """The settings of a cell in a few words, for tables and messages."""
    return ", ".join(_describe(name, value) for name, value in values)


def _describe(name: str, value: str) -> str:
    if name == WORKERS:
        return f"{value} worker{'' if value == '1' else 's'}"
    return describe(name, value) or f"no {name}"


def _axes_of(archive: Archive) -> dict[str, str]:
    facts = key_of(archive).facts()
    axes = {name: value for name, value in facts.items() if name in _AXES or name.startswith(_ENTRIES)}
    return {WORKERS: str(archive.result["workers"]), **axes}


def _varying_axes(side: Sequence[Archive]) -> list[str]:
    every = [_axes_of(archive) for archive in side]
    names = dict.fromkeys(name for axes in every for name in axes)
    return [name for name in names if len({axes.get(name, "") for axes in every}) > 1]


def _cells(side: Sequence[Archive], axes: Iterable[str]) -> dict[Values, list[Archive]]:
    cells: dict[Values, list[Archive]] = {}
    for archive in side:
        own = _axes_of(archive)
        cells.setdefault(tuple((name, own.get(name, "")) for name in axes), []).append(archive)
    return cells
