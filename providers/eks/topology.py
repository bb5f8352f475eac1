"""Labels nodes with their location in EC2's network.

AWS' cloud controller copies EC2's instance topology into labels (`topology.k8s.aws/network-node-layer-N`, layer 1 is
the farthest) when a node joins, unless EC2 throttles it, or the version of EKS does not support it. Such nodes are
labeled here: runs record the labels in their results, and schedulers such as Kueue use them. Sources:
kubernetes/cloud-provider-aws `pkg/resourcemanagers/topology.go`, EC2's API reference, AWS' page on the prerequisites of
the instance topology, as of 2026-11.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.errors import CredentialError, MlbenchError, UsageError
from providers.base import ROLE_LABEL, WORKER, Part, Readiness, Resource, ResourceStatus, TransientError
from providers.eks.aws import Aws
from providers.eks.control_plane import ControlPlane
from providers.eks.nodes import NodeGroup
from providers.kubernetes_calls import open_young_cluster

LAYER_LABEL = "topology.k8s.aws/network-node-layer-{}"
# Prefixes of machine types whose topology EC2 reports.
FAMILIES = ("g6e.", "g7e.", "hpc", "p3dn.", "p4d.", "p4de.", "p5", "p6", "trn")
MAX_INSTANCES = 100  # per request, by ID
GIVE_UP_SECONDS = 60.0  # limit for waiting for labels, because the cluster costs money


class NodeTopology(Part):
    """Labels of all workers' nodes with their location in EC2's network; optional for a cluster."""

    kind = "network topology"
    create_seconds = 300.0

    def __init__(self, plane: ControlPlane, workers: NodeGroup, needs: tuple[Resource, ...] = ()) -> None:
        self.plane = plane
        self.name = f"{plane.name}/topology"
        self.needs = needs or (workers,)
        self.goes_with = workers
        self._began: float | None = None
        self._problem: str | None = None

    def find(self) -> ResourceStatus | None:
        """Always None: nodes change, so each operation checks all of them."""
        return None

    def create(self) -> None:
        """Label the nodes without such labels. Raises TransientError for a while if AWS does not respond."""
        self._began = self._began or time.monotonic()
        try:
            self._problem = self._label_nodes()
        except TransientError as error:
            if time.monotonic() - self._began < GIVE_UP_SECONDS:
                raise
            self._problem = error.message
        except (CredentialError, UsageError) as error:  # no permission, or unsupported in this region
            self._problem = error.message

    def poll(self) -> Readiness:
        """Ready after the attempt; the record says why locations are unknown."""
        return Readiness(True, facts={"topology_problem": self._problem})

    def _label_nodes(self) -> str | None:
        """Label nodes; returns why some have no labels, or None."""
        with open_young_cluster(self.plane.access) as api:
            nodes = api.get("/api/v1/nodes", labelSelector=f"{ROLE_LABEL}={WORKER}")["items"]
            lacking = {instance: _name(node) for node in nodes if (instance := _find_unlabeled(node))}
            places = find_places(self.plane.aws, list(lacking)) if lacking else {}
            for instance, layers in places.items():
                labels = {LAYER_LABEL.format(number): layer for number, layer in enumerate(layers, 1)}
                api.patch(f"/api/v1/nodes/{lacking[instance]}", {"metadata": {"labels": labels}})
        unknown = len(lacking) - len(places)
        return f"EC2 does not report the position of {unknown} of {len(nodes)} machines." if unknown else None


def has_topology(machine_type: str) -> bool:
    """Whether EC2 reports the network location of machines of this type."""
    return machine_type.startswith(FAMILIES)


def find_places(aws: Aws, instances: Sequence[str]) -> dict[str, list[str]]:
    """The network nodes above each instance, the farthest first, except for instances unknown to EC2."""
    found: dict[str, list[str]] = {}
    for start in range(0, len(instances), MAX_INSTANCES):
        some = list(instances[start : start + MAX_INSTANCES])
        try:
            answer = aws.call("ec2", "describe_instance_topology", InstanceIds=some)
        except (TransientError, CredentialError, UsageError):
            raise
        except MlbenchError as error:  # a new machine is not yet visible everywhere
            raise TransientError(error.message, hint=error.hint) from None
        found |= {item["InstanceId"]: item["NetworkNodes"] for item in answer["Instances"] if item.get("NetworkNodes")}
    return found


def _find_unlabeled(node: Mapping[str, Any]) -> str | None:
    """The ID of a node's instance; None if it already has labels, or is not an EC2 instance."""
    if LAYER_LABEL.format(1) in (node["metadata"].get("labels") or {}):
        return None
    provider = str((node.get("spec") or {}).get("providerID") or "")
    return provider.rpartition("/")[2] if provider.startswith("aws://") else None


def _name(node: Mapping[str, Any]) -> str:
    return str(node["metadata"]["name"])
