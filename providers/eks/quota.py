"""What AWS offers and allows: reserved machines, quotas, zones, subnets, versions and prices. Read-only."""

import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from providers.base import PlanLine, RightsError, TransientError
from providers.eks.api import ELSEWHERE, MORE_QUOTA, Aws, aws_in
from providers.eks.options import LIST_SUBNETS, Group, Machine, find_machine
from providers.machines import make_version_error
from providers.pins import ends_soon

# --- reserved machines: On-Demand Capacity Reservations, and Capacity Blocks for ML -----------------------------------

# A block is prepaid, in one zone, and has a fixed start and end: no machine starts before, and EC2 terminates machines
# half an hour before the end. mlbench uses existing reservations and does not buy any. Sources: EC2's API reference,
# EKS' user guide for Capacity Blocks with managed node groups.

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
        begin = f"{datetime.fromtimestamp(reservation.begins, UTC):%Y-%m-%d %H:%M} UTC"
        raise CapacityError(
            f"The capacity reservation {name} begins at {begin}; machines cannot start earlier.",
            hint="Repeat the command after that.",
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


# --- quotas of vCPUs --------------------------------------------------------------------------------------------------


# Quotas count vCPUs of running machines by family. Source: Service Quotas of EC2, as of 2026-11.
@dataclass(frozen=True)
class FamilyQuota:
    """The on-demand and spot quotas of machines whose names begin with one of `prefixes`."""

    name: str
    prefixes: tuple[str, ...]
    on_demand: str
    spot: str


# The first match counts. P5 and later have their own spot quota.
QUOTAS = (
    FamilyQuota("P5 and later", ("p5", "p6"), "L-417A185B", "L-C4BD4855"),
    FamilyQuota("G and VT", ("g", "vt"), "L-DB2E81BA", "L-3819A6DF"),
    FamilyQuota("P", ("p",), "L-417A185B", "L-7212CCBC"),
    FamilyQuota("standard", ("a", "c", "d", "h", "i", "m", "r", "t", "z"), "L-1216C47A", "L-34B43A08"),
)


def price_spot(aws: Aws, workers: Group, zone: str) -> PlanLine | None:
    """Spot workers at EC2's current price, that of the most expensive allowed type; None for other workers."""
    if not workers.spot:
        return None
    what = f"worker {workers.types[0]} (spot{', or alike' if len(workers.types) > 1 else ''})"
    now = datetime.now(UTC)
    try:
        told = aws.call(
            *("ec2", "describe_spot_price_history"),
            InstanceTypes=list(workers.types),
            ProductDescriptions=["Linux/UNIX"],
            AvailabilityZone=zone,
            StartTime=now,
        )["SpotPriceHistory"]
    except TransientError:
        raise
    except MlbenchError:
        told = []  # the permission is optional
    latest: dict[str, tuple[datetime, float]] = {}
    for item in told:
        entry = (item["Timestamp"], float(item["SpotPrice"]))
        latest[item["InstanceType"]] = max(latest.get(item["InstanceType"], entry), entry)
    if not latest:
        return PlanLine(what, workers.count, None)
    dearest = max(price for _, price in latest.values())
    return PlanLine(what, workers.count, dearest, f"now, {now:%Y-%m-%d}")


def check_vcpus(aws: Aws, groups: tuple[Group, Group], machine: Machine) -> list[str]:
    """Check the vCPU quotas. Returns warnings; raises CapacityError if a quota is too small.

    System machines are on demand, and count together with workers of the same quota.
    """
    system, workers = groups
    vcpus = {kind: machine.vcpus if kind == machine.name else find_machine(kind).vcpus for kind in workers.types}
    needs: Counter[str] = Counter()
    parts: dict[str, list[str]] = {}
    for code, group, each in (
        (_quota_code(workers), workers, vcpus[workers.types[0]]),
        (_quota_code(system), system, find_machine(system.types[0]).vcpus),
    ):
        if code and group.count * each:
            needs[code] += group.count * each
            parts.setdefault(code, []).append(f"{group.count} × {group.types[0]}")
    warnings = []
    for code, needed in needs.items():
        largest = max(vcpus.values()) * workers.count if code == _quota_code(workers) else 0
        warnings += _check_quota(aws, code, needed, " and ".join(parts[code]), workers, vcpus, largest)
    return warnings


def raise_quota(aws: Aws, service: str, code: str, value: str) -> str:
    """The command that asks AWS for a larger quota."""
    return (
        f"aws service-quotas request-service-quota-increase --service-code {service} --quota-code {code} "
        f"--region {aws.region} --desired-value {value}"
    )


def _quota_code(group: Group) -> str | None:
    """The quota of a group's machines; None if unknown."""
    family = group.types[0].partition(".")[0]
    entry = next((item for item in QUOTAS if family.startswith(item.prefixes) and not family.startswith("trn")), None)
    if entry is None:
        return None
    return entry.spot if group.spot else entry.on_demand


def _check_quota(
    aws: Aws, code: str, needed: int, machines: str, workers: Group, vcpus: Mapping[str, int], largest: int
) -> list[str]:
    try:
        quota = aws.call("service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode=code)["Quota"]
    except TransientError:
        raise
    except MlbenchError as error:
        return [
            f"The quota {code} cannot be read, so mlbench cannot check whether it allows {needed} vCPUs: "
            f"{error.message}"
        ]
    limit = quota["Value"]
    what = f'quota "{quota.get("QuotaName", code)}" ({code}) in {aws.region}'
    if needed > limit:
        raise CapacityError(
            f"The {what} allows {limit:.0f} vCPUs; {machines} need {needed}.",
            hint=f"{raise_quota(aws, 'ec2', code, str(needed))}\n{MORE_QUOTA}",
            details={"quota": code, "limit": limit, "needed": needed},
        )
    if largest > limit:  # any of the spot types may be used
        named = ", ".join(kind for kind, each in vcpus.items() if workers.count * each > limit)
        return [
            f"The {what} allows {limit:.0f} vCPUs, too few if these machines come: {named} (--spot-type limits them)."
        ]
    if needed > limit / 2:
        return [f"The {what} allows {limit:.0f} vCPUs, of which these machines take {needed}, if no others take them."]
    return []


# --- zones and networks -----------------------------------------------------------------------------------------------

# Existing subnets (`--subnets`) must meet the requirements of EKS and machines. Sources: docs/development.


def zones_for(aws: Aws, machine_types: list[str], zone: str | None, flag: str = "--machine-type") -> list[str]:
    """At least two zones of the region where EKS has control planes; first `zone`, or else one with these machine
    types, which `flag` chooses.

    Raises UsageError if `zone` is none of those or does not have them, CapacityError if no zone of the region does.
    """
    filters = [{"Name": "zone-type", "Values": ["availability-zone"]}, {"Name": "state", "Values": ["available"]}]
    zones = sorted(
        item["ZoneName"]
        for item in aws.call("ec2", "describe_availability_zones", Filters=filters)["AvailabilityZones"]
        # us-east-1e and others: EKS has no control planes there.
        if item.get("ZoneId") not in ("use1-az3", "usw1-az2", "cac1-az3")
    )
    offering = [name for name in sorted(zones_with(aws, machine_types)) if name in zones]
    if not offering or (zone and zone not in offering):
        place = f"The zone {zone} does not have" if zone else f"No zone of {aws.region} has"
        raise UsageError(
            f"{place} {machine_types[0]} together with control planes of EKS.",
            hint=f"Use one of: {', '.join(offering)}, or another {flag}" if offering else "Choose another --region.",
        )
    ordered = sorted(zones, key=lambda name: (name != zone, name not in offering, name))
    if len(ordered) < 2:
        raise UsageError(f"EKS needs two zones, but only {len(ordered)} are available in {aws.region}.")
    return ordered


def zones_with(aws: Aws, machine_types: list[str]) -> set[str]:
    """The zones of the region with the first of these types. Raises CapacityError if there are none."""
    offers = aws.pages(
        "ec2",
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": machine_types}],
    )
    offering = {offer["Location"] for offer in offers if offer["InstanceType"] == machine_types[0]}
    if not offering:
        raise CapacityError(
            f"{machine_types[0]} is offered in no zone of {aws.region}.", hint=f"Choose another --region. {ELSEWHERE}"
        )
    return offering


def check_public_access(aws: Aws, groups: Sequence[Group]) -> None:
    """Raises UsageError if the account blocks internet gateways, which machines need to reach the cluster."""
    try:
        told = aws.call("ec2", "describe_vpc_block_public_access_options")["VpcBlockPublicAccessOptions"]
    except TransientError:
        raise
    except MlbenchError:
        return  # the permission is optional
    mode = str(told.get("InternetGatewayBlockMode") or "off")
    if mode == "block-bidirectional":
        raise UsageError(
            f"VPC Block Public Access is {mode} in {aws.region}: machines in a network created by mlbench would "
            "not join.",
            hint="Use a network with another route out: --subnets subnet-…,subnet-…",
        )
    if mode == "block-ingress" and not all(group.private for group in groups):
        raise UsageError(
            f"VPC Block Public Access is {mode} in {aws.region}: machines can reach the internet only through a "
            "NAT gateway.",
            hint="Use --private-nodes, or your own network: --subnets subnet-…,subnet-…",
        )


@dataclass(frozen=True)
class Subnets:
    """The given subnets by zone, in the given order, with their properties."""

    vpc: str
    by_zone: dict[str, str]
    public: frozenset[str]  # zones whose machines get public addresses
    free: dict[str, int]  # free addresses by zone


def find_subnets(aws: Aws, names: Sequence[str]) -> Subnets:
    """Look up the subnets. Raises UsageError unless they belong to one network and are in different zones."""
    try:
        answer = aws.call("ec2", "describe_subnets", SubnetIds=list(names))
    except NotFoundError as error:
        raise NotFoundError(error.message, hint=f"Subnets belong to one region and account: {LIST_SUBNETS}") from None
    found = {item["SubnetId"]: item for item in answer["Subnets"]}
    subnets = [found[name] for name in names]
    by_zone = {item["AvailabilityZone"]: item["SubnetId"] for item in subnets}
    vpcs = sorted({item["VpcId"] for item in subnets})
    if len(vpcs) > 1 or len(by_zone) < len(names):
        what = f"are of the networks {' and '.join(vpcs)}" if len(vpcs) > 1 else "share a zone"
        raise UsageError(
            f"--subnets: they {what}; it takes one subnet per zone, all in one network.", hint=LIST_SUBNETS
        )
    return Subnets(
        vpcs[0],
        by_zone,
        frozenset(item["AvailabilityZone"] for item in subnets if item.get("MapPublicIpOnLaunch")),
        {item["AvailabilityZone"]: int(item["AvailableIpAddressCount"]) for item in subnets},
    )


# Interfaces of the control plane during an upgrade. Source: EKS' user guide on network requirements.
PLANE_ADDRESSES = 6


def check_subnets(aws: Aws, names: Sequence[str], groups: Sequence[Group]) -> tuple[str, list[str]]:
    """Check the subnets for system machines and workers. Returns the workers' zone, and warnings.

    Raises UsageError or CapacityError if EKS would reject them, or machines could not join.
    """
    subnets = find_subnets(aws, names)
    ordered = zones_for(aws, list(groups[-1].types), groups[-1].zone)
    if barred := [zone for zone in subnets.by_zone if zone not in ordered]:
        raise UsageError(f"--subnets: EKS has no control planes in the zone {barred[0]}.", hint=LIST_SUBNETS)
    zone = _place_workers(subnets, groups[-1], zones_with(aws, list(groups[-1].types)))
    _check_dns(aws, subnets.vpc)
    warnings = _check_way_out(aws, subnets, zone, groups[-1])
    needed = dict.fromkeys(subnets.by_zone, 0)
    # The system machines are in the first subnet, too.
    needed[zone] = sum(group.count * _addresses(aws, group) for group in groups)
    for place, free in subnets.free.items():
        if free < needed[place] + PLANE_ADDRESSES:
            raise CapacityError(
                f"The subnet {subnets.by_zone[place]} has {free} free addresses; control plane and machines with "
                f"the addresses that they keep for pods take {needed[place] + PLANE_ADDRESSES}.",
                hint="Use a larger subnet with --subnets, or fewer machines.",
            )
    return zone, warnings


def _addresses(aws: Aws, group: Group) -> int:
    """Addresses that a machine takes when it joins: its own, and those that EKS' network plugin reserves for pods, a
    whole interface of them. Interfaces for EFA only take none. One without the right to ask EC2.

    Source: amazon-vpc-cni-k8s `docs/eni-and-ip-target.md`.
    """
    try:
        found = aws.call("ec2", "describe_instance_types", InstanceTypes=[group.types[0]])["InstanceTypes"]
    except CredentialError:
        return 1
    network = (found[0] if found else {}).get("NetworkInfo") or {}
    return max(1, int(network.get("Ipv4AddressesPerInterface") or 1))


def _place_workers(subnets: Subnets, workers: Group, offered: Collection[str]) -> str:
    """The zone of the workers. Raises UsageError if no subnet is in a zone with such machines."""
    wanted = [workers.zone] if workers.zone else [zone for zone in subnets.by_zone if zone in offered]
    found = next((zone for zone in wanted if zone in subnets.by_zone), None)
    if found is None:
        raise UsageError(
            f"--subnets has none in {workers.zone or ' or '.join(sorted(offered))}, where {workers.types[0]} is "
            f"available: they are in {' and '.join(subnets.by_zone)}.",
            hint=LIST_SUBNETS,
        )
    return found


def _check_dns(aws: Aws, vpc: str) -> None:
    """Check DNS support of the network, through which EKS nodes find the control plane."""
    for attribute, key in (("enableDnsSupport", "EnableDnsSupport"), ("enableDnsHostnames", "EnableDnsHostnames")):
        try:
            answer = aws.call("ec2", "describe_vpc_attribute", VpcId=vpc, Attribute=attribute)
        except CredentialError:  # an optional permission
            return
        if not answer[key]["Value"]:
            change = attribute.removeprefix("enableDns").lower()
            raise UsageError(
                f"The network {vpc} has {attribute} off, so machines would not find the control plane.",
                hint=f"aws ec2 modify-vpc-attribute --region {aws.region} --vpc-id {vpc} --enable-dns-{change}",
            )


def _check_way_out(aws: Aws, subnets: Subnets, zone: str, group: Group) -> list[str]:
    """Check that machines can reach EKS and registries. Returns warnings; raises UsageError if they certainly
    cannot."""
    subnet = subnets.by_zone[zone]
    try:
        target = _default_route(aws, subnets.vpc, subnet)
    except CredentialError:
        return [f"The routes of {subnet} cannot be read, so mlbench cannot check whether machines there reach EKS."]
    if target is None:
        return [
            f"{subnet} has no default route: machines join only if the network has endpoints for ec2, ecr.api, "
            "ecr.dkr, s3, sts and eks, and pull images only from ECR."
        ]
    if not target.startswith("igw-"):
        return []
    if zone not in subnets.public:
        raise UsageError(
            f"{subnet} goes out by {target}, but assigns no public addresses, so machines would not join the cluster.",
            hint=f"aws ec2 modify-subnet-attribute --region {aws.region} --subnet-id {subnet} "
            "--map-public-ip-on-launch, or name a subnet with a NAT gateway",
        )
    if group.private:
        raise UsageError(
            f"{subnet} goes out by {target}, which takes a public address: machines with several network cards get "
            "none from EC2, and those of --private-nodes are to have none.",
            hint="Name subnets whose default route is a NAT gateway or another way of your network.",
        )
    return []


def _default_route(aws: Aws, vpc: str, subnet: str) -> str | None:
    """The target of the subnet's default route: igw-…, nat-…, tgw-…, or similar; None without one."""

    def ask(name: str, value: str) -> list[dict[str, Any]]:
        return aws.pages("ec2", "describe_route_tables", "RouteTables", Filters=[{"Name": name, "Values": [value]}])

    tables = ask("association.subnet-id", subnet)
    if not tables:  # the network's main table applies
        tables = [
            table for table in ask("vpc-id", vpc) if any(item.get("Main") for item in table.get("Associations", ()))
        ]
    for route in (route for table in tables for route in table["Routes"]):
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State") != "blackhole":
            ways = (str(value) for key, value in route.items() if key.endswith(("GatewayId", "InterfaceId")))
            return next(ways, "another way")
    return None


# --- versions of Kubernetes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """Kubernetes X.Y in EKS, with the last day of standard support `ends` (None: unknown)."""

    name: str
    ends: date | None
    is_default: bool

    def __str__(self) -> str:
        return f"{self.name} (until {self.ends})" if self.ends else self.name

    def ends_soon(self, today: date) -> bool:
        """Whether its standard support ends within two months."""
        return ends_soon(self.ends, today)


def offered_versions(aws: Aws) -> tuple[Version, ...]:
    """The versions with standard support, newest first. Raises CredentialError without permission."""
    told = aws.pages("eks", "describe_cluster_versions", "clusterVersions")
    found = [_parse(item) for item in told if item.get("versionStatus", item.get("status")) == "STANDARD_SUPPORT"]
    return tuple(sorted(found, key=lambda version: _key(version.name), reverse=True))


def choose_version(offered: Sequence[Version], today: date | None = None) -> Version | None:
    """EKS' default; the newest if the default's support ends soon; None if unknown."""
    today = today or datetime.now(UTC).date()
    default = next((version for version in offered if version.is_default), None)
    if default is not None and not default.ends_soon(today):
        return default
    lasting = [version for version in offered if not version.ends_soon(today)]
    return lasting[0] if lasting else default


def version_for(aws: Aws, wanted: str | None) -> str | None:
    """The version to request; None: EKS' choice, without permission to list versions."""
    if wanted is not None:
        return wanted
    try:
        chosen = choose_version(offered_versions(aws))
    except RightsError:
        return None
    return None if chosen is None else chosen.name


def check_version(aws: Aws, wanted: str | None) -> list[str]:
    """Warnings about the version that a cluster will get. Raises UsageError for one without standard support."""
    today = datetime.now(UTC).date()
    try:
        offered = offered_versions(aws)
    except RightsError as error:
        return [] if wanted is None else [f"Cannot check whether EKS has Kubernetes {wanted}: {error.message}"]
    named = ", ".join(map(str, offered))
    if wanted is None:
        chosen, default = choose_version(offered, today), next((item for item in offered if item.is_default), None)
        if chosen is None or chosen is default:
            return []
        reason = f", since standard support of EKS' default {default.name} ends on {default.ends}" if default else ""
        return [f"The cluster gets Kubernetes {chosen}{reason}."]
    found = next((version for version in offered if version.name == wanted), None)
    if found is None:
        raise make_version_error("EKS", wanted, "with standard support", map(str, offered))
    if not found.ends_soon(today):
        return []
    return [
        f"Standard support of Kubernetes {found.name} on EKS ends on {found.ends}: EKS then upgrades the cluster by "
        f"itself. It has: {named}."
    ]


def _parse(item: dict[str, Any]) -> Version:
    ends = item.get("endOfStandardSupportDate")
    return Version(
        str(item["clusterVersion"]),
        ends.date() if isinstance(ends, datetime) else None,
        bool(item.get("defaultVersion")),
    )


def _key(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


# --- prices of machines that the table does not price -----------------------------------------------------------------

SERVICE_REGION = "us-east-1"  # the price list is served in few regions, for all of them
# Linux, shared tenancy, nothing preinstalled. Source: Karpenter's pricing provider.
FILTERS = {
    "serviceCode": "AmazonEC2",
    "preInstalledSw": "NA",
    "operatingSystem": "Linux",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
    "tenancy": "Shared",
    "productFamily": "Compute Instance",
}


def ask_price(machine: str, region: str) -> float | None:
    """The on-demand price of one machine per hour, for a plan; None if it is unknown or cannot be looked up."""
    try:
        return _ask_product(aws_in(SERVICE_REGION), machine, region)
    except MlbenchError:
        return None


def _ask_product(aws: Aws, machine: str, region: str) -> float | None:
    filters = {**FILTERS, "regionCode": region, "instanceType": machine}
    entries = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in filters.items()]
    found = aws.pages("pricing", "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=entries)
    return max((amount for text in found for amount in _hourly_prices(json.loads(text))), default=None)


def _hourly_prices(product: dict[str, Any]) -> Iterator[float]:
    """The on-demand prices of one product in USD, except 0, which marks unavailable offers."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            amount = float(dimension["pricePerUnit"].get("USD", 0))
            if dimension["unit"] == "Hrs" and amount > 0:
                yield amount
