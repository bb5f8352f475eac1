"""Pods -> what each worker does. Pure functions on the objects that the API gives, and on what agents say."""

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.engines.observe import NodeReport
from mlbench_cli.kube.api import GONE
from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.run import Ending, Phase, WorkerState

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
# In a pod's status: by its node, which may do so without the condition DisruptionTarget.
TAKEN_AWAY = ("Evicted", "Preempting", "NodeShutdown", "Shutdown", "Terminated")
UNKNOWN = "ContainerStatusUnknown"  # the kubelet made the exit code up
Pod = Mapping[str, Any]


class NodeEnd(Struct, frozen=True):
    """How a pod's ranks ended, as its agent says: EXITED with this code, CANCELED because the run was being stopped, or
    DEADLINE. Times are seconds since 1970."""

    ended: Ending
    exit_code: int
    started: float | None = None
    finished: float | None = None
    is_out_of_memory: bool = False


def by_worker(pods: Iterable[Pod]) -> dict[int, Pod]:
    """The newest pod of each worker, by number."""
    found: dict[int, Pod] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", ""))):
        index = pod["metadata"].get("labels", {}).get(INDEX_LABEL, "")
        if index.isdigit():
            found[int(index)] = pod
    return found


class Known:
    """Something that follows from a pod alone, worked out once for each of its versions: those are never changed."""

    def __init__(self, work_out: Callable[[int, Pod], Any]) -> None:
        self._work_out = work_out
        self._known: dict[int, tuple[Pod, Any]] = {}

    def __call__(self, worker: int, pod: Pod) -> Any:
        known = self._known.get(worker)
        if known is None or known[0] is not pod:
            known = self._known[worker] = pod, self._work_out(worker, pod)
        return known[1]


def worker_states(
    workers: int,
    pods: Mapping[int, Pod],
    ends: Mapping[int, NodeEnd],
    run_on_all: bool = True,
    state_of: Callable[[int, Pod], WorkerState] | None = None,
) -> tuple[WorkerState, ...]:
    """The state of every worker. What its agent said of its end counts before its pod's status."""
    state_of = state_of or worker_state
    alone = (state_of(index, pods[index]) if index in pods else WorkerState(index) for index in range(workers))
    states = [_apply_end(state, ends.get(state.rank)) for state in alone]
    if not run_on_all and states[0].exit_code is not None:
        # The others only waited for worker 0, and end when it does.
        states[1:] = [_assume_success(state) for state in states[1:]]
    return tuple(states)


def worker_state(index: int, pod: Pod) -> WorkerState:
    """What the pod's status says of its worker."""
    status, container = pod.get("status", {}), main_status(pod)
    state = container.get("state", {})
    ended = state.get("terminated") or {}
    running = state.get("running") or {}
    return WorkerState(
        rank=index,
        phase=_phase(pod, container, ended),
        reason=reason(pod),
        node=pod.get("spec", {}).get("nodeName"),
        exit_code=None if ended.get("reason") == UNKNOWN else ended.get("exitCode"),
        started=seconds(ended.get("startedAt") or running.get("startedAt")),
        finished=seconds(ended.get("finishedAt")) if ended or status.get("phase") == "Failed" else None,
        restarts=int(container.get("restartCount", 0)),
        image_digest=_image_digest(container),
    )


def find_end(report: NodeReport) -> NodeEnd | None:
    """What the agent of a pod says of its ranks' end; None before it, or if they never began."""
    state = report.state
    if state is None or not report.has_ended or state["ended"] == Ending.NEVER_STARTED:
        return None
    ranks = state["ranks"]
    first = next((facts for facts in ranks if facts["rank"] == state["first_failed"]), None)
    codes = [facts["exit_code"] for facts in ranks if facts["exit_code"] is not None]
    # Without a code they were told to end before they began.
    code = first["exit_code"] if first is not None else max(codes, default=128 + signal.SIGTERM)
    ended = Ending.EXITED
    if state["ended"] == Ending.DEADLINE:
        ended = Ending.DEADLINE
    elif state["ended"] == Ending.CANCELED or (first is None and any(facts["stopped"] for facts in ranks)):
        ended = Ending.CANCELED
    starts = [facts["started"] for facts in ranks if facts["started"] is not None]
    finishes = [facts["finished"] for facts in ranks if facts["finished"] is not None]
    return NodeEnd(
        ended,
        code,
        min(starts, default=state["started"]),
        max(finishes, default=state["finished"]),
        any(facts["out_of_memory"] for facts in ranks),
    )


def main_status(pod: Pod) -> Mapping[str, Any]:
    """Status of the container that runs the command; empty if the kubelet has not reported one."""
    statuses: Sequence[Mapping[str, Any]] = pod.get("status", {}).get("containerStatuses") or ()
    return next((item for item in statuses if item.get("name") == "main"), {})


def terminated_state(pod: Pod) -> Mapping[str, Any]:
    """How the container ended; empty while it has not."""
    return main_status(pod).get("state", {}).get("terminated") or {}


def memory_limit(pod: Pod | None) -> str | None:
    """The limit of the memory of the container that runs the command, for example 64Mi; None if it is not known."""
    containers: Sequence[Mapping[str, Any]] = (pod or {}).get("spec", {}).get("containers") or ()
    asked = next((item for item in containers if item.get("name") == "main"), {})
    for place in (asked, main_status(pod or {})):  # what was asked for, and what the kubelet says it gave
        limit = ((place.get("resources") or {}).get("limits") or {}).get("memory")
        if limit is not None:
            return str(limit)
    return None


def has_ended(pod: Pod) -> bool:
    """Whether nothing more will come from this pod."""
    ended = bool(terminated_state(pod)) or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return ended or bool(pod.get(GONE)) or is_cut_off(pod)


def is_cut_off(pod: Pod) -> bool:
    """Whether the pod is given up with its node, which no longer says what became of it."""
    target = condition(pod, "DisruptionTarget")
    return is_true(target) and target.get("reason") in ("DeletionByTaintManager", "DeletionByPodGC")


def is_on_silent_node(pod: Pod) -> bool:
    """Whether the pod's node has stopped answering: the cluster calls the pod unready, and has not given it up yet."""
    runs = pod.get("status", {}).get("phase") == "Running" and bool(main_status(pod).get("state", {}).get("running"))
    # A container without a probe is ready as long as it runs.
    return runs and condition(pod, "Ready").get("status") == "False" and not has_ended(pod)


def has_started(pod: Pod) -> bool:
    """Whether the task's container runs or has run, before a restart, too."""
    states = [main_status(pod).get(name) or {} for name in ("state", "lastState")]
    return any(state.get("running") or seconds((state.get("terminated") or {}).get("startedAt")) for state in states)


def reason(pod: Pod) -> str | None:
    """Why a pod is not simply running, in Kubernetes' word."""
    state = main_status(pod).get("state", {})
    scheduled = condition(pod, "PodScheduled")
    for word in (
        (state.get("terminated") or {}).get("reason"),
        pod.get("status", {}).get("reason"),
        "Deleted" if pod.get(GONE) else None,
        "Terminating" if pod["metadata"].get("deletionTimestamp") else None,
        (state.get("waiting") or {}).get("reason"),
        scheduled.get("reason") if scheduled.get("status") == "False" else None,
    ):
        if word and word != "Completed":
            return str(word)
    return None


def why_gone(pods: Sequence[Pod]) -> str:
    """How the head's last pod ended, or why there is none, as part of a sentence."""
    if not pods:
        return "its pod is gone"
    pod = pods[-1]
    if is_on_silent_node(pod):
        return f"its node {pod.get('spec', {}).get('nodeName')} does not answer"
    message = str(terminated_state(pod).get("message") or pod.get("status", {}).get("message") or "").strip()
    if pod.get("status", {}).get("phase") == "Succeeded":
        return message.rstrip(".") or "it had expired"
    return f"{reason(pod) or pod.get('status', {}).get('phase') or 'unknown'}{': ' + message if message else ''}"


def first_failed(
    job: Mapping[str, Any],
    states: Iterable[WorkerState],
    pods: Mapping[int, Pod],
    ends: Mapping[int, NodeEnd],
) -> int | None:
    """The worker that failed first; those that were stopped because of it do not count.

    Where all were stopped and yet the Job has failed, somebody stopped the first of them from outside.
    """
    failed = sorted(
        (was_stopped(pods.get(state.rank), ends.get(state.rank)), state.finished or float("inf"), state.rank)
        for state in states
        if state.phase in ("failed", "lost")
    )
    if not failed:
        return None
    stopped, _, worker = failed[0]
    return None if stopped and failure_of(job) in (None, "DeadlineExceeded") else worker


def failure_of(job: Mapping[str, Any]) -> str | None:
    """Why the Job has failed, in Kubernetes' word; None if it has not."""
    found = (condition(job, kind) for kind in ("FailureTarget", "Failed"))
    return next((str(item.get("reason")) for item in found if is_true(item)), None)


def was_stopped(pod: Pod | None, end: NodeEnd | None) -> bool:
    """Whether the worker ended because the run was being stopped; not if its pod was taken away from outside."""
    if pod is not None and (
        is_true(condition(pod, "DisruptionTarget")) or pod.get("status", {}).get("reason") in TAKEN_AWAY
    ):
        return False
    if end is not None:
        return end.ended is Ending.CANCELED
    if pod is None:
        return False
    if terminated_state(pod).get("reason") == "OOMKilled":
        return False
    return bool(pod["metadata"].get("deletionTimestamp")) or bool(pod.get(GONE))


def seconds(moment: str | None) -> float | None:
    """RFC 3339 -> seconds since 1970. The kubelet writes 1970 for a container that could not be started."""
    if not moment:
        return None
    try:
        return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp() or None
    except ValueError:
        return None


def _image_digest(container: Mapping[str, Any]) -> str | None:
    """The digest in what the kubelet reports: NAME@sha256:... after a pull, sha256:... of an image loaded by hand."""
    digest = str(container.get("imageID") or "").rpartition("@")[2]
    return digest.removeprefix("docker://") or None


def _phase(pod: Pod, container: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    phase = pod.get("status", {}).get("phase")
    if ended.get("reason") == UNKNOWN:
        return "lost"
    if ended:
        return "failed" if ended.get("exitCode") else "succeeded"
    if phase in ("Succeeded", "Failed"):
        return str(phase).lower()
    if pod.get(GONE) or is_cut_off(pod):
        return "lost"
    if container.get("state", {}).get("running"):
        return "running"
    return "starting" if is_true(condition(pod, "PodScheduled")) else "pending"


def _apply_end(state: WorkerState, end: NodeEnd | None) -> WorkerState:
    if end is None:
        return state
    if state.started is not None and end.finished is not None and end.finished < state.started:
        state = replace(state, started=None)  # the node's clock is not the pod's, so both times are taken from the pod
    return replace(
        state,
        phase=Phase.FAILED if end.exit_code else Phase.SUCCEEDED,
        exit_code=end.exit_code,
        started=end.started if state.started is None else state.started,
        finished=state.finished if end.finished is None else end.finished,
        reason=None if end.ended is Ending.EXITED and not end.exit_code else state.reason,
    )


def _assume_success(state: WorkerState) -> WorkerState:
    return state if state.exit_code is not None else replace(state, phase="succeeded", exit_code=0, reason=None)
