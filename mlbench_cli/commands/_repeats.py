"""How repeats of a run (`mlbench run --repeat`) are shown: mean and interval."""

from collections.abc import Sequence

from mlbench_cli import console
from mlbench_cli.results.analysis.numbers import SAMPLES_PER_SECOND, SECONDS, format_estimate
from mlbench_cli.runs.repeats import Repeats
from mlbench_cli.util.text import list_some

LEGEND = "In parentheses: 95 % intervals (Student's t, on logarithms), from three runs on. Failed runs are left out."


def show_repeats(found: Sequence[Repeats], *, all_metrics: bool) -> None:
    """The table of repeats on stdout, and what its intervals are on stderr; with all metrics that the programs
    reported, or only with those of programs that have no goal.
    """
    if not found:
        return
    console.out("")
    console.out_table(
        ["REPEATS", "WORKERS", "RUNS", "TIME", "METRIC", "THROUGHPUT"],
        [
            [
                item.name,
                item.point.workers,
                _format_count(item),
                format_estimate(item.point.seconds, SECONDS) if item.point.good else None,
                f"{item.metric} {format_estimate(item.point.value, item.unit)}"
                if item.point.good and item.point.value
                else None,
                format_estimate(item.point.throughput, SAMPLES_PER_SECOND)
                if item.point.good and item.point.throughput
                else None,
            ]
            for item in found
        ],
        droppable=["THROUGHPUT", "METRIC"],
    )
    _show_metrics([item for item in found if all_metrics or not item.metric])
    for item in found:
        if item.point.good and item.point.without_compiling is not None:
            console.out(f"{item.name}: {format_estimate(item.point.without_compiling, SECONDS)} without compiling")
    console.note(LEGEND)


def _metric_cells(item: Repeats, name: str) -> list[str]:
    """Last, best and mean of a metric; what the last values are, if they are no numbers."""
    found, unit = item.point.metrics.get(name, {}), item.point.unit_of(name)
    last, *others = (format_estimate(found.get(which), unit) for which in ("last", "best", "mean"))
    return [item.point.diverged.get(name, last), *others]


def _show_metrics(found: Sequence[Repeats]) -> None:
    """The figures of the metrics that the programs reported, a row for each."""
    rows = [
        [item.name, name, *_metric_cells(item, name)]
        for item in found
        if item.point.good
        for name in dict.fromkeys((*item.point.metrics, *item.point.diverged))
    ]
    if rows:
        console.out("")
        console.out_table(["REPEATS", "METRIC", "LAST", "BEST", "MEAN"], rows, droppable=["BEST", "MEAN"])
    if same := [item.name for item in found if _is_the_same_training(item)]:
        console.note(
            f"{list_some(same)}: all repeats reported the same values, so these intervals say nothing about other "
            "seeds. MLBENCH_SEED is the seed of a run; the program has to use it."
        )


def _is_the_same_training(item: Repeats) -> bool:
    """Whether the repeats of a user's program ignore their seed: no metric differs between them."""
    lasts = [each["last"] for each in item.point.metrics.values() if "last" in each and each["last"].low is not None]
    return bool(lasts) and all(each.low == each.high for each in lasts)


def _format_count(item: Repeats) -> str:
    good = len(item.point.good)
    return str(good) if good == item.total else f"{good} of {item.total}"
