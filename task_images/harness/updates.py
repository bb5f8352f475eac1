"""The interface of a task's data for training loops: an update has one or more passes, whose gradients are averaged
exactly."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from task_images.harness.errors import TaskUsageError

P = TypeVar("P")


@dataclass(frozen=True)
class Update(Generic[P]):
    """The work of one update on one rank.

    passes        this rank's passes in order; an iterator may load each on demand
    count         number of passes; may be 0 in the last update of an epoch
    weight        weight of this rank's gradients (see Method.begin): the number of samples if the loss is a mean, 1
                  if it is a sum
    total         the sum of all ranks' weights, or the number of terms of all ranks if losses are sums
    samples       samples of all ranks, for throughput and the result
    first         number of this rank's first pass among those of all ranks. If given, dropout's generator is seeded for
                  every pass, so that masks do not depend on the rank that computes it
    rate_factor   factor on the schedule's learning rate (shorter sequences learn more slowly)
    """

    passes: Iterable[P]
    count: int
    weight: float
    total: float
    samples: int
    first: int | None = None
    rate_factor: float = 1.0


class Batches(Protocol[P]):
    """The updates of one rank. All ranks get the same number."""

    def count(self, epoch: int) -> int:
        """Number of updates in `epoch` (from 1)."""
        ...

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[P]]:
        """The updates of `epoch` except the first `begin`. Waiting for the next one counts as data_wait."""
        ...


class SizedBatch(Protocol):
    """This rank's part of one step; all ranks have `total` samples in it."""

    @property
    def size(self) -> int:
        """Number of samples of this rank in the step."""

    @property
    def total(self) -> int:
        """Number of samples of all ranks."""


B = TypeVar("B", bound=SizedBatch)
T = TypeVar("T", bound=SizedBatch, covariant=True)


class TrainingData(Protocol[T]):
    """Training batches by epoch, the same number on all ranks."""

    steps: int

    def training(self, epoch: int) -> Iterable[T]:
        """The batches of `epoch` (from 1)."""
        ...


class SampleBatches(Generic[B]):
    """Batches as updates of one pass each."""

    def __init__(self, data: TrainingData[B]) -> None:
        self._data = data

    def count(self, epoch: int) -> int:
        """Number of updates in an epoch."""
        return self._data.steps

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[B]]:
        """The updates of an epoch, starting with number `begin`."""
        for number, batch in enumerate(self._data.training(epoch)):
            if number >= begin:
                yield Update([batch], 1, batch.size, batch.total, batch.total)


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
