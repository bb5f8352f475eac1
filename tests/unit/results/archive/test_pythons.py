"""An archive verifies alike on every Python that the tests run on, whichever sealed it."""

from pathlib import Path

from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.verify import verify

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.zip"))


def test_every_python_verifies_what_any_has_sealed() -> None:
    """Since 3.12 `sum` compensates for rounding. The golden archive holds timings like those of a GPU (milliseconds
    that were rounded to 32 bits, divided by 1000 and added up), of which both sums differ."""
    (path,) = GOLDEN
    assert verify(path).ok
    with Archive.open(path) as archive:
        assert "Compute: 54.790 seconds" in (archive.result["official_line"] or "")
