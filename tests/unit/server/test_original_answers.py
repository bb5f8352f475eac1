"""What MLBench 3's client gets of runs, pods and metrics, with runs made by hand."""

import asyncio
import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

from mlbench_cli.errors import MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Outcome, RunState
from mlbench_cli.results.analysis.tables import MetricPoint
from mlbench_cli.server import original
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.original import (
    describe_run,
    find_by_number,
    list_pods,
    make_routes,
    parse_form,
    pod_series,
    request_of_form,
    run_series,
    select_samples,
    state_of,
)
from mlbench_cli.storage.run_folder import STATE_FOLDER

CONFIG = ServerConfig(Path("/none"), 8080, token="t")
FORM = {"name": "mine-2", "num_workers": "2", "image_name": "mlbench/pytorch-backend-benchmark:latest"}


class Handle:
    """A run that is not sealed, in a folder."""

    is_sealed = False
    is_started = True
    goal = None

    def __init__(self, folder: Path, run_id: str = "00000000000a", **changes: Any) -> None:
        self.folder, self.name = folder, "a-2"
        self.outcome: Outcome | None = None
        self.row = SimpleNamespace(state=RunState.RUNNING)
        spec = SimpleNamespace(workers=2, world_size=2, argv=["python", "x.py"], engine="kubernetes")
        self.run = SimpleNamespace(id=run_id, created="2026-01-01T00:00:00.000Z", spec=spec)
        self.points: list[MetricPoint] = []
        self.deleted: list[bool] = []
        for name, value in changes.items():
            setattr(self, name, value)

    def metrics(self) -> list[MetricPoint]:
        return self.points

    def status(self) -> Any:
        return {"ranks": [{"phase": "running", "node": "n1"}, {"phase": "pending", "node": None}]}

    def logs(self, *, tail: int) -> Any:
        return [SimpleNamespace(text=b"one \xff")][:tail]

    def delete(self, *, force: bool) -> None:
        self.deleted.append(force)


@pytest.fixture
def handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Handle:
    (tmp_path / STATE_FOLDER).mkdir()
    found = Handle(tmp_path)

    def find_run(_: object, name: str) -> Handle:
        if name not in (found.name, found.run.id):
            raise NotFoundError("There is no run.")
        return found

    monkeypatch.setattr(original, "find_run", find_run)
    monkeypatch.setattr(original, "list_runs", lambda *_, **__: [found])
    return found


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Caller:
    """Calls an application in this process, by ASGI."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    def get(self, url: str) -> Answer:
        return self._call("GET", url, b"")

    def post(self, url: str, data: dict[str, Any]) -> Answer:
        return self._call("POST", url, urlencode(data, doseq=True).encode())

    def delete(self, url: str) -> Answer:
        return self._call("DELETE", url, b"")

    def _call(self, method: str, url: str, body: bytes) -> Answer:
        path, _, query = url.partition("?")
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": []}
        messages: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        asyncio.run(self._app(scope, receive, send))
        return Answer(messages[0]["status"], b"".join(message.get("body", b"") for message in messages))


@pytest.fixture
def client(handle: Handle) -> Caller:
    def refuse(_: object, error: Exception) -> Any:
        assert isinstance(error, MlbenchError)
        return PlainTextResponse(error.message, 404 if isinstance(error, NotFoundError) else 400)

    return Caller(Starlette(routes=make_routes(CONFIG), exception_handlers={MlbenchError: refuse}))


@pytest.mark.parametrize(
    ("outcome", "state", "is_started", "word"),
    [
        (Outcome.GOAL_MISSED, RunState.FINISHED, True, "finished"),
        (Outcome.COMPLETED, RunState.FINISHED, True, "finished"),
        (Outcome.BUDGET_SPENT, RunState.FINISHED, True, "finished"),
        (Outcome.GOAL_REACHED, RunState.FINISHED, True, "finished"),
        (Outcome.CANCELLED, RunState.FINISHED, True, "failed"),
        (Outcome.LOST, RunState.FINISHED, False, "failed"),
        (None, RunState.RUNNING, True, "started"),
        (None, RunState.RUNNING, False, "initialized"),
        (None, RunState.CREATED, True, "initialized"),
    ],
)
def test_states_of_the_first_edition(
    handle: Any, outcome: Outcome | None, state: RunState, is_started: bool, word: str
) -> None:
    handle.row.state, handle.is_started = state, is_started
    assert state_of(handle, outcome) == word


def test_a_run_in_the_list(handle: Any) -> None:
    (handle.folder / "result.json").write_text(json.dumps({"finished": "2026-01-02T00:00:00.000Z"}))
    document = {
        "id": 10,
        "name": "a-2",
        "created_at": "2026-01-01T00:00:00.000Z",
        "finished_at": None,
        "state": "started",
        "job_id": "",
        "job_metadata": {},
        "num_workers": 2,
    }
    assert describe_run(handle) == document
    handle.outcome = Outcome.COMPLETED
    assert describe_run(handle) == {**document, "finished_at": "2026-01-02T00:00:00.000Z", "state": "finished"}


@pytest.mark.parametrize("end", ["", "/"])
def test_a_run_by_its_number(client: Caller, handle: Handle, end: str) -> None:
    answer = client.get(f"/api/runs/10{end}")
    assert answer.json()["job_metadata"] == {
        "stdout": ["one \ufffd"],
        "stderr": [],
        "pods": ["a-2-0", "a-2-1"],
        "command": "python x.py",
        "master_name": "a-2-0",
        "workhorse_pid": None,
    }
    assert client.delete(f"/api/runs/10{end}").status == 204
    assert handle.deleted == [True]


@pytest.mark.parametrize("number", ["11", "a", "-10", "1.0", "٣", "1" * 20])
def test_an_unknown_number(handle: Handle, number: str) -> None:
    with pytest.raises(NotFoundError, match="There is no run"):
        find_by_number(CONFIG, number)


def test_a_run_whose_id_is_no_number_has_the_checksum_of_it(handle: Any) -> None:
    handle.run.id = "mine!"
    assert find_by_number(CONFIG, str(describe_run(handle)["id"])) is handle


def test_lists_of_runs_and_pods_are_answered(client: Caller) -> None:
    assert [run["id"] for run in client.get("/api/runs").json()] == [10]
    assert [pod["name"] for pod in client.get("/api/pods/").json()] == ["a-2-0", "a-2-1"]
    assert client.delete("/api/pods").status == client.post("/api/pods", {}).status == 405


def test_a_form_without_a_name_is_refused(client: Caller) -> None:
    answer = client.post("/api/runs", {"num_workers": "2"})
    assert (answer.status, answer.text) == (400, "A run needs name and num_workers.")


def test_pods_are_workers_with_their_nodes(handle: Any) -> None:
    labels = "{'app': 'mlbench', 'component': 'worker', 'run': 'a-2'}"
    assert list_pods(CONFIG) == [
        {"name": "a-2-0", "labels": labels, "phase": "Running", "ip": "n1"},
        {"name": "a-2-1", "labels": labels, "phase": "Pending", "ip": ""},
    ]
    handle.run.spec.engine = "local"
    assert {pod["ip"] for pod in list_pods(CONFIG)} == {"127.0.0.1"}


def test_metrics_of_a_running_run_are_in_order_of_time(handle: Any) -> None:
    handle.points = [
        MetricPoint("a-2", 2, 1, 5.0, "train_loss", 0.5),
        MetricPoint("a-2", 2, 1, 4.0, "train_loss", 0.75),
    ]
    found = run_series(handle)
    assert [(each["date"], each["value"]) for each in found["train_loss @ 1"]] == [
        ("1970-01-01T00:00:04.000Z", "0.75"),
        ("1970-01-01T00:00:05.000Z", "0.5"),
    ]


def test_pods_of_a_running_run_have_no_metrics_yet(handle: Any) -> None:
    assert pod_series(CONFIG, "a-2-1") == {}
    with pytest.raises(NotFoundError, match='There is no pod "a-2-2"'):
        pod_series(CONFIG, "a-2-2")


def test_a_posted_metric_is_kept_with_the_run(client: Caller, handle: Any) -> None:
    form = {"run_id": "10", "name": "speed", "value": "3", "date": "1970-01-01 00:00:09", "cumulative": "TRUE"}
    sample = {"date": "1970-01-01T00:00:09.000Z", "value": "3", "cumulative": True}
    answer = client.post("/api/metrics", data={**form, "metadata": ["a", "b"]})
    assert (answer.status, answer.json()) == (201, {"name": "speed", **sample, "metadata": "a, b"})
    assert client.post("/api/metrics", data={**form, "cumulative": "yes"}).json()["cumulative"] is False
    assert run_series(handle)["speed"] == [sample, {**sample, "cumulative": False}]
    assert client.get("/api/metrics/10?metric_type=run&last_n=1").json() == {"speed": [{**sample, "cumulative": False}]}
    assert client.get("/api/metrics/10?metric_type=run&metric_filter=other").json() == {}
    whole = client.get("/api/metrics").json()
    assert whole["pod_metrics"] == {}
    assert whole["run_metrics"]["a-2"]["speed"][0] == {"name": "speed", **sample, "metadata": ""}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run_id": ""}, "Run Id is missing"),
        ({"name": ""}, "name must have 1 to 50 characters"),
        ({"name": "x" * 51}, "name must have 1 to 50 characters"),
        ({"value": "x" * 256}, "value must have 1 to 255 characters"),
        ({"date": "soon"}, '"soon" is not a time'),
    ],
)
def test_a_posted_metric_has_bounds(client: Caller, changes: dict[str, str], words: str) -> None:
    form = {"run_id": "10", "name": "x" * 50, "value": "y" * 255, "date": ""}
    assert client.post("/api/metrics", data=form).status == 201
    answer = client.post("/api/metrics", data={**form, **changes})
    assert answer.status == 400
    assert words in answer.text


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("metric_type=node", 'metric_type "node" is neither pod nor run'),
        ("metric_type=run&summarize=-1", 'summarize "-1" is not a whole number'),
        ("metric_type=run&last_n=1234567890", 'last_n "1234567890" is not a whole number'),
        ("metric_type=run&since=x", '"x" is not a time'),
    ],
)
def test_wrong_queries_are_quoted(client: Caller, query: str, words: str) -> None:
    answer = client.get(f"/api/metrics/10?{query}")
    assert (answer.status, words in answer.text) == (400, True)


def test_means_of_texts_are_not_a_number() -> None:
    samples: Any = {"m": [{"date": str(n), "value": text, "cumulative": False} for n, text in enumerate("1x24")]}
    found = select_samples(samples, since=None, summarize=2, name=None, last=0)
    assert math.isnan(float(found["m"][0]["value"]))
    assert select_samples(samples, since=None, summarize=4, name=None, last=0) == samples


@pytest.mark.parametrize(
    ("changes", "request_"),
    [
        ({}, {"name": "mine", "workers": [2], "task": "allreduce"}),
        ({"name": "mine"}, {"name": "mine", "workers": [2], "task": "allreduce"}),
        ({"backend": "MPI"}, {"name": "mine", "workers": [2], "task": "allreduce", "backend": "mpi"}),
        (
            {"gpu_enabled": "true", "light_target": "true", "run_all_nodes": "true"},
            {"name": "mine", "workers": [2], "task": "allreduce", "gpu": True, "light": True},
        ),
        (
            {"gpu_enabled": "false", "light_target": "no"},
            {"name": "mine", "workers": [2], "task": "allreduce"},
        ),
        (
            {"image_name": "custom_image", "custom_image_command": "ls", "custom_image_name": "me/x"},
            {"name": "mine", "workers": [2], "command": "ls", "image": "me/x"},
        ),
        ({"image_name": "custom_image"}, {"name": "mine", "workers": [2], "command": ""}),
        ({"image_name": "custom_image", "run_all_nodes": "maybe"}, {"name": "mine", "workers": [2], "command": ""}),
    ],
)
def test_forms_as_spec_files(changes: dict[str, str], request_: dict[str, Any]) -> None:
    assert request_of_form({**FORM, **changes}) == request_


def test_fields_of_a_form_keep_their_order_and_empty_values() -> None:
    assert parse_form(b"b=2&a=&b=3+4") == [("b", "2"), ("a", ""), ("b", "3 4")]
    with pytest.raises(UsageError, match="is not a form"):
        parse_form(b"\xff=1")
