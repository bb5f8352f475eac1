"""Archives that the tests of a module share. They change documents in memory only."""

from pathlib import Path

import pytest

from mlbench_cli.results.analysis.series import Measurement, measure
from mlbench_cli.results.archive.files import Archive
from tests.unit.results.runs import sealed_run


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local run of two workers that reached its goal in 100 s."""
    return sealed_run(tmp_path_factory.mktemp("archives") / "a")


@pytest.fixture(scope="module")
def measured(sealed: Path) -> Measurement:
    """Its figures."""
    return measure(Archive.open(sealed))
