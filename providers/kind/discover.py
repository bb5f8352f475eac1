"""Finds the clusters whose marker volume is in this machine's Docker, complete or not."""

from collections.abc import Mapping

from mlbench_cli.model.run import Cluster
from providers.base import details_from_tags
from providers.kind.api import creation_lock
from providers.kind.resources import NODES_LABEL, REGISTRY_LABEL, list_owned_clusters, nodes_of


def discover_clusters() -> list[Cluster]:
    """All clusters of ours."""
    return [_discovered_cluster(name, labels) for name, labels in list_owned_clusters().items()]


def _discovered_cluster(name: str, labels: Mapping[str, str]) -> Cluster:
    nodes = int(labels.get(NODES_LABEL, "1"))  # containers, the control plane's among them
    states = list(nodes_of(name).values())
    with creation_lock(name, shared=True) as lock:
        being_made = lock is None
    ready = len(states) == nodes and set(states) == {"running"}
    state = "creating" if being_made else "ready" if ready else "failed"
    options: dict[str, object] = {}
    if REGISTRY_LABEL in labels:
        options = {"registry_name": labels[REGISTRY_LABEL], "registry_port": 0}
    details = {
        "nodes": max(1, nodes - 1),
        "gpus_per_node": 0,
        "functional_only": True,
        "options": options,
        **details_from_tags(labels),
    }
    return Cluster(name, "kind", state, labels["created"], details)
