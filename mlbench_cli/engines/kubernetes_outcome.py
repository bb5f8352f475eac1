"""Whether a run on a cluster has ended, and how: pure, from the Job, its pods and the workers' last words."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.engines.base import WorkerState
from mlbench_cli.engines.kubernetes_manifests import CANCELLED_ANNOTATION, GRACE_SECONDS
from mlbench_cli.kube.workers import Pod, Summary, condition, failure_of, has_ended, is_true, seconds
from mlbench_cli.spec import RunSpec

SETTLE_SECONDS = 5.0  # in which the others, too, may end on their own, so that the first to fail is known
STOP_SECONDS = GRACE_SECONDS + 15.0  # in which the Job controller has stopped the others


def ended(
    spec: RunSpec,
    job: Mapping[str, Any],
    states: Sequence[WorkerState],
    pods: Mapping[int, Pod],
    summaries: Mapping[int, Summary],
    now: float,
) -> str | None:
    """A word of Observation.ended, or None while the run goes on. A worker that holds its results has ended."""
    active = any(not has_ended(pod) and worker not in summaries for worker, pod in pods.items())
    if is_cancelled(job):
        return None if active else "cancelled"
    if _never_started_in_time(spec, job, states, now):
        return "deadline"
    over = all(state.phase in ("succeeded", "failed", "lost") for state in states)
    failed = [state for state in states if state.phase in ("failed", "lost")]
    if over and not failed:
        return "exited"
    if not is_over(job) and not failed:
        return None
    if active and not _others_wait_in_vain(failed, summaries, now):
        return None
    if failure_of(job) == "DeadlineExceeded" or any(
        summary.get("reason") == "deadline" for summary in summaries.values()
    ):
        return "deadline"
    return "failed"


def is_over(job: Mapping[str, Any]) -> bool:
    """Whether the Job controller has nothing more to do."""
    return is_true(condition(job, "Complete")) or is_true(condition(job, "Failed"))


def is_cancelled(job: Mapping[str, Any]) -> bool:
    return CANCELLED_ANNOTATION in (job.get("metadata", {}).get("annotations") or {})


def is_unreleased(job: Mapping[str, Any]) -> bool:
    """Whether the client that submitted the run was lost before it could release it."""
    labels = job.get("metadata", {}).get("labels") or {}
    waits = bool(job.get("spec", {}).get("suspend")) and not is_cancelled(job)
    return waits and "kueue.x-k8s.io/queue-name" not in labels


def _others_wait_in_vain(failed: Sequence[WorkerState], summaries: Mapping[int, Summary], now: float) -> bool:
    """A worker that failed and holds its results keeps the Job from stopping the others, who may wait for it."""
    if not failed:
        return False
    since = min((state.finished for state in failed if state.finished is not None), default=now)
    holds = any((summaries.get(state.rank) or {}).get("held") for state in failed)
    return now - since > (SETTLE_SECONDS if holds else STOP_SECONDS)


def _never_started_in_time(spec: RunSpec, job: Mapping[str, Any], states: Sequence[WorkerState], now: float) -> bool:
    if any(state.started is not None for state in states):
        return False
    released = seconds(job.get("status", {}).get("startTime"))
    return released is not None and now - released > spec.timeout
