"""The finding of a report: which two configurations of a job its title is about."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from mlbench_cli.model.methods import OWN
from mlbench_cli.results.analysis.comparability import CHOICES, describe
from mlbench_cli.results.analysis.compare import CODE, Comparison, Row, compare
from mlbench_cli.results.analysis.figures import SECONDS
from mlbench_cli.results.analysis.jobs import Job
from mlbench_cli.results.analysis.series import Group, Point, relate_runs
from mlbench_cli.results.analysis.stats import Ratio
from mlbench_cli.results.figures.curves import RunData
from mlbench_cli.util.text import counted

_DEFAULT_METHOD = describe("method", OWN)  # what its label begins with, and no experiment's name
_BASELINES = (OWN, "bsp", "ddp")  # baseline methods, in order of preference


class Place(Struct, frozen=True):
    """One configuration of a job: a group with one number of workers."""

    group: Group
    point: Point

    @property
    def name(self) -> str:
        """ "2 workers (fusion)"."""
        return f"{self.size} ({self.group.label})" if self.group.label else self.size

    @property
    def subject(self) -> str:
        """The label in a sentence: "eftopk", "the default method"."""
        return f"the {self.group.label}" if self.group.label.startswith(_DEFAULT_METHOD) else self.group.label

    @property
    def size(self) -> str:
        """ "2 workers"."""
        return counted(self.point.workers, "worker")


class Finding(Struct, frozen=True):
    """The finding of the page: one configuration against its baseline, compared as by `mlbench compare`."""

    base: Place
    other: Place
    found: Comparison

    @property
    def row(self) -> Row | None:
        """The row of the time."""
        return self.found.rows.get(SECONDS)

    @property
    def ratio(self) -> Ratio | None:
        """Other / base, if nothing but the number of runs prevents a verdict."""
        return self.row.ratio if self.row and not self.found.obstacles else None

    @property
    def is_across_sizes(self) -> bool:
        """Whether the two differ in nothing but the number of workers."""
        return self.base.group is self.other.group

    @property
    def places(self) -> tuple[Place, Place]:
        """Both sides, the other first."""
        return self.other, self.base

    @property
    def is_different(self) -> bool:
        """Whether the two differ for sure."""
        return self.ratio is not None and self.ratio.is_different

    @property
    def is_unsettled(self) -> bool:
        """Whether no verdict is possible: for another reason than the number of runs, or because the sides were
        measured in different sessions."""
        return self.ratio is None or self.row is None or self.ratio.is_confounded


def places_of(job: Job) -> list[Place]:
    """The configurations of a job with successful runs."""
    return [Place(group, point) for group in job.groups for point in group.points if point.good]


def best_of(job: Job) -> Place | None:
    """The fastest configuration, of which all runs reached the goal if there is one; for time budgets, the one with the
    best value."""
    found = places_of(job)
    return min(found, key=lambda place: (place.point.is_partial, place.group.order(place.point)), default=None)


def find(job: Job, runs: Sequence[RunData]) -> Finding | None:
    """The best configuration against the baseline of the same size, else the most workers against the fewest; None if
    there is nothing to compare."""
    if job.groups[0].after_time:
        return None
    by_size: dict[int, list[Place]] = {}
    for place in places_of(job):
        by_size.setdefault(place.point.workers, []).append(place)
    sizes = [size for size, found in by_size.items() if len(found) > 1]
    if sizes:
        alike = by_size[max(sizes)]
        most = max((comparable_with(place, alike) for place in alike), key=len)
        found = sorted(most if len(most) > 1 else alike, key=lambda place: place.point.seconds.mean)
        base = base_of(found)
        other = _most_different(base, [place for place in found if place is not base])
        names = base.subject, other.subject
    elif len(by_size) > 1 and len(job.groups) == 1:
        base, other = by_size[min(by_size)][0], by_size[max(by_size)][0]
        names = base.size, other.size
    else:
        return None
    archives = {str(run.archive.path): run.archive for run in runs}  # names of runs repeat across stores
    sides = [
        [archives[run.source] for run in (*place.point.good, *place.point.bad) if run.source in archives]
        for place in (base, other)
    ]
    return Finding(base, other, compare(sides[0], sides[1], names, CHOICES))


def _most_different(base: Place, others: Sequence[Place]) -> Place:
    """The fastest of the others; if it does not differ from the baseline, the one that does, as one of several."""
    ratios = [relate_runs(base.point.good, place.point.good, SECONDS) for place in others]
    if ratios[0] is not None and ratios[0].is_different:
        return others[0]

    def distance(found: Ratio | None) -> float:
        ends = None if found is None or found.is_confounded else found.interval(len(others))
        return 0.0 if found is None or ends is None or ends[0] <= 1 <= ends[1] else abs(found.shift)

    farthest = max(range(len(others)), key=lambda index: distance(ratios[index]))
    return others[farthest] if distance(ratios[farthest]) else others[0]


def comparable_with(place: Place, places: Iterable[Place]) -> list[Place]:
    """The configurations that differ from one in nothing but settings that people choose, or in the version of a
    user's program."""
    own = place.group.key
    accepted = {*CHOICES, *({CODE} if own.command else ())}
    return [each for each in places if all(one.word in accepted for one in own.differences(each.group.key))]


def base_of(places: Sequence[Place]) -> Place:
    """The baseline of configurations of one size: the earliest version of a user's program, a method that is one, else
    the slowest."""
    if places[0].group.key.command:
        return min(places, key=lambda place: min(run.moment.begin for run in place.point.good))
    return min(places, key=lambda place: (_rank_as_baseline(place.group), -place.point.seconds.mean))


def _rank_as_baseline(group: Group) -> int:
    name = group.facts.get("method", "")
    return next((place for place, known in enumerate(_BASELINES) if name == known), len(_BASELINES))
