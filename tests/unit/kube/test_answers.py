"""What the client makes of an API server's answers, times and clock, without a server."""

import threading
import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import pytest
import websocket

from mlbench_cli.errors import CredentialError, UsageError
from mlbench_cli.kube import api, execute
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import (
    AccessDenied,
    Api,
    ApiError,
    Expired,
    NodeUnreachable,
    ObjectNotFound,
    QuotaExceeded,
    RequestRejected,
    ServerUnreachable,
    error_of,
)
from mlbench_cli.kube.credentials import Credential, CredentialSource, Token
from mlbench_cli.kube.deadline import call_with_deadline
from mlbench_cli.kube.gpudirect import choose_release, explain_unknown_branch
from mlbench_cli.kube.watch import PodWatch, split_lines

PODS = "GET /api/v1/namespaces/n/pods"


@pytest.mark.parametrize(
    ("status", "message", "request_line", "kind"),
    [
        (401, "Unauthorized", PODS, AccessDenied),
        (403, "pods is forbidden", PODS, AccessDenied),
        (403, "exceeded quota: q", PODS, QuotaExceeded),
        (404, "not found", PODS, ObjectNotFound),
        (400, "bad", PODS, RequestRejected),
        (409, "exists", PODS, RequestRejected),
        (422, "invalid", PODS, RequestRejected),
        (410, "too old resource version", PODS, Expired),
        (429, "too many requests", PODS, ServerUnreachable),
        (502, "bad gateway", PODS, ServerUnreachable),
        (503, "starting", PODS, ServerUnreachable),
        (504, "timeout", PODS, ServerUnreachable),
        (500, "etcdserver: leader changed", PODS, ServerUnreachable),
        (500, "apiserver not ready", PODS, ServerUnreachable),
        (500, "failed calling webhook", PODS, ApiError),
        (500, "error dialing backend: timeout", f"{PODS}/p/exec", NodeUnreachable),
        (500, "dial tcp 10.0.0.1:10250: refused", f"{PODS}/p/log?follow=true", NodeUnreachable),
        (502, "anything", f"{PODS}/p/log", NodeUnreachable),
        (503, "starting", f"{PODS}/p/log", ServerUnreachable),
        (500, "error dialing backend: timeout", f"{PODS}/p", ApiError),
    ],
)
def test_a_status_and_its_words_tell_who_does_not_answer(
    status: int, message: str, request_line: str, kind: type[ApiError]
) -> None:
    """Only log and exec are forwarded to a node, and only some errors with 500 pass by themselves."""
    assert type(error_of(status, f'{{"message": "{message}"}}', request_line)) is kind


# --- times and clocks -----------------------------------------------------------------------------------------------


class Server:
    """A connection that gives the same answer to every request, and notes them."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.answer = SimpleNamespace(status=status, data=b"{}", headers=headers or {})
        self.sent: list[tuple[str, str, Any]] = []

    def client(self) -> Api:
        found = Api(SimpleNamespace(server="https://c", token=None))
        found._send = self._send  # type: ignore[method-assign,assignment]
        return found

    def _send(self, method: str, url: str, body: Any, *_: Any) -> Any:
        self.sent.append((method, url, body))
        return self.answer


@pytest.mark.parametrize(("status", "requests"), [(500, 2), (502, 2), (503, 2), (504, 2), (429, 2), (501, 1), (409, 1)])
def test_a_status_that_may_pass_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, status: int, requests: int) -> None:
    waits = iter([True, False])
    monkeypatch.setattr(api._Backoff, "wait", lambda self, retry_after=None: next(waits))
    server = Server(status)
    with pytest.raises(ApiError):
        server.client().get("/version")
    assert len(server.sent) == requests


def test_pauses_between_retries_double_up_to_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("mlbench_cli.kube.api.time.sleep", slept.append)
    monkeypatch.setattr("mlbench_cli.kube.api.random.uniform", lambda low, high: 1.0)
    backoff = api._Backoff(1000.0)
    assert all(backoff.wait() for _ in range(8))
    assert slept == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert backoff.wait(7.0)
    assert slept[-1] == 7.0
    assert not backoff.wait(2000.0)


@pytest.mark.parametrize(("ahead", "counts"), [(3, False), (-3, False), (60, True), (-60, True)])
def test_a_clock_that_nearly_agrees_counts_as_right(ahead: float, counts: bool) -> None:
    """The header Date has whole seconds, and the answer takes a moment."""
    client = Server(200, {"Date": formatdate(time.time() + ahead, usegmt=True)}).client()
    client.get("/version")
    assert (client.server_ahead != 0) is counts
    if counts:
        assert abs(client.server_ahead - ahead) < 2


def test_a_query_is_spelled_as_the_server_reads_it() -> None:
    server = Server(200)
    server.client().get("/x", watch=True, limit=5, labelSelector=None)
    assert server.sent[0][1] == "/x?watch=true&limit=5"


def test_a_deletion_takes_what_belongs_to_the_object_with_it() -> None:
    server = Server(200)
    assert server.client().delete("/x", grace=0) is True
    options = server.sent[0][2]
    assert (options["propagationPolicy"], options["gracePeriodSeconds"]) == ("Background", 0)
    server.client().delete("/x")
    assert "gracePeriodSeconds" not in server.sent[1][2]


# --- credentials ----------------------------------------------------------------------------------------------------


def test_a_credential_is_renewed_at_three_quarters_of_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("mlbench_cli.kube.credentials.time.time", lambda: now[0])
    tokens = iter(["first", "second"])
    source = Token(lambda: (next(tokens), now[0] + 100))
    assert source() == "first"
    now[0] = 1074.9
    assert source() == "first"
    now[0] = 1075.0
    assert source() == "second"


def test_only_the_rejected_credential_is_forgotten() -> None:
    """Another thread may have renewed it already."""
    fetched: list[int] = []

    def fetch() -> Credential:
        fetched.append(1)
        return Credential(token=f"token {len(fetched)}", certificate=b"C", key=b"K")

    source = CredentialSource(fetch)
    assert source() == "token 1"
    source.discard("token 0")
    assert source() == "token 1"
    source.discard("token 1")
    assert source() == "token 2"
    source.discard(b"C\nK")
    assert source() == "token 3"


def test_a_certificate_is_no_token() -> None:
    with pytest.raises(CredentialError, match="has no token"):
        CredentialSource(lambda: Credential(certificate=b"C", key=b"K"))()


@pytest.mark.parametrize("server", ["ftp://c", "https://", "https://c:0", "c:6443", "https://c:x"])
def test_an_address_that_is_no_url_is_refused(server: str) -> None:
    with pytest.raises(UsageError, match="not an http or https URL"):
        Access(server)
    assert Access("https://c:6443").server == "https://c:6443"


# --- waiting and reading --------------------------------------------------------------------------------------------


def test_what_arrives_after_the_deadline_is_discarded() -> None:
    go, discarded = threading.Event(), threading.Event()
    found: list[str] = []

    def discard(late: str) -> None:
        found.append(late)
        discarded.set()

    def work() -> str:
        go.wait(5)
        return "late"

    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        call_with_deadline(work, 0.01, discard=discard)
    go.set()
    assert discarded.wait(5)
    assert found == ["late"]


class Connection:
    """A websocket with these frames."""

    def __init__(self, *frames: bytes) -> None:
        self.frames = [(websocket.ABNF.OPCODE_BINARY, frame) for frame in frames]
        self.recv_data = lambda: self.frames.pop(0)

    def settimeout(self, seconds: float) -> None:
        pass

    def shutdown(self) -> None:
        pass


def test_of_standard_error_the_first_4_kib_are_kept() -> None:
    """A command that complains without end must not fill the client's memory."""
    ends = b'\x03{"status": "Success"}'
    connection = Connection(b"\x02" + b"a" * 3000, b"\x02" + b"b" * 3000, b"\x02ccc", b"\x01out", ends)
    client = SimpleNamespace(open_websocket=lambda *_: connection)
    opened = type("Opened", (), {"__enter__": lambda self: client, "__exit__": lambda *_: None})
    access: Any = SimpleNamespace(client=opened)
    done = execute.execute(access, "n", "p", ["true"])
    assert (done.code, done.stdout, done.stderr) == (0, b"out", "a" * 3000 + "b" * 1096)


def watch_with(pods: int, period: float) -> dict[str, Any]:
    """The parameters of the watch for that many pods."""
    asked: dict[str, Any] = {}
    watch = object.__new__(PodWatch)
    watch._pods = {str(number): {} for number in range(pods)}
    watch._period, watch._path, watch._selector = period, "/pods", "a=b"
    watch._changed, watch._relist, watch._closed = threading.Condition(), True, False
    answer = SimpleNamespace(close=lambda: None)
    watch._api = SimpleNamespace(stream=lambda path, **more: asked.update(more) or answer)  # type: ignore[assignment]
    watch._watch("7")
    return asked


@pytest.mark.parametrize(
    ("pods", "period", "seconds", "silence"),
    [(0, 15.0, 15, 20.0), (250, 15.0, 15, 20.0), (1000, 15.0, 60, 65.0), (1, 0.5, 1, 1.0)],
)
def test_a_watch_of_many_pods_lasts_longer_and_is_given_up_soon_after(
    pods: int, period: float, seconds: int, silence: float
) -> None:
    """`timeoutSeconds` is a whole number: with 0 the server would choose for itself."""
    asked = watch_with(pods, period)
    assert (asked["timeoutSeconds"], asked["read_seconds"]) == (seconds, silence)


def test_lines_are_put_together_again() -> None:
    assert list(split_lines(iter([b"a", b"b\nc\n", b"", b"d\ne"]))) == [b"ab", b"c", b"d"]


@pytest.mark.parametrize(
    ("kind", "branch", "chosen"),
    [
        ("tcpxo", 580, 580),
        ("tcpxo", 594, 580),
        ("tcpxo", 595, 595),
        ("tcpxo", 600, 595),
        ("tcpxo", 535, 580),
        ("tcpxo", None, 580),
        ("gib", 600, 580),
    ],
)
def test_the_newest_plugin_that_the_driver_supports_is_chosen(kind: str, branch: int | None, chosen: int) -> None:
    assert choose_release(kind, branch).branch == chosen
    if branch is not None:
        assert (explain_unknown_branch(kind, branch) is None) is (branch == chosen)
