"""Data in the same order for any number of ranks: random streams, samples divided over ranks, batches from arrays.

A training loop reads batches from `Data`; `ArrayData` makes them from arrays in memory or mapped from a file.
`Partition` is exact for any number of samples and ranks, and reshuffled over all ranks each epoch, by integer
arithmetic only: each rank computes the same permutation from the shared seed and takes its part of each global batch.
So the samples of a step depend only on seed, epoch and global batch size: not on the number of ranks or loader threads,
nor on where a run resumed.

Initial parameters, partition and split use the run's seed; dropout and augmentation use per-rank streams. Torch is
imported when it is used, because tasks of other frameworks divide their data in the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import islice, repeat
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from task_images.contract import TaskUsageError
from task_images.methods import torch

if TYPE_CHECKING:
    from task_images.world import World


def derive(seed: int, *path: str | int) -> int:
    """A 63-bit seed for the stream named by `path`: equal everywhere, and unrelated to those of other paths."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *path: str | int) -> torch.Generator:
    """A torch generator (on the CPU) of the stream `path`."""
    return torch.Generator().manual_seed(derive(seed, *path))


_lasting: dict[str, torch.Generator] = {}


def lasting_generator(seed: int, *path: str | int) -> torch.Generator:
    """Like `generator`, for a stream that continues across updates: its state is saved in checkpoints for restarts."""
    made = _lasting["/".join(map(str, path))] = generator(seed, *path)
    return made


def read_lasting_states() -> dict[str, torch.Tensor]:
    """The state of each lasting generator, by path."""
    return {path: stream.get_state() for path, stream in _lasting.items()}


def load_lasting_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restore lasting generators from `read_lasting_states`."""
    for path, state in states.items():
        if path in _lasting:
            _lasting[path].set_state(state)


def numpy_generator(seed: int, *path: str | int) -> np.random.Generator:
    """A numpy generator of the stream `path`."""
    return np.random.Generator(np.random.PCG64(derive(seed, *path)))


def seed_device(device: torch.device, seed: int, *path: str | int) -> None:
    """Seed torch's generators of the CPU and of `device` with the stream `path`, for random numbers within a pass.

    torch.manual_seed seeds every kind of device, and stores a stack trace for unused ones: 0.8 ms, 2.5 % of a step of
    the tiny decoder.
    """
    value = derive(seed, *path)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)


def seed_all(seed: int, rank: int | None = None) -> None:
    """Seed Python, numpy and torch: without `rank` the same everywhere, with it a separate stream per rank."""
    value = derive(seed, "all") if rank is None else derive(seed, "rank", rank)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


Indices = npt.NDArray[np.int64]


def shard(samples: int, shards: int, index: int) -> range:
    """Part `index` of range(samples), split into `shards` parts whose lengths differ by at most one, longer ones
    first."""
    if shards < 1 or not 0 <= index < shards:
        raise ValueError(f"part {index} of {shards}")
    length, longer = divmod(samples, shards)
    start = index * length + min(index, longer)
    return range(start, start + length + (index < longer))


class Share(NamedTuple):
    """One rank's part of one step: its samples, and the number of samples of all ranks in this step."""

    indices: Indices
    total: int


class Partition:
    """Splits `samples` samples into the same number of steps for each rank.

    Global batches have batch_size x ranks samples. The last one of an epoch has the remainder; if that is less than one
    sample per rank, it is merged with the previous one, so no rank has an empty batch and all ranks make the same
    number of steps. Raises TaskUsageError if there are fewer samples than ranks.
    """

    def __init__(self, samples: int, batch_size: int, ranks: int, seed: int) -> None:
        if samples < ranks:
            raise TaskUsageError(f"{samples} samples cannot be shared among {ranks} ranks")
        if batch_size < 1:
            raise TaskUsageError(f"the batch size is {batch_size}; the minimum is 1")
        self.samples = samples
        self.ranks = ranks
        self.seed = seed
        self.global_batch = batch_size * ranks
        full, rest = divmod(samples, self.global_batch)
        self.steps = full + (rest >= ranks) if full else 1

    def permutation(self, epoch: int) -> Indices:
        """The order of all samples in `epoch`; the same on every rank."""
        return numpy_generator(self.seed, "partition", epoch).permutation(self.samples)

    def shares(self, epoch: int, rank: int, begin: int = 0) -> Iterator[Share]:
        """The samples of `rank` in `epoch`, step by step, except the first `begin` steps. `Share.indices` is never
        empty."""
        order = self.permutation(epoch)
        for step in range(begin, self.steps):
            start = step * self.global_batch
            stop = self.samples if step == self.steps - 1 else start + self.global_batch
            part = shard(stop - start, self.ranks, rank)
            yield Share(order[start + part.start : start + part.stop], stop - start)


Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Item = TypeVar("Item")


def ahead(threads: int, calls: Iterator[Callable[[], Item]], window: int = 0) -> Iterator[Item]:
    """Yield the calls' results in order, computing up to `window` of them (at least 2 x `threads`) ahead in threads.
    Without threads, each is computed on demand."""
    window = max(window, 2 * threads)
    if not threads:
        for call in calls:
            yield call()
        return
    waiting: deque[Future[Item]] = deque()
    with ThreadPoolExecutor(threads, "loader", _stay_alone) as workers:
        try:
            for call in calls:
                waiting.append(workers.submit(call))
                if len(waiting) > window:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def stream_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items in order, computing each in a thread while the previous one is used."""

    def make() -> list[Item]:
        return list(islice(items, 1))

    for made in ahead(1, repeat(make)):
        if not made:
            return
        yield made[0]


def _stay_alone() -> None:
    """Make torch single-threaded in this thread: OpenMP creates a team per calling thread, and those of loaders would
    compete with the model's. torch.set_num_threads would also affect the model's threads."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.get_num_threads()  # the first call in a thread sets the number
        for openmp in _find_openmp():
            openmp.omp_set_num_threads(1)


@lru_cache(1)
def _find_openmp() -> tuple[ctypes.CDLL, ...]:
    """The OpenMP libraries loaded into this process: torch's, and those bundled with packages such as scikit-learn.
    Empty if the system does not list them."""
    paths: dict[str, None] = {}
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            path = line.split(maxsplit=5)[-1].strip()
            if path.rpartition("/")[2].startswith(("libgomp", "libiomp", "libomp")):
                paths[path] = None
    return tuple(ctypes.CDLL(path) for path in paths)


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` in pinned memory if `device` is a GPU and the tensor is not there yet, so that the transfer is
    asynchronous; torch reuses pinned memory only after its transfers."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor


# Limits in batches and bytes for gathering small batches together: a thread call for each would be too slow for the
# short steps of a logistic regression.
MAX_TOGETHER, TOGETHER_BYTES = 16, 16 << 20

Prepare = Callable[["torch.Tensor", "torch.Tensor"], tuple["torch.Tensor", "torch.Tensor"]]


class Batch(NamedTuple):
    """This rank's part of one step, as loaded: on the CPU, or on the device for resident data.

    `total`: samples of all ranks in this step.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    total: int

    @property
    def size(self) -> int:
        """Number of samples of this rank in the step."""
        return len(self.targets)


class Data(Protocol):
    """Batches for one rank. All ranks get the same number of training batches, none of them empty."""

    steps: int  # training batches per epoch

    def training(self, epoch: int, begin: int = 0) -> Iterable[Batch]:
        """The training batches of `epoch` (from 1) except the first `begin`, which are not even loaded."""
        ...

    def validation(self) -> Iterable[Batch]:
        """This rank's shard of the validation set, which may have fewer batches than other ranks', or none."""
        ...

    def prepare(self, batch: Batch, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
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
        batch_bytes = batch_size * training[0][:1].nbytes
        self._together = min(MAX_TOGETHER, max(1, TOGETHER_BYTES // max(1, batch_bytes))) if loaders else 1

    def training(self, epoch: int, begin: int = 0) -> Iterator[Batch]:
        """The batches of an epoch (from 1) for this rank, in the order of steps, from number `begin` on."""
        shares = self._partition.shares(epoch, self._world.rank, begin)
        groups = iter(lambda: list(islice(shares, self._together)), [])
        for batches in ahead(self._loaders, (partial(self._gather, group) for group in groups)):
            yield from batches

    def _gather(self, shares: list[Share]) -> list[Batch]:
        """The batches of several steps, gathered with one copy."""
        inputs, targets = self._training
        # Sorted indices read a mapped file sequentially; the order within a batch does not matter.
        order = [np.sort(share.indices) for share in shares]
        rows = np.concatenate(order)
        gathered = torch.empty(
            (len(rows), *inputs.shape[1:]),
            dtype=torch.from_numpy(np.empty(0, inputs.dtype)).dtype,
            pin_memory=self._world.device.type == "cuda",
        )
        np.take(inputs, rows, axis=0, out=gathered.numpy(), mode="clip")  # mode="raise" would make another copy
        labels = pin(torch.from_numpy(targets[rows]), self._world.device)
        sizes = [len(one) for one in order]
        parts = zip(torch.split(gathered, sizes), torch.split(labels, sizes), shares, strict=True)
        return [Batch(samples, labels, share.total) for samples, labels, share in parts]

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

    def prepare(self, batch: Batch, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets for the model, on its device."""
        inputs, targets = batch.inputs, batch.targets
        prepare = self._prepare[training]
        if prepare is not None:
            inputs, targets = prepare(inputs, targets)
        device = self._world.device
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
