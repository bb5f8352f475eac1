"""Batches on their way to a GPU: from pinned memory, without the host waiting. A stub notes what it is asked for."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from task_images.arrays import synthetic_images
from task_images.contract import Contract
from task_images.data import ArrayData, Data, ImageData
from task_images.imagenet_resnet.data import FileData
from task_images.translation.pairs import Pairs, Side
from task_images.translation.training import collate, move_batch
from task_images.world import World, open_world

SIDE = 8


class StubGpu:
    """A device that gets tensors: those in pinned memory, and those that the host waits for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.transfers = 0
        self.waits: list[tuple[bool, bool]] = []  # pinned, non_blocking
        self._pinned: set[int] = set()
        self._kept: list[Tensor] = []  # so that no other storage gets the address of a pinned one
        plain_to, plain_empty = Tensor.to, torch.empty

        def to(tensor: Tensor, *wanted: Any, **options: Any) -> Tensor:
            if not wanted or not isinstance(wanted[0], torch.device) or wanted[0].type != "cuda":
                return plain_to(tensor, *wanted, **options)
            self.transfers += 1
            found = (tensor.untyped_storage().data_ptr() in self._pinned, bool(options.get("non_blocking")))
            if found != (True, True):
                self.waits.append(found)
            return tensor

        def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            made = plain_empty(*shape, **options)
            return self._note(made) if pin_memory else made

        patch.setattr(Tensor, "to", to)
        patch.setattr(torch, "empty", empty)
        patch.setattr(Tensor, "pin_memory", lambda tensor: self._note(tensor.clone()))

    def _note(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor


def make_arrays(world: World, loaders: int) -> Data:
    rows = (np.ones((22, 3), np.float32), np.zeros(22, np.float32))
    return ArrayData(world, rows, rows, 4, 1, loaders=loaders)


def make_images(world: World, resident: bool) -> Data:
    training, validation = (synthetic_images(number, 4, SIDE, 1, "x") for number in (22, 10))
    return ImageData(
        world, training, validation, 4, 1, mean=[0.5], deviation=[0.5], padding=1, mirror=True, resident=resident
    )  # fmt: skip


def make_files(world: World) -> Data:
    folders: Any = SimpleNamespace(training=Part(), validation=Part())
    data = FileData(
        world, folders, 4, 1, side=SIDE, shorter=SIDE, least_crop=0.5, loaders=2, draft=False, channels_last=True
    )
    data._cut = SimpleNamespace(fill=lambda target, images, places: 0.0)  # type: ignore[assignment]
    return data


class Part:
    """Images that are not there."""

    labels = np.zeros(22, np.int64)

    def __len__(self) -> int:
        return 22


@pytest.mark.parametrize(
    ("make", "each_epoch"),
    [
        (partial(make_arrays, loaders=0), 0),
        (partial(make_arrays, loaders=2), 0),
        (partial(make_images, resident=False), 0),
        (partial(make_images, resident=True), 2),  # each image's place and mirroring
        (make_files, 0),
    ],
)
def test_no_batch_lets_the_host_wait_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[World], Data], each_epoch: int
) -> None:
    world = open_world(Contract({"OMP_NUM_THREADS": "1"}))
    data, gpu = make(world), StubGpu(monkeypatch)
    for holder, name in ((world, "device"), (data, "_place"), (getattr(data, "_normalize", None), "_device")):
        if hasattr(holder, name) and (name != "_place" or each_epoch):
            monkeypatch.setattr(holder, name, torch.device("cuda", 0))
    batches = [(batch, True) for batch in data.training(1)] + [(batch, False) for batch in data.validation()]
    for batch, training in batches:
        data.prepare(batch, training=training)
    assert gpu.transfers >= len(batches) > 5
    assert len(gpu.waits) == each_epoch


def test_no_pass_of_a_translation_lets_the_host_wait_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words to come and their places are counted by the host when it makes them."""
    side = Side(np.array([5, 6, 2, 7, 2]), np.array([0, 3]), np.array([3, 2]))
    batch = collate(Pairs(side, side), np.array([1, 0]), padding=1, start=9)
    gpu = StubGpu(monkeypatch)
    moved = move_batch(batch, torch.device("cuda", 0))
    assert (gpu.transfers, gpu.waits) == (4, [])
    assert moved.lengths is batch.lengths
