"""`mlbench delete`: remove a run from the cluster, the disk and the store, in this order."""

import shutil
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, RunName, Yes, engine_of
from mlbench_cli.errors import CleanupError, NotFoundError, UnreachableError
from mlbench_cli.model import Cluster, Run
from mlbench_cli.run_folder import RunFolder
from mlbench_cli.store import Store


def delete(
    name: RunName,
    force: Annotated[
        bool, typer.Option("--force", help="stop it if it is running; discard results that were not fetched")
    ] = False,
    yes: Yes = False,
    output: Output = Format.text,
) -> None:
    """Remove a run and its results. Zip files that were downloaded stay."""
    store = Store()
    run = store.run(name, readable=False).run
    console.confirm(f"Remove {name} and its results in {run.folder}?", yes=yes)
    with RunFolder(run.folder).lock(notice=console.note):  # not while another command completes its archive
        _delete_from_cluster(run, store, force)
        _remove_folder(run)
        store.forget_run(run)
    if output == Format.json:
        console.out_json({"run": name, "id": run.id, "deleted": True, "folder": str(run.folder)})
    else:
        console.out(f"{name} is deleted.")


def _delete_from_cluster(run: Run, store: Store, force: bool) -> None:
    cluster = _cluster(run, store)
    if cluster is None:
        return
    try:
        engine_of(cluster).delete(run, force=force)
    except UnreachableError as error:
        if not force:
            raise
        console.warn(f"{error.message} What {run.name} has on {cluster.name} stays there until its time is up.")


def _remove_folder(run: Run) -> None:
    try:
        shutil.rmtree(run.folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CleanupError(
            f"The folder {run.folder} cannot be removed: {error.strerror}.", hint=f"mlbench delete {run.name} --yes"
        ) from None


def _cluster(run: Run, store: Store) -> Cluster | None:
    """The run's cluster; None if it was deleted, and everything on it."""
    try:
        return store.cluster(run.spec.cluster)
    except NotFoundError:
        return None
