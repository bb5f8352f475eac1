"""What the client sends to an API server and what it makes of the answers, with connections that are the test's own."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3
import websocket
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import ws_client

from mlbench_cli.errors import CredentialError
from mlbench_cli.kube import api
from mlbench_cli.kube.api import (
    AccessDenied,
    Api,
    ApiError,
    Expired,
    NodeUnreachable,
    ObjectNotFound,
    RequestRejected,
    ServerUnreachable,
    error_of,
)
from tests.fakes.clock import Clock

POD = "/api/v1/namespaces/n/pods/p"
REFUSED = urllib3.exceptions.NewConnectionError(None, "Connection refused")  # type: ignore[arg-type]


class Answer(SimpleNamespace):
    """One answer of a server; `drained` once nobody wants its content."""

    def __init__(self, status: int = 200, data: bytes = b"{}", **headers: str) -> None:
        super().__init__(status=status, data=data, headers={key.replace("_", "-"): headers[key] for key in headers})
        self.drained = False

    def drain_conn(self) -> None:
        self.drained = True


class Clocks(Clock):
    """Its wall clock is the same as the monotonic one."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.pauses: list[float] = []

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.pauses.append(seconds)


class Lab:
    """A client whose requests get `answers`, one after the other, and the last one again and again."""

    def __init__(self, clock: Clocks) -> None:
        self.clock = clock
        self.sent: list[Any] = []
        self.answers: list[Answer | Exception] = [Answer()]
        self.discarded: list[Any] = []
        self.tokens = ["first", "second", "third"]
        self.certificate: str | None = None
        self.source: Any = SimpleNamespace(discard=self._discard)

    def client(self, retry_seconds: float | None = None, *, is_anonymous: bool = False) -> Api:
        if is_anonymous:
            self.source, self.tokens = None, []
        settings = SimpleNamespace(
            cert_file=self.certificate,
            api_key={"BearerToken": f"Bearer {self.tokens[0]}"} if self.tokens else {},
            get_api_key_with_prefix=lambda name: f"Bearer {self.tokens[0]}" if self.tokens else None,
        )
        endpoint: Any = SimpleNamespace(server="https://c", token=self.source, configuration=lambda: settings)
        found = Api(endpoint, retry_seconds)
        found._client = lambda configuration, certificate: SimpleNamespace(request=self._request)  # type: ignore[method-assign]
        return found

    def _discard(self, value: object) -> None:
        self.discarded.append(value)
        if isinstance(value, str):
            self.tokens.pop(0)

    def _request(self, method: str, url: str, **more: Any) -> Any:
        self.sent.append((method, url, more))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(response=answer)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    clock = Clocks(100.0)
    monkeypatch.setattr("mlbench_cli.kube.api.time", clock)
    monkeypatch.setattr("mlbench_cli.kube.api.random.uniform", lambda low, high: (low + high) / 2)
    return Lab(clock)


# --- requests -------------------------------------------------------------------------------------------------------


def test_a_read_has_a_credential_and_limits_of_time(lab: Lab) -> None:
    lab.answers = [Answer(data=b'{"items": []}')]
    assert lab.client().get(POD, pretty=True, limit=None) == {"items": []}
    headers = {"Accept": "application/json", "User-Agent": "mlbench", "authorization": "Bearer first"}
    assert lab.sent == [
        ("GET", f"https://c{POD}?pretty=true", {"headers": headers, "body": None, "_request_timeout": (10.0, 30.0)})
    ]


@pytest.mark.parametrize(
    ("method", "kind", "call"),
    [
        ("POST", "application/json", Api.create),
        ("PATCH", "application/merge-patch+json", Api.patch),
    ],
)
def test_a_change_says_what_kind_of_document_it_is(
    lab: Lab, method: str, kind: str, call: Callable[..., dict[str, Any]]
) -> None:
    lab.answers = [Answer(201, b'{"kind": "Pod"}')]
    assert call(lab.client(), POD, {"a": 1}) == {"kind": "Pod"}
    ((sent, _, more),) = lab.sent
    assert (sent, more["headers"]["Content-Type"], more["body"]) == (method, kind, {"a": 1})


@pytest.mark.parametrize(
    ("grace", "extra"), [(None, {}), (0, {"gracePeriodSeconds": 0}), (7, {"gracePeriodSeconds": 7})]
)
def test_a_deletion_is_a_document_of_kubernetes(lab: Lab, grace: int | None, extra: dict[str, int]) -> None:
    assert lab.client().delete(POD, grace, labelSelector="a=b") is True
    ((method, url, more),) = lab.sent
    assert (method, url) == ("DELETE", f"https://c{POD}?labelSelector=a%3Db")
    assert more["body"] == {
        "kind": "DeleteOptions",
        "apiVersion": "v1",
        "propagationPolicy": "Background",
        **extra,
    }


def test_what_is_not_there_need_not_be_deleted(lab: Lab) -> None:
    lab.answers = [Answer(404)]
    assert lab.client().delete(POD) is False
    lab.answers = [Answer(409)]
    with pytest.raises(RequestRejected):
        lab.client().delete(POD)


@pytest.mark.parametrize(("content", "found"), [(b"", {}), (b"[]", {}), (b'"text"', {}), (b'{"a": null}', {"a": None})])
def test_an_answer_is_an_object_or_nothing(lab: Lab, content: bytes, found: dict[str, Any]) -> None:
    lab.answers = [Answer(data=content)]
    assert lab.client().get("/") == found


def test_an_answer_that_is_no_json_is_quoted_as_far_as_it_helps(lab: Lab) -> None:
    lab.answers = [Answer(data=b"<" * 1000)]
    with pytest.raises(ApiError) as caught:
        lab.client().get("/")
    assert caught.value.message == f"The cluster answered with something other than JSON: {b'<' * 100!r}"


@pytest.mark.parametrize(("status", "is_fine"), [(200, True), (201, True), (299, True), (300, False), (304, False)])
def test_only_statuses_below_300_are_success(lab: Lab, status: int, is_fine: bool) -> None:
    lab.answers = [Answer(status)]
    if is_fine:
        assert lab.client().get("/") == {}
    else:
        with pytest.raises(ApiError):
            lab.client().get("/")


# --- retries --------------------------------------------------------------------------------------------------------


def test_a_request_is_retried_for_a_quarter_of_a_minute(lab: Lab) -> None:
    lab.answers = [Answer(503)]
    with pytest.raises(ServerUnreachable):
        lab.client().get("/")
    assert lab.clock.pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]  # 11.2 s; 5 s more would be too many
    assert len(lab.sent) == 7


@pytest.mark.parametrize(("patience", "requests"), [(0.0, 1), (0.19, 1), (0.2, 2), (0.61, 3)])
def test_a_caller_may_have_less_patience(lab: Lab, patience: float, requests: int) -> None:
    lab.clock.now = 0.0
    lab.answers = [REFUSED]
    with pytest.raises(ServerUnreachable):
        lab.client(1000.0).request("GET", "/", retry_seconds=patience)
    assert len(lab.sent) == requests
    lab.sent.clear()
    lab.clock.now = 0.0
    with pytest.raises(ServerUnreachable):
        lab.client(patience).request("GET", "/")
    assert len(lab.sent) == requests


@pytest.mark.parametrize(
    ("header", "pause"), [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("soon", 0.2), ("", 0.2), ("15", 15.0), ("16", None)]
)
def test_a_server_says_when_to_come_again(lab: Lab, header: str, pause: float | None) -> None:
    lab.answers = [Answer(429, Retry_After=header), Answer()]
    if pause is None:
        with pytest.raises(ServerUnreachable):
            lab.client().get("/")
    else:
        assert lab.client().get("/") == {}
    assert lab.clock.pauses == ([] if pause is None else [pause])


def test_pauses_differ_by_up_to_a_half_so_that_clients_do_not_come_together(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        asked.append((low, high))
        return high

    monkeypatch.setattr("mlbench_cli.kube.api.random.uniform", uniform)
    lab.answers = [Answer(500), Answer(502), Answer()]
    lab.client().get("/")
    assert asked == [(0.5, 1.5), (0.5, 1.5)]
    assert lab.clock.pauses == pytest.approx([0.3, 0.6])


# --- clocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("date", "ahead"),
    [
        ("Thu, 01 Jan 1970 00:01:45 GMT", 0.0),
        ("Thu, 01 Jan 1970 00:01:46 GMT", 6.0),
        ("Thu, 01 Jan 1970 00:01:35 GMT", 0.0),
        ("Thu, 01 Jan 1970 00:01:34 GMT", -6.0),
        ("yesterday", 60.0),  # as known before
        ("", 60.0),
    ],
)
def test_the_servers_clock_is_read_from_its_answers(lab: Lab, date: str, ahead: float) -> None:
    client = lab.client()
    lab.answers = [Answer(Date="Thu, 01 Jan 1970 00:02:40 GMT"), Answer(Date=date)]
    assert client.server_ahead == 0.0
    client.get("/")
    client.get("/")
    assert client.server_ahead == ahead


# --- credentials ----------------------------------------------------------------------------------------------------


def test_a_rejected_token_is_renewed_once(lab: Lab) -> None:
    rejected = Answer(401)
    lab.answers = [rejected, Answer()]
    lab.client().get("/")
    assert [more["headers"]["authorization"] for _, _, more in lab.sent] == ["Bearer first", "Bearer second"]
    assert (lab.discarded, rejected.drained) == (["first"], True)


def test_a_token_that_is_rejected_again_ends_the_request(lab: Lab) -> None:
    lab.answers = [Answer(401, b'{"message": "Unauthorized", "reason": "Unauthorized"}')]
    with pytest.raises(AccessDenied) as caught:
        lab.client().get("/api")
    assert (len(lab.sent), lab.discarded) == (2, ["first"])
    assert caught.value.message == 'The cluster refused GET /api: "Unauthorized" (401 Unauthorized).'
    assert (caught.value.hint, caught.value.status) == ("Log in to the cluster again.", 401)


def test_without_a_credential_there_is_nothing_to_renew(lab: Lab) -> None:
    lab.answers = [Answer(401)]
    with pytest.raises(AccessDenied):
        lab.client(is_anonymous=True).get("/")
    ((_, _, more),) = lab.sent
    assert "authorization" not in more["headers"]


def test_a_rejected_certificate_is_renewed_with_its_token(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "pem").write_bytes(b"CERTIFICATE")
    lab.certificate = str(tmp_path / "pem")
    lab.answers = [Answer(401), Answer()]
    lab.client().get("/")
    assert lab.discarded == ["first", b"CERTIFICATE"]


def test_a_certificate_that_tls_refuses_is_renewed_once(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "pem").write_bytes(b"CERTIFICATE")
    lab.certificate = str(tmp_path / "pem")
    lab.answers = [ApiException(status=0, reason="SSLError\ncertificate expired"), Answer()]
    assert lab.client().get("/") == {}
    assert lab.discarded == [b"CERTIFICATE"]
    lab.answers = [ApiException(status=0, reason="SSLError\ncertificate expired")]
    with pytest.raises(ServerUnreachable) as caught:
        lab.client(0.0).get("/")
    assert caught.value.message == "The cluster at https://c does not answer: certificate expired"


# --- who does not answer --------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named_with_what_to_check(lab: Lab) -> None:
    lab.answers = [urllib3.exceptions.ProtocolError("x" * 1000)]
    with pytest.raises(ServerUnreachable) as caught:
        lab.client(0.0).get(POD)
    error = caught.value
    assert error.message == f"The cluster at https://c does not answer: {'x' * 300}"
    assert error.hint == "Is the cluster running, and is this machine allowed to reach it?"
    assert (error.status, error.reason, error.details) == (0, "Unreachable", {"status": 0, "reason": "Unreachable"})


@pytest.mark.parametrize(
    ("words", "hint"),
    [("certificate verify failed", "is not trusted"), ("Unable to connect to proxy", "check HTTPS_PROXY")],
)
def test_a_connection_that_trust_or_a_proxy_prevents_is_explained(lab: Lab, words: str, hint: str) -> None:
    lab.answers = [urllib3.exceptions.ProtocolError(words)]
    with pytest.raises(ServerUnreachable) as caught:
        lab.client(0.0).get(POD)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


@pytest.mark.parametrize("version", [200, 401, 503])
@pytest.mark.parametrize("what", ["log", "exec", "log?follow=true"])
def test_a_node_that_does_not_answer_is_told_from_its_server(lab: Lab, version: int, what: str) -> None:
    """A server that answers anything answers."""
    lab.answers = [REFUSED, Answer(version)]
    with pytest.raises(NodeUnreachable) as caught:
        lab.client(0.0).get(f"{POD}/{what}")
    assert caught.value.message.startswith("The node of p does not answer: ")
    assert (caught.value.hint, caught.value.reason) == ("kubectl get nodes", "NodeUnreachable")
    assert lab.sent[1][:2] == ("GET", "https://c/version")
    assert lab.sent[1][2]["_request_timeout"] == (10.0, 5.0)


@pytest.mark.parametrize("path", [f"{POD}/log", f"{POD}/logs", POD, "/api/v1/nodes/n/log"])
def test_a_server_that_answers_nothing_is_not_a_node_that_does_not(lab: Lab, path: str) -> None:
    lab.answers = [REFUSED]
    with pytest.raises(ServerUnreachable):
        lab.client(0.0).get(path)
    assert len(lab.sent) == (2 if path.endswith("/p/log") else 1)


def test_a_credential_that_cannot_be_had_is_no_answer_of_the_server(lab: Lab) -> None:
    lab.answers = [REFUSED, CredentialError("no token")]
    with pytest.raises(ServerUnreachable):
        lab.client(0.0).get(f"{POD}/log")


# --- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_is_handed_over_unread_with_its_own_limit(lab: Lab) -> None:
    lab.answers = [Answer()]
    opened: Any = lab.client().stream(f"{POD}/log", 65.0, follow=True)
    assert (opened is lab.answers[0], opened.drained) == (True, False)
    ((method, url, more),) = lab.sent
    assert (method, url, more["body"]) == ("GET", f"https://c{POD}/log?follow=true", None)
    assert more["_request_timeout"] == (10.0, 65.0)
    assert "Content-Type" not in more["headers"]


@pytest.mark.parametrize(("header", "seconds"), [("3", 3.0), ("", None)])
def test_a_stream_is_not_retried_and_says_when_to_come_again(lab: Lab, header: str, seconds: float | None) -> None:
    lab.answers = [Answer(429, b'{"message": "slowly"}', Retry_After=header)]
    with pytest.raises(ServerUnreachable) as caught:
        lab.client().stream(POD, 65.0)
    assert (len(lab.sent), lab.clock.pauses) == (1, [])
    assert caught.value.details == {"status": 429, "reason": "", "retry_after": seconds}


def test_a_stream_that_does_not_begin_is_not_retried(lab: Lab) -> None:
    lab.answers = [REFUSED]
    with pytest.raises(ServerUnreachable):
        lab.client().stream(POD, 65.0)
    assert (len(lab.sent), lab.clock.pauses) == (1, [])
    lab.answers = [Answer(410)]
    with pytest.raises(Expired):
        lab.client().stream(POD, 65.0)


# --- websockets -----------------------------------------------------------------------------------------------------


class Sockets:
    """Websockets that open, or do not: `ends` are the errors of the first attempts."""

    def __init__(self, *ends: Exception) -> None:
        self.ends = list(ends)
        self.asked: list[Any] = []

    def open(self, configuration: object, url: str, headers: Mapping[str, str]) -> str:
        self.asked.append((url, dict(headers)))
        if self.ends:
            raise self.ends.pop(0)
        return "connection"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "Sockets":
        monkeypatch.setattr(ws_client, "create_websocket", self.open)
        return self


def refuse(status: int, body: bytes = b"") -> websocket.WebSocketBadStatusException:
    return websocket.WebSocketBadStatusException("Handshake status %d %s", status, "", {}, body)


QUERY = [("container", "main"), ("command", "a b")]


def test_a_websocket_is_asked_for_with_protocol_and_credential(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = Sockets().install(monkeypatch)
    connection: Any = lab.client().open_websocket(f"{POD}/exec", QUERY, ["v4.channel.k8s.io", "v5"])
    assert connection == "connection"
    headers = {"sec-websocket-protocol": "v4.channel.k8s.io,v5", "authorization": "Bearer first"}
    assert sockets.asked == [(f"wss://c{POD}/exec?container=main&command=a+b", headers)]


def test_an_anonymous_websocket_has_no_credential(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = Sockets().install(monkeypatch)
    lab.client(is_anonymous=True).open_websocket(f"{POD}/exec", QUERY, ["v4"])
    assert sockets.asked[0][1] == {"sec-websocket-protocol": "v4"}


@pytest.mark.parametrize(("ends", "is_open"), [((refuse(401),), True), ((refuse(401), refuse(401)), False)])
def test_a_websocket_renews_its_token_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, ends: tuple[Exception, ...], is_open: bool
) -> None:
    sockets = Sockets(*ends).install(monkeypatch)
    if is_open:
        lab.client().open_websocket(f"{POD}/exec", QUERY, ["v4"])
    else:
        with pytest.raises(AccessDenied):
            lab.client().open_websocket(f"{POD}/exec", QUERY, ["v4"])
    assert [headers["authorization"] for _, headers in sockets.asked] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        (refuse(404, b'{"message": "pods \\"p\\" not found", "reason": "NotFound"}'), ObjectNotFound, "(404 NotFound)"),
        (refuse(500, b'{"message": "error dialing backend"}'), NodeUnreachable, f"GET {POD}/exec"),
        (refuse(403), AccessDenied, "(403)"),
        (OSError("Connection reset by peer"), NodeUnreachable, "Connection reset by peer"),
        (websocket.WebSocketTimeoutException("timed out"), NodeUnreachable, "The node of p does not answer: timed out"),
    ],
)
def test_why_a_websocket_does_not_open_is_told(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, end: Exception, kind: type[ApiError], words: str
) -> None:
    Sockets(end).install(monkeypatch)
    with pytest.raises(kind) as caught:
        lab.client().open_websocket(f"{POD}/exec", QUERY, ["v4"])
    assert words in caught.value.message


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "path", "hint", "code", "exit_code"),
    [
        (401, "/x", "Log in to the cluster again.", "credentials", 3),
        (403, "/x", "mlbench doctor lists the rights that are needed.", "credentials", 3),
        (404, "/x", None, "not_found", 4),
        (409, "/x", None, "usage", 2),
        (410, "/x", None, "kubernetes_api", 1),
        (418, "/x", None, "kubernetes_api", 1),
        (503, "/x", None, "unreachable", 10),
        (502, f"{POD}/log", None, "node_unreachable", 10),
    ],
)
def test_an_error_has_the_servers_words_and_says_how_to_go_on(
    status: int, path: str, hint: str | None, code: str, exit_code: int
) -> None:
    error = error_of(status, b'{"message": "its words", "reason": "Why"}', f"GET {path}", 7.5)
    document = error.to_dict()["error"]
    assert document["message"] == f'The cluster refused GET {path}: "its words" ({status} Why).'
    assert (document["hint"], document["code"], error.exit_code) == (hint, code, exit_code)
    retry = {} if status in (401, 403, 404, 409) else {"retry_after": 7.5}
    assert document["details"] == {"status": status, "reason": "Why", **retry}
    assert (error.status, error.reason) == (status, "Why")


@pytest.mark.parametrize(
    ("content", "quoted"),
    [
        (b"", ""),
        (b"  <html>\n\t <b>502</b>  ", "<html> <b>502</b>"),
        (b'{"kind": "Status"}', '{"kind": "Status"}'),
        (b"[1]", "[1]"),
        (b"x" * 301, "x" * 300),
        (b"\xff", "\ufffd"),
    ],
)
def test_an_answer_without_a_message_is_quoted(content: bytes, quoted: str) -> None:
    assert error_of(418, content, "GET /x").message == f'The cluster refused GET /x: "{quoted}" (418).'


def test_a_used_up_quota_says_where_to_look() -> None:
    error = error_of(403, '{"message": "exceeded quota: gpus"}', "POST /x")
    assert (error.hint, error.reason) == ("kubectl describe resourcequota", "")


# --- connections ----------------------------------------------------------------------------------------------------


def test_each_certificate_has_its_connections_and_closing_drops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    class Pool:
        def __init__(self, configuration: object) -> None:
            self.pool_manager = SimpleNamespace(connection_pool_kw={})

        def close(self) -> None:
            closed.append(id(self))

    monkeypatch.setattr("kubernetes.client.rest.RESTClientObject", Pool)
    monkeypatch.setattr(api, "create_context", lambda configuration: f"context of {configuration}")
    endpoint: Any = SimpleNamespace(server="https://c", token=None)
    with Api(endpoint) as client:
        first, second = client._client("settings", None), client._client("settings", "/pem")
        assert first is not second
        assert client._client("others", "/pem") is second
        assert second.pool_manager.connection_pool_kw == {"ssl_context": "context of settings"}
    assert sorted(closed) == sorted([id(first), id(second)])
    client.close()
    assert len(closed) == 2
    assert client._client("settings", None) is not first


def test_a_credential_is_made_once_and_asked_for_with_each_request(lab: Lab) -> None:
    """The official client renews it in `get_api_key_with_prefix`, but not while a configuration is made."""
    client = lab.client()
    client.get("/")
    lab.tokens = ["renewed"]
    client.get("/")
    assert [more["headers"]["authorization"] for _, _, more in lab.sent] == ["Bearer first", "Bearer renewed"]
    assert json.loads(json.dumps(lab.sent[0][2]["headers"])) == lab.sent[0][2]["headers"]
