"""What a cluster on EKS will be and cost, and whether AWS is going to allow it. Reads only."""

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, UsageError
from mlbench_cli.store import Cluster
from providers import pricing
from providers.base import Plan, PlanLine, TransientError
from providers.eks import EksOptions
from providers.eks.aws import MORE_QUOTA, Aws, aws_in
from providers.eks.machines import machine_of
from providers.eks.network import zones_for
from providers.eks.nodes import Group

# Quotas count vCPUs of running machines by family. Source: Service Quotas of EC2, as of 2026-11.
QUOTAS = (
    (("g", "vt"), "L-DB2E81BA", "L-3819A6DF"),
    (("p",), "L-417A185B", "L-7212CCBC"),
    (("a", "c", "d", "h", "i", "m", "r", "t", "z"), "L-1216C47A", "L-34B43A08"),
)
EFA_WARNING = (
    "--efa: every worker of a run gets its machine's EFA cards; only an image with libfabric and NCCL's plugin for it "
    "uses them, and all others go over TCP."
)


def planned(cluster: Cluster, options: EksOptions, groups: tuple[Group, Group]) -> Plan:
    """Raises CredentialError, UsageError or CapacityError for what cannot work; what may not work is a warning."""
    aws = aws_in(cluster.details["region"])
    aws.call("sts", "get_caller_identity")
    system, workers = groups
    zone = zones_for(aws, list(workers.types), options.zone)[0]
    warnings = [*_version(aws, options), *_gpus(aws, workers, int(cluster.details["gpus_per_node"]))]
    warnings += _quota(aws, workers)
    if options.efa:
        warnings.append(EFA_WARNING)
    if options.spot and len(workers.types) > 1:
        warnings.append(f"Any of these machines may come, all of one type or mixed: {', '.join(workers.types)}.")
    prices = pricing.table("eks")
    region = aws.region
    lines = [
        PlanLine("EKS control plane", 1, prices.price("control-plane", region)),
        PlanLine(f"system machine {system.types[0]}", system.count, prices.price(system.types[0], region)),
        PlanLine(
            f"worker {workers.types[0]}{' (spot)' if workers.spot else ''}",
            workers.count,
            prices.price(workers.types[0], region, spot=workers.spot),
        ),
        PlanLine(
            "GB of disk", system.count * system.disk + workers.count * workers.disk, prices.price("disk-gb", region)
        ),
    ]
    if workers.private:
        lines.append(PlanLine("NAT gateway, without its traffic", 1, prices.price("nat-gateway", region)))
    return Plan(tuple(lines), location=zone, currency=prices.currency, source=prices.source, warnings=tuple(warnings))


def _version(aws: Aws, options: EksOptions) -> list[str]:
    if options.kubernetes_version is None:
        return []
    try:
        offered = aws.pages("eks", "describe_cluster_versions", "clusterVersions")
    except CredentialError as error:
        return [f"Whether EKS has Kubernetes {options.kubernetes_version} is not known: {error.message}"]
    standard = [item["clusterVersion"] for item in offered if item.get("versionStatus") == "STANDARD_SUPPORT"]
    if options.kubernetes_version not in standard:
        raise UsageError(
            f"EKS does not offer Kubernetes {options.kubernetes_version} with standard support.",
            hint=f"It has: {', '.join(standard)}; or leave out --kubernetes-version",
        )
    return []


def _gpus(aws: Aws, workers: Group, expected: int) -> list[str]:
    """Hold the table of machines against EC2's own."""
    try:
        found = aws.call("ec2", "describe_instance_types", InstanceTypes=list(workers.types[:1]))["InstanceTypes"]
    except UsageError as error:
        raise UsageError(error.message, hint="Choose another --machine-type.") from None
    gpus = sum(gpu.get("Count", 0) for item in found for gpu in item.get("GpuInfo", {}).get("Gpus", []))
    if found and gpus != expected:
        return [f"EC2 says that {workers.types[0]} has {gpus} GPUs; mlbench's table says {expected}."]
    return []


def _quota(aws: Aws, workers: Group) -> list[str]:
    """Whether the account may have that many vCPUs more. Raises CapacityError where it surely may not."""
    family = workers.types[0].partition(".")[0]
    vcpus = workers.count * machine_of(workers.types[0]).vcpus
    entry = next((item for item in QUOTAS if family.startswith(item[0]) and not family.startswith("trn")), None)
    if entry is None or not vcpus:
        return []
    code = entry[2 if workers.spot else 1]
    try:
        quota = aws.call("service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode=code)["Quota"]
    except TransientError:
        raise
    except MlbenchError as error:
        return [f"The quota {code} cannot be read, so whether {vcpus} vCPUs are allowed is not known: {error.message}"]
    limit = quota["Value"]
    what = f'quota "{quota.get("QuotaName", code)}" ({code}) in {aws.region}'
    if vcpus > limit:
        raise CapacityError(
            f"The {what} allows {limit:.0f} vCPUs; {workers.count} × {workers.types[0]} need {vcpus}.",
            hint=f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} "
            f"--region {aws.region} --desired-value {vcpus}\n{MORE_QUOTA}",
            details={"quota": code, "limit": limit, "needed": vcpus},
        )
    if vcpus > limit / 2:
        return [f"The {what} allows {limit:.0f} vCPUs, of which these workers take {vcpus}, if no others take them."]
    return []
