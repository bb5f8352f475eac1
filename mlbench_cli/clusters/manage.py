"""What the commands on clusters share: plan and create, find, and the rules of owner, TTL and identity.

Commands parse options, call this module and print. Nothing is printed here: progress goes to `report` and warnings to
`warn`, which the caller gives.
"""

import getpass
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from mlbench_cli.clusters.zone_failover import create_in_first_zone
from mlbench_cli.errors import CredentialError, MlbenchError, NotFoundError, UsageError, did_you_mean
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster, ClusterIdentity
from mlbench_cli.model.spec import check_name
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import parse_timestamp
from providers import registry
from providers.base import PartialSearchError, Plan, Provider, Resource, delete_command
from providers.helm.install import WAIT_SECONDS, Installation, Release, prepare_chart
from providers.lifecycle import Report, hold_operation_lock, is_operation_running, up

CREATION_SECONDS = 3600.0  # more than nearly every creation takes
# TTL of a paid cluster that no person has confirmed: long enough for a benchmark, short enough for a bill.
UNATTENDED_TTL = "8h"


# --- creation ---------------------------------------------------------------------------------------------------------


class Ttl(NamedTuple):
    """Time to live of a cluster, as given ("8h") and in seconds."""

    text: str
    seconds: float


class CreationRequest(Struct, frozen=True):
    """What `create-cluster` was asked for. `options` are fields of the provider's options class."""

    provider: Provider
    nodes: int
    release: str
    options: Mapping[str, Any]
    chart_location: str | None = None
    custom_values: Sequence[str] = ()
    chart_seconds: float | None = None
    ttl: Ttl | None = None  # None: forever

    @property
    def name(self) -> str:
        """The cluster's name: the release and the number of workers."""
        return f"{self.release}-{self.nodes}"

    def describe(self) -> Cluster:
        """The record of the cluster, as far as no cloud has to be asked. Raises UsageError for what cannot work."""
        provider, name = self.provider, check_name(self.name, "cluster name")
        try:
            return provider.new_cluster(name, self.nodes, self.options_of(self.options))
        except (CredentialError, UsageError) as error:
            if error.details.get("configured", True):
                raise
            return provider.new_cluster(name, self.nodes, self.options_of(provider.fill_place(self.options)))

    def options_of(self, values: Mapping[str, Any]) -> Any:
        """`values` as the provider's options."""
        assert self.provider.options is not None
        return self.provider.options(**values)


@dataclass
class PlannedCluster:
    """A cluster that can be created now: its record, its plan and the Helm chart to install, if any."""

    cluster: Cluster
    plan: Plan
    provider: Provider
    installation: Installation | None
    chart_notes: str = field(default="", init=False)  # what the Helm chart says once it is installed
    keeps_end: bool = field(default=False, init=False)  # it exists, and its end was not asked to move
    moves_end: bool = field(default=False, init=False)  # it existed, with another end: its tags are still to be set

    @property
    def resources(self) -> list[dict[str, str]]:
        """Kind and name of everything that will be created."""
        listed = [{"kind": item.kind, "name": item.name} for item in self.provider.resources(self.cluster)]
        if self.installation is not None:
            listed.append({"kind": "Helm release", "name": self.installation.chart.name})
        return listed

    def with_ttl(self, ttl: Ttl | None) -> "PlannedCluster":
        """The same cluster with an end, counted from now."""
        if ttl is None:
            return self
        details = {**self.cluster.details, "expires": int(time.time() + ttl.seconds), "ttl": ttl.text}
        return PlannedCluster(
            msgspec.structs.replace(self.cluster, details=details), self.plan, self.provider, self.installation
        )

    def with_end_of(self, known: Cluster) -> "PlannedCluster":
        """The same cluster with the end that its record `known` has, or without one."""
        end = {key: known.details[key] for key in ("expires", "ttl") if key in known.details}
        cluster = msgspec.structs.replace(self.cluster, details={**self.cluster.details, **end})
        planned = PlannedCluster(cluster, self.plan, self.provider, self.installation)
        planned.keeps_end = True
        return planned

    def create(self, store: Store, report: Report, warn: Callable[[str], None]) -> Cluster:
        """Create it, or what is missing of it, and choose it for the next commands. Returns its record.

        Raises UsageError if the name was taken elsewhere since the cluster was planned.
        """
        with hold_operation_lock(store, self.cluster.name):
            require_free_name(store, self.cluster)
            known = store.find_cluster(self.cluster.identity)
            cluster = _with_charts(self.cluster, known, self.installation)
            ready = create_in_first_zone(
                self.provider, cluster, known, lambda cluster: self._create(cluster, store, report), warn
            )
            store.choose_cluster(ready)
        ends = (ClusterDetails.of(ready).expires, ClusterDetails.of(known).expires if known is not None else None)
        self.moves_end = known is not None and ends[0] not in (None, ends[1])
        return ready

    def _create(self, cluster: Cluster, store: Store, report: Report) -> Cluster:
        resources: list[Resource] = list(self.provider.resources(cluster))
        if self.installation is None:
            return up(cluster, resources, store, report=report)

        def connect() -> Any:
            return self.provider.connect(cluster)

        with closing(Release(cluster, self.installation, connect, resources)) as release:
            ready = up(cluster, [*resources, release], store, report=report)
            self.chart_notes = release.notes
        return ready


@contextmanager
def plan_cluster(store: Store, request: CreationRequest) -> Iterator[PlannedCluster]:
    """Check everything that can be checked before a cluster is created. Creates and records nothing.

    Raises UsageError, CredentialError or CapacityError for what cannot work. The Helm chart's files exist until the
    context is left.
    """
    name = check_name(request.name, "cluster name")
    provider = request.provider
    try:
        cluster = provider.new_cluster(name, request.nodes, request.options_of(request.options))
        account = provider.find_account(cluster)
    except (CredentialError, UsageError) as error:
        if not error.details.get("configured", True):
            error.hint = f"{error.hint}\nA plan with prices needs no account: --dry-run"
        raise
    if account is not None:
        cluster = msgspec.structs.replace(cluster, account=account)
    require_free_name(store, cluster)
    if store.find_cluster(cluster.identity) is None:
        _check_ttl(provider, request.ttl)
    cluster = provider.describe_machines(cluster)
    with _prepare_chart(request) as installation:
        plan = provider.plan(cluster)
        details: dict[str, Any] = {**cluster.details, "owner": owner_name(), "plan": plan.to_dict()}
        cluster = _with_charts(
            msgspec.structs.replace(cluster, details=details), store.find_cluster(cluster.identity), installation
        )
        planned = PlannedCluster(cluster, plan, provider, installation)
        yield planned.with_ttl(request.ttl)


def _check_ttl(provider: Provider, ttl: Ttl | None) -> None:
    """Refuse an end of a new cluster before it is there: a bare number is in seconds."""
    minutes = provider.minutes[0]
    if ttl is not None and ttl.seconds < 60 * minutes and provider.name in registry.PAID:
        raise UsageError(
            f"--ttl {ttl.text}: the cluster would end before it is there, which takes about {minutes} minutes.",
            hint="For example --ttl 2h",
        )


def sketch_cluster(request: CreationRequest) -> PlannedCluster | None:
    """The plan of a cluster for somebody without an account, whom no cloud answers. None if the provider has none.

    It can only be shown: the files of its Helm chart, which is checked as for any plan, are gone.
    """
    name, provider = check_name(request.name, "cluster name"), request.provider
    cluster = provider.new_cluster(name, request.nodes, request.options_of(provider.fill_place(request.options)))
    if (sketch := provider.sketch(cluster)) is None:
        return None
    plan = replace(sketch, is_checked=False)
    cluster = msgspec.structs.replace(
        cluster, details={**cluster.details, "owner": owner_name(), "plan": plan.to_dict()}
    )
    with _prepare_chart(request) as installation:
        return PlannedCluster(cluster, plan, provider, installation).with_ttl(request.ttl)


def require_free_name(store: Store, cluster: Cluster) -> None:
    """Refuse a name that another known cluster bears: commands and runs refer to clusters by name.

    Without this, a second cluster of the same name in another region or account would hide the first one, which
    would go on costing money.
    """
    for known in store.clusters():
        if known.name != cluster.name or known.identity.matches(cluster.identity):
            continue
        if known.provider != cluster.provider or known.is_attached:
            raise UsageError(
                f'There is already a cluster "{cluster.name}" of the provider {known.provider}.',
                hint="Choose another name; see: mlbench list-clusters",
            )
        raise UsageError(
            f'There is already a cluster "{cluster.name}" in {_place(known)} ({known.state}); its resources there '
            "cost money until it is deleted.",
            hint=f"{delete_command(known)}   deletes it; or choose another RELEASE",
        )


def owner_name() -> str:
    """The login name as a tag can hold it; "unknown" without one."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())[:63]


def _prepare_chart(request: CreationRequest) -> AbstractContextManager[Installation | None]:
    """The Helm chart with its values, fetched and checked; None if none was asked for."""
    if request.chart_location is None and not request.custom_values and request.chart_seconds is None:
        return nullcontext()

    seconds = WAIT_SECONDS if request.chart_seconds is None else request.chart_seconds
    return prepare_chart(request.chart_location, request.custom_values, seconds)


def _with_charts(cluster: Cluster, known: Cluster | None, installation: Installation | None) -> Cluster:
    """The cluster with the Helm charts of its record `known`, and the one to be installed."""
    charts = [] if known is None else list(ClusterDetails.of(known).helm_charts)
    if installation is not None:
        record = installation.record()
        charts = [*(entry for entry in charts if entry["release"] != record["release"]), record]
    return msgspec.structs.replace(cluster, details={**cluster.details, "helm_charts": charts}) if charts else cluster


# --- finding ----------------------------------------------------------------------------------------------------------


def search_scope(project: str | None, location: str | None) -> dict[str, str]:
    """Where to search for clusters that the store does not know."""
    return {key: value for key, value in (("project", project), ("location", location)) if value}


def discover_clusters(
    names: Sequence[str] | None, scope: Mapping[str, str]
) -> tuple[list[Cluster], dict[str, MlbenchError]]:
    """All clusters that bear our tags, and the errors of providers that could not be searched, or not as a whole.

    A provider in `names` that cannot be searched at all raises its error. Without `names`, all providers that create
    clusters are searched; UsageError if none of them can be, because none was ever set up here.
    """
    found: list[Cluster] = []
    errors: dict[str, MlbenchError] = {}
    creators = list(registry.creators())
    for name in names or creators:
        try:
            found += registry.load(name).discover(scope)
        except PartialSearchError as error:
            found += error.found
            errors[name] = error
        except MlbenchError as error:
            if names:
                raise
            errors[name] = error
    if len(errors) == len(creators) and not any(_is_set_up(name, error) for name, error in errors.items()):
        raise UsageError(
            "No provider can be searched:\n"
            + "\n".join(f"  {name}: {error.message}" for name, error in errors.items()),
            hint=f"mlbench doctor {'|'.join(registry.PAID)}",
        )
    return found, errors


def describe_search_error(name: str, error: MlbenchError) -> str:
    """A sentence about a provider that could not be searched, or only in part."""
    part = " as a whole" if isinstance(error, PartialSearchError) else ""
    return f"{name} was not searched{part}: {error.message}"


def _is_set_up(name: str, error: MlbenchError) -> bool:
    """Whether a cloud that could not be searched is in use here, so that it may hold paid clusters."""
    return name in registry.PAID and bool(error.details.get("configured", True))


ACCOUNT_WORDS = ("project", "account")  # in the labels of accounts that could not be searched


class Search(NamedTuple):
    """What a search of several clouds found. `blind` names those in use that could not be searched."""

    found: list[Cluster]
    errors: dict[str, MlbenchError]
    blind: list[str]


def search_everywhere(store: Store, names: Sequence[str] | None, scope: Mapping[str, str]) -> Search:
    """All clusters of ours in every project that the store knows, besides the credentials' own.

    A cloud that cannot be searched counts as blind, unless it was never set up here and the store knows no cluster of
    it. Raises the error of a named provider.
    """
    found, errors = discover_clusters(names, scope)
    known = [cluster for cluster in store.clusters() if cluster.provider in registry.PAID]
    blind = [
        name
        for name, error in errors.items()
        if _is_set_up(name, error) or any(cluster.provider == name for cluster in known)
    ]
    searched = {(cluster.provider, cluster.account) for cluster in found}
    others = {
        (cluster.provider, cluster.account)
        for cluster in known
        if cluster.account and not cluster.account.isdecimal() and (not names or cluster.provider in names)
    }
    for provider, account in sorted(others - searched if "project" not in scope else ()):
        try:
            more = registry.load(provider).discover({**scope, "project": account})
        except MlbenchError as error:
            label = f"{provider} project {account}"
            errors[label] = error
            blind.append(label)
            more = error.found if isinstance(error, PartialSearchError) else []
        identities = [cluster.identity for cluster in found]
        found += [cluster for cluster in more if not is_known(cluster, identities)]
    found += _list_ended(known, Search(found, errors, blind), names)
    blind += _find_other_accounts(known, names)
    return Search(found, errors, blind)


def _list_ended(known: Sequence[Cluster], search: Search, names: Sequence[str] | None) -> list[Cluster]:
    """Clusters past their end that their cloud has deleted by itself: what is outside of them has still to go."""
    identities = [cluster.identity for cluster in search.found]
    wanted = [item for item in known if (not names or item.provider in names) and item.provider not in search.errors]
    late = [item for item in wanted if (ClusterDetails.of(item).expires or float("inf")) < time.time()]
    return [item for item in late if not is_known(item, identities)]


def _find_other_accounts(known: Sequence[Cluster], names: Sequence[str] | None) -> list[str]:
    """Accounts of AWS that the store knows clusters in, and that today's credentials cannot search."""
    labels = []
    for cluster in known:
        provider = registry.load(cluster.provider)
        if names and cluster.provider not in names:
            continue
        try:
            require_account(provider, cluster)
        except MlbenchError:
            labels.append(f"{cluster.provider} account {cluster.account}")
    return sorted(set(labels))


def is_known(cluster: Cluster, known: Sequence[ClusterIdentity]) -> bool:
    """Whether a cluster is among those that this machine has recorded."""
    return any(identity.matches(cluster.identity) for identity in known)


def find_cluster(store: Store, name: str, provider_name: str | None, scope: Mapping[str, str]) -> Cluster:
    """The one cluster of that name: as the store records it, else as its provider finds it by its tags.

    Raises NotFoundError if neither knows it, UsageError if it is another provider's, or if several clusters bear the
    name and `scope` does not tell which one is meant.
    """
    named = [cluster for cluster in store.clusters() if cluster.name == name]
    wanted = registry.ALIASES.get(provider_name or "", provider_name)
    known = [cluster for cluster in named if wanted in (None, cluster.provider) and _in_scope(cluster, scope)]
    if named and wanted not in (None, *(cluster.provider for cluster in named)):
        raise UsageError(
            f'The cluster "{name}" is one of {named[0].provider}, not of {provider_name}.',
            hint=delete_command(named[0]),
        )
    if known:
        return _only_one(name, [*known, *([] if scope else _find_namesakes(known))])
    if wanted is None:
        near = did_you_mean(name, [cluster.name for cluster in store.clusters()])
        raise NotFoundError(
            f'There is no cluster "{name}"{_describe(scope)}.{near}',
            hint="mlbench list-clusters; to find one that another machine created, put its provider's name before it",
        )
    silent: PartialSearchError | None = None
    try:
        discovered = registry.load(wanted).discover(scope)
    except PartialSearchError as error:
        discovered, silent = error.found, error
    found = [cluster for cluster in discovered if cluster.name == name]
    if found:
        return _only_one(name, found)
    if silent is not None:
        raise PartialSearchError(
            f'It is not known whether there is a cluster "{name}". {silent.message}',
            found,
            hint=silent.hint or "Repeat the command, or specify the place: --zone ZONE, --region REGION",
        )
    others = [*discovered, *(cluster for cluster in store.clusters() if cluster.provider == wanted)]
    raise NotFoundError(
        f'{wanted} has no mlbench cluster "{name}"{_describe(scope)}, complete or partly created.'
        f"{did_you_mean(name, [cluster.name for cluster in others])}",
        hint="mlbench list-clusters",
        details={"found": sorted(cluster.name for cluster in discovered)},
    )


def _only_one(name: str, clusters: Sequence[Cluster]) -> Cluster:
    if len(clusters) == 1:
        return clusters[0]
    lines = "\n".join(f"  {delete_command(cluster)}" for cluster in clusters)
    places = "; ".join(f"{cluster.provider} in {_place(cluster)}" for cluster in clusters)
    raise UsageError(
        f'{len(clusters)} mlbench clusters are called "{name}": {places}.',
        hint=f"Specify which one:\n{lines}",
        details={"clusters": [msgspec.structs.asdict(cluster.identity) for cluster in clusters]},
    )


def _find_namesakes(known: Sequence[Cluster]) -> list[Cluster]:
    """Other clusters that bear the name of a known one and our tags, in any location that can be searched."""
    first = known[0]
    if not first.location:
        return []
    scope = {"project": first.account} if first.account else {}
    try:
        discovered = registry.load(first.provider).discover(scope)
    except PartialSearchError as error:
        discovered = error.found
    except MlbenchError:
        return []  # the known cluster must be deletable although other locations do not answer
    identities = [cluster.identity for cluster in known]
    return [cluster for cluster in discovered if cluster.name == first.name and not is_known(cluster, identities)]


def _in_scope(cluster: Cluster, scope: Mapping[str, str]) -> bool:
    """Whether the location and project given on the command line can be those of the cluster."""
    project, location = scope.get("project"), scope.get("location")
    if project and cluster.account and project != cluster.account and not cluster.account.isdecimal():
        return False
    places = (cluster.location, ClusterDetails.of(cluster).location)
    # A zone of AWS is its region's name and a letter; a cluster there is one of the region.
    return not location or not cluster.location or location in places or location[:-1] == cluster.location


def _place(cluster: Cluster) -> str:
    account = f" of {cluster.account}" if cluster.account else ""
    return f"{cluster.location}{account}" if cluster.location else f"this data folder{account}"


def _describe(scope: Mapping[str, str]) -> str:
    return f" in {', '.join(scope.values())}" if scope else ""


def require_account(provider: Provider, cluster: Cluster) -> None:
    """Raise CredentialError if today's credentials are those of another account, which does not show the cluster."""
    account = provider.find_account(cluster) if cluster.account else None
    if account not in (None, cluster.account):
        raise CredentialError(
            f'The cluster "{cluster.name}" is in the account {cluster.account}; today\'s credentials are those of '
            f"{account}, so it cannot be found.",
            hint=f"Use credentials of {cluster.account}, then repeat: {delete_command(cluster)}",
        )


# --- garbage collection -----------------------------------------------------------------------------------------------


def list_abandoned(store: Store, search: Search, names: Sequence[str] | None) -> list[Cluster]:
    """Recorded clusters whose creation has failed, also for their cloud, or that nobody continues: the client was
    killed. As their cloud shows them, if it does; those of clouds that could not be searched are left out."""
    creators = [name for name in _creators(names) if name not in search.errors]
    records = [
        cluster
        for cluster in store.clusters()
        if cluster.state in ("creating", "failed")
        and cluster.provider in creators
        and not is_operation_running(store, cluster.name)
    ]
    shown = [[item for item in search.found if item.identity.matches(record.identity)] for record in records]
    return [
        found[0] if found else record
        for record, found in zip(records, shown, strict=True)
        if record.state == "creating" or (found and found[0].state == "failed")
    ]


def list_gone(store: Store, search: Search, names: Sequence[str] | None = None) -> list[Cluster]:
    """Recorded clusters that their clouds no longer show, although they were searched everywhere: somebody has deleted
    them on another machine."""
    hidden = {*search.errors, *search.blind}
    shown = [cluster.identity for cluster in search.found]
    return [
        cluster
        for cluster in store.clusters()
        if cluster.provider in _creators(names)  # attached clusters are in no list of a cloud
        and cluster.state != "creating"
        and not hidden & {cluster.provider, *(f"{cluster.provider} {of} {cluster.account}" for of in ACCOUNT_WORDS)}
        and not is_known(cluster, shown)
        and not is_operation_running(store, cluster.name)
    ]


def _creators(names: Sequence[str] | None) -> list[str]:
    return [name for name in registry.creators() if not names or name in names]


def removal_reason(
    cluster: Cluster,
    known: Sequence[ClusterIdentity],
    *,
    only_expired: bool,
    include_unknown: bool,
    abandoned: Sequence[ClusterIdentity] = (),
) -> str | None:
    """Why `gc` deletes the cluster: "expired", "partly created", "partly deleted", "unknown here"; None if not."""
    expires = ClusterDetails.of(cluster).expires
    if expires is not None and expires < time.time():
        return "expired"
    if only_expired:
        return None
    if is_known(cluster, abandoned):
        return "partly created"
    if cluster.state == "deleting":
        return "partly deleted"
    if cluster.state == "failed" and not may_be_in_creation(cluster):
        return "partly created"
    return "unknown here" if include_unknown and not is_known(cluster, known) else None


def may_be_in_creation(cluster: Cluster) -> bool:
    """Whether the cluster is incomplete, but so new that another machine may still be creating it."""
    try:
        age = time.time() - parse_timestamp(cluster.created)
    except ValueError:
        return False  # its cloud does not tell
    return cluster.state == "failed" and age < CREATION_SECONDS
