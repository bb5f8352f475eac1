"""A remote dashboard: which addresses are taken, where the token goes, and which error each answer stands for."""

import http.client
import io
import json
import ssl
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.api.dashboard import RemoteDashboard
from mlbench_cli.errors import (
    CannotTellError,
    CredentialError,
    DeadlineError,
    MlbenchError,
    NotFoundError,
    UnreachableError,
    UsageError,
)

URL = "https://board.example:8443/x/?token=secret"


class Web:
    """Answers every request with the same text, or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: Any = b"{}"
        self.length: str | None = None
        self.asked: list[urllib.request.Request] = []
        self.handlers: tuple[Any, ...] = ()

        def build(*handlers: Any) -> "Web":
            self.handlers = handlers
            return self

        monkeypatch.setattr(urllib.request, "build_opener", build)
        # Without reading the certificates of this machine, which takes long.
        monkeypatch.setattr(ssl, "create_default_context", lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        monkeypatch.delenv("MLBENCH_DASHBOARD_TOKEN", raising=False)

    def open(self, request: urllib.request.Request, timeout: float) -> Any:
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        found: Any = io.BytesIO(self.answer)
        found.headers = {} if self.length is None else {"Content-Length": self.length}
        return found


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    return Web(monkeypatch)


def refuse(code: int, body: bytes = b"", reason: str = "Reason") -> urllib.error.HTTPError:
    return urllib.error.HTTPError(URL, code, reason, Message(), io.BytesIO(body))


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("web")
@pytest.mark.parametrize(
    ("url", "host", "is_exposed"),
    [
        ("https://board.example/?token=t", "board.example", False),
        ("http://board.example:80/?token=t", "board.example:80", True),
        ("board.example:8080?token=t", "board.example:8080", True),
        ("http://127.0.0.1:1/?token=t", "127.0.0.1:1", False),
        ("http://localhost/?token=t", "localhost", False),
        ("http://[::1]:1/?token=t", "[::1]:1", False),
        ("http://board.example/t/abc", "board.example", True),
        ("http://board.example/t/", "board.example", True),
    ],
)
def test_addresses_of_dashboards(url: str, host: str, is_exposed: bool) -> None:
    found = RemoteDashboard(url)
    assert (found.host, found.is_exposed) == (host, is_exposed)


@pytest.mark.usefixtures("web")
@pytest.mark.parametrize(
    "url",
    [
        *("ftp://board?token=t", "http://?token=t", "http://b:99999/?token=t", "http://me:pw@b/?token=t"),
        *("http://bä/?token=t", "http://[x/?token=t"),
    ],
)
def test_what_is_no_address_of_a_dashboard(url: str) -> None:
    with pytest.raises(UsageError, match="--dashboard-url is not the URL of a dashboard"):
        RemoteDashboard(url)


def test_a_token_is_needed(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CredentialError, match="The dashboard needs a token"):
        RemoteDashboard("https://board.example/x")
    monkeypatch.setenv("MLBENCH_DASHBOARD_TOKEN", "other")
    RemoteDashboard("https://board.example").get("runs")
    RemoteDashboard(URL).get("runs")
    tokens = [request.get_header("Authorization") for request in web.asked]
    assert tokens == ["Bearer other", "Bearer secret"]
    monkeypatch.delenv("MLBENCH_DASHBOARD_TOKEN")
    RemoteDashboard("https://board.example/t/abc").get("runs")
    assert web.asked[-1].get_header("Authorization") is None
    assert web.asked[-1].full_url == "https://board.example/t/abc/api/v1/runs"


# --- questions --------------------------------------------------------------------------------------------------------


def test_a_question_has_its_path_and_query(web: Web) -> None:
    web.answer = b'{"runs": []}'
    assert RemoteDashboard(URL).get("runs/a b%/logs", rank=0, state=None, task=["x", "y"]) == {"runs": []}
    (request,) = web.asked
    assert request.full_url == "https://board.example:8443/x/api/v1/runs/a%20b%25/logs?rank=0&task=x&task=y"
    assert (request.get_method(), request.data) == ("GET", None)
    assert request.get_header("Accept") == "application/json"
    RemoteDashboard(URL).get("runs")
    assert web.asked[-1].full_url == "https://board.example:8443/x/api/v1/runs"


def test_a_document_is_posted_as_json(web: Web) -> None:
    RemoteDashboard(URL).post("runs", {"name": "demo"}, check="true")
    RemoteDashboard(URL).post("runs/demo/cancel")
    first, second = web.asked
    assert (first.get_method(), first.data) == ("POST", b'{"name": "demo"}')
    assert first.full_url.endswith("/api/v1/runs?check=true")
    assert first.get_header("Content-type") == "application/json"
    assert second.data == b"{}"


def test_a_redirect_is_not_followed_with_the_token(web: Web) -> None:
    RemoteDashboard(URL).get("runs")
    redirects = web.handlers[0]()
    assert redirects.redirect_request(web.asked[0], None, 302, "Found", {}, "https://elsewhere") is None


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, UsageError),
        (401, CredentialError),
        (403, CredentialError),
        (404, NotFoundError),
        (405, CredentialError),
        (409, CannotTellError),
        (413, UsageError),
        (502, UnreachableError),
        (503, UnreachableError),
        (504, DeadlineError),
        (500, MlbenchError),
        (302, MlbenchError),
    ],
)
def test_each_status_is_an_error_with_the_servers_words(web: Web, code: int, kind: type[MlbenchError]) -> None:
    web.answer = refuse(code, json.dumps({"message": "It\nfailed.", "hint": "Wait."}).encode())
    with pytest.raises(MlbenchError) as caught:
        RemoteDashboard(URL).get("runs")
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.hint) == ("board.example:8443: It failed.", "Wait.")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b"3"])
def test_an_error_without_words_has_its_number(web: Web, body: bytes) -> None:
    web.answer = refuse(404, body, "Not\nFound")
    with pytest.raises(NotFoundError, match=r"board\.example:8443: It answered 404 Not Found\.") as caught:
        RemoteDashboard(URL).get("runs")
    assert caught.value.hint is None


def test_a_hint_that_is_no_text_is_left_out(web: Web) -> None:
    web.answer = refuse(404, b'{"message": "No.", "hint": 3}')
    with pytest.raises(NotFoundError) as caught:
        RemoteDashboard(URL).get("runs")
    assert caught.value.hint is None


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b"3", b"\xff"])
def test_what_is_no_document_is_no_dashboard(web: Web, answer: bytes) -> None:
    web.answer = answer
    with pytest.raises(UnreachableError, match="does not answer like a dashboard of mlbench"):
        RemoteDashboard(URL).get("runs")


@pytest.mark.parametrize(
    ("error", "words", "hint"),
    [
        (urllib.error.URLError("Connection refused"), "Connection refused", None),
        (TimeoutError(), "TimeoutError", None),
        (http.client.BadStatusLine("x"), "x", None),
        (
            urllib.error.URLError("[SSL: CERTIFICATE_VERIFY_FAILED]"),
            "[SSL: CERTIFICATE_VERIFY_FAILED]",
            "SSL_CERT_FILE=ca.pem names its certificate authority.",
        ),
    ],
)
def test_a_dashboard_that_cannot_be_reached(web: Web, error: Exception, words: str, hint: str | None) -> None:
    web.answer = error
    with pytest.raises(UnreachableError) as caught:
        RemoteDashboard(URL).get("runs")
    assert caught.value.message == f"The dashboard at board.example:8443 cannot be reached: {words}."
    assert caught.value.hint == hint


@pytest.mark.parametrize("length", [None, "7", "unknown"])
def test_an_archive_is_written_whole(web: Web, tmp_path: Path, length: str | None) -> None:
    web.answer, web.length = b"archive", length
    assert RemoteDashboard(URL).download("a/b", tmp_path / "x.zip") == 7
    assert (tmp_path / "x.zip").read_bytes() == b"archive"
    assert web.asked[0].full_url == "https://board.example:8443/x/api/v1/runs/a%2Fb/archive"


@pytest.mark.parametrize("length", ["8", "6"])
def test_an_archive_that_is_cut_off_leaves_no_file(web: Web, tmp_path: Path, length: str) -> None:
    web.answer, web.length = b"archive", length
    with pytest.raises(UnreachableError, match=f"The connection broke after 7 of {length} bytes"):
        RemoteDashboard(URL).download("a", tmp_path / "x.zip")
    assert list(tmp_path.iterdir()) == []


def test_an_archive_that_cannot_be_written_says_why(web: Web, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x\.zip cannot be written: No such file or directory\."):
        RemoteDashboard(URL).download("a", tmp_path / "no" / "x.zip")
    web.answer = ConnectionResetError("reset")
    with pytest.raises(UnreachableError):
        RemoteDashboard(URL).download("a", tmp_path / "x.zip")
