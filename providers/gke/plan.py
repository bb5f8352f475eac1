"""What a cluster on GKE will be and cost, and whether Google is going to allow it. Reads only."""

from typing import TYPE_CHECKING

from mlbench_cli.cluster_details import ClusterDetails
from mlbench_cli.errors import UsageError
from mlbench_cli.model import Cluster
from providers import pricing
from providers.base import Plan
from providers.gke.api import Gke, region_of
from providers.gke.compute import check_machines
from providers.gke.machines import Machine
from providers.gke.resources import ControlPlane

if TYPE_CHECKING:
    from providers.gke import GkeOptions

SYSTEM_DISK = 50


def make_plan(cluster: Cluster, options: "GkeOptions", machine: Machine, gke: Gke) -> Plan:
    """Raises CredentialError, UsageError or CapacityError for what cannot work; what may not work is a warning."""
    _check_version(options, gke)
    count = ClusterDetails.of(cluster).nodes or 0
    zones = ControlPlane(cluster, gke, options).zones(machine)
    warnings = check_machines(gke.project, zones, machine, count, options.spot)
    if len(zones) > 1:
        warnings.append("Workers in several zones: what they send each other is slower, and costs extra.")
    if options.flex_start:
        warnings.append("Flex-start machines come only when a run asks for them; it may wait for hours.")
    prices = pricing.load_prices("gke")
    region = region_of(gke.location)
    regional = " in all zones of the region" if options.region else ""
    way = " (spot)" if options.spot else ""
    lines = [
        prices.line(f"GKE control plane{regional}", 1, "control-plane", region),
        prices.line(f"system machine {options.system_machine_type}", 1, options.system_machine_type, region),
        prices.line(f"worker {machine.name}{way}", count, machine.name, region, spot=options.spot),
    ]
    if machine.gpu and machine.name.startswith("n1-"):
        gpus = count * machine.gpus
        lines.append(prices.line(f"GPU {machine.gpu}{way}", gpus, machine.gpu, region, spot=options.spot))
    lines.append(prices.line("GB of disk", SYSTEM_DISK + count * options.disk_size, "disk-gb", region))
    location = f"{', '.join(zones)} of project {gke.project}"
    return Plan(tuple(lines), location, prices.currency, prices.source, prices.version, tuple(warnings))


def _check_version(options: "GkeOptions", gke: Gke) -> None:
    """Also the first call of all: it fails if credentials, project, zone or API are not as they must be."""
    config = gke.call("get_server_config", name=gke.parent)
    wanted = options.kubernetes_version
    if wanted is None:
        return
    channel = next((item for item in config.channels if item.channel.name == options.release_channel.upper()), None)
    offered = list(channel.valid_versions if channel is not None else config.valid_master_versions)
    if not any(version == wanted or version.startswith((f"{wanted}.", f"{wanted}-")) for version in offered):
        short = sorted({".".join(version.split(".")[:2]) for version in offered})
        raise UsageError(
            f"GKE does not offer Kubernetes {wanted} in the channel {options.release_channel} of {gke.location}.",
            hint=f"It has {', '.join(short)}; or leave out --kubernetes-version",
        )
