"""Archives from the web: which addresses are taken, and what each answer of a server means."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlbench_cli.agent.machine import free_port
from mlbench_cli.api import remote_archives
from mlbench_cli.api.remote_archives import fetch_archive, is_url
from mlbench_cli.api.workspace import Workspace
from mlbench_cli.errors import MlbenchError, NotFoundError, UnreachableError, UsageError

DATA = b"PK archive"


class Web(ThreadingHTTPServer):
    """A web server whose paths say how it answers: /404, /whole, /short, /endless, /to/SCHEME."""

    daemon_threads = True
    asked: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Web

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        word = self.path.strip("/")
        if word.isdigit():
            self.send_error(int(word))
            return
        if word.startswith("to-"):
            self.send_response(302)
            self.send_header("Location", f"{word[3:]}://127.0.0.1:{self.server.server_address[1]}/whole")
            self.end_headers()
            return
        self.send_response(200)
        if word != "unsized":
            self.send_header("Content-Length", str(len(DATA) + (1 if word == "short" else 0)))
        self.end_headers()
        self.wfile.write(DATA)


@pytest.fixture
def web() -> Iterator[Web]:
    with Web(("127.0.0.1", 0), Answers) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    made = Workspace(tmp_path / "home")
    yield made
    made.close()


def left(workspace: Workspace) -> list[str]:
    folder = workspace.store.folder / "fetched"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("path", ["whole", "unsized", "to-http"])
def test_an_archive_is_named_by_its_digest(web: Web, workspace: Workspace, path: str) -> None:
    digest = hashlib.sha256(DATA).hexdigest()
    told: list[str] = []
    workspace.notice = told.append
    found = fetch_archive(f"{web.url}/{path}", workspace)
    assert (found.read_bytes(), found.name) == (DATA, f"{digest[:16]}.zip")
    assert told[-1] == f"{found}: {len(DATA)} bytes, SHA-256 {digest}"
    assert left(workspace) == [found.name]


@pytest.mark.parametrize("code", [404, 410])
def test_an_archive_that_the_server_does_not_have_is_not_found(web: Web, workspace: Workspace, code: int) -> None:
    with pytest.raises(NotFoundError, match=f"the server answers {code}"):
        fetch_archive(f"{web.url}/{code}", workspace)
    assert left(workspace) == []


@pytest.mark.parametrize("code", [400, 401, 403, 405, 429, 500, 503])
def test_any_other_refusal_may_be_another_tomorrow(web: Web, workspace: Workspace, code: int) -> None:
    with pytest.raises(UnreachableError, match=f"the server answers {code}"):
        fetch_archive(f"{web.url}/{code}", workspace)
    assert left(workspace) == []


def test_a_connection_that_breaks_leaves_no_archive(web: Web, workspace: Workspace) -> None:
    with pytest.raises(
        UnreachableError, match="cannot be fetched: the connection broke after 10 of 11 bytes"
    ) as caught:
        fetch_archive(f"{web.url}/short", workspace)
    assert caught.value.hint == "Run the command again."
    assert left(workspace) == []


def test_a_server_that_is_not_there_is_unreachable(workspace: Workspace) -> None:
    with pytest.raises(UnreachableError, match="Connection refused"):
        fetch_archive(f"http://127.0.0.1:{free_port()}/whole", workspace)


def test_an_archive_may_have_as_many_bytes_as_the_limit_and_no_more(
    web: Web, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_archives, "MAX_BYTES", len(DATA))
    fetch_archive(f"{web.url}/whole", workspace).unlink()
    monkeypatch.setattr(remote_archives, "MAX_BYTES", len(DATA) - 1)
    with pytest.raises(MlbenchError, match="has more than 9 bytes"):
        fetch_archive(f"{web.url}/whole", workspace)
    assert left(workspace) == []


@pytest.mark.parametrize("scheme", ["file", "ftp"])
def test_a_redirect_leads_to_web_servers_only(web: Web, workspace: Workspace, scheme: str) -> None:
    with pytest.raises(UnreachableError, match=f"[Rr]edirect.*{scheme}://"):
        fetch_archive(f"{web.url}/to-{scheme}", workspace)
    assert web.asked == [f"/to-{scheme}"]


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://host/x.zip", "http:///x.zip", "http://host/a b", "http://h\u00f6st/x", "http://[x/",
     "http://host/\nx"],
)  # fmt: skip
def test_what_is_no_address_on_the_web_is_refused(workspace: Workspace, url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of an archive"):
        fetch_archive(url, workspace)


@pytest.mark.parametrize("who", ["me:secret@", "me@", ":secret@"])
def test_an_address_with_a_password_is_refused_before_it_is_written_anywhere(workspace: Workspace, who: str) -> None:
    told: list[str] = []
    workspace.notice = told.append
    with pytest.raises(UsageError, match="contains a user name or password") as caught:
        fetch_archive(f"https://{who}127.0.0.1/x.zip", workspace)
    assert "secret" not in str(caught.value)
    assert told == []


@pytest.mark.parametrize(("word", "expected"), [("https://host/x.zip", True), ("x.zip", False), ("/a/b:c", False)])
def test_an_address_is_told_from_a_path(word: str, expected: bool) -> None:
    assert is_url(word) is expected
