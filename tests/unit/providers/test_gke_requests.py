"""The documents that mlbench sends to Google for clusters, pools and networks, and what it reads from the answers."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers.base import BusyError
from providers.gke import GkeProvider, api
from providers.gke.api import Gke
from providers.gke.compute import Compute, Demand, Purchase, read_error
from providers.gke.families import configure_pool, count_networks, cpu_quota_names, fabric_facts, name_networks
from providers.gke.machines import Machine
from providers.gke.networks import find_marks, list_networks, read_marks
from providers.gke.options import GkeOptions
from providers.gke.prices import parse_skus, price_machines
from providers.gke.reservations import ReservationName, check_reservation, parse_reservation
from providers.gke.resources import ControlPlane, PoolSize, WorkerPool

TAGS = {"mlbench-cluster": "demo-2"}


class FakeGke(Gke):
    """Records requests, and gives the answers of the test by the name of the method."""

    def __init__(self, location: str = "europe-west1-b", **answers: Any) -> None:
        super().__init__("demo-project", location)
        self.answers = answers
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, method: str, **request: Any) -> Any:
        self.calls.append((method, request))
        answer = self.answers.get(method, SimpleNamespace(name="operation-1"))
        if isinstance(answer, Exception):
            raise answer
        return answer


def make_plane(gke: Gke | None = None, setup: str | None = None, **options: Any) -> ControlPlane:
    details = {"fabric": {"setup": setup} if setup else {}}
    cluster = Cluster(name="demo-2", provider="gke", details=details)
    return ControlPlane(cluster, gke or FakeGke(), GkeOptions(project="demo-project", **options))


def make_pool(machine: Machine, count: int = 2, setup: str | None = None, **options: Any) -> WorkerPool:
    return WorkerPool(make_plane(None, setup, **options), machine, count)


def state(name: str, **more: Any) -> SimpleNamespace:
    """A resource in Google's answer."""
    found = {"status": SimpleNamespace(name=name), "conditions": [], "status_message": "", **more}
    return SimpleNamespace(**found)


# --- the cluster ----------------------------------------------------------------------------------------------------


def test_the_request_of_a_cluster_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are those of GKE's API reference of `Cluster`."""
    monkeypatch.setattr("providers.gke.resources.time", SimpleNamespace(time=lambda: 0.0))
    request = make_plane().request()
    exclusion = {
        "start_time": "1970-01-01T00:00:00.000Z",
        "maintenance_exclusion_options": {
            "scope": "NO_MINOR_OR_NODE_UPGRADES",
            "end_time_behavior": "UNTIL_END_OF_SUPPORT",
        },
    }
    assert request == {
        "name": "demo-2",
        "resource_labels": TAGS,
        "locations": ["europe-west1-b"],
        "release_channel": {"channel": "REGULAR"},
        "ip_allocation_policy": {"use_ip_aliases": True},
        "network_config": {"datapath_provider": "ADVANCED_DATAPATH"},
        "workload_identity_config": {"workload_pool": "demo-project.svc.id.goog"},
        "control_plane_endpoints_config": {
            "dns_endpoint_config": {"allow_external_traffic": True},
            "ip_endpoints_config": {"enabled": False},
        },
        "maintenance_policy": {"window": {"maintenance_exclusions": {"mlbench": exclusion}}},
        "node_pools": [
            {
                "name": "system",
                "initial_node_count": 2,
                "config": {
                    "machine_type": "e2-standard-2",
                    "image_type": "COS_CONTAINERD",
                    "oauth_scopes": ["https://www.googleapis.com/auth/cloud-platform"],
                    "gvnic": {"enabled": True},
                    "resource_labels": TAGS,
                    "workload_metadata_config": {"mode": "GKE_METADATA"},
                    "disk_type": "pd-balanced",
                    "disk_size_gb": 50,
                    "labels": {"mlbench-role": "system"},
                },
            }
        ],
    }


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({"release_channel": "rapid"}, "release_channel", {"channel": "RAPID"}),
        ({"kubernetes_version": "1.34"}, "initial_cluster_version", "1.34"),
        ({"network": "own"}, "network", "own"),
        ({"subnetwork": "part"}, "subnetwork", "part"),
        (
            {"pods_range": "pods"},
            "ip_allocation_policy",
            {"use_ip_aliases": True, "cluster_secondary_range_name": "pods"},
        ),
        (
            {"services_range": "services"},
            "ip_allocation_policy",
            {"use_ip_aliases": True, "services_secondary_range_name": "services"},
        ),
        (
            {"private_nodes": True},
            "network_config",
            {"datapath_provider": "ADVANCED_DATAPATH", "default_enable_private_nodes": True},
        ),
        (
            {"setup": "tcpx"},
            "network_config",
            {"datapath_provider": "ADVANCED_DATAPATH", "enable_multi_networking": True},
        ),
        ({"setup": "gib"}, "network_config", {"datapath_provider": "ADVANCED_DATAPATH"}),
        (
            {"allow_from": ("192.0.2.0/24", "198.51.100.7/32")},
            "control_plane_endpoints_config",
            {
                "dns_endpoint_config": {"allow_external_traffic": False},
                "ip_endpoints_config": {
                    "enabled": True,
                    "enable_public_endpoint": True,
                    "authorized_networks_config": {
                        "enabled": True,
                        "cidr_blocks": [{"cidr_block": "192.0.2.0/24"}, {"cidr_block": "198.51.100.7/32"}],
                    },
                },
            },
        ),
    ],
)
def test_an_option_changes_its_part_of_the_cluster_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], key: str, value: object
) -> None:
    monkeypatch.setattr("providers.gke.resources.time", SimpleNamespace(time=lambda: 0.0))
    plain, request = make_plane().request(), make_plane(**options).request()
    assert request.pop(key) == value
    for document in (plain, request):
        for label in ("resource_labels", "node_pools"):  # a fast network is also a label
            document.pop(label)
    assert request == {name: part for name, part in plain.items() if name != key}


def test_secure_boot_and_a_service_account_apply_to_the_system_machines() -> None:
    (pool,) = make_plane(secure_boot=True, service_account="me@x").request()["node_pools"]
    shielded = {"enable_secure_boot": True, "enable_integrity_monitoring": True}
    assert (pool["config"]["shielded_instance_config"], pool["config"]["service_account"]) == (shielded, "me@x")


def test_a_regional_cluster_has_its_system_machines_in_the_first_zone_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def zone_with(self: Compute, region: str, machine: Machine) -> str:
        asked.append((region, machine.name))
        return f"{region}-c"

    monkeypatch.setattr(api, "open_session", SimpleNamespace)
    monkeypatch.setattr(Compute, "zone_with", zone_with)
    plane = make_plane(FakeGke("us-east4"))
    assert plane.request()["locations"] == ["us-east4-c"]
    assert asked == [("us-east4", "e2-standard-2")]
    given = make_plane(FakeGke("us-east4"), worker_zone=("us-east4-a", "us-east4-b"))
    assert given.request()["locations"] == ["us-east4-a"]
    assert given.zones(Machine("n1-standard-4")) == ["us-east4-a", "us-east4-b"]
    assert make_plane(worker_zone=("europe-west1-c",)).request()["locations"] == ["europe-west1-b"]


@pytest.mark.parametrize(
    ("name", "busy", "deleting", "broken"),
    [
        ("PROVISIONING", True, False, False),
        ("RECONCILING", True, False, False),
        ("RUNNING", False, False, False),
        ("DEGRADED", False, False, False),
        ("STOPPING", False, True, False),
        ("ERROR", False, False, True),
    ],
)
def test_the_state_of_a_cluster(name: str, busy: bool, deleting: bool, broken: bool) -> None:
    """The states of `Cluster.Status`: DEGRADED still serves, and only ERROR never will."""
    network = SimpleNamespace(enable_multi_networking=False)
    found = state(name, resource_labels=TAGS, network_config=network)
    status = make_plane(FakeGke(get_cluster=found)).find()
    assert status is not None
    assert (status.ours, bool(status.busy), status.deleting, bool(status.broken)) == (True, busy, deleting, broken)
    assert status.differs is None


def test_a_cluster_of_someone_else_or_without_the_fast_network_is_told_apart() -> None:
    network = SimpleNamespace(enable_multi_networking=False)
    found = state("RUNNING", resource_labels={"mlbench-cluster": "demo-3"}, network_config=network)
    status = make_plane(FakeGke(get_cluster=found), "tcpxo").find()
    assert status is not None
    assert not status.ours
    assert status.differs == "it was created without --fast-network, which cannot be added"
    network.enable_multi_networking = True
    again = make_plane(FakeGke(get_cluster=found), "tcpxo").find()
    assert again is not None
    assert again.differs is None


def test_an_absent_cluster_is_none_when_looked_for_and_an_error_when_needed() -> None:
    plane = make_plane(FakeGke(get_cluster=NotFoundError("gone"), delete_cluster=NotFoundError("gone")))
    assert plane.find() is None
    plane.delete()
    with pytest.raises(NotFoundError, match='no GKE cluster "demo-2"'):
        plane.require_raw()


# --- operations -----------------------------------------------------------------------------------------------------


def operation(name: str, code: int = 0, message: str = "", detail: str = "", codes: tuple[str, ...] = ()) -> Any:
    conditions = [SimpleNamespace(code=SimpleNamespace(name=each)) for each in codes]
    return SimpleNamespace(
        status=SimpleNamespace(name=name),
        error=SimpleNamespace(code=code, message=message),
        status_message="",
        detail=detail,
        cluster_conditions=conditions,
        nodepool_conditions=[],
    )


@pytest.mark.parametrize(
    ("cluster", "running", "is_ready", "detail"),
    [
        ("PROVISIONING", operation("RUNNING", detail="7 of 9"), False, "7 of 9"),
        ("RUNNING", operation("RUNNING"), False, "it is RUNNING"),
        ("PROVISIONING", operation("DONE"), False, "it is PROVISIONING"),
        ("RUNNING", operation("DONE"), True, "it is RUNNING"),
        ("DEGRADED", operation("DONE"), True, "it is DEGRADED"),
    ],
)
def test_a_cluster_is_ready_when_its_operation_is_done_and_it_runs(
    cluster: str, running: Any, is_ready: bool, detail: str
) -> None:
    gke = FakeGke(get_cluster=state(cluster), get_operation=running)
    plane = make_plane(gke)
    plane.create()
    progress = plane.poll()
    assert (progress.ready, progress.reason) == (is_ready, detail)
    path = "projects/demo-project/locations/europe-west1-b"
    method, request = gke.calls[0]
    assert (method, request["parent"], request["cluster"]["name"]) == ("create_cluster", path, "demo-2")
    assert gke.calls[1:] == [
        ("get_cluster", {"name": f"{path}/clusters/demo-2"}),
        ("get_operation", {"name": f"{path}/operations/operation-1"}),
    ]


def test_a_cluster_that_another_process_creates_is_ready_by_its_state_alone() -> None:
    gke = FakeGke(get_cluster=state("RUNNING"))
    assert make_plane(gke).poll().ready
    assert [method for method, _ in gke.calls] == ["get_cluster"]


@pytest.mark.parametrize(
    ("failed", "kind", "says"),
    [
        (operation("DONE", 8, "sorry", codes=("GCE_STOCKOUT",)), CapacityError, '"sorry"'),
        (operation("DONE", 8, "Quota exceeded"), CapacityError, '"Quota exceeded"'),
        (operation("DONE", 13, "broken disk"), MlbenchError, 'was not made: "broken disk"'),
        (operation("DONE", 13), MlbenchError, '"no reason given"'),
    ],
)
def test_a_failed_operation_is_a_lack_of_capacity_or_says_why(failed: Any, kind: type[MlbenchError], says: str) -> None:
    plane = make_plane(FakeGke(get_cluster=state("PROVISIONING"), get_operation=failed))
    plane.operation = "operation-1"
    with pytest.raises(MlbenchError) as caught:
        plane.poll()
    assert type(caught.value) is kind
    assert says in caught.value.message


def test_a_failed_cluster_reports_its_conditions() -> None:
    condition = SimpleNamespace(code=SimpleNamespace(name="UNKNOWN"), message="no addresses")
    plane = make_plane(FakeGke(get_cluster=state("ERROR", conditions=[condition])))
    with pytest.raises(MlbenchError, match='"UNKNOWN: no addresses"'):
        plane.poll()
    with pytest.raises(NotFoundError, match="disappeared while it was being made"):
        make_plane(FakeGke(get_cluster=NotFoundError("gone"))).poll()


# --- the workers ----------------------------------------------------------------------------------------------------

CONFIG = {
    "machine_type": "n1-standard-4",
    "image_type": "COS_CONTAINERD",
    "oauth_scopes": ["https://www.googleapis.com/auth/cloud-platform"],
    "gvnic": {"enabled": True},
    "resource_labels": TAGS,
    "workload_metadata_config": {"mode": "GKE_METADATA"},
    "disk_type": "pd-balanced",
    "disk_size_gb": 100,
    "spot": False,
    "flex_start": False,
    "labels": {"mlbench-role": "worker"},
}


def test_the_request_of_a_pool_without_gpus() -> None:
    """The keys are those of GKE's API reference of `NodePool`."""
    assert make_pool(Machine("n1-standard-4"), 3).request() == {
        "name": "workers",
        "initial_node_count": 3,
        "locations": ["europe-west1-b"],
        "config": CONFIG,
        "management": {"auto_repair": True, "auto_upgrade": True},
    }


@pytest.mark.parametrize(("driver", "version"), [("latest", "LATEST"), ("default", "DEFAULT")])
def test_a_pool_with_gpus_has_their_driver_and_a_taint(driver: str, version: str) -> None:
    config = make_pool(Machine("n1-standard-8", "nvidia-tesla-t4", 2), gpu_driver=driver, spot=True).request()["config"]
    assert config == {
        **CONFIG,
        "machine_type": "n1-standard-8",
        "spot": True,
        "accelerators": [
            {
                "accelerator_type": "nvidia-tesla-t4",
                "accelerator_count": 2,
                "gpu_driver_installation_config": {"gpu_driver_version": version},
            }
        ],
        "taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}],
    }


def test_flex_start_machines_start_with_the_pods_and_all_at_once() -> None:
    request = make_pool(Machine("n1-standard-4"), 4, flex_start=True).request()
    assert request == {
        "name": "workers",
        "initial_node_count": 0,
        "locations": ["europe-west1-b"],
        "config": {
            **CONFIG,
            "flex_start": True,
            "reservation_affinity": {"consume_reservation_type": "NO_RESERVATION"},
        },
        "management": {"auto_repair": False, "auto_upgrade": True},
        "autoscaling": {"enabled": True, "total_max_node_count": 4, "location_policy": "ANY"},
        "queued_provisioning": {"enabled": True},
    }
    assert "queued_provisioning" not in make_pool(Machine("n1-standard-4"), 1, flex_start=True).request()


def test_workers_of_two_zones_are_counted_for_each_zone() -> None:
    request = make_pool(Machine("n1-standard-4"), 6, worker_zone=("a-b1-b", "a-b1-c")).request()
    assert (request["initial_node_count"], request["locations"]) == (3, ["a-b1-b", "a-b1-c"])


def test_placement_reservation_and_disk_of_a_pool() -> None:
    request = make_pool(
        Machine("c2-standard-4"), compact_placement=True, reservation="mine", disk_size=200, disk_type="pd-ssd"
    ).request()
    assert request["placement_policy"] == {"type_": "COMPACT"}
    assert request["config"]["reservation_affinity"] == {
        "consume_reservation_type": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": ["mine"],
    }
    assert (request["config"]["disk_size_gb"], request["config"]["disk_type"]) == (200, "pd-ssd")


def test_the_networks_of_a_pool_with_fast_cards() -> None:
    tcpx = make_pool(Machine("a3-highgpu-8g", "nvidia-h100-80gb", 8), setup="tcpx").request()
    names = [f"mlbench-demo-2-net{number}" for number in (1, 2, 3, 4)]
    assert tcpx["network_config"] == {
        "additional_node_network_configs": [{"network": name, "subnetwork": name} for name in names]
    }
    assert tcpx["config"]["labels"] == {"mlbench-role": "worker"}
    rdma = make_pool(Machine("a4-highgpu-8g", "nvidia-b200", 8), setup="gib").request()
    assert rdma["network_config"] == {"accelerator_network_profile": "auto"}
    assert rdma["config"]["labels"] == {
        "mlbench-role": "worker",
        "cloud.google.com/gke-networking-dra-driver": "true",
    }


def found_pool(machine: str = "n1-standard-8", gpu: str = "", gpus: int = 0, spot: bool = False, fast: str = "") -> Any:
    accelerators = [SimpleNamespace(accelerator_type=gpu, accelerator_count=gpus)] if gpu else []
    config = SimpleNamespace(machine_type=machine, accelerators=accelerators, spot=spot)
    networks = SimpleNamespace(additional_node_network_configs=[], accelerator_network_profile=fast)
    return state("RUNNING", config=config, network_config=networks)


@pytest.mark.parametrize(
    ("found", "differs"),
    [
        (found_pool(gpu="nvidia-tesla-t4", gpus=1), None),
        (found_pool("n1-standard-4", "nvidia-tesla-t4", 1), "machine type n1-standard-4 instead of n1-standard-8"),
        (found_pool(), "GPU  instead of nvidia-tesla-t4, number of GPUs 0 instead of 1"),
        (found_pool(gpu="nvidia-tesla-t4", gpus=2), "number of GPUs 2 instead of 1"),
        (found_pool(gpu="nvidia-tesla-t4", gpus=1, spot=True), "spot True instead of False"),
        (found_pool(gpu="nvidia-tesla-t4", gpus=1, fast="auto"), "fast network True instead of False"),
    ],
)
def test_a_pool_that_is_not_as_requested_says_how(found: Any, differs: str | None) -> None:
    plane = make_plane(FakeGke(get_node_pool=found))
    status = WorkerPool(plane, Machine("n1-standard-8", "nvidia-tesla-t4", 1), 2).find()
    assert status is not None
    assert (status.differs, status.deleting, status.broken) == (differs, False, None)


def test_a_pool_whose_creation_failed_is_broken_and_not_compared() -> None:
    for name in ("ERROR", "RUNNING_WITH_ERROR"):
        plane = make_plane(FakeGke(get_node_pool=state(name)))
        status = WorkerPool(plane, Machine("n1-standard-8"), 2).find()
        assert status is not None
        assert (status.broken, status.differs) == (f"it is in the state {name}", None)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([("worker n1", 4, 0.5), ("GPU t4", 4, 1.5), ("control plane", 1, 9.0)], "2.00 USD/h"),
        ([("worker n1", 4, 0.5), ("GPU t4", 4, None)], "money (their price is not known)"),
        ([("control plane", 1, 9.0)], "money (their price is not known)"),
    ],
)
def test_running_machines_cost_their_share_of_workers_and_gpus(
    lines: list[tuple[str, int, float | None]], says: str
) -> None:
    plan = {"lines": [{"what": what, "count": count, "price_per_hour": price} for what, count, price in lines]}
    plane = ControlPlane(Cluster("demo-2", "gke", details={"plan": plan}), FakeGke(), GkeOptions())
    pool = WorkerPool(plane, Machine("n1-standard-4"), 4)
    assert pool._price(1) == says


def test_a_pool_is_resized_by_the_number_of_machines_in_each_zone() -> None:
    gke = FakeGke(get_node_pool=SimpleNamespace(locations=["a", "b"]))
    pool = WorkerPool(make_plane(gke), Machine("n1-standard-4"), 2)
    size = PoolSize(pool, 6)
    size.create()
    assert gke.calls[-1] == ("set_node_pool_size", {"name": pool.path, "node_count": 3})
    assert size.operation == "operation-1"
    with pytest.raises(UsageError, match="5 workers cannot be shared evenly by the 2 zones"):
        PoolSize(pool, 5).create()
    PoolSize(pool, 0).create()
    assert gke.calls[-1][1]["node_count"] == 0


# --- networks -------------------------------------------------------------------------------------------------------


class FakeCompute:
    """Records changes, and gives the answers of the test by the path."""

    def __init__(self, answers: Mapping[str, Any], done: bool = True) -> None:
        self.answers = answers
        self.done = done
        self.changes: list[tuple[str, str, Any]] = []

    def get(self, path: str) -> Any:
        if path not in self.answers:
            raise NotFoundError(path)
        return self.answers[path]

    def change(self, method: str, path: str, body: Any = None) -> str:
        self.changes.append((method, path, body))
        return f"/operations/{len(self.changes)}"

    def is_done(self, operation: str) -> bool:
        return self.done


def test_the_parts_of_eight_fast_networks_have_ranges_that_do_not_overlap() -> None:
    """Eight subnetworks of 8,192 addresses fill 192.168.0.0/16."""
    parts = list_networks(make_plane(None, "tcpxo"), "tcpxo")
    subnetworks = [part.body() for part in parts[1::3]]
    assert [part["ipCidrRange"] for part in subnetworks] == [
        f"192.168.{third}.0/19" for third in (0, 32, 64, 96, 128, 160, 192, 224)
    ]
    assert [part.kind for part in parts[:3]] == ["fast network", "fast subnetwork", "fast network's firewall rule"]
    assert len(parts) == 24
    assert list_networks(make_plane(None, "gib"), "gib") == []


def test_the_requests_of_a_network_its_subnetwork_and_its_firewall_rule() -> None:
    compute = FakeCompute({})
    parts = list_networks(make_plane(None, "tcpx"), "tcpx")[:3]
    for part in parts:
        part.open_compute = lambda: compute  # type: ignore[assignment, return-value]
        part.create()
    name = "mlbench-demo-2-net1"
    url = f"https://www.googleapis.com/compute/v1/projects/demo-project/global/networks/{name}"
    marks = "mlbench-cluster=demo-2 mlbench-fabric=tcpx mlbench-location=europe-west1-b"
    common = {"name": name, "description": marks}
    allowed = [{"IPProtocol": protocol} for protocol in ("tcp", "udp", "icmp")]
    network = {"autoCreateSubnetworks": False, "mtu": 8244, "routingConfig": {"routingMode": "REGIONAL"}}
    rule = {"network": url, "sourceRanges": ["192.168.0.0/16"], "allowed": allowed, "direction": "INGRESS"}
    assert compute.changes == [
        ("POST", "/global/networks", {**common, **network}),
        ("POST", "/regions/europe-west1/subnetworks", {**common, "network": url, "ipCidrRange": "192.168.0.0/19"}),
        ("POST", "/global/firewalls", {**common, **rule}),
    ]


def test_a_network_is_ready_when_its_operation_is_done_and_deleting_until_the_other_is() -> None:
    (network, *_) = list_networks(make_plane(None, "tcpx"), "tcpx")
    compute = FakeCompute({network.path: {"description": "mlbench-cluster=demo-2"}}, done=False)
    network.open_compute = lambda: compute  # type: ignore[assignment, return-value]
    network.create()
    assert not network.poll().ready
    compute.done = True
    assert network.poll().ready
    compute.answers = {**compute.answers, "/global/firewalls?filter=" + FILTER: {}}
    network.delete()
    compute.done = False
    for _ in range(2):
        status = network.find()
        assert status is not None
        assert status.deleting
    compute.done = True
    status = network.find()
    assert status is not None
    assert (status.deleting, status.ours) == (False, True)


FILTER = "network%20eq%20%22.%2A/networks/mlbench-demo-2-net1%22"


def test_a_network_is_deleted_after_the_firewall_rules_of_others() -> None:
    (network, *_) = list_networks(make_plane(None, "tcpx"), "tcpx")
    compute = FakeCompute({"/global/firewalls?filter=" + FILTER: {"items": [{"name": "gke-1"}, {"name": "gke-2"}]}})
    network.open_compute = lambda: compute  # type: ignore[assignment, return-value]
    with pytest.raises(BusyError, match="firewall rules: gke-1, gke-2"):
        network.delete()
    assert compute.changes == [("DELETE", f"/global/firewalls/{name}", None) for name in ("gke-1", "gke-2")]


@pytest.mark.parametrize(
    ("description", "marks"),
    [
        (None, {}),
        ("made by hand", {}),
        ("mlbench-cluster=a team=b mlbench-kept", {"mlbench-cluster": "a"}),
        ("mlbench-a=1 mlbench-b=", {"mlbench-a": "1", "mlbench-b": ""}),
    ],
)
def test_marks_are_read_from_a_description(description: str | None, marks: dict[str, str]) -> None:
    assert read_marks({"description": description}) == marks


def test_only_networks_with_the_name_of_a_cluster_are_mlbenchs(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [
        {"description": "mlbench-cluster=a", "creationTimestamp": "2026-01-01T00:00:00Z"},
        {"description": "mlbench-kept=a"},
    ]
    monkeypatch.setattr(api, "open_session", SimpleNamespace)
    monkeypatch.setattr(Compute, "get", lambda self, path: {"items": items})
    (mark,) = find_marks("demo-project")
    assert (mark.tags, mark.created) == ({"mlbench-cluster": "a"}, "2026-01-01T00:00:00Z")


@pytest.mark.parametrize(("kind", "count"), [("tcpx", 4), ("tcpxo", 8), ("gib", 0), (None, 0)])
def test_one_network_for_each_card(kind: str | None, count: int) -> None:
    assert count_networks(kind) == count
    assert name_networks("x", kind) == [f"mlbench-x-net{number}" for number in range(1, count + 1)]


def test_the_record_says_which_fast_network_is_there_and_whether_it_is_set_up() -> None:
    assert fabric_facts("a3-megagpu-8g", None) == {"name": "GPUDirect-TCPXO", "gbits": 1600}
    assert fabric_facts("a3-megagpu-8g", "tcpxo")["setup"] == "tcpxo"
    assert fabric_facts("n1-standard-4", None) == fabric_facts(None, None) == {}
    assert configure_pool("x", "gib")[0] == {"accelerator_network_profile": "auto"}


# --- Compute Engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Compute:
    """A client whose answers the test gives."""
    monkeypatch.setattr(api, "open_session", SimpleNamespace)
    return Compute("demo-project")


def answer(compute: Compute, answers: Mapping[str, Any]) -> None:
    compute.get = FakeCompute(answers).get  # type: ignore[method-assign]


N1, L4 = "/zones/z/machineTypes/n1-standard-8", "/zones/z/acceleratorTypes/nvidia-tesla-t4"


def test_an_offer_is_the_machine_and_for_n1_also_the_gpu(compute: Compute) -> None:
    machine = Machine("n1-standard-8", "nvidia-tesla-t4", 1)
    answer(compute, {N1: {"guestCpus": 8}, L4: {}, "/zones/z": {}})
    assert compute.check_offer("z", machine) == 8
    answer(compute, {N1: {"guestCpus": 8}, "/zones/z": {}})
    assert compute.check_offer("z", Machine("n1-standard-8")) == 8
    with pytest.raises(UsageError) as caught:
        compute.check_offer("z", machine)
    assert "gcloud compute accelerator-types list" in str(caught.value.hint)
    answer(compute, {"/zones/z": {}})
    with pytest.raises(UsageError, match="The zone z has no n1-standard-8") as caught:
        compute.check_offer("z", machine)
    assert "machine-types list --filter=name=n1-standard-8 --project demo-project" in str(caught.value.hint)
    answer(compute, {})
    with pytest.raises(UsageError, match='no zone "z"'):
        compute.check_offer("z", machine)


def test_built_in_gpus_are_counted_and_attached_ones_are_not(compute: Compute) -> None:
    listed = [{"guestAcceleratorType": "nvidia-gb300", "guestAcceleratorCount": 4}, {"guestAcceleratorCount": 2}]
    answer(compute, {"/zones/z/machineTypes/a4x-maxgpu-4g-metal": {"accelerators": listed}, N1: {}})
    assert compute.find_gpus("z", Machine("a4x-maxgpu-4g-metal")) == ("nvidia-gb300", 6)
    assert compute.find_gpus("z", Machine("n1-standard-8", "nvidia-tesla-t4", 1)) is None
    assert compute.find_gpus("z", Machine("n1-standard-8")) == (None, 0)


def test_the_first_zone_of_a_region_that_has_the_machine(compute: Compute) -> None:
    urls = [f"https://www.googleapis.com/compute/v1/projects/p/zones/r-{letter}" for letter in "cab"]
    zones: dict[str, Any] = {f"/zones/r-{letter}": {} for letter in "abc"}
    machines: dict[str, Any] = {f"/zones/r-{letter}/machineTypes/m1": {} for letter in "bc"}
    answer(compute, {"/regions/r": {"zones": urls}, **zones, **machines})
    assert compute.zone_with("r", Machine("m1")) == "r-b"
    with pytest.raises(UsageError, match="No zone of r has m2"):
        compute.zone_with("r", Machine("m2"))
    with pytest.raises(UsageError, match='no region "other"'):
        compute.zone_with("other", Machine("m1"))


def test_gpus_are_listed_by_zone_and_only_known_ones(compute: Compute) -> None:
    items = [{"name": "nvidia-l4"}, {"name": "ct5p"}, {"name": "nvidia-tesla-t4"}]
    answer(compute, {"/zones/us-east4-c": {}, "/zones/us-east4-c/acceleratorTypes": {"items": items}})
    assert compute.gpus("us-east4-c") == ["nvidia-tesla-t4", "nvidia-l4"]
    with pytest.raises(UsageError, match="us-east4 is a region"):
        compute.gpus("us-east4")
    with pytest.raises(UsageError, match='no zone "us-east4-x"'):
        compute.gpus("us-east4-x")


@pytest.mark.parametrize(
    ("quota", "needed"),
    [
        ("N1_CPUS", 8),  # two workers with 4 vCPUs
        ("CPUS", 2),  # the system machine's family has no quota
        ("CPUS_ALL_REGIONS", 10),
        ("SSD_TOTAL_GB", 250),
        ("IN_USE_ADDRESSES", 3),
        ("INSTANCES", 3),
        ("NVIDIA_T4_GPUS", 2),
        ("GPUS_ALL_REGIONS", 2),
        ("NETWORKS", 8),
    ],
)
def test_each_quota_that_a_cluster_needs_is_compared_with_what_is_left(
    compute: Compute, quota: str, needed: int
) -> None:
    demands = [
        Demand(Machine("e2-standard-2"), 1, 50, "pd-balanced"),
        Demand(Machine("n1-standard-4", "nvidia-tesla-t4", 1), 2, 100, "pd-balanced"),
    ]
    names = ("N1_CPUS", "CPUS", "CPUS_ALL_REGIONS", "SSD_TOTAL_GB", "IN_USE_ADDRESSES", "INSTANCES")
    limits = dict.fromkeys((*names, "NVIDIA_T4_GPUS", "GPUS_ALL_REGIONS", "NETWORKS"), 1000.0)

    def check(limit: float) -> list[str]:
        listed = [{"metric": name, "limit": number, "usage": 0.0} for name, number in limits.items() if name != quota]
        own = [{"metric": quota, "limit": limit, "usage": 5.0}]
        answer(compute, {"/regions/r": {"quotas": listed}, "": {"quotas": own}})
        return compute.check_quotas("r", demands, [2, 4], {"NETWORKS": 8}, public_addresses=True)

    assert check(needed + 5.0) == []
    with pytest.raises(CapacityError, match=f"{quota} has {needed - 1} of {needed + 4} left, {needed} needed"):
        check(needed + 4.0)


def test_private_machines_need_no_addresses_and_absent_ones_need_nothing(compute: Compute) -> None:
    listed = [{"metric": name, "limit": 0.0, "usage": 0.0} for name in ("IN_USE_ADDRESSES", "NETWORKS")]
    answer(compute, {"/regions/r": {"quotas": listed}, "": {}})
    demand = Demand(Machine("n1-standard-4"), 2, 100, None)
    assert compute.check_quotas("r", [demand], [4], {"NETWORKS": 0}, public_addresses=False) == []
    with pytest.raises(CapacityError):
        compute.check_quotas("r", [demand], [4], {}, public_addresses=True)
    none = Demand(Machine("n1-standard-4", "nvidia-tesla-t4", 1), 0, 100, None)
    assert compute.check_quotas("r", [none], [4], {}, public_addresses=True) == []


@pytest.mark.parametrize(
    ("purchase", "limits", "says"),
    [
        (Purchase.ON_DEMAND, {"GPU_FAMILY:NVIDIA_H100": 8.0, "GPUS_ALL_REGIONS": 8.0}, None),
        (Purchase.ON_DEMAND, {"NVIDIA_H100_GPUS": 8.0}, None),
        (Purchase.ON_DEMAND, {}, "per GPU family"),
        (Purchase.SPOT, {"PREEMPTIBLE_NVIDIA_H100_GPUS": 8.0}, None),
        (Purchase.SPOT, {}, "No quota of nvidia-h100-80gb is known in r"),
    ],
)
def test_a_gpu_without_a_known_quota_is_a_warning(
    compute: Compute, purchase: Purchase, limits: dict[str, float], says: str | None
) -> None:
    listed = [{"metric": name, "limit": number, "usage": 0.0} for name, number in limits.items()]
    answer(compute, {"/regions/r": {"quotas": listed}, "": {}})
    demand = Demand(Machine("a3-highgpu-8g", "nvidia-h100-80gb", 8), 1, 100, None, purchase)
    warnings = compute.check_quotas("r", [demand], [208], {}, public_addresses=False)
    assert len(warnings) == (says is not None)
    assert says is None or says in warnings[0]


@pytest.mark.parametrize(
    ("gpu", "quota"),
    [
        ("nvidia-tesla-a100", "NVIDIA_A100_GPUS"),
        ("nvidia-a100-80gb", "NVIDIA_A100_80GB_GPUS"),
        ("nvidia-h100-mega-80gb", "NVIDIA_H100_MEGA_GPUS"),
        ("nvidia-h200-141gb", "NVIDIA_H200_GPUS"),
        ("nvidia-b200", "NVIDIA_B200_GPUS"),
        ("nvidia-l4", "NVIDIA_L4_GPUS"),
    ],
)
def test_the_spot_quota_of_a_gpu_has_the_name_of_compute_engine(compute: Compute, gpu: str, quota: str) -> None:
    """The metrics of Compute Engine's page on GPU quotas."""
    answer(
        compute, {"/regions/r": {"quotas": [{"metric": f"PREEMPTIBLE_{quota}", "limit": 7.0, "usage": 0.0}]}, "": {}}
    )
    demand = Demand(Machine("x", gpu, 8), 1, 100, None, Purchase.SPOT)
    with pytest.raises(CapacityError, match=f"PREEMPTIBLE_{quota} has 7 of 7 left, 8 needed"):
        compute.check_quotas("r", [demand], [0], {}, public_addresses=False)


def test_a_family_has_its_own_cpu_quota() -> None:
    assert cpu_quota_names("c2d-standard-4") == ("C2D_CPUS", "CPUS")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", BusyError),
        ("RESOURCE_NOT_READY", BusyError),
        ("QUOTA_EXCEEDED", CapacityError),
        ("INTERNAL_ERROR", MlbenchError),
    ],
)
def test_a_failed_operation_of_compute_engine(compute: Compute, code: str, kind: type[MlbenchError]) -> None:
    answer(compute, {"/o": {"status": "DONE", "error": {"errors": [{"code": code, "message": "words"}]}}})
    with pytest.raises(MlbenchError, match='"words"') as caught:
        compute.is_done("/o")
    assert type(caught.value) is kind
    answer(compute, {"/o": {"status": "RUNNING"}, "/p": {"status": "DONE"}})
    assert (compute.is_done("/o"), compute.is_done("/p")) == (False, True)


@pytest.mark.parametrize(
    ("body", "error"), [({"error": {"message": "m"}}, {"message": "m"}), ({"error": "m"}, {}), ([], {})]
)
def test_an_error_that_is_not_googles_is_empty(body: Any, error: dict[str, str]) -> None:
    assert read_error(SimpleNamespace(json=lambda: body)) == error


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mine", ReservationName("mine")),
        ("projects/other-project/reservations/mine", ReservationName("mine", "other-project")),
        ("mine/reservationBlocks/b1", ReservationName("mine", None, "b1")),
        ("a" * 63, ReservationName("a" * 63)),
    ],
)
def test_the_name_of_a_reservation(text: str, name: ReservationName) -> None:
    assert parse_reservation(text) == name


@pytest.mark.parametrize("text", ["", "Mine", "mine-", "1mine", "a" * 64, "projects/other-project/mine", "mine/b1"])
def test_names_that_no_reservation_has(text: str) -> None:
    """RFC 1035 labels, as Compute Engine requires them."""
    with pytest.raises(UsageError, match="is not the name of a reservation"):
        parse_reservation(text)


def test_what_a_reservation_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {"specificReservation": {"instanceProperties": {"machineType": "a4-highgpu-8g"}}}
    blocks = {"/zones/z/reservations/mine/reservationBlocks/b1": {"resource": {"count": 3, "inUseCount": 2}}}
    monkeypatch.setattr(api, "open_session", SimpleNamespace)
    fake = FakeCompute({"/zones/z/reservations/mine": told, **blocks})
    monkeypatch.setattr(Compute, "get", lambda self, path: fake.get(path))
    right, wrong = Machine("a4-highgpu-8g"), Machine("a3-ultragpu-8g")
    (warning,) = check_reservation(ReservationName("mine"), "p", "z", right, 9)
    assert "does not report how many machines the reservation mine has left" in warning
    with pytest.raises(UsageError, match="is for a4-highgpu-8g, not a3-ultragpu-8g"):
        check_reservation(ReservationName("mine"), "p", "z", wrong, 1)
    assert check_reservation(ReservationName("mine", None, "b1"), "p", "z", right, 1) == []
    with pytest.raises(CapacityError) as caught:
        check_reservation(ReservationName("mine", None, "b1"), "p", "z", right, 2)
    assert caught.value.details == {"reason": "reservation", "left": 1, "needed": 2}
    with pytest.raises(UsageError, match="no block b2 of the reservation mine in z"):
        check_reservation(ReservationName("mine", None, "b2"), "p", "z", right, 1)
    with pytest.raises(UsageError, match="no reservation other in z") as missing:
        check_reservation(ReservationName("other", "host"), "p", "z", right, 1)
    assert "--project host" in str(missing.value.hint)


# --- prices ---------------------------------------------------------------------------------------------------------


def sku(description: str, usage: str = "OnDemand", units: str = "0", nanos: int = 500_000_000) -> dict[str, Any]:
    free, paid = {"unitPrice": {"units": "0", "nanos": 0}}, {"unitPrice": {"units": units, "nanos": nanos}}
    old = {"pricingExpression": {"tieredRates": [{"unitPrice": {"units": "99"}}]}}
    prices = [old, {"pricingExpression": {"tieredRates": [free, paid]}}]
    return {
        "description": description,
        "category": {"usageType": usage},
        "serviceRegions": ["us-east4"],
        "pricingInfo": prices,
    }


@pytest.mark.parametrize(
    ("item", "found"),
    [
        (sku("N1 Predefined Instance Core running in Americas"), ("N1 Predefined Instance Core", "on-demand", 0.5)),
        (sku("Nvidia L4 GPU running in Iowa", units="2"), ("Nvidia L4", "on-demand", 2.5)),
        (sku("Spot Preemptible E2 Instance Ram running in X", "Preemptible"), ("E2 Instance Ram", "spot", 0.5)),
        (sku("Nvidia L4 GPU attached to Spot Preemptible VMs running in X", "Preemptible"), ("Nvidia L4", "spot", 0.5)),
        (sku("N1 Predefined Instance Core", "Commit1Yr"), None),
        (sku("Commitment v1: Cpu in Americas"), None),
        (sku("Nvidia H100 80GB GPU attached to DWS Defined Duration VMs"), None),
        (sku("Licensing", nanos=0), None),
    ],
)
def test_the_catalogs_items_are_read(item: dict[str, Any], found: tuple[str, str, float] | None) -> None:
    skus = [(each.name, each.way, each.price) for each in parse_skus([item])]
    assert skus == ([found] if found else [])


@pytest.mark.parametrize(
    ("machine", "parts", "price"),
    [
        ("e2-standard-4", {"E2 Instance Core": 1.0, "E2 Instance Ram": 0.1}, 4 + 16 * 0.1),
        ("g2-standard-8", {"G2 Instance Core": 1.0, "G2 Instance Ram": 0.1, "Nvidia L4": 7.0}, 8 + 32 * 0.1 + 7),
        # Google's table of accelerator-optimized machines: 96 vCPUs, 680 GB, 8 GPUs.
        ("a2-highgpu-8g", {"A2 Instance Core": 1.0, "A2 Instance Ram": 0.1, "Nvidia Tesla A100": 7.0}, 96 + 68 + 56),
        # 96 vCPUs, 1,360 GB, 16 GPUs.
        ("a2-megagpu-16g", {"A2 Instance Core": 1.0, "A2 Instance Ram": 0.1, "Nvidia Tesla A100": 7.0}, 96 + 136 + 112),
        # 48 vCPUs, 680 GB, 4 GPUs.
        (
            "a2-ultragpu-4g",
            {"A2 Instance Core": 1.0, "A2 Instance Ram": 0.1, "Nvidia Tesla A100 80GB": 7.0},
            48 + 68 + 28,
        ),
        # 208 vCPUs, 1,872 GB, 8 GPUs.
        ("a3-highgpu-8g", {"A3 Instance Core": 1.0, "A3 Instance Ram": 0.1, "Nvidia H100 80GB": 7.0}, 208 + 187.2 + 56),
        ("a3-highgpu-8g", {"A3 Instance Core": 1.0, "A3 Instance Ram": 0.1}, None),
        ("a3-highgpu-8g", {"A3 Instance Core": 1.0, "Nvidia H100 80GB": 7.0}, None),
        ("a4-highgpu-8g", {"A4 Instance Core": 1.0, "A4 Instance Ram": 0.1}, None),
        ("nvidia-tesla-t4", {"Nvidia Tesla T4": 0.35}, 0.35),
    ],
)
def test_a_machine_costs_its_vcpus_its_memory_and_its_gpus(
    machine: str, parts: dict[str, float], price: float | None
) -> None:
    assert price_machines(parts).get(machine) == (None if price is None else pytest.approx(price))


def test_a_new_cluster_knows_its_project() -> None:
    cluster = GkeProvider().new_cluster("demo-2", 2, GkeOptions(project="demo-project"))
    assert (cluster.provider, cluster.details["project"]) == ("gke", "demo-project")
