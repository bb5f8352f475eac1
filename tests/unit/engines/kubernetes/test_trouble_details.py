"""What findings on a trouble say: whole sentences with numbers, hints and evidence, and when they become permanent."""

from decimal import Decimal
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.diagnosis.diagnose import diagnose
from mlbench_cli.engines.kubernetes.diagnosis.facts import Facts, when
from mlbench_cli.engines.kubernetes.diagnosis.scheduling import quantity
from mlbench_cli.model.run import Finding
from tests.unit.engines.kubernetes.test_diagnose import (
    INITIALIZING,
    NOW,
    a_job,
    a_node,
    a_pod,
    a_sidecar,
    an_event,
    unscheduled_pod,
    waiting,
)


def only(*pods: dict[str, Any], **facts: Any) -> Finding:
    (finding,) = diagnose(**{"job": a_job(), **facts}, pods=pods, now=NOW)
    return finding


def before(seconds: float) -> str:
    """A time of Kubernetes so many seconds before NOW, 2027-01-15T08:00:00Z."""
    minutes, rest = divmod(int(seconds), 60)
    return f"2027-01-15T07:{59 - minutes if rest else 60 - minutes:02d}:{(60 - rest) % 60:02d}Z"


# --- pods that do not come to run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "Back-off"),
        ([an_event("Failed", "Failed to pull image: i/o timeout")], "Failed to pull image: i/o timeout"),
        ([an_event("Failed", "Error: ErrImagePull")], "Back-off"),
        (
            [an_event("Failed", "Failed to pull: old", at=before(50)), an_event("Failed", "Failed to pull: new")],
            "Failed to pull: new",
        ),
    ],
)
def test_why_an_image_does_not_come_is_in_the_events_of_its_pull(events: list[Any], words: str) -> None:
    found = only(a_pod(state=waiting("ImagePullBackOff", "Back-off")), events=events)
    assert found.summary.endswith(f"was not pulled by n0: {words}")


@pytest.mark.parametrize(
    "sidecar",
    [
        a_sidecar(),
        a_sidecar(None, 1),
        [{**a_sidecar(None, 1, exitCode=1)[0], "started": True}],
        a_sidecar(waiting("ErrImagePull", "i/o timeout")),
    ],
)
def test_a_container_that_may_yet_run_is_no_finding(sidecar: list[dict[str, Any]]) -> None:
    assert diagnose(a_job(1), [a_pod(state=INITIALIZING, initContainerStatuses=sidecar)], now=NOW) == []


# --- pods without a node ---------------------------------------------------------------------------------------------


def unscheduled(*nodes: Any, workers: int = 2, message: str = "0/3 nodes are available", **template: Any) -> Finding:
    pods = [unscheduled_pod(index, message=message) for index in range(workers)]
    return only(*pods, job=a_job(workers, **template), nodes=nodes)


SPREAD: dict[str, Any] = {
    "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": {}}]}
}


@pytest.mark.parametrize(
    ("nodes", "template", "why"),
    [
        ([], {}, "0/3 nodes are available"),
        ([a_node(cpu="2")], {"resources": {"requests": {"cpu": "2"}}}, "0/3 nodes are available"),
        (
            [a_node(cpu="2"), a_node("n1", cpu="1500m")],
            {"resources": {"requests": {"cpu": "2001m"}}},
            "each requests 2.001 cpu, and the largest of 2 nodes has 2",
        ),
        (
            [a_node(cpu="2", memory="1Gi"), a_node("n1", cpu="1", memory="2Gi")],
            {"resources": {"requests": {"cpu": "2", "memory": "2Gi"}}},
            "none of 2 nodes has everything that each requests",
        ),
        (
            [a_node(cpu="2")],
            {"affinity": SPREAD},
            "2 workers need one node each, and 1 can take one (--set run.spread=no lets",
        ),
        ([a_node(), a_node("n1")], {"affinity": SPREAD}, "0/3 nodes are available"),
        (
            [a_node(labels={"pool": "b"})],
            {"nodeSelector": {"pool": "a"}},
            "none of the 1 nodes has the required labels",
        ),
        ([a_node(labels={"pool": "a"})], {"nodeSelector": {"pool": "a"}}, "0/3 nodes are available"),
    ],
)
def test_whether_nodes_can_ever_take_the_pods(nodes: list[Any], template: dict[str, Any], why: str) -> None:
    found = unscheduled(*nodes, **template)
    assert found.code == "unschedulable"
    assert found.summary.startswith(f"2 of 2 workers cannot be scheduled: {why}")
    assert found.permanent is (why != "0/3 nodes are available")
    assert found.evidence == {"workers": [0, 1], "waiting": 2, "message": "0/3 nodes are available"}


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "toleration", "is_tolerated"),
    [
        (TAINT, None, False),
        (TAINT, {"key": "gpu", "operator": "Exists"}, True),
        (TAINT, {"operator": "Exists"}, True),
        (TAINT, {"key": "other", "operator": "Exists"}, False),
        (TAINT, {"key": "gpu", "operator": "Equal", "value": "yes"}, True),
        (TAINT, {"key": "gpu", "value": "no"}, False),
        (TAINT, {"key": "other", "value": "yes"}, False),
        (TAINT, {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, True),
        (TAINT, {"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "gpu", "effect": "NoExecute"}, {"key": "gpu"}, True),
        ({"key": "gpu", "effect": "NoExecute"}, None, False),
        ({"key": "gpu", "effect": "PreferNoSchedule"}, None, True),  # only a wish
        ({"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}, None, True),  # it may pass
    ],
)
def test_taints_and_tolerations_as_kubernetes_defines_them(
    taint: dict[str, str], toleration: dict[str, str] | None, is_tolerated: bool
) -> None:
    node = a_node()
    node["spec"] = {"taints": [taint]}
    found = unscheduled(node, tolerations=[toleration] if toleration else [])
    assert found.permanent is not is_tolerated


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        ("1.5k", "1500"),
        ("1Ki", "1024"),
        ("1Mi", "1048576"),
        ("1Gi", "1073741824"),
        ("1Ti", "1099511627776"),
        ("1Pi", "1125899906842624"),
        ("2M", "2000000"),
        ("2G", "2000000000"),
        ("2T", "2000000000000"),
        ("2P", "2000000000000000"),
        ("1e3", "1000"),
        ("x", "0"),
        ("", "0"),
    ],
)
def test_quantities_of_kubernetes(text: str, number: str) -> None:
    assert quantity(text) == Decimal(number)


# --- workers that failed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "words"), [(1, ""), (2, " (Also 1 other worker.)"), (3, " (Also 2 other workers.)")])
def test_what_concerns_many_workers_alike_is_one_finding(count: int, words: str) -> None:
    found = only(*(a_pod(index, phase="Failed", reason="Shutdown") for index in range(count)))
    assert found.summary == f"The node n0 of worker 0 was shut down.{words}"
    assert found.evidence.get("workers") == (list(range(count)) if count > 1 else None)


# --- facts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "moment"),
    [
        ({"lastTimestamp": "2027-01-15T08:00:00Z", "eventTime": "2026-01-01T00:00:00Z"}, NOW),
        ({"series": {"lastObservedTime": "2027-01-15T08:00:00Z"}, "lastTimestamp": "2026-01-01T00:00:00Z"}, NOW),
        ({"lastTimestamp": None, "eventTime": "2027-01-15T08:00:00Z"}, NOW),
        ({}, 0.0),
    ],
)
def test_when_an_event_happened_last(event: dict[str, Any], moment: float) -> None:
    assert when(event) == moment


@pytest.mark.parametrize(
    ("labels", "is_spot"),
    [
        ({"cloud.google.com/gke-spot": "true"}, True),
        ({"cloud.google.com/gke-preemptible": "true"}, True),
        ({"cloud.google.com/gke-spot": "false"}, False),
        ({"eks.amazonaws.com/capacityType": "SPOT"}, True),
        ({"eks.amazonaws.com/capacityType": "ON_DEMAND"}, False),
        ({"kubernetes.azure.com/scalesetpriority": "spot"}, True),
        ({}, False),
    ],
)
def test_spot_machines_are_known_by_the_labels_of_their_cloud(labels: dict[str, str], is_spot: bool) -> None:
    facts = Facts({}, {}, (), [a_node(labels=labels)], NOW)
    assert facts.is_spot(a_pod()) is is_spot
    assert not facts.is_spot(a_pod(node="n9"))
