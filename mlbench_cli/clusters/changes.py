"""What commands change of a cluster that exists: its end, whether it exists.

Each reads the cluster's record once it holds the cluster's lock. What a command read before, for example to ask its
user, may be old by then: another command may have moved the end or deleted the cluster.
"""

from collections.abc import Callable
from contextlib import closing

from msgspec.structs import replace

from mlbench_cli.clusters import manage as clusters
from mlbench_cli.errors import CleanupError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers import registry
from providers.base import PartialSearchError, Provider
from providers.lifecycle import Report, down, hold_operation_lock, up
from providers.workload_cleanup import WorkloadCleanup

Warn = Callable[[str], None]


# --- deletion ---------------------------------------------------------------------------------------------------------


def delete_cluster(
    store: Store,
    cluster: Cluster,
    report: Report,
    warn: Warn,
    *,
    keep_images: bool = False,
    check: Callable[[Cluster], None] = lambda cluster: None,
) -> bool:
    """Delete a cluster and everything that belongs to it; an attached one is only forgotten.

    `check` raises what speaks against it, with the cluster's lock held. Returns whether it is certain that nothing is
    left. Raises CleanupError for what could not be deleted, CredentialError if today's credentials are those of
    another account: there the cluster would seem to be gone.
    """
    with hold_operation_lock(store, cluster.name):
        cluster = store.find_cluster(cluster.identity) or cluster
        check(cluster)
        provider = registry.load(cluster.provider)
        if provider.options is None:
            store.forget_cluster(cluster)
            return True
        clusters.require_account(provider, cluster)
        if keep_images:
            cluster = replace(cluster, details={**cluster.details, "keeps_images": True})
        return _delete_resources(store, cluster, provider, report, warn)


def _delete_resources(store: Store, cluster: Cluster, provider: Provider, report: Report, warn: Warn) -> bool:
    resources = provider.resources(cluster)
    with closing(WorkloadCleanup(cluster, provider, resources)) as cleanup:
        error: CleanupError | None = None
        try:
            down(cluster, [*resources, cleanup], store, report=report)
        except CleanupError as caught:
            error = caught
        try:
            cleanup.raise_for_orphans(error)
        finally:
            for warning in cleanup.warnings:
                warn(warning)
    return not cleanup.warnings


def forget_gone(store: Store, cluster: Cluster) -> list[str]:
    """Remove the record of a cluster of which nothing exists any more, not even disks or load balancers of its
    workloads. Returns what does; then the record stays.

    Raises CredentialError if today's credentials are those of another account: there it would seem to be gone.
    """
    with hold_operation_lock(store, cluster.name):
        provider = registry.load(cluster.provider)
        clusters.require_account(provider, cluster)
        states = [(resource, resource.find()) for resource in provider.resources(cluster)]
        left = [f"{item.kind} {item.name}" for item, found in states if found is not None and found.ours]
        if not left and provider.finds_orphans:
            left = [f"{orphan.kind} {orphan.name}" for orphan in provider.list_orphans(cluster, ())]
        if not left:
            store.forget_cluster(cluster)
        return left


def was_deleted(store: Store, name: str) -> bool:
    """Whether a cluster of that name was deleted from this data folder."""
    return any(entry.action == "deleted" for entry in store.journal_of(name))


def find_again(store: Store, cluster: Cluster) -> Cluster | None:
    """The cluster as its cloud shows it now; as it is recorded if the cloud shows none; None if it is gone."""
    places = (("location", cluster.location), ("project", cluster.account))
    scope = {key: value for key, value in places if value}
    silent: PartialSearchError | None = None
    try:
        listed = registry.load(cluster.provider).discover(scope)
    except PartialSearchError as error:
        listed, silent = error.found, error
    found = [item for item in listed if item.identity.matches(cluster.identity)]
    if silent is not None and not found:
        raise silent
    return found[0] if found else store.find_cluster(cluster.identity)


# --- end --------------------------------------------------------------------------------------------------------------


def set_end(store: Store, cluster: Cluster, report: Report) -> Cluster:
    """Set tag and timer in the cluster's cloud to the `expires` of its record, and record it."""
    provider = registry.load(cluster.provider)
    clusters.require_account(provider, cluster)
    return up(cluster, provider.extend(cluster), store, report=report, times="extending")


def describe_end(cluster: Cluster) -> str | None:
    """What of the cluster ends by itself; None for a cluster without an end."""
    if ClusterDetails.of(cluster).expires is None:
        return None
    return registry.load(cluster.provider).describe_end(cluster)
