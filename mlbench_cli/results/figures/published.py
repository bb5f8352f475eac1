"""Published results of MLBench 3, for comparison: published_results.csv."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlbench_cli.results.figures.chart import Row
from mlbench_cli.util.csv_text import read_table

_DATA = Path(__file__).parents[1] / "analysis" / "published_results.csv"
# Tasks that repeat a published one.
_SAME = {"cifar10_resnet20_ddp": "cifar10_resnet20", "cifar10_resnet20_tensorflow": "cifar10_resnet20"}
# Metric -> name of the phase, in the order of a step. "compute" is the sum of the first four.
PHASES = {
    "compute_seconds": "compute",
    **{f"{name}_seconds": name for name in ("forward", "loss", "backward", "optimizer")},
    "communication_seconds": "communication",
}


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

    @property
    def name(self) -> str:
        """The series in a chart."""
        return f"published: {self.variant}"


@cache
def read_published() -> tuple[PublishedValue, ...]:
    """All published values, with sources."""
    return tuple(
        PublishedValue(
            *(row["task"], row["variant"], row["metric"], int(row["workers"]), float(row["value"]), row["unit"]),
            row["approx"] == "yes",
            row["source"],
        )
        for row in read_table(_DATA)
    )


def published_values(task: str) -> list[PublishedValue]:
    """The published values of a task or of the one that it repeats."""
    return [item for item in read_published() if item.task == _SAME.get(task, task)]


def published_phases(task: str) -> Iterator[tuple[str, list[Row]]]:
    """The published bars of a task: variant and rows. If only total and communication are known, the remainder is "all
    else"."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    for item in published_values(task):
        values.setdefault(item.variant, {}).setdefault(item.metric, {})[item.workers] = item.value
    for variant, metrics in values.items():
        phases = {name: metrics[metric] for metric, name in PHASES.items() if metric in metrics}
        if list(phases) == ["communication"] and "seconds" in metrics:
            spent = phases["communication"]
            phases["all else"] = {k: total - spent[k] for k, total in metrics["seconds"].items() if k in spent}
        rows: list[Row] = [
            {"series": name, "x": f"{k} worker{'s' if k > 1 else ''}", "y": seconds}
            for name, points in phases.items()
            for k, seconds in sorted(points.items())
        ]
        if rows:
            yield variant, rows
