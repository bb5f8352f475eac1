"""The Kubernetes objects that `diagnose` works on, and helpers to query them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mlbench_cli.engines.kubernetes.workers import NodeEnd, Pod, seconds, worker_states
from mlbench_cli.kube.objects import condition
from mlbench_cli.model.run import WorkerState
from mlbench_cli.util.text import shorten_line

Object = Mapping[str, Any]
SPOT_LABELS = (  # of GKE, EKS' node groups, AKS, and Karpenter (also EKS Auto Mode and AKS node auto-provisioning)
    ("cloud.google.com/gke-spot", "true"),
    ("cloud.google.com/gke-preemptible", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
    ("karpenter.sh/capacity-type", "spot"),
)


@dataclass(frozen=True)
class Facts:
    """Objects as the API server gives them; pods, ends and last log lines by worker. `now` is since 1970.

    `known_states` are the workers' states, if they are known already.
    """

    job: Object
    pods: Mapping[int, Pod]
    events: Sequence[Object]
    nodes: Sequence[Object]
    now: float
    ends: Mapping[int, NodeEnd] = field(default_factory=dict)
    logs: Mapping[int, str] = field(default_factory=dict)
    known_states: tuple[WorkerState, ...] | None = None
    groups: frozenset[str] = frozenset()  # API groups of the cluster, which show which autoscalers it has
    booking: Object = field(default_factory=dict)  # the run's ProvisioningRequest, or Workload of a Kueue queue
    is_begun: bool = False  # an agent has written its state, though perhaps no pod is left

    @cached_property
    def states(self) -> tuple[WorkerState, ...]:
        """The workers' states, one per worker from 0 to the last that has a pod."""
        if self.known_states is not None:
            return self.known_states
        return worker_states(max(self.pods, default=-1) + 1, self.pods, self.ends)

    @property
    def run(self) -> str:
        """The run's name, which is the Job's; empty without a Job."""
        return str(self.job.get("metadata", {}).get("name", ""))

    @property
    def template(self) -> Object:
        """The spec of the pods."""
        template: Object = self.job.get("spec", {}).get("template", {}).get("spec", {})
        return template

    @property
    def image(self) -> str:
        """The image of the task's container; empty if the template has none."""
        containers = self.template.get("containers", ())
        return str(next((item.get("image") for item in containers if item.get("name") == "main"), ""))

    def age(self, pod: Pod) -> float:
        """Seconds since the pod was created, by the clock of `now`."""
        return self.now - (seconds(pod["metadata"].get("creationTimestamp")) or self.now)

    def events_of(self, item: Object, *reasons: str) -> list[Object]:
        """Events of these reasons (none: of all) on that object, the latest last."""
        uid = item.get("metadata", {}).get("uid")
        found = [
            event
            for event in self.events
            if event.get("involvedObject", {}).get("uid") == uid and (not reasons or event.get("reason") in reasons)
        ]
        return sorted(found, key=when)

    def node(self, pod: Pod) -> Object:
        """The pod's node; empty if it is not known."""
        return self._nodes_by_name.get(pod.get("spec", {}).get("nodeName"), {})

    @cached_property
    def _nodes_by_name(self) -> dict[Any, Object]:
        return {node.get("metadata", {}).get("name"): node for node in self.nodes}

    def is_lost(self, pod: Pod) -> bool:
        """Whether the pod's node no longer answers."""
        node = self.node(pod)
        taints = node.get("spec", {}).get("taints") or ()
        unreachable = any(taint.get("key") == "node.kubernetes.io/unreachable" for taint in taints)
        return unreachable or bool(condition(node, "Ready").get("status") == "Unknown")

    def is_spot(self, pod: Pod) -> bool:
        """Whether the pod's node may be taken away at any time, by its labels."""
        labels = self.node(pod).get("metadata", {}).get("labels", {})
        return any(labels.get(key) == value for key, value in SPOT_LABELS)


def when(event: Object) -> float:
    """When an event happened last."""
    moments = ((event.get("series") or {}).get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((moment for moment in map(seconds, moments) if moment), 0.0)


def evidence(worker: int, pod: Pod | None, message: object = None) -> dict[str, Any]:
    """The facts behind a finding about one worker: pod, node and the system's own message, at most 2 000 characters."""
    facts: dict[str, Any] = {"worker": worker}
    if pod is not None:
        facts |= {"pod": pod["metadata"]["name"], "node": pod.get("spec", {}).get("nodeName")}
    if message:
        facts["message"] = shorten_line(str(message), 2000)
    return facts
