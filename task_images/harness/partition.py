"""Partition of samples over ranks: exact for any number of samples and ranks, reshuffled over all ranks each epoch.

Integer arithmetic only. Each rank computes the same permutation from the shared seed and takes its part of each global
batch, so a step's samples depend only on the global batch size, not on the number of ranks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from task_images.harness.errors import TaskUsageError
from task_images.harness.seeds import numpy_generator

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
