"""Remove a run and everything that it left behind."""

import shutil
from collections.abc import Callable

from mlbench_cli.errors import CleanupError, CredentialError, NotFoundError, UnreachableError, UsageError
from mlbench_cli.model.run import Run
from mlbench_cli.runs.connect import connect_engine
from mlbench_cli.runs.queue import QueueFolder
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.storage.store import Store
from mlbench_cli.util.files import remove_folder


def delete_run(
    run: Run,
    store: Store,
    *,
    force: bool = False,
    notice: Callable[[str], None] | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> None:
    """Remove a run from its cluster, the disk and the store, in this order.

    `force` stops it if it is running, discards results that were not fetched, and does without the cluster if that is
    gone or refuses; the run of a cluster that never took it needs none. `notice` gets a sentence if another command
    holds the run's folder, or the cluster takes long, `warn` what stays behind. Raises what the engine raises,
    CleanupError for a folder that cannot be removed.
    """
    # Not while another command completes its archive, or its queue hands it to its engine.
    with RunFolder(run.folder).lock(notice=notice):
        row = store.find_run(run.id)
        if row is None or row.queue is None or run.spec.engine == "local":
            _delete_from_cluster(run, store, force, notice, warn)
        try:
            remove_folder(run.folder)
        except OSError as error:
            raise CleanupError(
                f"The folder {run.folder} cannot be removed: {error.strerror}.", hint=f"mlbench delete {run.name} --yes"
            ) from None
        for experiment in store.forget_run(run):
            shutil.rmtree(QueueFolder.of(store.folder, experiment).path, ignore_errors=True)


def _delete_from_cluster(
    run: Run, store: Store, force: bool, notice: Callable[[str], None] | None, warn: Callable[[str], None]
) -> None:
    try:
        cluster = store.cluster(run.spec.cluster)
    except NotFoundError:
        return  # it was deleted, and everything on it
    try:
        connect_engine(cluster, notice).delete(run, force=force)
    except (UnreachableError, CredentialError, NotFoundError, UsageError) as error:
        never_had = isinstance(error, CredentialError) and not run.manifests.exists()
        if not force and not never_had:
            if "mlbench delete" not in (error.hint or ""):
                leave = f"mlbench delete {run.name} --force   deletes it here only"
                error.hint = f"{error.hint}   Or: {leave}" if error.hint else leave
            raise
        words = error.message.rstrip(".")
        warn(f"{words}. What {run.name} may have left on {cluster.name} stays there until it expires.")
