"""Collectives over a range of sizes and data types, with a time budget; no goal, outcome `completed`."""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from task_images.allreduce import Settings, table
from task_images.allreduce.measure import (
    BANDWIDTH,
    CLOCK,
    COLUMNS,
    MIN_SAMPLES,
    Row,
    Series,
    check,
    check_sum,
    make,
    measure,
    measure_as_original,
    time_samples,
)
from task_images.allreduce.operations import COLLECTIVES, DTYPES, IN_PLACE, PLACES, Buffers
from task_images.allreduce.table import Fit, fit
from task_images.clock import Tracker
from task_images.contract import Contract, TaskUsageError, emit
from task_images.parameters import read_parameters
from task_images.report import Reporter
from task_images.run import tells_of_lost_peer
from task_images.world import World, open_world

# The original measured MPI in single precision only. Today halves are converted, and the result says so.
ONLY_FP32 = ("mpi",)


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
    fit: Fit | None = None

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
            "fit": self.fit.to_dict() if self.fit else None,
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
    tracker = Tracker(world.synchronize if world.device.type == "cuda" else None)
    world.barrier()
    tracker.restart()
    if settings.protocol == "legacy":
        measured, refused = _all_as_original(world, tracker, report, settings)
    else:
        measured, refused = _all(world, tracker, report, settings)

    rows = [row.to_dict() for one in measured for row in one.rows]
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
            _conclude(report, measured, refused, facts, world.size)
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
    report.say(f"{table.size(row.bytes):>9}  {series}: {row.p50_us:.1f} us, busbw {row.busbw:.3g} GB/s")


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


# --- telling --------------------------------------------------------------------------------------------------------


def _formulas(collectives: set[str]) -> dict[str, object]:
    return {
        "bandwidth": BANDWIDTH,
        "fit": "t = alpha + S * beta by relative least squares; outliers weigh less",
        **{name: {"S": kind.size, "busbw": kind.formula} for name, kind in COLLECTIVES.items() if name in collectives},
    }


def _conclude(
    report: Reporter,
    measured: Sequence[Measured],
    refused: dict[Series, str],
    facts: dict[str, Any],
    ranks: int,
) -> None:
    """The tables, and under them what is not in them."""
    for one in measured:
        report.say(table.header(one.series, ranks))
        for row in one.rows:
            report.say(table.line(row))
        report.say(table.describe_fit(one.fit))
        if one.left_out:
            report.say(f"left out: {', '.join(map(table.size, one.left_out))}: {one.why}")
    report.say("")
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
