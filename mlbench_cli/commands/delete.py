"""`mlbench delete`: remove a run from the cluster, the disk and the store, in this order."""

import shutil
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import RunName, Yes, engine_of
from mlbench_cli.errors import CleanupError, NotFoundError
from mlbench_cli.model import Cluster, Run
from mlbench_cli.store import Store


def delete(
    name: RunName,
    force: Annotated[
        bool, typer.Option("--force", help="stop it if it runs; drop results that are not here yet")
    ] = False,
    yes: Yes = False,
) -> None:
    """Remove a run and its results. Zip files that were downloaded stay."""
    store = Store()
    run = store.run(name).run
    console.confirm(f"Remove {name} and its results in {run.folder}?", yes=yes)
    cluster = _cluster(run, store)
    if cluster is not None:
        engine_of(cluster).delete(run, force=force)
    try:
        shutil.rmtree(run.folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CleanupError(
            f"The folder {run.folder} cannot be removed: {error.strerror}.", hint=f"mlbench delete {name} --yes"
        ) from None
    store.forget_run(run)
    console.out(f"{name} is deleted.")


def _cluster(run: Run, store: Store) -> Cluster | None:
    """The run's cluster; None where it was deleted, and everything on it."""
    try:
        return store.cluster(run.spec.cluster)
    except NotFoundError:
        return None
