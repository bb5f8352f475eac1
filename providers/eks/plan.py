"""Plans an EKS cluster: parts, prices, and whether AWS will allow it. Read-only."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from mlbench_cli.errors import CapacityError, MlbenchError, UsageError
from mlbench_cli.model.run import Cluster
from providers import pricing
from providers.base import Plan, PlanLine, TransientError
from providers.eks.aws import MORE_QUOTA, Aws, aws_in
from providers.eks.capacity import check_reservation, find_reservation
from providers.eks.given_subnets import split_subnets
from providers.eks.machines import Machine, machine_of
from providers.eks.network import zones_for
from providers.eks.nodes import Group
from providers.eks.options import EksOptions
from providers.eks.prices import ask_price
from providers.eks.subnet_checks import check_subnets
from providers.eks.versions import check_version


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
EFA_WARNING = (
    "--efa: every worker of a run gets its machine's EFA cards; only an image with libfabric and NCCL's plugin for it "
    "uses them (mlbench images push --base efa); all others go over TCP, and results are labeled slow_network."
)


def make_plan(cluster: Cluster, options: EksOptions, groups: tuple[Group, Group], machine: Machine) -> Plan:
    """Raises CredentialError, UsageError or CapacityError for what cannot work; what may not work is a warning."""
    aws = aws_in(cluster.location)
    aws.call("sts", "get_caller_identity")
    workers = groups[1]
    zone = zones_for(aws, list(workers.types), options.zone)[0]
    for other in workers.zones[1:]:
        zones_for(aws, list(workers.types), other)
    warnings = check_version(aws, options.kubernetes_version)
    given = split_subnets(options.subnets)
    if given:
        zone, more = check_subnets(aws, given, groups)
        warnings += more
    else:
        _check_public_access(aws, groups)
    if workers.reservation:  # already granted: vCPU quotas do not apply to blocks
        warnings += check_reservation(
            find_reservation(aws, workers.reservation), workers.types[0], workers.count, options.zone
        )
    else:
        warnings += _quota(aws, groups, machine)
    warnings += _fabric_warnings(options, workers, machine)
    if options.spot and len(workers.types) > 1:
        warnings.append(f"You may get any of these machines, of one type or mixed: {', '.join(workers.types)}.")
    workers_line = _spot(aws, workers, zone)
    return _price(groups, aws.region, zone, warnings, workers_line, is_given=bool(given), ask=True)


def _check_public_access(aws: Aws, groups: Sequence[Group]) -> None:
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


UNCHECKED = (
    "Not checked, because there are no credentials: versions, quotas, and which zone has these machines. To check "
    "them: aws configure or aws sso login"
)


def sketch_plan(cluster: Cluster, options: EksOptions, groups: tuple[Group, Group], machine: Machine) -> Plan:
    """The plan for somebody without an account: nothing is asked."""
    workers = groups[1]
    line = None
    if workers.spot:
        line = PlanLine(f"worker {workers.types[0]} (spot)", workers.count, None)
    warnings = [UNCHECKED, *_fabric_warnings(options, workers, machine)]
    zone = options.zone or cluster.location
    return _price(groups, cluster.location, zone, warnings, line, is_given=bool(options.subnets))


def _fabric_warnings(options: EksOptions, workers: Group, machine: Machine) -> list[str]:
    """What to know of the machines' fast network before money is spent."""
    if options.efa:
        return [EFA_WARNING]
    gbits = machine.fabric_gbits
    if not gbits or workers.count < 2:
        return []
    return [
        f"{workers.types[0]} has {gbits} Gbit/s of EFA, which this cluster does not set up (--efa): between machines, "
        "NCCL will use TCP over one network card, and results are labeled slow_network."
    ]


def _price(
    groups: tuple[Group, Group],
    region: str,
    zone: str,
    warnings: list[str],
    workers_line: PlanLine | None,
    *,
    is_given: bool,
    ask: bool = False,
) -> Plan:
    """The priced parts. `workers_line`: the workers at the current price; None: at the table's price.

    `is_given`: the network already exists, so its gateways are not included. `ask`: look up prices of machines missing
    in the table in AWS.
    """
    system, workers = groups
    prices = pricing.load_prices("eks")
    if ask:
        machines = [system.types[0], *([] if workers_line else [workers.types[0]])]
        asked = dict.fromkeys((machine, False) for machine in machines)
        prices = prices.ask_missing(list(asked), region, lambda machine, spot: ask_price(machine, region))
    lines = [
        prices.line("EKS control plane", 1, "control-plane", region),
        prices.line(f"system machine {system.types[0]}", system.count, system.types[0], region),
        workers_line or prices.line(f"worker {workers.types[0]}", workers.count, workers.types[0], region),
        prices.line("GB of disk", system.count * system.disk + workers.count * workers.disk, "disk-gb", region),
    ]
    if public := sum(group.count for group in groups if not group.private):
        lines.append(prices.line("public address", public, "public-address", region))
    if workers.private and not is_given:
        lines.append(prices.line("NAT gateway, without traffic", 1, "nat-gateway", region))
    return Plan(tuple(lines), zone, prices.currency, prices.source, prices.version, tuple(warnings))


def _spot(aws: Aws, workers: Group, zone: str) -> PlanLine | None:
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


def _quota(aws: Aws, groups: tuple[Group, Group], machine: Machine) -> list[str]:
    """Check the vCPU quotas. Returns warnings; raises CapacityError if a quota is too small.

    System machines are on demand, and count together with workers of the same quota.
    """
    system, workers = groups
    vcpus = {kind: machine.vcpus if kind == machine.name else machine_of(kind).vcpus for kind in workers.types}
    needs: Counter[str] = Counter()
    parts: dict[str, list[str]] = {}
    for code, group, each in (
        (_quota_code(workers), workers, vcpus[workers.types[0]]),
        (_quota_code(system), system, machine_of(system.types[0]).vcpus),
    ):
        if code and group.count * each:
            needs[code] += group.count * each
            parts.setdefault(code, []).append(f"{group.count} × {group.types[0]}")
    warnings = []
    for code, needed in needs.items():
        largest = max(vcpus.values()) * workers.count if code == _quota_code(workers) else 0
        warnings += _check_quota(aws, code, needed, " and ".join(parts[code]), workers, vcpus, largest)
    return warnings


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
            hint=f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} "
            f"--region {aws.region} --desired-value {needed}\n{MORE_QUOTA}",
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
