"""A method of an installed package: found by its entry point, and a training with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation import ROOT, read_blocks


@pytest.mark.nightly
def test_a_method_of_an_installed_package_is_listed_and_trains(tmp_path: Path) -> None:
    [block] = [block for block in read_blocks(ROOT / "docs/how-to/methods.md") if block.title == "averages.py"]
    installed = tmp_path / "site-packages"
    information = installed / "other_averages-1.0.dist-info"
    information.mkdir(parents=True)
    (installed / "other_averages.py").write_text(block.text)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other-averages\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[mlbench.methods]\naverages = other_averages:Averages\n")
    environment = {**os.environ, "MLBENCH_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def mlbench(*words: str, places: tuple[Path, ...] = (ROOT, installed)) -> "subprocess.CompletedProcess[str]":
        environment["PYTHONPATH"] = os.pathsep.join(map(str, places))
        command = [sys.executable, "-m", "mlbench_cli", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)

    assert mlbench("methods", "averages", places=(ROOT,)).returncode == 4
    shown = mlbench("methods", "averages")
    assert (shown.returncode, "this page" in shown.stdout) == (0, True), shown.stderr
    words = ("--task", "digits_resnet", "--preset", "tiny", "--method", "averages", "--set", "comm.steps=5", "--yes")
    trained = mlbench("run", "own", "2", *words)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    [result] = (tmp_path / "home").rglob("result.json")
    document = json.loads(result.read_text("utf-8"))
    assert document["method"] == "averages"
    assert "steps=2" in document["details"]["self_check"]["shortened"]
