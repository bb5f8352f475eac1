"""The end timer of an AKS cluster: a CronJob in the cluster that asks Azure to delete its resource group.

It uses a managed identity in the group, with the role Contributor only on the group, and federated with one service
account of this cluster (workload identity federation, without a secret). All of this is deleted with the group. Users
who may not assign roles get a cluster without a timer, and a warning. Sources: docs/clouds-assumptions.md.
"""

from collections.abc import Mapping

from mlbench_cli.errors import MlbenchError, NotFoundError
from providers.aks.api import Azure
from providers.aks.identities import assign_role, make_identity, name_assignment
from providers.aks.resources import ControlPlane, ResourceGroup, WorkerPool
from providers.aks.rights import list_denied
from providers.base import Readiness, ResourceStatus, TransientError
from providers.cluster_end import NAME, EndIdentity, EndMark, EndTimer, WorkerHold

NAMESPACE = "mlbench-end"
# Microsoft's registry, which nodes can use without an account.
IMAGE = "mcr.microsoft.com/azurelinux/base/python:3.12"
# Waits for a signal. AKS' machines already have it for their own pods.
PAUSE = "mcr.microsoft.com/oss/kubernetes/pause:3.6"
ASSIGN = "Microsoft.Authorization/roleAssignments/write"
CONTRIBUTOR = "b24988ac-6180-42a0-ab88-20f7382dd24c"  # the built-in role's ID, the same everywhere
AUDIENCE = "api://AzureADTokenExchange"


def _identity_path(group: ResourceGroup) -> str:
    return f"{group.path}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/{NAME}"


class AksEndIdentity(EndIdentity):
    """The managed identity, and its permission to delete the group."""

    def __init__(self, group: ResourceGroup) -> None:
        self.group = group
        self.name = f"{group.name}/{NAME}"
        self.needs = (group,)
        self.goes_with = group
        self.path = _identity_path(group)
        self._assignment = name_assignment(group.path, self.path)

    def find(self) -> ResourceStatus | None:
        """None until the identity has its role."""
        if self.refused is not None:
            return ResourceStatus("without a role")
        try:
            self.group.azure.get(self.path, "show the identity of the end")
            self.group.azure.get(self._assignment, "show its role")
        except NotFoundError:
            return None
        return ResourceStatus("has its role")

    def grant(self) -> None:
        principal = make_identity(self.group, self.path, "create the identity of the end")
        what = "give the identity of the end its role"
        assign_role(self.group.azure, self._assignment, CONTRIBUTOR, principal, what)


class AksEndTimer(EndTimer):
    """The CronJob that asks Azure to delete the group, and the identity's federation with its account."""

    image, script, audience = IMAGE, "aks_end.py", AUDIENCE

    def __init__(self, plane: ControlPlane, identity: AksEndIdentity | None = None) -> None:
        super().__init__(plane.cluster, plane.access, NAMESPACE, identity, (plane,), plane.group)
        self.plane = plane

    def environment(self) -> Mapping[str, str]:
        path, what = _identity_path(self.plane.group), "arm the end of the cluster"
        identity = self.plane.azure.get(path, what)["properties"]
        return {
            "MLBENCH_GROUP_PATH": self.plane.group.path,
            "AZURE_CLIENT_ID": identity["clientId"],
            "AZURE_TENANT_ID": identity["tenantId"],
            "AZURE_FEDERATED_TOKEN_FILE": "/var/run/secrets/azure/tokens/token",
        }

    def create(self) -> None:
        issuer = (self.plane.require_raw()["properties"].get("oidcIssuerProfile") or {}).get("issuerURL")
        if not issuer:
            raise TransientError("AKS does not show the issuer of the cluster's service accounts yet.")
        subject = f"system:serviceaccount:{NAMESPACE}:{NAME}"
        trust = {"properties": {"issuer": issuer, "subject": subject, "audiences": [AUDIENCE]}}
        path = f"{_identity_path(self.plane.group)}/federatedIdentityCredentials/{NAME}"
        self.plane.azure.change("PUT", path, "arm the end of the cluster", trust)
        super().create()


class AksHold(WorkerHold):
    """The worker hold of a node pool, for callers who may not assign roles."""

    image = PAUSE

    def __init__(self, pool: WorkerPool, identity: AksEndIdentity | None = None) -> None:
        plane = pool.plane
        needs = (identity, pool) if identity else ()
        super().__init__(plane.cluster, plane.access, NAMESPACE, pool.count, identity, needs, plane.group)
        self.pool = pool

    def let_shrink(self) -> None:
        """Enable autoscaling of the pool. A PUT resets omitted properties to their defaults."""
        what = f"let the {self.pool.kind} {self.pool.name} shrink"
        found = self.pool.azure.get(self.pool.path, what)["properties"]
        limits = {"enableAutoScaling": True, "minCount": 0, "maxCount": max(1, self.pool.count)}
        self.pool.operation = self.pool.azure.change("PUT", self.pool.path, what, {"properties": {**found, **limits}})

    def poll_shrinking(self) -> Readiness:
        return self.pool.poll_operation("scaled down automatically")


class EndTags(EndMark):
    """The expiry in the tags of the cluster's group."""

    kind = "tag of the end"

    def __init__(self, group: ResourceGroup) -> None:
        super().__init__(group.cluster, group)
        self.group = group

    def read(self) -> Mapping[str, str]:
        found = self.group.find_raw()
        if found is None:
            raise NotFoundError(f'There is no resource group "{self.group.name}".')
        return dict(found.get("tags") or {})

    def write(self, tags: Mapping[str, str]) -> None:
        body = {"tags": {**self.read(), **tags}}
        self.group.azure.change("PATCH", self.group.path, f"tag the group {self.group.name}", body)


def can_assign(azure: Azure) -> bool | None:
    """Whether the caller may assign the end timer's role; None if unknown, e.g. without credentials."""
    try:
        path = f"{azure.root}/providers/Microsoft.Authorization/permissions"
        return not list_denied([ASSIGN], azure.list_all(path, "list your permissions"))
    except MlbenchError:
        return None
