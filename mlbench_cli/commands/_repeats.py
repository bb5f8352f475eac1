"""Repeats of a run (`mlbench run --repeat`): found by their names, told as mean and interval."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlbench_cli import console
from mlbench_cli.commands._common import results_of, sealed
from mlbench_cli.model import Run, RunRow
from mlbench_cli.runs.select import find
from mlbench_cli.spec import common_name
from mlbench_cli.store import Store

if TYPE_CHECKING:
    from mlbench_cli.results.analysis.series import Point
    from mlbench_cli.results.analysis.statistics import Estimate


@dataclass(frozen=True)
class Repeats:
    """The finished repeats of one size. `point` has its estimates; `total` counts those that have not finished, too."""

    name: str
    total: int
    metric: str
    point: "Point"

    def to_dict(self) -> dict[str, Any]:
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
    families = {name: runs for name, runs in families.items() if sum(map(sealed, runs)) > 1}
    if not families:
        return []
    return [found for name, runs in families.items() for found in _measured(name, runs)]


def _measured(name: str, runs: Sequence[Run]) -> Iterable[Repeats]:
    from mlbench_cli.results.analysis.series import collect
    from mlbench_cli.results.archive.reader import Archive

    archives = [Archive.open(results_of(run)) for run in runs if sealed(run)]
    # One group and one point, unless somebody has given names of this form to runs that differ.
    for group in collect(archives).groups:
        yield from (Repeats(name, len(runs), group.metric, point) for point in group.points)


def show_repeats(found: Sequence[Repeats]) -> None:
    """The table of repeats on stdout, and what its intervals are on stderr."""
    if not found:
        return
    console.out("")
    console.out_table(
        ["REPEATS", "WORKERS", "RUNS", "SECONDS", "METRIC", "SAMPLES/S"],
        [
            [
                item.name,
                item.point.workers,
                _counted(item),
                in_figures(item.point.seconds) if item.point.good else None,
                f"{item.metric} {in_figures(item.point.value)}" if item.point.good and item.point.value else None,
                in_figures(item.point.throughput) if item.point.good else None,
            ]
            for item in found
        ],
        droppable=["SAMPLES/S", "METRIC"],
    )
    console.note("± is half the 95 % interval of the mean (Student's t); repeats that failed do not count.")


def in_figures(found: "Estimate | None") -> str | None:
    """ "12.31 ± 0.84": two digits of the margin, the mean to the same place; "12.31" without repeats."""
    if found is None:
        return None
    if not found.margin:
        return f"{found.mean:.4g}" if abs(found.mean) < 9999.5 else f"{found.mean:.0f}"
    digits = min(9, max(0, 1 - math.floor(math.log10(found.margin))))
    return f"{found.mean:.{digits}f} ± {found.margin:.{digits}f}"


def _counted(item: Repeats) -> str:
    good = len(item.point.good)
    return str(good) if good == item.total else f"{good} of {item.total}"
