"""Detect trainings that reach their goal in fewer epochs than the reference possibly can, so are not the same training.

The rule is that of MLPerf's reference convergence points (rcp_checker of mlperf-logging 4.1.68): means without the
least and the greatest value, the deviation of all, and a one-sided t-test with pooled degrees of freedom at 5 %. So the
least acceptable mean is m - t(0.95, n + k - 2) s sqrt(1/n + 1/k), where n and k are the numbers of values in the two
means. Batch sizes are summed over all ranks; machine and backend may differ, the method may not. It needs at least 5
reference runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.methods import method_phrase
from mlbench_cli.results.analysis.stats import MIN_REFERENCE, Verdict, find_least_mean, trimmed_mean
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.text import significant

METRIC = "convergence"


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


def decide_convergence(reference: Sequence[float], values: Sequence[float]) -> tuple[Verdict, str]:
    """Compare epochs to the goal with those of reference runs; the verdict with its reason."""
    if len(reference) < MIN_REFERENCE:
        known = f"{len(reference)} reference runs have equal task, goal, data, parameters and batch"
        return Verdict.CANNOT_TELL, f"{known}; {MIN_REFERENCE} are needed"
    if not values:
        return Verdict.CANNOT_TELL, "no run reached its goal"
    mean, used = trimmed_mean(values)
    least = find_least_mean(reference, used)
    text = (
        f"{significant(mean)} epochs to the goal; the reference's mean is {significant(trimmed_mean(reference)[0])}, "
        f"and {significant(least)} is the minimum it allows"
    )
    if mean < least:
        return Verdict.FAILED, f"{text}: converged faster than the reference can"
    return Verdict.PASSED, text
