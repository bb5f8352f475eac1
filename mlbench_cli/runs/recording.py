"""Recording an experiment: run.json of every member and the rows of the store, all of it or nothing.

The runs' folders are written first, under ids that nobody knows yet; one transaction makes them known. A client that is
killed before leaves folders without rows and a list of them, which the next recording removes.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Experiment, Run
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.storage.queue_folder import FOLDER, write_queued
from mlbench_cli.storage.store import Store

_INTENT = "recording-{}.json"  # in DATA/experiments, locked by the client that records


def record(
    experiment: Experiment,
    runs: Sequence[Run],
    store: Store,
    write_document: Callable[[Run], None] = write_run_document,
) -> None:
    """Record `experiment` with its members, and `runs`, those of their runs that are new.

    After a kill at any moment it has happened or it has not. Raises UsageError for a name that is taken or a folder
    that cannot be written.
    """
    folder = store.folder / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (store.folder / "runs").mkdir(exist_ok=True)
        _remove_abandoned(folder, store)
        with _intent(folder, experiment, runs):
            try:
                for run in runs:
                    write_document(run)
                    write_queued(run.folder, experiment.id, experiment.name)
                store.record_experiment(experiment, runs)
            except BaseException:
                _remove_unrecorded([run.id for run in runs], store)
                raise
    except OSError as error:
        raise UsageError(
            f"The runs cannot be recorded in {store.folder}: {error.strerror or error}.",
            hint="Free up disk space or fix its permissions, or set MLBENCH_HOME to another folder.",
        ) from None


@contextmanager
def _intent(folder: Path, experiment: Experiment, runs: Sequence[Run]) -> Iterator[None]:
    path = folder / _INTENT.format(f"{experiment.id}-{os.getpid()}")
    descriptor = _create_locked(path)
    try:
        os.write(descriptor, json.dumps([run.id for run in runs]).encode())
        os.fsync(descriptor)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _create_locked(path: Path) -> int:
    """A new file, locked. Another client may take one that is not locked yet for abandoned, and remove it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _remove_abandoned(folder: Path, store: Store) -> None:
    """Remove what clients that were killed while recording have left."""
    for path in folder.glob(_INTENT.format("*")):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_nlink:
                continue  # its client has just ended, and has removed it
            ids = json.loads(path.read_bytes() or b"[]")
            _remove_unrecorded([run_id for run_id in ids if isinstance(run_id, str)], store)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # another client is recording just now
        except ValueError:
            path.unlink(missing_ok=True)  # killed before it had written anything
        finally:
            os.close(descriptor)


def _remove_unrecorded(ids: Sequence[str], store: Store) -> None:
    for run_id in ids:
        if run_id.replace("-", "").isalnum() and store.find_run(run_id) is None:
            shutil.rmtree(store.folder / "runs" / run_id, ignore_errors=True)
