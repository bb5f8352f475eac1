"""Collectives over a range of sizes and data types, with a time budget; no goal, outcome `completed`.

A size is timed by the protocol of today (`measure`), or by that of the original benchmark for comparison with its
figures (`measure_as_original`).
"""

import csv
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from task_images.allreduce.operations import (
    COLLECTIVES,
    DTYPES,
    IN_PLACE,
    PLACES,
    Buffers,
    Call,
    make_call,
    make_tensorflow_call,
)
from task_images.clock import Tracker
from task_images.contract import Contract, TaskUsageError, WrongResultError, emit
from task_images.parameters import Task, parameter, read_parameters
from task_images.report import Reporter
from task_images.run import tells_of_lost_peer
from task_images.world import TENSORFLOW, World, open_world


@dataclass(frozen=True)
class Settings:
    """Parameters of the task, with the preset `spec` as defaults."""

    collectives: list[str] = parameter(
        ["all_reduce"],
        "what is measured",
        choices=tuple(COLLECTIVES),
    )
    dtypes: list[str] = parameter(["fp32", "fp16"], "data types", choices=tuple(DTYPES))
    places: list[str] = parameter(
        ["in_place"],
        "in place or out of place; collectives with only one form use that",
        choices=PLACES,
    )
    sizes: list[int] = parameter(
        [], "bytes of the larger side, e.g. 8B:64MiB:x2 or 4KiB,1MiB; empty: use the exponents", kind="sizes"
    )
    min_exponent: float = parameter(0.0, "the smallest buffer has 10 to this power elements", min=0, max=10)
    max_exponent: float = parameter(8.0, "the largest buffer has 10 to this power elements", min=0, max=10)
    count: int = parameter(
        80, "number of sizes, evenly spaced on a log scale; duplicates are measured once", min=1, max=10000
    )
    samples: int = parameter(100, "calls per size and data type", min=3, max=1000000)
    warmup: int = parameter(5, "calls before the first sample of a size", min=1, max=100000)
    seconds_per_size: float = parameter(0.0, "fewer samples if a size would take longer; 0: no limit", min=0, max=86400)
    seconds_total: float = parameter(0.0, "skip larger sizes after this time; 0: no limit", min=0, max=864000)
    protocol: str = parameter(
        "current",
        "legacy: the original's, fresh random numbers per sample and only the mean",
        choices=("current", "legacy"),
    )


TASK = Task(
    settings=Settings,
    number="0a",
    title="All-reduce of 1 to 100 million numbers, other collectives by parameter",
    legacy_name="PyTorch Distributed Backend benchmarking",
    backends=["gloo", "nccl", "mpi", "grpc"],
    measured_on=["CPU"],
    data="generated buffers with a known sum",
    notes=[
        "S: the larger side in bytes, k: number of ranks, algbw = S / p50; sides and factors as in nccl-tests",
        "(ping_pong and bidirectional as in the OSU benchmarks):",
        *(f"  {name:<15} S = {kind.size:<41} busbw = {kind.formula}" for name, kind in COLLECTIVES.items()),
        "Ping-pong and bidirectional: rank r with rank r + k/2, all pairs at once. Each sample is the time of "
        "the slowest rank.",
        "torch supports all_reduce, broadcast and reduce only in place; out_of_place copies the input before "
        "the clock starts.",
        "backend grpc (extra tensorflow, CPUs): TensorFlow's all-reduce and all-gather, out of place only.",
        "spec takes all 100 samples of each size, however long they take; capped gives up a size after a minute.",
    ],
    presets={
        "legacy": {
            "protocol": "legacy",
        },
        # Not comparable with spec where a limit was met: large sizes have fewer samples.
        "capped": {
            "seconds_per_size": 60.0,
            "seconds_total": 3600.0,
        },
        "collectives": {
            "collectives": ["all"],
            "dtypes": ["fp32"],
            "places": ["all"],
            "sizes": "8B:64MiB:x2",
            "seconds_per_size": 10.0,
            "seconds_total": 1200.0,
        },
        "tiny": {
            "max_exponent": 5.0,
            "count": 6,
            "samples": 10,
            "warmup": 2,
            "seconds_per_size": 1.0,
            "seconds_total": 20.0,
        },
    },
)


CLOCK = (
    "before every sample the buffers are refilled and all ranks meet at a barrier, outside the clock; a sample is the "
    "maximum over ranks of the time from a rank's call to its return (on GPUs: until the device is done)"
)
BANDWIDTH = "algbw = S / p50, GB = 10^9 bytes"
MIN_SAMPLES = 3
LEAST_SIZES = 3  # of a fit
# A percentile of fewer samples would be their maximum.
LEAST_FOR_P95, LEAST_FOR_P99 = 20, 100
_WARMUP_SHARE = 0.25  # of a size's time budget that warming up may take
# The original measured MPI in single precision only. Today halves are converted, and the result says so.
ONLY_FP32 = ("mpi",)


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


COLUMNS = tuple(item.name for item in fields(Row))


@dataclass(frozen=True)
class Series:
    """What is measured over sizes."""

    collective: str
    dtype: str
    place: str

    def __str__(self) -> str:
        return f"{self.collective}, {self.dtype}, {self.place.replace('_', ' ')}"


@dataclass
class Measured:
    """A series on its way from small to large: `elements` are its sizes, of which as many are done as there are rows.

    `why` says why it ends before the last.
    """

    series: Series
    elements: list[int]
    element_size: int
    rows: list[Row] = field(default_factory=list)
    why: str = ""
    fit: "Fit | None" = None

    @property
    def left_out(self) -> list[int]:
        """Sizes in bytes."""
        return [count * self.element_size for count in self.elements[len(self.rows) :]]

    @property
    def peak(self) -> Row | None:
        """The size with the greatest bus bandwidth; None if nothing was measured."""
        return max(self.rows, key=lambda row: row.busbw or 0.0, default=None)

    @property
    def next_seconds(self) -> float:
        """The least that the next size takes, judged by the one before; filling the buffers doubles it."""
        if not self.rows or self.rows[-1].p50_us is None:
            return 0.0
        growth = self.elements[len(self.rows)] / self.rows[-1].elements
        return 2e-6 * self.rows[-1].p50_us * growth * (1 + MIN_SAMPLES)

    def to_dict(self, samples: int) -> dict[str, Any]:
        """The series in short, as the result event has it; `samples` are those asked for."""
        peak = self.peak
        return {
            "collective": self.series.collective,
            "dtype": self.series.dtype,
            "place": self.series.place,
            "sizes": len(self.rows),
            "shortened": sum(row.samples < samples for row in self.rows),
            "left_out": {"bytes": self.left_out, "why": self.why} if self.left_out else None,
            "peak_busbw": peak.busbw if peak else None,
            "peak_bytes": peak.bytes if peak else None,
            "fit": self.fit._asdict() if self.fit else None,
        }


def main(contract: Contract) -> None:
    """Measure every series from small to large within the budget, check and report each size.

    Raises TaskUsageError for settings that do not go together.
    """
    settings = read_parameters(Settings, contract.parameters)
    _check(settings)
    world = open_world(contract, grouped_alone=True)
    # No data set is stood in for: the buffers are what is measured.
    report = Reporter(world, data="buffers with a known pattern", synthetic=False)
    report.environment()
    tracker = Tracker(world.device)
    world.barrier()
    tracker.restart()
    if settings.protocol == "legacy":
        measured, refused = _all_as_original(world, tracker, report, settings)
    else:
        measured, refused = _all(world, tracker, report, settings)

    rows = [asdict(row) for one in measured for row in one.rows]
    details = {
        "protocol": settings.protocol,
        "ranks": world.size,
        "clock": CLOCK if settings.protocol == "current" else "times of rank 0, mean only",
        "formulas": _formulas({one.series.collective for one in measured}),
        "series": [one.to_dict(settings.samples) for one in measured],
        "not_supported": [{"series": str(series), "why": why} for series, why in refused.items()],
        "rows": f"results/collectives.csv and .json of the output folder, {len(rows)} lines",
    }
    if world.is_first:
        facts = world.backend_facts()
        _write(Path(contract.output_dir) / "results", {**details, "backend": facts, "rows": rows})
        if settings.protocol == "current":
            _conclude(report, measured, refused, facts)
    report.phase("finished")
    report.result(tracker, details=details)
    world.close()


def _check(settings: Settings) -> None:
    for asked, what in (
        (settings.collectives, "collective"),
        (settings.dtypes, "data type"),
        (settings.places, "place"),
    ):
        if not asked:
            raise TaskUsageError(f"no {what} is given", "mlbench tasks allreduce lists them.")
    if not all(isinstance(size, int) and size > 0 for size in settings.sizes):
        raise TaskUsageError("sizes are whole numbers of bytes, above 0")
    if settings.protocol == "legacy" and (settings.collectives, settings.places) != (["all_reduce"], [IN_PLACE]):
        raise TaskUsageError("the protocol legacy supports only the all-reduce, in place", "Leave out --preset legacy.")


# --- measuring ------------------------------------------------------------------------------------------------------


def _all(
    world: World, tracker: Tracker, report: Reporter, settings: Settings
) -> tuple[list[Measured], dict[Series, str]]:
    """Every series that the backend can do, and why the others cannot be. Each size is measured for all series before
    the next one, so that what a machine does in the meantime meets them alike, and a budget costs the largest sizes.
    """
    asked = []  # in the order of the tables here; a collective that has but one form is measured in that
    for collective in (name for name in COLLECTIVES if name in settings.collectives):
        forms = COLLECTIVES[collective].places
        places = [place for place in PLACES if place in settings.places and place in forms] or list(forms)
        asked += [Series(collective, dtype, place) for dtype in DTYPES if dtype in settings.dtypes for place in places]
    refused = {series: why for series in asked if (why := _refusal(world, tracker, series))}
    if len(refused) == len(asked):
        first, why = next(iter(refused.items()))
        raise TaskUsageError(f"the backend {world.backend} supports none of the requested measurements; {first}: {why}")
    buffers = {dtype: Buffers.of(world, dtype) for dtype in settings.dtypes}
    measured = [
        Measured(
            series, _elements(settings, series, buffers[series.dtype], world.size), buffers[series.dtype].element_size
        )
        for series in asked
        if series not in refused
    ]
    steps = max(len(one.elements) for one in measured)
    for step in range(steps):
        for one in measured:
            if one.why or step >= len(one.elements):
                continue
            report.step(step + 1, steps, series=str(one.series))
            _next_size(world, tracker, report, settings, one, buffers[one.series.dtype])
    for one in measured:
        one.fit = fit([row.bytes for row in one.rows], [row.p50_us or 0 for row in one.rows])
    return measured, refused


def _refusal(world: World, tracker: Tracker, series: Series) -> str:
    """Why the backend cannot do it, found out with a few numbers; empty if it can. TaskError for a wrong result."""
    if COLLECTIVES[series.collective].is_pair and world.size < 2:
        return "it takes 2 ranks"
    if COLLECTIVES[series.collective].is_pair and world.is_gloo_on_gpu:
        return "gloo does not send GPU tensors from rank to rank"
    elements, why, call = 4 * world.size, "", None
    try:
        call = make(world, Buffers.of(world, series.dtype), series, elements)
        time_samples(world, tracker, call, 1)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        if tells_of_lost_peer(error):
            raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
    failed = [rank for rank, [bad] in enumerate(world.gather([bool(why)])) if bad]
    if failed or call is None:
        return why or f"rank {failed[0]} could not"
    check(world, series, elements, call)
    return ""


def _elements(settings: Settings, series: Series, buffers: Buffers, ranks: int) -> list[int]:
    numbers = (
        from_bytes(settings.sizes, buffers.element_size)
        if settings.sizes
        else grid(settings.min_exponent, settings.max_exponent, settings.count)
    )
    return in_parts(numbers, ranks) if COLLECTIVES[series.collective].divided else numbers


def _next_size(
    world: World, tracker: Tracker, report: Reporter, settings: Settings, one: Measured, buffers: Buffers
) -> None:
    """One more row, or the reason why there is none."""
    # Rank 0's clock decides for all, lest one rank stop while another waits for it.
    spent = world.agree(tracker.snapshot().wall)
    if settings.seconds_total and spent + one.next_seconds > settings.seconds_total:
        one.why = f"the time budget of {settings.seconds_total:g} s is spent"
        return
    elements = one.elements[len(one.rows)]
    limits = (settings.samples, settings.warmup, settings.seconds_per_size)
    try:
        row = measure(world, tracker, buffers, one.series, elements, *limits)
    except MemoryError:
        one.why = "no memory for larger buffers"
        return
    one.rows.append(row)
    _report(report, one.series, row)


def _report(report: Reporter, series: Series, row: Row) -> None:
    name = f"{row.collective}_{row.dtype}" + ("" if row.place == IN_PLACE else f"_{row.place}")
    assert row.p50_us is not None
    assert row.busbw is not None
    report.metric(f"{name}_p50", row.p50_us, step=row.bytes, unit="us")
    report.metric(f"{name}_busbw", row.busbw, step=row.bytes, unit="GB/s")
    report.say(f"{format_size(row.bytes):>9}  {series}: {row.p50_us:.1f} us, busbw {row.busbw:.3g} GB/s")


def _all_as_original(
    world: World, tracker: Tracker, report: Reporter, settings: Settings
) -> tuple[list[Measured], dict[Series, str]]:
    asked = [name for name in DTYPES if name in settings.dtypes]
    dtypes = [name for name in asked if name == "fp32" or world.backend not in ONLY_FP32]
    if not dtypes:
        raise TaskUsageError(
            f"the original supports none of the types {', '.join(settings.dtypes)} with {world.backend}"
        )
    check_sum(world)
    elements = grid(settings.min_exponent, settings.max_exponent, settings.count, duplicates=True)
    rows = []
    for step, size in enumerate(elements, 1):
        for dtype in dtypes:
            report.step(step, len(elements))
            row = measure_as_original(world, tracker, size, dtype, settings.samples)
            rows.append(row)
            # Four points by every rank, under the original's names and to be read side by side.
            points: dict[str, float] = {"tensor_size": size, "dtype": 32 if dtype == "fp32" else 16}
            points |= {"cuda": int(world.device.type == "cuda"), "avg_time": 1e-6 * row.mean_us}
            for name, value in points.items():
                emit("metric", world.rank, name=f"val_{name}", value=value)
            report.say(f"{dtype}  {size:>11} elements  mean {row.mean_us:10.1f} us")
    series = {dtype: Series("all_reduce", dtype, IN_PLACE) for dtype in asked}
    measured = [
        Measured(series[dtype], elements, DTYPES[dtype].itemsize, [row for row in rows if row.dtype == dtype])
        for dtype in dtypes
    ]
    why = f"the original measured {world.backend} only in single precision"
    return measured, {series[dtype]: why for dtype in asked if dtype not in dtypes}


# --- one size ---


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
        make_one = make_tensorflow_call if world.backend == TENSORFLOW else make_call
        call = make_one(series.collective, buffers, elements, series.place)
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


def grid(min_exponent: float, max_exponent: float, count: int, *, duplicates: bool = False) -> list[int]:
    """`count` numbers of elements, evenly spaced on a log scale from 10^min to 10^max and cut to integers, ascending.

    Cutting makes the smallest ones equal; they are measured once unless `duplicates`.
    """
    step = (max_exponent - min_exponent) / max(1, count - 1)
    # The tiny addition keeps 10^8, computed as 99999999.99, what it is.
    values = [int(10 ** (min_exponent + index * step) + 1e-6) for index in range(count)]
    return values if duplicates else sorted(set(values))


def from_bytes(sizes: Iterable[int], element_size: int) -> list[int]:
    """Numbers of elements for sizes in bytes, one at least, ascending and each once."""
    return sorted({max(1, size // element_size) for size in sizes})


def in_parts(elements: Iterable[int], ranks: int) -> list[int]:
    """The nearest numbers below that `ranks` equal parts make up (one element in each at least)."""
    return sorted({max(1, number // ranks) * ranks for number in elements})


# --- telling --------------------------------------------------------------------------------------------------------


def _formulas(collectives: set[str]) -> dict[str, object]:
    return {
        "bandwidth": BANDWIDTH,
        "fit": "t = alpha + S * beta by relative least squares",
        **{name: {"S": kind.size, "busbw": kind.formula} for name, kind in COLLECTIVES.items() if name in collectives},
    }


def _conclude(
    report: Reporter,
    measured: Sequence[Measured],
    refused: dict[Series, str],
    facts: dict[str, Any],
) -> None:
    """What the lines of sizes do not say."""
    for one in measured:
        if one.left_out:
            report.say(f"{one.series}: left out: {', '.join(map(format_size, one.left_out))}: {one.why}")
    for series, why in refused.items():
        report.say(f"not supported: {series}: {why}")
    for detour in facts.get("detours", ()):
        report.say(f"done by the backend: {detour}")
    report.say(f"{CLOCK}; {BANDWIDTH}")


def _write(folder: Path, document: dict[str, Any]) -> None:
    """collectives.csv, a line per size and series, and collectives.json, the same with everything around it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "collectives.json").write_text(json.dumps(document, indent=1) + "\n")
    with open(folder / "collectives.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(document["rows"])


class Fit(NamedTuple):
    """Latency and bandwidth: t = alpha + S * beta, alpha in microseconds; beta as bandwidth in GB/s, None if no size
    was large enough to tell it from nothing.

    `off_mean` says how far measured times are from the line, as a share of it, root of the mean square over sizes: a
    collective that changes its algorithm with the size is no straight line.
    """

    alpha_us: float
    algbw: float | None
    off_mean: float


def fit(sizes: Sequence[int], times: Sequence[float]) -> Fit | None:
    """The line through `times` (microseconds) over `sizes` (bytes). None with fewer than LEAST_SIZES different sizes.

    Residuals are relative, so that a microsecond counts as much at a small size as a millisecond at a large one;
    neither alpha nor beta is negative.
    """
    if len(set(sizes)) < LEAST_SIZES or min(times) <= 0:
        return None
    x, y = np.array(sizes, float), np.array(times, float)
    (beta, alpha), errors = np.polyfit(x, y, 1, w=1 / y, cov=True)
    if alpha < 0:  # through the origin
        alpha, beta = 0.0, (x / y).sum() / ((x / y) ** 2).sum()
    off = math.sqrt(np.mean(((alpha + beta * x) / y - 1) ** 2))
    return Fit(float(alpha), float(1e-3 / beta) if beta > errors[0, 0] ** 0.5 else None, off)


def format_size(count: int) -> str:
    """Bytes in the largest binary unit of which there is one: "64 KiB", "1.5 MiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"
