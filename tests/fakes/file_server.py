"""A web server with one file and habits of its own: it breaks off, it has bad moments, it may not know ranges."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class FileServer:
    """What it has, and how it behaves. `asked` holds the Range header (or None) of every request so far."""

    content: bytes
    ranges: bool = True
    break_off_after: list[int] = field(default_factory=list)  # bytes sent, for the first requests
    refuse_with: list[int] = field(default_factory=list)  # status codes, for the first requests
    wrong_start: bytes = b""  # what it says instead of the first bytes
    asked: list[str | None] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: Any) -> None:
        wanted = handler.headers.get("Range")
        self.asked.append(wanted)
        if self.refuse_with:
            handler.send_error(self.refuse_with.pop(0))
            return
        content = self.wrong_start + self.content[len(self.wrong_start) :]
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start >= len(content) and start:
            handler.send_error(416)
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        stop = start + self.break_off_after.pop(0) if self.break_off_after else len(content)
        handler.wfile.write(content[start:stop])


@contextmanager
def serving(server: FileServer) -> Iterator[FileServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        server.url = f"http://127.0.0.1:{web.server_port}/archive"
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield server
        web.shutdown()


@contextmanager
def serving_folder(folder: Path) -> Iterator[str]:
    """A web server of the files in a folder; its address."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
