"""Which VM sizes the options choose on AKS, Azure's limits and quotas, and what Azure's refusals become."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers.aks import AksProvider, api
from providers.aks.api import Azure, Operation
from providers.aks.compute import Demand, Offer, _check_quotas, _check_zones, _offer, _require_offer
from providers.aks.end_timer import AksHold
from providers.aks.errors import Message, error_from_answer, register_command
from providers.aks.machines import GPU_MACHINES, Machine, choose_machine
from providers.aks.options import AksOptions, split_zones
from providers.aks.plan import disk_of
from providers.aks.prices import read_price
from providers.base import BusyError, TransientError, identity_options

SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ((None, None, None), "Standard_D4s_v5"),
        ((None, 1, None), "Standard_NC4as_T4_v3"),
        ((None, None, "T4"), "Standard_NC4as_T4_v3"),
        ((None, 4, "t4"), "Standard_NC64as_T4_v3"),
        ((None, None, "a100"), "Standard_NC24ads_A100_v4"),
        ((None, 8, "a100-80gb"), "Standard_ND96amsr_A100_v4"),
        ((None, None, "a100-40gb"), "Standard_ND96asr_v4"),
        ((None, None, "nvidia-h100-80gb"), "Standard_ND96isr_H100_v5"),
        ((None, 2, "h100-nvl"), "Standard_NC80adis_H100_v5"),
        (("nc24ads_a100_v4", None, None), "Standard_NC24ads_A100_v4"),
        (("standard_d8s_V5", None, None), "Standard_D8s_v5"),
        (("Standard_E4s_v5", None, None), "Standard_E4s_v5"),  # not in the table: Azure is asked when it is planned
    ],
)
def test_options_choose_the_smallest_fitting_size(
    options: tuple[str | None, int | None, str | None], name: str
) -> None:
    assert choose_machine(*options).name == name


def test_every_size_of_the_table_is_found_by_its_gpu_and_number() -> None:
    for machine in GPU_MACHINES.values():
        found = choose_machine(None, machine.gpus, machine.gpu)
        assert (found.gpu, found.gpus) == (machine.gpu, machine.gpus)


@pytest.mark.parametrize(
    ("gigabytes", "disk"), [(30, "disk-p4"), (64, "disk-p6"), (128, "disk-p10"), (129, "disk-p15"), (2048, "disk-p40")]
)
def test_disks_are_priced_by_the_next_larger_size(gigabytes: int, disk: str) -> None:
    assert disk_of(gigabytes) == disk


@pytest.mark.parametrize(
    ("status", "document", "kind"),
    [
        (409, {"code": "OperationNotAllowed", "message": "Another operation is in progress"}, BusyError),
        (409, {"error": {"code": "OperationNotAllowed", "message": "exceeding approved Cores quota"}}, CapacityError),
        (400, {"error": {"code": "Bad", "details": [{"code": "QuotaExceeded", "message": "no"}]}}, CapacityError),
        (0, {"code": "AllocationFailed", "message": "none left"}, CapacityError),
        (0, {"code": "InternalOperationError", "message": "broken"}, MlbenchError),
        (409, {"error": {"code": "ResourceGroupBeingDeleted", "message": "it goes"}}, BusyError),
        (404, {"error": {"code": "ResourceNotFound", "message": "The Resource was not found"}}, NotFoundError),
        (404, {"error": {"code": "SubscriptionNotFound", "message": "no such"}}, UsageError),
        (403, {"error": {"code": "AuthorizationFailed", "message": "no"}}, CredentialError),
        (429, {"error": {"code": "TooManyRequests", "message": "later"}}, TransientError),
        (502, {"code": "", "message": "<html>a proxy</html>"}, TransientError),
        (400, None, UsageError),
        (400, {"error": "text"}, UsageError),
    ],
)
def test_refusals_are_read_in_every_form(status: int, document: Message | None, kind: type[MlbenchError]) -> None:
    assert type(error_from_answer("create it", status, document, SUBSCRIPTION)) is kind


def test_commands_name_the_subscription_of_a_cluster() -> None:
    cluster = Cluster("rel-2", "aks", account=SUBSCRIPTION, location="eastus")
    assert identity_options(cluster) == f" --subscription {SUBSCRIPTION} --region eastus"


# --- limits ---------------------------------------------------------------------------------------------------------


def new_cluster(nodes: int = 2, **options: Any) -> Cluster:
    return AksProvider().new_cluster("demo-2", nodes, AksOptions(subscription=SUBSCRIPTION, **options))


@pytest.mark.parametrize(("size", "is_allowed"), [(29, False), (30, True), (2048, True), (2049, False)])
def test_disks_of_nodes_have_30_to_2048_gb(size: int, is_allowed: bool) -> None:
    """The limits of `osDiskSizeGB` in AKS' API reference."""
    if is_allowed:
        assert new_cluster(disk_size=size).details["options"]["disk_size"] == size
    else:
        with pytest.raises(UsageError, match="from 30 to 2048 GB"):
            new_cluster(disk_size=size)


def test_a_pool_grows_to_the_maximum_of_azure_and_no_further() -> None:
    """AKS' page on limits: 1000 nodes per node pool."""
    assert new_cluster(1000).details["nodes"] == 1000
    assert new_cluster(0).details["nodes"] == 0
    assert AksProvider().scale(new_cluster(), 1000)
    with pytest.raises(UsageError, match="at most 1000"):
        AksProvider().scale(new_cluster(), 1001)
    with pytest.raises(UsageError, match="0 to 1000"):
        new_cluster(1001)


def test_infiniband_that_is_not_set_up_matters_between_machines_only() -> None:
    size = "Standard_ND96isr_H100_v5"
    assert new_cluster(1, machine_type=size)
    assert new_cluster(2, machine_type=size, slow_network_ok=True)
    with pytest.raises(UsageError, match="between 2 machines NCCL would use TCP"):
        new_cluster(2, machine_type=size)


@pytest.mark.parametrize("size", ["Standard_B2s", "B4ms", "Standard_NC4as_T4_v3"])
def test_system_machines_are_neither_burstable_nor_have_gpus(size: str) -> None:
    """AKS rejects the B series for system pools."""
    with pytest.raises(UsageError, match="at least 2 vCPUs that are not burstable"):
        new_cluster(system_machine_type=size)


def test_a_region_has_up_to_three_zones() -> None:
    assert split_zones("1, 2,eastus-3", "eastus") == ("eastus-1", "eastus-2", "eastus-3")
    for wrong in ("0", "4", "1,1", "", "westus-1"):
        with pytest.raises(UsageError, match="not a list of different zones"):
            split_zones(wrong, "eastus")


@pytest.mark.parametrize(("workers", "limit"), [(0, 1), (1, 1), (3, 3)])
def test_the_autoscaler_may_keep_all_workers_and_other_settings_stay(workers: int, limit: int) -> None:
    sent: list[Any] = []
    azure = SimpleNamespace(
        get=lambda path, what: {"properties": {"vmSize": "s"}}, change=lambda *words: sent.append(words[3])
    )
    hold = object.__new__(AksHold)
    pool = SimpleNamespace(azure=azure, path="p", kind="node pool", name="n", count=workers, operation=None)
    hold.pool = pool  # type: ignore[assignment]
    hold.let_shrink()
    limits = {"vmSize": "s", "enableAutoScaling": True, "minCount": 0, "maxCount": limit}
    assert sent == [{"properties": limits}]


# --- offers and quotas ----------------------------------------------------------------------------------------------

AZURE = Azure(SUBSCRIPTION, "eastus")


def offer_of(**more: Any) -> Offer:
    return Offer("Standard_D4s_v5", "standardDSv5Family", 4, 0, ("1", "2", "3"), can_be_spot=False, **more)


def check_quotas(left: dict[str, int], *, spot: bool) -> None:
    quotas = {name.lower(): {"limit": 100 + number, "currentValue": 100} for name, number in left.items()}
    _check_quotas(AZURE, [Demand(Machine("Standard_D4s_v5"), 2, spot)], [offer_of()], quotas)


@pytest.mark.parametrize(
    ("spot", "left"),
    [(False, {"standardDSv5Family": 8, "cores": 8, "virtualMachines": 2}), (True, {"lowPriorityCores": 8, "cores": 0})],
)
def test_a_quota_that_just_suffices_is_enough_and_spot_machines_have_their_own(
    spot: bool, left: dict[str, int]
) -> None:
    """Azure's page on quotas: spot machines of all sizes share one quota and use no other."""
    check_quotas(left, spot=spot)
    for name in (name for name, number in left.items() if number):
        with pytest.raises(CapacityError, match=f"{name} has {left[name] - 1} of"):
            check_quotas({**left, name: left[name] - 1}, spot=spot)


def test_a_size_that_cannot_be_spot_is_refused_as_spot_only() -> None:
    offers = {"standard_d4s_v5": offer_of()}
    size = Machine("Standard_D4s_v5")
    assert _require_offer(AZURE, offers, Demand(size, 1)) == offer_of()
    with pytest.raises(UsageError, match="not sold as spot"):
        _require_offer(AZURE, offers, Demand(size, 1, spot=True))


def test_a_zone_that_is_refused_is_an_error_only_without_another() -> None:
    offer = offer_of(refused_zones=("1",))
    _check_zones(AZURE, offer, ["1", "2"])
    with pytest.raises(CapacityError, match="may not use Standard_D4s_v5 in zone 1"):
        _check_zones(AZURE, offer, ["1"])


@pytest.mark.parametrize(("processor", "is_arm"), [("Arm64", True), ("x64", False)])
def test_arm_machines_are_told_by_their_capability(processor: str, is_arm: bool) -> None:
    """The values of the capability CpuArchitectureType in the API of resource SKUs."""
    item = {"name": "s", "capabilities": [{"name": "CpuArchitectureType", "value": processor}]}
    assert _offer(item).is_arm is is_arm


# --- prices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "price"),
    [
        ({}, 0.5),
        ({"type": "Reservation"}, None),
        ({"unitOfMeasure": "1 Month"}, None),
        ({"tierMinimumUnits": 100.0}, None),
        ({"productName": "Virtual Machines Dsv5 Series Windows"}, None),
        ({"productName": "Dsv5 Series Cloud Services"}, None),
        ({"skuName": "D4s v5 Low Priority"}, None),
        ({"retailPrice": 0.0}, None),
    ],
)
def test_only_the_hourly_price_of_linux_machines_is_read(more: Message, price: float | None) -> None:
    item = {
        "type": "Consumption",
        "unitOfMeasure": "1 Hour",
        "productName": "Virtual Machines Dsv5 Series",
        "skuName": "D4s v5",
        "tierMinimumUnits": 0.0,
        "retailPrice": 0.5,
    }
    assert read_price({**item, **more}) == price


# --- requests -------------------------------------------------------------------------------------------------------


class Answer:
    """A response of Azure."""

    def __init__(self, status: int, document: Message | None = None, **headers: str) -> None:
        self.status_code = status
        self.headers = {key.replace("_", "-"): value for key, value in headers.items()}
        self.content = b"" if document is None else json.dumps(document).encode()


@pytest.fixture
def poll(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What polling an operation returns for a response."""

    def ask(answer: Answer) -> tuple[bool, float]:
        monkeypatch.setattr(api, "client", lambda: SimpleNamespace(send_request=lambda request, **_: answer))
        operation = Operation("https://management.azure.com/operations/1")
        is_done = AZURE.poll(operation, "The cluster was not created")
        return is_done, operation.next_time - time.monotonic()

    return ask


@pytest.mark.parametrize(
    ("status", "document", "is_done"),
    [
        (202, None, False),
        (200, None, True),
        (200, {"status": "InProgress"}, False),
        (200, {"status": "Succeeded"}, True),
        (404, {"error": {"code": "NotFound", "message": "gone"}}, True),
    ],
)
def test_an_operation_is_done_when_azure_says_so(poll: Any, status: int, document: Any, is_done: bool) -> None:
    """Azure's page on asynchronous operations: by `status`, or for a Location URL by the end of 202."""
    assert poll(Answer(status, document))[0] is is_done


@pytest.mark.parametrize("state", ["Failed", "Canceled"])
def test_an_operation_that_ended_badly_raises_azures_words(poll: Any, state: str) -> None:
    with pytest.raises(MlbenchError, match="none left"):
        poll(Answer(200, {"status": state, "error": {"code": "Other", "message": "none left"}}))
    with pytest.raises(MlbenchError, match=state):
        poll(Answer(200, {"status": state}))


@pytest.mark.parametrize(("asked", "waits"), [("10", 10), ("30", 30), ("600", 30)])
def test_azure_sets_the_pause_between_polls_up_to_half_a_minute(poll: Any, asked: str, waits: int) -> None:
    _, pause = poll(Answer(202, None, Retry_After=asked))
    assert waits - 1 < pause <= waits


@pytest.mark.parametrize(
    ("state", "is_usable"),
    [("Enabled", True), ("Warned", True), ("PastDue", True), ("Disabled", False), ("Deleted", False)],
)
def test_a_subscription_works_until_it_is_disabled(state: str, is_usable: bool) -> None:
    """Azure's page on subscription states."""
    assert api._is_enabled({"state": state}) is is_usable


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/subscriptions", "?api-version=2022-12-01"),
        ("/subscriptions/s/resourcegroups/g", "?api-version=2021-04-01"),
        ("/subscriptions/s/providers/Microsoft.Compute/skus?$filter=x", "&api-version=2021-07-01"),
        ("/subscriptions/s/providers/Microsoft.Compute/locations/l/usages", "?api-version=2024-07-01"),
        ("/subscriptions/s?api-version=1", "?api-version=1"),
    ],
)
def test_every_request_names_the_version_of_its_service(path: str, version: str) -> None:
    assert api._url_of(path) == f"https://management.azure.com{path.removesuffix(version)}{version}"


def test_an_unknown_path_is_not_taken_for_an_unknown_subscription() -> None:
    words = "The Resource 'x' in the subscription s was not found."
    assert type(error_from_answer("show it", 404, {"code": "Other", "message": words}, SUBSCRIPTION)) is NotFoundError
    words = "The subscription 's' could not be found."
    assert type(error_from_answer("show it", 404, {"code": "Other", "message": words}, SUBSCRIPTION)) is UsageError


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("not registered to use namespace 'Microsoft.Compute'.", "Microsoft.Compute"),
        ("register Microsoft.Network/virtualNetworks first", "Microsoft.Network"),
        ("not registered", "Microsoft.ContainerService"),
    ],
)
def test_the_provider_to_register_is_read_from_the_refusal(words: str, name: str) -> None:
    assert f"--namespace {name} --wait" in register_command(words, SUBSCRIPTION)
