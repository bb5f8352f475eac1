"""The HTTP side of the GKE double: sign-in, Compute Engine, and the Kubernetes API of the clusters."""

import contextlib
import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.fakes.gke_fabric import answer_object, may_apply
from tests.fakes.gke_facts import PLAIN, PODS, REGION, SHAPES, ZONE, ZONES, ApiError
from tests.fakes.gke_rights import permission_of_kubernetes, permission_of_web
from tests.fakes.kube_pods import Object, start_job

if TYPE_CHECKING:
    from tests.fakes.gke import World


ARM_FAMILIES = ("a4x-", "c4a-", "n4a-", "t2a-")
REPOSITORY = re.compile(r"[a-z][-a-z0-9]{0,61}[a-z0-9]")
HTTP_CODES = {
    "UNAVAILABLE": 503, "INTERNAL": 500, "DEADLINE_EXCEEDED": 504, "PERMISSION_DENIED": 403, "RESOURCE_EXHAUSTED": 429,
}  # fmt: skip


def refuse(code: int, message: str, status: str) -> tuple[int, Object]:
    """An answer as Google's REST APIs refuse: its code, and a document with the name of the status."""
    return code, {"error": {"code": code, "message": message, "status": status}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer, sent in two parts, would wait 40 ms for an acknowledgement

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
        with contextlib.suppress(ConnectionError):  # the client was killed
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class Web(Handler):
    """Sign-in, and what Compute Engine tells of machines and quotas."""

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        if parsed and (permission := permission_of_web(self.command, self.path)):
            self.world.permissions.add(permission)
        return parsed

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.world.networks.serves(self.path):
            self._serve_network(json.loads(body))
            return
        if "/repositories" in self.path:
            self._serve("Repository", lambda: self._do_repository(json.loads(body or b"{}")))
            return
        if self.path.endswith(":testIamPermissions"):
            asked = json.loads(body)["permissions"]
            self.answer({"permissions": [name for name in asked if name not in self.world.denied]})
            return
        if self.path.endswith(":getIamPolicy"):
            self._serve("Policy", self._read_policy)
            return
        if self.world.token_answer is not None:
            self.answer(self.world.token_answer, 400)
            return
        self.world.tokens += 1
        self.answer({"access_token": f"token-{self.world.tokens}", "expires_in": 3600, "token_type": "Bearer"})

    def do_PATCH(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._serve("Repository", lambda: self._do_repository(json.loads(body)))

    def do_DELETE(self) -> None:
        if self.world.networks.serves(self.path):
            self._serve_network({})
            return
        self._serve("Repository", lambda: self._do_repository({}))

    def _serve_network(self, body: Object) -> None:
        what = {"POST": "Insert", "DELETE": "Drop", "GET": "List" if "?" in self.path else "Get"}[self.command]
        path = urlsplit(self.path).path.split("/")[5:]
        networks = self.world.networks
        self._serve(f"{what}Network", lambda: networks.answer(self.command, self.path, body), "/".join(path[-2:]))

    def _serve(self, what: str, work: Callable[[], tuple[int, Object]], subject: str = "") -> None:
        """Answer a request that is logged, and may get into trouble, as those by gRPC."""
        method = what if subject else f"{what}{self.command}"
        try:
            code, document = self.world.serve_logged(method, f"{method} {subject}", work)
        except ApiError as error:
            code, document = refuse(HTTP_CODES.get(error.code.name, 500), str(error), error.code.name)
            if error.code.name == "RESOURCE_EXHAUSTED" and subject:
                # So Compute Engine refuses too many requests. Source: terraform-provider-google 8360 and 9207.
                code, reason = 403, {"message": str(error), "domain": "usageLimits", "reason": "rateLimitExceeded"}
                document = {"error": {"code": code, "message": str(error), "errors": [reason]}}
        self.answer(document, code)

    def _read_policy(self) -> tuple[int, Object]:
        """The project's policy."""
        if self.world.policy_denied:
            return refuse(403, "Policy update access denied.", "PERMISSION_DENIED")
        return 200, self.world.policy

    def _list_repositories(self, parent: str, below: str | None) -> tuple[int, Object]:
        """The regions that have repositories of Artifact Registry, or the repositories of one."""
        if below is None:
            places = ("europe-west1", "us-central1")
            return 200, {"locations": [{"name": f"{parent}/{place}", "locationId": place} for place in places]}
        found = [item for path, item in self.world.repositories.items() if path.startswith(f"{parent}{below}/")]
        return 200, {"repositories": found}

    def _do_repository_policy(self, path: str, question: str, body: Object) -> tuple[int, Object]:
        """Who may use a repository; machines read it only if their account is bound, or has a role in the project."""
        if path not in self.world.repositories:
            return refuse(404, "Requested entity was not found.", "NOT_FOUND")
        if self.world.repository_policy_denied:
            return refuse(403, f"Permission 'artifactregistry.repositories.{question}' denied.", "PERMISSION_DENIED")
        policies = self.world.repository_policies
        if question == "setIamPolicy":
            if body["policy"].get("etag", "0") != policies.get(path, {}).get("etag", "0"):
                return refuse(409, "There were concurrent policy changes.", "ABORTED")
            policies[path] = {**body["policy"], "etag": str(int(body["policy"].get("etag", "0")) + 1)}
        return 200, policies.get(path, {"etag": "0"})

    def _do_repository(self, body: Object) -> tuple[int, Object]:
        url = urlsplit(self.path)
        path, repositories = url.path.removeprefix("/v1/"), self.world.repositories
        if self.command == "PATCH":
            repositories[path].update(body)
            return 200, repositories[path]
        path, _, question = path.partition(":")
        if question:
            return self._do_repository_policy(path, question, body)
        if self.command == "POST":
            name = parse_qs(url.query)["repositoryId"][0]
            if not REPOSITORY.fullmatch(name) or body.get("format") != "DOCKER":
                return refuse(400, f"Invalid repository ID: {name}", "INVALID_ARGUMENT")
            if f"{path}/{name}" in repositories:
                return refuse(409, "the repository already exists", "ALREADY_EXISTS")
            repositories[f"{path}/{name}"] = {"name": f"{path}/{name}", **body}
            return 200, {"name": "operations/1"}
        if path not in repositories:
            return refuse(404, "Requested entity was not found.", "NOT_FOUND")
        if self.command == "DELETE":
            del repositories[path]
            return 200, {"name": "operations/2"}
        return 200, repositories[path]

    def do_GET(self) -> None:
        if self.world.networks.serves(self.path):
            self._serve_network({})
            return
        if "/repositories/" in self.path:
            self._serve("Repository", lambda: self._do_repository({}))
            return
        if match := re.fullmatch(r"/v1/(projects/[a-z0-9-]+/locations)(/[a-z0-9-]+/repositories)?\?.*", self.path):
            parent, below = match.groups()
            self._serve("ListRepositories", lambda: self._list_repositories(parent, below))
            return
        if match := re.fullmatch(r"/v1/projects/([a-z0-9-]+)", self.path):
            self.answer({"projectId": match[1], "projectNumber": "123456789"})
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
        elif parts[:1] == ["zones"] and "/".join(parts[1:]) in self.world.reservations:
            self.answer(self.world.reservations["/".join(parts[1:])])
        elif parts == ["zones", ZONE, "acceleratorTypes"]:
            self.answer({"items": [{"name": "nvidia-tesla-t4"}, {"name": "nvidia-l4"}, {"name": "ct5lp"}]})
        elif (
            parts[:1] == ["zones"]
            and parts[1] in ZONES
            and (len(parts) == 2 or parts[3] in (*SHAPES, *PLAIN, "nvidia-tesla-t4"))
        ):
            cpus = PLAIN.get(parts[-1]) or (SHAPES[parts[-1]][2] if parts[-1] in SHAPES else None)
            found: Object = {"name": parts[-1], **({"guestCpus": cpus} if cpus else {})}
            found["architecture"] = "ARM64" if parts[-1].startswith(ARM_FAMILIES) else "X86_64"
            if parts[-1] in SHAPES and not self.world.hides_accelerators:
                kind, count, _ = SHAPES[parts[-1]]
                found["accelerators"] = [{"guestAcceleratorType": kind, "guestAcceleratorCount": count}]
            self.answer(found)
        else:
            self.answer({"error": {"code": 404, "message": f"The resource '{self.path}' was not found"}}, 404)

    def _disk(self, handle: str) -> dict[str, Any]:
        zone, name = handle.partition("/zones/")[2].partition("/")[0], handle.rpartition("/")[2]
        labels = {"goog-k8s-cluster-name": self.world.claimant, "goog-k8s-cluster-location": zone}
        found = {"name": name, "sizeGb": "10", "status": "READY", "zone": f"https://x/zones/{zone}"}
        return {**found, "labels": labels}

    def _outside(self, parts: list[str]) -> None:
        """ASSUMED: GKE labels the disks of all volumes; forwarding rules are filtered by their address."""
        place, _, wanted = parts[-1].partition("?filter=")
        wanted, _, token = wanted.partition("&pageToken=")
        if wanted and not token and self.world.networks.page == 1:  # nothing for the filter so far
            self.answer({"nextPageToken": "second"})
            return
        if parts[-2] == "disks":
            found = [item for item in self.world.outside if item.endswith("/".join(parts))]
        elif place == "disks":
            asked = set(re.findall(r"labels\.([\w-]+)=([\w-]+)", unquote(wanted)))
            disks = [self._disk(item) for item in self.world.outside if "/disks/" in item]
            named = [disk for disk in disks if asked and asked <= set(disk["labels"].items())]
            self.answer({"items": {f"zones/{ZONE}": {"disks": named}}})
            return
        elif wanted.startswith("name%3D"):  # nothing in them names their cluster
            name = wanted.removeprefix("name%3D")
            is_here = parts[:2] == ["regions", REGION] and name in self.world.balancers
            self.answer({"items": [{"name": name, "IPAddress": "203.0.113.7"}] if is_here else []})
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
        if self.world.unknown_looks:
            self.world.unknown_looks -= 1
            self.answer({"kind": "Status", "message": "forbidden", "reason": "Forbidden"}, 403)
            return
        url = urlsplit(self.path)
        self.world.permissions |= {"container.clusters.connect", permission_of_kubernetes(self.command, self.path)}
        if self.command == "PATCH" and url.path not in self.world.objects:  # applied: created if it is not there
            self.world.permissions.add(permission_of_kubernetes("POST", self.path))
        with self.world.lock:
            if url.path.startswith(PODS):
                name = url.path.removeprefix(PODS).strip("/")
                pods = self.world.pods_of("")
                code, document = pods.answer(self.command, name, body, self.world.machines())
                self.answer(document, code)
                return
            if self.command == "PATCH" and body is not None and may_apply(self.world, url.path):
                known = self.world.objects.get(url.path)
                self.world.objects[url.path] = start_job(known, body) if "/jobs/" in url.path else body
                self.answer(self.world.objects[url.path])
                return
            if self.command == "DELETE" and url.path in self.world.objects:
                self.answer(self.world.objects.pop(url.path))
                return
            if url.path != "/api/v1/nodes":
                code, document = answer_object(self.world, url.path)
                self.answer(document, code)
                return
            role = parse_qs(url.query).get("labelSelector", ["="])[0].partition("=")[2]
            self.answer({"items": self.world.nodes(role)})

    do_POST = do_DELETE = do_PATCH = do_GET
