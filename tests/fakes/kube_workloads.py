"""A Kubernetes API with controllers of a few rules: what charts make on a cluster, and what outlives it if not removed.

A Service of type LoadBalancer, a claim and its volume are held by finalizers; the world outside, `outside`, is what a
cloud would have made for them. A claim is held as long as a pod uses it. A StatefulSet makes pod and claim anew, a
Deployment its pod. The owner's end ends what it owns; a namespace's, all that is in it. Each request is a tick of all
controllers.
"""

import json
import os
import re
import signal
import ssl
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mlbench_cli.kube.access import Access
from tests.fakes.kube_pods import Object, start_job

PATH = re.compile(
    r"(?P<group>/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/(?P<space>[^/]+)(?=/))?/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+))?"
)
GROUPS = ("/api/v1", "/apis/apps/v1", "/apis/batch/v1", "/apis/networking.k8s.io/v1")
SPACELESS = ("namespaces", "persistentvolumes", "nodes")
Key = tuple[str, str, str]  # kind in plural, namespace, name


class Workloads:
    """The server. `stuck` are names of objects whose finalizers nobody removes; `looks`: ticks that a finalizer takes.

    With `pem`, a file of certificate and key, it speaks TLS; `allowed` judges the value of Authorization.
    """

    def __init__(self, pem: Path | None = None, allowed: Callable[[str], bool] = lambda authorization: True) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.outside: set[str] = set()
        self.stuck: set[str] = set()
        self.looks = 2
        self.down: int | None = None  # answered with this status instead
        self.changes: list[str] = []  # what mlbench asked to have removed
        self.kill_at: int | None = None  # of these the one after which, before its answer, `victim` is killed
        self.victim = Path()  # a file with its process number
        self.outage = 0  # so many requests after the first DELETE are refused
        self.allowed = allowed
        self.nodes: Callable[[str], list[dict[str, Any]]] = lambda role: []
        # Runs pods: status and document for method, name and manifest. None: pods are objects as all others.
        self.run_pod: Callable[[str, str, Object], tuple[int, Any]] | None = None
        self.requests: Counter[str] = Counter()
        self.lock = threading.RLock()
        self._ages: Counter[Key] = Counter()
        handler = type("Handler", (_Handler,), {"api": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        if pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pem)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def access(self) -> Access:
        return Access(f"http://127.0.0.1:{self.port}")

    # --- what a test puts there ---------------------------------------------------------------------------------

    def put(self, kind: str, name: str, space: str = "", /, **fields: Any) -> dict[str, Any]:
        with self.lock:
            metadata = {"name": name, "uid": uuid.uuid4().hex, **fields.pop("metadata", {})}
            if space:
                metadata["namespace"] = space
            made: dict[str, Any] = {"spec": {}, **fields, "metadata": metadata}
            self.objects[kind, space, name] = made
            return made

    def balancer(self, name: str, address: str = "192.0.2.7", space: str = "default") -> None:
        """A Service with a load balancer in the cloud."""
        status = {"loadBalancer": {"ingress": [{"ip": address}]}}
        self.put("services", name, space, spec={"type": "LoadBalancer"}, status=status)
        self.outside.add(address)

    def disk(self, claim: str, handle: str, space: str = "default", policy: str = "Delete") -> None:
        """A claim, its volume, and a disk in the cloud."""
        self.put("persistentvolumeclaims", claim, space, spec={"volumeName": f"pv-{claim}"})
        spec = {
            "persistentVolumeReclaimPolicy": policy,
            "claimRef": {"namespace": space, "name": claim},
            "csi": {"volumeHandle": handle},
        }
        self.put("persistentvolumes", f"pv-{claim}", spec=spec)
        self.outside.add(handle)

    def stateful(self, name: str, handle: str, space: str = "default") -> None:
        self.put("statefulsets", name, space, handle=handle)
        with self.lock:
            self.tick()

    def deployment(self, name: str, handle: str, space: str = "default") -> None:
        """Its ReplicaSet makes a pod that uses a claim."""
        self.disk(f"data-{name}-0", handle, space)
        self.put("deployments", name, space)
        with self.lock:
            self.tick()

    def names(self, kind: str) -> list[str]:
        with self.lock:
            return sorted(name for known, _, name in self.objects if known == kind)

    # --- what controllers do ------------------------------------------------------------------------------------

    def tick(self) -> None:
        for (kind, space, name), item in list(self.objects.items()):
            if kind == "deployments" and not self._goes(item) and ("replicasets", space, name) not in self.objects:
                self.put("replicasets", name, space, metadata={"ownerReferences": [_own("Deployment", item)]})
            if kind == "statefulsets" and not self._goes(item):
                if ("persistentvolumeclaims", space, f"data-{name}-0") not in self.objects:
                    self.disk(f"data-{name}-0", item["handle"], space)
                self._keep_pod(space, name, _own("StatefulSet", item))
            if kind == "replicasets" and not self._goes(item):
                self._keep_pod(space, name, _own("ReplicaSet", item))
            owner = (item["metadata"].get("ownerReferences") or [{}])[0].get("uid")
            if owner and all(other["metadata"]["uid"] != owner for other in self.objects.values()):
                self.delete((kind, space, name))
            if space and self._goes(self.objects.get(("namespaces", "", space), {})):
                self.delete((kind, space, name))
        for key, item in list(self.objects.items()):
            if self._goes(item) and self._may_go(key):
                self._ages[key] += 1
                if self._ages[key] > self.looks:
                    self._end(key, item)

    def delete(self, key: Key) -> None:
        self.objects[key]["metadata"].setdefault("deletionTimestamp", "2026-11-01T00:00:00Z")

    def _goes(self, item: dict[str, Any]) -> bool:
        return "deletionTimestamp" in item.get("metadata", {})

    def _may_go(self, key: Key) -> bool:
        kind, space, name = key
        if name in self.stuck:
            return False
        if kind == "namespaces":
            return not any(inside == name for _, inside, _ in self.objects)
        if kind == "persistentvolumeclaims":
            pods = [item for (known, inside, _), item in self.objects.items() if (known, inside) == ("pods", space)]
            return not any(item["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == name for item in pods)
        return True

    def _end(self, key: Key, item: dict[str, Any]) -> None:
        del self.objects[key], self._ages[key]
        if key[0] == "services":
            for point in (item.get("status") or {}).get("loadBalancer", {}).get("ingress", []):
                self.outside.discard(point["ip"])
        if key[0] == "persistentvolumeclaims":
            volume = self.objects.get(("persistentvolumes", "", item["spec"].get("volumeName", "")))
            if volume and volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete":
                self.delete(("persistentvolumes", "", volume["metadata"]["name"]))
        if key[0] == "persistentvolumes":
            self.outside.discard(item["spec"]["csi"]["volumeHandle"])

    def _keep_pod(self, space: str, name: str, owner: Object) -> None:
        if ("pods", space, f"{name}-0") not in self.objects:
            volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": f"data-{name}-0"}}]
            self.put("pods", f"{name}-0", space, metadata={"ownerReferences": [owner]}, spec={"volumes": volumes})


def _own(kind: str, item: Object) -> Object:
    """That `item` of a kind owns what refers so to it."""
    return {"kind": kind, "name": item["metadata"]["name"], "controller": True, "uid": item["metadata"]["uid"]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer takes 40 ms
    api: Workloads

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        document = json.loads(self.rfile.read(length)) if length else {}
        parts = urlsplit(self.path)
        with self.api.lock:
            self.api.requests[f"{self.command} {parts.path}"] += 1
            if self.api.outage and any(asked.startswith("DELETE") for asked in self.api.requests):
                self.api.outage -= 1
                return self._status(403, "as the test wants it")
            if self.api.down is not None:
                return self._status(self.api.down, "as the test wants it")
            if not self.api.allowed(self.headers.get("Authorization", "")):
                return self._status(401, "Unauthorized")
            self.api.tick()
            match = PATH.fullmatch(parts.path)
            if match is None or match["group"] not in GROUPS:
                return self._status(404, "the server could not find the requested resource")
            return self._dispatch(match, parse_qs(parts.query), document)

    do_POST = do_PATCH = do_DELETE = do_GET

    def _dispatch(self, match: re.Match[str], query: dict[str, list[str]], document: dict[str, Any]) -> None:
        kind, space, name = match["kind"], match["space"] or "", match["name"]
        selector = dict(part.split("=", 1) for part in query.get("labelSelector", [""])[0].split(",") if part)
        if kind == "nodes":
            return self._json(200, {"items": self.api.nodes(next(iter(selector.values()), ""))})
        if kind == "pods" and space and self.api.run_pod and (name or self.command == "POST"):
            return self._json(*self.api.run_pod(self.command, name or "", document))
        if name is None and self.command == "POST":
            key = (kind, space, document["metadata"]["name"])
            if key in self.api.objects:
                return self._status(409, f'{kind} "{key[2]}" already exists')
            if space and ("namespaces", "", space) not in self.api.objects and space != "default":
                return self._status(404, f'namespaces "{space}" not found')
            fields = {field: value for field, value in document.items() if field != "metadata"}
            return self._json(201, self.api.put(kind, key[2], space, metadata=document["metadata"], **fields))
        if name is None:
            found = [
                item
                for (known, inside, _), item in self.api.objects.items()
                if known == kind
                and space in ("", inside)
                and all((item["metadata"].get("labels") or {}).get(key) == value for key, value in selector.items())
            ]
            return self._json(200, {"items": found})
        key = (kind, "" if kind in SPACELESS else space, name)
        if "apply-patch" in self.headers.get("Content-Type", ""):
            return self._apply(key, query, document)
        if key not in self.api.objects:
            return self._status(404, f'{kind} "{name}" not found')
        item = self.api.objects[key]
        if self.command == "DELETE":
            self.api.delete(key)
            self._count(f"{kind} {name}")
            if kind in ("secrets", "configmaps"):
                del self.api.objects[key]
        if self.command == "PATCH":
            item["metadata"]["labels"] = {**item["metadata"].get("labels", {}), **document["metadata"]["labels"]}
        return self._json(200, item)

    def _apply(self, key: Key, query: dict[str, list[str]], document: dict[str, object]) -> None:
        """Server-side apply: it makes what is not there, and wants to know who applies."""
        kind, space, name = key
        if "fieldManager" not in query:
            return self._status(400, "fieldManager is required for apply patch")
        if space and ("namespaces", "", space) not in self.api.objects and space != "default":
            return self._status(404, f'namespaces "{space}" not found')
        code = 200 if key in self.api.objects else 201
        if kind == "jobs":
            document = start_job(self.api.objects.get(key), document)
        fields = {field: value for field, value in document.items() if field != "metadata"}
        return self._json(code, self.api.put(kind, name, space, metadata=document["metadata"], **fields))

    def _count(self, change: str) -> None:
        if self.headers.get("User-Agent") != "mlbench":
            return
        if len(self.api.changes) == self.api.kill_at:
            os.kill(int(self.api.victim.read_text()), signal.SIGKILL)
        self.api.changes.append(change)

    def _status(self, code: int, message: str) -> None:
        self._json(code, {"kind": "Status", "status": "Failure", "code": code, "message": message})

    def _json(self, code: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
