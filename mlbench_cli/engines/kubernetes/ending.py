"""Whether and how a run on a cluster has ended. Pure: from the Job, its pods and the final messages of the workers."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.engines.kubernetes.manifests import GRACE_SECONDS, STOPPED_ANNOTATION, queue_of
from mlbench_cli.engines.kubernetes.workers import NodeEnd, Pod, failure_of, has_ended, seconds
from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.run import Ending, WorkerState
from mlbench_cli.model.spec import RunSpec

SETTLE_SECONDS = 5.0  # time for the other workers to end by themselves, so that the first failure can be identified
STOP_SECONDS = GRACE_SECONDS + 15.0  # time for the Job controller to stop the others


def decide_ending(
    spec: RunSpec,
    job: Mapping[str, Any],
    states: Sequence[WorkerState],
    pods: Mapping[int, Pod],
    ends: Mapping[int, NodeEnd],
    now: float,
    failing_since: float | None,
) -> Ending | None:
    """How the run has ended; None while it is running.

    `failing_since` is when a worker was first seen to have failed; `now` is the cluster's clock, both since 1970.
    """
    going_on = active(pods, ends)
    if is_stopped(job):
        return None if going_on else Ending(stopped_as(job))
    failed = [state for state in states if state.phase in ("failed", "lost")]
    limit = None if failed or is_over(job) else start_limit(spec, job, states)
    if limit is not None and now > limit:
        return Ending.NEVER_STARTED
    if not failed and all(state.phase == "succeeded" for state in states):
        return Ending.EXITED
    if not is_over(job) and not failed:
        return None
    if going_on and not _survivors_are_stuck(pods, now - (failing_since or now)):
        return None
    if failing_since is None and not is_over(job) and _has_just_ended(states, now):
        return None  # all were stopped; the reason will be known soon
    late = failure_of(job) == "DeadlineExceeded" or any(end.ended is Ending.DEADLINE for end in ends.values())
    return Ending.DEADLINE if late else Ending.FAILED


def active(pods: Mapping[int, Pod], ends: Mapping[int, NodeEnd]) -> list[int]:
    """The workers that are running their command, or will run it."""
    return [worker for worker, pod in pods.items() if not has_ended(pod) and worker not in ends]


def is_over(job: Mapping[str, Any]) -> bool:
    """Whether the Job controller is done."""
    return is_true(condition(job, "Complete")) or is_true(condition(job, "Failed"))


def is_stopped(job: Mapping[str, Any]) -> bool:
    """Whether a client has stopped the run."""
    return bool(stopped_as(job))


def stopped_as(job: Mapping[str, Any]) -> str:
    """How the run had ended for the client that stopped it, a value of Observation.ended; empty if none has."""
    return str(_annotations(job).get(STOPPED_ANNOTATION, "")).partition(" ")[0]


def is_suspended(job: Mapping[str, Any]) -> bool:
    """Whether the Job has no pods until it is released."""
    return bool(job.get("spec", {}).get("suspend"))


def is_unreleased(job: Mapping[str, Any]) -> bool:
    """Whether the client that submitted the run died before releasing it."""
    return is_suspended(job) and not is_stopped(job) and queue_of(job) is None


def _annotations(job: Mapping[str, Any]) -> Mapping[str, str]:
    annotations: Mapping[str, str] = job.get("metadata", {}).get("annotations") or {}
    return annotations


def _survivors_are_stuck(pods: Mapping[int, Pod], seconds_failing: float) -> bool:
    """Whether the remaining workers wait for a failed worker that will not come back.

    The Job controller stops them when it sees a failed pod. It sees none if the failed worker went away with its
    node.
    """
    stopped = any(pod.get("status", {}).get("phase") == "Failed" for pod in pods.values())
    return seconds_failing > (STOP_SECONDS if stopped else SETTLE_SECONDS)


def _has_just_ended(states: Sequence[WorkerState], now: float) -> bool:
    """Whether the last worker's end is so recent that its pod may not show the reason yet."""
    return now - max((state.finished or 0.0 for state in states), default=0.0) < SETTLE_SECONDS


def start_limit(spec: RunSpec, job: Mapping[str, Any], states: Sequence[WorkerState]) -> float | None:
    """When a run is given up unless all workers that it needs have started, in seconds since 1970; None once they have.

    Counted from the release of the Job; where a queue releases it, from its creation.
    """
    if all(state.started is not None for state in states[: None if spec.absent_seconds is None else 1]):
        return None
    begun = seconds(job.get("status", {}).get("startTime"))
    if queue_of(job) is not None:
        begun = seconds(job.get("metadata", {}).get("creationTimestamp")) or begun
    return None if begun is None else begun + spec.pods.start_timeout
