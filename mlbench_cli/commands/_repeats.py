"""How repeats of a run (`mlbench run --repeat`) are shown: mean and interval."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlbench_cli import console
from mlbench_cli.runs.repeats import Repeats

if TYPE_CHECKING:
    from mlbench_cli.results.analysis.statistics import Estimate


def show_repeats(found: Sequence[Repeats]) -> None:
    """The table of repeats on stdout, and what its intervals are on stderr."""
    if not found:
        return
    console.out("")
    console.out_table(
        ["REPEATS", "WORKERS", "RUNS", "SECONDS", "METRIC", "SAMPLES/S"],
        [
            [
                item.name,
                item.point.workers,
                _format_count(item),
                in_figures(item.point.seconds) if item.point.good else None,
                f"{item.metric} {in_figures(item.point.value)}" if item.point.good and item.point.value else None,
                in_figures(item.point.throughput) if item.point.good else None,
            ]
            for item in found
        ],
        droppable=["SAMPLES/S", "METRIC"],
    )
    console.note("± is half the 95 % interval of the mean (Student's t); repeats that failed do not count.")


def in_figures(found: "Estimate | None") -> str | None:
    """ "12.31 ± 0.84": two digits of the margin, the mean to the same place; "12.31" without repeats."""
    if found is None:
        return None
    if not found.margin:
        return f"{found.mean:.4g}" if abs(found.mean) < 9999.5 else f"{found.mean:.0f}"
    digits = min(9, max(0, 1 - math.floor(math.log10(found.margin))))
    return f"{found.mean:.{digits}f} ± {found.margin:.{digits}f}"


def _format_count(item: Repeats) -> str:
    good = len(item.point.good)
    return str(good) if good == item.total else f"{good} of {item.total}"
