"""`python -m benchmarks.gpu` on a CPU with tiny sizes: the program of the GPU figures works before a GPU is rented."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def measure(folder: Path, *words: str) -> list[str]:
    """The lines that were measured."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--output", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    assert all(row["name"] in (folder / "table.md").read_text() for row in rows)
    return [row["name"] for row in rows if row["ended"] == "measured"]


def test_lines_are_kept_with_their_profiles_and_not_measured_again(tmp_path: Path) -> None:
    words = ("--only", "matrix", "ResNet-20")
    found = measure(tmp_path, *words)
    assert len(found) == 2
    assert "operations an update" in (tmp_path / "profile-resnet-20-resident-graphs.txt").read_text()
    assert measure(tmp_path, *words) == found


@pytest.mark.nightly
def test_all_lines_run(tmp_path: Path) -> None:
    assert len(measure(tmp_path)) == 8  # tests/gpu need a GPU
    assert len(list(tmp_path.iterdir())) <= 8
