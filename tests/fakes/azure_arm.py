"""Azure's side of an AKS cluster: groups, clusters, pools, identities, roles, and the operations that change them.

The rules below are assumptions: what Azure's documents and answers in public reports say, not what was observed in a
subscription (docs/development). Operations take time: so many looks, or seconds. `world.trouble` says which
requests go wrong, and how. `azure_web.py` serves it.
"""

import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NoReturn

from tests.fakes.azure_facts import OPERATION_ERRORS, SIZES, SUBSCRIPTION, TENANT, Message
from tests.fakes.azure_rules import SPOT_TAINT, ApiError, PoolRules, quota_names
from tests.fakes.cloud_double import CloudDouble
from tests.fakes.kube_pods import Node, Object, Pods, held_nodes

Finish = Callable[[bool], None]


@dataclass
class Operation:
    name: str
    target: str  # path of what it changes, in lower case
    looks: int
    until: float
    finish: Finish
    error: tuple[str, str] | None = None
    done: bool = False
    asked: float = 0.0  # when it was asked for last


@dataclass
class World(CloudDouble, PoolRules):
    """What exists, what was asked, and what is to go wrong."""

    looks: int = 2  # at anything of its target until an operation is done
    seconds: float = 0.0  # that an operation takes besides
    by_location: bool = False  # operations are named by the header Location, and have no document
    retry_after: int | None = None  # seconds that clients are asked to wait
    groups: dict[str, Message] = field(default_factory=dict)  # by name in lower case
    clusters: dict[str, Message] = field(default_factory=dict)  # by path in lower case
    others: dict[str, Message] = field(default_factory=dict)  # identities, roles, trusts, placement groups, by path
    operations: dict[str, Operation] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    # By request number or its words ("PUT agentPools"): kill-before kill-after, STATUS-before, or CODE-before.
    trouble: dict[int | str, str] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)  # kind of what is made: key of OPERATION_ERRORS
    empty_zones: set[str] = field(default_factory=set)  # numbers of those that have no machines left
    unregistered: set[str] = field(default_factory=set)  # services that the subscription has not registered
    vnets: dict[str, list[str]] = field(default_factory=dict)  # others' networks: ranges by path in lower case
    late: int = 0  # requests for which a group that was just made is not there
    locked: bool = False  # a lock of the subscription forbids deletions (CAPZ 3354)
    blocked: int = 0  # deletions of groups that fail in the end
    required_tag: str | None = None  # that Azure Policy wants on groups
    denied: set[str] = field(default_factory=set)  # actions that the caller may not do
    actions: set[str] = field(default_factory=set)  # that the requests so far have needed
    too_early: int = 0  # questions about an operation before the time that was asked for
    unknown_looks: int = 1  # at a new identity until Entra knows it everywhere
    lacking: int = 0  # machines that a failed pool has nevertheless got
    pidfile: Path | None = None
    tokens: int = 0
    token_answer: Message | None = None
    wants_entra: bool = False  # a policy refuses clusters with local accounts
    subscriptions: list[str] = field(default_factory=lambda: [SUBSCRIPTION])
    lock: Any = field(default_factory=threading.RLock)
    kubeconfig: Callable[[str], str] = lambda name: ""
    pods: Pods = field(default_factory=Pods)
    forget_kubernetes: Callable[[], None] = lambda: None
    plugin_applied: Callable[[], Object | None] = lambda: None
    driver: str = "580.126.09"
    versions: bool = True  # whether AKS offers any

    def strike(self, kind: str) -> NoReturn:
        """Raise ARM's error of this kind of trouble."""
        if kind == "kill":
            self.kill_client()
            raise ApiError(503, "ServerUnavailable", "the client was killed")
        status, _, code = kind.partition(" ")
        raise ApiError(int(status), code or {"429": "TooManyRequests", "403": "AuthorizationFailed"}.get(status, "Err"),
                       f"{kind}: the test said so")  # fmt: skip

    # --- groups -------------------------------------------------------------------------------------------------

    def put_group(self, name: str, body: Message) -> tuple[int, Message]:
        self.check_group(name, body)
        if self.lacks_tag(body):
            raise ApiError(403, "RequestDisallowedByPolicy", self.policy_words(name))
        known = self.groups.get(name.lower())
        if known is not None and known["location"] != body["location"]:
            words = f"Invalid resource group location '{body['location']}'. The Resource group already exists."
            raise ApiError(409, "InvalidResourceGroupLocation", words)
        if known is not None and known["properties"]["provisioningState"] == "Deleting":
            raise ApiError(409, "ResourceGroupBeingDeleted", f"The resource group '{name}' is being deleted.")
        made = {"id": f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{name}", "name": name, **body}
        self.groups[name.lower()] = {**made, "properties": {"provisioningState": "Succeeded"}}
        return 200 if known else 201, self.groups[name.lower()]

    def lacks_tag(self, body: Message) -> bool:
        return self.required_tag is not None and self.required_tag not in (body.get("tags") or {})

    def policy_words(self, name: str) -> str:
        """Source: MicrosoftDocs/azure-docs 99846, Azure/AKS 211."""
        policies = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Authorization"
        named = f'{{"name":"Tags","id":"{policies}/policyAssignments/tag-governance"}}'
        return (
            f"Resource '{name}' was disallowed by policy. Reasons: 'Resource group validation failed since you did not "
            f"supply a '{self.required_tag}' tag.'. Policy identifiers: '[{{\"policyAssignment\":{named}}}]'."
        )

    def find_group(self, name: str, look: bool = False) -> Message:
        """Another region of Azure answers, which may not know the group yet: terraform-provider-azurerm 18268."""
        if look:
            self.look(f"group {name.lower()}")
        is_late = self.late > 0 and name.lower() in self.groups
        self.late -= is_late
        if is_late or name.lower() not in self.groups:
            raise ApiError(404, "ResourceGroupNotFound", f"Resource group '{name}' could not be found.")
        return self.groups[name.lower()]

    def require_group(self, name: str) -> Message:
        """A group in which something may be made."""
        found = self.find_group(name)
        if found["properties"]["provisioningState"] == "Deleting":
            words = f"The resource group '{name}' is in deprovisioning state and cannot perform this operation."
            raise ApiError(409, "ResourceGroupBeingDeleted", words)
        return found

    def delete_group(self, name: str) -> Operation:
        """All in the group goes, and with a cluster the group of its machines."""
        found = self.find_group(name)
        if found["properties"]["provisioningState"] == "Deleting":
            return next(item for item in self.operations.values() if item.target == f"group {name.lower()}")
        found["properties"]["provisioningState"] = "Deleting"
        inside = f"/resourcegroups/{name.lower()}/"

        def finish(failed: bool) -> None:
            if failed:  # Azure shows the group as it was before
                found["properties"]["provisioningState"] = "Succeeded"
                return
            for path in [path for path in self.clusters if inside in path]:
                self._forget_cluster(path)
            for path in [path for path in self.others if inside in path]:
                del self.others[path]
            del self.groups[name.lower()]

        self.blocked -= 1
        return self.begin(f"group {name.lower()}", finish, "blocked" if self.blocked >= 0 else None)

    def find_network(self, path: str) -> Message:
        if path.lower() not in self.vnets:
            raise ApiError(404, "ResourceNotFound", f"The Resource '{path.split('/providers/')[1]}' was not found.")
        return {"id": path, "properties": {"addressSpace": {"addressPrefixes": self.vnets[path.lower()]}}}

    def check_ranges(self, properties: Message) -> None:
        """The cluster's own ranges are outside of the machines' network. Sources: Azure/AKS 1117 and 3551; the words
        about pods are ASSUMED."""
        network = str(properties["agentPoolProfiles"][0].get("vnetSubnetID")).lower().partition("/subnets/")[0]
        profile = properties["networkProfile"]
        for what, default in (("service", "10.0.0.0/16"), ("pod", "10.244.0.0/16")):
            own = ip_network(profile.get(f"{what}Cidr", default))
            for other in self.vnets.get(network, ()):
                if own.overlaps(ip_network(other)):
                    words = f"The specified {what} CIDR {own} is conflicted with an existing subnet CIDR {other}"
                    raise ApiError(400, f"{what.title()}CidrOverlapExistingSubnetsCidr", words, flat=True)
        if ip_address(profile.get("dnsServiceIP", "10.0.0.10")) not in ip_network(profile["serviceCidr"]):
            raise ApiError(400, "InvalidDNSServiceIP", "dnsServiceIP is not in serviceCidr.", flat=True)  # ASSUMED

    # --- clusters and pools -------------------------------------------------------------------------------------

    def put_cluster(self, path: str, body: Message) -> tuple[Message, Operation]:
        name, group = path.split("/")[-1], path.split("/")[4]
        self.require_group(group)
        self.check_cluster(name, body)
        self.check_accounts(name, body["properties"])
        self.check_ranges(body["properties"])
        if path.lower() in self.clusters:
            self.alone(path)
        for pool in body["properties"]["agentPoolProfiles"]:
            self.check_subnet(pool, body["identity"])
            self.check_quota(pool, body["location"])
            pool["provisioningState"] = "Creating"
        nodes = body["properties"]["nodeResourceGroup"]
        if self.lacks_tag(body):
            words = f"Resource request failed due to RequestDisallowedByPolicy. {self.policy_words(nodes)}"
            raise ApiError(400, "ReconcileResourceGroupError", words)
        tags = dict(body.get("tags") or {})  # ASSUMED: AKS copies the cluster's tags to the group of the machines
        self.groups[nodes.lower()] = {
            "id": f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{nodes}", "name": nodes, "tags": tags,
            "location": body["location"], "managedBy": path, "properties": {"provisioningState": "Succeeded"},
        }  # fmt: skip
        made = {**body, "id": path, "name": name}
        made["properties"] = {**body["properties"], "provisioningState": "Creating"}
        self.clusters[path.lower()] = made

        def finish(failed: bool) -> None:
            properties = made["properties"]
            properties["provisioningState"] = "Failed" if failed else "Succeeded"
            kubelet = {"objectId": f"kubelet-of-{name}"}
            properties["identityProfile"] = {"kubeletidentity": kubelet}
            properties["oidcIssuerProfile"] = {"enabled": True, "issuerURL": f"https://{name}.oic.example/{TENANT}/"}
            for pool in properties["agentPoolProfiles"]:
                pool["provisioningState"] = properties["provisioningState"]

        return made, self.begin(path, finish, self.failing.get("managedClusters"))

    def check_subnet(self, pool: Message, identity: Message) -> None:
        """A subnet of somebody's is joined by rights of the caller and of the cluster's identity on it.

        Source: AKS' page on its own network, issue Azure/AKS 2673. The words of the second refusal are a guess.
        """
        subnet = str(pool.get("vnetSubnetID") or "").lower()
        if not subnet:
            return
        wanted = {"Microsoft.Network/virtualNetworks/subnets/join/action"}
        if identity.get("userAssignedIdentities"):
            wanted.add("Microsoft.ManagedIdentity/userAssignedIdentities/assign/action")
        self.actions |= wanted
        if denied := sorted(wanted & self.denied):
            words = f"The client has permission to write, however, it does not have permission to perform {denied[0]}."
            raise ApiError(403, "LinkedAuthorizationFailed", words)
        own = [self.others.get(path.lower()) for path in identity.get("userAssignedIdentities") or {}]
        principals = [item["properties"]["principalId"] for item in own if item]
        roles = [item["properties"] for path, item in self.others.items() if path.startswith(f"{subnet}/providers/")]
        if not any(role.get("principalId") in principals for role in roles):
            words = f"The cluster's identity does not have permission to perform {sorted(wanted)[-1]} on {subnet}."
            raise ApiError(400, "LinkedAuthorizationFailed", words)

    def check_accounts(self, name: str, properties: Message) -> None:
        """A policy may demand that local accounts are disabled, which needs Entra. The second words are ASSUMED."""
        disabled = bool(properties.get("disableLocalAccounts"))
        if self.wants_entra and not disabled:
            words = self.policy_words(name).replace("Tags", "Azure Kubernetes Clusters should disable local accounts")
            raise ApiError(403, "RequestDisallowedByPolicy", words)
        if disabled and not properties.get("aadProfile", {}).get("managed"):
            raise ApiError(400, "BadRequest", "disableLocalAccounts requires that the cluster is AAD enabled.")

    def find_cluster(self, path: str, look: bool = False) -> Message:
        self.find_group(path.split("/")[4])
        if look:
            self.look(path)
        if path.lower() not in self.clusters:
            words = f"The Resource 'Microsoft.ContainerService/managedClusters/{path.split('/')[-1]}' was not found."
            raise ApiError(404, "ResourceNotFound", words)
        return self.clusters[path.lower()]

    def delete_cluster(self, path: str) -> Operation:
        self.find_cluster(path)["properties"]["provisioningState"] = "Deleting"
        return self.begin(path, lambda failed: self._forget_cluster(path.lower()), None)

    def _forget_cluster(self, path: str) -> None:
        found = self.clusters.pop(path)
        self.groups.pop(found["properties"]["nodeResourceGroup"].lower(), None)
        self.forget_kubernetes()

    def find_pool(self, path: str, look: bool = False) -> Message:
        cluster, _, name = path.partition("/agentPools/")
        for pool in self.find_cluster(cluster, look)["properties"]["agentPoolProfiles"]:
            if pool["name"] == name:
                return {"id": path, "name": name, "properties": {**pool}}
        raise ApiError(404, "NotFound", f"Could not find the agent pool {name}.", flat=True)

    def put_pool(self, path: str, body: Message) -> tuple[Message, Operation]:
        cluster_path, _, name = path.partition("/agentPools/")
        self.require_group(path.split("/")[4])
        cluster = self.find_cluster(cluster_path)
        self.alone(cluster_path)
        asked = {**body["properties"], "name": name}
        self.check_pool(name, asked, cluster["location"])
        self.check_subnet(asked, cluster["identity"])
        pools = cluster["properties"]["agentPoolProfiles"]
        known = next((pool for pool in pools if pool["name"] == name), None)
        if known is not None and known.get("scaleSetPriority") != asked.get("scaleSetPriority"):
            raise ApiError(400, "PropertyChangeNotAllowed", "Changing scaleSetPriority is not allowed.", flat=True)
        if asked.get("enableAutoScaling"):
            least, most = asked.get("minCount", 0), asked.get("maxCount", 0)
            if not (asked.get("mode") == "User" or least > 0) or not 0 <= least <= asked["count"] <= most or most < 1:
                words = f"Autoscaling range {least} to {most} is invalid for {asked['count']} nodes."
                raise ApiError(400, "InvalidParameter", words, flat=True)
        placement = asked.get("proximityPlacementGroupID")
        if placement and placement.lower() not in self.others:
            raise ApiError(400, "InvalidParameter", f"The proximity placement group {placement} was not found.")
        self.check_quota(asked, cluster["location"], int(known["count"]) if known else 0)
        if asked.get("scaleSetPriority") == "Spot":
            asked["nodeTaints"] = [*dict.fromkeys([*(asked.get("nodeTaints") or []), SPOT_TAINT])]
        asked["provisioningState"] = "Updating" if known else "Creating"
        cluster["properties"]["agentPoolProfiles"] = [*(pool for pool in pools if pool["name"] != name), asked]
        failure = self.failing.get("agentPools")
        if set(asked.get("availabilityZones") or []) & self.empty_zones:
            failure = "zone"

        def finish(failed: bool) -> None:
            asked["provisioningState"] = "Failed" if failed else "Succeeded"

        return self.find_pool(path), self.begin(cluster_path, finish, failure)

    def delete_pool(self, path: str) -> Operation:
        cluster_path, _, name = path.partition("/agentPools/")
        pools = self.find_cluster(cluster_path)["properties"]["agentPoolProfiles"]
        self.find_pool(path)
        self.alone(cluster_path)
        if [pool["name"] for pool in pools if pool.get("mode") == "System"] == [name]:
            raise ApiError(400, "OperationNotAllowed", "There has to be at least one system pool.", flat=True)
        next(pool for pool in pools if pool["name"] == name)["provisioningState"] = "Deleting"

        def finish(failed: bool) -> None:
            cluster = self.clusters[cluster_path.lower()]
            kept = [pool for pool in cluster["properties"]["agentPoolProfiles"] if pool["name"] != name]
            cluster["properties"]["agentPoolProfiles"] = kept

        return self.begin(cluster_path, finish, None)

    # --- identities, roles and the like: made at once -----------------------------------------------------------

    def put_other(self, path: str, body: Message) -> tuple[int, Message]:
        self.require_group(path.split("/")[4])
        kind, name = path.split("/")[-2:]
        known = self.others.get(path.lower())
        made = {**body, "id": path, "name": name}
        properties: Message = {**(body.get("properties") or {}), "provisioningState": "Succeeded"}
        if kind == "userAssignedIdentities":
            ids = known["properties"] if known else {"principalId": str(uuid.uuid4()), "clientId": str(uuid.uuid4())}
            properties |= {"tenantId": TENANT, **ids}
        if kind == "registries":
            if not re.fullmatch(r"[a-z0-9]{5,50}", name):
                raise ApiError(400, "InvalidResourceName", f"The registry name {name} is invalid.")
            properties["loginServer"] = f"{name}.azurecr.io"
        if kind == "roleAssignments":
            if known is not None:
                raise ApiError(409, "RoleAssignmentExists", "The role assignment already exists.")
            principals = [item["properties"].get("principalId") for item in self.others.values()]
            self.unknown_looks -= 1
            kubelets = [f"kubelet-of-{item['name']}" for item in self.clusters.values()]
            if properties["principalId"] not in [*principals, *kubelets] or self.unknown_looks >= 0:
                raise ApiError(400, "PrincipalNotFound", f"Principal {properties['principalId']} does not exist.")
        self.others[path.lower()] = {**made, "properties": properties}
        return 200 if known else 201, self.others[path.lower()]

    def find_other(self, path: str) -> Message:
        self.find_group(path.split("/")[4])
        if path.lower() not in self.others:
            raise ApiError(404, "ResourceNotFound", f"The Resource '{path.split('/providers/')[1]}' was not found.")
        return self.others[path.lower()]

    # --- operations ---------------------------------------------------------------------------------------------

    def begin(self, target: str, finish: Finish, failure: str | None) -> Operation:
        error = OPERATION_ERRORS[failure] if failure else None
        until = time.monotonic() + self.seconds
        operation = Operation(str(uuid.uuid4()), target.lower(), self.looks, until, finish, error)
        operation.asked = time.monotonic()
        self.operations[operation.name] = operation
        return operation

    def look(self, target: str) -> None:
        for operation in list(self.operations.values()):
            if operation.target == target.lower() and not operation.done:
                operation.looks -= 1
                if operation.looks <= 0 and time.monotonic() >= operation.until:
                    operation.done = True
                    if not self._is_overtaken(operation):
                        operation.finish(operation.error is not None)

    def _is_overtaken(self, operation: Operation) -> bool:
        """Whether what it works on has been deleted in between."""
        return operation.target.startswith("/") and operation.target not in self.clusters

    def answer_operation(self, name: str) -> Message:
        operation = self.operations.get(name)
        if operation is None:
            raise ApiError(404, "NotFound", f"The operation {name} was not found.")
        if self.retry_after and time.monotonic() - operation.asked < self.retry_after - 0.05:
            self.too_early += 1
        operation.asked = time.monotonic()
        self.look(operation.target)
        if not operation.done:
            return {"name": name, "status": "InProgress"}
        if operation.error:
            code, message = operation.error
            return {"name": name, "status": "Failed", "error": {"code": code, "message": message}}
        return {"name": name, "status": "Succeeded"}

    def alone(self, path: str) -> None:
        """A cluster is changed by one operation at a time."""
        for operation in self.operations.values():
            if operation.target == path.lower() and not operation.done:
                state = self.clusters[path.lower()]["properties"]["provisioningState"]
                words = (
                    f"Operation is not allowed: Another operation ({state}) is in progress, please wait for it to "
                    "finish before starting a new operation. See https://aka.ms/aks-pending-operation for more details"
                )
                raise ApiError(409, "OperationNotAllowed", words, flat=True)

    # --- machines -----------------------------------------------------------------------------------------------

    def count_used(self) -> dict[str, int]:
        used: Counter[str] = Counter()
        for cluster in self.clusters.values():
            for pool in cluster["properties"]["agentPoolProfiles"]:
                names, cpus = quota_names(pool)
                for name in names:
                    used[name] += cpus
        return used

    def pools(self) -> list[Message]:
        return [pool for item in self.clusters.values() for pool in item["properties"]["agentPoolProfiles"]]

    def autoscale(self, jobs: list[Object], now: float) -> None:
        """What the cluster's autoscaler makes of idle pools by then: it removes machines that no pod holds."""
        for pool in self.pools():
            if pool.get("enableAutoScaling"):
                held = held_nodes(jobs, pool.get("nodeLabels") or {}, now)
                pool["count"] = max(pool["minCount"], min(pool["maxCount"], held))

    def _count_machines(self, pool: Message) -> int:
        if pool["provisioningState"] == "Succeeded":
            return int(pool["count"])
        return int(pool["count"]) - self.lacking if self.lacking and pool["provisioningState"] == "Failed" else 0

    def _count_gpus(self, pool: Message) -> int:
        """A machine shows GPUs once its driver is installed and the device plugin may run on it."""
        _, _, gpus, _ = next(value for size, value in SIZES.items() if size.lower() == pool["vmSize"].lower())
        plugin = self.plugin_applied()
        if not gpus or plugin is None or (pool.get("gpuProfile") or {}).get("driver") != "Install":
            return 0
        spec = plugin["spec"]["template"]["spec"]
        tolerated = {item["key"] for item in spec["tolerations"]}
        taints = {taint.partition("=")[0] for taint in pool.get("nodeTaints") or []}
        fits = spec["nodeSelector"].items() <= (pool.get("nodeLabels") or {}).items() and taints <= tolerated
        return gpus if fits else 0

    def nodes(self, role: str) -> list[Object]:
        found = []
        for pool in self.pools():
            if role and (pool.get("nodeLabels") or {}).get("mlbench-role") != role:
                continue
            gpus = self._count_gpus(pool)
            allocatable = {"nvidia.com/gpu": str(gpus)} if gpus else {}
            status = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": allocatable}
            for number in range(self._count_machines(pool)):
                name = f"aks-{pool['name']}-12345678-vmss{number:06}"
                found.append({"metadata": {"name": name, "labels": pool.get("nodeLabels") or {}}, "status": status})
        return found

    def machines(self) -> list[Node]:
        """The machines as containers on them see them: NVIDIA's runtime shows the driver that AKS has installed."""
        return [
            Node(
                dict(pool.get("nodeLabels") or {}),
                tuple(taint.partition("=")[0] for taint in pool.get("nodeTaints") or []),
                self._count_gpus(pool),
                mounted=False,
                driver=self.driver,
            )
            for pool in self.pools()
            for _ in range(self._count_machines(pool))
        ]
