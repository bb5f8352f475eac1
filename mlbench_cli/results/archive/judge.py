"""The judge: from the evidence of a run to the documents of its archive. Pure, and the only code with an opinion.

Evidence is run.json, the observation, the logs with the events in them, and resource samples. Sealing writes what
`judge` returns, `verify` runs it again over the archive's own evidence and compares every field.

Success is exit code 0 of every rank; nothing that a log says replaces one. What a task says of its goal counts only
then, only for the goal that was asked for, and only if a metric event has the value that the result claims.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from mlbench_cli import run_folder
from mlbench_cli.catalog import TaskRules
from mlbench_cli.goals import Goal, goal_wording, is_finite_number
from mlbench_cli.json_text import make_strict
from mlbench_cli.model import Ending, Finding, JsonObject, Observation, Outcome
from mlbench_cli.results.archive.conditions import assess_conditions
from mlbench_cli.results.archive.division import find_division
from mlbench_cli.results.archive.documents import (
    JUDGE_VERSION,
    EnvironmentDocument,
    GoalDocument,
    ResultDocument,
    SecondsDocument,
    environment_document,
    find_exit_code,
    label_of,
    price_of,
    worker_document,
)
from mlbench_cli.results.archive.events import GoalWatcher, ReportedFacts, collect_events, read_events
from mlbench_cli.results.archive.network import NetworkDocument, find_least_sent, network_document
from mlbench_cli.results.archive.official import official_line, official_text
from mlbench_cli.spec import OPEN, RunSpec
from mlbench_cli.text import one_line
from mlbench_cli.times import parse_timestamp, timestamp

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

    @property
    def goal(self) -> Goal | None:
        """The goal that the run was asked to reach; None for a task without one."""
        return None if self.rules is None else self.rules.find_goal(self.spec.parameters, self.spec.goal)

    @property
    def span(self) -> tuple[float | None, float]:
        """Start of the first worker and end of the last, in seconds since 1970; the start is None if none began."""
        workers = self.observation.workers
        started = min((worker.started for worker in workers if worker.started is not None), default=None)
        ends = [worker.finished for worker in workers if worker.finished is not None]
        finished = max(ends, default=self.observation.time)
        return started, max(finished, parse_timestamp(self.created) if started is None else started)

    @property
    def is_alone(self) -> bool:
        """Whether each worker has a node of its own, so that what others use there is not the run's."""
        nodes = [worker.node for worker in self.observation.workers]
        return not self.spec.functional_only and len(set(nodes)) == len(nodes)


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
    def documents(self) -> dict[str, Mapping[str, Any]]:
        """The JSON documents by their file names, without schema versions."""
        documents: dict[str, Mapping[str, Any]] = {
            run_folder.RESULT: self.result,
            run_folder.ENVIRONMENT: self.environment,
            run_folder.FINDINGS: {"findings": [make_strict(finding.to_dict()) for finding in self.findings]},
        }
        if self.network is not None:
            documents[run_folder.NETWORK] = self.network
        return documents

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
    spec = evidence.spec
    if evidence.observation.ended is None:
        raise ValueError("the run has not ended")
    reported = collect_events(evidence.logs, spec.world_size, write_metric, _watcher(evidence))
    facts = reported.result or _NO_RESULT
    decision = _decide(evidence, reported)
    conditions = assess_conditions(
        spec, evidence.provenance, evidence.samples(), evidence.is_alone, reported.environments
    ).to_dict()
    division = find_division(
        spec, evidence.rules, facts["synthetic"], facts.get("data_identity"), has_other_code=decision.has_other_code
    ).to_dict()
    asked = spec.network if spec.workers > 1 else None
    network = network_document(asked, reported.probes, evidence.shaping, find_least_sent(spec, facts["details"]))
    result = _result(evidence, reported, decision, division, conditions)
    if spec.method:
        result["method"] = str(spec.method.get("name"))
    if network is not None:
        result["network"] = network["summary"]
    environment = environment_document(reported.environments)
    result["official_line"] = official_line(result)
    return Judgement(decision.outcome, result, official_text(result), environment, decision.findings, network)


# --- the outcome ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decision:
    """What came of the run. `goal` is its document without `reached` and `seconds`; `is_proven`: it was reached."""

    outcome: Outcome
    goal: JsonObject | None
    is_proven: bool
    has_other_code: bool
    findings: tuple[Finding, ...]


def _decide(evidence: Evidence, reported: ReportedFacts) -> _Decision:
    result = reported.result
    goal, differing = _find_goal(evidence, result["goal"] if result else None)
    claimed = _claimed_outcome(evidence.spec, evidence.observation, result)
    is_proven = _is_reached(goal) and _is_reported(evidence, goal, "value")
    is_shown = _is_reported(evidence, goal, "last") if claimed is Outcome.BUDGET_SPENT else is_proven
    outcome, unproven = _confirm(claimed, result, goal, is_shown)
    other_code = _find_other_code(evidence, reported)
    findings = (*evidence.observation.findings, *differing, *unproven, *other_code)
    return _Decision(outcome, goal, is_proven, bool(other_code), findings)


def _find_goal(evidence: Evidence, reported: Mapping[str, Any] | None) -> tuple[JsonObject | None, list[Finding]]:
    """The goal of a run without `reached` and `seconds`: what was asked for, with the values that the task reported.

    A reported goal that is not the one that was asked for proves nothing: its value is dropped, and a finding says so.
    """
    spec, rules, goal = evidence.spec, evidence.rules, evidence.goal
    if goal is None or rules is None or rules.goal is None:
        if reported is None:
            return None, []
        return {**reported, "kind": reported["kind"] or spec.goal, "wording": goal_wording(reported, None)}, []
    asked = {**goal.to_dict(), "kind": spec.goal}
    values = {key: reported[key] if reported else None for key in ("value", "last")}
    document = {**asked, **values, "wording": goal_wording(asked, rules.goal.wording)}
    if reported is None or _is_same_goal(asked, reported):
        return document, []
    finding = Finding(
        "goal_differs",
        f"The goal was {goal_wording(asked, None)}, but the task reported the goal {goal_wording(reported, None)}.",
        hint="Check the task's parameters goal_full and goal_light.",
        evidence={"reported": dict(reported), "asked": asked},
    )
    return {**document, "value": None, "last": None}, [finding]


def _is_same_goal(asked: Mapping[str, Any], reported: Mapping[str, Any]) -> bool:
    same = all(reported[key] == asked[key] for key in ("metric", "comparison", "threshold"))
    return same and reported["kind"] in (None, asked["kind"])


def _find_other_code(evidence: Evidence, reported: ReportedFacts) -> list[Finding]:
    """A finding if rank 0 ran other code of the task than the mlbench that recorded the run has."""
    code = evidence.provenance.get("code") or {}
    recorded, executed = code.get("digest"), reported.environments.get(0, {}).get("code_digest")
    if recorded is None or executed is None or recorded == executed:
        return []
    return [
        Finding(
            "code_differs",
            f"Rank 0 ran other code of {evidence.spec.task} than the mlbench that started it has.",
            hint="Build the images from the version in use: make images.",
            evidence={"recorded": recorded, "reported": one_line(str(executed))},
        )
    ]


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


def _watcher(evidence: Evidence) -> GoalWatcher | None:
    """For a command of the user's own that is held to a task's goal; None for any other run."""
    spec, goal = evidence.spec, evidence.goal
    if spec.preset != OPEN or goal is None:
        return None
    started, _ = evidence.span
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
    reported: ReportedFacts,
    decision: _Decision,
    division: dict[str, str | None],
    conditions: JsonObject,
) -> ResultDocument:
    """result.json but for its official line, method and network."""
    spec, observation = evidence.spec, evidence.observation
    facts = reported.result or _NO_RESULT
    seconds: SecondsDocument = {"wall": facts.get("wall_seconds"), "training": facts.get("training_seconds")}
    to_goal = _seconds_to_goal(facts, decision.goal, seconds) if decision.is_proven else None
    goal = _goal_document(decision.goal, to_goal)
    summary = _summarize(evidence, decision, reported.result)
    started, finished = evidence.span
    wall_seconds = None if started is None else round(finished - started, 3)
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
        "outcome": str(decision.outcome),
        "exit_code": find_exit_code(observation),
        "summary": summary,
        "started": None if started is None else timestamp(started),
        "finished": timestamp(finished),
        "wall_seconds": wall_seconds,
        "task_seconds": seconds,
        "goal": goal,
        "budget_seconds": facts.get("budget_seconds"),
        "timings": facts["timings"],
        "updates": facts.get("updates"),
        "samples": facts.get("samples"),
        "epochs": facts.get("epochs"),
        "synthetic": facts["synthetic"],
        "data": facts.get("data"),
        "data_identity": facts.get("data_identity"),
        "label": label_of(spec.functional_only),
        "division": division,
        "conditions": conditions,
        "first_failed": observation.first_failed,
        "ended": None if observation.ended is None else str(observation.ended),
        "worker_states": [worker_document(worker) for worker in observation.workers],
        "metrics": reported.metrics,
        "progress": reported.phase,
        "details": facts["details"],
        "price": price_of(spec.price, wall_seconds),
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


def _summarize(evidence: Evidence, decision: _Decision, reported: Mapping[str, Any] | None) -> str:
    """One sentence for people, with the reason if there is one."""
    outcome, findings = decision.outcome, decision.findings
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
