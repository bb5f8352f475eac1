"""From the logs of ranks to events, metrics and the task's own result. Foreign text: what is malformed is left out."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from mlbench_cli.results.archive.layout import log_names, parse_document
from mlbench_cli.times import timestamp
from task_images import contract

# A longer line is read in pieces, so that a log without line ends needs no memory.
LINE_LIMIT = 1 << 20
SPREAD = ("min", "mean", "max", "rank0")
_MARK = contract.PREFIX.encode() + b"{"
# Made once: json.dumps with arguments makes an encoder per call, which takes longer than the encoding.
_ENCODER = json.JSONEncoder(separators=(",", ":"))
LATEST = 253402300799  # the last second of the year 9999
_SPECIAL = ("nan", "inf", "-inf")


def log_files(folder: Path) -> dict[int, Path]:
    """Rank to log in a run's folder, in the order of ranks. Links are not followed."""
    paths = {f"logs/{path.name}": path for path in (folder / "logs").glob("rank-*.log") if not path.is_symlink()}
    return {rank: paths[name] for rank, name in log_names(paths).items() if paths[name].is_file()}


def read_events(log: BinaryIO) -> Iterator[dict[str, Any]]:
    """Every event in a log, in its order. Lines without one cost a search of bytes and nothing more."""
    while line := log.readline(LINE_LIMIT):
        if _MARK in line and (event := contract.parse_event(line)) is not None:
            yield event


class Reading:
    """One pass over the logs of a run: its metrics one by one, and what is known once all logs are read.

    `result` is the last that rank 0 reported in its own log, as by `result_of`; where it reported none, and `judge` is
    given, what that makes of rank 0's metrics. `environments` are facts by rank. Events of ranks outside the run are
    left out.
    """

    def __init__(self, world_size: int, judge: "Judge | None" = None) -> None:
        self._world_size = world_size
        self._reported: dict[str, Any] | None = None
        self._judge = judge
        self.environments: dict[int, dict[str, Any]] = {}

    @property
    def result(self) -> dict[str, Any] | None:
        return self._reported or (self._judge.result() if self._judge else None)

    def metrics(self, number: int, log: BinaryIO) -> Iterator[bytes]:
        """Read rank `number`'s log to its end; yields the lines of metrics.jsonl that follow from it."""
        for event in read_events(log):
            rank, kind = event["rank"], event["event"]
            if rank >= self._world_size:
                continue
            if kind == "metric" and (metric := metric_of(event)):
                if self._judge and rank == number == 0:
                    self._judge.see(metric)
                yield json_line(metric)
            elif kind == "environment":
                self.environments.setdefault(rank, {}).update(event)
            elif kind == "result" and rank == number == 0:
                self._reported = result_of(event) or self._reported


class Judge:
    """What a program that only reports its metric has reached: its result, by the goal that it is held to.

    `goal` has metric, comparison, threshold and kind; `started` is when the workers started (RFC 3339), from which the
    seconds count, since nothing else is known of the program's clock.
    """

    def __init__(self, goal: Mapping[str, Any], started: str | None) -> None:
        self._goal = goal
        self._names = goal_names(goal["metric"])
        self._started = None if started is None else datetime.fromisoformat(started).timestamp()
        self._value: float | None = None  # that which reached the goal, else the best
        self._last: float | None = None
        self._moment = ""  # of the goal, else of the last value
        self._reached = False

    def see(self, metric: Mapping[str, Any]) -> None:
        """Take rank 0's next metric, as by `metric_of`."""
        value, comparison = metric["value"], self._goal["comparison"]
        if metric["name"] not in self._names or not number(value):
            return
        self._last = value
        if self._reached:
            return
        self._moment = metric["time"]
        self._reached = meets(value, comparison, self._goal["threshold"])
        if self._value is None or meets(value, comparison, self._value):
            self._value = value

    def result(self) -> dict[str, Any] | None:
        """As `result_of` gives it; None where the metric was not reported."""
        if self._value is None:
            return None
        seconds = None
        if self._started is not None:
            seconds = max(0.0, round(datetime.fromisoformat(self._moment).timestamp() - self._started, 3))
        goal = {**self._goal, "value": self._value, "last": self._last}
        outcome = "goal_reached" if self._reached else "goal_missed"
        return result_of({"outcome": outcome, "goal": goal, "wall_seconds": seconds})


def goal_names(metric: str) -> tuple[str, str, str]:
    """The names under which a task reports its goal's metric: a goal says "Prec@1", its metric "val_global_Prec@1"."""
    return (metric, f"val_{metric}", f"val_global_{metric}")


def last_result(folder: Path) -> dict[str, Any] | None:
    """The result that rank 0 reported last in a run's folder, as by `result_of`; None if there is none."""
    log = log_files(folder).get(0)
    if log is None:
        return None
    reading = Reading(world_size=1)
    with open(log, "rb") as file:
        for _ in reading.metrics(0, file):
            pass
    return reading.result


def metric_of(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """A metric event for metrics.jsonl: rank, time (RFC 3339), name, value, and if reported epoch, step, seconds, unit.

    None where name, value or time is none. A value is a number or one of "nan", "inf", "-inf".
    """
    name, value, moment = event.get("name"), event.get("value"), event["time"]
    if not isinstance(name, str) or not name or not (number(value) or value in _SPECIAL) or not 0 <= moment <= LATEST:
        return None
    metric = {"rank": event["rank"], "time": timestamp(moment), "name": name, "value": value}
    for key in ("epoch", "step", "seconds"):
        if key in event and number(event[key]):
            metric[key] = event[key]
    if isinstance(event.get("unit"), str):
        metric["unit"] = event["unit"]
    return metric


def json_line(row: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(row).encode() + b"\n"


def resource_lines(samples: BinaryIO) -> Iterator[bytes]:
    """The lines of resources.jsonl with times as RFC 3339, without those that are torn."""
    while line := samples.readline(LINE_LIMIT):
        try:
            row = plain(parse_document(line))
        except ValueError:
            continue
        if number(row.get("time")) and 0 <= row["time"] <= LATEST:
            row["time"] = timestamp(row["time"])
        yield json_line(row)


def result_of(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """A result event with every field present and of its type (None where it was not reported), or None.

    Only outcomes of the contract count; any other field that is malformed is treated as not reported.
    """
    if event.get("outcome") not in contract.OUTCOMES:
        return None
    timings = event.get("timings")
    details = event.get("details")
    return {
        "outcome": event["outcome"],
        "goal": _goal(event.get("goal")),
        "budget_seconds": _amount(event.get("budget_seconds")),
        "wall_seconds": _amount(event.get("wall_seconds")),
        "training_seconds": _amount(event.get("training_seconds")),
        "timings": {
            category: {key: spread[key] for key in SPREAD}
            for category, spread in (timings.items() if isinstance(timings, dict) else ())
            if isinstance(spread, dict) and all(_amount(spread.get(key)) is not None for key in SPREAD)
        },
        "updates": _amount(event.get("updates")),
        "samples": _amount(event.get("samples")),
        "epochs": _amount(event.get("epochs")),
        "synthetic": event.get("synthetic") is True,
        "data": one_line(event["data"]) if isinstance(event.get("data"), str) else None,
        "details": plain(details) if isinstance(details, dict) else {},
    }


def meets(value: Any, comparison: str, threshold: float) -> bool:
    """Whether a metric's value reaches a threshold."""
    if not number(value):
        return False
    return bool(value >= threshold if comparison == ">=" else value <= threshold)


def proves(goal: Mapping[str, Any], lines: Iterable[bytes]) -> bool:
    """Whether the lines of metrics.jsonl hold the goal's metric with the goal's value."""
    names = goal_names(goal["metric"])
    mark = json.dumps(goal["metric"])[1:].encode()
    for line in lines:
        if mark not in line:
            continue
        metric = json.loads(line)
        if metric.get("name") not in names or not number(metric.get("value")):
            continue
        if math.isclose(metric["value"], goal["value"], rel_tol=1e-9, abs_tol=1e-12):
            return True
    return False


def plain(value: Any, depth: int = 24) -> Any:
    """A parsed JSON value as strict JSON can hold it: non-finite numbers become texts, and nesting has an end."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict | list) and depth == 0:
        return "…"
    if isinstance(value, dict):
        return {key: plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item, depth - 1) for item in value]
    return value


def one_line(text: str, limit: int = 200) -> str:
    """Foreign text for a line of a file: printable, no line ends, not endless."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(shown.split())[:limit]


def number(value: Any) -> bool:
    """Whether a JSON value is a finite number that a float can hold."""
    kind = type(value)  # exact, and quicker than isinstance: a bool is no number, and JSON has no subclasses
    if kind is float:
        return math.isfinite(value)
    return kind is int and abs(value) < 1 << 63


def _amount(value: Any) -> Any:
    return value if number(value) and value >= 0 else None


def _goal(goal: Any) -> dict[str, Any] | None:
    if not isinstance(goal, dict) or goal.get("comparison") not in (">=", "<=") or not number(goal.get("threshold")):
        return None
    if not isinstance(goal.get("metric"), str) or not one_line(goal["metric"]):
        return None
    return {
        "metric": one_line(goal["metric"]),
        "comparison": goal["comparison"],
        "threshold": goal["threshold"],
        "kind": goal["kind"] if goal.get("kind") in ("full", "light") else None,
        "value": goal["value"] if number(goal.get("value")) else None,
        "last": goal["last"] if number(goal.get("last")) else None,
    }
