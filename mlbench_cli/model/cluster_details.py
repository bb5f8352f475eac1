"""The facts of a cluster as its record keeps them, read and checked in one place.

`Cluster.details` is stored as JSON. `ClusterDetails.of(cluster)` turns it into attributes with types; a provider with
additional facts extends the class (`EksDetails`, `GkeDetails`, `AttachedDetails` in `providers`). Unknown keys
are kept, because a newer version may have written them, and missing keys have defaults, so records of all older
versions can be read.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, Self, TypedDict

import msgspec
from msgspec import Struct

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster

# Kubernetes' names of GPUs, by their makers' device plugins.
NVIDIA_GPU, AMD_GPU = "nvidia.com/gpu", "amd.com/gpu"
GPU_RESOURCES = (NVIDIA_GPU, AMD_GPU)


class PlanLineRecord(TypedDict):
    """One priced item. `price_per_hour` is the unit price, null if unknown (`why_unknown`); `as_of` is its date."""

    what: str
    count: int
    price_per_hour: float | None
    as_of: str | None
    why_unknown: NotRequired[str | None]


class PlanRecord(TypedDict, total=False):
    """What the cluster was planned to cost when it was created. `price_per_hour` is null if any part is unknown."""

    location: str
    lines: list[PlanLineRecord]
    price_per_hour: float | None
    currency: str
    price_source: str
    price_table: str
    warnings: list[str]


class WaitRecord(TypedDict):
    """One wait of a resource: what it waited for, and for how long."""

    reason: str
    seconds: float


class TimesRecord(TypedDict, total=False):
    """Times of one resource in seconds since the operation started, null until known (`providers.lifecycle`)."""

    kind: str
    name: str
    adopted: bool | None
    began: float | None
    accepted: float | None
    ready: float | None
    gone: float | None
    waits: list[WaitRecord]


class FailureRecord(TypedDict):
    """Why the last creation or deletion failed."""

    code: str
    message: str
    hint: str | None


class HelmChartRecord(TypedDict):
    """A Helm chart that was installed with the cluster. Of custom values only the names are kept: they may be
    secrets."""

    release: str
    namespace: str
    version: str
    source: str
    digest: str
    custom_values: list[str]


class ClusterDetails(Struct, frozen=True):
    """The facts that clusters of every provider can have."""

    nodes: int | None = None  # worker machines; None: not known
    gpus_per_node: int | None = None
    gpu: str | None = None  # as the cloud calls it
    gpu_resource: str | None = None  # Kubernetes' name of the GPUs; None: NVIDIA's
    machine_type: str | None = None
    arm: bool = False  # the workers have Arm processors
    # Other devices of each worker, by Kubernetes' name of the resource.
    devices_per_node: Mapping[str, int] = {}
    gpu_probe: Mapping[str, str] = {}  # `providers.gpu_probe.parse_report`
    node_selector: Mapping[str, str] = {}  # of the nodes meant for runs
    tolerations: list[str] = []  # that runs need besides, as --toleration
    fabric: Mapping[str, Any] = {}  # of each worker: name, gbits; {}: none
    provisioning_class: str | None = None  # with which runs reserve the machines of all their workers at once
    runtime_class: str | None = None  # of pods with GPUs, where it is not the nodes' default
    network_policies: bool = True  # whether runs may create them
    queues: list[str] = []  # Kueue's, of the namespace
    needs_queue: bool = False  # Kueue suspends Jobs that name no queue
    autopilot: bool = False  # GKE creates nodes for the pods' requests, which are also their limits
    functional_only: bool = False  # timings on the cluster mean nothing
    registry: str | None = None  # registry of task images, unless a run names another one
    registry_problem: str | None = None  # why its machines may be unable to pull from it
    registry_made: bool = False  # created and deleted with the cluster
    keeps_images: bool = False  # keep it this time: delete-cluster --keep-images
    addons: Mapping[str, str] = {}  # versions of EKS' add-ons
    images: Mapping[str, str] = {}  # digests in it, by IMAGE:VERSION
    region: str | None = None
    location: str | None = None  # zone or region of the workers
    owner: str | None = None  # who created it
    made_for: str | None = None  # the experiment whose command created it, and deletes it afterwards
    is_kept: bool = False  # that command was told to leave it
    ttl: str | None = None  # as given, e.g. "8h"
    expires: int | float | None = None  # seconds since 1970, when `gc --expired` may delete it; None: never
    options: Mapping[str, Any] = {}  # of its provider, by name
    plan: PlanRecord = {}
    helm_charts: list[HelmChartRecord] = []
    provisioning: list[TimesRecord] = []  # of its creation
    scaling: list[TimesRecord] = []  # of the last change of its size
    removal: list[TimesRecord] = []  # of its deletion
    failure: FailureRecord | None = None
    removed: str | None = None  # when it was deleted, RFC 3339 UTC

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """The facts of a cluster's record. Raises UsageError for a value of a wrong type, with its key."""
        known = {_NEW_KEYS.get(key, key): value for key, value in cluster.details.items() if value is not None}
        try:
            return msgspec.convert(known, cls)
        except msgspec.ValidationError as error:
            raise UsageError(
                f'The record of the cluster "{cluster.name}" is damaged: {error}.',
                hint=f"mlbench delete-cluster {cluster.provider} {cluster.name}   deletes what exists of it",
            ) from None

    @property
    def price_per_hour(self) -> float | None:
        """The planned price; None if it is unknown or nothing was planned."""
        return self.plan.get("price_per_hour")

    def describe_rest(self, *ended: str) -> str:
        """The price of what remains without workers, and without what begins with `ended` in the plan, as part of a
        sentence; empty if unknown."""
        lines = [line for line in self.plan.get("lines", []) if not line["what"].startswith((*_WORKER_PARTS, *ended))]
        known = [line["count"] * line["price_per_hour"] for line in lines if line["price_per_hour"] is not None]
        if not lines or len(known) < len(lines):
            return ""
        return f" and cost up to {sum(known):.2f} {self.plan.get('currency', 'USD')}/h"


class MachineDetails(ClusterDetails, frozen=True):
    """Fields that Slurm clusters and lists of hosts share. `folder` is absolute on the machines; `env` are variables of
    all ranks."""

    folder: str = ""
    python: str = "python3"
    ssh_config: str | None = None
    interface: str | None = None
    env: Mapping[str, str] = {}
    # Of `agent.serve.PACKAGES`, what all machines have; None: not known.
    packages: list[str] | None = None


# Prefixes of plan lines whose cost ends with the workers.
_WORKER_PARTS = ("worker ", "GPU ")

# Keys written by the first edition.
_NEW_KEYS = {"charts": "helm_charts"}
