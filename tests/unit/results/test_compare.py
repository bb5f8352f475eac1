from pathlib import Path

from mlbench_cli.results.archive import Archive
from mlbench_cli.results.compare import compare
from tests.unit.results.runs import sealed_run


def test_two_runs_that_may_be_compared(tmp_path: Path) -> None:
    a = Archive.open(sealed_run(tmp_path / "a", workers=1, seconds=100.0))
    b = Archive.open(sealed_run(tmp_path / "b", workers=2, seconds=60.0))
    found = compare(a, b)
    assert found.obstacles == ()
    assert found.differences == {"workers": (1, 2)}
    assert found.seconds["task"] == (100.0, 60.0)
    assert found.ratios["task"] == 0.6
    assert abs((found.ratios["communication"] or 0) - 0.6) < 1e-9
    assert found.to_dict()["schema_version"] == 1


def test_what_makes_a_comparison_void_is_said(tmp_path: Path) -> None:
    a = Archive.open(sealed_run(tmp_path / "a", task="one"))
    b = Archive.open(sealed_run(tmp_path / "b", "failed", task="two", synthetic=True))
    found = compare(a, b)
    assert found.ratios["task"] is None
    text = " ".join(found.obstacles)
    kind = Archive.open(sealed_run(tmp_path / "c", functional_only="one machine"))
    assert compare(kind, kind).obstacles[0] == "run-2 is functional, no measure of performance: one machine."
    for part in ("The tasks differ: one and two.", "The goals differ", "run-2 ended as failed"):
        assert part in text
