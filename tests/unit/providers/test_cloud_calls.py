"""What Google's and Azure's libraries raise, and what that means: the error's class, its words and the next step."""

from typing import Any

import pytest
import requests
from google.api_core import exceptions as google_errors
from google.auth import exceptions as auth_errors

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from providers.base import BusyError, RightsError, TransientError
from providers.gke import api as gke
from providers.gke import quota
from providers.gke.options import Machine
from providers.gke.quota import Demand, Purchase
from providers.machines import Quota

# --- Google: answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "hint"),
    [
        (google_errors.NotFound("x"), NotFoundError, None),
        (google_errors.Unauthenticated("x"), CredentialError, "application-default login"),
        (google_errors.Forbidden("x"), RightsError, "roles container.admin and iam.serviceAccountUser in demo"),
        (
            google_errors.PermissionDenied("SERVICE_DISABLED"),
            RightsError,
            "services enable container.googleapis.com",
        ),
        (
            google_errors.Forbidden("Kubernetes has not been used in project 12 before"),
            RightsError,
            "services enable container.googleapis.com --project demo",
        ),
        (google_errors.InternalServerError("x"), TransientError, None),
        (google_errors.ServiceUnavailable("x"), TransientError, "Check the network"),
        (google_errors.GatewayTimeout("x"), TransientError, "Check the network"),
        (google_errors.TooManyRequests("x"), TransientError, None),
        (google_errors.Cancelled("x"), TransientError, None),
        (google_errors.Unknown("x"), TransientError, None),
        (google_errors.InvalidArgument('Location "us-nowhere1" does not exist'), UsageError, "compute zones list"),
        (google_errors.InvalidArgument("al-location failed"), UsageError, None),
        (google_errors.AlreadyExists("x"), UsageError, None),
        (google_errors.OutOfRange("x"), UsageError, None),
        (google_errors.MethodNotAllowed("x"), MlbenchError, None),
    ],
)
def test_a_class_of_google_is_an_error_with_its_next_step(
    error: Exception, kind: type[MlbenchError], hint: str | None
) -> None:
    found = gke.error_from_exception(error, "create cluster", "demo")
    assert type(found) is kind
    assert found.message.startswith('Google refused to create cluster: "')
    assert (found.hint is None) if hint is None else hint in str(found.hint)


@pytest.mark.parametrize("words", gke.BUSY)
def test_another_operation_on_the_cluster_is_waited_for(words: str) -> None:
    for kind in (google_errors.FailedPrecondition, google_errors.Aborted):
        assert type(gke.error_from_exception(kind(f"it {words} now"), "x", "demo")) is BusyError
    assert type(gke.error_from_exception(google_errors.InvalidArgument(f"it {words}"), "x", "demo")) is UsageError


@pytest.mark.parametrize("words", gke.STOCK_OUT)
def test_a_lack_of_machines_is_no_lack_of_quota(words: str) -> None:
    found = gke.capacity_error(f"The zone: {words}", "demo")
    assert found.details == {"reason": "stock_out"}
    assert "--zones a,b,c" in str(found.hint)
    assert gke.capacity_error("refused", "demo", words).details == {"reason": "stock_out"}
    assert gke.capacity_error("refused", "demo").details == {"reason": "quota"}


@pytest.mark.parametrize(
    ("quota", "value", "region", "is_command"),
    [
        ("CPUS", 16.4, "us-east1", True),
        ("CPUS", None, "us-east1", False),
        ("CPUS", 16.0, None, False),
        ("GPUS_ALL_REGIONS", 4.0, None, True),
        ("GPU_FAMILY:NVIDIA_H100", 8.0, "us-east1", False),
    ],
)
def test_a_quota_without_a_place_or_a_value_is_asked_for_on_a_page(
    quota: str, value: float | None, region: str | None, is_command: bool
) -> None:
    hint = gke.raise_quota("demo", quota, value, region)
    assert hint.startswith("gcloud beta quotas preferences create") is is_command
    assert "quotas?project=demo" in hint


@pytest.mark.parametrize(
    ("error", "kind", "says", "hint"),
    [
        (auth_errors.RefreshError("Token expired"), CredentialError, "rejected the credentials", gke.SET_CLOCK),
        (auth_errors.RefreshError("invalid_grant"), CredentialError, "rejected the credentials", gke.LOGIN),
        (auth_errors.TransportError("refused"), TransientError, "sign-in cannot be reached", gke.UNREACHED),
        (auth_errors.MalformedError("bad key"), CredentialError, "cannot be used: bad key", gke.LOGIN),
        (google_errors.NotFound("no such"), NotFoundError, "Google refused to look", None),
        (
            requests.ConnectionError("no route"),
            TransientError,
            "The service cannot be reached: no route",
            gke.UNREACHED,
        ),
        (requests.Timeout("late"), TransientError, "The service cannot be reached: late", gke.UNREACHED),
    ],
)
def test_what_googles_libraries_raise_is_an_error_of_mlbench(
    error: Exception, kind: type[MlbenchError], says: str, hint: str | None
) -> None:
    with pytest.raises(MlbenchError, match=says) as caught, gke.map_rest_errors("The service", "look", "demo"):
        raise error
    assert type(caught.value) is kind
    assert caught.value.hint == hint
    with pytest.raises(ZeroDivisionError), gke.map_rest_errors("The service", "look", "demo"):
        raise ZeroDivisionError


# --- Google: who one is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "region"),
    [("us-east1-b", "us-east1"), ("us-east1", "us-east1"), ("-", "-"), ("europe-west4-a", "europe-west4")],
)
def test_a_place_of_google_is_in_a_region(place: str, region: str) -> None:
    assert gke.region_of(place) == region


# --- Azure ----------------------------------------------------------------------------------------------------------


# --- Google: machines and quotas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("purchase", "limits", "names"),
    [
        (Purchase.ON_DEMAND, {"PREEMPTIBLE_CPUS": 9.0}, ("CPUS",)),
        (Purchase.SPOT, {"PREEMPTIBLE_CPUS": 9.0}, ("PREEMPTIBLE_CPUS",)),
        (Purchase.SPOT, {"PREEMPTIBLE_CPUS": 0.0}, ("CPUS",)),
        (Purchase.SPOT, {}, ("CPUS",)),
        (Purchase.FLEX_START, {"PREEMPTIBLE_CPUS": 0.0}, ("PREEMPTIBLE_CPUS",)),
        (Purchase.FLEX_START, {}, ("CPUS",)),
    ],
)
def test_the_quota_of_a_way_of_buying_is_googles(
    purchase: Purchase, limits: dict[str, float], names: tuple[str, ...]
) -> None:
    """Compute Engine's page on allocation quotas: spot machines use the standard quota without a preemptible one."""
    assert purchase.order_quotas("CPUS", limits) == names


def quotas_of(**items: tuple[float, float]) -> Any:
    """A Compute Engine with these quotas: limit and usage."""
    found = object.__new__(quota.Compute)
    found.project = "demo"
    listed = {name: Quota.of_use(name, limit, usage) for name, (limit, usage) in items.items()}
    found.quotas = lambda region: listed  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("demand", "quotas", "lacks"),
    [
        (Demand(Machine("n1-standard-8"), 2, 100, "pd-balanced"), {"SSD_TOTAL_GB": (199.0, 0.0)}, "SSD_TOTAL_GB"),
        (Demand(Machine("n1-standard-8"), 2, 100, "pd-balanced"), {"SSD_TOTAL_GB": (200.0, 0.0)}, None),
        (
            Demand(Machine("n4-standard-8"), 2, 100, "hyperdisk-balanced"),
            {"HDB_TOTAL_GB": (199.0, 0.0)},
            "HDB_TOTAL_GB",
        ),
        (Demand(Machine("n1-standard-8"), 2, 100, None), {"SSD_TOTAL_GB": (0.0, 0.0)}, None),
        (Demand(Machine("n1-standard-8"), 2, 100, None), {"IN_USE_ADDRESSES": (1.0, 0.0)}, "IN_USE_ADDRESSES"),
        (Demand(Machine("n1-standard-8"), 2, 100, None), {"INSTANCES": (1.0, 0.0)}, "INSTANCES"),
        (Demand(Machine("n1-standard-8"), 2, 100, None), {"CPUS_ALL_REGIONS": (15.0, 0.0)}, "CPUS_ALL_REGIONS"),
        (Demand(Machine("n1-standard-8"), 0, 100, None), {"INSTANCES": (0.0, 0.0), "CPUS": (0.0, 0.0)}, None),
        (Demand(Machine("n2-standard-8"), 2, 100, None), {"N2_CPUS": (15.0, 0.0), "CPUS": (99.0, 0.0)}, "N2_CPUS"),
        (Demand(Machine("n2-standard-8"), 2, 100, None), {"CPUS": (15.0, 0.0)}, "CPUS"),
        (
            Demand(Machine("g2-standard-8", "nvidia-l4", 1), 2, 9, None),
            {"NVIDIA_L4_GPUS": (1.0, 0.0)},
            "NVIDIA_L4_GPUS",
        ),
        (Demand(Machine("g2-standard-8", "nvidia-l4", 1), 2, 9, None), {"GPUS_ALL_REGIONS": (1.0, 0.0)}, "GPUS_ALL"),
    ],
)
def test_each_quota_is_compared_with_what_two_machines_take(
    demand: Demand, quotas: dict[str, tuple[float, float]], lacks: str | None
) -> None:
    found = quotas_of(**quotas)
    if lacks is None:
        found.check_quotas("us-east1", [demand], [8], {"NETWORKS": 0}, public_addresses=True)
        return
    with pytest.raises(CapacityError, match=lacks):
        found.check_quotas("us-east1", [demand], [8], {"NETWORKS": 0}, public_addresses=True)
