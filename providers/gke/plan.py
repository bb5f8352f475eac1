"""Plans a GKE cluster: parts, prices, and whether Google will allow it. Read-only."""

import re

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers import pricing
from providers.base import Plan, split_zones
from providers.gke.api import Gke, region_of
from providers.gke.compute import Compute, Demand, Purchase, check_machines
from providers.gke.families import FABRICS, Fabric, count_networks, default_disk_type
from providers.gke.machines import Machine
from providers.gke.options import GkeOptions
from providers.gke.repository import require_api
from providers.gke.reservations import check_reservation, parse_reservation
from providers.gke.resources import SYSTEM_DISK, SYSTEM_NODES, ControlPlane, is_queued, setup_of
from providers.gpu_probe import IMAGE_CUDA, MIN_DRIVERS

UNCHECKED = (
    "Not checked, because there are no credentials: versions, quotas, and whether the zone has these machines. To "
    "check them: gcloud auth application-default login"
)


def make_plan(cluster: Cluster, options: GkeOptions, machine: Machine, gke: Gke) -> Plan:
    """The plan. Raises CredentialError, UsageError or CapacityError for certain problems; possible ones are
    warnings."""
    _check_version(options, gke, machine)
    count = ClusterDetails.of(cluster).nodes or 0
    system_type = options.system_machine_type
    zones = ControlPlane(cluster, gke, options).zones(machine)
    for zone in split_zones(options.zones)[1:]:
        Compute(gke.project).check_offer(zone, machine)
    demands = [
        Demand(Machine(options.system_machine_type), SYSTEM_NODES, SYSTEM_DISK, default_disk_type(system_type)),
        Demand(
            machine,
            count,
            options.disk_size,
            options.disk_type or default_disk_type(machine.name),
            purchase_of(options),
        ),
    ]
    if ClusterDetails.of(cluster).registry_made:
        require_api(gke.project)
    networks = count_networks(setup_of(cluster))
    public = not options.private_nodes
    warnings = check_machines(gke.project, zones, demands, public_addresses=public, networks=networks)
    if options.reservation and count:
        name = parse_reservation(options.reservation)
        for zone in zones:
            warnings += check_reservation(name, gke.project, zone, machine, count // len(zones))
    return _price(cluster, options, machine, zones, warnings, f"project {gke.project}")


def sketch_plan(cluster: Cluster, options: GkeOptions, machine: Machine) -> Plan:
    """The plan for users without an account. Makes no calls."""
    zones = list(options.worker_zone) or [cluster.location]
    return _price(cluster, options, machine, zones, [UNCHECKED], "a project of yours")


def _price(
    cluster: Cluster, options: GkeOptions, machine: Machine, zones: list[str], found: list[str], project: str
) -> Plan:
    """The priced parts, with the warnings `found` and those that depend only on the options."""
    count = ClusterDetails.of(cluster).nodes or 0
    system_type = options.system_machine_type
    warnings = [*found, *_network_warnings(options, machine, count)]
    if len(zones) > 1:
        warnings.append("Workers are in several zones: traffic between them is slower and costs extra.")
    if machine.gpu and options.gpu_driver == "default":
        warnings.append(
            f"--gpu-driver default: GKE's own driver may be older than {MIN_DRIVERS[IMAGE_CUDA]}, which images with "
            f"CUDA {IMAGE_CUDA} need (it was 535 in 2026-02). The GPU probe will show it."
        )
    if options.flex_start:
        together = ", all at once" if is_queued(options, count) else ""
        warnings.append(f"Flex-start machines start only when a run requests them{together}, which may take hours.")
    prices = pricing.load_prices("gke")
    region = region_of(cluster.location)
    regional = " in all zones of the region" if options.region else ""
    way = " (spot)" if options.spot else ""
    lines = [
        prices.line(f"GKE control plane{regional}", 1, "control-plane", region),
        prices.line(f"system machine {system_type}", SYSTEM_NODES, system_type, region),
        prices.line(f"worker {machine.name}{way}", count, machine.name, region, spot=options.spot),
    ]
    if machine.gpu and machine.name.startswith("n1-"):
        gpus = count * machine.gpus
        lines.append(prices.line(f"GPU {machine.gpu}{way}", gpus, machine.gpu, region, spot=options.spot))
    lines.append(prices.line("GB of disk", SYSTEM_NODES * SYSTEM_DISK + count * options.disk_size, "disk-gb", region))
    if not options.private_nodes:
        lines.append(prices.line("public address", SYSTEM_NODES + count, "public-address", region))
    location = f"{', '.join(zones)} of {project}"
    return Plan(tuple(lines), location, prices.currency, prices.source, prices.version, tuple(warnings))


def purchase_of(options: GkeOptions) -> Purchase:
    """How the workers are purchased: on demand, spot or flex-start."""
    if options.flex_start:
        return Purchase.FLEX_START
    return Purchase.SPOT if options.spot else Purchase.ON_DEMAND


def _network_warnings(options: GkeOptions, machine: Machine, count: int) -> list[str]:
    warnings = []
    fabric = FABRICS.get(machine.name)
    if fabric and options.fast_network:
        warnings.append(_explain_fast_network(fabric))
    elif fabric and count > 1:
        warnings.append(
            f"{machine.name} has {fabric.gbits} Gbit/s of {fabric.name}, which this cluster does not set up "
            "(--fast-network): between machines, NCCL will use TCP over one network card, and results are labeled "
            "slow_network."
        )
    if options.private_nodes:
        warnings.append(
            "Private nodes reach the Internet only through Cloud NAT, if the network has one; without it, images have "
            "to come from Artifact Registry or mirror.gcr.io."
        )
    return warnings


def _explain_fast_network(fabric: Fabric) -> str:
    """Explain what the fast network adds to the cluster, and what runs need to use it."""
    words = f"--fast-network: runs use {fabric.gbits} Gbit/s of {fabric.name}, if each worker has a whole machine."
    if fabric.networks:
        return (
            f"{words} {fabric.networks} VPC networks are made for it and deleted with the cluster (they are free); "
            "pods mount folders of the machine and get NET_ADMIN, which Pod Security refuses if it is enforced."
        )
    return (
        f"{words} Only an image with libibverbs does (mlbench images push --base gib); with others NCCL fails or uses "
        "TCP, and results are labeled slow_network."
    )


def _check_version(options: GkeOptions, gke: Gke, machine: Machine) -> None:
    """Check the Kubernetes version. As the first call, it fails if credentials, project, zone or API are unusable."""
    config = gke.call("get_server_config", name=gke.parent)
    wanted = options.kubernetes_version
    channel = next((item for item in config.channels if item.channel.name == options.release_channel.upper()), None)
    offered = list(channel.valid_versions if channel is not None else config.valid_master_versions)
    default = channel.default_version if channel is not None else config.default_cluster_version
    if options.fast_network and (fabric := FABRICS.get(machine.name)) and fabric.since:
        _check_since(fabric, wanted, offered, default)
    if wanted is None:
        return
    if not any(version == wanted or version.startswith((f"{wanted}.", f"{wanted}-")) for version in offered):
        short = sorted({".".join(version.split(".")[:2]) for version in offered})
        raise UsageError(
            f"GKE does not offer Kubernetes {wanted} in the channel {options.release_channel} of {gke.location}.",
            hint=f"It has {', '.join(short)}; or remove --kubernetes-version",
        )


def _check_since(fabric: Fabric, wanted: str | None, offered: list[str], default: str) -> None:
    """Reject versions of GKE that do not create RDMA networks."""
    chosen = [version for version in offered if wanted and version.startswith((wanted, f"{wanted}-"))] or [default]
    if all(_numbers(version) >= fabric.since for version in chosen if version):
        return
    newer = [version for version in offered if _numbers(version) >= fabric.since]
    raise UsageError(
        f"--fast-network with {fabric.name} needs GKE {_spell(fabric.since)} or later; this would be {chosen[-1]}.",
        hint=f"--kubernetes-version {newer[0]}" if newer else "Choose a newer --release-channel: rapid.",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """ "1.34.1-gke.1829001" as numbers."""
    return tuple(int(word) for word in re.findall(r"\d+", version))


def _spell(since: tuple[int, ...]) -> str:
    return "{}.{}.{}-gke.{}".format(*since)
