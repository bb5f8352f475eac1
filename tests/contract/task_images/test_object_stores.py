"""Data sets from buckets: S3 by moto's server, Google's by a double of its JSON API that knows rights and ranges."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from task_images.fetch import Archive, DownloadError, fetch

CONTENT = bytes(range(256)) * 40
URL = "https://data.example.org/sets/some file+1.zip"
KEY = "mirror/data.example.org/sets/some file+1.zip"
ARCHIVE = Archive("file.zip", URL, len(CONTENT), "")


def silent(_: str) -> None:
    pass


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from moto.server import ThreadedMotoServer  # half a second of a core, for every worker that collects

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        *(("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_DEFAULT_REGION", "us-east-1")),
        ("MLBENCH_DATA_MIRROR", "s3://sets/mirror"),
    ):
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="sets")
    yield client
    server.stop()


def test_a_file_comes_from_s3_and_goes_on_where_it_stopped(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket="sets", Key=KEY, Body=CONTENT)
    assert fetch(ARCHIVE, tmp_path, silent).read_bytes() == CONTENT
    (tmp_path / "file.zip").unlink()
    # What is here already is not fetched again, and so may differ.
    (tmp_path / "file.zip.part").write_bytes(b"x" * 1000)
    assert fetch(ARCHIVE, tmp_path, silent).read_bytes() == b"x" * 1000 + CONTENT[1000:]


def test_a_missing_object_of_s3_is_said_at_once(s3: Any, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="specified key does not exist"):
        fetch(Archive("none.zip", "https://data.example.org/none.zip", 9, ""), tmp_path, silent)


class Google:
    """One bucket. `token`: what requests must bear; the first answer breaks off in its middle."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.asked: list[str | None] = []

    def answer(self, handler: Any) -> None:
        parts = urlsplit(handler.path)
        name = unquote(parts.path.removeprefix("/storage/v1/b/sets/o/"))
        if "/" in parts.path.removeprefix("/storage/v1/b/sets/o/") or parse_qs(parts.query) != {"alt": ["media"]}:
            handler.send_error(400)
        elif self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            handler.send_error(401)
        elif name != KEY:
            handler.send_error(404)
        else:
            self._send(handler)

    def _send(self, handler: Any) -> None:
        wanted = handler.headers.get("Range")
        self.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        handler.send_header("Content-Length", str(len(CONTENT) - start))
        handler.end_headers()
        handler.wfile.write(CONTENT[start : len(CONTENT) // 2 if len(self.asked) == 1 else None])

    def give_token(self, handler: Any) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        handler.wfile.write(json.dumps({"access_token": self.token, "expires_in": 3600}).encode())


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Google, str]]:
    double = Google()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            double.answer(self)

        def do_POST(self) -> None:
            double.give_token(self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        address = f"http://127.0.0.1:{web.server_port}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        monkeypatch.setenv("MLBENCH_DATA_MIRROR", "gs://sets/mirror")
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "none"))
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield double, address
        web.shutdown()


def test_a_public_bucket_needs_no_login_and_a_broken_transfer_goes_on(
    google: tuple[Google, str], tmp_path: Path
) -> None:
    assert fetch(ARCHIVE, tmp_path, silent).read_bytes() == CONTENT
    assert google[0].asked == [None, f"bytes={len(CONTENT) // 2}-"]


def test_a_private_bucket_gets_the_token_of_a_service_account(
    google: tuple[Google, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double, address = google
    double.token = "ya29.token"
    with pytest.raises(DownloadError, match="Unauthorized"):
        fetch(ARCHIVE, tmp_path, silent)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {"type": "service_account", "client_email": "a@example.org", "private_key": key.decode()}
    (tmp_path / "account.json").write_text(json.dumps({**account, "token_uri": f"{address}/token"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    assert fetch(ARCHIVE, tmp_path, silent).read_bytes() == CONTENT
