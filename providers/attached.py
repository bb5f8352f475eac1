"""Existing clusters of the user, reached through a kubeconfig. mlbench does not create, change or delete them.

Runs need rights in one namespace only: those of RULES, which `role_manifests` prints and `check_rights` checks.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import AccessDenied, ApiError, ObjectNotFound
from mlbench_cli.kube.kubeconfig import current_context, uses_service_account
from mlbench_cli.model.cluster_details import AMD_GPU, GPU_RESOURCES, NVIDIA_GPU, ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.base import Provider, Resource

ROLE = "mlbench"
AUTOPILOT_PREFIX = "gk3-"  # of the names of GKE Autopilot's nodes; those of other clusters begin with gke-
# The labels that tell the product, of NVIDIA's feature discovery and of AMD's node labeller.
PRODUCTS = {NVIDIA_GPU: "nvidia.com/gpu.product", AMD_GPU: "amd.com/gpu.product-name"}
# The rights that the kubernetes engine uses: API group, resource, verbs, whether no run is possible without.
RULES: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("batch", "jobs", ("create", "get", "list", "watch", "patch", "delete"), True),
    ("", "pods", ("get", "list", "watch", "delete"), True),
    ("", "pods/log", ("get",), True),
    ("", "pods/exec", ("get", "create"), True),
    ("", "configmaps", ("create", "get", "list", "patch", "delete"), True),
    ("", "services", ("create", "get", "list", "patch", "delete"), True),
    ("networking.k8s.io", "networkpolicies", ("create", "get", "list", "patch", "delete"), False),
    ("", "events", ("get", "list"), False),
)
KUEUE = "kueue.x-k8s.io"


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
        """The right as kubectl names it, e.g. "create jobs.batch"."""
        return f"{self.verb} {self.resource}{'.' + self.group if self.group else ''}"


def name_rights(rights: Sequence[Right]) -> str:
    """The rights, those on one resource together: "get, list pods; create services"."""
    verbs: dict[str, list[str]] = {}
    for right in rights:
        verbs.setdefault(right.name.partition(" ")[2], []).append(right.verb)
    return "; ".join(f"{', '.join(found)} {resource}" for resource, found in verbs.items())


class AttachedDetails(ClusterDetails, frozen=True):
    """How the user's kubeconfig reaches the cluster."""

    kubeconfig: str | None = None  # absolute path; None: the files that $KUBECONFIG lists
    context: str | None = None
    namespace: str | None = None
    server: str | None = None  # URL of its API, when it was attached


class AttachedProvider(Provider):
    """The provider "attached": reaches a cluster through the user's kubeconfig and owns nothing of it."""

    name = "attached"

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """Empty: an attached cluster is neither created nor deleted."""
        return ()

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        """Empty: only the store of each machine knows which clusters are attached."""
        return []

    def connect(self, cluster: Cluster) -> Access:
        """Read the recorded kubeconfig and context. Raises UsageError if the file or the context does not exist."""
        details = AttachedDetails.of(cluster)
        return Access.from_kubeconfig(details.kubeconfig, details.context, details.namespace)


def new_attached_cluster(name: str, kubeconfig: Path | None, context: str | None, namespace: str | None) -> Cluster:
    """The record of a cluster that a kubeconfig describes. Reads the kubeconfig only; sends no request."""
    path = _absolute_kubeconfig(kubeconfig)
    # Record the context's name, because the kubeconfig's current context may change.
    context = context or current_context(path)
    access = Access.from_kubeconfig(path, context, namespace)
    details = {
        "kubeconfig": None if path is None else str(path),
        "context": context,
        "namespace": access.namespace,
        "server": access.server,
    }
    return Cluster(name, "attached", "ready", details=details)


def _absolute_kubeconfig(kubeconfig: Path | None) -> Path | None:
    """Absolute path of the kubeconfig; None if $KUBECONFIG lists several files or a pod's service account is used."""
    listed = [part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    if kubeconfig is None and (len(listed) > 1 or uses_service_account(None)):
        return None
    found = kubeconfig or (Path(listed[0]) if listed else Path("~/.kube/config"))
    return Path(os.path.expanduser(found)).absolute()


def role_manifests(namespace: str) -> list[dict[str, object]]:
    """The smallest Role that runs need, and its binding to a user called USER."""
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
    """Whether the nodes are containers of KIND. False also if the server does not let us read nodes."""
    try:
        nodes = access.client().get("/api/v1/nodes", limit=1).get("items", [])
    except (AccessDenied, ObjectNotFound):
        return False
    return any(str(node.get("spec", {}).get("providerID")).startswith("kind://") for node in nodes)


@dataclass(frozen=True)
class NodeFacts:
    """Devices of the nodes, as far as the client may read them: GPUs per node, and others."""

    nodes: int
    gpus_per_node: int
    gpu: str | None
    gpu_resource: str | None  # Kubernetes' name of them
    devices: tuple[str, ...]  # names of resources, e.g. rdma/hca
    autopilot: bool = False  # of GKE


def read_node_facts(access: Access) -> NodeFacts | None:
    """What the schedulable nodes offer; the most GPUs that any has. None if nodes may not be read."""
    try:
        nodes = access.client().get("/api/v1/nodes").get("items", [])
    except (AccessDenied, ObjectNotFound):
        return None
    gpus, name, resource, devices = 0, None, None, set()
    for node in nodes:
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        labels = node["metadata"].get("labels") or {}
        for each, label in PRODUCTS.items():
            if (count := int(allocatable.get(each, 0))) > gpus:
                gpus, name, resource = count, labels.get(label), each
        devices |= {key for key, amount in allocatable.items() if _is_device(key) and amount not in ("0", 0)}
    autopilot = any(str(node["metadata"].get("name")).startswith(AUTOPILOT_PREFIX) for node in nodes)
    return NodeFacts(len(nodes), gpus, name, resource, tuple(sorted(devices)), autopilot)


NVIDIA_CLASS = "nvidia"  # by NVIDIA's GPU operator, k3s and RKE2


def read_runtime_class(access: Access) -> str | None:
    """The RuntimeClass by which pods get GPUs; None if the cluster has none of that name, or does not tell.

    Where NVIDIA's runtime is not the nodes' default, pods without the class see no GPU.
    """
    try:
        access.client().get(f"/apis/node.k8s.io/v1/runtimeclasses/{NVIDIA_CLASS}")
    except ApiError:
        return None
    return NVIDIA_CLASS


def read_device_classes(access: Access) -> tuple[str, ...]:
    """Names of GPUs that the cluster offers by dynamic resource allocation, which runs cannot request yet."""
    api = access.client()
    path = find_api(api, "resource.k8s.io")
    try:
        items = api.get(f"{path}/deviceclasses").get("items", []) if path else []
    except ApiError:
        return ()
    return tuple(sorted(name for item in items if "gpu" in (name := str(item["metadata"]["name"]))))


def _is_device(resource: str) -> bool:
    """Whether it is of a device plugin: what Kubernetes itself offers has no "/"."""
    is_own = resource in GPU_RESOURCES or resource.startswith(("attachable-volumes", "kubernetes.io/"))
    return "/" in resource and not is_own


def check_rights(access: Access) -> list[Right]:
    """Ask the server for each right, by SelfSubjectAccessReview, which every user may create."""
    api = access.client()
    return [
        _review(api, access.namespace, group, resource, verb, needed)
        for group, resource, verbs, needed in RULES
        for verb in verbs
    ]


def find_api(api: Any, group: str) -> str | None:
    """The path of a group of the cluster's API, in the version that the server prefers; None without the group."""
    try:
        return f"/apis/{api.get(f'/apis/{group}')['preferredVersion']['groupVersion']}"
    except (AccessDenied, ObjectNotFound):
        return None


@dataclass(frozen=True)
class QueueFacts:
    """What Kueue does in a namespace: its queues, and whether it suspends a Job that names none."""

    queues: tuple[str, ...] = ()
    needs_queue: bool = False


def read_queue_facts(access: Access) -> QueueFacts:
    """Ask for Kueue's queues, and try a Job without one: on a dry run, the server lets Kueue change it."""
    api = access.client()
    path = find_api(api, KUEUE)
    if path is None:
        return QueueFacts()
    try:
        items = api.get(f"{path}/namespaces/{access.namespace}/localqueues").get("items", [])
    except ApiError:
        items = []
    try:
        tried = api.create(f"/apis/batch/v1/namespaces/{access.namespace}/jobs?dryRun=All", _try_job())
    except ApiError:
        tried = {}  # a policy or quota refused it, so nothing is known
    needs = bool((tried.get("spec") or {}).get("suspend"))
    return QueueFacts(tuple(sorted(item["metadata"]["name"] for item in items)), needs)


def _try_job() -> dict[str, object]:
    container = {
        "name": "main",
        "image": "none",
        "resources": {"requests": {"cpu": "1m", "memory": "1Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "mlbench-dry-run"},
        "spec": {"suspend": False, "template": {"spec": pod}},
    }


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


# --- machines without Kubernetes --------------------------------------------------------------------------------------


class MachinesProvider(Provider):
    """Nothing to create, find or delete."""

    name = "machines"

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """Nothing: these machines are neither created nor deleted."""
        return ()

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        """Nothing: such clusters are known by the store of the machine that attached them."""
        return []

    def connect(self, cluster: Cluster) -> Access:
        """Raise UsageError: there is no Kubernetes API to open."""
        raise UsageError(
            f'The cluster "{cluster.name}" has no Kubernetes API: it is a {cluster.provider} cluster.',
            hint="mlbench list-clusters",
        )


class LocalProvider(MachinesProvider):
    """The provider "local": this machine, the cluster that always exists."""

    name = "local"


class SlurmProvider(MachinesProvider):
    """The provider "slurm": a Slurm cluster, attached by `mlbench attach-slurm`."""

    name = "slurm"


class HostsProvider(MachinesProvider):
    """The provider "hosts": hosts that ssh reaches, attached by `mlbench attach-hosts`."""

    name = "hosts"
