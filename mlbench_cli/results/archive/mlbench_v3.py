"""Series by the names of MLBench 3, for its REST API: samples {date, value, cumulative} per metric."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.results.archive.reader import Archive

# Category of the tracker -> the original's name of that part of a step.
STEPS = {
    "preprocessing": "batch_load",
    "forward": "fwd_pass",
    "loss": "comp_loss",
    "backward": "backprop",
    "communication": "agg",
    "optimizer": "opt_step",
    "metrics": "comp_metrics",
}
_MIB = 1 << 20
# Original name -> field of resources.jsonl, and the size of the original's unit.
_GAUGES = {"memory": ("rss_bytes", _MIB), "network_in": ("received_bytes", _MIB), "network_out": ("sent_bytes", _MIB)}
_CUMULATIVE = ("network_in", "network_out")

Sample = dict[str, object]


def task_series(archive: Archive) -> dict[str, list[Sample]]:
    """The task's metrics: "result_<metric> @ <rank>" -> samples, in the order of the archive."""
    series: dict[str, list[Sample]] = {}
    goal = archive.result["goal"]
    for metric in archive.metrics():
        for name in original_names(metric, goal["metric"] if goal else None):
            series.setdefault(f"result_{_safe(name)} @ {metric['rank']}", []).append(
                _sample(metric["time"], metric["value"])
            )
    for name, seconds in _totals(archive.result):
        series[f"result_{name} @ 0"] = [_sample(archive.result["finished"], seconds)]
    return series


def original_names(metric: Mapping[str, Any], goal_metric: str | None) -> Iterator[str]:
    """The original's names of a metric: its plots read val_loss, its `status` val_global_loss and val_global_X."""
    name = metric["name"]
    if name == goal_metric:
        name = f"val_global_{name}"
    bare = name.removeprefix("val_").removeprefix("global_")
    if not name.startswith("val_"):
        yield name
        return
    yield f"val_{bare}"
    if metric["rank"] == 0:
        yield f"val_global_{bare}"


def _totals(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The seconds of rank 0 for the original's charts, in alphabetical order, as it posted them."""
    training = result["task_seconds"]["training"]
    steps = {STEPS[name]: spread["rank0"] for name, spread in result["timings"].items() if name in STEPS}
    if result["workers"] == 1 and not steps.get("agg", 0):
        steps.pop("agg", None)  # the original recorded it only if something was aggregated
    if training is not None:
        steps["CumulativeTrainTimeEpoch"] = training
        steps["end"] = max(
            0.0, training - sum(seconds for name, seconds in steps.items() if name != "CumulativeTrainTimeEpoch")
        )
        yield "CumulativeTrainTimeEpoch", training
        yield "TotalCumulativeTrainTime", training
    for name in sorted(steps):
        yield f"global_cum_{name}", steps[name]


def machine_series(archive: Archive) -> dict[str, list[Sample]]:
    """The machines' metrics: "<pod>_<metric>" -> samples."""
    series: dict[str, list[Sample]] = {}
    before: dict[str, tuple[float, float]] = {}
    for row in archive.resources():
        pod, date = _pod(archive, row), row.get("time")
        if not isinstance(date, str):
            continue
        if is_finite_number(row.get("cpu_seconds")):
            cores = _rate(before, pod, date, row["cpu_seconds"])
            if cores is not None:
                series.setdefault(f"{pod}_cpu", []).append(_sample(date, cores))
        for name, (field, unit) in _GAUGES.items():
            if is_finite_number(row.get(field)) and row[field] > 0:
                series.setdefault(f"{pod}_{name}", []).append(_sample(date, row[field] / unit, name in _CUMULATIVE))
    return series


def _pod(archive: Archive, row: Mapping[str, Any]) -> str:
    pod = row.get("pod")
    return _safe(pod) if isinstance(pod, str) and pod else f"{archive.run['name']}-{row.get('rank', 0)}"


def _rate(before: dict[str, tuple[float, float]], pod: str, date: str, seconds: float) -> float | None:
    """Cores in use since the pod's previous sample; None for the first one."""
    from datetime import datetime

    moment = datetime.fromisoformat(date).timestamp()
    earlier = before.get(pod)
    before[pod] = (moment, seconds)
    if earlier is None or moment <= earlier[0]:
        return None
    return max(0.0, seconds - earlier[1]) / (moment - earlier[0])


def _sample(date: str, value: Any, cumulative: bool = False) -> Sample:
    return {"date": date, "value": str(value), "cumulative": cumulative}


def _safe(name: str) -> str:
    """A metric's name for a zip entry: tasks may use names such as "a/b"."""
    return re.sub(r"[^\w.@ ()+=,%-]", "_", name)[:150]
