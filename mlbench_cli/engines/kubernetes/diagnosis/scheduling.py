"""Why the scheduler finds no node for a pod, and whether one may still come: `may_grow` alone decides that."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation

from mlbench_cli.engines.kubernetes.diagnosis.facts import Facts, Object, when
from mlbench_cli.engines.kubernetes.manifests import queue_of
from mlbench_cli.engines.kubernetes.workers import Pod, seconds
from mlbench_cli.kube.objects import condition, is_true
from mlbench_cli.model.cluster_details import GPU_RESOURCES
from mlbench_cli.model.run import Finding
from mlbench_cli.util.text import counted, shorten_line

# Labels of nodes with GPUs, whether their driver works or not: of the clouds, of NVIDIA's and of AMD's operator.
GPU_LABELS = ("cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator", "kubernetes.azure.com/accelerator")
GPU_MARKS = ("nvidia.com/gpu.present", "feature.node.kubernetes.io/amd-gpu")
# Events of cluster-autoscaler on pods, and of Karpenter (also EKS Auto Mode and AKS node auto-provisioning) on pods
# and on its NodeClaims. Sources: kubernetes/autoscaler `eventing_scale_up_processor.go`, karpenter `events.go` files.
CLUSTER_AUTOSCALER = ("TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp")
KARPENTER = ("Nominated", "Launched", "Registered", "Initialized", "InsufficientCapacityError")
NORMAL_EVENTS = ("TriggeredScaleUp", "NotTriggerScaleUp", "Nominated", "Launched")  # to ask for besides warnings
KARPENTER_GROUP, AUTOSCALING_GROUP = "karpenter.sh", "autoscaling.x-k8s.io"
BOOKED = "autoscaling.x-k8s.io/consume-provisioning-request"
# Conditions of a ProvisioningRequest whose machines will not come. Source: Kueue's page on troubleshooting them.
BOOKING_ENDS = ("Failed", "CapacityRevoked", "BookingExpired")
# Nodes that no autoscaler makes: without a provider ID, or containers and virtual machines of one computer.
LOCAL_PROVIDERS = ("kind://", "k3s://", "minikube://")
# What cluster-autoscaler says of a node pool whose nodes could never take the pod. All else passes: back-off after a
# failed scale-up, the maximum size of a pool, limits, quota.
_MISFIT = re.compile(
    r"\d+ (?:Insufficient \S+|node\(s\) (?:didn't match Pod's node affinity(?:/selector)?|didn't match node selector"
    r"|had (?:untolerated )?taints?(?:\(s\)| \{[^}]*\}| that the pod didn't tolerate)?"
    r"(?:, that the pod didn't tolerate)?))"
)
PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
_SUFFIXES = {"m": "0.001", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15"} | {
    f"{letter}i": str(1024**power) for power, letter in enumerate("KMGTP", start=1)
}
_MISSING_CLAIM = re.compile(r"persistentvolumeclaim (\"[^\"]+\") not found")
# If there are enough nodes for one worker each, anti-affinity can only concern other runs' workers.
_ANTI_AFFINITY = re.compile(r"anti-affinity")
VOLUME = r"(?i)\bvolumes?\b|VolumeBinding|PersistentVolume|\bpvc\b"
REQUEST_LESS = "request less (workers, --num-cpus, --memory, --gpus-per-worker)"
CURES = (
    (re.compile(r"Insufficient|Too many pods"), REQUEST_LESS),
    (re.compile(r"selector|labels"), "check --node-selector (kubectl get nodes --show-labels)"),
    (re.compile(r"\{node\.kubernetes\.io/"), "repair the nodes (kubectl describe node NODE)"),
    (re.compile(r"taint(?! \{node\.kubernetes\.io/)"), "tolerate taints with --pod-patch"),
    (re.compile(VOLUME), "check the claim and its volume (kubectl describe pvc)"),
    (re.compile(r"were unschedulable"), "uncordon nodes (kubectl uncordon NODE)"),
)
_PREEMPTION = re.compile(r"\s*(?:no new claims to deallocate, )?preemption: .*", re.DOTALL)


def unschedulable(facts: Facts, blocked: Sequence[tuple[int, Pod]]) -> list[Finding]:
    """The finding on the pods that have no node; one for all, since they are alike."""
    if not blocked:
        return []
    scheduled = condition(blocked[0][1], "PodScheduled")
    message = _PREEMPTION.sub("", str(scheduled.get("message") or ""))
    evidence = {"workers": [worker for worker, _ in blocked][:100], "waiting": len(blocked), "message": message}
    if scheduled.get("reason") == "SchedulingGated":
        return [Finding("queued", "The run is waiting for a scheduling gate (probably a queue).", evidence=evidence)]
    if claim := _MISSING_CLAIM.search(message):
        return [
            Finding(
                "volume_missing",
                f"The namespace has no PersistentVolumeClaim {claim[1]}.",
                hint="Create it, or choose another one with --data-claim: kubectl get pvc",
                permanent=True,
                evidence=evidence,
            )
        ]
    if (booking := _booking(facts, evidence)) is not None:
        return [booking]
    event = _scaler_event(facts, blocked)
    word, words = str(event.get("reason", "")), shorten_line(str(event.get("message", "")))
    if words:
        evidence["autoscaler"] = words
    if word in ("FailedScaleUp", "InsufficientCapacityError"):
        return [
            Finding(
                "scale_up_failed",
                f"The cluster cannot add a node now: {words}",
                hint="Choose another zone or machine type, or ask for more quota.",
                retryable=True,
                evidence=evidence,
            )
        ]
    if word not in ("", "NotTriggerScaleUp", "FailedScheduling"):
        return [Finding("scaling_up", "The cluster is adding a node.", evidence=evidence)]
    lacks, grows = _lacks(facts), may_grow(facts, blocked)
    if lacks is None and _ANTI_AFFINITY.search(message):
        return [
            Finding(
                "nodes_busy",
                f"{counted(len(blocked), 'worker is', 'workers are')} waiting for nodes that are in use by other runs.",
                hint="They start when those runs end (mlbench status). To start now, use --set run.share_nodes=yes.",
                evidence=evidence,
            )
        ]
    if lacks is None and word and not grows and not facts.nodes:
        lacks = f"no node pool of the cluster fits ({words})"
    driver = None if lacks else _driver(facts)
    if driver:
        hint = "Wait for the driver, or install the device plugin."
        return [Finding("driver_not_ready", driver, hint=hint, evidence=evidence)]
    workers = int(facts.job.get("spec", {}).get("parallelism") or len(blocked))
    reason = lacks or message or "the scheduler gave no reason"
    if word:
        reason += f"; the autoscaler adds no node ({words})"
    return [
        Finding(
            "unschedulable",
            f"{len(blocked)} of {workers} workers cannot be scheduled: {reason}",
            hint=_cures(reason),
            permanent=lacks is not None and not grows,
            evidence=evidence,
        )
    ]


def _cures(reason: str) -> str:
    """What helps against the reasons that the scheduler, or `_lacks`, gives. Further nodes bring no volume."""
    found = [cure for pattern, cure in CURES if pattern.search(reason)] or [REQUEST_LESS]
    only_volume = len(found) == 1 and re.search(VOLUME, reason)
    words = f"{', '.join(found)}{'' if only_volume else ', or scale up the cluster'}."
    return words[0].upper() + words[1:]


def _booking(facts: Facts, evidence: dict[str, object]) -> Finding | None:
    """What the autoscaler says of the machines that are booked for the run; None without a booking, or once they have
    come."""
    ends = [item for kind in BOOKING_ENDS if is_true(item := condition(facts.booking, kind))]
    told = ends[0] if ends else condition(facts.booking, "Provisioned")
    if not facts.booking or queue_of(facts.job) or (is_true(told) and not ends):
        return None
    words = shorten_line(str(told.get("message") or told.get("reason") or "nothing is known of them yet"))
    evidence = {**evidence, "autoscaler": words}
    describe = f"kubectl describe provisioningrequest {facts.run}"
    if not ends:
        waits = f"The run is waiting for the machines that are booked for it: {words}"
        return Finding("queued", waits, hint=describe, evidence=evidence)
    return Finding(
        "scale_up_failed",
        f"The machines that were booked for the run will not come ({told['type']}): {words}",
        hint=f"Choose another zone or machine type, or ask for more quota. {describe}",
        retryable=True,
        permanent=told["type"] == "Failed",  # which the autoscaler does not try again
        evidence=evidence,
    )


def may_grow(facts: Facts, blocked: Sequence[tuple[int, Pod]]) -> bool:
    """Whether anything may still add a node for these pods. Then only the run's start timeout ends the wait."""
    annotations = facts.job.get("spec", {}).get("template", {}).get("metadata", {}).get("annotations") or {}
    if BOOKED in annotations:
        return True  # machines that are booked may come after hours
    if KARPENTER_GROUP in facts.groups or any(_is_of_karpenter(event) for event in facts.events):
        return True
    told = [event for _, pod in blocked for event in facts.events_of(pod, *CLUSTER_AUTOSCALER)]
    if told:
        return any(event.get("reason") != "NotTriggerScaleUp" or not _fits_no_pool(event) for event in told)
    providers = [str(node.get("spec", {}).get("providerID") or "") for node in facts.nodes]
    in_cloud = any(provider and not provider.startswith(LOCAL_PROVIDERS) for provider in providers)
    return not facts.nodes or in_cloud or AUTOSCALING_GROUP in facts.groups


def _fits_no_pool(event: Object) -> bool:
    """Whether all reasons that cluster-autoscaler names are misfits, which more nodes do not cure."""
    reasons = str(event.get("message", "")).partition(": ")[2]
    return bool(reasons) and not _MISFIT.sub("", reasons).strip(" ,.")


def quantity(text: object) -> Decimal:
    """A quantity of Kubernetes as a number: "500m" is 0.5, "1Gi" is 1073741824."""
    value = str(text)
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if value.endswith(suffix):
            value, factor = value.removesuffix(suffix), Decimal(_SUFFIXES[suffix])
            break
    else:
        factor = Decimal(1)
    try:
        return Decimal(value) * factor
    except InvalidOperation:
        return Decimal(0)


def _scaler_event(facts: Facts, blocked: Sequence[tuple[int, Pod]]) -> Object:
    """The last event of an autoscaler about these pods or a node for them; empty if there is none."""
    told = (event for _, pod in blocked for event in facts.events_of(pod))
    found = [event for event in told if event.get("reason") in CLUSTER_AUTOSCALER or _is_of_karpenter(event)]
    begun = seconds(facts.job.get("metadata", {}).get("creationTimestamp")) or 0.0
    found += [
        event
        for event in facts.events
        if event.get("involvedObject", {}).get("kind") == "NodeClaim"
        and event.get("reason") in KARPENTER
        and when(event) >= begun
    ]
    return max(found, key=when, default={})


def _is_of_karpenter(event: Object) -> bool:
    """Whether Karpenter has said this. Its refusals have the scheduler's reason, and a beginning of their own."""
    return event.get("reason") in KARPENTER or str(event.get("message", "")).startswith("Failed to schedule pod, ")


def _lacks(facts: Facts) -> str | None:
    """Why the current nodes could not hold the run even if they were empty; None if they could, or are not known."""
    if not facts.nodes:
        return None
    asked = _requests(facts.template)
    usable = [node for node in facts.nodes if _takes(facts.template, node)]
    if not usable:
        return f"none of the {len(facts.nodes)} nodes has the required labels and tolerated taints"
    for resource, amount in asked.items():
        largest = max(_allocatable(node, resource) for node in usable)
        if amount > largest:
            if resource in GPU_RESOURCES and _driver(facts):
                return None
            has = f"the largest of {len(usable)} nodes has {_number(largest)}"
            return f"each requests {_number(amount)} {resource}, and {has}"
    fitting = [node for node in usable if _fits(asked, node)]
    workers = int(facts.job.get("spec", {}).get("parallelism") or 0)
    if not fitting:
        return f"none of {len(usable)} nodes has everything that each requests"
    if _spreads(facts.template) and workers > len(fitting):
        share = "(--set run.spread=no lets them share)"
        return f"{workers} workers need one node each, and {len(fitting)} can take one {share}"
    return None


def _requests(template: Object) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for container in template.get("containers", ()):
        resources = container.get("resources") or {}
        for resource, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[resource] = total.get(resource, Decimal(0)) + quantity(amount)
    return total


def _spreads(template: Object) -> bool:
    """Whether each pod wants a node for itself: not if its anti-affinity is to other runs' pods only."""
    anti_affinity = template.get("affinity", {}).get("podAntiAffinity", {})
    terms = anti_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or ()
    expressions = [(term.get("labelSelector") or {}).get("matchExpressions") or () for term in terms]
    return any(all(item.get("operator") != "NotIn" for item in found) for found in expressions)


def _allocatable(node: Object, resource: str) -> Decimal:
    return quantity(node.get("status", {}).get("allocatable", {}).get(resource, "0"))


def _fits(asked: Mapping[str, Decimal], node: Object) -> bool:
    return all(_allocatable(node, resource) >= amount for resource, amount in asked.items())


def _takes(template: Object, node: Object) -> bool:
    """Whether selector and taints let the pod onto the node. Taints of a trouble that may pass do not count."""
    labels = node.get("metadata", {}).get("labels", {})
    if any(labels.get(key) != value for key, value in (template.get("nodeSelector") or {}).items()):
        return False
    taints = [
        taint
        for taint in node.get("spec", {}).get("taints") or ()
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not str(taint.get("key")).startswith(PASSING_TAINTS)
    ]
    return all(any(_tolerates(item, taint) for item in template.get("tolerations") or ()) for taint in taints)


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and toleration.get("value", "") == taint.get("value", "")


def _driver(facts: Facts) -> str | None:
    """A sentence about a node whose GPUs are not available yet; None if there is none."""
    requested = _requests(facts.template)
    resource = next((name for name in GPU_RESOURCES if requested.get(name)), None)
    if resource is None:
        return None
    for node in facts.nodes:
        labels = node.get("metadata", {}).get("labels", {})
        has_gpu = any(key in labels for key in GPU_LABELS) or any(labels.get(key) == "true" for key in GPU_MARKS)
        if has_gpu and not _allocatable(node, resource):
            return f"The node {node['metadata'].get('name')} has GPUs, but its driver or device plugin is not ready."
    return None


def _number(amount: Decimal) -> str:
    return f"{amount.normalize():f}"
