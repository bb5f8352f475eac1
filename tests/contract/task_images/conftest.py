"""One process with torch loaded serves all tests of a session: each worker has a copy of it."""

import atexit

import pytest

from tests.contract.task_images.ranks import RankServer, SharedForks

_servers: list[RankServer] = []  # none or one
_shared: list[SharedForks] = []  # none or one, which workers inherit


def pytest_configure(config: pytest.Config) -> None:
    """Load torch for the workers while tests are still collected, on another core."""
    if config.option.workers and not config.option.collectonly:
        _shared.append(SharedForks())
        atexit.register(_shared[0].close)


@pytest.fixture(scope="session")
def ranks() -> RankServer:
    """Kept beyond a unit of work (tests/workers.py): what it has loaded took seconds."""
    if not _servers:
        _servers.append(RankServer(_shared[0].address if _shared else None))
        atexit.register(_servers[0].close)
    return _servers[0]
