"""Where nodes are in the cloud's network, from the labels that clouds put on them.

Two nodes with the same block, or the same last layer, are close to each other. Sources: Google's page on the topology
of A3 Ultra and A4 (labels `gce-topology-*`), its label daemon for A3 Mega (`topology.gke.io`), and AWS' cloud
controller, which copies EC2's instance topology into labels (layer 1 is the farthest).
"""

from collections.abc import Iterable, Mapping
from typing import Any

LABELS = {
    "topology.kubernetes.io/zone": "zone",
    "cloud.google.com/gce-topology-block": "block",
    "cloud.google.com/gce-topology-subblock": "subblock",
    "cloud.google.com/gce-topology-host": "host",
    "topology.gke.io/cluster": "block",
    "topology.gke.io/rack": "subblock",
    "topology.gke.io/host": "host",
    "topology.k8s.aws/network-node-layer-1": "layer_1",
    "topology.k8s.aws/network-node-layer-2": "layer_2",
    "topology.k8s.aws/network-node-layer-3": "layer_3",
    "topology.k8s.aws/network-node-layer-4": "layer_4",
}


def find_topology(nodes: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Each node's place by its name; nodes without such labels have an empty one."""
    found = {}
    for node in nodes:
        metadata = node.get("metadata") or {}
        labels = metadata.get("labels") or {}
        found[str(metadata.get("name"))] = {name: str(labels[key]) for key, name in LABELS.items() if key in labels}
    return found
