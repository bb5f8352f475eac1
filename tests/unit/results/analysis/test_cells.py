"""Which runs of one result stand beside which of another."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.compare import describe_cell, pair_cells
from mlbench_cli.results.archive.files import Archive
from tests.unit.results.runs import sealed_run


def archive(folder: Path, name: str, workers: int = 1, backend: str = "gloo", **changes: Any) -> Archive:
    return Archive.open(sealed_run(folder / name, name=name, workers=workers, backend=backend, **changes))


def test_experiments_of_several_sizes_are_compared_size_by_size(tmp_path: Path) -> None:
    a = [archive(tmp_path, f"a-{size}-{seed}", size, seed=seed) for size in (1, 2, 4) for seed in (0, 1)]
    b = [archive(tmp_path, f"b-{size}-{seed}", size, seed=seed) for size in (2, 1, 8) for seed in (0, 1)]
    pairs, alone = pair_cells(a, b)
    assert [(describe_cell(pair.values), len(pair.a), len(pair.b)) for pair in pairs] == [
        ("1 worker", 2, 2),
        ("2 workers", 2, 2),
    ]
    assert {run.run["name"] for run in pairs[1].b} == {"b-2-0", "b-2-1"}
    assert alone == ["4 workers (A only)", "8 workers (B only)"]


def test_cells_of_a_matrix_are_compared_one_by_one(tmp_path: Path) -> None:
    a, b = ([archive(tmp_path, f"{side}-{backend}", 2, backend) for backend in ("gloo", "mpi")] for side in ("a", "b"))
    pairs, alone = pair_cells(a, b)
    assert ([describe_cell(pair.values) for pair in pairs], alone) == (["gloo", "mpi"], [])


def test_single_runs_are_compared_whatever_they_differ_in(tmp_path: Path) -> None:
    pairs, alone = pair_cells([archive(tmp_path, "a", 1)], [archive(tmp_path, "b", 2, "mpi")])
    assert ([(pair.values, describe_cell(pair.values)) for pair in pairs], alone) == ([((), "")], [])


def test_nothing_in_common_is_refused_with_what_there_is(tmp_path: Path) -> None:
    a = [archive(tmp_path, f"a-{size}", size) for size in (1, 2)]
    b = [archive(tmp_path, f"b-{size}", size) for size in (4, 8)]
    with pytest.raises(UsageError, match=r"1 worker \(A only\); 2 workers \(A only\); 4 workers \(B only\)"):
        pair_cells(a, b)
