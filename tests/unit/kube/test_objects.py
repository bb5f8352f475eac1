"""Paths of objects as Kubernetes documents them, and conditions."""

from typing import Any

import pytest

from mlbench_cli.kube.objects import collection_path, condition, is_true, object_path


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Pod", "/api/v1/namespaces/n/pods"),
        ("Service", "/api/v1/namespaces/n/services"),
        ("ConfigMap", "/api/v1/namespaces/n/configmaps"),
        ("Secret", "/api/v1/namespaces/n/secrets"),
        ("Event", "/api/v1/namespaces/n/events"),
        ("PodTemplate", "/api/v1/namespaces/n/podtemplates"),
        ("PersistentVolumeClaim", "/api/v1/namespaces/n/persistentvolumeclaims"),
        ("Job", "/apis/batch/v1/namespaces/n/jobs"),
        ("NetworkPolicy", "/apis/networking.k8s.io/v1/namespaces/n/networkpolicies"),
        ("ResourceClaimTemplate", "/apis/resource.k8s.io/v1/namespaces/n/resourceclaimtemplates"),
        ("ProvisioningRequest", "/apis/autoscaling.x-k8s.io/v1/namespaces/n/provisioningrequests"),
    ],
)
def test_paths_of_kinds(kind: str, path: str) -> None:
    assert collection_path(kind, "n") == path
    assert object_path(kind, "n", "x") == f"{path}/x"


READY, FAILED = {"type": "Ready", "status": "True"}, {"type": "Failed", "status": "False"}


@pytest.mark.parametrize(
    ("owner", "kind", "found", "value"),
    [
        ({"status": {"conditions": [READY, FAILED]}}, "Failed", FAILED, False),
        ({"status": {"conditions": [READY, FAILED]}}, "Ready", READY, True),
        ({"status": {"conditions": [READY]}}, "Failed", {}, False),
        ({"status": {"conditions": None}}, "Ready", {}, False),
        ({"status": None}, "Ready", {}, False),
        ({}, "Ready", {}, False),
    ],
)
def test_conditions(owner: dict[str, Any], kind: str, found: dict[str, str], value: bool) -> None:
    assert condition(owner, kind) == found
    assert is_true(condition(owner, kind)) is value
