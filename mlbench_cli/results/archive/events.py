"""Reads events, metrics and the task's result from the logs of ranks. Logs are untrusted: malformed events are
ignored."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mlbench_cli.model.goals import KINDS, Goal, is_finite_number
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.archive.documents import DataIdentityDocument
from mlbench_cli.util.json_text import format_row, make_strict
from mlbench_cli.util.text import one_line
from mlbench_cli.util.times import MAX_SECONDS, parse_timestamp, timestamp
from task_images import contract

# Longer events are ignored and counted, so that a log without line ends needs no memory.
MAX_LINE_BYTES = 1 << 20
SPREAD = ("min", "mean", "max", "rank0")
MAX_AMOUNT = 1e100  # of an amount: larger ones are not measurements, and their sums would not be numbers
_MARK = contract.PREFIX.encode() + b"{"
# What reporters write for values that are not finite -> the words of metrics.jsonl.
_SPECIAL = {
    **dict.fromkeys(("nan", "+nan", "-nan"), "nan"),
    **dict.fromkeys(("inf", "+inf", "infinity", "+infinity"), "inf"),
    **dict.fromkeys(("-inf", "-infinity"), "-inf"),
}


@dataclass
class LogCounts:
    """Counters of one pass over a log."""

    bytes: int = 0
    too_long: int = 0  # events of more than MAX_LINE_BYTES, which are ignored
    ignored: int = 0  # malformed events
    why: str = ""  # of the first one

    def ignore(self, why: str) -> None:
        """Count an event that is not used."""
        self.ignored += 1
        self.why = self.why or why


def read_events(log: BinaryIO, counts: LogCounts | None = None) -> Iterator[JsonObject]:
    """The events in a log, in order. Lines without an event cost only a byte search."""
    counts = counts or LogCounts()
    for block in _read_whole_lines(log, counts):
        position = 0
        while (found := block.find(_MARK, position)) >= 0:
            position = block.find(b"\n", found) + 1 or len(block)
            line = block[found:position]
            if (event := contract.parse_event(line)) is not None:
                yield event
            else:
                counts.ignore(_explain_event(line))


def _explain_event(line: bytes) -> str:
    """Why a line that begins like an event is not a valid one."""
    try:
        record = json.loads(line[len(contract.PREFIX) :])
    except (ValueError, RecursionError):
        return "it is not one JSON object on a line"
    if not isinstance(record, dict) or record.get("v") != contract.VERSION:
        return f'its "v" is not {contract.VERSION}'
    if record.get("event") not in contract.KINDS:
        return f'its "event" is not one of {", ".join(contract.KINDS)}'
    return 'its "rank" or "time" is not a number in range'


def _read_whole_lines(log: BinaryIO, counts: LogCounts) -> Iterator[bytes]:
    """Yield blocks that end at a line end, or at the end of the log.

    If an unfinished line is longer than a block, everything before its first event marker is skipped, because it may be
    a progress bar.
    """
    rest, skips = b"", False
    while block := log.read(MAX_LINE_BYTES):
        counts.bytes += len(block)
        if skips:  # until the end of an event that is too long
            _, found, block = block.partition(b"\n")
            skips = not found
        data = rest + block
        end = data.rfind(b"\n") + 1
        if end:
            yield data[:end]
        rest = data[end:]
        if len(rest) > MAX_LINE_BYTES:
            mark = rest.find(_MARK)
            rest = rest[mark:] if mark >= 0 else rest[1 - len(_MARK) :]
            if len(rest) > MAX_LINE_BYTES:
                counts.too_long += 1
                rest, skips = b"", True
    if rest:
        yield rest


@dataclass(frozen=True)
class ReportedFacts:
    """The facts in all logs of a run.

    `result` is the last result in rank 0's own log, as returned by `parse_result`; if there is none and rank 0 was
    watched, the result derived from its metrics. `environments` are facts by rank, `metrics` the last values of
    rank 0 by name, `phase` its last phase event, `probes` its network events. `is_watched`: the result was derived from
    metrics.
    """

    result: JsonObject | None
    environments: Mapping[int, Mapping[str, Any]]
    metrics: dict[str, float | str]
    phase: JsonObject
    probes: Sequence[Mapping[str, Any]]
    is_watched: bool
    logs: Mapping[int, "LogFacts"]


@dataclass
class LogFacts:
    """The facts in one rank's log. Times of events are seconds since 1970; `backward` is the largest backward step
    between consecutive events of a rank; `first_reading` and `last_reading` are the time and the seconds of rank 0's
    first and last metric that has both; `foreign` counts events of ranks that do not write to this log.
    """

    counts: LogCounts
    first: float | None = None
    last: float | None = None
    backward: float = 0.0
    first_reading: tuple[float, float] | None = None
    last_reading: tuple[float, float] | None = None
    foreign: int = 0
    _moments: dict[int, float] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Record the next valid event."""
        moment, rank = float(event["time"]), event["rank"]
        self.backward = max(self.backward, self._moments.get(rank, moment) - moment)
        self._moments[rank] = moment
        self.first = moment if self.first is None else min(self.first, moment)
        self.last = moment if self.last is None else max(self.last, moment)
        if event["event"] == "metric" and rank == 0 and is_finite_number(event.get("seconds")):
            self.last_reading = (moment, float(event["seconds"]))
            self.first_reading = self.first_reading or self.last_reading


def collect_events(
    logs: Mapping[int, Callable[[], BinaryIO]],
    world_size: int,
    write_metric: Callable[[bytes], object],
    watcher: "GoalWatcher | None",
    writers: Callable[[int], Collection[int]],
) -> ReportedFacts:
    """Read the logs of all ranks once, in bounded memory. Ignores events of ranks outside the run.

    `write_metric` is called with each line of metrics.jsonl, in the order of logs and of lines in them. `watcher` finds
    the result of a program that does not report one. `writers` returns the ranks that write to the log with a number:
    events of others are ignored.
    """
    collector = _EventCollector(world_size, watcher, writers)
    for rank, open_log in logs.items():
        with open_log() as log:
            for line in collector.read(rank, log):
                write_metric(line)
    reported = collector.reported
    result = reported or (watcher.result() if watcher else None)
    facts = (collector.environments, collector.metrics, collector.phase, collector.probes)
    return ReportedFacts(result, *facts, is_watched=reported is None, logs=collector.logs)


class _EventCollector:
    """One pass over the logs of a run."""

    MAX_NAMES = 1000
    MAX_PROBES = 8

    def __init__(
        self,
        world_size: int,
        watcher: "GoalWatcher | None",
        writers: Callable[[int], Collection[int]],
    ) -> None:
        self._world_size = world_size
        self._writers = writers
        self.logs: dict[int, LogFacts] = {}
        self.reported: JsonObject | None = None
        self._watcher = watcher
        self.environments: dict[int, JsonObject] = {}
        self.metrics: dict[str, float | str] = {}
        self.phase: JsonObject = {}
        self.probes: list[Mapping[str, Any]] = []

    def read(self, number: int, log: BinaryIO) -> Iterator[bytes]:
        """Read rank `number`'s log to its end; yields its lines for metrics.jsonl."""
        facts = self.logs[number] = LogFacts(LogCounts())
        own = self._writers(number)
        for event in read_events(log, facts.counts):
            rank, kind = event["rank"], event["event"]
            if rank >= self._world_size or rank not in own:
                facts.foreign += 1
                continue
            facts.take(event)
            if kind == "metric" and not (metric := parse_metric(event)):
                facts.counts.ignore(_explain_metric(event))
            elif kind == "metric" and metric:
                if rank == number == 0:
                    self._take_metric(metric)
                yield format_row(metric)
            elif kind == "environment":
                self.environments.setdefault(rank, {}).update(event)
            elif kind == "phase" and rank == number == 0:
                self.phase = parse_phase(event, self.phase)
            elif kind == "network" and rank == number == 0 and len(self.probes) < self.MAX_PROBES:
                self.probes.append(event)
            elif kind == "result" and rank == number == 0:
                found = parse_result(event)
                if found is not None and self.reported is not None and found != self.reported:
                    facts.counts.ignore("a result that differs from the last one")
                self.reported = found or self.reported
                if found is None:
                    facts.counts.ignore(f"the outcome of a result is not one of {', '.join(contract.OUTCOMES)}")

    def _take_metric(self, metric: Mapping[str, Any]) -> None:
        if self._watcher:
            self._watcher.take(metric)
        name = one_line(metric["name"], 100)
        if name in self.metrics or len(self.metrics) < self.MAX_NAMES:
            self.metrics[name] = metric["value"]


class GoalWatcher:
    """Derives the result of a program that only reports a metric, for a given goal.

    `started` is when the workers started (RFC 3339). Seconds count from then, because the program's clock is unknown.
    """

    def __init__(self, goal: Goal, kind: str, started: str | None) -> None:
        self._goal = goal
        self._kind = kind
        self._started = None if started is None else parse_timestamp(started)
        self._value: float | None = None  # the value that reached the goal, else the best one
        self._last: float | None = None
        self._moment = ""  # of the goal, else of the last value
        self._reached = False

    def take(self, metric: Mapping[str, Any]) -> None:
        """Record rank 0's next metric, as returned by `parse_metric`."""
        value = metric["value"]
        if metric["name"] not in self._goal.metric_names or not is_finite_number(value):
            return
        self._last = value
        if self._reached:
            return
        self._moment = metric["time"]
        self._reached = self._goal.meets(value)
        if self._value is None or not self._goal.better(self._value, value):
            self._value = value

    def result(self) -> JsonObject | None:
        """The result in the form of `parse_result`; None if the metric was not reported."""
        if self._value is None:
            return None
        seconds = None
        if self._started is not None:
            seconds = max(0.0, round(parse_timestamp(self._moment) - self._started, 3))
        goal = {**self._goal.to_dict(), "kind": self._kind, "value": self._value, "last": self._last}
        outcome = "goal_reached" if self._reached else "goal_missed"
        return parse_result({"outcome": outcome, "goal": goal, "wall_seconds": seconds})


def parse_metric(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """A metric event for metrics.jsonl: rank, time (RFC 3339), name, value, and if reported epoch, step, seconds, unit.

    None if name, value or time is missing or malformed. A value is a number, or one of _SPECIAL in any case.
    """
    name, value, moment = event.get("name"), event.get("value"), event["time"]
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)  # bare NaN and Infinity, as Python's json and most reporters print them
    if isinstance(value, str):
        value = _SPECIAL.get(value.strip().lower())
    if not isinstance(name, str) or not name or not 0 <= moment <= MAX_SECONDS:
        return None
    if not is_finite_number(value) and not isinstance(value, str):
        return None
    metric = {"rank": event["rank"], "time": timestamp(moment), "name": name, "value": value}
    for key in ("epoch", "step", "seconds"):
        if key in event and is_finite_number(event[key]):
            metric[key] = event[key]
    if isinstance(event.get("unit"), str):
        metric["unit"] = event["unit"]
    return metric


def _explain_metric(event: Mapping[str, Any]) -> str:
    """Why `parse_metric` refuses a metric."""
    if not isinstance(event.get("name"), str) or not event["name"]:
        return "a metric has no name"
    return (
        f"the value of {one_line(event['name'], 60)} is {one_line(str(event.get('value')), 40)}, which is not a number"
    )


def parse_phase(event: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, object]:
    """`phase` with its finite epoch, epochs, step, steps; if the event has no epochs, those of `before`."""
    phase = event.get("phase")
    if not isinstance(phase, str) or not phase:
        return dict(before)
    numbers = {key: event[key] for key in ("epoch", "epochs", "step", "steps") if is_finite_number(event.get(key))}
    # A step belongs to its epoch; omitted epochs are unchanged.
    kept = {key: before[key] for key in ("epoch", "epochs") if key in before}
    return {**kept, **numbers, "phase": one_line(phase, 40)}


def parse_result(event: Mapping[str, Any]) -> dict[str, object] | None:
    """A result event with every field present and valid (None if not reported); None for an invalid event.

    The outcome must be one of the contract; other malformed fields are treated as not reported.
    """
    if event.get("outcome") not in contract.OUTCOMES:
        return None
    timings = event.get("timings")
    details = event.get("details")
    return {
        "outcome": event["outcome"],
        "goal": _parse_goal(event.get("goal")),
        "budget_seconds": read_amount(event.get("budget_seconds")),
        "wall_seconds": read_amount(event.get("wall_seconds")),
        "training_seconds": read_amount(event.get("training_seconds")),
        "timings": {
            category: {key: spread[key] for key in SPREAD}
            for category, spread in (timings.items() if isinstance(timings, dict) else ())
            if isinstance(spread, dict) and all(read_amount(spread.get(key)) is not None for key in SPREAD)
        },
        "updates": read_amount(event.get("updates")),
        "samples": read_amount(event.get("samples")),
        "epochs": read_amount(event.get("epochs")),
        "synthetic": event.get("synthetic") is True,
        "data": one_line(event["data"]) if isinstance(event.get("data"), str) else None,
        "data_identity": _parse_data_identity(event.get("data_identity")),
        "details": make_strict(details) if isinstance(details, dict) else {},
    }


def read_amount(value: Any) -> float | None:
    """A number from 0 to MAX_AMOUNT, as the log has it; None for anything else."""
    return value if is_finite_number(value) and 0 <= value <= MAX_AMOUNT else None


def _parse_data_identity(document: Any) -> DataIdentityDocument | None:
    """The data's identity as reported by the task; None if it reported none, or something invalid."""
    if not isinstance(document, dict):
        return None
    counts, official = document.get("counts"), document.get("official")
    digest, reason = document.get("digest"), document.get("reason")
    return {
        "counts": {
            one_line(str(part), 60): number
            for part, number in (counts.items() if isinstance(counts, dict) else ())
            if is_finite_number(number) and number >= 0
        },
        "digest": one_line(digest, 100) if isinstance(digest, str) else None,
        "official": official if isinstance(official, bool) else None,
        "reason": one_line(reason) if isinstance(reason, str) else None,
    }


def _parse_goal(document: Any) -> dict[str, object] | None:
    goal = Goal.parse(document)
    if goal is None or not one_line(goal.metric):
        return None
    return {
        **goal.to_dict(),
        "metric": one_line(goal.metric),
        "kind": document["kind"] if document.get("kind") in KINDS else None,
        "value": document["value"] if is_finite_number(document.get("value")) else None,
        "last": document["last"] if is_finite_number(document.get("last")) else None,
    }
