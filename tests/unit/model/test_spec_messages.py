"""RunSpec: each limit with its message, the numbering of ranks and servers, and the types of a document's fields."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import (
    KubernetesOptions,
    RunSpec,
    canonical_json,
    check_name,
    common_name,
    is_rdma_device,
)

SPEC = RunSpec("run-2", "far", "kubernetes", "t", "spec", ("x",), "gloo", 2)


@pytest.mark.parametrize("method", [None, "nsenter", "annotation", "chaos-mesh"])
def test_the_ways_to_shape_a_network_are_allowed(method: str | None) -> None:
    assert replace(SPEC, kubernetes=KubernetesOptions(network_method=method)).kubernetes.network_method == method


@pytest.mark.parametrize("length", [40, 41, 100])
def test_a_name_has_at_most_forty_characters(length: int) -> None:
    if length <= 40:
        assert check_name("a" * length) == "a" * length
        return
    with pytest.raises(UsageError) as caught:
        check_name("a" * length, "experiment name")
    assert caught.value.message == f'The experiment name "{"a" * 40}…" has {length} characters, 40 are allowed.'


@pytest.mark.parametrize(
    ("name", "common"),
    [
        ("demo-2-r3", "demo-2"),
        ("demo-16-r10", "demo-16"),
        ("a-r1-2-r3", "a-r1-2"),
        ("demo-2-r", None),
        ("demo-2-r3-x", None),
        ("-2-r3", None),
        ("demo-x-r3", None),
        ("demo-2-r3\n", None),
    ],
)
def test_repeats_are_told_by_their_names(name: str, common: str | None) -> None:
    assert common_name(name) == common


# --- ranks, workers and servers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "is_shaped"),
    [
        ({}, False),
        ({"network": "1gbit"}, True),
        ({"network": "model:1gbit"}, False),
        ({"network": "1gbit", "workers": 1}, False),
    ],
)
def test_a_network_is_shaped_between_at_least_two_workers(changes: dict[str, Any], is_shaped: bool) -> None:
    assert replace(SPEC, **changes).has_shaped_network is is_shaped


@pytest.mark.parametrize(
    ("changes", "has_faults"),
    [
        ({}, False),
        ({"faults": "at 5s kill rank 1"}, True),
        ({"on_failure": "restart"}, True),
        ({"detect_seconds": 5.0}, True),
        ({"checkpoint_every": "30s"}, False),
    ],
)
def test_faults_restarts_and_watching_are_all_told(changes: dict[str, Any], has_faults: bool) -> None:
    assert replace(SPEC, **changes).has_faults is has_faults


@pytest.mark.parametrize(
    ("resource", "is_rdma"),
    [
        ("rdma/ib", True),
        ("openshift.io/RDMA_vf", True),
        ("vpc.amazonaws.com/efa", True),
        ("vpc.amazonaws.com/efa-x", False),
        ("nvidia.com/gpu", False),
    ],
)
def test_cards_for_rdma_are_told_by_the_names_of_their_resources(resource: str, is_rdma: bool) -> None:
    assert is_rdma_device(resource) is is_rdma
    assert KubernetesOptions(devices={"x/y": "1", resource: "1"}).has_rdma_devices is is_rdma
    assert not KubernetesOptions().has_rdma_devices


# --- documents --------------------------------------------------------------------------------------------------------

CHANGED: dict[str, Any] = {
    "network": "1gbit",
    "method": {"name": "bsp"},
    "servers_on": ["h1"],
    "task_path": "/x",
    "pin": True,
    "anonymous": True,
    "faults": "at 5s kill rank 1",
    "on_failure": "restart",
    "checkpoint_every": "30s",
    "checkpoint_copy": "peer",
    "detect_seconds": 5.0,
}
CHANGED_OPTIONS: dict[str, Any] = {
    "pod_labels": {"a": "b"},
    "pod_annotations": {"a": "b"},
    "priority_class": "high",
    "scheduler": "volcano",
    "network_policy": False,
    "provisioning_class": "q",
    "fabric": {"name": "efa"},
    "network_method": "nsenter",
    "server_cpus": 2,
    "server_memory": "8Gi",
    "assigned_user": True,
    "cpu_limit": 4,
    "gpu_resource": "amd.com/gpu",
    "job_set": True,
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_field_that_came_later_is_written_only_if_it_is_set(name: str) -> None:
    value = CHANGED[name]
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value}
    changed = replace(SPEC, **fields)
    document = json.loads(canonical_json(changed.to_dict()))
    assert document == {**json.loads(canonical_json(SPEC.to_dict())), name: value}
    assert RunSpec.from_dict(document) == changed
    assert changed.hash != SPEC.hash
    assert changed.content_hash != SPEC.content_hash


@pytest.mark.parametrize("name", CHANGED_OPTIONS)
def test_an_option_that_came_later_is_written_only_if_it_is_set(name: str) -> None:
    changed = replace(SPEC, kubernetes=replace(SPEC.kubernetes, **{name: CHANGED_OPTIONS[name]}))
    document = json.loads(canonical_json(changed.to_dict()))
    plain = json.loads(canonical_json(SPEC.to_dict()))
    assert document == {**plain, "kubernetes": {**plain["kubernetes"], name: CHANGED_OPTIONS[name]}}
    assert RunSpec.from_dict(document) == changed
    assert changed.content_hash != SPEC.content_hash


def change(**changes: Any) -> dict[str, Any]:
    return {**json.loads(canonical_json(SPEC.to_dict())), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"cpus": 2},
        {"cpus": None},
        {"timeout": 60},
        {"parameters": {"a": [1]}},
        {"kubernetes": {}},
        {"kubernetes": {"tolerations": ["spot"], "cpu_limit": 4}},
        {"detect_seconds": 5},
    ],
)
def test_documents_may_have_whole_numbers_and_missing_options(changes: dict[str, Any]) -> None:
    found = RunSpec.from_dict(change(**changes))
    for name, value in changes.items():
        if name != "kubernetes":
            assert getattr(found, name) == value
    without_version = change(**changes)
    del without_version["spec_version"]
    assert RunSpec.from_dict(without_version) == found
