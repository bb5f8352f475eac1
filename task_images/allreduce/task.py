"""All-reduce over a range of sizes and data types, with a time budget; no goal, outcome `completed`."""

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from task_images.allreduce.measure import DTYPES, FORMULA, Row, check_sum, measure, measure_as_original, sizes
from task_images.contract import Contract, emit
from task_images.harness.distributed import World, open_world
from task_images.harness.errors import TaskUsageError
from task_images.harness.parameters import read_parameters
from task_images.harness.report import Reporter
from task_images.harness.tracker import Tracker

# The original measured MPI in single precision only. Today halves are converted, and the result says so.
ONLY_FP32 = ("mpi",)


@dataclass(frozen=True)
class Settings:
    """The parameters of task.yaml; the defaults are the preset `spec`. Seconds of 0 mean no limit."""

    min_exponent: float = 0.0
    max_exponent: float = 8.0
    count: int = 80
    samples: int = 100
    warmup: int = 5
    dtypes: list[str] = field(default_factory=lambda: ["fp32", "fp16"])
    seconds_per_size: float = 60.0
    seconds_total: float = 3600.0
    protocol: str = "current"


def main(contract: Contract) -> None:
    settings = read_parameters(Settings, contract.parameters)
    dtypes = _dtypes(settings, contract.backend)
    world = open_world(contract, grouped_alone=True)
    report = Reporter(world, data="generated buffers", synthetic=True)
    report.environment()
    tracker = Tracker(world.synchronize if world.device.type == "cuda" else None)

    legacy = settings.protocol == "legacy"
    if legacy:
        check_sum(world)
    elements = sizes(settings.min_exponent, settings.max_exponent, settings.count, duplicates=legacy)
    world.barrier()
    tracker.restart()
    rows: list[Row] = []
    left_out: list[dict[str, Any]] = []
    for step, size in enumerate(elements, 1):
        # Rank 0's clock decides for all, lest one rank stop while another waits for it.
        elapsed = world.agree(tracker.snapshot().wall)
        for dtype in dtypes:
            if settings.seconds_total and elapsed > settings.seconds_total:
                left_out.append({"dtype": dtype, "elements": size})
                continue
            report.step(step, len(elements))
            rows.append(_measure(world, tracker, settings, size, dtype))
            _report_row(report, world, rows[-1], legacy)
    if left_out:
        report.say(f"{len(left_out)} sizes left out: the time budget of {settings.seconds_total:g} s is spent")

    details = {
        "protocol": settings.protocol,
        "formula": FORMULA,
        "ranks": world.size,
        "rows": [row.to_dict() for row in rows],
        "left_out": left_out,
        "shortened": [[row.dtype, row.elements] for row in rows if row.samples < settings.samples],
        "left_out_dtypes": sorted(set(settings.dtypes) - set(dtypes)),
    }
    if world.is_first:
        _write(Path(contract.output_dir), details)
    report.phase("finished")
    report.result(tracker, details=details)
    world.close()


def _dtypes(settings: Settings, backend: str) -> list[str]:
    for name in settings.dtypes:
        if name not in DTYPES:
            raise TaskUsageError(f'there is no data type "{name}", only {", ".join(DTYPES)}')
    if settings.protocol not in ("current", "legacy"):
        raise TaskUsageError(f'the protocol "{settings.protocol}" is neither current nor legacy')
    halves = settings.protocol != "legacy" or backend not in ONLY_FP32
    kept = [name for name in DTYPES if name in settings.dtypes and (name == "fp32" or halves)]
    if not kept:
        raise TaskUsageError(f"the backend {backend} can reduce none of the data types {', '.join(settings.dtypes)}")
    return kept


def _measure(world: World, tracker: Tracker, settings: Settings, size: int, dtype: str) -> Row:
    if settings.protocol == "legacy":
        return measure_as_original(world, tracker, size, dtype, settings.samples)
    return measure(world, tracker, size, dtype, settings.samples, settings.warmup, settings.seconds_per_size)


def _report_row(report: Reporter, world: World, row: Row, legacy: bool) -> None:
    if legacy:
        # Four points by every rank, under the original's names and to be read side by side.
        bits = {"fp32": 32}.get(row.dtype, 16)
        cuda = int(world.device.type == "cuda")
        points = {"tensor_size": row.elements, "dtype": bits, "cuda": cuda, "avg_time": row.mean_seconds}
        for name, value in points.items():
            emit("metric", world.rank, name=f"val_{name}", value=value)
        report.say(f"{row.dtype}  {row.elements:>11} elements  mean {1e6 * row.mean_seconds:10.1f} us")
        return
    assert row.median_seconds is not None
    assert row.p95_seconds is not None
    assert row.busbw is not None
    report.metric(f"all_reduce_{row.dtype}_median", row.median_seconds, step=row.elements, unit="s")
    report.metric(f"all_reduce_{row.dtype}_busbw", row.busbw, step=row.elements, unit="GB/s")
    report.say(
        f"{row.dtype}  {row.elements:>11} elements  median {1e6 * row.median_seconds:10.1f} us"
        f"  p95 {1e6 * row.p95_seconds:10.1f} us  busbw {row.busbw:8.3f} GB/s  {row.samples} samples"
    )


def _write(folder: Path, details: dict[str, Any]) -> None:
    """allreduce.csv, a line per size and type, and allreduce.json, the same with everything around it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "allreduce.json").write_text(json.dumps(details, indent=2) + "\n")
    rows = details["rows"]
    with open(folder / "allreduce.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
