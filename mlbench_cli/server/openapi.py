"""The OpenAPI document of the REST API. A test compares its paths with the routes."""

from collections.abc import Mapping

from mlbench_cli import __version__
from mlbench_cli.model.run import JsonObject

_JSON = "application/json"
_SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"cookie": []}, {"basic": []}]
_ERROR = {"description": "an error: status, message", "content": {_JSON: {}}}


def _parameter(place: str, name: str, kind: str, text: str) -> JsonObject:
    schema: JsonObject = {"type": kind}
    if kind == "array":
        schema["items"] = {"type": "string"}
    return {"name": name, "in": place, "required": place == "path", "description": text, "schema": schema}


def _query(name: str, kind: str, text: str) -> JsonObject:
    return _parameter("query", name, kind, text)


def _operation(
    method: str,
    path: str,
    summary: str,
    *parameters: JsonObject,
    media: str = _JSON,
    statuses: Mapping[int, str] | None = None,
) -> tuple[str, str, JsonObject]:
    """`statuses` are those of success, with their meaning; default: 200."""
    responses: JsonObject = {
        str(status): {"description": text, **({} if status == 204 else {"content": {media: {}}})}
        for status, text in (statuses or {200: "the answer"}).items()
    }
    operation: JsonObject = {
        "summary": summary,
        "parameters": list(parameters),
        "responses": {**responses, "default": _ERROR},
        "security": _SECURITY,
    }
    return method, path, operation


_NAME = _parameter("path", "name", "string", "name or id of a run")
_EXPERIMENT = _parameter("path", "name", "string", "name of an experiment")
_ID = _parameter("path", "id", "string", "number of a run, or with metric_type=pod the name of a pod")
_SINCE = _query("since", "string", "only values not before this time, RFC 3339; without a zone: UTC")
_SUMMARIZE = _query("summarize", "integer", "maximum number of values per curve: means of equal groups; 0: all")

OPERATIONS = (
    _operation(
        "get",
        "/api/v1/runs",
        "Runs, newest first, as mlbench status -o json prints them",
        _query("state", "array", "states or outcomes, as stored"),
        _query("task", "array", "names of tasks"),
        _query("contains", "string", "part of the name"),
        _query("limit", "integer", "maximum number of runs; default: 50"),
        _query("offset", "integer", "number of the newest runs to skip"),
    ),
    _operation(
        "post",
        "/api/v1/runs",
        "Start an experiment; the body is a spec file's mapping as JSON",
        _query(
            "check",
            "string",
            "true: start nothing, answer 200 with runs and command line; try: the same, or 200 with the problem",
        ),
        statuses={201: "the runs", 200: "with check: nothing was started"},
    ),
    _operation("get", "/api/v1/runs/{name}", "A run, as mlbench status NAME -o json prints it", _NAME),
    _operation("delete", "/api/v1/runs/{name}", "Remove a run and its results", _NAME),
    _operation("post", "/api/v1/runs/{name}/cancel", "Stop a run and keep partial results", _NAME),
    _operation(
        "get",
        "/api/v1/runs/{name}/metrics",
        "What the ranks have reported so far",
        _NAME,
        _query("name", "array", "exact names of metrics"),
        _query("rank", "array", "ranks"),
        _SINCE,
        _SUMMARIZE,
        _query("last", "integer", "number of last values per curve; 0: all"),
    ),
    _operation(
        "get",
        "/api/v1/runs/{name}/resources",
        "Samples of CPU, memory and traffic",
        _NAME,
        _query("last", "integer", "number of last values; default: 1000; 0: all"),
    ),
    _operation(
        "get",
        "/api/v1/runs/{name}/logs",
        "A page of a rank's log",
        _NAME,
        _query("rank", "integer", "default: 0"),
        _query("offset", "integer", "bytes of the log before the page; -1: the last page"),
        _query("limit", "integer", "bytes of the page"),
        _query("raw", "boolean", "include the lines that hold events"),
    ),
    _operation(
        "get",
        "/api/v1/runs/{name}/events",
        "Server-sent events until the run ends: status, metrics, log, over",
        _NAME,
        media="text/event-stream",
    ),
    _operation("get", "/api/v1/runs/{name}/archive", "The archive as a zip", _NAME, media="application/zip"),
    _operation("get", "/api/v1/experiments", "Experiments, newest first"),
    _operation("get", "/api/v1/experiments/{name}", "An experiment with its progress", _EXPERIMENT),
    _operation("post", "/api/v1/experiments/{name}/cancel", "Stop an experiment", _EXPERIMENT),
    _operation(
        "get",
        "/api/v1/compare",
        "Two runs side by side, as mlbench compare A B -o json",
        _query("a", "string", "a run"),
        _query("b", "string", "a run"),
        _query("across", "array", "differences to accept"),
    ),
    _operation("get", "/api/v1/questions", "The questions of mlbench run, with the possible answers"),
    _operation("get", "/api/v1/tasks", "The catalog"),
    _operation("get", "/api/v1/clusters", "The known clusters"),
    _operation("get", "/api/v1/openapi.json", "This document"),
    _operation("get", "/metrics", "The newest runs for Prometheus", media="text/plain"),
    _operation("get", "/api/runs", "As MLBench 3: all runs"),
    _operation("post", "/api/runs", "As MLBench 3: start a run, by a form", statuses={201: "the answer"}),
    _operation("get", "/api/runs/{id}", "As MLBench 3: a run", _ID),
    _operation("delete", "/api/runs/{id}", "As MLBench 3: delete a run", _ID, statuses={204: "deleted"}),
    _operation("get", "/api/pods", "As MLBench 3: the workers"),
    _operation("get", "/api/metrics", "As MLBench 3: metrics of the newest 100 runs"),
    _operation("post", "/api/metrics", "As MLBench 3: keep a metric, by a form", statuses={201: "the answer"}),
    _operation(
        "get",
        "/api/metrics/{id}",
        "As MLBench 3: metrics of a run or pod, or with format=zip its results",
        _ID,
        _query("metric_type", "string", "pod (default) or run"),
        _SINCE,
        _SUMMARIZE,
        _query("metric_filter", "string", "exact name"),
        _query("last_n", "integer", "number of last values, after summarizing; 0: all"),
        _query("format", "string", "zip: a file"),
    ),
)


def describe_api() -> JsonObject:
    """The document of /api/v1/openapi.json."""
    paths: dict[str, JsonObject] = {}
    for method, path, operation in OPERATIONS:
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlbench", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "mlbench-PORT"},
            }
        },
    }
