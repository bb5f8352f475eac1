"""One process with torch loaded serves all tests that a worker runs."""

import atexit

import pytest

from tests.contract.task_images.ranks import RankServer

_servers: list[RankServer] = []  # none or one


@pytest.fixture(scope="session")
def ranks() -> RankServer:
    """Kept beyond a unit of work (tests/workers.py): what it has loaded took seconds."""
    if not _servers:
        _servers.append(RankServer())
        atexit.register(_servers[0].close)
    return _servers[0]
