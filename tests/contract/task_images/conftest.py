"""One process with torch loaded serves all tests of a session."""

from collections.abc import Iterator

import pytest

from tests.contract.task_images.ranks import RankServer


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()
