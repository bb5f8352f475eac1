"""The evaluation that programs of other people import."""

import gzip
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from task_images import public
from task_images.contract import TaskUsageError
from task_images.mnist.data import FILES


def write_idx(path: Path, array: npt.NDArray[np.uint8]) -> None:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


def test_a_validation_set_comes_whole_unscaled_and_in_its_order(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    written = {}
    for part, count in (("training", 5), ("validation", 7)):
        images = chance.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        written[part] = images, chance.integers(0, 10, count, dtype=np.uint8)
        for name, array in zip(FILES[part], written[part], strict=True):
            write_idx(tmp_path / f"{name}.gz", array)
    found, labels = public.load_validation("mnist", tmp_path)
    assert np.array_equal(found, written["validation"][0][:, None])
    assert np.array_equal(labels, written["validation"][1])


@pytest.mark.parametrize("task", ["allreduce", "bert_pretraining", "no_such_task", "../x", ""])
def test_a_task_without_such_a_set_is_refused(task: str, tmp_path: Path) -> None:
    with pytest.raises(TaskUsageError, match="no validation set"):
        public.load_validation(task, tmp_path)
