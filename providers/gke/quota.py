"""Compute Engine's REST API: checks machine types and quotas before anything is created, and changes networks."""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlbench_cli.errors import CapacityError, MlbenchError, NotFoundError, UsageError
from providers.base import BusyError, call_timeout
from providers.gke import api
from providers.gke.api import Message
from providers.gke.options import DISK_QUOTAS, Machine, cpu_quota_names
from providers.machines import Quota, check_if_permitted, require_quotas

ENDPOINT = "https://compute.googleapis.com"
# GPU -> name of its regional quota; for spot machines with the prefix PREEMPTIBLE_.
QUOTA_OF = {
    "nvidia-tesla-t4": "NVIDIA_T4_GPUS",
    "nvidia-l4": "NVIDIA_L4_GPUS",
    "nvidia-tesla-a100": "NVIDIA_A100_GPUS",
    "nvidia-a100-80gb": "NVIDIA_A100_80GB_GPUS",
    "nvidia-h100-80gb": "NVIDIA_H100_GPUS",
    "nvidia-h100-mega-80gb": "NVIDIA_H100_MEGA_GPUS",
    "nvidia-h200-141gb": "NVIDIA_H200_GPUS",
    "nvidia-b200": "NVIDIA_B200_GPUS",
    "nvidia-rtx-pro-6000": "NVIDIA_RTX_PRO_6000_GPUS",
}
# On demand, these GPUs have a quota per GPU family, which regions may not list. The quota above is 0 then.
BY_FAMILY = ("nvidia-h100-80gb", "nvidia-h100-mega-80gb", "nvidia-h200-141gb", "nvidia-b200", "nvidia-rtx-pro-6000")
ALL_GPUS, ALL_CPUS = "GPUS_ALL_REGIONS", "CPUS_ALL_REGIONS"
NETWORK_QUOTAS = ("NETWORKS", "SUBNETWORKS", "FIREWALLS")  # per project
# Reasons of errors and operations, without case and underscores, meaning that something else must end first.
IN_USE = frozenset({"resourceinusebyanotherresource", "resourcenotready"})


class Purchase(StrEnum):
    """How machines are purchased, which determines their quota."""

    ON_DEMAND = "on demand"
    SPOT = "spot"
    FLEX_START = "flex-start"

    def order_quotas(self, name: str, limits: Mapping[str, float]) -> tuple[str, ...]:
        """Names of the quotas to check, first the one that Google applies.

        Spot machines use the preemptible quota only if one was granted; flex-start machines always use it.
        """
        preemptible = f"PREEMPTIBLE_{name}"
        if self is Purchase.FLEX_START:
            return (preemptible,) if preemptible in limits else (name,)
        if self is Purchase.SPOT and limits.get(preemptible, 0) > 0:
            return (preemptible,)
        return (name,)


@dataclass(frozen=True)
class Demand:
    """Machines needed by a cluster: type, number and boot disks."""

    machine: Machine
    count: int
    disk_gb: int
    disk_type: str | None
    purchase: Purchase = Purchase.ON_DEMAND


def check_machines(
    project: str, zones: list[str], demands: Sequence[Demand], *, public_addresses: bool, networks: int = 0
) -> list[str]:
    """Warnings about possible problems. Raises UsageError or CapacityError for certain ones.

    The last demand is for the workers in `zones`; the system's machines are in the first zone. `networks` is the number
    of VPC networks, each with a subnetwork and a firewall rule.
    """
    compute = Compute(project)

    def check() -> list[str]:
        cpus = [compute.check_offer(zones[0], demand.machine) for demand in demands]
        for zone in zones[1:]:
            compute.check_offer(zone, demands[-1].machine)
        region, others = api.region_of(zones[0]), dict.fromkeys(NETWORK_QUOTAS, networks)
        return compute.check_quotas(region, demands, cpus, others, public_addresses=public_addresses)

    return check_if_permitted(", ".join(zones), check)


class Compute:
    """Compute Engine's REST API of one project."""

    def __init__(self, project: str) -> None:
        self.project = project
        self.date: str | None = None  # the time in the last response, and when it arrived
        self.asked = 0.0
        self._session = api.open_session()
        self._base = f"{os.environ.get('MLBENCH_COMPUTE_ENDPOINT', ENDPOINT)}/compute/v1/projects/{project}"

    def check_offer(self, zone: str, machine: Machine) -> int:
        """The number of vCPUs of the machine, 0 if unknown.

        Raises UsageError if the zone does not offer the machine, or the GPU to attach to it.
        """
        found = self.find_offer(zone, "machineTypes", machine.name)
        if machine.gpu and machine.name.startswith("n1-"):
            self.find_offer(zone, "acceleratorTypes", machine.gpu)
        return int(found.get("guestCpus") or 0)

    def find_gpus(self, zone: str, machine: Machine) -> tuple[str | None, int] | None:
        """Type and number of a machine's built-in GPUs; None if GPUs are attached on request.

        Raises UsageError if the zone does not offer the machine.
        """
        if machine.gpu and machine.name.startswith("n1-"):
            return None
        found = self.find_offer(zone, "machineTypes", machine.name)
        listed = found.get("accelerators") or []
        if not listed:
            return machine.gpu, 0
        return str(listed[0].get("guestAcceleratorType")), sum(int(i.get("guestAcceleratorCount") or 0) for i in listed)

    def is_arm(self, zone: str, machine: Machine) -> bool:
        """Whether the machine has Arm processors, such as Axion or Grace."""
        return self.find_offer(zone, "machineTypes", machine.name).get("architecture") == "ARM64"

    def zone_with(self, region: str, machine: Machine) -> str:
        """The first zone of a region with the machine. Raises UsageError if there is none, or no such region."""
        try:
            zones = sorted(str(url).rpartition("/")[2] for url in self.get(f"/regions/{region}").get("zones", []))
        except NotFoundError:
            raise UsageError(f'There is no region "{region}".', hint="gcloud compute regions list") from None
        for zone in zones:
            try:
                self.check_offer(zone, machine)
            except UsageError:
                continue
            return zone
        raise UsageError(
            f"No zone of {region} has {machine.name}.",
            hint=f"gcloud compute machine-types list --filter=name={machine.name} --project {self.project}",
        )

    def find_offer(self, zone: str, collection: str, name: str) -> Message:
        """Compute Engine's description of the machine or GPU. Raises UsageError if the zone does not offer it."""
        try:
            return self.get(f"/zones/{zone}/{collection}/{name}")
        except NotFoundError:
            self._zone(zone)
            raise UsageError(
                f"The zone {zone} has no {name}.",
                hint=f"gcloud compute {_gcloud(collection)} list --filter=name={name} --project {self.project}",
            ) from None

    def quotas(self, region: str) -> dict[str, Quota]:
        """The quotas of the project, regional and global, by name."""
        answers = (self.get(f"/regions/{region}"), self.get(""))
        listed = [item for answer in answers for item in answer.get("quotas", [])]
        return {item["metric"]: Quota.of_use(item["metric"], item["limit"], item["usage"]) for item in listed}

    def gpus(self, place: str) -> list[str]:
        """The GPUs offered in a zone that mlbench knows. Raises UsageError if there is no such zone."""
        if api.region_of(place) == place:
            raise UsageError(f"{place} is a region.", hint="GPU types are listed per zone: use --zone")
        self._zone(place)
        found = {item["name"] for item in self.list_all(f"/zones/{place}/acceleratorTypes")}
        return [name for name in QUOTA_OF if name in found]

    def check_quotas(
        self,
        region: str,
        demands: Sequence[Demand],
        cpus: Sequence[int],
        others: Mapping[str, int],
        *,
        public_addresses: bool,
    ) -> list[str]:
        """Warnings about unknown quotas. Raises CapacityError with all quotas that are too small.

        `cpus` are the vCPUs of each demand's machine, 0 if unknown; `others` are needs other than machines.
        """
        found = self.quotas(region)
        limits = {name: quota.limit for name, quota in found.items()}
        needs = _count_needs(demands, cpus, limits, public_addresses)
        gpu_quotas, warnings = _gpu_needs(demands[-1], limits)
        needs.update(gpu_quotas)
        needs.update({name: number for name, number in others.items() if number})

        def hint(quota: Quota, needed: int) -> str:
            return api.raise_quota(self.project, quota.name, quota.limit + needed - (quota.left or 0), region)

        require_quotas(f"{self.project} in {region}", needs, found, hint)
        if demands[-1].machine.gpu and demands[-1].count and not warnings and not set(gpu_quotas) & set(found):
            warnings.append(
                f"No quota of {demands[-1].machine.gpu} is known in {region}, so the request may still fail."
            )
        return warnings

    def _zone(self, zone: str) -> None:
        try:
            self.get(f"/zones/{zone}")
        except NotFoundError:
            raise UsageError(f'There is no zone "{zone}".', hint="gcloud compute zones list") from None

    def get(self, path: str) -> Message:
        """The response for a path below the project. Raises NotFoundError, and mapped errors."""
        with api.map_rest_errors("Compute Engine", f"tell of {path or self.project}", self.project):
            answer = self._session.get(f"{self._base}{path}", timeout=call_timeout())
            self.date, self.asked = answer.headers.get("Date"), time.time()
            api.require_success(answer)
        document: Message = answer.json()
        return document

    def pages(self, path: str) -> Iterator[Message]:
        """All pages of a list below the project."""
        return api.read_pages(self.get, path)

    def list_all(self, path: str) -> list[Message]:
        """All items of a list below the project."""
        return [item for page in self.pages(path) for item in page.get("items") or ()]

    def change(self, method: str, path: str, body: Message | None = None) -> str:
        """Request a change below the project. Returns the path of the operation to poll.

        Raises BusyError while something else uses or changes the resource, CapacityError for an exceeded quota.
        """
        with api.map_rest_errors("Compute Engine", f"{method.lower()} {path}", self.project):
            answer = self._session.request(method, f"{self._base}{path}", json=body, timeout=call_timeout())
            if answer.status_code in (400, 403):
                self._raise_known(read_error(answer))
            api.require_success(answer)
        operation: Message = answer.json()
        region = str(operation.get("region") or "").rpartition("/")[2]
        return f"{f'/regions/{region}' if region else '/global'}/operations/{operation['name']}"

    def is_done(self, operation: str) -> bool:
        """Whether an operation is done. Raises BusyError, CapacityError or MlbenchError if it has failed."""
        found = self.get(operation)
        if found.get("status") != "DONE":
            return False
        for error in (found.get("error") or {}).get("errors") or ():
            self._raise_known({"message": error.get("message"), "errors": [{"reason": error.get("code")}]})
            raise MlbenchError(f'Compute Engine failed: "{error.get("message")}"')
        return True

    def _raise_known(self, error: Message) -> None:
        """Raise BusyError or CapacityError for errors that waiting or a larger quota can fix."""
        message = f'Compute Engine refused: "{error.get("message")}"'
        reasons = {str(item.get("reason")).replace("_", "").lower() for item in error.get("errors") or ()}
        if reasons & IN_USE:
            raise BusyError(message)
        if reasons & {"quotaexceeded"}:
            raise api.capacity_error(message, self.project)


def read_error(answer: Any) -> Message:
    """The error in an error response; empty if it comes from something else, such as a proxy."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {}


def _gcloud(collection: str) -> str:
    return {"machineTypes": "machine-types", "acceleratorTypes": "accelerator-types"}[collection]


def _count_needs(
    demands: Sequence[Demand], cpus: Sequence[int], limits: Mapping[str, float], public_addresses: bool
) -> Counter[str]:
    """The machines' use of each quota: CPUs, disks, addresses, instances."""
    needs: Counter[str] = Counter()
    for demand, vcpus in zip(demands, cpus, strict=True):
        if not demand.count:
            continue
        if vcpus:
            own, common = cpu_quota_names(demand.machine.name)
            name = own if own in limits else common
            for quota in demand.purchase.order_quotas(name, limits):
                needs[quota] += demand.count * vcpus
            needs[ALL_CPUS] += demand.count * vcpus
        if disks := DISK_QUOTAS.get(demand.disk_type or ""):
            needs[disks] += demand.count * demand.disk_gb
        if public_addresses:
            needs["IN_USE_ADDRESSES"] += demand.count
        needs["INSTANCES"] += demand.count
    return needs


def _gpu_needs(demand: Demand, limits: Mapping[str, float]) -> tuple[dict[str, int], list[str]]:
    """The workers' GPU quotas with the number needed, and warnings."""
    gpu, wanted = demand.machine.gpu, demand.count * demand.machine.gpus
    if not gpu or not wanted:
        return {}, []
    name = QUOTA_OF.get(gpu, "")
    family = f"GPU_FAMILY:{name.removesuffix('_GPUS')}"
    if demand.purchase is Purchase.ON_DEMAND and gpu in BY_FAMILY:
        if family in limits:
            return {family: wanted, ALL_GPUS: wanted}, []
        if not limits.get(name):
            return {ALL_GPUS: wanted}, [
                f"The quota of {gpu} is per GPU family, which Compute Engine does not report, so the request may "
                "still fail."
            ]
    return {**dict.fromkeys(demand.purchase.order_quotas(name, limits), wanted), ALL_GPUS: wanted}, []


# --- reservations, and blocks of them (A3 Ultra, A4) ----------------------------------------------------------------

# A reservation is for one zone and one machine type, and only its unused machines are available. mlbench uses existing
# reservations and does not create any. Sources: Compute Engine's API reference (`reservations`, `reservationBlocks`),
# cluster-toolkit's `gke-node-pool` for the format of the affinity.


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
