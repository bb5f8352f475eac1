"""Compute Engine's networks, subnetworks and firewall rules in the double of Google: what is refused, and until when.

Sources: Compute Engine's REST reference and the words of its refusals in public reports; docs/development.
"""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import ip_network
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.gke_facts import PROJECT, REGION
from tests.fakes.kube_pods import Object

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
COLLECTIONS = ("global/networks", f"regions/{REGION}/subnetworks", "global/firewalls")
URL = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/"
# What each takes: none of them has labels.
FIELDS = {
    "networks": {"name", "description", "autoCreateSubnetworks", "mtu", "routingConfig"},
    "subnetworks": {"name", "description", "network", "ipCidrRange"},
    "firewalls": {"name", "description", "network", "sourceRanges", "allowed", "direction"},
}
QUOTAS = {"networks": "NETWORKS", "subnetworks": "SUBNETWORKS", "firewalls": "FIREWALLS"}


class Refusal(Exception):
    """A refusal with the reason that Compute Engine's REST API names."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def answer(self) -> tuple[int, Object]:
        error = {"reason": self.reason, "message": str(self), "domain": "global"}
        return self.code, {"error": {"code": self.code, "message": str(self), "errors": [error]}}


@dataclass
class Change:
    """An operation of Compute Engine: done after so many looks at it."""

    path: str
    method: str
    looks: int
    region: str | None = None
    error: Refusal | None = None


@dataclass
class Networks:
    """Parts of networks by path below the project; `used_by` are machines with a card in a network."""

    looks: int = 2
    found: dict[str, Object] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    failing: str | None = None  # kind whose next creation is accepted, and fails as an operation
    used_by: dict[str, set[str]] = field(default_factory=dict)  # network's name -> paths of clusters
    # What GKE's load balancers put into a network when its deletion is asked for the first time: names of rules.
    late_rules: list[str] = field(default_factory=list)
    refuses_late: bool = False  # a network in use: the deletion is accepted, and fails as an operation
    stuck: bool = False  # GKE does not remove the networks that it made itself
    page: int = 500  # items of a list in one answer; the first page of a filtered list may be empty

    def names(self, kind: str) -> list[str]:
        """The names of all networks, subnetworks or firewalls."""
        return sorted(path.rpartition("/")[2] for path in self.found if path.split("/")[-2] == kind)

    def serves(self, path: str) -> bool:
        parts = urlsplit(path).path.split("/")
        return "/".join(parts[5:7]) in COLLECTIONS or "/".join(parts[5:8]) in COLLECTIONS or "operations" in parts

    def answer(self, method: str, url: str, body: Object) -> tuple[int, Object]:
        path = "/".join(urlsplit(url).path.split("/")[5:])
        try:
            if "operations" in path:
                return 200, self._look(path)
            if method == "POST":
                return 200, self._insert(path, body)
            if path in COLLECTIONS:
                query = {key: values[0] for key, values in parse_qs(urlsplit(url).query).items()}
                return 200, self._list(path, query.get("filter", ""), query.get("pageToken", ""))
            if method == "GET":
                self._is_changing(path)
            if path not in self.found:
                raise Refusal(404, "notFound", f"The resource 'projects/{PROJECT}/{path}' was not found")
            if method == "DELETE":
                return 200, self._delete(path)
            return 200, self.found[path]
        except Refusal as refusal:
            return refusal.answer()

    # --- operations ---------------------------------------------------------------------------------------------

    def _begin(self, path: str, method: str, error: Refusal | None = None) -> Object:
        number = f"operation-{len(self.changes)}"
        region = URL + "regions/" + REGION if path.startswith("regions/") else None
        self.changes[number] = Change(path, method, self.looks, region, error)
        return {"name": number, "status": "RUNNING", **({"region": region} if region else {})}

    def _look(self, path: str) -> Object:
        change = self.changes.get(path.rpartition("/")[2])
        place = path.partition("/operations/")[0]
        if change is None or place != (f"regions/{REGION}" if change.region else "global"):
            raise Refusal(404, "notFound", f"The resource '{path}' was not found")
        self._advance(change)
        if change.looks > 0:
            return {"name": path, "status": "RUNNING"}
        if change.error is None:
            return {"name": path, "status": "DONE"}
        error = {"code": change.error.reason, "message": str(change.error)}
        return {"name": path, "status": "DONE", "error": {"errors": [error]}}

    def _advance(self, change: Change) -> None:
        """One look at an operation, or at what it works on: the last one ends it."""
        if change.looks <= 0:
            return
        change.looks -= 1
        if change.looks == 0 and change.method != "CHECK" and (change.error is not None or change.method == "DELETE"):
            self.found.pop(change.path, None)

    def _is_changing(self, path: str) -> bool:
        changes = [change for change in self.changes.values() if change.path == path]
        for change in changes:
            self._advance(change)
        return any(change.looks > 0 for change in changes)

    # --- rules --------------------------------------------------------------------------------------------------

    def _insert(self, collection: str, body: Object) -> Object:
        kind, name = collection.rpartition("/")[2], str(body.get("name"))
        path = f"{collection}/{name}"
        if unknown := set(body) - FIELDS[kind]:
            raise Refusal(400, "badRequest", f'Invalid JSON payload received. Unknown name "{min(unknown)}"')
        if not NAME.fullmatch(name):
            raise Refusal(400, "invalid", f"Invalid value for field 'resource.name': '{name}'.")
        if path in self.found:
            raise Refusal(409, "alreadyExists", f"The resource 'projects/{PROJECT}/{path}' already exists")
        limit = self.limits.get(QUOTAS[kind])
        if limit is not None and len(self.names(kind)) >= limit:
            raise Refusal(403, "quotaExceeded", f"Quota '{QUOTAS[kind]}' exceeded.  Limit: {limit} globally.")
        if kind == "networks":
            if body.get("autoCreateSubnetworks") is not False or not 1300 <= int(body.get("mtu", 1460)) <= 8896:
                raise Refusal(400, "invalid", "Invalid value for field 'resource.mtu' or a legacy network.")
        else:
            self._check_in_network(kind, body)
        created = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.found[path] = {**body, "selfLink": URL + path, "creationTimestamp": created}
        error = None
        if self.failing == kind:
            self.failing, error = None, Refusal(0, "QUOTA_EXCEEDED", f"Quota '{QUOTAS[kind]}' exceeded.")
        return self._begin(path, "POST", error)

    def _check_in_network(self, kind: str, body: Object) -> None:
        network = str(body.get("network")).removeprefix(URL)
        if network not in self.found:
            raise Refusal(404, "notFound", f"The resource '{network}' was not found")
        if self._is_changing(network):
            raise Refusal(400, "resourceNotReady", f"The resource '{network}' is not ready")
        if kind != "subnetworks":
            return
        wanted = ip_network(body["ipCidrRange"])
        if any(wanted.overlaps(ip_network(item["ipCidrRange"])) for item in self._in_network(network, kind).values()):
            raise Refusal(400, "invalid", f"Invalid IPCidrRange: {wanted} conflicts with existing subnetwork.")

    def _delete(self, path: str) -> Object:
        kind, name = path.split("/")[-2:]
        if self._is_changing(path):
            raise Refusal(400, "resourceNotReady", f"The resource '{path}' is not ready")
        if path not in self.found:
            raise Refusal(404, "notFound", f"The resource 'projects/{PROJECT}/{path}' was not found")
        if kind == "networks" and self.late_rules:
            rule = self.late_rules.pop()
            self.found[f"global/firewalls/{rule}"] = {"name": rule, "network": URL + path, "description": "{}"}
        users = set(self.used_by.get(name, ())) if kind != "firewalls" else set()
        if kind == "networks":
            users |= set(self._in_network(path, "subnetworks")) | set(self._in_network(path, "firewalls"))
        if users:
            words = f"The {kind[:-1]} resource '{path}' is already being used by '{min(users)}'"
            if self.refuses_late:
                return self._begin(path, "CHECK", Refusal(0, "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", words))
            raise Refusal(400, "resourceInUseByAnotherResource", words)
        return self._begin(path, "DELETE")

    def _in_network(self, network: str, kind: str) -> dict[str, Object]:
        return {
            path: item
            for path, item in self.found.items()
            if path.split("/")[-2] == kind and item["network"] == URL + network
        }

    def _list(self, collection: str, wanted: str, token: str) -> Object:
        """By the filters that the client uses: of the name, or of the network. Pages hold what was looked at, so that
        one may have nothing for the filter."""
        condition = re.fullmatch(r'(name|network) eq "(.*)"', wanted)
        if condition is None:
            raise Refusal(400, "invalid", f"Invalid value for field 'filter': '{wanted}'.")
        key, pattern = condition.groups()
        items = [item for path, item in self.found.items() if path.startswith(f"{collection}/")]
        first = int(token.removeprefix("after/") or 0)
        last = first + self.page
        found = [item for item in items[first:last] if re.fullmatch(pattern, str(item.get(key)))]
        return {**({"items": found} if found else {}), **({"nextPageToken": f"after/{last}"} if items[last:] else {})}

    # --- machines -----------------------------------------------------------------------------------------------

    def attach(self, cluster: str, configs: list[Any]) -> None:
        """Machines of a cluster have a card in each of the networks. GKE adds a rule of its own to the first."""
        for config in configs:
            self.used_by.setdefault(config.network, set()).add(cluster)
        if configs:
            name = f"gke-{cluster.rpartition('/')[2]}-mn"
            network = f"{URL}global/networks/{configs[0].network}"
            self.found[f"global/firewalls/{name}"] = {"name": name, "network": network, "description": ""}

    def make_rdma(self, cluster: str) -> None:
        """GKE makes two networks for machines with RDMA: one for a further card of the machine, one for the GPUs'."""
        for part in ("gvnic", "rdma"):
            name = f"gke-{cluster.rpartition('/')[2]}-workers-{part}"
            created = datetime.now(UTC).isoformat(timespec="milliseconds")
            self.found[f"global/networks/{name}"] = {"name": name, "creationTimestamp": created, "description": ""}
            self.used_by.setdefault(name, set()).add(cluster)

    def remove_rdma(self, cluster: str) -> None:
        """With the node pool, unless one of Google's services holds on to them."""
        for part in ("gvnic", "rdma") if not self.stuck else ():
            self.found.pop(f"global/networks/gke-{cluster.rpartition('/')[2]}-workers-{part}", None)

    def detach(self, cluster: str) -> None:
        self.remove_rdma(cluster)
        for users in self.used_by.values():
            users.discard(cluster)
