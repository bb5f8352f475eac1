"""Time by category: the clock is always in exactly one category, so the categories add up to the wall time.

    tracker = Tracker(world.device)
    tracker.restart()
    for batch in tracker.steps(loader):
        tracker.enter("forward")
        ...
        tracker.end_step(batch.total)

Boundaries between categories are noted, and summed a few hundred at a time. On a GPU they are events in its queue: work
counts for the category that launched it, and waiting for data only while the device was idle. The host waits for the
device once per SUM_EVERY boundaries and at every snapshot.

Time in no other category is `other`. Nothing inside `validation` enters another one, because a forward pass there is
not training.

Methods that send messages inside a phase say so by `mix`: that phase counts as, for example,
backward_and_communication, and there is no communication of its own.

`Throughput` measures in timed blocks instead.
"""

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from task_images.contract import ALL_CATEGORIES, CATEGORIES, MIXED_CATEGORIES
from task_images.parameters import ThroughputProtocol
from task_images.world import World

_OUTSIDE_TRAINING = frozenset({"data_wait", "validation"})

Item = TypeVar("Item")

SUM_EVERY = 256  # boundaries: about 25 steps
SPREAD = 1.96


@dataclass(frozen=True)
class Snapshot:
    """The tracker's figures at one moment. All times in seconds since `restart`.

    seconds     category -> seconds; their sum is `wall`
    training    time inside steps, without data_wait and validation
    updates     steps that updated the model
    samples     samples trained on, all ranks together
    epoch       current epoch, from 1; 0 before training
    """

    seconds: dict[str, float]
    wall: float
    training: float
    updates: int
    samples: int
    epoch: int


class Tracker:
    """Measures one rank, by events of its GPU or the host's clock. Not thread-safe."""

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._gpu = device if device is not None and device.type == "cuda" else None
        # A moment is a time of the host's clock, or an event behind all work launched so far.
        self._now: Callable[[], Any] = clock if self._gpu is None else partial(_record, self._gpu)
        self._boundaries: list[tuple[Any, str, bool]] = []  # moment, category before it, whether that was training
        self._counted = {name: name for name in CATEGORIES}  # as entered -> as counted
        self._category, self._in_step = "other", False
        self.restart()

    def restart(self, earlier: Snapshot | None = None) -> None:
        """Start the clock at zero, or at `earlier`, the snapshot of the resumed run."""
        self._seconds = self._zeros()
        self._seconds |= {name: value for name, value in (earlier.seconds if earlier else {}).items() if value}
        self._training = earlier.training if earlier else 0.0
        self.updates = earlier.updates if earlier else 0
        self.samples = earlier.samples if earlier else 0
        self.epoch = earlier.epoch if earlier else 0
        self._wall = earlier.wall if earlier else 0.0
        self._start_anew()

    def mix(self, phases: Collection[str]) -> None:
        """Count `phases` as mixed with communication from now on: its messages are sent inside them."""
        if phases:
            self._sum()
            self._counted |= {name: MIXED_CATEGORIES[name] for name in phases} | {"communication": "other"}
            self._seconds = self._zeros() | {name: value for name, value in self._seconds.items() if value}

    def _zeros(self) -> dict[str, float]:
        return dict.fromkeys(self._counted.values(), 0.0)

    def enter(self, category: str) -> str:
        """Count the time from now on as `category`, one of contract.CATEGORIES (else KeyError). Returns the one before,
        for whoever interrupts it."""
        self._counted[category]  # fails for another word now, not at the next boundary
        before, self._category = self._category, category
        self._note(before)
        return before

    def steps(self, items: Iterable[Item]) -> Iterator[Item]:
        """Like `waiting`; with each item a training step begins."""
        for item in self.waiting(items):
            self._in_step = True
            yield item

    def end_step(self, samples: int = 0, updates: int = 1) -> None:
        """End a step on `samples` samples of all ranks, which made so many updates."""
        self.enter("other")
        self._in_step = False
        self.updates += updates
        self.samples += samples

    def waiting(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items`, counting the time spent waiting for each as data_wait."""
        iterator = iter(items)
        while True:
            before = self.enter("data_wait")
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.enter(before)
            yield item

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block's time. If ranks may wait for each other in it, use a barrier before, or their waiting is
        excluded, too."""
        self.snapshot()
        try:
            yield
        finally:
            self._start_anew()

    def snapshot(self) -> Snapshot:
        """The figures so far. The clock continues."""
        self._note(self._category)
        self._sum()
        return Snapshot(dict(self._seconds), self._wall, self._training, self.updates, self.samples, self.epoch)

    def _start_anew(self) -> None:
        self._boundaries.clear()
        self._last = self._now()

    def _note(self, category: str) -> None:
        """A boundary: the time since the last one belongs to `category`."""
        is_training = self._in_step and category not in _OUTSIDE_TRAINING
        self._boundaries.append((self._now(), self._counted[category], is_training))
        if len(self._boundaries) >= SUM_EVERY:
            self._sum()

    def _sum(self) -> None:
        """Add up the time between all noted boundaries; on a GPU with a single wait."""
        if self._gpu is not None and self._boundaries:
            self._boundaries[-1][0].synchronize()
        for moment, category, is_training in self._boundaries:
            seconds = moment - self._last if self._gpu is None else self._last.elapsed_time(moment) / 1e3
            self._seconds[category] += seconds
            self._wall += seconds
            self._training += seconds if is_training else 0.0
            self._last = moment
        self._boundaries.clear()


def _record(gpu: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(gpu))
    return event


def gather_timings(world: World, snapshot: Snapshot) -> dict[str, dict[str, float]]:
    """category -> {min, mean, max, rank0} in seconds over all ranks. Every rank must call it; one collective."""
    rows = world.gather([snapshot.seconds.get(name, 0.0) for name in ALL_CATEGORIES])
    columns = zip(*rows, strict=True)
    return {
        name: {"min": min(column), "mean": sum(column) / len(column), "max": max(column), "rank0": column[0]}
        for name, column in zip(ALL_CATEGORIES, columns, strict=True)
        if name in snapshot.seconds
    }


@dataclass(frozen=True)
class Summary:
    """Statistics of the rates of blocks, in units per second; `spread` is 1.96 population standard deviations."""

    mean: float
    median: float
    spread: float


@dataclass(frozen=True)
class Measurement:
    """The measurement of a run by the protocol. Rates are of all ranks together, in units per second.

    per_update          units of one update of all ranks, the mean over all blocks
    seconds             times per block, by rank
    peak_memory_bytes   maximum over ranks: allocated on the GPU, else resident in the process
    """

    protocol: ThroughputProtocol
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
    """The throughput protocol of all tasks: a warm-up, then blocks with the same number of updates. A preset
    `throughput` of any task sets `blocks`; `train` does the rest.

    At each block boundary, ranks wait for their devices and for each other, so a block starts at the same time
    everywhere. The rate of a block is the work of all ranks divided by the *longest* time of any rank. The times of all
    ranks go into the result. The spread is mean +- 1.96 standard deviations of the blocks, as in the 2020 survey of
    communication methods: it says how much blocks differ.

    `on_start` is called after the warm-up, for example to reset a tracker.
    """

    def __init__(
        self,
        world: World,
        protocol: ThroughputProtocol,
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
            summary=Summary(statistics.fmean(rates), statistics.median(rates), SPREAD * statistics.pstdev(rates)),
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


LOOK_EVERY = 25  # most updates between two looks at the clock


class ClockLook:
    """Watches for a moment on rank 0's clock with few collectives: more often near the end, so that it is noticed
    within an update or two."""

    def __init__(self) -> None:
        self._next, self._last = 0, (0.0, 0)

    def is_past(self, total: int, read_left: Callable[[], float]) -> bool:
        """Whether the moment is past after update `total`. `read_left`: seconds until then, the same on all ranks."""
        if total < self._next:
            return False
        left, (before, updates) = read_left(), self._last
        each = (before - left) / max(1, total - updates)
        ahead = left / 2 / each if each > 0 else 1  # it is the first look, or the moment has been put off
        self._last, self._next = (left, total), total + max(1, int(min(LOOK_EVERY, ahead)))
        return left <= 0
