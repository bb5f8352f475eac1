"""The plan of a cluster in each cloud: its priced parts, and each warning with what causes it."""

import datetime
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers.aks import plan as aks
from providers.aks.machines import Machine as AksMachine
from providers.aks.options import AksOptions
from providers.base import Plan, PlanLine, TransientError
from providers.eks import plan as eks
from providers.eks.machines import Machine as EksMachine
from providers.eks.machines import machine_of
from providers.eks.nodes import Group
from providers.eks.options import EksOptions
from providers.gke import plan as gke
from providers.gke.api import Gke
from providers.gke.compute import Purchase
from providers.gke.families import FABRICS
from providers.gke.machines import Machine as GkeMachine
from providers.gke.options import GkeOptions
from providers.pricing import PriceTable
from tests.fakes.aws_operations import check_operation

DENIED = CredentialError("denied")
Line = tuple[str, int, float | None]


def use_prices(
    monkeypatch: pytest.MonkeyPatch, cloud: str, region: str, spot: dict[str, float], prices: dict[str, float]
) -> None:
    """A table of a cloud in which each item has a price of its own, only in this region."""
    table = PriceTable("USD", "a table", "v1", ({"on-demand": {region: prices}, "spot": {region: spot}},))
    monkeypatch.setattr("providers.pricing.load_prices", {cloud: table}.__getitem__)


def parts(plan: Plan) -> list[Line]:
    return [(line.what, line.count, line.price) for line in plan.lines]


def named(warnings: Any, *words: str) -> list[str]:
    """The warnings, each as the first of the given words that it has."""
    return [next((word for word in words if word in warning), warning) for warning in warnings]


# --- AKS ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def aks_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = {
        "control-plane": 0.1,
        "Standard_D2s_v5": 1.0,
        "Standard_NC4as_T4_v3": 2.0,
        "load-balancer": 3.0,
        "public-address": 4.0,
        "image-registry": 5.0,
        "disk-p10": 6.0,
        "disk-p15": 7.0,
    }
    use_prices(monkeypatch, "aks", "eastus", {"Standard_NC4as_T4_v3": 0.5}, prices)


T4 = AksMachine("Standard_NC4as_T4_v3", "t4", 1, 4)


def sketch_aks(machine: AksMachine = T4, nodes: int | None = 3, more: Any = (), **options: Any) -> Plan:
    details = {**({} if nodes is None else {"nodes": nodes}), **dict(more)}
    cluster = Cluster("demo-3", "aks", details=details, location="eastus")
    return aks.sketch_plan(cluster, AksOptions(**options), machine)


def test_the_parts_of_a_cluster_on_aks_have_their_prices(aks_prices: None) -> None:
    found = sketch_aks(disk_size=200, tier="standard", more={"registry_made": True})
    assert parts(found) == [
        ("AKS control plane", 1, 0.1),
        ("system machine Standard_D2s_v5", 2, 1.0),
        ("worker Standard_NC4as_T4_v3", 3, 2.0),
        ("disk of 128 GB", 2, 6.0),
        ("disk of 200 GB", 3, 7.0),
        ("load balancer (outgoing traffic)", 1, 3.0),
        ("public address", 1, 4.0),
        ("image registry", 1, 5.0),
    ]
    assert (found.location, found.currency, found.source, found.table) == (
        "eastus of a subscription of yours",
        "USD",
        "a table",
        "v1",
    )
    assert found.total == pytest.approx(0.1 + 2 + 6 + 12 + 21 + 3 + 4 + 5)
    assert found.warnings == (aks.UNCHECKED,)


def test_the_free_tier_of_aks_costs_nothing_and_spot_workers_their_own_price(aks_prices: None) -> None:
    found = sketch_aks(tier="free", spot=True, more={"location": "eastus-2"})
    assert parts(found)[0] == ("AKS control plane, free tier", 1, 0.0)
    assert parts(found)[2] == ("worker Standard_NC4as_T4_v3 (spot)", 3, 0.5)
    assert "image registry" not in [what for what, _, _ in parts(found)]
    assert found.location == "eastus-2 of a subscription of yours"


def test_a_price_that_is_not_in_the_table_leaves_the_sum_unknown(aks_prices: None) -> None:
    found = sketch_aks(AksMachine("Standard_D4s_v5"), nodes=None)
    assert parts(found)[2] == ("worker Standard_D4s_v5", 0, None)
    assert found.total is None


@pytest.mark.parametrize(
    ("gigabytes", "disk"),
    [
        *((1, "disk-p4"), (32, "disk-p4"), (33, "disk-p6"), (64, "disk-p6"), (65, "disk-p10"), (128, "disk-p10")),
        *((129, "disk-p15"), (256, "disk-p15"), (257, "disk-p20"), (512, "disk-p20"), (513, "disk-p30")),
        *((1024, "disk-p30"), (1025, "disk-p40"), (2048, "disk-p40")),
    ],
)
def test_a_premium_disk_of_azure_is_billed_by_the_next_size(gigabytes: int, disk: str) -> None:
    """https://learn.microsoft.com/azure/virtual-machines/disks-types#premium-ssds: P4 has 32 GiB, P40 has 2048."""
    assert aks.disk_of(gigabytes) == disk


H100 = AksMachine("Standard_ND96isr_H100_v5", "h100", 8, 96)
A10 = AksMachine("Standard_NV36ads_A10_v5", "a10", 1, 36)


@pytest.mark.parametrize(
    ("machine", "nodes", "options", "more", "warnings"),
    [
        (H100, 1, {}, {}, []),
        (H100, 2, {}, {}, ["3200 Gbit/s of InfiniBand"]),
        (T4, 2, {}, {}, []),
        (A10, 1, {}, {}, ["NVIDIA's driver 570.211.01 on Standard_NV36ads_A10_v5"]),
        (AksMachine("Standard_NV36ads_A10_v5", "a10", 0), 1, {}, {}, []),
        (AksMachine("Standard_NCx", "rtx-pro-6000", 1), 1, {}, {}, []),
        (T4, 1, {}, {"arm": True}, ["has Arm processors"]),
        (T4, 10, {"tier": "free"}, {}, []),
        (T4, 11, {"tier": "free"}, {}, ["up to 10 machines"]),
        (T4, 11, {"tier": "standard"}, {}, []),
        (T4, 1, {"compact_placement": True}, {}, ["--compact-placement without --zones"]),
        (T4, 1, {"compact_placement": True, "zones": "1"}, {}, []),
        (T4, 1, {"zones": "1"}, {}, []),
    ],
)
def test_what_may_disappoint_on_aks_is_warned_of(
    aks_prices: None, machine: AksMachine, nodes: int, options: Any, more: Any, warnings: list[str]
) -> None:
    found = sketch_aks(machine, nodes, more, **options).warnings[1:]
    assert named(found, *warnings) == warnings


class Azure:
    """A subscription: answers by path."""

    subscription, location, root = "s-1", "eastus", "/subscriptions/s-1"

    def __init__(self, **answers: Any) -> None:
        self.values: list[Any] = [
            {"version": "1.35", "isPreview": True, "patchVersions": {"1.35.0": {}}},
            {"version": "1.34", "patchVersions": {"1.34.2": {}, "1.34.1": {}}},
            {"version": "1.33", "capabilities": {"supportPlan": ["KubernetesOfficial"]}, "patchVersions": None},
            {"version": "1.30", "capabilities": {"supportPlan": ["AKSLongTermSupport"]}},
            {"version": "1.32", "capabilities": {"supportPlan": ["KubernetesOfficial", "AKSLongTermSupport"]}},
            {"version": "1.31", "capabilities": None, "isPreview": False},
        ]
        self.asked: list[str] = []
        self.identity: Any = {}

    def get(self, path: str, what: str) -> Any:
        self.asked.append(path)
        if path.endswith("kubernetesVersions"):
            return {"values": self.values}
        if isinstance(self.identity, Exception):
            raise self.identity
        return self.identity


def test_versions_of_aks_are_those_with_official_support() -> None:
    """Long-term support alone costs more, and previews are not for clusters that have to work."""
    azure = Azure()
    assert aks.list_versions(azure) == {"1.34": ["1.34.2", "1.34.1"], "1.33": [], "1.32": [], "1.31": []}  # type: ignore[arg-type]
    assert azure.asked == [
        "/subscriptions/s-1/providers/Microsoft.ContainerService/locations/eastus/kubernetesVersions"
    ]
    azure.values = []
    assert aks.list_versions(azure) == {}  # type: ignore[arg-type]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `check_machines` and `ask_price` of AKS are asked."""
    asked: list[Any] = []

    def check_machines(azure: Any, demands: Any, zones: Any) -> list[str]:
        asked.append(([(item.machine.name, item.count, item.spot) for item in demands], zones))
        return ["from the quotas"]

    def ask_price(name: str, region: str, spot: bool) -> float:
        asked.append((name, region, spot))
        return 9.0

    monkeypatch.setattr(aks, "check_machines", check_machines)
    monkeypatch.setattr(aks, "ask_price", ask_price)
    return asked


def plan_aks(azure: Azure, machine: AksMachine = T4, **options: Any) -> Plan:
    cluster = Cluster("demo-3", "aks", details={"nodes": 3, "location": "eastus"}, location="eastus")
    return aks.make_plan(cluster, AksOptions(**options), machine, azure)  # type: ignore[arg-type]


def test_a_plan_of_aks_checks_system_machines_and_workers(aks_prices: None, checked: list[Any]) -> None:
    found = plan_aks(Azure(), AksMachine("Standard_D4s_v5"), spot=True, zones="2,1")
    assert checked == [
        ([("Standard_D2s_v5", 2, False), ("Standard_D4s_v5", 3, True)], ["2", "1"]),
        ("Standard_D4s_v5", "eastus", True),
    ]
    assert parts(found)[2] == ("worker Standard_D4s_v5 (spot)", 3, 9.0)
    assert found.warnings[0] == "from the quotas"
    assert found.location == "eastus of subscription s-1"


@pytest.mark.parametrize("version", [None, "1.34", "1.34.1"])
def test_a_version_of_aks_or_one_of_its_patches_is_accepted(
    aks_prices: None, checked: list[Any], version: str | None
) -> None:
    plan_aks(Azure(), kubernetes_version=version)


@pytest.mark.parametrize("version", ["1.35", "1.34.3", "1.3"])
def test_a_version_that_aks_does_not_offer_is_refused(checked: list[Any], version: str) -> None:
    with pytest.raises(UsageError, match=f"does not offer Kubernetes {version} in eastus") as caught:
        plan_aks(Azure(), kubernetes_version=version)
    assert caught.value.hint == "It has 1.31, 1.32, 1.33, 1.34; or remove --kubernetes-version"
    assert checked == []


def test_an_identity_that_is_not_there_is_refused_before_anything_is_made(aks_prices: None, checked: list[Any]) -> None:
    azure = Azure()
    azure.identity = NotFoundError("no such identity")
    with pytest.raises(UsageError, match="no such identity") as caught:
        plan_aks(azure, identity="/subscriptions/s-1/identity")
    assert "az identity list" in str(caught.value.hint)
    azure.identity = {}
    plan_aks(azure, identity="/subscriptions/s-1/identity")
    assert azure.asked[-1] == "/subscriptions/s-1/identity"


# --- GKE ------------------------------------------------------------------------------------------------------------

CPU = GkeMachine("n1-standard-4")
N1 = GkeMachine("n1-standard-8", "nvidia-tesla-t4", 2)
L4 = GkeMachine("g2-standard-8", "nvidia-l4", 1)
A3 = GkeMachine("a3-highgpu-8g", "nvidia-h100-80gb", 8)
H200 = GkeMachine("a3-ultragpu-8g", "nvidia-h200-141gb", 8)


@pytest.fixture
def gke_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = {
        "control-plane": 0.1,
        "e2-standard-2": 1.0,
        "n1-standard-8": 2.0,
        "nvidia-tesla-t4": 3.0,
        "disk-gb": 4.0,
        "public-address": 5.0,
    }
    use_prices(monkeypatch, "gke", "us-east1", {"n1-standard-8": 0.2, "nvidia-tesla-t4": 0.3}, prices)


def sketch_gke(machine: GkeMachine = N1, nodes: int | None = 3, location: str = "us-east1-b", **options: Any) -> Plan:
    details = {} if nodes is None else {"nodes": nodes}
    return gke.sketch_plan(Cluster("demo-3", "gke", details=details, location=location), GkeOptions(**options), machine)


def test_the_parts_of_a_cluster_on_gke_have_their_prices(gke_prices: None) -> None:
    found = sketch_gke(disk_size=200)
    assert parts(found) == [
        ("GKE control plane", 1, 0.1),
        ("system machine e2-standard-2", 2, 1.0),
        ("worker n1-standard-8", 3, 2.0),
        ("GPU nvidia-tesla-t4", 6, 3.0),
        ("GB of disk", 2 * 50 + 3 * 200, 4.0),
        ("public address", 5, 5.0),
    ]
    assert found.location == "us-east1-b of a project of yours"
    assert found.warnings == (gke.UNCHECKED,)
    assert (found.currency, found.source, found.table) == ("USD", "a table", "v1")


def test_spot_machines_and_their_gpus_have_prices_of_their_own(gke_prices: None) -> None:
    found = sketch_gke(spot=True, private_nodes=True)
    assert parts(found)[2:] == [
        ("worker n1-standard-8 (spot)", 3, 0.2),
        ("GPU nvidia-tesla-t4 (spot)", 6, 0.3),
        ("GB of disk", 400, 4.0),
    ]


def test_machines_with_built_in_gpus_have_one_price_and_no_workers_cost_nothing(gke_prices: None) -> None:
    assert [what for what, _, _ in parts(sketch_gke(L4))] == [
        "GKE control plane",
        "system machine e2-standard-2",
        "worker g2-standard-8",
        "GB of disk",
        "public address",
    ]
    assert parts(sketch_gke(CPU, nodes=None))[2:] == [
        ("worker n1-standard-4", 0, None),
        ("GB of disk", 100, 4.0),
        ("public address", 2, 5.0),
    ]


def test_a_regional_control_plane_is_in_all_zones(gke_prices: None) -> None:
    found = sketch_gke(region="us-east1", location="us-east1", worker_zone=("us-east1-b", "us-east1-c"))
    assert parts(found)[0] == ("GKE control plane in all zones of the region", 1, 0.1)
    assert found.location == "us-east1-b, us-east1-c of a project of yours"
    assert found.warnings[1:] == ("Workers are in several zones: traffic between them is slower and costs extra.",)


@pytest.mark.parametrize(
    ("machine", "nodes", "options", "warnings"),
    [
        (L4, 2, {"gpu_driver": "latest"}, []),
        (L4, 2, {"gpu_driver": "default"}, ["--gpu-driver default"]),
        (CPU, 2, {"gpu_driver": "default"}, []),
        (L4, 2, {"flex_start": True}, ["when a run requests them, all at once, which"]),
        (L4, 1, {"flex_start": True}, ["when a run requests them, which"]),
        (L4, 2, {"flex_start": True, "compact_placement": True}, ["when a run requests them, which"]),
        (A3, 1, {}, []),
        (A3, 2, {}, ["800 Gbit/s of GPUDirect-TCPX, which this cluster does not set up (--fast-network)"]),
        (A3, 1, {"fast_network": True}, ["4 VPC networks are made for it"]),
        (H200, 2, {"fast_network": True}, ["Only an image with libibverbs"]),
        (L4, 2, {"private_nodes": True}, ["Private nodes reach the Internet only through Cloud NAT"]),
    ],
)
def test_what_may_disappoint_on_gke_is_warned_of(
    gke_prices: None, machine: GkeMachine, nodes: int, options: Any, warnings: list[str]
) -> None:
    found = sketch_gke(machine, nodes, **options).warnings[1:]
    assert named(found, *warnings) == warnings


@pytest.mark.parametrize(
    ("options", "purchase"),
    [
        ({}, Purchase.ON_DEMAND),
        ({"spot": True}, Purchase.SPOT),
        ({"flex_start": True}, Purchase.FLEX_START),
    ],
)
def test_the_options_tell_how_machines_are_bought(options: Any, purchase: Purchase) -> None:
    assert gke.purchase_of(GkeOptions(**options)) is purchase


def channel(name: str, default: str, *versions: str) -> Any:
    return SimpleNamespace(channel=SimpleNamespace(name=name), default_version=default, valid_versions=list(versions))


SERVER = SimpleNamespace(
    channels=[
        channel("REGULAR", "1.33.6-gke.200", "1.34.1-gke.1829001", "1.34.1-gke.1829000", "1.33.6-gke.200"),
        channel("RAPID", "1.35.0-gke.1", "1.35.0-gke.1"),
    ],
    valid_master_versions=["1.32.9-gke.7"],
    default_cluster_version="1.32.9-gke.7",
)


class Server(Gke):
    """A zone with two channels."""

    def call(self, method: str, **request: Any) -> Any:
        assert (method, request) == ("get_server_config", {"name": self.parent})
        return SERVER


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the checks of GKE are asked."""
    asked: list[Any] = []

    def check_machines(project: str, zones: list[str], demands: Any, **more: Any) -> list[str]:
        asked.append((project, zones, [list(asdict(item).values())[1:] for item in demands], more))
        return ["from the quotas"]

    def check_reservation(*given: Any) -> list[str]:
        asked.append(given)
        return [f"from the reservation in {given[2]}"]

    class Compute:
        def __init__(self, project: str) -> None:
            assert project == "demo"

        def check_offer(self, zone: str, machine: GkeMachine) -> None:
            asked.append((zone, machine.name))

    for name, value in (
        ("check_machines", check_machines),
        ("check_reservation", check_reservation),
        ("Compute", Compute),
    ):
        monkeypatch.setattr(gke, name, value)
    return asked


def plan_gke(machine: GkeMachine = L4, nodes: int = 4, setup: str | None = None, **options: Any) -> Plan:
    details = {"nodes": nodes, "fabric": {"setup": setup}}
    cluster = Cluster("demo-4", "gke", details=details, location="us-east1-b")
    return gke.make_plan(cluster, GkeOptions(**options), machine, Server("demo", "us-east1-b"))


def test_a_plan_of_gke_checks_system_machines_and_workers_with_their_disks(gke_prices: None, google: list[Any]) -> None:
    found = plan_gke(spot=True, zones="us-east1-b,us-east1-c", private_nodes=True)
    assert google == [
        ("us-east1-c", "g2-standard-8"),
        (
            "demo",
            ["us-east1-b"],
            [[2, 50, "pd-balanced", Purchase.ON_DEMAND], [4, 100, "pd-balanced", Purchase.SPOT]],
            {"public_addresses": False, "networks": 0},
        ),
    ]
    assert found.warnings[0] == "from the quotas"
    assert found.location == "us-east1-b of project demo"


def test_fast_networks_and_the_type_of_disk_count_toward_quotas(gke_prices: None, google: list[Any]) -> None:
    plan_gke(A3, setup="tcpx", disk_type="pd-ssd", disk_size=300)
    ((_, _, demands, more),) = google
    assert demands[1] == [4, 300, "pd-ssd", Purchase.ON_DEMAND]
    assert more == {"public_addresses": True, "networks": 4}


def test_a_reservation_is_checked_in_each_zone_for_its_share_of_the_workers(
    gke_prices: None, google: list[Any]
) -> None:
    zones = ("us-east1-b", "us-east1-c")
    found = plan_gke(H200, reservation="train", worker_zone=zones)
    asked = [(item[0].name, *item[1:]) for item in google[1:]]
    assert asked == [("train", "demo", zone, H200, 2) for zone in zones]
    assert found.warnings[1:3] == tuple(f"from the reservation in {zone}" for zone in zones)
    google.clear()
    plan_gke(H200, nodes=0, reservation="train", worker_zone=zones)
    assert len(google) == 1


@pytest.mark.parametrize(
    ("options", "is_offered"),
    [
        ({}, True),
        ({"kubernetes_version": "1.34"}, True),
        ({"kubernetes_version": "1.34.1"}, True),
        ({"kubernetes_version": "1.34.1-gke.1829000"}, True),
        ({"kubernetes_version": "1.3"}, False),
        ({"kubernetes_version": "1.34.1-gke.18"}, False),
        ({"kubernetes_version": "1.35"}, False),
        ({"kubernetes_version": "1.35", "release_channel": "rapid"}, True),
        ({"kubernetes_version": "1.32", "release_channel": "extended"}, True),
        ({"kubernetes_version": "1.34", "release_channel": "extended"}, False),
    ],
)
def test_a_version_of_gke_is_one_of_its_channel(
    gke_prices: None, google: list[Any], options: dict[str, Any], is_offered: bool
) -> None:
    if is_offered:
        plan_gke(**options)
        return
    with pytest.raises(UsageError, match=f"does not offer Kubernetes {options['kubernetes_version']} in") as caught:
        plan_gke(**options)
    has = "1.32" if "release_channel" in options else "1.33, 1.34"
    assert caught.value.hint == f"It has {has}; or remove --kubernetes-version"


@pytest.mark.parametrize(
    ("machine", "options", "says"),
    [
        (H200, {}, "needs GKE 1.34.1-gke.1829001 or later; this would be 1.33.6-gke.200."),
        (H200, {"kubernetes_version": "1.34.1-gke.1829001"}, None),
        (H200, {"kubernetes_version": "1.34.1-gke.1829000"}, "this would be 1.34.1-gke.1829000."),
        (H200, {"release_channel": "rapid"}, None),
        (A3, {}, None),
    ],
)
def test_rdma_networks_need_a_version_that_makes_them(
    gke_prices: None, google: list[Any], machine: GkeMachine, options: dict[str, Any], says: str | None
) -> None:
    """Google's page on GPUDirect RDMA: 1.34.1-gke.1829001 for managed DRANET."""
    if says is None:
        plan_gke(machine, fast_network=True, **options)
        return
    with pytest.raises(UsageError) as caught:
        plan_gke(machine, fast_network=True, **options)
    assert caught.value.message.endswith(says)
    assert caught.value.hint == "--kubernetes-version 1.34.1-gke.1829001"
    plan_gke(machine, **options)


def test_a_channel_without_such_a_version_is_left_for_a_newer_one() -> None:
    with pytest.raises(UsageError) as caught:
        gke._check_since(FABRICS[H200.name], None, ["1.33.6-gke.200"], "1.33.6-gke.200")
    assert caught.value.hint == "Choose a newer --release-channel: rapid."


# --- EKS ------------------------------------------------------------------------------------------------------------

G5 = machine_of("g5.xlarge")
NOW = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)


@pytest.fixture
def eks_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = {
        "control-plane": 0.1,
        "t3.medium": 1.0,
        "g5.xlarge": 2.0,
        "disk-gb": 3.0,
        "public-address": 4.0,
        "nat-gateway": 5.0,
    }
    use_prices(monkeypatch, "eks", "eu-west-1", {}, prices)


def groups(*types: str, count: int = 3, private: bool = False, **more: Any) -> tuple[Group, Group]:
    system = Group("demo-system", ("t3.medium",), 2, 20, worker=False, private=private and "partly" not in more)
    more.pop("partly", None)
    return system, Group("demo-workers", types or ("g5.xlarge",), count, 100, private=private, **more)


def sketch_eks(pair: tuple[Group, Group] | None = None, machine: EksMachine = G5, **options: Any) -> Plan:
    cluster = Cluster("demo-3", "eks", location="eu-west-1")
    return eks.sketch_plan(cluster, EksOptions(**options), pair or groups(), machine)


def test_the_parts_of_a_cluster_on_eks_have_their_prices(eks_prices: None) -> None:
    found = sketch_eks()
    assert parts(found) == [
        ("EKS control plane", 1, 0.1),
        ("system machine t3.medium", 2, 1.0),
        ("worker g5.xlarge", 3, 2.0),
        ("GB of disk", 2 * 20 + 3 * 100, 3.0),
        ("public address", 5, 4.0),
    ]
    assert (found.location, found.currency, found.source, found.table) == ("eu-west-1", "USD", "a table", "v1")
    assert found.warnings == (eks.UNCHECKED,)


def test_private_machines_have_a_gateway_instead_of_addresses(eks_prices: None) -> None:
    assert parts(sketch_eks(groups(private=True)))[4:] == [("NAT gateway, without traffic", 1, 5.0)]
    partly = sketch_eks(groups(private=True, partly=True))
    assert parts(partly)[4:] == [("public address", 2, 4.0), ("NAT gateway, without traffic", 1, 5.0)]
    assert parts(sketch_eks(groups(private=True), subnets="subnet-1,subnet-2"))[4:] == []


def test_the_price_of_spot_machines_is_unknown_without_an_account(eks_prices: None) -> None:
    found = sketch_eks(groups("g5.xlarge", "g6.xlarge", spot=True), zone="eu-west-1b")
    assert parts(found)[2] == ("worker g5.xlarge (spot)", 3, None)
    assert found.location == "eu-west-1b"


def test_a_sketch_asks_nobody_for_prices(monkeypatch: pytest.MonkeyPatch, eks_prices: None) -> None:
    """It is for people without an account, perhaps without a network."""

    def ask_price(*_: Any) -> float:
        raise AssertionError

    monkeypatch.setattr(eks, "ask_price", ask_price)
    monkeypatch.setattr(aks, "ask_price", ask_price)
    assert parts(sketch_eks(groups("g6.xlarge"), machine_of("g6.xlarge")))[2] == ("worker g6.xlarge", 3, None)
    use_prices(monkeypatch, "aks", "eastus", {}, {})
    assert parts(sketch_aks(AksMachine("Standard_D4s_v5")))[2] == ("worker Standard_D4s_v5", 3, None)


P4D = machine_of("p4d.24xlarge")


@pytest.mark.parametrize(
    ("machine", "count", "options", "warnings"),
    [
        (P4D, 1, {}, []),
        (P4D, 2, {}, ["p4d.24xlarge has 400 Gbit/s of EFA, which this cluster does not set up"]),
        (G5, 2, {}, []),
        (P4D, 1, {"efa": True}, ["--efa: every worker"]),
    ],
)
def test_a_fast_network_that_is_not_used_is_warned_of(
    eks_prices: None, machine: EksMachine, count: int, options: Any, warnings: list[str]
) -> None:
    found = sketch_eks(groups(machine.name, count=count), machine, **options).warnings[1:]
    assert named(found, *warnings) == warnings


class Aws:
    """One region: answers by operation."""

    region = "eu-west-1"

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "get_caller_identity": {},
            "describe_vpc_block_public_access_options": {"VpcBlockPublicAccessOptions": {}},
            "get_service_quota": {"Quota": {"Value": 1000.0, "QuotaName": "Running G and VT"}},
            "describe_spot_price_history": {"SpotPriceHistory": []},
            **answers,
        }
        self.calls: list[tuple[str, str, Mapping[str, Any]]] = []

    def call(self, service: str, operation: str, **parameters: Any) -> Any:
        check_operation(service, operation)
        self.calls.append((service, operation, parameters))
        answer = self.answers[operation]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def amazon(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the checks of EKS are asked."""
    asked: list[Any] = []

    def record(name: str, answer: Any) -> Any:
        def ask(*given: Any) -> Any:
            asked.append((name, *given[1:]))
            return answer

        return ask

    answers = {
        "check_version": ["from the version"],
        "zones_for": ["eu-west-1b", "eu-west-1c"],
        "check_subnets": ("eu-west-1a", ["from the subnets"]),
        "find_reservation": "a reservation",
        "check_reservation": ["from the reservation"],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(eks, name, record(name, answer))
    monkeypatch.setattr(eks, "ask_price", lambda machine, region: asked.append(("price", machine, region)))
    return asked


def plan_eks(
    monkeypatch: pytest.MonkeyPatch, aws: Aws, pair: tuple[Group, Group], machine: EksMachine = G5, **options: Any
) -> Plan:
    monkeypatch.setattr(eks, "aws_in", lambda region: aws)
    return eks.make_plan(Cluster("demo-3", "eks", location="eu-west-1"), EksOptions(**options), pair, machine)


def test_a_plan_of_eks_checks_identity_zones_version_and_quotas(
    monkeypatch: pytest.MonkeyPatch, eks_prices: None, amazon: list[Any]
) -> None:
    aws = Aws()
    pair = groups(zones=("eu-west-1b", "eu-west-1c"))
    found = plan_eks(monkeypatch, aws, pair, zone="eu-west-1b", kubernetes_version="1.34")
    assert amazon == [
        ("zones_for", ["g5.xlarge"], "eu-west-1b"),
        ("zones_for", ["g5.xlarge"], "eu-west-1c"),
        ("check_version", "1.34"),
    ]
    assert [name for _, name, _ in aws.calls] == [
        "get_caller_identity",
        "describe_vpc_block_public_access_options",
        "get_service_quota",
        "get_service_quota",
    ]
    assert (found.location, found.warnings) == ("eu-west-1b", ("from the version",))


def test_given_subnets_are_checked_instead_of_public_access(
    monkeypatch: pytest.MonkeyPatch, eks_prices: None, amazon: list[Any]
) -> None:
    aws = Aws()
    subnets = ("subnet-12345678", "subnet-23456789")
    found = plan_eks(monkeypatch, aws, groups(private=True), subnets=",".join(subnets))
    assert ("check_subnets", subnets, groups(private=True)) in amazon
    assert "describe_vpc_block_public_access_options" not in [name for _, name, _ in aws.calls]
    assert (found.location, found.warnings) == ("eu-west-1a", ("from the version", "from the subnets"))
    assert "NAT gateway, without traffic" not in [line.what for line in found.lines]


def test_a_reservation_is_checked_instead_of_quotas(
    monkeypatch: pytest.MonkeyPatch, eks_prices: None, amazon: list[Any]
) -> None:
    aws = Aws()
    found = plan_eks(monkeypatch, aws, groups(reservation="cr-1"), zone="eu-west-1b")
    assert ("find_reservation", "cr-1") in amazon
    assert ("check_reservation", "g5.xlarge", 3, "eu-west-1b") in amazon
    assert "get_service_quota" not in [name for _, name, _ in aws.calls]
    assert found.warnings == ("from the version", "from the reservation")


@pytest.mark.parametrize(
    ("machine", "types", "spot", "warnings"),
    [
        ("g7.xlarge", ("g7.xlarge",), False, ["did not find the GPUs of g7.xlarge"]),
        ("g7e.xlarge", ("g7e.xlarge",), False, []),
        ("g5.xlarge", ("g5.xlarge", "g6.xlarge"), True, ["of one type or mixed: g5.xlarge, g6.xlarge."]),
        ("g5.xlarge", ("g5.xlarge",), True, []),
    ],
)
def test_what_may_disappoint_on_eks_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    eks_prices: None,
    amazon: list[Any],
    machine: str,
    types: tuple[str, ...],
    spot: bool,
    warnings: list[str],
) -> None:
    pair = groups(*types, spot=spot)
    found = plan_eks(monkeypatch, Aws(), pair, EksMachine(machine, 4, "X", 1), spot=spot).warnings
    assert named(found[1:], *warnings) == warnings


def test_prices_that_the_table_lacks_are_asked_of_aws(
    monkeypatch: pytest.MonkeyPatch, eks_prices: None, amazon: list[Any]
) -> None:
    plan_eks(monkeypatch, Aws(), groups("g6.xlarge"), machine_of("g6.xlarge"))
    assert amazon[-1] == ("price", "g6.xlarge", "eu-west-1")
    amazon.clear()
    plan_eks(monkeypatch, Aws(), groups("g6.xlarge", spot=True), machine_of("g6.xlarge"), spot=True)
    assert not [item for item in amazon if item[0] == "price"]  # spot prices are those of EC2


@pytest.mark.parametrize(
    ("mode", "private", "says"),
    [
        (None, False, None),
        ("off", False, None),
        ("block-bidirectional", True, "would not join"),
        ("block-bidirectional", False, "would not join"),
        ("block-ingress", False, "only through a NAT gateway"),
        ("block-ingress", True, None),
    ],
)
def test_a_blocked_internet_gateway_is_told_before_anything_is_made(
    mode: str | None, private: bool, says: str | None
) -> None:
    """EC2's modes: off, block-bidirectional, block-ingress (egress by a NAT gateway stays possible)."""
    told = {"VpcBlockPublicAccessOptions": {"InternetGatewayBlockMode": mode}}
    aws: Any = Aws(describe_vpc_block_public_access_options=told)
    if says is None:
        eks._check_public_access(aws, groups(private=private))
        return
    with pytest.raises(UsageError, match=f"{mode} in eu-west-1: .*{says}") as caught:
        eks._check_public_access(aws, groups(private=private))
    assert ("--private-nodes" in str(caught.value.hint)) == (mode == "block-ingress")


def test_machines_that_are_only_partly_private_need_the_gateway() -> None:
    told = {"VpcBlockPublicAccessOptions": {"InternetGatewayBlockMode": "block-ingress"}}
    with pytest.raises(UsageError, match="NAT gateway"):
        eks._check_public_access(Aws(describe_vpc_block_public_access_options=told), groups(private=True, partly=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", ["public_access", "spot", "quota"])
def test_only_a_missing_right_leaves_a_check_out(operation: str) -> None:
    checks: dict[str, Any] = {
        "public_access": lambda aws: eks._check_public_access(aws, groups()),
        "spot": lambda aws: eks._spot(aws, groups(spot=True)[1], "eu-west-1b"),
        "quota": lambda aws: eks._check_quota(aws, "L-1", 8, "2 × x", groups()[1], {"g5.xlarge": 4}, 8),
    }
    names = (
        "describe_vpc_block_public_access_options",
        "describe_spot_price_history",
        "get_service_quota",
    )
    assert checks[operation](Aws(**dict.fromkeys(names, DENIED))) in (
        None,
        PlanLine("worker g5.xlarge (spot)", 3, None),
        ["The quota L-1 cannot be read, so mlbench cannot check whether it allows 8 vCPUs: denied"],
    )
    with pytest.raises(TransientError):
        checks[operation](Aws(**dict.fromkeys(names, TransientError("late"))))


def price(machine: str, hours_ago: int, amount: str) -> dict[str, Any]:
    return {"InstanceType": machine, "Timestamp": NOW - datetime.timedelta(hours=hours_ago), "SpotPrice": amount}


def test_spot_machines_cost_the_newest_price_of_the_dearest_type() -> None:
    history = [price("g5.xlarge", 3, "9.0"), price("g5.xlarge", 1, "0.4"), price("g6.xlarge", 2, "0.6")]
    aws = Aws(describe_spot_price_history={"SpotPriceHistory": history})
    line: Any = eks._spot(aws, groups("g5.xlarge", "g6.xlarge", spot=True)[1], "eu-west-1b")  # type: ignore[arg-type]
    assert (line.what, line.count, line.price) == ("worker g5.xlarge (spot, or alike)", 3, 0.6)
    assert str(line.as_of).startswith("now, 20")
    ((service, _, asked),) = aws.calls
    assert service == "ec2"
    assert {**asked, "StartTime": None} == {
        "InstanceTypes": ["g5.xlarge", "g6.xlarge"],
        "ProductDescriptions": ["Linux/UNIX"],
        "AvailabilityZone": "eu-west-1b",
        "StartTime": None,
    }
    assert eks._spot(aws, groups()[1], "eu-west-1b") is None  # type: ignore[arg-type]


def quota(limit: float, pair: tuple[Group, Group], machine: EksMachine = G5) -> list[str]:
    told = {"Quota": {"Value": limit, "QuotaName": "a quota"}}
    return eks._quota(Aws(get_service_quota=told), pair, machine)  # type: ignore[arg-type]


def test_workers_and_system_machines_of_one_quota_count_together() -> None:
    """m5.xlarge has 4 vCPUs, t3.medium 2: three and two of them need 16 of the standard quota."""
    pair, machine = groups("m5.xlarge"), machine_of("m5.xlarge")
    with pytest.raises(CapacityError, match=r"allows 15 vCPUs; 3 × m5\.xlarge and 2 × t3\.medium need 16") as caught:
        quota(15, pair, machine)
    assert caught.value.details == {"quota": "L-1216C47A", "limit": 15, "needed": 16}
    assert "--quota-code L-1216C47A --region eu-west-1 --desired-value 16" in str(caught.value.hint)
    (warning,) = quota(31, pair, machine)
    assert warning == (
        'The quota "a quota" (L-1216C47A) in eu-west-1 allows 31 vCPUs, of which these machines take 16, if no others '
        "take them."
    )
    assert quota(32, pair, machine) == []


def test_a_larger_spot_type_than_the_quota_allows_is_warned_of() -> None:
    pair = groups("g5.xlarge", "g5.2xlarge", "g6.2xlarge", spot=True)
    (warning,) = quota(23, pair)
    assert "allows 23 vCPUs, too few if these machines come: g5.2xlarge, g6.2xlarge (--spot-type" in warning
    assert "too few" not in " ".join(quota(24, pair))


def test_no_workers_need_no_quota_of_theirs() -> None:
    aws = Aws()
    eks._quota(aws, groups(count=0), G5)  # type: ignore[arg-type]
    assert [each["QuotaCode"] for _, _, each in aws.calls] == ["L-1216C47A"]


@pytest.mark.parametrize(
    ("machine", "spot", "code"),
    [
        *(("p4d.24xlarge", False, "L-417A185B"), ("p4d.24xlarge", True, "L-7212CCBC")),
        *(
            ("p5.48xlarge", False, "L-417A185B"),
            ("p5.48xlarge", True, "L-C4BD4855"),
            ("p6-b200.48xlarge", True, "L-C4BD4855"),
        ),
        *(("g5.xlarge", False, "L-DB2E81BA"), ("g5.xlarge", True, "L-3819A6DF"), ("vt1.3xlarge", True, "L-3819A6DF")),
        *(("m5.large", False, "L-1216C47A"), ("m5.large", True, "L-34B43A08"), ("trn1.2xlarge", False, None)),
        *(("u-6tb1.metal", False, None), ("x2idn.32xlarge", False, None)),
    ],
)
def test_the_quota_of_a_family_has_the_code_of_service_quotas(machine: str, spot: bool, code: str | None) -> None:
    """Codes of AWS' page on EC2 quotas; X, U and Trn machines have quotas of their own, which mlbench does not know."""
    assert eks._quota_code(Group("w", (machine,), 1, 100, spot=spot)) == code


def test_an_error_that_is_none_of_aws_is_not_a_warning() -> None:
    with pytest.raises(ZeroDivisionError):
        eks._check_public_access(Aws(describe_vpc_block_public_access_options=ZeroDivisionError()), groups())  # type: ignore[arg-type]
