"""The top of a report: a verdict as the title, a sentence, badges, and at most four numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlbench_cli.model.goals import name_metric
from mlbench_cli.model.methods import OWN
from mlbench_cli.results.analysis.comparability import conditions_of
from mlbench_cli.results.analysis.compare import TIMES, compare
from mlbench_cli.results.analysis.numbers import (
    MIN_RUNS,
    SAMPLES_PER_SECOND,
    SECONDS,
    format_estimate,
    format_factor,
    format_percent,
    format_ratio,
    format_value,
    has_verdict,
    unit_of,
)
from mlbench_cli.results.analysis.series import SUCCESSFUL, Group, Point, outcome_of
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.figures.curves import RunData
from mlbench_cli.results.figures.scaling import Job
from mlbench_cli.results.report.model import Badge, KeyNumber, Tone
from mlbench_cli.util.text import counted

# Differences by which two configurations are not ones of the same job in the same place: no winner is named.
_DECISIVE = frozenset(
    {"", "cluster", "machine", "image", "code", "framework", "label", "conditions", "faults", "judge"}
)
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
class Verdict:
    """The answer to "which is faster?" for two configurations of the same size; `ratio` is other over base.

    `obstacle` says why there is no answer, whatever the ratio; empty if nothing but the number of runs can prevent it.
    """

    base: Place
    other: Place
    ratio: Estimate | None
    obstacle: str = ""

    @property
    def is_known(self) -> bool:
        """Whether there are enough runs for an interval, and nothing else prevents a verdict."""
        return self.ratio is not None and has_verdict(self.ratio) and not self.obstacle

    @property
    def is_different(self) -> bool:
        """Whether the interval excludes 1."""
        found = self.ratio
        return self.is_known and found is not None and not (found.low or 0.0) <= 1 <= (found.high or 0.0)

    @property
    def words(self) -> str:
        """ "1.45× faster (1.39 to 1.52)"."""
        return format_ratio(self.ratio)


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


def judge(job: Job, runs: Sequence[RunData]) -> Verdict | None:
    """The best configuration against the baseline of the same size, judged as by `mlbench compare`; None without
    another configuration of that size."""
    if job.groups[0].after_time or len(job.groups) < 2:
        return None
    by_size: dict[int, list[Place]] = {}
    for place in places_of(job):
        by_size.setdefault(place.point.workers, []).append(place)
    sizes = [size for size, found in by_size.items() if len(found) > 1]
    if not sizes:
        return None
    found = sorted(by_size[max(sizes)], key=lambda place: place.point.seconds.mean)
    base = min(found, key=lambda place: (_rank_as_baseline(place.group), -place.point.seconds.mean))
    other = found[0] if found[0] is not base else found[1]
    archives = {str(run.archive.path): run.archive for run in runs}  # names of runs repeat across stores
    sides = [[archives[run.source] for run in place.point.good if run.source in archives] for place in (base, other)]
    found_apart = compare(sides[0], sides[1])
    rows = found_apart.seconds
    ratio = next((rows[name].ratio for name in TIMES if name in rows and rows[name].ratio), None)
    obstacle = next((each.text for each in found_apart.obstacles if each.word in _DECISIVE), "")
    if not obstacle and ratio is not None and ratio.low is None and ratio.count >= MIN_RUNS:
        obstacle = f"{found_apart.sessions.note}."
    return Verdict(base, other, ratio, obstacle)


def _rank_as_baseline(group: Group) -> int:
    name = group.facts.get("method", "")
    return next((place for place, known in enumerate(_BASELINES) if name == known), len(_BASELINES))


# --- title and sentence ---------------------------------------------------------------------------------------------


def title_of(job: Job, verdict: Verdict | None) -> str:
    """The result of a job as a sentence without a period."""
    best = best_of(job)
    if best is None:
        return f"{job.name}: no run succeeded"
    group, point = best.group, best.point
    if group.after_time:
        value = format_value(point.value.mean if point.value else None, unit_of(group.metric))
        return f"{job.title} reaches {value} {name_metric(group.metric)} with {best.name}"
    if verdict is not None and verdict.is_known and verdict.ratio is not None:
        other, base = verdict.other, verdict.base.subject
        if not verdict.is_different:
            return f"No difference seen between {base} and {other.subject} on {other.size}"
        ratio = verdict.ratio if verdict.ratio.mean >= 1 else verdict.ratio.inverse
        word = "slower" if verdict.ratio.mean > 1 else "faster"
        does = "reaches the goal" if group.metric else "runs"
        text = f"{other.subject} {does} {format_value(ratio.mean)}× {word} than {base} on {other.size}"
        return f"T{text[1:]}" if other.subject != other.group.label else text
    time = format_value(point.seconds.mean, SECONDS)
    if group.metric and not group.key.measure:
        return f"{job.title} reaches its goal in {time} with {best.name}"
    return f"{job.title} takes {time} with {best.name}"


def sentences_of(job: Job, verdict: Verdict | None) -> Iterator[str]:
    """Sentences with time and interval, the gain of more workers, and the comparison."""
    best = best_of(job)
    if best is None:
        return
    group, point = best.group, best.point
    if group.after_time:
        yield f"{group.metric} {format_estimate(point.value, unit_of(group.metric))} with {best.name}."
        return
    text = f"{format_estimate(point.seconds, SECONDS)} with {best.name}"
    speedup = group.speedup(point)
    if group.has_speedup and speedup is not None and group.baseline is not None and point is not group.baseline:
        text += f", {format_factor(speedup)} as fast as with {counted(group.baseline.workers, 'worker')}"
    yield f"{text}."
    if point.without_compiling is not None:
        yield f"{format_estimate(point.without_compiling, SECONDS)} of it without compiling."
    if verdict is not None and verdict.obstacle:
        pair = f"{verdict.base.subject} and {verdict.other.subject}"
        yield f"No verdict on {pair} on {verdict.other.size}: {verdict.obstacle}"
    elif verdict is not None and not verdict.is_known:
        yield (
            f"Too few runs to tell {verdict.base.subject} and {verdict.other.subject} apart on "
            f"{verdict.other.size}; at least {MIN_RUNS} of each are needed."
        )
    elif verdict is not None and verdict.is_different:
        waits = [_waiting(place) for place in (verdict.other, verdict.base)]
        if all(share is not None for share in waits):
            shares = [format_percent(share or 0.0) for share in waits]
            yield f"It waits {shares[0]} of the time for messages; {verdict.base.subject} waits {shares[1]}."


def _waiting(place: Place) -> float | None:
    parts = place.point.parts
    total = sum(parts.values())
    return parts["communication"] / total if total > 0 and "communication" in parts else None


# --- numbers --------------------------------------------------------------------------------------------------------


def numbers_of(job: Job, verdict: Verdict | None) -> Iterator[KeyNumber]:
    """At most four: time, speed-up, efficiency, and the ratio to the baseline or the throughput."""
    best = best_of(job)
    if best is None:
        return
    group, point = best.group, best.point
    if group.after_time:
        yield _number(name_metric(group.metric).capitalize(), point.value, unit_of(group.metric), best.name)
    else:
        name = "Time to goal" if group.metric and not group.key.measure else "Time"
        yield _number(name, point.seconds, SECONDS, best.name)
        speedup, first = group.speedup(point), group.baseline
        if group.has_speedup and speedup is not None and first is not None and point is not first:
            growth = point.workers / first.workers
            value, _, ends = format_factor(speedup).partition(" (")
            interval = (ends.rstrip(")"),) if ends else ()
            yield KeyNumber(
                f"Speed-up over {counted(first.workers, 'worker')}", value, (*interval, f"{growth:g}× is ideal")
            )
            yield KeyNumber("Efficiency", format_percent(speedup.mean / growth), ("speed-up over growth in workers",))
    if verdict is not None:
        value, _, ends = verdict.words.partition(" (")
        value, _, note = value.partition(",")
        notes = (ends.rstrip(")"), note.strip(), f"{verdict.other.group.label}, {verdict.other.size}")
        kept = tuple(text for text in notes if text)
        yield KeyNumber(f"Against {verdict.base.subject}", value, kept)
    elif point.throughput is not None:
        yield _number("Throughput", point.throughput, SAMPLES_PER_SECOND, "of all ranks")


def _number(name: str, found: Estimate | None, unit: str, place: str) -> KeyNumber:
    value, _, ends = format_estimate(found, unit).partition(" (")
    count = found.count if found else 0
    spread = f"{ends.rstrip(')')} · n\u00a0=\u00a0{count}" if ends else "one run" if count == 1 else ""
    return KeyNumber(name, value, tuple(text for text in (spread, place) if text))


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
        yield f"{next(iter(found))} division"
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
