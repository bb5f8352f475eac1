"""What findings on a trouble say: whole sentences with numbers, hints and evidence, and when they become permanent."""

from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.diagnosis.diagnose import diagnose
from mlbench_cli.model.run import Finding
from tests.unit.engines.kubernetes.test_diagnose import (
    NOW,
    a_job,
    a_node,
    a_pod,
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


def test_a_pull_secret_that_is_not_there_is_named() -> None:
    lacking = "Unable to retrieve some image pull secrets (team); attempting to pull the image may not succeed."
    events = [an_event("FailedToRetrieveImagePullSecret", lacking)]
    found = only(a_pod(state=waiting("ErrImagePull", "pull access denied")), events=events)
    assert found.code == "image_not_found"
    assert "(team)" in str(found.hint)


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
            [a_node(cpu="2", memory="1Gi"), a_node("n1", cpu="1", memory="2Gi"), a_node("n2", cpu="2", memory="2Gi")],
            {"resources": {"requests": {"cpu": "2", "memory": "2Gi"}}},
            "0/3 nodes are available",
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
