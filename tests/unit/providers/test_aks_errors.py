"""Azure's refusals: what passes and is tried again, and what lasts. The words are Azure's own."""

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, UsageError
from providers.aks.api import BUSY_WORDS, error_from_answer
from providers.base import BusyError


def answer(status: int, code: str = "Conflict", message: str = "words") -> MlbenchError:
    return error_from_answer("create it", status, {"error": {"code": code, "message": message}}, "sub")


@pytest.mark.parametrize("words", BUSY_WORDS)
@pytest.mark.parametrize(("status", "is_busy"), [(409, True), (0, True), (400, False), (403, False), (404, False)])
def test_another_operation_in_progress_is_busy_only_as_a_conflict(words: str, status: int, is_busy: bool) -> None:
    """A bad request or a missing right whose text happens to have these words stays what it is."""
    assert isinstance(answer(status, "Other", f"An operation is {words} here."), BusyError) is is_busy


@pytest.mark.parametrize("code", ["EtagMismatch", "ResourceGroupBeingDeleted", "PrincipalNotFound"])
def test_codes_of_something_that_ends_first_are_busy_with_any_status(code: str) -> None:
    assert isinstance(answer(400, code), BusyError)


def test_a_stock_out_is_about_capacity_whatever_its_status() -> None:
    assert isinstance(answer(409, "ZonalAllocationFailed", "in progress"), CapacityError)
    assert isinstance(answer(400, "QuotaExceeded"), CapacityError)


# Sources: SupportArticles-docs 1834, Azure/AKS 4113, azure-dev 1409,
# Azure/azure-cli 32567 and 29559, learn-terraform-provision-aks-cluster 15, Azure/AKS 5746 and 1607,
# rancher/rancher 20784.
@pytest.mark.parametrize(
    ("status", "code", "said", "kind", "hint"),
    [
        (
            *(403, "RequestDisallowedByAzure"),
            "Resource 'x' was disallowed by Azure: This policy maintains a set of best available regions where your "
            "subscription can deploy resources.",
            *(UsageError, "--region"),
        ),
        (
            *(400, "BadRequest"),
            "The VM size of Standard_B2s is not allowed in your subscription in location 'westus2'.",
            *(CapacityError, "--machine-type"),
        ),
        (400, "SkuNotAvailableForSubscription", "words", CapacityError, "support"),
        (
            *(400, "AksCapacityHeavyUsage"),
            "Creating or starting a free tier cluster is unavailable at this time in region eastus.",
            *(CapacityError, "--tier standard"),
        ),
        (0, "AKSCapacityError", "Creating a new cluster is unavailable at this time.", CapacityError, "--region"),
        (0, "PublicIPCountLimitReached", "Cannot create more than 20 public IP addresses", CapacityError, "more at"),
        (
            *(401, "InvalidAuthenticationTokenTenant", "The access token is from the wrong issuer"),
            *(CredentialError, "az login --tenant"),
        ),
        (
            400,
            "InsufficientSubnetSize",
            "Pre-allocated IPs 333 exceeds IPs available in Subnet",
            CapacityError,
            "--subnet",
        ),
        (
            0,
            "VMExtensionProvisioningError",
            "Unable to establish outbound connection from agents",
            MlbenchError,
            "ports",
        ),
        (0, "Failed", "VM has reported a failure when processing extension 'vmssCSE'", MlbenchError, "--subnet"),
        (409, "ScopeLocked", "The scope '/x' cannot perform delete: following scope(s) are locked", UsageError, "lock"),
        (409, "K8sVersionNotSupported", "version 1.30 is only available for LTS", UsageError, "get-versions"),
        (409, "AvailabilityZoneNotSupported", "The zone(s) '1' for 'workers' is not supported", UsageError, "--zones"),
    ],
)
def test_the_cause_is_told_from_the_words(
    status: int, code: str, said: str, kind: type[MlbenchError], hint: str
) -> None:
    error = answer(status, code, said)
    assert type(error) is kind
    assert hint in (error.hint or "")
