"""The judge: from the evidence of a run to the documents of its archive. Pure, and the only code with an opinion.

Evidence is run.json, the observation, the logs with the events in them, and resource samples. Sealing writes what
`judge` returns, `verify` runs it again over the archive's own evidence and compares every field.

Success is exit code 0 of every rank; nothing that a log says replaces one. What a task says of its goal counts only
then, only for the goal that was asked for, and only if a metric event has the value that the result claims.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

from mlbench_cli.catalog import TaskRules
from mlbench_cli.goals import Goal, is_finite_number
from mlbench_cli.model import Ending, Finding, Observation, Outcome
from mlbench_cli.results.archive.conditions import assess_conditions
from mlbench_cli.results.archive.division import find_division
from mlbench_cli.results.archive.documents import (
    JUDGE_VERSION,
    EnvironmentDocument,
    GoalDocument,
    ResultDocument,
    SecondsDocument,
    asked_goal,
    environment_document,
    find_exit_code,
    find_goal,
    find_span,
    label_of,
    price_of,
    worker_document,
)
from mlbench_cli.results.archive.events import EventCollector, GoalWatcher, one_line, read_events
from mlbench_cli.results.archive.fabric import check_fabric
from mlbench_cli.results.archive.network import NetworkDocument, network_document
from mlbench_cli.results.archive.official import official_line, official_text
from mlbench_cli.spec import OPEN, RunSpec
from mlbench_cli.times import timestamp

_NO_RESULT: Mapping[str, Any] = {"timings": {}, "details": {}, "synthetic": False}


@dataclass(frozen=True)
class Evidence:
    """What a run left behind as it happened. `logs` opens each rank's log for reading, as often as asked."""

    id: str
    name: str
    created: str  # RFC 3339
    spec: RunSpec
    rules: TaskRules | None
    observation: Observation
    provenance: Mapping[str, Any]  # Provenance.to_dict; empty for a run of the first edition
    samples: Callable[[], Iterable[Mapping[str, Any]]]  # the rows of resources.jsonl
    logs: Mapping[int, Callable[[], BinaryIO]]
    shaping: Mapping[str, Any] | None = None  # shaping.json, if the engine made the network


@dataclass(frozen=True)
class Judgement:
    """The documents that follow from the evidence, without schema versions. metrics.jsonl went to the sink."""

    outcome: Outcome
    result: ResultDocument
    official_text: str
    environment: EnvironmentDocument
    findings: tuple[Finding, ...]
    network: NetworkDocument | None = None

    @property
    def goal_reached(self) -> bool:
        """Whether the run has a goal and its evidence shows that it was reached."""
        goal = self.result["goal"]
        return goal is not None and goal["reached"]


def judge(evidence: Evidence, write_metric: Callable[[bytes], object] = lambda line: None) -> Judgement:
    """The documents that follow from the evidence of a run that has ended.

    `write_metric` gets the lines of metrics.jsonl one by one, in the order of logs and of lines in them. Logs are read
    in bounded memory; each a second time only to prove a claimed goal. Raises ValueError if the run has not ended.
    """
    spec, rules, observation = evidence.spec, evidence.rules, evidence.observation
    if observation.ended is None:
        raise ValueError("the run has not ended")
    started, finished = find_span(evidence.created, observation)
    collector = EventCollector(spec.world_size, _watcher(spec, rules, started))
    for rank, open_log in evidence.logs.items():
        with open_log() as log:
            for line in collector.read(rank, log):
                write_metric(line)
    reported = collector.result
    goal, differing = find_goal(spec, rules, reported["goal"] if reported else None)
    outcome = _claimed_outcome(spec, observation, reported)
    proven = _is_reached(goal) and _is_reported(evidence, goal, "value")
    shown = _is_reported(evidence, goal, "last") if outcome is Outcome.BUDGET_SPENT else proven
    outcome, unproven = _confirm(outcome, reported, goal, shown)
    other_code = _find_other_code(evidence, collector)
    findings = (*observation.findings, *differing, *unproven, *other_code)
    result = _result(evidence, outcome, collector, goal, proven)
    division = find_division(spec, rules, result["synthetic"], result["data_identity"], has_other_code=bool(other_code))
    result["division"] = division.to_dict()
    nodes = [worker.node for worker in evidence.observation.workers]
    is_alone = not spec.functional_only and len(set(nodes)) == len(nodes)
    conditions = assess_conditions(spec, evidence.provenance, evidence.samples(), is_alone)
    result["conditions"] = replace(conditions, slow_network=check_fabric(spec, collector.environments)).to_dict()
    if spec.method:
        result["method"] = str(spec.method.get("name"))
    network = network_document(spec.network if spec.workers > 1 else None, collector.probes, evidence.shaping)
    if network is not None:
        result["network"] = network["summary"]
    result["started"] = None if started is None else timestamp(started)
    result["finished"] = timestamp(finished)
    result["wall_seconds"] = None if started is None else round(finished - started, 3)
    result["price"] = price_of(spec.price, result["wall_seconds"])
    result["summary"] = _summarize(evidence, outcome, findings, reported)
    result["official_line"] = official_line(result)
    environment = environment_document(collector.environments)
    return Judgement(outcome, result, official_text(result), environment, findings, network)


def _find_other_code(evidence: Evidence, collector: EventCollector) -> list[Finding]:
    """A finding if rank 0 ran other code of the task than the mlbench that recorded the run has."""
    code = evidence.provenance.get("code") or {}
    recorded, reported = code.get("digest"), collector.environments.get(0, {}).get("code_digest")
    if recorded is None or reported is None or recorded == reported:
        return []
    return [
        Finding(
            "code_differs",
            f"Rank 0 ran other code of {evidence.spec.task} than the mlbench that started it has.",
            hint="Build the images from the version in use: make images.",
            evidence={"recorded": recorded, "reported": one_line(str(reported))},
        )
    ]


# --- the outcome ----------------------------------------------------------------------------------------------------


def _claimed_outcome(spec: RunSpec, observation: Observation, reported: Mapping[str, Any] | None) -> Outcome:
    """The outcome by the ending and exit codes, and if those are fine the one that the task reported."""
    ending = observation.ended
    assert ending is not None
    if (outcome := ending.outcome) is not None:
        never_started = all(worker.started is None for worker in observation.workers)
        if ending is Ending.CANCELLED and never_started and any(found.permanent for found in observation.findings):
            return Outcome.NEVER_STARTED  # the client gave up waiting because it could not help
        return outcome
    if ending is not Ending.EXITED or len(observation.workers) < spec.workers:
        return Outcome.FAILED
    if any(worker.exit_code != 0 for worker in observation.workers):
        return Outcome.FAILED
    if any(found.code == "disk_full" for found in observation.findings):
        return Outcome.FAILED  # what was not written cannot be known to be unimportant
    if reported:
        return Outcome(reported["outcome"])
    return Outcome.GOAL_MISSED if spec.preset == OPEN else Outcome.COMPLETED


def _confirm(
    outcome: Outcome, reported: Mapping[str, Any] | None, goal: Mapping[str, Any] | None, proven: bool
) -> tuple[Outcome, list[Finding]]:
    """Downgrade a reached goal or a spent budget that the logs do not support; returned with findings.

    A reached goal needs a value that meets the threshold and a metric event with that value (`proven`). A spent budget
    with a goal needs a metric event with the last value, which is its figure.
    """
    if outcome is Outcome.BUDGET_SPENT and goal is None:
        return outcome, []
    if outcome not in (Outcome.GOAL_REACHED, Outcome.BUDGET_SPENT):
        return outcome, []
    if goal is not None and goal["value"] is not None and proven:
        return outcome, []
    claims_more = outcome is Outcome.GOAL_REACHED and goal is not None and goal["value"] is not None
    reason = (
        f"the value {goal['value']:g} does not meet {goal['comparison']} {goal['threshold']:g}"
        if claims_more and goal is not None and not _is_reached(goal)
        else "no metric event has the value that its result claims"
    )
    return Outcome.COMPLETED if goal is None else Outcome.GOAL_MISSED, [
        Finding(
            "goal_not_proved",
            f"The task reported {outcome}, but {reason}.",
            hint="A task reports its goal's metric with contract.emit before it reports its result.",
            evidence={"goal": dict(goal) if goal else None, "reported": dict(reported) if reported else None},
        )
    ]


def _watcher(spec: RunSpec, rules: TaskRules | None, started: float | None) -> GoalWatcher | None:
    """For a command of the user's own that is held to a task's goal; None for any other run."""
    goal = asked_goal(spec, rules)
    if spec.preset != OPEN or goal is None:
        return None
    return GoalWatcher(goal, spec.goal, None if started is None else timestamp(started))


def _is_reached(goal: Mapping[str, Any] | None) -> bool:
    return goal is not None and Goal(goal["metric"], goal["comparison"], goal["threshold"]).meets(goal["value"])


def _is_reported(evidence: Evidence, goal: Mapping[str, Any] | None, key: str) -> bool:
    """Whether a metric event of any rank has the goal's `value` or `last`."""
    if goal is None or goal[key] is None:
        return False
    names = Goal(goal["metric"], goal["comparison"], goal["threshold"]).metric_names
    return any(
        event["event"] == "metric" and event.get("name") in names and _is_close(event.get("value"), goal[key])
        for open_log in evidence.logs.values()
        for event in _closing(open_log)
    )


def _closing(open_log: Callable[[], BinaryIO]) -> Iterator[dict[str, object]]:
    with open_log() as log:
        yield from read_events(log)


def _is_close(value: Any, wanted: float) -> bool:
    return is_finite_number(value) and abs(value - wanted) <= max(1e-9 * max(abs(value), abs(wanted)), 1e-12)


# --- result.json ----------------------------------------------------------------------------------------------------


def _result(
    evidence: Evidence,
    outcome: Outcome,
    collector: EventCollector,
    goal: Mapping[str, Any] | None,
    proven: bool,
) -> ResultDocument:
    """result.json but for what depends on times and findings; `judge` fills that in."""
    spec, observation = evidence.spec, evidence.observation
    facts = collector.result or _NO_RESULT
    synthetic = facts["synthetic"]
    seconds: SecondsDocument = {"wall": facts.get("wall_seconds"), "training": facts.get("training_seconds")}
    to_goal = _seconds_to_goal(facts, goal, seconds) if proven else None
    return {
        "judge": JUDGE_VERSION,
        "run": evidence.name,
        "id": evidence.id,
        "task": spec.task,
        "preset": spec.preset,
        "engine": spec.engine,
        "cluster": spec.cluster,
        "backend": spec.backend,
        "workers": spec.workers,
        "world_size": spec.world_size,
        "device": spec.device,
        "outcome": str(outcome),
        "exit_code": find_exit_code(observation),
        "summary": "",
        "started": None,
        "finished": "",
        "wall_seconds": None,
        "task_seconds": seconds,
        "goal": _goal_document(goal, to_goal),
        "budget_seconds": facts.get("budget_seconds"),
        "timings": facts["timings"],
        "updates": facts.get("updates"),
        "samples": facts.get("samples"),
        "epochs": facts.get("epochs"),
        "synthetic": synthetic,
        "data": facts.get("data"),
        "data_identity": facts.get("data_identity"),
        "label": label_of(spec.functional_only),
        "division": {},
        "conditions": {},
        "first_failed": observation.first_failed,
        "ended": None if observation.ended is None else str(observation.ended),
        "worker_states": [worker_document(worker) for worker in observation.workers],
        "metrics": collector.metrics,
        "progress": collector.phase,
        "details": facts["details"],
        "price": None,
        "official_line": None,
    }


def _goal_document(goal: Mapping[str, Any] | None, seconds: SecondsDocument | None) -> GoalDocument | None:
    if goal is None:
        return None
    return cast(GoalDocument, {**goal, "reached": seconds is not None, "seconds": seconds})


def _seconds_to_goal(
    facts: Mapping[str, Any], goal: Mapping[str, Any] | None, whole: SecondsDocument
) -> SecondsDocument | None:
    """Seconds to a goal that was reached.

    Those of the whole training if it ended at the goal, those that the task noted on its way if it went on to the end
    of a budget; None if the goal was not reached.
    """
    if goal is None:
        return None
    if facts.get("outcome") == Outcome.GOAL_REACHED:
        return whole
    passed = facts.get("details", {}).get("goals", {})
    passed = passed.get(goal["kind"]) if isinstance(passed, dict) else None
    if facts.get("outcome") != Outcome.BUDGET_SPENT or not isinstance(passed, dict):
        return None
    wall, training = (_amount(passed.get(f"{key}_seconds")) for key in ("wall", "training"))
    return {"wall": wall, "training": training}


def _amount(value: Any) -> float | None:
    return value if is_finite_number(value) and value >= 0 else None


# --- the sentence ---------------------------------------------------------------------------------------------------


def _summarize(
    evidence: Evidence, outcome: Outcome, findings: tuple[Finding, ...], reported: Mapping[str, Any] | None
) -> str:
    """One sentence for people, with the reason if there is one."""
    begin = f"{evidence.name} {outcome.phrase}"
    if outcome.is_success:
        begin += _figures(outcome, reported or {})
        reason = next((found.summary for found in findings if found.code == "goal_not_proved"), "")
    elif outcome is Outcome.FAILED and not findings:
        workers = evidence.observation.workers
        reason = f"{sum(1 for worker in workers if worker.exit_code)} of {len(workers)} ranks failed."
    else:
        reason = findings[0].summary if findings else ""
    return f"{begin}. {reason}".strip()


def _figures(outcome: Outcome, reported: Mapping[str, Any]) -> str:
    if outcome is Outcome.COMPLETED:
        return ""
    return _last_figures(reported) if outcome is Outcome.BUDGET_SPENT else _goal_figures(reported)


def _goal_figures(reported: Mapping[str, Any]) -> str:
    """ ": Prec@1 97.2 (>= 97) after 12.3 s", as far as the task reported it."""
    goal = reported.get("goal")
    if not goal or goal["value"] is None:
        return ""
    wanted = f" ({goal['comparison']} {goal['threshold']:g})"
    return f": {goal['metric'][:60]} {goal['value']:.4g}{wanted}{_after(reported)}"


def _last_figures(reported: Mapping[str, Any]) -> str:
    """ ": Prec@1 81.25 after 7200.1 s", as far as the task reported it."""
    goal = reported.get("goal")
    if not goal or goal["last"] is None:
        return ""
    return f": {goal['metric'][:60]} {goal['last']:.4g}{_after(reported)}"


def _after(reported: Mapping[str, Any]) -> str:
    seconds = reported.get("wall_seconds")
    return "" if seconds is None else f" after {seconds:.1f} s"
