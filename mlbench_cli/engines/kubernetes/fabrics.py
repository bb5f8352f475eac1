"""Which pod patch lets the ranks use the fast network of their machine: a file of templates/kubernetes/fabrics/.

A file names its source, and is merged into the pods of workers before the user's own patch. Which of Google's networks
is set up is `fabric["setup"]` of the cluster's record (`providers/gke/options.py`). Assumptions: docs/development.
"""

from typing import Any

import templates
from mlbench_cli.kube.gpudirect import choose_release
from mlbench_cli.model.spec import RunSpec

EFA = "vpc.amazonaws.com/efa"
GOOGLES = ("tcpx", "tcpxo", "gib")
GPUS = 8  # of every machine with one of Google's networks


def fabric_patch(spec: RunSpec) -> dict[str, Any]:
    """What is merged into the pods of workers; variables that the user sets are left out of it."""
    kind = _choose_fabric(spec)
    if kind is None:
        return {}
    # The sidecar must be of the same release as the plugin that is installed in the cluster.
    branch = spec.pods.fabric.get("driver_branch")
    program = choose_release(kind, branch).program if kind in GOOGLES else None
    (patch,) = templates.documents(f"kubernetes/fabrics/{kind}.yaml.j2", {"name": spec.name, "program": program})
    for container in patch["spec"]["containers"]:
        container["env"] = [item for item in container.get("env", ()) if item["name"] not in spec.env]
    return patch


def claims_cards(spec: RunSpec) -> bool:
    """Whether the workers get their network cards by a claim of dynamic resource allocation."""
    return _choose_fabric(spec) == "gib"


def _choose_fabric(spec: RunSpec) -> str | None:
    if EFA in spec.pods.pod_devices:
        return "efa"
    if spec.pods.has_rdma_devices:
        return "rdma"
    # Google's is only for several workers with whole machines: one alone communicates within its machine.
    kind = str(spec.pods.fabric.get("setup"))
    return kind if kind in GOOGLES and spec.gpus_per_worker >= GPUS and spec.workers > 1 else None
