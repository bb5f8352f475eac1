"""The OpenAPI document of the REST API. A test compares its paths with the routes."""

from mlbench_cli import __version__
from mlbench_cli.model.run import JsonObject

_NAME = ("name", "path", "string", "name or id of a run")
_EXPERIMENT = ("name", "path", "string", "name of an experiment")
_SINCE = ("since", "query", "string", "only values not before this time, RFC 3339; without a zone: UTC")
_SUMMARIZE = ("summarize", "query", "integer", "maximum number of values per curve: means of equal groups; 0: all")
_ID = ("id", "path", "string", "number of a run, or with metric_type=pod the name of a pod")
_Parameter = tuple[str, str, str, str]

# (method, path, what it does, parameters, media type of the answer)
OPERATIONS: tuple[tuple[str, str, str, tuple[_Parameter, ...], str], ...] = (
    (
        *("get", "/api/v1/runs", "Runs, newest first, as mlbench status -o json prints them"),
        (
            ("state", "query", "array", "states or outcomes, as stored"),
            ("task", "query", "array", "names of tasks"),
            ("contains", "query", "string", "part of the name"),
            ("limit", "query", "integer", "maximum number of runs; default: 50"),
            ("offset", "query", "integer", "number of the newest runs to skip"),
        ),
        "application/json",
    ),
    (
        *("post", "/api/v1/runs", "Start an experiment; the body is a spec file's mapping as JSON"),
        (
            (
                *("check", "query", "string"),
                "true: start nothing, answer 200 with runs and command line; try: the same, or 200 with the problem",
            ),
        ),
        "application/json",
    ),
    ("get", "/api/v1/runs/{name}", "A run, as mlbench status NAME -o json prints it", (_NAME,), "application/json"),
    ("delete", "/api/v1/runs/{name}", "Remove a run and its results", (_NAME,), "application/json"),
    ("post", "/api/v1/runs/{name}/cancel", "Stop a run and keep partial results", (_NAME,), "application/json"),
    (
        *("get", "/api/v1/runs/{name}/metrics", "What the ranks have reported so far"),
        (
            _NAME,
            ("name", "query", "array", "exact names of metrics"),
            ("rank", "query", "array", "ranks"),
            _SINCE,
            _SUMMARIZE,
            ("last", "query", "integer", "number of last values per curve; 0: all"),
        ),
        "application/json",
    ),
    (
        *("get", "/api/v1/runs/{name}/resources", "Samples of CPU, memory and traffic"),
        (_NAME, ("last", "query", "integer", "number of last values; default: 1000; 0: all")),
        "application/json",
    ),
    (
        *("get", "/api/v1/runs/{name}/logs", "A page of a rank's log"),
        (
            _NAME,
            ("rank", "query", "integer", "default: 0"),
            ("offset", "query", "integer", "bytes of the log before the page; -1: the last page"),
            ("limit", "query", "integer", "bytes of the page"),
            ("raw", "query", "boolean", "include the lines that hold events"),
            ("stream", "query", "string", "both (default), stdout or stderr"),
        ),
        "application/json",
    ),
    (
        *("get", "/api/v1/runs/{name}/events", "Server-sent events until the run ends: status, metrics, log, over"),
        (_NAME,),
        "text/event-stream",
    ),
    ("get", "/api/v1/runs/{name}/archive", "The archive as a zip", (_NAME,), "application/zip"),
    ("get", "/api/v1/experiments", "Experiments, newest first", (), "application/json"),
    ("get", "/api/v1/experiments/{name}", "An experiment with its progress", (_EXPERIMENT,), "application/json"),
    ("post", "/api/v1/experiments/{name}/cancel", "Stop an experiment", (_EXPERIMENT,), "application/json"),
    (
        *("get", "/api/v1/compare", "Two runs side by side, as mlbench compare A B -o json"),
        (
            ("a", "query", "string", "a run"),
            ("b", "query", "string", "a run"),
            ("across", "query", "array", "differences to accept"),
        ),
        "application/json",
    ),
    ("get", "/api/v1/questions", "The questions of mlbench run, with the possible answers", (), "application/json"),
    ("get", "/api/v1/tasks", "The catalog", (), "application/json"),
    ("get", "/api/v1/clusters", "The known clusters", (), "application/json"),
    ("get", "/api/v1/openapi.json", "This document", (), "application/json"),
    ("get", "/metrics", "The newest runs for Prometheus", (), "text/plain"),
    ("get", "/api/runs", "As MLBench 3: all runs", (), "application/json"),
    ("post", "/api/runs", "As MLBench 3: start a run, by a form", (), "application/json"),
    ("get", "/api/runs/{id}", "As MLBench 3: a run", (_ID,), "application/json"),
    ("delete", "/api/runs/{id}", "As MLBench 3: delete a run", (_ID,), "application/json"),
    ("get", "/api/pods", "As MLBench 3: the workers", (), "application/json"),
    ("get", "/api/metrics", "As MLBench 3: metrics of the newest 100 runs", (), "application/json"),
    ("post", "/api/metrics", "As MLBench 3: keep a metric, by a form", (), "application/json"),
    (
        *("get", "/api/metrics/{id}", "As MLBench 3: metrics of a run or pod, or with format=zip its results"),
        (
            _ID,
            ("metric_type", "query", "string", "pod (default) or run"),
            _SINCE,
            _SUMMARIZE,
            ("metric_filter", "query", "string", "exact name"),
            ("last_n", "query", "integer", "number of last values, after summarizing; 0: all"),
            ("format", "query", "string", "zip: a file"),
        ),
        "application/json",
    ),
)


def describe_api() -> JsonObject:
    """The document of /api/v1/openapi.json."""
    paths: dict[str, JsonObject] = {}
    for method, path, summary, parameters, media in OPERATIONS:
        operation: JsonObject = {
            "summary": summary,
            "parameters": [_parameter(*parameter) for parameter in parameters],
            "responses": {
                **_describe_answers(method, path, media),
                "default": {"description": "an error: status, message", "content": {"application/json": {}}},
            },
            "security": [{"bearer": []}, {"cookie": []}, {"basic": []}],
        }
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


def _describe_answers(method: str, path: str, media: str) -> JsonObject:
    if (method, path) == ("delete", "/api/runs/{id}"):
        return {"204": {"description": "deleted"}}
    answer = {"description": "the answer", "content": {media: {}}}
    if (method, path) == ("post", "/api/v1/runs"):
        return {"201": answer, "200": {**answer, "description": "with check: nothing was started"}}
    return {"201" if method == "post" and path.endswith("s") else "200": answer}


def _parameter(name: str, place: str, kind: str, text: str) -> JsonObject:
    schema: JsonObject = {"type": kind}
    if kind == "array":
        schema["items"] = {"type": "string"}
    return {"name": name, "in": place, "required": place == "path", "description": text, "schema": schema}
