"""The permission of Google's IAM that each request to the double wants.

Sources: the pages "Required permissions" of GKE's, Compute Engine's, Artifact Registry's and Resource Manager's REST
references, recalled; docs/development. Node pools have none of their own: changing one updates its cluster.
"""

import re
from urllib.parse import urlsplit

# Of the cluster manager, by method.
CONTAINER = {
    "GetServerConfig": "container.clusters.list",
    "ListClusters": "container.clusters.list",
    "GetCluster": "container.clusters.get",
    "GetNodePool": "container.clusters.get",
    "GetOperation": "container.operations.get",
    "CreateCluster": "container.clusters.create",
    "DeleteCluster": "container.clusters.delete",
    "SetLabels": "container.clusters.update",
    "CreateNodePool": "container.clusters.update",
    "SetNodePoolAutoscaling": "container.clusters.update",
    "DeleteNodePool": "container.clusters.update",
}
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "update", "DELETE": "delete"}
# Kubernetes' plurals as IAM spells them; objects of other API groups are "third party objects".
KINDS = {
    "configmaps": "configMaps", "cronjobs": "cronJobs", "daemonsets": "daemonSets", "endpointslices": "endpointSlices",
    "events": "events", "ingresses": "ingresses", "jobs": "jobs", "namespaces": "namespaces",
    "networkpolicies": "networkPolicies", "nodes": "nodes", "persistentvolumeclaims": "persistentVolumeClaims",
    "persistentvolumes": "persistentVolumes", "pods": "pods", "podtemplates": "podTemplates", "secrets": "secrets",
    "serviceaccounts": "serviceAccounts", "services": "services",
}  # fmt: skip


def permission_of_web(method: str, url: str) -> str | None:
    """Of a request to one of the REST APIs; None if anybody may ask, as for prices and tokens."""
    path = urlsplit(url).path
    if path.startswith("/compute/v1/projects/"):
        return _of_compute(method, path.split("/")[5:])
    if re.fullmatch(r"/v1/projects/[a-z0-9-]+/locations", path):
        return "artifactregistry.locations.list"
    if path.endswith("/repositories") and method == "GET":
        return "artifactregistry.repositories.list"
    if "/repositories" in path and ":" in path:
        return f"artifactregistry.repositories.{path.rpartition(':')[2]}"
    if "/repositories" in path:
        return f"artifactregistry.repositories.{VERBS[method]}"
    if match := re.fullmatch(r"/v1/projects/[^/:]+(?::(\w+))?", path):
        verb = {"getIamPolicy": "getIamPolicy", "setIamPolicy": "setIamPolicy", None: "get"}.get(match[1])
        return f"resourcemanager.projects.{verb}" if verb else None  # anybody may test permissions
    return None


def _of_compute(method: str, parts: list[str]) -> str:
    if not parts:
        return "compute.projects.get"
    if parts[0] in ("zones", "regions") and len(parts) <= 2:
        return f"compute.{parts[0]}.get"
    scope, rest = parts[0], parts[1:] if parts[0] in ("global", "aggregated") else parts[2:]
    if rest[0] == "operations":
        return f"compute.{'globalOperations' if scope == 'global' else 'regionOperations'}.get"
    kind = "reservationBlocks" if "reservationBlocks" in rest else rest[0]
    if kind == "forwardingRules" and scope == "global":
        kind = "globalForwardingRules"
    is_list = method == "GET" and len(rest) % 2 == 1
    return f"compute.{kind}.{'list' if is_list else VERBS[method]}"


def permission_of_kubernetes(method: str, url: str) -> str:
    """Of a request to a cluster's own API, which a role of IAM grants as RBAC does."""
    parts = urlsplit(url).path.strip("/").split("/")
    if parts[0] == "version":
        return "container.clusters.connect"
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if rest[0] == "namespaces" and len(rest) > 2:
        rest = rest[2:]
    kind = KINDS.get(rest[0], "thirdPartyObjects")
    if rest[2:3] in (["log"], ["exec"]):
        return {"log": "container.pods.getLogs", "exec": "container.pods.exec"}[rest[2]]
    is_list = method == "GET" and len(rest) == 1
    return f"container.{kind}.{'list' if is_list else VERBS[method]}"
