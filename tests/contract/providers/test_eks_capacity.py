"""Workers from capacity that was reserved before: reservations and capacity blocks of EC2; and zones tried in turn."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from providers.eks.options import EksOptions
from tests.contract.providers.eks_world import list_made, make, remove
from tests.fakes.aws_server import AwsClient

ZONE = "eu-west-1b"
BLOCK, PLAIN, LATER, FAST, ABSENT, PLACED = (f"cr-0000000000000000{number}" for number in range(1, 7))
FIELDS = {"instanceType": "m5.large", "availabilityZone": ZONE, "availableInstanceCount": "2", "state": "active"}
SMALL = ("-t", "m5.large", "--zone", ZONE)


@pytest.fixture
def reservations(aws: AwsClient) -> Iterator[AwsClient]:
    block = {**FIELDS, "reservationType": "capacity-block", "endDate": "2099-01-01T00:00:00Z"}
    later = {**block, "state": "scheduled", "startDate": "2099-01-01T00:00:00Z"}
    fast = {**block, "instanceType": "p4d.24xlarge", "availabilityZone": "eu-west-1c"}
    group = "arn:aws:ec2:eu-west-1:123456789012:placement-group/training"
    placed = {**fast, "reservationType": "default", "placementGroupArn": group}
    aws.rules(
        reservations={
            PLACED: placed,
            FAST: fast,
            BLOCK: block,
            PLAIN: {**FIELDS, "reservationType": "default"},
            LATER: later,
        }
    )
    yield aws
    aws.rules(reservations={})


@pytest.mark.slow
@pytest.mark.parametrize(("identifier", "kind"), [(BLOCK, "CAPACITY_BLOCK"), (PLAIN, "ON_DEMAND")])
def test_workers_come_from_a_reservation(reservations: AwsClient, tmp_path: Path, identifier: str, kind: str) -> None:
    name = f"{kind.lower().replace('_', '-')[:8]}-2"
    options = EksOptions(machine_type="m5.large", zone=ZONE, capacity_reservation=identifier)
    made = make(name, tmp_path / "home", options)
    assert made.state == "ready"
    template = list_made(reservations, "ec2:CreateLaunchTemplate")[1]
    target = template["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert (target["CapacityReservationId"], template["InstanceType"]) == (identifier, "m5.large")
    market = template.get("InstanceMarketOptions", {}).get("MarketType")
    assert market == ("capacity-block" if kind == "CAPACITY_BLOCK" else None)
    workers = list_made(reservations, "eks:CreateNodegroup")[1]
    assert (workers["capacityType"], workers.get("instanceTypes")) == (kind, None)
    again = make(name, tmp_path / "home", options)  # adopted as it is
    assert again.state == "ready"
    remove(name, tmp_path / "empty")
    assert reservations.list_left(name) == []


@pytest.mark.slow
def test_machines_of_a_block_get_their_fast_network_cards(reservations: AwsClient, tmp_path: Path) -> None:
    options = EksOptions(machine_type="p4d.24xlarge", zone="eu-west-1c", efa=True, capacity_reservation=FAST)
    assert make("quick-2", tmp_path / "home", options).state == "ready"
    template = list_made(reservations, "ec2:CreateLaunchTemplate")[1]
    kinds = [card["InterfaceType"] for card in template["NetworkInterfaces"]]
    assert kinds == ["efa", "efa-only", "efa-only", "efa-only"]
    assert template["InstanceMarketOptions"]["MarketType"] == "capacity-block"
    assert "Placement" not in template
    assert list_made(reservations, "ec2:CreatePlacementGroup") == []
    remove("quick-2", tmp_path / "empty")
    assert reservations.list_left("quick-2") == []


@pytest.mark.slow
def test_machines_of_a_reservation_start_in_its_own_placement_group(reservations: AwsClient, tmp_path: Path) -> None:
    options = EksOptions(machine_type="p4d.24xlarge", zone="eu-west-1c", efa=True, capacity_reservation=PLACED)
    assert make("placed-2", tmp_path / "home", options).state == "ready"
    template = list_made(reservations, "ec2:CreateLaunchTemplate")[1]
    assert template["Placement"]["GroupName"] == "training"
    assert list_made(reservations, "ec2:CreatePlacementGroup") == []
    remove("placed-2", tmp_path / "empty")
    assert reservations.list_left("placed-2") == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((*SMALL, "--capacity-reservation", "mine"), 2, "is not the ID of one"),
        (("-t", "m5.large", "--capacity-reservation", PLAIN), 2, "needs its --zone"),
        ((*SMALL, "--capacity-reservation", PLAIN, "--spot"), 2, "exclude each other"),
        ((*SMALL, "--capacity-reservation", PLAIN, "--placement-group"), 2, "exclude each other"),
        (("-t", "m5.xlarge", "--zone", ZONE, "--capacity-reservation", PLAIN), 2, "is for m5.large, not m5.xlarge"),
        (("-t", "m5.large", "--zone", "eu-west-1a", "--capacity-reservation", PLAIN), 2, "is in eu-west-1b"),
        ((*SMALL, "--capacity-reservation", LATER), 5, "begins at 2099-01-01 00:00 UTC"),
        ((*SMALL, "--capacity-reservation", ABSENT), 4, "does not exist"),
    ],
)
def test_a_reservation_that_cannot_serve_is_refused_before_money_is_spent(
    command: Callable[..., Any], reservations: AwsClient, words: tuple[str, ...], code: int, says: str
) -> None:
    result = command("create-cluster", "eks", "2", "never", *words, "--yes")
    assert result.code == code, result.err
    assert says in result.err
    assert reservations.list_left("never-2") == []


def test_too_few_machines_and_the_end_of_a_block_are_said(command: Callable[..., Any], reservations: AwsClient) -> None:
    words = (*SMALL, "--capacity-reservation", BLOCK)
    few = command("create-cluster", "eks", "3", "never", *words, "--yes")
    assert (few.code, "has 2 machines left, but 3 are needed" in few.err) == (5, True)
    assert (
        "EC2 takes the machines away half an hour before"
        in command("create-cluster", "eks", "2", "x", *words, "--dry-run").err
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine", "efa"), [("move-2", "m5.large", ()), ("wide-2", "p4d.24xlarge", ("--efa",))]
)
def test_the_next_zone_is_tried_and_what_the_first_left_is_removed(
    command: Callable[..., Any], aws: AwsClient, name: str, machine: str, efa: tuple[str, ...]
) -> None:
    zones = ["eu-west-1a", "eu-west-1b", "eu-west-1c"]
    words = ("-t", machine, "--zones", ",".join(zones), "--yes", "--probe-image", "none", *efa)
    aws.rules(no_capacity=[f"{machine}@{zone}" for zone in zones[:2]], offered=[[machine, zone] for zone in zones])
    aws.rules(quotas={"L-417A185B": 1000.0})
    try:
        result = command("create-cluster", "eks", "2", name.partition("-")[0], *words)
        assert result.code == 0, result.err
        assert "then trying eu-west-1b" in result.err
        assert "then trying eu-west-1c" in result.err
        groups = list_made(aws, "eks:CreateNodegroup")
        subnets = [given["subnets"][0] for given in groups if given["nodegroupName"].endswith("workers")]
        assert len(set(subnets)) == 3
        again = command("create-cluster", "eks", "2", name.partition("-")[0], *words)
        assert again.code == 0, again.err
    finally:
        aws.rules(no_capacity=[], offered=[], quotas={})
    assert command("delete-cluster", "eks", name, "--yes").code == 0
    assert aws.list_left(name) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--zones", "eu-west-1a,eu-west-1a"), "is not a list of different zones"),
        (("--zones", "eu-west-1a,us-east-1a"), "these zones are in several regions"),
        (("--zones", "somewhere"), "is not the name of a zone"),
        (("--zones", "eu-west-1a,eu-west-1b", "--zone", "eu-west-1a"), "exclude each other"),
        (("--zones", "eu-west-1a,eu-west-1z"), "does not have m5.large"),
        (("--zones", ",".join(f"eu-west-1{letter}" for letter in "abcde")), "at most 4"),
    ],
)
def test_wrong_zones_are_refused_before_anything_is_made(
    command: Callable[..., Any], aws: AwsClient, words: tuple[str, ...], says: str
) -> None:
    result = command("create-cluster", "eks", "2", "never", "-t", "m5.large", *words, "--yes")
    assert result.code == 2, result.err
    assert says in result.err


def test_a_zone_without_control_planes_is_refused_and_never_chosen(command: Callable[..., Any], aws: AwsClient) -> None:
    """us-east-1e (use1-az3) has machines, but EKS has no control planes there: machines must not come from elsewhere
    instead."""
    words = ("create-cluster", "eks", "2", "never", "-t", "m5.large", "--dry-run")
    aws.rules(offered=[["m5.large", "us-east-1e"], ["m5.large", "us-east-1c"]])
    try:
        for place in (("--zone", "us-east-1e"), ("--zones", "us-east-1c,us-east-1e")):
            refused = command(*words, *place)
            assert refused.code == 2, refused.out
            assert "The zone us-east-1e does not have m5.large together with control planes of EKS" in refused.err
            assert "Use one of: us-east-1c" in refused.err
        assert "The cluster never-2 in us-east-1c" in command(*words, "--region", "us-east-1").err
        aws.rules(offered=[["m5.large", "us-east-1e"]])
        refused = command(*words, "--region", "us-east-1")
        assert refused.code == 2, refused.out
        assert "No zone of us-east-1 has m5.large" in refused.err
    finally:
        aws.rules(offered=[])


def test_a_zone_without_the_system_s_machines_names_their_option(command: Callable[..., Any], aws: AwsClient) -> None:
    aws.rules(offered=[["m5.large", "eu-west-1a"], ["t3.large", "eu-west-1c"]])
    try:
        words = ("create-cluster", "eks", "2", "never", "-t", "m5.large", "--dry-run")
        refused = command(*words, "--system-machine-type", "t3.large")
        assert (refused.code, "The zone eu-west-1a does not have t3.large" in refused.err) == (2, True), refused.err
        assert "--system-machine-type" in refused.err.rpartition("Next:")[2]
    finally:
        aws.rules(offered=[])
