"""A run waits for its nodes as long as an autoscaler may still add one, and no longer than --start-timeout.

A controller plays the autoscaler: it writes the events that the real one writes, in its words, and the clock of the
API server advances by twenty seconds with each observation, after five minutes faster.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.model.run import Outcome, Run
from mlbench_cli.model.spec import KubernetesOptions
from mlbench_cli.runs import supervise
from mlbench_cli.runs.finalize import FinishedRun
from mlbench_cli.runs.progress import Progress
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import parse_timestamp
from tests import NIGHTLY, slow
from tests.contract.engines.kubernetes.test_engine import a_run, terminated_pod
from tests.fakes.kube_api import KubeApi

STEP = 20.0  # seconds by the server's clock between two observations
NODE_AFTER = 180.0
BOOKING = "queued-provisioning.gke.io"

Event = tuple[str, str, str]  # type, reason, message
UNTRIGGERED = "pod didn't trigger scale-up: "
NOMINATED: Event = ("Normal", "Nominated", "Pod should schedule on: nodeclaim/default-8f2kq")
KARPENTER_MISFIT: Event = (
    "Warning",
    "FailedScheduling",
    'Failed to schedule pod, all available instance types exceed limits for nodepool: "gpu"',
)


@dataclass
class Case:
    """A cluster whose only node is too small, and what its autoscaler says."""

    events: tuple[Event, ...] = ()
    on_claim: tuple[Event, ...] = ()  # of a NodeClaim
    groups: tuple[str, ...] = ()
    provider: str = ""  # of the node's providerID
    booked: bool = False
    booking: str = ""  # condition of the ProvisioningRequest
    nodes: bool = True


WAITING = {
    "karpenter": Case((NOMINATED,), groups=("karpenter.sh", "karpenter.k8s.aws")),
    "karpenter says nothing yet": Case(groups=("karpenter.sh",)),
    "karpenter without rights to list groups": Case((NOMINATED,)),
    "karpenter at its limits": Case((KARPENTER_MISFIT,), groups=("karpenter.sh",)),
    "auto mode": Case((NOMINATED,), (("Normal", "Launched", "Status condition transitioned"),), ("eks.amazonaws.com",)),
    "node auto-provisioning, stock-out": Case(
        (),
        (("Warning", "InsufficientCapacityError", "no capacity in zone 1"),),
        ("karpenter.sh", "karpenter.azure.com"),
    ),
    "cluster-autoscaler": Case((("Normal", "TriggeredScaleUp", "pod triggered scale-up: [{pool 0->1 (max: 4)}]"),)),
    "back-off": Case((("Normal", "NotTriggerScaleUp", UNTRIGGERED + "1 in backoff after failed scale-up"),)),
    "maximum size": Case(
        (("Normal", "NotTriggerScaleUp", UNTRIGGERED + "1 max node group size reached, 2 Insufficient cpu"),)
    ),
    "stock-out": Case((("Warning", "FailedScaleUp", "GCE out of resources"),)),
    "a cloud's nodes": Case(provider="aws:///eu-west-1a/i-0123456789abcdef0"),
    "booked machines": Case(
        (("Normal", "NotTriggerScaleUp", UNTRIGGERED + "3 Insufficient cpu"),), booked=True, provider="gce://p/z/n"
    ),
    "scaled to zero": Case(nodes=False),
}
# One for each kind of autoscaler; the others differ from one of them in words only.
BY_DAY = ["karpenter at its limits", "auto mode", "back-off", "stock-out", "a cloud's nodes", "booked machines"]
NEVER = {
    "no autoscaler": Case(provider="kind://docker/kind/kind-worker"),
    "a machine in a cellar": Case(),
    "no pool fits": Case(
        (("Normal", "NotTriggerScaleUp", UNTRIGGERED + "2 node(s) didn't match Pod's node affinity/selector, "
          "1 Insufficient cpu"),), provider="gce://p/z/n", groups=("autoscaling.x-k8s.io",),
    ),
    "a booking that failed": Case(booked=True, booking="Failed", provider="gce://p/z/n"),
}  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    monkeypatch.setattr("mlbench_cli.engines.kubernetes.observe.QUICK_POLL", 0.0)
    monkeypatch.setattr("mlbench_cli.engines.follow.POLL_SECONDS", 0.05)
    with Cluster() as server:
        yield server


class Cluster(KubeApi):
    """With the rule of the Job controller that a Job has no active pods once its deadline has passed."""

    def put(self, kind: str, document: dict[str, Any]) -> dict[str, Any]:
        stored = super().put(kind, document)
        if kind == "jobs" and document["spec"].get("activeDeadlineSeconds") == 1:
            pods = [(name, pod) for (known, name), pod in self.objects.items() if known == "pods"]
            for name, pod in pods:
                if pod["status"]["phase"] == "Pending":
                    self.remove("pods", name)
        return stored


class Autoscaler:
    """Plays a case, one step for each observation. `node_after`: seconds until its node is there."""

    def __init__(self, server: KubeApi, case: Case, node_after: float | None) -> None:
        self.server, self.case, self.node_after = server, case, node_after
        server.groups = dict.fromkeys(case.groups, "v1")
        if case.nodes:
            self.put_node("old", "1", case.provider)
        self.said: list[str] = []

    def begin(self, run: Run) -> None:
        for worker in range(run.spec.workers):
            self.put_pod(run, worker, None, phase="Pending", conditions=[UNSCHEDULABLE])
            uid = self.server.objects["pods", f"{run.name}-{worker}-x"]["metadata"]["uid"]
            for event in self.case.events:
                self.put_event(event, {"kind": "Pod", "uid": uid}, f"{event[1]}-{worker}")
        for event in self.case.on_claim:
            self.put_event(event, {"kind": "NodeClaim", "name": "default-8f2kq"}, event[1])
        if self.case.booking:
            booking = self.server.objects["provisioningrequests", run.name]
            over = {"type": self.case.booking, "status": "True", "message": "no machines in this zone"}
            self.server.put("provisioningrequests", {**booking, "status": {"conditions": [over]}})
        self.put_job(run, {"startTime": self.server.now})

    def step(self, run: Run, progress: Progress) -> None:
        self.said += [finding.summary for finding in progress.observation.findings]
        self.server.ahead += STEP if self.server.ahead < 300 else 10 * STEP
        if self.node_after is not None and self.server.ahead >= self.node_after:
            self.put_node("new", "64", self.case.provider)
            for worker in range(run.spec.workers):
                self.put_pod(run, worker, "new", **terminated_pod(0))
                self.server.write(f"{run.name}-{worker}-x")
            complete = [{"type": "Complete", "status": "True"}]
            self.put_job(run, {**self.server.objects["jobs", run.name]["status"], "conditions": complete})

    def put_job(self, run: Run, status: dict[str, Any]) -> None:
        self.server.put("jobs", {**self.server.objects["jobs", run.name], "status": status})

    def put_node(self, name: str, cpus: str, provider: str) -> None:
        status = {"allocatable": {"cpu": cpus, "memory": "64Gi"}}
        self.server.put("nodes", {"metadata": {"name": name}, "spec": {"providerID": provider}, "status": status})

    def put_pod(self, run: Run, worker: int, node: str | None, **status: Any) -> None:
        labels = {"mlbench/run": run.name, "batch.kubernetes.io/job-completion-index": str(worker)}
        spec = {"nodeName": node} if node else {}
        name = f"{run.name}-{worker}-x"
        self.server.put("pods", {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status})

    def put_event(self, event: Event, involved: dict[str, str], name: str) -> None:
        kind, reason, message = event
        self.server.put("events", {
            "metadata": {"name": name.lower()}, "type": kind, "reason": reason, "message": message,
            "involvedObject": involved, "lastTimestamp": self.server.now,
        })  # fmt: skip


UNSCHEDULABLE = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 Insufficient cpu.",
}  # fmt: skip


def follow(server: KubeApi, folder: Path, case: Case, node_after: float | None) -> tuple[FinishedRun, Autoscaler]:
    """Submit a run whose workers need 8 CPUs each and follow it to its end."""
    options = KubernetesOptions(keep_seconds=0, provisioning_class=BOOKING if case.booked else None)
    spec = a_run(folder, kubernetes=options, cpus=8.0, argv=("true",)).spec
    with closing(Store(folder)) as store:
        run = store.record_run(spec)
        engine = KubernetesEngine(server.access)
        autoscaler = Autoscaler(server, case, node_after)
        engine.submit(run, engine.render(spec))
        autoscaler.begin(run)
        return supervise.follow(run, engine, store, report=lambda seen: autoscaler.step(run, seen)), autoscaler


@pytest.mark.parametrize("name", WAITING if NIGHTLY else [BY_DAY[0], *slow(BY_DAY[1:])])
def test_a_run_waits_while_a_node_may_still_come(server: KubeApi, tmp_path: Path, name: str) -> None:
    finished, autoscaler = follow(server, tmp_path, WAITING[name], NODE_AFTER)
    assert finished.outcome is Outcome.COMPLETED, autoscaler.said
    job = server.objects["jobs", "r-2"]
    assert "mlbench/stopped" not in job["metadata"]["annotations"]
    limit = time.gmtime(parse_timestamp(job["status"]["startTime"]) + finished.run.spec.pods.start_timeout)
    until = f"until {time.strftime('%H:%M', limit)} UTC (--start-timeout)"
    assert any(until in said for said in autoscaler.said)


@pytest.mark.parametrize("name", ["karpenter", "back-off", "a cloud's nodes"] if NIGHTLY else ["back-off"])
def test_a_pool_that_never_comes_ends_the_run_at_its_start_timeout(server: KubeApi, tmp_path: Path, name: str) -> None:
    finished, _ = follow(server, tmp_path, WAITING[name], None)
    assert finished.outcome is Outcome.NEVER_STARTED
    assert finished.findings[0].code == "start_timeout"
    assert 1800 <= server.ahead <= 1800 + 20 * STEP
    assert server.objects["jobs", "r-2"]["spec"]["activeDeadlineSeconds"] == 1


@pytest.mark.parametrize("name", NEVER)
def test_what_no_node_can_cure_ends_a_run_after_a_minute(server: KubeApi, tmp_path: Path, name: str) -> None:
    finished, _ = follow(server, tmp_path, NEVER[name], None)
    assert finished.outcome is Outcome.NEVER_STARTED
    assert server.ahead < 300
    if NEVER[name].booking:
        assert "no machines in this zone" in finished.findings[0].summary
    else:
        assert server.ahead > 60  # an autoscaler may need as long to say that it acts
