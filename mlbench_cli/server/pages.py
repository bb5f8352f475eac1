"""The pages of the dashboard: server-rendered tables, with live parts by server-sent events."""

import hashlib
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlencode

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from mlbench_cli import __version__
from mlbench_cli.api import RunHandle
from mlbench_cli.errors import DamagedArchive, MlbenchError, UnprovenArchive, UsageError
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.figures import SUCCESSFUL
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.figures.chart import Chart
from mlbench_cli.results.figures.curves import RunData, metric_charts, resource_charts
from mlbench_cli.results.figures.files import STYLE
from mlbench_cli.results.report.facts import collect
from mlbench_cli.results.report.render import FOLDER, make_environment, render_html
from mlbench_cli.server.access import (
    client_of,
    count_runs,
    find_experiment,
    find_run,
    find_runs,
    list_clusters,
    list_experiments,
    list_runs,
    open_checked,
)
from mlbench_cli.server.clusters import describe_cluster
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.live import latest_resources
from mlbench_cli.server.log_pages import read_page
from mlbench_cli.server.rest import compare_runs, read_questions, whole_number
from mlbench_cli.server.statuses import status_of
from mlbench_cli.server.words import SORTS, add_filters, arrange, facts_of, group_repeats
from providers import registry

PAGES = Path(__file__).parent / "pages"
PAGE_SIZE = 50
SORTED_SIZE = 200  # runs of a page that is sorted
MAX_EXPERIMENTS = 20
MAX_LISTED = 100  # experiments on their own page
OPEN_STATES = ("pending", "running")
MAX_REPORT_RUNS = 100
MAX_NAMES = 500  # completed on the comparison page
MAX_CARDS = 12  # running runs with a progress card
MAX_LAST_LINES = 20
# Name in the URL -> file and content type.
ASSETS = {
    "figures.css": (STYLE, "text/css"),
    "page.css": (FOLDER / "page.css", "text/css"),
    "dashboard.js": (PAGES / "dashboard.js", "text/javascript"),
    "dashboard.css": (PAGES / "dashboard.css", "text/css"),
}
_PLAIN_POLICY = "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def make_routes(config: ServerConfig) -> list[BaseRoute]:
    """The routes of all pages and of their static files."""
    pages = _Pages(config)
    return [
        Route("/", pages.overview),
        Route("/listing", pages.listing),
        Route("/runs/{name}", pages.run),
        Route("/experiments", pages.experiments),
        Route("/experiment-list", pages.experiment_list),
        Route("/experiments/{name}", pages.experiment),
        Route("/experiments/{name}/part", pages.experiment_part),
        Route("/new", pages.new),
        Route("/compare", pages.compare),
        Route("/clusters", pages.clusters),
        Route("/cluster-list", pages.cluster_list),
        Route("/report", pages.report),
        Route("/static/{digest}/{name}", _serve_asset),
        Route("/favicon.ico", _no_icon),
    ]


@dataclass(frozen=True)
class _Listing:
    """The filters and page of a list of runs in a request."""

    offset: int
    contains: str
    states: tuple[str, ...]
    tasks: tuple[str, ...]
    sort: str  # a key of SORTS, "-" before it for the other direction; empty: newest first, by experiment

    @classmethod
    def parse(cls, request: Request) -> "_Listing":
        query = request.query_params
        states, tasks = (tuple(word for word in query.getlist(name) if word) for name in ("state", "task"))
        sort = query.get("sort", "")
        if sort and sort.removeprefix("-") not in SORTS:
            raise UsageError(f'The list cannot be sorted by "{sort[:40]}".', hint=f"It can by {', '.join(SORTS)}.")
        offset, contains = whole_number(query.get("offset"), "offset"), query.get("contains", "")[:100]
        return cls(offset, contains, states, tasks, sort)

    @property
    def size(self) -> int:
        """The number of runs of a page."""
        return SORTED_SIZE if self.sort else PAGE_SIZE

    @property
    def values(self) -> JsonObject:
        """What links to other pages and orders of the list need."""
        return {
            "offset": self.offset,
            "size": self.size,
            "contains": self.contains,
            "state": "".join(self.states[:1]),
            "sort": self.sort,
        }

    def read(self, config: ServerConfig) -> list[RunHandle]:
        """One run more than a page, if there are more."""
        return list_runs(
            config,
            states=self.states,
            tasks=self.tasks,
            contains=self.contains,
            limit=self.size + 1,
            offset=self.offset,
        )


class _Pages:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config

    def overview(self, request: Request) -> Response:
        """The overview, from the store only, so it is fast; `listing` adds what is read from folders and clusters."""
        asked = _Listing.parse(request)
        unknown = dict.fromkeys(("goal", "seconds", "conditions", "problem"))
        rows = [{**handle.describe(), **unknown} for handle in asked.read(self._config)]
        rows, has_more = rows[: asked.size], len(rows) > asked.size
        values: JsonObject = {"runs": rows, "has_more": has_more, "total": count_runs(self._config), **asked.values}
        values |= {"groups": arrange(rows, asked.sort), "experiments": [], "is_whole": False, "is_open": True}
        return render(request, self._config, "overview.html.j2", "Runs", **values)

    def listing(self, request: Request) -> Response:
        """The slow part of the overview: experiments, and runs with their current results."""
        asked = _Listing.parse(request)
        handles = asked.read(self._config)[: asked.size]
        document = client_of(self._config).status(handles)
        runs = document["runs"]
        experiments_of = client_of(self._config).store.experiments_of([handle.run.id for handle in handles])
        names = {member.run_id: each.name for each in experiments_of for member in each.members}
        for run in runs:
            run["experiment"] = names.get(run["id"])
        _add_progress(handles, runs)
        newest = [] if asked.offset else list_experiments(self._config, limit=MAX_EXPERIMENTS)
        experiments = [item.status() for item in newest]
        under_way = [item for item in experiments if item["state"] not in ("completed", "failed")]
        is_open = bool(under_way) or any(run["state"] != "finished" for run in runs)
        several = [item for item in experiments if item["progress"]["total"] > 1]
        values: JsonObject = {"runs": runs, "experiments": under_way or several[:3], "is_open": is_open}
        values |= {"groups": arrange(group_repeats(document), asked.sort), **asked.values}
        return render(request, self._config, "listing.html.j2", "Runs", is_whole=True, **values)

    def run(self, request: Request) -> Response:
        handle = find_run(self._config, request.path_params["name"])
        status = handle.status()
        archive = open_checked(handle) if handle.is_sealed else None
        data = [RunData(archive)] if archive else []
        curves, used = list(metric_charts(data, "run-")), list(resource_charts(data, "machine-"))
        provenance = (archive.run.get("provenance") or {}) if archive else {}
        failed = status["first_failed"] or 0
        is_bad = archive is not None and status["outcome"] not in SUCCESSFUL
        values: JsonObject = {
            "run": status,
            "curves": curves,
            "used": used,
            "resources": latest_resources(handle),
            "is_over": handle.is_sealed,
            "command": " ".join(handle.run.spec.argv),
            "command_line": shlex.join(map(str, provenance.get("command_line") or [])),
            "experiment": getattr(handle.experiment, "name", None),
            "facts": facts_of(status, archive.result if archive else None),
            "is_bad": is_bad,
            "failed_rank": failed,
            "last_lines": _last_lines(handle, failed) if is_bad else "",
        }
        return render(request, self._config, "run.html.j2", str(status["name"]), **values)

    def experiments(self, request: Request) -> Response:
        return render(request, self._config, "experiments.html.j2", "Experiments")

    def experiment_list(self, request: Request) -> Response:
        """The newest experiments with their progress."""
        found = [handle.status() for handle in list_experiments(self._config, limit=MAX_LISTED)]
        values: JsonObject = {"experiments": found, "is_open": any(item["state"] in OPEN_STATES for item in found)}
        return render(request, self._config, "experiment_list.html.j2", "Experiments", **values)

    def experiment(self, request: Request) -> Response:
        return self._render_experiment(request, "experiment.html.j2")

    def experiment_part(self, request: Request) -> Response:
        """The part of an experiment's page that changes while it runs."""
        return self._render_experiment(request, "experiment_part.html.j2")

    def _render_experiment(self, request: Request, template: str) -> Response:
        name = request.path_params["name"]
        found = find_experiment(self._config, name)
        handles = found.runs()
        document = client_of(self._config).status(handles)
        runs = document["runs"]
        _add_progress(handles, runs)
        archives: list[Archive] = []
        ended = [handle for handle in handles if handle.is_sealed]
        for handle in ended[:MAX_REPORT_RUNS]:
            with suppress(DamagedArchive, UnprovenArchive):  # shown in its row
                archives.append(open_checked(handle))
        report = collect(archives) if archives else None
        values: JsonObject = {"experiment": found.status(), "runs": runs, "report": report}
        values["counts"] = (MAX_REPORT_RUNS, len(ended)) if len(ended) > MAX_REPORT_RUNS else None
        values["groups"] = [{"experiment": None, "runs": group_repeats(document)}]
        return render(request, self._config, template, f"Experiment {name[:80]}", **values)

    def new(self, request: Request) -> Response:
        if not self._config.allows_actions:
            raise UsageError("This dashboard is read-only.", hint="mlbench serve --allow-actions")
        values: JsonObject = {"questions": read_questions(self._config)}
        values["creators"], values["paid"] = [] if self._config.cluster else [*registry.creators()], registry.PAID
        return render(request, self._config, "new.html.j2", "New run", **values)

    def compare(self, request: Request) -> Response:
        """Compare the names `a` and `b`, or the runs that were selected in a list: more than two in a report."""
        query = request.query_params
        selected = list(dict.fromkeys(query.getlist("run")))
        if len(selected) > 2:
            return RedirectResponse(f"/report?{urlencode([('run', name) for name in selected])}", 303)
        a, b = (query.get(side, other)[:100] for side, other in zip("ab", [*selected, "", ""][:2], strict=True))
        across = query.getlist("across")
        known = [handle.name for handle in list_runs(self._config, limit=MAX_NAMES)]
        experiments = [item.name for item in list_experiments(self._config, limit=MAX_LISTED)]
        values: JsonObject = {"a": a, "b": b, "across": across, "names": [*dict.fromkeys([*experiments, *known])]}
        values |= {"found": None, "problem": None, "figures": ()}
        status = 200
        try:
            if a and b:
                values["found"] = compare_runs(self._config, {"a": a, "b": b}, across)
                values["figures"] = self._compared_figures(a, b)
        except MlbenchError as error:  # the page keeps the typed names
            values["problem"], status = error, status_of(error)
        return render(request, self._config, "compare.html.j2", "Compare", status, **values)

    def _compared_figures(self, a: str, b: str) -> tuple[Chart, ...]:
        """The curves and phases of both sides if they ran the same job."""
        handles = {run.run.id: run for name in (a, b) for run in find_runs(self._config, name) if run.is_sealed}
        jobs = collect([open_checked(run) for run in handles.values()])["jobs"]
        return next((tuple(job["charts"]) for job in jobs if job["charts"]), ())

    def clusters(self, request: Request) -> Response:
        return self._render_clusters(request, "clusters.html.j2")

    def cluster_list(self, request: Request) -> Response:
        """The part of the cluster page that changes while runs are in progress."""
        return self._render_clusters(request, "cluster_list.html.j2")

    def _render_clusters(self, request: Request, template: str) -> Response:
        """Clusters with the nodes, pods and resources of their running runs."""
        running = list_runs(self._config, states=("running",), limit=PAGE_SIZE)
        newest = {run.run.spec.cluster: run.name for run in reversed(list_runs(self._config, limit=PAGE_SIZE))}
        found: list[JsonObject] = []
        for number, cluster in enumerate(list_clusters(self._config)):
            own = [run for run in running if run.run.spec.cluster == cluster.name]
            found.append({**describe_cluster(cluster, own, number), "last": newest.get(cluster.name)})
        found.sort(key=lambda item: not item["runs"])
        values: JsonObject = {"clusters": found, "is_open": bool(running)}
        return render(request, self._config, template, "Clusters", **values)

    def report(self, request: Request) -> Response:
        """The page of `mlbench report`, with its own content security policy."""
        names = request.query_params.getlist("run")
        if not names:
            return RedirectResponse("/", 303)
        runs = [run for name in names for run in self._find_ended(name)]
        if len(runs) > MAX_REPORT_RUNS:
            command = shlex.join(["mlbench", "report", "OUT.html", *names])
            raise UsageError(f"A report here has at most {MAX_REPORT_RUNS} runs, not {len(runs)}.", hint=command)

        archives = [run.archive() for run in runs]
        try:
            text = render_html(collect(archives))
        finally:
            for archive in archives:
                archive.close()
        policy = text.split('http-equiv="Content-Security-Policy" content="', 1)[1].split('"', 1)[0]
        plain = policy.replace("&#39;", "'").split("; base-uri", 1)[0]
        return HTMLResponse(text, headers={"content-security-policy": plain + _PLAIN_POLICY})

    def _find_ended(self, name: str) -> list[RunHandle]:
        """A run, or those of its repeats or of an experiment that have ended."""
        found = find_runs(self._config, name)
        return [handle for handle in found if handle.is_sealed or len(found) == 1]


def warm_up(config: ServerConfig) -> None:
    """Load in advance what the first page needs, then what other pages need."""
    environment = _environment()
    first = [PAGES / name for name in ("overview.html.j2", "listing.html.j2", "run.html.j2")]
    for path in dict.fromkeys([*first, *PAGES.glob("*.html.j2")]):
        environment.get_template(path.name)
    with suppress(MlbenchError):  # the request for a page reports it
        client_of(config).status(list_runs(config, limit=1))


# --- rendering ------------------------------------------------------------------------------------------------------


def render(
    request: Request, config: ServerConfig | None, template: str, title: str, status: int = 200, **values: object
) -> Response:
    """A page. Every value is escaped."""
    environment = _environment()
    text = environment.get_template(template).render(
        title=title,
        version=__version__,
        allows_actions=config is not None and config.allows_actions,
        is_read_only=config is not None and not config.allows_actions,
        cluster=config.cluster if config else None,
        asset=asset_path,
        path=request.url.path,
        **values,
    )
    return HTMLResponse(text, status)


def render_problem(request: Request, status: int, message: str, hint: str | None) -> Response:
    """A page that says what went wrong and what to do next."""
    return render(request, None, "problem.html.j2", "mlbench", status, message=message, hint=hint)


def asset_path(name: str) -> str:
    """The address of a file; it changes with the content, so browsers can cache it."""
    return f"/static/{_asset_digest(name)}/{name}"


@cache
def _asset_digest(name: str) -> str:
    return hashlib.sha256(ASSETS[name][0].read_bytes()).hexdigest()[:12]


async def _serve_asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        return HTMLResponse("There is no such file.", 404)
    path, kind = ASSETS[name]
    is_current = request.path_params["digest"] == _asset_digest(name)
    headers = {"cache-control": "max-age=31536000, immutable"} if is_current else {}
    return Response(path.read_bytes(), media_type=f"{kind}; charset=utf-8", headers=headers)


async def _no_icon(request: Request) -> Response:
    return Response(status_code=204)


@cache
def _environment() -> Environment:
    environment = make_environment(PAGES)
    add_filters(environment)
    return environment


def _add_progress(handles: "Sequence[RunHandle]", rows: list[JsonObject]) -> None:
    """Add the progress of running runs to their rows."""
    open_runs = {handle.run.id: handle for handle in handles if str(handle.row.state) == "running"}
    for row in [row for row in rows if row["state"] == "running"][:MAX_CARDS]:
        handle = open_runs.get(row["id"])
        with suppress(MlbenchError):
            if handle is not None:
                found = handle.status()
                row |= {"progress": found.get("progress"), "goal": found.get("goal")}


def _last_lines(handle: RunHandle, rank: int) -> str:
    """The end of a failed rank's log."""
    page = read_page(handle.folder / "logs" / f"rank-{rank}.log", -1, limit=8192)
    return "\n".join(page.lines[-MAX_LAST_LINES:])
