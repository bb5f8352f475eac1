"""A home of its own for each test of the local engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.local_runs import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Start runs in a new folder; what still runs at the end is stopped."""
    opened = Lab(tmp_path)
    yield opened
    opened.close()
