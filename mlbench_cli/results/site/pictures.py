"""The charts of a site: time against cost with the Pareto front, trends over time, runs of a claim."""

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from msgspec.structs import replace

from mlbench_cli.results.analysis import collectives
from mlbench_cli.results.analysis.jobs import Job
from mlbench_cli.results.analysis.numbers import SECONDS, unit_of
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.figures.chart import Axis, Chart, Kind, Row
from mlbench_cli.results.figures.collectives import collective_charts
from mlbench_cli.results.figures.curves import RunData, metric_charts
from mlbench_cli.results.figures.experiment import draw_front
from mlbench_cli.results.figures.scaling import phase_chart
from mlbench_cli.results.site.claims import Claim, Contest

MAX_TREND_LINES = 7
MAX_CURVES = 2  # metrics of a claim: the goal's and the first loss
MAX_OFFERS = 240  # marks of a chart; each is about 250 bytes of its page


def contest_charts(contest: Contest) -> Iterator[Chart]:
    """The charts of a contest; none for a single claim."""
    for chart in (draw_offers(contest, f"{contest.key}-offers"), draw_trend(contest, f"{contest.key}-trend")):
        if chart is not None:
            yield chart


def draw_offers(contest: Contest, key: str) -> Chart | None:
    """Time against cost with the Pareto front, the best first; None for fewer than two results of known cost."""
    offers = [(claim, claim.cost.mean) for claim in contest.good if claim.cost and claim.point.seconds.mean > 0]
    if contest.job.groups[0].after_time or len(offers) < 2:
        return None
    rows: list[Row] = [
        {"series": "result", "x": price, "y": claim.point.seconds.mean, "note": name, "short": name.partition(" ")[0]}
        for (claim, price), name in zip(offers[:MAX_OFFERS], _names([claim for claim, _ in offers]), strict=False)
    ]
    left = len(offers) - len(rows)
    caption = "Lower left is better. Dashed: no other result is both faster and cheaper."
    return Chart(
        key,
        "Time against cost",
        Axis("US dollars per run", is_log=True),
        Axis(contest.job.what, SECONDS, is_log=True),
        (*rows, *draw_front((price, each.point.seconds.mean) for each, price in offers if not each.point.is_partial)),
        Kind.DOTS,
        caption + (f" {left} slower results are omitted." if left else ""),
    )


def _names(claims: Sequence[Claim]) -> list[str]:
    """Names that distinguish results: their methods, and whatever else differs."""
    words = [
        (f"{claim.point.workers} ×", claim.machine, claim.network, ", ".join(claim.point.labels)) for claim in claims
    ]
    differs = [len(set(column)) > 1 for column in zip(*words, strict=True)]
    return [
        " ".join(
            [claim.method.partition(" (")[0], *(word for word, shown in zip(own, differs, strict=True) if shown)]
        ).strip()
        for claim, own in zip(claims, words, strict=True)
    ]


def draw_trend(contest: Contest, key: str) -> Chart | None:
    """The values of equal settings over time; a line needs two points."""
    series: dict[str, list[Claim]] = {}
    for claim in contest.good:
        workers = f"{claim.point.workers} worker{'s' * (claim.point.workers > 1)}"
        words = (claim.method, claim.machine, workers, claim.network)
        series.setdefault(", ".join(filter(None, words)), []).append(claim)
    found = {name: own for name, own in series.items() if len({claim.date for claim in own}) > 1}
    if not found:
        return None
    chosen = sorted(found.items(), key=lambda item: -len(item[1]))[:MAX_TREND_LINES]
    first = min(claim.date for _, own in chosen for claim in own)
    rows = []
    for name, own in chosen:
        for claim in sorted(own, key=lambda claim: claim.date):
            days = (date.fromisoformat(claim.date) - date.fromisoformat(first)).days
            row: Row = {"series": name, "x": days, "y": claim.value.mean if claim.value else None}
            row["note"] = f"mlbench {claim.version}, {claim.date}"
            ends = {"low": claim.value.low, "high": claim.value.high} if claim.value and claim.value.low else {}
            rows.append({**row, **ends})
    group = contest.job.groups[0]
    unit = unit_of(group.metric) if group.after_time else SECONDS
    return Chart(
        key,
        "Over time",
        Axis(f"days since {first}"),
        Axis(group.metric if group.after_time else contest.job.what, unit, from_zero=True),
        tuple(rows),
        caption="One line per method, machine and number of workers. Bars: 95 % intervals. " + _say_versions(chosen),
    )


def _say_versions(chosen: Sequence[tuple[str, Sequence[Claim]]]) -> str:
    """The first day of each version of mlbench, if there are several."""
    first: dict[str, str] = {}
    for claim in sorted((claim for _, own in chosen for claim in own), key=lambda claim: claim.date):
        first.setdefault(claim.version, claim.date)
    return f"mlbench {', '.join(f'{name} from {day}' for name, day in first.items())}." if len(first) > 1 else ""


def claim_charts(claim: Claim, site: Path) -> list[Chart]:
    """Progress of every repeat toward the goal, phases, and rates of collectives by size."""
    archives = [Archive.open(site / entry.file, is_shown=True) for entry in claim.entries_of(claim.point.shown)]
    try:
        curves = [curve for archive in archives for curve in collectives.read(archive)]
        charts = list(collective_charts(collectives.label_curves(curves)))[:4] if curves else []
        runs = [RunData(archive) for archive in archives]
        charts += list(metric_charts(runs, "run-"))[:MAX_CURVES]
    finally:
        for archive in archives:
            archive.close()
    phases = phase_chart(Job(claim.title, (replace(claim.group, points=(claim.point,)),)), "run-phases")
    return [*charts, *([phases] if phases else [])]
