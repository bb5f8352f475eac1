"""Figures over the number of workers: time, speed-up, efficiency, phases, communication, cost, throughput.

Runs share a figure only if they did the same job: equal task, goal, data and time budget. Other differences (backend,
machine, method, ...) are in the label of the line.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mlbench_cli.results.analysis.comparability import ComparisonKey, describe
from mlbench_cli.results.analysis.numbers import (
    SAMPLES_PER_SECOND,
    SECONDS,
    format_share,
    unit_of,
)
from mlbench_cli.results.analysis.series import Group, Point, Series
from mlbench_cli.results.analysis.stats import MIN_RUNS, Estimate, Ratio, estimate
from mlbench_cli.results.figures.look import MAX_LOOKS, PHASES, Look, choose_shared_looks, family_of, look_of
from mlbench_cli.results.figures.model import MAX_SERIES, Axis, Figure, Kind, Line, Scale, choose_divider
from mlbench_cli.results.figures.published import published_lines, published_phases
from mlbench_cli.util.text import counted, list_some
from task_images.contract import COMPUTE_CATEGORIES, MIXED_CATEGORIES

COMMUNICATION = "communication"
_WORKERS = "workers"


@dataclass(frozen=True)
class Job:
    """Groups of runs of the same job, which share figures. `prices` are US dollars by archive, if known.
    `published` adds the published curves of MLBench 3."""

    name: str
    groups: tuple[Group, ...]
    prices: dict[str, float]
    published: bool = True

    @cached_property
    def places(self) -> list[tuple[str, str]]:
        """For each group, the title of its small multiple and its name there.

        Too many groups for one plot are divided by the setting that gives the fewest panels of at most MAX_SERIES, else
        by the families of their methods.
        """
        facts = [group.facts for group in self.groups]
        if len(facts) <= MAX_SERIES:
            return [("measured", group.label) for group in self.groups]
        telling = _choose_telling(facts)
        chosen = choose_divider(telling, facts)
        if not chosen:
            panels = _join_families([family_of(fact.get("method", "")) for fact in facts])
            return [(panel, group.label) for panel, group in zip(panels, self.groups, strict=True)]
        rest = [name for name in telling if name != chosen]
        return [
            (describe(chosen, fact.get(chosen, "")) or f"no {chosen}", _describe_all(rest, fact) or group.label)
            for fact, group in zip(facts, self.groups, strict=True)
        ]

    @cached_property
    def looks(self) -> list[Look]:
        """Color and mark of each group, equal for groups with the same name in several panels."""
        names = [name for _, name in self.places]
        return choose_shared_looks(names, [group.facts.get("method", "") for group in self.groups])

    def list_published(self, metric: str) -> list[Line]:
        """The published lines of the task, in colors that the groups do not use."""
        found = published_lines(self.task, metric) if self.published else ()
        taken = set(self.looks)
        free = [look for look in map(look_of, range(MAX_LOOKS)) if look not in taken]
        return [
            replace(line, color=look[0], shape=look[1], panel="published")
            for line, look in zip(found, free, strict=False)
        ]

    @property
    def title(self) -> str:
        """The task; of a user's command, its experiments and the command."""
        return _title_of(self.groups)

    @property
    def task(self) -> str:
        """The task of all groups."""
        return self.groups[0].task

    @property
    def workers(self) -> list[int]:
        """All numbers of workers, ascending."""
        return sorted({point.workers for group in self.groups for point in group.points})

    @property
    def what(self) -> str:
        """The timed quantity: "seconds to the goal" or "seconds of the run"."""
        if self.groups[0].after_time:
            return "time budget in seconds"
        if self.groups[0].key.measure:
            return "seconds of the run"
        return "seconds to the goal" if self.groups[0].metric else "seconds of the task"


def split_jobs(series: Series, prices: dict[str, float], *, published: bool = True) -> list[Job]:
    """The groups by job, in the order of the series; names distinguish jobs of the same task."""
    found: dict[tuple[object, ...], list[Group]] = {}
    for group in series.groups:
        found.setdefault(_job_key(group.key), []).append(group)
    jobs = list(found.values())
    titles = [_title_of(groups) for groups in jobs]
    return [
        Job(
            title if titles.count(title) == 1 else f"{title} ({_difference(groups[0])})",
            label_groups(groups),
            prices,
            published,
        )
        for title, groups in zip(titles, jobs, strict=True)
    ]


def _title_of(groups: Sequence[Group]) -> str:
    """ "a, b: python train.py" of two experiments with one command."""
    titles = list(dict.fromkeys(title for group in groups for title in group.titles))
    names, commands = zip(*(title.partition(": ")[::2] for title in titles), strict=True)
    if len(titles) < 2 or len({*commands}) > 1:
        return titles[0]
    return f"{list_some(names)}{': ' + commands[0] if commands[0] else ''}"


# Distinguishing settings in the order of labels. Digests and versions come last, because they rarely explain a
# difference.
_TELLING = ("method", "network", "backend", "device", "command", "cluster", "processes_per_worker", "gpus_per_worker")
_LAST = ("machine", "framework", "image", "code", "judge", "data", "division")


def label_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups of one job, labeled by their differences; a single group by its method."""
    facts = [group.facts for group in groups]
    if len(groups) == 1:
        return (replace(groups[0], label=describe("method", facts[0]["method"])),)
    telling = _choose_telling(facts)
    labels = [_describe_all(telling, fact) for fact in facts]
    if "code" in telling and all(group.key.command for group in groups):  # versions of a program: by their experiments
        rest = [name for name in telling if name != "code"]
        names = [list_some([title.partition(": ")[0] for title in group.titles]) for group in groups]
        named = [
            ", ".join(filter(None, (name, _describe_all(rest, fact)))) for name, fact in zip(names, facts, strict=True)
        ]
        labels = named if len(set(named)) == len(named) else labels
    return tuple(replace(group, label=label or group.label) for group, label in zip(groups, labels, strict=True))


def _choose_telling(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings whose values tell the groups apart."""
    names = dict.fromkeys(name for fact in facts for name in fact if name not in ("metric", "setting goal"))
    order = [*_TELLING, *(name for name in names if name not in (*_TELLING, *_LAST)), *_LAST]
    chosen: list[str] = []
    told = 1
    for name in order:
        count = len({tuple(fact.get(each, "") for each in (*chosen, name)) for fact in facts})
        if count > told:
            chosen, told = [*chosen, name], count
    return chosen


def _describe_all(names: Sequence[str], facts: Mapping[str, str]) -> str:
    return ", ".join(filter(None, (describe(name, facts.get(name, "")) for name in names)))


def _join_families(families: Sequence[str]) -> list[str]:
    """The panel of each family; neighbors share one as long as it has at most MAX_SERIES methods."""
    panels: list[tuple[list[str], int]] = []
    for family, count in Counter(families).items():
        if not panels or panels[-1][1] + count > MAX_SERIES:
            panels.append(([], 0))
        panels[-1] = [*panels[-1][0], family], panels[-1][1] + count
    if len(panels) == 1:
        return [""] * len(families)
    titles = {family: ", ".join(filter(None, members)) for members, _ in panels for family in members}
    return [titles[family] for family in families]


def _job_key(key: ComparisonKey) -> tuple[object, ...]:
    """The key of a job; without a goal it includes the parameters, which define the amount of work."""
    amount = () if key.goal else key.parameters
    shared = (key.task, key.preset, key.goal, key.metric, key.budget, key.data, key.synthetic)
    return (*shared, key.measure, key.label, key.command, key.judge, amount)


def _difference(group: Group) -> str:
    facts = group.facts
    words = [facts.get("preset"), facts.get("goal"), facts.get("synthetic"), facts.get("label"), facts.get("budget")]
    return ", ".join(word for word in words if word) or group.label


def scaling_figures(job: Job, number: int) -> Iterator[Figure]:
    """All figures of a job over the number of workers, without empty ones."""
    key = f"job{number}-"
    made = (
        time_figure(job, key),
        speedup_figure(job, key),
        _compute_speedup(job, key),
        phases_figure(job, key),
        _share(job, key),
        _cost(job, key),
        _price_index(job, key),
        _throughput(job, key),
        _node_hours(job, key),
        after_time_figure(job, key),
        _final_error(job, key),
    )
    return (figure for figure in made if figure is not None)


# --- one figure each ------------------------------------------------------------------------------------------------


def time_figure(job: Job, key: str) -> Figure | None:
    """The time to the goal, or of the run, over the number of workers."""
    lines = _collect_lines(job, lambda group, point: point.seconds if point.good else None)
    if job.groups[0].after_time:
        return None
    lines += job.list_published("seconds") if job.groups[0].metric else ()
    title = "Time to goal" if job.groups[0].metric and not job.groups[0].key.measure else "Time"
    scale = _wide(lines, Scale.LOG10)
    return _figure(
        job, f"{key}time", f"{title}: {job.name}", job.what, lines, "Lower is better.", y_scale=scale, unit=SECONDS
    )


def speedup_figure(job: Job, key: str) -> Figure | None:
    """Speed-up over the smallest number of workers of the same line."""
    lines = _collect_lines(job, lambda group, point: group.speedup(point))
    if not any(group.has_speedup for group in job.groups):
        return None
    lines += [*job.list_published("speedup"), _ideal(job)]
    caption = "Speed relative to the fewest workers of the same line: T(k0) / T(k)."
    scale = _wide(lines, Scale.LOG2)
    return _figure(job, f"{key}speedup", f"Speed-up: {job.name}", "speed-up", lines, caption, y_scale=scale)


def _wide(lines: Sequence[Line], scale: Scale) -> Scale:
    """`scale` for values that differ by a large factor, else linear."""
    values = [y for line in lines for y in line.ys if y is not None and y > 0]
    return scale if values and max(values) > 16 * min(values) else Scale.LINEAR


def _compute_speedup(job: Job, key: str) -> Figure | None:
    lines = _collect_lines(job, _compute_speedup_of)
    if not any(len(line.xs) > 1 for line in lines):
        return None
    lines += [*job.list_published("compute_speedup"), _ideal(job)]
    caption = "Forward, loss, backward and optimizer only, without communication; rank 0."
    title = f"Compute-only speed-up: {job.name}"
    return _figure(job, f"{key}compute-speedup", title, "speed-up of computing", lines, caption, y_scale=Scale.LOG2)


def phase_figures(job: Job, key: str) -> Iterator[Figure]:
    """Rank 0's time by phase: a bar per number of workers, a figure per group."""
    for index, group in enumerate(job.groups):
        points = [point for point in group.points if point.shown and any(point.parts.values())]
        if not points:
            continue
        name = job.name if len(job.groups) == 1 else f"{job.name}, {group.label}"
        yield Figure(
            f"{key}phases-{index}",
            f"Time by phase: {name}",
            _name_workers([point.workers for point in points]),
            Axis("seconds", from_zero=True, unit=SECONDS),
            tuple(_phase_lines(points)),
            "Rank 0; means over repeats. The parts of a bar add up to the total time." + _mixed_note(points),
            Kind.BARS,
        )


def phases_figure(job: Job, key: str) -> Figure | None:
    """All groups of a job in one figure of phases: a bar per number of workers and group."""
    found = [
        (group, point)
        for count in job.workers
        for group in job.groups
        for point in group.points
        if point.workers == count and point.shown and any(point.parts.values())
    ]
    if not any(name != "other" and seconds for _, point in found for name, seconds in point.parts.items()):
        return None  # phases are unknown
    names = tuple(_name_place(job, group, point) for group, point in found)
    return Figure(
        f"{key}phases",
        f"Where the time went: {job.name}",
        Axis("configuration", Scale.CATEGORIES, categories=names),
        Axis("seconds", from_zero=True, unit=SECONDS),
        tuple(_phase_lines([point for _, point in found], shares=True)),
        "Rank 0; means over repeats." + _mixed_note([point for _, point in found]),
        Kind.BARS,
    )


def _name_place(job: Job, group: Group, point: Point) -> str:
    size = counted(point.workers, "worker")
    if len(job.groups) == 1:
        return size
    return f"{group.label}, {size}" if len(job.workers) > 1 else group.label


def _phase_lines(points: Sequence[Point], *, shares: bool = False) -> Iterator[Line]:
    xs = tuple(map(float, range(len(points))))
    notes = tuple(_waiting(point) if shares else _note(point) for point in points)
    for words, color, names in PHASES:
        for name in names:
            if any(point.parts.get(name) for point in points):
                ys = tuple(point.parts.get(name, 0.0) for point in points)
                yield Line(name.replace("_", " "), xs, ys, color=color, group=words, notes=notes)


def _mixed_note(points: Sequence[Point]) -> str:
    """What must be said of phases in which messages are sent; empty without any."""
    is_mixed = any(name in point.parts for point in points for name in MIXED_CATEGORIES.values())
    return " Where messages are sent inside a pass, their time cannot be told from computing." if is_mixed else ""


def _waiting(point: Point) -> str:
    """ "waits 38 %": share of the time spent waiting for messages; empty if none."""
    share = point.parts.get(COMMUNICATION, 0.0) / (sum(point.parts.values()) or 1.0)
    return f"waits {format_share(share)}" if share > 0 else ""


def _name_workers(counts: Sequence[int]) -> Axis:
    names = tuple(counted(count, "worker") for count in counts)
    return Axis(_WORKERS, Scale.CATEGORIES, categories=names)


def _note(point: Point) -> str:
    """The note at a point: "1 of 2 reached it", "failed", "contended"."""
    trouble = point.share or ("" if point.good else "/".join(sorted({run.outcome for run in point.bad})))
    words = (trouble, *point.labels)
    return ", ".join(word.replace("_", " ") for word in words if word)


def published_phases_figures(job: Job, key: str) -> Iterator[Figure]:
    """MLBench 3's bars, a figure per series, separate from ours because they are from other machines."""
    for index, (variant, counts, lines) in enumerate(published_phases(job.task)):
        yield Figure(
            f"{key}published-phases-{index}",
            f"Published time by phase: {variant}",
            _name_workers(counts),
            Axis("seconds", from_zero=True, unit=SECONDS),
            lines,
            "Published by the original MLBench, from other machines and other software.",
            Kind.BARS,
        )


def _share(job: Job, key: str) -> Figure | None:
    lines = _collect_lines(job, _share_of)
    if not any(y for line in lines for y in line.ys):
        return None
    lines += job.list_published("communication_share")
    caption = "Share of the total time that rank 0 spent communicating and waiting for others."
    title = f"Communication share: {job.name}"
    return _figure(job, f"{key}communication", title, "share of the time", lines, caption, from_zero=True)


def _cost(job: Job, key: str) -> Figure | None:
    def cost(group: Group, point: Point) -> Estimate | None:
        known = [job.prices[run.source] for run in point.good if run.source in job.prices]
        return estimate(known) if known and len(known) == len(point.good) else None

    lines = _collect_lines(job, cost)
    if not any(line.ys for line in lines):
        return None
    lines += job.list_published("cost")
    caption = "The whole cluster from the start of the first worker to the end of the last, at list prices."
    title = f"Cost to goal: {job.name}"
    return _figure(job, f"{key}cost", title, "US dollars", lines, caption, from_zero=True)


def _price_index(job: Job, key: str) -> Figure | None:
    if not any(group.has_speedup for group in job.groups):
        return None
    lines = [*_collect_lines(job, _price_index_of), *job.list_published("price_index")]
    lines.append(
        Line("below 1, distribution pays off", _counts(job, lines), (1.0,) * len(_counts(job, lines)), reference=True)
    )
    caption = "Increase in price divided by increase in performance: (k / k0) / S(k)²."
    title = f"Price index: {job.name}"
    return _figure(job, f"{key}price-index", title, "price index", lines, caption, y_scale=Scale.LOG10)


def _throughput(job: Job, key: str) -> Figure | None:
    lines = _collect_lines(job, lambda group, point: point.throughput if point.good else None)
    if not any(line.ys for line in lines):
        return None
    lines += job.list_published("samples_per_second")
    caption = "Samples of all ranks per second of training, including waiting for data, without validation."
    title = f"Throughput: {job.name}"
    return _figure(job, f"{key}throughput", title, "samples per second", lines, caption, unit=SAMPLES_PER_SECOND)


def _node_hours(job: Job, key: str) -> Figure | None:
    """Node hours as the cost without prices; only drawn together with published values."""
    published = job.list_published("node_hours")
    if not published or job.groups[0].after_time or not job.groups[0].metric:
        return None

    def node_hours(_: Group, point: Point) -> Estimate | None:
        return _map_estimate(point.seconds, lambda seconds: seconds * point.workers / 3600) if point.good else None

    lines = [*_collect_lines(job, node_hours), *published]
    caption = "Workers times hours to the goal."
    return _figure(job, f"{key}node-hours", f"Node hours: {job.name}", "hours", lines, caption, y_scale=Scale.LOG10)


def _final_error(job: Job, key: str) -> Figure | None:
    """The final error of a fixed training over the number of workers; only drawn together with published values."""
    published = job.list_published("final_error")
    metric = job.groups[0].metric or ""
    if not published or not metric.startswith("Prec@"):
        return None

    def error(_: Group, point: Point) -> Estimate | None:
        return _map_estimate(point.value, lambda value: 100.0 - value) if point.value else None

    lines = [*_collect_lines(job, error), *published]
    caption = f"100 % minus {metric}: here at the goal or the end of the budget; published values after all epochs."
    title = f"Final error: {job.name}"
    return _figure(job, f"{key}final-error", title, "error, %", lines, caption, from_zero=True)


def _map_estimate(found: Estimate, change: Callable[[float], float]) -> Estimate:
    """The estimate of a monotonic function of another quantity."""
    if found.low is None or found.high is None:
        return replace(found, mean=change(found.mean))
    low, high = sorted((change(found.low), change(found.high)))
    return replace(found, mean=change(found.mean), low=low, high=high)


def after_time_figure(job: Job, key: str) -> Figure | None:
    """The goal's metric at the end of the time budget over the number of workers."""
    if not any(group.after_time for group in job.groups):
        return None
    lines = _collect_lines(job, lambda group, point: point.value if point.good else None)
    metric = job.groups[0].metric or "metric of the goal"
    budget = job.groups[0].facts.get("budget", "")
    caption = f"{metric} at the end of {budget} s of training."
    return _figure(
        job, f"{key}after-time", f"{metric} after time: {job.name}", metric, lines, caption, unit=unit_of(metric)
    )


# --- values ---------------------------------------------------------------------------------------------------------


def _price_index_of(group: Group, point: Point) -> Estimate | None:
    speedup, baseline = group.speedup(point), group.baseline
    if speedup is None or baseline is None:
        return None
    growth = point.workers / baseline.workers
    low, high = (None if end is None or end <= 0 else growth / end**2 for end in (speedup.high, speedup.low))
    return Estimate(speedup.count, growth / speedup.mean**2, low, high)


def _compute_speedup_of(group: Group, point: Point) -> Estimate | None:
    baseline = group.baseline
    if baseline is None or not point.good:
        return None
    if any(name in each.parts for each in (baseline, point) for name in MIXED_CATEGORIES.values()):
        return None
    seconds = [sum(each.parts.get(name, 0.0) for name in COMPUTE_CATEGORIES) for each in (baseline, point)]
    return Estimate(len(point.good), seconds[0] / seconds[1]) if min(seconds) > 0 else None


def _share_of(group: Group, point: Point) -> Estimate | None:
    if not point.good or point.seconds.mean <= 0 or COMMUNICATION not in point.parts:
        return None
    shares = [(run.get(COMMUNICATION) or 0.0) / run.seconds for run in point.good if run.seconds > 0]
    return estimate(shares) if shares else None


def _scale(found: Estimate | Ratio, factor: float) -> Estimate:
    low, high = (None if end is None else end * factor for end in (found.low, found.high))
    return Estimate(found.count, found.mean * factor, low, high)


# --- lines ----------------------------------------------------------------------------------------------------------


def _collect_lines(job: Job, value: Callable[[Group, Point], Estimate | Ratio | None]) -> list[Line]:
    """A line per group with the points that have a value."""
    lines = []
    for group, (color, shape), (panel, short) in zip(job.groups, job.looks, job.places, strict=True):
        found = [(point, each) for point in group.points if (each := value(group, point)) is not None]
        if not found:
            continue
        ends = [None if each.low is None or each.high is None else (each.low, each.high) for _, each in found]
        has_ends = any(ends)
        lines.append(
            Line(
                group.label or job.title,
                tuple(float(point.workers) for point, _ in found),
                tuple(each.mean for _, each in found),
                tuple(each and each[0] for each in ends) if has_ends else (),
                tuple(each and each[1] for each in ends) if has_ends else (),
                few=tuple(each.count < MIN_RUNS for _, each in found),
                notes=tuple(_note(point) for point, _ in found),
                color=color,
                shape=shape,
                panel=panel,
                short=short,
            )
        )
    return lines


def _ideal(job: Job) -> Line:
    """The line of ideal scaling."""
    counts = job.workers
    return Line("ideal", tuple(map(float, counts)), tuple(count / counts[0] for count in counts), reference=True)


def _counts(job: Job, lines: Sequence[Line]) -> tuple[float, ...]:
    return tuple(sorted({x for line in lines for x in line.xs} | {float(count) for count in job.workers}))


def _figure(
    job: Job,
    key: str,
    title: str,
    label: str,
    lines: Sequence[Line],
    caption: str = "",
    *,
    y_scale: Scale = Scale.LINEAR,
    from_zero: bool = True,
    unit: str = "",
) -> Figure | None:
    own = [line for line in lines if not line.reference]
    counts = _counts(job, lines)
    if sum(len(line.xs) for line in own) < 2 and len(counts) < 2:
        return None  # a single value is shown as a sentence
    lines = [replace(line, low=tuple(end and max(0.0, end) for end in line.low)) for line in lines]
    if any(line.low for line in own):
        caption = f"{caption} Bars: 95 % intervals.".strip()
    if len(counts) == 1:
        return Figure(key, title, *_turn(own, Axis(label, from_zero=True, unit=unit)), caption, Kind.BARS)
    x = Axis(_WORKERS, Scale.LOG2, ticks=counts)
    return Figure(key, title, x, Axis(label, y_scale, from_zero=from_zero, unit=unit), tuple(lines), caption)


def _turn(lines: Sequence[Line], axis: Axis) -> tuple[Axis, Axis, tuple[Line, ...]]:
    """Convert values at a single number of workers to horizontal bars, one per line."""
    bars = tuple(replace(line, xs=(float(index),)) for index, line in enumerate(lines))
    return Axis("series", Scale.CATEGORIES, categories=tuple(line.label for line in lines)), axis, bars
