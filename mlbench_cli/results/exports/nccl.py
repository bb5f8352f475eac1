"""Collectives in the JSON format of nccl-tests 2.19 (version 3)."""

import json
from typing import TYPE_CHECKING

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import JsonObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlbench_cli.results.analysis.collectives import Curve
    from mlbench_cli.results.archive.reader import Archive

VERSION = 3
TYPES = {"fp32": "float", "fp16": "half", "bf16": "bfloat16", "int32": "int32"}
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int32": 4}


def format_nccl(archive: "Archive") -> str:
    """The collectives of a verified archive, without their environment, which may contain secrets.

    Times are medians in microseconds, bandwidths GB/s of 10^9 bytes. Raises UsageError if there are none.
    """
    from mlbench_cli.results.analysis.collectives import read

    curves = read(archive)
    if not curves:
        raise UsageError(
            f"{archive.run['name']} did not measure collectives.", hint="mlbench run NAME 2 --task allreduce"
        )
    rows = [row for curve in curves for row in _rows(curve)]
    rates = [row["out_of_place" if "out_of_place" in row else "in_place"]["bus_bw"] for row in rows]
    sizes = [row["size"] for row in rows]
    document: JsonObject = {
        "version": VERSION,
        "start_time": archive.result["started"],
        "end_time": archive.result["finished"],
        "args": [],
        "env": [],
        "config": {
            "nthreads": 1,
            "ngpus": int(archive.run["spec"].get("gpus_per_worker") or 0),
            "ranks": int(archive.result["world_size"]),
            "minimum_bytes": min(sizes),
            "maximum_bytes": max(sizes),
            "backend": archive.result["backend"],
            "devices": _devices(archive),
        },
        "results": rows,
        "out_of_bounds": {"count": 0, "okay": "unchecked"},
        "average_bus_bandwidth": {"bandwidth": sum(rates) / len(rates), "okay": "unchecked"},
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _rows(curve: "Curve") -> "Sequence[JsonObject]":
    place = "in_place" if curve.place == "in_place" else "out_of_place"
    return [
        {
            "size": size,
            "count": size // ITEM_BYTES.get(curve.dtype, 1),
            "type": TYPES.get(curve.dtype, curve.dtype),
            "redop": "sum" if "reduce" in curve.collective else "none",
            "root": "-1",
            place: {"time": time, "alg_bw": size / time / 1e3, "bus_bw": bandwidth, "nwrong": "N/A"},
            "experiment_name": curve.collective,
        }
        for size, time, bandwidth in curve.points
    ]


def _devices(archive: "Archive") -> "list[JsonObject]":
    ranks = archive.environment.get("ranks", {})
    return [
        {"rank": int(rank), "hostname": facts.get("host", ""), "device_info": facts.get("device_name", "")}
        for rank, facts in ranks.items()
    ]
