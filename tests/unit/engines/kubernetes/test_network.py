"""Shaped networks on clusters: what the Job says of them, links that nodes shape, and objects of Chaos Mesh."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.network import chaos
from mlbench_cli.engines.kubernetes.network.chaos import inject, remove_chaos, require_chaos_mesh
from mlbench_cli.engines.kubernetes.network.gate import network_findings, read_state
from mlbench_cli.engines.kubernetes.network.nodes import link_arguments, shape_links
from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.model.network import NetworkShape, parse_network
from tests.unit.engines.kubernetes.memory_api import MemoryApi

PATH = "/apis/chaos-mesh.org/v1alpha1/namespaces/team/networkchaos"


def job(state: Any) -> dict[str, Any]:
    text = state if isinstance(state, str) else json.dumps(state)
    return {"metadata": {"annotations": {"mlbench/network": text}}}


def test_the_job_says_how_far_the_network_is() -> None:
    note = {"state": "shaping", "time": 5, "holder": "me"}
    assert read_state(job(note)) == {"state": "shaping", "time": 5.0, "holder": "me"}
    assert read_state(job({**note, "problem": "slow"})) == {**note, "problem": "slow"}


@pytest.mark.parametrize(
    "found",
    [
        None,
        {},
        {"metadata": {"annotations": None}},
        job("{"),
        job("[]"),
        job({"state": "open", "time": 5}),
        job({"state": "open", "time": None, "holder": "me"}),
    ],
)
def test_a_job_without_a_readable_note_says_nothing(found: dict[str, Any] | None) -> None:
    assert read_state(found) is None
    assert network_findings(found) == []


def test_a_refused_network_is_a_finding_and_others_are_none() -> None:
    note = {"state": "refused", "time": 5, "holder": "me", "problem": "it carries 9 Mbit/s", "report": {"links": []}}
    (finding,) = network_findings(job(note))
    assert (finding.code, finding.retryable) == ("network_not_as_asked", True)
    assert finding.summary == "The requested network is not available: it carries 9 Mbit/s."
    assert finding.evidence == {"report": {"links": []}}
    for state in ("open", "shaping"):
        assert network_findings(job({**note, "state": state})) == []


@pytest.mark.parametrize(
    ("network", "arguments"),
    [
        # Rate in bit/s, delay in µs; bucket of 1 ms and queue of 50 ms at this rate, in bytes.
        ("1gbit", ["1000000000", "0", "125000", "6250000"]),
        ("1gbit,5ms", ["1000000000", "5000", "125000", "6250000"]),
        # Eight times what is under way in one direction, 125 MB/s for 20 ms.
        ("1gbit,20ms", ["1000000000", "20000", "125000", "20000000"]),
        # Two packets and 256 KiB at least.
        ("1mbit", ["1000000", "0", "3000", "262144"]),
    ],
)
def test_the_sizes_of_a_shaped_link(network: str, arguments: list[str]) -> None:
    assert link_arguments(parse_network(network)) == arguments


def a_pod(node: str, container: str | None) -> dict[str, Any]:
    statuses = [{"name": "sidecar", "containerID": "containerd://no"}, {"name": "main", "containerID": container}]
    return {"metadata": {"name": f"on-{node}"}, "spec": {"nodeName": node}, "status": {"containerStatuses": statuses}}


def test_each_pods_link_is_shaped_on_its_node() -> None:
    asked: list[tuple[str, list[str]]] = []

    def run_on_node(node: str, script: str, arguments: Any) -> str:
        asked.append((node, list(arguments)))
        return json.dumps({"discipline": node})

    pods = {0: a_pod("n1", "containerd://a"), 1: a_pod("n2", "containerd://b")}
    shape = NetworkShape(1e9, 0.005)
    found = shape_links(run_on_node, pods, shape)
    assert [dict(link) for link in found] == [{"discipline": "n1"}, {"discipline": "n2"}]
    assert sorted(asked) == [("n1", ["a", *link_arguments(shape)]), ("n2", ["b", *link_arguments(shape)])]


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("cri-o://a", "the pod on-n1 is run by cri-o, not by containerd"),
        ("containerd://", "is run by containerd, not by"),
        (None, "is run by an unknown runtime, not by containerd"),
    ],
)
def test_only_containers_of_containerd_can_be_shaped(container: str | None, words: str) -> None:
    with pytest.raises(CapacityError) as caught:
        shape_links(lambda *_: "{}", {0: a_pod("n1", container)}, NetworkShape(1e9))
    assert words in caught.value.message


def test_a_node_that_answers_something_else_is_quoted() -> None:
    with pytest.raises(CapacityError, match="the node n1 answered 'tc: not found'"):
        shape_links(lambda *_: "tc: not found", {0: a_pod("n1", "containerd://a")}, NetworkShape(1e9))


# --- Chaos Mesh ------------------------------------------------------------------------------------------------------

OWNER = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x-2", "namespace": "team", "uid": "u"}}


def networkchaos(**status: Any) -> dict[str, Any]:
    metadata = {"name": "x-2-delay", "namespace": "team", "labels": {"mlbench/run": "x-2"}}
    return {"kind": "NetworkChaos", "metadata": metadata, "status": status}


def test_a_cluster_without_chaos_mesh_is_refused() -> None:
    require_chaos_mesh(MemoryApi({PATH: {"items": []}}).api, "team")
    with pytest.raises(UsageError, match="Chaos Mesh is not installed"):
        require_chaos_mesh(MemoryApi().api, "team")


def test_objects_are_created_for_the_job_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    api, waits = MemoryApi(), []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        api.objects[f"{PATH}/x-2-delay"]["status"] = {"conditions": [{"type": "AllInjected", "status": "True"}]}

    monkeypatch.setattr(chaos, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    document = networkchaos(conditions=[{"type": "AllInjected", "status": "False"}])
    assert inject(api.api, [document], OWNER) == ["x-2-delay"]
    assert len(waits) == 1
    (owner,) = api.objects[f"{PATH}/x-2-delay"]["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("u", False)
    assert inject(api.api, [document], OWNER) == ["x-2-delay"]
    assert len(waits) == 1


def events(*items: tuple[str, str]) -> dict[str, Any]:
    listed = [{"type": kind, "message": message} for kind, message in items]
    return {"experiment": {"containerRecords": [{}, {"events": listed}]}}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (events(("Failed", "old"), ("Failed", "no  such\n device"), ("Succeeded", "ok")), "no such device"),
        (
            {"conditions": [{"type": "Selected", "status": "False"}, {"type": "Paused", "status": "False"}]},
            "Selected is False, Paused is False",
        ),
        (events(("Failed", "")), "it has no status, so its controller is not running"),
        ({}, "it has no status, so its controller is not running"),
    ],
)
def test_an_object_that_is_not_injected_in_time_says_why(status: dict[str, Any], words: str) -> None:
    with pytest.raises(CapacityError) as caught:
        inject(MemoryApi().api, [networkchaos(**status)], OWNER, seconds=-1.0)
    assert caught.value.message == f"Chaos Mesh has not injected x-2-delay within -1 s: {words}"


def test_objects_of_a_run_are_removed() -> None:
    api = MemoryApi({PATH: {"items": [networkchaos()]}, f"{PATH}/x-2-delay": networkchaos()})
    remove_chaos(api.api, "team", "x-2")
    assert api.writes == [f"DELETE {PATH}/x-2-delay"]
    assert api.bodies[0] == {"labelSelector": "mlbench/run=x-2"}
    remove_chaos(MemoryApi().api, "team", "x-2")
