"""The provider interface. A provider describes clusters as lists of resources; `lifecycle` creates and deletes them.

A new provider is one folder with a class that extends `Provider`, and one line in `registry`; the page
docs/development/new-cloud.md makes one. The life cycle prevents leaks, provided that each resource

* has a name that follows from the cluster name alone, so that any machine can find it,
* gets its ownership tags in the call that creates it,
* is found by name and tag, never from memory, and
* raises TransientError for errors that a retry may cure, another MlbenchError with the cloud's own words for the rest.
"""

import ipaddress
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from mlbench_cli.errors import CredentialError, DeadlineError, MlbenchError, UnreachableError, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.doctor import Check
from providers.workloads import OrphanedResource, WorkloadObject

if TYPE_CHECKING:
    from mlbench_cli.kube.access import Access  # loads 15 modules, which `mlbench status` does not need


# Names of our ownership tags (labels). Values are lower case letters, digits, "-" and "_": all clouds accept those.
CLUSTER_TAG = "mlbench-cluster"
KEPT_TAG = "mlbench-kept"  # for images that outlive their cluster
OWNER_TAG = "mlbench-owner"
EXPIRES_TAG = "mlbench-expires"  # seconds since 1970
REGISTRY_TAG = "mlbench-registry"  # "auto": an image repository was created with the cluster
AUTO = "auto"  # of --registry
ROLE_LABEL, WORKER, SYSTEM = "mlbench-role", "worker", "system"  # of nodes: what they are for
FABRIC_TAG = "mlbench-fabric"  # kind of the fast network that was set up with the cluster
CALL_SECONDS = 30.0
THIS_MACHINE = "this machine"  # as the location of a plan
# In the details of an error: the cloud was never set up on this machine, so searches skip it silently.
NOT_CONFIGURED = {"configured": False}


def call_timeout() -> float:
    """Timeout in seconds for one answer of a cloud. MLBENCH_CALL_SECONDS changes it, e.g. for slow networks."""
    given = os.environ.get("MLBENCH_CALL_SECONDS", "")
    if not given:
        return CALL_SECONDS
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise UsageError(f'MLBENCH_CALL_SECONDS is "{given}", not a number of seconds above 0 and up to 3600.')
    return seconds


class RightsError(CredentialError):
    """The credentials are valid, but lack a right. A check that needs it can be left out; nothing else can."""


class ExistsError(UsageError):
    """Something of that name exists already."""


class TransientError(DeadlineError):
    """A call that may succeed when retried: throttled, a server error, no answer, busy with another operation.

    The life cycle retries it for a while. After that, the user sees it as a deadline error.
    """


class NoAnswerError(TransientError):
    """A call to a cloud that could not be reached from this machine, or did not answer."""

    exit_code = UnreachableError.exit_code
    code = UnreachableError.code


class PartialSearchError(NoAnswerError):
    """Some places did not answer a search for clusters; `found` are the clusters of those that did."""

    def __init__(self, message: str, found: Sequence[Cluster], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.found = list(found)


class BusyError(TransientError):
    """The cloud works on something that has to end first: its own upgrade, a network card that is detached.

    The life-cycle waits for it until the resource's own deadline; it does not count as an error.
    """


@dataclass(frozen=True)
class ResourceStatus:
    """What a cloud reports of an existing resource."""

    state: str  # in the cloud's own words
    ours: bool = True  # whether it has this cluster's tag; otherwise mlbench does not touch it
    deleting: bool = False
    busy: str | None = None  # why it cannot be deleted yet; deletion waits
    broken: str | None = None  # why it will never be ready; it is deleted and recreated
    differs: str | None = None  # how it differs from the requested settings; this is an error
    kept: str | None = None  # why it stays when the cluster is deleted, e.g. because others use it
    owner: str | None = None  # who created the cluster, if this resource tells it


@dataclass(frozen=True)
class Readiness:
    """Whether a resource is ready, and what it is waiting for if not. `facts` go into the cluster's record.

    `broken`: it will never be ready, e.g. because whoever was making it died; `find` says so, too, and it is made anew.
    """

    ready: bool
    reason: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    broken: bool = False


class Resource(Protocol):
    """One thing that a cloud creates for a cluster, e.g. a node pool."""

    kind: str  # in users' words, e.g. "node pool"
    name: str  # follows from the cluster's name
    needs: Sequence["Resource"] = ()  # must be ready before this one is created, and are deleted after it
    goes_with: "Resource | None" = None  # deleted together with that resource
    create_seconds: float = 1800.0  # deadline of its creation
    delete_seconds: float = 1800.0
    remove_command: str = ""  # command that deletes it without mlbench
    holds_images: bool = False  # it stays if the user keeps the cluster's images

    def find(self) -> ResourceStatus | None:
        """Ask the cloud for this resource; None if it does not exist."""

    def create(self) -> None:
        """Request its creation, with its tags in the call. Returns when the request is accepted."""

    def poll(self) -> Readiness:
        """Ask the cloud whether it is ready. Raises with the cloud's own words if its creation has failed."""

    def keep(self) -> None:
        """Mark a resource that the user keeps (`kept`), so that gc does not treat it as a leftover."""
        return

    def delete(self) -> None:
        """Request its deletion. Idempotent: may be called when it does not exist or is already being deleted."""


class Part(Resource):
    """A resource that is deleted with another one (`goes_with`), and is ready as soon as it is found."""

    missing = "the cloud does not show it yet"

    def poll(self) -> Readiness:
        """Ready when it is found."""
        return Readiness(self.find() is not None, self.missing)

    def delete(self) -> None:
        """Do nothing: it goes with another resource."""


@dataclass(frozen=True)
class PlanLine:
    """One priced part of a cluster. `price` is per piece and hour in the plan's currency, None if it is unknown.

    `as_of` is the date of the price, if its table names one; `on_demand` the price on demand of what has no known spot
    price. `why_unknown` is the reason for a missing price, and `row` the beginning of the row that a table would need.
    """

    what: str
    count: int
    price: float | None
    as_of: str | None = None
    on_demand: float | None = None
    why_unknown: str | None = None
    row: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The line as `create-cluster --dry-run -o json` prints it."""
        told = {"what": self.what, "count": self.count, "price_per_hour": self.price, "as_of": self.as_of}
        return told if self.price is not None else {**told, "why_unknown": self.why_unknown}


@dataclass(frozen=True)
class Plan:
    """What `create-cluster` is about to create. Nothing has been created or recorded when it is printed."""

    lines: tuple[PlanLine, ...]
    location: str
    currency: str = "USD"
    source: str = ""  # where the prices come from; it goes into archives, so it names no path of this machine
    table: str = ""  # version of the price table, by its content
    warnings: tuple[str, ...] = ()
    is_checked: bool = True  # False: a sketch, made without asking the cloud

    @property
    def total(self) -> float | None:
        """Price per hour; None if any part is unknown, because a sum without it would be too low."""
        return None if any(line.price is None for line in self.lines) else self.known_total

    @property
    def limit(self) -> float | None:
        """Price per hour with spot machines of unknown price as on demand, which they do not exceed; None if a part is
        unknown either way."""
        prices = [line.on_demand if line.price is None else line.price for line in self.lines]
        counted = zip(self.lines, prices, strict=True)
        return None if None in prices else sum(line.count * (price or 0.0) for line, price in counted)

    @property
    def known_total(self) -> float:
        """Price per hour of the parts whose price is known."""
        return sum(line.count * (line.price or 0.0) for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """The plan as `create-cluster --dry-run -o json` prints it; prices per hour in `currency`, None if unknown."""
        return {
            "location": self.location,
            "lines": [line.to_dict() for line in self.lines],
            "price_per_hour": self.total,
            "currency": self.currency,
            "price_source": self.source,
            "price_table": self.table,
            "warnings": list(self.warnings),
        }


# --- what a provider is -----------------------------------------------------------------------------------------------


class Provider(ABC):
    """Creates, finds and opens the clusters of one kind; `mlbench_cli.model.cluster_details` reads their `details`.

    What a kind of cluster does not have keeps its default: it finds nothing, changes nothing, or raises UsageError.
    """

    name: str
    summary = ""  # one line of help
    notes = ""  # further sentences of help
    options: type[Any] | None = None  # a dataclass with fields made by `option`; None: mlbench creates no such clusters
    minutes = (10, 10)  # typical, to create and to delete a cluster: docs/development/clouds-assumptions.md
    min_nodes, max_nodes = 0, 0  # workers of a cluster
    finds_orphans = False  # its cloud can be asked for disks and load balancers that workloads have left

    # --- its clusters

    @abstractmethod
    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        """All clusters with mlbench's tags, complete or not. `scope` limits the search (project, location).

        Raises PartialSearchError, with what was found, if some places did not answer.
        """

    @abstractmethod
    def connect(self, cluster: Cluster) -> "Access":
        """Endpoint and credentials of its Kubernetes API, held in memory."""

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """All resources of the cluster, each after those that it needs; empty if mlbench deletes none."""
        return ()

    def find_account(self, cluster: Cluster) -> str | None:
        """The account that today's credentials select, if they do, in which names are unique and which pays."""
        return None

    def check_account(self, project: str | None, location: str | None) -> Iterator[Check]:
        """Whether a cluster can be created: credentials, rights, APIs, quotas, versions, prices. Reads only."""
        raise self._lacks("account to check")

    # --- creation

    def new_cluster(self, name: str, nodes: int, options: Any) -> Cluster:
        """The record of a cluster to be created. Raises UsageError for combinations that cannot work. Asks no cloud."""
        raise self._lacks("clusters that mlbench creates")

    def check_nodes(self, nodes: int) -> None:
        """Raise UsageError for a number of workers that its clusters cannot have."""
        if not self.min_nodes <= nodes <= self.max_nodes:
            raise UsageError(
                f"{nodes} workers: a cluster of {self.name} can have {self.min_nodes} to {self.max_nodes} workers."
            )

    def describe_machines(self, cluster: Cluster) -> Cluster:
        """The cluster to create with the GPUs, network cards and vCPUs that the cloud tells of its workers, so that
        types newer than the table work.

        Raises UsageError if they differ from the request, or if the cloud reports no GPUs for a GPU machine.
        """
        return cluster

    def plan(self, cluster: Cluster) -> Plan:
        """Sizes and prices, after a check of tools, credentials and quotas. Writes nothing."""
        raise self._lacks("clusters that mlbench creates")

    def fill_place(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with a place holder for what an account would have decided: a project, a region."""
        return dict(options)

    def sketch(self, cluster: Cluster) -> Plan | None:
        """As `plan`, without an account: what the cloud would have been asked is a warning. None: there is none."""
        return None

    def list_zones(self, cluster: Cluster) -> Sequence[str]:
        """The zones to try for the workers, in their order; empty if there is no choice."""
        return ()

    def place_workers(self, cluster: Cluster, zone: str) -> Cluster:
        """The record of the same cluster with its workers in `zone`: its resources replace those of another zone."""
        raise self._lacks("zones")

    def fetch_registry_login(self, cluster: Cluster) -> tuple[str, str]:
        """User and password for the registry of the cluster's account."""
        raise self._lacks("registry")

    # --- changes

    def extend(self, cluster: Cluster) -> Sequence[Resource]:
        """Resources whose creation moves the end of the cluster to its `expires`, in the cloud and in its tags."""
        return ()

    def describe_end(self, cluster: Cluster) -> str:
        """A sentence about what expires and what remains until it is deleted."""
        return "It does not delete itself when it expires: run mlbench gc --expired."

    # --- what workloads leave in the cloud

    def list_orphans(self, cluster: Cluster, objects: Sequence[WorkloadObject]) -> list[OrphanedResource]:
        """Load balancers and disks that still exist outside of the cluster. Raises MlbenchError if the cloud cannot be
        asked."""
        return []

    def orphan_command(self, cluster: Cluster, item: WorkloadObject | None) -> str:
        """The command that finds and deletes the resource of `item`, or any leftovers of the cluster."""
        raise self._lacks("resources outside of the cluster")

    def _lacks(self, what: str) -> UsageError:
        return UsageError(f"{self.name} has no {what}.", hint="mlbench create-cluster --help")


# --- helpers of providers ---------------------------------------------------------------------------------------------


def option(default: Any, *flags: str, help: str) -> Any:
    """A field of an options dataclass: its default, its flags and its line of help on the command line."""
    return field(default=default, metadata={"flags": flags, "help": help})


@dataclass(frozen=True)
class CloudOptions:
    """The options of `create-cluster` of every cloud, in the order of its help.

    A cloud adds its own, and declares those again of which there is more to say.
    """

    machine_type: str | None = option(
        None, "--machine-type", "-t", help="machine type of each worker; default: one with the requested GPUs"
    )
    num_gpus: int | None = option(
        None, "--num-gpus", "-g", help="number of GPUs per worker; default: all of its machine type"
    )
    gpus_per_node: int | None = option(
        None, "--gpus-per-node", help="number of GPUs of the machine type, if the cloud reports none or a wrong one"
    )
    gpu_type: str | None = option(None, "--gpu-type", help="t4, a100, h100, …; selects the machine type")
    num_cpus: int | None = option(None, "--num-cpus", "-c", help="minimum number of vCPUs per worker")
    disk_size: int = option(100, "--disk-size", "-d", help="disk size per worker in GB")
    kubernetes_version: str | None = option(
        None, "--kubernetes-version", "-k", help="Kubernetes X.Y; default: the cloud's own default version"
    )
    region: str | None = option(None, "--region", help="region of the cluster")
    zones: str | None = option(
        None, "--zones", help="zones of one region to try for the workers, in turn until one has capacity: a,b,c"
    )
    spot: bool = option(False, "--spot", "--preemptible", "-e", help="cheaper machines that may be interrupted")
    probe_image: str | None = option(
        None, "--probe-image", help="image of the GPU probe after creation, preferably with torch; none: no probe"
    )
    registry: str | None = option(
        None,
        "--registry",
        help="source of the task images: a prefix, e.g. ghcr.io/me, or auto: a repository created with the cluster",
    )
    allow_from: tuple[str, ...] = option(
        (), "--allow-from", help="CIDR with access to the Kubernetes API; repeatable; default: any"
    )
    tag: tuple[str, ...] = option(
        (),
        "--tag",
        help="NAME=VALUE for everything that is created, such as the tags that your organization requires; repeatable",
    )


def read_options(cluster: Cluster, cls: type[Any]) -> Any:
    """The options that a cluster was created with; options missing from its record have their defaults."""
    known = {item.name for item in fields(cls)}
    kept = ClusterDetails.of(cluster).options
    return cls(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in kept.items() if key in known}
    )


def ownership_tags(cluster: Cluster) -> dict[str, str]:
    """The tags of everything that is created for `cluster`, after those that its creator gave with --tag."""
    details = ClusterDetails.of(cluster)
    given = dict(text.split("=", 1) for text in details.options.get("tag") or ())
    tags: dict[str, object] = {
        **given,
        CLUSTER_TAG: cluster.name,
        OWNER_TAG: details.owner,
        EXPIRES_TAG: details.expires,
    }
    tags[REGISTRY_TAG] = AUTO if details.registry_made else None
    tags[FABRIC_TAG] = details.fabric.get("setup")
    return {key: str(value) for key, value in tags.items() if value is not None}


def check_tags(texts: Sequence[str], name_form: str, value_form: str, *reserved: str) -> None:
    """Raise UsageError for a --tag that is not NAME=VALUE by the cloud's regular expressions, whose name begins with
    what is `reserved`, in any case, or one whose name differs from another's in case only: roles of AWS, and all of
    Azure, take such names for the same.
    """
    known: set[str] = set()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(name_form, name) or not re.fullmatch(value_form, value):
            raise UsageError(
                f'--tag "{text}" is not a NAME=VALUE that the cloud accepts.', hint="For example: --tag team=research"
            )
        if prefix := next((item for item in ("mlbench", *reserved) if name.lower().startswith(item)), None):
            raise UsageError(
                f'--tag "{text}": such names are reserved.', hint=f"Choose a name without {prefix} in front."
            )
        if name.lower() in known:
            raise UsageError(f'--tag "{text}": there is a tag of that name already.', hint="Name each tag once.")
        known.add(name.lower())


def expiry_of(tags: Mapping[str, str]) -> int | None:
    """The end that a cluster's tags hold, in seconds since 1970; None without one, or if the tag is no number."""
    text = tags.get(EXPIRES_TAG, "")
    return int(text) if text.isdecimal() else None


def details_from_tags(tags: Mapping[str, str]) -> dict[str, object]:
    """The details of a cluster that its tags hold: owner, expires if it has an end, image repository, fast network."""
    details: dict[str, Any] = {"owner": tags.get(OWNER_TAG)}
    if (expires := expiry_of(tags)) is not None:
        details["expires"] = expires
    if tags.get(REGISTRY_TAG) == AUTO:
        details["registry_made"] = True
    if FABRIC_TAG in tags:
        details["fabric"] = {"setup": tags[FABRIC_TAG]}
    return details


def registry_details(registry: str | None, made: str | None = None) -> dict[str, Any]:
    """The details of a new cluster's registry: the prefix given, or with --registry auto the one to be `made`."""
    if registry is None:
        return {}
    if registry == AUTO:
        return {"registry_made": True, **({"registry": made} if made else {})}
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", registry):
        raise UsageError(f'--registry "{registry}" is not an image prefix.', hint="For example ghcr.io/me, or auto")
    return {"registry": registry.rstrip("/")}


def describe_differences(settings: Mapping[str, tuple[object, object]]) -> str | None:
    """The settings that a resource has otherwise than they are asked for; None if there are none. Of each name: what it
    has, and what it is to have."""

    differing = {name: pair for name, pair in settings.items() if pair[0] != pair[1]}
    return ", ".join(f"{name} {_say(has)} instead of {_say(asked)}" for name, (has, asked) in differing.items()) or None


def _say(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) or "none"


def split_zones(text: str | None) -> tuple[str, ...]:
    """The zones of --zones, in their order. Raises UsageError for empty or repeated ones, or zones of two regions."""
    zones = tuple(part.strip() for part in text.split(",")) if text is not None else ()
    if any(not zone for zone in zones) or len(set(zones)) < len(zones):
        raise UsageError(f'--zones "{text}" is not a list of different zones.', hint="--zones eu-west-1a,eu-west-1b")
    if len({re.sub("-?[a-z]$", "", zone) for zone in zones}) > 1:
        raise UsageError(
            f"--zones {text}: these zones are in several regions.",
            hint="A cluster is in one region. If none of its zones has machines, try another region.",
        )
    return zones


def identity_options(cluster: Cluster) -> str:
    """The options of a command that single out this cluster among those of its name, with a space before them."""
    # An option names GKE's account, a project, and AKS', a subscription; that of AWS follows from the credentials.
    flag = "--subscription" if cluster.provider == "aks" else "--project"
    words = [f"{flag} {cluster.account}"] if cluster.account and not cluster.account.isdecimal() else []
    if cluster.location:
        flag = "--zone" if re.fullmatch(r".*\d-?[a-z]", cluster.location) else "--region"
        words.append(f"{flag} {cluster.location}")
    return "".join(f" {word}" for word in words)


def delete_command(cluster: Cluster) -> str:
    """The command that deletes exactly this cluster, and no other of the same name."""
    return f"mlbench delete-cluster {cluster.provider} {cluster.name}{identity_options(cluster)}"


def check_ranges(ranges: Sequence[str], *, is_public: bool) -> None:
    """Refuse an --allow-from that is no range of IPv4 addresses, or not of the internet where only those have access.

    Source: EKS's InvalidParameterException for reserved ranges, and az's own check: Azure/azure-cli-extensions 1764.
    """
    for item in ranges:
        try:
            if ipaddress.IPv4Network(item).is_global or not is_public:
                continue
            problem = "The Kubernetes API is reached over the internet, where nobody has such an address"
        except ValueError as error:
            problem = str(error)
        raise UsageError(
            f'--allow-from "{item}": {problem}.',
            hint="The address of this computer: curl https://checkip.amazonaws.com (append /32)",
        )


def foreign_resource_error(resource: Resource) -> UsageError:
    """The error about a resource that mlbench did not create."""
    return UsageError(
        f'The {resource.kind} "{resource.name}" exists, but was not created by mlbench, so it is left alone.',
        hint="Choose another name"
        + (f", or delete it yourself: {resource.remove_command}" if resource.remove_command else "."),
        details={"kind": resource.kind, "name": resource.name},
    )


# --- refusals whose words tell the cause, whatever their class or code ------------------------------------------------


# Words, the error that a refusal with them becomes, and what to do next. Special words stand before general ones.
Cause = tuple[re.Pattern[str], type[MlbenchError], str]


def error_from_causes(causes: Iterable[Cause], message: str, said: str, **names: str) -> MlbenchError | None:
    """The error `message` of the first cause whose words are in `said`; None for other words. With `names`, they are
    put into its hint."""
    for words, kind, hint in causes:
        if words.search(said):
            return kind(message, hint=hint.format(**names) if names else hint)
    return None
