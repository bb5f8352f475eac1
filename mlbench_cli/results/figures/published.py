"""Published results of MLBench 3, for comparison: published_results.csv."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlbench_cli.results.figures.look import color_of_phase
from mlbench_cli.results.figures.model import Line
from mlbench_cli.util.csv_text import read_table

_DATA = Path(__file__).parents[1] / "analysis" / "published_results.csv"
# Tasks that repeat a published one.
_SAME = {"cifar10_resnet20_ddp": "cifar10_resnet20", "cifar10_resnet20_tensorflow": "cifar10_resnet20"}


@dataclass(frozen=True)
class PublishedValue:
    """One published value. `is_approximate`: read from a plot, within 2 to 5 %."""

    task: str
    variant: str
    metric: str
    workers: int
    value: float
    unit: str
    is_approximate: bool
    source: str


@cache
def read_published() -> tuple[PublishedValue, ...]:
    """All published values, with sources."""
    return tuple(
        PublishedValue(
            row["task"],
            row["variant"],
            row["metric"],
            int(row["workers"]),
            float(row["value"]),
            row["unit"],
            row["approx"] == "yes",
            row["source"],
        )
        for row in read_table(_DATA)
    )


def published_lines(task: str, metric: str) -> Iterator[Line]:
    """The published curves of a task's metric over the number of workers, if any."""
    values = [item for item in read_published() if (item.task, item.metric) == (_SAME.get(task, task), metric)]
    for variant in dict.fromkeys(item.variant for item in values):
        own = [item for item in values if item.variant == variant]
        around = " ≈" if any(item.is_approximate for item in own) else ""
        yield Line(
            f"published: {variant}{around}",
            tuple(float(item.workers) for item in own),
            tuple(item.value for item in own),
            reference=True,
        )


# Metric -> name of the phase, in the order of a step. "compute" is the sum of the first four.
PHASES = {
    "compute_seconds": "compute",
    **{f"{name}_seconds": name for name in ("forward", "loss", "backward", "optimizer")},
    "communication_seconds": "communication",
}


def published_phases(task: str) -> Iterator[tuple[str, list[int], tuple[Line, ...]]]:
    """The published bars of a task: variant, numbers of workers, and a line per phase.

    If only total and communication are known, the remainder is "all else".
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for item in read_published():
        if item.task == _SAME.get(task, task):
            values.setdefault(item.variant, {}).setdefault(item.metric, {})[item.workers] = item.value
    for variant, metrics in values.items():
        phases = {name: metrics[metric] for metric, name in PHASES.items() if metric in metrics}
        if not phases:
            continue
        if list(phases) == ["communication"] and "seconds" in metrics:
            spent = phases["communication"]
            phases["all else"] = {k: total - spent[k] for k, total in metrics["seconds"].items() if k in spent}
        counts = sorted({workers for points in phases.values() for workers in points})
        xs = tuple(map(float, range(len(counts))))
        lines = (
            Line(name, xs, tuple(points.get(k) for k in counts), color=color_of_phase(name))
            for name, points in phases.items()
        )
        yield variant, counts, tuple(lines)


def published_sources(task: str) -> list[str]:
    """The distinct sources of a task's published values."""
    return list(dict.fromkeys(item.source for item in read_published() if item.task == _SAME.get(task, task)))
