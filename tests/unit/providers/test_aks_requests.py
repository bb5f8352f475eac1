"""The documents that mlbench sends to Azure for clusters and pools, and what it reads from sizes, quotas and states."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers.aks.api import Azure, Operation, _operation_of, _parse
from providers.aks.compute import Demand, Offer, check_machines, find_offer, list_offers, list_quotas
from providers.aks.errors import Message
from providers.aks.machines import Machine
from providers.aks.options import AksOptions
from providers.aks.resources import (
    ControlPlane,
    Placement,
    PoolSize,
    ResourceGroup,
    WorkerPool,
    state_of,
    zone_of,
)
from providers.base import BusyError

SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
GROUP = f"/subscriptions/{SUBSCRIPTION}/resourcegroups/mlbench-demo-2-eastus"
CLUSTER_PATH = f"{GROUP}/providers/Microsoft.ContainerService/managedClusters/demo-2"
TAGS = {"mlbench-cluster": "demo-2"}
SUBNET = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/v/subnets/n"


class FakeAzure(Azure):
    """Records changes, and gives the answers of the test by path."""

    def __init__(self, answers: dict[str, Any] | None = None, done: bool = True) -> None:
        super().__init__(SUBSCRIPTION, "eastus")
        self.answers = answers or {}
        self.done = done
        self.changes: list[tuple[str, str, Any]] = []

    def get(self, path: str, what: str) -> Message:
        if path not in self.answers:
            raise NotFoundError(what)
        found: Message = self.answers[path]
        return found

    def list_all(self, path: str, what: str) -> list[Message]:
        found = self.answers[path.partition("?")[0]]
        if isinstance(found, Exception):
            raise found
        return list(found)

    def change(self, method: str, path: str, what: str, body: Message | None = None) -> Operation | None:
        self.changes.append((method, path, body))
        return None

    def poll(self, operation: Operation | None, what: str) -> bool:
        return self.done


def make_plane(azure: FakeAzure | None = None, location: str = "eastus", **options: Any) -> ControlPlane:
    cluster = Cluster("demo-2", "aks", details={"location": location}, location="eastus")
    return ControlPlane(ResourceGroup(cluster, azure or FakeAzure()), AksOptions(**options))


def make_pool(machine: Machine, plane: ControlPlane | None = None, **options: Any) -> WorkerPool:
    return WorkerPool(plane or make_plane(**options), machine, 3, None, ())


# --- requests -------------------------------------------------------------------------------------------------------

POOL = {
    "type": "VirtualMachineScaleSets",
    "osType": "Linux",
    "osDiskType": "Managed",
    "enableUltraSSD": False,
    "tags": TAGS,
}
SYSTEM = {
    "name": "system",
    "mode": "System",
    "count": 2,
    "vmSize": "Standard_D2s_v5",
    "osDiskSizeGB": 128,
    "nodeLabels": {"mlbench-role": "system"},
    **POOL,
}


def test_the_request_of_a_cluster_without_options() -> None:
    """The keys are those of Azure's REST reference of managed clusters."""
    assert make_plane().request() == {
        "location": "eastus",
        "tags": TAGS,
        "sku": {"name": "Base", "tier": "Free"},
        "identity": {"type": "SystemAssigned"},
        "properties": {
            "dnsPrefix": "demo-2",
            "nodeResourceGroup": "mlbench-demo-2-eastus-nodes",
            "enableRBAC": True,
            "agentPoolProfiles": [SYSTEM],
            "networkProfile": {
                "networkPlugin": "azure",
                "networkPluginMode": "overlay",
                "networkDataplane": "cilium",
                "networkPolicy": "cilium",
                "loadBalancerSku": "standard",
                "outboundType": "loadBalancer",
            },
            "oidcIssuerProfile": {"enabled": True},
            "autoUpgradeProfile": {"upgradeChannel": "none", "nodeOSUpgradeChannel": "None"},
        },
    }


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({"kubernetes_version": "1.34"}, "kubernetesVersion", "1.34"),
        (
            {"allow_from": ("192.0.2.0/24", "198.51.100.7/32")},
            "apiServerAccessProfile",
            {"authorizedIPRanges": ["192.0.2.0/24", "198.51.100.7/32"]},
        ),
        ({"subnet": SUBNET}, "agentPoolProfiles", [{**SYSTEM, "vnetSubnetID": SUBNET}]),
        (
            {"system_machine_type": "Standard_D4s_v5"},
            "agentPoolProfiles",
            [{**SYSTEM, "vmSize": "Standard_D4s_v5"}],
        ),
    ],
)
def test_an_option_changes_its_property_and_nothing_else(options: dict[str, Any], key: str, value: object) -> None:
    plain, changed = make_plane().request()["properties"], make_plane(**options).request()["properties"]
    assert changed[key] == value
    assert {**changed, key: None} == {**plain, key: None}


@pytest.mark.parametrize(
    ("options", "identity"),
    [
        ({"identity": "/my/identity"}, "/my/identity"),
        ({"identity": "/my/identity", "subnet": SUBNET}, "/my/identity"),
        ({"subnet": SUBNET}, f"{GROUP}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/mlbench-network"),
    ],
)
def test_a_cluster_in_a_given_subnet_has_an_identity_with_a_role_there(options: dict[str, Any], identity: str) -> None:
    assert make_plane(**options).request()["identity"] == {
        "type": "UserAssigned",
        "userAssignedIdentities": {identity: {}},
    }


def test_the_tier_is_written_as_azure_writes_it() -> None:
    assert make_plane(tier="standard").request()["sku"] == {"name": "Base", "tier": "Standard"}


def test_the_group_has_the_time_of_its_creation_because_azure_does_not_report_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("providers.aks.resources.time", SimpleNamespace(time=lambda: 1234.9))
    azure = FakeAzure()
    make_plane(azure).group.create()
    tags = {**TAGS, "mlbench-created": "1234"}
    assert azure.changes == [("PUT", GROUP, {"location": "eastus", "tags": tags})]


WORKERS = {
    "mode": "User",
    "count": 3,
    "vmSize": "Standard_D4s_v5",
    "osDiskSizeGB": 128,
    "nodeLabels": {"mlbench-role": "worker"},
    **POOL,
}


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {}),
        ({"disk_size": 256}, {"osDiskSizeGB": 256}),
        ({"spot": True}, {"scaleSetPriority": "Spot", "scaleSetEvictionPolicy": "Delete", "spotMaxPrice": -1}),
        ({"location": "eastus-2"}, {"availabilityZones": ["2"]}),
        ({"subnet": SUBNET}, {"vnetSubnetID": SUBNET}),
    ],
)
def test_the_request_of_a_pool_without_gpus(options: dict[str, Any], more: dict[str, Any]) -> None:
    """The keys are those of Azure's REST reference of agent pools; a price of -1 is the price on demand."""
    assert make_pool(Machine("Standard_D4s_v5"), **options).request() == {"properties": {**WORKERS, **more}}


def test_a_pool_with_gpus_has_their_driver_a_label_and_a_taint() -> None:
    assert make_pool(Machine("Standard_NC4as_T4_v3", "t4", 1)).request()["properties"] == {
        **WORKERS,
        "vmSize": "Standard_NC4as_T4_v3",
        "nodeLabels": {"mlbench-role": "worker", "nvidia.com/gpu.present": "true"},
        "gpuProfile": {"driver": "Install"},
        "nodeTaints": ["nvidia.com/gpu=present:NoSchedule"],
    }


def test_machines_in_one_data_center_refer_to_their_placement_group() -> None:
    plane = make_plane()
    placement = Placement(plane.group)
    path = f"{GROUP}/providers/Microsoft.Compute/proximityPlacementGroups/workers"
    pool = WorkerPool(plane, Machine("Standard_D4s_v5"), 3, placement, (placement,))
    assert pool.request()["properties"]["proximityPlacementGroupID"] == placement.path == path
    properties = {"proximityPlacementGroupType": "Standard"}
    assert placement.request() == {"location": "eastus", "tags": TAGS, "properties": properties}


def test_a_resize_keeps_all_other_properties_of_the_pool() -> None:
    path = f"{CLUSTER_PATH}/agentPools/workers"
    azure = FakeAzure({path: {"name": "workers", "properties": {"count": 3, "vmSize": "s", "mode": "User"}}})
    size = PoolSize(make_pool(Machine("s"), make_plane(azure)), 5)
    size.create()
    assert azure.changes == [("PUT", path, {"properties": {"count": 5, "vmSize": "s", "mode": "User"}})]
    size.delete()
    assert len(azure.changes) == 1
    azure.answers.clear()
    with pytest.raises(NotFoundError, match='no node pool "demo-2/workers"'):
        size.create()


# --- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "state"),
    [
        ({"properties": {"provisioningState": "Deleting"}}, "Deleting"),
        ({"properties": {}}, "Succeeded"),
        ({"properties": None}, "Succeeded"),
        ({}, "Succeeded"),
    ],
)
def test_a_document_without_a_state_has_succeeded(document: Message, state: str) -> None:
    assert state_of(document) == state


@pytest.mark.parametrize(
    ("state", "broken", "deleting"),
    [
        ("Succeeded", None, False),
        ("Creating", None, False),
        ("Deleting", None, True),
        ("Failed", "it is in the state Failed", False),
        ("Canceled", "it is in the state Canceled", False),
    ],
)
def test_the_state_of_a_cluster_in_azure(state: str, broken: str | None, deleting: bool) -> None:
    plane = make_plane(FakeAzure({CLUSTER_PATH: {"properties": {"provisioningState": state}}}))
    found = plane.find()
    assert found is not None
    assert (found.state, found.broken, found.deleting) == (state, broken, deleting)


def test_a_cluster_that_cannot_be_requested_yet_says_why_but_only_if_it_is_absent() -> None:
    plane = make_plane()
    assert plane.find() is None
    plane.obstacles = [lambda: None, lambda: "its identity has no role yet", lambda: "later"]
    with pytest.raises(BusyError, match="its identity has no role yet"):
        plane.find()
    there = make_plane(FakeAzure({CLUSTER_PATH: {}}))
    there.obstacles = plane.obstacles
    assert there.find() is not None
    with pytest.raises(NotFoundError, match='no AKS cluster "demo-2"'):
        plane.require_raw()


@pytest.mark.parametrize(
    ("tags", "ours"), [({"mlbench-cluster": "demo-2"}, True), ({"mlbench-cluster": "demo"}, False), (None, False)]
)
def test_a_group_is_ours_by_its_tag(tags: dict[str, str] | None, ours: bool) -> None:
    found = make_plane(FakeAzure({GROUP: {"tags": tags}})).group.find()
    assert found is not None
    assert found.ours is ours


@pytest.mark.parametrize(
    ("properties", "spot", "differs"),
    [
        ({"vmSize": "STANDARD_D4S_V5"}, False, None),
        ({"vmSize": "standard_d8s_v5"}, False, "VM size standard_d8s_v5 instead of standard_d4s_v5"),
        ({"vmSize": "standard_d4s_v5", "scaleSetPriority": "Spot"}, False, "priority Spot instead of Regular"),
        ({"vmSize": "standard_d4s_v5"}, True, "priority Regular instead of Spot"),
        (
            {"vmSize": "x", "scaleSetPriority": "Regular"},
            True,
            "VM size x instead of standard_d4s_v5, priority Regular instead of Spot",
        ),
    ],
)
def test_a_pool_in_azure_that_is_not_as_requested(properties: Message, spot: bool, differs: str | None) -> None:
    path = f"{CLUSTER_PATH}/agentPools/workers"
    plane = make_plane(FakeAzure({path: {"properties": properties}}), spot=spot)
    found = make_pool(Machine("Standard_D4s_v5"), plane).find()
    assert found is not None
    assert found.differs == differs


@pytest.mark.parametrize(
    ("state", "done", "is_ready", "reason"),
    [
        ("Creating", False, False, "Azure is working on it"),
        ("Creating", True, False, "it is Creating"),
        ("Succeeded", True, True, "it is Succeeded"),
    ],
)
def test_a_cluster_is_ready_when_its_operation_and_its_state_say_so(
    state: str, done: bool, is_ready: bool, reason: str
) -> None:
    azure = FakeAzure({CLUSTER_PATH: {"properties": {"provisioningState": state}}}, done)
    progress = make_plane(azure).poll()
    assert (progress.ready, progress.reason) == (is_ready, reason)


def test_a_cluster_that_failed_or_disappeared_while_it_was_created() -> None:
    with pytest.raises(MlbenchError, match='"demo-2" was not created: it is in the state Failed'):
        make_plane(FakeAzure({CLUSTER_PATH: {"properties": {"provisioningState": "Failed"}}})).poll()
    with pytest.raises(NotFoundError, match="disappeared while it was being created"):
        make_plane().poll()


@pytest.mark.parametrize(
    ("location", "zone"),
    [("eastus-2", "2"), ("eastus", None), ("", None), ("eastus-b", None), ("westus3", None), ("-2", None)],
)
def test_the_zone_is_the_number_behind_the_region(location: str, zone: str | None) -> None:
    assert zone_of(Cluster("x", "aks", details={"location": location})) == zone


# --- sizes and quotas -----------------------------------------------------------------------------------------------

ROOT = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Compute"
SKUS, USAGES = f"{ROOT}/skus", f"{ROOT}/locations/eastus/usages"


def sku(name: str = "Standard_NC4as_T4_v3", **more: Any) -> Message:
    """An item of Azure's API of resource SKUs."""
    able = {"vCPUs": "4", "GPUs": "1", "LowPriorityCapable": "True", "CpuArchitectureType": "x64"}
    return {
        "resourceType": "virtualMachines",
        "name": name,
        "family": "standardNCASv3_T4Family",
        "capabilities": [{"name": key, "value": value} for key, value in able.items()],
        "locationInfo": [{"location": "eastus", "zones": ["3", "1"]}],
        "restrictions": [],
        **more,
    }


def usages(**left: int) -> list[Message]:
    return [{"name": {"value": name}, "limit": number + 5, "currentValue": 5} for name, number in left.items()]


def test_the_offer_of_a_size_is_read_from_azures_document() -> None:
    restrictions = [
        {"type": "Zone", "reasonCode": "NotAvailableForSubscription", "restrictionInfo": {"zones": ["3"]}},
        {"type": "Location", "reasonCode": "NotAvailableForSubscription"},
    ]
    items = [
        sku(),
        sku("a", restrictions=restrictions),
        sku("disk", resourceType="disks"),
        {**sku("b"), "family": None},
    ]
    offers = list_offers(FakeAzure({SKUS: items}))
    plain = Offer("Standard_NC4as_T4_v3", "standardNCASv3_T4Family", 4, 1, ("1", "3"), True)
    assert offers["standard_nc4as_t4_v3"] == plain
    assert (offers["a"].refused, offers["a"].refused_zones) == ("NotAvailableForSubscription", ("3",))
    assert offers["b"].family == ""
    assert sorted(offers) == ["a", "b", "standard_nc4as_t4_v3"]
    (empty,) = list_offers(FakeAzure({SKUS: [{"name": "E", "resourceType": "virtualMachines"}]})).values()
    assert empty == Offer("E", "", 0, 0, (), False)


def check(
    items: list[Message], quotas: Any, *, count: int = 2, spot: bool = False, zones: tuple[str, ...] = ()
) -> list[str]:
    demands = [Demand(Machine("Standard_NC4as_T4_v3"), 1), Demand(Machine("standard_nc4as_t4_V3"), count, spot)]
    return check_machines(FakeAzure({SKUS: items, USAGES: quotas}), demands, zones)


@pytest.mark.parametrize(
    ("spot", "quota", "needed"),
    [
        (False, "standardNCASv3_T4Family", 12),
        (False, "cores", 12),
        (False, "virtualMachines", 3),
        (True, "lowPriorityCores", 8),
        (True, "standardNCASv3_T4Family", 4),
        (True, "cores", 4),
        (True, "virtualMachines", 3),
    ],
)
def test_each_quota_of_azure_is_compared_with_what_is_left(spot: bool, quota: str, needed: int) -> None:
    """Spot machines have a quota for all families together; both kinds count as virtual machines."""
    assert check([sku()], usages(**{quota: needed}), spot=spot) == []
    unit = "" if quota == "virtualMachines" else " vCPUs"
    with pytest.raises(CapacityError, match=f"{quota} has {needed - 1} of {needed + 4}{unit} left, {needed} needed"):
        check([sku()], usages(**{quota: needed - 1}), spot=spot)


def test_a_quota_of_zero_does_not_matter_if_nothing_is_needed() -> None:
    azure = FakeAzure({SKUS: [sku()], USAGES: usages(cores=-5)})
    assert check_machines(azure, [Demand(Machine("Standard_NC4as_T4_v3"), 0)], ()) == []
    assert list_quotas(azure)["cores"]["limit"] == 0


@pytest.mark.parametrize(
    ("item", "more", "kind", "says"),
    [
        (sku("other"), {}, UsageError, "The region eastus has no Standard_NC4as_T4_v3"),
        (
            sku(restrictions=[{"type": "Location", "reasonCode": "QuotaId"}]),
            {},
            CapacityError,
            "may not use Standard_NC4as_T4_v3 in eastus: QuotaId",
        ),
        (sku(restrictions=[{"type": "Location"}]), {}, CapacityError, "in eastus: restricted"),
        (sku(capabilities=[]), {"spot": True}, UsageError, "is not sold as spot"),
        (sku(), {"zones": ("2",)}, UsageError, "in zone 2; it is in 1, 3"),
        (sku(locationInfo=[]), {"zones": ("1",)}, UsageError, "in zone 1, or no zones at all for it"),
    ],
)
def test_sizes_that_cannot_be_had(item: Message, more: Any, kind: type[MlbenchError], says: str) -> None:
    with pytest.raises(MlbenchError) as caught:
        check([item], [], **more)
    assert type(caught.value) is kind
    assert says in caught.value.message


def test_a_refused_zone_matters_only_without_another_one() -> None:
    item = sku(restrictions=[{"type": "Zone", "restrictionInfo": {"zones": ["3"]}}])
    assert check([item], [], zones=("3", "1")) == []
    assert check([item], [], zones=("1",)) == []
    with pytest.raises(CapacityError) as caught:
        check([item], [], zones=("3",))
    assert (caught.value.hint, caught.value.details) == ("--zones 1", {"reason": "restricted"})


def test_lists_that_may_not_be_read_are_a_warning_and_bad_credentials_an_error() -> None:
    denied = CredentialError("AuthorizationFailed: no role")
    (warning,) = check([sku()], denied)
    assert "could not be checked: AuthorizationFailed: no role" in warning
    with pytest.raises(CredentialError):
        check([sku()], CredentialError("expired"))
    assert find_offer(FakeAzure({SKUS: denied}), "x") is None
    with pytest.raises(CredentialError):
        find_offer(FakeAzure({SKUS: CredentialError("expired")}), "x")
    found = find_offer(FakeAzure({SKUS: [sku()]}), "STANDARD_NC4AS_T4_V3")
    assert found is not None
    assert found.gpus == 1


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "document"),
    [
        (b"", {}),
        (b'{"a": 1}', {"a": 1}),
        (b"[1]", {"value": [1]}),
        (b"<html>", {"code": "", "message": "<html>"}),
    ],
)
def test_an_answer_that_is_no_document_is_kept_as_a_message(content: bytes, document: Message) -> None:
    assert _parse(SimpleNamespace(content=content, text=content.decode)) == document


@pytest.mark.parametrize(
    ("headers", "url"),
    [
        ({}, None),
        ({"Location": "l"}, "l"),
        ({"Azure-AsyncOperation": "a", "Location": "l"}, "a"),
        ({"Retry-After": "5"}, ""),
    ],
)
def test_the_operation_is_in_the_headers_of_the_answer(headers: dict[str, str], url: str | None) -> None:
    found = _operation_of(SimpleNamespace(headers=headers))
    assert (None if found is None else found.url) == url
