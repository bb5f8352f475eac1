"""`mlbench delete-cluster [PROVIDER] NAME`: delete a cluster and everything that belongs to it, or continue to."""

from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.clusters import changes as cluster_changes
from mlbench_cli.clusters import manage as clusters
from mlbench_cli.commands._clusters import Location, Project, delete_with_progress
from mlbench_cli.commands._common import Format, Output, Yes, complete_clusters, print_answer
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.run_folder import is_sealed
from mlbench_cli.storage.store import Store


def delete_cluster(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PROVIDER] NAME",
            help="cluster to delete; with its provider, also one that this machine did not create",
            autocompletion=lambda incomplete: [name for name in complete_clusters(incomplete) if name != "local"],
        ),
    ],
    project: Project = None,
    location: Location = None,
    force: Annotated[bool, typer.Option("--force", help="discard results that were not fetched")] = False,
    keep_images: Annotated[
        bool, typer.Option("--keep-images", help="keep the image repository of the cluster, which costs money")
    ] = False,
    yes: Yes = False,
    output: Output = Format.text,
) -> None:
    """Delete a cluster and everything that belongs to it. Repeat the command to resume after an interruption.

    With PROVIDER, it also deletes clusters that another machine or data folder created, also partly created ones. If
    several clusters have the same name, choose one with --region or --zone. An attached cluster is only removed from
    mlbench.
    """
    if len(words) > 2:
        raise UsageError(f"{len(words)} words are given.", hint="mlbench delete-cluster PROVIDER NAME")
    name = words[-1]
    provider = words[0] if len(words) == 2 else None
    store = Store(notice=console.note)
    try:
        cluster = clusters.find_cluster(store, name, provider, clusters.search_scope(project, location))
    except NotFoundError:
        if not cluster_changes.was_deleted(store, name):
            raise
        _print(name, f"The cluster {name} has already been deleted.", output)
        return
    if cluster.provider == "local":
        raise UsageError('The cluster "local" is this machine; it cannot be deleted.')
    if not force:
        _refuse_unfetched(store, cluster)
    if not cluster.is_attached:
        place = f", {cluster.location}" if cluster.location else ""
        made, owner = ClusterDetails.of(cluster).registry_made, ClusterDetails.of(cluster).owner
        of = f" of {owner}" if owner not in (None, clusters.owner_name()) else ""
        also = "" if not made or keep_images else " and its image repository (--keep-images keeps that)"
        console.confirm(f"Delete the cluster {name}{of} ({cluster.provider}{place}), everything on it{also}?", yes=yes)

    def check(cluster: Cluster) -> None:
        if not force:
            _refuse_unfetched(store, cluster)  # a run may have started while the prompt was open

    _print(name, delete_with_progress(store, cluster, keep_images=keep_images, check=check), output)


def _print(name: str, sentence: str, output: Format) -> None:
    print_answer(output, {"cluster": name, "deleted": True, "summary": sentence}, sentence)


def _refuse_unfetched(store: Store, cluster: Cluster) -> None:
    names = [row.run.name for row in store.runs() if row.run.spec.cluster == cluster.name and not is_sealed(row.run)]
    if names:
        raise UsageError(
            f'On the cluster "{cluster.name}" are runs whose results have not been fetched: {", ".join(names)}.',
            hint=f"mlbench wait {names[0]}   fetches them; --force discards them",
        )
