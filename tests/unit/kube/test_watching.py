"""How the pods of a run are followed: lists, changes, pauses, and what ends the watch for good."""

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3

from mlbench_cli.kube.api import AccessDenied, ApiError, Expired, ObjectNotFound, ServerUnreachable
from mlbench_cli.kube.watch import GONE, PodWatch, list_pods
from tests.fakes.clock import Clock


def pod(name: str, phase: str = "Running") -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {}, "status": {"phase": phase}}


class Server:
    """Answers requests with `pages` and streams with `lines`; notes what was asked."""

    def __init__(self) -> None:
        self.pages: list[dict[str, Any]] = []
        self.lines: list[Any] = []
        self.asked: list[Any] = []
        self.closed = 0

    def request(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        self.asked.append((method, path, more))
        return self.pages.pop(0)

    def stream(self, path: str, **more: Any) -> Any:
        self.asked.append(("WATCH", path, more))
        data = b"".join(json.dumps(line).encode() + b"\n" for line in self.lines)
        return SimpleNamespace(stream=lambda size: iter([data]), close=self._close, shutdown=self._close)

    def _close(self) -> None:
        self.closed += 1


def make_watch(server: Any) -> PodWatch:
    """A watch without its thread."""
    watch = object.__new__(PodWatch)
    watch._api, watch._path, watch._selector, watch._period = server, "/pods", "run=r", 15.0
    watch._pods, watch._changed, watch._version = {}, threading.Condition(), 0
    watch.listed, watch.silent_since, watch.trouble = float("-inf"), None, None
    watch._closed = watch._relist = False
    watch._answer = watch._failure = None
    return watch


# --- lists ----------------------------------------------------------------------------------------------------------


def test_a_list_is_read_page_by_page_and_names_where_to_go_on() -> None:
    server = Server()
    server.pages = [
        {"items": [pod("a")], "metadata": {"resourceVersion": "7", "continue": "more"}},
        {"items": [pod("b")], "metadata": {"resourceVersion": "8"}},
    ]
    watch = make_watch(server)
    assert watch._list() == "8"
    assert [item["metadata"]["name"] for item in watch.pods()] == ["a", "b"]
    assert watch.version == 1
    first = {"labelSelector": "run=r", "limit": 100, "continue": None}
    assert [more["params"] for _, _, more in server.asked] == [first, {**first, "continue": "more"}]
    assert {(method, path, more["retry_seconds"]) for method, path, more in server.asked} == {("GET", "/pods", 0)}


def test_only_a_change_or_the_first_list_is_told() -> None:
    server = Server()
    watch = make_watch(server)
    server.pages = [{}, {"items": []}, {"items": [pod("a")]}, {"items": [pod("a")]}, {"items": [pod("a", "Failed")]}]
    assert watch._list() == ""
    assert watch.version == 1  # there are none, which is known now
    for version in (1, 2, 2, 3):
        watch._list()
        assert watch.version == version


def test_a_pod_that_is_not_listed_any_more_keeps_its_last_state() -> None:
    server = Server()
    watch = make_watch(server)
    server.pages = [{"items": [pod("a"), pod("b")]}, {"items": [pod("b")]}, {"items": [pod("b")]}]
    for _ in range(3):
        watch._list()
    found = {item["metadata"]["name"]: item for item in watch.pods()}
    assert found == {"a": {**pod("a"), GONE: True}, "b": pod("b")}
    assert watch.version == 2


def test_a_list_that_comes_ends_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1000.0)
    monkeypatch.setattr("mlbench_cli.kube.watch.time", clock)
    server = Server()
    watch = make_watch(server)
    watch._note_silence(ServerUnreachable("first"))
    clock.now = 1010.0
    watch._note_silence(trouble := ServerUnreachable("second"))
    assert (watch.silent_since, watch.trouble) == (1000.0, trouble)
    server.pages = [{}]
    watch._list()
    assert (watch.silent_since, watch.trouble, watch.listed) == (None, None, 1010.0)


def test_of_a_pod_only_what_tells_something_is_kept() -> None:
    server: Any = Server()
    full = {
        "metadata": {
            "name": "a",
            "uid": "u",
            "labels": {"x": "y"},
            "creationTimestamp": "c",
            "deletionTimestamp": "d",
            "managedFields": ["long"],
            "annotations": {},
        },
        "spec": {"nodeName": "n", "containers": ["long"]},
        "status": {"phase": "Running", "podIP": "10.0.0.1", "podIPs": [], "hostIPs": [], "conditions": []},
    }
    server.pages = [{"items": [full, {}]}]
    assert list_pods(server, "team-a", "run=r") == [
        {
            "metadata": {
                "name": "a",
                "uid": "u",
                "labels": {"x": "y"},
                "creationTimestamp": "c",
                "deletionTimestamp": "d",
            },
            "spec": {"nodeName": "n"},
            "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": []},
        },
        {"metadata": {}, "spec": {}, "status": {}},
    ]
    assert server.asked[0][1] == "/api/v1/namespaces/team-a/pods"


# --- changes --------------------------------------------------------------------------------------------------------


def test_changes_are_applied_until_the_server_ends_the_watch() -> None:
    server = Server()
    watch = make_watch(server)
    server.lines = [
        {"type": "ADDED", "object": pod("a", "Pending")},
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}},
        {"type": "MODIFIED", "object": pod("a")},
        {"type": "ADDED", "object": pod("b")},
        {"type": "DELETED", "object": pod("b", "Failed")},
    ]
    watch._watch("7")
    assert watch.pods() == [pod("a"), {**pod("b", "Failed"), GONE: True}]
    assert (watch.version, server.closed, watch._answer) == (4, 1, None)
    ((_, path, more),) = server.asked
    assert path == "/pods"
    assert more == {
        "read_seconds": 20.0,
        "labelSelector": "run=r",
        "watch": True,
        "resourceVersion": "7",
        "timeoutSeconds": 15,
        "allowWatchBookmarks": True,
    }


@pytest.mark.parametrize(
    ("status", "found"), [({"code": 410, "message": "too old"}, 410), ({"message": "too old"}, 500)]
)
def test_an_error_in_the_stream_ends_it(status: dict[str, Any], found: int) -> None:
    server = Server()
    watch = make_watch(server)
    server.lines = [{"type": "ERROR", "object": status}, {"type": "ADDED", "object": pod("a")}]
    with pytest.raises(ApiError, match="too old") as caught:
        watch._watch("7")
    assert (caught.value.status, watch.pods(), server.closed) == (found, [], 1)


@pytest.mark.parametrize(("attribute", "seen"), [("_relist", 0), ("_closed", 1)])
def test_a_watch_that_is_not_wanted_any_more_reads_no_further(attribute: str, seen: int) -> None:
    server = Server()
    watch = make_watch(server)
    setattr(watch, attribute, True)
    server.lines = [{"type": "ADDED", "object": pod("a")}, {"type": "ADDED", "object": pod("b")}]
    watch._watch("7")
    assert (len(watch.pods()), server.closed) == (seen, 1)


def test_asking_for_a_list_ends_the_stream() -> None:
    server = Server()
    watch = make_watch(server)
    watch.relist()
    assert (watch._relist, server.closed) == (True, 0)
    watch._answer = server.stream("/pods")
    watch.relist()
    assert server.closed == 1
    server.pages = [{}]
    watch._list()
    assert not watch._relist


def test_whoever_waits_hears_of_a_change_or_of_a_failure() -> None:
    watch = make_watch(Server())
    assert watch.wait(0, 0.0) == 0
    watch._apply("ADDED", pod("a"))
    assert watch.wait(0, 60.0) == 1
    watch._closed = True
    assert watch.wait(1, 60.0) == 1
    watch._fail(ApiError("no right to watch"))
    with pytest.raises(ApiError, match="no right to watch"):
        watch.wait(1, 60.0)


# --- what ends it ---------------------------------------------------------------------------------------------------


class Runs:
    """A watch whose rounds end as `ends` says, one after the other; the last one closes it. Notes the pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Exception | float | None) -> None:
        """A number lets so many seconds pass, None is a round that ended well."""
        self.clock = Clock(1000.0)
        monkeypatch.setattr("mlbench_cli.kube.watch.time", self.clock)
        monkeypatch.setattr("mlbench_cli.kube.watch.random.uniform", lambda low, high: high)  # 1.5
        self.watch = make_watch(Server())
        self.pauses: list[float] = []
        self.ends: Iterator[Exception | float | None] = iter(ends)
        self.rounds = 0
        stub: Any = self.watch
        stub._list, stub._watch, stub._sleep = self._list, lambda version: None, self._sleep
        self.watch._run()

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def _list(self) -> str:
        self.rounds += 1
        for end in self.ends:
            if isinstance(end, float):
                self.clock.now += end
            elif end is not None:
                raise end
            else:
                return "7"
        self.watch._closed = True
        return "7"


def unreachable(retry_after: float | None = None) -> ServerUnreachable:
    error = ServerUnreachable("no answer", status=503)
    error.details["retry_after"] = retry_after
    return error


def test_pauses_double_up_to_a_quarter_of_a_minute_and_begin_again_after_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs(monkeypatch, *[unreachable() for _ in range(7)], None, unreachable())
    assert runs.pauses == [0.75, 1.5, 3.0, 6.0, 12.0, 22.5, 22.5, 0.75]  # half a second to 15 s, and jitter
    assert runs.watch._failure is None


def test_a_server_that_says_when_to_come_again_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Runs(monkeypatch, unreachable(7.0), unreachable(0.0), unreachable()).pauses == [7.0, 0.0, 3.0]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 422])
def test_a_refusal_ends_the_watch(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    refusal = ApiError("refused", status=status)
    runs = Runs(monkeypatch, refusal)
    assert (runs.watch._failure, runs.pauses, runs.rounds) == (refusal, [], 1)


@pytest.mark.parametrize("status", [0, 402, 409, 410, 429, 500, 503])
def test_what_may_pass_does_not(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    runs = Runs(monkeypatch, ApiError("it may pass", status=status))
    assert (runs.watch._failure, runs.pauses, runs.rounds) == (None, [0.75], 2)
    assert runs.watch.silent_since is None


@pytest.mark.parametrize(
    ("before", "error", "seconds", "ends"),
    [
        (unreachable(), AccessDenied("refused", status=403), 59.9, False),
        (unreachable(), AccessDenied("refused", status=401), 59.9, False),
        (unreachable(), AccessDenied("refused", status=403), 60.0, True),
        (unreachable(), ObjectNotFound("not there", status=404), 1.0, True),
        (urllib3.exceptions.ProtocolError("cut"), AccessDenied("refused", status=403), 59.9, False),
        (Expired("too old", status=410), AccessDenied("refused", status=403), 1.0, True),
    ],
)
def test_a_server_that_has_just_started_may_refuse_for_a_minute(
    monkeypatch: pytest.MonkeyPatch, before: Exception, error: ApiError, seconds: float, ends: bool
) -> None:
    runs = Runs(monkeypatch, before, seconds, error)
    assert runs.watch._failure == (error if ends else None)


def test_a_silent_server_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, error := unreachable())
    assert (runs.watch.silent_since, runs.watch.trouble) == (1000.0, error)


@pytest.mark.parametrize(
    "error", [urllib3.exceptions.ProtocolError("cut"), OSError("reset"), ValueError("half a line"), KeyError("type")]
)
def test_a_stream_that_breaks_is_opened_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    runs = Runs(monkeypatch, error)
    assert (runs.watch._failure, runs.pauses) == (None, [0.75])


def test_an_error_of_the_program_ends_the_watch_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, ZeroDivisionError("here"))
    assert runs.watch._failure is not None
    assert runs.watch._failure.message == "Watching the pods failed: ZeroDivisionError('here')"
    assert runs.pauses == []


def test_a_watch_is_one_thread_that_ends_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, ended = threading.Event(), threading.Event()

    def run(self: PodWatch) -> None:
        ran.set()
        self._sleep(30.0)
        ended.set()

    monkeypatch.setattr(PodWatch, "_run", run)
    closed: list[int] = []
    access: Any = SimpleNamespace(client=lambda: SimpleNamespace(close=lambda: closed.append(1)))
    watch = PodWatch(access, "team-a", "run=r")
    assert ran.wait(30)
    assert (watch._path, watch.pods(), watch.version) == ("/api/v1/namespaces/team-a/pods", [], 0)
    assert (watch.listed, watch.silent_since, watch.trouble) == (float("-inf"), None, None)
    watch.close()
    assert (ended.is_set(), closed, watch._relist) == (True, [1], True)


def test_a_thread_that_hangs_does_not_keep_the_one_who_closes_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[float] = []
    monkeypatch.setattr(PodWatch, "_run", lambda self: None)
    closed: list[int] = []
    access: Any = SimpleNamespace(client=lambda: SimpleNamespace(close=lambda: closed.append(1)))
    watch = PodWatch(access, "team-a", "run=r")
    watch._thread.join()
    stuck: Any = SimpleNamespace(join=joined.append)
    watch._thread = stuck
    watch.close()
    assert (joined, closed) == ([5], [1])
