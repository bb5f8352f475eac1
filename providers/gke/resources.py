"""The resources of a GKE cluster: the control plane with a small system pool, the worker pool, and what goes with them.

They are separate, so that if the pool fails for lack of stock or quota, the cluster remains for another try. GKE runs
one operation at a time on a cluster and rejects others, also during automatic upgrades: mlbench waits for these.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.gpudirect import Release, choose_release
from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.cluster_details import NVIDIA_GPU, ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import timestamp
from providers.base import (
    CLUSTER_TAG,
    KEPT_TAG,
    OWNER_TAG,
    ROLE_LABEL,
    WORKER,
    BusyError,
    Readiness,
    Resource,
    ResourceStatus,
    TransientError,
    describe_differences,
    ownership_tags,
)
from providers.cluster_end import EndMark, WorkerHold
from providers.gke import api
from providers.gke.api import Gke, Message, Project, region_of
from providers.gke.options import (
    FabricKind,
    GkeOptions,
    Machine,
    configure_pool,
    count_networks,
    default_disk_type,
    name_networks,
)
from providers.gke.quota import Compute, parse_reservation
from providers.gpu_probe import GpuProbe, find_driver_branch
from providers.kubernetes_calls import ClusterObjects, Document, list_ready_workers
from providers.pins import require_pin
from templates import documents

SYSTEM_POOL = "system"
WORKER_POOL = "workers"
# Label with which pods request flex-start machines, and taint of machines of queued provisioning.
FLEX_START_LABEL = "cloud.google.com/gke-flex-start"
QUEUED_TOLERATION = "cloud.google.com/gke-queued=true:NoSchedule"
QUEUED_CLASS = "queued-provisioning.gke.io"
GPU_TAINT = {"key": NVIDIA_GPU, "value": "present", "effect": "NO_SCHEDULE"}
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
        return self.poll_operation(self.operation, "created")

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
            owner=found.resource_labels.get(OWNER_TAG),
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
        return api.access_to(self.require_raw())

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
        if ClusterDetails.of(self.plane.cluster).expires is not None and self.count:
            request["autoscaling"] = shrinkable(self.count // len(zones))
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
        accelerator = found.config.accelerators[0] if found.config.accelerators else None
        networks = found.network_config
        is_fast = bool(networks.additional_node_network_configs or networks.accelerator_network_profile)
        return describe_differences(
            {
                "machine type": (found.config.machine_type, self.machine.name),
                "GPU": (accelerator.accelerator_type if accelerator else "", self.machine.gpu or ""),
                "number of GPUs": (accelerator.accelerator_count if accelerator else 0, self.machine.gpus),
                "spot": (bool(found.config.spot), bool(self.plane.options.spot)),
                "fast network": (is_fast, bool(setup_of(self.plane.cluster))),
            }
        )


def shrinkable(most: int) -> Message:
    """Limits of a pool that the autoscaler may shrink to nothing; `most` machines per zone."""
    return {"enabled": True, "min_node_count": 0, "max_node_count": max(1, most)}


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


# --- the end of a cluster ---------------------------------------------------------------------------------------------

# GKE has no timer: machines that exceed their maximum run time (`max_run_duration`) are recreated, and changing it
# recreates every machine. So a label tells every machine's `mlbench gc`, and a Job holds the workers until then.

# Waits for a signal. GKE's machines already have it for their own pods.
PAUSE = "gke.gcr.io/pause:3.8@sha256:880e63f94b145e46f1b1082bb71b85e21f16b99b180b9996407d61240ceb9830"


class GkeHold(WorkerHold):
    """The hold on the workers of a node pool."""

    image = PAUSE

    def __init__(self, pool: WorkerPool, needs: Sequence[Resource] = ()) -> None:
        plane = pool.plane
        super().__init__(plane.cluster, plane.access, pool.count, needs, plane)
        self.pool = pool
        self.operation: str | None = None

    def let_shrink(self) -> None:
        """Enable autoscaling of the pool. One that has failed is created again, with autoscaling."""
        found = self.pool.find_raw()
        if found is None or self.pool.find_flaw(found):
            return
        gke, limits = self.pool.plane.gke, shrinkable(self.pool.count // max(len(found.locations), 1))
        self.operation = gke.call("set_node_pool_autoscaling", name=self.pool.path, autoscaling=limits).name

    def may_shrink(self) -> bool:
        found = self.pool.find_raw()
        return found is None or bool(found.autoscaling.enabled)

    def poll_shrinking(self) -> Readiness:
        if self.operation is None:
            return Readiness(True)
        return self.pool.poll_operation(self.operation, "scaled down automatically")


class EndLabel(EndMark):
    """The cluster's labels."""

    kind = "expiry label"

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane.cluster, plane)
        self.plane = plane

    def read(self) -> Mapping[str, str]:
        return dict(self.plane.require_raw().resource_labels)

    def write(self, tags: Mapping[str, str]) -> None:
        found = self.plane.require_raw()
        labels = {**dict(found.resource_labels), **tags}
        fingerprint = found.label_fingerprint
        self.plane.gke.call("set_labels", name=self.plane.path, resource_labels=labels, label_fingerprint=fingerprint)


# --- the image repository of --registry auto --------------------------------------------------------------------------

# Source: Artifact Registry's REST reference, as of 2026-11. Uses google-auth's session, so no other library is needed.
# MLBENCH_ARTIFACT_ENDPOINT sets the API's address, for tests and proxies.

ENDPOINT = "https://artifactregistry.googleapis.com"
AT_ONCE = 16  # concurrent requests for regions
RETRY_WAITS = (0.5, 2.0)  # seconds before retries after transient errors
READER = "roles/artifactregistry.reader"
USER = "oauth2accesstoken"  # Artifact Registry's user name for access tokens


def repository_id(cluster: str) -> str:
    return f"mlbench-{cluster}"


def registry_of(project: str, location: str, cluster: str) -> str:
    """The prefix of image names, for nodes and `docker push`."""
    return f"{region_of(location)}-docker.pkg.dev/{project}/{repository_id(cluster)}"


def node_account(gke: Gke, given: str | None) -> str:
    """The service account of a cluster's machines: the given one, else the project's Compute Engine default."""
    return given or f"{Project(gke).number()}-compute@developer.gserviceaccount.com"


class ImageRepository(Resource):
    """A Docker repository in the cluster's region. It is deleted before the cluster, by which it is found."""

    kind = "image repository"
    create_seconds = delete_seconds = 300.0
    holds_images = True

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.name = repository_id(plane.name)
        self.needs = (plane,)
        gke = plane.gke
        self.region = region_of(gke.location)
        self._parent = f"/v1/projects/{gke.project}/locations/{self.region}/repositories"
        self.remove_command = (
            f"gcloud artifacts repositories delete {self.name} --location {self.region} --project {gke.project}"
        )

    def find(self) -> ResourceStatus | None:
        try:
            found = self._ask("GET", f"{self._parent}/{self.name}")
        except NotFoundError:
            return None
        return ResourceStatus("there", ours=(found.get("labels") or {}).get(CLUSTER_TAG) == self.plane.name)

    def create(self) -> None:
        body = {
            "format": "DOCKER",
            "description": f"images of the mlbench cluster {self.plane.name}",
            "labels": {**ownership_tags(self.plane.cluster), LOCATION_TAG: self.plane.gke.location},
        }
        self._ask("POST", f"{self._parent}?repositoryId={self.name}", body)

    def poll(self) -> Readiness:
        """Ready when it exists and the machines' account may read it; if that cannot be granted, the record says so."""
        if self.find() is None:
            return Readiness(False, "Google does not show it yet")
        try:
            self._let_machines_read()
        except CredentialError as error:
            account = self.plane.options.service_account or "the machines' service account"
            problem = (
                f"{error.message} Unless {account} has the role {READER}, pods cannot pull: gcloud artifacts "
                f"repositories add-iam-policy-binding {self.name} --location {self.region} --project "
                f"{self.plane.gke.project} --role {READER} --member serviceAccount:ACCOUNT"
            )
            return Readiness(True, facts={"registry_problem": problem})
        return Readiness(True, facts={"registry_problem": None})

    def keep(self) -> None:
        """Mark it, so that gc keeps it after its cluster is deleted."""
        found = self._ask("GET", f"{self._parent}/{self.name}")
        labels = {**(found.get("labels") or {}), KEPT_TAG: "true"}
        self._ask("PATCH", f"{self._parent}/{self.name}?updateMask=labels", {"labels": labels})

    def _let_machines_read(self) -> None:
        """Bind the reader role to the machines' account, only on this repository.

        In organizations created since May 2024, the project's default account has no roles
        (iam.automaticIamGrantsForDefaultServiceAccounts).
        """
        member = f"serviceAccount:{node_account(self.plane.gke, self.plane.options.service_account)}"
        policy = self._ask("GET", f"{self._parent}/{self.name}:getIamPolicy")
        bindings = policy.setdefault("bindings", [])
        if any(item["role"] == READER and member in item["members"] for item in bindings):
            return
        bindings.append({"role": READER, "members": [member]})
        self._ask("POST", f"{self._parent}/{self.name}:setIamPolicy", {"policy": policy})

    def delete(self) -> None:
        with suppress(NotFoundError):
            self._ask("DELETE", f"{self._parent}/{self.name}")

    def _ask(self, method: str, path: str, body: Message | None = None) -> Message:
        return _ask(self.plane.gke.project, method, path, f"{method.lower()} the image repository {self.name}", body)


def list_repositories(project: str) -> list[Message]:
    """The project's repositories with mlbench's label, in all regions, except those kept by --keep-images.

    Empty if the API is disabled. Raises MlbenchError if Google cannot be asked.
    """
    try:
        places = _list_places(project)
    except CredentialError as error:
        if api.is_api_off(error.message):
            return []
        raise
    parents = [
        f"/v1/{item['name']}/repositories?pageSize=500" for page in places for item in page.get("locations") or ()
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda parent: _list(project, parent, "list image repositories"), parents)
        listed = [item for pages in found for page in pages for item in page.get("repositories") or ()]
    labels = [(item, item.get("labels") or {}) for item in listed]
    return [item for item, marks in labels if CLUSTER_TAG in marks and KEPT_TAG not in marks]


def require_api(project: str) -> None:
    """Raise CredentialError with the command that enables Artifact Registry's API if the project has not: before
    anything that costs money is made."""
    _list_places(project)


def _list_places(project: str) -> list[Message]:
    return _list(project, f"/v1/projects/{project}/locations?pageSize=500", "list regions of repositories")


def _list(project: str, path: str, what: str) -> list[Message]:
    """The pages of a list. With many regions a transient error is likely, so requests are retried."""

    def read(path: str) -> Message:
        for wait in RETRY_WAITS:
            try:
                return _ask(project, "GET", path, what)
            except TransientError:
                time.sleep(wait)
        return _ask(project, "GET", path, what)

    return list(api.read_pages(read, path))


def _ask(project: str, method: str, path: str, what: str, body: Message | None = None) -> Message:
    url = f"{os.environ.get('MLBENCH_ARTIFACT_ENDPOINT', ENDPOINT)}{path}"
    return api.ask_rest("Artifact Registry", method, url, what, project, body)


# --- the networks of --fast-network -----------------------------------------------------------------------------------

# For machines with GPUDirect-TCPX or TCPXO, one VPC network per card, each with a subnetwork and a firewall rule for
# the machines. They are free, but limited per project (quota NETWORKS), and GKE does not delete them with a cluster.
# Compute Engine does not support labels for them, so mlbench's tags are in their descriptions, by which they are found
# even without a cluster. Sources: Google's page on GPUDirect-TCPX and TCPXO, cluster-toolkit (MTU, one network per
# card), Compute Engine's REST reference.

MTU = 8244  # the largest MTU with header-data split on the cards
# Divided among at most 8 networks: a machine's cards must not have overlapping ranges.
RANGE, SUBNET_BITS = "192.168.0.0/16", 19
LOCATION_TAG = "mlbench-location"
PREFIX = "mlbench-"


@dataclass(frozen=True)
class NetworkKind:
    """A kind of part of a network: its API path below the project, and its words in gcloud. {region} is replaced."""

    words: str
    collection: str
    command: str


NETWORK = NetworkKind("fast network", "/global/networks", "networks delete {name}")
SUBNETWORK = NetworkKind(
    "fast subnetwork", "/regions/{region}/subnetworks", "networks subnets delete {name} --region {region}"
)
FIREWALL_RULE = NetworkKind("fast network's firewall rule", "/global/firewalls", "firewall-rules delete {name}")


class NetworkPart(Resource):
    """A part of a network, read and changed by Compute Engine's REST API (changes are operations)."""

    create_seconds = delete_seconds = 900.0

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        kind: NetworkKind,
        body: Message,
        open_compute: Callable[[], Compute],
        needs: Sequence[Resource] = (),
    ) -> None:
        """`body` is the create request without name and description. The client is opened on first use, because
        plans need no credentials."""
        self.plane = plane
        self.name = name
        self.kind = kind.words
        self.needs = needs
        self.body = body
        self.compute = open_compute
        region, project = region_of(plane.gke.location), plane.gke.project
        self.collection = kind.collection.format(region=region)
        self.path = f"{self.collection}/{name}"
        self.remove_command = f"gcloud compute {kind.command.format(name=name, region=region)} --project {project}"
        self._creation: str | None = None
        self._removal: str | None = None

    def find(self) -> ResourceStatus | None:
        """Read its status; deleting while this process's delete operation runs."""
        if self._removal is not None:
            operation, self._removal = self._removal, None
            if not self.compute().is_done(operation):
                self._removal = operation
                return ResourceStatus("being deleted", deleting=True)
        try:
            found = self.compute().get(self.path)
        except NotFoundError:
            return None
        return ResourceStatus("there", ours=read_marks(found).get(CLUSTER_TAG) == self.plane.name)

    def create(self) -> None:
        """Request it with mlbench's tags in its description, and store the operation to poll."""
        request = {"name": self.name, "description": describe_owner(self.plane), **self.body}
        self._creation = self.compute().change("POST", self.collection, request)

    def poll(self) -> Readiness:
        """Ready when the create operation is done. Raises with Compute Engine's message if it failed."""
        if self._creation is not None and not self.compute().is_done(self._creation):
            return Readiness(False, "Compute Engine is creating it")
        self._creation = None
        self.compute().get(self.path)
        return Readiness(True)

    def delete(self) -> None:
        """Request the deletion. Absent is success. Raises BusyError while something else uses it."""
        if self.collection == NETWORK.collection:
            self._delete_rules()
        with suppress(NotFoundError):
            self._removal = self.compute().change("DELETE", self.path)

    def _delete_rules(self) -> None:
        """Delete firewall rules that others, such as GKE, created in this network. Raises BusyError until they are
        gone.

        Other users of the network, such as a load balancer's endpoint group, are not deleted: mlbench waits for them,
        and reports Google's message if they remain.
        """
        wanted = quote(f'network eq ".*/networks/{self.name}"')
        rules = self.compute().list_all("/global/firewalls?filter=" + wanted)
        for rule in rules:
            with suppress(NotFoundError):
                self.compute().change("DELETE", f"/global/firewalls/{rule['name']}")
        if rules:
            raise BusyError(f"waiting for its firewall rules: {', '.join(str(rule['name']) for rule in rules)}")


def list_networks(plane: ControlPlane, kind: str | None) -> list[NetworkPart]:
    """The networks of a cluster with this fast network, one per card, each followed by its subnetwork and the rule that
    lets the machines' cards reach each other."""
    open_compute = cache(lambda: Compute(plane.gke.project))
    parts: list[NetworkPart] = []
    for card, name in enumerate(name_networks(plane.name, kind)):
        body: Message = {"autoCreateSubnetworks": False, "mtu": MTU, "routingConfig": {"routingMode": "REGIONAL"}}
        network = NetworkPart(plane, name, NETWORK, body, open_compute)
        url = f"https://www.googleapis.com/compute/v1/projects/{plane.gke.project}{network.path}"
        addresses = f"192.168.{card << (24 - SUBNET_BITS)}.0/{SUBNET_BITS}"
        allowed = [{"IPProtocol": protocol} for protocol in ("tcp", "udp", "icmp")]
        rule = {"network": url, "sourceRanges": [RANGE], "allowed": allowed, "direction": "INGRESS"}
        within: Message = {"network": url, "ipCidrRange": addresses}
        parts += [
            network,
            NetworkPart(plane, name, SUBNETWORK, within, open_compute, (network,)),
            NetworkPart(plane, name, FIREWALL_RULE, rule, open_compute, (network,)),
        ]
    return parts


def describe_owner(plane: ControlPlane) -> str:
    """mlbench's tags as a description."""
    tags = {**ownership_tags(plane.cluster), LOCATION_TAG: plane.gke.location}
    return " ".join(f"{key}={value}" for key, value in tags.items())


def read_marks(found: Mapping[str, object]) -> dict[str, str]:
    """The tags in the description of a part of a network; empty if it is not mlbench's."""
    words = (word.partition("=") for word in str(found.get("description") or "").split())
    return {key: value for key, equals, value in words if equals and key.startswith(PREFIX)}


@dataclass(frozen=True)
class NetworkMark:
    """The marks of one of mlbench's networks: its tags, and when it was created (RFC 3339)."""

    tags: Mapping[str, str]
    created: str


def find_marks(project: str) -> list[NetworkMark]:
    """The marks of all of mlbench's networks in the project.

    Empty for users who may not list networks, because they cannot have created any.
    """
    try:
        listed = Compute(project).list_all("/global/networks?filter=" + quote(f'name eq "{PREFIX}.*"'))
    except CredentialError:
        return []
    marks = (NetworkMark(read_marks(item), str(item.get("creationTimestamp"))) for item in listed)
    return [mark for mark in marks if CLUSTER_TAG in mark.tags]


# --- what lets pods use the networks: Kubernetes objects and NCCL's plugin ------------------------------------------

# GPUDirect-TCPX and TCPXO need one network per card (above), a pair of Kubernetes objects for each, and a program that
# gives pods access to the cards' devices. For RDMA, GKE creates the networks (`accelerator_network_profile`), and pods
# claim cards. In all cases a DaemonSet installs NCCL's plugin in a folder of the machine. Sources:
# GoogleCloudPlatform/container-engine-accelerators, GoogleCloudPlatform/cluster-toolkit, Google's pages on GPUDirect
# and on managed DRANET, as of 2026-11; assumptions: docs/development/clouds-assumptions.md.


INSTALLER = "mlbench-nccl-installer"


class NetworkObjects(ClusterObjects):
    """A `Network` and its `GKENetworkParamSet` for each additional network, to which pods' interfaces refer."""

    kind = "Kubernetes' networks"

    def __init__(self, plane: ControlPlane, kind: FabricKind, needs: Sequence[Resource]) -> None:
        self.networks = {f"vpc{number}": name for number, name in enumerate(name_networks(plane.name, kind), 1)}
        super().__init__(plane.access, f"{plane.name}/vpc1…vpc{len(self.networks)}", needs, plane)

    def documents(self) -> Sequence[Document]:
        """For each network, its parameters and the network that refers to them."""
        networks = [{"name": name, "network": network} for name, network in self.networks.items()]
        return documents("kubernetes/gke-networks.yaml.j2", {"networks": networks})

    def poll(self) -> Readiness:
        """Ready when GKE has accepted the parameters of every network."""
        for document in self.documents():
            ready = condition(self.read(document) or {}, "Ready")
            if document["kind"] == "GKENetworkParamSet" and not is_true(ready):
                said = ready.get("message") or "GKE has not processed it yet"
                return Readiness(False, f"{document['metadata']['name']} is not ready: {said}")
        return Readiness(True)


class NcclInstaller(ClusterObjects):
    """DaemonSets that install NCCL's plugin on every worker; ready when it is on all of them."""

    kind = "NCCL plugin"

    def __init__(
        self, plane: ControlPlane, kind: FabricKind, count: int, pool: Resource, probe: GpuProbe | None = None
    ) -> None:
        """`probe` reports the driver branch; without it, the oldest known release is installed."""
        super().__init__(plane.access, INSTALLER, (pool, *((probe,) if probe else ())), plane)
        self.plane = plane
        self.fabric = kind
        self.count = count
        self.probe = probe

    @property
    def branch(self) -> int | None:
        """The workers' driver branch, if already known."""
        details = ClusterDetails.of(self.plane.cluster)
        return find_driver_branch(self.probe.report if self.probe and self.probe.report else details.gpu_probe)

    @property
    def release(self) -> Release:
        """The plugin release to install."""
        return choose_release(self.fabric, self.branch)

    def find(self) -> ResourceStatus | None:
        """Look for the installer; None if it is missing, or installs a plugin for another driver branch."""
        document = self.documents()[-1]
        found = self.read(document)
        return ResourceStatus("there") if found and _images(found) == _images(document) else None

    def documents(self) -> Sequence[Document]:
        """The installer, after the device injector if pods reach the cards' devices through it."""
        values = {
            "kind": self.fabric.value,
            "name": INSTALLER,
            "node_selector": {ROLE_LABEL: WORKER},
            "plugin": self.release.plugin,
            "injector": None if self.fabric is FabricKind.GIB else require_pin("gke", "nri-device-injector"),
            "pause": require_pin("gke", "pause"),
        }
        return documents("kubernetes/gke-nccl-installer.yaml.j2", values)

    def poll(self) -> Readiness:
        """Count the workers on which each DaemonSet is ready. Uses the expected number, because with a wrong label a
        DaemonSet would want no machine."""
        for document in self.documents():
            status = (self.read(document) or {}).get("status") or {}
            ready = int(status.get("numberReady") or 0)
            if ready < self.count:
                name = document["metadata"]["name"]
                return Readiness(False, f"{name} is ready on {ready} of {self.count} machines")
        fabric = {**ClusterDetails.of(self.plane.cluster).fabric, "driver_branch": self.branch}
        is_first = self.release == choose_release(self.fabric, None)  # the default of runs
        return Readiness(True, facts={} if is_first else {"fabric": fabric})


def _images(daemon_set: Mapping[str, Any]) -> list[str]:
    """The images of its init containers."""
    return [str(item["image"]) for item in daemon_set["spec"]["template"]["spec"].get("initContainers") or ()]
