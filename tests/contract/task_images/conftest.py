"""One process with torch loaded serves all tests of a session: each worker has a copy of it."""

import atexit

import pytest

from tests.contract.task_images.ranks import RankServer, SharedForks

_servers: list[RankServer] = []  # none or one
_shared: list[SharedForks] = []  # none or one, which workers inherit


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load torch for the workers before they are forked, if one of their tests has ranks."""
    options = session.config.option
    if options.workers and not options.collectonly and any("ranks" in _fixtures(item) for item in session.items):
        _shared.append(SharedForks())
        atexit.register(_shared[0].close)


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.fixture(scope="session")
def ranks() -> RankServer:
    """Kept beyond a unit of work (tests/workers.py): what it has loaded took seconds."""
    if not _servers:
        _servers.append(RankServer(_shared[0].address if _shared else None))
        atexit.register(_servers[0].close)
    return _servers[0]
