"""Repeats of a run (`mlbench run --repeat`), combined to a mean and an interval."""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mlbench_cli.errors import DamagedArchive
from mlbench_cli.model.run import JsonObject, Run, RunRow
from mlbench_cli.results.analysis.numbers import unit_of
from mlbench_cli.results.analysis.series import Measurement, Point, group_runs, measure
from mlbench_cli.results.archive.files import Archive, read_documents
from mlbench_cli.runs.families import find_families
from mlbench_cli.storage.run_folder import ENVIRONMENT, METRICS, RESULT, RUN, SUMS, is_sealed
from mlbench_cli.storage.store import Store

_DOCUMENTS = (RUN, RESULT, ENVIRONMENT)
MAX_MEASURED = 10_000  # runs


class Repeats(NamedTuple):
    """The finished repeats of one size. `point` has its estimates; `total` counts those that have not finished, too."""

    name: str
    total: int
    metric: str
    point: Point

    @property
    def unit(self) -> str:
        """The unit of the metric."""
        return unit_of(self.metric)

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
            "metrics": _metrics(self.point) if self.point.good else {},
            **({"seconds_without_compiling": spent.to_dict()} if (spent := self.point.without_compiling) else {}),
        }


def _metrics(point: Point) -> JsonObject:
    return {name: {which: each.to_dict() for which, each in found.items()} for name, found in point.metrics.items()}


def repeats_in(store: Store, rows: Iterable[RunRow]) -> list[Repeats]:
    """The repeats of some runs of which at least two have results, in the order of the rows.

    All repeats count, also those that `rows` leaves out.
    """
    families = ((family.name, [row.run for row in family.rows]) for family in find_families(store, rows))
    return [found for name, runs in families if sum(map(is_sealed, runs)) > 1 for found in _measure(name, runs)]


def _measure(name: str, runs: Sequence[Run]) -> Iterable[Repeats]:
    measured = [found for run in runs if (found := _measure_run(run)) is not None]
    groups, unfinished = group_runs(measured).groups, len(runs) - len(measured)
    # One group, unless something that the experiment does not fix has changed between its runs, such as the code.
    for group in groups:
        title = name if len(groups) == 1 else f"{name} ({group.label})"
        for point in group.points:
            yield Repeats(title, len(point.good) + len(point.bad) + unfinished, group.metric, point)


_measured: dict[str, tuple[list[int], Measurement]] = {}  # id -> when its files were changed, its numbers


def _measure_run(run: Run) -> Measurement | None:
    """The numbers of a run, which a dashboard asks for again and again; None unless it is sealed, and the documents
    that they are read from are as they were sealed."""
    try:
        state = [os.stat(run.folder / name).st_mtime_ns for name in (SUMS, *_DOCUMENTS, METRICS)]
        if run.id not in _measured or _measured[run.id][0] != state:
            read_documents(run.folder, _DOCUMENTS)
            if len(_measured) >= MAX_MEASURED:
                _measured.clear()
            _measured[run.id] = state, measure(Archive.open(run.folder))
        return _measured[run.id][1]
    except (OSError, DamagedArchive):
        return None
