"""Reserved capacity: On-Demand Capacity Reservations, and Capacity Blocks for ML.

A block is prepaid, in one zone, and has a fixed start and end: no machine starts before, and EC2 terminates machines
half an hour before the end. mlbench uses existing reservations and does not buy any. Sources: EC2's API reference, EKS'
user guide for Capacity Blocks with managed node groups.
"""

import time
from dataclasses import dataclass
from datetime import datetime

from mlbench_cli.errors import CapacityError, NotFoundError, UsageError
from providers.eks.api import Aws

BLOCK = "capacity-block"


@dataclass(frozen=True)
class Reservation:
    """A reservation, as described by EC2. Times are in seconds since 1970; the end may be None."""

    identifier: str
    machine: str
    zone: str
    free: int
    is_block: bool
    begins: float | None = None
    ends: float | None = None
    placement_group: str | None = None  # in which it was created

    @property
    def template(self) -> dict[str, object]:
        """The launch template's settings for machines from the reservation."""
        target = {"CapacityReservationTarget": {"CapacityReservationId": self.identifier}}
        market = {"InstanceMarketOptions": {"MarketType": BLOCK}} if self.is_block else {}
        # EC2 provides the reservation's capacity in no other group (eksctl 7949).
        placement = {"Placement": {"GroupName": self.placement_group}} if self.placement_group else {}
        return {"CapacityReservationSpecification": target, "InstanceType": self.machine, **market, **placement}


def find_reservation(aws: Aws, identifier: str) -> Reservation:
    """Look up a reservation in EC2. Raises NotFoundError if it does not exist, UsageError if it has ended."""
    listing = f"aws ec2 describe-capacity-reservations --region {aws.region}"
    try:
        answer = aws.call("ec2", "describe_capacity_reservations", CapacityReservationIds=[identifier])
    except NotFoundError as error:
        raise NotFoundError(error.message, hint=f"{listing}   lists those of the account and region") from None
    found = (answer["CapacityReservations"] or [{}])[0]
    state = found.get("State")
    if state not in ("active", "scheduled", "payment-pending", "pending", "assessing"):
        raise UsageError(
            f"The capacity reservation {identifier} {f'is {state}' if state else 'does not exist'}.",
            hint=listing,
        )
    return Reservation(
        identifier,
        found["InstanceType"],
        found["AvailabilityZone"],
        int(found.get("AvailableInstanceCount", 0)),
        found.get("ReservationType") == BLOCK,
        _seconds(found.get("StartDate")),
        _seconds(found.get("EndDate")),
        str(found.get("PlacementGroupArn") or "").partition("placement-group/")[2] or None,
    )


def check_reservation(reservation: Reservation, machine: str, count: int, zone: str | None) -> list[str]:
    """Warnings about a reservation. Raises UsageError or CapacityError if the workers cannot come from it."""
    name = reservation.identifier
    if reservation.machine != machine:
        raise UsageError(
            f"The capacity reservation {name} is for {reservation.machine}, not {machine}.",
            hint=f"--machine-type {reservation.machine}",
        )
    if zone and zone != reservation.zone:
        raise UsageError(
            f"The capacity reservation {name} is in {reservation.zone}, not in {zone}.",
            hint=f"--zone {reservation.zone}",
        )
    now = time.time()
    if reservation.begins and reservation.begins > now:
        begin = f"{datetime.fromtimestamp(reservation.begins):%Y-%m-%d %H:%M}"
        raise CapacityError(
            f"The capacity reservation {name} begins at {begin}; machines cannot start earlier.",
            hint="Repeat the command after the run has started.",
        )
    if reservation.free < count:
        raise CapacityError(
            f"The capacity reservation {name} has {reservation.free} machines left, but {count} are needed.",
            hint=f"Use {reservation.free} workers, or another reservation.",
        )
    if reservation.ends and reservation.is_block:
        hours = (reservation.ends - now) / 3600
        return [f"The capacity block {name} ends in {hours:.1f} h; EC2 takes the machines away half an hour before."]
    return []


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
