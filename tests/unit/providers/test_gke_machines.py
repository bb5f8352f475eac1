"""Which machine has which GPUs, the limits of Google Cloud, its quotas, and how a cluster on GKE is reached."""

import base64
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core import exceptions as google

from mlbench_cli.errors import CapacityError, MlbenchError, UsageError
from mlbench_cli.model.run import Cluster
from providers.base import BusyError, TransientError
from providers.gke import GkeProvider, api
from providers.gke.compute import Compute, Demand, Purchase
from providers.gke.discovery import _is_young
from providers.gke.end_timer import ROLE, GkeEndIdentity, GkeHold, Project
from providers.gke.families import FABRICS, default_disk_type
from providers.gke.machines import SHAPED, Machine, choose_machine, is_gpu_family
from providers.gke.options import GkeOptions
from providers.gke.plan import _check_since
from providers.gke.prices import price_machines
from providers.gke.reservations import check_reservation, parse_reservation
from providers.gke.resources import WorkerPool, _maintenance_policy, is_queued


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
    container = pytest.importorskip("google.cloud.container_v1")
    from providers.gke.resources import access_to

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


@pytest.mark.parametrize("nodes", [0, 1000])
def test_a_cluster_may_start_without_workers_or_with_the_most(nodes: int) -> None:
    assert new_cluster(nodes).details["nodes"] == nodes


def test_a_pool_grows_to_the_maximum_and_no_further() -> None:
    provider, cluster = GkeProvider(), new_cluster()
    assert provider.scale(cluster, 1000)
    with pytest.raises(UsageError, match="at most 1000"):
        provider.scale(cluster, 1001)


def test_e2_and_n1_machines_have_no_compact_placement() -> None:
    """Compute Engine's page on placement policies lists the families; E2 and N1 are not among them."""
    for machine in ("e2-standard-4", "n1-standard-4"):
        with pytest.raises(UsageError, match="not possible"):
            new_cluster(machine_type=machine, compact_placement=True)
    assert new_cluster(machine_type="c2-standard-4", compact_placement=True)


def test_only_a_network_of_another_project_needs_named_ranges() -> None:
    own = "projects/demo-project/global/networks/own"
    assert new_cluster(network=own).details["options"]["network"] == own
    with pytest.raises(UsageError, match="The project host shares this network"):
        new_cluster(network="projects/host/global/networks/shared")


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


def test_maintenance_leaves_the_machines_of_a_run_alone() -> None:
    """The scope NO_MINOR_UPGRADES of GKE would still drain nodes for patches."""
    (exclusion,) = _maintenance_policy()["window"]["maintenance_exclusions"].values()
    assert exclusion["maintenance_exclusion_options"]["scope"] == "NO_MINOR_OR_NODE_UPGRADES"


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


def test_rdma_networks_come_with_a_patch_of_gke_1_34() -> None:
    fabric = FABRICS["a4-highgpu-8g"]
    _check_since(fabric, None, [], "1.34.1-gke.1829001")
    with pytest.raises(UsageError, match=r"needs GKE 1\.34\.1-gke\.1829001 or later"):
        _check_since(fabric, None, [], "1.34.1-gke.1829000")


@pytest.mark.parametrize(
    ("machine", "has_gpus"),
    [("a4x-highgpu-4g", True), ("g4-standard-48", True), ("n1-standard-4", False), ("c4a-standard-4", False)],
)
def test_families_a_and_g_have_gpus(machine: str, has_gpus: bool) -> None:
    assert is_gpu_family(machine) is has_gpus


def test_n1_machines_are_priced_with_3_75_gib_for_each_vcpu() -> None:
    parts = {"N1 Predefined Instance Core": 1.0, "N1 Predefined Instance Ram": 1.0}
    assert price_machines(parts)["n1-standard-4"] == 4 + 4 * 3.75


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


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Compute:
    """A client whose answers the test gives."""
    monkeypatch.setattr(api, "open_session", SimpleNamespace)
    return Compute("demo-project")


def check_quotas(compute: Compute, limits: dict[str, float], *demands: Demand, cpus: int = 4) -> list[str]:
    found = {name: {"metric": name, "limit": limit, "usage": 1.0} for name, limit in limits.items()}
    compute.quotas = lambda region: found  # type: ignore[method-assign]
    return compute.check_quotas("r", demands, [cpus] * len(demands), {}, public_addresses=False)


def test_a_quota_that_just_suffices_is_enough_for_system_machines_and_workers_together(compute: Compute) -> None:
    demands = [Demand(Machine("n1-standard-4"), count, 100, None) for count in (2, 3)]
    assert check_quotas(compute, {"CPUS": 21.0}, *demands) == []
    with pytest.raises(CapacityError, match="CPUS has 19 of 20 left, 20 needed"):
        check_quotas(compute, {"CPUS": 20.0}, *demands)


def test_a_regional_gpu_quota_of_zero_may_mean_a_quota_per_family(compute: Compute) -> None:
    demand = Demand(Machine("a3-highgpu-8g", "nvidia-h100-80gb", 8), 1, 100, None)
    (warning,) = check_quotas(compute, {"NVIDIA_H100_GPUS": 0.0, "GPUS_ALL_REGIONS": 99.0}, demand)
    assert "per GPU family" in warning


@pytest.mark.parametrize(("architecture", "is_arm"), [("ARM64", True), ("X86_64", False)])
def test_arm_machines_are_told_by_their_architecture(compute: Compute, architecture: str, is_arm: bool) -> None:
    """The values of the field `architecture` in Compute Engine's API reference of machine types."""
    compute.get = lambda path: {"architecture": architecture}  # type: ignore[method-assign]
    assert compute.is_arm("europe-west1-b", Machine("c4a-standard-4")) is is_arm


@pytest.mark.parametrize(
    ("more", "needed", "warnings"),
    [
        ({}, 3, []),
        ({"status": "READY"}, 3, []),
        ({"status": "UPDATING"}, 3, ["The reservation mine is UPDATING."]),
    ],
)
def test_a_reservation_serves_as_many_machines_as_it_has_left(
    compute: Compute, monkeypatch: pytest.MonkeyPatch, more: dict[str, str], needed: int, warnings: list[str]
) -> None:
    told = {"specificReservation": {"count": "4", "inUseCount": "1"}, **more}
    monkeypatch.setattr(Compute, "get", lambda self, path: told)
    check = (parse_reservation("mine"), "demo-project", "z", Machine("a4-highgpu-8g"))
    assert check_reservation(*check, needed) == warnings
    with pytest.raises(CapacityError, match=f"3 machines left in z, {needed + 1} are needed"):
        check_reservation(*check, needed + 1)


def test_a_block_of_ones_own_reservation_is_named_with_the_project() -> None:
    affinity = parse_reservation("mine/reservationBlocks/b1").affinity("demo-project")
    assert affinity["values"] == ["projects/demo-project/reservations/mine/reservationBlocks/b1"]


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


def test_the_hint_for_a_quota_asks_for_the_limit_and_what_is_short() -> None:
    said = (
        "Insufficient regional quota to satisfy request: resource \"CPUS\": request requires '16.0' and is short "
        "'4.0'. project has a quota of '12.0' with '12.0' available."
    )
    error = api.capacity_error(f"refused in europe-west1: {said}", "demo-project")
    assert "--preferred-value 16 " in str(error.hint)


@pytest.mark.parametrize(
    ("place", "region"),
    [("europe-west1", "europe-west1"), ("europe-west1-b", "europe-west1"), ("us-east4-c", "us-east4")],
)
def test_a_zone_names_its_region(place: str, region: str) -> None:
    assert api.region_of(place) == region


# --- the end of a cluster -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "zones", "limit"), [(3, 2, 2), (4, 2, 2), (1, 3, 1), (0, 1, 1)])
def test_the_autoscaler_may_keep_all_workers_whose_limit_is_per_zone(workers: int, zones: int, limit: int) -> None:
    calls = []

    def call(method: str, **request: Any) -> Any:
        calls.append(request["autoscaling"])
        return SimpleNamespace(name="op")

    hold = object.__new__(GkeHold)
    found = SimpleNamespace(locations=["z"] * zones)
    plane = SimpleNamespace(gke=SimpleNamespace(call=call))
    hold.pool = SimpleNamespace(find_raw=lambda: found, count=workers, plane=plane, path="p")  # type: ignore[assignment]
    hold.let_shrink()
    assert calls == [{"enabled": True, "min_node_count": 0, "max_node_count": limit}]


def test_permissions_are_asked_about_100_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`testIamPermissions` of the Resource Manager rejects more."""
    asked = []

    def ask_rest(service: str, method: str, url: str, what: str, project: str, body: Any, conflict: str) -> Any:
        asked.append(len(body["permissions"]))
        return body

    monkeypatch.setattr(api, "ask_rest", ask_rest)
    names = [f"a.b.c{number}" for number in range(201)]
    assert Project(api.Gke("demo-project", "z")).list_granted(names) == set(names)
    assert asked == [100, 100, 1]


def test_only_the_unconditional_binding_of_the_cluster_is_removed() -> None:
    conditional = {"role": ROLE, "members": ["me"], "condition": {"expression": "true"}}
    other = {"role": "roles/viewer", "members": ["me"]}
    written: list[Any] = []
    identity = object.__new__(GkeEndIdentity)
    identity._member = lambda: "me"  # type: ignore[method-assign]
    policy = {"bindings": [{"role": ROLE, "members": ["me", "you"]}, conditional, other]}
    project = SimpleNamespace(read_policy=lambda: policy, write_policy=written.append)
    identity._project = project  # type: ignore[assignment]
    identity.delete()
    assert written[0]["bindings"] == [{"role": ROLE, "members": ["you"]}, conditional, other]


@pytest.mark.parametrize(("minutes", "is_young"), [(1, True), (14, True), (16, False), (900, False)])
def test_a_network_without_cluster_is_young_for_a_quarter_of_an_hour(minutes: int, is_young: bool) -> None:
    created = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat()
    assert _is_young(SimpleNamespace(created=created)) is is_young  # type: ignore[arg-type]


@pytest.mark.parametrize(("running", "says"), [(0, None), (1, "1 of 3"), (2, "2 of 3"), (3, None)])
def test_machines_that_run_while_others_are_awaited_are_counted(
    monkeypatch: pytest.MonkeyPatch, running: int, says: str | None
) -> None:
    monkeypatch.setattr("providers.gke.resources.list_ready_workers", lambda connect: [{}] * running)
    pool = object.__new__(WorkerPool)
    pool.plane = SimpleNamespace(access=None, cluster=new_cluster(3))  # type: ignore[assignment]
    pool.count, pool._counted, pool._partial = 3, 0.0, None
    told = pool._describe_machines(0.0)
    assert (told or "").startswith(says or "")
    assert (told is None) is (says is None)
