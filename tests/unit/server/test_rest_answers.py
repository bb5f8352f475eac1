"""Answers of the REST API: what is read from a query, its defaults and bounds, and the documents that come back."""

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from mlbench_cli.api import Client
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import Outcome
from mlbench_cli.results.analysis.tables import MetricPoint
from mlbench_cli.server import rest
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.live import Feeds, TooManyFollowers
from mlbench_cli.server.log_pages import LogPage, Stream
from tests.unit.server.asking import ask, read_json
from tests.unit.server.conftest import Ended


def get(home: Path, path: str, method: str = "GET", **config: Any) -> Any:
    """The document of the answer."""
    return read_json(respond(home, path, method, **config))


def respond(home: Path, path: str, method: str = "GET", **config: Any) -> Any:
    settings = ServerConfig(home, 8080, token="t", **config)
    return ask(rest.make_routes(settings, Feeds(settings)), path, method=method)


# --- runs -----------------------------------------------------------------------------------------------------------


def test_runs_are_listed_by_page_with_the_number_of_all(ended: Ended) -> None:
    document = get(ended.home, "/api/v1/runs?limit=1&offset=1")
    assert [run["name"] for run in document["runs"]] == ["study-2"]
    assert (document["total"], document["offset"]) == (3, 1)
    assert document["runs"][0]["goal"]["value"] == 80.5
    assert document["runs"][0]["seconds"] == 60.0


def test_a_dashboard_of_one_cluster_lists_only_its_runs(ended: Ended) -> None:
    document = get(ended.home, "/api/v1/runs", cluster="far")
    assert ([run["name"] for run in document["runs"]], document["total"]) == (["bad"], 1)


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", {"states": (), "tasks": (), "contains": "", "limit": 50, "offset": 0}),
        (
            "state=failed&state=running&task=mnist&contains=x&limit=1000&offset=7",
            {"states": ("failed", "running"), "tasks": ("mnist",), "contains": "x", "limit": 1000, "offset": 7},
        ),
        ("limit=0", {"states": (), "tasks": (), "contains": "", "limit": 0, "offset": 0}),
    ],
)
def test_what_a_query_asks_for(ended: Ended, monkeypatch: pytest.MonkeyPatch, query: str, wanted: Any) -> None:
    asked: list[Any] = []

    def list_runs(_: ServerConfig, **options: Any) -> list[Any]:
        asked.append(options)
        return []

    monkeypatch.setattr(rest, "list_runs", list_runs)
    assert get(ended.home, f"/api/v1/runs?{query}")["runs"] == []
    assert asked == [wanted]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("limit=1001", 'limit "1001" is not a whole number from 0 to 1000.'),
        ("offset=-1", 'offset "-1" is not a whole number from 0 to 2147483648.'),
    ],
)
def test_pages_have_a_largest_size(ended: Ended, query: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        get(ended.home, f"/api/v1/runs?{query}")
    assert caught.value.message == words


def test_a_run_is_the_document_of_its_status(ended: Ended) -> None:
    with Client(ended.home) as client:
        wanted = client.find_run("study-2").status()
    assert get(ended.home, "/api/v1/runs/study-2") == wanted
    assert get(ended.home, f"/api/v1/runs/{ended.runs['study-2'].id}") == wanted
    with pytest.raises(NotFoundError, match='There is no run "nobody"'):
        get(ended.home, "/api/v1/runs/nobody")


# --- metrics and resources ------------------------------------------------------------------------------------------


def point(number: int) -> MetricPoint:
    return MetricPoint("study-2", 2, 0, float(number), "loss", 0.5, None, None, None)


class Handle:
    """A run whose metrics and samples are numbered, and which keeps what is asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[Any] = []
        self.name = "study-2"

    def metrics(self, names: Any, **options: Any) -> list[MetricPoint]:
        self.asked.append((names, options))
        return [point(number) for number in range(self.count)]

    def resources(self) -> Any:
        return SimpleNamespace(to_dicts=lambda: [{"time": number} for number in range(self.count)])

    def cancel(self) -> Any:
        self.asked.append("cancel")
        return SimpleNamespace(run=self, outcome=Outcome.CANCELLED, summary="It was stopped.")

    def delete(self) -> None:
        self.asked.append("delete")


def give(monkeypatch: pytest.MonkeyPatch, count: int) -> Handle:
    handle = Handle(count)
    monkeypatch.setattr(rest, "find_run", lambda *_: handle)
    return handle


NO_LIMITS = {"since": None, "summarize": 0, "last": 0, "ranks": None}


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", (None, NO_LIMITS)),
        ("since=1970-01-01T00:01:40.000Z", (None, {**NO_LIMITS, "since": 100.0})),
        ("since=1970-01-01+00:01:40", (None, {**NO_LIMITS, "since": 100.0})),
        (
            "name=loss&name=acc&summarize=10&last=3&rank=0&rank=2",
            (["loss", "acc"], {"since": None, "summarize": 10, "last": 3, "ranks": [0, 2]}),
        ),
    ],
)
def test_which_metrics_are_asked_for(monkeypatch: pytest.MonkeyPatch, query: str, wanted: Any) -> None:
    handle = give(monkeypatch, 0)
    assert get(Path("/none"), f"/api/v1/runs/x/metrics?{query}") == {"points": [], "left_out": 0}
    assert handle.asked == [wanted]


@pytest.mark.parametrize("query", ["rank=-1", "rank=x", "last=many", "summarize=1.5", "since=yesterday"])
def test_metrics_of_a_query_that_is_wrong(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    handle = give(monkeypatch, 0)
    with pytest.raises(UsageError):
        get(Path("/none"), f"/api/v1/runs/x/metrics?{query}")
    assert handle.asked == []


@pytest.mark.parametrize(
    ("count", "times", "left_out"), [(2, [0.0, 1.0], 0), (3, [0.0, 1.0, 2.0], 0), (5, [2.0, 3.0, 4.0], 2)]
)
def test_the_oldest_of_too_many_points_are_left_out(
    monkeypatch: pytest.MonkeyPatch, count: int, times: list[float], left_out: int
) -> None:
    monkeypatch.setattr(rest, "MAX_POINTS", 3)
    give(monkeypatch, count)
    document = get(Path("/none"), "/api/v1/runs/x/metrics")
    assert [each["time"] for each in document["points"]] == times
    assert document["left_out"] == left_out


@pytest.mark.parametrize(
    ("query", "first", "count"),
    [("", 200, 1000), ("?last=2", 1198, 2), ("?last=0", 0, 1200), ("?last=100000", 0, 1200)],
)
def test_resources_are_the_last_thousand_samples(
    monkeypatch: pytest.MonkeyPatch, query: str, first: int, count: int
) -> None:
    give(monkeypatch, 1200)
    samples = get(Path("/none"), f"/api/v1/runs/x/resources{query}")["samples"]
    assert (samples[0]["time"], len(samples)) == (first, count)


def test_resources_have_a_largest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 1)
    with pytest.raises(UsageError, match='last "100001" is not a whole number from 0 to 100000'):
        get(Path("/none"), "/api/v1/runs/x/resources?last=100001")


# --- logs and archives ----------------------------------------------------------------------------------------------


def test_the_log_of_a_rank(ended: Ended) -> None:
    size = (ended.runs["study-2"].folder / "logs" / "rank-1.log").stat().st_size
    assert get(ended.home, "/api/v1/runs/study-2/logs?rank=1") == {
        "offset": 0,
        "end": size,
        "size": size,
        "before": None,
        "lines": ["loading the data", "epoch 0 of 3", "epoch 1 of 3", "epoch 2 of 3"],
        "cut": None,
        "has_streams": False,
    }
    raw = get(ended.home, "/api/v1/runs/study-2/logs?rank=1&raw=true")["lines"]
    assert len(raw) > 4
    assert raw[1].startswith("@mlbench {")


def test_a_run_has_as_many_logs_as_ranks(ended: Ended) -> None:
    with pytest.raises(NotFoundError) as caught:
        get(ended.home, "/api/v1/runs/study-2/logs?rank=2")
    assert caught.value.message == "The run study-2 has no rank 2."


@pytest.mark.parametrize(
    ("query", "offset", "options"),
    [
        ("", 0, {"raw": False, "limit": 65536, "stream": Stream.BOTH}),
        ("offset=-1", -1, {"raw": False, "limit": 65536, "stream": Stream.BOTH}),
        ("offset=123&limit=2048&stream=stderr", 123, {"raw": False, "limit": 2048, "stream": Stream.ERRORS}),
        ("limit=1023&raw=true&stream=stdout", 0, {"raw": True, "limit": 1024, "stream": Stream.OUTPUT}),
        ("limit=1025&raw=yes", 0, {"raw": False, "limit": 1025, "stream": Stream.BOTH}),
        ("limit=1048576", 0, {"raw": False, "limit": 1048576, "stream": Stream.BOTH}),
        ("offset=1125899906842624", 1 << 50, {"raw": False, "limit": 65536, "stream": Stream.BOTH}),
    ],
)
def test_which_page_of_a_log_is_read(
    ended: Ended, monkeypatch: pytest.MonkeyPatch, query: str, offset: int, options: Any
) -> None:
    asked: list[Any] = []

    def read_page(path: Path, start: int, **given: Any) -> LogPage:
        asked.append((path, start, given))
        return LogPage(0, 0, 0, None, ())

    monkeypatch.setattr(rest, "read_page", read_page)
    get(ended.home, f"/api/v1/runs/study-1/logs?{query}")
    assert asked == [(ended.runs["study-1"].folder / "logs" / "rank-0.log", offset, options)]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("stream=stdin", 'stream "stdin" is not one of both, stdout, stderr.'),
        (f"stream={'x' * 30}", f'stream "{"x" * 20}" is not one of both, stdout, stderr.'),
        ("limit=1048577", 'limit "1048577" is not a whole number from 0 to 1048576.'),
        ("offset=1125899906842625", "is not a whole number from 0 to 1125899906842624."),
        ("offset=-2", 'offset "-2" is not a whole number'),
        ("rank=-1", 'rank "-1" is not a whole number'),
    ],
)
def test_pages_of_a_log_that_there_are_not(ended: Ended, query: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        get(ended.home, f"/api/v1/runs/study-1/logs?{query}")
    assert words in caught.value.message


def test_an_archive_is_a_zip_that_is_removed_once_it_is_sent(ended: Ended) -> None:
    answer = respond(ended.home, "/api/v1/runs/study-1/archive")
    path = Path(answer.path)
    assert answer.media_type == "application/zip"
    assert answer.headers["content-disposition"] == 'attachment; filename="study-1.zip"'
    assert "result.json" in zipfile.ZipFile(path).namelist()
    answer.background.func(*answer.background.args, **answer.background.kwargs)
    assert not path.exists()


# --- experiments, comparisons, choices ------------------------------------------------------------------------------


def test_experiments_with_their_dates(ended: Ended) -> None:
    wanted = {"experiments": [{"name": "study", "created": "2026-01-01T00:00:00.000Z"}]}
    assert get(ended.home, "/api/v1/experiments") == wanted
    assert get(ended.home, "/api/v1/experiments", cluster="far") == {"experiments": []}


def test_an_experiment_is_the_document_of_its_status(ended: Ended) -> None:
    document = get(ended.home, "/api/v1/experiments/study")
    assert (document["name"], document["state"]) == ("study", "completed")
    assert document["progress"] == {"finished": 2, "failed": 0, "total": 2}
    with pytest.raises(NotFoundError, match='The experiment "study" is not on far'):
        get(ended.home, "/api/v1/experiments/study", cluster="far")


@pytest.mark.parametrize("query", ["", "a=study-1", "b=study-1", "a=study-1&b="])
def test_a_comparison_has_two_sides(ended: Ended, query: str) -> None:
    with pytest.raises(UsageError) as caught:
        get(ended.home, f"/api/v1/compare?{query}")
    assert caught.value.message == "A comparison needs two runs, a and b."


def test_two_runs_side_by_side(ended: Ended) -> None:
    document = get(ended.home, "/api/v1/compare?a=study-1&b=study-2&across=workers")
    assert (document["a"], document["b"]) == ("study-1", "study-2")
    ratio = document["estimates"]["task"]["ratio"]["mean"]
    assert ratio == pytest.approx(60 / 90)
    assert document["obstacles"] == []
    assert get(ended.home, "/api/v1/compare?a=study-1&b=study-2")["obstacles"] != []


def test_a_side_of_several_runs_has_the_name_that_was_asked_for(ended: Ended) -> None:
    document = get(ended.home, "/api/v1/compare?a=study&b=study-1&across=workers")
    assert [(each["a"], each["b"]) for each in document.get("comparisons", [document])] == [("study", "study-1")]
    with Client(ended.home) as client:
        identity = client.find_run("study-1").run.id
    named = get(ended.home, f"/api/v1/compare?a={identity}&b=study-2&across=workers")
    assert (named["a"], named["b"]) == ("study-1", "study-2")


def test_questions_are_those_of_the_shown_cluster(ended: Ended) -> None:
    everything = get(ended.home, "/api/v1/questions")
    assert [cluster["name"] for cluster in everything["clusters"]] == ["local", "far"]
    assert everything["cluster"] == "local"
    shown = get(ended.home, "/api/v1/questions", cluster="far")
    assert [cluster["name"] for cluster in shown["clusters"]] == ["far"]
    assert shown["cluster"] == "far"
    assert {**everything, "clusters": [], "cluster": ""} == {**shown, "clusters": [], "cluster": ""}


def test_tasks_of_the_catalog(ended: Ended) -> None:
    tasks = {task["name"]: task for task in get(ended.home, "/api/v1/tasks")["tasks"]}
    assert set(tasks["digits_resnet"]) == {"name", "title", "presets", "backends"}
    assert {"tiny"} <= set(tasks["digits_resnet"]["presets"])
    assert {"gloo", "mpi"} <= set(tasks["digits_resnet"]["backends"])
    assert tasks["digits_resnet"]["title"]


def test_clusters_with_their_states(ended: Ended) -> None:
    local = {"name": "local", "provider": "local", "state": "ready"}
    far = {"name": "far", "provider": "attached", "state": "ready"}
    assert get(ended.home, "/api/v1/clusters") == {"clusters": [local, far]}
    assert get(ended.home, "/api/v1/clusters", cluster="far") == {"clusters": [far]}


def test_prometheus_is_told_the_version_of_its_format(ended: Ended) -> None:
    answer = respond(ended.home, "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"mlbench_runs_total 3.0\n" in answer.body


def test_the_api_describes_itself(ended: Ended) -> None:
    assert get(ended.home, "/api/v1/openapi.json")["openapi"] == "3.1.0"


# --- acting ---------------------------------------------------------------------------------------------------------


def test_a_run_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = give(monkeypatch, 0)
    wanted = {"run": "study-2", "outcome": "cancelled", "summary": "It was stopped."}
    assert get(Path("/none"), "/api/v1/runs/study-2/cancel", "POST") == wanted
    assert handle.asked == ["cancel"]


def test_a_run_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = give(monkeypatch, 0)
    assert get(Path("/none"), "/api/v1/runs/study-2", "DELETE") == {"run": "study-2", "deleted": True}
    assert handle.asked == ["delete"]


def test_an_experiment_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(0)
    monkeypatch.setattr(rest, "find_experiment", lambda *_: handle)
    assert get(Path("/none"), "/api/v1/experiments/study/cancel", "POST") == {"experiment": "study"}
    assert handle.asked == ["cancel"]


# --- following ------------------------------------------------------------------------------------------------------


def test_events_of_a_run_are_a_stream(ended: Ended) -> None:
    answer = respond(ended.home, "/api/v1/runs/study-1/events")
    assert (answer.status_code, answer.media_type) == (200, "text/event-stream")
    with pytest.raises(NotFoundError):
        respond(ended.home, "/api/v1/runs/nobody/events")


def test_a_stream_too_many_is_refused_before_it_begins(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_cli.server.live.MAX_FOLLOWERS", 0)
    with pytest.raises(TooManyFollowers):
        respond(ended.home, "/api/v1/runs/study-1/events")
