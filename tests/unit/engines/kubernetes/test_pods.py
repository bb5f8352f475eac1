"""Scheduling and rights of a run's pods: requests, limits, tolerations, anti-affinity and users."""

from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.pods import (
    anti_affinity,
    resource_limits,
    resource_requests,
    toleration,
)
from mlbench_cli.model.spec import KubernetesOptions, RunSpec


def a_spec(gpus: int = 0, cpus: float | None = None, **options: Any) -> RunSpec:
    names = ("demo-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2)
    return RunSpec(*names, gpus_per_worker=gpus, cpus=cpus, kubernetes=KubernetesOptions(**options))


@pytest.mark.parametrize(
    ("spec", "requests", "limits"),
    [
        (a_spec(), {"cpu": "500m", "memory": "512Mi"}, {}),
        (a_spec(cpus=4.0), {"cpu": "4", "memory": "512Mi"}, {}),
        (a_spec(cpus=0.5, memory="8Gi"), {"cpu": "0.5", "memory": "8Gi"}, {"memory": "8Gi"}),
        (
            a_spec(gpus=8, devices={"rdma/hca": "1"}, gpu_resource="amd.com/gpu"),
            {"cpu": "500m", "memory": "512Mi"},
            {"amd.com/gpu": "8", "rdma/hca": "1"},
        ),
        (a_spec(gpus=1), {"cpu": "500m", "memory": "512Mi"}, {"nvidia.com/gpu": "1"}),
    ],
)
def test_requests_and_limits(spec: RunSpec, requests: dict[str, str], limits: dict[str, str]) -> None:
    assert resource_requests(spec) == requests
    assert resource_limits(spec) == limits


@pytest.mark.parametrize(
    ("text", "document"),
    [
        ("spot", {"key": "spot", "operator": "Exists"}),
        ("spot:NoExecute", {"key": "spot", "operator": "Exists", "effect": "NoExecute"}),
        ("gpu=yes", {"key": "gpu", "operator": "Equal", "value": "yes"}),
        ("gpu=", {"key": "gpu", "operator": "Equal", "value": ""}),
        (
            "a.b/c=d:PreferNoSchedule",
            {"key": "a.b/c", "operator": "Equal", "value": "d", "effect": "PreferNoSchedule"},
        ),
    ],
)
def test_tolerations_are_written_as_kubectl_writes_taints(text: str, document: dict[str, str]) -> None:
    assert toleration(text) == document


WORKERS = {"app.kubernetes.io/managed-by": "mlbench", "mlbench/role": "worker"}
OTHER_RUNS = {"key": "mlbench/run", "operator": "NotIn", "values": ["demo-2"]}
OWN = {"mlbench/run": "demo-2"}


@pytest.mark.parametrize(
    ("spec", "labels", "expressions", "everywhere"),
    [
        (a_spec(), WORKERS, [], True),
        (a_spec(spread=False), WORKERS, [OTHER_RUNS], True),
        (a_spec(share_nodes=True), {**WORKERS, **OWN}, [], False),
        (a_spec(gpus=8), WORKERS, [], True),
    ],
)
def test_pods_keep_off_the_nodes_of_those_who_would_disturb_them(
    spec: RunSpec, labels: dict[str, str], expressions: list[object], everywhere: bool
) -> None:
    selector = {"matchLabels": labels, **({"matchExpressions": expressions} if expressions else {})}
    namespaces: dict[str, object] = {"namespaceSelector": {}} if everywhere else {}
    assert anti_affinity(spec) == [{"topologyKey": "kubernetes.io/hostname", **namespaces, "labelSelector": selector}]
