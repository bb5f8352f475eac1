"""From verified archives to a report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlbench_cli.model.methods import method_phrase
from mlbench_cli.results.analysis import collectives
from mlbench_cli.results.analysis.comparability import conditions_of
from mlbench_cli.results.analysis.foreign_collectives import read_foreign_curves
from mlbench_cli.results.analysis.numbers import (
    NO_VALUE,
    SAMPLES_PER_SECOND,
    SECONDS,
    format_estimate,
    format_factor,
    format_goal,
    format_percent,
    format_value,
    unit_of,
)
from mlbench_cli.results.analysis.series import Group, Point, Series
from mlbench_cli.results.analysis.series import collect as collect_series
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.collectives import collective_figures
from mlbench_cli.results.figures.curves import RunData, metric_figures, resource_figures, step_figures, timeline_figure
from mlbench_cli.results.figures.model import Figure
from mlbench_cli.results.figures.published import published_sources
from mlbench_cli.results.figures.scaling import Job, scaling_figures, split_jobs
from mlbench_cli.results.report.model import Report, ReportTable, Section
from mlbench_cli.util.text import shorten

MAX_MACHINE_RUNS = 4  # whose samples are drawn: the largest of each group first
NOT_PUBLISHED = "loss over time and learning rate: the original published no numbers"


def collect(
    archives: Sequence[Archive],
    *,
    title: str | None = None,
    more: Sequence[Figure] = (),
    foreign: Sequence[Path] = (),
    left_out: Sequence[str] = (),
) -> Report:
    """The report of verified archives; `more` are figures of their clusters, `foreign` files of nccl-tests or OSU,
    `left_out` sentences about archives that were refused.

    Raises UsageError for two archives of one run that differ.
    """
    series = collect_series(archives)
    runs = [RunData(archive) for archive in _in_order(archives, series)]
    jobs = split_jobs(series, _prices(runs))
    names = [run.name for run in runs]
    sections = [
        _result_section(series, jobs),
        *(section for number, job in enumerate(jobs, 1) for section in _job_sections(job, number, runs)),
        *_collective_sections(archives, foreign),
        _finding_section(runs),
        *_machine_sections(runs, more),
        *(replace(each, is_folded=True) for each in (_setting_section(series, jobs, runs), _run_section(runs))),
        replace(_method_section(jobs), is_folded=True),
    ]
    return Report(
        title or _title(series, names),
        tuple(_headline(jobs, runs)),
        (*_warnings(runs), *left_out),
        tuple(section for section in sections if section.tables or section.figures or section.paragraphs),
        tuple(names),
    )


def _in_order(archives: Sequence[Archive], series: Series) -> list[Archive]:
    """As the series has them: by group, workers and name."""
    points = (point for group in series.groups for point in group.points)
    order = {run.source: index for index, run in enumerate(run for point in points for run in point.good + point.bad)}
    unique = {str(archive.run["id"]): archive for archive in reversed(archives)}
    return sorted(unique.values(), key=lambda archive: order.get(str(archive.path), len(order)))


def _prices(runs: Sequence[RunData]) -> dict[str, float]:
    found = {}
    for run in runs:
        amount = (run.archive.result["price"] or {}).get("amount")
        if isinstance(amount, int | float):
            found[run.name] = float(amount)
    return found


def _title(series: Series, names: Sequence[str]) -> str:
    tasks = ", ".join(series.tasks[:3]) + (" and more" if len(series.tasks) > 3 else "")
    return f"{tasks}: {names[0]}" if len(names) == 1 else f"{tasks}: {len(names)} runs"


# --- result ---------------------------------------------------------------------------------------------------------


def _headline(jobs: Sequence[Job], runs: Sequence[RunData]) -> Iterator[str]:
    """The result of every job in a sentence: its best time with interval, and what more workers brought."""
    if len(runs) == 1:
        yield str(runs[0].archive.result["summary"])
        return
    for job in jobs:
        good = [(group, point) for group in job.groups for point in group.points if point.good]
        if not good:
            yield f"{job.name}: no run succeeded."
            continue
        if job.groups[0].after_time:
            group, point = max(good, key=lambda found: found[1].value.mean if found[1].value else 0.0)
            value = format_estimate(point.value, unit_of(group.metric))
            yield f"{job.name}: {group.metric} {value} with {_workers(point)}."
            continue
        group, point = min(good, key=lambda found: found[1].seconds.mean)
        text = f"{job.name}: {format_estimate(point.seconds, SECONDS)} with {_workers(point)} ({group.label})"
        speedup = group.speedup(point)
        if group.has_speedup and speedup is not None and group.baseline is not None and point is not group.baseline:
            text += f", {format_factor(speedup)} as fast as with {_workers(group.baseline)}"
        yield f"{text}."


def _warnings(runs: Sequence[RunData]) -> Iterator[str]:
    """What the figures must not be taken for, each once with the runs that it is about."""
    found: dict[str, list[str]] = {}
    for run in runs:
        result = run.archive.result
        if result["label"]["word"] == "functional":
            found.setdefault(f"functional, not a performance measurement: {result['label']['reason']}", []).append(
                run.name
            )
        if result["synthetic"]:
            found.setdefault("synthetic data", []).append(run.name)
        if phrase := conditions_of(run.archive).phrase:
            found.setdefault(f"not measured alone or in full: {phrase}", []).append(run.name)
        if result["outcome"] not in ("goal_reached", "budget_spent", "completed"):
            found.setdefault(f"ended as {result['outcome']}: its times are left out", []).append(run.name)
    for text, names in found.items():
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        yield f"{shown}: {text}."


def _result_section(series: Series, jobs: Sequence[Job]) -> Section:
    head = (
        "job",
        "series",
        "workers",
        "runs",
        "time",
        "speed-up",
        "efficiency",
        "throughput",
        "metric",
        "conditions",
    )
    rows = [_result_row(job, group, point) for job in jobs for group in job.groups for point in group.points]
    # A column that says the same of every row says nothing.
    silent = {0: len(jobs) == 1, 9: all(row[9] == NO_VALUE for row in rows)}
    kept = [index for index in range(len(head)) if not silent.get(index)]
    table = ReportTable(
        "Results by number of workers",
        tuple(head[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in rows),
        tuple(kept.index(index) for index in range(2, 9)),
    )
    note = (
        "In parentheses: the 95 % interval of the mean (Student's t), for two runs their range; intervals of ratios "
        "are Welch's, on logarithms."
    )
    has_interval = any(point.seconds.low is not None for group in series.groups for point in group.points)
    return Section("Result", (note,) if has_interval else (), (table,))


def _result_row(job: Job, group: Group, point: Point) -> tuple[str, ...]:
    speedup = group.speedup(point)
    efficiency = ""
    if speedup is not None and group.baseline is not None:
        efficiency = format_percent(speedup.mean * group.baseline.workers / point.workers)
    total = len(point.good) + len(point.bad)
    counted = str(total) if not point.bad else f"{len(point.good)} of {total}"
    return (
        job.name,
        group.label,
        str(point.workers),
        counted,
        format_estimate(point.seconds, SECONDS) if point.good else "–",
        format_factor(speedup),
        efficiency,
        format_estimate(point.throughput, SAMPLES_PER_SECOND) if point.good else "–",
        f"{group.metric} {format_estimate(point.value, unit_of(group.metric))}" if point.value else "–",
        ", ".join(point.labels) or "–",
    )


def _workers(point: Point) -> str:
    return f"{point.workers} worker{'s' if point.workers > 1 else ''}"


# --- settings -------------------------------------------------------------------------------------------------------


def _setting_section(series: Series, jobs: Sequence[Job], runs: Sequence[RunData]) -> Section:
    """What all runs share, what each job is, and what tells the series of a job apart."""
    common = tuple((name, shorten(value, 300)) for name, value in series.common.items() if value)
    tables = [ReportTable("The same for all", ("setting", "value"), common)]
    for job in jobs:
        facts = [group.facts for group in job.groups]
        rows = []
        for name in dict.fromkeys(name for fact in facts for name in fact if name not in series.common):
            values = [fact.get(name, "") for fact in facts]
            if any(values):
                rows.append(
                    (name, *(shorten(value, 300) or "–" for value in (values if len(set(values)) > 1 else values[:1])))
                )
        alike = tuple(row for row in rows if len(row) == 2)
        apart = tuple(row for row in rows if len(row) > 2)
        tables.append(ReportTable(f"{job.name}: settings", ("setting", "value"), alike))
        head = ("setting", *(group.label for group in job.groups))
        tables.append(ReportTable(f"{job.name}: what differs between its series", head, apart))
    platforms = dict.fromkeys(row for run in runs for row in _platform_rows(run))
    tables.append(ReportTable("Software and machines", ("what", "value"), tuple(platforms)))
    return Section("What was run, and on what", (), tuple(table for table in tables if table.rows))


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
        ("kernel", machine.get("kernel")),
        ("cluster", result["cluster"]),
    ):
        if value:
            yield name, shorten(value, 300)


def _gigabytes(value: object) -> str:
    return f"{value / 2**30:.1f} GiB" if isinstance(value, int | float) else ""


# --- figures --------------------------------------------------------------------------------------------------------


def _job_sections(job: Job, number: int, runs: Sequence[RunData]) -> Iterator[Section]:
    figures = tuple(scaling_figures(job, number))
    if figures:
        yield Section(f"{job.name}: over the number of workers", _comparison_note(job), (), figures)
    own = _runs_of(job, runs)
    curves = (*metric_figures(own, f"job{number}-"), *step_figures(own, f"job{number}-"))
    if curves:
        yield Section(f"{job.name}: over time", (), (), curves)


def _comparison_note(job: Job) -> tuple[str, ...]:
    sources = published_sources(job.task)
    if not sources or not job.groups[0].metric:
        return ()
    return (
        f"Published figures of the original MLBench are dashed ({'; '.join(sources)}), on other machines and with "
        f"other software; ≈ is read off plots. {NOT_PUBLISHED.capitalize()}.",
    )


def _runs_of(job: Job, runs: Sequence[RunData]) -> list[RunData]:
    names = {run.name for group in job.groups for point in group.points for run in point.shown}
    return [run for run in runs if run.name in names]


def _collective_sections(archives: Sequence[Archive], foreign: Sequence[Path]) -> Iterator[Section]:
    curves = [curve for archive in archives for curve in collectives.read(archive)]
    curves += [curve for path in foreign for curve in read_foreign_curves(path)]
    if not curves:
        return
    together = collectives.label_curves([*curves, *collectives.find_published(curves)])
    figures = tuple(collective_figures(together))
    text = (collectives.ABOUT_PUBLISHED,) if any(curve.published for curve in together) else ()
    yield Section("Collectives over the size of the message", text, (), figures)


def _machine_sections(runs: Sequence[RunData], more: Sequence[Figure]) -> Iterator[Section]:
    timeline = timeline_figure(runs, "timeline")
    figures = [*([timeline] if timeline else []), *more]
    if figures:
        yield Section("Where the time went", (), (), tuple(figures))
    largest = sorted(runs, key=lambda run: -run.workers)[:MAX_MACHINE_RUNS]
    drawn = tuple(resource_figures(largest, "machine-"))
    if drawn:
        left = len(runs) - len(largest)
        text = (f"The {len(largest)} largest runs are drawn; {left} more are in their archives.",) if left else ()
        yield Section("Machines over time", text, (), drawn, is_folded=True)


# --- findings, runs, method -----------------------------------------------------------------------------------------


def _finding_section(runs: Sequence[RunData]) -> Section:
    rows = [
        (run.name, str(found.get("code")), str(found.get("summary")), str(found.get("hint") or "–"))
        for run in runs
        for found in run.archive.findings
    ]
    table = ReportTable("Findings", ("run", "code", "what", "next"), tuple(rows))
    return Section("Findings", () if rows else ("No run has a finding.",), (table,) if rows else ())


def _run_section(runs: Sequence[RunData]) -> Section:
    head = ("run", "workers", "outcome", "time", "goal", "method", "network", "conditions", "division", "label", "id")
    rows = tuple(
        (
            run.name,
            str(run.workers),
            str(run.archive.result["outcome"]),
            format_value(run.archive.result["task_seconds"]["wall"], SECONDS),
            format_goal(run.archive.result["goal"], run.archive.result["outcome"]) or "–",
            method_phrase(run.archive.run["spec"].get("method") or {}),
            run.archive.run["spec"].get("network") or "–",
            conditions_of(run.archive).phrase or "–",
            str(run.archive.result["division"].get("word") or "none"),
            str(run.archive.result["label"]["word"]),
            str(run.archive.run["id"]),
        )
        for run in runs
    )
    reasons = dict.fromkeys(
        f"No division: {reason}." for run in runs if (reason := run.archive.result["division"].get("reason"))
    )
    return Section("Runs", tuple(reasons), (ReportTable("All runs", head, rows, (1, 3)),))


def _method_section(jobs: Sequence[Job]) -> Section:
    apart = f"{len(jobs)} jobs differ in what they did and are not drawn together. " if len(jobs) > 1 else ""
    text = (
        f"{apart}Runs share a figure only if task, goal, data and time to spend are equal; what else differs is named "
        "by the label of the line. Every archive was verified: its documents follow from its evidence. The data "
        "of each figure is in a CSV file beside this page, and in the table below it; a mark shows its value under the "
        "pointer."
    )
    return Section("How to read this page", (text,))
