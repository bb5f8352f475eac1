"""Figures of collectives: latency and bandwidth by message size with fits, a figure per collective."""

from collections.abc import Iterator, Sequence

from mlbench_cli.results.analysis.collectives import ABOUT_PUBLISHED, Curve
from mlbench_cli.results.analysis.numbers import SECONDS, format_value
from mlbench_cli.results.figures.look import Look, look_of
from mlbench_cli.results.figures.model import Axis, Figure, Line, Scale, Sheet
from mlbench_cli.results.figures.ticks import format_tick

KINDS = {
    "latency": ("Latency", "Median time of a call on its slowest rank"),
    "bandwidth": ("Bandwidth", "Bus bandwidth, the factor of each collective included"),
}


def collective_figures(curves: Sequence[Curve], dtype: str | None = None, kind: str | None = None) -> Iterator[Figure]:
    """A figure per collective and data type of the labeled curves; optionally of one data type and kind."""
    for index, (name, found) in enumerate(dict.fromkeys((curve.collective, curve.dtype) for curve in curves)):
        own = [curve for curve in curves if (curve.collective, curve.dtype) == (name, found)]
        for each in KINDS:
            # A single rank sends nothing.
            shown = [curve for curve in own if each == "latency" or any(busbw for _, _, busbw in curve.points)]
            if shown and dtype in (None, found) and kind in (None, each):
                yield _figure(f"collective{index}-{each}", f"{KINDS[each][0]} of {name}, {found}", shown, each)


def collective_sheets(curves: Sequence[Curve]) -> Iterator[Sheet]:
    """A sheet per data type and kind, with a panel per collective."""
    for dtype in dict.fromkeys(curve.dtype for curve in curves):
        for kind, (word, meaning) in KINDS.items():
            figures = tuple(collective_figures(curves, dtype, kind))
            if not figures:
                continue
            own = [curve for curve in curves if curve.dtype == dtype]
            marked = [curve.functional for curve in own if not curve.published]
            marks = (f"{'' if all(marked) else 'PARTLY '}FUNCTIONAL ONLY",) if any(marked) else ()
            names = list(dict.fromkeys(curve.collective for curve in own))
            title = f"{word} of {names[0] if len(names) == 1 else 'collectives'}, {dtype}"
            subtitle = f"{meaning}. Dashed: the fit, latency + S / bandwidth (± its mean error)."
            yield Sheet(f"collectives_{kind}_{dtype}", title, figures, subtitle, _footnote(own), marks)


def _figure(key: str, title: str, curves: Sequence[Curve], kind: str) -> Figure:
    looks = _choose_looks(curves)
    lines = []
    for curve in curves:
        color, shape = looks[curve.label]
        xs = tuple(float(size) for size, _, _ in curve.points)
        ys = tuple(time / 1e6 if kind == "latency" else 1e9 * busbw for _, time, busbw in curve.points)
        lines.append(Line(_label(curve), xs, ys, reference=curve.published, color=color, shape=shape))
        if fit := _evaluate_fit(curve, kind):
            lines.append(
                Line(f"{curve.label}{_place(curve)}: fit", xs, tuple(fit), reference=True, color=color, is_named=False)
            )
    sizes = [x for line in lines for x in line.xs]
    y = Axis("time", Scale.LOG10, unit=SECONDS) if kind == "latency" else Axis("bus bandwidth", Scale.LOG10, unit="B/s")
    return Figure(
        key,
        title,
        Axis("bytes of the larger side", Scale.LOG10, _ticks(min(sizes), max(sizes)), unit="B"),
        y,
        tuple(lines),
    )


def _choose_looks(curves: Sequence[Curve]) -> dict[str, Look]:
    """Color and mark of each label; published curves share the color of their counterparts."""
    found: dict[str, Look] = {}
    counterparts: dict[tuple[str, ...], Look] = {}
    for curve in sorted(curves, key=lambda curve: curve.published):
        alike = tuple(curve.facts[name] for name in ("backend", "ranks", "device"))
        look = counterparts[alike] if curve.published and alike in counterparts else look_of(len(set(found.values())))
        counterparts.setdefault(alike, found.setdefault(curve.label, look))
    return found


def _evaluate_fit(curve: Curve, kind: str) -> list[float]:
    """The fit at the curve's sizes, as time or as the corresponding bandwidth."""
    if curve.fit is None or not curve.points:
        return []
    alpha, per_byte = curve.fit["alpha_us"], 1e-3 / curve.fit["algbw"] if "algbw" in curve.fit else 0.0
    times = [alpha + size * per_byte for size, _, _ in curve.points]
    if kind == "latency":
        return [time / 1e6 for time in times]
    return [1e9 * busbw * time / own for own, (_, time, busbw) in zip(times, curve.points, strict=True)]


def _place(curve: Curve) -> str:
    return "" if curve.published or curve.place == "in_place" else ", out of place"


def _label(curve: Curve) -> str:
    text = f"{curve.label}{_place(curve)}"
    if curve.fit:
        rate = f" + S / {format_tick(1e9 * curve.fit['algbw'], 'B/s')}" if "algbw" in curve.fit else ""
        off = f"{100 * curve.fit['off_mean']:.0f}\N{NO-BREAK SPACE}%"
        text += f": {format_value(curve.fit['alpha_us'] / 1e6, SECONDS)}{rate} (±{off})"
    return text


def _footnote(curves: Sequence[Curve]) -> str:
    machines = list(dict.fromkeys(curve.machine for curve in curves if curve.machine))
    notes = [f"Measured on {'; '.join(machines[:4])}{' and others' if len(machines) > 4 else ''}."] if machines else []
    if any(curve.published for curve in curves):
        notes.append(ABOUT_PUBLISHED)
    return " ".join(notes)


def _ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of 2^5, or all powers of two if the range is short."""
    powers = [2.0**power for power in range(60) if low <= 2.0**power <= high]
    coarse = tuple(2.0**power for power in range(0, 60, 5) if low <= 2.0**power <= high)
    return coarse if len(coarse) >= 3 else tuple(powers[:: max(1, len(powers) // 6)])
