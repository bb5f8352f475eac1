"""The options of `create-cluster eks`, and the facts that only its clusters have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlbench_cli.model.cluster_details import ClusterDetails
from providers.base import CloudOptions, option


@dataclass(frozen=True)
class EksDetails(ClusterDetails):
    """What only clusters on EKS have."""

    machine: Mapping[str, Any] = field(default_factory=dict, metadata={"types": (dict,)})  # fields of Machine


@dataclass(frozen=True)
class EksOptions(CloudOptions):
    """The options of `mlbench create-cluster eks`; fields are declared once, for flags, plans and the record."""

    gpu_type: str | None = option(None, "--gpu-type", help="T4, A10G, L4, A100, H100, …; selects the instance type")
    kubernetes_version: str | None = option(
        None, "--kubernetes-version", "-k", help="Kubernetes X.Y; default: EKS' own default version"
    )
    region: str | None = option(
        None, "--region", help="AWS region; default: the zone's, the environment's or the profile's"
    )
    zone: str | None = option(None, "--zone", "-z", help="zone of the workers; default: the first with such machines")
    spot_type: tuple[str, ...] = option(
        (),
        "--spot-type",
        help="with --spot: another acceptable instance type; repeatable; default: those with the same GPUs",
    )
    capacity_reservation: str | None = option(
        None, "--capacity-reservation", help="capacity reservation or Capacity Block (cr-…) for the workers"
    )
    placement_group: bool = option(False, "--placement-group", help="put the workers close together")
    subnets: str | None = option(
        None,
        "--subnets",
        help="subnet IDs of a network that others made, one for each of two zones or more; default: a network made "
        "with the cluster",
    )
    private_nodes: bool = option(
        False, "--private-nodes", help="machines without public addresses, behind a NAT gateway"
    )
    permissions_boundary: str | None = option(
        None, "--permissions-boundary", help="ARN of the IAM policy that limits the roles created for the cluster"
    )
    efa: bool = option(False, "--efa", help="EFA network cards, with a placement group; runs request them")
    node_image: str = option(
        "al2023",
        "--node-image",
        help="node image of the workers: al2023, or bottlerocket, which has a GPU device plugin",
    )
    admin: tuple[str, ...] = option(
        (), "--admin", help="ARN of another principal with administrator access; repeatable"
    )
    no_network_policies: bool = option(
        False, "--no-network-policies", help="omit the agent that enforces the network policies of runs"
    )
    no_volumes: bool = option(False, "--no-volumes", help="omit the EBS driver and the default storage class")
    system_machine_type: str = option(
        "t3.medium", "--system-machine-type", help="instance type of the two system nodes (DNS, Helm charts)"
    )
