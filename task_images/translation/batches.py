"""Batches by sentences or by tokens, the same for any number of ranks.

An update has the same sentences for any number of ranks. Its passes are numbered over all ranks; each rank has
consecutive ones, and in the last update of an epoch a rank may have fewer, or none.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from task_images.contract import TaskUsageError
from task_images.data import Indices, numpy_generator, shard
from task_images.translation.corpora import Pairs


class Passes(NamedTuple):
    """`number` forward and backward passes per update and rank, each on `size` samples (or tokens)."""

    number: int
    size: int


def plan_passes(global_batch: int, largest: int, ranks: int) -> Passes:
    """Split `global_batch` evenly over `ranks` ranks and passes of at most `largest`.

    Raises TaskUsageError if it cannot be split evenly.
    """
    number = max(1, -(-global_batch // (largest * ranks)))
    size, rest = divmod(global_batch, ranks * number)
    if rest or not size:
        even = max(1, round(global_batch / (ranks * number))) * ranks * number
        raise TaskUsageError(
            f"a global batch of {global_batch} cannot be shared evenly by {ranks} ranks with {number} passes each",
            f"Use another number of workers, or e.g. --set global_batch={even}.",
        )
    return Passes(number, size)


class Update(NamedTuple):
    """One update. `passes`: this rank's, as indices of pairs; `first`: the number of its first pass among those of all
    ranks; `sentences` and `tokens` (target words including ends): of all ranks; `own`: sentences of this rank."""

    passes: list[Indices]
    first: int
    sentences: int
    tokens: int

    @property
    def own(self) -> int:
        """Number of sentences of this rank in the update."""
        return sum(map(len, self.passes))


class Batches:
    """The updates of an epoch for one rank: `list_passes` of all ranks, divided among them.

    reshuffle   whether pairs are distributed anew in every epoch
    """

    def __init__(self, pairs: Pairs, passes: Passes, ranks: int, rank: int, seed: int, reshuffle: bool = True) -> None:
        self._pairs, self._passes = pairs, passes
        self._ranks, self._rank = ranks, rank
        self._seed, self._reshuffle = seed, reshuffle
        self.steps = -(-self.count_passes() // (passes.number * ranks))  # updates per epoch

    def count_passes(self) -> int:
        """Passes of an epoch over all ranks."""
        return len(self.list_passes(1))

    def list_passes(self, epoch: int) -> list[Indices]:
        """The pairs of every pass of an epoch, over all ranks."""
        raise NotImplementedError

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update]:
        """The updates of `epoch` (from 1) except the first `begin`."""
        batches = self.list_passes(epoch)
        group = self._passes.number * self._ranks
        for start in range(begin * group, len(batches), group):
            whole = batches[start : start + group]
            own = shard(len(whole), self._ranks, self._rank)
            members = np.concatenate(whole)
            tokens = int(self._pairs.target.lengths[members].sum())
            yield Update(list(whole[own.start : own.stop]), own.start, len(members), tokens)

    def padding(self, epoch: int) -> float:
        """Share of padding in all source and target positions of that epoch, from 0 to 1."""
        filled = positions = 0
        for members in self.list_passes(epoch):
            for side in (self._pairs.source, self._pairs.target):
                lengths = side.lengths[members]
                filled += int(lengths.sum())
                positions += len(members) * int(lengths.max())
        return 1 - filled / positions


class SentenceBatches(Batches):
    """Passes with the same number of sentences, in random order.

    reshuffle   True: all pairs are reshuffled every epoch. False: each rank keeps its part from the first shuffle and
                reshuffles only that, as in the original.
    """

    def count_passes(self) -> int:
        """As many as the pairs fill."""
        return -(-len(self._pairs) // self._passes.size)

    def list_passes(self, epoch: int) -> list[Indices]:
        """The pairs of every pass of an epoch, over all ranks."""
        order = self._order(epoch)
        size = self._passes.size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _order(self, epoch: int) -> Indices:
        count = len(self._pairs)
        if self._reshuffle:
            return numpy_generator(self._seed, "sentences", epoch).permutation(count)
        once = numpy_generator(self._seed, "sentences").permutation(count)
        ranks, size = self._ranks, self._passes.size * self._passes.number
        parts = [once[(part := shard(count, ranks, rank)).start : part.stop] for rank in range(ranks)]
        mixed = [numpy_generator(self._seed, "part", epoch, rank).permutation(part) for rank, part in enumerate(parts)]
        updates = -(-max(map(len, mixed)) // size)
        return np.concatenate([part[step * size : (step + 1) * size] for step in range(updates) for part in mixed])


class TokenBatches(Batches):
    """Passes of at most `passes.size` positions (sentences x longest side, rounded up) of similar length.

    Sentences are sorted by target, then source length, with ties in random order, and batched greedily; lengths are
    rounded up to multiples of 2 (of 8 while a batch has fewer than 4 sentences), and a full batch is cut to a multiple
    of 4 sentences, the rest of which go into the next one. Then the batches are shuffled. With `reshuffle` all this is
    repeated every epoch.
    """

    def list_passes(self, epoch: int) -> list[Indices]:
        """The pairs of every pass of an epoch, over all ranks."""
        generator = numpy_generator(self._seed, "tokens", epoch if self._reshuffle else 1)
        pairs = self._pairs
        order = generator.permutation(len(pairs))
        order = order[np.lexsort((pairs.target.lengths[order], pairs.source.lengths[order]))]
        lengths = np.maximum(pairs.source.lengths, pairs.target.lengths)
        batches = fill_batches(order, lengths[order], self._passes.size)
        return [batches[place] for place in generator.permutation(len(batches))]


def fill_batches(order: Indices, lengths: npt.NDArray[np.int64], budget: int, few: int = 4) -> list[Indices]:
    """Split `order` into runs; lengths[i] belongs to order[i]. Only a run of a single sentence may exceed `budget`."""
    batches = []
    start = 0
    while start < len(order):
        # Every sentence takes at least 2 positions, so the run ends within this window.
        window = np.maximum.accumulate(lengths[start : start + budget // 2 + 1])
        counts = np.arange(1, len(window) + 1)
        padded = np.where(counts <= few, -(-window // 8) * 8, -(-window // 2) * 2)
        fits = counts * padded <= budget
        found = len(fits) if fits.all() else int(fits.argmin())
        if found > few:
            found -= found % few
        stop = start + max(1, found)
        batches.append(order[start:stop])
        start = stop
    return batches
