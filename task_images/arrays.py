"""Arrays without a framework: samples divided over ranks, prefetching in threads, synthetic images.

`Partition` is exact for any number of samples and ranks, and reshuffled over all ranks each epoch, by integer
arithmetic only: each rank computes the same permutation from the shared seed and takes its part of each global batch,
so a step's samples depend only on the global batch size, not on the number of ranks.
"""

import contextlib
import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice, repeat
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from task_images.errors import TaskUsageError
from task_images.seeds import numpy_generator

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

    def shares(self, epoch: int, rank: int) -> Iterator[Share]:
        """The samples of `rank` in `epoch`, step by step. `Share.indices` is never empty."""
        order = self.permutation(epoch)
        for step in range(self.steps):
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


def synthetic_images(
    number: int, classes: int, side: int, seed: int, part: str, *, channels: int = 3, noise: float = 0.25
) -> tuple[Bytes, Labels]:
    """`number` synthetic images [n, channels, side, side] that a convolutional network can learn, and their labels.

    Each class has a smooth color pattern with left-right symmetry. An image is its class's pattern, shifted by up to an
    eighth of its side, with random brightness and noise of standard deviation `noise`. Equal `seed` and `part` give
    equal images on all ranks; all parts of a seed share the patterns.
    """
    patterns = _patterns(classes, side, channels, seed)
    stream = numpy_generator(seed, "images", part)
    labels = stream.permutation(np.arange(number) % classes)
    shifts = stream.integers(-(side // 8), side // 8 + 1, (2, number))
    brightness = stream.uniform(0.6, 1.0, (number, 1, 1, 1)).astype(np.float32)
    place = np.arange(side)
    down, across = (place + shift[:, None] for shift in shifts)
    moved = patterns[labels[:, None, None], :, down[:, :, None] % side, across[:, None, :] % side].transpose(0, 3, 1, 2)
    images = moved * brightness + noise * stream.standard_normal(moved.shape, np.float32)
    return np.clip(255 * images, 0, 255).astype(np.uint8), labels


def _patterns(classes: int, side: int, channels: int, seed: int) -> npt.NDArray[np.float32]:
    """Patterns [classes, channels, side, side] from 0 to 1, each made of a few low frequencies."""
    stream = numpy_generator(seed, "patterns")
    angles = np.arange(side) * (2 * np.pi / side)
    waves = np.stack([np.cos(frequency * angles + phase) for frequency in (1, 2, 3) for phase in (0, np.pi / 2)])
    weights = stream.standard_normal((classes, channels, len(waves), len(waves)))
    raw = np.einsum("kcab,ah,bw->kchw", weights, waves, waves)
    raw = raw + raw[..., ::-1]
    low, high = raw.min((2, 3), keepdims=True), raw.max((2, 3), keepdims=True)
    patterns: npt.NDArray[np.float32] = ((raw - low) / (high - low)).astype(np.float32)
    return patterns
