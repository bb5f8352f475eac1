"""The facts of a cluster as its record keeps them, read and checked in one place.

`Cluster.details` is stored as JSON. `ClusterDetails.of(cluster)` turns it into attributes with types; a provider with
additional facts extends the class (`EksDetails`, `GkeDetails`, `AttachedDetails` in `providers`). Unknown keys
are kept, because a newer version may have written them, and missing keys have defaults, so records of all older
versions can be read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypedDict

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster

# Kubernetes' names of GPUs, by their makers' device plugins.
NVIDIA_GPU, AMD_GPU = "nvidia.com/gpu", "amd.com/gpu"
GPU_RESOURCES = (NVIDIA_GPU, AMD_GPU)


class PlanLineRecord(TypedDict):
    """One priced item. `price_per_hour` is the unit price, null if unknown; `as_of` is the date of the price."""

    what: str
    count: int
    price_per_hour: float | None
    as_of: str | None


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


def fact(*types: type, default: Any = None) -> Any:
    """A field of a stored record whose value has one of `types`; `default` is used if it is missing."""
    return field(default=default, metadata={"types": types})


_DICT: dict[str, object] = {"types": (dict,)}
_LIST: dict[str, object] = {"types": (list,)}


@dataclass(frozen=True)
class ClusterDetails:
    """The facts that clusters of every provider can have."""

    nodes: int | None = fact(int)  # worker machines; None: not known
    gpus_per_node: int | None = fact(int)
    gpu: str | None = fact(str)  # as the cloud calls it
    gpu_resource: str | None = fact(str)  # Kubernetes' name of the GPUs; None: NVIDIA's
    machine_type: str | None = fact(str)
    arm: bool = fact(bool, default=False)  # the workers have Arm processors
    # Other devices of each worker, by Kubernetes' name of the resource.
    devices_per_node: Mapping[str, int] = field(default_factory=dict, metadata=_DICT)
    gpu_probe: Mapping[str, str] = field(default_factory=dict, metadata=_DICT)  # `providers.gpu_probe.parse_report`
    node_selector: Mapping[str, str] = field(default_factory=dict, metadata=_DICT)  # of the nodes meant for runs
    tolerations: list[str] = field(default_factory=list, metadata=_LIST)  # that runs need besides, as --toleration
    fabric: Mapping[str, Any] = field(default_factory=dict, metadata=_DICT)  # of each worker: name, gbits; {}: none
    provisioning_class: str | None = fact(str)  # with which runs reserve the machines of all their workers at once
    runtime_class: str | None = fact(str)  # of pods with GPUs, where it is not the nodes' default
    network_policies: bool = fact(bool, default=True)  # whether runs may create them
    queues: list[str] = field(default_factory=list, metadata=_LIST)  # Kueue's, of the namespace
    needs_queue: bool = fact(bool, default=False)  # Kueue suspends Jobs that name no queue
    autopilot: bool = fact(bool, default=False)  # GKE creates nodes for the pods' requests, which are also their limits
    functional_only: bool = fact(bool, default=False)  # timings on the cluster mean nothing
    registry: str | None = fact(str)  # registry of task images, unless a run names another one
    registry_problem: str | None = fact(str)  # why its machines may be unable to pull from it
    registry_made: bool = fact(bool, default=False)  # created and deleted with the cluster
    keeps_images: bool = fact(bool, default=False)  # keep it this time: delete-cluster --keep-images
    addons: Mapping[str, str] = field(default_factory=dict, metadata=_DICT)  # versions of EKS' add-ons
    images: Mapping[str, str] = field(default_factory=dict, metadata=_DICT)  # digests in it, by IMAGE:VERSION
    region: str | None = fact(str)
    location: str | None = fact(str)  # zone or region of the workers
    owner: str | None = fact(str)  # who created it
    made_for: str | None = fact(str)  # the experiment whose command created it, and deletes it afterwards
    is_kept: bool = fact(bool, default=False)  # that command was told to leave it
    ttl: str | None = fact(str)  # as given, e.g. "8h"
    expires: int | float | None = fact(int, float)  # seconds since 1970, when `gc --expired` may delete it; None: never
    options: Mapping[str, Any] = field(default_factory=dict, metadata=_DICT)  # of its provider, by name
    plan: PlanRecord = field(default_factory=lambda: PlanRecord(), metadata=_DICT)
    helm_charts: list[HelmChartRecord] = field(default_factory=list, metadata=_LIST)
    provisioning: list[TimesRecord] = field(default_factory=list, metadata=_LIST)  # of its creation
    scaling: list[TimesRecord] = field(default_factory=list, metadata=_LIST)  # of the last change of its size
    removal: list[TimesRecord] = field(default_factory=list, metadata=_LIST)  # of its deletion
    failure: FailureRecord | None = field(default=None, metadata=_DICT)
    removed: str | None = fact(str)  # when it was deleted, RFC 3339 UTC

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """The facts of a cluster's record. Raises UsageError for a value of a wrong type, with its key."""
        values: dict[str, Any] = {}
        if cls not in _TYPES:
            _TYPES[cls] = {item.name: item.metadata["types"] for item in fields(cls)}
        types_of = _TYPES[cls]
        for key, value in cluster.details.items():
            name = key if key in types_of else _NEW_KEYS.get(key, key)
            types = types_of.get(name)
            if types is None or value is None or (name != key and name in cluster.details):
                continue
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise UsageError(
                    f'The record of the cluster "{cluster.name}" is damaged: its {name} is {value!r:.60}, '
                    f"not {' or '.join(kind.__name__ for kind in types)}.",
                    hint=f"mlbench delete-cluster {cluster.provider} {cluster.name}   deletes what exists of it",
                )
            values[name] = value
        return cls(**values)

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


@dataclass(frozen=True)
class MachineDetails(ClusterDetails):
    """Fields that Slurm clusters and lists of hosts share. `folder` is absolute on the machines; `env` are variables of
    all ranks."""

    folder: str = fact(str, default="")
    python: str = fact(str, default="python3")
    ssh_config: str | None = fact(str)
    interface: str | None = fact(str)
    env: Mapping[str, str] = field(default_factory=dict, metadata=_DICT)
    # Of `agent.serve.PACKAGES`, what all machines have; None: not known.
    packages: list[str] | None = field(default=None, metadata={"types": (list,)})


# Prefixes of plan lines whose cost ends with the workers.
_WORKER_PARTS = ("worker ", "GPU ")

# Keys written by the first edition.
_NEW_KEYS = {"charts": "helm_charts"}
_TYPES: dict[type, dict[str, tuple[type, ...]]] = {}  # class of details -> types of its facts by key
