"""New clusters of each cloud: the record, the options that are refused, and the resources that each option adds."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from mlbench_cli.errors import CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers import aks, eks, gke
from providers.aks import AksProvider
from providers.aks.compute import Offer
from providers.aks.options import AksOptions
from providers.eks import EksProvider
from providers.eks.machines import machine_of
from providers.eks.options import EksOptions
from providers.gke import GkeProvider
from providers.gke.options import GkeOptions

SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"


def names(resources: Any) -> list[str]:
    """The kinds of the resources, in their order."""
    return [type(item).__name__ for item in resources]


# --- GKE ------------------------------------------------------------------------------------------------------------


def new_gke(nodes: int = 2, **options: Any) -> Cluster:
    return GkeProvider().new_cluster("demo-2", nodes, GkeOptions(project="demo", **options))


def test_the_record_of_a_new_cluster_on_gke() -> None:
    found = new_gke(machine_type="g2-standard-8", spot=True, disk_size=50)
    assert found == Cluster(
        "demo-2",
        "gke",
        "creating",
        "",
        {
            "nodes": 2,
            "gpus_per_node": 1,
            "gpu": "nvidia-l4",
            "machine_type": "g2-standard-8",
            "project": "demo",
            "location": "europe-west1-b",
            "options": asdict(GkeOptions(project="demo", machine_type="g2-standard-8", spot=True, disk_size=50)),
            "node_selector": {"mlbench-role": "worker"},
        },
        "demo",
        "europe-west1-b",
    )


FLEX = {"mlbench-role": "worker", "cloud.google.com/gke-flex-start": "true"}
QUEUED = {
    "node_selector": FLEX,
    "tolerations": ["cloud.google.com/gke-queued=true:NoSchedule"],
    "provisioning_class": "queued-provisioning.gke.io",
}


@pytest.mark.parametrize(
    ("nodes", "options", "details"),
    [
        (2, {"machine_type": "g2-standard-8", "flex_start": True}, QUEUED),
        (1, {"machine_type": "g2-standard-8", "flex_start": True}, {"node_selector": FLEX}),
        (
            2,
            {"machine_type": "a3-highgpu-8g", "fast_network": True},
            {"fabric": {"name": "GPUDirect-TCPX", "gbits": 800, "setup": "tcpx"}},
        ),
        (2, {"machine_type": "a3-highgpu-8g"}, {"fabric": {"name": "GPUDirect-TCPX", "gbits": 800}}),
        (2, {"registry": "ghcr.io/me"}, {"registry": "ghcr.io/me"}),
        (
            2,
            {"registry": "auto", "zone": "us-east1-b"},
            {"registry_made": True, "registry": "us-east1-docker.pkg.dev/demo/mlbench-demo-2"},
        ),
        (2, {"region": "us-east1"}, {"location": "us-east1"}),
        (2, {"zones": "us-east1-c,us-east1-b"}, {"location": "us-east1-c"}),
        (2, {"zones": "us-east1-c", "region": "us-east1"}, {"location": "us-east1"}),
        (2, {"zones": "us-east1-c", "zone": "us-east1-b"}, {"location": "us-east1-b"}),
    ],
)
def test_an_option_changes_its_part_of_the_record_on_gke(
    nodes: int, options: dict[str, Any], details: dict[str, Any]
) -> None:
    found = new_gke(nodes, **options).details
    assert {key: found.get(key) for key in details} == details
    optional = {"tolerations", "provisioning_class", "fabric", "registry", "registry_made"}
    assert optional & set(found) == optional & set(details)


def test_the_first_zone_to_try_is_that_of_the_workers() -> None:
    options = new_gke(zones="us-east1-c,us-east1-b", region="us-east1").details["options"]
    assert (options["zone"], options["worker_zone"]) == (None, ("us-east1-c",))
    options = new_gke(zones="us-east1-c,us-east1-b", zone="us-east1-d").details["options"]
    assert (options["zone"], options["worker_zone"]) == ("us-east1-d", ("us-east1-c",))
    cluster = new_gke(zones="us-east1-c,us-east1-b")
    assert GkeProvider().list_zones(cluster) == ("us-east1-c", "us-east1-b")
    moved = GkeProvider().place_workers(cluster, "us-east1-b")
    assert moved.details["options"]["worker_zone"] == ["us-east1-b"]
    assert moved.details["location"] == "us-east1-b"
    assert moved.location == cluster.location


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"zone": "us-east1-b", "region": "us-east1"}, "--region and --zone exclude each other"),
        ({"region": "us-east1-b"}, '--region "us-east1-b" is not a region'),
        ({"zone": "us-east1"}, '--zone "us-east1" is not a zone'),
        ({"worker_zone": ("us-east1",)}, '--worker-zone "us-east1" is not a zone'),
        ({"zones": "us-east1-b,US-east1-c"}, "is not a zone|several regions"),
        ({"zone": "us-east1-b", "worker_zone": ("us-west1-b",)}, "us-west1-b is in another region than us-east1-b"),
        ({"zones": "us-west1-b", "zone": "us-east1-b"}, "us-west1-b is in another region than us-east1-b"),
        ({"zones": "us-east1-b", "worker_zone": ("us-east1-b",)}, "--zones and --worker-zone exclude each other"),
        ({"zone": "us-east1-b", "worker_zone": ("us-east1-b", "us-east1-b")}, "--worker-zone is given twice"),
        ({"disk_size": 9}, "--disk-size 9: from 10 to 65536 GB"),
        ({"disk_size": 65537}, "--disk-size 65537"),
        ({"kubernetes_version": "1.3"}, "is not of the form X.Y"),
        ({"kubernetes_version": "1.34.1-gke"}, "is not of the form X.Y"),
        ({"kubernetes_version": "v1.34"}, "is not of the form X.Y"),
        ({"release_channel": "fast"}, '--release-channel "fast" is not one of rapid, regular, stable, extended'),
        ({"gpu_driver": "580"}, '--gpu-driver "580" is not one of latest, default'),
        ({"gpus_per_node": 0}, "gpus-per-node"),
        ({"allow_from": ("203.0.113.7/8",)}, "--allow-from"),
        ({"tag": ("Team=x",)}, "--tag"),
        ({"tag": ("1team=x",)}, "--tag"),
        ({"tag": ("_team=x",)}, "--tag"),
        ({"tag": (f"{'x' * 64}=x",)}, "--tag"),
        ({"tag": (f"team={'x' * 64}",)}, "--tag"),
        ({"spot": True, "flex_start": True}, "--spot and --flex-start exclude each other"),
        ({"flex_start": True, "reservation": "train"}, "--flex-start and --reservation exclude each other"),
        ({"reservation": "Train"}, "is not the name of a reservation"),
        ({"machine_type": "a3-ultragpu-8g"}, "only as spot, flex-start or from a reservation"),
        ({"machine_type": "g2-standard-8", "fast_network": True}, "g2-standard-8 has no fast network"),
        ({"machine_type": "g2-standard-8", "flex_start": True, "compact_placement": True}, "exclude each other for g2"),
        ({"machine_type": "e2-standard-4", "compact_placement": True}, "not possible with e2-standard-4"),
        ({"machine_type": "n1-standard-4", "compact_placement": True}, "not possible with n1-standard-4"),
        (
            {
                "machine_type": "g2-standard-8",
                "zone": "us-east1-b",
                "worker_zone": ("us-east1-b", "us-east1-c"),
                "compact_placement": True,
            },
            "--compact-placement needs one zone",
        ),
        ({"pods_range": "p"}, "need the --subnetwork that has them"),
        ({"services_range": "s"}, "need the --subnetwork that has them"),
        ({"network": "projects/host/global/networks/n"}, "The project host shares this network"),
        (
            {"subnetwork": "projects/host/regions/r/subnetworks/n", "pods_range": "p"},
            "The project host shares this network",
        ),
        ({"num_cpus": 8}, "vCPUs"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_gke(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        new_gke(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"disk_size": 10},
        {"disk_size": 65536},
        {"kubernetes_version": "1.34"},
        {"kubernetes_version": "1.34.1"},
        {"kubernetes_version": "1.34.1-gke.1829001"},
        {"release_channel": "extended"},
        {"gpu_driver": "default"},
        {"tag": (f"team={'x' * 63}", "empty=", "year=2026", f"{'x' * 63}=_")},
        {"machine_type": "a3-ultragpu-8g", "spot": True},
        {"machine_type": "a3-ultragpu-8g", "flex_start": True},
        {"machine_type": "a3-ultragpu-8g", "reservation": "train"},
        {"machine_type": "a3-ultragpu-8g", "flex_start": True, "compact_placement": True},
        {"machine_type": "g2-standard-8", "compact_placement": True},
        {"network": "projects/demo/global/networks/n"},
        {"network": "n", "subnetwork": "s", "pods_range": "p"},
        {
            "network": "projects/host/global/networks/n",
            "subnetwork": "projects/host/regions/r/subnetworks/s",
            "pods_range": "p",
            "services_range": "s",
        },
        {"num_cpus": 4},
        {"zone": "us-east1-b", "worker_zone": ("us-east1-c", "us-east1-d")},
    ],
)
def test_options_at_their_limits_are_accepted_by_gke(options: dict[str, Any]) -> None:
    assert new_gke(**options).state == "creating"


@pytest.mark.parametrize(
    ("nodes", "zones", "says"),
    [
        (1001, 1, "can have 0 to 1000"),
        (-1, 1, "can have 0 to 1000"),
        (1000, 1, None),
        (0, 2, None),
        (4, 2, None),
        (5, 2, "5 workers cannot be shared evenly by 2 zones"),
    ],
)
def test_workers_are_shared_evenly_by_zones(nodes: int, zones: int, says: str | None) -> None:
    places = ("us-east1-b", "us-east1-c")[:zones]
    if says is None:
        assert new_gke(nodes, zone="us-east1-b", worker_zone=places).details["nodes"] == nodes
        return
    with pytest.raises(UsageError, match=says) as caught:
        new_gke(nodes, zone="us-east1-b", worker_zone=places)
    if zones > 1:
        assert caught.value.hint == "For example: NUM_WORKERS 6"


PLAIN = ["ControlPlane", "WorkerPool", "ReadyMachines"]
ENDING = ["GkeEndIdentity", "GkeEndTimer", "GkeHold"]


@pytest.mark.parametrize(
    ("nodes", "options", "more", "found"),
    [
        (2, {}, {}, PLAIN),
        (0, {}, {}, PLAIN[:2]),
        (2, {"machine_type": "g2-standard-8"}, {}, [*PLAIN, "GpuProbe"]),
        (2, {"machine_type": "g2-standard-8", "probe_image": "none"}, {}, PLAIN),
        (0, {"machine_type": "g2-standard-8"}, {}, PLAIN[:2]),
        (2, {"registry": "auto"}, {}, ["ControlPlane", "ImageRepository", *PLAIN[1:]]),
        (2, {}, {"expires": 5}, [*PLAIN[:2], *ENDING, PLAIN[2]]),
        (0, {}, {"expires": 5}, [*PLAIN[:2], *ENDING[:2]]),
        (2, {"machine_type": "g2-standard-8", "flex_start": True}, {}, PLAIN[:2]),
        (2, {"machine_type": "g2-standard-8", "flex_start": True}, {"expires": 5}, [*PLAIN[:2], *ENDING[:2]]),
        (
            2,
            {"machine_type": "a3-highgpu-8g", "fast_network": True},
            {},
            [
                "ControlPlane",
                *["FastNetwork", "FastSubnetwork", "FastFirewallRule"] * 4,
                *["WorkerPool", "NetworkObjects", "ReadyMachines", "GpuProbe", "NcclInstaller"],
            ],
        ),
        (
            2,
            {"machine_type": "a3-ultragpu-8g", "fast_network": True, "spot": True},
            {},
            [*PLAIN, "GpuProbe", "NcclInstaller"],
        ),
    ],
)
def test_a_cluster_on_gke_consists_of_what_its_options_ask_for(
    nodes: int, options: dict[str, Any], more: dict[str, Any], found: list[str]
) -> None:
    cluster = new_gke(nodes, **options)
    resources = GkeProvider().resources(
        Cluster(cluster.name, "gke", details={**cluster.details, **more}, account="demo")
    )
    assert names(resources) == found
    placed: list[Any] = []
    for item in resources:
        assert all(any(need is other for other in placed) for need in item.needs)
        placed.append(item)


def test_nccls_plugin_is_awaited_on_as_many_workers_as_there_are() -> None:
    spot = {"machine_type": "a3-ultragpu-8g", "fast_network": True}
    (waited,) = [
        item for item in GkeProvider().resources(new_gke(2, spot=True, **spot)) if "Nccl" in type(item).__name__
    ]
    (later,) = [
        item for item in GkeProvider().resources(new_gke(2, flex_start=True, **spot)) if "Nccl" in type(item).__name__
    ]
    assert (waited.count, later.count) == (2, 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("nodes", "details", "found"),
    [
        (3, {}, ["PoolSize", "ReadyMachines"]),
        (0, {}, ["PoolSize"]),
        (3, {"expires": 5}, ["PoolSize", "ReadyMachines"]),
        (3, {"end_problem": "x"}, ["PoolSize", "ReadyMachines"]),
        (3, {"expires": 5, "end_problem": "x"}, ["GkeHold", "PoolSize", "ReadyMachines"]),
        (0, {"expires": 5, "end_problem": "x"}, ["GkeHold", "PoolSize"]),
    ],
)
def test_a_pool_on_gke_is_resized_after_its_hold(nodes: int, details: dict[str, Any], found: list[str]) -> None:
    cluster = new_gke()
    resources = GkeProvider().scale(
        Cluster("demo-2", "gke", details={**cluster.details, **details}, account="demo"), nodes
    )
    assert names(resources) == found
    size = next(item for item in resources if type(item).__name__ == "PoolSize")
    assert list(size.needs) == list(resources[: found.index("PoolSize")])


def test_flex_start_machines_are_not_resized() -> None:
    with pytest.raises(UsageError, match="nothing to scale"):
        GkeProvider().scale(new_gke(machine_type="g2-standard-8", flex_start=True), 3)


@pytest.mark.parametrize(
    ("nodes", "options", "details", "found"),
    [
        (2, {}, {}, ["EndLabel", "GkeEndTimer"]),
        (2, {}, {"end_problem": "x"}, ["EndLabel", "GkeHold"]),
        (0, {}, {"end_problem": "x"}, ["EndLabel"]),
        (2, {"machine_type": "g2-standard-8", "flex_start": True}, {"end_problem": "x"}, ["EndLabel"]),
    ],
)
def test_the_end_of_a_cluster_on_gke_moves_with_its_clock_or_its_hold(
    nodes: int, options: dict[str, Any], details: dict[str, Any], found: list[str]
) -> None:
    cluster = new_gke(nodes, **options)
    moved = Cluster("demo-2", "gke", details={**cluster.details, "expires": 5, **details}, account="demo")
    assert names(GkeProvider().extend(moved)) == found


@pytest.mark.parametrize(
    ("may", "says"),
    [(True, "at the end. Disks"), (None, "at the end, if you are allowed"), (False, "only the workers expire")],
)
def test_the_end_of_a_cluster_on_gke_depends_on_the_policy(
    monkeypatch: pytest.MonkeyPatch, may: bool | None, says: str
) -> None:
    monkeypatch.setattr(gke, "can_bind", lambda found: may)
    assert says in GkeProvider().describe_end(new_gke())


def test_a_project_that_is_not_known_yet_has_a_place_holder() -> None:
    assert GkeProvider().fill_place({"x": 1}) == {"x": 1, "project": "your-project"}
    assert GkeProvider().fill_place({"project": "demo"}) == {"project": "demo"}
    assert AksProvider().fill_place({"x": 1}) == {"x": 1, "subscription": "00000000-0000-0000-0000-000000000000"}
    assert AksProvider().fill_place({"subscription": "s"}) == {"subscription": "s"}


@pytest.mark.parametrize(
    ("cluster", "path"),
    [
        (
            Cluster("a", "gke", details={"project": "p", "location": "l-1"}, account="x", location="y-1"),
            "projects/x/locations/y-1",
        ),
        (Cluster("a", "gke", details={"project": "p", "location": "l-1"}), "projects/p/locations/l-1"),
        (Cluster("a", "gke", details={"project": "p", "options": {"region": "r-1"}}), "projects/p/locations/r-1"),
        (Cluster("a", "gke", details={"project": "p"}), "projects/p/locations/europe-west1-b"),
    ],
)
def test_a_cluster_on_gke_is_looked_for_at_its_own_place_first(cluster: Cluster, path: str) -> None:
    assert gke._gke(cluster).parent == path


class Compute:
    """A zone that tells of its machines, or may not be asked."""

    gpus: Any = ("nvidia-h200-141gb", 8)
    arm = False

    def __init__(self, project: str) -> None:
        assert project == "demo"

    def find_gpus(self, zone: str, machine: Any) -> Any:
        assert zone == "europe-west1-b"
        if isinstance(self.gpus, Exception):
            raise self.gpus
        return self.gpus

    def is_arm(self, zone: str, machine: Any) -> bool:
        return self.arm


def test_google_tells_the_gpus_of_a_new_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gke, "Compute", type("Found", (Compute,), {"arm": True}))
    found = GkeProvider().describe_machines(new_gke(machine_type="a9-highgpu-8g"))
    assert [found.details[key] for key in ("gpu", "gpus_per_node", "arm")] == ["nvidia-h200-141gb", 8, True]


def test_a_missing_right_to_ask_leaves_the_table_and_wrong_credentials_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = CredentialError("no permission", hint="ask for it")
    monkeypatch.setattr(gke, "Compute", type("Denied", (Compute,), {"gpus": denied}))
    found = GkeProvider().describe_machines(new_gke(machine_type="g2-standard-8"))
    assert [found.details.get(key) for key in ("gpu", "gpus_per_node", "arm")] == ["nvidia-l4", 1, None]
    signed_out = CredentialError("expired", hint=gke.api.LOGIN)
    monkeypatch.setattr(gke, "Compute", type("SignedOut", (Compute,), {"gpus": signed_out}))
    with pytest.raises(CredentialError, match="expired"):
        GkeProvider().describe_machines(new_gke(machine_type="g2-standard-8"))


# --- AKS ------------------------------------------------------------------------------------------------------------


def new_aks(nodes: int = 2, **options: Any) -> Cluster:
    return AksProvider().new_cluster("demo-2", nodes, AksOptions(subscription=SUBSCRIPTION, **options))


def test_the_record_of_a_new_cluster_on_aks() -> None:
    found = new_aks(machine_type="nc4as_t4_v3", spot=True)
    options = AksOptions(subscription=SUBSCRIPTION, machine_type="nc4as_t4_v3", spot=True)
    assert found == Cluster(
        "demo-2",
        "aks",
        "creating",
        "",
        {
            "nodes": 2,
            "gpus_per_node": 1,
            "gpu": "t4",
            "machine_type": "Standard_NC4as_T4_v3",
            "subscription": SUBSCRIPTION,
            "location": "eastus",
            "options": asdict(options),
            "node_selector": {"mlbench-role": "worker"},
            "tolerations": ["kubernetes.azure.com/scalesetpriority=spot:NoSchedule"],
        },
        SUBSCRIPTION,
        "eastus",
    )


@pytest.mark.parametrize(
    ("options", "details"),
    [
        ({"zones": "2,1"}, {"location": "eastus-2"}),
        ({"region": "westus2"}, {"location": "westus2"}),
        ({"region": "westus2", "zones": "3"}, {"location": "westus2-3"}),
        (
            {"machine_type": "nd96isr_h100_v5", "slow_network_ok": True},
            {"fabric": {"name": "InfiniBand", "gbits": 3200}},
        ),
        ({"registry": "ghcr.io/me/"}, {"registry": "ghcr.io/me"}),
    ],
)
def test_an_option_changes_its_part_of_the_record_on_aks(options: dict[str, Any], details: dict[str, Any]) -> None:
    found = new_aks(**options)
    assert {key: found.details.get(key) for key in details} == details
    assert found.location == options.get("region", "eastus")
    assert "tolerations" not in found.details
    assert ("fabric" in found.details) == ("fabric" in details)


def test_the_system_machine_of_aks_is_recorded_as_azure_writes_it() -> None:
    assert new_aks(system_machine_type="d4s_v5").details["options"]["system_machine_type"] == "Standard_D4s_v5"


IDENTITY = "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/i"
SUBNET = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/v/subnets/n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"region": "East US"}, '--region "East US" is not a region'),
        ({"region": "abc"}, "is not a region"),
        ({"region": "a" * 41}, "is not a region"),
        ({"disk_size": 29}, "--disk-size 29: from 30 to 2048 GB"),
        ({"disk_size": 2049}, "--disk-size 2049"),
        ({"kubernetes_version": "1.3"}, "is not of the form X.Y or X.Y.Z"),
        ({"kubernetes_version": "1.34."}, "is not of the form X.Y or X.Y.Z"),
        ({"tier": "premium"}, '--tier "premium" is not one of free, standard'),
        ({"subnet": "subnets/n"}, "is not the resource ID of a subnet"),
        ({"identity": SUBNET}, "is not the resource ID of a user-assigned identity"),
        ({"tag": ("a<b=x",)}, "--tag"),
        ({"tag": (f"{'x' * 257}=x",)}, "--tag"),
        ({"system_machine_type": "Standard_B2s"}, "--system-machine-type Standard_B2s"),
        ({"system_machine_type": "Standard_NC4as_T4_v3"}, "--system-machine-type Standard_NC4as_T4_v3"),
        ({"zones": "1,2", "compact_placement": True}, "--compact-placement needs one zone"),
        ({"zones": "4"}, "is not a list of different zones"),
        ({"allow_from": ("x",)}, "--allow-from"),
        ({"gpus_per_node": 65}, "gpus-per-node"),
        ({"num_cpus": 5}, "vCPUs"),
        ({"machine_type": "nd96isr_h100_v5"}, "between 2 machines NCCL would use TCP"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_aks(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        new_aks(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"region": "abcd"},
        {"region": "a" * 40 + "2"},
        {"disk_size": 30},
        {"disk_size": 2048},
        {"kubernetes_version": "1.34"},
        {"kubernetes_version": "1.34.10"},
        {"tier": "standard"},
        {"subnet": SUBNET},
        {"subnet": SUBNET.replace("resourceGroups", "RESOURCEGROUPS")},
        {"identity": IDENTITY.lower()},
        {"tag": (f"{'x' * 256}=x", "Cost Center=1")},
        {"zones": "1", "compact_placement": True},
        {"num_cpus": 4},
    ],
)
def test_options_at_their_limits_are_accepted_by_aks(options: dict[str, Any]) -> None:
    assert new_aks(**options).state == "creating"


def test_one_machine_with_infiniband_needs_no_permission_for_a_slow_network() -> None:
    assert new_aks(1, machine_type="nd96isr_h100_v5").details["nodes"] == 1
    for nodes in (-1, 1001):
        with pytest.raises(UsageError, match="can have 0 to 1000"):
            new_aks(nodes)
    assert new_aks(1000).details["nodes"] == 1000


AKS_PLAIN = ["ResourceGroup", "ControlPlane", "WorkerPool"]


@pytest.mark.parametrize(
    ("nodes", "options", "more", "found"),
    [
        (2, {}, {}, [*AKS_PLAIN, "ReadyMachines"]),
        (0, {}, {}, AKS_PLAIN),
        (2, {"machine_type": "nc4as_t4_v3"}, {}, [*AKS_PLAIN, "DevicePlugin", "ReadyMachines", "GpuProbe"]),
        (2, {"machine_type": "nc4as_t4_v3", "probe_image": "none"}, {}, [*AKS_PLAIN, "DevicePlugin", "ReadyMachines"]),
        (0, {"machine_type": "nc4as_t4_v3"}, {}, [*AKS_PLAIN, "DevicePlugin"]),
        (2, {"registry": "auto"}, {}, [*AKS_PLAIN, "ImageGroup", "ImageRegistry", "ReadyMachines"]),
        (2, {"compact_placement": True}, {}, [*AKS_PLAIN[:2], "Placement", "WorkerPool", "ReadyMachines"]),
        (2, {"subnet": SUBNET}, {}, ["ResourceGroup", "SubnetAccess", *AKS_PLAIN[1:], "ReadyMachines"]),
        (2, {"subnet": SUBNET, "identity": IDENTITY}, {}, [*AKS_PLAIN, "ReadyMachines"]),
        (
            2,
            {},
            {"expires": 5},
            [*AKS_PLAIN, "AksEndIdentity", "AksEndTimer", "AksHold", "ReadyMachines"],
        ),
        (0, {}, {"expires": 5}, [*AKS_PLAIN, "AksEndIdentity", "AksEndTimer"]),
    ],
)
def test_a_cluster_on_aks_consists_of_what_its_options_ask_for(
    nodes: int, options: dict[str, Any], more: dict[str, Any], found: list[str]
) -> None:
    cluster = new_aks(nodes, **options)
    details = {**cluster.details, **more}
    resources = AksProvider().resources(
        Cluster("demo-2", "aks", details=details, account=SUBSCRIPTION, location="eastus")
    )
    assert names(resources) == found
    placed: list[Any] = []
    for item in resources:
        assert all(any(need is other for other in placed) for need in item.needs)
        placed.append(item)
    # The group goes last, and with it nearly everything.
    assert {name for name, item in zip(found, resources, strict=True) if item.goes_with is None} <= {
        *("ResourceGroup", "ControlPlane", "WorkerPool", "Placement", "SubnetAccess", "ImageGroup"),
    }


@pytest.mark.parametrize(
    ("nodes", "details", "found"),
    [
        (3, {}, ["PoolSize", "ReadyMachines"]),
        (0, {}, ["PoolSize"]),
        (3, {"expires": 5}, ["PoolSize", "ReadyMachines"]),
        (3, {"expires": 5, "end_problem": "x"}, ["AksHold", "PoolSize", "ReadyMachines"]),
        (3, {"end_problem": "x"}, ["PoolSize", "ReadyMachines"]),
    ],
)
def test_a_pool_on_aks_is_resized_after_its_hold(nodes: int, details: dict[str, Any], found: list[str]) -> None:
    made = new_aks()
    cluster = Cluster("demo-2", "aks", details={**made.details, **details}, account=SUBSCRIPTION, location="eastus")
    resources = AksProvider().scale(cluster, nodes)
    assert names(resources) == found
    size = next(item for item in resources if type(item).__name__ == "PoolSize")
    assert list(size.needs) == list(resources[: found.index("PoolSize")])


@pytest.mark.parametrize(
    ("nodes", "details", "found"),
    [
        (2, {}, ["EndTags", "AksEndTimer"]),
        (2, {"end_problem": "x"}, ["EndTags", "AksHold"]),
        (0, {"end_problem": "x"}, ["EndTags"]),
    ],
)
def test_the_end_of_a_cluster_on_aks_moves_with_its_clock_or_its_hold(
    nodes: int, details: dict[str, Any], found: list[str]
) -> None:
    made = new_aks(nodes)
    cluster = Cluster("demo-2", "aks", details={**made.details, "expires": 5, **details}, account=SUBSCRIPTION)
    assert names(AksProvider().extend(cluster)) == found


@pytest.mark.parametrize(
    ("may", "says"),
    [
        (True, "load balancers. The registry"),
        (None, "if you are allowed to assign roles"),
        (False, "only the workers expire"),
    ],
)
def test_the_end_of_a_cluster_on_aks_depends_on_roles(
    monkeypatch: pytest.MonkeyPatch, may: bool | None, says: str
) -> None:
    monkeypatch.setattr(aks, "can_assign", lambda azure: may)
    assert says in AksProvider().describe_end(new_aks())


def test_zones_of_azure_are_tried_in_their_order() -> None:
    cluster = new_aks(zones="3,1")
    assert AksProvider().list_zones(cluster) == ("eastus-3", "eastus-1")
    moved = AksProvider().place_workers(cluster, "eastus-1")
    assert (moved.details["location"], moved.location) == ("eastus-1", "eastus")
    assert moved.details["options"] == cluster.details["options"]


@pytest.mark.parametrize(
    ("offer", "facts"),
    [
        (Offer("x", "f", 4, 2, (), True, is_arm=True), ["t4", 2, True]),
        (None, ["t4", 1, False]),
    ],
)
def test_azure_tells_the_gpus_of_a_size(monkeypatch: pytest.MonkeyPatch, offer: Offer | None, facts: list[Any]) -> None:
    monkeypatch.setattr(aks, "find_offer", lambda azure, name: offer)
    found = AksProvider().describe_machines(new_aks(machine_type="nc4as_t4_v3"))
    assert [found.details[key] for key in ("gpu", "gpus_per_node", "arm")] == facts


def test_a_cluster_that_is_gone_is_told_with_the_command_that_removes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise NotFoundError("There is no such cluster.")

    monkeypatch.setattr("providers.aks.resources.ControlPlane.access", missing)
    monkeypatch.setattr("providers.gke.api.Gke.call", missing)
    cases: list[tuple[Any, Cluster]] = [(AksProvider(), new_aks()), (GkeProvider(), new_gke())]
    for provider, cluster in cases:
        with pytest.raises(MlbenchError, match="There is no such cluster") as caught:
            provider.connect(cluster)
        assert caught.value.hint == f"mlbench delete-cluster {cluster.provider} demo-2"


# --- EKS ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _region(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without boto3's list of regions, which takes a while to load."""

    def region_of(asked: str | None, zone: str | None = None) -> str:
        return asked or (zone[:-1] if zone else "eu-west-1")

    monkeypatch.setattr(eks, "region_of", region_of)


def new_eks(nodes: int = 2, **options: Any) -> Cluster:
    return EksProvider().new_cluster("demo-2", nodes, EksOptions(**options))


def with_details(cluster: Cluster, **details: Any) -> Cluster:
    return replace(cluster, details={**cluster.details, **details})


@pytest.mark.usefixtures("_region")
def test_the_record_of_a_new_cluster_on_eks() -> None:
    machine = machine_of("g5.xlarge")
    assert new_eks(machine_type="g5.xlarge") == Cluster(
        "demo-2",
        "eks",
        "creating",
        "",
        {
            "nodes": 2,
            "region": "eu-west-1",
            "location": "eu-west-1",
            "options": asdict(EksOptions(machine_type="g5.xlarge")),
            "node_selector": {"mlbench-role": "worker"},
            "gpus_per_node": 1,
            "gpu": "A10G",
            "machine_type": "g5.xlarge",
            "arm": False,
            "machine": asdict(machine),
        },
        "",
        "eu-west-1",
    )


EFA = "vpc.amazonaws.com/efa"


@pytest.mark.usefixtures("_region")
@pytest.mark.parametrize(
    ("options", "details"),
    [
        ({"zone": "us-east-1b"}, {"location": "us-east-1b", "region": "us-east-1"}),
        ({"zones": "us-east-1b,us-east-1a"}, {"location": "us-east-1b", "region": "us-east-1"}),
        ({"registry": "ghcr.io/me"}, {"registry": "ghcr.io/me"}),
        ({"registry": "auto"}, {"registry_made": True}),
        ({"machine_type": "p4d.24xlarge"}, {"fabric": {"name": "EFA", "gbits": 400}}),
        (
            {"machine_type": "p4d.24xlarge", "efa": True},
            {
                "fabric": {"name": "EFA", "gbits": 400},
                "devices_per_node": {EFA: 4, "hugepages-2Mi": 5 * 2**30},
            },
        ),
        (
            {"machine_type": "p4d.24xlarge", "efa": True, "node_image": "bottlerocket"},
            {"fabric": {"name": "EFA", "gbits": 400}, "devices_per_node": {EFA: 4}},
        ),
    ],
)
def test_an_option_changes_its_part_of_the_record_on_eks(options: dict[str, Any], details: dict[str, Any]) -> None:
    found = new_eks(**options).details
    assert {key: found.get(key) for key in details} == details
    optional = {"registry", "registry_made", "fabric", "devices_per_node"}
    assert optional & set(found) == optional & set(details)


RESERVATION = {"capacity_reservation": "cr-0123abcd", "zone": "eu-west-1a"}
SUBNETS = "subnet-0123abcd,subnet-1234abcd"


@pytest.mark.usefixtures("_region")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"disk_size": 19}, "--disk-size 19: from 20 to 16384 GB"),
        ({"disk_size": 16385}, "--disk-size 16385"),
        ({"kubernetes_version": "1.3"}, "is not of the form X.Y"),
        ({"gpus_per_node": 65}, "gpus-per-node"),
        ({"machine_type": "p5en.48xlarge"}, "AWS does not sell p5en.48xlarge on demand"),
        ({"zones": "eu-west-1a", "zone": "eu-west-1a"}, "--zones and --zone exclude each other"),
        ({"zones": "eu-west-1a", "capacity_reservation": "cr-0123abcd"}, "--zones and --capacity-reservation exclude"),
        ({"zones": ",".join(f"eu-west-1{name}" for name in "abcde")}, "names 5 zones: .* at most 4"),
        ({"zones": "eu-west-1a", "subnets": SUBNETS}, "--zones and --subnets exclude each other"),
        ({**RESERVATION, "capacity_reservation": "cr-0123abc"}, "is not the ID of one"),
        ({**RESERVATION, "capacity_reservation": "cr-0123ABCD"}, "is not the ID of one"),
        ({**RESERVATION, "spot": True}, "--capacity-reservation and --spot exclude"),
        ({**RESERVATION, "placement_group": True}, "--capacity-reservation and --placement-group exclude"),
        ({"capacity_reservation": "cr-0123abcd"}, "--capacity-reservation needs its --zone"),
        ({"admin": ("arn:aws:iam::12:user/me",)}, "is not the ARN of a user or role"),
        ({"admin": ("arn:aws:iam::123456789012:group/us",)}, "is not the ARN of a user or role"),
        ({"permissions_boundary": "arn:aws:iam::123456789012:role/x"}, "is not the ARN of a policy"),
        ({"subnets": "subnet-0123abcd"}, "subnets"),
        ({"tag": ("aws:x=1",)}, "such names are reserved"),
        ({"tag": (f"{'x' * 129}=1",)}, "--tag"),
        ({"node_image": "ubuntu"}, '--node-image "ubuntu" is not one of al2023, bottlerocket'),
        ({"machine_type": "g5.xlarge", "efa": True}, "g5.xlarge has no EFA network interface"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_eks(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        new_eks(**options)


@pytest.mark.usefixtures("_region")
@pytest.mark.parametrize(
    "options",
    [
        {"disk_size": 20},
        {"disk_size": 16384},
        {"kubernetes_version": "1.34"},
        {"machine_type": "p5en.48xlarge", "spot": True},
        {"machine_type": "p5en.48xlarge", **RESERVATION},
        {"zones": "eu-west-1a,eu-west-1b,eu-west-1c,eu-west-1d"},
        {"zone": "eu-west-1a", "capacity_reservation": "cr-0123456789abcdef0"},
        {"admin": ("arn:aws-cn:iam::123456789012:role/path/me", "arn:aws:iam::123456789012:user/me")},
        {"permissions_boundary": "arn:aws:iam::aws:policy/PowerUserAccess"},
        {"permissions_boundary": "arn:aws:iam::123456789012:policy/boundary"},
        {"subnets": SUBNETS, "zone": "eu-west-1a"},
        {"tag": (f"{'x' * 128}=1", "Cost Center=a/b:c")},
        {"machine_type": "g5.8xlarge", "efa": True},
    ],
)
def test_options_at_their_limits_are_accepted_by_eks(options: dict[str, Any]) -> None:
    assert new_eks(**options).state == "creating"


@pytest.mark.usefixtures("_region")
@pytest.mark.parametrize(
    ("options", "types", "private"),
    [
        ({"machine_type": "g5.xlarge"}, ("g5.xlarge",), False),
        ({"machine_type": "g5.xlarge", "private_nodes": True}, ("g5.xlarge",), True),
        ({"machine_type": "g5.8xlarge", "efa": True}, ("g5.8xlarge",), False),
        ({"machine_type": "p4d.24xlarge", "efa": True}, ("p4d.24xlarge",), True),
        ({"machine_type": "p4d.24xlarge", "efa": True, "spot": True}, ("p4d.24xlarge",), True),
        (
            {"machine_type": "g5.xlarge", "spot": True, "spot_type": ("g5.2xlarge", "g5.xlarge", "g5.2xlarge")},
            ("g5.xlarge", "g5.2xlarge"),
            False,
        ),
    ],
)
def test_machines_with_several_cards_are_private_and_of_one_type(
    options: dict[str, Any], types: tuple[str, ...], private: bool
) -> None:
    """EC2 assigns no public address to a machine with several interfaces."""
    system, workers = EksProvider().groups(new_eks(**options, disk_size=50))
    assert (workers.private, system.private) == (private, bool(options.get("private_nodes")))
    assert workers.types == types
    assert (workers.count, workers.disk, workers.name, workers.gpu) == (2, 50, "demo-2-workers", True)
    assert (system.count, system.disk, system.name, system.worker) == (2, 20, "demo-2-system", False)


BASE = ["Stack", "ControlPlane", "AddOn", "AddOn"]
POOLS = ["NodeGroup", "NodeGroup", "AddOn"]


@pytest.mark.usefixtures("_region")
@pytest.mark.parametrize(
    ("nodes", "options", "more", "found"),
    [
        (2, {"no_volumes": True}, {}, [*BASE, *POOLS]),
        (2, {"no_volumes": True, "registry": "auto"}, {}, ["Stack", "ImageRepository", *BASE[1:], *POOLS]),
        (
            2,
            {"no_volumes": True, "admin": ("arn:aws:iam::123456789012:user/me",)},
            {},
            [*BASE, "Admin", *POOLS],
        ),
        (2, {"no_volumes": True, "placement_group": True}, {}, [*BASE, "PlacementGroup", "LaunchTemplate", *POOLS]),
        (2, {"no_volumes": True, **RESERVATION}, {}, [*BASE, "LaunchTemplate", *POOLS]),
        (2, {"no_volumes": True}, {"expires": 5}, [*BASE, *POOLS, "EndTimer", "EndTimer", "PlaneEnd"]),
        (2, {"no_volumes": True, "machine_type": "g5.xlarge"}, {}, [*BASE, *POOLS, "DevicePlugin", "GpuProbe"]),
        (
            2,
            {"no_volumes": True, "machine_type": "g5.xlarge", "probe_image": "none"},
            {},
            [*BASE, *POOLS, "DevicePlugin"],
        ),
        (0, {"no_volumes": True, "machine_type": "g5.xlarge"}, {}, [*BASE, *POOLS]),
        (
            2,
            {"no_volumes": True, "machine_type": "p4d.24xlarge", "efa": True},
            {},
            [
                *BASE,
                *(
                    "PlacementGroup",
                    "LaunchTemplate",
                    *POOLS,
                    "DevicePlugin",
                    "DevicePlugin",
                    "NodeTopology",
                    "GpuProbe",
                ),
            ],
        ),
    ],
)
def test_a_cluster_on_eks_consists_of_what_its_options_ask_for(
    nodes: int, options: dict[str, Any], more: dict[str, Any], found: list[str]
) -> None:
    assert names(EksProvider().resources(with_details(new_eks(nodes, **options), **more))) == found


@pytest.mark.usefixtures("_region")
def test_a_cluster_of_which_only_the_name_is_known_may_have_everything() -> None:
    found = names(EksProvider().resources(Cluster("demo-2", "eks", location="eu-west-1")))
    assert {"ImageRepository", "PlacementGroup", "LaunchTemplate", "PlaneEnd"} < set(found)
    assert len(names(EksProvider().resources(new_eks()))) > len([*BASE, *POOLS])  # volumes, unless left out


@pytest.mark.usefixtures("_region")
@pytest.mark.parametrize(
    ("machine", "nodes", "found"),
    [
        ("m5.xlarge", 3, ["NodeGroupSize"]),
        ("g5.xlarge", 3, ["NodeGroupSize", "DevicePlugin"]),
        ("g5.xlarge", 0, ["NodeGroupSize"]),
        ("p4d.24xlarge", 3, ["NodeGroupSize", "DevicePlugin", "NodeTopology"]),
        ("p4d.24xlarge", 0, ["NodeGroupSize"]),
    ],
)
def test_a_group_on_eks_is_resized_before_its_devices_are_awaited(machine: str, nodes: int, found: list[str]) -> None:
    size, *others = EksProvider().scale(new_eks(machine_type=machine), nodes)
    assert names([size, *others]) == found
    assert all(list(item.needs) == [size] for item in others)


@pytest.mark.usefixtures("_region")
def test_the_end_of_a_cluster_on_eks_moves_in_its_tag_its_groups_and_its_schedules() -> None:
    resources = EksProvider().extend(with_details(new_eks(), expires=5))
    assert names(resources) == ["EndTag", "EndTimer", "EndTimer", "PlaneEndMoved"]
    assert all(not item.needs for item in resources[1:])
    assert [item.expires for item in resources[1:]] == [5, 5, 5]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_region")
@pytest.mark.parametrize(
    ("options", "has_gateway"),
    [({}, False), ({"private_nodes": True}, True), ({"private_nodes": True, "subnets": SUBNETS}, False)],
)
def test_the_end_of_a_private_cluster_is_also_that_of_its_gateway(options: dict[str, Any], has_gateway: bool) -> None:
    words = EksProvider().describe_end(new_eks(**options))
    assert ("deletes the control plane and the NAT gateway within" in words) is has_gateway


@pytest.mark.parametrize(
    ("options", "variable", "region"),
    [
        ({}, "", "us-east-1"),
        ({"region": "eu-west-1"}, "", "eu-west-1"),
        ({"zone": "eu-west-1a"}, "", None),
        ({}, "ap-south-1", None),
    ],
)
def test_a_region_that_is_not_known_yet_has_a_place_holder(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], variable: str, region: str | None
) -> None:
    monkeypatch.setenv("AWS_REGION", variable)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "")
    assert EksProvider().fill_place(options).get("region") == region


@pytest.mark.usefixtures("_region")
def test_zones_of_aws_are_tried_in_their_order() -> None:
    cluster = new_eks(zones="eu-west-1b,eu-west-1a")
    assert EksProvider().list_zones(cluster) == ("eu-west-1b", "eu-west-1a")
    moved = EksProvider().place_workers(cluster, "eu-west-1a")
    assert (moved.details["location"], moved.details["options"]["zone"]) == ("eu-west-1a", "eu-west-1a")
    assert EksProvider().groups(moved)[1].zone == "eu-west-1a"
