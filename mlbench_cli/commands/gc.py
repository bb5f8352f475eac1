"""`mlbench gc`: remove clusters that nobody looks after, found by their marks, with or without a data directory."""

import time
from collections.abc import Callable
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._clusters import Location, Project, discovered, document_of, scope_of
from mlbench_cli.commands._common import Format, Output, Yes
from mlbench_cli.commands.create_cluster import _owner
from mlbench_cli.commands.delete_cluster import remove
from mlbench_cli.errors import CleanupError, MlbenchError
from mlbench_cli.model import Cluster
from mlbench_cli.store import Store


def gc(
    providers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROVIDER]...", help="cloud to search; default: all configured clouds"),
    ] = None,
    project: Project = None,
    location: Location = None,
    expired: Annotated[bool, typer.Option("--expired", help="only clusters past their --ttl")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="also complete clusters that this data directory does not know")
    ] = False,
    everybody: Annotated[bool, typer.Option("--everybody", help="also clusters of other owners")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would be removed")] = False,
    yes: Yes = False,
    output: Output = Format.text,
) -> None:
    """Remove forgotten clusters: those that are past their --ttl, and those that were left half made or half removed.

    They are found by the marks they carry, so an empty data directory will do. With --all also those that are whole,
    or being made, and that this data directory does not know: another one may be using them.
    """
    store = Store()
    found, unseen = discovered(providers, scope_of(project, location))
    known = {cluster.name for cluster in store.clusters()}
    chosen = [
        (cluster, why)
        for cluster in found
        if (everybody or cluster.details.get("owner") in (None, _owner()))
        and (why := _reason(cluster, known, expired, everything)) is not None
    ]
    as_json = output == Format.json
    documents = [{**document_of(cluster), "why": why} for cluster, why in chosen]
    if as_json:
        pass  # one document, when it is known what has become of each
    elif chosen:
        rows = [[item.name, item.provider, item.details.get("location"), item.state, why] for item, why in chosen]
        console.out_table(["CLUSTER", "PROVIDER", "WHERE", "STATE", "WHY"], rows)
    else:
        console.out("There is nothing to remove.")
    for name, error in unseen.items():
        console.warn(f"{name} was not searched: {error.message}")
    if chosen and not dry_run:
        console.confirm(f"Remove {len(chosen)} clusters and all that is on them?", yes=yes)
        _remove_all(store, [cluster for cluster, _ in chosen], console.note if as_json else console.out)
    if as_json:
        console.out_json({"clusters": documents, "removed": bool(chosen) and not dry_run})


def _reason(cluster: Cluster, known: set[str], only_expired: bool, everything: bool) -> str | None:
    """Why the cluster is to be removed; None where it stays."""
    expires = cluster.details.get("expires")
    if expires is not None and expires < time.time():
        return f"expired {console.duration(time.time() - expires)} ago"
    if only_expired:
        return None
    if cluster.state in ("failed", "deleting"):
        return "half made" if cluster.state == "failed" else "half removed"
    return "unknown here" if everything and cluster.name not in known else None


def _remove_all(store: Store, clusters: list[Cluster], tell: Callable[[str], None]) -> None:
    """Remove each, whatever becomes of the others. Raises CleanupError naming those that could not be removed."""
    failed: dict[str, MlbenchError] = {}
    for cluster in clusters:
        try:
            tell(remove(store, cluster, yes=True))
        except MlbenchError as error:
            if error.exit_code >= 130:
                raise
            failed[cluster.name] = error
    if failed:
        raise CleanupError(
            "\n".join(f"{name}: {error.message}" for name, error in failed.items()),
            hint="mlbench gc   goes on",
            details={name: error.details for name, error in failed.items()},
        )
