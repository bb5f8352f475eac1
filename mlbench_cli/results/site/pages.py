"""Claims as HTML: an overview, pages of tasks, one page per claim. Complete without JavaScript; one policy for all."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment

from mlbench_cli import __version__
from mlbench_cli.results.figures.chart import Chart
from mlbench_cli.results.figures.files import STYLE
from mlbench_cli.results.report.render import make_environment, read_asset
from mlbench_cli.results.site.claims import Claim, Contest, describe_setting
from mlbench_cli.results.site.pictures import claim_charts, contest_charts
from mlbench_cli.util.text import size as format_size

FOLDER = Path(__file__).parent / "pages"
SCRIPT = "site.js"
POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'"
)
ROWS = 200  # rows of a task's page, at most 300 kB


@dataclass(frozen=True)
class Look:
    """Settings of all pages of a site."""

    title: str
    address: str = ""  # future URL of the site, for commands on it


def site_css() -> str:
    """The style sheet of figures, report and site."""
    own = (FOLDER / "site.css").read_text("utf-8")
    return "\n".join((STYLE.read_text("utf-8"), read_asset("page.css"), own))


def render_overview(contests: Sequence[Contest], look: Look, refused: Sequence[object] = ()) -> str:
    """index.html with every contest and its best result."""
    tasks = _tasks(contests)
    counts = {
        "results": sum(len(contest.claims) for contest in contests),
        "runs": sum(len(claim.entries) for contest in contests for claim in contest.claims),
        "tasks": len(tasks),
    }
    return _render("index.html.j2", look, "", contests=contests, tasks=tasks, counts=counts, refused=refused)


def render_task(contests: Sequence[Contest], task: str, look: Look) -> dict[str, str]:
    """The pages of a task by name."""
    own = [contest for contest in contests if contest.job.task == task]
    figures = {contest.name: list(contest_charts(contest)) for contest in own}
    rows = [(contest, claim) for contest in own for claim in contest.claims]
    count = max(1, -(-len(rows) // ROWS))
    names = [page_name(task, number) for number in range(1, count + 1)]
    pages = {}
    for number, name in enumerate(names):
        shown = rows[number * ROWS : (number + 1) * ROWS]
        parts = [(contest, [claim for each, claim in shown if each is contest]) for contest in own]
        pages[name] = _render(
            "task.html.j2",
            look,
            "../",
            task=task,
            tasks=_tasks(contests),
            sections=[(contest, claims) for contest, claims in parts if claims],
            figures=figures if number == 0 else {name: [] for name in figures},
            options=_options([claim for _, claim in shown]),
            names=names,
            number=number + 1,
            count=len(shown),
            total=len(rows),
        )
    return pages


def page_name(task: str, number: int) -> str:
    """The file of a task's page."""
    return f"tasks/{task}.html" if number == 1 else f"tasks/{task}-{number}.html"


def render_claim(claim: Claim, contest: Contest, look: Look, site: Path) -> tuple[str, list[Chart]]:
    """The page of a claim, and its figures."""
    figures = claim_charts(claim, site)
    page = _render(
        "result.html.j2",
        look,
        "../",
        claim=claim,
        contest=contest,
        figures=figures,
        place=_place(claim, contest),
        neighbors=_neighbors(claim, contest),
        setting=describe_setting(claim),
        findings=list(dict.fromkeys(found for entry in claim.entries for found in entry.findings)),
        task_page=page_name(claim.task, 1),
    )
    return page, figures


def _render(template: str, look: Look, root: str, **values: Any) -> str:
    return (
        _environment()
        .get_template(template)
        .render(look=look, root=root, policy=POLICY, version=__version__, page_name=page_name, **values)
    )


@cache
def _environment() -> Environment:
    environment = make_environment(FOLDER)
    environment.filters |= {"bytes": format_size, "columns": _columns, "values": _values}
    return environment


def _tasks(contests: Sequence[Contest]) -> dict[str, int]:
    found: dict[str, int] = {}
    for contest in contests:
        found[contest.job.task] = found.get(contest.job.task, 0) + len(contest.claims)
    return found


def _values(claim: Claim) -> dict[str, str]:
    """The cells of a row of results besides machine and value."""
    return {
        "method": claim.method,
        "network": claim.network or "–",
        "division": claim.division,
        "workers": str(claim.point.workers),
        "cost": "–" if claim.cost is None else f"{claim.cost.mean:.4g}",
        "energy": "–" if claim.energy is None else f"{claim.energy.mean:.4g}",
        "runs": claim.counted,
        "conditions": ", ".join(claim.point.labels) or "–",
        "signed by": ", ".join(claim.signers) or "nobody",
        "date": claim.date,
        "mlbench": claim.version,
    }


def _columns(claims: Sequence[Claim]) -> dict[str, Any]:
    """The columns whose cells differ, and the values that are the same for all, unless empty."""
    rows = [_values(claim) for claim in claims]
    different = {name: len({row[name] for row in rows}) > 1 for name in rows[0]}
    same = {name: rows[0][name] for name, each in different.items() if not each and rows[0][name] != "–"}
    return {"shown": [name for name, each in different.items() if each], "same": same}


def _options(claims: Sequence[Claim]) -> dict[str, list[str]]:
    """The options of the filters, only for settings that differ."""
    rows = [{"machine": claim.machine, **_values(claim), "network": claim.network or "none"} for claim in claims]
    names = ("division", "machine", "method", "network", "workers", "signed by")
    found = {name: list(dict.fromkeys(row[name] for row in rows)) for name in names}
    found["workers"].sort(key=int)
    return {name: each for name, each in found.items() if len(each) > 1}


def _place(claim: Claim, contest: Contest) -> tuple[int, int] | None:
    """Its rank among the claims of its division, and their number."""
    own = [each for each in contest.good if each.division == claim.division]
    return (own.index(claim) + 1, len(own)) if claim in own else None


def _neighbors(claim: Claim, contest: Contest) -> list[Claim]:
    """Up to eleven claims around it, by rank."""
    if claim not in contest.good:
        return []
    at = contest.good.index(claim)
    return list(contest.good[max(0, at - 5) : at + 6]) if len(contest.good) > 1 else []
