"""A Helm chart repository: an index and archives, over http on this machine, with faults of its own."""

import hashlib
import io
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

CHART = {
    "Chart.yaml": "apiVersion: v2\nname: {name}\nversion: {version}\n",
    "values.yaml": "replicas: 1\nimage: {{repository: web, tag: v1}}\nannotations: {{}}\nauth: null\n"
    "ports: [{{name: http, port: 80}}, {{name: admin}}]\n",
    "templates/config.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n"
    "  all: {{{{ toJson .Values | quote }}}}\n",
}


def chart_files(name: str = "web", version: str = "1.2.3") -> dict[str, str]:
    """A small chart, by path inside its folder."""
    return {path: text.format(name=name, version=version) for path, text in CHART.items()}


def write_chart(folder: Path, name: str = "web", version: str = "1.2.3", **more: str) -> Path:
    """The chart as a folder."""
    for path, text in {**chart_files(name, version), **more}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def pack_chart(files: Mapping[str, str | bytes | tarfile.TarInfo], top: str = "web/") -> bytes:
    """A chart's archive. A TarInfo is a member that is no file; a name with a slash before it is taken as is."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name if name.startswith(("/", "..")) else top + name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@dataclass
class Repository:
    """`files` by path; `redirects` from path to URL; `cut`, `stall`: after so many bytes it ends, or nothing comes."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    entries: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    stall: dict[str, int] = field(default_factory=dict)
    dropped: int = 0  # connections that are closed without an answer
    asked: list[str] = field(default_factory=list)
    hold_headers: bool = False  # when it stalls, not even these come
    over: threading.Event = field(default_factory=threading.Event)

    def add(self, archive: bytes, name: str = "web", version: str = "1.2.3", **changes: Any) -> None:
        """Publish a version; `changes` say what the index tells wrongly, None leaves it out."""
        path = f"archives/{name}-{version}.tgz"
        self.files[f"/{path}"] = archive
        entry = {"name": name, "version": version, "urls": [path], "digest": hashlib.sha256(archive).hexdigest()}
        entry = {key: value for key, value in {**entry, **changes}.items() if value is not None}
        self.entries.setdefault(name, []).append(entry)

    def body(self, path: str) -> bytes | None:
        if path == "/index.yaml" and path not in self.files:
            return yaml.safe_dump({"apiVersion": "v1", "entries": self.entries}).encode()
        return self.files.get(path)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        self.asked.append(path)
        if self.dropped:
            self.dropped -= 1
            return
        if target := self.redirects.get(path):
            handler.send_response(302)
            handler.send_header("Location", target)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        body = self.body(path)
        if path in self.refused or body is None:
            handler.send_error(self.refused.get(path, 404))
            return
        if path in self.stall and self.hold_headers:
            self.over.wait(60)
            return
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        limit = self.cut.get(path, self.stall.get(path, len(body)))
        handler.wfile.write(body[:limit])
        if path in self.stall:
            handler.wfile.flush()
            self.over.wait(60)


@contextmanager
def serving() -> Iterator[Repository]:
    repository = Repository()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            repository.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        web.daemon_threads = True
        repository.url = f"http://127.0.0.1:{web.server_port}"
        thread = threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield repository
        repository.over.set()
        web.shutdown()


def wait_for(path: Path, seconds: float = 20) -> None:
    """Until a file is there."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert path.exists(), f"{path} did not come"
