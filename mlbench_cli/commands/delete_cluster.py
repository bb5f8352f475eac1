"""`mlbench delete-cluster [PROVIDER] NAME`: remove a cluster and all that belongs to it, or go on removing it."""

from contextlib import closing
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._clusters import Location, Project, StepTeller, locate, scope_of
from mlbench_cli.commands._common import Format, Output, Yes, complete_clusters, sealed
from mlbench_cli.errors import CleanupError, NotFoundError, UsageError
from mlbench_cli.model import Cluster
from mlbench_cli.store import Store
from providers import registry


def delete_cluster(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PROVIDER] NAME",
            help="cluster to delete; name its provider to find clusters this machine did not create",
            autocompletion=complete_clusters,
        ),
    ],
    project: Project = None,
    location: Location = None,
    force: Annotated[bool, typer.Option("--force", help="discard results that are still on it")] = False,
    yes: Yes = False,
    output: Output = Format.text,
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
        _print(name, f"The cluster {name} was deleted before; nothing of it is left.", output)
        return
    if cluster.provider == "local":
        raise UsageError('The cluster "local" is this machine; it cannot be deleted.')
    if not force:
        _refuse_unfetched(store, cluster)
    _print(name, remove(store, cluster, yes=yes), output)


def _print(name: str, sentence: str, output: Format) -> None:
    if output == Format.json:
        console.out_json({"cluster": name, "deleted": True, "summary": sentence})
    else:
        console.out(sentence)


def remove(store: Store, cluster: Cluster, *, yes: bool) -> str:
    """Ask, then remove the cluster; a sentence that says what has become of it."""
    provider = registry.load(cluster.provider)
    if cluster.provider == "attached":
        store.forget_cluster(cluster.name)
        return f"The cluster {cluster.name} is forgotten; nothing on it was changed."
    console.confirm(f"Remove the cluster {cluster.name} ({cluster.provider}) and all that is on it?", yes=yes)
    from providers.leavings import Leavings
    from providers.lifecycle import down

    resources = provider.resources(cluster)
    with closing(Leavings(cluster, provider, resources)) as leavings:
        error: CleanupError | None = None
        try:
            with StepTeller() as tell:
                down(cluster, [*resources, leavings], store, report=tell)
        except CleanupError as caught:
            error = caught
        try:
            leavings.check(error)
        finally:
            for warning in leavings.warnings:
                console.warn(warning)
    certain = "" if leavings.warnings else "; nothing of it is left"
    return f"The cluster {cluster.name} is deleted{certain}."


def _refuse_unfetched(store: Store, cluster: Cluster) -> None:
    names = [row.run.name for row in store.runs() if row.run.spec.cluster == cluster.name and not sealed(row.run)]
    if names:
        raise UsageError(
            f'On the cluster "{cluster.name}" are runs whose results are not here: {", ".join(names)}.',
            hint=f"mlbench wait {names[0]}   fetches them; --force loses them",
        )
