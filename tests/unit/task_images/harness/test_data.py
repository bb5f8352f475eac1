"""Samples of arrays in batches: the same for any number of loaders, copies for mapped files, and who validates what."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from task_images.contract import Contract
from task_images.harness import data as module
from task_images.harness.data import ArrayData, Batch
from task_images.harness.distributed import World

INPUTS = np.arange(46, dtype=np.float32).reshape(23, 2)
TARGETS = np.arange(23, dtype=np.int64)


def make(rank: int = 0, size: int = 1, batch: int = 4, **more: Any) -> ArrayData:
    world = World(Contract({"RANK": str(rank), "WORLD_SIZE": str(size)}), torch.device("cpu"), 1, grouped=False)
    return ArrayData(world, (INPUTS, TARGETS), (INPUTS, TARGETS), batch, 7, **more)


def rows(batch: Batch) -> list[int]:
    assert torch.equal(batch.inputs, torch.from_numpy(INPUTS)[batch.targets])
    return batch.targets.tolist()


def test_an_epoch_has_every_sample_once_in_batches_of_the_size() -> None:
    data = make()
    assert data.steps == 6
    batches = [(sorted(rows(batch)), batch.size, batch.total) for batch in data.training(1)]
    assert [(size, total) for _, size, total in batches] == [(4, 4)] * 5 + [(3, 3)]
    assert sorted(number for chosen, _, _ in batches for number in chosen) == list(range(23))


@pytest.mark.parametrize(("loaders", "together"), [(0, 1), (1, 16), (3, 16), (2, 2)])
def test_loaders_change_nothing_but_the_time(loaders: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOGETHER", together)
    expected = [rows(batch) for batch in make().training(2)]
    data = make(loaders=loaders)
    assert data._together == (together if loaders else 1)
    assert [rows(batch) for batch in data.training(2)] == expected
    assert [rows(batch) for batch in data.training(3)] != expected


@pytest.mark.parametrize(("limit", "together"), [(31, 1), (32, 1), (63, 1), (64, 2), (1 << 20, 16)])
def test_small_batches_are_gathered_together_up_to_a_limit_of_bytes(
    limit: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOGETHER_BYTES", limit)  # a batch has 4 x 2 x 4 = 32 bytes
    assert make(loaders=1)._together == together


def test_ranks_share_each_step() -> None:
    parts = [list(make(rank, 3, 2).training(1)) for rank in range(3)]
    whole = list(make(0, 1, 6).training(1))
    for step, batch in enumerate(whole):
        together = [number for part in parts for number in rows(part[step])]
        assert sorted(together) == sorted(rows(batch))
        assert {part[step].total for part in parts} == {batch.total}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_sample_is_validated_by_one_rank(size: int) -> None:
    batches = [list(make(rank, size, validation_batch=4).validation()) for rank in range(size)]
    assert [number for own in batches for batch in own for number in rows(batch)] == list(range(23))
    assert all(batch.size <= 4 and batch.total == 23 for own in batches for batch in own)
    assert len(batches[0]) == math.ceil(math.ceil(23 / size) / 4)


def test_validation_does_not_touch_a_read_only_file() -> None:
    inputs = INPUTS.copy()
    inputs.flags.writeable = False
    world = World(Contract({}), torch.device("cpu"), 1, grouped=False)
    data = ArrayData(world, (inputs, TARGETS), (inputs, TARGETS), 4, 7)
    batch = next(data.validation())
    batch.inputs.fill_(0)
    assert inputs[1, 1] == 3.0


def test_training_and_validation_are_prepared_each_in_its_way() -> None:
    def shift(by: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return lambda inputs, targets: (inputs + by, targets * 2)

    data = make(prepare_training=shift(100.0))
    batch = Batch(torch.zeros(2), torch.ones(2), 2)
    assert [part.tolist() for part in data.prepare(batch, training=True)] == [[100.0] * 2, [2.0] * 2]
    assert [part.tolist() for part in data.prepare(batch, training=False)] == [[0.0] * 2, [1.0] * 2]
    other = make(prepare_validation=shift(5.0))
    assert [part.tolist() for part in other.prepare(batch, training=False)] == [[5.0] * 2, [2.0] * 2]
