"""A Kubernetes API server in one process, with rules of its own: enough for a client of runs, and full of faults.

It keeps objects with resource versions, lists them in pages, gives out logs, and executes commands in a folder that
stands for the pod's /results. `server.faults` says which requests are answered badly. It checks tokens if told to.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import parse_qs, urlsplit

import yaml
from kubernetes.client import V1PodSpec

from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Token
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store

COLLECTION = re.compile(
    r"/(?:api|apis/[^/]+)/v1(?:alpha\d|beta\d)?(?:/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[a-z]+)"
)
ITEM = re.compile(COLLECTION.pattern + r"/(?P<name>[^/]+)(?:/(?P<part>log|exec))?")
FRAME = 1 << 15


@dataclass
class Fault:
    """What happens to requests whose "METHOD PATH?QUERY" matches `pattern`, the next `times` times.

    status: answered with it; cut: the connection is broken after so many bytes of the body.
    """

    pattern: str
    times: int = 1
    status: int | None = None
    retry_after: str | None = None
    message: str = "as the test wants it"
    cut: int | None = None


class Broken(Exception):
    """The connection is to be broken off."""


class KubeApi:
    """The server; `with KubeApi() as server:` starts and ends it. `server.access` reaches it.

    With `tls` it speaks https; `subjects` then lists the common names of the clients' certificates, one each request.
    """

    def __init__(
        self, tokens: Callable[[], set[str]] | None = None, tls: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}  # (kind, name), all in the namespace "default"
        self.logs: dict[str, list[bytes]] = {}  # lines, by the pod's name
        self.folders: dict[str, Path] = {}  # by the pod's name: what /results is there
        self.faults: list[Fault] = []
        self.requests: Counter[str] = Counter()
        self.headers: list[tuple[str, list[tuple[str, str]]]] = []  # path and headers of each request
        self.version = {"major": "1", "minor": "34"}
        self.groups: dict[str, str] = {}  # of custom resources: the version that is preferred
        self.denied: set[str] = set()  # rights, such as "create jobs"
        self.reviews: list[dict[str, str]] = []  # rights that were asked for
        self.ahead = 0.0  # seconds by which its clock is ahead, so that a test can let hours pass
        self.needs_queue = False  # Kueue's manageJobsWithoutQueueName
        self.lock = threading.RLock()
        self.stopped = False
        self.is_down = False  # each connection breaks, and those that are open have broken
        self.dead_nodes: set[str] = set()  # their kubelets answer nobody, and the server says so
        self.tokens = tokens
        self._version = 100
        handler = type("Handler", (_Handler,), {"api": self})
        self.tls = tls
        self.subjects: list[str] = []
        self._http = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self._http.server_address[1]}"

    @property
    def access(self) -> Access:
        return Access(self.url)

    def write_kubeconfig(self, path: Path) -> None:
        """A kubeconfig that reaches this server without credentials, by the context "x"."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "clusters": [{"name": "x", "cluster": {"server": self.url}}],
            "users": [{"name": "x", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        }
        path.write_text(yaml.safe_dump(config))

    def record(self, home: Path) -> None:
        """Record this server as the attached cluster "there" in a data folder, whose kubeconfig reaches it."""
        self.write_kubeconfig(home / "kubeconfig")
        details = {"kubeconfig": str(home / "kubeconfig"), "context": "x", "namespace": "default"}
        store = Store(home)
        store.record_cluster(Cluster("there", "attached", details=details))
        store.close()

    def access_with(self, fetch: Callable[[], tuple[str, float | None]]) -> Access:
        return Access(self.url, token=Token(fetch))

    # --- what happens in the cluster ------------------------------------------------------------------------------

    @property
    def now(self) -> str:
        """The time by its clock, as in the fields of objects."""
        return stamp(time.time() + self.ahead)[:19] + "Z"

    def put(self, kind: str, document: dict[str, Any]) -> dict[str, Any]:
        """Create or replace an object."""
        with self.lock:
            name = document["metadata"]["name"]
            known = self.objects.get((kind, name))
            self._version += 1
            metadata = {"uid": str(uuid.uuid4()), "creationTimestamp": self.now, **document["metadata"]}
            if kind == "pods":
                metadata["labels"] = {**self._label_of_job(metadata), **metadata.get("labels", {})}
            if known:
                metadata["uid"] = known["metadata"]["uid"]
            stored = {**document, "metadata": {**metadata, "resourceVersion": str(self._version)}}
            self.objects[kind, name] = stored
            return stored

    def _label_of_job(self, pod: dict[str, Any]) -> dict[str, str]:
        """What the Job controller adds to the labels of a pod, whose name begins with that of its Job."""
        jobs = [(name, job) for (kind, name), job in self.objects.items() if kind == "jobs"]
        found = [job["metadata"]["uid"] for name, job in sorted(jobs) if pod["name"].startswith(f"{name}-")]
        return {"batch.kubernetes.io/controller-uid": found[-1]} if found else {}

    def remove(self, kind: str, name: str) -> dict[str, Any] | None:
        with self.lock:
            found = self.objects.pop((kind, name), None)
            if found is not None:
                self._collect_garbage(found["metadata"]["uid"])
            return found

    def clear(self) -> None:
        """Begin as another cluster, which has nothing yet."""
        for kind, name in list(self.objects):
            self.remove(kind, name)

    def _collect_garbage(self, owner: str) -> None:
        """What belongs to an object goes with it; a pod takes its files along."""
        for kind, name in list(self.objects):
            metadata = self.objects.get((kind, name), {}).get("metadata", {})
            if any(item["uid"] == owner for item in metadata.get("ownerReferences", ())):
                self.folders.pop(name, None)
                self.remove(kind, name)

    def write(self, pod: str, *lines: bytes) -> None:
        """Let a container write lines: from its start on it has a log, which may be empty."""
        with self.lock:
            self.logs.setdefault(pod, []).extend(lines)

    # --- what the handlers ask ------------------------------------------------------------------------------------

    def list_objects(self, kind: str, selector: dict[str, str], fields: str) -> tuple[list[dict[str, Any]], int]:
        with self.lock:
            found = [item for (known, _), item in self.objects.items() if known == kind and matches(item, selector)]
            wanted = dict(part.split("=", 1) for part in fields.split(",") if part)
            if "type!" in wanted:
                found = [item for item in found if item.get("type") != wanted["type!"]]
            if "reason" in wanted:
                found = [item for item in found if item.get("reason") == wanted["reason"]]
            if uid := wanted.get("involvedObject.uid"):
                found = [item for item in found if item.get("involvedObject", {}).get("uid") == uid]
            return sorted(found, key=lambda item: str(item["metadata"]["name"])), self._version

    def fault(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none of our business."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer takes 40 ms
    api: KubeApi

    def setup(self) -> None:
        if self.api.tls is not None:
            self.request = self.api.tls().wrap_socket(self.request, server_side=True)
        super().setup()

    def log_message(self, *_: object) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + self.api.ahead)

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PATCH = do_DELETE = do_GET

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        self.commands = parse_qs(parts.query).get("command", [])
        self.sent = 0
        if isinstance(self.connection, ssl.SSLSocket):
            subject: Any = (self.connection.getpeercert() or {}).get("subject", ())
            self.api.subjects += [value for ((key, value),) in subject if key == "commonName"]
        length = int(self.headers.get("Content-Length") or 0)
        self.document: dict[str, Any] = json.loads(self.rfile.read(length)) if length else {}
        self.fault = self.api.fault(f"{self.command} {self.path}") or Fault("")
        with self.api.lock:
            self.api.headers.append((parts.path, self.headers.items()))
            self.api.requests[f"{self.command} {parts.path}"] += 1
        try:
            if self.api.is_down:
                raise Broken
            self._dispatch(parts.path)
        except Broken:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.close_connection = True

    def _dispatch(self, path: str) -> None:
        if self.fault.status:
            return self._status(self.fault.status, "Fault", self.fault.message)
        if self.api.tokens is not None:
            sort, _, token = self.headers.get("Authorization", "").partition(" ")
            if sort != "Bearer" or token not in self.api.tokens():
                return self._status(401, "Unauthorized", "Unauthorized")
        if path == "/version":
            return self._json(200, self.api.version)
        if path.endswith("/selfsubjectaccessreviews"):
            asked = self.document["spec"]["resourceAttributes"]
            self.api.reviews.append(asked)
            is_allowed = f"{asked['verb']} {asked['resource']}" not in self.api.denied
            return self._json(201, {**self.document, "status": {"allowed": is_allowed}})
        if path == "/apis":
            return self._json(200, {"kind": "APIGroupList", "groups": [{"name": name} for name in self.api.groups]})
        if version := self.api.groups.get(path.removeprefix("/apis/")):
            return self._json(200, {"preferredVersion": {"groupVersion": f"{path[6:]}/{version}", "version": version}})
        if match := COLLECTION.fullmatch(path):
            return self._collection(match["kind"])
        if match := ITEM.fullmatch(path):
            pod = self.api.objects.get(("pods", match["name"]), {})
            if match["part"] and pod.get("spec", {}).get("nodeName") in self.api.dead_nodes:
                message = "error dialing backend: dial tcp 10.0.0.7:10250: i/o timeout"
                return self._status(500, "InternalError", message)
            if match["part"] == "log":
                return self._log(match["name"])
            if match["part"] == "exec":
                return self._exec(match["name"])
            return self._item(match["kind"], match["name"])
        return self._status(404, "NotFound", "the server could not find the requested resource")

    # --- objects --------------------------------------------------------------------------------------------------

    def _collection(self, kind: str) -> None:
        selector = dict(part.split("=", 1) for part in self.query.get("labelSelector", "").split(",") if part)
        if self.command == "POST":
            name = self.document["metadata"]["name"]
            if "dryRun" in self.query:
                changed = {"suspend": True} if self.api.needs_queue else {}
                return self._json(201, {**self.document, "spec": {**self.document["spec"], **changed}})
            unknown = _unknown_fields(kind, self.document) if self.query.get("fieldValidation") == "Strict" else ()
            if unknown:  # otherwise the server drops them, and says so in a header
                message = f'{self.document["kind"]} in version "v1" cannot be handled: strict decoding error: '
                return self._status(400, "BadRequest", message + ", ".join(f'unknown field "{it}"' for it in unknown))
            if (kind, name) in self.api.objects:
                return self._status(409, "AlreadyExists", f'{kind} "{name}" already exists')
            return self._json(201, self.api.put(kind, self.document))
        items, version = self.api.list_objects(kind, selector, self.query.get("fieldSelector", ""))
        begin, limit = int(self.query.get("continue") or 0), int(self.query.get("limit") or 10**9)
        metadata = {"resourceVersion": str(version)}
        if begin + limit < len(items):
            metadata["continue"] = str(begin + limit)
        return self._json(200, {"items": items[begin : begin + limit], "metadata": metadata})

    def _item(self, kind: str, name: str) -> None:
        found = self.api.objects.get((kind, name))
        if found is None:
            return self._status(404, "NotFound", f'{kind} "{name}" not found')
        wanted = {"PATCH": self.document.get("metadata") or {}, "DELETE": self.document.get("preconditions") or {}}
        if wanted.get(self.command, {}).get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            is_patch = (
                self.command == "PATCH"
            )  # see validation.ValidateObjectMetaUpdate and registry.Store of Kubernetes
            return self._status(*((422, "Invalid") if is_patch else (409, "Conflict")), "it has another uid")
        if self.command == "PATCH":
            with self.api.lock:  # as controllers change it, too
                found = self.api.put(kind, merge(self.api.objects.get((kind, name), found), self.document))
        if self.command == "DELETE":
            self.api.remove(kind, name)
        return self._json(200, found)

    # --- logs -----------------------------------------------------------------------------------------------------

    def _log(self, name: str) -> None:
        log = self.api.logs.get(name)
        if log is None:
            if ("pods", name) not in self.api.objects:
                return self._status(404, "NotFound", f'pods "{name}" not found')
            return self._status(400, "BadRequest", "container is waiting to start: ContainerCreating")
        tail = int(self.query.get("tailLines") or len(log))
        return self._bytes(200, b"".join(line + b"\n" for line in log[max(0, len(log) - tail) :]))

    # --- exec -----------------------------------------------------------------------------------------------------

    def _exec(self, name: str) -> None:
        folder = self.api.folders.get(name)
        if folder is None:
            return self._status(400, "BadRequest", "cannot exec in a container that has ended")
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.send_header("Sec-WebSocket-Protocol", self.headers["Sec-WebSocket-Protocol"].partition(",")[0])
        self.end_headers()
        self.close_connection = True
        argv = [part.replace("/results", str(folder)) for part in self.commands]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "HOME": str(folder)},
            start_new_session=True,
        )
        lock, broken = threading.Lock(), threading.Event()

        def pump(stream: IO[bytes], channel: int) -> None:
            try:
                while data := os.read(stream.fileno(), FRAME):
                    with lock:
                        self._frame(bytes([channel]) + data)
            except (OSError, ValueError, Broken):
                broken.set()

        def feed() -> None:
            assert process.stdin is not None
            with contextlib.suppress(OSError, ValueError):
                while (payload := self._read_frame()) is not None:
                    if payload[:1] == b"\0":
                        process.stdin.write(payload[1:])
                        process.stdin.flush()
            broken.set()

        assert process.stdout is not None
        assert process.stderr is not None
        pumps = [threading.Thread(target=pump, args=(process.stdout, 1), daemon=True)]
        pumps.append(threading.Thread(target=pump, args=(process.stderr, 2), daemon=True))
        for thread in (*pumps, threading.Thread(target=feed, daemon=True)):
            thread.start()
        while process.poll() is None:
            is_there = self.api.folders.get(name) is folder and not self.api.is_down and not self.api.stopped
            if broken.wait(0.02) or not is_there:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise Broken
        for thread in pumps:
            thread.join()
        status: dict[str, Any] = {"status": "Success"}
        if process.returncode:
            cause = {"reason": "ExitCode", "message": str(process.returncode)}
            status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
        self._frame(bytes([3]) + json.dumps(status).encode())
        return self._close_frame()

    def _read_frame(self) -> bytes | None:
        """The payload of a client's frame, which is masked (RFC 6455); None at the end."""
        head = self.rfile.read(2)
        if len(head) < 2 or head[0] & 0x0F == 8:
            return None
        length = head[1] & 0x7F
        if length >= 126:
            length = int.from_bytes(self.rfile.read(2 if length == 126 else 8), "big")
        mask = self.rfile.read(4)
        data = self.rfile.read(length)
        whole = mask * (length // 4 + 1)
        return (int.from_bytes(data, "big") ^ int.from_bytes(whole[:length], "big")).to_bytes(length, "big")

    def _close_frame(self) -> None:
        self.wfile.write(b"\x88\x02\x03\xe8")

    def _frame(self, payload: bytes) -> None:
        head = struct.pack("!BB", 0x82, len(payload)) if len(payload) < 126 else b""
        if not head:
            head = struct.pack("!BBH", 0x82, 126, len(payload)) if len(payload) < 1 << 16 else b""
        self._raw(head or struct.pack("!BBQ", 0x82, 127, len(payload)), payload)

    # --- wire -----------------------------------------------------------------------------------------------------

    def _raw(self, head: bytes, data: bytes) -> None:
        """Send, unless the fault's place in the stream has come."""
        limit = self.fault.cut
        if limit is None or self.sent + len(data) <= limit:
            self.wfile.write(head + data)
            self.sent += len(data)
            return
        self.wfile.write(head + data[: limit - self.sent])
        raise Broken

    def _json(self, status: int, document: dict[str, Any]) -> None:
        self._bytes(status, json.dumps(document).encode())

    def _bytes(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.fault.retry_after:
            self.send_header("Retry-After", self.fault.retry_after)
        self.end_headers()
        if self.fault.cut is not None:
            self.wfile.write(data[: self.fault.cut])
            raise Broken
        self.wfile.write(data)

    def _status(self, code: int, reason: str, message: str) -> None:
        self._json(code, {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message})


def _unknown_fields(kind: str, document: dict[str, Any]) -> list[str]:
    """Fields of a Job's pod that Kubernetes does not have."""
    if kind != "jobs":
        return []
    pod = document["spec"]["template"]["spec"]
    known = V1PodSpec.attribute_map.values()
    return [f"spec.template.spec.{name}" for name in pod if name not in known]


def stamp(seconds: float | None = None) -> str:
    """A time stamp as the kubelet writes it: fixed width, nanoseconds."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"


def matches(item: dict[str, Any], selector: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in selector.items())


def merge(old: Any, patch: Any) -> Any:
    """JSON merge patch, RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result
