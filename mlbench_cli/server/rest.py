"""The REST API /api/v1. Its documents are those that commands print with `-o json`."""

import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from mlbench_cli.api import RunHandle
from mlbench_cli.errors import MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import JsonObject
from mlbench_cli.server.access import (
    client_of,
    count_runs,
    find_experiment,
    find_run,
    find_runs,
    list_clusters,
    list_experiments,
    list_runs,
)
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.live import Feeds, point_document
from mlbench_cli.server.log_pages import PAGE_BYTES, Stream, has_streams, read_page
from mlbench_cli.server.openapi import describe_api
from mlbench_cli.server.original import parse_since
from mlbench_cli.server.prometheus import CONTENT_TYPE, render_metrics

if TYPE_CHECKING:
    from mlbench_cli.runs.request import Request as Asked

MAX_PAGE = 1000  # runs per response
MAX_POINTS = 100_000
Handler = Callable[[Request], Awaitable[Response]]


def make_routes(config: ServerConfig, feeds: Feeds) -> list[BaseRoute]:
    """The table of the API; `openapi.describe_api` describes the same paths."""
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
        ("GET", "/api/v1/openapi.json", rest.openapi),
        ("GET", "/metrics", rest.prometheus),
    )
    return [Route(path, handler, methods=[method]) for method, path, handler in table]


class _Rest:
    def __init__(self, config: ServerConfig, feeds: Feeds) -> None:
        self._config = config
        self._feeds = feeds

    # --- reading ----------------------------------------------------------------------------------------------------

    async def runs(self, request: Request) -> Response:
        query = request.query_params
        states, tasks = tuple(query.getlist("state")), tuple(query.getlist("task"))
        contains = query.get("contains", "")
        limit, offset = (
            whole_number(query.get("limit"), "limit", 50, MAX_PAGE),
            whole_number(query.get("offset"), "offset"),
        )

        def read() -> JsonObject:
            client = client_of(self._config)
            handles = list_runs(self._config, states=states, tasks=tasks, contains=contains, limit=limit, offset=offset)
            return {**client.status(handles), "total": count_runs(self._config), "offset": offset}

        return JSONResponse(await run_in_threadpool(read))

    async def run(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(await run_in_threadpool(lambda: find_run(self._config, name).status()))

    async def metrics(self, request: Request) -> Response:
        query, name = request.query_params, request.path_params["name"]
        since = query.get("since")
        summarize = whole_number(query.get("summarize"), "summarize")
        last = whole_number(query.get("last"), "last")
        ranks = [whole_number(rank, "rank") for rank in query.getlist("rank")] or None

        def read() -> JsonObject:
            table = find_run(self._config, name).metrics(
                query.getlist("name") or None,
                since=None if since is None else parse_since(since),
                summarize=summarize,
                last=last,
                ranks=ranks,
            )
            left = max(0, len(table) - MAX_POINTS)
            return {"points": [point_document(point) for point in table[-MAX_POINTS:]], "left_out": left}

        return JSONResponse(await run_in_threadpool(read))

    async def resources(self, request: Request) -> Response:
        name = request.path_params["name"]
        last = whole_number(request.query_params.get("last"), "last", 1000, MAX_POINTS)

        def read() -> JsonObject:
            table = find_run(self._config, name).resources().to_dicts()
            return {"samples": table[-last:] if last else table}

        return JSONResponse(await run_in_threadpool(read))

    async def logs(self, request: Request) -> Response:
        query, name = request.query_params, request.path_params["name"]
        rank = whole_number(query.get("rank"), "rank")
        offset = -1 if query.get("offset") == "-1" else whole_number(query.get("offset"), "offset", 0, 1 << 50)
        limit = whole_number(query.get("limit"), "limit", PAGE_BYTES, 1 << 20)
        is_raw = query.get("raw") == "true"
        if (word := query.get("stream", Stream.BOTH)) not in [*Stream]:
            raise UsageError(f'stream "{word[:20]}" is not one of {", ".join(Stream)}.')

        def read() -> JsonObject:
            handle = find_run(self._config, name)
            if rank >= handle.run.spec.world_size:
                raise NotFoundError(f"The run {handle.name} has no rank {rank}.")
            path = handle.folder / "logs" / f"rank-{rank}.log"
            page = read_page(path, offset, raw=is_raw, limit=max(1024, limit), stream=Stream(word))
            return {**page.to_dict(), "has_streams": has_streams(path)}

        return JSONResponse(await run_in_threadpool(read))

    async def events(self, request: Request) -> Response:
        name = await run_in_threadpool(lambda: find_run(self._config, request.path_params["name"]).name)
        self._feeds.require_room()
        return StreamingResponse(self._feeds.follow(name), media_type="text/event-stream")

    async def archive(self, request: Request) -> Response:
        name = request.path_params["name"]

        def write() -> tuple[Path, str]:
            handle = find_run(self._config, name)
            with tempfile.NamedTemporaryFile(suffix=".zip", delete=False) as file:
                target = Path(file.name)
            try:
                return handle.download(target), handle.name
            except BaseException:
                target.unlink(missing_ok=True)
                raise

        target, plain = await run_in_threadpool(write)
        cleanup = BackgroundTask(target.unlink, missing_ok=True)
        return FileResponse(target, media_type="application/zip", filename=f"{plain}.zip", background=cleanup)

    async def experiments(self, request: Request) -> Response:
        def read() -> JsonObject:
            found = list_experiments(self._config, limit=MAX_PAGE)
            return {"experiments": [{"name": item.name, "created": item.experiment.created} for item in found]}

        return JSONResponse(await run_in_threadpool(read))

    async def experiment(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(await run_in_threadpool(lambda: find_experiment(self._config, name).status()))

    async def compare(self, request: Request) -> Response:
        query = request.query_params
        return JSONResponse(await run_in_threadpool(compare_runs, self._config, query, query.getlist("across")))

    async def questions(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(read_questions, self._config))

    async def tasks(self, request: Request) -> Response:
        from mlbench_cli.tasks.catalog import load_catalog

        def read() -> JsonObject:
            tasks = load_catalog().values()
            return {
                "tasks": [
                    {
                        "name": task.name,
                        "title": task.title,
                        "presets": list(task.presets),
                        "backends": list(task.backends),
                    }
                    for task in tasks
                ]
            }

        return JSONResponse(await run_in_threadpool(read))

    async def clusters(self, request: Request) -> Response:
        def read() -> JsonObject:
            found = list_clusters(self._config)
            return {"clusters": [{"name": item.name, "provider": item.provider, "state": item.state} for item in found]}

        return JSONResponse(await run_in_threadpool(read))

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(describe_api())

    async def prometheus(self, request: Request) -> Response:
        return PlainTextResponse(
            await run_in_threadpool(render_metrics, self._config), headers={"content-type": CONTENT_TYPE}
        )

    # --- acting -----------------------------------------------------------------------------------------------------

    async def start(self, request: Request) -> Response:
        """Start the runs of a spec file's mapping, as JSON. With check=true, only describe them; with check=try, also
        report errors with status 200, for an incomplete form."""
        data, check = await request.body(), request.query_params.get("check")

        def begin() -> JsonObject:
            try:
                client, asked = client_of(self._config), self._parse(data)
                self._config.limits.check(client.prepare(asked).specs)
                if check in ("true", "try"):
                    return client.plan(asked, estimate=check == "true")
            except MlbenchError as error:
                if check != "try":
                    raise
                return {"problem": error.message}
            experiment = client.submit(asked, command_line=("mlbench", "serve"))
            client.remember(asked)
            return {"experiment": experiment.name, "runs": [run.name for run in experiment.runs()]}

        return JSONResponse(await run_in_threadpool(begin), 201 if check not in ("true", "try") else 200)

    def _parse(self, data: bytes) -> "Asked":
        """The request in a body: keys of a spec file, and command-line options as strings in "flags". Raises
        UsageError."""
        from mlbench_cli.runs.request import merge, parse_file, parse_flags

        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            raise UsageError("The request is not JSON.") from None
        if not isinstance(document, dict):
            raise UsageError("The request is not a JSON object of options and values.")
        given = document.pop("flags", {})
        if not (isinstance(given, dict) and all(isinstance(text, str) for text in given.values())):
            raise UsageError('"flags" is not an object of options and texts.')
        asked = merge(parse_flags(given), parse_file(json.dumps(document)))
        if not asked.name or not asked.workers or not (asked.task or asked.command):
            raise UsageError("A run needs name, workers, and task or command.")
        own = self._config.cluster
        if own is not None and asked.cluster not in (None, own):
            raise UsageError(f"This dashboard shows only the cluster {own}.")
        return asked if own is None else replace(asked, cluster=own)

    async def cancel(self, request: Request) -> Response:
        name = request.path_params["name"]

        def stop() -> JsonObject:
            finished = find_run(self._config, name).cancel()
            return {"run": finished.run.name, "outcome": str(finished.outcome), "summary": finished.summary}

        return JSONResponse(await run_in_threadpool(stop))

    async def cancel_experiment(self, request: Request) -> Response:
        name = request.path_params["name"]
        await run_in_threadpool(lambda: find_experiment(self._config, name).cancel())
        return JSONResponse({"experiment": name})

    async def delete(self, request: Request) -> Response:
        name = request.path_params["name"]
        await run_in_threadpool(lambda: find_run(self._config, name).delete())
        return JSONResponse({"run": name, "deleted": True})


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
    from mlbench_cli.results.analysis.cells import compare_cells, make_document
    from mlbench_cli.results.analysis.comparability import check_words

    names = [query.get(side) or "" for side in ("a", "b")]
    if not all(names):
        raise UsageError("A comparison needs two runs, a and b.")
    with ExitStack() as stack:
        one, other = (
            [stack.enter_context(run.archive()) for run in _finished(find_runs(config, name))] for name in names
        )
        sides = (one, names[0]), (other, names[1])
        titles = [str(side[0].run["name"]) if len(side) == 1 else name for side, name in sides]
        found, alone = compare_cells(one, other, (titles[0], titles[1]), check_words(across))
        return make_document(found, {}, alone)


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
