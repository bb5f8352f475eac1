"""Timing one size: the protocol of today, and that of the original benchmark for comparison with its figures."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from task_images.allreduce.pattern import Pattern
from task_images.harness.distributed import World
from task_images.harness.errors import TaskError
from task_images.harness.tracker import Tracker

FORMULA = "algbw = bytes / median; busbw = algbw * 2 (k - 1) / k; GB = 10^9 bytes; bytes = elements * size of one"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LEAST_SAMPLES = 3


@dataclass(frozen=True)
class Row:
    """One size. Seconds are over samples, each the maximum over ranks (legacy: rank 0's own, and only the mean)."""

    dtype: str
    elements: int
    bytes: int
    samples: int
    mean_seconds: float
    min_seconds: float | None = None
    median_seconds: float | None = None
    p95_seconds: float | None = None
    max_seconds: float | None = None
    algbw: float | None = None  # GB/s
    busbw: float | None = None  # GB/s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sizes(min_exponent: float, max_exponent: float, count: int, *, duplicates: bool = False) -> list[int]:
    """`count` numbers of elements, evenly spaced on a log scale from 10^min to 10^max and cut to integers, ascending.

    Cutting makes the smallest ones equal; they are measured once unless `duplicates`.
    """
    step = (max_exponent - min_exponent) / max(1, count - 1)
    # The tiny addition keeps 10^8, computed as 99999999.99, what it is.
    values = [int(10 ** (min_exponent + index * step) + 1e-6) for index in range(count)]
    return values if duplicates else sorted(set(values))


def measure(
    world: World, tracker: Tracker, elements: int, dtype: str, samples: int, warmup: int, seconds: float
) -> Row:
    """Time `samples` all-reduces (SUM, in place) of one buffer of `elements` numbers.

    Warm-up first; before every sample the buffer is refilled and all ranks meet at a barrier, outside the clock; the
    device is synchronised at both ends of it. A sample is the maximum over ranks. Fewer samples (LEAST_SAMPLES at
    least) where they would take longer than `seconds` (0: no limit). The last result is checked: TaskError if wrong.
    """
    pattern = Pattern(world.rank, world.size, DTYPES[dtype], world.device)
    buffer = torch.empty(elements, dtype=DTYPES[dtype], device=world.device)
    begin = time.perf_counter()
    time_samples(world, tracker, pattern, buffer, warmup)
    per_sample = world.max([(time.perf_counter() - begin) / max(1, warmup)])[0]
    if seconds:
        samples = max(LEAST_SAMPLES, min(samples, int(seconds / max(per_sample, 1e-9))))
    times = world.max(time_samples(world, tracker, pattern, buffer, samples))
    wrong = world.sum([pattern.wrong(buffer)])[0]
    if wrong:
        raise TaskError(f"the all-reduce of {elements} {dtype} numbers is wrong in {wrong:.0f} elements over all ranks")
    return _row(dtype, elements, buffer.element_size(), times, world.size)


def time_samples(world: World, tracker: Tracker, pattern: Pattern, buffer: torch.Tensor, samples: int) -> list[float]:
    """This rank's seconds for each of `samples` all-reduces of `buffer`. All of it is booked as communication: a border
    per sample would be felt in collectives of some hundred microseconds."""
    times = []
    on_device = world.device.type == "cuda"
    clock, all_reduce = time.perf_counter, world.all_reduce
    with tracker.section("communication"):
        for _ in range(samples):
            pattern.fill(buffer)
            world.barrier()
            if on_device:
                world.synchronize()
            begin = clock()
            all_reduce(buffer)
            if on_device:
                world.synchronize()
            times.append(clock() - begin)
    return times


def measure_as_original(world: World, tracker: Tracker, elements: int, dtype: str, samples: int) -> Row:
    """The original protocol: a new random tensor for every sample, made by each rank for itself; no warm-up, no
    barrier, the arithmetic mean of this rank's samples. So waiting for the slowest generator counts as communication.
    """
    times = []
    for _ in range(samples):
        with tracker.section("preprocessing"):
            tensor = torch.rand(elements).to(DTYPES[dtype]).to(world.device)
        with tracker.section("communication"):
            begin = time.perf_counter()
            world.all_reduce(tensor)
            world.synchronize()
            times.append(time.perf_counter() - begin)
    return Row(dtype, elements, elements * tensor.element_size(), samples, statistics.fmean(times))


def check_sum(world: World) -> None:
    """The original's only check: the sum of one 1 per rank is the number of ranks. Raises TaskError."""
    one = torch.ones(1, dtype=torch.int64, device=world.device)
    if int(world.all_reduce(one)) != world.size:
        raise TaskError(f"an all-reduce of ones over {world.size} ranks gives {int(one)}")


def _row(dtype: str, elements: int, element_size: int, times: Sequence[float], ranks: int) -> Row:
    ordered = sorted(times)
    median = statistics.median(ordered)
    moved = elements * element_size
    algbw = moved / median / 1e9
    return Row(
        dtype,
        elements,
        moved,
        len(times),
        mean_seconds=statistics.fmean(times),
        min_seconds=ordered[0],
        median_seconds=median,
        # Nearest rank, as nccl-tests does.
        p95_seconds=ordered[math.ceil(0.95 * len(ordered)) - 1],
        max_seconds=ordered[-1],
        algbw=algbw,
        busbw=algbw * 2 * (ranks - 1) / ranks,
    )
