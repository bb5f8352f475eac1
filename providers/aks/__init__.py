"""AKS, Kubernetes on Azure: a resource group, a cluster with a small system pool, a pool of equal workers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.aks import api
from providers.aks.compute import find_offer
from providers.aks.discovery import discover_clusters
from providers.aks.end import AksHold, EndTags
from providers.aks.errors import Message
from providers.aks.machines import CPU_DEFAULT, FABRICS, Machine, choose_machine, find_machine, is_gpu_family
from providers.aks.options import DEFAULT_REGION, AksDetails, AksOptions, split_zones
from providers.aks.readiness import PLUGIN, SPOT, DevicePlugin
from providers.aks.repository import ImageGroup, ImageRegistry, fetch_login, registry_of
from providers.aks.resources import (
    SPOT_TOLERATION,
    ControlPlane,
    Placement,
    PoolSize,
    ResourceGroup,
    WorkerPool,
    azure_of,
)
from providers.aks.subnet import SubnetAccess
from providers.base import (
    ROLE_LABEL,
    WORKER,
    Plan,
    Provider,
    Resource,
    check_ranges,
    check_tags,
    read_options,
    registry_details,
)
from providers.cluster_end import describe_hold
from providers.gpu_probe import NONE, GpuProbe
from providers.machine_checks import check_forced, require_vcpus, settle_gpus
from providers.ready_machines import ReadyMachines

MAX_NODES = 1000
REGION = re.compile(r"[a-z]{4,40}\d?")
VERSION = re.compile(r"1\.\d{2}(\.\d+)?")
TIERS = ("free", "standard")
IDENTITY = re.compile(
    r"/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.ManagedIdentity/userAssignedIdentities/[^/]+", re.I
)
TAG = r"[^<>%&\\?/=]{1,256}"
SUBNET = re.compile(r"/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.Network/.+/subnets/[^/]+", re.I)
# Microsoft's registry, which nodes can use without an account and without rate limits.
PROBE_IMAGE = "mcr.microsoft.com/azurelinux/base/python:3.12"
PLACE_HOLDER = "00000000-0000-0000-0000-000000000000"


class AksProvider(Provider):
    """The provider "aks": a resource group with a cluster, its small system pool, and a pool of equal workers."""

    name = "aks"
    summary = "Kubernetes on Azure, with or without GPUs; costs money"
    options = AksOptions

    def new_cluster(self, name: str, nodes: int, options: AksOptions) -> Cluster:
        """Check all options and return the cluster to create. Calls only read.

        `nodes` is the number of workers, at least 0. Raises UsageError for conflicting options.
        """
        if not 0 <= nodes <= MAX_NODES:
            raise UsageError(f"{nodes} workers: an AKS cluster can have 0 to {MAX_NODES}.")
        system = find_machine(options.system_machine_type)
        options = replace(options, system_machine_type=system.name)
        machine = machine_of(options)
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
            **fabric_details(machine.name),
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
        return replace(cluster, details={**cluster.details, **facts})

    def plan(self, cluster: Cluster) -> Plan:
        """The plan: what will be created, with prices per hour. Checks sizes and quotas with read-only calls."""
        from providers.aks.plan import make_plan

        return make_plan(cluster, read_options(cluster, AksOptions), _recorded_machine(cluster), _azure(cluster))

    def fill_place(self, options: Mapping[str, Any]) -> Message:
        """The options with a subscription, which otherwise comes from the credentials."""
        return {**options, "subscription": options.get("subscription") or PLACE_HOLDER}

    def sketch(self, cluster: Cluster) -> Plan:
        """Sizes and prices for users without an account. Makes no calls."""
        from providers.aks.plan import sketch_plan

        return sketch_plan(cluster, read_options(cluster, AksOptions), _recorded_machine(cluster))

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """The resources in the order of creation: group, cluster, pool, device plugin, machines, probe."""
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
        found: list[Resource] = [group, *access, plane, *([placement] if placement else []), pool]
        if details.registry_made:
            images = ImageGroup(group)
            found += [images, ImageRegistry(images, plane)]
        needs: list[Resource] = [pool]
        if machine.gpus:
            found.append(plugin := DevicePlugin(plane.access, PLUGIN, [plane], group))
            needs.append(plugin)
        if details.expires is not None and count:
            found.append(AksHold(pool, (pool,)))
        if count:
            ready = ReadyMachines(plane.access, plane.name, count, machine.gpus, needs, group)
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
        return replace(cluster, details={**cluster.details, "location": zone})

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

    def connect(self, cluster: Cluster) -> Access:
        """Connect to the cluster's API. Raises NotFoundError if the cluster does not exist."""
        plane = ControlPlane(ResourceGroup(cluster, _azure(cluster)), read_options(cluster, AksOptions))
        try:
            return plane.access()
        except NotFoundError as error:
            raise NotFoundError(error.message, hint=f"mlbench delete-cluster aks {cluster.name}") from None

    def scale(self, cluster: Cluster, nodes: int) -> Sequence[Resource]:
        """The resources that resize the pool to `nodes` machines. Raises UsageError above the maximum size."""
        if nodes > MAX_NODES:
            raise UsageError(f"{nodes} workers: an AKS cluster can have at most {MAX_NODES}.")
        machine = _recorded_machine(cluster)
        plane = ControlPlane(ResourceGroup(cluster, _azure(cluster)), read_options(cluster, AksOptions))
        pool = WorkerPool(plane, machine, nodes, None, ())
        size = PoolSize(pool, nodes)
        details = ClusterDetails.of(cluster)
        hold = [AksHold(pool)] if details.expires is not None else []
        size.needs = tuple(hold)
        ready = [ReadyMachines(plane.access, plane.name, nodes, machine.gpus, (size,), plane.group)] if nodes else []
        return [*hold, size, *ready]


def fabric_details(machine_type: str | None) -> dict[str, object]:
    """The machines' fast network, for the cluster's record; mlbench does not set it up."""
    fabric = FABRICS.get(machine_type or "")
    return {"fabric": {"name": fabric.name, "gbits": fabric.gbits}} if fabric else {}


def machine_of(options: AksOptions) -> Machine:
    """The VM size selected by the options. Raises UsageError if it has fewer vCPUs or other GPUs than requested."""
    machine = choose_machine(options.machine_type, options.num_gpus, options.gpu_type)
    return require_vcpus(machine, options.num_cpus)


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
    check_tags(options.tag, TAG)
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
    check_ranges(options.allow_from)


def _place_of(cluster: Cluster) -> tuple[str, str, str]:
    azure = _azure(cluster)
    return azure.subscription, azure.location, cluster.name


def _azure(cluster: Cluster) -> api.Azure:
    options = read_options(cluster, AksOptions)
    return azure_of(cluster, AksDetails.of(cluster).subscription, options.region or DEFAULT_REGION)
