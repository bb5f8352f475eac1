"""What EKS' machines start with, when a group that gets no more of them is given up, and AWS' limits for them."""

from datetime import date, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.model.run import Cluster
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from providers.eks.quota import Version, choose_version
from providers.eks.resources import LaunchTemplate, NodeGroup, is_in_use
from tests.fakes.aws_operations import check_operation

STOCK_OUT = (
    "We currently do not have sufficient g5.xlarge capacity in the Availability Zone you requested (eu-west-1a). "
    "Launching EC2 instance failed."
)


class Aws:
    """Notes the calls; answers those of the auto scaling group."""

    region = "eu-west-1"

    def __init__(self, running: int = 0) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        self._running = running

    def call(self, service: str, operation: str, **arguments: Any) -> dict[str, Any]:
        check_operation(service, operation)
        self.calls[operation] = arguments
        if operation == "describe_scaling_activities":
            return {"Activities": [{"StatusCode": "Failed", "StatusMessage": STOCK_OUT}]}
        if operation == "describe_auto_scaling_groups":
            return {"AutoScalingGroups": [{"Instances": [{}] * self._running}]}
        return {}


def plane_of(aws: Aws) -> Any:
    cluster = SimpleNamespace(name="rel-2", created="2026-01-01T00:00:00Z", identity="x", details={}, provider="eks")
    return SimpleNamespace(cluster=cluster, aws=aws, name="rel-2")


def test_the_metadata_of_machines_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """IMDSv2: a pod that can be made to fetch an address does not get the machine's credentials."""
    monkeypatch.setattr("providers.eks.resources.ownership_tags", lambda cluster: {})
    aws = Aws()
    LaunchTemplate(plane_of(aws), 100, None).create()
    data = aws.calls["create_launch_template"]["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["BlockDeviceMappings"][0]["Ebs"]["DeleteOnTermination"] is True


@pytest.mark.parametrize(("running", "is_given_up"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_group_that_has_all_its_machines_is_not_given_up_for_an_earlier_stock_out(
    running: int, is_given_up: bool
) -> None:
    group = SimpleNamespace(name="rel-2-workers", count=2)
    node_group = NodeGroup(plane_of(Aws(running)), SimpleNamespace(), group, ())  # type: ignore[arg-type]
    error = node_group._launch_failure({"resources": {"autoScalingGroups": [{"name": "asg"}]}})
    assert isinstance(error, CapacityError) is is_given_up


# --- AWS' limits ----------------------------------------------------------------------------------------------------


def new_cluster(count: int = 2, **options: Any) -> Cluster:
    return EksProvider().new_cluster("demo-2", count, EksOptions(region="eu-west-1", **options))


@pytest.mark.parametrize(("size", "is_allowed"), [(19, False), (20, True), (16384, True), (16385, False)])
def test_a_gp3_disk_has_up_to_16_tib_and_room_for_the_image_with_a_driver(size: int, is_allowed: bool) -> None:
    if is_allowed:
        assert new_cluster(disk_size=size).details["options"]["disk_size"] == size
    else:
        with pytest.raises(UsageError, match="from 20 to 16384 GB"):
            new_cluster(disk_size=size)


# --- reservations and places ----------------------------------------------------------------------------------------


# --- versions -------------------------------------------------------------------------------------------------------

TODAY = date(2026, 11, 1)


@pytest.mark.parametrize(("days", "chosen"), [(61, "1.33"), (60, "1.34"), (-1, "1.34")])
def test_a_default_whose_support_ends_within_60_days_is_passed_over(days: int, chosen: str) -> None:
    newest = Version("1.34", TODAY + timedelta(days=400), is_default=False)
    default = Version("1.33", TODAY + timedelta(days=days), is_default=True)
    found = choose_version([newest, default], TODAY)
    assert found is not None
    assert found.name == chosen


# --- networks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "is_used"), [("available", False), ("detaching", False), ("in-use", True), ("attaching", True)]
)
def test_an_interface_that_is_being_detached_is_no_longer_in_use(state: str, is_used: bool) -> None:
    assert is_in_use({"Status": state}) is is_used


# --- machines -------------------------------------------------------------------------------------------------------
