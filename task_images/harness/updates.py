"""What a training loop asks of a task's data: an update is one or more passes, and its gradients' exact mean."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from task_images.harness.errors import TaskUsageError

P = TypeVar("P")


@dataclass(frozen=True)
class Update(Generic[P]):
    """The work of one update on one rank.

    passes        this rank's passes in their order; an iterator may load each when it is asked for
    count         number of them; the last update of an epoch may leave a rank without any
    weight        how much this rank's gradients count (see Strategy.begin): the samples that the loss is a mean of, or
                  1 if the loss is a sum
    total         the sum of all ranks' weights, or the number of terms of all ranks if losses are sums
    samples       samples of all ranks, for throughput and the result
    first         number of this rank's first pass among those of all ranks. Given, the generator of dropout is seeded
                  for every pass, so that masks do not depend on the rank that does it
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
    """The updates of one rank. All ranks get equally many."""

    def count(self, epoch: int) -> int:
        """Number of updates in `epoch` (from 1)."""
        ...

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[P]]:
        """The updates of `epoch` but for the first `begin`. Waiting for the next one is booked as data_wait."""
        ...


class SizedBatch(Protocol):
    """This rank's part of one step; all ranks have `total` samples in it."""

    @property
    def size(self) -> int:
        """How many samples this rank has in the step."""

    @property
    def total(self) -> int:
        """How many samples all ranks have."""


B = TypeVar("B", bound=SizedBatch)
T = TypeVar("T", bound=SizedBatch, covariant=True)


class TrainingData(Protocol[T]):
    """Training batches by epoch, equally many on all ranks."""

    steps: int

    def training(self, epoch: int) -> Iterable[T]:
        """The batches of `epoch` (from 1)."""
        ...


class SampleBatches(Generic[B]):
    """Data as batches: every batch is an update of one pass."""

    def __init__(self, data: TrainingData[B]) -> None:
        self._data = data

    def count(self, epoch: int) -> int:
        """How many updates an epoch has."""
        return self._data.steps

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[B]]:
        """The updates of an epoch from number `begin` on."""
        for number, batch in enumerate(self._data.training(epoch)):
            if number >= begin:
                yield Update([batch], 1, batch.size, batch.total, batch.total)


class Passes(NamedTuple):
    """`number` forward and backward passes per update and rank, each on `size` samples (or tokens)."""

    number: int
    size: int


def plan_passes(global_batch: int, largest: int, ranks: int) -> Passes:
    """How each of `ranks` ranks gets through its part of `global_batch` with at most `largest` per pass.

    Raises TaskUsageError if that does not come out even.
    """
    number = max(1, -(-global_batch // (largest * ranks)))
    size, rest = divmod(global_batch, ranks * number)
    if rest or not size:
        even = max(1, round(global_batch / (ranks * number))) * ranks * number
        raise TaskUsageError(
            f"a global batch of {global_batch} cannot be shared evenly by {ranks} ranks with {number} passes each",
            f"Take another number of workers, or for instance --set global_batch={even}.",
        )
    return Passes(number, size)
