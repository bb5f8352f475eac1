"""The cost of a run's faults, for result.json: derived from faults.json and the checkpoints that rank 0 reported.

Every second from the start of the first rank to the end of the run is in exactly one of PARTS:

    startup       until the first attempt trains
    useful        training and validation that led to the result
    checkpointing waiting for a checkpoint to be written
    waiting       a rank was stopped or slowed, and recovered by itself
    lost          work after the checkpoint from which the next attempt resumed
    detection     from a fault to the end of its attempt
    restart       from the end of an attempt until the next one trains, excluding loading
    loading       reading the checkpoint
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.faults import FaultKind, Policy, plan_of
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.run import Finding
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import FaultsDocument, RecoveryDocument
from mlbench_cli.util.json_text import parse_document
from mlbench_cli.util.times import parse_timestamp

NOT_INJECTED = "fault_not_injected"
PARTS = ("startup", "useful", "checkpointing", "waiting", "lost", "detection", "restart", "loading")
CHECKPOINT, RESTORE = "checkpoint_seconds", "restore_seconds"
MAX_EVENTS = 10_000


class CheckpointMarks:
    """The checkpoints that rank 0 wrote and read, by their metrics: (time since 1970, update, seconds)."""

    def __init__(self) -> None:
        self.written: list[tuple[float, float, float]] = []
        self.read: list[tuple[float, float, float]] = []

    def take(self, line: bytes) -> None:
        """Record a line of metrics.jsonl."""
        if b"_seconds" not in line or not (b"checkpoint_" in line or b"restore_" in line):
            return
        row = parse_document(line)
        kept = {CHECKPOINT: self.written, RESTORE: self.read}.get(str(row.get("name")))
        step, value = row.get("step"), row.get("value")
        if kept is None or len(kept) >= MAX_EVENTS or row.get("rank") != 0:
            return
        if is_finite_number(step) and is_finite_number(value):
            kept.append((parse_timestamp(str(row["time"])), float(step), max(0.0, float(value))))


def faults_document(record: Mapping[str, Any] | None, marks: CheckpointMarks) -> FaultsDocument | None:
    """The cost of a run's faults; None without a record of faults, or with a malformed one."""
    attempts = _rows((record or {}).get("attempts"))
    ended = (record or {}).get("ended")
    if record is None or not attempts:
        return None
    ends = [_number(attempt.get("ended")) for attempt in attempts]
    wall = max([_number(ended), *ends])
    events = [event for event in _rows(record.get("events")) if isinstance(event.get("planned"), Mapping)]
    began = _number(record.get("began"))
    seconds = dict.fromkeys(PARTS, 0.0)
    recoveries: list[RecoveryDocument] = []
    timeline: list[list[Any]] = []
    before = None  # unfinished recovery of the previous attempt
    for number, attempt in enumerate(attempts):
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        # The time before the first attempt's ranks were started is part of its startup.
        start = _number(attempt.get("started")) if number else 0.0
        end = ends[number] if following is not None else wall
        trained = attempt.get("training")
        training = min(_number(trained), end) if is_finite_number(trained) else end
        loading = sum(cost for moment, _, cost in marks.read if start <= moment - began <= training + 1)
        loading = min(loading, training - start)
        timeline.append(["restart" if number else "startup", start, training])
        seconds["restart" if number else "startup"] += training - start - loading
        seconds["loading"] += loading
        if before is not None:
            before["restart"], before["loading"] = round(training - before["at"] - before["detection"], 3), loading
            before["restart"] = round(before["restart"] - loading, 3)
            before["seconds"] = round(training - before["at"] + before["lost"], 3)
            before = None
        if following is None:
            kept = fault = end
        else:
            fault = _find_fault(events, training, end)
            kept = _find_kept(marks, following, attempt, began, training, fault)
            seconds["lost"] += fault - kept
            seconds["detection"] += end - fault
            seconds["restart"] += _number(following.get("started")) - end
            again = _number(following.get("started"))
            timeline += [["lost", kept, fault], ["detection", fault, end], ["restart", end, again]]
            rank = attempt.get("rank")
            before = RecoveryDocument(
                at=round(fault, 3),
                rank=rank if isinstance(rank, int) else None,
                why=str(attempt.get("why"))[:40],
                detection=round(end - fault, 3),
                restart=0.0,
                loading=0.0,
                lost=round(fault - kept, 3),
                seconds=0.0,
            )
            recoveries.append(before)
        checkpointing = sum(cost for moment, _, cost in marks.written if training <= moment - began <= kept + 0.01)
        checkpointing = min(checkpointing, kept - training)
        waiting = min(_find_waiting(events, training, kept), kept - training - checkpointing)
        seconds["checkpointing"] += checkpointing
        seconds["waiting"] += waiting
        timeline.append(["useful", training, kept])
        seconds["useful"] += kept - training - checkpointing - waiting
    done = [event for event in events if event.get("problem") is None]
    costs = [cost for _, _, cost in marks.written]
    return {
        "script": None if record.get("script") is None else str(record["script"]),
        "policy": str(record.get("policy")),
        "planned": len(events),
        "injected": len(done),
        "attempts": len(attempts),
        "ranks": int(_number(attempts[-1].get("ranks"))),
        "wall_seconds": round(wall, 3),
        "seconds": {part: round(value, 3) for part, value in seconds.items()},
        "goodput": round(seconds["useful"] / wall, 4) if wall else None,
        "checkpoints": len(costs),
        "checkpoint_seconds": round(sum(costs) / len(costs), 4) if costs else None,
        "recoveries": recoveries,
        "timeline": [[part, round(begin, 3), round(end, 3)] for part, begin, end in timeline if end > begin],
        "events": [
            [
                str(event["planned"].get("kind"))[:10],
                target if isinstance(target := event["planned"].get("target"), int) else None,
                round(_number(event.get("at")), 3),
                round(_number(event["until"]), 3) if event.get("until") is not None else None,
            ]
            for event in done
        ],
    }


def _find_fault(events: list[Mapping[str, Any]], training: float, end: float) -> float:
    """When the fault that ended an attempt began; the end itself if none was injected."""
    ending = (FaultKind.KILL, FaultKind.STOP)
    moments = [
        _number(event.get("at"))
        for event in events
        if event.get("problem") is None and event["planned"].get("kind") in ending
    ]
    return max((moment for moment in moments if training <= moment <= end), default=end)


def _find_kept(
    marks: CheckpointMarks,
    following: Mapping[str, Any],
    attempt: Mapping[str, Any],
    began: float,
    training: float,
    fault: float,
) -> float:
    """Until when the work of an attempt was kept: the checkpoint from which the next one resumed."""
    update = following.get("resumed_update")
    if update is None or update == attempt.get("resumed_update"):
        return training
    moments = [moment - began for moment, step, _ in marks.written if step == update]
    found = [moment for moment in moments if training <= moment <= fault + 1]
    return min(fault, max(found, default=training))


def _find_waiting(events: list[Mapping[str, Any]], begin: float, end: float) -> float:
    """Seconds for which a rank was stopped; for slowed ranks, the corresponding share."""
    total = 0.0
    for event in events:
        kind = event["planned"].get("kind")
        if kind not in (FaultKind.STOP, FaultKind.SLOW) or event.get("problem") is not None:
            continue
        until = event.get("until")
        overlap = min(end, _number(until) if until is not None else end) - max(begin, _number(event.get("at")))
        share = 1.0 if kind == FaultKind.STOP else _number(event.get("stopped_share"))
        total += max(0.0, overlap) * share
    return total


def find_not_injected(spec: RunSpec, record: Mapping[str, Any] | None, is_success: bool) -> Finding | None:
    """The finding that faults of the script were not injected; None if every fault whose time was reached was
    injected."""
    if spec.faults is None or not is_success:
        return None
    problems = [
        f"{_describe(event)}: {event['problem']}"
        for event in _rows((record or {}).get("events"))
        if event.get("problem")
    ]
    if record is None:
        problems = ["they were not recorded"]
    elif record.get("never_trained"):
        problems.append("the training, from which their times count, never began")
    elif record.get("missed"):
        problems.append(f"{_describe({'planned': record['missed']})}: the run ended between two attempts")
    if not problems:
        return None
    return Finding(
        NOT_INJECTED,
        f"Not all faults were injected, so the result does not count: {'; '.join(problems[:3])}.",
        hint="Run it again, or remove the faults that cannot be injected here.",
        evidence={"problems": problems[:20]},
    )


def find_fault_contradictions(spec: RunSpec, record: Mapping[str, Any] | None) -> Iterator[str]:
    """Contradictions between faults.json and the spec."""
    if record is None:
        return
    if record.get("script") != spec.faults or record.get("policy") != (spec.on_failure or Policy.FAIL):
        yield "faults.json has another script or policy than the run"
        return
    if len(_rows(record.get("attempts"))) > 1 and record.get("policy") == Policy.FAIL:
        yield "its ranks were started again, against its policy"
    events = _rows(record.get("events"))
    try:
        plan = [fault.to_dict() for fault in islice(plan_of(spec), len(events))]
    except UsageError as error:
        yield f"its fault script cannot be read: {error.message}"
        return
    if [event.get("planned") for event in events] != plan:
        yield "the faults do not follow from the script and the seed"


def faults_phrase(document: FaultsDocument) -> str:
    """ "after 2 faults and 1 restart"; empty if nothing happened."""
    faults, restarts = document["injected"], document["attempts"] - 1
    words = [
        f"{count} {word}{'s' if count > 1 else ''}"
        for count, word in ((faults, "fault"), (restarts, "restart"))
        if count
    ]
    return f"after {' and '.join(words)}" if words else ""


def _describe(event: Mapping[str, Any]) -> str:
    planned = event.get("planned")
    if not isinstance(planned, Mapping):
        return "a fault"
    target = planned.get("target")
    return f"{str(planned.get('kind'))[:10]}{'' if target is None else f' {str(target)[:10]}'}"


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)][:MAX_EVENTS] if isinstance(value, list) else []


def _number(value: Any) -> float:
    return float(value) if is_finite_number(value) and value >= 0 else 0.0
