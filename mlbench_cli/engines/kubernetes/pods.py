"""Scheduling of a run's pods: requests, limits, anti-affinity and tolerations. Pure."""

import re
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import NVIDIA_GPU
from mlbench_cli.model.spec import RunSpec

RUN_LABEL = "mlbench/run"
MANAGED_LABEL = "app.kubernetes.io/managed-by"
ROLE_LABEL = "mlbench/role"
WORKER, HEAD = "worker", "head"

# A service mesh would route gloo's and NCCL's connections through its proxy, or reject them. Harmless elsewhere.
NO_MESH = {"sidecar.istio.io/inject": "false", "istio.io/dataplane-mode": "none"}  # labels: Istio, sidecar and ambient
NO_MESH_ANNOTATIONS = {"linkerd.io/inject": "disabled"}
HOST = "kubernetes.io/hostname"
NODE_LOSS_SECONDS = 30
# A lost node ends the run, or moves its head, after 30 s instead of five minutes.
LOST_NODE: list[dict[str, Any]] = [
    {
        "key": f"node.kubernetes.io/{key}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": NODE_LOSS_SECONDS,
    }
    for key in ("not-ready", "unreachable")
]
# Only so that a worker is not the first to be evicted: it has its node for itself by anti-affinity.
USER = 10001
CPU_REQUEST, MEMORY_REQUEST = "500m", "512Mi"
_TOLERATION = re.compile(
    r"(?P<key>[^=:\s]+)(=(?P<value>[^=:\s]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)


def resource_requests(spec: RunSpec) -> dict[str, str]:
    """What the scheduler keeps free on a node for each worker."""
    return {
        "cpu": CPU_REQUEST if spec.cpus is None else f"{spec.cpus:g}",
        "memory": spec.pods.memory or MEMORY_REQUEST,
    }


def resource_limits(spec: RunSpec) -> dict[str, str]:
    """Memory, GPUs and other devices of each worker, but no CPUs: their limits slow ranks down now and then."""
    gpus = {gpu_resource(spec): str(spec.gpus_per_worker)} if spec.gpus_per_worker else {}
    memory = {"memory": spec.pods.memory} if spec.pods.memory else {}
    return {**memory, **gpus, **spec.pods.devices}


def gpu_resource(spec: RunSpec) -> str:
    """Kubernetes' name of the machines' GPUs."""
    return spec.pods.gpu_resource or NVIDIA_GPU


def anti_affinity(spec: RunSpec) -> list[dict[str, object]]:
    """The term that keeps workers off nodes of this run's other workers, of other runs' workers, or of both.

    One term at most: when a pod ends, the scheduler of Kubernetes 1.34 looks again at once only at waiting pods all of
    whose terms match it, at others after five minutes.
    """
    options, labels = spec.pods, {MANAGED_LABEL: "mlbench", ROLE_LABEL: WORKER}
    expressions: list[dict[str, object]] = []
    if options.share_nodes and not options.spread:
        return []
    if options.share_nodes:
        labels[RUN_LABEL] = spec.name
    elif not options.spread:
        expressions.append({"key": RUN_LABEL, "operator": "NotIn", "values": [spec.name]})
    everywhere: dict[str, object] = {} if options.share_nodes else {"namespaceSelector": {}}
    matched = {"matchLabels": labels, **({"matchExpressions": expressions} if expressions else {})}
    return [{"topologyKey": HOST, **everywhere, "labelSelector": matched}]


def pod_security(spec: RunSpec) -> dict[str, object]:
    """The security context of all pods of a run, as the standard "restricted" wants it."""
    user = 0 if spec.pods.runs_as_root else USER
    return {
        "runAsNonRoot": user != 0,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def list_tolerations(spec: RunSpec) -> list[dict[str, Any]]:
    """The taints that workers tolerate. Raises UsageError for one that is not of Kubernetes' form."""
    resource = gpu_resource(spec)  # its name is the key of the taint by custom
    gpu = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}] if spec.gpus_per_worker else []
    return [*LOST_NODE, *gpu, *(toleration(text) for text in spec.pods.tolerations)]


def toleration(text: str) -> dict[str, Any]:
    """KEY[=VALUE][:EFFECT] as an object. Raises UsageError."""
    match = _TOLERATION.fullmatch(text)
    if match is None:
        raise UsageError(
            f'The toleration "{text}" is not of the form KEY[=VALUE][:EFFECT].', hint="For example gpu=yes:NoSchedule."
        )
    given = {"effect": match["effect"]} if match["effect"] else {}
    if match["value"] is None:
        return {"key": match["key"], "operator": "Exists", **given}
    return {"key": match["key"], "operator": "Equal", "value": match["value"], **given}
