"""The interface of data for training loops, and its implementations for arrays in memory or mapped from a file: samples
of any kind (`ArrayData`), and images of bytes that are cropped and flipped (`ImageData`).

The samples of a step, and an image's crop and flip, depend only on seed, epoch and sample: not on the number of ranks
or loader threads, nor on where a run resumed.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from task_images.arrays import Bytes, Labels, Partition, Share, ahead, shard
from task_images.seeds import generator
from task_images.world import World


class BufferPool:
    """Memory for batches, reused: the kernel zeroes the pages of each new array, which for 256 images takes more than
    1 % of a step.

    CPU tensors backed by arrays of one shape and type, created by `make`. A tensor returns to the pool when nothing
    references it or a view of it. Threads may share a pool."""

    def __init__(self, make: Callable[[], npt.NDArray[np.generic]]) -> None:
        self._make = make
        self._free: list[npt.NDArray[np.generic]] = []

    def take(self) -> Tensor:
        """A tensor with arbitrary contents."""
        try:
            whole = self._free.pop()
        except IndexError:
            whole = self._make()
        # This view is referenced only by the tensor's storage, which all views of the tensor share.
        view = whole[:]
        weakref.finalize(view, self._free.append, whole).atexit = False
        return torch.from_numpy(view)


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` in pinned memory if `device` is a GPU and the tensor is not there yet, so that the transfer is
    asynchronous; torch reuses pinned memory only after its transfers."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor


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


class ImageData:
    """Images [n, channels, height, width] of bytes with labels [n]; `data.Data` for a training loop.

    mean, deviation    per channel, for values from 0 to 1
    padding            black border added before a random crop of the original size; 0: no crop
    mirror             whether to flip half of the images horizontally, at random
    loaders            prefetching threads; 0: load on demand
    channels_last      memory format of the model's input
    resident           keep all images on the device, and augment them there, without loaders
    """

    def __init__(
        self,
        world: World,
        training: tuple[Bytes, Labels],
        validation: tuple[Bytes, Labels],
        batch_size: int,
        seed: int,
        *,
        mean: Sequence[float],
        deviation: Sequence[float],
        padding: int = 0,
        mirror: bool = False,
        loaders: int = 2,
        channels_last: bool = False,
        validation_batch: int = 500,
        resident: bool = False,
    ) -> None:
        self._world = world
        self._place = world.device if resident else torch.device("cpu")
        self._training = self._keep(training) if resident else training
        self._validation = self._keep(validation) if resident else validation
        self._validation_batch = validation_batch
        self._seed = seed
        self._padding = padding
        self._mirror = mirror
        self._loaders = 0 if resident else loaders
        self._normalize = Normalize(world.device, mean, deviation, channels_last)
        self._partition = Partition(len(training[1]), batch_size, world.size, seed)
        self.steps = self._partition.steps

    def training(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch (from 0) for this rank, augmented and prefetched."""
        images, labels = self._training
        side = images.shape[-1]
        stream = generator(self._seed, "augmentation", epoch)
        crops = Crops(len(labels), side, self._padding, self._mirror, stream, self._place)
        shares = self._partition.shares(epoch, self._world.rank)

        def load(rows: npt.NDArray[np.int64], total: int) -> Batch:
            numbers = self._number(rows)
            chosen, targets = self._choose(images, numbers), self._choose(labels, numbers)
            return Batch(self._pin(crops.cut(chosen, numbers)), self._pin(targets), total)

        return ahead(self._loaders, (partial(load, share.indices, share.total) for share in shares))

    def validation(self) -> Iterator[Batch]:
        """This rank's part of the validation set, in batches, prefetched."""
        images, labels = self._validation
        own = shard(len(labels), self._world.size, self._world.rank)

        def load(start: int) -> Batch:
            numbers = self._number(np.arange(start, min(start + self._validation_batch, own.stop)))
            return Batch(self._pin(self._choose(images, numbers)), self._pin(self._choose(labels, numbers)), 0)

        starts = range(own.start, own.stop, self._validation_batch)
        return ahead(self._loaders, (partial(load, start) for start in starts))

    def prepare(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """Normalized images in float32 [n, channels, height, width] and labels [n], on the device."""
        return self._normalize(batch.inputs), batch.targets.to(self._world.device, non_blocking=True)

    def _keep(self, part: tuple[Bytes, Labels]) -> tuple[Tensor, Tensor]:
        """A part's images and labels on the device."""
        images, labels = (torch.tensor(array, device=self._place) for array in part)
        return images, labels

    def _number(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Sample indices as a tensor on the data's device, transferred asynchronously."""
        return pin(torch.from_numpy(rows), self._place).to(self._place, non_blocking=True)

    def _choose(self, source: Bytes | Labels | Tensor, numbers: Tensor) -> Tensor:
        """Copies of the samples, on the device for resident data."""
        return source[numbers] if isinstance(source, Tensor) else torch.from_numpy(source[numbers.numpy()])

    def _pin(self, part: Tensor) -> Tensor:
        return pin(part, self._world.device)


class Normalize:
    """Images of bytes [n, channels, height, width] -> fp32 on `device`, normalized by `mean` and `deviation` (per
    channel, for values from 0 to 1), in the model's memory format. Bytes are transferred and converted on the
    device."""

    def __init__(
        self, device: torch.device, mean: Sequence[float], deviation: Sequence[float], channels_last: bool
    ) -> None:
        self._device = device
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        spread = torch.tensor(deviation, device=device).view(-1, 1, 1)
        self._factor = 1 / (255 * spread)
        self._shift = torch.tensor(mean, device=device).view(-1, 1, 1) / spread

    def __call__(self, images: Tensor) -> Tensor:
        there = images.to(self._device, non_blocking=True)
        return there.to(torch.float32, memory_format=self._format).mul_(self._factor).sub_(self._shift)


class Crops:
    """Random crops and flips of `images` square images of `side` pixels in one epoch.

    Drawn on the CPU, so that all devices use the same crops; applied on `device`.
    """

    def __init__(
        self, images: int, side: int, padding: int, mirror: bool, stream: torch.Generator, device: torch.device
    ) -> None:
        self._side = side
        self._padding = padding
        self._offsets = torch.randint(2 * padding + 1, (2, images, 1), generator=stream).to(device)
        self._mirrored = (torch.rand((images, 1), generator=stream) < (0.5 if mirror else 0.0)).to(device)

    def cut(self, chosen: Tensor, numbers: Tensor) -> Tensor:
        """The crops of the images `chosen` [n, channels, side, side], bytes, with channels-last memory.

        `numbers` [n] are their indices among all images.
        """
        padded = torch.nn.functional.pad(chosen, (self._padding,) * 4)
        place = torch.arange(self._side, device=chosen.device)
        down = self._offsets[0, numbers] + place
        across = self._offsets[1, numbers] + torch.where(self._mirrored[numbers], self._side - 1 - place, place)
        number = torch.arange(len(numbers), device=chosen.device)
        # With indices on both sides of the slice, torch puts the sliced dimension last.
        return padded[number[:, None, None], :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)
