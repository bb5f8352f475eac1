"""The interface of data for training loops, and its implementation for arrays in memory or mapped from a file."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from task_images.harness.arrays import ahead
from task_images.harness.buffers import BufferPool, pin
from task_images.harness.distributed import World
from task_images.harness.partition import Partition, Share, shard

# Limits in batches and bytes for gathering small batches together: a thread call for each would be too slow for the
# short steps of a logistic regression.
MAX_TOGETHER, TOGETHER_BYTES = 16, 16 << 20

Prepare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Batch(NamedTuple):
    """This rank's part of one step, as loaded: on the CPU, or on the device for resident data.

    `total`: samples of all ranks in this step.
    """

    inputs: Tensor
    targets: Tensor
    total: int

    @property
    def size(self) -> int:
        """Number of samples of this rank in the step."""
        return len(self.targets)


class Data(Protocol):
    """Batches for one rank. All ranks get the same number of training batches, none of them empty."""

    steps: int  # training batches per epoch

    def training(self, epoch: int) -> Iterable[Batch]:
        """The training batches of `epoch` (from 1)."""
        ...

    def validation(self) -> Iterable[Batch]:
        """This rank's shard of the validation set, which may have fewer batches than other ranks', or none."""
        ...

    def prepare(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets for the model, on its device: conversion, augmentation, transfer."""
        ...


class ArrayData:
    """Data in arrays (numpy, memory-mapped or not): inputs [n, ...] and targets [n], indexed by sample.

    prepare_training and prepare_validation map CPU tensors (inputs, targets) to those for the model, which are then
    transferred to the device. Samples are split by `partition.Partition` with the shared seed. `loaders`: threads that
    prefetch training samples, several small batches at a time; 0: gather on demand.
    """

    def __init__(
        self,
        world: World,
        training: tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]],
        validation: tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]],
        batch_size: int,
        seed: int,
        *,
        prepare_training: Prepare | None = None,
        prepare_validation: Prepare | None = None,
        validation_batch: int = 512,
        loaders: int = 0,
    ) -> None:
        self._world = world
        self._training = training
        self._loaders = loaders
        self._validation = validation
        self._validation_batch = validation_batch
        self._prepare = {True: prepare_training, False: prepare_validation}
        self._partition = Partition(len(training[1]), batch_size, world.size, seed)
        self.steps = self._partition.steps
        inputs = training[0]
        batch_bytes = batch_size * inputs[:1].nbytes
        self._together = min(MAX_TOGETHER, max(1, TOGETHER_BYTES // max(1, batch_bytes))) if loaders else 1
        self._most = self._together * batch_size
        self._shape = (self._most, *inputs.shape[1:])
        self._buffers = BufferPool(partial(np.empty, self._shape, inputs.dtype))

    def training(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch (from 0) for this rank, in the order of steps."""
        shares = self._partition.shares(epoch, self._world.rank)
        groups = iter(lambda: list(islice(shares, self._together)), [])
        for batches in ahead(self._loaders, (partial(self._gather, group) for group in groups)):
            yield from batches

    def _gather(self, shares: list[Share]) -> list[Batch]:
        """The batches of several steps, gathered with one copy."""
        inputs, targets = self._training
        # Sorted indices read a mapped file sequentially; the order within a batch does not matter.
        order = [np.sort(share.indices) for share in shares]
        rows = np.concatenate(order)
        if len(rows) > self._most:  # the last batch of an epoch may be larger
            gathered = pin(torch.from_numpy(inputs[rows]), self._world.device)
        else:
            gathered = self._take_memory(inputs)[: len(rows)]
            np.take(inputs, rows, axis=0, out=gathered.numpy(), mode="clip")  # mode="raise" would make another copy
        labels = pin(torch.from_numpy(targets[rows]), self._world.device)
        sizes = [len(one) for one in order]
        parts = zip(torch.split(gathered, sizes), torch.split(labels, sizes), shares, strict=True)
        return [Batch(samples, labels, share.total) for samples, labels, share in parts]

    def _take_memory(self, inputs: npt.NDArray[np.generic]) -> Tensor:
        """Memory for the samples of several steps; for a GPU pinned, which torch itself reuses."""
        if self._world.device.type != "cuda":
            return self._buffers.take()
        kind = torch.from_numpy(np.empty(0, inputs.dtype)).dtype
        return torch.empty(self._shape, dtype=kind, pin_memory=True)

    def validation(self) -> Iterator[Batch]:
        """This rank's part of the validation set, in batches; each sample belongs to exactly one rank."""
        inputs, targets = self._validation
        own = shard(len(targets), self._world.size, self._world.rank)
        for start in range(own.start, own.stop, self._validation_batch):
            rows = slice(start, min(start + self._validation_batch, own.stop))
            # A copy, because mapped files are read-only and torch has no read-only tensors.
            samples, labels = (
                pin(torch.from_numpy(part[rows].copy()), self._world.device) for part in (inputs, targets)
            )
            yield Batch(samples, labels, len(targets))

    def prepare(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets for the model, on its device."""
        inputs, targets = batch.inputs, batch.targets
        prepare = self._prepare[training]
        if prepare is not None:
            inputs, targets = prepare(inputs, targets)
        device = self._world.device
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
