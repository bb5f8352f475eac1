from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.analysis.compare import compare
from mlbench_cli.results.archive.files import Archive
from tests.unit.results.runs import sealed_run


def test_two_runs_that_may_be_compared(tmp_path: Path) -> None:
    a = Archive.open(sealed_run(tmp_path / "a", workers=1, seconds=100.0))
    b = Archive.open(sealed_run(tmp_path / "b", workers=2, seconds=60.0))
    assert [obstacle.word for obstacle in compare([a], [b]).obstacles] == ["workers"]
    found = compare([a], [b], across=["workers"])
    assert found.obstacles == ()
    assert found.differences == {"workers": (1, 2)}
    row = found.rows["seconds"]
    assert (row.old, row.new, row.words) == ((100.0,), (60.0,), "1.67× faster, too few runs")
    assert found.rows["communication"].ratio is not None
    assert str(found.verdict).startswith("Too few runs for a verdict on run-1 and run-2: one run each;")
    assert found.to_dict()["schema_version"] == 1


def test_repeats_are_compared_by_mean_and_interval(tmp_path: Path) -> None:
    a = [
        Archive.open(sealed_run(tmp_path / f"a{n}", name=f"a-1-r{n}", workers=1, seconds=seconds, seed=n))
        for n, seconds in enumerate((90.0, 100.0, 110.0))
    ]
    b = [Archive.open(sealed_run(tmp_path / "b", workers=1, seconds=50.0, seed=0))]
    found = compare(a, b, ("a-1", "b"))
    row = found.rows["seconds"]
    assert (row.old, row.new) == ((90.0, 100.0, 110.0), (50.0,))
    assert row.ratio is not None
    assert row.ratio.low is None  # a single run has no interval
    assert found.differences == {"seed": ([0, 1, 2], 0)}
    document = found.to_dict()
    rows = document["rows"]
    assert (document["a"], document["runs"]) == ("a-1", [3, 1])
    assert rows["Prec@1"]["a"] == {"count": 3, "mean": 80.5, "low": 80.5, "high": 80.5, "confidence": 0.95}
    assert rows["throughput"]["ratio"]["mean"] > 1
    assert rows["seconds"]["b"]["low"] is None


def test_what_makes_a_comparison_void_is_said(tmp_path: Path) -> None:
    a = Archive.open(sealed_run(tmp_path / "a", task="one"))
    b = Archive.open(sealed_run(tmp_path / "b", "failed", task="two", synthetic=True))
    found = compare([a], [b])
    text = " ".join(obstacle.text for obstacle in found.obstacles)
    assert (found.failed, found.excluded) == (("run-2",), {"run-2": "failed"})
    assert found.verdict == "No verdict on run-2 and run-2: no run of run-2 succeeded."
    kind = Archive.open(sealed_run(tmp_path / "c", functional_only="one machine"))
    first, second = compare([kind], [kind]).obstacles
    assert first.text == "run-2 is functional, not a performance measurement: one machine."
    assert second.text == "run-2 is on both sides."
    for part in ("The tasks differ: one and two.", "The goals differ"):
        assert part in text


@pytest.mark.parametrize(
    ("one", "other", "word", "text"),
    [
        ({"workers": 1}, {"workers": 2}, "workers", "The numbers of workers differ: 1 and 2."),
        ({}, {"backend": "mpi"}, "backend", "The backends differ: gloo and mpi."),
        ({}, {"preset": "legacy"}, "preset", "The presets differ: spec and legacy."),
        (
            *({"parameters": {"batch_size": 1}}, {"parameters": {"batch_size": 2}}),
            *("parameters", "The values of batch_size differ: 1 and 2."),
        ),
        (
            {},
            {"environment": {"cpu": "EPYC", "cores": 8}},
            "machine",
            "The machines differ: unknown and EPYC, 8 cores.",
        ),
        (
            {"engine": "kubernetes", "cluster": "lab", "cluster_kind": "kind"},
            {"engine": "kubernetes", "cluster": "big", "cluster_kind": "eks/m5"},
            "cluster",
            "The kinds of cluster differ: kind lab and eks/m5.",
        ),
        (
            *(
                {"engine": "kubernetes", "cluster": "c"},
                {"engine": "kubernetes", "cluster": "c", "image_digest": "a@1"},
            ),
            *("image", "The images differ: unknown and a@1."),
        ),
        ({}, {"environment": {"env": {"OMP_NUM_THREADS": "4"}}}, "cpus", "The CPUs per rank differ: 1 and 4."),
        ({}, {"data": "mnist"}, "data", "The data differ: digits and mnist."),
        ({}, {"synthetic": True}, "data", "The kinds of data differ: none and synthetic data."),
    ],
)
def test_every_difference_is_an_obstacle_unless_asked_for(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], word: str, text: str
) -> None:
    a, b = (Archive.open(sealed_run(tmp_path / name, **changes)) for name, changes in (("a", one), ("b", other)))
    assert (word, text) in [(obstacle.word, obstacle.text) for obstacle in compare([a], [b]).obstacles]
    assert compare([a], [b], across=[word]).obstacles == ()


def test_conditions_are_an_obstacle_and_in_the_document(tmp_path: Path) -> None:
    a = Archive.open(sealed_run(tmp_path / "a"))
    b = Archive.open(sealed_run(tmp_path / "b", name="noisy-2", share_machine=True))
    found = compare([a], [b])
    assert [obstacle.word for obstacle in found.obstacles] == ["conditions"]
    assert found.to_dict()["conditions"] == {"noisy-2": "shared: --share-machine"}
    assert compare([a], [b], across=["conditions"]).obstacles == ()


def test_repeats_of_one_side_must_agree_too(tmp_path: Path) -> None:
    a = [Archive.open(sealed_run(tmp_path / f"a{n}", backend=backend)) for n, backend in enumerate(("gloo", "mpi"))]
    b = [Archive.open(sealed_run(tmp_path / "b"))]
    assert [obstacle.word for obstacle in compare(a, b).obstacles] == ["backend"]
