"""`mlbench gc`: delete clusters that nobody looks after, found by their tags, with or without a data directory."""

import time
from typing import Annotated

import typer

from mlbench_cli import clusters, console
from mlbench_cli.cluster_details import ClusterDetails
from mlbench_cli.commands._clusters import Location, Project, StepPrinter, cluster_document
from mlbench_cli.commands._common import Format, Output, Yes
from mlbench_cli.errors import CleanupError, MlbenchError
from mlbench_cli.model import Cluster
from mlbench_cli.store import Store


def gc(
    providers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROVIDER]...", help="providers to search; default: all that are configured"),
    ] = None,
    project: Project = None,
    location: Location = None,
    expired: Annotated[bool, typer.Option("--expired", help="only clusters past their --ttl")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="also complete clusters that this data directory does not know")
    ] = False,
    everybody: Annotated[bool, typer.Option("--everybody", help="also clusters of other owners")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be deleted")] = False,
    yes: Yes = False,
    output: Output = Format.text,
) -> None:
    """Delete forgotten clusters: those past their --ttl, and those left half created or half deleted.

    They are found by their tags, so this also works with an empty data directory. With --all it also deletes complete
    clusters, and those being created, that this data directory does not know: somebody else may be using them.
    """
    store = Store()
    found, errors = clusters.discover_clusters(providers, clusters.search_scope(project, location))
    known = [cluster.identity for cluster in store.clusters()]
    chosen = [
        (cluster, why)
        for cluster in found
        if (everybody or ClusterDetails.of(cluster).owner in (None, clusters.owner_name()))
        and (why := clusters.removal_reason(cluster, known, only_expired=expired, include_unknown=everything))
    ]
    _print_chosen([(cluster, _describe(cluster, why)) for cluster, why in chosen], output)
    for name, error in errors.items():
        console.warn(f"{name} was not searched: {error.message}")
    if dry_run or not chosen:
        return
    console.confirm(f"Delete {len(chosen)} clusters and everything on them?", yes=yes)
    _delete_all(store, [cluster for cluster, _ in chosen])


def _print_chosen(chosen: list[tuple[Cluster, str]], output: Format) -> None:
    if output == Format.json:
        console.out_json({"clusters": [{**cluster_document(cluster), "why": why} for cluster, why in chosen]})
    elif chosen:
        rows = [
            [item.name, item.provider, item.location or ClusterDetails.of(item).location, item.state, why]
            for item, why in chosen
        ]
        console.out_table(["CLUSTER", "PROVIDER", "LOCATION", "STATE", "WHY"], rows)
    else:
        console.out("There is nothing to delete.")


def _describe(cluster: Cluster, why: str) -> str:
    expires = ClusterDetails.of(cluster).expires
    return f"{why} {console.duration(time.time() - expires)} ago" if why == "expired" and expires is not None else why


def _delete_all(store: Store, chosen: list[Cluster]) -> None:
    """Delete each, also if others fail. Raises CleanupError naming those that could not be deleted."""
    failed: dict[str, MlbenchError] = {}
    for cluster in chosen:
        try:
            with StepPrinter() as report:
                certain = clusters.delete_cluster(store, cluster, report, console.warn)
            console.out(f"The cluster {cluster.name} is deleted{'; nothing of it is left' if certain else ''}.")
        except MlbenchError as error:
            failed[f"{cluster.name}@{cluster.location}" if cluster.location else cluster.name] = error
    if failed:
        raise CleanupError(
            "\n".join(f"{name}: {error.message}" for name, error in failed.items()),
            hint="mlbench gc   continues",
            details={name: error.details for name, error in failed.items()},
        )
