"""The documents of an archive, computed from a run, what the engine saw, and what the task reported."""

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from mlbench_cli import __version__
from mlbench_cli.catalog import GoalRule, load_task
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model import Finding, Observation, Run, WorkerState
from mlbench_cli.results.archive.division import division_of
from mlbench_cli.results.archive.events import Judge, meets, number, plain
from mlbench_cli.results.archive.official import goal_wording, official_line
from mlbench_cli.spec import OPEN, RunSpec, canonical_json
from mlbench_cli.times import timestamp

SUCCESSES = ("goal_reached", "goal_missed", "budget_spent", "completed")

# A task may report its environment variables; only these are kept, since the others may hold secrets.
KEPT_VARIABLES = {
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_NUM_THREADS",
}
_KEPT_PREFIXES = ("NCCL_", "GLOO_", "OMPI_MCA_", "UCX_", "TORCH_NCCL_")
_MAX_ENVIRONMENT = 8 << 20


def run_document(run: Run) -> dict[str, Any]:
    """run.json without its schema version."""
    return {**identity(run), "mlbench": __version__}


def identity(run: Run) -> dict[str, Any]:
    """What run.json says of a run on whatever machine and by whatever version it is written; plain JSON values."""
    spec = json.loads(canonical_json(run.spec.to_dict()))
    return {"id": run.id, "name": run.name, "created": run.created, "spec_hash": run.spec.hash, "spec": spec}


def goal_of(spec: RunSpec, reported: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, list[Finding]]:
    """The goal of a run without `reached` and `seconds`: the catalogue's rule with what the task reported of it.

    A reported goal that is not the one that was asked for proves nothing: its value is dropped, and a finding says so.
    """
    reported = dict(reported) if reported else None
    rule = _rule(spec)
    threshold = spec.parameters.get(f"goal_{spec.goal}")
    if rule is None or isinstance(threshold, bool) or not isinstance(threshold, int | float):
        if reported is None:
            return None, []
        return {**reported, "kind": reported["kind"] or spec.goal, "wording": goal_wording(reported, None)}, []
    asked = {"metric": rule.metric, "comparison": rule.comparison, "threshold": threshold, "kind": spec.goal}
    values = {key: reported[key] if reported else None for key in ("value", "last")}
    goal = {**asked, **values, "wording": goal_wording(asked, rule.wording)}
    if reported is None or _same_goal(asked, reported):
        return goal, []
    finding = Finding(
        "goal_differs",
        f"The goal was {goal_wording(asked, None)}, but the task reported the goal {goal_wording(reported, None)}.",
        hint="Check the task's parameters goal_full and goal_light.",
        evidence={"reported": reported, "asked": asked},
    )
    return {**goal, "value": None, "last": None}, [finding]


def judge_of(spec: RunSpec, started: str | None) -> Judge | None:
    """Who tells what a command of one's own has reached where it is held to a task's goal; None for any other run."""
    goal, _ = goal_of(spec, None)
    if spec.preset != OPEN or goal is None:
        return None
    return Judge({key: goal[key] for key in ("metric", "comparison", "threshold", "kind")}, started)


def started(run: Run, seen: Observation) -> str | None:
    """When the first worker began, as RFC 3339; None where none did."""
    moment, _ = _span(run, seen)
    return None if moment is None else timestamp(moment)


def settle(
    outcome: str, reported: Mapping[str, Any] | None, goal: Mapping[str, Any] | None, proven: bool, seen: Observation
) -> tuple[str, list[Finding]]:
    """The outcome that can be upheld, never better than the one given, and why it is another.

    A reached goal needs a result event that says so, a value that meets the threshold, a metric event with that value
    (`proven`), and not one rank that failed. A spent budget with a goal needs a metric event with the last value
    (`proven`), for that is its figure.
    """
    if outcome not in SUCCESSES:
        return outcome, []
    failed = [worker for worker in seen.workers if worker.exit_code]
    if failed:
        codes = {worker.rank: worker.exit_code for worker in failed}
        return "failed", [
            Finding(
                "exit_codes_contradict",
                f'The outcome "{outcome}" was given, but {len(failed)} of {len(seen.workers)} ranks failed.',
                evidence={"exit_codes": {str(rank): code for rank, code in codes.items()}},
            )
        ]
    if outcome not in ("goal_reached", "budget_spent") or (outcome == "budget_spent" and goal is None):
        return outcome, []
    claimed = reported is not None and reported["outcome"] == outcome
    if claimed and goal is not None and goal["value"] is not None and proven:
        return outcome, []
    return "completed" if goal is None else "goal_missed", [
        Finding(
            "goal_not_proved",
            f"The outcome {outcome} is not upheld: "
            + (
                "no metric event has the value that the result claims."
                if claimed
                else "no result event of rank 0 says so."
            ),
            hint="A task reports its goal's metric with contract.emit before it reports its result.",
            evidence={"goal": dict(goal) if goal else None},
        )
    ]


def result_document(
    run: Run,
    *,
    outcome: str,
    exit_code: int | None,
    seen: Observation,
    reported: Mapping[str, Any] | None,
    goal: Mapping[str, Any] | None,
    proven: bool,
) -> dict[str, Any]:
    """result.json without its schema version. All times in seconds; `timings` are seconds over ranks."""
    told: Mapping[str, Any] = reported or {}
    spec = run.spec
    seconds = {"wall": told.get("wall_seconds"), "training": told.get("training_seconds")}
    to_goal = _seconds_to_goal(told, goal, seconds) if proven else None
    started, finished = _span(run, seen)
    synthetic = told.get("synthetic", False)
    wall = None if started is None else round(finished - started, 3)
    document: dict[str, Any] = {
        "run": run.name,
        "id": run.id,
        "task": spec.task,
        "preset": spec.preset,
        "engine": spec.engine,
        "cluster": spec.cluster,
        "backend": spec.backend,
        "workers": spec.workers,
        "world_size": spec.world_size,
        "device": spec.device,
        "outcome": outcome,
        "exit_code": exit_code,
        "started": None if started is None else timestamp(started),
        "finished": timestamp(finished),
        "wall_seconds": wall,
        "task_seconds": seconds,
        "goal": {**goal, "reached": to_goal is not None, "seconds": to_goal} if goal else None,
        "budget_seconds": told.get("budget_seconds"),
        "timings": told.get("timings", {}),
        "updates": told.get("updates"),
        "samples": told.get("samples"),
        "epochs": told.get("epochs"),
        "synthetic": synthetic,
        "data": told.get("data"),
        "label": label_of(spec.functional_only),
        "division": division_of(spec, synthetic).to_dict(),
        "first_failed": seen.first_failed,
        "ended": seen.ended,
        "worker_states": [_state(worker) for worker in seen.workers],
        "details": told.get("details", {}),
        "price": price_of(spec.price, wall),
    }
    return {**document, "official_line": official_line(document)}


def _seconds_to_goal(
    told: Mapping[str, Any], goal: Mapping[str, Any] | None, whole: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Seconds to the goal (wall, training): those of the whole training where that ended at the goal, those that the
    task noted on its way where it went on to the end of a budget; None where the goal was not reached."""
    if goal is None or not is_proven(goal):
        return None
    if told.get("outcome") == "goal_reached":
        return whole
    passage = told.get("details", {}).get("goals", {})
    passage = passage.get(goal["kind"]) if isinstance(passage, dict) else None
    if told.get("outcome") != "budget_spent" or not isinstance(passage, dict):
        return None
    seconds = {key: passage.get(f"{key}_seconds") for key in ("wall", "training")}
    return {
        key: value if value is not None and number(value) and value >= 0 else None for key, value in seconds.items()
    }


def price_of(price: Mapping[str, Any], wall_seconds: float | None) -> dict[str, Any] | None:
    """What the whole cluster cost from the start of the first worker to the end of the last, as far as it is known."""
    if not price:
        return None
    hours = None if wall_seconds is None else wall_seconds / 3600
    each = price.get("per_hour")
    return {**price, "amount": None if each is None or hours is None else round(each * hours, 4)}


def label_of(functional_only: str | None) -> dict[str, Any]:
    """What the figures of a run may be taken for: "performance", or "functional" with the reason."""
    return {"word": "functional" if functional_only else "performance", "reason": functional_only}


def environment_document(spec: RunSpec, ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """environment.json: what the ranks reported, and the machine on which the archive was made.

    With the local engine that machine is also the one the ranks ran on.
    """
    reported: dict[str, Any] = {}
    size = 0
    for rank in sorted(ranks):
        facts = _without_secrets(ranks[rank])
        size += len(repr(facts))
        if size > _MAX_ENVIRONMENT:
            break
        reported[str(rank)] = facts
    return {
        "client": {"ran_the_ranks": spec.engine == "local", **machine_facts()},
        "ranks": reported,
        "ranks_left_out": len(ranks) - len(reported),
    }


def machine_facts() -> dict[str, Any]:
    """What is noted of this machine; memory in bytes."""
    uname = platform.uname()
    return {
        "mlbench": __version__,
        "python": platform.python_version(),
        "platform": f"{uname.system} {uname.release}",
        "machine": uname.machine,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def findings_document(findings: Iterable[Finding]) -> dict[str, Any]:
    return {"findings": [finding.to_dict() for finding in findings]}


def is_proven(goal: Mapping[str, Any] | None) -> bool:
    """Whether the goal's value meets its threshold."""
    return goal is not None and meets(goal["value"], goal["comparison"], goal["threshold"])


def _rule(spec: RunSpec) -> GoalRule | None:
    if spec.task == "custom":
        return None
    try:
        return load_task(spec.task).goal
    except MlbenchError:
        return None  # a task of another version's catalogue


def _same_goal(asked: Mapping[str, Any], reported: Mapping[str, Any]) -> bool:
    return (
        reported["metric"] == asked["metric"]
        and reported["comparison"] == asked["comparison"]
        and reported["threshold"] == asked["threshold"]
        and reported["kind"] in (None, asked["kind"])
    )


def _span(run: Run, seen: Observation) -> tuple[float | None, float]:
    """Start of the first worker and end of the last, in seconds since 1970; the start is None if none began."""
    starts = [worker.started for worker in seen.workers if worker.started is not None]
    ends = [worker.finished for worker in seen.workers if worker.finished is not None]
    started = min(starts, default=None)
    finished = max(ends, default=seen.time)
    created = datetime.fromisoformat(run.created).timestamp()
    return started, max(finished, created if started is None else started)


def _state(worker: WorkerState) -> dict[str, Any]:
    times = {"started": worker.started, "finished": worker.finished}
    return {**worker.to_dict(), **{key: None if value is None else timestamp(value) for key, value in times.items()}}


def _without_secrets(facts: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = plain(
        {key: value for key, value in facts.items() if key not in ("v", "event", "rank", "time")}
    )
    for key in ("env", "environ", "environment", "variables"):
        if isinstance(kept.get(key), dict):
            kept[key] = {name: value for name, value in kept[key].items() if _is_kept(name)}
    return kept


def _is_kept(name: str) -> bool:
    return name in KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES)


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines: Sequence[str] = [line for line in file if line.startswith(("model name", "Model"))]
    except OSError:
        return platform.processor() or None
    return lines[0].partition(":")[2].strip() if lines else platform.processor() or None
