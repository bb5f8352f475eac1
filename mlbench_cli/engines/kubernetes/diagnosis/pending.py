"""Why workers do not start: pods that cannot be created or scheduled, or whose containers cannot be created."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from mlbench_cli.engines.kubernetes.diagnosis.facts import Facts, Object, evidence
from mlbench_cli.engines.kubernetes.diagnosis.scheduling import quantity
from mlbench_cli.engines.kubernetes.ending import is_stopped, is_suspended
from mlbench_cli.engines.kubernetes.manifests import queue_of
from mlbench_cli.engines.kubernetes.workers import Pod, has_ended, main_status
from mlbench_cli.kube.objects import FINAL_PULL, PULL_REASONS, condition, is_true
from mlbench_cli.model.run import Finding
from mlbench_cli.util.text import counted, shorten_line

QUIET_SECONDS = 30.0  # a pull that takes longer is told
CREATING_SECONDS = 60.0  # a container that takes longer to create may be stuck
PULLING_SECONDS = 180.0  # time for a registry that does not answer to recover

PULL_PREAMBLE = re.compile(
    r'rpc error: code = \w+ desc = |failed to (pull|pull and unpack) image "[^"]*": '
    r'|failed to resolve reference "[^"]*": ',
    re.IGNORECASE,
)
WRONG_PLATFORM = re.compile(r"no match for platform|no matching manifest for|no image found .*for architecture")
PULL_HINTS = (
    (re.compile(r"toomanyrequests|\b429\b|rate limit"), "The registry limits pulls: log in with --pull-secret, or "
     "copy the image to a registry of your own (mlbench images push)."),
    (re.compile(r"no space left on device"), "The node's disk is full: choose nodes with larger disks."),
    (re.compile(r"x509: |HTTP response to HTTPS client"), "The nodes must trust the registry: name its certificate, or "
     "plain HTTP, in the hosts.toml of their containerd."),
    (re.compile(r"short[- ]name"), "The nodes want the registry's name, too, for example --image docker.io/NAME:TAG."),
)  # fmt: skip
MAX_RESTARTS = 3  # of a sidecar that the task waits for; from this many on its failure is permanent
# Of the node's runtime, which a busy node may get over: a call that took too long, a name that is still reserved.
RUNTIME_REASONS = ("CreateContainerError", "RunContainerError", "PreCreateHookError", "PreStartHookError")
# Of the kubelet and of volumes, whatever they are called; the others are told elsewhere.
STUCK = re.compile(r"NetworkNotReady|Failed(?!Scheduling$|ScaleUp$|ToRetrieveImagePullSecret$)\w+")
# Decisions of the API server on a pod: they stay the same. A webhook that does not answer is an "Internal error".
REFUSED = re.compile(r"\bis (?:forbidden|invalid)\b|denied (?:the )?request")
# What a pod asks of a quota, and the quota: lists of NAME=QUANTITY.
EXCEEDED = re.compile(r"requested: (\S+), used: \S+, limited: (\S+)")

CPU_LIMIT_HINT = "--pod-patch FILE with   spec: {containers: [{name: main, resources: {limits: {cpu: N}}}]}"


def not_created(facts: Facts) -> list[Finding]:
    """Findings on pods that the Job controller does not create, or is not allowed to."""
    spec = facts.job.get("spec", {})
    if is_suspended(facts.job):
        return [_suspended_finding(facts)]
    if len(facts.pods) >= int(spec.get("parallelism") or 0):
        return []
    refusals = facts.events_of(facts.job, "FailedCreate")
    if not refusals:
        return []
    message = shorten_line(str(refusals[-1].get("message", "")), 600)
    proof = {"message": message, "created": len(facts.pods), "wanted": spec.get("parallelism")}
    if re.search(r"(exceeded|failed|status unknown for) quota", message):
        # Where the quota is merely used up, others may end and make room; a new one has no status for a moment.
        return [
            Finding(
                "quota_exceeded",
                f"The namespace's quota does not allow the pods: {message}",
                hint=CPU_LIMIT_HINT if _lacks_cpu_limit(message) else "kubectl describe resourcequota",
                retryable=True,
                permanent="must specify" in message or _never_fits(message, int(spec.get("parallelism") or 1)),
                evidence=proof,
            )
        ]
    refused = REFUSED.search(message) is not None or "security context constraint" in message
    code, hint = _refusal(message) if refused else ("pods_not_created", None)
    return [Finding(code, f"The pods cannot be created: {message}", hint=hint, permanent=refused, evidence=proof)]


def list_unscheduled(pods: Mapping[int, Pod]) -> list[tuple[int, Pod]]:
    """The pods that have no node."""
    return [(worker, pod) for worker, pod in pods.items() if condition(pod, "PodScheduled").get("status") == "False"]


def unseen(facts: Facts, pods: Mapping[int, Pod]) -> list[Finding]:
    """The finding on pods that no scheduler has looked at, one for all."""
    found = [
        worker
        for worker, pod in pods.items()
        if not pod["spec"].get("nodeName") and not condition(pod, "PodScheduled") and facts.age(pod) >= QUIET_SECONDS
    ]
    if not found:
        return []
    name = facts.template.get("schedulerName", "default-scheduler")
    who = counted(len(found), "worker is", "workers are")
    return [
        Finding(
            "unschedulable",
            f'{who} waiting for the scheduler "{name}", which is busy or not on this cluster.',
            hint="Install it, or name another one as schedulerName in --pod-patch.",
            evidence=evidence(found[0], pods[found[0]]),
        )
    ]


def held_up(facts: Facts, pods: Mapping[int, Pod]) -> list[tuple[int, Finding]]:
    """Worker and finding for each scheduled pod that does not start, or whose node is lost."""
    found = (
        (worker, _container(facts, worker, pod) or _unreachable(facts, worker, pod)) for worker, pod in pods.items()
    )
    return [(worker, finding) for worker, finding in found if finding is not None]


def waiting(facts: Facts) -> dict[int, Pod]:
    """The pods that have not ended, by worker."""
    return {
        worker: pod for worker, pod in sorted(facts.pods.items()) if not has_ended(pod) and worker not in facts.ends
    }


def _suspended_finding(facts: Facts) -> Finding:
    queue = queue_of(facts.job)
    if (facts.pods or facts.is_begun) and not is_stopped(facts.job):
        who = f'The queue "{queue}"' if queue else "Somebody"
        why = _told([condition(facts.booking, "Evicted")])
        return Finding(
            "preempted",
            f"{who} has suspended the run's Job, which ended its workers{why or '.'}",
            hint="Run it again when the cluster is less busy: kubectl describe workloads",
            retryable=True,
        )
    if queue:
        checks = (facts.booking.get("status") or {}).get("admissionChecks") or ()
        unmet = [condition(facts.booking, "QuotaReserved"), *checks]
        why = _told([item for item in unmet if not is_true(item) and item.get("state") != "Ready"])
        return Finding(
            "queued", f'The run is waiting in the queue "{queue}"{why or "."}', hint="kubectl describe workloads"
        )
    return Finding(
        "suspended",
        "The run's Job is still suspended.",
        hint="Repeat the command. If the cluster uses Kueue, add --queue: kubectl get localqueues",
    )


def _told(conditions: Sequence[Object]) -> str:
    """The messages of conditions, to end a sentence with."""
    messages = "; ".join(str(item["message"]) for item in conditions if item.get("message"))
    return f": {shorten_line(messages)}" if messages else ""


def _lacks_cpu_limit(message: str) -> bool:
    return re.search(r"must specify [^:]*limits\.cpu", message) is not None


def _never_fits(message: str, workers: int) -> bool:
    """Whether so many pods would exceed the quota even if nobody else used any of it."""
    match = EXCEEDED.search(message)
    asked, limits = (dict(re.findall(r"([^=,]+)=([^,]+)", part)) for part in (match.groups() if match else ("", "")))
    return any(quantity(amount) * workers > quantity(limits[name]) for name, amount in asked.items() if name in limits)


def _refusal(message: str) -> tuple[str, str]:
    """Code and hint for a refused pod."""
    if "violates PodSecurity" in message:
        return (
            "pod_security",
            "The namespace forbids such pods: check --pod-patch, or use another namespace.",
        )
    if "security context constraint" in message:
        return "security_context", (
            "OpenShift assigns users to pods. --pod-patch FILE with   spec: {securityContext: {runAsUser: null, "
            "runAsGroup: null, fsGroup: null}}"
        )
    if "autogke" in message or "warden" in message:
        return (
            "admission_denied",
            "GKE Autopilot rejects these requests: change --num-cpus N --memory N, or use another compute class.",
        )
    if re.search(r"(minimum|maximum) .* usage per|limit to request ratio|less than or equal to \w+ limit", message):
        return "admission_denied", "kubectl describe limitrange"
    return "admission_denied", "Change the pods with the options of the run or --pod-patch, or ask the administrator."


def _container(facts: Facts, worker: int, pod: Pod) -> Finding | None:
    state = main_status(pod).get("state", {})
    if state.get("running") or state.get("terminated"):
        return None
    if (trouble := _sidecar(worker, pod)) is not None:
        return trouble
    stopped: Mapping[str, Any] = state.get("waiting") or {}
    word, message = str(stopped.get("reason") or "Pending"), str(stopped.get("message") or "")

    def finding(code: str, summary: str, hint: str | None) -> Finding:
        return Finding(code, summary, hint, permanent=True, evidence=evidence(worker, pod, message))

    if word == "InvalidImageName":
        return finding("image_name_invalid", f'"{facts.image}" is not the name of an image.', "--image NAME:TAG")
    if word == "ErrImageNeverPull":
        summary = f'The image "{facts.image}" is not on the node, and the pull policy does not allow pulling it.'
        return finding("image_not_found", summary, "Load it onto every node.")
    if word in PULL_REASONS:
        return _pull(facts, worker, pod, message)
    if word == "CreateContainerConfigError":
        summary = f"The container of worker {worker} cannot be created: {shorten_line(message) or word}"
        late = "timed out" in message  # of a busy node, which asks again
        return replace(finding("config_error", summary, _config_hint(message)), permanent=not late, retryable=late)
    if word in RUNTIME_REASONS:
        node = pod.get("spec", {}).get("nodeName")
        summary = f"The node {node} has not created the container of worker {worker}: {shorten_line(message) or word}"
        hint = f"Run it again on other nodes. kubectl describe node {node}"
        return replace(finding("container_not_created", summary, hint), retryable=True)
    stuck = _stuck(facts, worker, pod, word) if facts.age(pod) >= CREATING_SECONDS else None
    return stuck or (_pulling(facts, worker, pod) if word == "ContainerCreating" else None)


def _sidecar(worker: int, pod: Pod) -> Finding | None:
    """The finding on a sidecar that must be ready before the task's container, and keeps failing or cannot be
    created."""
    for status in pod.get("status", {}).get("initContainerStatuses") or ():
        name, image = status.get("name"), status.get("image")
        held: Mapping[str, Any] = (status.get("state") or {}).get("waiting") or {}
        ended: Mapping[str, Any] = (status.get("lastState") or {}).get("terminated") or {}
        reason, message = str(held.get("reason") or ""), str(held.get("message") or "")
        if reason in PULL_REASONS and FINAL_PULL.search(message):
            summary = f'The image "{image}" of the container {name} cannot be pulled: {shorten_line(message)}'
            return Finding("image_not_found", summary, permanent=True, evidence=evidence(worker, pod, message))
        if reason == "CrashLoopBackOff" or (status.get("restartCount") and ended and not status.get("started")):
            return Finding(
                "sidecar_failed",
                f"The container {name} of worker {worker}, which must run before the task, keeps crashing: "
                f"{ended.get('reason') or reason} with exit code {ended.get('exitCode')}.",
                hint=f"kubectl logs {pod['metadata']['name']} -c {name} --previous (the node may lack its devices)",
                permanent=int(status.get("restartCount") or 0) >= MAX_RESTARTS,
                evidence=evidence(worker, pod, ended.get("message") or message),
            )
    return None


def _pull(facts: Facts, worker: int, pod: Pod, message: str) -> Finding:
    """The finding on an image that cannot be pulled. The event of the pull says more than the back-off's message."""
    told = [str(event.get("message", "")) for event in facts.events_of(pod, "Failed")]
    words = next((text for text in reversed(told) if "ull" in text and not text.startswith("Error:")), message)
    words = PULL_PREAMBLE.sub("", words)
    if WRONG_PLATFORM.search(words):
        return Finding(
            "wrong_architecture",
            f'The image "{facts.image}" is not made for the architecture of its node: {shorten_line(words)}',
            hint="mlbench images push --platform linux/amd64   (or linux/arm64, matching the nodes), or select other "
            "nodes: --node-selector kubernetes.io/arch=ARCH",
            permanent=True,
            evidence=evidence(worker, pod, words),
        )
    known = next((hint for pattern, hint in PULL_HINTS if pattern.search(words)), None)
    if FINAL_PULL.search(words):
        lacking = [str(event.get("message")) for event in facts.events_of(pod, "FailedToRetrieveImagePullSecret")]
        secret = f"{lacking[-1]}; kubectl get secrets" if lacking else None
        return Finding(
            "image_not_found",
            f'The image "{facts.image}" cannot be pulled: {shorten_line(words)}',
            hint=known
            or secret
            or "Check the name and the tag, push the image (mlbench images push) or load it, or pass the registry's "
            "credentials with --pull-secret.",
            permanent=True,
            evidence=evidence(worker, pod, words),
        )
    return Finding(
        "image_pull",
        f'The image "{facts.image}" was not pulled by {pod.get("spec", {}).get("nodeName")}: {shorten_line(words)}',
        hint=known or "Can the nodes reach the registry?",
        retryable=True,
        permanent=facts.age(pod) > PULLING_SECONDS,
        evidence=evidence(worker, pod, words),
    )


def _pulling(facts: Facts, worker: int, pod: Pod) -> Finding | None:
    """The finding on an image that takes long. No field of the pod says so: its conditions change after the pull."""
    if facts.age(pod) < QUIET_SECONDS or not facts.events_of(pod, "Pulling"):
        return None
    node = pod.get("spec", {}).get("nodeName")
    return Finding(
        "image_pull",
        f'The image "{facts.image}" is still being pulled by {node}.',
        hint="A large image takes minutes: set a longer --start-timeout, or use a registry closer to the nodes.",
        retryable=True,
        evidence=evidence(worker, pod),
    )


def _stuck(facts: Facts, worker: int, pod: Pod, word: str) -> Finding | None:
    events = [event for event in facts.events_of(pod) if STUCK.fullmatch(str(event.get("reason")))]
    if not events:
        return None
    kind, message = str(events[-1].get("reason")), str(events[-1].get("message", ""))
    return Finding(
        "volume_mount" if "Mount" in kind or "Volume" in kind else "pod_sandbox",
        f"Worker {worker} cannot start ({word}, {kind}): {shorten_line(message)}",
        hint=f"kubectl describe pod {pod['metadata']['name']}",
        evidence=evidence(worker, pod, message),
    )


def _unreachable(facts: Facts, worker: int, pod: Pod) -> Finding | None:
    if not facts.is_lost(pod):
        return None
    node = pod.get("spec", {}).get("nodeName")
    return Finding(
        "node_unreachable",
        f"The node {node} of worker {worker} is not responding.",
        hint=f"kubectl describe node {node}",
        retryable=True,
        evidence=evidence(worker, pod),
    )


def _config_hint(message: str) -> str | None:
    if "secret" in message and "not found" in message:
        return "Create the secret in the run's namespace, or remove the option."
    if "non-root" in message or "runAsNonRoot" in message or "run as root" in message:
        return "Use an image that can run as a user other than root."
    return None
