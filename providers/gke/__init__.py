"""GKE, Kubernetes on Google Cloud: a zonal or regional cluster, a small system pool, a pool of equal workers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mlbench_cli.errors import CredentialError, NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
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
    split_zones,
)
from providers.cluster_end import describe_hold
from providers.gke import api, orphans
from providers.gke.api import Gke
from providers.gke.compute import Compute
from providers.gke.discovery import discover_clusters
from providers.gke.end import EndLabel, GkeHold
from providers.gke.fabric import NcclInstaller, NetworkObjects
from providers.gke.families import FABRICS, FLEX_START_COMPACT, NOT_ON_DEMAND, FabricKind, fabric_facts
from providers.gke.machines import CPU_DEFAULT, Machine, choose_machine, is_gpu_family
from providers.gke.networks import list_networks
from providers.gke.options import DEFAULT_ZONE, GkeDetails, GkeOptions
from providers.gke.repository import USER, ImageRepository, registry_of
from providers.gke.reservations import parse_reservation
from providers.gke.resources import (
    FLEX_START_LABEL,
    QUEUED_CLASS,
    QUEUED_TOLERATION,
    ControlPlane,
    PoolSize,
    WorkerPool,
    access_to,
    is_queued,
    setup_of,
)
from providers.gpu_probe import NONE, GpuProbe
from providers.machine_checks import check_forced, require_vcpus, settle_gpus
from providers.ready_machines import ReadyMachines
from providers.workloads import OrphanedResource, WorkloadObject

MAX_NODES = 1000
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
    finds_orphans = True

    def new_cluster(self, name: str, nodes: int, options: GkeOptions) -> Cluster:
        """Check all options and return the cluster to create. Calls only read.

        `nodes` is the number of workers, at least 0, divided evenly among the zones. Raises UsageError for conflicting
        options.
        """
        if not 0 <= nodes <= MAX_NODES:
            raise UsageError(f"{nodes} workers: a GKE cluster can have 0 to {MAX_NODES}.")
        options = _with_first_zone(options)
        machine = machine_of(options)
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
        except CredentialError as error:
            if error.hint in (api.LOGIN, api.SET_CLOCK):  # not a missing permission: the credentials are invalid
                raise
        machine = settle_gpus(
            machine,
            told,
            forced=options.gpus_per_node,
            asked=None if machine.name.startswith("n1-") else options.num_gpus,
            is_gpu_family=is_gpu_family(machine.name),
        )
        return replace(cluster, details={**cluster.details, "gpu": machine.gpu, "gpus_per_node": machine.gpus, **arm})

    def plan(self, cluster: Cluster) -> Plan:
        """The plan: what will be created, with prices per hour. Checks quotas with read-only calls."""
        from providers.gke.plan import make_plan

        return make_plan(cluster, read_options(cluster, GkeOptions), _recorded_machine(cluster), _gke(cluster))

    def fill_place(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with a project, which otherwise comes from the credentials."""
        return {**options, "project": options.get("project") or "your-project"}

    def sketch(self, cluster: Cluster) -> Plan:
        """Sizes and prices for users without an account. Makes no calls."""
        from providers.gke.plan import sketch_plan

        return sketch_plan(cluster, read_options(cluster, GkeOptions), _recorded_machine(cluster))

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """The resources in the order of creation: control plane, networks, pool, wait for machines, probe."""
        options = read_options(cluster, GkeOptions)
        machine = _recorded_machine(cluster)
        plane = ControlPlane(cluster, _gke(cluster), options)
        count = ClusterDetails.of(cluster).nodes or 0
        setup = setup_of(cluster)
        networks = list_networks(plane, setup)
        pool = WorkerPool(plane, machine, count, networks)
        found: list[Resource] = [plane, *networks, pool]
        if ClusterDetails.of(cluster).registry_made:
            found.insert(1, ImageRepository(plane))
        if ClusterDetails.of(cluster).expires is not None and count and not options.flex_start:
            found.append(GkeHold(pool, (pool,)))
        kind = FabricKind(setup) if setup in list(FabricKind) else None
        if kind and networks:
            found.append(NetworkObjects(plane, kind, (plane, *networks)))
        probe = None
        if count and not options.flex_start:
            ready = ReadyMachines(plane.access, plane.name, count, machine.gpus, (pool,), plane)
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
        return replace(cluster, details={**cluster.details, "options": options, "location": zone})

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

    def connect(self, cluster: Cluster) -> Access:
        """Connect to the cluster's API with Google's credentials. Raises NotFoundError if the cluster does not
        exist."""
        gke = _gke(cluster)
        try:
            found = gke.call("get_cluster", name=gke.cluster(cluster.name))
        except NotFoundError as error:
            raise NotFoundError(error.message, hint=f"mlbench delete-cluster gke {cluster.name}") from None
        return access_to(found)

    def list_orphans(self, cluster: Cluster, objects: Sequence[WorkloadObject]) -> list[OrphanedResource]:
        """Load balancers and disks that the cluster's workloads have left."""
        return orphans.list_orphans(cluster, objects)

    def orphan_command(self, cluster: Cluster, item: WorkloadObject | None) -> str:
        """The command that finds and deletes the resource of `item`, or any leftovers of the cluster."""
        return orphans.orphan_command(cluster, item)

    def scale(self, cluster: Cluster, nodes: int) -> Sequence[Resource]:
        """The resources that resize the pool to `nodes` machines.

        Raises UsageError with flex-start, or above the maximum size.
        """
        if nodes > MAX_NODES:
            raise UsageError(f"{nodes} workers: a GKE cluster can have at most {MAX_NODES}.")
        options = read_options(cluster, GkeOptions)
        if options.flex_start:
            raise UsageError("With --flex-start, machines come and go with the runs, so there is nothing to scale.")
        machine = _recorded_machine(cluster)
        plane = ControlPlane(cluster, _gke(cluster), options)
        pool = WorkerPool(plane, machine, nodes)
        size = PoolSize(pool, nodes)
        details = ClusterDetails.of(cluster)
        hold = [GkeHold(pool)] if details.expires is not None else []
        size.needs = tuple(hold)
        ready = [ReadyMachines(plane.access, plane.name, nodes, machine.gpus, (size,), plane)] if nodes else []
        return [*hold, size, *ready]


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


def machine_of(options: GkeOptions) -> Machine:
    """The machine type selected by the options.

    Raises UsageError if it has fewer vCPUs or other GPUs than requested.
    """
    machine = choose_machine(options.machine_type, options.num_gpus, options.gpu_type)
    return require_vcpus(machine, options.num_cpus)


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
    check_ranges(options.allow_from)
    check_tags(options.tag, r"[a-z0-9_-]{1,63}", r"[a-z][a-z0-9_-]{0,62}")  # keys of labels begin with a letter
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
