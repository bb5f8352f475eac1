"""Clusters that a person already has: reached as a kubeconfig says, never made, changed or removed.

`attach-cluster` needs rights in one namespace only: those of RULES, which `role` writes out and `check_rights` tests.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.kubeconfig import current_context, uses_service_account
from mlbench_cli.model import Cluster
from providers.base import Plan, Resource

ROLE = "mlbench"
# What the kubernetes engine does: API group, resource, verbs, whether runs are impossible without.
RULES: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("batch", "jobs", ("create", "get", "list", "watch", "patch", "delete"), True),
    ("", "pods", ("get", "list", "watch", "delete"), True),
    ("", "pods/log", ("get",), True),
    ("", "pods/exec", ("get", "create"), True),
    ("", "configmaps", ("create", "get", "list", "patch", "delete"), True),
    ("", "services", ("create", "get", "list", "patch", "delete"), True),
    ("networking.k8s.io", "networkpolicies", ("create", "get", "list", "patch", "delete"), True),
    ("", "events", ("get", "list"), False),
)


@dataclass(frozen=True)
class Right:
    """One right and whether the server grants it."""

    group: str
    resource: str
    verb: str
    needed: bool
    allowed: bool
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.verb} {self.resource}{'.' + self.group if self.group else ''}"


@dataclass(frozen=True)
class NoOptions:
    """`attach-cluster` has options of its own."""


class AttachedProvider:
    name = "attached"
    options = NoOptions

    def describe(self, name: str, nodes: int, options: NoOptions) -> Cluster:
        raise UsageError("An attached cluster is not created.", hint="mlbench attach-cluster NAME --context CONTEXT")

    def plan(self, cluster: Cluster) -> Plan:
        return Plan((), location=str(cluster.details.get("context") or "this pod's cluster"))

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        return ()

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        return []

    def connect(self, cluster: Cluster) -> Access:
        details = cluster.details
        return Access.from_kubeconfig(details.get("kubeconfig"), details.get("context"), details.get("namespace"))

    def scale(self, cluster: Cluster, nodes: int) -> Sequence[Resource]:
        raise UsageError(f'The cluster "{cluster.name}" is attached; mlbench does not change its machines.')


def attached(name: str, kubeconfig: Path | None, context: str | None, namespace: str | None) -> Cluster:
    """The record of a cluster that a kubeconfig describes. Only reads the kubeconfig; the cluster is not asked."""
    path = _kept_path(kubeconfig)
    # The context's name is kept, since the current one is whatever a person last chose.
    context = context or current_context(path)
    access = Access.from_kubeconfig(path, context, namespace)
    details = {
        "kubeconfig": None if path is None else str(path),
        "context": context,
        "namespace": access.namespace,
        "server": access.server,
    }
    return Cluster(name, "attached", "ready", details=details)


def _kept_path(kubeconfig: Path | None) -> Path | None:
    """The kubeconfig's absolute path. None if $KUBECONFIG lists several, or a pod's service account is used instead."""
    listed = [part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    if kubeconfig is None and (len(listed) > 1 or uses_service_account(None)):
        return None
    found = kubeconfig or (Path(listed[0]) if listed else Path.home() / ".kube" / "config")
    return found.expanduser().absolute()


def role(namespace: str) -> list[dict[str, Any]]:
    """The least rights that runs need, as a Role and its binding; whoever gets them stands for USER."""
    rules = [{"apiGroups": [group], "resources": [kind], "verbs": list(verbs)} for group, kind, verbs, _ in RULES]
    metadata = {"name": ROLE, "namespace": namespace}
    api = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": api, "kind": "Role", "name": ROLE},
            "subjects": [{"kind": "User", "name": "USER", "apiGroup": api}],
        },
    ]


def is_kind(access: Access) -> bool:
    """Whether the nodes are containers of KIND. False also where the server does not let one look at nodes."""
    from mlbench_cli.kube.api import AccessDenied, ObjectNotFound

    try:
        nodes = access.client().get("/api/v1/nodes", limit=1).get("items", [])
    except (AccessDenied, ObjectNotFound):
        return False
    return any(str(node.get("spec", {}).get("providerID")).startswith("kind://") for node in nodes)


def check_rights(access: Access) -> list[Right]:
    """What the server says of each right, by SelfSubjectAccessReview, which everybody may ask."""
    api = access.client()
    return [
        _review(api, access.namespace, group, resource, verb, needed)
        for group, resource, verbs, needed in RULES
        for verb in verbs
    ]


def _review(api: Any, namespace: str, group: str, resource: str, verb: str, needed: bool) -> Right:
    kind, _, subresource = resource.partition("/")
    attributes = {"namespace": namespace, "group": group, "resource": kind, "verb": verb}
    if subresource:
        attributes["subresource"] = subresource
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    status = answer.get("status") or {}
    return Right(group, resource, verb, needed, bool(status.get("allowed")), str(status.get("reason") or ""))
