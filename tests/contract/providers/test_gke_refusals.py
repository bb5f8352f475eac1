"""Refusals of Google that have a cause by name and a next command: quotas as 403, organizations' policies, networks."""

from collections.abc import Callable
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError
from providers.gke.api import error_from_words
from tests.fakes.gke import World

CREATE = ("create-cluster", "gke", "2", "rel", "--gpu-type", "l4", "--yes")
DELETE = ("delete-cluster", "gke", "rel-2", "--yes")


def test_a_quota_that_gke_refuses_as_403_is_a_quota_with_its_name_and_bill(
    command: Callable[..., Any], gke_world: World
) -> None:
    gke_world.quotas["SSD_TOTAL_GB"] = 500
    gke_world.taken_later["SSD_TOTAL_GB"] = 400
    refused = command(*CREATE, "-o", "json")
    assert refused.code == 5, refused.err
    error = refused.json["error"]
    assert 'resource "SSD_TOTAL_GB"' in error["message"]
    assert "GKE cluster rel-2 (ready)" in error["message"]  # which costs money already
    assert "USD an hour" in error["message"]
    wanted = "--quota-id SSD-TOTAL-GB-per-project-region --preferred-value 600 --dimensions region=europe-west1"
    assert (
        f"gcloud beta quotas preferences create --service compute.googleapis.com --project demo-project {wanted}"
        in (error["hint"])
    )
    assert "container.admin" not in error["hint"]
    assert error["details"]["quota"] == "SSD_TOTAL_GB"
    gke_world.taken_later.clear()
    assert command(*CREATE).code == 0  # continues with what exists
    assert command(*DELETE).code == 0


def test_a_limit_of_clusters_is_a_quota(command: Callable[..., Any], gke_world: World) -> None:
    gke_world.max_clusters = 0
    refused = command(*CREATE)
    assert refused.code == 5, refused.err
    assert "cannot create more than 0 clusters" in refused.err


def test_a_quota_ends_the_search_for_zones(command: Callable[..., Any], gke_world: World) -> None:
    gke_world.quotas["SSD_TOTAL_GB"] = 500
    gke_world.taken_later["SSD_TOTAL_GB"] = 400
    refused = command(*CREATE, "--zones", "europe-west1-b,europe-west1-d")
    assert refused.code == 5, refused.err
    assert sum(line.startswith("CreateNodePool") for line in gke_world.log) == 1
    assert command(*DELETE).code == 0


@pytest.mark.parametrize(
    ("failure", "code", "hint"),
    [
        ("addresses", 5, "--subnetwork"),
        ("external", 2, "--private-nodes"),
        ("account", 2, "--service-account"),
        ("unregistered", 1, "firewall"),
    ],
)
def test_a_pool_that_fails_for_a_known_reason_names_the_option(
    command: Callable[..., Any], gke_world: World, failure: str, code: int, hint: str
) -> None:
    gke_world.failing["CreateNodePool"] = failure
    refused = command(*CREATE)
    assert refused.code == code, refused.err
    assert hint in refused.err
    assert "tries again" not in refused.err
    gke_world.failing.clear()
    assert command(*DELETE).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        ('Network "default" does not exist.', 2, "--network"),
        ('Network "default" uses manual subnet mode and requires specifying a subnetwork.', 2, "--subnetwork"),
        ('Network "vpc" requires specifying a subnetwork.', 2, "--subnetwork"),
        ('Project "p" has no network named "default".', 2, "--network"),
        ("This API method requires billing to be enabled. Please enable billing on project #p.", 2, "billing projects"),
        ("Project p (#1) has billing disabled. Please enable it.", 2, "billing projects link"),
        ("The project to be billed is associated with a closed billing account.", 2, "billing projects link"),
        ("The x.googleapis.com API requires a quota project, which is not set by default.", 3, "set-quota-project"),
        ("Caller does not have required permission to use project p. Grant the", 3, "set-quota-project"),
        (
            *('Operation denied by org policy on resource \'projects/1\': ["customConstraints/custom.team": "x"]', 2),
            "--tag NAME=VALUE",
        ),
        ("Consumer 1 should enable service:container.googleapis.com before generating a", 2, "gcloud services enable"),
        ("Generic::not_found: Not found; Gaia id not found for email 1-compute@a.", 2, "--service-account"),
        ("Service account 1-compute@developer.gserviceaccount.com is disabled.", 2, "--service-account"),
        ('This operation will exceed max secondary ranges per subnetwork (30) for subnet "default"', 5, "another one"),
        ("Constraint constraints/compute.vmExternalIpAccess violated for project 1.", 2, "--private-nodes"),
        ("Constraint constraints/gcp.resourceLocations violated for project 1.", 2, "organization"),
        ("Subnetwork allocation is invalid.", 2, None),
        ('Location "europe-west1-q" does not exist.', 2, "gcloud compute zones list"),
    ],
)
def test_policies_and_networks_are_named(
    command: Callable[..., Any], gke_world: World, words: str, code: int, hint: str | None
) -> None:
    gke_world.policies["CreateCluster"] = words
    refused = command(*CREATE)
    assert refused.code == code, refused.err
    assert words in refused.err
    if hint:
        assert hint in refused.err
    else:
        assert "zones list" not in refused.err


SHARED = (
    *("--network", "projects/host/global/networks/net"),
    *("--subnetwork", "projects/host/regions/europe-west1/subnetworks/net-1"),
)


def test_a_shared_network_takes_the_ranges_of_its_host_project(command: Callable[..., Any], gke_world: World) -> None:
    gke_world.shared_ranges = {"pods", "services"}
    refused = command(*CREATE, *SHARED)
    assert refused.code == 2, refused.err
    assert "--pods-range" in refused.err
    assert "list-usable --network-project host" in refused.err
    assert not any(line.startswith("CreateCluster") for line in gke_world.log)
    refused = command(*CREATE, *SHARED, "--pods-range", "pods", "--services-range", "other")
    assert refused.code == 2, refused.err
    assert "list-usable" in refused.err
    made = command(*CREATE, *SHARED, "--pods-range", "pods", "--services-range", "services", "--private-nodes")
    assert made.code == 0, made.err
    (cluster,) = gke_world.clusters.values()
    assert cluster.ip_allocation_policy.cluster_secondary_range_name == "pods"
    assert cluster.network_config.default_enable_private_nodes
    assert command(*DELETE).code == 0


def test_a_host_project_that_has_not_let_gke_in_is_named(command: Callable[..., Any], gke_world: World) -> None:
    gke_world.policies["CreateCluster"] = (
        "Google Compute Engine: Required 'compute.subnetworks.use' permission for "
        "'projects/host/regions/europe-west1/subnetworks/net-1'."
    )
    refused = command(*CREATE, *SHARED, "--pods-range", "pods", "--services-range", "services")
    assert refused.code == 3, refused.err
    assert "hostServiceAgentUser" in refused.err


def test_the_other_form_of_a_lack_of_quota_gives_the_command_that_asks_for_more() -> None:
    words = (
        "Insufficient regional quota to satisfy request for resource: \"SSD_TOTAL_GB\". The request requires '300.0' "
        "and is short '100.0'. The regional quota is '500.0' with '200.0' available."
    )
    error = error_from_words(f'Google refused to create it in europe-west1-b: "{words}"', words, "p")
    assert isinstance(error, CapacityError)
    assert "--quota-id SSD-TOTAL-GB-per-project-region --preferred-value 600" in str(error.hint)
