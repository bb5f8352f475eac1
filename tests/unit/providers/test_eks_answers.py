"""What is decided from answers of AWS: machines, reservations, versions, subnets, codes of errors."""

import functools
import operator
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from providers.base import TransientError
from providers.eks import capacity, subnet_checks, topology, versions
from providers.eks.aws import ASK_RIGHTS, ELSEWHERE, LOG_IN, MORE_QUOTA, SET_CLOCK, error_from_code, tag_list, tags_of
from providers.eks.capacity import Reservation
from providers.eks.machines import Machine, describe_machine, machine_of
from providers.eks.versions import Version
from tests.fakes.aws_operations import check_operation


def aws(answers: Mapping[str, Any]) -> Any:
    """AWS in a region that answers these operations; an exception is raised."""

    def answer(service: str, operation: str, **_parameters: Any) -> Any:
        check_operation(service, operation)
        found = answers[operation]
        if isinstance(found, Exception):
            raise found
        return found

    return SimpleNamespace(
        region="eu-west-1", call=answer, pages=lambda service, operation, key, **more: answer(service, operation)[key]
    )


def described(**item: Any) -> Any:
    return aws({"describe_instance_types": {"InstanceTypes": [item] if item else []}})


def test_a_new_machine_has_what_ec2_tells() -> None:
    answer = described(
        VCpuInfo={"DefaultVCpus": 192},
        GpuInfo={"Gpus": [{"Name": "B300", "Manufacturer": "NVIDIA", "Count": 8}]},
        NetworkInfo={
            "NetworkPerformance": "6400 Gigabit",
            "EfaSupported": True,
            "EfaInfo": {"MaximumEfaInterfaces": 16},
            "MaximumNetworkCards": 17,
        },
    )
    found = describe_machine(answer, Machine("p6-b300.48xlarge", 0))
    assert found == Machine("p6-b300.48xlarge", 192, "B300", 8, 16, 6400, plain_first=True)


def test_the_table_names_the_gpu_and_knows_vcpus_that_ec2_does_not_tell() -> None:
    answer = described(GpuInfo={"Gpus": [{"Name": "A10", "Count": 2}, {"Name": "A10", "Count": 2}]})
    assert describe_machine(answer, Machine("g5.12xlarge", 48, "A10G", 4, 1)) == Machine("g5.12xlarge", 48, "A10G", 4)


@pytest.mark.parametrize(
    ("network", "efa", "gbits", "plain_first"),
    [
        ({}, 0, None, False),
        ({"EfaSupported": True}, 1, None, False),
        ({"EfaSupported": False, "EfaInfo": {"MaximumEfaInterfaces": 4}, "MaximumNetworkCards": 4}, 0, None, False),
        ({"EfaSupported": True, "EfaInfo": {"MaximumEfaInterfaces": 4}, "MaximumNetworkCards": 4}, 4, None, False),
        ({"EfaSupported": True, "EfaInfo": {"MaximumEfaInterfaces": 1}, "MaximumNetworkCards": 2}, 1, None, True),
        ({"NetworkPerformance": "100 Gigabit"}, 0, 100, False),
        ({"NetworkPerformance": "50 Gigabit"}, 0, None, False),
        ({"NetworkPerformance": "99 Gigabit"}, 0, None, False),
        ({"NetworkPerformance": "Up to 200 Gigabit"}, 0, None, False),
    ],
)
def test_network_cards_with_efa_and_bandwidth_from_100_gbit_are_read(
    network: dict[str, Any], efa: int, gbits: int | None, plain_first: bool
) -> None:
    found = describe_machine(described(InstanceType="m5.xlarge", NetworkInfo=network), machine_of("m5.xlarge"))
    assert found == Machine("m5.xlarge", 4, None, 0, efa, gbits, plain_first)


def test_a_type_without_description_is_unknown() -> None:
    assert describe_machine(described(), machine_of("m5.xlarge")) is None


def test_gpus_of_another_maker_are_named() -> None:
    answer = described(GpuInfo={"Gpus": [{"Name": "MI300X", "Manufacturer": "AMD", "Count": 8}]})
    with pytest.raises(UsageError, match=r"The GPUs of g8\.xlarge are AMD's, not NVIDIA's") as caught:
        describe_machine(answer, machine_of("g8.xlarge"))
    assert caught.value.hint == "--gpu-type L4"


def test_only_a_missing_permission_leaves_a_machine_unknown() -> None:
    missing = CredentialError("no", hint=ASK_RIGHTS)
    assert describe_machine(aws({"describe_instance_types": missing}), machine_of("g5.xlarge")) is None
    with pytest.raises(CredentialError):
        describe_machine(
            aws({"describe_instance_types": CredentialError("expired", hint=LOG_IN)}), machine_of("g5.xlarge")
        )


def test_a_gpu_machine_that_ec2_does_not_know_is_rejected_with_the_nearest() -> None:
    answer = aws({"describe_instance_types": UsageError("There is no g5.3xlarge.")})
    with pytest.raises(UsageError, match=r"There is no g5\.3xlarge\..*g5\.") as caught:
        describe_machine(answer, machine_of("g5.3xlarge"))
    assert caught.value.hint == "Choose another --machine-type."
    assert describe_machine(answer, machine_of("m5.3xlarge")) is None


BEGIN, END = datetime(2026, 3, 1, 11, 30, tzinfo=UTC), datetime(2026, 3, 2, 11, 30, tzinfo=UTC)
GROUP = "arn:aws:ec2:eu-west-1:111122223333:placement-group/train"


def reserved(**more: Any) -> Any:
    item = {"InstanceType": "p5.48xlarge", "AvailabilityZone": "eu-west-1a", "State": "active", **more}
    return aws({"describe_capacity_reservations": {"CapacityReservations": [item]}})


def test_a_capacity_block_is_read_with_its_times_and_group() -> None:
    answer = reserved(
        AvailableInstanceCount=4,
        ReservationType="capacity-block",
        StartDate=BEGIN,
        EndDate=END,
        PlacementGroupArn=GROUP,
    )
    assert capacity.find_reservation(answer, "cr-1") == Reservation(
        "cr-1", "p5.48xlarge", "eu-west-1a", 4, True, 1772364600.0, 1772451000.0, "train"
    )


def test_an_open_reservation_has_no_times_and_no_group() -> None:
    assert capacity.find_reservation(reserved(), "cr-1") == Reservation("cr-1", "p5.48xlarge", "eu-west-1a", 0, False)


@pytest.mark.parametrize("state", ["active", "scheduled", "payment-pending", "pending", "assessing"])
def test_a_reservation_that_is_or_will_be_active_is_accepted(state: str) -> None:
    assert capacity.find_reservation(reserved(State=state), "cr-1").identifier == "cr-1"


@pytest.mark.parametrize("state", ["expired", "cancelled", "failed", "payment-failed", "unsupported"])
def test_a_reservation_that_has_ended_is_rejected_with_its_state(state: str) -> None:
    with pytest.raises(UsageError, match=f"The capacity reservation cr-1 is {state}") as caught:
        capacity.find_reservation(reserved(State=state), "cr-1")
    assert caught.value.hint == "aws ec2 describe-capacity-reservations --region eu-west-1"


@pytest.mark.parametrize(
    ("answer", "kind"), [({"CapacityReservations": []}, UsageError), (NotFoundError("none"), NotFoundError)]
)
def test_a_reservation_that_does_not_exist_is_said_so(answer: Any, kind: type[MlbenchError]) -> None:
    with pytest.raises(kind) as caught:
        capacity.find_reservation(aws({"describe_capacity_reservations": answer}), "cr-1")
    assert str(caught.value.hint).startswith("aws ec2 describe-capacity-reservations --region eu-west-1")
    assert caught.value.message in ("none", "The capacity reservation cr-1 does not exist.")


def test_a_block_sets_the_market_and_the_group_of_the_launch_template() -> None:
    target = {"CapacityReservationTarget": {"CapacityReservationId": "cr-1"}}
    plain = Reservation("cr-1", "p5.48xlarge", "eu-west-1a", 4, False)
    assert plain.template == {"CapacityReservationSpecification": target, "InstanceType": "p5.48xlarge"}
    block = Reservation("cr-1", "p5.48xlarge", "eu-west-1a", 4, True, placement_group="train")
    assert block.template == {
        "CapacityReservationSpecification": target,
        "InstanceType": "p5.48xlarge",
        "InstanceMarketOptions": {"MarketType": "capacity-block"},
        "Placement": {"GroupName": "train"},
    }


def reservation(free: int = 4, block: bool = True, begins: float | None = None, ends: float | None = None) -> Any:
    return Reservation("cr-1", "p5.48xlarge", "eu-west-1a", free, block, begins, ends)


@pytest.mark.parametrize(
    ("machine", "zone", "count", "kind", "message", "hint"),
    [
        ("p4d.24xlarge", None, 1, UsageError, "is for p5.48xlarge, not p4d.24xlarge", "--machine-type p5.48xlarge"),
        ("p5.48xlarge", "eu-west-1b", 1, UsageError, "is in eu-west-1a, not in eu-west-1b", "--zone eu-west-1a"),
        ("p5.48xlarge", None, 5, CapacityError, "has 4 machines left, but 5 are needed", "Use 4 workers"),
    ],
)
def test_a_reservation_that_does_not_fit_is_rejected(
    machine: str, zone: str | None, count: int, kind: type[MlbenchError], message: str, hint: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        capacity.check_reservation(reservation(), machine, count, zone)
    assert hint in str(caught.value.hint)


def test_a_reservation_with_just_enough_machines_is_accepted() -> None:
    assert capacity.check_reservation(reservation(), "p5.48xlarge", 4, None) == []
    assert capacity.check_reservation(reservation(), "p5.48xlarge", 4, "eu-west-1a") == []


def test_a_block_must_have_begun_and_says_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "time", SimpleNamespace(time=lambda: 1_000_000.0))
    with pytest.raises(CapacityError, match=r"begins at .*; machines cannot start earlier"):
        capacity.check_reservation(reservation(begins=1_000_001.0), "p5.48xlarge", 1, None)
    begun = reservation(begins=1_000_000.0, ends=1_000_000.0 + 5.5 * 3600)
    assert capacity.check_reservation(begun, "p5.48xlarge", 1, None) == [
        "The capacity block cr-1 ends in 5.5 h; EC2 takes the machines away half an hour before."
    ]
    assert capacity.check_reservation(reservation(block=False, ends=1_000_060.0), "p5.48xlarge", 1, None) == []


def version(name: str, days: int | None, is_default: bool = False) -> Version:
    return Version(name, None if days is None else TODAY + timedelta(days=days), is_default)


TODAY = date(2026, 6, 1)
SOON, LATER = 10, 300


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ([version("1.35", LATER), version("1.34", LATER, True)], "1.34"),
        ([version("1.35", LATER), version("1.34", SOON, True)], "1.35"),
        ([version("1.35", SOON), version("1.34", SOON, True)], "1.34"),
        ([version("1.35", SOON), version("1.34", None, True)], "1.34"),
        ([version("1.36", SOON), version("1.35", LATER), version("1.34", LATER)], "1.35"),
        ([], None),
    ],
)
def test_the_default_version_is_chosen_unless_its_support_ends_soon(offered: list[Version], chosen: str | None) -> None:
    found = versions.choose_version(offered, TODAY)
    assert (found and found.name) == chosen


def offer(*items: tuple[str, int | None, bool]) -> Any:
    now = datetime.now(UTC)
    told = [
        {
            "clusterVersion": name,
            "defaultVersion": is_default,
            "versionStatus": "STANDARD_SUPPORT",
            **({} if days is None else {"endOfStandardSupportDate": now + timedelta(days=days)}),
        }
        for name, days, is_default in items
    ]
    extended = {"clusterVersion": "1.27", "versionStatus": "EXTENDED_SUPPORT", "defaultVersion": True}
    return aws({"describe_cluster_versions": {"clusterVersions": [extended, *told]}})


def test_versions_with_standard_support_are_listed_by_number_with_the_newest_first() -> None:
    found = versions.offered_versions(offer(("1.9", None, False), ("1.31", None, True), ("1.30", None, False)))
    assert [(item.name, item.ends, item.is_default) for item in found] == [
        ("1.31", None, True),
        ("1.30", None, False),
        ("1.9", None, False),
    ]
    old = {"clusterVersions": [{"clusterVersion": "1.32", "status": "STANDARD_SUPPORT"}]}
    assert [str(item) for item in versions.offered_versions(aws({"describe_cluster_versions": old}))] == ["1.32"]


def test_a_version_is_written_with_the_end_of_its_support() -> None:
    assert str(Version("1.34", date(2026, 12, 2), False)) == "1.34 (until 2026-12-02)"


def test_the_version_asked_for_goes_before_the_default() -> None:
    answer = offer(("1.35", LATER, False), ("1.34", LATER, True))
    assert versions.version_for(answer, "1.33") == "1.33"
    assert versions.version_for(answer, None) == "1.34"
    assert versions.version_for(offer(), None) is None
    assert versions.version_for(aws({"describe_cluster_versions": CredentialError("no")}), None) is None


def test_a_version_without_standard_support_is_rejected_with_those_that_have_it() -> None:
    with pytest.raises(UsageError, match=r"EKS does not offer Kubernetes 1\.27 with standard support") as caught:
        versions.check_version(offer(("1.35", None, False), ("1.34", None, True)), "1.27")
    assert caught.value.hint == "It has: 1.35, 1.34; or remove --kubernetes-version"


def test_a_warning_says_that_support_ends_soon_or_that_the_default_is_not_used() -> None:
    answer = offer(("1.35", LATER, False), ("1.34", SOON, True))
    (warning,) = versions.check_version(answer, "1.34")
    assert warning.startswith("Standard support of Kubernetes 1.34 on EKS ends on ")
    assert versions.check_version(answer, "1.35") == []
    (warning,) = versions.check_version(answer, None)
    assert warning.startswith("The cluster gets Kubernetes 1.35 (until 2")
    assert "), since standard support of EKS' default 1.34 ends on 2" in warning
    assert versions.check_version(offer(("1.35", None, False)), None) == ["The cluster gets Kubernetes 1.35."]
    assert versions.check_version(offer(("1.35", LATER, True)), None) == []


def test_without_permission_only_a_version_asked_for_is_warned_of() -> None:
    answer = aws({"describe_cluster_versions": CredentialError("no right")})
    assert versions.check_version(answer, None) == []
    assert versions.check_version(answer, "1.34") == ["Cannot check whether EKS has Kubernetes 1.34: no right"]


def routes(*tables: dict[str, Any], main: dict[str, Any] | None = None) -> Any:
    def pages(_service: str, _operation: str, _key: str, Filters: list[dict[str, Any]]) -> list[Any]:
        if Filters[0]["Name"] == "association.subnet-id":
            assert Filters[0]["Values"] == ["subnet-1"]
            return list(tables)
        assert Filters == [{"Name": "vpc-id", "Values": ["vpc-1"]}]
        other = {"Associations": [{"SubnetId": "subnet-2"}], "Routes": [default(GatewayId="igw-other")]}
        return [other, {"Routes": []}, *([{**main, "Associations": [{"Main": True}]}] if main else [])]

    return SimpleNamespace(region="eu-west-1", pages=pages)


def default(**way: Any) -> dict[str, Any]:
    return {"DestinationCidrBlock": "0.0.0.0/0", "State": "active", **way}


LOCAL = {"DestinationCidrBlock": "10.0.0.0/16", "GatewayId": "local"}


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        (routes({"Routes": [LOCAL, default(GatewayId="igw-1")]}), "igw-1"),
        (routes({"Routes": [LOCAL, default(NatGatewayId="nat-1")]}), "nat-1"),
        (routes({"Routes": [default(TransitGatewayId="tgw-1")]}), "tgw-1"),
        (routes({"Routes": [default(NetworkInterfaceId="eni-1")]}), "eni-1"),
        (routes({"Routes": [default(VpcPeeringConnectionId="pcx-1")]}), "another way"),
        (routes({"Routes": [{**default(GatewayId="igw-1"), "State": "blackhole"}]}), None),
        (routes({"Routes": [LOCAL]}, main={"Routes": [default(GatewayId="igw-main")]}), None),
        (routes(main={"Routes": [default(GatewayId="igw-main")]}), "igw-main"),
        (routes(), None),
    ],
)
def test_the_default_route_of_a_subnet_is_that_of_its_own_table_or_of_the_main_one(
    answer: Any, target: str | None
) -> None:
    assert subnet_checks._default_route(answer, "vpc-1", "subnet-1") == target


def way_out(answer: Any, *, public: bool = True, private_nodes: bool = False) -> list[str]:
    subnets: Any = SimpleNamespace(
        by_zone={"eu-west-1a": "subnet-1"}, vpc="vpc-1", public={"eu-west-1a"} if public else {}
    )
    group: Any = SimpleNamespace(private=private_nodes)
    return subnet_checks._check_way_out(answer, subnets, "eu-west-1a", group)


def test_machines_behind_an_internet_gateway_need_public_addresses() -> None:
    internet = routes({"Routes": [default(GatewayId="igw-1")]})
    assert way_out(internet) == []
    with pytest.raises(UsageError, match="goes out by igw-1, but assigns no public addresses") as caught:
        way_out(internet, public=False)
    assert "--subnet-id subnet-1 --map-public-ip-on-launch" in str(caught.value.hint)
    with pytest.raises(UsageError, match="which takes a public address"):
        way_out(internet, private_nodes=True)


def test_private_machines_may_go_out_by_nat_and_are_warned_of_without_a_way() -> None:
    nat = routes({"Routes": [default(NatGatewayId="nat-1")]})
    assert way_out(nat, public=False, private_nodes=True) == []
    (warning,) = way_out(routes({"Routes": []}), public=False, private_nodes=True)
    assert warning.startswith("subnet-1 has no default route")

    def refuse(*_: Any, **__: Any) -> Any:
        raise CredentialError("no")

    (warning,) = way_out(SimpleNamespace(region="eu-west-1", pages=refuse))
    assert warning.startswith("The routes of subnet-1 cannot be read")


@pytest.mark.parametrize(
    ("off", "command"), [("EnableDnsSupport", "--enable-dns-support"), ("EnableDnsHostnames", "--enable-dns-hostnames")]
)
def test_a_network_without_dns_is_rejected_with_the_command(off: str, command: str) -> None:
    answer = {key: {"Value": key != off} for key in ("EnableDnsSupport", "EnableDnsHostnames")}
    with pytest.raises(UsageError, match=f"vpc-1 has e{off[1:]} off") as caught:
        subnet_checks._check_dns(aws({"describe_vpc_attribute": answer}), "vpc-1")
    assert caught.value.hint == f"aws ec2 modify-vpc-attribute --region eu-west-1 --vpc-id vpc-1 {command}"


def test_network_places_are_asked_about_100_instances_at_a_time() -> None:
    asked: list[list[str]] = []

    def call(_service: str, _operation: str, InstanceIds: list[str]) -> dict[str, Any]:
        asked.append(InstanceIds)
        return {
            "Instances": [{"InstanceId": item, "NetworkNodes": ["a", "b"]} for item in InstanceIds[:-1]]
            + [{"InstanceId": InstanceIds[-1]}]
        }

    names = [f"i-{number}" for number in range(201)]
    found = topology.find_places(SimpleNamespace(call=call), names)  # type: ignore[arg-type]
    assert [len(some) for some in asked] == [100, 100, 1]
    assert functools.reduce(operator.iadd, asked, []) == names
    assert set(names) - set(found) == {"i-99", "i-199", "i-200"}
    assert found["i-0"] == ["a", "b"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NotFoundError("new", hint="later"), TransientError),
        (CredentialError("no"), CredentialError),
        (UsageError("unsupported"), UsageError),
        (TransientError("busy"), TransientError),
    ],
)
def test_an_instance_that_ec2_does_not_know_yet_is_asked_about_again(
    error: MlbenchError, kind: type[MlbenchError]
) -> None:
    with pytest.raises(kind) as caught:
        topology.find_places(aws({"describe_instance_topology": error}), ["i-1"])
    assert (caught.value.message, caught.value.hint) == (error.message, error.hint)


@pytest.mark.parametrize(
    ("labels", "provider", "instance"),
    [
        (None, "aws:///eu-west-1a/i-1", "i-1"),
        ({"other": "x"}, "aws:///eu-west-1a/i-1", "i-1"),
        ({"topology.k8s.aws/network-node-layer-1": "nn-1"}, "aws:///eu-west-1a/i-1", None),
        ({}, "kind://docker/x/y", None),
        ({}, None, None),
    ],
)
def test_nodes_of_ec2_without_a_place_are_found(
    labels: dict[str, str] | None, provider: str | None, instance: str | None
) -> None:
    node = {"metadata": {"labels": labels}, "spec": {"providerID": provider}}
    assert topology._find_unlabeled(node) == instance


@pytest.mark.parametrize(
    ("code", "said", "status", "kind", "hint"),
    [
        ("RequestLimitExceeded", "", 503, TransientError, None),
        ("ThrottlingException", "", 400, TransientError, None),
        ("RequestExpired", "", 400, CredentialError, SET_CLOCK),
        ("SignatureDoesNotMatch", "Signature expired: 1 is now earlier", 403, CredentialError, SET_CLOCK),
        ("SignatureDoesNotMatch", "check your key", 403, CredentialError, LOG_IN),
        ("ExpiredTokenException", "", 400, CredentialError, LOG_IN),
        ("UnauthorizedOperation", "", 403, CredentialError, ASK_RIGHTS),
        ("AccessDeniedException", "", 400, CredentialError, ASK_RIGHTS),
        ("ClientException", "", 400, CredentialError, ASK_RIGHTS),
        ("InsufficientInstanceCapacity", "", 500, CapacityError, ELSEWHERE),
        ("VcpuLimitExceeded", "", 400, CapacityError, MORE_QUOTA),
        ("ServiceQuotaExceededException", "", 400, CapacityError, MORE_QUOTA),
        ("InvalidSubnetID.NotFound", "", 400, NotFoundError, None),
        ("ResourceNotFoundException", "", 404, NotFoundError, None),
        ("ValidationError", "Stack with id x does not exist", 400, NotFoundError, None),
        ("ValidationError", "Template is wrong", 400, UsageError, None),
        ("DependencyViolation", "", 400, UsageError, None),
        ("ResourceInUseException", "", 409, UsageError, None),
        ("InvalidParameterException", "Role arn:x could not be assumed", 400, TransientError, None),
        ("InvalidParameterException", "The role is fine", 400, UsageError, None),
        ("InternalError", "", 500, TransientError, None),
        ("ServiceUnavailable", "", 503, TransientError, None),
        ("UnsupportedAvailabilityZoneException", "", 400, UsageError, "Choose another --zone or --machine-type"),
        ("Unheard", "", 500, TransientError, None),
        ("Unheard", "", 429, TransientError, None),
        ("Unheard", "", 499, MlbenchError, "mlbench doctor"),
        ("Unheard", "", 0, MlbenchError, "mlbench doctor"),
    ],
)
def test_codes_of_aws_are_errors_with_a_way_out(
    code: str, said: str, status: int, kind: type[MlbenchError], hint: str | None
) -> None:
    error = error_from_code(code, "words", said, status, {"aws": code})
    assert type(error) is kind
    assert (error.message, error.hint, error.details) == ("words", hint, {"aws": code})


def test_tags_are_read_as_they_are_written() -> None:
    assert tag_list({"a": "1", "b": ""}) == [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": ""}]
    assert tags_of(tag_list({"a": "1", "b": ""})) == {"a": "1", "b": ""}
    assert tags_of(None) == {}
