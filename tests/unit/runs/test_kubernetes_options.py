"""Options of runs on Kubernetes: what they and the cluster's record become in the spec, and what is refused."""

from typing import Any

import pytest

from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.runs.kubernetes_options import (
    check_mount_point,
    gpus_of_machine,
    resolve_kubernetes,
)
from mlbench_cli.runs.request import Request

SPEC = RunSpec("x-2", "far", "kubernetes", "custom", "custom", ("true",), "gloo", 2)


def cluster(**details: Any) -> Cluster:
    return Cluster("far", "gke", details=details)


def resolve(details: dict[str, Any] | None = None, **options: Any) -> KubernetesOptions:
    return resolve_kubernetes(Request(**options), cluster(**(details or {})))


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({}, {"vpc.amazonaws.com/efa": "4"}),
        ({"spread": True}, {"vpc.amazonaws.com/efa": "4"}),
        ({"spread": False}, {}),  # workers that share a machine cannot each have all its cards
    ],
)
def test_a_worker_gets_the_devices_of_its_machine(options: dict[str, Any], devices: dict[str, str]) -> None:
    assert resolve({"devices_per_node": {"vpc.amazonaws.com/efa": 4}}, **options).devices == devices


@pytest.mark.parametrize(
    ("options", "fabric"),
    [
        ({}, {"setup": "gib", "name": "RoCE"}),
        ({"spread": False}, {"name": "RoCE"}),
    ],
)
def test_a_fast_network_is_set_up_only_for_pods_that_have_a_machine_and_a_network_for_themselves(
    options: dict[str, Any], fabric: dict[str, str]
) -> None:
    details = {"fabric": {"setup": "gib", "name": "RoCE"}}
    assert resolve(details, **options).fabric == fabric
    assert details == {"fabric": {"setup": "gib", "name": "RoCE"}}


@pytest.mark.parametrize(
    "options",
    [
        {"queue": "a" * 63},
        {"namespace": "a"},
        {"memory": "1.5Gi"},
        {"shm": "512M"},
        {"env": {"_A1": "1", "RANKS": "1"}},
    ],
)
def test_what_kubernetes_allows_is_not_refused(options: dict[str, Any]) -> None:
    resolve(**options)


@pytest.mark.parametrize(
    ("gpus", "options", "count"),
    [
        (8, {}, 8),
        (8, {"spread": True}, 8),
        (8, {"spread": False}, 1),
        (8, {"processes_per_worker": 2}, 1),
        (0, {}, 1),
        (None, {}, 1),
    ],
)
def test_a_worker_with_a_machine_for_itself_has_all_its_gpus(
    gpus: int | None, options: dict[str, Any], count: int
) -> None:
    assert gpus_of_machine(Request(**options), cluster(gpus_per_node=gpus)) == count


@pytest.mark.parametrize(
    ("path", "normal"),
    [("/data", "/data"), ("/mnt/sets/", "/mnt/sets"), ("/data/../sets", "/sets"), ("/tmp/data", "/tmp/data")],
)
def test_data_can_be_mounted_at_an_absolute_path(path: str, normal: str) -> None:
    assert check_mount_point(path) == normal
