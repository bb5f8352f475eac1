"""Plans an AKS cluster: parts, prices, and whether Azure will allow it. Read-only."""

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers import pricing
from providers.aks.api import Azure
from providers.aks.compute import Demand, check_machines
from providers.aks.machines import DRIVERS, FABRICS, OTHER_DRIVER, Machine
from providers.aks.options import AksDetails, AksOptions, split_zones
from providers.aks.prices import ask_price
from providers.aks.resources import SYSTEM_DISK, SYSTEM_NODES
from providers.base import Plan, PlanLine
from providers.gpu_probe import IMAGE_CUDA, MIN_DRIVERS

UNCHECKED = (
    "Not checked, because there are no credentials: versions, quotas, and whether the region has these machines. To "
    "check them: az login"
)
# Premium disks are sold in sizes: the smallest with this many GB is used.
DISKS = ((32, "disk-p4"), (64, "disk-p6"), (128, "disk-p10"), (256, "disk-p15"), (512, "disk-p20"), (1024, "disk-p30"))
LARGEST_DISK = "disk-p40"
SMALL = 10  # maximum number of machines recommended for the free tier


def make_plan(cluster: Cluster, options: AksOptions, machine: Machine, azure: Azure) -> Plan:
    """The plan. Raises CredentialError, UsageError or CapacityError for certain problems; possible ones are
    warnings."""
    _check_version(options, azure)
    _check_identity(options, azure)
    count = ClusterDetails.of(cluster).nodes or 0
    demands = [Demand(Machine(options.system_machine_type), SYSTEM_NODES), Demand(machine, count, options.spot)]
    zones = [zone.rpartition("-")[2] for zone in split_zones(options.zones, azure.location)]
    warnings = check_machines(azure, demands, zones)
    return _price(cluster, options, machine, warnings, f"subscription {azure.subscription}", ask=True)


def sketch_plan(cluster: Cluster, options: AksOptions, machine: Machine) -> Plan:
    """The plan for users without an account. Makes no calls."""
    return _price(cluster, options, machine, [UNCHECKED], "a subscription of yours")


def _price(
    cluster: Cluster, options: AksOptions, machine: Machine, found: list[str], account: str, ask: bool = False
) -> Plan:
    """The priced parts, with the warnings `found` and those that depend only on the options.

    `ask`: look up prices of machines missing in the table.
    """
    details = ClusterDetails.of(cluster)
    count, region = details.nodes or 0, cluster.location
    prices = pricing.load_prices("aks")
    if ask:
        machines = [(options.system_machine_type, False), (machine.name, options.spot)]
        prices = prices.ask_missing(machines, region, lambda name, spot: ask_price(name, region, spot))
    way = " (spot)" if options.spot else ""
    first = prices.line("AKS control plane", 1, "control-plane", region)
    if options.tier == "free":
        first = PlanLine("AKS control plane, free tier", 1, 0.0)
    lines: list[PlanLine] = [
        first,
        prices.line(f"system machine {options.system_machine_type}", SYSTEM_NODES, options.system_machine_type, region),
        prices.line(f"worker {machine.name}{way}", count, machine.name, region, spot=options.spot),
        prices.line(f"disk of {SYSTEM_DISK} GB", SYSTEM_NODES, disk_of(SYSTEM_DISK), region),
        prices.line(f"disk of {options.disk_size} GB", count, disk_of(options.disk_size), region),
        prices.line("load balancer (outgoing traffic)", 1, "load-balancer", region),
        prices.line("public address", 1, "public-address", region),
    ]
    if details.registry_made:
        lines.append(prices.line("image registry", 1, "image-registry", region))
    location = f"{details.location or region} of {account}"
    warnings = [*found, *_warn(options, machine, count, AksDetails.of(cluster))]
    return Plan(tuple(lines), location, prices.currency, prices.source, prices.version, tuple(warnings))


def disk_of(gigabytes: int) -> str:
    """The name of a premium disk of this size in the price table."""
    return next((name for size, name in DISKS if gigabytes <= size), LARGEST_DISK)


def _warn(options: AksOptions, machine: Machine, count: int, details: AksDetails) -> list[str]:
    warnings = []
    if (fabric := FABRICS.get(machine.name)) and count > 1:
        warnings.append(
            f"{machine.name} has {fabric.gbits} Gbit/s of {fabric.name}, which this cluster does not set up: between "
            "machines, NCCL will use TCP, and results are labeled slow_network."
        )
    driver = DRIVERS.get(machine.gpu or "", OTHER_DRIVER)
    if machine.gpus and _branch(driver) < MIN_DRIVERS[IMAGE_CUDA]:
        warnings.append(
            f"AKS installs NVIDIA's driver {driver} on {machine.name}; the default images (CUDA {IMAGE_CUDA}) need "
            f"{MIN_DRIVERS[IMAGE_CUDA]}. Build images with CUDA 12.8: mlbench images push --index URL   of PyTorch's "
            "wheels for cu128"
        )
    if details.arm:
        warnings.append(
            f"{machine.name} has Arm processors: mlbench images push --platform linux/arm64   builds images for them."
        )
    if options.tier == "free" and count > SMALL:
        warnings.append(
            f"The free tier of the control plane is meant for up to {SMALL} machines: --tier standard has an SLA."
        )
    if options.compact_placement and not options.zones:
        warnings.append(
            "--compact-placement without --zones: the data center of the first machine may not have the others "
            "(OverconstrainedAllocationRequest)."
        )
    return warnings


def _branch(driver: str) -> int:
    return int(driver.partition(".")[0])


def _check_version(options: AksOptions, azure: Azure) -> None:
    """Check the Kubernetes version. As the first call, it fails if credentials, subscription, region or service are
    unusable."""
    offered = list_versions(azure)
    wanted = options.kubernetes_version
    if wanted is None:
        return
    patches = [patch for versions in offered.values() for patch in versions]
    if wanted not in offered and wanted not in patches:
        raise UsageError(
            f"AKS does not offer Kubernetes {wanted} in {azure.location}.",
            hint=f"It has {', '.join(sorted(offered))}; or remove --kubernetes-version",
        )


def _check_identity(options: AksOptions, azure: Azure) -> None:
    if options.identity is None:
        return
    try:
        azure.get(options.identity, "show the identity of --identity")
    except NotFoundError as error:
        raise UsageError(error.message, hint="az identity list --query [].id   lists those there are") from None


def list_versions(azure: Azure) -> dict[str, list[str]]:
    """The generally available minor versions of the region, with their patches."""
    path = f"{azure.root}/providers/Microsoft.ContainerService/locations/{azure.location}/kubernetesVersions"
    values = azure.get(path, f"list Kubernetes' versions in {azure.location}").get("values") or []
    plans = {item["version"]: (item.get("capabilities") or {}).get("supportPlan") or [] for item in values}
    return {
        item["version"]: list(item.get("patchVersions") or {})
        for item in values
        if not item.get("isPreview") and (not plans[item["version"]] or "KubernetesOfficial" in plans[item["version"]])
    }
