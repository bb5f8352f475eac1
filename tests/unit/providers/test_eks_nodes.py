"""What EKS' machines start with, when a group that gets no more of them is given up, and AWS' limits for them."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.model.run import Cluster
from providers.base import BusyError
from providers.eks import EksProvider, nodes, subnet_checks
from providers.eks.capacity import Reservation, check_reservation, find_reservation
from providers.eks.leftovers import clear_network, is_in_use
from providers.eks.machines import Machine, describe_machine, machine_of
from providers.eks.nodes import Group, LaunchTemplate, NodeGroup
from providers.eks.options import EksOptions
from providers.eks.plan import _check_public_access, _check_quota, _fabric_warnings, _quota_code, _spot
from providers.eks.topology import NodeTopology, _find_unlabeled, find_places, has_topology
from providers.eks.versions import Version, choose_version, offered_versions
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


# --- AWS' limits ----------------------------------------------------------------------------------------------------


class Answers:
    """AWS as a table of answers by operation: a document, an error, or a function of the arguments."""

    region = "eu-west-1"

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, service: str, operation: str, **arguments: Any) -> Any:
        check_operation(service, operation)
        self.calls.append((operation, arguments))
        answer = self.answers.get(operation, {})
        if isinstance(answer, Exception):
            raise answer
        return answer(**arguments) if callable(answer) else answer

    def pages(self, service: str, operation: str, key: str, **arguments: Any) -> Any:
        return self.call(service, operation, **arguments).get(key, [])


def new_cluster(count: int = 2, **options: Any) -> Cluster:
    return EksProvider().new_cluster("demo-2", count, EksOptions(region="eu-west-1", **options))


@pytest.mark.parametrize(("size", "is_allowed"), [(19, False), (20, True), (16384, True), (16385, False)])
def test_a_gp3_disk_has_up_to_16_tib_and_room_for_the_image_with_a_driver(size: int, is_allowed: bool) -> None:
    if is_allowed:
        assert new_cluster(disk_size=size).details["options"]["disk_size"] == size
    else:
        with pytest.raises(UsageError, match="from 20 to 16384 GB"):
            new_cluster(disk_size=size)


def test_a_node_group_grows_to_the_quota_of_450_machines_and_no_further() -> None:
    """The default of the service quota "Nodes per managed node group" of EKS."""
    assert new_cluster(450).details["nodes"] == 450
    assert EksProvider().scale(new_cluster(), 450)
    with pytest.raises(UsageError, match="at most 450"):
        EksProvider().scale(new_cluster(), 451)


@pytest.mark.parametrize(
    ("limit", "needed", "outcome"),
    [(8.0, 8, "of which these machines take 8"), (8.0, 5, "take 5"), (8.0, 4, ""), (7.9, 8, "refused")],
)
def test_a_quota_of_vcpus_is_compared_with_the_need(limit: float, needed: int, outcome: str) -> None:
    aws: Any = Answers(get_service_quota={"Quota": {"Value": limit}})
    check = (aws, "L-1216C47A", needed, "2 × m5.xlarge", Group("g", ("m5.xlarge",), 2, 20), {"m5.xlarge": 4}, 0)
    if outcome == "refused":
        with pytest.raises(CapacityError, match=f"need {needed}"):
            _check_quota(*check)
    else:
        found = _check_quota(*check)
        assert outcome in "".join(found)
        assert bool(found) is bool(outcome)


@pytest.mark.parametrize(
    ("machine", "spot", "code"),
    [
        ("p5.48xlarge", True, "L-C4BD4855"),
        ("p4d.24xlarge", True, "L-7212CCBC"),
        ("p5.48xlarge", False, "L-417A185B"),
        ("g5.xlarge", False, "L-DB2E81BA"),
        ("vt1.3xlarge", False, "L-DB2E81BA"),
        ("t3.large", False, "L-1216C47A"),
        ("trn1.2xlarge", False, None),
        ("u-6tb1.56xlarge", False, None),
    ],
)
def test_a_machine_counts_toward_the_quota_of_its_family(machine: str, spot: bool, code: str | None) -> None:
    """The codes of EC2 in Service Quotas. Trainium has quotas of its own."""
    assert _quota_code(Group("g", (machine,), 1, 20, spot=spot)) == code


@pytest.mark.parametrize(
    ("mode", "private", "is_refused"),
    [
        ("off", (False, False), False),
        ("block-ingress", (False, False), True),
        ("block-ingress", (False, True), True),
        ("block-ingress", (True, True), False),
        ("block-bidirectional", (True, True), True),
    ],
)
def test_a_block_of_public_access_leaves_only_private_machines(
    mode: str, private: tuple[bool, bool], is_refused: bool
) -> None:
    told = {"VpcBlockPublicAccessOptions": {"InternetGatewayBlockMode": mode}}
    aws: Any = Answers(describe_vpc_block_public_access_options=told)
    groups = [Group("g", ("m5.xlarge",), 1, 20, private=item) for item in private]
    if is_refused:
        with pytest.raises(UsageError, match=f"is {mode}"):
            _check_public_access(aws, groups)
    else:
        _check_public_access(aws, groups)


@pytest.mark.parametrize(("count", "warns"), [(1, False), (2, True)])
def test_a_network_that_is_not_set_up_matters_between_machines_only(count: int, warns: bool) -> None:
    workers = Group("g", ("p4d.24xlarge",), count, 100)
    assert bool(_fabric_warnings(EksOptions(), workers, machine_of("p4d.24xlarge"))) is warns


def test_the_spot_price_is_the_latest_of_the_dearest_type() -> None:
    now = datetime.now(UTC)
    told = [
        {"InstanceType": "a", "Timestamp": now - timedelta(hours=1), "SpotPrice": "9.0"},
        {"InstanceType": "a", "Timestamp": now, "SpotPrice": "1.0"},
        {"InstanceType": "b", "Timestamp": now, "SpotPrice": "2.0"},
    ]
    aws: Any = Answers(describe_spot_price_history={"SpotPriceHistory": told})
    line = _spot(aws, Group("g", ("a", "b"), 2, 20, spot=True), "eu-west-1a")
    assert line is not None
    assert line.price == 2.0


# --- reservations and places ----------------------------------------------------------------------------------------


def reservation(**more: Any) -> Reservation:
    return Reservation("cr-1", "p5.48xlarge", "z", 2, more.pop("is_block", False), **more)


def test_a_reservation_serves_as_many_machines_as_are_free() -> None:
    assert check_reservation(reservation(), "p5.48xlarge", 2, "z") == []
    with pytest.raises(CapacityError, match="has 2 machines left, but 3 are needed"):
        check_reservation(reservation(), "p5.48xlarge", 3, None)


def test_only_a_capacity_block_is_taken_away_at_its_end() -> None:
    end = time.time() + 7200
    assert check_reservation(reservation(ends=end), "p5.48xlarge", 1, None) == []
    (warning,) = check_reservation(reservation(ends=end, is_block=True), "p5.48xlarge", 1, None)
    assert "ends in 2.0 h" in warning
    with pytest.raises(CapacityError, match="machines cannot start earlier"):
        check_reservation(reservation(begins=end), "p5.48xlarge", 1, None)


# The states of a capacity reservation in EC2's API reference.
@pytest.mark.parametrize(
    ("state", "is_usable"),
    [
        ("active", True),
        ("pending", True),
        ("scheduled", True),
        ("assessing", True),
        ("payment-pending", True),
        ("expired", False),
        ("cancelled", False),
        ("failed", False),
        ("payment-failed", False),
        ("delayed", False),
        ("unsupported", False),
    ],
)
def test_a_reservation_that_has_not_ended_is_found(state: str, is_usable: bool) -> None:
    found = {"State": state, "InstanceType": "p5.48xlarge", "AvailabilityZone": "z"}
    aws: Any = Answers(describe_capacity_reservations={"CapacityReservations": [found]})
    if is_usable:
        assert find_reservation(aws, "cr-1").machine == "p5.48xlarge"
    else:
        with pytest.raises(UsageError, match=f"is {state}"):
            find_reservation(aws, "cr-1")


def test_positions_are_asked_for_100_machines_at_a_time() -> None:
    """The most instance IDs that DescribeInstanceTopology accepts."""

    def answer(**arguments: Any) -> dict[str, Any]:
        return {"Instances": [{"InstanceId": name, "NetworkNodes": ["n"]} for name in arguments["InstanceIds"]]}

    aws: Any = Answers(describe_instance_topology=answer)
    assert len(find_places(aws, [f"i-{number}" for number in range(201)])) == 201
    assert [len(arguments["InstanceIds"]) for _, arguments in aws.calls] == [100, 100, 1]


@pytest.mark.parametrize(
    ("provider", "labels", "instance"),
    [
        ("aws:///eu-west-1a/i-1", {}, "i-1"),
        ("aws:///eu-west-1a/i-1", {"topology.k8s.aws/network-node-layer-1": "n"}, None),
        ("eks-hybrid:///eu-west-1/rel/mi-1", {}, None),
        ("", {}, None),
    ],
)
def test_only_ec2_machines_without_labels_are_labeled(provider: str, labels: Any, instance: str | None) -> None:
    assert _find_unlabeled({"metadata": {"labels": labels}, "spec": {"providerID": provider}}) == instance


def test_the_farthest_layer_of_the_network_has_the_label_of_layer_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS' cloud controller numbers the layers from 1, as EC2 lists them."""
    patches: list[Any] = []
    node = {"metadata": {"name": "n"}, "spec": {"providerID": "aws:///z/i-1"}}
    client = SimpleNamespace(
        get=lambda *_, **__: {"items": [node]}, patch=lambda path, body: patches.append(body["metadata"]["labels"])
    )
    monkeypatch.setattr("providers.eks.topology.open_young_cluster", lambda connect: nullcontext(client))
    told = {"Instances": [{"InstanceId": "i-1", "NetworkNodes": ["far", "near"]}]}
    topology = object.__new__(NodeTopology)
    topology.plane = SimpleNamespace(access=None, aws=Answers(describe_instance_topology=told))  # type: ignore[assignment]
    assert topology._label_nodes() is None
    layers = {f"topology.k8s.aws/network-node-layer-{number}": name for number, name in ((1, "far"), (2, "near"))}
    assert patches == [layers]


@pytest.mark.parametrize(
    ("machine", "is_known"), [("p5en.48xlarge", True), ("g6e.xlarge", True), ("g6.xlarge", False), ("m5.large", False)]
)
def test_ec2_tells_the_topology_of_some_families(machine: str, is_known: bool) -> None:
    assert has_topology(machine) is is_known


# --- versions -------------------------------------------------------------------------------------------------------

TODAY = date(2026, 11, 1)


def test_versions_are_ordered_by_number_and_without_those_in_extended_support() -> None:
    names = {
        "1.9": "STANDARD_SUPPORT",
        "1.33": "STANDARD_SUPPORT",
        "1.10": "STANDARD_SUPPORT",
        "1.8": "EXTENDED_SUPPORT",
    }
    told = [{"clusterVersion": name, "versionStatus": state} for name, state in names.items()]
    aws: Any = Answers(describe_cluster_versions={"clusterVersions": told})
    assert [version.name for version in offered_versions(aws)] == ["1.33", "1.10", "1.9"]


@pytest.mark.parametrize(("days", "chosen"), [(61, "1.33"), (60, "1.34"), (-1, "1.34")])
def test_a_default_whose_support_ends_within_60_days_is_passed_over(days: int, chosen: str) -> None:
    newest = Version("1.34", TODAY + timedelta(days=400), is_default=False)
    default = Version("1.33", TODAY + timedelta(days=days), is_default=True)
    found = choose_version([newest, default], TODAY)
    assert found is not None
    assert found.name == chosen


# --- networks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def subnets(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Checks one subnet with that many free addresses for one system machine and two workers."""
    monkeypatch.setattr(subnet_checks, "zones_for", lambda *_: ["z"])
    monkeypatch.setattr(subnet_checks, "zones_with", lambda *_: ["z"])
    monkeypatch.setattr(subnet_checks, "_check_dns", lambda *_: None)
    monkeypatch.setattr(subnet_checks, "_check_way_out", lambda *_: [])
    groups = [Group("system", ("m5.large",), 1, 20), Group("workers", ("m5.large",), 2, 20)]

    def check(free: int) -> list[str]:
        found = SimpleNamespace(vpc="vpc-1", by_zone={"z": "subnet-1"}, public=("z",), free={"z": free})
        monkeypatch.setattr(subnet_checks, "find_subnets", lambda *_: found)
        return subnet_checks.check_subnets(Answers(), ["subnet-1"], groups)[1]  # type: ignore[arg-type]

    return check


def test_a_subnet_has_addresses_for_the_machines_and_six_of_the_control_plane(
    subnets: Callable[[int], list[str]],
) -> None:
    """EKS' user guide: a subnet of the control plane needs at least six addresses."""
    assert subnets(9) == []
    with pytest.raises(CapacityError, match="8 free addresses; control plane and machines take 9"):
        subnets(8)


@pytest.mark.parametrize(("state", "target"), [("active", "nat-1"), ("blackhole", None)])
def test_a_default_route_to_nowhere_is_none(state: str, target: str | None) -> None:
    route = {"DestinationCidrBlock": "0.0.0.0/0", "State": state, "NatGatewayId": "nat-1"}
    aws: Any = Answers(describe_route_tables={"RouteTables": [{"Routes": [route]}]})
    assert subnet_checks._default_route(aws, "vpc-1", "subnet-1") == target


def test_the_group_default_of_a_network_is_left_to_aws() -> None:
    """EC2 deletes it with its network only, and refuses anything else."""
    groups = [{"GroupId": "sg-1", "GroupName": "default"}, {"GroupId": "sg-2", "GroupName": "k8s-elb"}]
    aws: Any = Answers(describe_security_groups={"SecurityGroups": groups})
    clear_network(aws, ["vpc-1"])
    assert [arguments for operation, arguments in aws.calls if operation == "delete_security_group"] == [
        {"GroupId": "sg-2"}
    ]


@pytest.mark.parametrize(
    ("state", "is_used"), [("available", False), ("detaching", False), ("in-use", True), ("attaching", True)]
)
def test_an_interface_that_is_being_detached_is_no_longer_in_use(state: str, is_used: bool) -> None:
    assert is_in_use({"Status": state}) is is_used


def test_an_interface_that_is_still_attached_is_waited_for() -> None:
    interfaces = [
        {"NetworkInterfaceId": "eni-1", "Status": "in-use"},
        {"NetworkInterfaceId": "eni-2", "Status": "available"},
    ]
    aws: Any = Answers(describe_network_interfaces={"NetworkInterfaces": interfaces})
    with pytest.raises(BusyError, match="eni-1 is in-use"):
        clear_network(aws, ["vpc-1"])
    assert ("delete_network_interface", {"NetworkInterfaceId": "eni-2"}) in aws.calls


# --- machines -------------------------------------------------------------------------------------------------------


def describe(**network: Any) -> Machine:
    item = {"GpuInfo": {"Gpus": [{"Name": "H100", "Count": 8, "Manufacturer": "NVIDIA"}]}, "NetworkInfo": network}
    aws: Any = Answers(describe_instance_types={"InstanceTypes": [item]})
    found = describe_machine(aws, Machine("p9.48xlarge", 0))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("speed", "gbits"),
    [("100 Gigabit", 100), ("3200 Gigabit", 3200), ("50 Gigabit", None), ("Up to 100 Gigabit", None)],
)
def test_a_network_counts_as_fast_from_100_gbit_on(speed: str, gbits: int | None) -> None:
    assert describe(NetworkPerformance=speed).gbits == gbits


@pytest.mark.parametrize(
    ("efa", "cards", "plain_first"), [(16, 17, True), (16, 16, False), (0, 1, False), (1, 1, False)]
)
def test_a_card_more_than_efa_has_is_an_ordinary_first_one(efa: int, cards: int, plain_first: bool) -> None:
    info = {"EfaInfo": {"MaximumEfaInterfaces": efa}, "EfaSupported": efa > 0, "MaximumNetworkCards": cards}
    machine = describe(**info)
    assert (machine.efa, machine.plain_first) == (efa, plain_first)


def interfaces_of(machine: Machine, *, private: bool = False) -> list[dict[str, Any]]:
    template = object.__new__(LaunchTemplate)
    stack = SimpleNamespace(network=lambda: SimpleNamespace(public=True))
    template.plane, template.aws = SimpleNamespace(name="rel-2", stack=stack), Answers()  # type: ignore[assignment]
    template.private = private
    return template._interfaces(machine)


@pytest.fixture
def _has_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"resourcesVpcConfig": {"clusterSecurityGroupId": "sg-1"}}
    monkeypatch.setattr(nodes, "find_raw_cluster", lambda *_: told)


@pytest.mark.usefixtures("_has_cluster")
def test_cards_are_numbered_as_ec2_wants_them() -> None:
    """EC2's guide to EFA: device 0 on the first card and 1 on all others; 0 again for interfaces of EFA only."""

    def list_cards(machine: Machine) -> list[tuple[int, int, str]]:
        found = interfaces_of(machine)
        return [(item["NetworkCardIndex"], item["DeviceIndex"], item["InterfaceType"]) for item in found]

    assert list_cards(Machine("p4d", 96, efa=3)) == [(0, 0, "efa"), (1, 1, "efa"), (2, 1, "efa")]
    with_plain = Machine("p6-b300", 192, efa=2, plain_first=True)
    assert list_cards(with_plain) == [(0, 0, "interface"), (1, 0, "efa-only"), (2, 0, "efa-only")]


@pytest.mark.usefixtures("_has_cluster")
@pytest.mark.parametrize(("efa", "private", "is_public"), [(1, False, True), (1, True, False), (2, False, False)])
def test_only_a_machine_with_one_card_gets_a_public_address(efa: int, private: bool, is_public: bool) -> None:
    found = interfaces_of(Machine("p", 96, efa=efa), private=private)
    assert [("AssociatePublicIpAddress" in item) for item in found] == [is_public] * efa


def test_containers_reach_the_metadata_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container is one hop further: with AWS' default of one, the answer would not arrive."""
    monkeypatch.setattr("providers.eks.nodes.ownership_tags", lambda cluster: {})
    aws = Aws()
    LaunchTemplate(plane_of(aws), 100, None).create()
    options = aws.calls["create_launch_template"]["LaunchTemplateData"]["MetadataOptions"]
    assert options["HttpPutResponseHopLimit"] == 2
