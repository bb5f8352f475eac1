"""MLPerf's log lines (mlperf-logging 4.1.68), as far as an archive has the facts.

A line is `:::MLLOG {JSON}`. The division is always "open", because only MLCommons publishes MLPerf results.
`list_missing` names the keys for which the archive has no facts.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlbench_cli import __version__
from mlbench_cli.model.goals import is_finite_number, metric_names
from mlbench_cli.tasks.catalog import rename_parameters
from mlbench_cli.util.times import parse_timestamp

if TYPE_CHECKING:
    from mlbench_cli.results.archive.reader import Archive

# Task -> benchmark of MLPerf Training that it follows.
BENCHMARKS = {
    "imagenet_resnet": "resnet",
    "bert_pretraining": "bert",
    "wmt16_gnmt": "gnmt",
    "wmt17_transformer": "transformer",
}
# Keys required at least once, or exactly once, in the open division, ruleset 4.0.0.
DEMANDED = (
    *("submission_org", "submission_platform", "submission_division", "submission_status", "submission_benchmark"),
    *("cache_clear", "init_start", "init_stop", "run_start", "run_stop", "train_samples", "eval_samples"),
    *("epoch_start", "epoch_stop", "eval_start", "eval_stop", "eval_accuracy"),
)
_START, _END, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


@dataclass(frozen=True)
class Submitter:
    """Facts that archives do not contain: submitter and system. `status` is cloud, onprem, preview or research."""

    organization: str = "none"
    platform: str = ""
    status: str = "research"


@dataclass(frozen=True)
class MlLogLine:
    """One event. `time_ms` is in milliseconds since 1970."""

    time_ms: int
    key: str
    value: Any
    kind: str = _POINT
    metadata: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        about = {"file": "mlbench", "lineno": 0, **(self.metadata or {})}
        body = {"namespace": "", "time_ms": self.time_ms, "event_type": self.kind, "key": self.key}
        return ":::MLLOG " + json.dumps({**body, "value": self.value, "metadata": about}, allow_nan=False)


def make_lines(archive: "Archive", submitter: Submitter) -> list[MlLogLine]:
    """The lines of a verified archive, in the order of time."""
    result, spec = archive.result, archive.run["spec"]
    begin = _milliseconds(parse_timestamp(result["started"] or archive.run["created"]))
    parameters = rename_parameters(spec["task"], spec["parameters"])
    facts = {
        "submission_benchmark": BENCHMARKS.get(result["task"], result["task"]),
        "submission_org": submitter.organization,
        "submission_division": "open",
        "submission_status": submitter.status,
        "submission_platform": submitter.platform or f"{result['cluster']}, {result['workers']} x {result['device']}",
    }
    lines = [MlLogLine(begin, key, value) for key, value in facts.items()]
    lines.append(MlLogLine(begin, "mlbench_version", __version__))
    lines.append(MlLogLine(begin, "seed", spec["seed"]))
    counts = _find_counts(result)
    batch = result["details"].get("global_batch")  # as the task says: ranks of a parameter server do not share one
    if is_finite_number(batch) and batch > 0:
        lines.append(MlLogLine(begin, "global_batch_size", int(batch)))
    elif is_finite_number(parameters.get("batch_size")):
        lines.append(MlLogLine(begin, "global_batch_size", int(parameters["batch_size"]) * int(result["world_size"])))
    lines += [MlLogLine(begin, key, value) for key, value in counts.items()]
    options = (("learning_rate", "base_learning_rate"), ("momentum", "momentum"), ("weight_decay", "weight_decay"))
    lines += [
        MlLogLine(begin, f"opt_{name}", parameters[key])
        for key, name in options
        if is_finite_number(parameters.get(key))
    ]
    lines.append(MlLogLine(begin, "cache_clear", False))  # system caches are not cleared before a run
    lines.append(MlLogLine(begin, "init_start", None, _START))
    lines += _training_lines(archive, begin)
    return sorted(lines, key=lambda line: line.time_ms)


def list_missing(lines: Sequence[MlLogLine]) -> list[str]:
    """Keys required by the compliance checker in the open division for which the archive has no facts."""
    keys = {line.key for line in lines}
    return [key for key in DEMANDED if key not in keys]


def _training_lines(archive: "Archive", begin: int) -> Iterator[MlLogLine]:
    phases = [event for event in archive.events(0) if event["event"] == "phase" and event["rank"] == 0]
    first = next((_time(event) for event in phases if event.get("phase") == "training"), None)
    if first is None:
        return
    start = max(first, begin + 1)
    yield MlLogLine(start, "init_stop", None, _END)
    yield MlLogLine(start, "run_start", None, _START)
    end = _run_end(archive, phases, start)
    yield from _epoch_lines([event for event in phases if _time(event) <= end], start, end)
    yield from _accuracy_lines(archive, end)
    status = "success" if archive.result["outcome"] == "goal_reached" else "aborted"
    yield MlLogLine(end, "run_stop", None, _END, {"status": status})


def _run_end(archive: "Archive", phases: Sequence[Mapping[str, Any]], start: int) -> int:
    """When the clock stopped: at the goal, or else at the end of the training."""
    goal, seconds = archive.result["goal"], archive.result["task_seconds"]["wall"]
    if goal and goal["reached"] and goal["seconds"] and goal["seconds"]["wall"] is not None:
        last = [_milliseconds(parse_timestamp(row["time"])) for row in _goal_rows(archive)]
        return max([start + _milliseconds(goal["seconds"]["wall"]), *last[-1:]])
    if seconds is not None:
        return start + _milliseconds(seconds)
    return max(start, *(_time(event) for event in phases))


def _epoch_lines(phases: Sequence[Mapping[str, Any]], start: int, end: int) -> Iterator[MlLogLine]:
    """Epochs start at their first training phase and do not include validation."""
    open_key, number = "", 0
    for event in phases:
        phase, epoch, moment = event.get("phase"), event.get("epoch"), max(start, _time(event))
        key = {"training": "epoch", "validation": "eval"}.get(str(phase), "")
        if not is_finite_number(epoch) or (key, epoch) == (open_key, number):
            continue
        if open_key:
            yield MlLogLine(moment, f"{open_key}_stop", None, _END, {"epoch_num": number})
        open_key, number = key, int(epoch)
        if open_key:
            yield MlLogLine(moment, f"{open_key}_start", None, _START, {"epoch_num": number})
    if open_key:
        yield MlLogLine(end, f"{open_key}_stop", None, _END, {"epoch_num": number})


def _accuracy_lines(archive: "Archive", end: int) -> Iterator[MlLogLine]:
    """The goal's metric; a percentage becomes a share, as MLPerf has it."""
    goal = archive.result["goal"]
    divisor = 100.0 if goal and str(goal["metric"]).startswith("Prec@") else 1.0
    for row in _goal_rows(archive):
        moment = min(end, _milliseconds(parse_timestamp(row["time"])))
        if is_finite_number(row["value"]) and is_finite_number(row.get("epoch")):
            yield MlLogLine(moment, "eval_accuracy", row["value"] / divisor, metadata={"epoch_num": row["epoch"]})


def _goal_rows(archive: "Archive") -> list[Mapping[str, Any]]:
    goal = archive.result["goal"]
    names = metric_names(goal["metric"]) if goal else ()
    return [row for row in archive.metrics() if row["rank"] == 0 and row["name"] in names]


def _find_counts(result: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of samples reported by the task, by MLPerf's names."""
    counts: Mapping[str, Any] = (result["data_identity"] or {}).get("counts") or {}
    found: dict[str, int] = {}
    for key, parts in (("train_samples", ("train",)), ("eval_samples", ("valid", "test", "dev"))):
        value = next((value for name, value in counts.items() if name.lower().startswith(parts)), None)
        if is_finite_number(value):
            found[key] = int(value)
    return found


def _time(event: Mapping[str, Any]) -> int:
    return _milliseconds(float(event["time"]))


def _milliseconds(seconds: float) -> int:
    return round(min(seconds * 1e3, sys.float_info.max))
