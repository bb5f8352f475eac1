"""Which leftovers of others and of workloads are deleted, waited for, or left alone."""

import pytest

from providers.eks import leftovers
from providers.workloads import WorkloadObject


def interface(status: str, **more: str) -> dict[str, str]:
    return {"NetworkInterfaceId": f"eni-{status}", "Status": status, **more}


@pytest.mark.parametrize(
    ("status", "is_in_use"), [("in-use", True), ("attaching", True), ("available", False), ("detaching", False)]
)
def test_an_attached_interface_is_in_use(status: str, is_in_use: bool) -> None:
    assert leftovers.is_in_use(interface(status)) is is_in_use


@pytest.mark.parametrize(
    ("item", "path", "words"),
    [
        (WorkloadObject("Service", "n", "s"), "/api/v1/namespaces/n/services/s", "Service n/s"),
        (
            WorkloadObject("Ingress", "n", "i"),
            *("/apis/networking.k8s.io/v1/namespaces/n/ingresses/i", "Ingress n/i"),
        ),
        (
            WorkloadObject("Gateway", "n", "g"),
            *("/apis/gateway.networking.k8s.io/v1/namespaces/n/gateways/g", "Gateway n/g"),
        ),
        (WorkloadObject("PersistentVolume", "", "pv"), "/api/v1/persistentvolumes/pv", "PersistentVolume pv"),
    ],
)
def test_an_object_of_a_workload_has_the_path_of_the_api_reference(item: WorkloadObject, path: str, words: str) -> None:
    assert (item.path, str(item)) == (path, words)
