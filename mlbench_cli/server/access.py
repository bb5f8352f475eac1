"""API clients for the server, one per thread because a store belongs to one thread; and what may be shown.

A dashboard of one cluster shows only the runs of that cluster and the experiments with a run on it.
"""

import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from mlbench_cli.api import Client, ExperimentHandle, RunHandle
from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.archive.files import Archive, walk
from mlbench_cli.server.config import ServerConfig

LOCK_SECONDS = 2.0  # that a page waits for a locked store
MAX_CHECKED = 1000  # verified archives to remember
_local = threading.local()
_checked: dict[str, tuple[int, tuple[str, ...]]] = {}  # run id -> state of its files, unproven parts


def client_of(config: ServerConfig) -> Client:
    """This thread's client. Raises StoreError or StoreLockedError for an unreadable store."""
    clients: dict[str, Client] = _local.__dict__.setdefault("clients", {})
    key = str(config.home)
    if key not in clients:
        clients[key] = Client(config.home, patience=LOCK_SECONDS)
    clients[key].require_readable()
    return clients[key]


def find_run(config: ServerConfig, name: str) -> RunHandle:
    """The run with this name or id on the shown cluster. Raises NotFoundError."""
    client = client_of(config)
    try:
        handle = client.find_run(name)
    except NotFoundError:
        try:
            handle = client.find_run_by_id(name)
        except NotFoundError:
            raise NotFoundError(f'There is no run "{name[:60]}".', hint="mlbench status") from None
    if not _is_shown(config, handle):
        raise NotFoundError(f'The run "{name[:60]}" is not on {config.cluster}.', hint="mlbench serve")
    return handle


def open_checked(handle: RunHandle) -> Archive:
    """The archive of a sealed run, verified at first and whenever one of its files changes; unproven archives are
    marked. Raises DamagedArchive."""
    found = ((name, (handle.folder / name).lstat()) for name, _ in sorted(walk(handle.folder)))
    state = hash(tuple((name, facts.st_size, facts.st_mtime_ns) for name, facts in found))
    known = _checked.get(handle.run.id)
    if known is not None and known[0] == state:
        return Archive.open(handle.folder, not_derived=known[1], is_shown=True)
    archive = handle.archive(unproven=True)
    while len(_checked) >= MAX_CHECKED:
        _checked.pop(next(iter(_checked)), None)
    _checked[handle.run.id] = state, archive.not_derived
    return archive


def find_runs(config: ServerConfig, name: str) -> list[RunHandle]:
    """The runs with this name or id on the shown cluster: a run, its repeats, or an experiment.

    Raises NotFoundError.
    """
    try:
        found = client_of(config).select([name], repeats=True).runs
    except NotFoundError:
        return [find_run(config, name)]
    shown = [handle for handle in found if _is_shown(config, handle)]
    if not shown:
        raise NotFoundError(f'The run "{name[:60]}" is not on {config.cluster}.', hint="mlbench serve")
    return shown


def list_runs(
    config: ServerConfig,
    *,
    states: tuple[str, ...] = (),
    tasks: tuple[str, ...] = (),
    contains: str = "",
    limit: int | None = None,
    offset: int = 0,
) -> list[RunHandle]:
    """The runs of the shown cluster, newest first."""
    found = client_of(config).iterate_runs(states=states, tasks=tasks, contains=contains)
    here: Iterable[RunHandle] = (handle for handle in found if _is_shown(config, handle))
    return list(islice(here, offset, None if limit is None else offset + limit))


def count_runs(config: ServerConfig) -> int:
    """The number of runs that may be shown."""
    client = client_of(config)
    if config.cluster is None:
        return client.count_runs()
    return sum(_is_shown(config, handle) for handle in client.iterate_runs())


def list_experiments(config: ServerConfig, *, limit: int) -> list[ExperimentHandle]:
    """The newest experiments of the shown cluster."""
    client = client_of(config)
    if config.cluster is None:
        return client.experiments(limit=limit)
    here: Iterator[ExperimentHandle] = (item for item in client.experiments() if _has_shown(config, item))
    return list(islice(here, limit))


def find_experiment(config: ServerConfig, name: str) -> ExperimentHandle:
    """The experiment with this name on the shown cluster. Raises NotFoundError."""
    handle = client_of(config).find_experiment(name)
    if not _has_shown(config, handle):
        raise NotFoundError(f'The experiment "{name[:60]}" is not on {config.cluster}.', hint="mlbench serve")
    return handle


def list_clusters(config: ServerConfig) -> list[Cluster]:
    """All clusters known to this machine, or the shown cluster."""
    found = client_of(config).clusters()
    return [cluster for cluster in found if config.cluster in (None, cluster.name)]


def send_zip(write: Callable[[Path], object], **answer: Any) -> FileResponse:
    """What `write` puts into a temporary file, which is deleted once it is sent. `answer`: see FileResponse."""
    with tempfile.NamedTemporaryFile(suffix=".zip", delete=False) as file:
        target = Path(file.name)
    try:
        write(target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return FileResponse(target, background=BackgroundTask(target.unlink, missing_ok=True), **answer)


def _is_shown(config: ServerConfig, handle: RunHandle) -> bool:
    return config.cluster in (None, handle.run.spec.cluster)


def _has_shown(config: ServerConfig, experiment: ExperimentHandle) -> bool:
    return config.cluster is None or any(_is_shown(config, run) for run in experiment.runs())
