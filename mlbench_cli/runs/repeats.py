"""Repeats of a run (`mlbench run --repeat`): found by their names, put together as mean and interval."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mlbench_cli.model import JsonObject, Run, RunRow
from mlbench_cli.run_folder import RunFolder
from mlbench_cli.runs.select import find
from mlbench_cli.spec import common_name
from mlbench_cli.store import Store

if TYPE_CHECKING:
    from mlbench_cli.results.analysis.series import Point


class Repeats(NamedTuple):
    """The finished repeats of one size. `point` has its estimates; `total` counts those that have not finished, too."""

    name: str
    total: int
    metric: str
    point: "Point"

    def to_dict(self) -> JsonObject:
        """The repeats as `-o json` prints them."""
        counted, left_out = ([run.name for run in runs] for runs in (self.point.good, self.point.bad))
        metric = {"name": self.metric, **self.point.value.to_dict()} if self.point.value else None
        return {
            "name": self.name,
            "workers": self.point.workers,
            "repeats": self.total,
            "counted": counted,
            "left_out": left_out,
            "seconds": self.point.seconds.to_dict() if self.point.good else None,
            "metric": metric if self.point.good else None,
            "samples_per_second": self.point.throughput.to_dict()
            if self.point.good and self.point.throughput
            else None,
        }


def runs_named(store: Store, name: str) -> list[Run]:
    """The run of that name, the runs of that experiment, or the repeats that have the name in common.

    Raises NotFoundError with the nearest name.
    """
    rows, _ = find(store, name)
    return [row.run for row in rows]


def repeats_in(rows: Iterable[RunRow]) -> list[Repeats]:
    """Those of which at least two have results, in the order of the rows."""
    families: dict[str, list[Run]] = {}
    for row in rows:
        if (name := common_name(row.run.name)) is not None:
            families.setdefault(name, []).append(row.run)
    families = {name: runs for name, runs in families.items() if sum(map(is_sealed, runs)) > 1}
    if not families:
        return []
    return [found for name, runs in families.items() for found in _measure(name, runs)]


def _measure(name: str, runs: Sequence[Run]) -> Iterable[Repeats]:
    from mlbench_cli.results.analysis.series import collect
    from mlbench_cli.results.archive.reader import Archive

    archives = [Archive.open(run.folder) for run in runs if is_sealed(run)]
    # One group and one point, unless somebody has given names of this form to runs that differ.
    for group in collect(archives).groups:
        yield from (Repeats(name, len(runs), group.metric, point) for point in group.points)


def is_sealed(run: Run) -> bool:
    """Whether the run's folder is a complete archive."""
    return RunFolder(run.folder).is_sealed
