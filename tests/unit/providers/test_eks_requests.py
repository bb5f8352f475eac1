"""The documents that mlbench sends to AWS for stacks, control planes, add-ons and machines, and what it reads back."""

from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers.base import BusyError, TransientError
from providers.eks.aws import Aws
from providers.eks.control_plane import (
    ADMIN_POLICY,
    AddOn,
    Admin,
    ControlPlane,
    access_to,
    error_from_issues,
    error_from_message,
)
from providers.eks.given_subnets import find_subnets, split_subnets
from providers.eks.machines import Machine
from providers.eks.network import Network, PlacementGroup, Stack, zones_for
from providers.eks.nodes import Group, LaunchTemplate, NodeGroup, NodeGroupSize, scaling_config
from providers.eks.volumes import volume_resources
from tests.fakes.aws_operations import check_operation

TAGS = {"mlbench-cluster": "demo-2"}
TAG_LIST = [{"Key": "mlbench-cluster", "Value": "demo-2"}]
CLUSTER = Cluster("demo-2", "eks")
NETWORK = Network(
    "vpc-1",
    {"r-1a": "subnet-a", "r-1b": "subnet-b", "r-1c": "subnet-c"},
    {"r-1a": "private-a", "r-1b": "private-b"},
    "control-role",
    "machine-role",
    "volume-role",
    "end-role",
    "nat-1",
    frozenset({"r-1a"}),
)


class FakeAws(Aws):
    """Records calls, and gives the answers of the test by the name of the operation."""

    def __init__(self, **answers: Any) -> None:
        super().__init__("r-1")
        self.answers = answers
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        check_operation(service, operation)
        self.calls.append((service, operation, parameters))
        answer = self.answers.get(operation, {})
        if isinstance(answer, Exception):
            raise answer
        found: dict[str, Any] = answer
        return found

    def pages(self, service: str, operation: str, key: str, **parameters: Any) -> list[Any]:
        return list(self.call(service, operation, **parameters).get(key, []))

    def find(self, service: str, operation: str, key: str, **parameters: Any) -> Any:
        try:
            return self.call(service, operation, **parameters).get(key)
        except NotFoundError:
            return None

    def last(self, operation: str) -> dict[str, Any]:
        """The parameters of the last call of an operation, without the token that makes it idempotent."""
        parameters = next(each for _, name, each in reversed(self.calls) if name == operation)
        tokens = ("clientRequestToken", "ClientRequestToken", "ClientToken")
        assert any(len(parameters.get(token, "")) == 32 for token in tokens)
        return {key: value for key, value in parameters.items() if key not in tokens}


def make_plane(aws: FakeAws | None = None, network: Network = NETWORK, **options: Any) -> ControlPlane:
    aws = aws or FakeAws()
    stack = Stack(CLUSTER, aws, ["m5.large"])
    stack._network = network
    return ControlPlane(CLUSTER, aws, stack, **options)


def make_group(aws: FakeAws | None = None, template: bool = False, **more: Any) -> NodeGroup:
    plane = make_plane(aws)
    settings = {"name": "demo-2-workers", "types": ("m5.large",), "count": 3, "disk": 100, **more}
    made = LaunchTemplate(plane, 100, None) if template else None
    return NodeGroup(plane, plane.stack, Group(**settings), (), made)


# --- the control plane ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "access", "version"),
    [
        ({}, {}, {}),
        ({"version": "1.34"}, {}, {"version": "1.34"}),
        ({"allowed": ("192.0.2.0/24",)}, {"publicAccessCidrs": ["192.0.2.0/24"]}, {}),
    ],
)
def test_the_request_of_a_control_plane(
    options: dict[str, Any], access: dict[str, Any], version: dict[str, str]
) -> None:
    """The keys are those of `CreateCluster` in EKS' API reference."""
    aws = FakeAws()
    make_plane(aws, **options).create()
    assert aws.last("create_cluster") == {
        "name": "demo-2",
        "roleArn": "control-role",
        "resourcesVpcConfig": {
            "subnetIds": ["subnet-a", "subnet-b"],
            "endpointPublicAccess": True,
            "endpointPrivateAccess": True,
            **access,
        },
        "accessConfig": {"authenticationMode": "API", "bootstrapClusterCreatorAdminPermissions": True},
        "upgradePolicy": {"supportType": "STANDARD"},
        "bootstrapSelfManagedAddons": False,
        "tags": TAGS,
        **version,
    }


ISSUES = {"issues": [{"code": "Ec2SubnetInvalid", "message": "gone"}, {"code": "Other", "message": "also"}]}


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"status": "ACTIVE"}, (True, None, False)),
        ({"status": "CREATING"}, (False, None, False)),
        ({"status": "DELETING"}, (False, None, True)),
        ({"status": "FAILED"}, (None, "FAILED", False)),
        ({"status": "FAILED", "health": ISSUES}, (None, "Ec2SubnetInvalid: gone; Other: also", False)),
    ],
)
def test_the_status_of_a_control_plane(described: dict[str, Any], expected: tuple[Any, Any, bool]) -> None:
    plane = make_plane(FakeAws(describe_cluster={"cluster": {**described, "tags": TAGS}}))
    is_ready, broken, deleting = expected
    found = plane.find()
    assert found is not None
    assert (found.ours, found.broken, found.deleting) == (True, broken, deleting)
    if is_ready is None:
        with pytest.raises(MlbenchError, match="The EKS cluster demo-2 was not created"):
            plane.poll()
    else:
        assert plane.poll().ready is is_ready


def test_a_control_plane_of_another_version_or_another_owner() -> None:
    described = {"status": "ACTIVE", "version": "1.33", "tags": None}
    aws = FakeAws(describe_cluster={"cluster": described})
    found = make_plane(aws, version="1.34").find()
    assert found is not None
    assert (found.ours, found.differs) == (False, "it has Kubernetes 1.33, not 1.34")
    assert [make_plane(aws, version=version).find().differs for version in ("1.33", None)] == [None, None]  # type: ignore[union-attr]
    assert make_plane(FakeAws(describe_cluster=NotFoundError("gone"))).find() is None
    with pytest.raises(TransientError, match='does not show the EKS cluster "demo-2" yet'):
        make_plane(FakeAws(describe_cluster=NotFoundError("gone"))).poll()


def test_a_deletion_that_eks_refuses_for_now_is_busy_only_while_it_creates() -> None:
    in_use = UsageError("it has node groups", details={"aws": "ResourceInUseException"})
    aws = FakeAws(delete_cluster=in_use, describe_cluster={"cluster": {"status": "CREATING"}})
    plane = make_plane(aws)
    with pytest.raises(BusyError, match="it has node groups"):
        plane.delete()
    assert plane.find().busy == "it has node groups"  # type: ignore[union-attr]
    aws.answers["describe_cluster"] = {"cluster": {"status": "ACTIVE"}}
    assert plane.find().busy is None  # type: ignore[union-attr]
    aws.answers["delete_cluster"] = UsageError("wrong", details={"aws": "InvalidParameterException"})
    with pytest.raises(UsageError, match="wrong"):
        plane.delete()
    aws.answers["delete_cluster"] = NotFoundError("gone")
    plane.delete()


@pytest.mark.parametrize(("status", "is_open"), [("ACTIVE", True), ("UPDATING", True), ("CREATING", False)])
def test_a_cluster_is_reached_while_it_is_active_or_updating(status: str, is_open: bool) -> None:
    cluster = {"status": status, "endpoint": "https://e", "certificateAuthority": {"data": "UEVN"}}
    aws = FakeAws(describe_cluster={"cluster": cluster})
    if is_open:
        access = access_to(aws, "demo-2")
        assert (access.server, access.ca) == ("https://e", b"PEM")
    else:
        with pytest.raises(NotFoundError, match="cannot be reached: it is CREATING"):
            access_to(aws, "demo-2")
    with pytest.raises(NotFoundError, match='no EKS cluster "demo-2" in r-1'):
        access_to(FakeAws(), "demo-2")


# --- add-ons and administrators -------------------------------------------------------------------------------------


def offer(name: str, default: bool) -> dict[str, Any]:
    return {"addonVersion": name, "compatibilities": [{"defaultVersion": False}, {"defaultVersion": default}]}


def addon_world(*offers: dict[str, Any], **more: Any) -> FakeAws:
    addons = {"addons": [{"addonVersions": list(offers)}]}
    return FakeAws(describe_cluster={"cluster": {"version": "1.0"}}, describe_addon_versions=addons, **more)


def test_the_request_of_an_add_on_with_the_default_version_of_eks() -> None:
    aws = addon_world(offer("v2", False), offer("v1", True))
    AddOn(make_plane(aws), "vpc-cni").create()
    assert aws.last("create_addon") == {
        "clusterName": "demo-2",
        "addonName": "vpc-cni",
        "resolveConflicts": "OVERWRITE",
        "tags": TAGS,
        "configurationValues": '{"enableNetworkPolicy": "true"}',
        "addonVersion": "v1",
    }


def test_an_add_on_without_settings_version_or_role_has_none_in_its_request() -> None:
    aws = addon_world(offer("v2", False))
    AddOn(make_plane(aws), "vpc-cni", plain=True).create()
    assert set(aws.last("create_addon")) == {"clusterName", "addonName", "resolveConflicts", "tags"}
    denied = FakeAws(describe_cluster={"cluster": {"version": "1.0"}}, describe_addon_versions=CredentialError("no"))
    AddOn(make_plane(denied), "coredns").create()
    assert set(denied.last("create_addon")) == {"clusterName", "addonName", "resolveConflicts", "tags"}


def test_a_pinned_version_goes_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.eks.control_plane.find_pin", lambda cloud, name, version: "v3")
    for offers, chosen in (([offer("v1", True), offer("v3", False)], "v3"), ([offer("v1", True)], "v1")):
        aws = addon_world(*offers)
        AddOn(make_plane(aws), "coredns").create()
        assert aws.last("create_addon")["addonVersion"] == chosen


def test_the_driver_of_volumes_gets_its_role_by_pod_identity() -> None:
    aws = FakeAws()
    plane = make_plane(aws)
    group = make_group(aws)
    agent, driver, storage = volume_resources(plane, group)
    driver.create()
    assert aws.last("create_addon")["podIdentityAssociations"] == [
        {"serviceAccount": "ebs-csi-controller-sa", "roleArn": "volume-role"}
    ]
    assert (driver.goes_with, agent.goes_with, storage.goes_with) == (group, plane, plane)
    assert [each.name for each in driver.needs] == ["demo-2", "demo-2/eks-pod-identity-agent", "demo-2-workers"]


def test_an_add_on_is_ready_when_active_and_waits_while_degraded() -> None:
    aws = FakeAws(describe_addon={"addon": {"status": "DEGRADED", "health": ISSUES}})
    addon = AddOn(make_plane(aws), "coredns")
    assert addon.poll().reason == "Ec2SubnetInvalid: gone; Other: also"
    aws.answers["describe_addon"] = {"addon": {"status": "CREATING"}}
    assert (addon.poll().ready, addon.poll().reason) == (False, "it is CREATING")
    aws.answers["describe_addon"] = {"addon": {"status": "ACTIVE", "addonVersion": "v1"}}
    assert (addon.poll().ready, addon.poll().facts) == (True, {"addons": {"coredns": "v1"}})
    aws.answers["describe_addon"] = {"addon": {"status": "CREATE_FAILED"}}
    with pytest.raises(MlbenchError, match="The add-on demo-2/coredns was not created"):
        addon.poll()


def test_an_administrator_has_an_entry_and_the_policy_for_the_whole_cluster() -> None:
    aws = FakeAws(create_access_entry=UsageError("exists", details={"aws": "ResourceInUseException"}))
    admin = Admin(make_plane(aws), "arn:me")
    admin.create()
    named = {"clusterName": "demo-2", "principalArn": "arn:me"}
    policy = "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
    assert aws.last("create_access_entry") == {**named, "tags": TAGS}
    assert aws.calls[-1] == (
        "eks",
        "associate_access_policy",
        {**named, "policyArn": policy, "accessScope": {"type": "cluster"}},
    )
    aws.answers["create_access_entry"] = UsageError("wrong", details={"aws": "InvalidParameterException"})
    with pytest.raises(UsageError, match="wrong"):
        admin.create()


@pytest.mark.parametrize(("policies", "is_there"), [([], False), (["other"], False), (["other", ADMIN_POLICY], True)])
def test_an_entry_without_the_policy_is_not_there_yet(policies: list[str], is_there: bool) -> None:
    listed = [{"policyArn": policy} for policy in policies]
    aws = FakeAws(list_associated_access_policies={"associatedAccessPolicies": listed})
    assert (Admin(make_plane(aws), "arn:me").find() is not None) is is_there


# --- machines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "request_changes"),
    [
        ({}, {}),
        ({"spot": True, "types": ("m5.large", "m5a.large")}, {"capacityType": "SPOT"}),
        ({"zone": "r-1b"}, {"subnets": ["subnet-b"]}),
        ({"zone": "r-1b", "private": True}, {"subnets": ["private-b"]}),
        ({"private": True}, {"subnets": ["private-a"]}),
        ({"zone": "r-1x"}, {"subnets": ["subnet-a"]}),
        ({"worker": False}, {"labels": {"mlbench-role": "system"}}),
        (
            {"gpu": True},
            {
                "amiType": "AL2023_x86_64_NVIDIA",
                "labels": {"mlbench-role": "worker", "nvidia.com/gpu.present": "true"},
                "taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}],
            },
        ),
        ({"system": "bottlerocket"}, {"amiType": "BOTTLEROCKET_x86_64"}),
        ({"efa": True}, {"labels": {"mlbench-role": "worker", "vpc.amazonaws.com/efa.present": "true"}}),
        ({"disk": 250}, {"diskSize": 250}),
        ({"count": 0}, {"scalingConfig": {"minSize": 0, "maxSize": 1, "desiredSize": 0}}),
    ],
)
def test_the_request_of_a_node_group(more: dict[str, Any], request_changes: dict[str, Any]) -> None:
    """The keys are those of `CreateNodegroup` in EKS' API reference."""
    aws = FakeAws()
    make_group(aws, **more).create()
    assert aws.last("create_nodegroup") == {
        "clusterName": "demo-2",
        "nodegroupName": "demo-2-workers",
        "nodeRole": "machine-role",
        "subnets": ["subnet-a"],
        "amiType": "AL2023_x86_64_STANDARD",
        "capacityType": "ON_DEMAND",
        "scalingConfig": {"minSize": 0, "maxSize": 3, "desiredSize": 3},
        "labels": {"mlbench-role": "worker"},
        "taints": [],
        "tags": TAGS,
        "diskSize": 100,
        "instanceTypes": list(more.get("types", ("m5.large",))),
        **request_changes,
    }


RESERVATION = {"State": "active", "InstanceType": "p5.48xlarge", "AvailabilityZone": "r-1a"}


@pytest.mark.parametrize(("kind", "capacity"), [("default", "ON_DEMAND"), ("capacity-block", "CAPACITY_BLOCK")])
def test_with_a_reservation_the_template_has_the_type(kind: str, capacity: str) -> None:
    aws = FakeAws(describe_capacity_reservations={"CapacityReservations": [{**RESERVATION, "ReservationType": kind}]})
    make_group(aws, template=True, reservation="cr-1").create()
    sent = aws.last("create_nodegroup")
    assert (sent["capacityType"], sent["launchTemplate"]) == (capacity, {"name": "mlbench-demo-2"})
    assert not {"instanceTypes", "diskSize"} & set(sent)


def found_group(**more: Any) -> dict[str, Any]:
    return {
        "status": "ACTIVE",
        "instanceTypes": ["m5.large"],
        "capacityType": "ON_DEMAND",
        "subnets": ["subnet-a"],
        "scalingConfig": {"desiredSize": 3},
        "tags": TAGS,
        **more,
    }


@pytest.mark.parametrize(
    ("described", "differs"),
    [
        ({}, None),
        ({"instanceTypes": ["c5.large"]}, "its machines are c5.large, not m5.large"),
        ({"instanceTypes": []}, None),
        ({"capacityType": "SPOT"}, "its machines are SPOT"),
        ({"capacityType": None}, None),
        ({"subnets": ["subnet-b"]}, "its machines are not in the zone r-1a"),
        ({"scalingConfig": {"desiredSize": 2}}, "it has 2 machines, not 3 (mlbench scale-cluster demo-2 N)"),
        ({"status": "DELETING", "scalingConfig": {"desiredSize": 2}}, None),
        ({"status": "CREATE_FAILED", "scalingConfig": {"desiredSize": 2}}, None),
    ],
)
def test_a_node_group_that_is_not_as_requested(described: dict[str, Any], differs: str | None) -> None:
    found = make_group(FakeAws(describe_nodegroup={"nodegroup": found_group(**described)}), zone="r-1a").find()
    assert found is not None
    assert found.differs == differs


def test_a_group_that_waits_in_another_zone_is_given_up_but_not_once_it_is_there() -> None:
    elsewhere = found_group(status="CREATING", subnets=["subnet-b"])
    aws = FakeAws(describe_nodegroup={"nodegroup": elsewhere})
    assert make_group(aws, zone="r-1a").find().broken == "it is waiting for machines in a zone other than r-1a"  # type: ignore[union-attr]
    assert make_group(aws, zone="r-1b").find().broken is None  # type: ignore[union-attr]
    assert make_group(aws).find().broken is None  # type: ignore[union-attr]
    there = FakeAws(describe_nodegroup={"nodegroup": found_group(subnets=["subnet-b"])})
    assert make_group(there, zone="r-1a", zones=("r-1a", "r-1b")).find().differs is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (found_group(), None),
        (found_group(status="CREATING"), "3 × m5.large: CREATING"),
        (found_group(status="UPDATING"), "3 × m5.large: UPDATING"),
    ],
)
def test_the_progress_of_a_node_group(described: dict[str, Any], reason: str | None) -> None:
    progress = make_group(FakeAws(describe_nodegroup={"nodegroup": described})).poll()
    assert (progress.ready, progress.reason) == (reason is None, reason or "")


@pytest.mark.parametrize("status", ["CREATING", "CREATE_FAILED", "DEGRADED"])
def test_issues_of_a_node_group_are_an_error_even_while_eks_tries_again(status: str) -> None:
    issue = {"code": "AsgInstanceLaunchFailures", "message": "We do not have sufficient m5.large capacity"}
    described = found_group(status=status, health={"issues": [issue]})
    with pytest.raises(CapacityError, match="demo-2-workers did not get its machines"):
        make_group(FakeAws(describe_nodegroup={"nodegroup": described})).poll()


@pytest.mark.parametrize(("count", "largest"), [(0, 1), (1, 1), (2, 2)])
def test_the_largest_size_of_a_group_is_at_least_one(count: int, largest: int) -> None:
    """EKS requires maxSize to be at least 1."""
    assert scaling_config(count) == {"minSize": 0, "maxSize": largest, "desiredSize": count}


@pytest.mark.parametrize(
    ("status", "size", "is_there", "is_ready"),
    [
        ("ACTIVE", 5, True, True),
        ("ACTIVE", 3, False, False),
        ("UPDATING", 3, True, False),
        ("UPDATING", 5, True, False),
    ],
)
def test_a_resize_is_done_when_the_group_is_active_with_its_size(
    status: str, size: int, is_there: bool, is_ready: bool
) -> None:
    described = found_group(status=status, scalingConfig={"desiredSize": size})
    aws = FakeAws(describe_nodegroup={"nodegroup": described})
    resize = NodeGroupSize(make_group(aws), 5)
    assert ((resize.find() is not None), resize.poll().ready) == (is_there, is_ready)
    resize.create()
    assert aws.last("update_nodegroup_config") == {
        "clusterName": "demo-2",
        "nodegroupName": "demo-2-workers",
        "scalingConfig": {"minSize": 0, "maxSize": 5, "desiredSize": 5},
    }
    with pytest.raises(NotFoundError, match="no node group demo-2-workers"):
        NodeGroupSize(make_group(FakeAws()), 5).find()


@pytest.mark.parametrize(("system", "device"), [("al2023", "/dev/xvda"), ("bottlerocket", "/dev/xvdb")])
def test_the_request_of_a_launch_template(system: str, device: str) -> None:
    """The keys are those of `CreateLaunchTemplate` in EC2's API reference."""
    aws = FakeAws()
    plane = make_plane(aws)
    placement = PlacementGroup(CLUSTER, aws, plane.stack)
    LaunchTemplate(plane, 250, None, placement, system).create()
    kinds = ("instance", "volume", "network-interface")
    volume = {"VolumeSize": 250, "VolumeType": "gp3", "DeleteOnTermination": True}
    assert aws.last("create_launch_template") == {
        "LaunchTemplateName": "mlbench-demo-2",
        "LaunchTemplateData": {
            "BlockDeviceMappings": [{"DeviceName": device, "Ebs": volume}],
            "TagSpecifications": [{"ResourceType": kind, "Tags": TAG_LIST} for kind in kinds],
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
            "Placement": {"GroupName": "mlbench-demo-2"},
        },
        "TagSpecifications": [{"ResourceType": "launch-template", "Tags": TAG_LIST}],
    }


def test_the_only_card_of_a_machine_has_a_public_address_and_the_clusters_security_group() -> None:
    vpc = {"resourcesVpcConfig": {"clusterSecurityGroupId": "sg-1"}}
    aws = FakeAws(describe_cluster={"cluster": vpc})
    LaunchTemplate(make_plane(aws), 100, Machine("g5.48xlarge", 192, efa=1)).create()
    assert aws.last("create_launch_template")["LaunchTemplateData"]["NetworkInterfaces"] == [
        {
            "NetworkCardIndex": 0,
            "DeviceIndex": 0,
            "InterfaceType": "efa",
            "Groups": ["sg-1"],
            "DeleteOnTermination": True,
            "AssociatePublicIpAddress": True,
        }
    ]


@pytest.mark.parametrize(
    ("groups", "state"),
    [
        ([], None),
        ([{"State": "deleted", "Tags": TAG_LIST}], None),
        ([{"State": "pending", "Tags": TAG_LIST}], ("pending", True, False, False)),
        ([{"State": "available", "Tags": []}], ("available", False, False, True)),
        ([{"State": "deleting", "Tags": TAG_LIST}], ("deleting", True, True, False)),
    ],
)
def test_the_state_of_a_placement_group(groups: list[dict[str, Any]], state: Any) -> None:
    aws = FakeAws(describe_placement_groups={"PlacementGroups": groups})
    group = PlacementGroup(CLUSTER, aws, make_plane(aws).stack)
    found, is_ready = group.find(), group.poll().ready
    assert (None if found is None else (found.state, found.ours, found.deleting, is_ready)) == state
    group.create()
    assert aws.calls[-1][2] == {
        "GroupName": "mlbench-demo-2",
        "Strategy": "cluster",
        "TagSpecifications": [{"ResourceType": "placement-group", "Tags": TAG_LIST}],
    }


# --- the network ----------------------------------------------------------------------------------------------------


def zone_world(*names: str, offering: tuple[str, ...] = (), **more: Any) -> FakeAws:
    listed = [{"ZoneName": name, "ZoneId": f"id-{name}"} for name in names] + [{"ZoneName": "x", "ZoneId": "use1-az3"}]
    offers = [{"Location": name, "InstanceType": "m5.large"} for name in offering]
    others = [{"Location": name, "InstanceType": "other"} for name in names]
    return FakeAws(
        describe_availability_zones={"AvailabilityZones": listed},
        describe_instance_type_offerings={"InstanceTypeOfferings": offers + others},
        **more,
    )


def test_zones_with_the_machines_come_first_and_the_wanted_one_before_them() -> None:
    aws = zone_world("c", "b", "a", offering=("b", "c"))
    assert zones_for(aws, ["m5.large"], None) == ["b", "c", "a"]
    assert zones_for(aws, ["m5.large"], "c") == ["c", "b", "a"]
    with pytest.raises(UsageError, match=r"zone a does not have m5\.large") as caught:
        zones_for(aws, ["m5.large"], "a")
    assert caught.value.hint == "These have it: b, c"
    with pytest.raises(CapacityError, match=r"m5\.large is offered in no zone of r-1"):
        zones_for(zone_world("a", "b"), ["m5.large"], None)
    with pytest.raises(UsageError, match="only 1 are available in r-1"):
        zones_for(zone_world("a", offering=("a",)), ["m5.large"], None)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"zone": "c"}, {"FirstZone": "c", "SecondZone": "b"}),
        ({"private": True}, {"PrivateMachines": "yes"}),
        ({"boundary": "arn:b"}, {"Boundary": "arn:b"}),
        ({"zones": ("c",)}, {"FirstZone": "c", "SecondZone": "b", "Moving": "yes"}),
        (
            {"zones": ("c", "b", "a")},
            {"FirstZone": "c", "SecondZone": "b", "ThirdZone": "a", "Moving": "yes"},
        ),
    ],
)
def test_the_request_of_a_stack(options: dict[str, Any], changes: dict[str, str]) -> None:
    """The keys are those of `CreateStack` in CloudFormation's API reference."""
    aws = zone_world("c", "b", "a", offering=("b", "c"))
    Stack(CLUSTER, aws, ["m5.large"], **options).create()
    sent = aws.last("create_stack")
    assert "AWSTemplateFormatVersion" in sent.pop("TemplateBody")
    given = {item["ParameterKey"]: item["ParameterValue"] for item in sent.pop("Parameters")}
    plain = {"FirstZone": "b", "SecondZone": "c", "ClusterName": "demo-2", "Subnets": "", "Boundary": ""}
    assert given == {**plain, "PrivateMachines": "no", "Moving": "no", **changes}
    assert sent == {
        "StackName": "mlbench-demo-2",
        "Capabilities": ["CAPABILITY_IAM"],
        "TimeoutInMinutes": 20,
        "OnFailure": "ROLLBACK",
        "Tags": TAG_LIST,
    }


OUTPUTS = {
    "Vpc": "vpc-1",
    "ControlRole": "c",
    "MachineRole": "m",
    "FirstZone": "a",
    "FirstSubnet": "subnet-1",
    "SecondZone": "b",
    "SecondSubnet": "subnet-2",
    "PrivateSubnet": "private-1",
}


def stack_world(status: str, outputs: dict[str, str] | None = None, **more: Any) -> FakeAws:
    listed = [{"OutputKey": key, "OutputValue": value} for key, value in (outputs or OUTPUTS).items()]
    return FakeAws(describe_stacks={"Stacks": [{"StackStatus": status, "Outputs": listed, "Tags": TAG_LIST, **more}]})


@pytest.mark.parametrize("status", ["CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE"])
def test_the_outputs_of_a_stack(status: str) -> None:
    network = Stack(CLUSTER, stack_world(status), []).network()
    zones = {"a": "subnet-1", "b": "subnet-2"}
    assert network == Network("vpc-1", zones, {"a": "private-1"}, "c", "m", "", "", "", frozenset({"a", "b"}))
    roles = {"VolumeRole": "v", "EndRole": "e", "Nat": "n"}
    whole = Stack(CLUSTER, stack_world(status, {**OUTPUTS, **roles}), []).network()
    assert (whole.volume_role, whole.end_role, whole.nat) == ("v", "e", "n")


def test_a_stack_that_is_not_complete_has_no_network() -> None:
    with pytest.raises(NotFoundError, match="is not complete: CREATE_IN_PROGRESS"):
        Stack(CLUSTER, stack_world("CREATE_IN_PROGRESS"), []).network()
    with pytest.raises(NotFoundError, match="is not complete: absent"):
        Stack(CLUSTER, stack_world("DELETE_COMPLETE"), []).network()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("CREATE_COMPLETE", (False, None)),
        ("CREATE_IN_PROGRESS", (False, None)),
        ("DELETE_IN_PROGRESS", (True, None)),
        ("ROLLBACK_IN_PROGRESS", (True, None)),
        ("ROLLBACK_COMPLETE", (False, "ROLLBACK_COMPLETE")),
        ("DELETE_FAILED", (False, "DELETE_FAILED")),
    ],
)
def test_the_status_of_a_stack(status: str, expected: tuple[bool, str | None]) -> None:
    found = Stack(CLUSTER, stack_world(status), []).find()
    assert found is not None
    assert ((found.deleting, found.broken), found.ours) == (expected, True)


@pytest.mark.parametrize(
    ("options", "has", "differs"),
    [
        ({}, {}, None),
        ({"zone": "a"}, {"FirstZone": "a", "SecondZone": "b"}, None),
        ({"zone": "c"}, {"FirstZone": "a", "SecondZone": "b"}, "it is in the zones a and b, not in c"),
        ({"zones": ("a", "d")}, {"FirstZone": "a", "SecondZone": "b"}, "it is in the zones a and b, not in d"),
        ({"private": True}, {"PrivateMachines": "yes"}, None),
        (
            {"private": True},
            {"PrivateMachines": "no"},
            "it has no private subnet, which machines with several network cards need",
        ),
        ({"subnets": ("s1", "s2")}, {"Subnets": "s2,s1"}, None),
        ({"subnets": ("s1", "s2")}, {"Subnets": ""}, "it is in its own network, not in s1,s2"),
        ({}, {"Subnets": "s1,s2"}, "it is in s1,s2, not in its own"),
    ],
)
def test_a_stack_that_is_not_as_requested(options: dict[str, Any], has: dict[str, str], differs: str | None) -> None:
    parameters = [{"ParameterKey": key, "ParameterValue": value} for key, value in has.items()]
    found = Stack(CLUSTER, stack_world("CREATE_COMPLETE", Parameters=parameters), [], **options).find()
    assert found is not None
    assert found.differs == differs


@pytest.mark.parametrize(
    ("reason", "kind", "hint"),
    [
        ("The maximum number of VPCs has been reached", CapacityError, None),
        ("User is not authorized to perform: iam:CreateRole on x", CredentialError, "--permissions-boundary"),
        ("User is not authorized to perform: ec2:CreateVpc", CredentialError, "--subnets"),
        ("Something else", MlbenchError, "describe-stack-events --stack-name mlbench-demo-2"),
    ],
)
def test_a_stack_that_failed_reports_its_first_failure(reason: str, kind: type[MlbenchError], hint: str | None) -> None:
    def event(name: str, status: str, words: str) -> dict[str, str]:
        ids = {"LogicalResourceId": name, "ResourceType": "AWS::T"}
        return {**ids, "ResourceStatus": status, "ResourceStatusReason": words}

    aws = stack_world("ROLLBACK_COMPLETE")
    aws.answers["describe_stack_events"] = {
        "StackEvents": [  # newest first
            event("Last", "CREATE_FAILED", "later"),
            event("First", "CREATE_FAILED", reason),
            event("Other", "CREATE_FAILED", "Resource creation cancelled"),
            event("Zero", "CREATE_COMPLETE", "fine"),
        ]
    }
    with pytest.raises(MlbenchError) as caught:
        Stack(CLUSTER, aws, []).poll()
    assert type(caught.value) is kind
    assert f'(ROLLBACK_COMPLETE): "First (AWS::T): {reason}"' in caught.value.message
    assert hint is None or hint in str(caught.value.hint)


def test_given_subnets_are_of_one_network_and_of_different_zones() -> None:
    def subnet(number: int, zone: str, vpc: str = "v", public: bool = False) -> dict[str, Any]:
        ids = {"SubnetId": f"subnet-0000000{number}", "AvailabilityZone": zone, "VpcId": vpc}
        return {**ids, "MapPublicIpOnLaunch": public, "AvailableIpAddressCount": 10 + number}

    names = ("subnet-00000002", "subnet-00000001")
    found = find_subnets(FakeAws(describe_subnets={"Subnets": [subnet(1, "a", public=True), subnet(2, "b")]}), names)
    assert (found.vpc, list(found.by_zone.items())) == ("v", [("b", names[0]), ("a", names[1])])
    assert (found.public, found.free) == (frozenset({"a"}), {"a": 11, "b": 12})
    for second, says in ((subnet(2, "b", "w"), "of the networks v and w"), (subnet(2, "a"), "share a zone")):
        with pytest.raises(UsageError, match=says):
            find_subnets(FakeAws(describe_subnets={"Subnets": [subnet(1, "a"), second]}), names)


@pytest.mark.parametrize("text", ["subnet-1234567", "subnet-" + "a" * 18, "subnet-0000000G,subnet-00000001", "vpc-1"])
def test_ids_of_subnets_have_8_to_17_hexadecimal_digits(text: str) -> None:
    with pytest.raises(UsageError, match="is not the ID of a subnet"):
        split_subnets(text)


def test_at_least_two_different_subnets_or_none() -> None:
    assert split_subnets(None) == split_subnets("") == ()
    assert split_subnets(" subnet-00000001, subnet-00000002,") == ("subnet-00000001", "subnet-00000002")
    for text in ("subnet-00000001", "subnet-00000001,subnet-00000001"):
        with pytest.raises(UsageError, match="at least two subnets"):
            split_subnets(text)


# --- causes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said", "kind"),
    [
        ("AsgInstanceLaunchFailures", "no Spot capacity available", CapacityError),
        ("AsgInstanceLaunchFailures", "You have requested more vCPU capacity than your vCPU limit", CapacityError),
        ("AsgInstanceLaunchFailures", "InstanceLimitExceeded", CapacityError),
        ("InsufficientFreeAddresses", "x", CapacityError),
        ("AccessDenied", "You are not authorized to perform this operation", CredentialError),
        ("AsgInstanceLaunchFailures", "Client.InternalError: Client error on launch", CredentialError),
        ("AsgInstanceLaunchFailures", "PendingVerification", CredentialError),
        ("AsgInstanceLaunchFailures", "The type is not eligible for Free Tier", UsageError),
        ("AsgInstanceLaunchFailures", "Unsupported - not in this zone", UsageError),
    ],
)
def test_a_cause_in_amazons_words(code: str, said: str, kind: type[MlbenchError]) -> None:
    assert type(error_from_message(code, "message", said, "r-1")) is kind


def test_an_unhealthy_resource_without_issues_is_described_by_its_status() -> None:
    error = error_from_issues({"status": "CREATE_FAILED"}, "It failed")
    assert error.message == 'It failed: "CREATE_FAILED" (CREATE_FAILED)'
