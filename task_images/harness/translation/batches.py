"""Batches by sentences or by tokens, the same for any number of ranks.

An update has the same sentences for any number of ranks. Its passes are numbered over all ranks; each rank has
consecutive ones, and in the last update of an epoch a rank may have fewer, or none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from task_images.harness.partition import Indices, shard
from task_images.harness.seeds import numpy_generator
from task_images.harness.translation.pairs import Pairs
from task_images.harness.updates import Passes


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


class Batches(Protocol):
    """The updates of an epoch for one rank."""

    steps: int  # updates per epoch

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update]:
        """The updates of `epoch` (from 1) except the first `begin`."""
        ...

    def padding(self, epoch: int) -> float:
        """Share of padding in all source and target positions of that epoch, from 0 to 1."""
        ...


@dataclass(frozen=True)
class _Cut:
    """Splits a list of passes over ranks, for one rank."""

    pairs: Pairs
    passes: Passes
    ranks: int
    rank: int

    def updates(self, batches: Sequence[Indices], begin: int) -> Iterator[Update]:
        group = self.passes.number * self.ranks
        for start in range(begin * group, len(batches), group):
            whole = batches[start : start + group]
            own = shard(len(whole), self.ranks, self.rank)
            members = np.concatenate(whole)
            tokens = int(self.pairs.target.lengths[members].sum())
            yield Update(list(whole[own.start : own.stop]), own.start, len(members), tokens)

    def steps(self, batches: int) -> int:
        return -(-batches // (self.passes.number * self.ranks))

    def padding(self, batches: Sequence[Indices]) -> float:
        filled = positions = 0
        for members in batches:
            for side in (self.pairs.source, self.pairs.target):
                lengths = side.lengths[members]
                filled += int(lengths.sum())
                positions += len(members) * int(lengths.max())
        return 1 - filled / positions


class SentenceBatches:
    """Passes with the same number of sentences, in random order.

    reshuffle   True: all pairs are reshuffled every epoch. False: each rank keeps its part from the first shuffle and
                reshuffles only that, as in the original.
    """

    def __init__(self, pairs: Pairs, passes: Passes, ranks: int, rank: int, seed: int, reshuffle: bool = True) -> None:
        self._cut = _Cut(pairs, passes, ranks, rank)
        self._seed = seed
        self._reshuffle = reshuffle
        self.steps = self._cut.steps(-(-len(pairs) // passes.size))

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update]:
        """The updates of an epoch from number `begin` on."""
        return self._cut.updates(self._batches(epoch), begin)

    def padding(self, epoch: int) -> float:
        """Share of padding in all source and target positions of that epoch, from 0 to 1."""
        return self._cut.padding(self._batches(epoch))

    def _batches(self, epoch: int) -> list[Indices]:
        order = self._order(epoch)
        size = self._cut.passes.size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _order(self, epoch: int) -> Indices:
        count = len(self._cut.pairs)
        if self._reshuffle:
            return numpy_generator(self._seed, "sentences", epoch).permutation(count)
        once = numpy_generator(self._seed, "sentences").permutation(count)
        ranks, size = self._cut.ranks, self._cut.passes.size * self._cut.passes.number
        parts = [once[(part := shard(count, ranks, rank)).start : part.stop] for rank in range(ranks)]
        mixed = [numpy_generator(self._seed, "part", epoch, rank).permutation(part) for rank, part in enumerate(parts)]
        updates = -(-max(map(len, mixed)) // size)
        return np.concatenate([part[step * size : (step + 1) * size] for step in range(updates) for part in mixed])


class TokenBatches:
    """Passes of at most `passes.size` positions (sentences x longest side, rounded up) of similar length.

    Sentences are sorted by target, then source length, with ties in random order, and batched greedily; lengths are
    rounded up to multiples of 2 (of 8 while a batch has fewer than 4 sentences), and a full batch is cut to a multiple
    of 4 sentences, the rest of which go into the next one. Then the batches are shuffled. With `reshuffle` all this is
    repeated every epoch.
    """

    def __init__(self, pairs: Pairs, passes: Passes, ranks: int, rank: int, seed: int, reshuffle: bool = True) -> None:
        self._cut = _Cut(pairs, passes, ranks, rank)
        self._seed = seed
        self._reshuffle = reshuffle
        self.steps = self._cut.steps(len(self._batches(1)))

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update]:
        """The updates of an epoch from number `begin` on."""
        return self._cut.updates(self._batches(epoch), begin)

    def padding(self, epoch: int) -> float:
        """Share of padding in all source and target positions of that epoch, from 0 to 1."""
        return self._cut.padding(self._batches(epoch))

    def _batches(self, epoch: int) -> list[Indices]:
        generator = numpy_generator(self._seed, "tokens", epoch if self._reshuffle else 1)
        pairs = self._cut.pairs
        order = generator.permutation(len(pairs))
        order = order[np.lexsort((pairs.target.lengths[order], pairs.source.lengths[order]))]
        lengths = np.maximum(pairs.source.lengths, pairs.target.lengths)
        batches = fill_batches(order, lengths[order], self._cut.passes.size)
        return [batches[place] for place in generator.permutation(len(batches))]


def fill_batches(order: Indices, lengths: npt.NDArray[np.int64], budget: int, few: int = 4) -> list[Indices]:
    """Split `order` into runs; lengths[i] belongs to order[i]. Only a run of a single sentence may exceed `budget`."""
    batches = []
    start = 0
    while start < len(order):
        stop = _run_end(lengths, start, budget, few)
        batches.append(order[start:stop])
        start = stop
    return batches


def _run_end(lengths: npt.NDArray[np.int64], start: int, budget: int, few: int) -> int:
    # Every sentence takes at least 2 positions, so the run ends within this window.
    window = np.maximum.accumulate(lengths[start : start + budget // 2 + 1])
    counts = np.arange(1, len(window) + 1)
    padded = np.where(counts <= few, -(-window // 8) * 8, -(-window // 2) * 2)
    fits = counts * padded <= budget
    found = len(fits) if fits.all() else int(fits.argmin())
    if found > few:
        found -= found % few
    return start + max(1, found)
