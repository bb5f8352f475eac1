"""What a person can get wrong, or have wrong, for a cluster on a cloud: exit code, the cloud's words, the next command.

And each time nothing half made is left that the store does not know.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import (
    CapacityError,
    CredentialError,
    MlbenchError,
    UnreachableError,
    UsageError,
)
from mlbench_cli.storage.store import Store
from providers.eks.api import Aws
from providers.eks.options import EksOptions
from tests.contract.providers.eks_world import REGION, become_for_a_test, forget, make, remove
from tests.fakes.aws_server import AwsClient
from tests.fakes.azure_arm import World as AzureWorld
from tests.fakes.gke import World

Command = Callable[..., Any]
NAME = "bad-2"


@dataclass(frozen=True)
class Case:
    """`says` is the cloud's or mlbench's own word for it, `next` part of the command that follows."""

    kind: type[MlbenchError]
    says: str
    next: str
    words: tuple[str, ...] = ()
    release: str = "bad"
    environment: dict[str, str] = field(default_factory=dict)
    spoil: Any = None
    recorded: bool = False  # something of it is there, and the store knows


def judge(done: Any, case: Case) -> None:
    assert done.code == case.kind.exit_code, done.err
    assert case.says in done.err
    assert case.next in done.err.partition("\nNext: ")[2], done.err
    assert "Traceback" not in done.err


# --- GKE --------------------------------------------------------------------------------------------------------------


def _token(**answer: str) -> Callable[[World], None]:
    return lambda world: setattr(world, "token_answer", answer)


def _trouble(**trouble: str) -> Callable[[World], None]:
    return lambda world: world.trouble.update(trouble)


GKE = {
    "credentials that are not where they should be": Case(
        CredentialError,
        "/nowhere/key.json was not found",
        "gcloud auth application-default login",
        environment={"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/key.json"},
    ),
    "expired credentials": Case(
        CredentialError,
        "Token has been expired or revoked",
        "gcloud auth application-default login",
        spoil=_token(error="invalid_grant", error_description="Token has been expired or revoked."),
    ),
    "a clock that is wrong": Case(
        CredentialError,
        "Invalid JWT",
        "set this machine's clock",
        spoil=_token(error="invalid_grant", error_description="Invalid JWT: Check your iat and exp values."),
    ),
    "wrong project": Case(
        CredentialError,
        "Permission denied on resource project another",
        "gcloud projects list",
        ("--project", "another"),
    ),
    "API that is not enabled": Case(
        CredentialError,
        "has not been used in project",
        "gcloud services enable container.googleapis.com",
        spoil=_trouble(GetServerConfig="DISABLED-before"),
    ),
    "no network": Case(
        UnreachableError,
        "failed to connect",
        "mlbench doctor gke",
        environment={"MLBENCH_GKE_ENDPOINT": "127.0.0.1:9", "MLBENCH_CALL_SECONDS": "2"},
    ),
    "refused half way": Case(
        CredentialError,
        "PERMISSION_DENIED",
        "mlbench delete-cluster gke bad-2",
        spoil=_trouble(CreateNodePool="PERMISSION_DENIED-before"),
        recorded=True,
    ),
    "a policy that wants secure boot": Case(
        UsageError,
        "constraints/compute.requireShieldedVm",
        "--secure-boot",
        spoil=lambda world: setattr(world, "wants_secure_boot", True),
    ),
    "a region that the organization does not allow": Case(
        UsageError,
        "constraints/gcp.resourceLocations violated",
        "--zone or --region",
        spoil=lambda world: world.policies.update(
            CreateCluster="Constraint constraints/gcp.resourceLocations violated for project 1."
        ),
    ),
    "a tag that Google does not take": Case(
        UsageError, '--tag "Team=Research" is not a NAME=VALUE', "--tag team=research", ("--tag", "Team=Research")
    ),
}


@pytest.mark.parametrize("case", GKE.values(), ids=GKE)
def test_gke(command: Command, gke_world: World, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    for key, value in case.environment.items():
        monkeypatch.setenv(key, value)
    if case.spoil:
        case.spoil(gke_world)
    done = command("create-cluster", "gke", "2", case.release, *case.words, "--yes")
    judge(done, case)
    assert bool(gke_world.clusters) == case.recorded
    assert {item.name: item.state for item in Store().clusters()}.get(NAME) == ("failed" if case.recorded else None)


def test_gke_secure_boot_and_tags_are_what_policies_ask_for(command: Command, gke_world: World) -> None:
    gke_world.wants_secure_boot = True
    done = command("create-cluster", "gke", "2", "good", "--secure-boot", "--tag", "team=research", "--yes")
    assert done.code == 0, done.err
    cluster = gke_world.find_cluster("good-2")
    assert [pool.config.shielded_instance_config.enable_secure_boot for pool in cluster.node_pools] == [True, True]
    assert cluster.resource_labels["team"] == "research"
    assert all(pool.config.resource_labels["team"] == "research" for pool in cluster.node_pools)
    assert command("delete-cluster", "gke", "good-2", "--yes").code == 0


# --- AKS --------------------------------------------------------------------------------------------------------------

IDENTITY = (
    "/subscriptions/11111111-2222-3333-4444-555555555555/resourceGroups/net/providers/Microsoft.ManagedIdentity/"
    "userAssignedIdentities/company"
)
AKS = {
    "expired credentials": Case(
        CredentialError,
        "AADSTS700082",
        "az login",
        spoil=lambda world: setattr(
            world,
            "token_answer",
            {"error": "invalid_grant", "error_description": "AADSTS700082: The refresh token has expired."},
        ),
    ),
    "a region that the subscription may not use": Case(
        UsageError,
        "LocationNotAvailableForResourceType",
        "az account list-locations",
        spoil=_trouble(**{"PUT resourcegroups": "400 LocationNotAvailableForResourceType-before"}),
    ),
    "no such identity": Case(UsageError, "could not be found", "az identity list", ("--identity", IDENTITY)),
    "a tag that is demanded": Case(
        UsageError,
        "did not supply a 'Owner' tag",
        "--tag NAME=VALUE",
        spoil=lambda world: setattr(world, "required_tag", "Owner"),
    ),
    "a policy half way": Case(
        UsageError,
        "was disallowed by policy",
        "use a network that complies (--subnet ID), or ask the subscription's administrator for an exemption from "
        'the policy assignment "Sandbox Restrictions - No Public Interfaces"',
        spoil=lambda world: world.failing.update(managedClusters="policy"),
        recorded=True,
    ),
    "no stock half way": Case(
        CapacityError,
        "AllocationFailed",
        "--zones 1,2,3",
        spoil=lambda world: world.failing.update(agentPools="stockout"),
        recorded=True,
    ),
    "no right half way": Case(
        CredentialError,
        "AuthorizationFailed",
        "mlbench doctor aks",
        spoil=lambda world: world.denied.add("Microsoft.ContainerService/managedClusters/agentPools/write"),
        recorded=True,
    ),
    "expired half way": Case(
        CredentialError,
        "InvalidAuthenticationToken",
        "to resume, repeat the command",
        spoil=_trouble(**{"PUT agentPools": "401 InvalidAuthenticationToken-before"}),
        recorded=True,
    ),
}


@pytest.mark.parametrize("case", AKS.values(), ids=AKS)
def test_aks(command: Command, azure_world: AzureWorld, case: Case) -> None:
    if case.spoil:
        case.spoil(azure_world)
    done = command("create-cluster", "aks", "2", case.release, *case.words, "--yes")
    judge(done, case)
    assert bool(azure_world.groups) == case.recorded
    assert {item.name: item.state for item in Store().clusters()}.get(NAME) == ("failed" if case.recorded else None)
    if case.recorded:
        azure_world.denied.clear()
        azure_world.trouble = {}
        assert command("delete-cluster", "aks", NAME, "--yes").code == 0
        assert azure_world.groups == {}


def test_aks_tags_and_an_identity_of_the_company_are_what_policies_ask_for(
    command: Command, azure_world: AzureWorld
) -> None:
    azure_world.required_tag = "Owner"
    azure_world.groups["net"] = {"id": IDENTITY.partition("/providers")[0], "name": "net", "location": "eastus",
                                 "properties": {"provisioningState": "Succeeded"}, "tags": {"Owner": "it"}}  # fmt: skip
    identity = {"id": IDENTITY, "name": "company", "properties": {"principalId": "p-1", "clientId": "c-1"}}
    azure_world.others[IDENTITY.lower()] = identity
    words = ("--tag", "Owner=R&D/a=b", "--identity", IDENTITY, "--ttl", "none")
    done = command("create-cluster", "aks", "2", "good", *words, "--yes")
    assert done.code == 0, done.err
    (made,) = azure_world.clusters.values()
    assert made["identity"] == {"type": "UserAssigned", "userAssignedIdentities": {IDENTITY: {}}}
    assert {group["tags"]["Owner"] for name, group in azure_world.groups.items() if name != "net"} == {"R&D/a=b"}
    assert command("delete-cluster", "aks", "good-2", "--yes").code == 0
    assert (list(azure_world.groups), list(azure_world.others)) == (["net"], [IDENTITY.lower()])


# --- clusters of other versions ---------------------------------------------------------------------------------------


EARLIER = """
Resources:
  Vpc: {Type: AWS::EC2::VPC, Properties: {CidrBlock: 192.168.0.0/16}}
  First:
    Type: AWS::EC2::Subnet
    Properties: {VpcId: !Ref Vpc, CidrBlock: 192.168.0.0/18, AvailabilityZone: eu-west-1a}
  Second:
    Type: AWS::EC2::Subnet
    Properties: {VpcId: !Ref Vpc, CidrBlock: 192.168.64.0/18, AvailabilityZone: eu-west-1b}
  Role: {Type: AWS::IAM::Role, Properties: {AssumeRolePolicyDocument: {Version: "2012-10-17", Statement: []}}}
Outputs:
  First: {Value: !Ref First}
  Second: {Value: !Ref Second}
  Role: {Value: !GetAtt Role.Arn}
"""


def test_a_cluster_whose_machines_are_in_no_stack_is_deleted(command: Command, aws: AwsClient) -> None:
    """As earlier versions of mlbench made them: the stack had the network and the roles only."""
    client, mark = Aws(REGION), {"mlbench-cluster": "early-2", "mlbench-expires": "1000000000"}
    tags = [{"Key": key, "Value": value} for key, value in mark.items()]
    stack = {"StackName": "mlbench-early-2", "TemplateBody": EARLIER, "Capabilities": ["CAPABILITY_IAM"], "Tags": tags}
    client.call("cloudformation", "create_stack", **stack)
    for _ in range(3):
        made = client.call("cloudformation", "describe_stacks", StackName="mlbench-early-2")["Stacks"][0]
    outputs = {item["OutputKey"]: item["OutputValue"] for item in made["Outputs"]}
    network = {"subnetIds": [outputs["First"], outputs["Second"]]}
    named = {"name": "early-2", "tags": mark}
    client.call("eks", "create_cluster", **named, roleArn=outputs["Role"], resourcesVpcConfig=network)
    for _ in range(3):
        client.call("eks", "describe_cluster", name="early-2")
    client.call("eks", "create_nodegroup", clusterName="early-2", nodegroupName="early-2-workers", tags=mark,
                nodeRole=outputs["Role"], subnets=[outputs["First"]], instanceTypes=["m5.large"], labels={},
                amiType="AL2023_x86_64_STANDARD", capacityType="ON_DEMAND",
                scalingConfig={"minSize": 0, "maxSize": 2, "desiredSize": 2})  # fmt: skip
    template = {"LaunchTemplateName": "mlbench-early-2", "LaunchTemplateData": {"InstanceType": "m5.large"}}
    marks = [{"ResourceType": "launch-template", "Tags": tags}]
    client.call("ec2", "create_launch_template", **template, TagSpecifications=marks)
    marks = [{"ResourceType": "placement-group", "Tags": tags}]
    client.call("ec2", "create_placement_group", GroupName="mlbench-early-2", TagSpecifications=marks)
    again = command("create-cluster", "eks", "2", "early", "--region", REGION, "-t", "m5.large", "--yes")
    assert (again.code, "it was made by an earlier version of mlbench" in again.err) == (2, True), again.err
    done = command("gc", "eks", "--expired", "--yes")
    assert done.code == 0, done.err
    assert aws.list_left("early-2") == []


# --- EKS --------------------------------------------------------------------------------------------------------------


def _order(kind: str, action: str, **more: Any) -> Callable[[AwsClient], None]:
    return lambda aws: aws.order("me", kind, action=action, times=99, **more)


EKS = {
    "no credentials": Case(
        CredentialError,
        "no AWS credentials",
        "aws configure",
        environment={"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
    ),
    "half of the credentials": Case(
        CredentialError, "cannot be used", "aws sts get-caller-identity", environment={"AWS_SECRET_ACCESS_KEY": ""}
    ),
    "no such profile": Case(
        CredentialError, "profile (nobody) could not be found", "aws configure", environment={"AWS_PROFILE": "nobody"}
    ),
    "expired credentials": Case(
        CredentialError,
        "security token included in the request is expired",
        "aws sso login",
        spoil=_order("expired", "sts:.*"),
    ),
    "a clock that is wrong": Case(
        CredentialError, "Signature expired", "set this machine's clock", spoil=_order("skew", "sts:.*")
    ),
    "wrong zone": Case(
        UsageError, "eu-west-1z does not have g4dn.xlarge", "eu-west-1a", ("-t", "g4dn.xlarge", "--zone", "eu-west-1z")
    ),
    "machine type not offered": Case(
        CapacityError, "m5.nano is offered in no zone of eu-west-1", "another --region", ("-t", "m5.nano")
    ),
    "version not offered": Case(UsageError, "does not offer Kubernetes 1.30", "It has 1.36", ("-k", "1.30")),
    "no quota": Case(
        CapacityError, "allows 0 vCPUs; 2 × p4d.24xlarge need 192", "aws service-quotas request", ("-t", "p4d.24xlarge")
    ),
    "no network": Case(
        UnreachableError,
        "returned no usable answer",
        "Check the network",
        environment={"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
    ),
    "refused half way": Case(
        CredentialError,
        "is not authorized",
        f"mlbench delete-cluster eks {NAME}",
        spoil=lambda aws: aws.order("me/cloudformation", "deny", action="eks:CreateCluster .*", times=99),
        recorded=True,
    ),
    "expired half way": Case(
        CredentialError,
        "is expired",
        "to resume, repeat the command",
        spoil=_order("expired", "cloudformation:DescribeStacks mlbench-.*-workers"),
        recorded=True,
    ),
}


@pytest.mark.parametrize("case", EKS.values(), ids=EKS)
def test_eks(
    command: Command,
    aws: AwsClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    case: Case,
) -> None:
    for key, value in case.environment.items():
        monkeypatch.setenv(key, value) if value else monkeypatch.delenv(key)
    if case.environment:
        request.addfinalizer(forget)
        forget()
    if case.spoil:
        case.spoil(aws)
    done = command("create-cluster", "eks", "2", case.release, *case.words, "--yes")
    judge(done, case)
    assert bool(aws.list_left(NAME)) == case.recorded
    assert {item.name: item.state for item in Store().clusters()}.get(NAME) == ("failed" if case.recorded else None)
    if case.recorded:
        aws.calm("me")
        remove(NAME, tmp_path / "empty")
        assert aws.list_left(NAME) == []


@pytest.fixture
def copied_cloud(aws: AwsClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsClient]:
    """A double in which something may stay behind."""
    copy = aws.copy()
    become_for_a_test(copy, monkeypatch)
    yield copy
    forget()
    copy.stop()


def test_eks_the_name_is_a_foreign_clusters(copied_cloud: AwsClient, tmp_path: Path) -> None:
    make("host-0", tmp_path / "host", EksOptions(), 0)
    client = Aws(REGION)
    host = client.call("eks", "describe_cluster", name="host-0")["cluster"]
    subnets = {"subnetIds": host["resourcesVpcConfig"]["subnetIds"]}
    client.call("eks", "create_cluster", name=NAME, roleArn=host["roleArn"], resourcesVpcConfig=subnets)
    with pytest.raises(UsageError, match="was not created by mlbench, so it is left alone"):
        make(NAME, tmp_path / "home", EksOptions())
    with pytest.raises(UsageError, match="was not created by mlbench, so it is left alone"):
        remove(NAME, tmp_path / "empty")
    assert client.call("eks", "describe_cluster", name=NAME)["cluster"]["status"] in ("CREATING", "ACTIVE")
    assert not [entry for entry in copied_cloud.log("me") if entry["action"] == "eks:DeleteCluster"]
    assert f"stack mlbench-{NAME}" not in copied_cloud.list_left(NAME)
