"""Timing one size: the protocol of today, and that of the original benchmark for comparison with its figures."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from task_images.allreduce import tensorflow_operations
from task_images.allreduce.operations import COLLECTIVES, DTYPES, IN_PLACE, Buffers, Call
from task_images.clock import Tracker
from task_images.contract import WrongResultError
from task_images.world import TENSORFLOW, World

CLOCK = (
    "before every sample the buffers are refilled and all ranks meet at a barrier, outside the clock; a sample is the "
    "maximum over ranks of the time from a rank's call to its return (on GPUs: until the device is done)"
)
BANDWIDTH = "algbw = S / p50, GB = 10^9 bytes"
MIN_SAMPLES = 3
# A percentile of fewer samples would be their maximum.
LEAST_FOR_P95, LEAST_FOR_P99 = 20, 100
_WARMUP_SHARE = 0.25  # of a size's time budget that warming up may take


@dataclass(frozen=True)
class Row:
    """One size. Microseconds over samples, percentiles by nearest rank (p50: the median), bandwidths in GB/s.

    `bytes` is S, the larger side, and `elements` its numbers. p95 and p99 need 20 and 100 samples. `rank_p50_min_us`
    and `rank_p50_max_us` are the least and the greatest median of a single rank's own times: how far ranks are apart.
    The legacy protocol knows only the mean of rank 0, from which its bandwidths are.
    """

    collective: str
    dtype: str
    place: str
    bytes: int
    elements: int
    samples: int
    min_us: float | None
    mean_us: float
    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    max_us: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    rank_p50_min_us: float | None = None
    rank_p50_max_us: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row as the result event has it."""
        return asdict(self)


COLUMNS = tuple(item.name for item in fields(Row))


@dataclass(frozen=True)
class Series:
    """What is measured over sizes."""

    collective: str
    dtype: str
    place: str

    def __str__(self) -> str:
        return f"{self.collective}, {self.dtype}, {self.place.replace('_', ' ')}"


def measure(
    world: World,
    tracker: Tracker,
    buffers: Buffers,
    series: Series,
    elements: int,
    samples: int,
    warmup: int,
    seconds: float,
) -> Row:
    """Time `samples` calls on buffers of `elements` numbers.

    Fewer samples (MIN_SAMPLES at least) and warm-ups (one at least) if they would take longer than `seconds` (0: no
    limit). The results of one call before and of the last call are checked: WrongResultError if one is wrong.
    MemoryError on every rank if one has no room.
    """
    call = make(world, buffers, series, elements)
    first = world.max([_wall(world, tracker, call, 1)])[0]
    check(world, series, elements, call)
    if seconds:
        warmup = min(warmup, 1 + int(_WARMUP_SHARE * seconds / max(first, 1e-9)))
    per_sample = first
    if warmup > 1:
        per_sample = world.max([_wall(world, tracker, call, warmup - 1) / (warmup - 1)])[0]
    if seconds:
        samples = max(MIN_SAMPLES, min(samples, int(seconds / max(per_sample, 1e-9))))
    own = time_samples(world, tracker, call, samples)
    check(world, series, elements, call)
    medians = [row[0] for row in world.gather([statistics.median(own)]) if row[0]]
    row = _row(series, elements, buffers.element_size, world.max(own), world.size)
    return replace(
        row,
        rank_p50_min_us=1e6 * min(medians, default=0.0),
        rank_p50_max_us=1e6 * max(medians, default=0.0),
    )


def make(world: World, buffers: Buffers, series: Series, elements: int) -> Call:
    """The call with its buffers. MemoryError on every rank if one has no room for them."""
    call = None
    try:
        if world.backend == TENSORFLOW:
            call = tensorflow_operations.make(series.collective, buffers, elements, series.place)
        else:
            call = COLLECTIVES[series.collective].make(buffers, elements, series.place)
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator's error has no class
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
    if world.max([call is None])[0] or call is None:
        raise MemoryError
    return call


def time_samples(world: World, tracker: Tracker, call: Call, samples: int) -> list[float]:
    """This rank's seconds for each of `samples` calls, 0 if its clock does not count. All of it is booked as
    communication: a border per sample would be felt in collectives of some hundred microseconds."""
    times = []
    on_device = world.device.type == "cuda"
    clock, fill, barrier, timed = time.perf_counter, call.fill, world.barrier, call.call
    tracker.enter("communication")
    for _ in range(samples):
        fill()
        barrier()
        if on_device:
            world.synchronize()
        begin = clock()
        timed()
        if on_device:
            world.synchronize()
        times.append(clock() - begin)
    tracker.enter("other")
    return [one / call.trips if call.counts else 0.0 for one in times]


def check(world: World, series: Series, elements: int, call: Call) -> None:
    """Raises WrongResultError on every rank if the last result is wrong on one."""
    wrong = world.gather([call.wrong()])
    bad = {rank: int(count) for rank, [count] in enumerate(wrong) if count}
    if bad:
        ranks = ", ".join(f"{count} on rank {rank}" for rank, count in list(bad.items())[:8])
        raise WrongResultError(
            f"{series} of {elements} numbers gave a wrong result: wrong elements: {ranks}",
            "Do not trust this backend's figures until the cause is known.",
        )


def measure_as_original(world: World, tracker: Tracker, elements: int, dtype: str, samples: int) -> Row:
    """The original protocol: a new random tensor for every sample, made by each rank for itself; no warm-up, no
    barrier, the arithmetic mean of this rank's samples. So waiting for the slowest generator counts as communication.
    """
    times = []
    for _ in range(samples):
        tracker.enter("preprocessing")
        tensor = torch.rand(elements).to(DTYPES[dtype]).to(world.device)
        tracker.enter("communication")
        begin = time.perf_counter()
        world.all_reduce(tensor)
        world.synchronize()
        times.append(time.perf_counter() - begin)
        tracker.enter("other")
    mean, moved = 1e6 * statistics.fmean(times), elements * tensor.element_size()
    bandwidth = moved / mean / 1e3, moved / mean / 1e3 * COLLECTIVES["all_reduce"].factor(world.size)
    return Row("all_reduce", dtype, IN_PLACE, moved, elements, samples, None, mean, None, None, None, None, *bandwidth)


def check_sum(world: World) -> None:
    """The original's only check: the sum of one 1 per rank is the number of ranks. Raises WrongResultError."""
    one = torch.ones(1, dtype=torch.int64, device=world.device)
    if int(world.all_reduce(one)) != world.size:
        raise WrongResultError(f"an all-reduce of ones over {world.size} ranks gives {int(one)}")


def _wall(world: World, tracker: Tracker, call: Call, samples: int) -> float:
    begin = time.perf_counter()
    time_samples(world, tracker, call, samples)
    return time.perf_counter() - begin


def _row(series: Series, elements: int, element_size: int, times: Sequence[float], ranks: int) -> Row:
    ordered = sorted(1e6 * one for one in times)
    median, moved = statistics.median(ordered), elements * element_size
    algbw = moved / median / 1e3
    return Row(
        series.collective,
        series.dtype,
        series.place,
        moved,
        elements,
        len(ordered),
        min_us=ordered[0],
        mean_us=statistics.fmean(ordered),
        p50_us=median,
        p95_us=_percentile(ordered, 0.95) if len(ordered) >= LEAST_FOR_P95 else None,
        p99_us=_percentile(ordered, 0.99) if len(ordered) >= LEAST_FOR_P99 else None,
        max_us=ordered[-1],
        algbw=algbw,
        busbw=algbw * COLLECTIVES[series.collective].factor(ranks),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank, as nccl-tests does."""
    return ordered[math.ceil(share * len(ordered)) - 1]
