"""What GKE refuses in a node pool: the rules of machines, disks, ways to buy, reservations and fast networks."""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from google.cloud import container_v1 as g

from tests.fakes.gke_facts import (
    NEVER_ON_DEMAND,
    NEWER,
    NO_HYPERDISK,
    ONLY_HYPERDISK,
    PLAIN,
    PROJECT,
    REGION,
    SHAPES,
    VERSIONS,
    ZONE,
    ZONES,
    ApiError,
    Code,
)
from tests.fakes.gke_networks import Networks
from tests.fakes.kube_pods import Object

# Network cards of a machine besides its first, and the machines whose networks GKE makes, since which version.
CARDS = {"a3-highgpu-8g": 4, "a3-megagpu-8g": 8}
RDMA, RDMA_SINCE = ("a3-ultragpu-8g", "a4-highgpu-8g"), (1, 34, 1, 1829001)

SUPPORT_DAYS = 60  # left of the version that clusters get


@dataclass
class PoolRules:
    """What exists besides clusters, and the checks of a request for a node pool."""

    # What Compute Engine tells of reservations and their blocks, by ZONE/reservations/NAME[/reservationBlocks/BLOCK].
    reservations: dict[str, Object] = field(default_factory=dict)
    networks: Networks = field(default_factory=Networks)
    quotas: dict[str, float] = field(default_factory=lambda: {"NVIDIA_L4_GPUS": 8, "NVIDIA_T4_GPUS": 8})
    used: dict[str, float] = field(default_factory=dict)  # of the quotas
    taken_later: dict[str, float] = field(default_factory=dict)  # of the quotas, by others, after the plan was made
    shared_ranges: set[str] = field(default_factory=set)  # of the subnetworks of other projects
    wants_secure_boot: bool = False  # constraints/compute.requireShieldedVm
    policies: dict[str, str] = field(default_factory=dict)  # request -> words of an organization's refusal

    def check_zones(self, zones: Any, place: str) -> None:
        if not zones or not all(zone in ZONES and place in (ZONE, REGION) for zone in zones):
            raise ApiError(Code.INVALID_ARGUMENT, f"Invalid locations {list(zones)} of a cluster in {place}.")

    def check_quota(self, pool: g.NodePool, zones: Any, cluster: g.Cluster) -> None:
        """GKE itself refuses a lack of regional quota, as PERMISSION_DENIED.

        Sources: kubeflow/kubeflow 842, kubeflow/examples 597, GoogleCloudPlatform/cloud-ops-sandbox 44.
        """
        count = pool.initial_node_count * len(zones)
        private = cluster.network_config.default_enable_private_nodes
        needs = {} if private else {"IN_USE_ADDRESSES": float(count)}
        if pool.config.disk_type.startswith("pd-"):
            needs["SSD_TOTAL_GB"] = float(pool.config.disk_size_gb * count)
        for name, needed in needs.items():
            limit = self.quotas.get(name)
            left = (limit or 0.0) - self.used.get(name, 0.0) - self.taken_later.get(name, 0.0)
            if limit is not None and left < needed:
                raise ApiError(
                    Code.PERMISSION_DENIED,
                    f'Insufficient regional quota to satisfy request: resource "{name}": request requires '
                    f"'{needed}' and is short '{needed - left}'. project has a quota of '{limit}' with '{left}' "
                    "available. View and manage quotas at "
                    f"https://console.cloud.google.com/iam-admin/quotas?usage=USED&project={PROJECT}.",
                )

    def check_exclusions(self, cluster: g.Cluster) -> None:
        """An exclusion may not outlive the support of the cluster's version, and has one kind of end.

        Source: Google's page on maintenance exclusions, the comments of MaintenanceExclusionOptions.EndTimeBehavior.
        """
        latest = datetime.now(UTC) + timedelta(days=SUPPORT_DAYS)
        for exclusion in cluster.maintenance_policy.window.maintenance_exclusions.values():
            end = exclusion.end_time
            until_end = exclusion.maintenance_exclusion_options.end_time_behavior.name == "UNTIL_END_OF_SUPPORT"
            if until_end == bool(end):
                raise ApiError(Code.INVALID_ARGUMENT, "Set either end_time or UNTIL_END_OF_SUPPORT.")  # ASSUMED
            if end and end > latest:
                words = f"Maintenance exclusion cannot end after the end of support of the version, {latest:%Y-%m-%d}."
                raise ApiError(Code.INVALID_ARGUMENT, words)  # ASSUMED: the words

    def check_shared_network(self, asked: g.Cluster, project: str) -> None:
        """In a network of another project the ranges of pods and Services are its administrator's, and named.

        Source: Google's page on clusters with Shared VPC; the words: fabianlee/gcp-gke-clusters-ingress 2.
        """
        parts = asked.subnetwork.split("/")
        if len(parts) < 2 or parts[1] == project:
            return
        policy = asked.ip_allocation_policy
        for name in (policy.cluster_secondary_range_name, policy.services_secondary_range_name):
            if name not in self.shared_ranges:
                raise ApiError(
                    Code.INVALID_ARGUMENT,
                    f'Pod secondary range "{name}" not found in network "{asked.network}", subnetwork "{parts[-1]}".',
                )

    def check_policy(self, method: str) -> None:
        """What an organization refuses: its words are in the rule `policies`."""
        if words := self.policies.get(method):
            raise ApiError(Code.INVALID_ARGUMENT, words)

    def check_machine(self, pool: g.NodePool) -> None:
        machine = pool.config.machine_type
        found = [(item.accelerator_type, item.accelerator_count) for item in pool.config.accelerators]
        disk = pool.config.disk_type
        wrong_disk = (disk.startswith("pd-") and machine.startswith(ONLY_HYPERDISK)) or (
            disk.startswith("hyperdisk-") and machine.startswith(NO_HYPERDISK)
        )
        if wrong_disk:
            raise ApiError(
                Code.INVALID_ARGUMENT, f"{disk} disk type cannot be used by {machine} machine type. [INVALID_ARGUMENT]"
            )
        if self.wants_secure_boot and not pool.config.shielded_instance_config.enable_secure_boot:
            # The words: cloud-setup notes of several public projects, such as "GKE cluster creation fails with".
            raise ApiError(
                Code.INVALID_ARGUMENT,
                "Instance 'gke-1' creation failed: Constraint constraints/compute.requireShieldedVm violated for "
                "project projects/1. Secure Boot is not enabled in the 'shielded_instance_config' field.",
            )
        reserved = pool.config.reservation_affinity.values
        self._check_reservation(pool)
        if machine in NEVER_ON_DEMAND and not (pool.config.spot or pool.config.flex_start or reserved):
            raise ApiError(Code.INVALID_ARGUMENT, f"Machine type {machine} is not available on demand.")  # ASSUMED
        if pool.config.flex_start and not pool.autoscaling.enabled:
            raise ApiError(Code.INVALID_ARGUMENT, "Flex start node pools require autoscaling enabled.")
        if pool.queued_provisioning.enabled:
            affinity = pool.config.reservation_affinity.consume_reservation_type.name
            compact = pool.placement_policy.type_.name == "COMPACT"
            if affinity != "NO_RESERVATION" or pool.config.spot or compact or not pool.autoscaling.enabled:
                raise ApiError(Code.INVALID_ARGUMENT, "Queued provisioning excludes reservations, spot and placement.")
        if pool.config.flex_start and pool.initial_node_count:
            raise ApiError(Code.INVALID_ARGUMENT, "Flex start node pools require initial node count to be set to 0.")
        if pool.config.flex_start and reserved:
            raise ApiError(Code.INVALID_ARGUMENT, "flex start node pools don't support reservations")
        if pool.autoscaling.enabled and not pool.config.flex_start:
            most = pool.autoscaling.max_node_count
            if not pool.autoscaling.min_node_count <= pool.initial_node_count <= most or most < 1:
                raise ApiError(Code.INVALID_ARGUMENT, "initial_node_count must be within the autoscaling limits.")
        if machine in SHAPES:
            fits = found == [SHAPES[machine][:2]] or (machine in NEWER and not found)
        elif machine.startswith("n1-"):
            fits = all(kind == "nvidia-tesla-t4" and count in (1, 2, 4) for kind, count in found)
        else:
            fits = machine in PLAIN and not found
        if not fits:
            raise ApiError(Code.INVALID_ARGUMENT, f"Machine type {machine} does not go with accelerators {found}.")

    def _check_reservation(self, pool: g.NodePool) -> None:
        """A specific reservation has to be in each zone of the pool, of its machine type. ASSUMED: the words."""
        for value in pool.config.reservation_affinity.values:
            path = value.removeprefix(f"projects/{PROJECT}/").removeprefix("reservations/")
            for zone in pool.locations:
                found = self.reservations.get(f"{zone}/reservations/{path.partition('/')[0]}", {})
                specific = found.get("specificReservation", {})
                if specific.get("instanceProperties", {}).get("machineType") != pool.config.machine_type:
                    raise ApiError(Code.INVALID_ARGUMENT, f"Reservation {value} in {zone} is incompatible or missing.")
                if f"{zone}/reservations/{path}" not in self.reservations:
                    raise ApiError(Code.INVALID_ARGUMENT, f"Reservation block {value} was not found in {zone}.")

    def check_networks(self, pool: g.NodePool, cluster: g.Cluster) -> None:
        """Additional networks only in a cluster with multi-networking, all of them there; RDMA's by a newer GKE."""
        asked, machine = pool.network_config, pool.config.machine_type
        has_dataplane = cluster.network_config.datapath_provider.name == "ADVANCED_DATAPATH"
        if asked.additional_node_network_configs:
            if not (cluster.network_config.enable_multi_networking and has_dataplane):
                raise ApiError(
                    Code.INVALID_ARGUMENT, "Additional node networks require multi-networking to be enabled."
                )
            if len(asked.additional_node_network_configs) > CARDS.get(machine, 0):
                raise ApiError(Code.INVALID_ARGUMENT, f"Too many additional networks for {machine}.")
            for config in asked.additional_node_network_configs:
                for name in (f"global/networks/{config.network}", f"regions/{REGION}/subnetworks/{config.subnetwork}"):
                    if name not in self.networks.found:
                        raise ApiError(Code.INVALID_ARGUMENT, f"The resource '{name}' was not found.")
        if not (profile := asked.accelerator_network_profile):
            return
        asked_version = cluster.initial_cluster_version or VERSIONS[1]
        full = next((item for item in VERSIONS if item.startswith(asked_version)), asked_version)
        version = tuple(int(word) for word in re.findall(r"\d+", full))
        if profile != "auto" or machine not in RDMA or version < RDMA_SINCE or not has_dataplane:
            words = f"Accelerator network profile {profile} is not supported by {machine} in this cluster."
            raise ApiError(Code.INVALID_ARGUMENT, words)
        if asked.additional_node_network_configs:
            raise ApiError(Code.INVALID_ARGUMENT, "accelerator_network_profile excludes additional networks.")

    def reserve(self, name: str, machine: str, count: int, used: int = 0, zone: str = ZONE) -> None:
        """Make a reservation with one block, `NAME-block-1`, that has half of its machines."""
        numbers = {"count": str(count), "inUseCount": str(used)}
        specific = {**numbers, "instanceProperties": {"machineType": machine}}
        self.reservations[f"{zone}/reservations/{name}"] = {"status": "READY", "specificReservation": specific}
        block = {"resource": {"count": count // 2, "inUseCount": 0, "status": "READY"}}
        self.reservations[f"{zone}/reservations/{name}/reservationBlocks/{name}-block-1"] = block
