"""The OpenAPI document against the server's handlers, and against OpenAPI's own rules."""

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.datastructures import QueryParams
from starlette.routing import BaseRoute, Route

from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Outcome, RunState
from mlbench_cli.server import original, rest
from mlbench_cli.server.access import list_runs
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.live import Feeds
from mlbench_cli.server.openapi import OPERATIONS, describe_api
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks import catalog
from tests.unit.results.runs import new_run, observation_of, spec, training_log


class Recorder(QueryParams):
    """An empty query that remembers what it was asked for, and which names were read as lists."""

    def __init__(self) -> None:
        super().__init__("")
        self.one: set[str] = set()
        self.many: set[str] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.one.add(str(key))
        return default

    def getlist(self, key: Any) -> list[str]:
        self.many.add(str(key))
        return []


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    """A dashboard of one sealed run."""
    from mlbench_cli.results.archive.documents import write_run_document
    from mlbench_cli.results.archive.seal import seal

    home = tmp_path_factory.mktemp("home")
    store = Store(home)
    run = store.record_run(spec(name="alpha-1", workers=1))
    new_run(run.folder, run.spec, {0: training_log(0, 90.0)})
    write_run_document(run)
    seal(run, observation_of(1, 93.0))
    store.update_run(run, RunState.FINISHED, Outcome.GOAL_REACHED)
    store.close()
    return ServerConfig(home=home, port=1)


def list_routes(config: ServerConfig) -> dict[tuple[str, str], Route]:
    """The routes by method and path; HEAD, which Starlette adds, and trailing slashes are left out."""
    made: list[BaseRoute] = [*rest.make_routes(config, Feeds(config)), *original.make_routes(config)]
    return {
        (method.lower(), route.path): route
        for route in made
        if isinstance(route, Route) and not route.path.endswith("/")
        for method in (route.methods or set()) - {"HEAD"}
    }


def read_query(config: ServerConfig, method: str, path: str) -> Recorder:
    """Call the handler of a route without any query and return what it read."""
    query = Recorder()
    (handle,) = list_runs(config)
    number = "alpha-1-0" if path == "/api/metrics/{id}" else str(original.number_of(handle.run.id))

    async def body() -> bytes:
        return b"{}"

    request: Any = SimpleNamespace(query_params=query, body=body, path_params={"name": "alpha-1", "id": number})
    handler: Any = list_routes(config)[method, path].endpoint
    try:
        answer = handler(request)
        if asyncio.iscoroutine(answer):
            asyncio.run(answer)
    except MlbenchError:
        pass  # required parameters are missing
    return query


def documented(method: str, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = describe_api()["paths"][path][method]["parameters"]
    return found


READING = [(method, path) for method, path, *_ in OPERATIONS if method == "get" or path == "/api/v1/runs"]


def test_the_document_has_exactly_the_routes_of_the_server(config: ServerConfig) -> None:
    described = {(method, path) for path, item in describe_api()["paths"].items() for method in item}
    assert described == set(list_routes(config))
    assert len(described) == len(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), READING)
def test_every_query_parameter_that_the_server_reads_is_documented(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    monkeypatch.setattr(rest, "read_questions", lambda config: {})  # what takes long has no parameters
    monkeypatch.setattr(catalog, "load_catalog", dict)
    monkeypatch.setattr(rest, "send_zip", lambda *_, **__: None)
    read = read_query(config, method, path)
    by_kind = {
        (each["name"], each["schema"]["type"] == "array") for each in documented(method, path) if each["in"] == "query"
    }
    assert by_kind == {*((name, False) for name in read.one), *((name, True) for name in read.many)}


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, *_ in OPERATIONS])
def test_parameters_follow_the_rules_of_openapi(method: str, path: str) -> None:
    """A path has each of its templates as a required parameter, arrays say what is in them, and no name comes twice."""
    parameters = documented(method, path)
    in_path = {each["name"] for each in parameters if each["in"] == "path"}
    assert in_path == set(re.findall(r"{(\w+)}", path))
    assert all(each["required"] is (each["in"] == "path") for each in parameters)
    assert len({(each["name"], each["in"]) for each in parameters}) == len(parameters)
    for each in parameters:
        assert each["schema"]["type"] in ("string", "integer", "boolean", "array")
        assert ("items" in each["schema"]) is (each["schema"]["type"] == "array")
        assert each["description"]


def test_every_security_requirement_names_a_scheme() -> None:
    document = describe_api()
    schemes = document["components"]["securitySchemes"]
    used = {
        name
        for item in document["paths"].values()
        for operation in item.values()
        for requirement in operation["security"]
        for name in requirement
    }
    assert used == set(schemes)
    assert schemes["bearer"] == {"type": "http", "scheme": "bearer"}
    assert schemes["basic"] == {"type": "http", "scheme": "basic"}
    assert schemes["cookie"]["in"] == "cookie"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("get", "/api/v1/runs", "200"),
        ("post", "/api/v1/runs", "201"),
        ("post", "/api/v1/runs/{name}/cancel", "200"),
        ("post", "/api/v1/experiments/{name}/cancel", "200"),
        ("delete", "/api/v1/runs/{name}", "200"),
        ("post", "/api/runs", "201"),
        ("post", "/api/metrics", "201"),
        ("delete", "/api/runs/{id}", "204"),
    ],
)
def test_the_documented_status_is_that_of_the_answer(method: str, path: str, status: str) -> None:
    responses = describe_api()["paths"][path][method]["responses"]
    assert set(responses) - {"default"} >= {status}
    assert ("content" in responses[status]) is (status != "204")


def test_a_run_that_is_only_checked_is_documented_as_200() -> None:
    assert {"200", "201"} <= set(describe_api()["paths"]["/api/v1/runs"]["post"]["responses"])
    several = {"/api/v1/runs", "/api/runs", "/api/metrics"}
    created = {
        path for path, item in describe_api()["paths"].items() for each in item.values() if "201" in each["responses"]
    }
    assert created == several
