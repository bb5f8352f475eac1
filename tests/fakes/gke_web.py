"""The HTTP side of the GKE double: sign-in, Compute Engine, and the Kubernetes API of the clusters."""

import json
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.gke_facts import PLAIN, PODS, REGION, SHAPES, SKUS, ZONE, ZONES

if TYPE_CHECKING:
    from tests.fakes.gke import World


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def world(self) -> "World":
        world: World = self.server.world  # type: ignore[attr-defined]
        return world

    def answer(self, document: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class Web(Handler):
    """Sign-in, and what Compute Engine tells of machines and quotas."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.world.token_answer is not None:
            self.answer(self.world.token_answer, 400)
            return
        self.world.tokens += 1
        self.answer({"access_token": f"token-{self.world.tokens}", "expires_in": 3600, "token_type": "Bearer"})

    def do_GET(self) -> None:
        if self.path.startswith("/v1/services/"):
            self.answer(self._list_skus())
            return
        parts = self.path.split("/")[5:]
        quotas = [
            {"metric": name, "limit": limit, "usage": self.world.used.get(name, 0)}
            for name, limit in self.world.quotas.items()
        ]
        if parts and (parts[-1].startswith(("disks", "forwardingRules")) or parts[2:3] == ["disks"]):
            self._outside(parts)
        elif not parts or parts == ["regions", REGION]:
            zones = [f"https://compute/zones/{zone}" for zone in ("europe-west1-c", *reversed(ZONES))]
            self.answer({"quotas": quotas, "zones": zones})
        elif parts == ["zones", ZONE, "acceleratorTypes"]:
            self.answer({"items": [{"name": "nvidia-tesla-t4"}, {"name": "nvidia-l4"}, {"name": "ct5lp"}]})
        elif (
            parts[:1] == ["zones"]
            and parts[1] in ZONES
            and (len(parts) == 2 or parts[3] in (*SHAPES, *PLAIN, "nvidia-tesla-t4"))
        ):
            cpus = PLAIN.get(parts[-1]) or (SHAPES[parts[-1]][2] if parts[-1] in SHAPES else None)
            self.answer({"name": parts[-1], **({"guestCpus": cpus} if cpus else {})})
        else:
            self.answer({"error": {"code": 404, "message": f"The resource '{self.path}' was not found"}}, 404)

    def _list_skus(self) -> dict[str, object]:
        """Two pages of the catalogue; a wrong service answers 200 without any."""
        url = urlsplit(self.path)
        if url.path != "/v1/services/6F81-5844-456A/skus":
            return {"skus": []}
        half = len(SKUS) // 2
        if "pageToken" in parse_qs(url.query):
            return {"skus": SKUS[half:], "nextPageToken": ""}
        return {"skus": SKUS[:half], "nextPageToken": "second"}

    def _disk(self, handle: str) -> dict[str, object]:
        return {"name": handle.rpartition("/")[2], "sizeGb": "10", "status": "READY", "zone": f"https://x/zones/{ZONE}"}

    def _outside(self, parts: list[str]) -> None:
        """ASSUMED: GKE labels the disks of all volumes; forwarding rules are filtered by their address."""
        place, _, wanted = parts[-1].partition("?filter=")
        if parts[-2] == "disks":
            found = [item for item in self.world.outside if item.endswith("/".join(parts))]
        elif place == "disks":
            disks = [item for item in self.world.outside if "/disks/" in item and "labels." in wanted]
            self.answer({"items": {f"zones/{ZONE}": {"disks": [self._disk(item) for item in disks]}}})
            return
        else:
            found = [item for item in self.world.outside if wanted == f"IPAddress%3D{item}" and parts[0] != "global"]
        items = [self._disk(item) for item in found]
        if parts[-2] == "disks" and not items:
            self.answer({"error": {"code": 404, "message": f"The resource '{self.path}' was not found"}}, 404)
            return
        self.answer(items[0] if parts[-2] == "disks" else {"items": items})


class Kube(Handler):
    """One API server for all clusters of a test: each test has one cluster at a time."""

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        if not self.world.knows(self.headers.get("Authorization", "")):
            self.answer({"kind": "Status", "message": "Unauthorized", "reason": "Unauthorized"}, 401)
            return
        url = urlsplit(self.path)
        with self.world.lock:
            if url.path.startswith(PODS):
                name = url.path.removeprefix(PODS).strip("/")
                pods = self.world.pods_of("")
                code, document = pods.answer(self.command, name, body, self.world.machines())
                self.answer(document, code)
                return
            role = parse_qs(url.query).get("labelSelector", ["="])[0].partition("=")[2]
            self.answer({"items": self.world.nodes(role)})

    do_POST = do_DELETE = do_GET
