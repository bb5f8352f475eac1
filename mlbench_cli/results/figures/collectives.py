"""Charts of collectives: latency and bandwidth by message size with fits, one per collective and data type."""

from collections.abc import Iterator, Sequence

from mlbench_cli.results.analysis.collectives import Curve
from mlbench_cli.results.analysis.numbers import SECONDS, format_value
from mlbench_cli.results.figures.chart import FIT, PUBLISHED, Axis, Chart, Row, format_tick

_SIZES = Axis("bytes of the larger side", "B", is_log=True, at_values=True)
_KINDS = {
    "latency": ("Latency", Axis("seconds", SECONDS, is_log=True)),
    "bandwidth": ("Bus bandwidth", Axis("bus bandwidth", "B/s", is_log=True)),
}


def collective_charts(curves: Sequence[Curve]) -> Iterator[Chart]:
    """Latency and bandwidth of each collective and data type of the labeled curves."""
    for number, (name, dtype) in enumerate(dict.fromkeys((curve.collective, curve.dtype) for curve in curves)):
        own = [curve for curve in curves if (curve.collective, curve.dtype) == (name, dtype)]
        for kind, (word, axis) in _KINDS.items():
            # A single rank sends nothing.
            shown = [curve for curve in own if kind == "latency" or any(busbw for _, _, busbw in curve.points)]
            if shown:
                rows = tuple(row for curve in shown for row in _rows(curve, kind))
                yield Chart(f"collective{number}-{kind}", f"{word} of {name}, {dtype}", _SIZES, axis, rows)


def _rows(curve: Curve, kind: str) -> Iterator[Row]:
    style = PUBLISHED if curve.published else ""
    for size, microseconds, busbw in curve.points:
        y = microseconds / 1e6 if kind == "latency" else 1e9 * busbw
        yield {"series": _label(curve), "x": float(size), "y": y, "style": style}
    if curve.fit is None:
        return
    alpha, per_byte = curve.fit["alpha_us"], 1e-3 / curve.fit["algbw"] if "algbw" in curve.fit else 0.0
    for size, microseconds, busbw in curve.points:
        found = alpha + size * per_byte
        y = found / 1e6 if kind == "latency" else 1e9 * busbw * microseconds / found
        yield {"series": _label(curve), "x": float(size), "y": y, "style": FIT}


def _label(curve: Curve) -> str:
    text = f"{curve.label}{'' if curve.published or curve.place == 'in_place' else ', out of place'}"
    if curve.fit:
        rate = f" + S / {format_tick(1e9 * curve.fit['algbw'], 'B/s')}" if "algbw" in curve.fit else ""
        off = f"{100 * curve.fit['off_mean']:.0f}\N{NO-BREAK SPACE}%"
        text += f": {format_value(curve.fit['alpha_us'] / 1e6, SECONDS)}{rate} (±{off})"
    return text
