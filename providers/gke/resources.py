"""The resources of a GKE cluster: the control plane with a small system pool, then the worker pool.

They are separate, so that if the pool fails for lack of stock or quota, the cluster remains for another try. GKE runs
one operation at a time on a cluster and rejects others, also during automatic upgrades: mlbench waits for these.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mlbench_cli.errors import CapacityError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import timestamp
from providers.base import CLUSTER_TAG, ROLE_LABEL, WORKER, Part, Readiness, Resource, ResourceStatus, ownership_tags
from providers.gke import api
from providers.gke.api import Gke, Message
from providers.gke.options import GkeOptions, Machine, configure_pool, count_networks, default_disk_type
from providers.gke.quota import Compute, parse_reservation
from providers.ready_machines import list_ready_workers

SYSTEM_POOL = "system"
WORKER_POOL = "workers"
GPU = "nvidia.com/gpu"
# Label with which pods request flex-start machines, and taint of machines of queued provisioning.
FLEX_START_LABEL = "cloud.google.com/gke-flex-start"
QUEUED_TOLERATION = "cloud.google.com/gke-queued=true:NoSchedule"
QUEUED_CLASS = "queued-provisioning.gke.io"
GPU_TAINT = {"key": GPU, "value": "present", "effect": "NO_SCHEDULE"}
# The system pool has no taint, so that Helm charts and controllers can run there; runs select the workers' label. Two
# machines, so that DNS survives the upgrade of one.
SYSTEM_NODES = 2
SYSTEM_DISK = 50  # GB
# Deleting may have to wait for another operation, such as a pool that is waiting for stock.
DELETE_SECONDS = 3600.0
# Interval for counting machines of a pool in creation: Google reports a partial stock-out much later.
PARTIAL_SECONDS = 15.0
CAPACITY_CODES = ("GCE_STOCKOUT", "GCE_QUOTA_EXCEEDED")


class GkeResource(Resource):
    """A resource that GKE creates by an operation: identified by its path, with a state and explaining conditions."""

    reading: str  # the cluster manager's methods
    removing: str
    ready: tuple[str, ...] = ("RUNNING",)
    failed: tuple[str, ...] = ("ERROR", "RUNNING_WITH_ERROR")

    def __init__(self, gke: Gke, name: str, path: str) -> None:
        self.gke = gke
        self.name = name
        self.path = path
        self.operation: str | None = None

    def find_raw(self) -> Any | None:
        """Read the resource as Google's message; None if it does not exist."""
        try:
            return self.gke.call(self.reading, name=self.path)
        except NotFoundError:
            return None

    def poll(self) -> Readiness:
        """Ready when the create operation is done. Raises Google's error if it failed."""
        return self.poll_operation(self.operation, "made")

    def poll_operation(self, operation: str | None, doing: str) -> Readiness:
        """The progress of an operation on it. Raises with Google's message if the operation or the resource has
        failed."""
        what = f'The {self.kind} "{self.name}" was not {doing}'
        found = self.find_raw()
        done, detail = _operation(self.gke, operation, what)
        if found is None:
            raise NotFoundError(f'The {self.kind} "{self.name}" disappeared while it was being {doing}.')
        state = found.status.name
        if state in self.failed:
            raise _failure(what, found, self.gke.project)
        return Readiness(done and state in self.ready, detail or f"it is {state}")

    def delete(self) -> None:
        """Request the deletion. Absent is success."""
        with suppress(NotFoundError):
            self.gke.call(self.removing, name=self.path)

    def find_flaw(self, found: Any) -> str | None:
        """Why it will never be ready; None if it may be."""
        state = found.status.name
        return (_conditions(found) or f"it is in the state {state}") if state in self.failed else None


class ControlPlane(GkeResource):
    """The cluster with its system pool."""

    kind = "GKE cluster"
    create_seconds = 1800.0
    delete_seconds = DELETE_SECONDS
    reading, removing = "get_cluster", "delete_cluster"
    ready, failed = ("RUNNING", "DEGRADED"), ("ERROR",)

    def __init__(self, cluster: Cluster, gke: Gke, options: Any) -> None:
        super().__init__(gke, cluster.name, gke.cluster(cluster.name))
        self.cluster = cluster
        self.options = options
        self.remove_command = (
            f"gcloud container clusters delete {self.name} --location {gke.location} --project {gke.project}"
        )

    def find(self) -> ResourceStatus | None:
        """The status from the cluster's state and labels; busy during an operation."""
        found = self.find_raw()
        if found is None:
            return None
        state = found.status.name
        return ResourceStatus(
            state,
            ours=found.resource_labels.get(CLUSTER_TAG) == self.name,
            deleting=state == "STOPPING",
            busy="an operation on it is in progress" if state in ("PROVISIONING", "RECONCILING") else None,
            broken=self.find_flaw(found),
            differs=self._difference(found),
        )

    def _difference(self, found: Any) -> str | None:
        wants = bool(count_networks(setup_of(self.cluster)))
        missing = wants and not found.network_config.enable_multi_networking
        return "it was created without --fast-network, which cannot be added" if missing else None

    def create(self) -> None:
        """Request the cluster with its system pool and labels, and store the operation to poll."""
        answer = self.gke.call("create_cluster", parent=self.gke.parent, cluster=self.request())
        self.operation = answer.name

    def require_raw(self) -> Any:
        """Read the cluster as Google's message. Raises NotFoundError if it does not exist."""
        found = self.find_raw()
        if found is None:
            raise NotFoundError(f'There is no GKE cluster "{self.name}".')
        return found

    def access(self) -> Access:
        """Connect to the cluster's API with Google's credentials. Raises NotFoundError if the cluster does not
        exist."""
        return access_to(self.require_raw())

    def zones(self, machine: Machine) -> list[str]:
        """The workers' zones: as requested, else the cluster's zone, or in a region the first zone with the machine
        type."""
        if self.options.worker_zone:
            return list(self.options.worker_zone)
        place = self.gke.location
        return [place] if api.region_of(place) != place else [Compute(self.gke.project).zone_with(place, machine)]

    def request(self) -> Message:
        """The create request. mlbench's marks are labels, which also appear on Google's bill."""
        labels = ownership_tags(self.cluster)
        options = self.options
        place = self.gke.location
        regional = api.region_of(place) == place
        # One zone, also in a region: more system machines would only add cost.
        zones = self.zones(Machine(options.system_machine_type))[:1] if regional else [place]
        request: Message = {
            "name": self.name,
            "resource_labels": labels,
            "locations": zones,
            "release_channel": {"channel": options.release_channel.upper()},
            "ip_allocation_policy": _ranges(options),
            "network_config": {
                "datapath_provider": "ADVANCED_DATAPATH",
                # Can only be set at creation: allows pods with interfaces in several networks.
                **({"enable_multi_networking": True} if count_networks(setup_of(self.cluster)) else {}),
                **({"default_enable_private_nodes": True} if options.private_nodes else {}),
            },
            "workload_identity_config": {"workload_pool": f"{self.gke.project}.svc.id.goog"},
            "control_plane_endpoints_config": _endpoints(options.allow_from),
            "maintenance_policy": _maintenance_policy(),
            "node_pools": [
                {
                    "name": SYSTEM_POOL,
                    "initial_node_count": SYSTEM_NODES,
                    "config": {
                        **_node_config(options, labels, options.system_machine_type),
                        "disk_size_gb": SYSTEM_DISK,
                        "labels": {ROLE_LABEL: SYSTEM_POOL},
                    },
                }
            ],
        }
        for key, value in (
            ("initial_cluster_version", options.kubernetes_version),
            ("network", options.network),
            ("subnetwork", options.subnetwork),
        ):
            if value:
                request[key] = value
        return request


class WorkerPool(GkeResource):
    """The machines for runs, all of one type, in one zone or spread evenly over several."""

    kind = "node pool"
    create_seconds = 2400.0
    reading, removing = "get_node_pool", "delete_node_pool"

    def __init__(self, plane: ControlPlane, machine: Machine, count: int, networks: Sequence[Resource] = ()) -> None:
        super().__init__(plane.gke, f"{plane.name}/{WORKER_POOL}", f"{plane.path}/nodePools/{WORKER_POOL}")
        self.plane = plane
        self.machine = machine
        self.count = count
        self._counted = time.monotonic()
        self._partial: str | None = None
        self.needs = (plane, *networks)
        self.goes_with = plane
        self.remove_command = (
            f"gcloud container node-pools delete {WORKER_POOL} --cluster {plane.name} "
            f"--location {self.gke.location} --project {self.gke.project}"
        )

    def find(self) -> ResourceStatus | None:
        """The status from the pool's state, with differences from the request."""
        found = self.find_raw()
        if found is None:
            return None
        state, flaw = found.status.name, self.find_flaw(found)
        differs = None if flaw else self._difference(found)
        return ResourceStatus(state, deleting=state == "STOPPING", broken=flaw, differs=differs)

    def poll(self) -> Readiness:
        """Like other resources; if only some machines have started, reports them and their cost."""
        try:
            progress = super().poll()
        except CapacityError as error:
            if here := self._describe_machines(0.0):
                raise CapacityError(f"{error.message} {here}.", hint=error.hint, details=error.details) from None
            raise
        here = None if progress.ready else self._describe_machines(PARTIAL_SECONDS)
        return Readiness(False, f"{here}; Google looks for the others") if here else progress

    def _describe_machines(self, pause: float) -> str | None:
        """How many machines run, if only some do; checked at most every `pause` seconds. None: none, or unknown."""
        now = time.monotonic()
        if now - self._counted < pause:
            return self._partial
        self._counted, self._partial = now, None
        try:
            running = len(list_ready_workers(self.plane.access))
        except MlbenchError:
            return None
        if 0 < running < self.count:
            self._partial = f"{running} of {self.count} machines are running and cost {self._price(running)}"
        return self._partial

    def _price(self, machines: int) -> str:
        """The price of a number of the pool's machines: their share of the plan's lines for workers and GPUs."""
        plan = ClusterDetails.of(self.plane.cluster).plan
        lines = [line for line in plan.get("lines", []) if line["what"].startswith(("worker ", "GPU "))]
        known = [line["count"] * line["price_per_hour"] for line in lines if line["price_per_hour"] is not None]
        if not lines or len(known) < len(lines):
            return "money (their price is not known)"
        return f"{sum(known) * machines / self.count:.2f} {plan.get('currency', 'USD')}/h"

    def create(self) -> None:
        """Request the pool, and store the operation to poll."""
        answer = self.gke.call("create_node_pool", parent=self.plane.path, node_pool=self.request())
        self.operation = answer.name

    def request(self) -> Message:
        """The create request: machines, disks, GPUs with their driver, zones, labels."""
        options, machine = self.plane.options, self.machine
        config: Message = {
            **_node_config(options, ownership_tags(self.plane.cluster), machine.name, options.disk_type),
            "disk_size_gb": options.disk_size,
            "spot": options.spot,
            "flex_start": options.flex_start,
            "labels": {ROLE_LABEL: WORKER},
        }
        if machine.gpu:
            driver = {"gpu_driver_version": options.gpu_driver.upper()}
            config["accelerators"] = [
                {
                    "accelerator_type": machine.gpu,
                    "accelerator_count": machine.gpus,
                    "gpu_driver_installation_config": driver,
                }
            ]
            config["taints"] = [GPU_TAINT]
        if options.reservation:
            config["reservation_affinity"] = parse_reservation(options.reservation).affinity(self.gke.project)
        zones = self.plane.zones(machine)
        request: Message = {
            "name": WORKER_POOL,
            "initial_node_count": self.count // len(zones),  # GKE counts per zone
            "locations": zones,
            "config": config,
            "management": {"auto_repair": True, "auto_upgrade": True},
        }
        if options.compact_placement:
            request["placement_policy"] = {"type_": "COMPACT"}
        if kind := setup_of(self.plane.cluster):
            request["network_config"], labels = configure_pool(self.plane.name, kind)
            config["labels"].update(labels)
        if options.flex_start:
            # Such machines start when pods request them, so the pool starts empty.
            request["initial_node_count"] = 0
            request["autoscaling"] = {"enabled": True, "total_max_node_count": self.count, "location_policy": "ANY"}
            request["management"] = {"auto_repair": False, "auto_upgrade": True}
            config["reservation_affinity"] = {"consume_reservation_type": "NO_RESERVATION"}
            if is_queued(options, self.count):
                request["queued_provisioning"] = {"enabled": True}
        return request

    def _difference(self, found: Any) -> str | None:
        fast = bool(setup_of(self.plane.cluster))
        asked = (self.machine.name, self.machine.gpu or "", self.machine.gpus, bool(self.plane.options.spot), fast)
        accelerator = found.config.accelerators[0] if found.config.accelerators else None
        gpu = (accelerator.accelerator_type, accelerator.accelerator_count) if accelerator else ("", 0)
        networks = found.network_config
        has_fast = bool(networks.additional_node_network_configs or networks.accelerator_network_profile)
        has = (found.config.machine_type, *gpu, found.config.spot, has_fast)
        words = ("machine type", "GPU", "number of GPUs", "spot", "fast network")
        differing = [f"{word} {a} instead of {b}" for word, a, b in zip(words, has, asked, strict=True) if a != b]
        return ", ".join(differing) or None


class PoolSize(Part):
    """The number of machines in the worker pool."""

    kind = "size of node pool"
    create_seconds = 2400.0

    def __init__(self, pool: WorkerPool, count: int) -> None:
        self.pool = pool
        self.count = count
        self.name = f"{pool.name}={count}"
        self.goes_with = pool
        self.operation: str | None = None

    def find(self) -> ResourceStatus | None:
        """Always None: GKE does not report a pool's size reliably, and setting it again is harmless."""
        return None

    def create(self) -> None:
        """Request the new number of machines, divided evenly among the zones. Raises UsageError if that is
        impossible."""
        found = self.pool.find_raw()
        zones = len(found.locations) if found is not None else 0
        if self.count % (zones or 1):
            raise UsageError(f"{self.count} workers cannot be shared evenly by the {zones} zones of the node pool.")
        each = self.count // (zones or 1)
        self.operation = self.pool.gke.call("set_node_pool_size", name=self.pool.path, node_count=each).name

    def poll(self) -> Readiness:
        """Ready when the resize operation is done. Raises Google's error if it failed."""
        return self.pool.poll_operation(self.operation, "resized")


def setup_of(cluster: Cluster) -> str | None:
    """The kind of the cluster's fast network; None without one."""
    kind = ClusterDetails.of(cluster).fabric.get("setup")
    return str(kind) if kind else None


def is_queued(options: GkeOptions, workers: int) -> bool:
    """Whether flex-start machines start all at once, so that the first ones do not cost money while waiting for the
    last.

    Not with compact placement, which queued provisioning does not support.
    """
    return options.flex_start and workers > 1 and not options.compact_placement


def access_to(found: Any) -> Access:
    """Access to a cluster's Kubernetes API: by DNS name if enabled, else by IP address."""
    import base64

    dns = found.control_plane_endpoints_config.dns_endpoint_config
    token = api.token()
    if dns.endpoint and dns.allow_external_traffic:
        return Access(f"https://{dns.endpoint}", token=token)
    if not found.endpoint:
        raise UsageError(f'The GKE cluster "{found.name}" has no address yet: it is {found.status.name}.')
    return Access(
        f"https://{found.endpoint}", ca=base64.b64decode(found.master_auth.cluster_ca_certificate), token=token
    )


def _ranges(options: GkeOptions) -> Message:
    """The address ranges of pods and Services: added to the subnetwork by GKE, or the named ones."""
    named = {
        "cluster_secondary_range_name": options.pods_range,
        "services_secondary_range_name": options.services_range,
    }
    return {"use_ip_aliases": True, **{key: value for key, value in named.items() if value}}


def _endpoints(allowed: Sequence[str]) -> Message:
    """The endpoints of the Kubernetes API: by DNS name, protected by IAM, or by IP address from given networks."""
    by_address: Message = {"enabled": bool(allowed)}
    if allowed:
        networks = {"enabled": True, "cidr_blocks": [{"cidr_block": block} for block in allowed]}
        by_address |= {"enable_public_endpoint": True, "authorized_networks_config": networks}
    return {"dns_endpoint_config": {"allow_external_traffic": not allowed}, "ip_endpoints_config": by_address}


def _maintenance_policy() -> Message:
    """No upgrades of machines while the version is supported, because draining a machine fails its run."""
    exclusion = {
        "start_time": timestamp(time.time()),
        "maintenance_exclusion_options": {
            "scope": "NO_MINOR_OR_NODE_UPGRADES",
            "end_time_behavior": "UNTIL_END_OF_SUPPORT",
        },
    }
    return {"window": {"maintenance_exclusions": {"mlbench": exclusion}}}


def _node_config(options: Any, labels: dict[str, str], machine_type: str, disk_type: str | None = None) -> Message:
    config: Message = {
        "machine_type": machine_type,
        "image_type": "COS_CONTAINERD",
        "oauth_scopes": [api.SCOPE],
        "gvnic": {"enabled": True},
        "resource_labels": labels,
        "workload_metadata_config": {"mode": "GKE_METADATA"},
    }
    if disk := disk_type or default_disk_type(machine_type):
        config["disk_type"] = disk
    if options.secure_boot:
        config["shielded_instance_config"] = {"enable_secure_boot": True, "enable_integrity_monitoring": True}
    if options.service_account:
        config["service_account"] = options.service_account
    return config


def _operation(gke: Gke, name: str | None, what: str) -> tuple[bool, str]:
    """Whether an operation is done, and its progress. There is no state "failed": a done operation may have an error.

    Operations of other processes are unknown; then the resource's state is used.
    """
    if name is None:
        return True, ""
    operation = gke.call("get_operation", name=f"{gke.parent}/operations/{name}")
    if operation.status.name == "DONE" and operation.error.code:
        codes = [item.code.name for item in (*operation.cluster_conditions, *operation.nodepool_conditions)]
        words = operation.error.message or operation.status_message or "no reason given"
        raise _operation_error(f'{what}: "{words}"', [*codes, words], gke.project)
    return operation.status.name == "DONE", str(operation.detail)


def _failure(what: str, found: Any, project: str) -> MlbenchError:
    words = _conditions(found) or found.status.name
    return _operation_error(f'{what}: "{words}"', [item.code.name for item in found.conditions] + [words], project)


def _operation_error(message: str, said: list[str], project: str) -> MlbenchError:
    text = " ".join(said)
    if known := api.error_from_words(message, text, project):
        return known
    if any(code in text for code in CAPACITY_CODES) or any(word in text for word in (*api.STOCK_OUT, "uota")):
        return api.capacity_error(message, project, text)
    return MlbenchError(
        message, hint="Repeat the create-cluster command: it removes the failed resource and tries again."
    )


def _conditions(found: Any) -> str | None:
    messages = [f"{item.code.name}: {item.message}" for item in found.conditions] or [found.status_message]
    return "; ".join(text for text in messages if text) or None
