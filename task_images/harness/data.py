"""What a training loop asks of data, and the plain case: arrays in memory or mapped from a file."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from task_images.harness.distributed import World
from task_images.harness.partition import Partition, shard

Prepare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Batch(NamedTuple):
    """This rank's part of one step, as loaded: on the CPU, or on the device if the data are kept there.

    `total`: samples of all ranks in this step.
    """

    inputs: Tensor
    targets: Tensor
    total: int

    @property
    def size(self) -> int:
        """How many samples this rank has in the step."""
        return len(self.targets)


class Data(Protocol):
    """Batches for one rank. All ranks get equally many training batches, none of them empty."""

    steps: int  # training batches per epoch

    def training(self, epoch: int) -> Iterable[Batch]:
        """The training batches of `epoch` (from 1)."""
        ...

    def validation(self) -> Iterable[Batch]:
        """This rank's shard of the validation set; it may have fewer batches than other ranks', or none."""
        ...

    def prepare(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets as the model wants them, on its device: types, augmentation, transfer."""
        ...


class ArrayData:
    """Data in arrays (numpy, memory-mapped or not): inputs [n, ...] and targets [n], indexed by sample.

    prepare_training and prepare_validation get CPU tensors (inputs, targets) and give what the model wants; the
    transfer to the device follows. Partition as `partition.Partition`, shared seed.
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
    ) -> None:
        self._world = world
        self._training = training
        self._validation = validation
        self._validation_batch = validation_batch
        self._prepare = {True: prepare_training, False: prepare_validation}
        self._partition = Partition(len(training[1]), batch_size, world.size, seed)
        self.steps = self._partition.steps

    def training(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch (from 0) for this rank, in the order of steps."""
        inputs, targets = self._training
        for share in self._partition.shares(epoch, self._world.rank):
            # Ascending indices read a mapped file forward; within a batch the order does not matter.
            rows = np.sort(share.indices)
            yield Batch(torch.from_numpy(inputs[rows]), torch.from_numpy(targets[rows]), share.total)

    def validation(self) -> Iterator[Batch]:
        """This rank's part of the validation set, in batches; each sample is in exactly one rank's."""
        inputs, targets = self._validation
        own = shard(len(targets), self._world.size, self._world.rank)
        for start in range(own.start, own.stop, self._validation_batch):
            rows = slice(start, min(start + self._validation_batch, own.stop))
            # A copy, since a mapped file is read-only and torch knows no such thing.
            yield Batch(torch.from_numpy(inputs[rows].copy()), torch.from_numpy(targets[rows].copy()), len(targets))

    def prepare(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets as the model wants them, on the device."""
        inputs, targets = batch.inputs, batch.targets
        prepare = self._prepare[training]
        if prepare is not None:
            inputs, targets = prepare(inputs, targets)
        return inputs.to(self._world.device), targets.to(self._world.device)
