"""What a person reads of the figures: a header for each collective and type, a line for each size, and the fit."""

from task_images.allreduce.fit import Fit
from task_images.allreduce.measure import Row, Series
from task_images.allreduce.operations import COLLECTIVES

_COLUMNS = (
    *(("bytes", 11), ("elements", 11), ("min us", 10), ("mean us", 10), ("p50 us", 10), ("p95 us", 10)),
    *(("p99 us", 10), ("max us", 10), ("ranks us", 15), ("algbw GB/s", 10), ("busbw GB/s", 10), ("samples", 7)),
)


def header(series: Series, ranks: int, mode: str) -> str:
    """The lines above a series: what S and the bus bandwidth mean, and the columns' titles."""
    kind = COLLECTIVES[series.collective]
    titles = "  ".join(f"{title:>{width}}" for title, width in _COLUMNS)
    return f"\n{series}, {mode}, k = {ranks}: S = {kind.size}; busbw = {kind.formula}\n{titles}"


def line(row: Row) -> str:
    """The line of one size, in the order of the columns."""
    values = (
        *(row.bytes, row.elements, row.min_us, row.mean_us, row.p50_us, row.p95_us, row.p99_us, row.max_us),
        *(_span(row), row.algbw, row.busbw, row.samples),
    )
    return "  ".join(
        f"{_figure(value, title):>{width}}" for value, (title, width) in zip(values, _COLUMNS, strict=True)
    )


def describe_fit(series: Series, fit: Fit | None, ranks: int) -> str:
    """The fit in words, with latency and bandwidth of a single link if the collective's model gives them."""
    if fit is None:
        return "no fit: it needs at least three sizes"
    kind = COLLECTIVES[series.collective]
    line = f"fit t = alpha + S * beta: alpha {fit.alpha_us:.4g} ± {fit.alpha_error_us:.2g} us"
    link = ", b too small to tell"
    if fit.algbw is not None and fit.busbw is not None:
        line += f", 1 / beta {fit.algbw:.4g} ± {fit.algbw_error:.2g} GB/s"
        link = f", 1 / b {fit.busbw:.4g} GB/s"
    line += f"; off by {fit.off_mean:.0%}, at worst {fit.off_worst:.0%} ({size(fit.worst_bytes)})"
    if not kind.start(ranks):  # one rank alone
        return line
    return f"{line}\n{kind.model}: a {fit.alpha_us / kind.start(ranks):.4g} us{link}"


def size(count: int) -> str:
    """Bytes in the largest binary unit of which there is one: "64 KiB", "1.5 MiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def _span(row: Row) -> str:
    """The least and the greatest median of a single rank."""
    if row.rank_p50_min_us is None or row.rank_p50_max_us is None:
        return "-"
    return f"{row.rank_p50_min_us:.1f}-{row.rank_p50_max_us:.1f}"


def _figure(value: float | str | None, title: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value)
    if title.endswith(" us"):
        return f"{value:.1f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"
