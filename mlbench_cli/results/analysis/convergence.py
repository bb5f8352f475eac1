"""Detect trainings that reach their goal in fewer epochs than the reference possibly can, so are not the same training.

The rule is that of MLPerf's reference convergence points (rcp_checker of mlperf-logging 4.1.68): means without the
least and the greatest value, the deviation of all, and a one-sided t-test with pooled degrees of freedom at 5 %. So the
least acceptable mean is m - t(0.95, n + k - 2) s sqrt(1/n + 1/k), with n and k values that the two means are over. What
a batch is, counts over all ranks; machine and backend may differ, the method may not. It needs at least 5 reference
runs.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.methods import method_phrase
from mlbench_cli.results.analysis.history import Judged
from mlbench_cli.results.analysis.statistics import student_quantile
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.util.text import significant

METRIC = "convergence"
MIN_REFERENCE = 5
_LEVEL = 0.05
_MIN_DEVIATION = 1e-9


@dataclass(frozen=True)
class TrainingKey:
    """Settings that must be equal for epochs to be comparable."""

    task: str
    preset: str
    goal: str
    method: str
    data: str
    batch: float  # samples of a step, all ranks together
    parameters: str  # those that are not the batch of a rank


def training_key(archive: Archive) -> TrainingKey | None:
    """The key of a run with a goal and a batch size; None for any other."""
    result, parameters = archive.result, archive.run["spec"]["parameters"]
    goal, batch = result["goal"], parameters.get("batch_size")
    if not goal or not is_finite_number(batch):
        return None
    identity = result["data_identity"]
    others = {key: value for key, value in sorted(parameters.items()) if key != "batch_size"}
    return TrainingKey(
        str(result["task"]),
        str(result["preset"]),
        f"{goal['metric']} {goal['comparison']} {goal['threshold']}",
        method_phrase(archive.run["spec"].get("method") or {}),
        str(identity["digest"] if identity and identity["digest"] else result["data"]),
        float(batch) * int(result["world_size"]),
        repr(others),
    )


def epochs_to_goal(archives: Sequence[Archive]) -> list[float]:
    """Epochs of the runs that reached their goal."""
    values = (archive.result["epochs"] for archive in archives if archive.result["outcome"] == "goal_reached")
    return [float(value) for value in values if is_finite_number(value) and value > 0]


def find_least_mean(reference: Sequence[float], count: int) -> float:
    """The least mean of `count` runs (those that it is over) that a reference of at least MIN_REFERENCE allows."""
    mean, used = _trimmed_mean(reference)
    deviation = max(statistics.pstdev(reference), _MIN_DEVIATION)
    reach = student_quantile(used + count - 2, 1 - 2 * _LEVEL)
    return mean - reach * deviation * math.sqrt(1 / used + 1 / count)


def decide_convergence(reference: Sequence[float], values: Sequence[float]) -> Judged:
    """Compare epochs to the goal with those of reference runs. `worse` is the reference's mean over the runs' mean."""
    if len(reference) < MIN_REFERENCE:
        known = f"{len(reference)} reference runs have equal task, goal, data, parameters and batch"
        return Judged(Verdict.CANNOT_TELL, f"{known}; {MIN_REFERENCE} are needed")
    if not values:
        return Judged(Verdict.CANNOT_TELL, "no run reached its goal")
    mean, used = _trimmed_mean(values)
    expected, _ = _trimmed_mean(reference)
    least = find_least_mean(reference, used)
    text = (
        f"{significant(mean)} epochs to the goal; the reference's mean is {significant(expected)}, "
        f"and {significant(least)} is the minimum it allows"
    )
    if mean < least:
        return Judged(Verdict.FAILED, f"{text}: converged faster than the reference can", expected / mean)
    return Judged(Verdict.PASSED, text, expected / mean)


def _trimmed_mean(values: Sequence[float]) -> tuple[float, int]:
    """The mean without least and greatest, and how many values it is over; of fewer than 5 values the mean of all."""
    kept = sorted(values)[1:-1] if len(values) >= MIN_REFERENCE else list(values)
    return statistics.fmean(kept), len(kept)
