"""The REST API /api/v1. Its documents are those that commands print with `-o json`."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack

from msgspec.structs import replace
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from mlbench_cli.api import RunHandle
from mlbench_cli.errors import MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.comparability import check_words
from mlbench_cli.results.analysis.compare import compare_cells, make_document
from mlbench_cli.runs.request import Request as Asked
from mlbench_cli.runs.request import equivalent_command, merge, parse_file, parse_line
from mlbench_cli.server.access import (
    client_of,
    count_runs,
    find_experiment,
    find_run,
    find_runs,
    list_clusters,
    list_experiments,
    list_runs,
    send_zip,
)
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.live import Feeds, point_document
from mlbench_cli.server.log_pages import PAGE_BYTES, read_page
from mlbench_cli.tasks.catalog import load_catalog
from mlbench_cli.util.durations import parse_since

MAX_PAGE = 1000  # runs per response
MAX_POINTS = 100_000
Handler = Callable[[Request], Awaitable[Response] | Response]  # Starlette calls what is not async in a thread


def make_routes(config: ServerConfig, feeds: Feeds) -> list[BaseRoute]:
    """The table of the API."""
    rest = _Rest(config, feeds)
    table: tuple[tuple[str, str, Handler], ...] = (
        ("GET", "/api/v1/runs", rest.runs),
        ("POST", "/api/v1/runs", rest.start),
        ("GET", "/api/v1/runs/{name}", rest.run),
        ("DELETE", "/api/v1/runs/{name}", rest.delete),
        ("POST", "/api/v1/runs/{name}/cancel", rest.cancel),
        ("GET", "/api/v1/runs/{name}/metrics", rest.metrics),
        ("GET", "/api/v1/runs/{name}/resources", rest.resources),
        ("GET", "/api/v1/runs/{name}/logs", rest.logs),
        ("GET", "/api/v1/runs/{name}/events", rest.events),
        ("GET", "/api/v1/runs/{name}/archive", rest.archive),
        ("GET", "/api/v1/experiments", rest.experiments),
        ("GET", "/api/v1/experiments/{name}", rest.experiment),
        ("POST", "/api/v1/experiments/{name}/cancel", rest.cancel_experiment),
        ("GET", "/api/v1/compare", rest.compare),
        ("GET", "/api/v1/questions", rest.questions),
        ("GET", "/api/v1/tasks", rest.tasks),
        ("GET", "/api/v1/clusters", rest.clusters),
    )
    return [Route(path, handler, methods=[method]) for method, path, handler in table]


class _Rest:
    def __init__(self, config: ServerConfig, feeds: Feeds) -> None:
        self._config = config
        self._feeds = feeds

    # --- reading ----------------------------------------------------------------------------------------------------

    def runs(self, request: Request) -> Response:
        query = request.query_params
        states, tasks = tuple(query.getlist("state")), tuple(query.getlist("task"))
        contains = query.get("contains", "")
        limit = whole_number(query.get("limit"), "limit", 50, MAX_PAGE)
        offset = whole_number(query.get("offset"), "offset")
        handles = list_runs(self._config, states=states, tasks=tasks, contains=contains, limit=limit, offset=offset)
        shown = client_of(self._config).status(handles)
        return JSONResponse({**shown, "total": count_runs(self._config), "offset": offset})

    def run(self, request: Request) -> Response:
        return JSONResponse(find_run(self._config, request.path_params["name"]).status())

    def metrics(self, request: Request) -> Response:
        query = request.query_params
        since = query.get("since")
        table = find_run(self._config, request.path_params["name"]).metrics(
            query.getlist("name") or None,
            since=None if since is None else parse_since(since, "since"),
            summarize=whole_number(query.get("summarize"), "summarize"),
            last=whole_number(query.get("last"), "last"),
            ranks=[whole_number(rank, "rank") for rank in query.getlist("rank")] or None,
        )
        left = max(0, len(table) - MAX_POINTS)
        return JSONResponse({"points": [point_document(point) for point in table[-MAX_POINTS:]], "left_out": left})

    def resources(self, request: Request) -> Response:
        last = whole_number(request.query_params.get("last"), "last", 1000, MAX_POINTS)
        table = find_run(self._config, request.path_params["name"]).resources().to_dicts()
        return JSONResponse({"samples": table[-last:] if last else table})

    def logs(self, request: Request) -> Response:
        query = request.query_params
        rank = whole_number(query.get("rank"), "rank")
        offset = -1 if query.get("offset") == "-1" else whole_number(query.get("offset"), "offset", 0, 1 << 50)
        limit = whole_number(query.get("limit"), "limit", PAGE_BYTES, 1 << 20)
        handle = find_run(self._config, request.path_params["name"])
        if rank >= handle.run.spec.world_size:
            raise NotFoundError(f"The run {handle.name} has no rank {rank}.")
        path = handle.folder / "logs" / f"rank-{rank}.log"
        is_raw = query.get("raw") == "true"
        page = read_page(path, offset, raw=is_raw, limit=max(1024, limit))
        return JSONResponse(page.to_dict())

    async def events(self, request: Request) -> Response:
        name = await run_in_threadpool(lambda: find_run(self._config, request.path_params["name"]).name)
        self._feeds.require_room()
        return StreamingResponse(self._feeds.follow(name), media_type="text/event-stream")

    def archive(self, request: Request) -> Response:
        handle = find_run(self._config, request.path_params["name"])
        return send_zip(handle.download, media_type="application/zip", filename=f"{handle.name}.zip")

    def experiments(self, request: Request) -> Response:
        found = list_experiments(self._config, limit=MAX_PAGE)
        named = [{"name": item.name, "created": item.experiment.created} for item in found]
        return JSONResponse({"experiments": named})

    def experiment(self, request: Request) -> Response:
        return JSONResponse(find_experiment(self._config, request.path_params["name"]).status())

    def compare(self, request: Request) -> Response:
        query = request.query_params
        return JSONResponse(compare_runs(self._config, query, query.getlist("across")))

    def questions(self, request: Request) -> Response:
        return JSONResponse(read_questions(self._config))

    def tasks(self, request: Request) -> Response:
        found = [
            {"name": task.name, "title": task.title, "presets": list(task.presets), "backends": list(task.backends)}
            for task in load_catalog().values()
        ]
        return JSONResponse({"tasks": found})

    def clusters(self, request: Request) -> Response:
        found = list_clusters(self._config)
        named = [{"name": item.name, "provider": item.provider, "state": item.state} for item in found]
        return JSONResponse({"clusters": named})

    # --- acting -----------------------------------------------------------------------------------------------------

    async def start(self, request: Request) -> Response:
        """Start the runs of a spec file's mapping, as JSON. With check=true, only describe them; with check=try, also
        report errors with status 200, for an incomplete form."""
        data, check = await request.body(), request.query_params.get("check")

        def begin() -> JsonObject:
            try:
                client, asked = client_of(self._config), self._parse(data)
                if asked.create and check:  # its plan, price and question need a terminal
                    return {"runs": [], "command": equivalent_command(asked)}
                self._config.limits.check(client.prepare(asked).specs)
                if check in ("true", "try"):
                    return client.plan(asked)
            except MlbenchError as error:
                if check != "try":
                    raise
                return {"problem": error.message}
            experiment = client.submit(asked, command_line=("mlbench", "serve"))
            client.remember(asked)
            return {"experiment": experiment.name, "runs": [run.name for run in experiment.runs()]}

        return JSONResponse(await run_in_threadpool(begin), 201 if check not in ("true", "try") else 200)

    def _parse(self, data: bytes) -> Asked:
        """The request in a body: keys of a spec file, and command-line options as one text in "options". Raises
        UsageError."""
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            raise UsageError("The request is not JSON.") from None
        if not isinstance(document, dict):
            raise UsageError("The request is not a JSON object of options and values.")
        options = document.pop("options", "")
        if not isinstance(options, str):
            raise UsageError('"options" is not a text of command-line options.')
        asked = merge(parse_line(options), parse_file(json.dumps(document)))
        if not asked.name or not asked.workers or not (asked.task or asked.command):
            raise UsageError("A run needs name, workers, and task or command.")
        own = self._config.cluster
        if own is not None and asked.cluster not in (None, own):
            raise UsageError(f"This dashboard shows only the cluster {own}.")
        return asked if own is None else replace(asked, cluster=own)

    def cancel(self, request: Request) -> Response:
        finished = find_run(self._config, request.path_params["name"]).cancel()
        return JSONResponse({"name": finished.run.name, "outcome": str(finished.outcome), "summary": finished.summary})

    def cancel_experiment(self, request: Request) -> Response:
        name = request.path_params["name"]
        find_experiment(self._config, name).cancel()
        return JSONResponse({"experiment": name})

    def delete(self, request: Request) -> Response:
        name = request.path_params["name"]
        find_run(self._config, name).delete()
        return JSONResponse({"name": name, "deleted": True})


def read_questions(config: ServerConfig) -> JsonObject:
    """The questions of `mlbench run` for the shown cluster or for all clusters."""
    questions = client_of(config).questions().to_dict()
    if config.cluster is None:
        return questions
    shown = [cluster for cluster in questions["clusters"] if cluster["name"] == config.cluster]
    return {**questions, "clusters": shown, "cluster": config.cluster}


def compare_runs(config: ServerConfig, query: Mapping[str, str], across: list[str]) -> JsonObject:
    """Two runs, experiments or groups of repeats side by side, as `mlbench compare A B -o json`; `query` has "a" and
    "b"."""
    names = [query.get(side) or "" for side in ("a", "b")]
    if not all(names):
        raise UsageError("A comparison needs two runs, a and b.")
    with ExitStack() as stack:
        one, other = (
            [stack.enter_context(run.archive()) for run in _finished(find_runs(config, name))] for name in names
        )
        sides = (one, names[0]), (other, names[1])
        titles = [side[0].name if len(side) == 1 else name for side, name in sides]
        found, alone = compare_cells(one, other, (titles[0], titles[1]), check_words(across))
        return make_document(list(found.items()), alone)


def _finished(runs: Sequence[RunHandle]) -> Sequence[RunHandle]:
    """The runs with results; if there are none, all runs, so that the first reports why."""
    return [run for run in runs if run.is_sealed] or runs


def whole_number(text: str | None, name: str, default: int = 0, most: int = 1 << 31) -> int:
    """A query parameter as an integer from 0 to `most`. Raises UsageError."""
    if text is None or text == "":
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 16 or int(text) > most:
        raise UsageError(f'{name} "{text[:40]}" is not a whole number from 0 to {most}.')
    return int(text)
