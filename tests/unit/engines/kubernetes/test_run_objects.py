"""Objects of runs with queues, booked machines, and shaped networks; and the names of a run's objects."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.manifests import (
    file_name,
    has_chaos,
    holders,
    manifests,
    queue_of,
    role_of,
)
from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import KubernetesOptions, RunSpec

DAY = 86400


def a_spec(options: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    names = ("demo-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2)
    kubernetes = KubernetesOptions(**(options or {}))
    return replace(RunSpec(*names, image="example.com/image:1", timeout=600.0, kubernetes=kubernetes), **changes)


def objects(spec: RunSpec) -> dict[str, Any]:
    """The run's objects by the names of their files."""
    return {file_name(document): document for document in manifests(spec, "team")}


def variables(document: Any) -> dict[str, Any]:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return {item["name"]: item.get("value") for item in container["env"]}


SERVED = {"method": {"name": "ps", "servers": "2"}}
SHAPED: dict[str, Any] = {"network": "1gbit,5ms"}
CHAOS = {"network_method": "chaos-mesh"}

# --- which objects there are, and their names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (a_spec(), ["job", "configmap", "service", "networkpolicy", "keeper"]),
        (a_spec({"keep_seconds": 0}), ["job", "configmap", "service", "networkpolicy"]),
        (a_spec({"keep_seconds": 1}), ["job", "configmap", "service", "networkpolicy", "keeper"]),
        (a_spec({"network_policy": False}), ["job", "configmap", "service", "keeper"]),
        (
            a_spec({"provisioning_class": "q"}),
            ["job", "configmap", "service", "networkpolicy", "podtemplate", "provisioningrequest", "keeper"],
        ),
        # Kueue books the machines of its queues.
        (a_spec({"provisioning_class": "q", "queue": "q"}), ["job", "configmap", "service", "networkpolicy", "keeper"]),
        (
            a_spec({"fabric": {"setup": "gib"}}, gpus_per_worker=8),
            ["job", "configmap", "service", "networkpolicy", "resourceclaimtemplate", "keeper"],
        ),
        (
            a_spec(CHAOS, **SHAPED),
            [
                *("job", "configmap", "service", "networkpolicy", "keeper"),
                *("networkchaos-bandwidth", "networkchaos-delay"),
            ],
        ),
        (
            a_spec(CHAOS, network="1gbit"),
            ["job", "configmap", "service", "networkpolicy", "keeper", "networkchaos-bandwidth"],
        ),
        (a_spec(**SERVED), ["job", "configmap", "service", "networkpolicy", "keeper", "servers"]),
    ],
)
def test_a_run_has_the_objects_that_it_needs(spec: RunSpec, names: list[str]) -> None:
    assert list(objects(spec)) == [f"{name}.yaml" for name in names]


@pytest.mark.parametrize(
    ("labels", "queue", "role"),
    [
        (None, None, None),
        ({"mlbench/role": "keeper"}, None, "keeper"),
        ({"kueue.x-k8s.io/queue-name": "a"}, "a", None),
    ],
)
def test_the_labels_of_a_job_say_its_queue_and_role(
    labels: dict[str, str] | None, queue: str | None, role: str | None
) -> None:
    job = {"metadata": {"labels": labels}}
    assert (queue_of(job), role_of(job)) == (queue, role)
    assert (queue_of({}), role_of({})) == (None, None)


@pytest.mark.parametrize(
    ("spec", "workers"),
    [
        (a_spec(), (0,)),
        (a_spec({"collect": "all"}), (0, 1)),
        (a_spec({"collect": "all"}, run_on_all=False), (0,)),
    ],
)
def test_workers_whose_output_is_kept_hold_it(spec: RunSpec, workers: tuple[int, ...]) -> None:
    assert holders(spec) == workers
    assert variables(objects(spec)["job.yaml"])["MLBENCH_COLLECT"] == ("all" if len(workers) > 1 else "rank0")


@pytest.mark.parametrize(
    ("changes", "options", "shaped"),
    [
        (SHAPED, CHAOS, True),
        (SHAPED, {"network_method": "annotation"}, False),
        (SHAPED, {}, False),
        ({}, CHAOS, False),
        ({**SHAPED, "workers": 1}, CHAOS, False),
    ],
)
def test_chaos_mesh_shapes_only_what_it_was_asked_for(
    changes: dict[str, Any], options: dict[str, Any], shaped: bool
) -> None:
    assert has_chaos(a_spec(options, **changes)) is shaped


# --- times -----------------------------------------------------------------------------------------------------------


# --- shaped networks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "limit", "buffer"),
    [
        # A queue of 50 ms and a bucket of 1 ms at this rate.
        ("1gbit", 6_250_000, 125_000),
        # A queue of two one-way delays, because bytes under way for so long must fit.
        ("1gbit,100ms", 25_000_000, 125_000),
        ("1gbit,25ms", 6_250_000, 125_000),
        # Two packets at least, ten times as many in the queue; and what the objects' fields can hold at most.
        ("1mbit", 30_000, 3_000),
        ("100tbit", 4_294_967_295, 4_294_967_295),
    ],
)
def test_queue_and_bucket_of_a_network_shaped_by_chaos_mesh(network: str, limit: int, buffer: int) -> None:
    bandwidth = objects(a_spec(CHAOS, network=network))["networkchaos-bandwidth.yaml"]["spec"]["bandwidth"]
    assert (bandwidth["limit"], bandwidth["buffer"]) == (limit, buffer)


@pytest.mark.parametrize(
    ("options", "changes", "rate"),
    [
        ({"network_method": "annotation"}, {"network": "1gbit"}, "1025000000"),
        ({"network_method": "nsenter"}, {"network": "1gbit"}, None),
        ({"network_method": "annotation"}, {}, None),
        ({"network_method": "annotation"}, {"network": "1gbit", "workers": 1}, None),
    ],
)
def test_the_plugin_bandwidth_is_asked_by_annotations(
    options: dict[str, Any], changes: dict[str, Any], rate: str | None
) -> None:
    for name, document in objects(a_spec(options, **SERVED, **changes)).items():
        if name in ("job.yaml", "servers.yaml"):
            annotations = document["spec"]["template"]["metadata"]["annotations"]
            assert annotations.get("kubernetes.io/ingress-bandwidth") == rate
            assert annotations.get("kubernetes.io/egress-bandwidth") == rate


# --- servers and faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "figures"),
    [
        (
            a_spec({"hold_seconds": 60}, timeout=600.5),
            {"TIMEOUT": "601", "HOLD": "60", "WORKERS": "2", "RUN_ON_ALL": "1", "WORK_DIR": "/results"},
        ),
        (a_spec({"hold_seconds": 0}, run_on_all=False), {"TIMEOUT": "600", "HOLD": "0", "RUN_ON_ALL": "0"}),
        (a_spec(), {"KEEPER": "demo-2-keeper.demo-2:29600", "JOB": None, "FIRST_UNIT": None}),
        (a_spec({"keep_seconds": 0}), {"KEEPER": None}),
    ],
)
def test_what_a_worker_is_told(spec: RunSpec, figures: dict[str, str | None]) -> None:
    environment = variables(objects(spec)["job.yaml"])
    assert {name: environment.get(f"MLBENCH_{name}") for name in figures} == figures


@pytest.mark.parametrize(
    ("keep_storage", "size"),
    [("10Gi", (10 << 30) - (64 << 20)), ("65Mi", 1 << 20), ("1G", 10**9 - (64 << 20))],
)
def test_a_keeper_leaves_a_part_of_its_disk_free(keep_storage: str, size: int) -> None:
    (container,) = objects(a_spec({"keep_storage": keep_storage}))["keeper.yaml"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert str(size) in json.dumps(container)


@pytest.mark.parametrize(
    "options", [{"run_as_user": 2**31 - 1}, {"keep_seconds": 30 * DAY}, {"memory": "1e9"}, {"shm": "0.5Gi"}]
)
def test_what_kubernetes_just_allows_is_not_refused(options: dict[str, Any]) -> None:
    manifests(a_spec(options), "team")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run_as_user": 2**31}, "--run-as-user 2147483648: the number must be from 0 to 2147483647."),
        ({"keep_seconds": 30 * DAY + 1}, "the maximum is 30 days"),
        ({"keep_seconds": -1}, "--keep: -1 seconds"),
        ({"memory": "9GB"}, '--memory "9GB" is not a quantity of Kubernetes.'),
    ],
)
def test_what_kubernetes_just_refuses_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        manifests(a_spec(options), "team")
    assert words in caught.value.message
