"""The pages of the dashboard: server-rendered tables, with live parts by server-sent events."""

import hashlib
from functools import cache
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from mlbench_cli import __version__
from mlbench_cli.api import RunHandle
from mlbench_cli.errors import UsageError
from mlbench_cli.model import JsonObject
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.report.collect import collect
from mlbench_cli.results.report.html import FOLDER, make_environment, render_html
from mlbench_cli.results.report.model import Report
from mlbench_cli.server.access import client_of, find_run, list_runs
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.rest import compare_runs, whole_number

PAGES = Path(__file__).parent / "pages"
PAGE_SIZE = 50
MAX_EXPERIMENTS = 20
MAX_REPORT_RUNS = 100
# Name in the address -> file, and its kind.
ASSETS = {
    "uPlot.js": (FOLDER / "vendored" / "uPlot.iife.min.js", "text/javascript"),
    "uPlot.css": (FOLDER / "vendored" / "uPlot.min.css", "text/css"),
    "figures.js": (FOLDER / "figures.js", "text/javascript"),
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
        Route("/runs/{name}", pages.run),
        Route("/experiments/{name}", pages.experiment),
        Route("/new", pages.new),
        Route("/compare", pages.compare),
        Route("/report", pages.report),
        Route("/static/{digest}/{name}", _serve_asset),
        Route("/favicon.ico", _no_icon),
    ]


class _Pages:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config

    async def overview(self, request: Request) -> Response:
        query = request.query_params
        offset = whole_number(query.get("offset"), "offset")
        contains = query.get("contains", "")[:100]
        states = tuple(state for state in query.getlist("state") if state)
        tasks = tuple(task for task in query.getlist("task") if task)

        def read() -> JsonObject:
            client = client_of(self._config)
            handles = list_runs(
                self._config, states=states, tasks=tasks, contains=contains, limit=PAGE_SIZE + 1, offset=offset
            )
            status = client.status(handles[:PAGE_SIZE])
            experiments = [] if offset else [item.status() for item in client.experiments()[:MAX_EXPERIMENTS]]
            open_ones = [item for item in experiments if item["state"] not in ("completed", "failed")]
            return {
                "runs": status["runs"],
                "has_more": len(handles) > PAGE_SIZE,
                "total": client.store.count_runs(),
                "experiments": open_ones or experiments[:3],
            }

        document = await run_in_threadpool(read)
        more: JsonObject = {"offset": offset, "size": PAGE_SIZE, "contains": contains, "state": "".join(states[:1])}
        return render(request, self._config, "overview.html.j2", "Runs", **(document | more))

    async def run(self, request: Request) -> Response:
        name = request.path_params["name"]

        def read() -> JsonObject:
            handle = find_run(self._config, name)
            status = handle.status()
            report = collect([handle.archive(verify=False)]) if handle.is_sealed else None
            return {
                "run": status,
                "report": report,
                "svgs": _pictures(report),
                "resources": _latest_resources(handle),
                "is_over": handle.is_sealed,
                "command": " ".join(handle.run.spec.argv),
                "experiment": getattr(client_of(self._config).store.find_experiment_of(handle.run), "name", None),
            }

        document = await run_in_threadpool(read)
        return render(request, self._config, "run.html.j2", str(document["run"]["name"]), **document)

    async def experiment(self, request: Request) -> Response:
        name = request.path_params["name"]

        def read() -> JsonObject:
            client = client_of(self._config)
            found = client.find_experiment(name)
            return {"experiment": found.status(), "runs": client.status(found.runs())["runs"]}

        return render(
            request, self._config, "experiment.html.j2", f"Experiment {name[:80]}", **await run_in_threadpool(read)
        )

    async def new(self, request: Request) -> Response:
        from mlbench_cli.catalog import load_catalog

        if not self._config.allows_actions:
            raise UsageError("This dashboard is read-only.", hint="mlbench serve --allow-actions")
        tasks = await run_in_threadpool(lambda: list(load_catalog().values()))
        clusters = [cluster.name for cluster in client_of(self._config).store.clusters()]
        shown = [self._config.cluster] if self._config.cluster else clusters
        return render(request, self._config, "new.html.j2", "Start a run", tasks=tasks, clusters=shown)

    async def compare(self, request: Request) -> Response:
        query = request.query_params
        names = [query.get(side, "")[:100] for side in ("a", "b")]
        found = None
        if all(names):
            found = await run_in_threadpool(compare_runs, self._config, query, query.getlist("across"))
        return render(request, self._config, "compare.html.j2", "Compare", found=found, a=names[0], b=names[1])

    async def report(self, request: Request) -> Response:
        """The same page that `mlbench report` writes; its own policy holds the digests of what is inside."""
        names = request.query_params.getlist("run")
        if not names:
            return RedirectResponse("/", 303)
        if len(names) > MAX_REPORT_RUNS:
            raise UsageError(f"A report here has at most {MAX_REPORT_RUNS} runs.", hint="mlbench report OUT.html")

        def make() -> str:
            archives = [archive for name in names for archive in self._archives(name)]
            try:
                return render_html(collect(archives))
            finally:
                for archive in archives:
                    archive.close()

        text = await run_in_threadpool(make)
        policy = text.split('http-equiv="Content-Security-Policy" content="', 1)[1].split('"', 1)[0]
        plain = policy.replace("&#39;", "'").split("; base-uri", 1)[0]
        return HTMLResponse(text, headers={"content-security-policy": plain + _PLAIN_POLICY})

    def _archives(self, name: str) -> "list[Archive]":
        """Of a run, or of an experiment whose runs have ended."""
        from mlbench_cli.errors import NotFoundError

        try:
            return [find_run(self._config, name).archive()]
        except NotFoundError:
            return client_of(self._config).find_experiment(name).archives()


def warm_up(config: ServerConfig) -> None:
    """Load what the first page needs, so that its reader does not wait for it."""
    environment = make_environment(PAGES)
    for path in PAGES.glob("*.html.j2"):
        environment.get_template(path.name)
    client_of(config).status(list_runs(config, limit=1))


# --- rendering ------------------------------------------------------------------------------------------------------


def render(
    request: Request, config: ServerConfig | None, template: str, title: str, status: int = 200, **values: object
) -> Response:
    """A page. Every value is escaped."""
    environment = make_environment(PAGES)
    text = environment.get_template(template).render(
        title=title,
        version=__version__,
        allows_actions=bool(config and config.allows_actions),
        is_read_only=config is not None and not config.allows_actions,
        cluster=config.cluster if config else None,
        asset=asset_path,
        **values,
    )
    return HTMLResponse(text, status)


def render_problem(request: Request, status: int, message: str, hint: str | None) -> Response:
    """A page that says what went wrong and what to do next."""
    return render(request, None, "problem.html.j2", "mlbench", status, message=message, hint=hint)


def asset_path(name: str) -> str:
    """The address of a file; it changes with the content, so that a browser may keep it."""
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


def _pictures(report: Report | None) -> dict[str, object]:
    from markupsafe import Markup

    from mlbench_cli.results.report.svg import render_svg

    return {figure.key: Markup(render_svg(figure)) for figure in report.figures} if report else {}


def _latest_resources(handle: RunHandle) -> dict[int, JsonObject]:
    """What each rank used last: CPU seconds, memory in MiB, traffic in MB."""
    found: dict[int, JsonObject] = {}
    for sample in handle.resources():
        before = found.get(sample.rank, {"memory": 0.0})
        memory = max(before["memory"], (sample.rss_bytes or 0.0) / 2**20)
        traffic = None
        if sample.received_bytes is not None or sample.sent_bytes is not None:
            traffic = ((sample.received_bytes or 0.0) + (sample.sent_bytes or 0.0)) / 1e6
        found[sample.rank] = {"cpu": sample.cpu_seconds, "memory": memory, "traffic": traffic}
    return found
