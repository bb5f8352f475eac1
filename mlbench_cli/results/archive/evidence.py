"""The evidence of a run, in its folder or its archive: what was observed, samples, and the events in the logs of ranks.

Whatever a program wrote is untrusted: malformed rows and events are ignored, and events are counted then.
"""

import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from msgspec import Struct

from mlbench_cli.errors import DamagedArchive, UsageError
from mlbench_cli.model.goals import KINDS, MAX_METRICS, Goal, is_finite_number
from mlbench_cli.model.run import JsonObject, Observation, Run
from mlbench_cli.model.spec import OPEN, RunSpec
from mlbench_cli.results.archive.documents import DataIdentityDocument
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.storage import run_folder
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.tasks.catalog import TaskRules
from mlbench_cli.util.files import read_end
from mlbench_cli.util.json_text import format_row, make_strict, parse_document
from mlbench_cli.util.text import one_line
from mlbench_cli.util.times import MAX_SECONDS, parse_timestamp, read_moment, timestamp
from task_images import contract

MAX_LINKS = 64  # of a network, and probes and counters
MAX_ROW_BYTES = 1 << 20  # of resources.jsonl; longer lines are not rows
# Longer events are ignored and counted, so that a log without line ends needs no memory.
MAX_LINE_BYTES = 1 << 20
SPREAD = ("min", "mean", "max", "rank0")
MAX_AMOUNT = 1e100  # of an amount: larger ones are not measurements, and their sums would not be numbers
# Two clocks of a machine, read together, differ by less than this even if it is busy.
MAX_CLOCK_ERROR = 0.1
MAX_SLEW = 0.0005  # maximum slew rate of NTP in seconds per second
_MARK = contract.PREFIX.encode() + b"{"
_JSON = json.JSONDecoder()
# What reporters write for values that are not finite -> the words of metrics.jsonl.
_SPECIAL = {
    **dict.fromkeys(("nan", "+nan", "-nan"), "nan"),
    **dict.fromkeys(("inf", "+inf", "infinity", "+infinity"), "inf"),
    **dict.fromkeys(("-inf", "-infinity"), "-inf"),
}


# What readers of environment.json rely on; all else that a rank reports of itself is only shown.
_FACT_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("env", "environ", "environment", "variables", "packages", "method", "nccl"), (dict,)),
    **dict.fromkeys(("cores", "cpu_quota"), (int, float)),
    "gpus": (list, str),
}


class Evidence(Struct, frozen=True):
    """The evidence that a run left behind. `logs` opens each rank's log for reading, repeatedly if needed."""

    id: str
    name: str
    created: str  # RFC 3339
    spec: RunSpec
    rules: TaskRules | None
    observation: Observation
    provenance: Mapping[str, Any]  # Provenance.to_dict
    samples: Callable[[], Iterable[Mapping[str, Any]]]  # the rows of resources.jsonl
    logs: Mapping[int, Callable[[], BinaryIO]]
    shaping: Mapping[str, Any] | None = None  # shaping.json, if the engine emulated the network
    faults: Mapping[str, Any] | None = None  # faults.json, if faults occurred, or ranks could be restarted

    @property
    def goal(self) -> Goal | None:
        """The run's goal; None for a task without one."""
        return None if self.rules is None else self.rules.find_goal(self.spec.parameters, self.spec.goal)

    @property
    def span(self) -> tuple[float | None, float]:
        """Start of the first worker and end of the last, in seconds since 1970; the start is None if none started."""
        workers = self.observation.workers
        started = min((worker.started for worker in workers if worker.started is not None), default=None)
        ends = [worker.finished for worker in workers if worker.finished is not None]
        finished = max(ends, default=self.observation.time)
        return started, max(finished, parse_timestamp(self.created) if started is None else started)

    def writers(self, number: int) -> Collection[int]:
        """The ranks that write to the log with a number: one rank, or all ranks of a worker that share a log."""
        spec = self.spec
        if number >= spec.process_count:
            return ()
        if not spec.run_on_all:  # a launcher on rank 0 prints the output of all ranks
            return range(spec.world_size) if number == 0 else ()
        ranks = spec.ranks_of(spec.unit_of(number))
        return {number, *(rank for rank in ranks if number == ranks[0] and rank not in self.logs)}

    @property
    def is_alone(self) -> bool:
        """Whether each worker has its own node, so that other processes there do not belong to the run."""
        nodes = [worker.node for worker in self.observation.workers]
        return not self.spec.functional_only and len(set(nodes)) == len(nodes)


def collect_evidence(run: Run, document: Mapping[str, Any], observation: Observation) -> Evidence:
    """The evidence in the folder of a run that is not yet sealed; `document` is its run.json."""
    folder = RunFolder(run.folder)
    logs: dict[int, Callable[[], BinaryIO]] = {rank: partial(_open, path) for rank, path in folder.logs().items()}
    rules, provenance = _rules(document), document.get("provenance") or {}
    samples = partial(read_samples, run.folder / run_folder.RESOURCES)
    shaping = folder.read_json(run_folder.SHAPING)
    head = (run.id, run.name, run.created, run.spec, rules)
    return Evidence(*head, observation, provenance, samples, logs, shaping, folder.read_json(run_folder.FAULTS))


def load_evidence(archive: Archive) -> Evidence:
    """The evidence in an archive. Raises DamagedArchive, which names the file and the problem."""
    run = archive.run
    try:
        spec = RunSpec.from_dict(run["spec"])
        rules = _rules(run)
    except (UsageError, TypeError, ValueError, KeyError) as error:
        message = error.message if isinstance(error, UsageError) else str(error)
        raise DamagedArchive(
            archive.path, run_folder.RUN, f"it cannot be judged: {message}", problem="schema"
        ) from None
    logs: dict[int, Callable[[], BinaryIO]] = {
        rank: partial(archive.open_file, name) for rank, name in archive.logs.items()
    }
    observation, provenance = _load_observation(archive), run.get("provenance") or {}
    head = (run["id"], run["name"], run["created"], spec, rules)
    shaping = archive.document(run_folder.SHAPING) if run_folder.SHAPING in archive.names else None
    faults = archive.document(run_folder.FAULTS) if run_folder.FAULTS in archive.names else None
    return Evidence(*head, observation, provenance, archive.samples, logs, shaping, faults)


def _rules(document: Mapping[str, Any]) -> TaskRules | None:
    """The task's rules in run.json."""
    rules = document["task"]
    return None if rules is None else TaskRules.from_dict(rules)


def _load_observation(archive: Archive) -> Observation:
    document = archive.document(run_folder.OBSERVATION)
    document.pop("schema_version")
    try:
        return Observation.from_dict(document)
    except ValueError as error:
        raise DamagedArchive(
            archive.path, run_folder.OBSERVATION, f"it is not an observation: {error}", problem="schema"
        ) from None


def read_last_samples(path: Path, limit: int = 64 * 1024) -> Iterator[Mapping[str, object]]:
    """The complete rows in the last `limit` bytes of resources.jsonl; none if the file is missing."""
    data = read_end(path, limit)
    if len(data) == limit:
        data = data[data.find(b"\n") + 1 :]  # the first row may be truncated
    return _whole_rows(io.BytesIO(data))


def _open(path: Path) -> BinaryIO:
    return open(path, "rb")


# --- samples ----------------------------------------------------------------------------------------------------------


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of resources.jsonl with times as RFC 3339, also from a file that is not yet normalized."""
    if path.is_file():
        with open(path, "rb") as samples:
            yield from _whole_rows(samples)


def _whole_rows(samples: BinaryIO) -> Iterator[dict[str, Any]]:
    """The rows of resources.jsonl with times as RFC 3339, without truncated rows."""
    while line := samples.readline(MAX_ROW_BYTES):
        try:
            row = make_strict(parse_document(line))
        except ValueError:
            continue
        if is_finite_number(moment := row.get("time")) and 0 <= moment <= MAX_SECONDS:
            row["time"] = timestamp(moment)
        yield row


class SampleWatch:
    """Collects facts about a run's clocks and logs from the rows of resources.jsonl, which it passes through.

    `log_bytes` is the last size of each rank's log, `machines` the number of rows about machine load, `locks` the lock
    states of the machines, `first` and `last` the times of the earliest and latest row. `probe` is the report about the
    network between the nodes of a run, and `interfaces` what their interfaces had counted at the end, by node.
    """

    def __init__(self) -> None:
        self.stepped_seconds = 0.0
        self.log_bytes: dict[int, int] = {}
        self.machines = 0
        self.locks: set[str] = set()
        self.first: float | None = None
        self.last: float | None = None
        self.probe: Mapping[str, Any] | None = None
        self.interfaces: dict[int, Mapping[str, Any]] = {}
        self._clocks: dict[int, tuple[float, float]] = {}  # worker -> the row's time, and its seconds since the start

    def watch(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yield the rows unchanged, and record their facts."""
        for row in rows:
            moment = read_moment(row.get("time"))
            if moment is not None:
                self.first = moment if self.first is None else min(self.first, moment)
                self.last = moment if self.last is None else max(self.last, moment)
            rank, size = row.get("rank"), row.get("log_bytes")
            if isinstance(rank, int) and isinstance(size, int):
                self.log_bytes[rank] = size
            if row.get("kind") == "machine":
                self.machines += 1
                if isinstance(row.get("lock"), str):
                    self.locks.add(row["lock"])
                self._compare_clocks(row, moment)
            elif row.get("kind") == "network":
                self.probe = self.probe or row
            elif row.get("kind") == "interface" and row.get("worker") in range(MAX_LINKS):
                self.interfaces[row["worker"]] = row
            yield row

    def _compare_clocks(self, row: Mapping[str, Any], moment: float | None) -> None:
        elapsed, worker = row.get("elapsed_seconds"), row.get("worker")
        if moment is None or not is_finite_number(elapsed):
            return
        key = worker if isinstance(worker, int) else 0
        before, self._clocks[key] = self._clocks.get(key), (moment, elapsed)
        if before is not None:
            self.stepped_seconds += find_step(moment - before[0], elapsed - before[1])


def find_step(wall: float, seconds: float) -> float:
    """By how much the wall clock was changed, if it shows `wall` seconds for `seconds`; 0 if both agree."""
    difference = abs(wall - seconds)
    return difference if difference > MAX_CLOCK_ERROR + MAX_SLEW * abs(seconds) else 0.0


# --- events -----------------------------------------------------------------------------------------------------------


class LogCounts(Struct):
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
            yield from find_events(block[found:position], counts)


def find_events(line: bytes, counts: LogCounts | None = None) -> Iterator[JsonObject]:
    """The events in one line of a log: one that ends the line, or several, or some with other text behind them."""
    if (event := contract.parse_event(line)) is not None:
        yield event
        return
    for part in map(_cut_event, line.split(_MARK)[1:]):
        if (event := contract.parse_event(part)) is not None:
            yield event
        elif counts is not None:
            counts.ignore(_explain_event(part))


def _cut_event(text: bytes) -> bytes:
    """An event without what follows it on its line, such as a progress bar, from the text behind its mark."""
    try:  # as Latin-1, of which each byte is a character
        return _MARK + text[: _JSON.raw_decode("{" + text.decode("latin-1"))[1] - 1]
    except (ValueError, RecursionError):
        return _MARK + text


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


class Checkpoint(NamedTuple):
    """A checkpoint that was written or read: when it was done (seconds since 1970), its update, and what it took."""

    moment: float
    update: float
    seconds: float


class ReportedFacts(Struct, frozen=True):
    """The facts in all logs of a run.

    `result` is the last result in rank 0's own log, as returned by `parse_result`; if there is none and rank 0 was
    watched, the result derived from its metrics. `environments` are facts by rank, `metrics` the last values of
    rank 0 by name, `phase` its last phase event. `written` and `restored` are the checkpoints of rank 0. `is_watched`:
    the result was derived from metrics.
    """

    result: JsonObject | None
    environments: Mapping[int, Mapping[str, Any]]
    metrics: dict[str, float | str]
    phase: JsonObject
    written: Sequence[Checkpoint]
    restored: Sequence[Checkpoint]
    is_watched: bool
    logs: Mapping[int, "LogFacts"]


class LogFacts(Struct):
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
    _moments: dict[int, float] = {}

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


def collect_events(evidence: Evidence, write_metric: Callable[[bytes], object]) -> ReportedFacts:
    """Read the logs of all ranks once, in bounded memory. Ignores events of ranks that do not write to their log.

    `write_metric` is called with each line of metrics.jsonl, in the order of logs and of lines in them. Of a user's
    command that is measured against a task's goal, the result is derived from its metrics if it reports none.
    """
    watcher = None
    if evidence.spec.preset == OPEN and evidence.goal is not None:
        # By the clock of the machine that times rank 0's metrics.
        started = next((worker.started for worker in evidence.observation.workers if worker.rank == 0), None)
        watcher = GoalWatcher(evidence.goal, evidence.spec.goal, None if started is None else timestamp(started))
    collector = _EventCollector(evidence, watcher)
    for rank, open_log in evidence.logs.items():
        with open_log() as log:
            for line in collector.read(rank, log):
                write_metric(line)
    reported = collector.reported
    result = reported or (watcher.result() if watcher else None)
    return ReportedFacts(
        result,
        collector.environments,
        collector.metrics,
        collector.phase,
        written=collector.checkpoints["checkpoint_seconds"],
        restored=collector.checkpoints["restore_seconds"],
        is_watched=reported is None,
        logs=collector.logs,
    )


class _EventCollector:
    """One pass over the logs of a run."""

    MAX_CHECKPOINTS = 10_000

    def __init__(self, evidence: Evidence, watcher: "GoalWatcher | None") -> None:
        self._world_size = evidence.spec.world_size
        self._is_task = evidence.spec.runs_task_program
        self._writers = evidence.writers
        self._watcher = watcher
        self.logs: dict[int, LogFacts] = {}
        self.reported: JsonObject | None = None
        self.environments: dict[int, JsonObject] = {}
        self.metrics: dict[str, float | str] = {}
        self.phase: JsonObject = {}
        self.checkpoints: dict[str, list[Checkpoint]] = {"checkpoint_seconds": [], "restore_seconds": []}

    def read(self, number: int, log: BinaryIO) -> Iterator[bytes]:
        """Read rank `number`'s log to its end; yields its lines for metrics.jsonl."""
        facts = self.logs[number] = LogFacts(LogCounts())
        own = self._writers(number)
        for event in read_events(log, facts.counts):
            rank, kind = event["rank"], event["event"]
            if rank >= self._world_size or rank not in own:
                # A command may start further ranks itself, such as torchrun with several processes on each worker.
                facts.foreign += rank < self._world_size or self._is_task
                continue
            facts.take(event)
            if kind == "metric" and not (metric := parse_metric(event)):
                facts.counts.ignore(_explain_metric(event))
            elif kind == "metric" and metric:
                if rank == number == 0:
                    self._take_metric(metric)
                yield format_row(metric)
            elif kind == "environment":
                self.environments.setdefault(rank, {}).update(parse_environment(event, facts.counts))
            elif kind == "phase" and rank == number == 0:
                self.phase = parse_phase(event, self.phase)
            elif kind == "result" and rank == number == 0:
                found = parse_result(event)
                if found is not None and self.reported is not None and found != self.reported:
                    facts.counts.ignore("a result that differs from the last one")
                self.reported = found or self.reported
                for why in _find_ignored_fields(event, found or {}):
                    facts.counts.ignore(why)
                if found is None:
                    facts.counts.ignore(f"the outcome of a result is not one of {', '.join(contract.OUTCOMES)}")

    def _take_metric(self, metric: Mapping[str, Any]) -> None:
        if self._watcher:
            self._watcher.take(metric)
        name = one_line(metric["name"], 100)
        if name in self.metrics or len(self.metrics) < MAX_METRICS:
            self.metrics[name] = metric["value"]
        kept = self.checkpoints.get(metric["name"])
        if kept is None or len(kept) >= self.MAX_CHECKPOINTS:
            return
        if "step" in metric and is_finite_number(seconds := metric["value"]):
            moment, update = parse_timestamp(metric["time"]), float(metric["step"])
            kept.append(Checkpoint(moment, update, max(0.0, float(seconds))))


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
    # Bare NaN and Infinity, as Python's json and most reporters print them; a count of operations is more than 2**63.
    name, value, moment = event.get("name"), make_strict(event.get("value")), event["time"]
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
    name, value = one_line(event["name"], 60), json.dumps(make_strict(event.get("value")))  # a text has quotes
    if not 0 <= event["time"] <= MAX_SECONDS:
        return f"the time of {name} is {event['time']:g}, which is not in seconds since 1970"
    return f"the value of {name} is {one_line(value, 40)}, which is not a number"


def parse_environment(event: Mapping[str, Any], counts: LogCounts) -> JsonObject:
    """What a rank reports of itself, without facts of another type than readers expect, which are counted."""
    known: JsonObject = make_strict(event)
    for name, kinds in _FACT_TYPES.items():
        if known.get(name) is not None and not isinstance(known[name], kinds):
            counts.ignore(f"{name} of an environment is {one_line(json.dumps(known.pop(name)), 40)}")
    return known


def parse_phase(event: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, object]:
    """`phase` with its finite epoch, epochs, step, steps; if the event has no epochs, those of `before`."""
    phase = event.get("phase")
    if not isinstance(phase, str) or not phase:
        return dict(before)
    numbers = {key: event[key] for key in ("epoch", "epochs", "step", "steps") if is_finite_number(event.get(key))}
    # A step belongs to its epoch; omitted epochs are unchanged.
    kept = {key: before[key] for key in ("epoch", "epochs") if key in before}
    return {**kept, **numbers, "phase": one_line(phase, 40)}


_AMOUNTS = ("budget_seconds", "wall_seconds", "training_seconds", "updates", "samples", "epochs")


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
        **{name: read_amount(event.get(name)) for name in _AMOUNTS},
        "timings": {
            category: {key: spread[key] for key in SPREAD}
            for category, spread in (timings.items() if isinstance(timings, dict) else ())
            if isinstance(spread, dict) and all(read_amount(spread.get(key)) is not None for key in SPREAD)
        },
        "synthetic": event.get("synthetic") is True,
        "data": one_line(event["data"]) if isinstance(event.get("data"), str) else None,
        "data_identity": _parse_data_identity(event.get("data_identity")),
        "details": make_strict(details) if isinstance(details, dict) else {},
    }


def _find_ignored_fields(event: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[str]:
    """Why fields of a valid result event are not in its result, such as seconds by a clock that was set back."""
    for name in (*_AMOUNTS, "goal"):
        if name in result and result[name] is None and event.get(name) is not None:
            value = one_line(json.dumps(make_strict(event[name])), 40)
            kind = "goal" if name == "goal" else "number from 0 on"
            yield f"{name} of the result is {value}, which is not a {kind}"
    timings: Any = event.get("timings")
    for name in timings if isinstance(timings, dict) and "timings" in result else ():
        if name not in result["timings"]:
            value = one_line(json.dumps(make_strict(timings[name])), 80)
            yield f"{one_line(str(name), 40)} of the timings is {value}, not {', '.join(SPREAD)} from 0 on"


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
