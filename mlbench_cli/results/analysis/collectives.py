"""Collectives by message size, from archives of the task allreduce: curves (bytes, microseconds, GB/s) and their fits.

The original's published curves can be added; published_allreduce.csv names their sources.
"""

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.errors import DamagedArchive, UsageError
from mlbench_cli.results.analysis.comparability import ComparisonKey, describe, key_of
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.csv_text import read_table
from mlbench_cli.util.text import counted, shorten

_ROWS = re.compile(r"output/(?:[^/]+/)?results/collectives\.json")
_DATA = Path(__file__).with_name("published_allreduce.csv")
_ITEM = {"fp32": 4, "fp16": 2, "bf16": 2, "int32": 4}
PUBLISHED = "published 2020"
ABOUT_PUBLISHED = (
    "Published: the original's plots of release 2020, read to within 5\N{NO-BREAK SPACE}%: PyTorch 1.5, Google "
    "n1-standard-4 (GPU: one T4), 7.5 Gbit/s, mean of 100 without warm-up or barrier."
)
# Facts of a run that distinguish curves, in the order of a label.
FACTS = ("backend", "ranks", "device", "processes", "cpus", "cluster", "preset")
# Fields of a run's key that these facts cover.
_KEY_FACTS_IN_LABEL = frozenset(
    {"task", "backend", "device", "processes_per_worker", "cpus", "cluster", "preset", "label"}
)


class Curve(Struct, frozen=True):
    """One collective in one data type and place, as one run measured it. Points are (bytes, microseconds, GB/s)."""

    run: str
    collective: str
    dtype: str
    place: str
    points: tuple[tuple[int, float, float], ...]
    fit: Mapping[str, float] | None  # alpha_us, algbw (GB/s, absent: too small to tell) and off_mean (share)
    facts: Mapping[str, str]
    machine: str
    label: str = ""
    published: bool = False
    functional: bool = False  # its figures are not a performance measurement
    key: ComparisonKey | None = None  # None: published


def read(archive: Archive) -> list[Curve]:
    """The curves in a verified archive; empty if it is of another task. Raises DamagedArchive for foreign rows."""
    name = next((name for name in archive.names if _ROWS.fullmatch(name)), None)
    if name is None or archive.run["spec"]["task"] != "allreduce":
        return []
    try:
        document = json.loads(archive.read(name))
        rows = [_row(row) for row in document["rows"]]
        fits = {_key(entry): entry["fit"] for entry in document["series"]}
        facts = _facts(archive, int(document["ranks"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedArchive(archive.path, name, f"it is not as the task writes it: {error!r}") from None
    machine, run, spec = _machine(archive), archive.name, archive.run["spec"]
    functional = bool(spec.get("functional_only"))
    keys = dict.fromkeys(key for key, _ in rows)
    return [
        Curve(
            run, *key, tuple(point for own, point in rows if own == key), _fit(fits.get(key)), facts, machine,
            functional=functional, key=key_of(archive),
        )
        for key in keys
    ]  # fmt: skip


def figures_of(archive: Archive) -> dict[str, float]:
    """For `compare`: of each curve the fit's latency and bandwidth, and the bandwidth at the best size."""
    found: dict[str, float] = {}
    for curve in read(archive):
        name = f"{curve.collective} {curve.dtype}" + ("" if curve.place == "in_place" else " out of place")
        if curve.fit:
            found[f"{name}, alpha us"] = curve.fit["alpha_us"]
        found[f"{name}, best busbw GB/s"] = max(busbw for _, _, busbw in curve.points)
    return found


def select_published(curves: Sequence[Curve]) -> list[Curve]:
    """The original's curves that belong beside these: of their devices and types, and of their numbers of ranks where
    there are such. Raises UsageError if none of these is an all-reduce in a type that was published.
    """
    found = find_published(curves)
    if not found:
        raise UsageError(
            "--published: the original published the all-reduce in fp32 and fp16; none of these runs measured that.",
            hint="mlbench run NAME 2 --task allreduce",
        )
    return found


def find_published(curves: Sequence[Curve]) -> list[Curve]:
    """Like `select_published`, but empty if the original published nothing comparable."""
    own = [curve for curve in curves if curve.collective == "all_reduce"]
    wanted = {(curve.facts["device"], curve.dtype) for curve in own}
    found = [curve for curve in load_published() if (curve.facts["device"], curve.dtype) in wanted]
    ranks = {curve.facts["ranks"] for curve in own}
    return [curve for curve in found if curve.facts["ranks"] in ranks] or found


def label_curves(curves: Iterable[Curve]) -> list[Curve]:
    """Curves with labels of what tells their runs apart; repeats are put together: medians of times, means of fits.

    Curves of runs whose times are not comparable stay apart, whatever they differ in.
    """
    curves = list(curves)
    varying = {name for name in FACTS if len({curve.facts[name] for curve in curves if not curve.published}) > 1}
    differences = _describe_differences([curve.key for curve in curves if curve.key is not None])
    groups: dict[tuple[str, ...], list[Curve]] = {}
    for curve in curves:
        words = [curve.facts[name] for name in FACTS if name in varying or name in ("backend", "ranks")]
        if curve.key is not None:
            words += differences[curve.key]
        label = ", ".join(filter(None, [*([PUBLISHED] if curve.published else []), *words]))
        groups.setdefault((curve.collective, curve.dtype, curve.place, label), []).append(replace(curve, label=label))
    return [_together(group) for group in groups.values()]


def _describe_differences(keys: Iterable[ComparisonKey]) -> dict[ComparisonKey, list[str]]:
    """For each key, how it differs from the others, in words, beyond what every label contains."""
    facts = {key: key.facts() for key in keys}
    names = dict.fromkeys(name for own in facts.values() for name in own if name not in _KEY_FACTS_IN_LABEL)
    varying = [name for name in names if len({own.get(name, "") for own in facts.values()}) > 1]
    return {key: [describe(name, own.get(name, "")) for name in varying] for key, own in facts.items()}


# --- reading ------------------------------------------------------------------------------------------------------


def _key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(entry["collective"]), str(entry["dtype"]), str(entry["place"])


def _row(row: Mapping[str, Any]) -> tuple[tuple[str, str, str], tuple[int, float, float]]:
    size, time = int(row["bytes"]), float(row["p50_us"] or row["mean_us"])
    busbw = float(row["busbw"] or 0.0)
    if size < 1 or not 0 < time < math.inf or not 0 <= busbw < math.inf:
        raise ValueError(f"{size} bytes in {time} microseconds")
    return _key(row), (size, time, busbw)


def _fit(entry: Mapping[str, Any] | None) -> dict[str, float] | None:
    if entry is None:
        return None
    names = ("alpha_us", "algbw", "off_mean")
    return {name: float(entry[name]) for name in names if entry[name] is not None}


def _facts(archive: Archive, ranks: int) -> dict[str, str]:
    spec = archive.run["spec"]
    each = spec["processes_per_worker"]
    return {
        "backend": str(spec["backend"]),
        "ranks": counted(ranks, "rank"),
        "device": str(spec["device"]),
        "processes": f"{each} per worker" if each > 1 else "",
        "cpus": f"{spec['cpus']:g} CPUs" if spec.get("cpus") else "",
        "cluster": str(spec["cluster"]),
        "preset": "the original's protocol" if spec["preset"] == "legacy" else "",
    }


def _machine(archive: Archive) -> str:
    """What the ranks ran on: "Intel Xeon, 2 cores (local)"."""
    spec = archive.run["spec"]
    first = archive.environment["ranks"].get("0", {})
    client = (archive.run.get("provenance") or {}).get("machine") or {}
    here = spec["engine"] == "local"
    words = [first.get("cpu") or (client.get("cpu") if here else None) or first.get("device_name") or "unknown CPU"]
    if here and client.get("cores"):
        words.append(f"{client['cores']} cores")
    if spec["device"] == "gpu" and first.get("device_name"):
        words.append(str(first["device_name"]))
    return shorten(f"{', '.join(map(str, words))} ({spec['cluster']})", 150)


@cache
def load_published() -> tuple[Curve, ...]:
    groups: dict[tuple[str, str, str, str], list[tuple[int, float, float]]] = {}
    for row in read_table(_DATA):
        ranks, size = int(row["ranks"]), int(row["elements"]) * _ITEM[row["dtype"]]
        time = 1e3 * float(row["mean_ms"])
        point = (size, time, size / time / 1e3 * 2 * (ranks - 1) / ranks)
        groups.setdefault((row["device"], row["dtype"], row["ranks"], row["backend"]), []).append(point)
    empty = dict.fromkeys(FACTS, "")
    return tuple(
        Curve(
            PUBLISHED, "all_reduce", dtype, "in_place", tuple(points), None,
            {**empty, "backend": backend, "ranks": f"{ranks} ranks", "device": device}, "", published=True,
        )
        for (device, dtype, ranks, backend), points in groups.items()
    )  # fmt: skip


def _together(group: Sequence[Curve]) -> Curve:
    """Combine repeats into one curve, over the sizes that all of them have."""
    if len(group) == 1:
        return group[0]
    sizes = sorted(set.intersection(*({size for size, _, _ in curve.points} for curve in group)))
    tables = [{size: (time, busbw) for size, time, busbw in curve.points} for curve in group]
    points = [
        (
            size,
            statistics.median(table[size][0] for table in tables),
            statistics.median(table[size][1] for table in tables),
        )
        for size in sizes
    ]
    fits = [curve.fit for curve in group if curve.fit]
    names = set.intersection(*(set(fit) for fit in fits)) if len(fits) == len(group) else set()
    mean = {name: statistics.fmean(fit[name] for fit in fits) for name in names}
    return replace(
        group[0],
        run=" ".join(curve.run for curve in group),
        label=f"{group[0].label} ({len(group)} runs)",
        points=tuple(points),
        fit=mean or None,
    )
