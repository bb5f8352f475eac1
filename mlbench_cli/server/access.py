"""The API's client in a server: one for each thread, since a store belongs to one; and which runs may be shown."""

import threading
from collections.abc import Iterator
from itertools import islice

from mlbench_cli.api import Client, RunHandle
from mlbench_cli.errors import NotFoundError
from mlbench_cli.server.config import ServerConfig

_local = threading.local()


def client_of(config: ServerConfig) -> Client:
    """This thread's client."""
    clients: dict[str, Client] = _local.__dict__.setdefault("clients", {})
    key = str(config.home)
    if key not in clients:
        clients[key] = Client(config.home)
    return clients[key]


def find_run(config: ServerConfig, name: str) -> RunHandle:
    """The run of that name or id, of the cluster that is shown. Raises NotFoundError."""
    client = client_of(config)
    try:
        handle = client.find_run(name)
    except NotFoundError:
        try:
            handle = client.find_run_by_id(name)
        except NotFoundError:
            raise NotFoundError(f'There is no run "{name[:60]}".', hint="mlbench status") from None
    if config.cluster not in (None, handle.run.spec.cluster):
        raise NotFoundError(f'The run "{name[:60]}" is not on {config.cluster}.', hint="mlbench serve")
    return handle


def list_runs(
    config: ServerConfig,
    *,
    states: tuple[str, ...] = (),
    tasks: tuple[str, ...] = (),
    contains: str = "",
    limit: int | None = None,
    offset: int = 0,
) -> list[RunHandle]:
    """Runs, newest first, of the cluster that is shown."""
    client = client_of(config)
    if config.cluster is None:
        return client.runs(states=states, tasks=tasks, contains=contains, limit=limit, offset=offset)
    found: Iterator[RunHandle] = iter(client.runs(states=states, tasks=tasks, contains=contains))
    here = (handle for handle in found if handle.run.spec.cluster == config.cluster)
    return list(islice(here, offset, None if limit is None else offset + limit))
