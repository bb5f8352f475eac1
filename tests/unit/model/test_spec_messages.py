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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "0 workers: the number must be from 1 to 4096."),
        ({"workers": 4097}, "4097 workers: the number must be from 1 to 4096."),
        ({"processes_per_worker": 0}, "0 processes per worker: the number must be from 1 to 64."),
        ({"processes_per_worker": 65}, "65 processes per worker: the number must be from 1 to 64."),
        ({"gpus_per_worker": -1}, "-1 GPUs per worker: the number must be from 0 to 64."),
        ({"gpus_per_worker": 65}, "65 GPUs per worker: the number must be from 0 to 64."),
        ({"cpus": 0.0}, "0.0 CPUs per worker: the number must be above 0 and at most 4096."),
        ({"cpus": 4096.5}, "4096.5 CPUs per worker: the number must be above 0 and at most 4096."),
        ({"seed": -1}, "The seed is -1: it must be from 0 to 4294967295."),
        ({"seed": 1 << 32}, "The seed is 4294967296: it must be from 0 to 4294967295."),
        ({"timeout": -1.0}, "A timeout of -1.0 s: it must be above 0 and at most 30 days."),
        ({"timeout": 2592000.5}, "A timeout of 2592000.5 s: it must be above 0 and at most 30 days."),
        ({"device": "GPU"}, 'The device "GPU" is neither cpu nor gpu.'),
        ({"goal": ""}, 'The goal "" is neither full nor light.'),
        ({"argv": ()}, "The command of the run is empty."),
        ({"argv": ("", "x")}, "The command of the run is empty."),
        ({"backend": "a\0"}, "'a\\x00' holds a zero byte, or bytes that are not UTF-8."),
        ({"image": "a\ud800"}, "'a\\ud800' holds a zero byte, or bytes that are not UTF-8."),
        ({"data_dir": "\udfff"}, "'\\udfff' holds a zero byte, or bytes that are not UTF-8."),
        ({"task_path": "\0"}, "'\\x00' holds a zero byte, or bytes that are not UTF-8."),
        ({"argv": ("x", "\0")}, "'\\x00' holds a zero byte, or bytes that are not UTF-8."),
        (
            {"kubernetes": KubernetesOptions(network_method="magic")},
            'The method "magic" of the network is unknown.',
        ),
        ({"network": "1gbit,1ms,2ms"}, '--network "1gbit,1ms,2ms" has more than a rate and a delay.'),
    ],
)
def test_a_run_that_cannot_be_is_refused_with_the_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(SPEC, **changes)
    assert caught.value.message == message


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


def test_a_name_that_is_no_dns_label_comes_with_the_rule() -> None:
    with pytest.raises(UsageError) as caught:
        check_name("My run", "experiment name")
    assert caught.value.message == (
        'The experiment name "My run" is not a DNS label: only a-z, 0-9 and "-", beginning with a letter, '
        "ending with a letter or digit."
    )


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

SERVED = replace(SPEC, workers=3, processes_per_worker=2, method={"name": "x", "servers": "2"})


def test_servers_come_after_the_ranks_each_as_a_unit_of_its_own() -> None:
    assert (SERVED.world_size, SERVED.servers, SERVED.process_count, SERVED.unit_count) == (6, 2, 8, 5)
    assert [list(SERVED.ranks_of(unit)) for unit in range(5)] == [[0, 1], [2, 3], [4, 5], [6], [7]]
    assert [SERVED.unit_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 4]


def test_without_servers_the_units_are_the_workers() -> None:
    assert (SPEC.world_size, SPEC.servers, SPEC.process_count, SPEC.unit_count) == (2, 0, 2, 2)
    assert replace(SPEC, method={"name": "x"}).servers == 0


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
    "calibrate": True,
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


def test_the_content_of_a_spec_has_no_name_and_no_price() -> None:
    content = replace(SPEC, price={"per_hour": 1.0}, functional_only="x").content()
    whole = json.loads(canonical_json(SPEC.to_dict()))
    assert content == {key: value for key, value in whole.items() if key not in ("name", "price", "functional_only")}


def change(**changes: Any) -> dict[str, Any]:
    return {**json.loads(canonical_json(SPEC.to_dict())), **changes}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "The run spec is not an object with text keys."),
        ({1: 2}, "The run spec is not an object with text keys."),
        (change(kubernetes=[]), "The kubernetes is not an object with text keys."),
        (change(spec_version=2), "The run spec has version 2; this mlbench reads 1."),
        (change(spec_version="1"), "The run spec has version '1'; this mlbench reads 1."),
        (change(taks="x"), 'The run spec has an unknown key "taks". Did you mean "task"?'),
        (
            change(kubernetes={"memry": "8Gi"}),
            'The run spec has an unknown key "kubernetes.memry". Did you mean "memory"?',
        ),
        (change(name=5), '"name" of the run spec is 5, not of type str.'),
        (change(workers=2.0), '"workers" of the run spec is 2.0, not of type int.'),
        (change(seed=True), '"seed" of the run spec is True, not of type int.'),
        (change(pin=1), '"pin" of the run spec is 1, not of type bool.'),
        (change(timeout="1h"), "\"timeout\" of the run spec is '1h', not of type float."),
        (change(cpus=False), '"cpus" of the run spec is False, not of type float | None.'),
        (change(image=5), '"image" of the run spec is 5, not of type str | None.'),
        (change(argv="x"), "\"argv\" of the run spec is 'x', not of type tuple[str, ...]."),
        (change(argv=["x", 5]), '"argv" of the run spec must be a list of strings.'),
        (change(parameters=[]), '"parameters" of the run spec is [], not of type Mapping[str, Any].'),
        (change(method={"a": 1}), '"method" of the run spec must map strings to strings.'),
        (change(method={1: "a"}), '"method" of the run spec must map strings to strings.'),
        (change(kubernetes={"env": {"A": 1}}), '"kubernetes.env" of the run spec must map strings to strings.'),
        (
            change(kubernetes={"cpu_limit": "4"}),
            "\"kubernetes.cpu_limit\" of the run spec is '4', not of type int | None.",
        ),
    ],
)
def test_a_wrong_document_is_named_with_its_key(document: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunSpec.from_dict(document)
    assert caught.value.message == message


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
