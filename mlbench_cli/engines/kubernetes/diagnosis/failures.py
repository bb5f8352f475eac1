"""Why workers failed: disruptions from outside, or the end of their own command."""

from collections.abc import Callable, Sequence

from mlbench_cli.engines.kubernetes.diagnosis.crashes import crash
from mlbench_cli.engines.kubernetes.diagnosis.facts import Facts, evidence
from mlbench_cli.engines.kubernetes.workers import (
    Pod,
    first_failed,
    has_started,
    memory_limit,
    terminated_state,
    was_stopped,
)
from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.run import Ending, Finding, WorkerState
from mlbench_cli.util.text import duration, shorten_line


def failures(facts: Facts) -> list[tuple[int, Finding]]:
    """Worker and finding: the one that failed first, then those that were hit from outside as well.

    What the others do when one is gone (a broken connection, a stop) is no finding.
    """
    first = first_failed(facts.job, facts.states, facts.pods, facts.ends)
    if first is None:
        return []
    others = [state.rank for state in facts.states if state.phase in ("failed", "lost") and state.rank != first]
    hit = [(worker, disruption(facts, worker)) for worker in others if not _was_stopped(facts, worker)]
    return [
        (first, disruption(facts, first) or ending(facts, first)),
        *((worker, finding) for worker, finding in hit if finding is not None),
    ]


def disruption(facts: Facts, worker: int) -> Finding | None:
    """What was done to a worker from outside; None if its own command ended badly."""
    pod = facts.pods.get(worker)
    if pod is None:
        return None
    status, node = pod.get("status", {}), pod.get("spec", {}).get("nodeName")
    target, word = condition(pod, "DisruptionTarget"), str(status.get("reason") or "")
    cause = str(target.get("reason")) if is_true(target) else ""
    words = str(status.get("message") or (target.get("message") if cause else "") or "")
    spot = facts.is_spot(pod)

    def finding(code: str, summary: str, hint: str, retryable: bool = True) -> Finding:
        return Finding(code, summary, hint, retryable=retryable, evidence=evidence(worker, pod, words))

    # The kubelet says TerminationByKubelet of evictions, of pods that make room for a critical one, and of those on a
    # node that shuts down: the reason of the pod tells which.
    if cause == "PreemptionByScheduler" or word == "Preempting":
        return finding(
            "preempted",
            f"Worker {worker} was preempted by a pod with a higher priority.",
            "Run it again when the cluster is less busy.",
        )
    if word in ("Terminated", "NodeShutdown", "Shutdown") or "node shutdown" in words:
        return _shut_down(finding, worker, node, spot)
    if word == "Evicted" or cause == "TerminationByKubelet":
        return finding(
            "evicted",
            f"Worker {worker} was evicted from {node}: {shorten_line(words) or 'no reason given'}",
            "Raise --memory, write less to disk, or use larger nodes.",
            retryable=False,
        )
    if spot and cause in ("EvictionByEvictionAPI", "DeletionByPodGC", "DeletionByTaintManager"):
        return _shut_down(finding, worker, node, spot)
    if cause in ("DeletionByTaintManager", "DeletionByPodGC") or (not terminated_state(pod) and facts.is_lost(pod)):
        return finding(
            "node_lost", f"The node {node} of worker {worker} has stopped responding.", f"kubectl describe node {node}"
        )
    if cause:
        is_drain = cause == "EvictionByEvictionAPI"
        reason = (
            "because the node was drained" if is_drain else f"({cause}): {shorten_line(words) or 'no reason given'}"
        )
        return finding(
            "drained", f"Worker {worker} was evicted from {node} {reason}.", "Run it again after the maintenance."
        )
    # Kubelets may list the containers of a rejected pod as waiting, or as ended in an unknown way: kubernetes 136592.
    if word and status.get("phase") == "Failed" and not has_started(pod):
        return finding(
            "device_admission",
            f"The node {node} did not admit worker {worker} ({word}): {shorten_line(words) or 'no reason given'}",
            "Run it again: another pod may have taken the device. If it happens again, request fewer GPUs or CPUs per "
            "worker, so that they fit into one NUMA domain of the node, or ask for the node's policy.",
        )
    return None


def ending(facts: Facts, worker: int) -> Finding:
    """How a worker's own command ended badly."""
    pod, end = facts.pods.get(worker), facts.ends.get(worker)
    ended = terminated_state(pod) if pod else {}
    if end is not None and end.ended is Ending.DEADLINE:
        return deadline(facts, worker)
    if pod is not None and end is None and (found := _failed_before(worker, pod)) is not None:
        return found
    if not ended if end is None else end.ended is Ending.CANCELED:
        unknown = "; its exit code is unknown" if end is None else ""
        return Finding(
            "pod_deleted",
            f"The pod of worker {worker} was deleted by someone else{unknown}.",
            hint="kubectl get events",
            retryable=True,
            evidence=evidence(worker, pod),
        )
    code = int(ended.get("exitCode", -1)) if end is None else end.exit_code
    # The message of a container is the end of its log, which an agent has brought already.
    message = str(ended.get("message") or "") if end is None else ""
    # Where memory is limited per process, only the rank is killed, and its agent reports that.
    reason = "OOMKilled" if end is not None and end.is_out_of_memory else str(ended.get("reason") or "")
    node = str((pod or {}).get("spec", {}).get("nodeName") or "")
    return crash(facts.run, worker, code, reason, message, facts.logs.get(worker, ""), memory_limit(pod), node)


def _failed_before(worker: int, pod: Pod) -> Finding | None:
    """The finding on a container that had to end before the task's, and failed; webhooks add such ones."""
    for status in pod.get("status", {}).get("initContainerStatuses") or ():
        ended = (status.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            words = shorten_line(str(ended.get("message") or ended.get("reason") or "it gave no reason"))
            return Finding(
                "sidecar_failed",
                f"The container {status.get('name')} of worker {worker}, which must run before the task, ended with "
                f"exit code {ended['exitCode']}: {words}",
                hint=f"kubectl logs {pod['metadata']['name']} -c {status.get('name')}",
                evidence=evidence(worker, pod, words),
            )
    return None


def deadline(facts: Facts, worker: int | None = None) -> Finding:
    """The finding of a run, or of one worker, that was stopped at its deadline."""
    never = not facts.ends and not any(has_started(pod) for pod in facts.pods.values())
    who = "The run" if worker is None else f"Worker {worker}"
    what = "reached its deadline before any worker started" if never else "was stopped at its deadline"
    return Finding(
        "deadline",
        f"{who} {what}.",
        hint="Set a longer --timeout (mlbench certify: --budget).",
        evidence={"never_ran": never},
    )


def start_timeout(limit: float, states: Sequence[WorkerState], reasons: Sequence[Finding]) -> Finding:
    """The finding of a run whose workers have not all started within `limit` seconds, with what they waited for."""
    missing = [state.rank for state in states if state.started is None]
    reason = f": {reasons[0].summary}" if reasons else "."
    return Finding(
        "start_timeout",
        f"{len(missing)} of {len(states)} workers had not started after {duration(limit)}{reason}",
        hint="Set a longer --start-timeout, or request less.",
        retryable=True,
        evidence={"workers": missing[:100]},
    )


def _was_stopped(facts: Facts, worker: int) -> bool:
    return was_stopped(facts.pods.get(worker), facts.ends.get(worker))


def _shut_down(finding: Callable[..., Finding], worker: int, node: object, spot: bool) -> Finding:
    if spot:
        return finding(
            "spot_lost",
            f"The spot machine {node} of worker {worker} was interrupted.",
            "Run it again, or use on-demand machines.",
        )
    return finding("node_shut_down", f"The node {node} of worker {worker} was shut down.", "Run again.")
