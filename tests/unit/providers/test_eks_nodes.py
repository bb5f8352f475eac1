"""What EKS' machines start with, and when a group that gets no more of them is given up."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError
from providers.eks.nodes import LaunchTemplate, NodeGroup

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
    monkeypatch.setattr("providers.eks.nodes.ownership_tags", lambda cluster: {})
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
