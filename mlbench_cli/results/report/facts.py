"""From verified archives to the facts of a report: a dict of plain values, which the templates put into words."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from mlbench_cli.model.goals import BEST, MEAN, name_metric
from mlbench_cli.model.methods import method_of
from mlbench_cli.results.analysis import collectives
from mlbench_cli.results.analysis.comparability import UNKNOWN, conditions_of, describe
from mlbench_cli.results.analysis.compare import Row, compare_runs
from mlbench_cli.results.analysis.energy import find_energy
from mlbench_cli.results.analysis.figures import IN_DOUBT, SECONDS, SUCCESSFUL, listed_seconds, outcome_of
from mlbench_cli.results.analysis.jobs import Job, split_jobs
from mlbench_cli.results.analysis.published import published_values
from mlbench_cli.results.analysis.series import Series
from mlbench_cli.results.analysis.series import collect as collect_series
from mlbench_cli.results.archive.conditions import PARTS
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.figures.chart import PHASES, Chart
from mlbench_cli.results.figures.collectives import collective_charts
from mlbench_cli.results.figures.curves import RunData, metric_charts
from mlbench_cli.results.figures.faults import draw_faults
from mlbench_cli.results.report.finding import Finding, Place, base_of, best_of, comparable_with, find, places_of
from mlbench_cli.util.text import counted, shorten

Facts = dict[str, Any]
MAX_WAYS = 6  # lines of configurations in the chart of the way to the goal
MAX_CURVES = 2  # of a job
MAX_CHANGES = 3  # metrics in the lead
MAX_FAULTED = 4  # runs whose faults are drawn
MAX_COMMANDS = 6


def collect(archives: Sequence[Archive], *, title: str | None = None, left_out: Sequence[str] = ()) -> Facts:
    """The facts of verified archives; charts are under "charts" by their keys, the numbers of all rows under "csv".
    `left_out` are sentences about rejected archives.

    Raises UsageError if two archives of the same run differ.
    """
    series = collect_series(archives)
    runs = [RunData(archive) for archive in _in_order(archives, series)]
    jobs = split_jobs(series)
    curves = [curve for archive in archives for curve in collectives.read(archive)]
    together = collectives.label_curves([*curves, *collectives.find_published(curves)]) if curves else []
    found: Facts = {
        "title": title,
        "runs": [_run(run) for run in runs],
        "tasks": list(dict.fromkeys(job.title for job in jobs)),
        "goal": series.common.get("goal", ""),
        "places": list(dict.fromkeys(str(run.archive.result["cluster"]) for run in runs)),
        "date": max((str(run.archive.result["finished"]) for run in runs), default="")[:10],
        "unproven": sum(bool(run.archive.not_derived) for run in runs),
        "networks": sorted({str(_spec(run).get("network") or "") for run in runs} - {""}),
        "divisions": _divisions(runs),
        "deviations": _deviations(runs),
        "left_out": list(left_out),
        "jobs": [_job(job, number, runs) for number, job in enumerate(jobs, 1)],
        "faults": [_faults(archive) for archive in archives if archive.result.get("faults")],
        "fault_charts": [
            draw_faults(archive, f"faults{number}")
            for number, archive in enumerate([one for one in archives if one.result.get("faults")][:MAX_FAULTED])
        ],
        "collectives": list(collective_charts(together)),
        "about_published": collectives.ABOUT_PUBLISHED if any(curve.published for curve in together) else "",
        "findings": _findings(runs),
        "differences": _differences(jobs, runs),
        "commands": _commands(runs),
        "settings": {_setting_name(name): text for name, text in series.common.items() if text and text != UNKNOWN},
        "own_settings": [(job.name, _own_settings(job, series)) for job in jobs] if len(jobs) > 1 else [],
        "machines": _machines(runs),
        "csv": series.to_csv(),
    }
    charts = [
        *(chart for job in found["jobs"] for chart in job["charts"]),
        *found["fault_charts"],
        *found["collectives"],
    ]
    return {**found, "charts": {chart.key: chart for chart in charts}}


def _in_order(archives: Sequence[Archive], series: Series) -> list[Archive]:
    """The archives in the order of the series: by group, workers and name."""
    points = (point for group in series.groups for point in group.points)
    order = {run.source: index for index, run in enumerate(run for point in points for run in point.good + point.bad)}
    unique = {str(archive.run["id"]): archive for archive in reversed(archives)}
    return sorted(unique.values(), key=lambda archive: order.get(str(archive.path), len(order)))


def _spec(run: RunData) -> Mapping[str, Any]:
    found: Mapping[str, Any] = run.archive.run["spec"]
    return found


def _run(run: RunData) -> Facts:
    result, energy = run.archive.result, find_energy(run.archive)
    return {
        "name": run.name,
        "id": str(run.archive.run["id"]),
        "workers": run.workers,
        "outcome": str(result["outcome"]).replace("_", " "),
        "is_good": outcome_of(result) in SUCCESSFUL,
        "seconds": listed_seconds(result),
        "goal": result["goal"],
        "method": method_of(_spec(run)),
        "network": _spec(run).get("network"),
        "conditions": [label.replace("_", "-") for label in conditions_of(run.archive).labels],
        "division": result["division"],
        "summary": str(result["summary"]),
        "energy": energy,
    }


def _divisions(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """The methods of the runs by division, including "none"."""
    found: dict[str, set[str]] = {}
    for run in runs:
        word = str(run.archive.result["division"].get("word") or "none")
        found.setdefault(word, set()).add(method_of(_spec(run)))
    return {word: sorted(methods) for word, methods in sorted(found.items())}


def _deviations(runs: Sequence[RunData]) -> list[Facts]:
    """Caveats of the figures, and what is left out of them, each once with its runs."""
    found: dict[tuple[str, str], list[str]] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        result = run.archive.result
        if result["label"]["word"] == "functional":
            found.setdefault(("functional", str(result["label"]["reason"])), []).append(run.name)
        if result["synthetic"]:
            found.setdefault(("synthetic", ""), []).append(run.name)
        for condition in conditions_of(run.archive).found:
            key = "condition", condition.label.replace("_", "-")
            found.setdefault(key, []).append(run.name)
            reasons.setdefault(key, []).append(condition.reason)
        if (ending := outcome_of(result)) == IN_DOUBT:
            found.setdefault(("doubt", ""), []).append(f"{run.name} ({', '.join(result['doubts'])})")
        elif ending not in SUCCESSFUL:
            found.setdefault(("outcome", ending.replace("_", " ")), []).append(run.name)
    return [
        {"kind": kind, "word": word, "runs": names, "reason": _join_reasons(reasons.get((kind, word), []))}
        for (kind, word), names in found.items()
    ]


def _join_reasons(reasons: Sequence[str]) -> str:
    """ "other processes used 1.7 of 2 CPUs, or the like" of reasons that differ in their numbers; empty for none."""
    some = list(dict.fromkeys(reasons))
    return some[0] + (", or the like" if len(some) > 1 else "") if some else ""


def _findings(runs: Sequence[RunData]) -> list[Facts]:
    """Findings, failures first, each once with its runs and the next command."""
    found: dict[tuple[str, str, str], list[RunData]] = {}
    for run in runs:
        for item in run.archive.findings:
            key = str(item.get("code")), str(item.get("summary")), str(item.get("hint") or "")
            found.setdefault(key, []).append(run)
    bad = [run for run in runs if outcome_of(run.archive.result) not in (*SUCCESSFUL, "goal_missed")]
    listed = [
        {
            "code": code,
            "summary": summary,
            "hint": hint,
            "runs": [run.name for run in own],
            "is_bad": any(run in bad for run in own),
        }
        for (code, summary, hint), own in found.items()
    ]
    return sorted(listed, key=lambda item: not item["is_bad"])


# --- a job ----------------------------------------------------------------------------------------------------------


def _job(job: Job, number: int, runs: Sequence[RunData]) -> Facts:
    """A row per configuration: what its time was spent on, the time, and how it compares; and at most two curves."""
    places = [Place(group, point) for group in job.groups for point in group.points]
    if len(job.groups) > 1:
        places.sort(key=lambda place: (place.point.workers, not place.point.good, place.point.seconds.mean))
    bases = {id(place): _base(place, job) for place in places}
    known = [(place, base) for place in places if (base := bases[id(place)]) is not None]
    changes = {id(place): compare_runs(base.point.good, place.point.good)[0] for place, base in known}
    against = {base.size if base.group is place.group else base.subject for place, base in known}
    top = _top(places)
    rows = [_row(place, changes.get(id(place), {}), job, top) for place in places]
    group, best, finding = job.groups[0], best_of(job), find(job, runs)
    return {
        "name": job.name,
        "title": job.title,
        "metric": name_metric(group.metric) if group.metric else "result",
        "metric_name": group.metric,
        "after_time": group.after_time,
        "to_goal": bool(group.metric and not group.key.measure and not group.after_time),
        "against": against.pop() if len(against) == 1 else "the baseline",
        "rows": rows,
        "columns": [name for name in _COLUMNS if any(row[name] for row in rows)]
        + (["runs"] if len({row["runs"] for row in rows}) > 1 else []),
        "phases": [
            (words, color)
            for words, color, names in PHASES
            if any(place.point.parts.get(name) for place in places for name in names)
        ],
        "best": best,
        "best_name": job.name_of(best.group, best.point) if best is not None else "",
        "finding": finding,
        "metric_changes": _metric_changes(finding) if finding is not None and group.key.command else [],
        "waiting": _waiting(job, finding.places) if finding is not None and finding.is_different else [],
        "charts": _curves(job, number, runs),
        "metrics": list(_metrics(places, changes, job)),
        "published": bool(published_values(job.task)) and bool(group.metric),
    }


def _metric_changes(finding: Finding) -> list[str]:
    """How the last values that a user's program reported differ, for sure: "accuracy 1.21× lower"."""
    rows = [row for row in finding.found.rows.values() if row.is_metric and not row.name.endswith((BEST, MEAN))]
    changed = [row for row in rows if row.ratio is not None and row.ratio.is_different and not row.ratio.is_confounded]
    return [f"{row.name} {row.change.difference}" for row in changed[:MAX_CHANGES]]


_COLUMNS = ("change", "efficiency", "throughput", "value", "conditions")


def _waiting(job: Job, places: Sequence[Place]) -> list[tuple[str, float]]:
    shares = [
        (job.name_of(place.group, place.point), share) for place in places if (share := place.point.waiting) is not None
    ]
    return shares if len(shares) == len(places) else []


def _base(place: Place, job: Job) -> Place | None:
    """The place that a row is compared with: the baseline method of its size, else the fewest workers. None for the
    baseline itself."""
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


def _top(places: Sequence[Place]) -> float:
    """The end of the axis: beyond the longest interval, but not so far that bars cannot be told apart."""
    found = [place.point.seconds for place in places if place.point.good]
    longest = max((each.mean for each in found), default=0.0)
    return max(1.02 * longest, min(max((each.high or 0.0 for each in found), default=0.0), 1.6 * longest)) or 1.0


def _row(place: Place, changes: Mapping[str, Row], job: Job, top: float) -> Facts:
    group, point = place.group, place.point
    speedup, total = group.speedup(point), len(point.good) + len(point.bad)
    is_scaled = speedup is not None and group.baseline is not None and group.has_speedup
    outcomes = sorted({run.outcome.replace("_", " ") for run in point.bad})
    return {
        "name": job.name_of(group, point),
        "seconds": point.seconds if point.good else None,
        "change": changes[SECONDS].words if changes else "",
        "efficiency": speedup.mean * group.baseline.workers / point.workers if is_scaled else None,  # type: ignore[union-attr]
        "throughput": point.throughput if point.good else None,
        "value": point.value,
        "runs": (len(point.good), total),
        "bad": outcomes,
        "conditions": [*outcomes, *(label.replace("_", "-") for label in point.labels)],
        "plot": _plot(place, top),
    }


def _plot(place: Place, top: float) -> Facts | None:
    """What a row's bar shows; positions are shares of the axis, 0 to 1."""
    point, begin, spent = place.point, 0.0, []
    if not point.good:
        return None
    parts = [(words, color, sum(point.parts.get(name, 0.0) for name in names)) for words, color, names in PHASES]
    if not any(seconds for _, _, seconds in parts):
        parts = [("time", "other", point.seconds.mean)]
    for words, color, seconds in parts:
        if seconds > 0:
            spent.append(
                {"name": words, "color": color, "begin": begin / top, "share": seconds / top, "seconds": seconds}
            )
            begin += seconds
    base, found = place.group.baseline, point.seconds
    ideal = base.seconds.mean * base.workers / point.workers / top if base and base is not point else None
    low, high = (None if end is None else end / top for end in (found.low, found.high))
    return {"spent": spent, "low": low, "high": high, "ideal": ideal}


def _metrics(places: Sequence[Place], changes: Mapping[int, Mapping[str, Row]], job: Job) -> Iterator[Facts]:
    """The metrics that the programs reported, by metric and configuration, with the last value against the baseline."""
    good = [place for place in places if place.point.good]
    for name in dict.fromkeys(name for place in good for name in (*place.point.metrics, *place.point.diverged)):
        for place in good:
            if name in place.point.metrics or name in place.point.diverged:
                row = changes.get(id(place), {}).get(name)
                yield {
                    "name": name,
                    "where": job.name_of(place.group, place.point),
                    "unit": place.point.unit_of(name),
                    **place.point.metrics.get(name, {}),
                    "diverged": place.point.diverged.get(name, ""),
                    "change": row.words if row else "",
                }


def _curves(job: Job, number: int, runs: Sequence[RunData]) -> list[Chart]:
    """The metric of the goal over time for each run, else the first metrics that the program reports."""
    own, prefix = [run for run in runs if str(run.archive.path) in job.sources], f"job{number}-"
    way = _way_chart(job, own, prefix)
    return (
        [way] if way else [chart for chart in metric_charts(own, prefix, job.sources) if _has_curve(chart)][:MAX_CURVES]
    )


def _has_curve(chart: Chart) -> bool:
    lines = [[row for row in line if row["y"] is not None] for line in chart.lines if not line[0].get("style")]
    return any(len(line) > 1 for line in lines)


def _way_lines(job: Job) -> dict[str, str]:
    """The successful runs whose way to the goal is drawn: path -> name of the line. All configurations if they are few,
    else the groups at the largest number of workers that all of them have."""
    points = [(group, point) for group in job.groups for point in group.points if point.good]
    if len(points) <= MAX_WAYS:
        return {run.source: job.name_of(group, point) for group, point in points for run in point.good}
    counts = [{point.workers for group, point in points if group is each} for each in job.groups]
    known = [count for count in counts if count]
    largest = max(set.intersection(*known) or set.union(*known))
    return {
        run.source: f"{group.label or job.title}, {counted(largest, 'worker')}"
        for group, point in points
        if point.workers == largest
        for run in point.good
    }


def _way_chart(job: Job, runs: Sequence[RunData], prefix: str) -> Chart | None:
    """The goal's metric over time: a color per configuration, a line per repeat."""
    lines = _way_lines(job)
    charts = metric_charts([run for run in runs if str(run.archive.path) in lines], prefix, lines)
    found = next((chart for chart in charts if chart.key == f"{prefix}goal-metric"), None)
    if found is None or not _has_curve(found):
        return None
    label = name_metric(job.groups[0].metric) + (", %" if found.y.unit == "%" else "")
    return replace(found, key=f"{prefix}way", title="Progress toward the goal", y=replace(found.y, label=label))


# --- settings, machines, faults -------------------------------------------------------------------------------------


def _setting_name(name: str) -> str:
    return name.removeprefix("parameter ").removeprefix("setting ").replace("_", " ")


def _differences(jobs: Sequence[Job], runs: Sequence[RunData]) -> dict[str, list[str]]:
    """The settings that differ between the configurations of a job, with their values."""
    if len(jobs) != 1:
        return {}
    facts = [group.facts for group in jobs[0].groups]
    names = dict.fromkeys(name for fact in facts for name in fact)
    found = {
        _setting_name(name): [shorten(describe(name, fact.get(name, "")), 120) for fact in facts] for name in names
    }
    found |= {"workers": [str(count) for count in jobs[0].workers]}
    found |= {"seed": [str(seed) for seed in sorted({str(_spec(run).get("seed")) for run in runs})]}
    each = {name: list(dict.fromkeys(values)) for name, values in found.items()}
    return {name: values for name, values in each.items() if len(values) > 1}


def _commands(runs: Sequence[RunData]) -> list[str]:
    lines = [(run.archive.run.get("provenance") or {}).get("command_line") or [] for run in runs]
    commands = dict.fromkeys(shorten(shlex.join(map(str, line)), 400) for line in lines if line[:1] == ["mlbench"])
    return list(commands)[:MAX_COMMANDS]


def _own_settings(job: Job, series: Series) -> dict[str, list[str]]:
    """The settings of a job that not all jobs share."""
    facts = [group.facts for group in job.groups]
    names = dict.fromkeys(name for fact in facts for name in fact if name not in series.common)
    found = {_setting_name(name): list(dict.fromkeys(fact.get(name, "") for fact in facts)) for name in names}
    return {name: values for name, values in found.items() if any(values)}


def _machines(runs: Sequence[RunData]) -> dict[str, list[str]]:
    rows: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _machine(run):
            if value:
                rows.setdefault(name, {})[shorten(str(value), 300)] = None
    return {name: list(values) for name, values in rows.items()}


def _machine(run: RunData) -> Iterator[tuple[str, Any]]:
    provenance: Mapping[str, Any] = run.archive.run.get("provenance") or {}
    machine = provenance.get("machine") or {}
    ranks: Mapping[str, Any] = run.archive.environment.get("ranks") or {}
    first: Mapping[str, Any] = ranks.get("0") or {}
    memory = machine.get("memory_bytes")
    yield "processor", machine.get("cpu")
    yield "cores", machine.get("cores")
    yield "memory", f"{memory / 2**30:.1f} GiB" if isinstance(memory, int | float) else ""
    yield "framework", " ".join(str(first.get(key) or "") for key in ("framework", "framework_version")).strip()
    yield "device", first.get("device_name")
    yield "Python", first.get("python")
    yield "operating system", machine.get("platform")
    yield "cluster", run.archive.result["cluster"]
    yield "mlbench", run.archive.run.get("mlbench")


def _faults(archive: Archive) -> Facts:
    facts = archive.result["faults"]
    times = [each["seconds"] for each in facts["recoveries"]]
    return {
        "run": archive.name,
        "injected": facts["injected"],
        "restarts": facts["attempts"] - 1,
        "goodput": facts["goodput"],
        "recovery": sum(times) / len(times) if times else None,
        "parts": {part: facts["seconds"].get(part) for part in PARTS},
    }
