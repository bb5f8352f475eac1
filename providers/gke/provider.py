"""GKE, Kubernetes on Google Cloud: a zonal or regional cluster, a small system pool, a pool of equal workers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.cluster_details import NVIDIA_GPU, ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.base import (
    ROLE_LABEL,
    WORKER,
    Plan,
    Provider,
    Resource,
    RightsError,
    check_ranges,
    check_tags,
    read_options,
    registry_details,
    split_zones,
)
from providers.cluster_end import describe_hold
from providers.doctor import Check
from providers.gke import api, discover
from providers.gke.api import Gke, region_of
from providers.gke.discover import check_account, discover_clusters
from providers.gke.options import (
    CPU_DEFAULT,
    DEFAULT_ZONE,
    FABRICS,
    FLEX_START_COMPACT,
    NOT_ON_DEMAND,
    Fabric,
    FabricKind,
    GkeDetails,
    GkeOptions,
    Machine,
    choose_machine,
    count_networks,
    default_disk_type,
    fabric_facts,
    is_gpu_family,
)
from providers.gke.quota import Compute, Demand, Purchase, check_machines, check_reservation, parse_reservation
from providers.gke.resources import (
    FLEX_START_LABEL,
    QUEUED_CLASS,
    QUEUED_TOLERATION,
    SYSTEM_DISK,
    SYSTEM_NODES,
    USER,
    ControlPlane,
    EndLabel,
    GkeHold,
    ImageRepository,
    NcclInstaller,
    NetworkObjects,
    WorkerPool,
    is_queued,
    list_networks,
    registry_of,
    require_api,
    setup_of,
)
from providers.gpu_probe import IMAGE_CUDA, MIN_DRIVERS, NONE, GpuProbe
from providers.kubernetes_calls import ReadyMachines
from providers.machines import (
    check_forced,
    load_prices,
    machine_of,
    make_version_error,
    settle_gpus,
    warn_slow_network,
    warn_unchecked,
)
from providers.workloads import OrphanedResource, WorkloadObject

REGION = re.compile(r"[a-z]+-[a-z]+\d+")
ZONE = re.compile(rf"{REGION.pattern}-[a-z]")
CHANNELS = ("rapid", "regular", "stable", "extended")
DRIVERS = ("latest", "default")
# Google's mirror of the base image of task images, which nodes reach without public addresses.
PROBE_IMAGE = "mirror.gcr.io/library/python:3.12-slim-bookworm"


class GkeProvider(Provider):
    """The provider "gke": a control plane with a small system pool, and a pool of equal workers."""

    name = "gke"
    summary = "Kubernetes on Google Cloud, with or without GPUs; costs money"
    options = GkeOptions
    minutes = (8, 5)
    max_nodes = 1000
    finds_orphans = True

    def new_cluster(self, name: str, nodes: int, options: GkeOptions) -> Cluster:
        """Check all options and return the cluster to create. Calls only read.

        `nodes` is the number of workers, at least 0, divided evenly among the zones. Raises UsageError for conflicting
        options.
        """
        self.check_nodes(nodes)
        options = _with_first_zone(options)
        machine = machine_of(options, choose_machine)
        _check(options, machine)
        zones = len(options.worker_zone) or 1
        if nodes % zones:
            raise UsageError(
                f"{nodes} workers cannot be shared evenly by {zones} zones.",
                hint=f"For example: NUM_WORKERS {nodes - nodes % zones + zones}",
            )
        project = api.project_of(options.project)
        details = {
            "nodes": nodes,
            "gpus_per_node": machine.gpus,
            "gpu": machine.gpu,
            "machine_type": machine.name,
            "project": project,
            "location": place_of(options),
            "options": asdict(options),
            "node_selector": {ROLE_LABEL: WORKER},
            **_fabric_details(options, machine),
            **_flex_start_details(options, nodes),
            **registry_details(options.registry, registry_of(project, place_of(options), name)),
        }
        return Cluster(name, self.name, "creating", details=details, account=project, location=place_of(options))

    def describe_machines(self, cluster: Cluster) -> Cluster:
        """The cluster with the GPUs of its machine type, as reported by Compute Engine."""
        options, machine = read_options(cluster, GkeOptions), _recorded_machine(cluster)
        told, arm = None, {}
        try:
            zone = ControlPlane(cluster, _gke(cluster), options).zones(machine)[0]
            compute = Compute(api.project_of(options.project))
            told = compute.find_gpus(zone, machine)
            arm = {"arm": compute.is_arm(zone, machine)}
        except RightsError:
            pass  # the table tells
        machine = settle_gpus(
            machine,
            told,
            forced=options.gpus_per_node,
            asked=None if machine.name.startswith("n1-") else options.num_gpus,
            is_gpu_family=is_gpu_family(machine.name),
        )
        return msgspec.structs.replace(
            cluster, details={**cluster.details, "gpu": machine.gpu, "gpus_per_node": machine.gpus, **arm}
        )

    def plan(self, cluster: Cluster) -> Plan:
        """The plan: what will be created, with prices per hour. Checks quotas with read-only calls."""
        options, machine, gke = read_options(cluster, GkeOptions), _recorded_machine(cluster), _gke(cluster)
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

    def fill_place(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with a project, which otherwise comes from the credentials."""
        return {**options, "project": options.get("project") or "your-project"}

    def sketch(self, cluster: Cluster) -> Plan:
        """Sizes and prices for users without an account. Makes no calls."""
        options, machine = read_options(cluster, GkeOptions), _recorded_machine(cluster)
        zones = list(options.worker_zone) or [cluster.location]
        return _price(
            cluster,
            options,
            machine,
            zones,
            [warn_unchecked("gcloud auth application-default login")],
            "a project of yours",
        )

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """The resources in the order of creation: control plane, networks, end, pool, wait for machines, probe."""
        options = read_options(cluster, GkeOptions)
        machine = _recorded_machine(cluster)
        plane = ControlPlane(cluster, _gke(cluster), options)
        count = ClusterDetails.of(cluster).nodes or 0
        setup = setup_of(cluster)
        networks = list_networks(plane, setup)
        pool = WorkerPool(plane, machine, count, networks)
        found: list[Resource] = [plane, *networks]
        if ClusterDetails.of(cluster).registry_made:
            found.insert(1, ImageRepository(plane))
        if ClusterDetails.of(cluster).expires is not None and count and not options.flex_start:
            found.append(hold := GkeHold(pool, (plane,)))
            pool.needs = (*pool.needs, hold)
        found.append(pool)
        kind = FabricKind(setup) if setup in list(FabricKind) else None
        if kind and networks:
            found.append(NetworkObjects(plane, kind, (plane, *networks)))
        probe = None
        if count and not options.flex_start:
            ready = ReadyMachines(plane.access, plane.name, count, {NVIDIA_GPU: machine.gpus}, (pool,), plane)
            found.append(ready)
            if machine.gpus and options.probe_image != NONE:
                probe = GpuProbe(plane.access, options.probe_image or PROBE_IMAGE, machine.gpus, (ready,), plane)
                found.append(probe)
        if kind:
            found.append(NcclInstaller(plane, kind, 0 if options.flex_start else count, pool, probe))
        return found

    def list_zones(self, cluster: Cluster) -> Sequence[str]:
        """The zones of --zones."""
        return split_zones(read_options(cluster, GkeOptions).zones)

    def place_workers(self, cluster: Cluster, zone: str) -> Cluster:
        """The cluster with its node pool in `zone`; the control plane is unchanged."""
        options = {**ClusterDetails.of(cluster).options, "worker_zone": [zone]}
        return msgspec.structs.replace(cluster, details={**cluster.details, "options": options, "location": zone})

    def fetch_registry_login(self, cluster: Cluster) -> tuple[str, str]:
        """The user name for access tokens, and this process's token."""
        return USER, api.token()()

    def extend(self, cluster: Cluster) -> Sequence[Resource]:
        """The resources that store the cluster's expiry: its label, to be updated."""
        options, details = read_options(cluster, GkeOptions), ClusterDetails.of(cluster)
        plane = ControlPlane(cluster, _gke(cluster), options)
        pool = WorkerPool(plane, _recorded_machine(cluster), details.nodes or 0)
        return [EndLabel(plane), *([GkeHold(pool)] if pool.count and not options.flex_start else [])]

    def describe_end(self, cluster: Cluster) -> str:
        """Describe what ends without this machine, and what remains."""
        return describe_hold(cluster)

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        """Find the clusters with our label in the project and location of `scope`; "-" is every location."""
        return discover_clusters(api.project_of(scope.get("project")), scope.get("location", "-"))

    def check_account(self, project: str | None, location: str | None) -> Iterator[Check]:
        """The lines of `mlbench doctor gke`."""
        return check_account(project, location)

    def connect(self, cluster: Cluster) -> Access:
        """Connect to the cluster's API with Google's credentials. Raises NotFoundError if the cluster does not
        exist."""
        gke = _gke(cluster)
        try:
            found = gke.call("get_cluster", name=gke.cluster(cluster.name))
        except NotFoundError as error:
            raise NotFoundError(error.message, hint=f"mlbench delete-cluster gke {cluster.name}") from None
        return api.access_to(found)

    def list_orphans(self, cluster: Cluster, objects: Sequence[WorkloadObject]) -> list[OrphanedResource]:
        """Load balancers and disks that the cluster's workloads have left."""
        return discover.list_orphans(cluster, objects)

    def orphan_command(self, cluster: Cluster, item: WorkloadObject | None) -> str:
        """The command that finds and deletes the resource of `item`, or any leftovers of the cluster."""
        return discover.orphan_command(cluster, item)


def _with_first_zone(options: GkeOptions) -> GkeOptions:
    """The options with the workers in the first of --zones, and also the control plane unless it has a location."""
    zones = split_zones(options.zones)
    if not zones:
        return options
    if options.worker_zone:
        raise UsageError("--zones and --worker-zone exclude each other: one tries zones in turn, one uses all at once.")
    zone = options.zone if options.zone or options.region else zones[0]
    return replace(options, zone=zone, worker_zone=zones[:1])


def _fabric_details(options: GkeOptions, machine: Machine) -> dict[str, object]:
    """The machines' fast network, and its kind if it is set up."""
    fabric = FABRICS.get(machine.name)
    facts = fabric_facts(machine.name, fabric.kind if fabric and options.fast_network else None)
    return {"fabric": facts} if facts else {}


def _flex_start_details(options: GkeOptions, nodes: int) -> dict[str, object]:
    """The details with which runs request flex-start machines: all at once if there are several."""
    if not options.flex_start:
        return {}
    details: dict[str, object] = {"node_selector": {ROLE_LABEL: WORKER, FLEX_START_LABEL: "true"}}
    if is_queued(options, nodes):
        details |= {"tolerations": [QUEUED_TOLERATION], "provisioning_class": QUEUED_CLASS}
    return details


def place_of(options: GkeOptions) -> str:
    """The cluster's zone or region."""
    return options.region or options.zone or DEFAULT_ZONE


def _recorded_machine(cluster: Cluster) -> Machine:
    """The machine type of an existing cluster, without checks: it must be found and deleted even if the table has
    changed."""
    details = ClusterDetails.of(cluster)
    return Machine(details.machine_type or CPU_DEFAULT, details.gpu, details.gpus_per_node or 0)


def _check(options: GkeOptions, machine: Machine) -> None:
    _check_place(options)
    check_forced(options.gpus_per_node)
    if not 10 <= options.disk_size <= 65536:
        raise UsageError(f"--disk-size {options.disk_size}: from 10 to 65536 GB.")
    if options.kubernetes_version and not re.fullmatch(r"1\.\d{2}(\.\d+(-gke\.\d+)?)?", options.kubernetes_version):
        raise UsageError(f'--kubernetes-version "{options.kubernetes_version}" is not of the form X.Y or X.Y.Z-gke.N.')
    for flag, value, known in (
        ("--release-channel", options.release_channel, CHANNELS),
        ("--gpu-driver", options.gpu_driver, DRIVERS),
    ):
        if value not in known:
            raise UsageError(f'{flag} "{value}" is not one of {", ".join(known)}.')
    check_ranges(options.allow_from, is_public=False)
    check_tags(options.tag, r"[a-z][a-z0-9_-]{0,62}", r"[a-z0-9_-]{0,63}")  # keys of labels begin with a letter
    _check_network(options)
    ways = [flag for flag, on in (("--spot", options.spot), ("--flex-start", options.flex_start)) if on]
    if options.reservation:
        parse_reservation(options.reservation)
        ways.append("--reservation")
    if len(ways) > 1:
        raise UsageError(f"{' and '.join(ways)} exclude each other.")
    if machine.name in NOT_ON_DEMAND and not ways:
        raise UsageError(
            f"Google sells {machine.name} only as spot, flex-start or from a reservation.",
            hint="--spot: cheap, but may be interrupted. --flex-start: queued until available, for at most 7 days. "
            "--reservation NAME: bought before.",
        )
    if options.fast_network and machine.name not in FABRICS:
        raise UsageError(f"{machine.name} has no fast network.", hint=f"--machine-type: {', '.join(FABRICS)}")
    if options.flex_start and options.compact_placement and not machine.name.startswith(FLEX_START_COMPACT):
        raise UsageError(f"--compact-placement and --flex-start exclude each other for {machine.name}.")
    if options.compact_placement and machine.name.startswith(("e2-", "n1-")):
        raise UsageError(
            f"--compact-placement is not possible with {machine.name}.", hint="For example: g2, a2, a3, c2."
        )


def _check_network(options: GkeOptions) -> None:
    """Check network options. GKE cannot add secondary ranges to a shared network, so its host project must provide
    them."""
    ranges = (options.pods_range, options.services_range)
    if any(ranges) and not options.subnetwork:
        raise UsageError("--pods-range and --services-range need the --subnetwork that has them.")
    owner = re.match(r"projects/([^/]+)/", options.network or options.subnetwork or "")
    if owner and owner[1] != options.project and not (options.subnetwork and all(ranges)):
        raise UsageError(
            f"The project {owner[1]} shares this network: pass its --subnetwork, --pods-range and --services-range.",
            hint=f"gcloud container subnets list-usable --network-project {owner[1]}   lists subnetworks and ranges",
        )


def _check_place(options: GkeOptions) -> None:
    if options.region and options.zone:
        raise UsageError(
            "--region and --zone exclude each other.", hint="For the zone of the workers, use --worker-zone ZONE"
        )
    if options.region and not REGION.fullmatch(options.region):
        raise UsageError(
            f'--region "{options.region}" is not a region.',
            hint="For example europe-west1: gcloud compute regions list",
        )
    named = (*options.worker_zone, *split_zones(options.zones))
    for flag, zone in (("--zone", options.zone), *(("--worker-zone", zone) for zone in named)):
        if zone is not None and not ZONE.fullmatch(zone):
            raise UsageError(
                f'{flag} "{zone}" is not a zone.', hint="For example europe-west1-b: gcloud compute zones list"
            )
    place = place_of(options)
    for zone in named:
        if api.region_of(zone) != api.region_of(place):
            raise UsageError(f"--worker-zone {zone} is in another region than {place}.")
    if len(set(options.worker_zone)) < len(options.worker_zone):
        raise UsageError("A --worker-zone is given twice.")
    if options.compact_placement and len(options.worker_zone) > 1:
        raise UsageError("--compact-placement needs one zone.", hint="Name one --worker-zone.")


def _gke(cluster: Cluster) -> Gke:
    details = GkeDetails.of(cluster)
    location = cluster.location or details.location or place_of(read_options(cluster, GkeOptions))
    return Gke(cluster.account or details.project or api.project_of(None), location)


# --- the plan: parts, prices, and whether Google will allow it ------------------------------------------------------


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
    prices = load_prices("gke")
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
        network = f"{fabric.gbits} Gbit/s of {fabric.name}"
        warnings.append(warn_slow_network(machine.name, network, " (--fast-network)"))
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
        raise make_version_error("GKE", wanted, f"in the channel {options.release_channel} of {gke.location}", short)


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
