"""`mlbench gc`: delete expired and orphaned clusters, found by their tags, with or without a data folder."""

import time
from collections.abc import Callable
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.clusters import changes as cluster_changes
from mlbench_cli.clusters import manage as clusters
from mlbench_cli.commands._clusters import Location, Project, cluster_document, delete_with_progress
from mlbench_cli.commands._common import Format, Output, Yes, one_of
from mlbench_cli.commands._machines import end_orphans, find_orphans
from mlbench_cli.errors import CleanupError, MlbenchError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.run_folder import is_sealed
from mlbench_cli.storage.store import Store
from mlbench_cli.util.text import counted
from providers import registry
from providers.base import delete_command
from providers.lifecycle import hold_operation_lock


def gc(
    providers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROVIDER]...",
            help="clouds to search, or slurm, hosts; default: all",
            autocompletion=one_of(*registry.PROVIDERS),
        ),
    ] = None,
    project: Project = None,
    location: Location = None,
    expired: Annotated[bool, typer.Option("--expired", help="only clusters past their --ttl")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="also delete complete clusters that this data folder does not know")
    ] = False,
    everybody: Annotated[bool, typer.Option("--everybody", help="also delete clusters of other owners")] = False,
    force: Annotated[bool, typer.Option("--force", help="discard results that were not fetched")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list what would be deleted, then exit")] = False,
    yes: Yes = False,
    output: Output = Format.text,
) -> None:
    """Delete expired clusters (--ttl) and clusters that were only partly created or deleted.

    On attached hosts and Slurm clusters, it ends processes of runs that have no agent.

    Clusters are found by their tags, so this also works with an empty data folder. Incomplete ones that it does not
    know are left for an hour, because another machine may be creating them. Records of clusters that were
    deleted on another machine are removed. --all also deletes complete clusters that this data folder does not know:
    someone else may be using them. mlbench searches every project in which this data folder has clusters. The exit code
    is 8 if a cloud could not be searched, or if a cluster was kept because its results were not fetched yet.
    """
    store = Store(notice=console.note)
    scope = clusters.search_scope(project, location)
    names = [registry.ALIASES.get(name, name) for name in providers or ()]
    search = clusters.search_everywhere(store, names, scope)
    known = [cluster.identity for cluster in store.clusters()]
    left = clusters.list_abandoned(store, search, names)
    abandoned = [cluster.identity for cluster in left]

    def reason(cluster: Cluster) -> str | None:
        return clusters.removal_reason(
            cluster, known, only_expired=expired, include_unknown=everything, abandoned=abandoned
        )

    found = [*search.found, *(cluster for cluster in left if cluster not in search.found)]
    due = [(cluster, why) for cluster in found if (why := reason(cluster))]
    chosen = [
        (cluster, why)
        for cluster, why in due
        if (everybody or ClusterDetails.of(cluster).owner in (None, clusters.owner_name()))
    ]
    kept = _keep_unfetched(store, chosen) if not force else []
    chosen = [item for item in chosen if item[0] not in kept]
    missing = [] if expired or scope else clusters.list_gone(store, search, names)
    gone = [cluster for cluster in missing if force or not _keep_unfetched(store, [(cluster, "")])]
    listed = [(cluster, _describe(cluster, why)) for cluster, why in chosen]
    listed += [(cluster, "deleted elsewhere") for cluster in gone]
    as_json = output == Format.json
    if not as_json:  # JSON is one document, printed after everything is deleted
        _print_chosen(listed)
    foreign = [cluster for cluster, _ in due if ClusterDetails.of(cluster).owner not in (None, clusters.owner_name())]
    if foreign and not everybody:
        named = ", ".join(f"{item.name} of {ClusterDetails.of(item).owner}" for item in foreign)
        console.warn(f"Clusters of other owners are kept: {named}. --everybody includes them.")
    for name, error in search.errors.items():
        console.warn(clusters.describe_search_error(name, error))
    for cluster in search.found:
        if not expired and not reason(cluster) and clusters.may_be_in_creation(cluster):
            console.note(
                f"{cluster.name} is incomplete, but may still be being created on another machine. If it is not: "
                f"{delete_command(cluster)}"
            )
    documents = [{**cluster_document(cluster), "why": why} for cluster, why in listed]
    orphans = find_orphans(store, providers)
    for orphan in orphans:
        line = f"{orphan.host}: {len(orphan.processes)} orphaned processes of the run {orphan.run}"
        (console.note if as_json else console.out)(line)
    if orphans and not dry_run:
        console.confirm("End these processes?", yes=yes)
        end_orphans(store, providers)
    if not dry_run:
        _forget(store, gone)
    if chosen and not dry_run:
        console.confirm(
            f"Delete {counted(len(chosen), 'cluster')} and everything in {'it' if len(chosen) == 1 else 'them'}?",
            yes=yes,
        )

        def explain_keeping(cluster: Cluster) -> str | None:
            """Why a cluster is not deleted after all; it is queried again, because its expiry may have been
            extended."""
            fresh = cluster_changes.find_again(store, cluster)
            if fresh is None:
                return "is gone"
            if not reason(fresh):
                return "has changed and is no longer eligible"
            if not force and _keep_unfetched(store, [(fresh, "")]):
                kept.append(fresh)
                return "now has a run"
            return None

        _delete_all(
            store, [cluster for cluster, _ in chosen], explain_keeping, console.note if as_json else console.out
        )
    incomplete = None
    if search.blind or kept:
        incomplete = CleanupError(
            "Not everything could be searched or deleted: "
            + "; ".join(
                [
                    *(f"{name} could not be searched" for name in search.blind),
                    *(f"{cluster.name} has results that were not fetched (--force discards them)" for cluster in kept),
                ]
            )
            + ".",
            hint="mlbench doctor   says why a cloud cannot be searched; mlbench wait RUN   fetches results",
            details={"not_searched": sorted(search.blind), "kept": [cluster.name for cluster in kept]},
        )
    if as_json:
        document = {
            "clusters": documents,
            "removed": bool(chosen) and not dry_run,
            "not_searched": {name: error.message for name, error in search.errors.items()},
            "processes": [vars(orphan) for orphan in orphans],
        }
        console.out_json(document, incomplete)
    if incomplete is not None:
        raise incomplete


def _keep_unfetched(store: Store, chosen: list[tuple[Cluster, str]]) -> list[Cluster]:
    """The clusters with runs whose results have not been fetched here: those are not deleted without --force."""
    busy = {row.run.spec.cluster for row in store.runs() if not is_sealed(row.run)}
    recorded = {cluster.name: cluster.identity for cluster in store.clusters() if cluster.name in busy}
    return [
        cluster
        for cluster, _ in chosen
        if cluster.name in recorded and recorded[cluster.name].matches(cluster.identity)
    ]


def _forget(store: Store, gone: list[Cluster]) -> None:
    """Remove the records of clusters that no longer exist. Of others, say what remains and how to delete it."""
    for cluster in gone:
        try:
            remains = cluster_changes.forget_gone(store, cluster)
        except MlbenchError as error:
            console.warn(f"It is not known whether anything of {cluster.name} remains: {error.message}")
            continue
        if remains:
            console.warn(f"{cluster.name} has {', '.join(remains)} left. To delete it: {delete_command(cluster)}")
        else:
            console.note(f"{cluster.name} no longer exists; its record is removed.")


def _print_chosen(chosen: list[tuple[Cluster, str]]) -> None:
    if chosen:
        rows = [
            [item.name, item.provider, item.location or ClusterDetails.of(item).location, item.state, why]
            for item, why in chosen
        ]
        console.out_table(["CLUSTER", "PROVIDER", "LOCATION", "STATE", "WHY"], rows)
    else:
        console.out("Nothing to delete.")


def _describe(cluster: Cluster, why: str) -> str:
    expires = ClusterDetails.of(cluster).expires
    return f"{why} {console.duration(time.time() - expires)} ago" if why == "expired" and expires is not None else why


def _delete_all(
    store: Store,
    chosen: list[Cluster],
    explain_keeping: Callable[[Cluster], str | None],
    print_line: Callable[[str], None],
) -> None:
    """Delete each cluster, even if others fail, unless there is a reason to keep it by now.

    Raises CleanupError naming those that could not be deleted.
    """
    failed: dict[str, MlbenchError] = {}
    for cluster in chosen:
        try:
            with hold_operation_lock(store, cluster.name):
                if reason := explain_keeping(cluster):
                    console.note(f"{cluster.name} {reason}.")
                else:
                    print_line(delete_with_progress(store, cluster))
        except MlbenchError as error:
            failed[f"{cluster.name}@{cluster.location}" if cluster.location else cluster.name] = error
    if failed:
        raise CleanupError(
            "\n".join(f"{name}: {error.message}" for name, error in failed.items()),
            hint="mlbench gc   continues",
            details={name: error.details for name, error in failed.items()},
        )
