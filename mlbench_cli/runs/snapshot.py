"""The state of runs for `mlbench status`. Read-only: nothing is fetched, sealed, released or recorded."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypedDict

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.agent.processes import is_locked
from mlbench_cli.engines.base import Engine
from mlbench_cli.errors import DamagedArchive, MlbenchError, UnreachableError
from mlbench_cli.model.goals import Goal, metric_names
from mlbench_cli.model.methods import method_phrase
from mlbench_cli.model.network import network_phrase
from mlbench_cli.model.run import DAMAGED, Observation, Run, RunRow, RunState
from mlbench_cli.results.analysis.figures import program_metrics
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.runs.finalize import FinishedRun, read_finished
from mlbench_cli.runs.progress import ProgressReader
from mlbench_cli.runs.queue import QUEUE_ENDED, queued_observation
from mlbench_cli.runs.supervise import is_waiting

ENDED = "ended"  # the state of a run whose workers have ended and whose archive is not complete
UNKNOWN = "unknown"  # its cluster, machine or folder gives no answer


class GoalStanding(TypedDict):
    """A run's distance from its goal. `distance` is in the metric's unit, 0 once reached, null without any value."""

    metric: str
    comparison: str
    threshold: float
    value: float | None
    best: float | None
    distance: float | None


class RunStatus(Struct, frozen=True):
    """A row of `mlbench status`. `problem` says why the state may be out of date."""

    row: RunRow
    state: str
    outcome: str | None
    problem: str | None = None

    def to_dict(self) -> dict[str, object]:
        """The run as `status -o json` prints it."""
        return {**describe_run(self.row), "state": self.state, "outcome": self.outcome, "problem": self.problem}


def read_states(rows: Iterable[RunRow], engine_of: Callable[[Run], Engine]) -> Iterator[RunStatus]:
    """The state of each run now, in turn. A run, folder or cluster that gives no answer affects only its own rows."""
    unreachable: dict[str, str] = {}
    return (_read_state(row, engine_of, unreachable) for row in rows)


def _read_state(row: RunRow, engine_of: Callable[[Run], Engine], unreachable: dict[str, str]) -> RunStatus:
    if row.problem:
        return RunStatus(row, UNKNOWN, None, row.problem)
    if row.state is RunState.FINISHED:
        return RunStatus(row, str(row.state), None if row.outcome is None else str(row.outcome))
    cluster = row.run.spec.cluster
    if cluster in unreachable:
        return RunStatus(row, str(row.state), None, unreachable[cluster])
    try:
        if (finished := read_finished(row.run)) is not None:
            return RunStatus(row, str(RunState.FINISHED), str(finished.outcome))
        observation = _look(row, engine_of)
    except UnreachableError as error:
        unreachable[cluster] = error.message
        return RunStatus(row, str(row.state), None, error.message)
    except DamagedArchive as damage:
        return damaged_status(row, damage)
    except (MlbenchError, OSError, ValueError, KeyError) as error:
        return RunStatus(row, UNKNOWN, None, error.message if isinstance(error, MlbenchError) else str(error))
    codes = ("unknown_from_here", QUEUE_ENDED)
    problem = next((found.summary for found in observation.findings if found.code in codes), None)
    return RunStatus(row, live_state(row, observation), None, problem)


def damaged_status(row: RunRow, damage: DamagedArchive) -> RunStatus:
    """The row of a run whose archive is damaged, with the reason."""
    return RunStatus(row, DAMAGED, None, f"{damage.file}: {damage.plain}" if damage.file else damage.plain)


def _look(row: RunRow, engine_of: Callable[[Run], Engine]) -> Observation:
    """The run as it is now."""
    if is_waiting(row):
        return queued_observation(row)
    seen = engine_of(row.run).look(row.run)
    if seen.is_absent and row.state is RunState.SUBMITTED and row.run.folder.is_dir() and is_locked(row.run.folder):
        return replace(seen, ended=None, findings=())  # the client that has the lock is about to submit it
    return seen


def find_metric(metrics: Mapping[str, float | str], metric: str) -> str | None:
    """The name of a reported metric by its plain name: "Prec@1" finds val_global_Prec@1."""
    names = (metric, *reversed(metric_names(metric)[1:]), f"train_{metric}")
    return next((name for name in names if name in metrics), None)


def finished_snapshot(row: RunRow) -> dict[str, Any] | None:
    """A run whose archive is complete; None for any other. Loads no engine."""
    finished = read_finished(row.run)
    if finished is None or finished.result is None:
        return None
    result = finished.result
    ended = {"state": "finished", "outcome": str(finished.outcome), "summary": finished.summary}
    return {
        **describe_run(row),
        **ended,
        "ended": result.get("ended"),
        "first_failed": result["first_failed"],
        "ranks": list(result["worker_states"]),
        "progress": _finished_progress(finished),
        "metrics": result.get("metrics", {}),
        "metric_figures": _finished_metrics(row.run),
        "goal": _finished_goal(result["goal"], str(finished.outcome)),
        **run_conditions(result),
        **({"faults": result["faults"]} if result.get("faults") else {}),
        "findings": [finding.to_dict() for finding in finished.findings],
    }


def _finished_metrics(run: Run) -> dict[str, Any]:
    """Last, best and mean of each metric; empty if the file of metrics is damaged."""
    try:
        with Archive.open(run.folder) as archive:
            return {name: found.to_dict() for name, found in program_metrics(archive).items()}
    except DamagedArchive:
        return {}


def live_snapshot(row: RunRow, engine: Engine) -> dict[str, Any]:
    """A run whose archive is not complete, as the engine sees it now and rank 0's events tell."""
    run = row.run
    observation = _look(row, lambda _: engine)
    reader = ProgressReader(engine, run)
    progress = reader.read(observation).to_dict()
    return {
        **describe_run(row),
        "state": live_state(row, observation),
        "ended": observation.ended,
        "first_failed": observation.first_failed,
        "ranks": [worker.to_dict() for worker in observation.workers],
        "progress": progress,
        "metrics": reader.tracker.metrics,
        "metric_figures": {name: found.to_dict() for name, found in reader.tracker.metric_figures.items()},
        "goal": _live_goal(progress),
        "findings": [finding.to_dict() for finding in observation.findings],
    }


def live_state(row: RunRow, observation: Observation) -> str:
    """The state of a run that is not finalized: "ended" if its workers have ended and its archive is not complete."""
    return ENDED if observation.ended else str(row.state)


def describe_run(row: RunRow) -> dict[str, object]:
    """The facts that the store has of every run, whatever its state."""
    run, spec = row.run, row.run.spec
    return {
        "name": run.name,
        "id": run.id,
        "cluster": spec.cluster,
        "engine": spec.engine,
        "task": spec.task,
        "title": spec.title,
        "preset": spec.preset,
        "backend": spec.backend,
        "device": spec.device,
        "method": method_phrase(spec.method) if spec.runs_task_program else "",
        "network": spec.network,
        "pin": spec.pin,
        "functional_only": spec.functional_only,
        "workers": spec.workers,
        "world_size": spec.world_size,
        "seed": spec.seed,
        "created": run.created,
        "folder": str(run.folder),
        "state": str(row.state),
        "outcome": None if row.outcome is None else str(row.outcome),
    }


def _finished_progress(finished: FinishedRun) -> dict[str, object]:
    result = finished.result
    assert result is not None
    phase = result.get("progress") or {}
    numbers = {key: phase.get(key) for key in ("phase", "epoch", "epochs", "step", "steps")}
    return {**numbers, "elapsed": result["wall_seconds"] or 0.0, "eta": None, "eta_high": None}


def run_conditions(result: Mapping[str, Any]) -> dict[str, object]:
    """Under which conditions a finished run was measured, each with its reason, and its measured network."""
    network = result.get("network")
    return {
        "conditions": list(condition_phrases(result.get("conditions"))),
        "measured_network": network_phrase(network) if network else None,
    }


def condition_phrases(document: object) -> Iterator[str]:
    """ "crowded: 4 threads for 2 ranks on 2 cores" for each label in the conditions of a result."""
    if not isinstance(document, Mapping):
        return
    for label in document.get("labels") or ():
        entry = document.get(label)
        reason = entry.get("reason") if isinstance(entry, Mapping) else None
        yield f"{str(label).replace('_', '-')}: {reason}" if reason else str(label).replace("_", "-")


def group_conditions(phrases: Iterable[str] | None) -> dict[str, list[str]]:
    """The phrases of conditions by their labels, which lists of runs show without the reasons."""
    found: dict[str, list[str]] = {}
    for phrase in phrases or ():
        found.setdefault(phrase.partition(":")[0], []).append(phrase)
    return found


def _finished_goal(goal: Mapping[str, Any] | None, outcome: str) -> GoalStanding | None:
    """As `format_goal`: of a run that spent a time budget, the value at the end."""
    if goal is None:
        return None
    value = goal["last"] if outcome == "budget_spent" else goal["value"]
    return _standing(Goal(goal["metric"], goal["comparison"], goal["threshold"]), value, goal["value"])


def _live_goal(progress: Mapping[str, Any]) -> GoalStanding | None:
    if progress["metric"] is None or progress["threshold"] is None:
        return None
    goal = Goal(progress["metric"], progress["comparison"], progress["threshold"])
    return _standing(goal, progress["value"], progress["best"])


def _standing(goal: Goal, value: float | None, best: float | None) -> GoalStanding:
    return {
        "metric": goal.metric,
        "comparison": goal.comparison,
        "threshold": goal.threshold,
        "value": value,
        "best": best,
        "distance": None if best is None else goal.distance(best),
    }
