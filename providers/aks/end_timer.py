"""The end of a cluster on AKS, kept by the cluster itself: a CronJob that asks Azure to delete its resource group.

It acts by a managed identity in the group, which has the role Contributor on nothing but the group, and which trusts
one service account of this cluster (workload identity federation, without a secret). All of that goes with the group.
Who may not assign roles gets a cluster without a timer, and a warning. Sources: docs/clouds-assumptions.md.
"""

from collections.abc import Sequence
from types import MappingProxyType

from mlbench_cli.errors import CredentialError, MlbenchError, NotFoundError
from mlbench_cli.model.cluster_details import ClusterDetails
from providers.aks.api import Azure
from providers.aks.identities import assign_role, make_identity, name_assignment
from providers.aks.resources import ROLE_LABEL, SYSTEM_POOL, WORKER, ControlPlane, ResourceGroup, WorkerPool
from providers.aks.rights import list_denied
from providers.base import Readiness, Resource, ResourceStatus, TransientError
from providers.kubernetes_calls import apply_object, open_young_cluster
from providers.worker_hold import WorkerHold
from templates import FOLDER, documents

NAME = "mlbench-end"
NAMESPACE = "mlbench-end"
# Microsoft's own registry: nodes reach it without an account.
IMAGE = "mcr.microsoft.com/azurelinux/base/python:3.12"
# Waits for a signal. AKS' machines have it for their own pods.
PAUSE = "mcr.microsoft.com/oss/kubernetes/pause:3.6"
ASSIGN = "Microsoft.Authorization/roleAssignments/write"
CONTRIBUTOR = "b24988ac-6180-42a0-ab88-20f7382dd24c"  # the built-in role's ID, the same everywhere
AUDIENCE = "api://AzureADTokenExchange"
KINDS = {"Namespace": "namespaces", "ServiceAccount": "serviceaccounts", "CronJob": "cronjobs"}


class EndIdentity(Resource):
    """The managed identity, and its right to delete the group."""

    kind = "identity of the end"
    create_seconds = delete_seconds = 600.0

    def __init__(self, group: ResourceGroup) -> None:
        self.group = group
        self.name = f"{group.name}/{NAME}"
        self.needs = (group,)
        self.goes_with = group
        self.refused: str | None = None  # why it may not get the role
        self.has_right = False
        self.path = f"{group.path}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/{NAME}"
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

    def create(self) -> None:
        principal = make_identity(self.group, self.path, "create the identity of the end")
        try:
            what = "give the identity of the end its role"
            assign_role(self.group.azure, self._assignment, CONTRIBUTOR, principal, what)
        except CredentialError as error:
            self.refused = error.message

    def poll(self) -> Readiness:
        if self.refused is not None:
            return Readiness(True, facts={"end_problem": self.refused})
        self.has_right = self.find() is not None
        return Readiness(self.has_right, "Azure does not show its role yet", {"end_problem": None})

    def delete(self) -> None:
        """Do nothing: identity and role go with the group."""
        return


class EndTimer(Resource):
    """Trust, namespace, account and CronJob. Applied again with another time when the end moves."""

    kind = "scheduled end"
    create_seconds = 600.0

    def __init__(self, plane: ControlPlane, identity: EndIdentity | None = None) -> None:
        self.plane = plane
        self.identity = identity  # None: it has its role since the cluster's creation
        self.name = f"{plane.name}/{NAME}"
        self.needs = (plane, *((identity,) if identity else ()))
        self.goes_with = plane.group
        self.expires = int(ClusterDetails.of(plane.cluster).expires or 0)
        self._identity_path = (identity or EndIdentity(plane.group)).path

    def find(self) -> ResourceStatus | None:
        if self.identity is not None and self.identity.refused is not None:
            return ResourceStatus("not armed")
        try:
            with open_young_cluster(self.plane.access) as kubernetes:
                found = kubernetes.get(f"{_path('batch/v1', NAMESPACE, 'cronjobs')}/{NAME}")
        except NotFoundError:
            return None
        expires = (found["metadata"].get("annotations") or {}).get("mlbench/expires")
        return ResourceStatus("armed") if expires == str(self.expires) else None

    def create(self) -> None:

        azure, what = self.plane.azure, "arm the end of the cluster"
        issuer = (self.plane.require_raw()["properties"].get("oidcIssuerProfile") or {}).get("issuerURL")
        if not issuer:
            raise TransientError("AKS does not show the issuer of the cluster's service accounts yet.")
        subject = f"system:serviceaccount:{NAMESPACE}:{NAME}"
        trust = {"properties": {"issuer": issuer, "subject": subject, "audiences": [AUDIENCE]}}
        azure.change("PUT", f"{self._identity_path}/federatedIdentityCredentials/{NAME}", what, trust)
        identity = azure.get(self._identity_path, what)["properties"]
        values = {
            "name": NAME,
            "account": NAME,
            "namespace": NAMESPACE,
            "expires": self.expires,
            "path": self.plane.group.path,
            "client": identity["clientId"],
            "tenant": identity["tenantId"],
            "audience": AUDIENCE,
            "image": IMAGE,
            "node_selector": {ROLE_LABEL: SYSTEM_POOL},
            "script": (FOLDER / "kubernetes" / "aks_end.py").read_text("utf-8"),
        }
        with open_young_cluster(self.plane.access) as kubernetes:
            for document in documents("kubernetes/aks-end.yaml.j2", values):
                namespace = document["metadata"].get("namespace", "")
                path = _path(document["apiVersion"], namespace, KINDS[document["kind"]])
                apply_object(kubernetes, f"{path}/{document['metadata']['name']}", document)

    def poll(self) -> Readiness:
        return Readiness(self.find() is not None, "the CronJob is not there yet")

    def delete(self) -> None:
        """Do nothing: it goes with the cluster."""
        return


class AksHold(WorkerHold):
    """The hold on the workers of a node pool, for callers who may not assign roles."""

    image = PAUSE
    node_selector = MappingProxyType({ROLE_LABEL: WORKER})

    def __init__(
        self, plane: ControlPlane, pool: WorkerPool, identity: EndIdentity | None, needs: Sequence[Resource]
    ) -> None:
        super().__init__(
            plane.cluster,
            plane.access,
            NAMESPACE,
            pool.count,
            needs,
            plane.group,
            lambda: identity is not None and identity.has_right,
        )
        self.pool = pool

    def let_shrink(self) -> None:
        """Give the pool the cluster's autoscaler. A PUT takes what is left out for its default."""
        what = f"let the {self.pool.kind} {self.pool.name} shrink"
        found = self.pool.azure.get(self.pool.path, what)["properties"]
        limits = {"enableAutoScaling": True, "minCount": 0, "maxCount": max(1, self.pool.count)}
        self.pool.operation = self.pool.azure.change("PUT", self.pool.path, what, {"properties": {**found, **limits}})

    def poll_shrinking(self) -> Readiness:
        return self.pool.poll_operation("made to shrink by itself")


def can_assign(azure: Azure) -> bool | None:
    """Whether the caller may give the end its role; None if Azure cannot be asked, e.g. without credentials."""
    try:
        path = f"{azure.root}/providers/Microsoft.Authorization/permissions"
        return not list_denied([ASSIGN], azure.list_all(path, "list your permissions"))
    except MlbenchError:
        return None


def _path(version: str, namespace: str, kind: str) -> str:
    root = "/api/v1" if version == "v1" else f"/apis/{version}"
    return f"{root}/namespaces/{namespace}/{kind}" if namespace else f"{root}/{kind}"
