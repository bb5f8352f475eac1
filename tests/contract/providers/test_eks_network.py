"""A network that others have put things into is removed all the same, and its paid parts are not kept waiting."""

from pathlib import Path

import pytest

from mlbench_cli.errors import CapacityError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.eks import resources
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from providers.lifecycle import Step, down
from tests.contract.providers.eks_world import make
from tests.fakes.aws_server import AwsClient

CPU = EksOptions(machine_type="m5.large")
GPU = EksOptions(machine_type="g4dn.xlarge")
RULES = {"guardduty": False, "detach_looks": 0, "crossed_groups": False, "launch_fails": None, "started": 0}


@pytest.fixture(autouse=True)
def calm(aws: AwsClient) -> None:
    aws.rules(**RULES)


def remove_patiently(name: str, home: Path, patience: float = 10.0) -> list[Step]:
    steps: list[Step] = []
    home.mkdir(exist_ok=True)
    cluster = Cluster(name, "eks")
    down(cluster, EksProvider().resources(cluster), Store(home), report=steps.append, patience=patience)
    return steps


@pytest.mark.slow
def test_an_endpoint_of_guardduty_that_comes_back_is_deleted_again(aws: AwsClient, tmp_path: Path) -> None:
    aws.rules(guardduty=True)
    make("guarded-2", tmp_path / "home", CPU)
    assert any(item.startswith("endpoint") for item in aws.list_left("guarded-2"))
    steps = remove_patiently("guarded-2", tmp_path / "home", patience=0.2)  # being deleted is not an error
    assert any("guardduty-data) is being deleted" in step.reason for step in steps)
    assert aws.list_left("guarded-2") == []
    asked = [entry for entry in aws.log("me") if entry["action"] == "ec2:DeleteVpcEndpoints"]
    assert len(asked) >= 2


@pytest.mark.slow
def test_rules_between_groups_are_revoked_before_the_groups_are_deleted(aws: AwsClient, tmp_path: Path) -> None:
    aws.rules(crossed_groups=True)
    make("crossed-2", tmp_path / "home", CPU)
    remove_patiently("crossed-2", tmp_path / "home")
    assert aws.list_left("crossed-2") == []
    actions = [entry["action"] for entry in aws.log("me")]
    assert actions.index("ec2:RevokeSecurityGroupIngress") < actions.index("ec2:DeleteSecurityGroup")


@pytest.mark.slow
def test_interfaces_that_detach_slowly_are_waited_for(aws: AwsClient, tmp_path: Path) -> None:
    """Longer than errors are borne: it is none."""
    aws.rules(detach_looks=5)
    make("slow-2", tmp_path / "home", CPU)
    steps = remove_patiently("slow-2", tmp_path / "home", patience=0.05)
    assert any("is detaching" in step.reason for step in steps)
    assert aws.list_left("slow-2") == []


@pytest.mark.slow
def test_what_costs_money_goes_before_the_last_interface(
    aws: AwsClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ten minutes the stack's deletion is requested: NAT gateway and address do not wait for an interface."""
    aws.rules(detach_looks=12)
    make("paid-2", tmp_path / "home", CPU)
    monkeypatch.setattr(resources, "OCCUPIED_SECONDS", 0.0)
    remove_patiently("paid-2", tmp_path / "home")
    asked = [(entry["action"], entry["target"]) for entry in aws.log("me")]
    # Asked for again when the interface was gone.
    assert asked.count(("cloudformation:DeleteStack", "mlbench-paid-2")) > 1
    assert aws.list_left("paid-2") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        "We currently do not have sufficient g4dn.xlarge capacity in the Availability Zone you requested (eu-west-1a).",
        "Could not launch On-Demand Instances. VcpuLimitExceeded - You have requested more vCPU capacity.",
    ],
)
def test_some_machines_of_many_are_reported_at_once_with_their_number(
    aws: AwsClient, tmp_path: Path, said: str
) -> None:
    """The newest activity is a machine that came; the failure stands before it."""
    aws.rules(launch_fails=said, started=3)
    name = f"part{len(said)}-4"
    with pytest.raises(CapacityError, match="has 3 of 4 machines and cannot get more") as caught:
        make(name, tmp_path / "home", GPU, nodes=4)
    assert f"node group {name}-workers" in caught.value.message
    aws.rules(**RULES)
    remove_patiently(name, tmp_path / "home")
    assert aws.list_left(name) == []


def test_p5_spot_has_a_quota_of_its_own(aws: AwsClient) -> None:
    provider = EksProvider()
    options = EksOptions(machine_type="p5.48xlarge", spot=True, region="eu-north-1")
    cluster = provider.new_cluster("fast-2", 2, options)
    aws.rules(quotas={"L-C4BD4855": 384.0, "L-7212CCBC": 0.0})
    assert provider.plan(cluster)
    aws.rules(quotas={"L-C4BD4855": 0.0, "L-7212CCBC": 768.0})
    with pytest.raises(CapacityError, match="L-C4BD4855"):
        provider.plan(cluster)
    aws.rules(quotas={})
