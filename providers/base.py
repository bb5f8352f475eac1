"""What a provider is: it describes clusters as lists of resources and opens them; `lifecycle` makes and removes them.

A new provider is one module with a class that has the members of `Provider`, and a line in `registry`. Its resources
have the members of `Resource`; that they are never leaked is the life-cycle's affair, provided that each resource

* has a name that follows from the cluster's alone, so that any machine finds it,
* is marked as this cluster's in the very call that makes it,
* is found by name and mark, never by memory, and
* raises TransientError for what repeating may cure, another MlbenchError with the cloud's own words for the rest.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from mlbench_cli.errors import DeadlineError, UsageError
from mlbench_cli.model import Cluster

if TYPE_CHECKING:
    from mlbench_cli.kube.access import Access

# What our marks (tags, labels) are called. Values are lower case letters, digits, "-" and "_": all clouds take those.
CLUSTER_TAG = "mlbench-cluster"
OWNER_TAG = "mlbench-owner"
EXPIRES_TAG = "mlbench-expires"  # seconds since 1970
CALL_SECONDS = 30.0


def call_timeout() -> float:
    """The longest that a cloud may take for one answer; MLBENCH_CALL_SECONDS changes it, for slow ways."""
    given = os.environ.get("MLBENCH_CALL_SECONDS", "")
    if not given:
        return CALL_SECONDS
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise UsageError(f'MLBENCH_CALL_SECONDS is "{given}": it has to be a number of seconds, above 0, at most 3600.')
    return seconds


class TransientError(DeadlineError):
    """A call that may succeed when repeated: throttled, a server error, no answer, busy with something else.

    The life-cycle repeats it for a while; where that does not help, the user sees it as a passed deadline.
    """


@dataclass(frozen=True)
class ResourceStatus:
    """What is there under a resource's name."""

    state: str  # in the cloud's own words
    ours: bool = True  # marked as this cluster's; if not, it is never touched
    deleting: bool = False  # on its way out
    busy: str | None = None  # why it cannot be removed yet, though it will be possible: wait
    broken: str | None = None  # why it will never be ready: it is made anew
    differs: str | None = None  # how it differs from what is asked for: it is refused
    kept: str | None = None  # why it stays when the cluster goes: shared with others


@dataclass(frozen=True)
class Readiness:
    ready: bool
    reason: str = ""  # what it is waiting for, where it is not ready


class Resource(Protocol):
    """One thing that a cloud makes for a cluster."""

    kind: str  # as a person calls it: "node pool"
    name: str  # follows from the cluster's name
    needs: Sequence["Resource"] = ()  # what must be ready before this is made, and is removed only after it
    goes_with: "Resource | None" = None  # removed by removing that one
    create_seconds: float = 1800.0  # the longest that making it may take
    delete_seconds: float = 1800.0
    remove_command: str = ""  # how a person removes it without mlbench

    def find(self) -> ResourceStatus | None:
        """What is there under this name, by asking the cloud."""
        ...

    def create(self) -> None:
        """Ask for it, with its marks in the call. Returns when the request is accepted."""
        ...

    def poll(self) -> Readiness:
        """How far it is. Raises with the cloud's own words where it has failed."""
        ...

    def delete(self) -> None:
        """Ask for its removal. Absent or on its way out already: nothing to do."""
        ...


@dataclass(frozen=True)
class PlanLine:
    """One priced part of a cluster. `price` is per piece and hour in the plan's currency, None where it is unknown.

    `as_of` says of when the price is, as far as its table tells.
    """

    what: str
    count: int
    price: float | None
    as_of: str | None = None


@dataclass(frozen=True)
class Plan:
    """What `create-cluster` is about to make. Nothing has been written when it is printed."""

    lines: tuple[PlanLine, ...]
    location: str
    currency: str = "USD"
    source: str = ""  # where the prices come from, with their date
    table: str = ""  # the version of the table of prices: another one has another
    warnings: tuple[str, ...] = ()

    @property
    def total(self) -> float | None:
        """Per hour; None where any part is unknown, since a sum without it would be too low."""
        prices = [line.price for line in self.lines]
        if None in prices:
            return None
        return sum(line.count * (line.price or 0.0) for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "location": self.location,
            "lines": [
                {"what": line.what, "count": line.count, "price_per_hour": line.price, "as_of": line.as_of}
                for line in self.lines
            ],
            "price_per_hour": self.total,
            "currency": self.currency,
            "price_source": self.source,
            "price_table": self.table,
            "warnings": list(self.warnings),
        }


class Provider(Protocol):
    """Makes, finds, opens and removes the clusters of one kind. `Cluster.details` is the provider's own, but for:

    functional_only  True where timings on the cluster mean nothing
    nodes            how many machines it has
    gpus_per_node    of the machines that work
    devices_per_node other devices of theirs that every worker of a run gets, by Kubernetes' name of the resource
    registry         where tasks' images come from, unless a run says otherwise
    options          the provider's options, by name
    expires          seconds since 1970, when `gc --expired` may remove it; absent: never
    owner            who made it
    plan             Plan.to_dict() as it was when the cluster was made
    charts           Helm charts that were installed with it: release, namespace, version, source, digest
    provisioning     written by the life-cycle: what took how long (see `timeline`); so are
    scaling          of the last change of size, and
    removal          of a removal that is going on or done
    failure          why the last making or removal did not come to its end: code, message, hint
    """

    name: str
    options: type[Any]  # a dataclass whose fields are made by `option`: what `create-cluster` takes

    def new_cluster(self, name: str, nodes: int, options: Any) -> Cluster:
        """The record of a cluster that is to be. Pure; raises UsageError for every combination that cannot work."""
        ...

    def plan(self, cluster: Cluster) -> Plan:
        """Sizes and prices, after checking tools, credentials and quotas. Writes nothing."""
        ...

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """All that the cluster consists of; each stands behind what it needs."""
        ...

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        """All that is marked as ours, whole or half made. `scope` narrows or moves the search (project, region)."""
        ...

    def connect(self, cluster: Cluster) -> "Access":
        """The way to its Kubernetes API, held in memory."""
        ...

    def scale(self, cluster: Cluster, nodes: int) -> Sequence[Resource]:
        """Resources whose making brings the cluster to `nodes` worker machines. Raises UsageError where it cannot."""
        ...


def option(default: Any, *flags: str, help: str) -> Any:
    """A field of an options dataclass: its default, its flags and its line of help on the command line."""
    return field(default=default, metadata={"flags": flags, "help": help})


def read_options(cluster: Cluster, cls: type[Any]) -> Any:
    """The options that a cluster was described with; what its record does not have is at its default."""
    known = {item.name for item in fields(cls)}
    kept = cluster.details.get("options", {})
    return cls(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in kept.items() if key in known}
    )


def ownership_tags(cluster: Cluster) -> dict[str, str]:
    """What is put on everything that is made for `cluster`."""
    found = {
        CLUSTER_TAG: cluster.name,
        OWNER_TAG: cluster.details.get("owner"),
        EXPIRES_TAG: cluster.details.get("expires"),
    }
    return {key: str(value) for key, value in found.items() if value is not None}


def details_from_tags(found: Mapping[str, str]) -> dict[str, Any]:
    """The details of a cluster that its marks tell: owner, and expires where it has an end."""
    details: dict[str, Any] = {"owner": found.get(OWNER_TAG)}
    if (expires := found.get(EXPIRES_TAG, "")).isdecimal():
        details["expires"] = int(expires)
    return details


def foreign_resource_error(resource: Resource) -> UsageError:
    """The refusal to touch what somebody else made."""
    return UsageError(
        f'The {resource.kind} "{resource.name}" exists and was not made by mlbench; it is not touched.',
        hint="Choose another name"
        + (f", or remove it yourself: {resource.remove_command}" if resource.remove_command else "."),
        details={"kind": resource.kind, "name": resource.name},
    )
