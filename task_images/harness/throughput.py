"""The throughput protocol of all tasks: a warm-up, then blocks with the same number of updates, timed on every rank.

    meter = Throughput(world, Protocol(warmup=10, blocks=10, updates=10), unit="images")
    while not meter.is_over:
        ...                       # one update
        meter.after_update(images_of_all_ranks)

A preset `throughput` of any task sets `blocks`; `harness.loop` does the rest.

At each block boundary, ranks wait for their devices and for each other, so a block starts at the same time everywhere.
The rate of a block is the work of all ranks divided by the *longest* time of any rank. The times of all ranks go into
the result. The spread is mean +- 1.96 standard deviations of the blocks, as in the 2020 survey of communication
methods: it says how much blocks differ. The interval is Student's 95 % interval of the mean of the blocks.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from task_images.harness.ranks import Ranks
from task_images.harness.settings import Protocol

# Quantile 0.975 of Student's distribution with 1, 2, ... 30 degrees of freedom; beyond, the normal one is close.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL = 1.96


@dataclass(frozen=True)
class Summary:
    """Statistics of the rates of blocks, in units per second. `interval` is None for a single block."""

    mean: float
    deviation: float
    spread: float
    median: float
    interval: tuple[float, float] | None


def summarize(rates: Sequence[float]) -> Summary:
    """Mean, population standard deviation, 1.96 of it, median, and Student's 95 % interval of the mean."""
    mean, deviation = statistics.fmean(rates), statistics.pstdev(rates)
    interval = None
    if len(rates) > 1:
        quantile = STUDENT[len(rates) - 2] if len(rates) - 2 < len(STUDENT) else NORMAL
        margin = quantile * statistics.stdev(rates) / math.sqrt(len(rates))
        interval = (mean - margin, mean + margin)
    return Summary(mean, deviation, NORMAL * deviation, statistics.median(rates), interval)


@dataclass(frozen=True)
class Measurement:
    """The measurement of a run by the protocol. Rates are of all ranks together, in units per second.

    per_update          units of one update of all ranks, the mean over all blocks
    seconds             times per block, by rank
    peak_memory_bytes   maximum over ranks: allocated on the GPU, else resident in the process
    """

    protocol: Protocol
    unit: str
    per_update: float
    ranks: int
    seconds: tuple[tuple[float, ...], ...]
    rates: tuple[float, ...]
    summary: Summary
    peak_memory_bytes: int

    def __str__(self) -> str:
        found = self.summary
        return (
            f"throughput {found.mean:.1f} {self.unit}/s on {self.ranks} ranks, spread +- {found.spread:.1f}"
            f" (1.96 standard deviations of {len(self.rates)} blocks), median {found.median:.1f}"
        )


class Throughput:
    """The clock of one rank. `on_start` is called after the warm-up, for example to reset a tracker."""

    def __init__(
        self,
        world: Ranks,
        protocol: Protocol,
        *,
        unit: str,
        on_start: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._world, self._protocol, self._clock = world, protocol, clock
        self._unit = unit
        self._on_start = on_start
        self._begin = 0.0
        self._updates = 0
        self._seconds: list[float] = []
        self._amounts: list[float] = []
        self._amount = 0.0
        if not protocol.warmup:
            self._start()

    @property
    def is_over(self) -> bool:
        """Whether all blocks have been timed."""
        return len(self._seconds) == self._protocol.blocks

    def after_update(self, amount: float) -> bool:
        """Call after an update, in which all ranks trained on `amount` units. True after the last block."""
        self._updates += 1
        measured = self._updates - self._protocol.warmup
        if measured == 0:
            self._start()
        elif measured > 0 and not self.is_over:
            self._amount += amount
            if measured % self._protocol.updates == 0:
                self._end_block()
        return self.is_over

    def measurement(self) -> Measurement:
        """The times of all ranks and their statistics. Every rank must call it; two collectives."""
        rows = self._world.gather(self._seconds)
        by_block = tuple(tuple(column) for column in zip(*rows, strict=True))
        rates = tuple(amount / max(times) for amount, times in zip(self._amounts, by_block, strict=True))
        return Measurement(
            protocol=self._protocol,
            unit=self._unit,
            per_update=math.fsum(self._amounts) / (len(self._amounts) * self._protocol.updates),
            ranks=self._world.size,
            seconds=by_block,
            rates=rates,
            summary=summarize(rates),
            peak_memory_bytes=self._world.peak_memory(),
        )

    def _start(self) -> None:
        self._world.synchronize()
        if self._on_start is not None:
            self._on_start()
        self._meet()

    def _end_block(self) -> None:
        self._world.synchronize()
        self._seconds.append(self._clock() - self._begin)
        self._amounts.append(self._amount)
        self._amount = 0.0
        self._meet()

    def _meet(self) -> None:
        self._world.barrier()
        self._begin = self._clock()
