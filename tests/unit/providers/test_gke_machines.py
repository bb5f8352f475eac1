"""Which machine has which GPUs, the limits of Google Cloud, its quotas, and how a cluster on GKE is reached."""

import base64
from typing import Any

import pytest
from google.api_core import exceptions as google

from mlbench_cli.errors import CapacityError, MlbenchError, UsageError
from mlbench_cli.model.run import Cluster
from providers.base import BusyError, TransientError
from providers.gke import api
from providers.gke.options import FABRICS, SHAPED, GkeOptions, Machine, choose_machine, default_disk_type, is_gpu_family
from providers.gke.provider import GkeProvider
from providers.gke.quota import Purchase
from providers.gke.resources import is_queued
from tests.needs import needs


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((None, None, None), Machine("n1-standard-4")),
        ((None, 0, None), Machine("n1-standard-4")),
        ((None, 2, None), Machine("n1-standard-16", "nvidia-tesla-t4", 2)),
        ((None, None, "T4"), Machine("n1-standard-8", "nvidia-tesla-t4", 1)),
        ((None, None, "nvidia-l4"), Machine("g2-standard-8", "nvidia-l4", 1)),
        ((None, None, "h200"), Machine("a3-ultragpu-8g", "nvidia-h200-141gb", 8)),
        ((None, None, "b200"), Machine("a4-highgpu-8g", "nvidia-b200", 8)),
        ((None, 8, "a100"), Machine("a2-highgpu-8g", "nvidia-tesla-a100", 8)),
        (("g2-standard-24", None, None), Machine("g2-standard-24", "nvidia-l4", 2)),
        (("n1-highmem-8", 4, None), Machine("n1-highmem-8", "nvidia-tesla-t4", 4)),
        (("c3-standard-8", None, None), Machine("c3-standard-8")),
    ],
)
def test_the_machine_that_is_meant(asked: tuple[str | None, int | None, str | None], found: Machine) -> None:
    assert choose_machine(*asked) == found


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((None, 3, "a100"), "1, 2, 4, 8 or 16"),
        ((None, -1, None), "minimum is 0"),
        (("n1-standard-4", 1, "a100"), "comes with its own machine types"),
        (("a2-highgpu-1g", 0, None), "not 0"),
        ((None, 1, "v100"), "too old"),
    ],
)
def test_pairs_that_cannot_be(asked: tuple[str | None, int | None, str | None], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        choose_machine(*asked)


def test_every_shaped_machine_is_what_its_own_gpus_choose() -> None:
    for machine in SHAPED.values():
        assert choose_machine(machine.name, machine.gpus, machine.gpu) == machine
        assert choose_machine(None, machine.gpus, machine.gpu).gpus == machine.gpus


def test_vcpus_are_read_from_the_name() -> None:
    assert Machine("n1-standard-16").vcpus == 16
    assert Machine("a2-highgpu-1g").vcpus is None


def test_the_open_dns_name_goes_before_the_address() -> None:
    container = needs("google.cloud.container_v1")
    from providers.gke.api import access_to

    found = container.Cluster({"name": "rel", "endpoint": "192.0.2.1", "status": "RUNNING"})
    found.master_auth = container.MasterAuth({"cluster_ca_certificate": base64.b64encode(b"PEM").decode()})
    access = access_to(found)
    assert (access.server, access.ca) == ("https://192.0.2.1", b"PEM")
    dns = {"endpoint": "gke-1.europe-west1.gke.goog", "allow_external_traffic": True}
    found.control_plane_endpoints_config = container.ControlPlaneEndpointsConfig({"dns_endpoint_config": dns})
    access = access_to(found)
    assert (access.server, access.ca) == ("https://gke-1.europe-west1.gke.goog", None)
    found.control_plane_endpoints_config.dns_endpoint_config.allow_external_traffic = False
    assert access_to(found).server == "https://192.0.2.1"
    with pytest.raises(UsageError, match="no address yet"):
        access_to(container.Cluster({"name": "rel", "status": "PROVISIONING"}))


# --- limits ---------------------------------------------------------------------------------------------------------


def new_cluster(nodes: int = 2, **options: Any) -> Cluster:
    return GkeProvider().new_cluster("demo-2", nodes, GkeOptions(project="demo-project", **options))


@pytest.mark.parametrize(("size", "is_allowed"), [(9, False), (10, True), (65536, True), (65537, False)])
def test_boot_disks_have_10_gb_to_64_tib(size: int, is_allowed: bool) -> None:
    """The limits of Compute Engine for persistent disks and Hyperdisk."""
    if is_allowed:
        assert new_cluster(disk_size=size).details["options"]["disk_size"] == size
    else:
        with pytest.raises(UsageError, match="from 10 to 65536 GB"):
            new_cluster(disk_size=size)


@pytest.mark.parametrize(
    ("workers", "options", "is_all_at_once"),
    [
        (1, {"flex_start": True}, False),
        (2, {"flex_start": True}, True),
        (2, {"flex_start": True, "compact_placement": True}, False),
        (2, {}, False),
    ],
)
def test_several_flex_start_machines_start_together(workers: int, options: Any, is_all_at_once: bool) -> None:
    assert is_queued(GkeOptions(**options), workers) is is_all_at_once


# --- families -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "disk"),
    [
        ("c3-standard-4", "pd-balanced"),
        ("c3d-standard-8", None),
        ("n2d-standard-2", "pd-balanced"),
        ("c4a-standard-4", "hyperdisk-balanced"),
        ("a3-highgpu-8g", "pd-balanced"),
        ("a3-ultragpu-8g", "hyperdisk-balanced"),
    ],
)
def test_a_family_has_its_own_kind_of_boot_disk(machine: str, disk: str | None) -> None:
    assert default_disk_type(machine) == disk


@pytest.mark.parametrize(
    ("machine", "gbits"),
    [("a3-highgpu-8g", 800), ("a3-megagpu-8g", 1600), ("a3-ultragpu-8g", 3200), ("a4-highgpu-8g", 3200)],
)
def test_the_bandwidth_of_gpu_networks_is_googles(machine: str, gbits: int) -> None:
    """Compute Engine's page on the network bandwidth of GPU machines, without the cards for other traffic."""
    assert FABRICS[machine].gbits == gbits


@pytest.mark.parametrize(
    ("machine", "has_gpus"),
    [("a4x-highgpu-4g", True), ("g4-standard-48", True), ("n1-standard-4", False), ("c4a-standard-4", False)],
)
def test_families_a_and_g_have_gpus(machine: str, has_gpus: bool) -> None:
    assert is_gpu_family(machine) is has_gpus


# --- quotas and reservations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("purchase", "limits", "quota"),
    [
        (Purchase.ON_DEMAND, {"PREEMPTIBLE_CPUS": 9.0}, "CPUS"),
        (Purchase.SPOT, {"PREEMPTIBLE_CPUS": 9.0}, "PREEMPTIBLE_CPUS"),
        (Purchase.SPOT, {"PREEMPTIBLE_CPUS": 0.0}, "CPUS"),
        (Purchase.SPOT, {}, "CPUS"),
        (Purchase.FLEX_START, {"PREEMPTIBLE_CPUS": 0.0}, "PREEMPTIBLE_CPUS"),
        (Purchase.FLEX_START, {}, "CPUS"),
    ],
)
def test_the_way_of_buying_decides_the_quota(purchase: Purchase, limits: dict[str, float], quota: str) -> None:
    """Spot machines use the ordinary quota until a preemptible one is granted; flex-start machines never do."""
    assert purchase.order_quotas("CPUS", limits) == (quota,)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (google.ResourceExhausted("Quota exceeded for 'Read requests per minute'"), TransientError),
        (google.ResourceExhausted("something else"), CapacityError),
        (google.FailedPrecondition("Cluster is running incompatible operation x"), BusyError),
        (google.Aborted("Cluster is running incompatible operation x"), BusyError),
        (google.FailedPrecondition("something else"), UsageError),
        (google.Aborted("something else"), TransientError),
    ],
)
def test_a_refusal_by_google_is_busy_transient_or_final(error: Exception, kind: type[MlbenchError]) -> None:
    assert type(api.error_from_exception(error, "do it", "demo-project")) is kind


@pytest.mark.parametrize(
    ("place", "region"),
    [("europe-west1", "europe-west1"), ("europe-west1-b", "europe-west1"), ("us-east4-c", "us-east4")],
)
def test_a_zone_names_its_region(place: str, region: str) -> None:
    assert api.region_of(place) == region


# --- the end of a cluster -------------------------------------------------------------------------------------------
