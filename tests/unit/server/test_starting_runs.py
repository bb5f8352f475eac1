"""Requests that start runs: what is read, refused, limited, and only described."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.requests import Request

from mlbench_cli.errors import UsageError
from mlbench_cli.server import rest
from mlbench_cli.server.config import Limits, ServerConfig
from mlbench_cli.server.live import Feeds
from tests.unit.results.runs import spec

BODY = {"name": "mine", "workers": [2], "task": "mnist"}


class Client:
    """Keeps what is asked for, and starts nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: Any = None

    def prepare(self, asked: Any) -> Any:
        self.asked = asked
        return SimpleNamespace(specs=[spec(name="mine-2", workers=2)])

    def plan(self, _: Any, *, estimate: bool) -> Any:
        self.calls.append(f"plan estimate={estimate}")
        return {"planned": True}

    def submit(self, _: Any, *, command_line: tuple[str, ...]) -> Any:
        self.calls.append(f"submit {' '.join(command_line)}")
        return SimpleNamespace(name="mine", runs=lambda: [SimpleNamespace(name="mine-2")])

    def remember(self, _: Any) -> None:
        self.calls.append("remember")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    found = Client()
    monkeypatch.setattr(rest, "client_of", lambda _: found)
    return found


def post(body: Any, query: str = "", **config: Any) -> tuple[int, Any]:
    """Status and document of the answer. Errors are raised; the server answers them in one place."""
    settings = ServerConfig(Path("/none"), 8080, token="t", **config)
    handlers = {
        (route.path, method): route.endpoint  # type: ignore[attr-defined]
        for route in rest.make_routes(settings, Feeds(settings))
        for method in route.methods  # type: ignore[attr-defined]
    }
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def receive() -> Any:
        return {"type": "http.request", "body": data, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": query.encode(), "headers": []}
    answer = asyncio.run(handlers["/api/v1/runs", "POST"](Request(scope, receive)))
    return answer.status_code, json.loads(answer.body)


def test_runs_are_submitted_and_remembered(client: Client) -> None:
    assert post(BODY) == (201, {"experiment": "mine", "runs": ["mine-2"]})
    assert client.calls == ["submit mlbench serve", "remember"]
    assert (client.asked.name, client.asked.task) == ("mine", "mnist")


@pytest.mark.parametrize(("check", "estimate"), [("true", True), ("try", False)])
def test_a_check_starts_nothing(client: Client, check: str, estimate: bool) -> None:
    assert post(BODY, f"check={check}") == (200, {"planned": True})
    assert client.calls == [f"plan estimate={estimate}"]


def test_another_check_starts_the_run(client: Client) -> None:
    assert post(BODY, "check=false")[0] == 201


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "The request is not JSON."),
        (b"[" * 100_000, "The request is not JSON."),
        ([], "not a JSON object"),
        ({**BODY, "flags": []}, '"flags" is not an object'),
        ({**BODY, "flags": {"timeout": 3}}, '"flags" is not an object'),
        ({"name": "mine", "workers": [2]}, "A run needs name, workers, and task or command."),
        ({"name": "mine", "task": "mnist"}, "A run needs name, workers"),
        ({"workers": [2], "task": "mnist"}, "A run needs name, workers"),
    ],
)
def test_what_is_no_request_is_refused_or_told(client: Client, body: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        post(body)
    assert words in caught.value.message
    with pytest.raises(UsageError):
        post(body, "check=true")
    assert post(body, "check=try") == (200, {"problem": caught.value.message})
    assert client.calls == []


def test_limits_hold_before_anything_starts(client: Client) -> None:
    with pytest.raises(UsageError, match="requests 2 workers; the limit of this dashboard is 1"):
        post(BODY, limits=Limits(workers=1))
    assert client.calls == []


def test_a_dashboard_of_one_cluster_starts_runs_only_there(client: Client) -> None:
    post(BODY, cluster="far")
    assert client.asked.cluster == "far"
    assert post({**BODY, "cluster": "far"}, cluster="far")[0] == 201
    with pytest.raises(UsageError, match="This dashboard shows only the cluster far"):
        post({**BODY, "cluster": "near"}, cluster="far")
