"""The top of a report: the finding as the title, its interval, where the time went, and what deviates."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlbench_cli.model.goals import name_metric
from mlbench_cli.model.methods import OWN
from mlbench_cli.results.analysis.comparability import CHOICES, conditions_of
from mlbench_cli.results.analysis.compare import CODE, Comparison, Row, be, compare
from mlbench_cli.results.analysis.figures import SECONDS, SUCCESSFUL, outcome_of
from mlbench_cli.results.analysis.jobs import Job
from mlbench_cli.results.analysis.numbers import SECONDS as SECONDS_UNIT
from mlbench_cli.results.analysis.numbers import (
    format_estimate,
    format_percent,
    format_value,
    unit_of,
)
from mlbench_cli.results.analysis.series import Group, Point, relate_runs
from mlbench_cli.results.analysis.stats import Ratio
from mlbench_cli.results.figures.curves import RunData
from mlbench_cli.results.report.model import Badge, Tone
from mlbench_cli.util.text import counted

_BASELINES = (OWN, "bsp", "ddp")  # baseline methods, in order of preference


@dataclass(frozen=True)
class Place:
    """One configuration of a job: a group with one number of workers."""

    group: Group
    point: Point

    @property
    def name(self) -> str:
        """ "2 workers (fusion)"."""
        return f"{self.size} ({self.group.label})" if self.group.label else self.size

    @property
    def subject(self) -> str:
        """The label in a sentence: "eftopk", "the task's own method"."""
        return f"the {self.group.label}" if self.group.label.startswith("task's own") else self.group.label

    @property
    def size(self) -> str:
        """ "2 workers"."""
        return counted(self.point.workers, "worker")


@dataclass(frozen=True)
class Finding:
    """What the page is about: one configuration against its baseline, as `mlbench compare` has it."""

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
    def title(self) -> str:
        """The finding as a sentence without a period, or that there is none."""
        where = "" if self.is_across_sizes else f" on {self.other.size}"
        found = self.ratio
        if found is not None and self.row is not None and found.low is None:
            return f"{self.found.a} and {self.found.b}{where}, {self.found.counts}: too few to compare"
        if found is None or self.row is None or found.is_confounded:
            return (self.found.verdict or f"{self.found.a} and {self.found.b}{where}").rstrip(".")
        if not found.is_different:
            return f"No difference seen between {self.found.a} and {self.found.b}{where}"
        return f"{self.found.b} {be(self.found.b)} {self.row.words.partition(' (')[0]} than {self.found.a}{where}"

    @property
    def sentence(self) -> str:
        """The verdict with its interval, or what stands in the way."""
        return self.found.verdict or ""


def places_of(job: Job) -> list[Place]:
    """The configurations of a job with successful runs."""
    return [Place(group, point) for group in job.groups for point in group.points if point.good]


def best_of(job: Job) -> Place | None:
    """The fastest configuration; for time budgets, the one with the best value."""
    found = places_of(job)
    if not found:
        return None
    if job.groups[0].after_time:
        return max(found, key=lambda place: place.point.value.mean if place.point.value else 0.0)
    return min(found, key=lambda place: place.point.seconds.mean)


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
    sides = [[archives[run.source] for run in place.point.good if run.source in archives] for place in (base, other)]
    return Finding(base, other, compare(sides[0], sides[1], names, CHOICES))


def _most_different(base: Place, others: Sequence[Place]) -> Place:
    """The fastest of the others; if it does not differ from the baseline, the one that does, as one of several."""
    ratios = [relate_runs(base.point.good, place.point.good, SECONDS) for place in others]
    if ratios[0] is not None and ratios[0].is_different:
        return others[0]

    def distance(found: Ratio | None) -> float:
        ends = None if found is None or found.is_confounded else found.interval(len(others))
        return 0.0 if found is None or ends is None or ends[0] <= 1 <= ends[1] else abs(found.log)

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


# --- title and sentence ---------------------------------------------------------------------------------------------


def title_of(job: Job, finding: Finding | None) -> str:
    """The result of a job as a sentence without a period."""
    best = best_of(job)
    if best is None:
        return f"{job.name}: no run succeeded"
    group, point = best.group, best.point
    if group.after_time:
        value = format_value(point.value.mean if point.value else None, unit_of(group.metric))
        return f"{job.title} reaches {value} {name_metric(group.metric)} with {best.name}"
    if finding is not None:
        text = finding.title
        return f"T{text[1:]}" if text.startswith("the ") else text
    time = format_value(point.seconds.mean, SECONDS_UNIT)
    if group.metric and not group.key.measure:
        return f"{job.title} reaches its goal in {time} with {best.name}"
    return f"{job.title} takes {time} with {best.name}"


def sentences_of(job: Job, finding: Finding | None) -> Iterator[str]:
    """Sentences with time and interval, the comparison, and where the time goes."""
    best = best_of(job)
    if best is None:
        return
    group, point = best.group, best.point
    if group.after_time:
        yield f"{group.metric} {format_estimate(point.value, unit_of(group.metric))} with {best.name}."
        return
    if finding is not None and finding.sentence:
        yield finding.sentence
    yield f"{format_estimate(point.seconds, SECONDS_UNIT)} with {best.name}."
    if point.without_compiling is not None:
        yield f"{format_estimate(point.without_compiling, SECONDS_UNIT)} of it without compiling."
    if finding is not None and finding.ratio is not None and finding.ratio.is_different:
        waits = [_waiting(place) for place in (finding.other, finding.base)]
        if all(share is not None for share in waits):
            names = finding.found.b, finding.found.a
            shares = [f"{name} {format_percent(share or 0.0)}" for name, share in zip(names, waits, strict=True)]
            yield f"Share of the time that is communication: {', '.join(shares)}."


def _waiting(place: Place) -> float | None:
    parts = place.point.parts
    total = sum(parts.values())
    return parts["communication"] / total if total > 0 and "communication" in parts else None


# --- badges ---------------------------------------------------------------------------------------------------------


def badges_of(runs: Sequence[RunData], names: Mapping[str, str]) -> Iterator[Badge]:
    """Badges for the whole page. `names` are the methods by run, for divisions."""
    total = len(runs)
    proven = sum(not run.archive.not_derived for run in runs)
    if proven == total:
        yield Badge("1 archive verified" if total == 1 else f"{total} of {total} archives verified", Tone.GOOD)
    else:
        yield Badge(f"{total - proven} of {total} archives not proven", Tone.BAD)
    yield from (Badge(text) for text in _divisions(runs, names))
    if networks := {str(run.archive.run["spec"].get("network") or "") for run in runs} - {""}:
        yield Badge(f"network {networks.pop()}" if len(networks) == 1 else f"{len(networks)} networks")
    counts: dict[str, tuple[int, Tone]] = {}
    for run in runs:
        for word, tone in _words(run):
            counts[word] = counts.get(word, (0, tone))[0] + 1, tone
    for word, (count, tone) in sorted(counts.items(), key=lambda item: item[1][1] is Tone.BAD):
        yield Badge(word if total == 1 else f"{count} of {total} {word}", tone)


def _divisions(runs: Sequence[RunData], names: Mapping[str, str]) -> Iterator[str]:
    found: dict[str, set[str]] = {}
    for run in runs:
        found.setdefault(str(run.archive.result["division"].get("word") or "no"), set()).add(names.get(run.name, ""))
    if len(found) == 1:
        if (word := next(iter(found))) != "no":
            yield f"{word} division"
    elif len(found) > 1:
        yield from (
            f"{', '.join(sorted(methods))}: {word} division" if len(methods) < 3 else f"some: {word} division"
            for word, methods in sorted(found.items())
        )


def _words(run: RunData) -> Iterator[tuple[str, Tone]]:
    result = run.archive.result
    if result["label"]["word"] == "functional":
        yield "functional only", Tone.WARN
    if result["synthetic"]:
        yield "synthetic data", Tone.WARN
    for label in conditions_of(run.archive).labels:
        yield label.replace("_", "-"), Tone.WARN
    if result["outcome"] == "goal_missed":
        yield "missed the goal", Tone.WARN
    elif outcome_of(result) not in SUCCESSFUL:
        yield str(result["outcome"]).replace("_", " "), Tone.BAD
