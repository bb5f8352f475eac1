"""The network of an EKS cluster from its zones to its deletion, the token of its API, and causes that AWS names."""

import base64
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import (
    CapacityError,
    CredentialError,
    MlbenchError,
    NeverStartedError,
    NotFoundError,
    UsageError,
)
from providers.base import BusyError, Readiness, ResourceStatus, TransientError
from providers.eks import control_plane, network
from providers.eks.control_plane import (
    AddOn,
    access_to,
    error_from_cause,
    error_from_issues,
    error_from_message,
    sign_token,
)
from providers.eks.network import PlacementGroup, Stack, zones_for
from providers.eks.nodes import Group, LaunchTemplate
from providers.eks.subnet_checks import check_subnets
from tests.unit.providers.test_eks_requests import (
    CLUSTER,
    OUTPUTS,
    FakeAws,
    make_group,
    make_plane,
    stack_world,
    zone_world,
)

# --- zones and outputs ----------------------------------------------------------------------------------------------


def test_subnets_of_four_zones_are_read_from_the_outputs() -> None:
    more = {
        "ThirdZone": "c",
        "ThirdSubnet": "subnet-3",
        "FourthZone": "d",
        "FourthSubnet": "subnet-4",
        "SecondPrivate": "private-2",
        "ThirdPrivate": "private-3",
        "FourthPrivate": "private-4",
    }
    found = Stack(CLUSTER, stack_world("CREATE_COMPLETE", {**OUTPUTS, **more}), []).network()
    assert found.subnets == {"a": "subnet-1", "b": "subnet-2", "c": "subnet-3", "d": "subnet-4"}
    assert found.private_subnets == {"a": "private-1", "b": "private-2", "c": "private-3", "d": "private-4"}


def test_the_outputs_of_a_stack_are_asked_for_once_until_it_is_deleted() -> None:
    aws = stack_world("CREATE_COMPLETE", describe_vpcs={})
    stack = Stack(CLUSTER, aws, [])
    assert stack.network() is stack.network()
    assert [name for _, name, _ in aws.calls] == ["describe_stacks"]
    assert aws.calls[0][2] == {"StackName": "mlbench-demo-2"}
    stack.delete()
    stack.network()
    assert [name for _, name, _ in aws.calls].count("describe_stacks") == 2


def subnet(zone: str, public: bool = True) -> dict[str, Any]:
    return {
        "SubnetId": f"s-{zone}",
        "VpcId": "vpc-9",
        "AvailabilityZone": zone,
        "MapPublicIpOnLaunch": public,
        "AvailableIpAddressCount": 9,
    }


def test_a_network_that_was_given_is_described_by_ec2() -> None:
    aws = stack_world("CREATE_COMPLETE", {"ControlRole": "c", "MachineRole": "m", "Subnets": "s-a,s-b"})
    aws.answers["describe_subnets"] = {"Subnets": [subnet("a"), subnet("b", public=False)]}
    found = Stack(CLUSTER, aws, [], subnets=("s-a", "s-b")).network()
    assert (found.vpc, found.subnets, found.public) == ("vpc-9", {"a": "s-a", "b": "s-b"}, frozenset({"a"}))


def test_a_stack_in_a_given_network_begins_with_the_zone_that_has_the_machines() -> None:
    subnets = [subnet(zone) for zone in ("a", "b", "c")]
    aws = zone_world("c", "b", "a", offering=("b",), describe_subnets={"Subnets": subnets})
    Stack(CLUSTER, aws, ["m5.large"], subnets=("s-a", "s-b", "s-c")).create()
    given = {item["ParameterKey"]: item["ParameterValue"] for item in aws.last("create_stack")["Parameters"]}
    assert (given["FirstZone"], given["SecondZone"], given["Subnets"]) == ("b", "a", "s-b,s-a,s-c")
    assert "ThirdZone" not in given


@pytest.mark.parametrize("bad", ["use1-az3", "usw1-az2", "cac1-az3"])
def test_zones_without_control_planes_are_left_out(bad: str) -> None:
    """EKS' user guide, "Subnet requirements": these zone IDs are not supported."""
    listed = [{"ZoneName": name, "ZoneId": zone} for name, zone in (("a", bad), ("b", "id-b"), ("c", "id-c"))]
    aws = zone_world("a", "b", "c", offering=("a", "b", "c"))
    aws.answers["describe_availability_zones"] = {"AvailabilityZones": listed}
    assert zones_for(aws, ["m5.large"], None) == ["b", "c"]
    filters = [each["Filters"] for _, name, each in aws.calls if name == "describe_availability_zones"]
    assert filters == [
        [{"Name": "zone-type", "Values": ["availability-zone"]}, {"Name": "state", "Values": ["available"]}]
    ]


def test_cloudformation_gives_up_before_the_life_cycle_does() -> None:
    aws = zone_world("a", "b", offering=("a",))
    stack = Stack(CLUSTER, aws, ["m5.large"])
    stack.create()
    assert stack.create_seconds == 60 * aws.last("create_stack")["TimeoutInMinutes"]


# --- the end of a stack ---------------------------------------------------------------------------------------------


def interface(status: str = "in-use", **more: Any) -> dict[str, Any]:
    return {"NetworkInterfaceId": "eni-1", "Status": status, "VpcId": "vpc-1", **more}


def occupied(status: str = "CREATE_COMPLETE", *interfaces: Any) -> FakeAws:
    aws = stack_world(status)
    aws.answers |= {
        "describe_vpcs": {"Vpcs": [{"VpcId": "vpc-1"}]},
        "describe_network_interfaces": {"NetworkInterfaces": list(interfaces)},
    }
    return aws


@pytest.mark.parametrize("status", ["CREATE_COMPLETE", "DELETE_FAILED"])
def test_a_network_in_use_is_waited_for_for_ten_minutes(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    """Then its gateway, which costs money, is deleted although interfaces are still attached."""
    now = [0.0]
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: now[0]))
    attached = interface(Attachment={"Status": "attached"}, Description="a card of a machine")
    stack = Stack(CLUSTER, occupied(status, attached), [])
    busy = "1 network interfaces are still in use, one is eni-1 (a card of a machine)"
    for now[0], expected in ((0.0, busy), (600.0, busy), (600.1, None)):
        found = stack.find()
        assert found is not None
        assert found.busy == expected


@pytest.mark.parametrize(
    ("more", "words"),
    [({}, "no description"), ({"InterfaceType": "efa"}, "efa"), ({"Description": "", "InterfaceType": "efa"}, "efa")],
)
def test_an_interface_in_use_is_described_as_well_as_ec2_does(more: dict[str, Any], words: str) -> None:
    attached = interface(Attachment={"Status": "attached"}, **more)
    found = Stack(CLUSTER, occupied("CREATE_COMPLETE", attached), []).find()
    assert found is not None
    assert str(found.busy).endswith(f"one is eni-1 ({words})")


def test_a_stack_of_someone_else_is_left_alone() -> None:
    aws = stack_world("ROLLBACK_COMPLETE", Tags=[])
    found = Stack(CLUSTER, aws, []).find()
    assert found == ResourceStatus("ROLLBACK_COMPLETE", ours=False, deleting=True)
    assert [name for _, name, _ in aws.calls] == ["describe_stacks"]


def test_a_stack_is_deleted_after_what_others_left_in_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[Any] = []
    monkeypatch.setattr(network, "clear_network", lambda aws, vpcs: cleared.append(vpcs))
    monkeypatch.setattr(network, "clear_cluster", lambda aws, name: cleared.append(name))
    aws = occupied()
    stack = Stack(CLUSTER, aws, [])
    stack.delete()
    assert cleared == [["vpc-1"], "demo-2"]
    assert aws.calls[-1] == ("cloudformation", "delete_stack", {"StackName": "mlbench-demo-2"})
    filters = [each["Filters"] for _, name, each in aws.calls if name == "describe_vpcs"]
    assert filters == [[{"Name": "tag:mlbench-cluster", "Values": ["demo-2"]}]]


def test_what_blocks_a_network_is_waited_for_and_then_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def busy(aws: Any, vpcs: Any) -> None:
        raise BusyError("a group is in use")

    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(network, "clear_network", busy)
    aws = occupied()
    stack = Stack(CLUSTER, aws, [])
    for now[0] in (0.0, 600.0):
        with pytest.raises(BusyError, match="a group is in use"):
            stack.delete()
    now[0] = 600.1
    stack.delete()
    assert aws.calls[-1][1] == "delete_stack"


@pytest.mark.parametrize(
    ("status", "reason", "is_refused"),
    [
        ("DELETE_FAILED", "User is not authorized to perform: iam:DeleteRole", True),
        ("DELETE_FAILED", "The subnet has dependencies", False),
        ("DELETE_IN_PROGRESS", "not authorized", False),
    ],
)
def test_a_missing_permission_of_an_earlier_deletion_is_told(status: str, reason: str, is_refused: bool) -> None:
    aws = occupied("CREATE_COMPLETE")
    stack = Stack(CLUSTER, aws, [])
    stack.delete()
    (described,) = aws.answers["describe_stacks"]["Stacks"]
    described |= {"StackStatus": status, "StackStatusReason": reason}
    if not is_refused:
        stack.delete()
        return
    with pytest.raises(CredentialError, match="iam:DeleteRole") as caught:
        stack.delete()
    assert "--policy --for delete-cluster" in str(caught.value.hint)
    Stack(CLUSTER, aws, []).delete()  # this process has not asked yet


@pytest.mark.parametrize(
    ("status", "ready"),
    [
        ("CREATE_COMPLETE", Readiness(True)),
        ("CREATE_IN_PROGRESS", Readiness(False, "its network and roles are being created")),
    ],
)
def test_a_stack_is_ready_when_it_is_complete(status: str, ready: Readiness) -> None:
    assert Stack(CLUSTER, stack_world(status), []).poll() == ready


def test_a_stack_that_disappears_while_it_is_created_is_an_error() -> None:
    with pytest.raises(MlbenchError, match="disappeared while it was being created"):
        Stack(CLUSTER, FakeAws(describe_stacks={"Stacks": []}), []).poll()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (None, None),
        (NotFoundError("none"), None),
        (UsageError("in use"), BusyError),
        (TransientError("late"), TransientError),
    ],
)
def test_a_placement_group_waits_for_the_machines_in_it(
    error: Exception | None, raised: type[Exception] | None
) -> None:
    aws = FakeAws(delete_placement_group=error or {})
    group = PlacementGroup(CLUSTER, aws, Stack(CLUSTER, aws, []))
    if raised is None:
        group.delete()
    else:
        with pytest.raises(raised):
            group.delete()
    assert aws.calls == [("ec2", "delete_placement_group", {"GroupName": "mlbench-demo-2"})]


# --- access ---------------------------------------------------------------------------------------------------------


def test_access_to_a_cluster_is_by_tokens_that_are_renewed_before_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server accepts a token of STS for 15 minutes."""
    now = [1000.0]
    signed: list[str] = []

    def sign(aws: Any, name: str) -> str:
        signed.append(name)
        return f"token {len(signed)}"

    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr(control_plane, "sign_token", sign)
    ca = base64.b64encode(b"ca").decode()
    described = {"status": "ACTIVE", "endpoint": "https://e", "certificateAuthority": {"data": ca}}
    aws = FakeAws(describe_cluster={"cluster": described})
    access = access_to(aws, "demo-2")
    assert aws.calls == [("eks", "describe_cluster", {"name": "demo-2"})]
    source: Any = access.token
    assert (access.server, source(), source()) == ("https://e", "token 1", "token 1")
    now[0] += 5 * 60
    assert source() == "token 1"
    now[0] += 10 * 60
    assert source() == "token 2"
    assert signed == ["demo-2", "demo-2"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (NotFoundError("none"), 'There is no EKS cluster "demo-2" in r-1'),
        ({"cluster": {"status": "CREATING"}}, "cannot be reached: it is CREATING"),
        ({"cluster": {"status": "DELETING"}}, "cannot be reached: it is DELETING"),
    ],
)
def test_a_cluster_that_is_not_active_cannot_be_reached(answer: Any, says: str) -> None:
    with pytest.raises(NotFoundError, match=says) as caught:
        access_to(FakeAws(describe_cluster=answer), "demo-2")
    assert "mlbench delete-cluster eks demo-2" in str(caught.value.hint)


def test_without_credentials_no_token_is_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    aws: Any = FakeAws()
    aws.client = lambda service: SimpleNamespace(meta=None)
    nobody = SimpleNamespace(get_credentials=lambda: None)
    monkeypatch.setattr(control_plane, "session", lambda: nobody)
    with pytest.raises(CredentialError, match="no AWS credentials on this machine"):
        sign_token(aws, "demo-2")


# --- add-ons --------------------------------------------------------------------------------------------------------


def test_versions_of_all_add_ons_are_in_the_record() -> None:
    plane = make_plane(FakeAws())
    for name, version in (("vpc-cni", "v1.20"), ("coredns", None)):
        plane.aws.answers["describe_addon"] = {"addon": {"status": "ACTIVE", "addonVersion": version}}  # type: ignore[attr-defined]
        progress = AddOn(plane, name).poll()
    assert progress.facts == {"addons": {"vpc-cni": "v1.20", "coredns": ""}}


@pytest.mark.parametrize(
    ("status", "health", "reason"),
    [
        ("CREATING", {}, "it is CREATING"),
        (
            "DEGRADED",
            {"issues": [{"code": "InsufficientNumberOfReplicas", "message": "no nodes"}]},
            "InsufficientNumberOfReplicas: no nodes",
        ),
        ("DEGRADED", None, "it is DEGRADED"),
    ],
)
def test_an_add_on_waits_for_its_pods_with_the_words_of_eks(status: str, health: Any, reason: str) -> None:
    aws = FakeAws(describe_addon={"addon": {"status": status, "health": health}})
    assert AddOn(make_plane(aws), "coredns").poll() == Readiness(False, reason)


def test_without_the_right_to_list_versions_eks_chooses_that_of_an_add_on() -> None:
    described = {"cluster": {"version": "1.34"}}
    aws = FakeAws(describe_cluster=described, describe_addon_versions=CredentialError("denied"))
    AddOn(make_plane(aws), "coredns").create()
    assert "addonVersion" not in aws.last("create_addon")
    aws = FakeAws(describe_cluster=NotFoundError("none"))
    AddOn(make_plane(aws), "coredns").create()
    assert "describe_addon_versions" not in [name for _, name, _ in aws.calls]


# --- causes ---------------------------------------------------------------------------------------------------------

REPORTS: tuple[tuple[str, str, type[MlbenchError], str], ...] = (
    ("AsgInstanceLaunchFailures", "AuthFailure.ServiceLinkedRoleCreationNotPermitted - x", CredentialError, "no role"),
    ("AsgInstanceLaunchFailures", "Client.InvalidKMSKey.InvalidState: x", CredentialError, "--region r-1   shows the"),
    ("AsgInstanceLaunchFailures", "Client.InternalError: Client error on launch", CredentialError, "KMS key"),
    ("Ec2SubnetInvalidConfiguration", "insufficient free addresses", CapacityError, "--region r-1   shows how many"),
    ("AsgInstanceLaunchFailures", "Your Spot request price of 0.1 is lower", CapacityError, "remove --spot"),
    ("AsgInstanceLaunchFailures", "PendingVerification - Your request", CredentialError, "up to four hours"),
    ("AsgInstanceLaunchFailures", "This account is currently blocked", CredentialError, "Account Verification"),
    ("AsgInstanceLaunchFailures", "You've reached the maximum Fleet Requests", CredentialError, "Account Verification"),
    ("AsgInstanceLaunchFailures", "the type is not eligible for Free Tier", UsageError, "--region r-1 --filters"),
    ("AsgInstanceLaunchFailures", "OptInRequired - x", CredentialError, "--region-name r-1"),
    ("NodeCreationFailure", "Instances failed to join the kubernetes cluster", NeverStartedError, "Public Access"),
    ("AsgInstanceLaunchFailures", "Unsupported - The type is not in this zone", UsageError, "another --zone"),
)  # fmt: skip


@pytest.mark.parametrize(("code", "said", "kind", "hint"), REPORTS)
def test_a_machine_that_does_not_start_has_a_cause_and_a_next_step(
    code: str, said: str, kind: type[MlbenchError], hint: str
) -> None:
    error = error_from_message(code, "The group was not created", said, "r-1")
    assert type(error) is kind
    assert hint in str(error.hint)
    assert error.message == "The group was not created"


@pytest.mark.parametrize(
    ("code", "said", "kind", "aws"),
    [
        (
            "AsgInstanceLaunchFailures",
            "InsufficientInstanceCapacity - We have no capacity",
            CapacityError,
            "--zones a,b,c",
        ),
        ("AsgInstanceLaunchFailures", "UnfulfillableCapacity", CapacityError, "--zones a,b,c"),
        ("AsgInstanceLaunchFailures", "We currently do not have sufficient g5", CapacityError, "--zones a,b,c"),
        ("AsgInstanceLaunchFailures", "ReservationCapacityExceeded", CapacityError, "--zones a,b,c"),
        ("InsufficientInstanceCapacity", "none", CapacityError, "--zones a,b,c"),
        ("AsgInstanceLaunchFailures", "VcpuLimitExceeded - more than your limit", CapacityError, "servicequotas"),
        ("AsgInstanceLaunchFailures", "MaxSpotInstanceCountExceeded", CapacityError, "servicequotas"),
        ("AccessDenied", "x is not authorized to perform: ec2:RunInstances", CredentialError, "AWS_PROFILE"),
        ("AsgInstanceLaunchFailures", "UnauthorizedOperation", CredentialError, "AWS_PROFILE"),
    ],
)
def test_a_lack_of_capacity_quota_and_rights_are_told_apart(
    code: str, said: str, kind: type[MlbenchError], aws: str
) -> None:
    error = error_from_message(code, "The group was not created", said, "r-1")
    assert type(error) is kind
    assert aws in str(error.hint)


@pytest.mark.parametrize("said", ["Odd - nobody knows", "ServerError - try again", "nothing known"])
def test_a_code_that_is_not_known_is_told_with_the_words(said: str) -> None:
    error = error_from_message("OddCode", "The group was not created", said, "r-1")
    assert type(error) is MlbenchError
    assert error.message == "The group was not created (OddCode)"
    assert error_from_cause("m", said, "r-1") is None


def test_the_first_issue_of_a_resource_is_its_error() -> None:
    issues = [{"code": "IamRoleNotFound", "message": "no role"}, {"code": "VpcNotFound", "message": "no network"}]
    error = error_from_issues({"status": "FAILED", "health": {"issues": issues}}, "The cluster was not created")
    assert error.message == 'The cluster was not created: "no role" (IamRoleNotFound)'


# --- machines that do not come --------------------------------------------------------------------------------------

ASG = {"resources": {"autoScalingGroups": [{"name": "asg-1"}]}}


def creating(**more: Any) -> dict[str, Any]:
    return {"nodegroup": {"status": "CREATING", "scalingConfig": {"desiredSize": 3}, "subnets": [], **ASG, **more}}


def failed(*words: str, code: str = "Failed") -> dict[str, Any]:
    return {"Activities": [{"StatusCode": code, "StatusMessage": said} for said in words]}


def machines(count: int) -> dict[str, Any]:
    return {"AutoScalingGroups": [{"Instances": [{"InstanceId": f"i-{number}"} for number in range(count)]}]}


STOCK_OUT = "We currently do not have sufficient g5.xlarge capacity"


@pytest.mark.parametrize(
    ("activities", "running", "kind"),
    [
        (failed(STOCK_OUT), 1, CapacityError),
        (failed("starting", STOCK_OUT), 0, CapacityError),
        (failed(STOCK_OUT), 3, None),
        (failed(STOCK_OUT, code="InProgress"), 1, None),
        (failed("The role is not visible yet"), 1, None),
        (failed("PendingVerification"), 0, CredentialError),
        (failed(), 0, None),
        (CredentialError("denied"), 0, None),
        (NotFoundError("no group"), 0, None),
    ],
)
def test_the_auto_scaling_group_tells_early_why_machines_do_not_come(
    activities: Any, running: int, kind: type[MlbenchError] | None
) -> None:
    """EKS itself reports it only after twenty minutes."""
    aws = FakeAws(
        describe_nodegroup=creating(),
        describe_scaling_activities=activities,
        describe_auto_scaling_groups=machines(running),
    )
    if kind is None:
        assert make_group(aws).poll() == Readiness(False, "3 × m5.large: CREATING")
        return
    with pytest.raises(kind) as caught:
        make_group(aws).poll()
    assert caught.value.message.startswith(f"demo-2-workers has {running} of 3 machines and cannot get more: ")
    asked = {name: each for _, name, each in aws.calls}
    assert asked["describe_scaling_activities"] == {"AutoScalingGroupName": "asg-1", "MaxRecords": 50}
    assert asked["describe_auto_scaling_groups"] == {"AutoScalingGroupNames": ["asg-1"]}


JOIN = {"issues": [{"code": "NodeCreationFailure", "message": "Instances failed to join"}]}
CONSOLE = "booting\n one error\nfine\n  Access DENIED \nconnection timed out\nlast failure\n"


@pytest.mark.parametrize(
    ("console", "said"),
    [
        ({"Output": CONSOLE}, 'i-0 printed: "Access DENIED; connection timed out; last failure"'),
        ({"Output": f"error {'x' * 600}"}, f'i-0 printed: "error {"x" * 494}"'),
        ({"Output": "all is fine"}, 'i-0 printed: "no reason given"'),
        ({}, 'i-0 printed: "no reason given"'),
        (CredentialError("denied"), None),
    ],
)
def test_a_machine_that_did_not_join_is_quoted_from_its_console(console: Any, said: str | None) -> None:
    aws = FakeAws(
        describe_nodegroup=creating(status="CREATE_FAILED", health=JOIN),
        describe_auto_scaling_groups=machines(2),
        get_console_output=console,
    )
    with pytest.raises(NeverStartedError) as caught:
        make_group(aws).poll()
    message = 'The node group demo-2-workers did not get its machines: "Instances failed to join"'
    assert caught.value.message == (message if said is None else f"{message} {said}")
    assert "Block Public Access" in str(caught.value.hint)
    command = "aws ec2 get-console-output --region r-1 --instance-id i-0"
    assert str(caught.value.hint).startswith(command) is (said is not None)
    assert aws.calls[-1] == ("ec2", "get_console_output", {"InstanceId": "i-0"})


def test_without_machines_there_is_no_console_to_quote() -> None:
    aws = FakeAws(describe_nodegroup=creating(status="DEGRADED", health=JOIN), describe_auto_scaling_groups=machines(0))
    with pytest.raises(NeverStartedError, match=r'"Instances failed to join"$'):
        make_group(aws).poll()
    aws = FakeAws(describe_nodegroup=creating(status="CREATE_FAILED", health={"issues": [{"code": "AccessDenied"}]}))
    with pytest.raises(MlbenchError):
        make_group(aws).poll()
    assert [name for _, name, _ in aws.calls] == ["describe_nodegroup"]


@pytest.mark.parametrize(
    ("group", "subnet"),
    [
        ({}, "subnet-a"),
        ({"zone": "r-1c"}, "subnet-c"),
        ({"zone": "r-1x"}, "subnet-a"),
        ({"private": True}, "private-a"),
        ({"private": True, "zone": "r-1b"}, "private-b"),
        ({"private": True, "zone": "r-1c"}, "private-a"),
    ],
)
def test_machines_are_in_the_subnet_of_their_zone(group: dict[str, Any], subnet: str) -> None:
    aws = FakeAws()
    make_group(aws, **group).create()
    assert aws.last("create_nodegroup")["subnets"] == [subnet]


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ([{"Key": "mlbench-cluster", "Value": "demo-2"}], ResourceStatus("there")),
        ([{"Key": "mlbench-cluster", "Value": "other"}], ResourceStatus("there", ours=False)),
        (None, ResourceStatus("there", ours=False)),
    ],
)
def test_a_launch_template_is_the_clusters_by_its_tag(tags: Any, found: ResourceStatus) -> None:
    aws = FakeAws(describe_launch_templates={"LaunchTemplates": [{"Tags": tags}]})
    template = LaunchTemplate(make_plane(aws), 100, None)
    assert template.find() == found
    assert template.poll() == Readiness(True, "it is not shown yet")
    assert aws.calls[0][2] == {"LaunchTemplateNames": ["mlbench-demo-2"]}
    aws.answers = {"describe_launch_templates": NotFoundError("none"), "delete_launch_template": NotFoundError("none")}
    assert template.find() is None
    assert not template.poll().ready
    template.delete()
    assert aws.calls[-1] == ("ec2", "delete_launch_template", {"LaunchTemplateName": "mlbench-demo-2"})


# --- given subnets --------------------------------------------------------------------------------------------------


def subnet_world(free: dict[str, int], offering: tuple[str, ...]) -> FakeAws:
    """A network with DNS whose subnets, in this order of zones, go out by a NAT gateway."""
    route = {"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-1", "State": "active"}
    on = {"Value": True}
    return zone_world(
        *("a", "b", "c"),
        offering=offering,
        describe_subnets={"Subnets": [{**subnet(zone), "AvailableIpAddressCount": free[zone]} for zone in free]},
        describe_vpc_attribute={"EnableDnsSupport": on, "EnableDnsHostnames": on},
        describe_route_tables={"RouteTables": [{"Routes": [route]}]},
    )


@pytest.mark.parametrize(
    ("order", "offering", "wanted", "zone"),
    [
        ("ab", "abc", None, "a"),
        ("ba", "abc", None, "b"),
        ("cab", "ab", None, "a"),
        ("cba", "ab", None, "b"),
        ("cba", "abc", "a", "a"),
    ],
)
def test_machines_are_in_the_first_subnet_that_can_have_them_as_the_plan_says(
    order: str, offering: str, wanted: str | None, zone: str
) -> None:
    names = tuple(f"s-{name}" for name in order)
    aws = subnet_world(dict.fromkeys(order, 99), tuple(offering))
    groups = (Group("system", ("t3.medium",), 2, 20), Group("workers", ("m5.large",), 3, 100, zone=wanted))
    assert check_subnets(aws, names, groups) == (zone, [])
    Stack(CLUSTER, aws, ["m5.large"], wanted, subnets=names).create()
    given = {item["ParameterKey"]: item["ParameterValue"] for item in aws.last("create_stack")["Parameters"]}
    assert given["FirstZone"] == zone
    assert given["Subnets"].split(",")[0] == f"s-{zone}"
    assert sorted(given["Subnets"].split(",")) == sorted(names)


@pytest.mark.parametrize(
    ("free", "lacks"),
    [
        ({"b": 11, "a": 6}, None),
        ({"b": 10, "a": 6}, "s-b has 10 free addresses; control plane and machines take 11"),
        ({"b": 11, "a": 5}, "s-a has 5 free addresses; control plane and machines take 6"),
    ],
)
def test_subnets_have_addresses_for_control_plane_and_machines(free: dict[str, int], lacks: str | None) -> None:
    """EKS' user guide: at least six for the control plane in each subnet."""
    aws = subnet_world(free, ("a", "b"))
    groups = (Group("system", ("t3.medium",), 2, 20), Group("workers", ("m5.large",), 3, 100))
    if lacks is None:
        assert check_subnets(aws, ("s-b", "s-a"), groups)[0] == "b"
        return
    with pytest.raises(CapacityError, match=lacks):
        check_subnets(aws, ("s-b", "s-a"), groups)


def test_subnets_in_zones_without_control_planes_or_machines_are_refused() -> None:
    groups = (Group("system", ("t3.medium",), 2, 20), Group("workers", ("m5.large",), 3, 100))
    aws = subnet_world({"x": 99, "a": 99}, ("a",))
    with pytest.raises(UsageError, match="EKS has no control planes in the zone x"):
        check_subnets(aws, ("s-x", "s-a"), groups)
    aws = subnet_world({"a": 99, "b": 99}, ("c",))
    with pytest.raises(UsageError, match=r"has none in c, where m5\.large is available: they are in a and b"):
        check_subnets(aws, ("s-a", "s-b"), groups)
