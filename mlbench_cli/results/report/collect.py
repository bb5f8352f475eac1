"""From verified archives to a report."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlbench_cli.model.goals import name_metric
from mlbench_cli.model.methods import method_of
from mlbench_cli.results.analysis import collectives
from mlbench_cli.results.analysis.comparability import UNKNOWN, conditions_of, describe
from mlbench_cli.results.analysis.compare import compare_runs
from mlbench_cli.results.analysis.energy import Energy, find_energy
from mlbench_cli.results.analysis.figures import IN_DOUBT, SUCCESSFUL, outcome_of
from mlbench_cli.results.analysis.jobs import Job, split_jobs
from mlbench_cli.results.analysis.numbers import (
    JOULES,
    NO_VALUE,
    SAMPLES_PER_SECOND,
    SECONDS,
    format_estimate,
    format_goal,
    format_percent,
    format_value,
    unit_of,
)
from mlbench_cli.results.analysis.series import Point, Series
from mlbench_cli.results.analysis.series import collect as collect_series
from mlbench_cli.results.archive.faults import PARTS
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.chart import PHASES, Chart
from mlbench_cli.results.figures.collectives import collective_charts
from mlbench_cli.results.figures.curves import RunData, metric_charts
from mlbench_cli.results.figures.faults import draw_faults
from mlbench_cli.results.figures.published import published_values
from mlbench_cli.results.figures.svg import Spent
from mlbench_cli.results.report.model import Note, Report, ReportTable, RowPlot, Section, Tone
from mlbench_cli.results.report.summary import (
    Finding,
    Place,
    badges_of,
    base_of,
    comparable_with,
    find,
    places_of,
    sentences_of,
    title_of,
)
from mlbench_cli.util.text import counted, list_some, shorten

MAX_FIGURES = 2  # of a job
RUNS = 6  # the column that counts runs
MAX_FAULTED = 4  # runs whose faults are drawn


def collect(
    archives: Sequence[Archive],
    *,
    title: str | None = None,
    left_out: Sequence[str] = (),
) -> Report:
    """The report of verified archives. `left_out` are sentences about rejected archives.

    Raises UsageError if two archives of the same run differ.
    """
    series = collect_series(archives)
    runs = [RunData(archive) for archive in _in_order(archives, series)]
    jobs = split_jobs(series)
    findings = [find(job, runs) for job in jobs]
    sections = [
        *(
            _job_section(job, number, finding, runs, len(jobs))
            for number, (job, finding) in enumerate(zip(jobs, findings, strict=True), 1)
        ),
        *_fault_sections(archives),
        *_collective_sections(archives),
        _finding_section(runs, left_out),
        *(_metric_section(job, len(jobs)) for job in jobs),
        _difference_section(jobs, runs),
        _setting_section(series, jobs),
        _platform_section(runs),
        _run_section(runs),
        _method_section(jobs),
    ]
    return Report(
        title or _title(jobs, findings, runs),
        tuple(_headline(jobs, findings, runs)),
        (*_warnings(runs), *left_out),
        tuple(section for section in sections if not section.is_empty),
        tuple(run.name for run in runs),
        context=_context(series, runs),
        badges=tuple(badges_of(runs, {run.name: method_of(_spec(run)) for run in runs})),
        csv=series.to_csv(),
    )


def _in_order(archives: Sequence[Archive], series: Series) -> list[Archive]:
    """The archives in the order of the series: by group, workers and name."""
    points = (point for group in series.groups for point in group.points)
    order = {run.source: index for index, run in enumerate(run for point in points for run in point.good + point.bad)}
    unique = {str(archive.run["id"]): archive for archive in reversed(archives)}
    return sorted(unique.values(), key=lambda archive: order.get(str(archive.path), len(order)))


def _spec(run: RunData) -> Mapping[str, Any]:
    found: Mapping[str, Any] = run.archive.run["spec"]
    return found


def _title(jobs: Sequence[Job], findings: Sequence[Finding | None], runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        return str(runs[0].archive.result["summary"]).rstrip(".")
    return title_of(jobs[0], findings[0]) if len(jobs) == 1 else f"{len(jobs)} jobs, {len(runs)} runs"


def _context(series: Series, runs: Sequence[RunData]) -> str:
    """The line above the title: tasks, goal, place, date."""
    titles = list(dict.fromkeys(title for group in series.groups for title in group.titles))
    tasks = ", ".join(titles[:3]) + (" and more" if len(titles) > 3 else "")
    goal = series.common.get("goal", "")
    places = list(dict.fromkeys(str(run.archive.result["cluster"]) for run in runs))
    where = "this machine" if places == ["local"] else ", ".join(places[:3]) + (" and more" if len(places) > 3 else "")
    last = max((str(run.archive.result["finished"]) for run in runs), default="")[:10]
    return " · ".join(filter(None, (tasks, goal, where, last)))


# --- result ---------------------------------------------------------------------------------------------------------


def _headline(jobs: Sequence[Job], findings: Sequence[Finding | None], runs: Sequence[RunData]) -> Iterator[str]:
    """The sentences below the title: details of a single job, or that several jobs are not compared."""
    if len(jobs) == 1 and len(runs) > 1:
        title = title_of(jobs[0], findings[0])
        yield from (text for text in sentences_of(jobs[0], findings[0]) if text.rstrip(".") not in title)
    elif len(jobs) > 1:
        yield "Only runs of one job are compared: equal task, preset, goal and data."


def _warnings(runs: Sequence[RunData]) -> Iterator[str]:
    """Warnings about what the figures do not show, each once with its runs."""
    for lead, text in _conditions(runs):
        yield f"{lead} {text}"


def _conditions(runs: Sequence[RunData]) -> Iterator[tuple[str, str]]:
    """ "12 runs were contended:" and "a-1 (other processes used 1.1 of 2 CPUs), ..."."""
    found: dict[str, list[str]] = {}
    for run in runs:
        result = run.archive.result
        if result["label"]["word"] == "functional":
            text = f"{{}} functional only, not a performance measurement: {result['label']['reason']}:"
            found.setdefault(text, []).append(run.name)
        if result["synthetic"]:
            found.setdefault("{} on synthetic data:", []).append(run.name)
        for condition in conditions_of(run.archive).found:
            found.setdefault(f"{{}} {condition.label.replace('_', '-')}:", []).append(
                f"{run.name} ({condition.reason})"
            )
        if (ending := outcome_of(result)) == IN_DOUBT:
            doubts = ", ".join(result["doubts"])
            found.setdefault("{} left out of all times (the evidence is in doubt):", []).append(
                f"{run.name} ({doubts})"
            )
        elif ending not in SUCCESSFUL:
            found.setdefault(f"{{}} left out of all times ({ending.replace('_', ' ')}):", []).append(run.name)
    for text, names in found.items():
        _, _, rest = text.partition("{}")
        count = counted(len(names), "run was", "runs were")
        yield f"{count}{rest}", f"{list_some(names)}."


def _job_section(job: Job, number: int, finding: Finding | None, runs: Sequence[RunData], count: int) -> Section:
    """The table of a job, whose rows are its figure, and at most two curves."""
    figures = tuple(_curves(job, number, runs))
    table = _answer(job)
    if count == 1:
        return Section(table.title, _comparison_note(job), (table,), figures)
    is_finding = finding is not None and finding.ratio is not None and finding.ratio.is_different
    heading = f"{job.name}: {finding.title}" if finding is not None and is_finding else job.name
    return Section(heading, tuple(sentences_of(job, finding)), (table,), figures)


def _answer(job: Job) -> ReportTable:
    """A row per configuration: what its time was spent on, the time, and how it compares. Columns without any value,
    or with the same in all rows, are left out."""
    places = [Place(group, point) for group in job.groups for point in group.points]
    if len(job.groups) > 1:
        places.sort(key=lambda place: (place.point.workers, not place.point.good, place.point.seconds.mean))
    bases = [_base(place, job) for place in places]
    rows = [_answer_row(place, base, job) for place, base in zip(places, bases, strict=True)]
    counts = {row[RUNS] for row in rows}
    what = name_metric(job.groups[0].metric) if job.groups[0].metric else "result"
    pairs = [(place, base) for place, base in zip(places, bases, strict=True) if base is not None]
    labels = {base.size if base.group is place.group else base.subject for place, base in pairs}
    against = f"against {labels.pop()}" if len(labels) == 1 else "against the baseline"
    head = ("configuration", "time", against, "efficiency", "throughput", what, "runs", "conditions")
    kept = [
        index
        for index in range(len(head))
        if index < 2 or (any(row[index] != NO_VALUE for row in rows) and (index != RUNS or len(counts) > 1))
    ]
    top = _top([place.point for place in places])
    key = [
        (words, color)
        for words, color, parts in PHASES
        if any(place.point.parts.get(part) for place in places for part in parts)
    ]
    tones = [Tone.BAD if place.point.bad else Tone.WARN if place.point.labels else Tone.PLAIN for place in places]
    is_goal = job.groups[0].metric and not job.groups[0].key.measure and not job.groups[0].after_time
    return ReportTable(
        f"Time{' to the goal' if is_goal else ''}{', by what it was spent on' if len(key) > 1 else ''}",
        tuple(head[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in rows),
        tuple(kept.index(index) for index in (1, 3, 4, 5, 6) if index in kept),
        plots=tuple(_plot(place, top) for place in places),
        key=tuple(key) if len(key) > 1 else (),
        tones=tuple(tones) if 7 in kept else (),
    )


def _base(place: Place, job: Job) -> Place | None:
    """What a row is compared with: the baseline method of its size, else the fewest workers. None for itself."""
    if place.group.after_time or not place.point.good:
        return None
    alike = [each for each in comparable_with(place, places_of(job)) if each.point.workers == place.point.workers]
    if len(alike) > 1:
        base = base_of(alike)
    elif place.group.baseline is not None:
        base = Place(place.group, place.group.baseline)
    else:
        return None
    return None if base.point is place.point else base


def _answer_row(place: Place, base: Place | None, job: Job) -> tuple[str, ...]:
    group, point = place.group, place.point
    change = NO_VALUE
    if base is not None:
        rows, _ = compare_runs(base.point.good, point.good)
        change = rows["seconds"].words
    speedup, efficiency = group.speedup(point), NO_VALUE
    if speedup is not None and group.baseline is not None and group.has_speedup:
        efficiency = format_percent(speedup.mean * group.baseline.workers / point.workers)
    total = len(point.good) + len(point.bad)
    outcomes = sorted({run.outcome.replace("_", " ") for run in point.bad})
    bad = ["failed"] if point.bad and point.good else outcomes
    return (
        job.name_of(place.group, place.point),
        format_estimate(point.seconds, SECONDS) if point.good else NO_VALUE,
        change,
        efficiency,
        format_estimate(point.throughput, SAMPLES_PER_SECOND).partition(" (")[0] if point.good else NO_VALUE,
        format_estimate(point.value, unit_of(group.metric)).partition(" (")[0] if point.value else NO_VALUE,
        str(total) if not point.bad else f"{len(point.good)} of {total}",
        ", ".join((*bad, *(label.replace("_", "-") for label in point.labels))) or NO_VALUE,
    )


def _top(points: Sequence[Point]) -> float:
    """The end of the axis: beyond the longest interval, but not so far that bars cannot be told apart."""
    means = [point.seconds.mean for point in points if point.good]
    ends = [point.seconds.high or 0.0 for point in points if point.good]
    longest = max(means, default=0.0)
    return max(1.02 * longest, min(max(ends, default=0.0), 1.6 * longest)) or 1.0


def _plot(place: Place, top: float) -> RowPlot:
    point, begin, spent = place.point, 0.0, []
    if not point.good:
        return RowPlot((), None, None, None)
    parts = [(words, color, sum(point.parts.get(name, 0.0) for name in names)) for words, color, names in PHASES]
    if not any(seconds for _, _, seconds in parts):
        parts = [("time", "other", point.seconds.mean)]
    for words, color, seconds in parts:
        if seconds > 0:
            spent.append(Spent(words, color, begin / top, seconds / top, format_value(seconds, SECONDS)))
            begin += seconds
    base, found = place.group.baseline, point.seconds
    ideal = base.seconds.mean * base.workers / point.workers / top if base and base is not point else None
    low, high = (None if end is None else end / top for end in (found.low, found.high))
    return RowPlot(tuple(spent), low, high, ideal)


def _metric_section(job: Job, count: int) -> Section:
    """What the programs reported: folded where the goal's metric is in the table already."""
    tables = _metric_tables(job)
    names = list(dict.fromkeys(row[tables[0].head.index("metric")] for row in tables[0].rows)) if tables else []
    heading = "Metrics" if count == 1 else f"Metrics of {job.name}"
    return Section(heading, (), tables, is_folded=bool(job.groups[0].metric), summary=list_some(names, 6))


def _metric_tables(job: Job) -> tuple[ReportTable, ...]:
    """What the programs reported: a row per metric and configuration, with the row of its last value against the
    baseline. None if they reported nothing."""
    cells: dict[str, list[tuple[str, ...]]] = {}
    for place in (Place(group, point) for group in job.groups for point in group.points if point.good):
        base = _base(place, job)
        changes = compare_runs(base.point.good, place.point.good)[0] if base is not None else {}
        for name, each in place.point.metrics.items():
            values = (format_estimate(each.get(which), unit_of(name)) for which in ("last", "best", "mean"))
            change = changes[name].words if name in changes else NO_VALUE
            cells.setdefault(name, []).append((name, job.name_of(place.group, place.point), *values, change))
    rows = tuple(row for found in cells.values() for row in found)
    if not rows:
        return ()
    head = ("metric", "configuration", "last", "best", "mean", "last, against the baseline")
    has_changes = any(row[-1] != NO_VALUE for row in rows)
    kept = [0, *((1,) if len({row[1] for row in rows}) > 1 else ()), 2, 3, 4, *((5,) if has_changes else ())]
    table = ReportTable(
        "Metrics of rank 0",
        tuple(head[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in rows),
        tuple(kept.index(index) for index in (2, 3, 4)),
    )
    return (table,)


# --- settings -------------------------------------------------------------------------------------------------------


def _difference_section(jobs: Sequence[Job], runs: Sequence[RunData]) -> Section:
    """The differences between the series of one job, and the commands that ran them."""
    rows = []
    if len(jobs) == 1:
        facts = [group.facts for group in jobs[0].groups]
        for name in dict.fromkeys(name for fact in facts for name in fact):
            values = list(dict.fromkeys(describe(name, fact.get(name, "")) or NO_VALUE for fact in facts))
            if len(values) > 1:
                rows.append((_setting_name(name), ", ".join(shorten(value, 120) for value in values)))
        if len(jobs[0].workers) > 1:
            rows.append(("workers", ", ".join(map(str, jobs[0].workers))))
    seeds = sorted({str(_spec(run).get("seed")) for run in runs})
    if len(seeds) > 1 and len(jobs) == 1:
        rows.append(("seed", ", ".join(seeds[:8]) + (" and more" if len(seeds) > 8 else "")))
    lines = [(run.archive.run.get("provenance") or {}).get("command_line") or [] for run in runs]
    commands = dict.fromkeys(shorten(shlex.join(map(str, line)), 400) for line in lines if line[:1] == ["mlbench"])
    table = ReportTable("What differs", ("what differs", "values"), tuple(rows))
    shown = ", ".join(name for name, _ in rows)
    return Section(
        "Settings and commands",
        (),
        (table,) if rows else (),
        commands=tuple(commands)[:6],
        is_folded=True,
        summary=shown,
    )


def _setting_name(name: str) -> str:
    return name.removeprefix("parameter ").removeprefix("setting ").replace("_", " ")


def _setting_section(series: Series, jobs: Sequence[Job]) -> Section:
    """The settings that all runs share, and those of each job."""
    common = tuple(
        (_setting_name(name), shorten(value.replace("_", "-") if name == "label" else value, 300))
        for name, value in series.common.items()
        if value and value != UNKNOWN
    )
    tables = [ReportTable("Equal for all", ("setting", "value"), common)]
    for job in jobs if len(jobs) > 1 else ():
        facts = [group.facts for group in job.groups]
        rows = []
        for name in dict.fromkeys(name for fact in facts for name in fact if name not in series.common):
            values = list(dict.fromkeys(fact.get(name, "") for fact in facts))
            if any(values):
                rows.append((_setting_name(name), "; ".join(shorten(value, 120) or NO_VALUE for value in values)))
        tables.append(ReportTable(job.name, ("setting", "value"), tuple(rows)))
    kept = tuple(table for table in tables if table.rows)
    heading = "Settings that are equal for all runs" if len(jobs) == 1 else "Settings of each job"
    return Section(heading, (), kept, is_folded=True, summary=str(sum(len(table.rows) for table in kept)))


def _platform_section(runs: Sequence[RunData]) -> Section:
    rows: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _platform_rows(run):
            rows.setdefault(name, {})[value] = None
    table = ReportTable(
        "Software and machines", ("what", "value"), tuple((name, "; ".join(values)) for name, values in rows.items())
    )
    shown = [next(iter(rows[name])) for name in ("processor", "cores", "memory", "framework") if name in rows]
    return Section("Machines", (), (table,) if rows else (), is_folded=True, summary=", ".join(shown))


def _platform_rows(run: RunData) -> Iterator[tuple[str, str]]:
    document, result = run.archive.run, run.archive.result
    provenance: Mapping[str, Any] = document.get("provenance") or {}
    machine = provenance.get("machine") or {}
    ranks: Mapping[str, Any] = run.archive.environment.get("ranks") or {}
    first: Mapping[str, Any] = ranks.get("0") or {}
    yield "mlbench", str(document.get("mlbench"))
    for name, value in (
        ("framework", " ".join(str(first.get(key) or "") for key in ("framework", "framework_version")).strip()),
        ("Python", first.get("python")),
        ("device", first.get("device_name")),
        ("processor", machine.get("cpu")),
        ("cores", machine.get("cores")),
        ("memory", _gigabytes(machine.get("memory_bytes"))),
        ("operating system", machine.get("platform")),
        ("cluster", result["cluster"]),
    ):
        if value:
            yield name, shorten(value, 300)


def _gigabytes(value: object) -> str:
    return f"{value / 2**30:.1f} GiB" if isinstance(value, int | float) else ""


# --- figures --------------------------------------------------------------------------------------------------------


def _curves(job: Job, number: int, runs: Sequence[RunData]) -> Iterator[Chart]:
    """How the runs learned: the way to the goal, else the first metrics that the program reports."""
    own, prefix = _runs_of(job, runs), f"job{number}-"
    way = _way_chart(job, own, prefix)
    yield from (
        [way]
        if way
        else [chart for chart in metric_charts(own, prefix, job.sources) if _has_curve(chart)][:MAX_FIGURES]
    )


def _has_curve(chart: Chart) -> bool:
    return any(
        len([row for row in line if row["y"] is not None]) > 1 for line in chart.lines if not line[0].get("style")
    )


def _largest(job: Job) -> dict[str, str]:
    """The successful runs at the largest number of workers that all groups have: path -> name of the group."""
    counts = [{point.workers for point in group.points if point.good} for group in job.groups]
    known = [count for count in counts if count]
    if not known:
        return {}
    shared = set.intersection(*known) or set.union(*known)
    return {
        run.source: group.label or job.title
        for group in job.groups
        for point in group.points
        if point.workers == max(shared)
        for run in point.good
    }


def _way_chart(job: Job, runs: Sequence[RunData], prefix: str) -> Chart | None:
    """The goal's metric over time for one number of workers: a color per series, a line per repeat."""
    members = _largest(job)
    shown = [run for run in runs if str(run.archive.path) in members]
    charts = metric_charts(shown, prefix, members)
    found = next((chart for chart in charts if chart.key == f"{prefix}goal-metric"), None)
    if found is None or not _has_curve(found):
        return None
    counts = {run.workers for run in shown}
    size = f", {counted(counts.pop(), 'worker')}" if len(job.workers) > 1 and len(counts) == 1 else ""
    label = name_metric(job.groups[0].metric) + (", %" if found.y.unit == "%" else "")
    return replace(found, key=f"{prefix}way", title=f"Progress toward the goal{size}", y=replace(found.y, label=label))


def _comparison_note(job: Job) -> tuple[str, ...]:
    if not published_values(job.task) or not job.groups[0].metric:
        return ()
    return ("mlbench charts --published draws the original MLBench's published results next to these.",)


def _runs_of(job: Job, runs: Sequence[RunData]) -> list[RunData]:
    return [run for run in runs if str(run.archive.path) in job.sources]


def _collective_sections(archives: Sequence[Archive]) -> Iterator[Section]:
    curves = [curve for archive in archives for curve in collectives.read(archive)]
    if not curves:
        return
    together = collectives.label_curves([*curves, *collectives.find_published(curves)])
    figures = tuple(collective_charts(together))
    text = (collectives.ABOUT_PUBLISHED,) if any(curve.published for curve in together) else ()
    yield Section("Collectives by message size", text, (), figures)


def _fault_sections(archives: Sequence[Archive]) -> Iterator[Section]:
    """The cost of faults, and the timeline of the ranks of each run with faults."""
    faulted = [archive for archive in archives if archive.result.get("faults")]
    if not faulted:
        return
    head = ("run", "faults", "restarts", "goodput", "recovery", *PARTS)
    rows = []
    for archive in faulted:
        facts = archive.result["faults"]
        goodput = NO_VALUE if facts["goodput"] is None else format_percent(facts["goodput"])
        times = [each["seconds"] for each in facts["recoveries"]]
        recovery = format_value(sum(times) / len(times) if times else None, SECONDS)
        parts = [format_value(facts["seconds"].get(part), SECONDS) for part in PARTS]
        counts = str(facts["injected"]), str(facts["attempts"] - 1)
        rows.append((str(archive.result["run"]), *counts, goodput, recovery, *parts))
    table = ReportTable("Where the time of runs with faults went", head, tuple(rows), tuple(range(1, len(head))))
    text = "Goodput is the share of the wall time that contributed to the result, relative to each run's own speed."
    drawn = enumerate(faulted[:MAX_FAULTED])
    figures = tuple(draw_faults(archive, f"faults{number}") for number, archive in drawn)
    yield Section("Faults", (text,), (table,), figures)


# --- findings, runs, method -----------------------------------------------------------------------------------------


def _finding_section(runs: Sequence[RunData], left_out: Sequence[str]) -> Section:
    """Findings, failures first, each once with its runs and the next command."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        for item in run.archive.findings:
            key = str(item.get("code")), str(item.get("summary")), str(item.get("hint") or "")
            found.setdefault(key, []).append(run.name)
    failed = {run.name for run in runs if outcome_of(run.archive.result) not in (*SUCCESSFUL, "goal_missed")}
    notes = [
        Note(f"{list_some(names)}: {summary}", f"({code})", hint, Tone.BAD if failed & set(names) else Tone.WARN)
        for (code, summary, hint), names in found.items()
    ]
    notes += [Note(lead, text, tone=Tone.WARN) for lead, text in _conditions(runs)]
    notes += [Note(text, tone=Tone.WARN) for text in left_out]
    notes.sort(key=lambda note: note.tone is not Tone.BAD)
    divisions = {str(run.archive.result["division"].get("word") or "none") for run in runs}
    if len(divisions) > 1:
        notes.append(
            Note("Not all runs are in the same division.", "Quote a comparison across divisions with this note.")
        )
    return Section("Findings", () if notes else ("No findings.",), notes=tuple(notes))


def _run_section(runs: Sequence[RunData]) -> Section:
    head = (
        *("run", "workers", "outcome", "time", "goal", "method", "network", "conditions", "division", "id"),
        *("energy", "per sample", "per token", "energy by"),
    )
    rows = tuple(
        (
            run.name,
            str(run.workers),
            str(run.archive.result["outcome"]).replace("_", " "),
            format_value(run.archive.result["task_seconds"]["wall"], SECONDS),
            format_goal(run.archive.result["goal"], run.archive.result["outcome"], in_words=True) or NO_VALUE,
            method_of(_spec(run)) or NO_VALUE,
            _spec(run).get("network") or NO_VALUE,
            ", ".join(label.replace("_", "-") for label in conditions_of(run.archive).labels) or NO_VALUE,
            str(run.archive.result["division"].get("word") or "none"),
            str(run.archive.run["id"]),
            *_energy_cells(find_energy(run.archive)),
        )
        for run in runs
    )
    # Columns without any value are left out.
    kept = [index for index in range(len(head)) if any(row[index] != NO_VALUE for row in rows)]
    table = ReportTable(
        "All runs",
        tuple(head[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in rows),
        tuple(kept.index(index) for index in (1, 3, 10, 11, 12) if index in kept),
    )
    reasons = dict.fromkeys(
        f"No division: {reason}." for run in runs if (reason := run.archive.result["division"].get("reason"))
    )
    good = sum(outcome_of(run.archive.result) in SUCCESSFUL for run in runs)
    return Section("Runs", tuple(reasons), (table,), is_folded=True, summary=f"{len(runs)}, of which {good} succeeded")


def _energy_cells(found: Energy | None) -> tuple[str, str, str, str]:
    if found is None:
        return (NO_VALUE,) * 4
    figures = (found.joules, found.per_sample, found.per_token)
    total, sample, token = (format_value(each, JOULES) for each in figures)
    return total, sample, token, found.label


def _method_section(jobs: Sequence[Job]) -> Section:
    apart = f"{len(jobs)} jobs differ, so they are not drawn together. " if len(jobs) > 1 else ""
    text = (
        f"{apart}Runs share a figure only if task, goal, data and time budget are equal; labels name what else "
        "differs. Means are geometric, with 95 % intervals (Student's t, on logarithms) of three runs or more. "
        "Speed-ups and comparisons are the rows of mlbench compare. "
        "CSV files beside this page hold the numbers of the rows and of each figure; mlbench charts draws more figures."
    )
    return Section("How to read this page", (text,), is_folded=True)
