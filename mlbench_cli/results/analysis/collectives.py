"""Collectives over the size of the message, from archives of the task allreduce: curves, their fits, and figures.

Two figures for each data type, latency and bandwidth, with a panel for each collective, and one CSV of all points. The
original's published curves can be put beside them; where they are from is said in published_allreduce.csv.
"""

import csv
import io
import json
import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_cli import files
from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.comparability import ComparisonKey, key_of
from mlbench_cli.results.analysis.series import describe
from mlbench_cli.results.archive.layout import DamagedArchive
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.style import COLORS, MARKERS, style, write
from mlbench_cli.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = re.compile(r"output/(?:[^/]+/)?results/collectives\.json")
_DATA = Path(__file__).with_name("published_allreduce.csv")
_ITEM = {"fp32": 4, "fp16": 2, "bf16": 2, "int32": 4}
PUBLISHED = "published 2020"
ABOUT_PUBLISHED = (
    "Published: the original's plots of release 2020, read to within 5\N{NO-BREAK SPACE}%: PyTorch 1.5, Google "
    "n1-standard-4 (GPU: one T4), 7.5 Gbit/s, mean of 100 without warm-up or barrier."
)
# Facts of a run that tell curves apart, in the order of a label.
FACTS = ("backend", "ranks", "device", "processes", "cpus", "cluster", "preset")
# What the key of a run has in common with these.
_KEY_FACTS_IN_LABEL = frozenset(
    {"task", "backend", "device", "processes_per_worker", "cpus", "cluster", "preset", "label"}
)


@dataclass(frozen=True)
class Curve:
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
    """The curves in a verified archive; none if it is of another task. Raises DamagedArchive for foreign rows."""
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
    machine, run, spec = _machine(archive), str(archive.run["name"]), archive.run["spec"]
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
    """As `published`; empty if the original published nothing of the kind."""
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
    """For each key in what it differs from others, in words, beyond what every label has."""
    facts = {key: key.facts() for key in keys}
    names = dict.fromkeys(name for own in facts.values() for name in own if name not in _KEY_FACTS_IN_LABEL)
    varying = [name for name in names if len({own.get(name, "") for own in facts.values()}) > 1]
    return {key: [describe(name, own.get(name, "")) for name in varying] for key, own in facts.items()}


def to_csv(curves: Iterable[Curve]) -> str:
    """One line per curve and size."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["collective", "dtype", "place", *FACTS, "published", "bytes", "microseconds", "busbw", "runs"])
    for curve in curves:
        facts = [curve.facts[name] for name in FACTS]
        for size, time, busbw in curve.points:
            about = [curve.collective, curve.dtype, curve.place, *facts, "yes" if curve.published else "no"]
            table.writerow([*about, size, f"{time:.6g}", f"{busbw:.6g}", curve.run])
    return text.getvalue()


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
        "ranks": f"{ranks} rank{'s' if ranks > 1 else ''}",
        "device": str(spec["device"]),
        "processes": f"{each} per worker" if each > 1 else "",
        "cpus": f"{spec['cpus']:g} CPUs" if spec.get("cpus") else "",
        "cluster": str(spec["cluster"]),
        "preset": "the original's protocol" if spec["preset"] == "legacy" else "",
    }


def _machine(archive: Archive) -> str:
    """What the ranks ran on: "Intel Xeon, 2 cores (local)"."""
    environment: Mapping[str, Any] = archive.environment  # the first edition's has "client"
    spec = archive.run["spec"]
    first = environment.get("ranks", {}).get("0", {})
    client = (archive.run.get("provenance") or {}).get("machine") or environment.get("client", {})
    here = spec["engine"] == "local"
    words = [first.get("cpu") or (client.get("cpu") if here else None) or first.get("device_name") or "unknown CPU"]
    if here and client.get("cores"):
        words.append(f"{client['cores']} cores")
    if spec["device"] == "gpu" and first.get("device_name"):
        words.append(str(first["device_name"]))
    return shorten(f"{', '.join(map(str, words))} ({spec['cluster']})", 150)


@cache
def load_published() -> tuple[Curve, ...]:
    lines = [line for line in _DATA.read_text("utf-8").splitlines() if not line.startswith("#")]
    groups: dict[tuple[str, str, str, str], list[tuple[int, float, float]]] = {}
    for row in csv.DictReader(lines):
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
    """Repeats as one curve, over the sizes that all of them have."""
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


# --- the figures --------------------------------------------------------------------------------------------------

_KINDS = {
    "latency": ("Latency", "Median time of a call on its slowest rank"),
    "bandwidth": ("Bandwidth", "Bus bandwidth, the factor of each collective included"),
}
# In inches: what is left of a panel for its axis, a panel's height, what is above and below it, a line of its legend.
_AXIS, _PANEL, _ABOVE, _BELOW, _LINE = 1.05, 2.5, 0.32, 0.62, 0.155
_LETTERS = 17.5  # of a legend in an inch


def draw(curves: Iterable[Curve], folder: Path) -> list[Path]:
    """Draw curves into `folder`, which is there; the paths that were written."""
    together = label_curves(curves)
    with style():
        written = [path for name, figure in figures(together) for path in write(figure, folder / name)]
    files.write_atomically(folder / "collectives.csv", to_csv(together).encode())
    return [*written, folder / "collectives.csv"]


def figures(curves: Sequence[Curve]) -> Iterator[tuple[str, "Figure"]]:
    """Name and figure of each data type and kind, to be drawn in the style of `charts.style`."""
    for dtype in dict.fromkeys(curve.dtype for curve in curves):
        alike = [curve for curve in curves if curve.dtype == dtype]
        yield f"collectives_latency_{dtype}", _figure(alike, dtype, "latency")
        # One rank alone moves nothing.
        moving = [curve for curve in alike if any(busbw for _, _, busbw in curve.points)]
        if moving:
            yield f"collectives_bandwidth_{dtype}", _figure(moving, dtype, "bandwidth")


def _figure(curves: Sequence[Curve], dtype: str, kind: str) -> "Figure":
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(curve.collective for curve in curves))
    columns = {1: 1, 2: 2, 4: 2}.get(len(names), 3)
    rows, inner = -(-len(names) // columns), 6.4 if columns == 1 else 3.9
    width = columns * (_AXIS + inner) + 0.2
    letters = int((inner - 0.55) * _LETTERS)
    legends = {name: [_legend(curve, letters) for curve in curves if curve.collective == name] for name in names}
    most = max(sum(text.count("\n") + 1 for text in texts) for texts in legends.values())
    subtitle = textwrap.wrap(f"{_KINDS[kind][1]}; dotted: the fit α + S β (± how far it is off).", int(width * 13.5))
    footnote = textwrap.wrap(_footnote(curves), int(width * 16))
    above = _ABOVE if len(names) > 1 else 0.05
    head, foot, row = 0.45 + 0.18 * len(subtitle), 0.14 + 0.15 * len(footnote), above + _PANEL + _BELOW + most * _LINE
    height = head + rows * row + foot
    figure = Figure(figsize=(width, height))
    left = 0.12 / width
    title = f"{_KINDS[kind][0]} of {names[0] if len(names) == 1 else 'collectives'}, {dtype}"
    shown = figure.text(left, 1 - 0.1 / height, title, va="top", fontsize=13, fontweight="bold")
    marked = [curve.functional for curve in curves if not curve.published]
    if any(marked):
        x = left + shown.get_window_extent().width / figure.bbox.width
        text = f"   {'' if all(marked) else 'PARTLY '}FUNCTIONAL ONLY"
        figure.text(x, 1 - 0.1 / height, text, va="top", fontsize=13, fontweight="bold", color=COLORS[5])
    figure.text(left, 1 - 0.38 / height, "\n".join(subtitle), va="top", color="#444444")
    figure.text(left, 0.08 / height, "\n".join(footnote), va="bottom", fontsize=8, color="#444444")
    colors = _colors(curves)
    for place, name in enumerate(names):
        x, y = (place % columns) * (_AXIS + inner) + _AXIS, height - head - place // columns * row - above - _PANEL
        axes = figure.add_axes((x / width, y / height, inner / width, _PANEL / height))
        if len(names) > 1:
            axes.set_title(name)
        _panel(axes, [curve for curve in curves if curve.collective == name], kind, colors, legends[name])
        below = -0.48 / _PANEL
        axes.legend(
            loc="upper left", bbox_to_anchor=(0, below), fontsize=8, handlelength=3.6, labelspacing=0.2,
            borderaxespad=0, borderpad=0,
        )  # fmt: skip
    return figure


def _colors(curves: Sequence[Curve]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each label, the same in every panel; what was published has those of its own counterpart."""
    found: dict[str, tuple[str, str]] = {}
    counterparts: dict[tuple[str, ...], str] = {}
    for curve in sorted(curves, key=lambda curve: curve.published):
        alike = tuple(curve.facts[name] for name in ("backend", "ranks", "device"))
        index = len(set(found.values()))
        own = (COLORS[index % 7], MARKERS[(index + index // 7) % 7])
        found.setdefault(curve.label, found[counterparts[alike]] if curve.published and alike in counterparts else own)
        counterparts.setdefault(alike, curve.label)
    return found


def _panel(
    axes: "Axes",
    curves: Sequence[Curve],
    kind: str,
    colors: Mapping[str, tuple[str, str]],
    legends: Sequence[str],
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    drawn: list[float] = []
    for curve, legend in zip(curves, legends, strict=True):
        color, marker = colors[curve.label]
        x = [size for size, _, _ in curve.points]
        y = [time if kind == "latency" else busbw for _, time, busbw in curve.points]
        axes.plot(
            x, y, color=color, marker=marker, markersize=4.5, linewidth=1.3,
            linestyle="-." if curve.published else "-" if curve.place == "in_place" else "--",
            markerfacecolor="white" if curve.published or curve.place != "in_place" else color,
            markevery=max(1, len(x) // 14), label=legend,
        )  # fmt: skip
        line = _evaluate_fit(curve, kind)
        if line:
            axes.plot(x, line, color=color, linestyle=(0, (1, 1.6)), linewidth=1.1)
        drawn += [*y, *line]
    sizes = [size for curve in curves for size, _, _ in curve.points]
    ticks = _ticks(min(sizes), max(sizes))
    axes.set_xticks(ticks, [_bytes(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("S, bytes of the larger side")
    axes.set_ylabel("time" if kind == "latency" else "bus bandwidth")
    heights = _decades([value for value in drawn if value > 0])
    axes.set_yticks(heights, [(_time if kind == "latency" else _rate)(height) for height in heights])
    axes.set_yticks([], minor=True)
    axes.grid(True, axis="both")


def _evaluate_fit(curve: Curve, kind: str) -> list[float]:
    """The fit at the curve's sizes; in the bandwidth as what the fitted times come to."""
    if curve.fit is None or not curve.points:
        return []
    alpha, per_byte = curve.fit["alpha_us"], 1e-3 / curve.fit["algbw"] if "algbw" in curve.fit else 0.0
    times = [alpha + size * per_byte for size, _, _ in curve.points]
    if kind == "latency":
        return times
    return [busbw * time / own for own, (_, time, busbw) in zip(times, curve.points, strict=True)]


def _legend(curve: Curve, letters: int) -> str:
    place = "" if curve.published or curve.place == "in_place" else ", out of place"
    text = f"{curve.label}{place}"
    if curve.fit:
        rate = f" + S / {_rate(curve.fit['algbw'])}" if "algbw" in curve.fit else ""
        text += f": {_time(curve.fit['alpha_us'])}{rate} (±{100 * curve.fit['off_mean']:.0f}\N{NO-BREAK SPACE}%)"
    return textwrap.fill(shorten(text, 150), letters)


def _footnote(curves: Sequence[Curve]) -> str:
    machines = list(dict.fromkeys(curve.machine for curve in curves if curve.machine))
    notes = [f"Measured on {'; '.join(machines[:4])}{' and others' if len(machines) > 4 else ''}."] if machines else []
    if any(curve.published for curve in curves):
        notes.append(ABOUT_PUBLISHED)
    return " ".join(notes)


def _ticks(low: int, high: int) -> list[int]:
    """Powers of 2^5, or all powers of two if the range is short."""
    coarse = [2**power for power in range(0, 60, 5) if low <= 2**power <= high]
    if len(coarse) >= 3:
        return coarse
    fine = [2**power for power in range(60) if low <= 2**power <= high]
    return fine[:: max(1, len(fine) // 6)] or [low]


def _decades(values: Sequence[float]) -> list[float]:
    """Powers of ten, or 1, 2 and 5 times these if the range is short."""
    if not values:
        return []
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high / low < 200 else (1,)
    return [ticks for power in powers for digit in digits if low <= (ticks := digit * 10.0**power) <= high]


def _bytes(size: float) -> str:
    return _format_scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _time(microseconds: float) -> str:
    return _format_scaled(microseconds, 1000, ("µs", "ms", "s"))


def _rate(gigabytes: float) -> str:
    return _format_scaled(gigabytes * 1e9, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def _format_scaled(value: float, step: int, units: Sequence[str]) -> str:
    rest = list(units)
    while value >= 0.9995 * step and len(rest) > 1:
        value /= step
        rest.pop(0)
    return f"{value:.3g}\N{NO-BREAK SPACE}{rest[0]}"
