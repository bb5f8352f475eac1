"""EKS against a double of AWS that boto3 talks to over HTTP: what is asked for, refused, and found again."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.base import CLUSTER_TAG
from providers.eks.api import Aws
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from providers.lifecycle import down, up
from tests.contract.providers.eks_world import become_for_a_test, forget, list_made, make, remove
from tests.fakes.aws_server import AwsClient

REGION = "eu-west-1"
PLUGINS = "/apis/apps/v1/namespaces/kube-system/daemonsets"
GPU = EksOptions(machine_type="g4dn.xlarge")
CALM: dict[str, object] = {
    "no_capacity": [],
    "launch_fails": None,
    "stack_fails": None,
    "looks": 1,
    "support_days": {},
}


@pytest.fixture
def aws(aws_server: AwsClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsClient]:
    become_for_a_test(aws_server, monkeypatch)
    yield aws_server
    aws_server.rules(**CALM)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def made_by_stacks(aws: AwsClient, action: str) -> list[dict[str, Any]]:
    return list_made(aws, f"eks:{action}")


def actions(aws: AwsClient) -> list[str]:
    return [entry["action"] for entry in aws.log("me")]


# --- making ---------------------------------------------------------------------------------------------------------


def test_what_is_asked_for(aws: AwsClient, home: Path, tmp_path: Path) -> None:
    made = make("whole-2", home, EksOptions(machine_type="g4dn.xlarge", kubernetes_version="1.35"))
    assert made.state == "ready"
    (plane,) = made_by_stacks(aws, "CreateCluster")
    assert plane["accessConfig"]["authenticationMode"] == "API"
    assert plane["upgradePolicy"] == {"supportType": "STANDARD"}
    assert plane["bootstrapSelfManagedAddons"] is False
    assert plane["version"] == "1.35"
    system, workers = made_by_stacks(aws, "CreateNodegroup")
    assert workers["scalingConfig"] == {"minSize": 0, "maxSize": 2, "desiredSize": 2}
    assert (system["amiType"], workers["amiType"]) == ("AL2023_x86_64_STANDARD", "AL2023_x86_64_NVIDIA")
    assert (workers["capacityType"], workers["instanceTypes"]) == ("ON_DEMAND", ["g4dn.xlarge"])
    addons = {item["addonName"]: item for item in made_by_stacks(aws, "CreateAddon")}
    assert list(addons)[:2] == ["vpc-cni", "kube-proxy"]
    assert set(addons) == {"vpc-cni", "kube-proxy", "coredns", "eks-pod-identity-agent", "aws-ebs-csi-driver"}
    # Versions that are known to work together, else EKS' default.
    assert addons["vpc-cni"]["addonVersion"] == "v1.22.4-eksbuild.3"
    assert addons["aws-ebs-csi-driver"]["addonVersion"] == "v1.63.1-eksbuild.1"
    assert made.details["addons"]["coredns"] == "v1.13.2-eksbuild.31"
    (association,) = addons["aws-ebs-csi-driver"]["podIdentityAssociations"]
    assert association["serviceAccount"] == "ebs-csi-controller-sa"
    with EksProvider().connect(made).client() as kubernetes:
        found = kubernetes.get("/apis/storage.k8s.io/v1/storageclasses/mlbench-gp3")
    assert found["metadata"]["annotations"] == {"storageclass.kubernetes.io/is-default-class": "true"}
    # The network plugin and the add-on for pod identities come before the machines, DNS after them.
    order = [
        entry["target"]
        for entry in aws.log("me/cloudformation")
        if entry["action"] in ("eks:CreateAddon", "eks:CreateNodegroup")
    ]
    assert order[:3] == ["vpc-cni", "kube-proxy", "eks-pod-identity-agent"]
    assert sorted(order[3:5]) == ["whole-2-system", "whole-2-workers"]
    assert {entry["kind"] for entry in made.details["provisioning"]} >= {
        "EKS cluster",
        "node group",
        "GPU device plugin",
    }
    nodes = EksProvider().connect(made).client().get("/api/v1/nodes")["items"]
    assert sum(int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) for node in nodes) == 2
    remove("whole-2", tmp_path / "empty")
    assert aws.list_left("whole-2") == []


def test_a_creator_who_is_named_as_administrator_gets_no_second_entry(
    aws: AwsClient, home: Path, tmp_path: Path
) -> None:
    """EKS makes one for the creator, and refuses another (eks-distro 2805, terraform-aws-eks 2969)."""
    own, other = "arn:aws:iam::123456789012:role/team/ci", "arn:aws:iam::123456789012:user/ada"
    aws.rules(caller=["arn:aws:sts::123456789012:assumed-role/ci/build-7", own])
    try:
        options = EksOptions(machine_type="g5.8xlarge", efa=True, admin=(own, other, other))
        make("own-0", home, options, nodes=0)
        assert [entry["principalArn"] for entry in made_by_stacks(aws, "CreateAccessEntry")] == [other]
        (card,) = list_made(aws, "ec2:CreateLaunchTemplate")[1]["NetworkInterfaces"]
        assert (card["InterfaceType"], card["AssociatePublicIpAddress"]) == ("efa", True)
        remove("own-0", tmp_path / "empty")
    finally:
        aws.rules(caller=None)
    assert aws.list_left("own-0") == []


@pytest.mark.slow
def test_every_create_call_says_whose_it_is(aws: AwsClient, home: Path, tmp_path: Path) -> None:
    options = EksOptions(machine_type="p4d.24xlarge", efa=True, admin=("arn:aws:iam::123456789012:role/ci",))
    provider = EksProvider()
    described = provider.new_cluster("marked-2", 2, options)
    cluster = Cluster("marked-2", "eks", details={**described.details, "owner": "ada", "expires": 1800000000})
    home.mkdir()
    up(cluster, provider.resources(cluster), Store(home))
    marks = {CLUSTER_TAG: "marked-2", "mlbench-owner": "ada", "mlbench-expires": "1800000000"}
    created = [entry["parameters"] for entry in aws.log("me") if ":Create" in entry["action"]]
    names = [f"mlbench-marked-2{end}" for end in ("", "-system", "-workers")]
    assert [given["StackName"] for given in created] == names
    for given in created:
        text = {value: given[key.replace("Key", "Value")] for key, value in given.items()
                if key.endswith("Key") and key.replace("Key", "Value") in given}  # fmt: skip
        assert marks.items() <= text.items()
        assert given["ClientRequestToken"]
    assert EksProvider().connect(cluster).client().get(f"{PLUGINS}/mlbench-efa-device-plugin")
    plain, template = list_made(aws, "ec2:CreateLaunchTemplate")
    for data in (plain, template):  # pods do not get the machine's role
        assert data["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
        assert all(
            marks.items() <= {tag["Key"]: tag["Value"] for tag in item["Tags"]}.items()
            for item in data["TagSpecifications"]
        )
    kinds = [card["InterfaceType"] for card in template["NetworkInterfaces"]]
    assert kinds == ["efa", *["efa-only"] * 3]
    assert template["Placement"]["GroupName"].startswith("mlbench-marked-2-workers-PlacementGroup")
    workers = made_by_stacks(aws, "CreateNodegroup")[1]
    stack = Aws(REGION).call("cloudformation", "describe_stacks", StackName="mlbench-marked-2")["Stacks"][0]
    outputs = {item["OutputKey"]: item["OutputValue"] for item in stack["Outputs"]}
    assert workers["subnets"] == [outputs["PrivateSubnet"]]
    found = {item.name: item for item in provider.discover({"location": REGION})}["marked-2"]
    assert (found.details["owner"], found.details["expires"]) == ("ada", 1800000000)
    down(found, provider.resources(found), Store(home))
    assert aws.list_left("marked-2") == []


@pytest.mark.slow
def test_bottlerocket_shows_gpus_by_itself(aws: AwsClient, home: Path, tmp_path: Path) -> None:
    made = make("rocket-2", home, EksOptions(machine_type="g4dn.xlarge", node_image="bottlerocket"))
    assert [given["amiType"] for given in made_by_stacks(aws, "CreateNodegroup")] == [
        "AL2023_x86_64_STANDARD",
        "BOTTLEROCKET_x86_64_NVIDIA",
    ]
    with pytest.raises(NotFoundError):
        EksProvider().connect(made).client().get(f"{PLUGINS}/mlbench-nvidia-device-plugin")
    remove("rocket-2", tmp_path / "empty")
    assert aws.list_left("rocket-2") == []


@pytest.mark.slow
def test_a_cluster_with_other_machines_is_refused(aws: AwsClient, home: Path, tmp_path: Path) -> None:
    make("again-2", home, GPU)
    for options, words in (
        (EksOptions(machine_type="g5.xlarge"), "its machines are g4dn.xlarge, not g5.xlarge"),
        (EksOptions(machine_type="g4dn.xlarge", kubernetes_version="1.34"), "Kubernetes 1.35, not 1.34"),
        (EksOptions(machine_type="g4dn.xlarge", zone="eu-west-1c"), "zones eu-west-1a and eu-west-1b"),
    ):
        with pytest.raises(UsageError, match=words):
            make("again-2", home, options)
    assert Store(home).cluster("again-2").state == "ready"
    remove("again-2", tmp_path / "empty")


@pytest.mark.slow
def test_no_machines_in_one_zone_then_in_another(aws: AwsClient, home: Path, tmp_path: Path) -> None:
    aws.rules(no_capacity=["g4dn.xlarge"])
    with pytest.raises(CapacityError, match="InsufficientInstanceCapacity") as caught:
        make("scarce-2", home, GPU)
    assert "EKS cluster scarce-2 (ready)" in caught.value.message
    assert "--zone" in (caught.value.hint or "")
    aws.rules(no_capacity=[])
    assert make("scarce-2", home, EksOptions(machine_type="g4dn.xlarge", zone="eu-west-1b")).state == "ready"
    first, second = (
        given["subnets"] for given in made_by_stacks(aws, "CreateNodegroup") if "workers" in given["nodegroupName"]
    )
    assert first != second
    remove("scarce-2", tmp_path / "empty")
    assert aws.list_left("scarce-2") == []


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("We currently do not have sufficient capacity. InsufficientInstanceCapacity", "--zone"),
        ("You have requested more vCPU capacity than your current vCPU limit of 0", "servicequotas"),
    ],
)
def test_what_the_auto_scaling_group_says_comes_first(aws: AwsClient, home: Path, said: str, hint: str) -> None:
    aws.rules(launch_fails=said)
    name = f"early{len(said)}-2"
    with pytest.raises(CapacityError) as caught:
        make(name, home, GPU)
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")
    remove(name, home / "empty")
    assert aws.list_left(name) == []


@pytest.mark.slow
def test_a_group_that_got_all_its_machines_is_not_given_up_for_an_earlier_stock_out(
    aws: AwsClient, home: Path, tmp_path: Path
) -> None:
    aws.rules(launch_fails="We currently do not have sufficient g4dn.xlarge capacity.", started=2)
    try:
        assert make("late-2", home, GPU).state == "ready"
    finally:
        aws.rules(started=0)
    remove("late-2", tmp_path / "empty")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "code", "hint"),
    [
        (
            "AuthFailure.ServiceLinkedRoleCreationNotPermitted - The provided credentials do not have permission to "
            "create the service-linked role for EC2 Spot Instances. Launching EC2 instance failed.",
            3,
            "create-service-linked-role --aws-service-name spot.amazonaws.com",
        ),
        ("Client.InternalError: Client error on launch", 3, "get-ebs-default-kms-key-id --region eu-west-1"),
        ("InsufficientFreeAddressesInSubnet - The specified subnet does not have enough free addresses.", 5, "--zone"),
        ("Unsupported - The requested configuration is currently not supported.", 2, "--machine-type"),
        ("VcpuLimitExceeded - You have requested more vCPU capacity than your limit.", 5, "servicequotas"),
    ],
)
def test_launches_that_fail_for_another_reason_than_capacity_are_named_at_once(
    aws: AwsClient, home: Path, said: str, code: int, hint: str
) -> None:
    aws.rules(launch_fails=said)
    name = f"cause{len(said)}-2"
    with pytest.raises(MlbenchError) as caught:
        make(name, home, GPU)
    assert (caught.value.exit_code, said in caught.value.message) == (code, True)
    assert hint in (caught.value.hint or "")
    remove(name, home / "empty")
    assert aws.list_left(name) == []


@pytest.mark.slow
def test_machines_that_do_not_join_are_named_with_what_they_printed(aws: AwsClient, home: Path, tmp_path: Path) -> None:
    aws.rules(unjoined=True, started=1, console="cloud-init ok\nnodeadm: error: dial tcp 10.0.0.1:443: i/o timeout\n")
    try:
        with pytest.raises(MlbenchError) as caught:
            make("apart-2", home, GPU)
    finally:
        aws.rules(unjoined=False, started=0, console="")
    assert "i/o timeout" in caught.value.message
    assert "get-console-output --region eu-west-1 --instance-id i-00000000" in (caught.value.hint or "")
    assert "describe-vpc-block-public-access-options" in (caught.value.hint or "")
    remove("apart-2", tmp_path / "empty")
    assert aws.list_left("apart-2") == []


# Sources: open-on-demand-on-aws 14, pulumi-eks 1401, amazon-eks-user-guide 36, eksctl 7095.
@pytest.mark.parametrize(
    ("said", "code", "hint"),
    [
        ("The maximum number of VPCs has been reached.", 5, "--subnets subnet-"),
        ("EKS does not support control plane instances in us-east-1e, the targeted availability zone.", 2, "--zones"),
        ("us-east-1d, the targeted availability zone, does not currently have sufficient capacity.", 2, "--zones A,B"),
        ("The security token included in the request is expired", 3, "aws sso login"),
    ],
)  # fmt: skip
def test_what_a_service_told_cloudformation_has_its_next_command(
    aws: AwsClient, home: Path, said: str, code: int, hint: str
) -> None:
    name = f"told{len(said)}-0"
    aws.rules(stack_fails=f'Resource handler returned message: "{said} (Service: Ec2, Status Code: 400)"')
    try:
        with pytest.raises(MlbenchError) as caught:
            make(name, home, GPU, nodes=0)
    finally:
        aws.rules(stack_fails=None)
    assert (caught.value.exit_code, said in caught.value.message) == (code, True)
    assert hint in (caught.value.hint or "")
    remove(name, home / "empty")
    assert aws.list_left(name) == []


@pytest.mark.slow
def test_a_stack_that_is_rolled_back_is_made_anew(aws: AwsClient, home: Path, tmp_path: Path) -> None:
    aws.rules(stack_fails="The maximum number of VPCs has been reached. (Service: Ec2, Status Code: 400)")
    with pytest.raises(CapacityError, match="maximum number of VPCs has been reached"):
        make("rolled-2", home, GPU)
    aws.rules(stack_fails=None)
    assert make("rolled-2", home, GPU).state == "ready"
    remove("rolled-2", tmp_path / "empty")
    assert aws.list_left("rolled-2") == []


# --- finding, reaching -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_found_by_marks_in_every_region(
    aws: AwsClient, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = EksProvider()
    aws.order("me/cloudformation", "deny", action="eks:CreateCluster .*", times=1)
    with pytest.raises(CredentialError):
        make("half-2", home, EksOptions(machine_type="g4dn.xlarge", region="us-west-2"))
    aws.order("me", "deny", region="eu-north-1")  # one that is closed to us
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):  # credentials need no region of their own
        monkeypatch.delenv(variable, raising=False)
    found = {cluster.name: cluster for cluster in provider.discover({})}
    assert (found["half-2"].state, found["half-2"].details["region"]) == ("failed", "us-west-2")
    assert [cluster.name for cluster in provider.discover({"location": "eu-central-1"})] == []
    down(found["half-2"], provider.resources(found["half-2"]), Store(home))
    assert aws.list_left("half-2", "us-west-2") == []


def test_what_boto3_repeats_by_itself(aws: AwsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    forget()
    aws.order("me", "throttle", action="sts:.*", times=1)
    Aws(REGION).call("sts", "get_caller_identity")
    assert actions(aws) == ["sts:GetCallerIdentity"] * 2
    forget()


# --- the plan -------------------------------------------------------------------------------------------------------


def make_plan(name: str, options: EksOptions, nodes: int = 2) -> Any:
    provider = EksProvider()
    return provider.plan(provider.new_cluster(name, nodes, options))


def test_the_plan_writes_nothing_and_sums_what_is_known(aws: AwsClient) -> None:
    plan = make_plan("plan-2", EksOptions(machine_type="g4dn.xlarge", zone="us-east-1b", kubernetes_version="1.35"))
    assert (plan.location, plan.currency) == ("us-east-1b", "USD")
    assert plan.total == pytest.approx(0.10 + 2 * 0.0416 + 2 * 0.526 + 240 * 0.00011 + 4 * 0.005)
    assert not [action for action in actions(aws) if not action.split(":")[1].startswith(("Get", "Describe"))]
    assert plan.to_dict()["price_table"]
    assert {line.as_of for line in plan.lines} == {"2026-07-20"}


@pytest.mark.slow
def test_a_default_that_leaves_support_soon_is_passed_over(aws: AwsClient, tmp_path: Path) -> None:
    aws.rules(support_days={"1.35": 9})
    warnings = " ".join(make_plan("plan-2", EksOptions(machine_type="g4dn.xlarge")).warnings)
    assert "The cluster gets Kubernetes 1.36 (until 20" in warnings
    assert "since standard support of EKS' default 1.35 ends on 20" in warnings
    asked = make_plan("plan-2", EksOptions(machine_type="g4dn.xlarge", kubernetes_version="1.35")).warnings
    assert "EKS then upgrades the cluster by itself. It has: 1.36 (until 20" in " ".join(asked)
    make("soon-2", tmp_path / "home", EksOptions(machine_type="g4dn.xlarge"))
    assert made_by_stacks(aws, "CreateCluster")[-1]["version"] == "1.36"


def test_spot_machines_are_planned_at_todays_price(aws: AwsClient) -> None:
    zone = "us-east-1b"
    plan = make_plan("plan-2", EksOptions(machine_type="g4dn.xlarge", spot=True, zone=zone))
    assert plan.lines[2].price == 0.25  # the dearest that may come, each at its latest price
    assert (plan.lines[2].as_of or "").startswith("now, 20")
    assert plan.total is not None
    none_told = make_plan("plan-2", EksOptions(machine_type="g5.xlarge", spot=True, zone=zone))
    assert none_told.lines[2].price is None
    aws.order("me", "deny", action="ec2:DescribeSpotPriceHistory.*", times=1)
    assert make_plan("plan-2", EksOptions(machine_type="g4dn.xlarge", spot=True, zone=zone)).total is None


def test_a_quota_counts_every_type_of_spot_machines_that_may_come(aws: AwsClient) -> None:
    aws.rules(quotas={"L-3819A6DF": 64.0})
    warnings = " ".join(make_plan("plan-2", EksOptions(machine_type="g4dn.xlarge", spot=True)).warnings)
    assert "allows 64 vCPUs, too few if these machines come: g4dn.16xlarge (--spot-type limits them)" in warnings
    few = EksOptions(machine_type="g4dn.xlarge", spot=True, spot_type=("g4dn.2xlarge",))
    assert "too few" not in " ".join(make_plan("plan-2", few).warnings)


def test_a_quota_that_may_not_be_read_is_a_finding(aws: AwsClient) -> None:
    aws.order("me", "deny", action="servicequotas:.*", times=1)
    (warning,) = make_plan("plan-2", GPU).warnings
    assert "cannot be read" in warning
    aws.rules(quotas={"L-DB2E81BA": 10.0})
    (warning,) = make_plan("plan-2", GPU).warnings
    assert "allows 10 vCPUs, of which these machines take 8" in warning


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("region", "partition"), [("cn-north-1", "aws-cn")])
def test_a_region_of_another_partition_gets_arns_of_its_own(
    aws: AwsClient, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, region: str, partition: str
) -> None:
    """China and GovCloud refuse every ARN that begins with arn:aws:."""
    monkeypatch.setenv("AWS_REGION", region)
    offered = [[name, f"{region}{zone}"] for name in ("m5.large", "t3.medium") for zone in "ab"]
    aws.rules(offered=offered, denied_actions=["eks:CreateCluster"])
    forget()
    role = f"arn:{partition}:iam::123456789012:role/ci"
    try:
        words = ("eks", "1", "far", "-t", "m5.large", "--admin", role, "--zones", f"{region}a,{region}b", "--yes")
        made = command("create-cluster", *words)
        assert made.code == 0, made.err
        (entry,) = made_by_stacks(aws, "CreateAccessEntry")
        policy = f"arn:{partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
        assert entry["accessPolicies"][0]["policyArn"] == policy
        rights = next(
            item for item in command("doctor", "eks", "-o", "json").json["checks"] if item["what"] == "eks rights"
        )
        assert f"arn:{partition}: in place of arn:aws:" in rights["hint"]
        sent = "".join(json.dumps(entry["parameters"]) for entry in aws.log("me"))
        assert set(re.findall(r"arn:([^:]+):", sent)) == {partition, "${AWS"}  # and what CloudFormation fills in
        assert command("delete-cluster", "eks", "far-1", "--region", region, "--yes").code == 0
        assert aws.list_left("far-1", region) == []
    finally:
        aws.rules(offered=[], denied_actions=[])
        forget()
