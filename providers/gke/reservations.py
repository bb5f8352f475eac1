"""Machines from Compute Engine reservations, or from a block of one (A3 Ultra, A4).

A reservation is for one zone and one machine type, and only its unused machines are available. mlbench uses existing
reservations and does not create any. Sources: Compute Engine's API reference (`reservations`, `reservationBlocks`),
cluster-toolkit's `gke-node-pool` for the format of the affinity.
"""

import re
from dataclasses import dataclass

from mlbench_cli.errors import CapacityError, NotFoundError, UsageError
from providers.gke.api import Message
from providers.gke.compute import Compute
from providers.gke.machines import Machine

NAME = r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"
FORM = re.compile(
    rf"(?:projects/(?P<project>[a-z][-a-z0-9:.]{{4,62}})/reservations/)?(?P<name>{NAME})"
    rf"(?:/reservationBlocks/(?P<block>{NAME}))?"
)
KEY = "compute.googleapis.com/reservation-name"
EXAMPLES = "For example RESERVATION, projects/PROJECT/reservations/RESERVATION, or RESERVATION/reservationBlocks/BLOCK"


@dataclass(frozen=True)
class ReservationName:
    """A reservation, of another project if `project` is given; `block` selects one of its blocks."""

    name: str
    project: str | None = None
    block: str | None = None

    def affinity(self, project: str) -> Message:
        """The reservation affinity of a node pool in `project`."""
        value = self.name
        if self.project or self.block:
            value = f"projects/{self.project or project}/reservations/{self.name}"
        if self.block:
            value += f"/reservationBlocks/{self.block}"
        return {"consume_reservation_type": "SPECIFIC_RESERVATION", "key": KEY, "values": [value]}


def parse_reservation(text: str) -> ReservationName:
    """The reservation named by --reservation. Raises UsageError for invalid names."""
    match = FORM.fullmatch(text)
    if match is None:
        raise UsageError(f'--reservation "{text}" is not the name of a reservation.', hint=EXAMPLES)
    return ReservationName(match["name"], match["project"], match["block"])


def check_reservation(name: ReservationName, project: str, zone: str, machine: Machine, count: int) -> list[str]:
    """Warnings. Raises UsageError or CapacityError if the reservation cannot provide `count` machines in the zone."""
    compute = Compute(name.project or project)
    path = f"/zones/{zone}/reservations/{name.name}"
    listing = f"gcloud compute reservations list --project {compute.project}"
    try:
        found = compute.get(path)
        block = compute.get(f"{path}/reservationBlocks/{name.block}").get("resource", {}) if name.block else None
    except NotFoundError:
        what = f"block {name.block} of the reservation {name.name}" if name.block else f"reservation {name.name}"
        raise UsageError(f"There is no {what} in {zone}.", hint=listing) from None
    specific = found.get("specificReservation") or {}
    reserved = (specific.get("instanceProperties") or {}).get("machineType")
    if reserved and reserved != machine.name:
        raise UsageError(
            f"The reservation {name.name} is for {reserved}, not {machine.name}.", hint=f"--machine-type {reserved}"
        )
    counted = specific if block is None else block
    what = f"reservation {name.name}" if block is None else f"block {name.block} of the reservation {name.name}"
    if "count" not in counted:
        return [f"Google does not report how many machines the {what} has left."]
    left = int(counted["count"]) - int(counted.get("inUseCount") or 0)
    if left < count:
        raise CapacityError(
            f"The {what} has {left} machines left in {zone}, {count} are needed.",
            hint=f"Use {left} workers, or another reservation: {listing}",
            details={"reason": "reservation", "left": left, "needed": count},
        )
    if found.get("status") not in (None, "READY"):
        return [f"The reservation {name.name} is {found['status']}."]
    return []
