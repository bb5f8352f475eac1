"""The progress of an experiment: its state, its queue, and its members. Read-only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlbench_cli.engines.base import Engine
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Experiment, ExperimentState, JsonObject, Outcome, Run, RunState
from mlbench_cli.runs.finalize import read_undamaged
from mlbench_cli.runs.queue import QueueFolder
from mlbench_cli.runs.snapshot import RunStatus, live_snapshot
from mlbench_cli.storage.store import Store

MAX_LOG_LINES = 20
_QUEUE_WORDS = {True: "alive", False: "ended", None: "unknown"}


class ExperimentStatus(Struct, frozen=True):
    """The current status of an experiment. `eta`: seconds until the last member ends; None if unknown. `is_queued`:
    whether a process starts its runs (None: cannot be seen from here); `queue_text` says which, or why none does.
    """

    experiment: Experiment
    state: ExperimentState
    finished: int
    failed: int
    canceled: int
    total: int
    is_queued: bool | None
    queue_text: str | None
    eta: float | None
    log: Sequence[str]

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.experiment.name

    def to_dict(self) -> JsonObject:
        """The experiment as `-o json` prints it."""
        experiment = self.experiment
        return {
            "name": experiment.name,
            "id": experiment.id,
            "created": experiment.created,
            "state": str(self.state),
            "progress": {
                "finished": self.finished,
                "failed": self.failed,
                "canceled": self.canceled,
                "total": self.total,
            },
            "eta_seconds": self.eta,
            "queue": {"state": _QUEUE_WORDS[self.is_queued], "text": self.queue_text},
            "require_goal": experiment.require_goal,
            "parallel": experiment.parallel,
            "request": experiment.request,
            "members": [
                {"index": item.index, "run": item.run_id, "content_hash": item.content_hash, "point": item.point}
                for item in experiment.members
            ],
        }


def experiment_status(
    experiment: Experiment, states: Sequence[RunStatus], store: Store, engine_of: Callable[[Run], Engine]
) -> ExperimentStatus:
    """The status of an experiment; `states` includes those of its members. Read-only."""
    by_id = {status.row.run.id: status for status in states}
    own = [by_id[member.run_id] for member in experiment.members if member.run_id in by_id]
    known = [(_state(status), None if status.outcome is None else Outcome(status.outcome)) for status in own]
    folder = QueueFolder.of(store.folder, experiment.id)
    is_queued = folder.is_held()
    state = ExperimentState.derive(known, is_queued=is_queued is not False)
    canceled = sum(1 for _, outcome in known if outcome is Outcome.CANCELED)
    failed = sum(1 for _, outcome in known if outcome is not None and not outcome.is_success) - canceled
    finished = sum(1 for state, _ in known if state is RunState.FINISHED)
    return ExperimentStatus(
        experiment,
        state,
        finished,
        failed,
        canceled,
        len(known),
        is_queued,
        _queue_text(folder, is_queued, state),
        None if state.is_over else _eta(own, experiment, engine_of),
        folder.read_log()[-MAX_LOG_LINES:],
    )


def _state(status: RunStatus) -> RunState:
    if status.state == RunState.FINISHED:
        return RunState.FINISHED
    return RunState.RUNNING if status.row.state is RunState.RUNNING else RunState.QUEUED  # until its engine has it


def _queue_text(folder: QueueFolder, is_queued: bool | None, experiment: ExperimentState) -> str | None:
    holder = folder.read_holder()
    if is_queued is not False and holder is not None:
        return holder.phrase if is_queued else f"unknown on this machine: {holder.phrase}"
    return f"ended: {folder.explain_end()}" if experiment is ExperimentState.STOPPED else None


def _eta(own: Sequence[RunStatus], experiment: Experiment, engine_of: Callable[[Run], Engine]) -> float | None:
    """Seconds until the last member ends, from the mean time of finished members of the same size and point; None if a
    size has no finished member yet, or a running member has no estimate."""
    points = {member.run_id: tuple(sorted(member.point.items())) for member in experiment.members}
    spent: dict[Any, list[float]] = {}
    for status in own:
        finished = read_undamaged(status.row.run) if _state(status) is RunState.FINISHED else None
        if finished is not None and finished.result and finished.outcome.is_success:
            key = (points[status.row.run.id], status.row.run.spec.workers)
            spent.setdefault(key, []).append(finished.result["wall_seconds"] or 0.0)
    total = 0.0
    for status in own:
        state = _state(status)
        if state is RunState.FINISHED:
            continue
        known = spent.get((points[status.row.run.id], status.row.run.spec.workers))
        mean = sum(known) / len(known) if known else None
        seconds = _left_of(status, mean, engine_of) if state is RunState.RUNNING else mean
        if seconds is None:
            return None
        total += seconds
    return total / max(1, experiment.parallel)


def _left_of(status: RunStatus, mean: float | None, engine_of: Callable[[Run], Engine]) -> float | None:
    try:
        progress: Mapping[str, Any] = live_snapshot(status.row, engine_of(status.row.run))["progress"]
    except (MlbenchError, OSError, ValueError, KeyError):
        return None
    if progress["eta"] is not None:
        return float(progress["eta_high"] or progress["eta"])
    return None if mean is None else max(0.0, mean - progress["elapsed"])
