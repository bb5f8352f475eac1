"""Which machine has which GPUs, the limits of Google Cloud, its quotas, and how a cluster on GKE is reached."""

import base64

import pytest
from google.api_core import exceptions as google

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, UsageError
from providers.base import BusyError, TransientError
from providers.gke import api
from providers.gke.options import SHAPED, Machine, choose_machine
from tests.needs import needs


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


def test_the_open_dns_name_goes_before_the_address() -> None:
    container = needs("google.cloud.container_v1")
    from providers.gke.api import access_to

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


@pytest.mark.parametrize(
    ("words", "kind", "hint"),
    [
        ("Artifact Registry API has not been used in project 123 before or it is disabled. Enable it by visiting "
         "https://console.developers.google.com/apis/api/artifactregistry.googleapis.com/overview?project=123",
         CredentialError, "gcloud services enable artifactregistry.googleapis.com"),
        ("Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: abc", CredentialError,
         "service perimeter"),
        ("Required 'compute.networks.get' permission for 'projects/p/global/networks/own'", CredentialError,
         "roles/compute.networkUser"),
        ("network does not have available private IP space in 10.0.0.0/8 to reserve a /14 block", CapacityError,
         "--pods-range"),
    ],
)  # fmt: skip
def test_the_cause_is_told_from_the_words(words: str, kind: type[MlbenchError], hint: str) -> None:
    with pytest.raises(MlbenchError) as caught, api.map_cloud_errors("make it", "p"):
        raise google.PermissionDenied(words)
    assert caught.value.exit_code == kind.exit_code
    assert hint in str(caught.value.hint)
