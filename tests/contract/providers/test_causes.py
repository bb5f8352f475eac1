"""Refusals of clouds that people met: the class of the error and the next command follow from the cloud's own words."""

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, UsageError
from providers.aks.api import error_from_answer
from providers.base import RightsError
from providers.eks.api import error_from_code
from providers.gke.api import map_cloud_errors


@pytest.mark.parametrize(
    ("code", "words", "kind", "hint"),
    [
        ("ScopeLocked", "The scope '/x' cannot perform delete: following scope(s) are locked", UsageError,
         "az lock list"),
        ("K8sVersionNotSupported", "version 1.30 is only available for LTS", UsageError,
         "get-versions"),
        ("AvailabilityZoneNotSupported", "The zone(s) '1' for 'workers' is not supported", UsageError, "--zones"),
    ],
)  # fmt: skip
def test_azure(code: str, words: str, kind: type[MlbenchError], hint: str) -> None:
    error = error_from_answer("make it", 409, {"error": {"code": code, "message": f"{code}: {words}"}}, "s")
    assert type(error) is kind
    assert hint in str(error.hint)


@pytest.mark.parametrize(
    ("code", "words", "kind", "hint"),
    [
        ("InvalidRequestException", "Failed to create service linked role: AWSServiceRoleForAmazonEKSNodegroup",
         CredentialError, "create-service-linked-role --aws-service-name eks-nodegroup.amazonaws.com"),
        ("Ec2SubnetInvalidConfiguration", "One or more Amazon EC2 Subnets of [subnet-1] does not automatically assign "
         "public IP addresses; Ec2SubnetInvalidConfiguration", UsageError, "--map-public-ip"),
        ("TagPolicyViolation", "The tag policy does not allow the specified value for the following tag key: 'Team'.",
         UsageError, "--tag NAME=VALUE"),
        ("UnauthorizedOperation", "You are not authorized to perform: ec2:RunInstances with an explicit deny in a "
         "service control policy", RightsError, "--tag NAME=VALUE"),
    ],
)  # fmt: skip
def test_aws(code: str, words: str, kind: type[MlbenchError], hint: str) -> None:
    error = error_from_code(code, words, words)
    assert type(error) is kind
    assert hint in str(error.hint)


@pytest.mark.parametrize(
    ("words", "kind", "hint"),
    [
        ("Artifact Registry API has not been used in project 123 before or it is disabled. Enable it by visiting "
         "https://console.developers.google.com/apis/api/artifactregistry.googleapis.com/overview?project=123",
         CredentialError, "gcloud services enable artifactregistry.googleapis.com"),
        ("Compute Engine API has not been used in project 123 before or it is disabled. Enable it by visiting "
         "https://console.developers.google.com/apis/api/compute.googleapis.com/overview?project=123",
         CredentialError, "gcloud services enable compute.googleapis.com"),
        ("Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: abc", CredentialError,
         "service perimeter"),
        ("Required 'compute.networks.get' permission for 'projects/p/global/networks/own'", CredentialError,
         "roles/compute.networkUser"),
        ("network does not have available private IP space in 10.0.0.0/8 to reserve a /14 block", CapacityError,
         "--pods-range"),
    ],
)  # fmt: skip
def test_google(words: str, kind: type[MlbenchError], hint: str) -> None:
    from google.api_core.exceptions import PermissionDenied

    with pytest.raises(MlbenchError) as caught, map_cloud_errors("make it", "p"):
        raise PermissionDenied(words)
    assert caught.value.exit_code == kind.exit_code
    assert hint in str(caught.value.hint)
