"""The options of runs on Kubernetes: from a request and its cluster to `KubernetesOptions`.

Pure, except for reading the file of --pod-patch. What Kubernetes would reject is rejected here, with the option's name.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import GPU_RESOURCES, ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import KubernetesOptions
from mlbench_cli.runs.request import Request, check_environment, parse_duration
from mlbench_cli.util.files import read_regular
from mlbench_cli.util.text import shorten
from mlbench_cli.util.yaml_text import read_yaml

_LABEL_KEY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9./_-]*[A-Za-z0-9])?")
QUEUE_SECONDS = 7 * 86400
PATCH_BYTES = 100_000  # of a --pod-patch: it is stored with the run
# Options of a request that are those of the spec, which checks them.
_AS_GIVEN = (
    *("namespace", "memory", "shm", "runtime_class", "pull_secret", "queue", "data_claim"),
    *("collect", "spread", "share_nodes"),
)


def resolve_kubernetes(request: Request, cluster: Cluster) -> KubernetesOptions:
    """The checked options of a run on Kubernetes. Raises UsageError."""
    details, patch = ClusterDetails.of(cluster), _read_patch(request.pod_patch)
    if details.needs_queue and request.queue is None:
        raise UsageError(
            f"Kueue on the cluster {cluster.name} releases only Jobs of its queues.",
            hint=f"--queue {details.queues[0]}" if details.queues else "--queue NAME: kubectl get localqueues",
        )
    given: dict[str, Any] = {
        **{name: getattr(request, name) for name in _AS_GIVEN},
        "start_timeout": _choose_start_timeout(request, cluster),
        "keep_seconds": None if request.keep is None else round(parse_duration(request.keep, "run.keep")),
        "network_policy": details.network_policies,
        "fabric": _choose_fabric(request, cluster, patch),
        "provisioning_class": details.provisioning_class,
        "gpu_resource": details.gpu_resource,
        "registry": None if request.registry is None else request.registry.rstrip("/"),
    }
    if given["runtime_class"] is None and request.gpu:
        given["runtime_class"] = details.runtime_class
    if details.autopilot and None in (request.num_cpus, request.memory):
        raise UsageError(
            f"The cluster {cluster.name} is GKE Autopilot, where workers get only the CPUs and memory that they "
            "request.",
            hint="For example --num-cpus 8 --memory 32Gi",
        )
    for key in request.node_selector:
        if not _LABEL_KEY.fullmatch(key):
            raise UsageError(f'--node-selector: "{shorten(key)}" is not a valid label key.')
    return KubernetesOptions(
        node_selector={**details.node_selector, **request.node_selector},
        devices=_list_devices(request, cluster),
        pod_patch=patch,
        tolerations=tuple(details.tolerations),
        **{key: value for key, value in given.items() if value is not None},
    )


def gpus_of_machine(request: Request, cluster: Cluster) -> int:
    """All GPUs of a machine that a worker has for itself; one if workers share machines or the number is not known."""
    if request.spread is False or request.processes_per_worker is not None:
        return 1
    return max(1, ClusterDetails.of(cluster).gpus_per_node or 1)


def check_mount_point(path: str) -> str:
    """The normalized path of a folder inside the container.

    Raises UsageError if it is not absolute, or is one that the run's own volumes take.
    """
    taken = ("/", "/dev", "/mlbench", "/proc", "/results", "/sys", "/tmp")
    if not path.startswith("/") or os.path.normpath(path) in taken or path.startswith("/dev/"):
        raise UsageError(
            f'--data-dir "{shorten(path)}" cannot be a data folder in a container.',
            hint="Use an absolute path, e.g. /data.",
        )
    return os.path.normpath(path)


def _choose_start_timeout(request: Request, cluster: Cluster) -> int | None:
    """The start timeout in seconds: the user's, else several days if a queue or a booking may take that long."""
    if request.start_timeout is not None:
        return round(parse_duration(request.start_timeout, "--start-timeout"))
    return QUEUE_SECONDS if request.queue or ClusterDetails.of(cluster).provisioning_class else None


def _list_devices(request: Request, cluster: Cluster) -> dict[str, str]:
    """All devices of a machine, such as network cards, for its only worker; none for workers that share a machine."""
    if request.spread is False:
        return {}
    return {name: str(count) for name, count in ClusterDetails.of(cluster).devices_per_node.items()}


def _choose_fabric(request: Request, cluster: Cluster, patch: Mapping[str, Any]) -> dict[str, object]:
    """The machines' fast network; not set up for workers that share a machine, as only one pod can have its cards."""
    fabric = dict(ClusterDetails.of(cluster).fabric)
    if request.spread is False or KubernetesOptions(pod_patch=patch).uses_host_network:
        fabric.pop("setup", None)
    return fabric


def _read_patch(path: str | None) -> Mapping[str, Any]:
    """The content of --pod-patch. Raises UsageError for fields that a pod does not have, or that mlbench sets
    itself."""
    if path is None:
        return {}
    what = f"--pod-patch {shorten(path)}"
    try:
        patch = read_yaml(read_regular(os.path.expanduser(path), PATCH_BYTES), what)
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror}.") from None
    if not isinstance(patch, dict) or not patch or not all(isinstance(part, dict) for part in patch.values()):
        raise UsageError(f"{what} is not a mapping of metadata and spec.", hint="spec: {priorityClassName: high}")
    if foreign := [key for key in patch if key not in ("metadata", "spec")]:
        raise UsageError(f'{what}: "{foreign[0]}" is no part of a pod; it has metadata and spec.')
    metadata, spec = patch.get("metadata") or {}, patch.get("spec") or {}
    for kind, values in metadata.items():
        if kind not in ("labels", "annotations") or not isinstance(values, dict):
            raise UsageError(f"{what}: metadata holds labels and annotations.")
        for key, value in values.items():
            if str(key).startswith(("mlbench/", "batch.kubernetes.io/")) or key == "app.kubernetes.io/managed-by":
                raise UsageError(f"{what}: {key} is reserved for mlbench or Kubernetes.", hint="Choose another key.")
            if not isinstance(value, str) or not _LABEL_KEY.fullmatch(str(key)):
                raise UsageError(f"{what}: {kind} map keys to texts in quotes, and {shorten(str(key))} does not.")
    containers = spec.get("containers") or []
    if not isinstance(containers, list) or not all(isinstance(item, dict) and "name" in item for item in containers):
        raise UsageError(f'{what}: containers are a list, each with its name; the ranks run in "main".')
    if "restartPolicy" in spec or any({"command", "args"} & set(item) for item in containers if item["name"] == "main"):
        raise UsageError(
            f'{what}: restartPolicy, and command and args of "main", are mlbench\'s own.', hint="--command"
        )
    for item in containers:
        if gpus := set((item.get("resources") or {}).get("limits") or ()) & set(GPU_RESOURCES):
            raise UsageError(f"{what}: use --gpu and --gpus-per-worker for {min(gpus)}.", hint="--gpu")
        pairs = {str(one.get("name")): str(one.get("value", "")) for one in item.get("env") or () if "value" in one}
        check_environment(pairs)
    return patch
