from pathlib import Path

import pytest

from mlbench_cli.results.analysis.compare import THROUGHPUT, Row, compare
from mlbench_cli.results.analysis.statistics import Estimate
from mlbench_cli.results.archive.reader import Archive
from tests.unit.results.runs import sealed_run


def test_two_runs_that_may_be_compared(tmp_path: Path) -> None:
    a = Archive.open(sealed_run(tmp_path / "a", workers=1, seconds=100.0))
    b = Archive.open(sealed_run(tmp_path / "b", workers=2, seconds=60.0))
    found = compare([a], [b])
    assert found.obstacles == ()
    assert found.differences == {"workers": (1, 2)}
    assert found.seconds["task"] == Row(Estimate(1, 100.0), Estimate(1, 60.0), Estimate(1, 0.6))
    assert found.ratios["task"] == 0.6
    assert abs((found.ratios["communication"] or 0) - 0.6) < 1e-9
    assert found.to_dict()["schema_version"] == 1


def test_repeats_are_compared_by_mean_and_interval(tmp_path: Path) -> None:
    a = [
        Archive.open(sealed_run(tmp_path / f"a{n}", name=f"a-1-r{n}", workers=1, seconds=seconds, seed=n))
        for n, seconds in enumerate((90.0, 100.0, 110.0))
    ]
    b = [Archive.open(sealed_run(tmp_path / "b", workers=1, seconds=50.0, seed=0))]
    found = compare(a, b, ("a-1", "b"))
    row = found.seconds["task"]
    assert row.a is not None
    assert (row.a.count, row.a.mean) == (3, 100.0)
    assert row.b == Estimate(1, 50.0)
    assert row.ratio is not None
    assert row.ratio.mean == 0.5
    assert row.ratio.margin == pytest.approx(0.5 * row.a.margin / 100)  # type: ignore[operator]
    assert found.differences == {"seed": ([0, 1, 2], 0)}
    document = found.to_dict()
    assert (document["a"], document["seconds"]["task"], document["ratios"]["task"]) == ("a-1", [100.0, 50.0], 0.5)
    assert document["estimates"]["Prec@1"]["a"] == {
        "count": 3,
        "mean": 80.5,
        "low": 80.5,
        "high": 80.5,
        "confidence": 0.95,
    }
    assert document["estimates"][THROUGHPUT]["ratio"]["mean"] > 1
    assert document["estimates"]["task"]["b"]["low"] is None


def test_what_makes_a_comparison_void_is_said(tmp_path: Path) -> None:
    a = Archive.open(sealed_run(tmp_path / "a", task="one"))
    b = Archive.open(sealed_run(tmp_path / "b", "failed", task="two", synthetic=True))
    found = compare([a], [b])
    assert found.ratios["task"] is None
    text = " ".join(found.obstacles)
    kind = Archive.open(sealed_run(tmp_path / "c", functional_only="one machine"))
    assert compare([kind], [kind]).obstacles[0] == "run-2 is functional, no measure of performance: one machine."
    for part in ("The tasks differ: one and two.", "The goals differ", "run-2 ended as failed"):
        assert part in text
