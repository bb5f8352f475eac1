"""The judge derives the documents of an archive from the evidence of a run. It is pure, and the only code that decides.

Evidence is run.json, the observation, the logs with the events in them, and resource samples. Sealing writes what
`judge` returns; `verify` runs it again on the evidence in the archive and compares every field.

A run succeeds only if every rank exits with 0, whatever its logs say. A reported goal counts only then, only if it is
the requested goal, and only if a metric event has the value in the result.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, BinaryIO, cast

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.certify.judge import certify
from mlbench_cli.model.goals import GOAL_ON, HOLD_OUT, Goal, goal_wording, is_finite_number
from mlbench_cli.model.network import network_phrase
from mlbench_cli.model.run import Ending, Finding, JsonObject, Observation, Outcome, WorkerState
from mlbench_cli.model.spec import CUSTOM, OPEN, RunSpec
from mlbench_cli.results.archive.conditions import (
    NOT_INJECTED,
    Conditions,
    assess_conditions,
    faults_document,
    faults_phrase,
    find_least_sent,
    find_not_injected,
    network_document,
)
from mlbench_cli.results.archive.documents import (
    ConditionsDocument,
    DataIdentityDocument,
    DivisionDocument,
    EnvironmentDocument,
    GoalDocument,
    LabelDocument,
    NetworkDocument,
    ResultDocument,
    SecondsDocument,
    WorkerDocument,
)
from mlbench_cli.results.archive.evidence import (
    Evidence,
    ReportedFacts,
    SampleWatch,
    collect_events,
    read_amount,
    read_events,
)
from mlbench_cli.results.archive.plausibility import (
    CLOCK_STEPPED,
    NO_RESULT,
    PREFIX,
    find_clock_step,
    find_contradictions,
    find_ignored,
    find_too_long,
    find_unreported_goal,
)
from mlbench_cli.storage import run_folder
from mlbench_cli.tasks.catalog import BUDGET, TaskRules
from mlbench_cli.util.json_text import make_strict
from mlbench_cli.util.text import one_line
from mlbench_cli.util.times import timestamp
from task_images.contract import COMPUTE_CATEGORIES, MIXED_CATEGORIES

# The version of the rules in `judge`. From the first release on, a change that gives a different result for the same
# evidence needs a new version.
JUDGE_VERSION = 1
CERTIFY = "certify"  # the task whose runs are judged to a certificate, too

# Tasks may report environment variables; only these are kept, because others may contain secrets.
KEPT_VARIABLES = {
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_NUM_THREADS",
}
_KEPT_PREFIXES = ("NCCL_", "GLOO_", "OMPI_MCA_", "UCX_", "TORCH_NCCL_")
_MAX_ENVIRONMENT = 8 << 20
# libfabric's EFA provider fails with "Cannot allocate memory" at 8 MiB (awslabs/awsome-distributed-ai#647).
MIN_MEMLOCK = 1 << 30

_NO_RESULT: Mapping[str, Any] = {"timings": {}, "details": {}, "synthetic": False}
STILL_RUNNING = "still_running"  # finding in archives written before the run ended


class Judgement(Struct, frozen=True):
    """The documents derived from the evidence, without schema versions. metrics.jsonl was passed to `write_metric`."""

    outcome: Outcome
    result: ResultDocument
    official_text: str
    environment: EnvironmentDocument
    findings: tuple[Finding, ...]
    network: NetworkDocument | None = None
    certificate: Mapping[str, Any] | None = None

    @property
    def documents(self) -> dict[str, Mapping[str, Any]]:
        """The JSON documents by file name, without schema versions."""
        documents: dict[str, Mapping[str, Any]] = {
            run_folder.RESULT: self.result,
            run_folder.ENVIRONMENT: self.environment,
            run_folder.FINDINGS: {"findings": [make_strict(finding.to_dict()) for finding in self.findings]},
        }
        if self.network is not None:
            documents[run_folder.NETWORK] = self.network
        if self.certificate is not None:
            documents[run_folder.CERTIFICATE] = self.certificate
        return documents

    @property
    def goal_reached(self) -> bool:
        """Whether the run has a goal and its evidence shows that it was reached."""
        goal = self.result["goal"]
        return goal is not None and goal["reached"]


def judge(evidence: Evidence, write_metric: Callable[[bytes], object] = lambda line: None) -> Judgement:
    """Derive the documents from the evidence of a run that has ended.

    `write_metric` is called with each line of metrics.jsonl, in the order of logs and of lines in them. Logs are read
    in bounded memory, and a second time only to prove a claimed goal. Raises ValueError if the run has not ended.
    """
    spec = evidence.spec
    if evidence.observation.ended is None:
        raise ValueError("the run has not ended")
    reported = collect_events(evidence, write_metric)
    samples = SampleWatch()
    conditions = assess_conditions(
        spec, evidence.provenance, samples.watch(evidence.samples()), evidence.is_alone, reported.environments
    )
    asked = spec.network if spec.workers > 1 else None
    details = (reported.result or _NO_RESULT)["details"]
    network = network_document(asked, samples, evidence.shaping, find_least_sent(spec, details))
    faults = faults_document(evidence.faults, reported)
    step = find_clock_step(evidence.observation, samples)
    if step is not None and reported.is_watched and reported.result is not None:
        reported = replace(reported, result={**reported.result, "wall_seconds": None})
    facts = reported.result or _NO_RESULT
    acceptance = certify(spec, evidence.observation, evidence.logs) if spec.task == CERTIFY else None
    measured = [] if acceptance is None else list(acceptance.find_contradictions())
    decision = _decide(evidence, reported, samples, step, measured)
    division = find_division(
        spec,
        evidence.rules,
        facts["synthetic"],
        facts.get("data_identity"),
        code=_compare_code(evidence, reported),
    )
    doubts = _find_doubts(evidence, decision)
    if contradictions := [code for code in doubts if code.startswith(PREFIX)]:
        division = Division(None, f"the evidence contradicts itself ({', '.join(contradictions)})")
    result = _result(evidence, reported, decision, division.to_dict(), cast(ConditionsDocument, conditions.to_dict()))
    result["summary"] = _summarize(evidence, decision, reported.result, "" if faults is None else faults_phrase(faults))
    if faults is not None:
        result["faults"] = faults
    if doubts:
        result["doubts"] = doubts
    if spec.method:
        result["method"] = str(spec.method.get("name"))
    if network is not None:
        result["network"] = network["summary"]
    environment = environment_document(reported.environments)
    result["official_line"] = official_line(result)
    certificate = None
    if acceptance is not None:
        found = (finding for finding in decision.findings if finding.code.startswith(PREFIX))
        certificate = acceptance.document([text for finding in found for text in finding.evidence["contradictions"]])
    return Judgement(
        decision.outcome, result, official_text(result), environment, decision.findings, network, certificate
    )


# --- division ---------------------------------------------------------------------------------------------------------

_THRESHOLDS = ("goal_full", "goal_light")


class Code(Enum):
    """Whether the ranks ran the code of the mlbench that recorded the run, judged by the digests of both."""

    SAME = "the task's code"
    OTHER = "another version of the task's code"
    UNKNOWN = "code not known to be the task's"


class Division(Struct, frozen=True):
    """`word` is "closed", "open" or None; `reason` says why it is not closed."""

    word: str | None
    reason: str | None = None

    def to_dict(self) -> DivisionDocument:
        """The division's entry in result.json."""
        return {"word": self.word, "reason": self.reason}


def find_division(
    spec: RunSpec,
    rules: TaskRules | None,
    synthetic: bool,
    data: DataIdentityDocument | None,
    code: Code = Code.SAME,
) -> Division:
    """The division of a run under `spec` of a task with `rules`.

    The two divisions of the benchmark, which say which results can be compared.

    closed  The task's own program with its preset `spec`. Hardware, number of workers, backend, seed, full or light
            goal, time budget, and the parameters that the task lists as `free` may be chosen, because they do not
            change the mathematics. Results of this division compare systems.
    open    The task's data and goal, with any model and training: another preset, a changed parameter, another
            communication method, another image, or a custom command (`mlbench run NAME N --task TASK --command ...`).
            The goal's metric, threshold and validation set must not be changed; for a custom command, mlbench relies
            on its author for that. Results of this division compare ways to train.

    A run has no division if it has no goal of a task, if a threshold was changed, or if its data are synthetic, a part
    of the official data, or other data. The closed division needs official data: data of unknown origin are open.

    `synthetic`: whether its data were generated; `data`: their identity (None: not reported by the task); `code`:
    whether its ranks ran this version of the task.
    """
    if spec.task == CUSTOM:
        return Division(None, "a command without a task's goal")
    if rules is None:
        return Division(None, "a task that this mlbench does not know")
    if rules.goal is None:
        return Division(None, "the task has no goal")
    if changes := list(_changed_thresholds(spec, rules)):
        return Division(None, f"the goal was changed: {', '.join(changes)}")
    if synthetic:
        return Division(None, "the data are synthetic")
    if data is not None and data["official"] is False:
        return Division(None, data["reason"] or "not the official data")
    if spec.preset == OPEN:
        return Division("open", "a command of one's own")
    if rules.origin is not None:
        return Division("open", f"the task is not mlbench's own but of {rules.origin}")
    changes = [*_changes(spec, rules), *([code.value] if code is not Code.SAME else [])]
    if data is None or data["official"] is None:
        reason = data["reason"] if data else None
        changes.append(f"data not known to be official{f' ({reason})' if reason else ''}")
    return Division("open", ", ".join(changes)) if changes else Division("closed")


def _changed_thresholds(spec: RunSpec, rules: TaskRules) -> Iterator[str]:
    for name in _THRESHOLDS:
        if spec.parameters.get(name) != rules.spec[name]:
            yield f"{name} {spec.parameters.get(name)} instead of {rules.spec[name]}"
    usual = rules.spec.get(GOAL_ON)
    if (chosen := spec.parameters.get(GOAL_ON, usual)) != usual:
        yield f"{GOAL_ON} {chosen} instead of {usual}"
    if held_out := spec.parameters.get(HOLD_OUT):
        yield f"{HOLD_OUT} {held_out} instead of 0"


def _changes(spec: RunSpec, rules: TaskRules) -> Iterator[str]:
    if spec.preset != "spec":
        yield f"preset {spec.preset}"
    if spec.faults:
        yield "faults were injected"
    if spec.on_failure:
        yield "failed ranks were started again"
    if spec.method:
        yield f"method {spec.method['name']}"
    for name, value in spec.parameters.items():
        if name not in (*rules.free, BUDGET) and value != rules.preset.get(name):
            yield f"{name} {value} instead of {rules.preset.get(name)}"
    if spec.argv != rules.command:
        yield "another command"
    # Ignore the tag (mlbench's version) and the prefix (the registry to which the image was copied).
    image = None if spec.image is None else spec.image.rpartition("/")[2].partition("@")[0].partition(":")[0]
    if image not in (None, rules.image):
        yield f"image {spec.image}"


def _find_digests(evidence: Evidence, reported: ReportedFacts) -> tuple[str | None, str | None]:
    """The digests of the code of task and method: recorded by the mlbench that started the run, and reported by rank 0;
    None if unknown."""
    code, facts = evidence.provenance.get("code") or {}, reported.environments.get(0, {})
    recorded, executed = (
        (code.get("digest"), code.get("method_digest")),
        (facts.get("code_digest"), facts.get("method_digest")),
    )
    return _joined(recorded), _joined(executed)


def _joined(digests: tuple[Any, Any]) -> str | None:
    return " ".join(str(one) for one in digests if one) if digests[0] else None


def _compare_code(evidence: Evidence, reported: ReportedFacts) -> Code:
    recorded, executed = _find_digests(evidence, reported)
    if recorded is None or executed is None:
        return Code.UNKNOWN
    return Code.SAME if recorded == executed else Code.OTHER


def _find_other_code(evidence: Evidence, reported: ReportedFacts) -> list[Finding]:
    """A finding if rank 0 ran different task code than the mlbench that recorded the run."""
    recorded, executed = _find_digests(evidence, reported)
    if _compare_code(evidence, reported) is not Code.OTHER:
        return []
    return [
        Finding(
            "code_differs",
            f"Rank 0 ran a different version of {evidence.spec.task} than the mlbench that started it.",
            hint="Build the images from the version in use: make images.",
            evidence={"recorded": recorded, "reported": one_line(str(executed))},
        )
    ]


# --- the outcome ----------------------------------------------------------------------------------------------------


class _Decision(Struct, frozen=True):
    """The decision about a run. `goal` is its document without `reached` and `seconds`; `is_proven`: the goal was
    reached.
    """

    outcome: Outcome
    goal: JsonObject | None
    is_proven: bool
    has_other_code: bool
    findings: tuple[Finding, ...]


def _decide(
    evidence: Evidence, reported: ReportedFacts, samples: SampleWatch, step: Finding | None, measured: Sequence[str]
) -> _Decision:
    """The decision. `measured`: contradictions in what the task measured."""
    result = reported.result
    goal, differing = _find_goal(evidence, result["goal"] if result else None)
    claimed = _claimed_outcome(evidence.spec, evidence.observation, result)
    silent: list[Finding] = []
    if claimed is Outcome.COMPLETED and result is None and _must_report(evidence):
        claimed = Outcome.FAILED
        silent = [
            Finding(
                NO_RESULT,
                f"The program of {evidence.spec.task} exited with 0 but reported no result.",
                hint=f"mlbench logs {evidence.name}",
            )
        ]
    is_proven = _is_reached(goal) and _is_reported(evidence, goal, "value")
    is_shown = _is_reported(evidence, goal, "last") if claimed is Outcome.BUDGET_SPENT else is_proven
    outcome, unproven = _confirm(claimed, result, goal, is_shown)
    other_code = _find_other_code(evidence, reported)
    locked = [*_find_low_memlock(evidence.spec, reported), *_find_separate(evidence.spec, outcome, reported)]
    heard = [find_ignored(reported), find_unreported_goal(evidence, reported)]
    silent += [finding for finding in heard if finding is not None]
    doubts = [finding for finding in (step, find_too_long(reported)) if finding is not None]
    doubts += find_contradictions(
        evidence, reported, samples, outcome.is_success, is_stepped=step is not None, measured=measured
    )
    milder = find_not_injected(evidence.spec, evidence.faults, outcome.is_success)
    if milder is not None:
        doubts.append(milder)
    findings = (*evidence.observation.findings, *silent, *differing, *unproven, *other_code, *locked, *doubts)
    return _Decision(outcome, goal, is_proven, bool(other_code), findings)


def _must_report(evidence: Evidence) -> bool:
    """Whether the run's program belongs to a task that must report a result."""
    rules = evidence.rules
    return evidence.spec.runs_task_program and rules is not None and (rules.origin is None or rules.goal is not None)


def _find_goal(evidence: Evidence, reported: Mapping[str, Any] | None) -> tuple[JsonObject | None, list[Finding]]:
    """The goal of a run, without `reached` and `seconds`: the requested goal with the values that the task reported.

    If the reported goal is not the requested one, its value is dropped, and a finding says so.
    """
    spec, rules, goal = evidence.spec, evidence.rules, evidence.goal
    if goal is None or rules is None or rules.goal is None:
        if reported is None:
            return None, []
        return {**reported, "kind": reported["kind"] or spec.goal, "wording": goal_wording(reported, None)}, []
    asked = {**goal.to_dict(), "kind": spec.goal}
    values = {key: reported[key] if reported else None for key in ("value", "last")}
    document = {**asked, **values, "wording": goal_wording(asked, rules.goal.wording_of(goal))}
    if reported is None or _is_same_goal(asked, reported):
        return document, []
    finding = Finding(
        "goal_differs",
        f"The goal was {goal_wording(asked, None)}, but the task reported the goal {goal_wording(reported, None)}.",
        hint="Check the task's parameters goal_full and goal_light.",
        evidence={"reported": dict(reported), "asked": asked},
    )
    return {**document, "value": None, "last": None}, [finding]


def _find_doubts(evidence: Evidence, decision: _Decision) -> list[str]:
    """The codes of findings that remove the official line.

    A clock step does so only if the line's seconds may be differences of wall times. Catalog tasks use the monotonic
    clock.
    """
    spec, rules = evidence.spec, evidence.rules
    is_own = rules is not None and rules.origin is None and spec.argv == rules.command and not decision.has_other_code
    return [
        finding.code
        for finding in decision.findings
        if finding.code.startswith(PREFIX)
        or finding.code == NOT_INJECTED
        or (finding.code == CLOCK_STEPPED and not (is_own and spec.preset != OPEN))
    ]


def _is_same_goal(asked: Mapping[str, Any], reported: Mapping[str, Any]) -> bool:
    same = all(reported[key] == asked[key] for key in ("metric", "comparison", "threshold"))
    return same and reported["kind"] in (None, asked["kind"])


def _find_low_memlock(spec: RunSpec, reported: ReportedFacts) -> list[Finding]:
    """A finding if ranks with RDMA network cards may lock too little memory: NCCL then fails or falls back to TCP."""
    if not spec.pods.has_rdma_devices:
        return []
    limits = {rank: facts.get("memlock_bytes") for rank, facts in reported.environments.items()}
    low = {rank: limit for rank, limit in limits.items() if type(limit) is int and 0 <= limit < MIN_MEMLOCK}
    if not low:
        return []
    return [
        Finding(
            "memlock_low",
            f"{len(low)} of {len(limits)} ranks may lock {min(low.values()) / 2**20:.4g} MiB of memory. RDMA network "
            "cards need at least 1 GiB; otherwise NCCL fails to register memory or falls back to TCP.",
            hint="Run as root (the default with such cards), or raise LimitMEMLOCK of containerd on the nodes.",
            evidence={"memlock_bytes": {str(rank): limit for rank, limit in sorted(low.items())[:16]}},
        )
    ]


def _find_separate(spec: RunSpec, outcome: Outcome, reported: ReportedFacts) -> list[Finding]:
    """A finding if every rank of a command has loaded torch, and none has ever joined others in a process group, or
    each has started one of its own, as agent/beside/sitecustomize.py reports."""
    if not outcome.is_success or spec.world_size < 2:  # a run that failed may have done so before it would have joined
        return []
    ranks = [reported.environments.get(rank, {}) for rank in range(spec.world_size)]
    if all(facts.get("leads") is True for facts in ranks):
        what, unless = "Every rank started a process group of torch of its own", ""
    elif all(facts.get("alone") is True and "process_group" not in facts for facts in ranks):
        what = "No rank joined others in a process group of torch"
        unless = ", unless the program exchanges gradients by other means"
    else:
        return []
    return [
        Finding(
            "trained_separately",
            f"{what}, so each of the {spec.world_size} ranks trains separately{unless}.",
            hint="Call torch.distributed.init_process_group(), with torchrun --nnodes, with accelerate launch "
            '--num_machines, with Lightning Trainer(strategy="ddp", devices=1, num_nodes=WORKERS); see '
            "docs/tutorial/own-training.md",
        )
    ]


def _claimed_outcome(spec: RunSpec, observation: Observation, reported: Mapping[str, Any] | None) -> Outcome:
    """The outcome from the ending and exit codes; if these are fine, the outcome that the task reported."""
    ending = observation.ended
    assert ending is not None
    if (outcome := ending.outcome) is not None:
        never_started = all(worker.started is None for worker in observation.workers)
        if ending is Ending.CANCELED and never_started and any(found.permanent for found in observation.findings):
            return Outcome.NEVER_STARTED  # the client gave up, because waiting was pointless
        return outcome
    if ending is not Ending.EXITED or len(observation.workers) < spec.workers:
        return Outcome.FAILED
    if any(worker.exit_code != 0 for worker in observation.workers):
        return Outcome.FAILED
    if any(found.code == "disk_full" for found in observation.findings):
        return Outcome.FAILED  # the missing files may have been important
    if reported:
        return Outcome(reported["outcome"])
    return Outcome.GOAL_MISSED if spec.preset == OPEN else Outcome.COMPLETED


def _confirm(
    outcome: Outcome, reported: Mapping[str, Any] | None, goal: Mapping[str, Any] | None, proven: bool
) -> tuple[Outcome, list[Finding]]:
    """Downgrade a reached goal or a spent budget that the logs do not support. Returns findings, too.

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
        else "no metric event has the value in its result"
    )
    return Outcome.COMPLETED if goal is None else Outcome.GOAL_MISSED, [
        Finding(
            "goal_not_proved",
            f"The task reported {outcome}, but {reason}.",
            hint="A task must report its goal metric with contract.emit before it reports its result.",
            evidence={"goal": dict(goal) if goal else None, "reported": dict(reported) if reported else None},
        )
    ]


def _is_reached(goal: Mapping[str, Any] | None) -> bool:
    return goal is not None and Goal(goal["metric"], goal["comparison"], goal["threshold"]).meets(goal["value"])


def _is_reported(evidence: Evidence, goal: Mapping[str, Any] | None, key: str) -> bool:
    """Whether a metric event of rank 0 in its own log has the goal's `value` or `last`."""
    if goal is None or goal[key] is None:
        return False
    names = Goal(goal["metric"], goal["comparison"], goal["threshold"]).metric_names
    return any(
        event["event"] == "metric" and event.get("name") in names and _is_close(event.get("value"), goal[key])
        for number, open_log in evidence.logs.items()
        if 0 in evidence.writers(number)
        for event in _closing(open_log)
        if event["rank"] == 0
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
    division: DivisionDocument,
    conditions: ConditionsDocument,
) -> ResultDocument:
    """result.json without its summary, official line, method, network and faults."""
    spec, observation = evidence.spec, evidence.observation
    facts = reported.result or _NO_RESULT
    seconds: SecondsDocument = {"wall": facts.get("wall_seconds"), "training": facts.get("training_seconds")}
    to_goal = _seconds_to_goal(facts, decision.goal, seconds) if decision.is_proven else None
    goal = _goal_document(decision.goal, to_goal)
    started, finished = evidence.span
    wall_seconds = None if started is None else round(finished - started, 3)
    if observation.seconds is not None:
        wall_seconds = round(observation.seconds, 3)
    elif any(finding.code == CLOCK_STEPPED for finding in decision.findings):
        wall_seconds = None  # after a clock step, differences of wall times are not durations, so there is no price
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
        "summary": "",
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

    The seconds of the whole training if it ended at the goal, or those recorded at the goal if it ran to the end of a
    budget; None if the goal was not reached.
    """
    if goal is None:
        return None
    if facts.get("outcome") == Outcome.GOAL_REACHED:
        return whole
    passed = facts.get("details", {}).get("goals", {})
    passed = passed.get(goal["kind"]) if isinstance(passed, dict) else None
    if facts.get("outcome") != Outcome.BUDGET_SPENT or not isinstance(passed, dict):
        return None
    wall, training = (read_amount(passed.get(f"{key}_seconds")) for key in ("wall", "training"))
    return {"wall": wall, "training": training}


def find_exit_code(observation: Observation) -> int | None:
    """The exit code of the rank that failed first, else the first non-zero one; None if no rank ended."""
    first = [worker.exit_code for worker in observation.workers if worker.rank == observation.first_failed]
    codes = [worker.exit_code for worker in observation.workers]
    nothing_ended = all(code is None for code in codes)
    return next((code for code in (*first, *codes) if code), None if nothing_ended else 0)


def price_of(price: Mapping[str, Any], wall_seconds: float | None) -> dict[str, object] | None:
    """The cost of the whole cluster from the start of the first worker to the end of the last; None if unknown."""
    if not price:
        return None
    hours = None if wall_seconds is None else wall_seconds / 3600
    each = price.get("per_hour")
    return {**price, "amount": None if each is None or hours is None else round(each * hours, 4)}


def label_of(functional_only: str | None) -> LabelDocument:
    """The label of a run's figures: "performance", or "functional" with the reason."""
    return {"word": "functional" if functional_only else "performance", "reason": functional_only}


def worker_document(worker: WorkerState) -> WorkerDocument:
    """A worker's state for observation.json, with times as RFC 3339 UTC."""
    times = {"started": worker.started, "finished": worker.finished}
    moments = {key: None if value is None else timestamp(value) for key, value in times.items()}
    return {**worker.to_dict(), **moments}  # type: ignore[typeddict-item]


# --- the summary ---------------------------------------------------------------------------------------------------


def _summarize(evidence: Evidence, decision: _Decision, reported: Mapping[str, Any] | None, faults: str) -> str:
    """One sentence for people, with what the run has been through, and the reason if there is one."""
    outcome, findings = decision.outcome, decision.findings
    is_unfinished = any(found.code == STILL_RUNNING for found in evidence.observation.findings)
    begin = f"{evidence.name} had not ended" if is_unfinished else f"{evidence.name} {outcome.phrase} {faults}".rstrip()
    if outcome.is_success:
        begin += _figures(outcome, reported or {})
        telling = ("goal_not_proved", NOT_INJECTED)
        doubts = (found for found in findings if found.code in telling or found.code.startswith(PREFIX))
        reason = next((found.summary for found in doubts), "")
    elif outcome is Outcome.FAILED and all(found.code.startswith(PREFIX) for found in findings):
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


# --- official_result.txt ----------------------------------------------------------------------------------------------

_OPEN = "comparable with results of the open division only"


def official_line(result: Mapping[str, Any]) -> str | None:
    """The line of a result.json, without newline; None without goal.

    "80% Top 1 Validation Accuracy reached in 150.2 seconds (training steps: 106.912), Compute: 52.97 seconds, ...".
    Seconds are rank 0's wall clock from the first training step to the goal, including validation and waiting for data;
    in parentheses the sum over its training steps only, which MLBench 3 reported. Parts that are 0 are omitted. For a
    run with a time budget: "81.25% Top 1 Validation Accuracy after 7204.125 seconds (budget 7200, then the last
    validation), ...". Also None if findings remove the line (`doubts`).
    """
    goal, parts = result["goal"], _parts(result)
    if result.get("doubts"):
        return None
    if result["outcome"] == "budget_spent" and goal and goal["last"] is not None:
        value = result_wording(goal, goal["last"])
        seconds = result["task_seconds"]["wall"] or 0.0
        budget = result["budget_seconds"]  # None if a custom command did not report it
        spent = f" (budget {budget:g}, then the last validation)" if budget else ""
        return f"{value} after {seconds:.3f} seconds{spent}{parts}"
    if result["outcome"] != "goal_reached" or not goal or not goal["reached"]:
        return None
    wall, training = goal["seconds"]["wall"], goal["seconds"]["training"]
    seconds = training if wall is None else wall
    if seconds is None:
        return f"{goal['wording']} reached"
    steps = f" (training steps: {training:.3f})" if training is not None else ""
    return f"{goal['wording']} reached in {seconds:.3f} seconds{steps}" + parts


def _parts(result: Mapping[str, Any]) -> str:
    mixed = math.fsum(_rank0(result, category) for category in MIXED_CATEGORIES.values())
    computing = math.fsum(_rank0(result, category) for category in COMPUTE_CATEGORIES) + mixed
    parts = {
        "Compute and Communication" if mixed else "Compute": computing,
        "Communication": _rank0(result, "communication"),
        "Metrics Computation": _rank0(result, "metrics"),
        "Pre-processing": _rank0(result, "preprocessing"),
    }
    texts = {name: f"{value:.3f}" for name, value in parts.items()}
    return "".join(f", {name}: {text} seconds" for name, text in texts.items() if float(text))


def official_text(result: Mapping[str, Any]) -> str:
    """The content of official_result.txt, derived only from result.json."""
    line = official_line(result) or f"No official result: {_why_not_official(result)}."
    if result["synthetic"]:
        line += f"\nThe data were synthetic ({result['data'] or 'unnamed'}): not comparable with figures on real data."
    data = result.get("data_identity")
    if data is not None and data["official"] is False and not result["synthetic"]:
        line += f"\nThe data were not the official ones ({data['reason']}): not comparable with official results."
    division = result["division"]
    if division["word"] == "open":
        line += f"\nDivision: open ({division['reason']}), {_OPEN}."
    elif division["word"] is None and result["goal"] and result["task"] != CUSTOM and not _has_other_data(result):
        line += f"\nDivision: none ({division['reason']}), not comparable with official results."
    if result["label"]["word"] == "functional":
        line += f"\nThe result is functional, not a performance measurement: {result['label']['reason']}."
    if method := result.get("method"):
        line += f"\nMethod of communication: {method}, not the task's own."
    network = result.get("network")
    if network and (phrase := network_phrase(network)):
        line += f"\nNetwork between the workers: {phrase}."
    conditions = result.get("conditions")
    if conditions and conditions["labels"]:
        line += f"\nThe run did not have its machine to itself: {Conditions.from_dict(conditions).phrase}."
    return line + "\n"


def _has_other_data(result: Mapping[str, Any]) -> bool:
    data = result.get("data_identity")
    return bool(result["synthetic"] or (data is not None and data["official"] is False))


def result_wording(goal: Mapping[str, Any], value: float) -> str:
    """ "81.25% Top 1 Validation Accuracy": the goal's wording with a value instead of the threshold."""
    if goal["wording"] == goal_wording(goal, None):
        return f"{goal['metric']} of {value:.6g}"
    return str(goal["wording"]).replace(f"{goal['threshold']:g}", f"{value:.6g}", 1)


def _why_not_official(result: Mapping[str, Any]) -> str:
    goal, outcome = result["goal"], result["outcome"]
    if not Outcome(outcome).is_success:
        reason = f"the run {Outcome(outcome).phrase}"
        if outcome == Outcome.FAILED:
            reason += f" with exit code {result['exit_code']}" if result["exit_code"] is not None else ""
            reason += f", rank {result['first_failed']} first" if result["first_failed"] is not None else ""
        return reason
    if result.get("doubts"):
        return f"its evidence is in doubt ({', '.join(result['doubts'])}; findings.json says why)"
    if goal is None:
        return "the run completed, and it has no goal"
    if goal["value"] is None:
        return f'the goal "{goal["wording"]}" was not reached'
    return f'the goal "{goal["wording"]}" was not reached, {goal["metric"]} came to {goal["value"]:g}'


def _rank0(result: Mapping[str, Any], category: str) -> float:
    spread = result["timings"].get(category)
    return spread["rank0"] if spread else 0.0


# --- environment.json -----------------------------------------------------------------------------------------------


def environment_document(ranks: Mapping[int, Mapping[str, Any]]) -> EnvironmentDocument:
    """environment.json without its schema version, and without variables that may contain secrets."""
    reported: dict[str, Any] = {}
    size = 0
    for rank in sorted(ranks):
        facts = _without_secrets(ranks[rank])
        size += len(repr(facts))
        if size > _MAX_ENVIRONMENT:
            break
        reported[str(rank)] = facts
    return {"ranks": reported, "ranks_left_out": len(ranks) - len(reported)}


def _without_secrets(facts: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = make_strict(
        {key: value for key, value in facts.items() if key not in ("v", "event", "rank", "time")}
    )
    for key in ("env", "environ", "environment", "variables"):
        if isinstance(kept.get(key), dict):
            kept[key] = {name: value for name, value in kept[key].items() if _is_kept(name)}
    return kept


def _is_kept(name: str) -> bool:
    return name in KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES)
