"""Which VM sizes the options choose on AKS, Azure's limits and quotas, and what Azure's refusals become."""

import pytest

from mlbench_cli.errors import CapacityError, MlbenchError, NotFoundError, UsageError
from providers.aks.api import Message, error_from_answer
from providers.aks.options import GPU_MACHINES, choose_machine
from providers.aks.quota import read_price
from providers.base import BusyError, RightsError, TransientError

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
        (403, {"error": {"code": "AuthorizationFailed", "message": "no"}}, RightsError),
        (429, {"error": {"code": "TooManyRequests", "message": "later"}}, TransientError),
        (502, {"code": "", "message": "<html>a proxy</html>"}, TransientError),
        (400, None, UsageError),
        (400, {"error": "text"}, UsageError),
    ],
)
def test_refusals_are_read_in_every_form(status: int, document: Message | None, kind: type[MlbenchError]) -> None:
    assert type(error_from_answer("create it", status, document, SUBSCRIPTION)) is kind


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
