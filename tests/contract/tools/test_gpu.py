"""`python -m benchmarks.gpu` on a CPU with tiny sizes: the program of the GPU figures works before a GPU is rented."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
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


@pytest.mark.nightly
def test_lines_are_kept_with_their_profiles_and_not_measured_again(tmp_path: Path) -> None:
    words = ("--only", "matrix", "ResNet-20")
    found = measure(tmp_path, *words)
    assert len(found) == 2
    assert "operations an update" in (tmp_path / "profile-resnet-20-resident-graphs.txt").read_text()
    assert measure(tmp_path, *words) == found


def link_packages(folder: Path, *names: str) -> None:
    """Links to the files of packages and of what they require, so that nothing else can be imported from `folder`."""
    due, done = list(names), set()
    while due:
        if (name := due.pop()) in done:
            continue
        done.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        due += [re.split(r"[^\w.-]", line)[0] for line in package.requires or () if "extra ==" not in line]
        for top in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "bin", "__pycache__")}:
            if not (folder / top).exists():  # several packages have their part of "nvidia"
                (folder / top).symlink_to(Path(str(package.locate_file(top))).resolve())


@pytest.mark.slow
def test_the_tasks_need_nothing_but_torch_numpy_and_yaml(tmp_path: Path) -> None:
    """A machine that is lent by the minute has no others."""
    link_packages(tmp_path, "torch", "numpy", "PyYAML")
    tasks = ("gpt_pretraining", "bert_pretraining", "cifar10_resnet20", "imagenet_resnet", "certify")
    modules = [
        "benchmarks.gpu",
        "benchmarks._profiled",
        "task_images.run",
        *(f"task_images.{task}.task" for task in tasks),
    ]
    command = [sys.executable, "-S", "-c", f"import {', '.join(modules)}"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_all_lines_run(tmp_path: Path) -> None:
    assert len(measure(tmp_path)) == 8  # tests/gpu need a GPU
    assert len(list(tmp_path.iterdir())) <= 8
