"""The figures of a site: time against cost with the Pareto front, trends over time, runs of a claim."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from mlbench_cli.results.analysis import collectives
from mlbench_cli.results.analysis.numbers import SECONDS, unit_of
from mlbench_cli.results.analysis.series import Group
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.collectives import collective_figures
from mlbench_cli.results.figures.curves import RunData, metric_figures
from mlbench_cli.results.figures.experiment import draw_front
from mlbench_cli.results.figures.look import choose_looks, family_of
from mlbench_cli.results.figures.model import Axis, Figure, Line, Scale
from mlbench_cli.results.figures.scaling import Job, phase_figures
from mlbench_cli.results.figures.svg import MAX_MARKS
from mlbench_cli.results.site.claims import Claim, Contest

MAX_TREND_LINES = 7
MAX_OFFERS = 240  # marks of a figure; each is about 250 bytes of its page


def contest_figures(contest: Contest) -> Iterator[Figure]:
    """The figures of a contest; none for a single claim."""
    for figure in (draw_offers(contest, f"{contest.key}-offers"), draw_trend(contest, f"{contest.key}-trend")):
        if figure is not None:
            yield figure


def draw_offers(contest: Contest, key: str) -> Figure | None:
    """Time against cost, or against worker-seconds if no cost is known, with the Pareto front."""
    if contest.job.groups[0].after_time:
        return None
    has_cost = any(claim.cost for claim in contest.good)
    offers = [(claim, price) for claim in contest.good if (price := _price(claim, has_cost)) is not None]
    if len(offers) < 2:
        return None
    methods = list(dict.fromkeys(claim.method for claim, _ in offers))
    lines = []
    most = min(MAX_MARKS, max(1, MAX_OFFERS // len(methods)))  # of a method: the best come first
    for method, (color, shape) in zip(methods, choose_looks(methods), strict=True):
        own = [(claim, price) for claim, price in offers if claim.method == method][:most]
        lines.append(
            Line(
                method,
                tuple(price for _, price in own),
                tuple(claim.point.seconds.mean for claim, _ in own),
                notes=tuple(_place(claim) for claim, _ in own),
                color=color,
                shape=shape,
                is_joined=False,
                panel=family_of(method),
            )
        )
    left = len(offers) - sum(len(line.xs) for line in lines)
    caption = "Lower left is better. Dashed: no other result is both faster and cheaper."
    return Figure(
        key,
        f"Time against {'cost' if has_cost else 'worker-seconds'}",
        Axis("US dollars per run" if has_cost else "worker-seconds", Scale.LOG10),
        Axis(contest.job.what, Scale.LOG10, unit=SECONDS),
        (*lines, draw_front((price, claim.point.seconds.mean) for claim, price in offers)),
        caption + (f" {left} slower results are omitted." if left else ""),
    )


def _price(claim: Claim, has_cost: bool) -> float | None:
    price = (claim.cost.mean if claim.cost else None) if has_cost else claim.worker_seconds
    return price if price and price > 0 and claim.point.seconds.mean > 0 else None


def _place(claim: Claim) -> str:
    words = [f"{claim.point.workers} × {claim.machine}", claim.network, *claim.point.labels]
    return ", ".join(filter(None, words))


def draw_trend(contest: Contest, key: str) -> Figure | None:
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
    lines = []
    for name, own in chosen:
        own.sort(key=lambda claim: claim.date)
        ends = [(claim.value.low, claim.value.high) if claim.value else (None, None) for claim in own]
        lines.append(
            Line(
                name,
                tuple(float((date.fromisoformat(claim.date) - date.fromisoformat(first)).days) for claim in own),
                tuple(claim.value.mean if claim.value else None for claim in own),
                tuple(low for low, _ in ends),
                tuple(high for _, high in ends),
                notes=tuple(f"mlbench {claim.version}, {claim.date}" for claim in own),
            )
        )
    group = contest.job.groups[0]
    unit = unit_of(group.metric) if group.after_time else SECONDS
    return Figure(
        key,
        "Over time",
        Axis(f"days since {first}"),
        Axis(group.metric if group.after_time else contest.job.what, from_zero=True, unit=unit),
        tuple(lines),
        f"One line per method, machine and number of workers. Bars: 95 % intervals. {_say_versions(chosen)}".strip(),
    )


def _say_versions(chosen: Sequence[tuple[str, Sequence[Claim]]]) -> str:
    """The first day of each version of mlbench, if there are several."""
    first: dict[str, str] = {}
    for claim in sorted((claim for _, own in chosen for claim in own), key=lambda claim: claim.date):
        first.setdefault(claim.version, claim.date)
    return f"mlbench {', '.join(f'{name} from {day}' for name, day in first.items())}." if len(first) > 1 else ""


def claim_figures(claim: Claim, site: Path) -> list[Figure]:
    """Progress of every repeat toward the goal, phases, and rates of collectives by size."""
    archives = [
        Archive.open(site / entry.file, is_shown=True)
        for entry in claim.entries
        if entry.name in {run.name for run in claim.point.shown}
    ]
    try:
        curves = [curve for archive in archives for curve in collectives.read(archive)]
        figures = list(collective_figures(collectives.label_curves(curves)))[:4] if curves else []
        runs = [RunData(archive) for archive in archives]
        figures += metric_figures(runs, "run-", with_others=False)
    finally:
        for archive in archives:
            archive.close()
    alone = Job(claim.title, (_only(claim),), {}, published=False)
    return [*figures, *phase_figures(alone, "run-")]


def _only(claim: Claim) -> Group:
    return replace(claim.group, points=(claim.point,))
