"""AKS, Kubernetes on Azure: a resource group, a cluster with a small system pool, a pool of equal workers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.cluster_details import NVIDIA_GPU, ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.aks import api
from providers.aks.api import Azure, Message
from providers.aks.discover import check_account, discover_clusters
from providers.aks.options import (
    CPU_DEFAULT,
    DEFAULT_REGION,
    DRIVERS,
    FABRICS,
    OTHER_DRIVER,
    AksDetails,
    AksOptions,
    Machine,
    choose_machine,
    find_machine,
    is_gpu_family,
    split_zones,
)
from providers.aks.quota import (
    IDENTITIES,
    REGISTRIES,
    SERVICES,
    Demand,
    ask_price,
    check_machines,
    find_offer,
    list_versions,
    require_role_assignments,
    require_services,
)
from providers.aks.resources import (
    SPOT,
    SPOT_TOLERATION,
    SYSTEM_DISK,
    SYSTEM_NODES,
    AksHold,
    ControlPlane,
    EndTags,
    ImageGroup,
    ImageRegistry,
    Placement,
    ResourceGroup,
    SubnetAccess,
    WorkerPool,
    azure_of,
    fetch_login,
    read_network,
    registry_of,
)
from providers.base import (
    ROLE_LABEL,
    WORKER,
    Plan,
    PlanLine,
    Provider,
    Resource,
    check_ranges,
    check_tags,
    read_options,
    registry_details,
)
from providers.cluster_end import describe_hold
from providers.doctor import Check
from providers.gpu_probe import IMAGE_CUDA, MIN_DRIVERS, NONE, GpuProbe
from providers.kubernetes_calls import DevicePlugin, ReadyMachines
from providers.machines import (
    check_forced,
    load_prices,
    machine_of,
    make_version_error,
    settle_gpus,
    warn_slow_network,
    warn_unchecked,
)

REGION = re.compile(r"[a-z]{4,40}\d?")
VERSION = re.compile(r"1\.\d{2}(\.\d+)?")
TIERS = ("free", "standard")
IDENTITY = re.compile(
    r"/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.ManagedIdentity/userAssignedIdentities/[^/]+", re.I
)
GROUP = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.I)
TAG_NAME = r"[^<>%&\\?/]{1,128}"  # some services allow no more
SUBNET = re.compile(r"/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.Network/.+/subnets/[^/]+", re.I)
# Microsoft's registry, which nodes can use without an account and without rate limits.
PROBE_IMAGE = "mcr.microsoft.com/azurelinux/base/python:3.12"
PLACE_HOLDER = "00000000-0000-0000-0000-000000000000"


class AksProvider(Provider):
    """The provider "aks": a resource group with a cluster, its small system pool, and a pool of equal workers."""

    name = "aks"
    summary = "Kubernetes on Azure, with or without GPUs; costs money"
    options = AksOptions
    minutes = (8, 7)
    max_nodes = 1000

    def new_cluster(self, name: str, nodes: int, options: AksOptions) -> Cluster:
        """Check all options and return the cluster to create. Calls only read.

        `nodes` is the number of workers, at least 0. Raises UsageError for conflicting options.
        """
        self.check_nodes(nodes)
        system = find_machine(options.system_machine_type)
        options = replace(options, system_machine_type=system.name)
        machine = machine_of(options, choose_machine)
        _check(options, system)
        # Reject several machines with InfiniBand, which would be unused although it is most of their price.
        fabric = FABRICS.get(machine.name)
        if fabric and nodes > 1 and not options.slow_network_ok:
            raise UsageError(
                f"{machine.name} has {fabric.gbits} Gbit/s of {fabric.name}, which mlbench does not set up on AKS: "
                f"between {nodes} machines NCCL would use TCP.",
                hint="--slow-network-ok accepts that; for InfiniBand install NVIDIA's network operator on your own "
                "cluster, attach it, and request the cards by --pod-patch: docs/how-to/attached.md",
            )
        region = options.region or DEFAULT_REGION
        zones = split_zones(options.zones, region)
        subscription = api.subscription_of(options.subscription)
        details = {
            "nodes": nodes,
            "gpus_per_node": machine.gpus,
            "gpu": machine.gpu,
            "machine_type": machine.name,
            "subscription": subscription,
            "location": zones[0] if zones else region,
            "options": asdict(options),
            "node_selector": {ROLE_LABEL: WORKER},
            **({"tolerations": [SPOT_TOLERATION]} if options.spot else {}),
            **_fabric_details(machine.name),
            **registry_details(options.registry, registry_of(subscription, region, name)),
        }
        return Cluster(name, self.name, "creating", details=details, account=subscription, location=region)

    def describe_machines(self, cluster: Cluster) -> Cluster:
        """The cluster with the GPUs of its VM size, as reported by Azure."""
        options, machine = read_options(cluster, AksOptions), _recorded_machine(cluster)
        offer = find_offer(_azure(cluster), machine.name)
        machine = settle_gpus(
            machine,
            None if offer is None else (machine.gpu, offer.gpus),
            forced=options.gpus_per_node,
            asked=options.num_gpus,
            is_gpu_family=is_gpu_family(machine.name),
        )
        facts = {"gpu": machine.gpu, "gpus_per_node": machine.gpus, "arm": bool(offer and offer.is_arm)}
        return msgspec.structs.replace(cluster, details={**cluster.details, **facts})

    def plan(self, cluster: Cluster) -> Plan:
        """The plan: what will be created, with prices per hour. Checks sizes and quotas with read-only calls."""
        options, machine, azure = read_options(cluster, AksOptions), _recorded_machine(cluster), _azure(cluster)
        _check_version(options, azure)
        needed = {
            IDENTITIES: bool(options.subnet and not options.identity),
            REGISTRIES: ClusterDetails.of(cluster).registry_made,
        }
        require_services(azure, [service for service in SERVICES if needed.get(service, True)])
        if needed[REGISTRIES]:
            require_role_assignments(azure)
        _check_identity(options, azure)
        if options.subnet:
            read_network(azure, options.subnet)
        count = ClusterDetails.of(cluster).nodes or 0
        demands = [Demand(Machine(options.system_machine_type), SYSTEM_NODES), Demand(machine, count, options.spot)]
        zones = [zone.rpartition("-")[2] for zone in split_zones(options.zones, azure.location)]
        warnings = check_machines(azure, demands, zones)
        return _price(cluster, options, machine, warnings, f"subscription {azure.subscription}", ask=True)

    def fill_place(self, options: Mapping[str, Any]) -> Message:
        """The options with a subscription, which otherwise comes from the credentials."""
        return {**options, "subscription": options.get("subscription") or PLACE_HOLDER}

    def sketch(self, cluster: Cluster) -> Plan:
        """Sizes and prices for users without an account. Makes no calls."""
        options, machine = read_options(cluster, AksOptions), _recorded_machine(cluster)
        return _price(cluster, options, machine, [warn_unchecked("az login")], "a subscription of yours")

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """The resources in the order of creation: group, cluster, end, pool, device plugin, machines, probe."""
        options = read_options(cluster, AksOptions)
        machine = _recorded_machine(cluster)
        details = ClusterDetails.of(cluster)
        count = details.nodes or 0
        group = ResourceGroup(cluster, _azure(cluster))
        plane = ControlPlane(group, options)
        placement = Placement(group) if options.compact_placement else None
        pool = WorkerPool(plane, machine, count, placement, [plane, *([placement] if placement else [])])
        access = [SubnetAccess(group, options.subnet)] if options.subnet and not options.identity else []
        plane.obstacles = [item.describe_wait for item in access]
        found: list[Resource] = [group, *access, plane, *([placement] if placement else [])]
        if details.expires is not None and count:
            found.append(hold := AksHold(pool, (plane,)))
            pool.needs = (*pool.needs, hold)
        found.append(pool)
        if details.registry_made:
            images = ImageGroup(group)
            found += [images, ImageRegistry(images, plane)]
        needs: list[Resource] = [pool]
        if machine.gpus:
            # AKS installs the driver only.
            needs.append(DevicePlugin(plane.access, "GPU", "nvidia-device-plugin", [plane], group, [SPOT]))
            found.append(needs[-1])
        if count:
            ready = ReadyMachines(plane.access, plane.name, count, {NVIDIA_GPU: machine.gpus}, needs, group)
            found.append(ready)
            if machine.gpus and options.probe_image != NONE:
                image = options.probe_image or PROBE_IMAGE
                found.append(GpuProbe(plane.access, image, machine.gpus, [ready], group, [SPOT]))
        return found

    def list_zones(self, cluster: Cluster) -> Sequence[str]:
        """The zones of --zones."""
        return split_zones(read_options(cluster, AksOptions).zones, cluster.location)

    def place_workers(self, cluster: Cluster, zone: str) -> Cluster:
        """The cluster with its workers in `zone`; the control plane is unchanged."""
        return msgspec.structs.replace(cluster, details={**cluster.details, "location": zone})

    def fetch_registry_login(self, cluster: Cluster) -> tuple[str, str]:
        """User and token of the cluster's registry."""
        return fetch_login(ClusterDetails.of(cluster).registry or registry_of(*_place_of(cluster)))

    def extend(self, cluster: Cluster) -> Sequence[Resource]:
        """The resources that store the cluster's expiry: the group's tag and the end timer in the cluster."""
        details = ClusterDetails.of(cluster)
        group = ResourceGroup(cluster, _azure(cluster))
        plane = ControlPlane(group, read_options(cluster, AksOptions))
        pool = WorkerPool(plane, _recorded_machine(cluster), details.nodes or 0, None, ())
        return [EndTags(group), *([AksHold(pool)] if pool.count else [])]

    def describe_end(self, cluster: Cluster) -> str:
        """Describe what ends without this machine, and what remains."""
        return describe_hold(cluster)

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        """Find the resource groups with our tag in the subscription and region of `scope`."""
        return discover_clusters(api.subscription_of(scope.get("project")), scope.get("location"))

    def check_account(self, project: str | None, location: str | None) -> Iterator[Check]:
        """The lines of `mlbench doctor aks`."""
        return check_account(project, location)

    def connect(self, cluster: Cluster) -> Access:
        """Connect to the cluster's API. Raises NotFoundError if the cluster does not exist."""
        plane = ControlPlane(ResourceGroup(cluster, _azure(cluster)), read_options(cluster, AksOptions))
        try:
            return plane.access()
        except NotFoundError as error:
            raise NotFoundError(error.message, hint=f"mlbench delete-cluster aks {cluster.name}") from None


def _fabric_details(machine_type: str) -> dict[str, object]:
    """The machines' fast network, for the cluster's record; mlbench does not set it up."""
    fabric = FABRICS.get(machine_type)
    return {"fabric": {"name": fabric.name, "gbits": fabric.gbits}} if fabric else {}


def _recorded_machine(cluster: Cluster) -> Machine:
    """The VM size of an existing cluster, without checks: it must be found and deleted even if the table has
    changed."""
    details = ClusterDetails.of(cluster)
    return Machine(details.machine_type or CPU_DEFAULT, details.gpu, details.gpus_per_node or 0)


def _check(options: AksOptions, system: Machine) -> None:
    check_forced(options.gpus_per_node)
    if options.region is not None and not REGION.fullmatch(options.region):
        raise UsageError(
            f'--region "{options.region}" is not a region.', hint="For example westeurope: az account list-locations"
        )
    if not 30 <= options.disk_size <= 2048:
        raise UsageError(f"--disk-size {options.disk_size}: from 30 to 2048 GB.")
    if options.kubernetes_version and not VERSION.fullmatch(options.kubernetes_version):
        raise UsageError(f'--kubernetes-version "{options.kubernetes_version}" is not of the form X.Y or X.Y.Z.')
    if options.tier not in TIERS:
        raise UsageError(f'--tier "{options.tier}" is not one of {", ".join(TIERS)}.')
    if options.subnet and not SUBNET.fullmatch(options.subnet):
        raise UsageError(
            f'--subnet "{options.subnet}" is not the resource ID of a subnet.',
            hint="az network vnet subnet show --query id",
        )
    if options.identity and not IDENTITY.fullmatch(options.identity):
        raise UsageError(
            f'--identity "{options.identity}" is not the resource ID of a user-assigned identity.',
            hint="az identity show --query id",
        )
    if options.aad is not None and not GROUP.fullmatch(options.aad):
        raise UsageError(
            f'--aad "{options.aad}" is not the object ID of a group.', hint="az ad group show --group NAME --query id"
        )
    check_tags(options.tag, TAG_NAME, r".{0,256}", "azure", "microsoft", "windows")
    if system.gpus or "standard_b" in system.name.lower():
        raise UsageError(
            f"--system-machine-type {system.name}: AKS needs machines of at least 2 vCPUs that are not burstable, and "
            "GPUs there would only cost money."
        )
    if options.compact_placement and len(split_zones(options.zones, options.region or DEFAULT_REGION)) > 1:
        raise UsageError(
            "--compact-placement needs one zone, because its group stays in the data center of the first machine.",
            hint="For example --zones 1",
        )
    check_ranges(options.allow_from, is_public=True)


def _place_of(cluster: Cluster) -> tuple[str, str, str]:
    azure = _azure(cluster)
    return azure.subscription, azure.location, cluster.name


def _azure(cluster: Cluster) -> api.Azure:
    options = read_options(cluster, AksOptions)
    return azure_of(cluster, AksDetails.of(cluster).subscription, options.region or DEFAULT_REGION)


# --- the plan: parts, prices, and whether Azure will allow it -------------------------------------------------------


# Premium disks are sold in sizes: the smallest with this many GB is used.
DISKS = ((32, "disk-p4"), (64, "disk-p6"), (128, "disk-p10"), (256, "disk-p15"), (512, "disk-p20"), (1024, "disk-p30"))
LARGEST_DISK = "disk-p40"
SMALL = 10  # maximum number of machines recommended for the free tier


def _price(
    cluster: Cluster, options: AksOptions, machine: Machine, found: list[str], account: str, ask: bool = False
) -> Plan:
    """The priced parts, with the warnings `found` and those that depend only on the options.

    `ask`: look up prices of machines missing in the table.
    """
    details = ClusterDetails.of(cluster)
    count, region = details.nodes or 0, cluster.location
    prices = load_prices("aks")
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
        prices.line(f"system disk of {SYSTEM_DISK} GB", SYSTEM_NODES, _disk_of(SYSTEM_DISK), region),
        prices.line(f"worker disk of {options.disk_size} GB", count, _disk_of(options.disk_size), region),
        prices.line("load balancer (outgoing traffic)", 1, "load-balancer", region),
        prices.line("public address", 1, "public-address", region),
    ]
    if details.registry_made:
        lines.append(prices.line("image registry", 1, "image-registry", region))
    location = f"{details.location or region} of {account}"
    warnings = [*found, *_warn(options, machine, count, AksDetails.of(cluster))]
    return Plan(tuple(lines), location, prices.currency, prices.source, prices.version, tuple(warnings))


def _disk_of(gigabytes: int) -> str:
    """The name of a premium disk of this size in the price table."""
    return next((name for size, name in DISKS if gigabytes <= size), LARGEST_DISK)


def _warn(options: AksOptions, machine: Machine, count: int, details: AksDetails) -> list[str]:
    warnings = []
    if (fabric := FABRICS.get(machine.name)) and count > 1:
        warnings.append(warn_slow_network(machine.name, f"{fabric.gbits} Gbit/s of {fabric.name}"))
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
        raise make_version_error("AKS", wanted, f"in {azure.location}", sorted(offered))


def _check_identity(options: AksOptions, azure: Azure) -> None:
    if options.identity is None:
        return
    try:
        azure.get(options.identity, "show the identity of --identity")
    except NotFoundError as error:
        raise UsageError(error.message, hint="az identity list --query [].id   lists those there are") from None
