"""`mlbench delete-cluster [PROVIDER] NAME`: remove a cluster and all that belongs to it, or go on removing it."""

from contextlib import closing
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._clusters import Location, Project, StepTeller, locate, scope_of
from mlbench_cli.commands._common import Yes, sealed
from mlbench_cli.errors import CleanupError, NotFoundError, UsageError
from mlbench_cli.model import Cluster
from mlbench_cli.store import Store
from providers import registry


def delete_cluster(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[PROVIDER] NAME", help="a cluster; its provider finds also what is unknown here"),
    ],
    project: Project = None,
    location: Location = None,
    force: Annotated[bool, typer.Option("--force", help="lose results that are still on it")] = False,
    yes: Yes = False,
) -> None:
    """Remove a cluster and all that belongs to it. Repeated, it goes on where it was.

    With PROVIDER it also removes clusters, whole or half made, that another machine or data directory has made. An
    attached cluster is only forgotten.
    """
    if len(words) > 2:
        raise UsageError(f"{len(words)} words are given.", hint="mlbench delete-cluster PROVIDER NAME")
    name = words[-1]
    store = Store()
    try:
        cluster = locate(store, name, words[0] if len(words) == 2 else None, scope_of(project, location))
    except NotFoundError:
        if not any(entry.action == "deleted" for entry in store.journal_of(name)):
            raise
        console.out(f"The cluster {name} was deleted before; nothing of it is left.")
        return
    if cluster.provider == "local":
        raise UsageError('The cluster "local" is this machine; it cannot be deleted.')
    if not force:
        _refuse_unfetched(store, cluster)
    remove(store, cluster, yes=yes)


def remove(store: Store, cluster: Cluster, *, yes: bool) -> None:
    """Ask, then remove the cluster."""
    provider = registry.load(cluster.provider)
    if cluster.provider == "attached":
        store.forget_cluster(cluster.name)
        console.out(f"The cluster {cluster.name} is forgotten; nothing on it was changed.")
        return
    console.confirm(f"Remove the cluster {cluster.name} ({cluster.provider}) and all that is on it?", yes=yes)
    from providers.lifecycle import down
    from providers.workload_cleanup import WorkloadCleanup

    resources = provider.resources(cluster)
    with closing(WorkloadCleanup(cluster, provider, resources)) as cleanup:
        error: CleanupError | None = None
        try:
            with StepTeller() as tell:
                down(cluster, [*resources, cleanup], store, report=tell)
        except CleanupError as caught:
            error = caught
        try:
            cleanup.raise_for_orphans(error)
        finally:
            for warning in cleanup.warnings:
                console.warn(warning)
    certain = "" if cleanup.warnings else "; nothing of it is left"
    console.out(f"The cluster {cluster.name} is deleted{certain}.")


def _refuse_unfetched(store: Store, cluster: Cluster) -> None:
    names = [row.run.name for row in store.runs() if row.run.spec.cluster == cluster.name and not sealed(row.run)]
    if names:
        raise UsageError(
            f'On the cluster "{cluster.name}" are runs whose results are not here: {", ".join(names)}.',
            hint=f"mlbench wait {names[0]}   fetches them; --force loses them",
        )
