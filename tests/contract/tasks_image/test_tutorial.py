"""The tutorial's two scripts, on small files of MNIST's very format."""

import difflib
import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from task_images.harness.images import synthetic_images
from task_images.mnist.data import FILES, load
from tests.contract.tasks.ranks import ROOT, RankServer

SCRIPTS = [ROOT / "task_images" / "mnist" / name for name in ("ordinary.py", "benchmark.py")]


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """400 training images gzipped, 100 validation images plain."""
    for part, number in (("training", 400), ("validation", 100)):
        images, labels = synthetic_images(number, 10, 28, 3, part, channels=1)
        for name, values in zip(FILES[part], (images[:, 0], labels), strict=True):
            raw = idx(values)
            if part == "training":
                (tmp_path / f"{name}.gz").write_bytes(gzip.compress(raw))
            else:
                (tmp_path / name).write_bytes(raw)
    return tmp_path


def test_at_most_ten_lines_make_it_a_benchmark() -> None:
    before, after = (script.read_text().splitlines() for script in SCRIPTS)
    changes = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 0 < len(changes) <= 10


def test_both_scripts_run_and_the_benchmark_reports_the_metric(ranks: RankServer, folder: Path) -> None:
    given = {"MLBENCH_DATA_DIR": str(folder), "EPOCHS": "2"}
    (folder / "one").mkdir()
    [alone] = ranks.run("task_images.mnist.ordinary", 1, folder / "one", {}, **given)
    assert alone.code == 0, alone.stderr
    assert alone.stdout.count("of the validation images") == 2
    (folder / "two").mkdir()
    both = ranks.run("task_images.mnist.benchmark", 2, folder / "two", {}, **given)
    assert [one.code for one in both] == [0, 0], both[0].stderr
    assert len(both[0].metric("val_global_Prec@1")) == 2
    # The replicas are equal, and so is what they find.
    assert both[0].metric("val_global_Prec@1") == both[1].metric("val_global_Prec@1")


def test_files_are_read_exactly(folder: Path) -> None:
    images, labels = synthetic_images(400, 10, 28, 3, "training", channels=1)
    got, kinds = load(folder, "training").tensors
    np.testing.assert_array_equal(np.rint((got.numpy() * 0.3081 + 0.1307) * 255), images)
    np.testing.assert_array_equal(kinds.numpy(), labels)


@pytest.mark.parametrize("content", [b"", b"\0\0\x08", idx(np.zeros(3))[:-1], b"<html>"])
def test_a_damaged_file_is_named(folder: Path, content: bytes) -> None:
    (folder / FILES["validation"][1]).write_bytes(content)
    with pytest.raises(ValueError, match="t10k-labels"):
        load(folder, "validation")
