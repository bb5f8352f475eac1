"""Keeps the results of a run after its workers have ended. Runs in the cluster, in the run's own image.

    python keeper.py serve          the keeper pod: takes what workers hand over, until its time is up
    python keeper.py send SECONDS   a worker: hands over its archive, its log and its last word

Standard library only, Python 3.7 or later: any image that has Python can run it. A worker sends each file with its
SHA-256 by HTTP PUT, and its last word as the commit. Nothing is given out by HTTP: clients read by `kubectl exec`.

In $MLBENCH_WORK_DIR of the keeper: WORKER/archive.tar, WORKER/log, WORKER/resources.jsonl, and index.json, which lists
only what was verified: {"until": seconds since 1970, "workers": {"0": {"archive": {size, sha256} or null, "log": {size,
sha256, truncated} or null, "samples": {size, sha256} or null, "summary": the worker's last word}}}
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import http.server
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time
from typing import Any

PORT = 29600
BLOCK = 1 << 20
IDLE_SECONDS = 30.0  # after which a connection that moves no bytes is given up
SLOWEST = 2 << 20  # bytes a second that a transfer must reach on average
PAUSE_SECONDS = 0.5
RUN_GONE_SECONDS = 900.0  # without any worker's name in DNS, after which the run is over
DNS_SECONDS = 60.0
FILES = {"archive": "archive.tar", "log": "log", "samples": "resources.jsonl"}
MAX_SUMMARY = 1 << 16
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LASTING = (400, 403, 404, 507)  # answers that another try would get again


class Shelf:
    """The keeper's folder: what is in it, how much it may hold, and until when it is kept."""

    def __init__(self, folder: str, workers: int, limit: int, keep_seconds: float) -> None:
        self.folder = folder
        self.workers = workers
        self.limit = limit
        self.keep_seconds = keep_seconds
        self.lock = threading.Lock()
        self.received: dict[str, dict[str, dict[str, object]]] = {}  # verified files of workers that have not committed
        self.reserved = 0
        try:
            with open(os.path.join(folder, "index.json"), encoding="utf-8") as file:
                self.index = json.load(file)
        except (OSError, ValueError):
            self.index = {"until": None, "workers": {}}
            self._save()

    def reserve(self, size: int) -> bool:
        """Set `size` bytes aside; False if they do not fit below the limit."""
        with self.lock:
            if self._used_bytes() + self.reserved + size > self.limit:
                return False
            self.reserved += size
            return True

    def release(self, size: int) -> None:
        """Give back bytes that were reserved for a transfer."""
        with self.lock:
            self.reserved -= size

    def add(self, worker: str, kind: str, part: str, facts: dict[str, Any]) -> None:
        """Take a verified file in."""
        folder = os.path.join(self.folder, worker)
        os.replace(part, os.path.join(folder, FILES[kind]))
        with self.lock:
            self.received.setdefault(worker, {})[kind] = facts

    def commit(self, worker: str, said: dict[str, Any]) -> bool:
        """Enter a worker into the index; False if a file that it names has not arrived."""
        with self.lock:
            files = self.received.get(worker, {})
            for kind in FILES:
                wanted = said.get(kind)
                if wanted and files.get(kind, {}).get("sha256") != wanted.get("sha256"):
                    return False
            self.index["workers"][worker] = {"summary": said.get("summary"), **{kind: said.get(kind) for kind in FILES}}
            self.index["until"] = time.time() + self.keep_seconds
            self._save()
            return True

    def is_over(self) -> bool:
        """Whether the time to keep the results is up."""
        return self.index["until"] is not None and time.time() >= self.index["until"]

    def _used_bytes(self) -> int:
        return sum(
            os.path.getsize(os.path.join(parent, name))
            for parent, _, names in os.walk(self.folder)
            for name in names
            if not name.endswith(".part")
        )

    def _save(self) -> None:
        path = os.path.join(self.folder, "index.json")
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump(self.index, file)
        os.replace(path + ".part", path)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the workers: an offer, pieces and the last words, each with the run's token."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    shelf: Shelf
    token: str

    def log_message(self, *_: object) -> None:
        """Print nothing: the pod's log is for people."""

    def do_PUT(self) -> None:
        """Take an offer, a piece or the last words of a worker; 403 without the token, 400 for a malformed request."""
        self.close_connection = True
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return self._reply(403, "forbidden")
        worker, _, kind = self.path.strip("/").partition("/")
        size = self.headers.get("Content-Length", "")
        if not worker.isdigit() or int(worker) >= self.shelf.workers or not size.isdigit():
            return self._reply(400, "bad request")
        if kind == "offer":
            return self._answer_offer(int(size))
        if kind == "summary":
            return self._commit(str(int(worker)), int(size))
        if kind not in FILES:
            return self._reply(404, "not found")
        return self._reply(*self._receive(str(int(worker)), kind, int(size)))

    def _receive(self, worker: str, kind: str, size: int) -> tuple[int, str]:
        """Take one file in, if it arrives as it was sent; HTTP's status and words."""
        if not self.shelf.reserve(size):
            return 507, "no room"
        folder = os.path.join(self.shelf.folder, worker)
        part = os.path.join(folder, f"{kind}.{threading.get_ident()}.part")
        try:
            os.makedirs(folder, exist_ok=True)
            sha256 = self._write(part, size)
            if sha256 != self.headers.get("X-Sha256"):
                return 422, "damaged"
            self.shelf.add(worker, kind, part, {"size": size, "sha256": sha256})
            return 200, "ok"
        except OSError as error:
            return 507, str(error.strerror)
        finally:
            self.shelf.release(size)
            if os.path.exists(part):
                os.unlink(part)

    def _write(self, path: str, size: int) -> str:
        """The SHA-256 of what came; another one than was sent if the worker went away."""
        digest, left = hashlib.sha256(), size
        with open(path, "wb") as file:
            while left:
                piece = self.rfile.read(min(BLOCK, left))
                if not piece:
                    break
                digest.update(piece)
                file.write(piece)
                left -= len(piece)
        return digest.hexdigest()

    def _answer_offer(self, size: int) -> None:
        """Whether so many bytes would fit: said before they are sent, since who sends does not listen."""
        try:
            wanted = int(self.rfile.read(min(size, MAX_SUMMARY)))
        except ValueError:
            return self._reply(400, "bad request")
        if not self.shelf.reserve(wanted):
            return self._reply(507, "no room")
        self.shelf.release(wanted)
        return self._reply(200, "ok")

    def _commit(self, worker: str, size: int) -> None:
        try:
            said = json.loads(self.rfile.read(min(size, MAX_SUMMARY)))
        except ValueError:
            return self._reply(400, "bad request")
        if not isinstance(said, dict) or not self.shelf.commit(worker, said):
            return self._reply(409, "files are missing")
        return self._reply(200, "ok")

    def _reply(self, code: int, text: str) -> None:
        data = text.encode()
        try:
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """One thread per connection, and a queue that holds 1 000 workers which end at the same moment."""

    daemon_threads = True
    request_queue_size = 1024

    def server_bind(self) -> None:
        """Bind without asking DNS for this host's name."""
        socketserver.TCPServer.server_bind(self)  # HTTPServer would ask DNS for this host's full name
        self.server_name, self.server_port = "keeper", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A worker that went away is its own affair: nothing of it is in the index."""


def serve(environ: dict[str, str]) -> int:
    """Keep results until the time is up or the pod is stopped; returns the exit code."""
    folder = environ["MLBENCH_WORK_DIR"]
    shelf = Shelf(
        folder,
        int(environ["MLBENCH_WORKERS"]),
        int(environ["MLBENCH_KEEPER_BYTES"]),
        float(environ["MLBENCH_KEEP"]),
    )
    # Before any thread starts: all of them block these signals, and the loop below takes them. A handler would run only
    # between two steps of Python, so a slow name server would hold up the end of the pod.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    handler = type("KeeperHandler", (Handler,), {"shelf": shelf, "token": environ["MLBENCH_KEEPER_TOKEN"]})
    server = Server(("", int(environ.get("MLBENCH_KEEPER_PORT", PORT))), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pause = 1.0 if shelf.keep_seconds < DNS_SECONDS else DNS_SECONDS
    run_is_gone = threading.Event()
    threading.Thread(
        target=watch_workers, args=(environ.get("MLBENCH_RUN_ID", ""), pause, run_is_gone), daemon=True
    ).start()
    while signal.sigtimedwait(STOP_SIGNALS, pause) is None:
        if shelf.is_over():
            return 0
        if run_is_gone.is_set() and not shelf.index["workers"]:
            return 0  # the run is over, and nobody has handed anything over
    return 0


def watch_workers(service: str, pause: float, run_is_gone: threading.Event) -> None:
    """Ask DNS every `pause` seconds; `run_is_gone` is set while the workers that were there have no name any more."""
    last_seconds, had_others = time.monotonic(), False
    while True:
        time.sleep(pause)
        if has_others(service):
            last_seconds, had_others = time.monotonic(), True
            run_is_gone.clear()
        elif had_others and time.monotonic() > last_seconds + RUN_GONE_SECONDS:
            run_is_gone.set()


def has_others(service: str) -> bool:
    """Whether the run's Service knows a pod beside this one. Only pods that have not ended are in it."""
    try:
        found = {item[4][0] for item in socket.getaddrinfo(service, None, type=socket.SOCK_STREAM)}
        own = {item[4][0] for item in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found - own)


def send(environ: dict[str, str], patience: float) -> int:
    """Hand over; print why it failed, as one word. An unreachable keeper is tried for `patience` seconds."""
    folder = environ["MLBENCH_WORK_DIR"]
    with open(os.path.join(folder, "summary.json"), encoding="utf-8") as file:
        summary = json.load(file)
    worker = summary["worker"]  # not the index in the pod's Job: servers come after the workers
    said: dict[str, Any] = {"summary": summary, **{kind: summary.get(kind) for kind in FILES}}
    size = sum(said[kind]["size"] for kind in FILES if said[kind])
    deadline = time.monotonic() + patience
    end = deadline + IDLE_SECONDS + size / SLOWEST
    trouble = "unreachable"
    while True:
        try:
            put(environ, f"/{worker}/offer", str(size).encode(), "", end)
            for kind, name in FILES.items():
                if said[kind]:
                    put(environ, f"/{worker}/{kind}", os.path.join(folder, name), said[kind]["sha256"], end)
            put(environ, f"/{worker}/summary", json.dumps(said).encode(), "", end)
            return 0
        except UploadRejected as error:
            trouble = str(error)
            if error.code in LASTING:
                break
        except (OSError, http.client.HTTPException):
            trouble = "unreachable"
        if time.monotonic() >= min(deadline, end):
            break
        time.sleep(PAUSE_SECONDS)
    print(trouble)
    return 1


class UploadRejected(Exception):
    """The keeper answered, and did not take it."""

    def __init__(self, code: int) -> None:
        super().__init__({507: "no_room", 422: "damaged", 403: "forbidden"}.get(code, f"status_{code}"))
        self.code = code


def put(environ: dict[str, str], path: str, what: str | bytes, sha256: str, end: float) -> None:
    """Send bytes, or the file at a path, with their SHA-256, until `end` on the monotonic clock.

    Raises OSError or http.client.HTTPException if the keeper does not take it, TimeoutError if no time is left.
    """
    host, _, port = environ["MLBENCH_KEEPER"].rpartition(":")
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection = http.client.HTTPConnection(host, int(port), timeout=min(IDLE_SECONDS, max(1.0, left)), blocksize=BLOCK)
    headers = {"Authorization": f"Bearer {environ['MLBENCH_KEEPER_TOKEN']}", "X-Sha256": sha256}
    try:
        if isinstance(what, bytes):
            connection.request("PUT", path, what, headers)
        else:
            with open(what, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                # Refused before all of it was sent: the answer says why.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request("PUT", path, file, {**headers, "Content-Length": str(size)})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise UploadRejected(answer.status)
    finally:
        connection.close()


def main(arguments: list[str]) -> int:
    """Run "serve" or "send SECONDS"; 64 for other arguments."""
    if arguments[:1] == ["serve"]:
        return serve(dict(os.environ))
    if arguments[:1] == ["send"] and len(arguments) == 2:
        return send(dict(os.environ), float(arguments[1]))
    print(__doc__, file=sys.stderr)
    return 64


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
