"""EKS, Kubernetes on AWS: CloudFormation stacks of a cluster and of its node groups."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import msgspec

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.kube.access import Access
from mlbench_cli.model.cluster_details import NVIDIA_GPU, ClusterDetails
from mlbench_cli.model.run import Cluster
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
    split_zones,
)
from providers.doctor import Check
from providers.eks import discover
from providers.eks.api import REGION_VARIABLES, access_to, account_of, aws_in, region_of
from providers.eks.discover import check_account, discover_clusters
from providers.eks.options import (
    AL2023,
    BOTTLEROCKET,
    EFA,
    HUGE_PAGES,
    IMAGES,
    NOT_ON_DEMAND,
    EksDetails,
    EksOptions,
    Group,
    Machine,
    choose_machine,
    describe_machine,
    equivalent_types,
    find_machine,
    is_gpu_family,
    require_equivalent,
    require_supported,
    split_subnets,
)
from providers.eks.quota import (
    ask_price,
    check_public_access,
    check_reservation,
    check_subnets,
    check_vcpus,
    check_version,
    find_reservation,
    price_spot,
    zones_for,
)
from providers.eks.resources import (
    CLASS,
    MAX_ZONES,
    ClusterStack,
    EndTag,
    EndTimer,
    ImageRepository,
    NodeStack,
    StorageClass,
    fetch_login,
    timers,
    worker_group,
)
from providers.gpu_probe import NONE, GpuProbe
from providers.kubernetes_calls import DevicePlugin, ReadyMachines
from providers.machines import check_forced, load_prices, machine_of, settle_gpus, warn_slow_network, warn_unchecked
from providers.workloads import OrphanedResource, WorkloadObject

SYSTEM_MACHINES = 2  # so that DNS survives the loss of one
SYSTEM_DISK = 20
SMALLEST_DISK = 20  # GB; the image with the GPU driver alone takes most of it
# AWS' mirror of the base image of task images.
PROBE_IMAGE = "public.ecr.aws/docker/library/python:3.12-slim-bookworm"


class EksProvider(Provider):
    """The provider "eks": a stack for network and control plane, one for the system's machines, one for the workers."""

    name = "eks"
    summary = "Kubernetes on AWS, with or without GPUs; costs money"
    options = EksOptions
    minutes = (17, 12)
    max_nodes = 450  # the quota of machines in one managed node group
    finds_orphans = True

    def new_cluster(self, name: str, nodes: int, options: EksOptions) -> Cluster:
        """Check all options and return the cluster to create. Makes no calls.

        `nodes` is the number of workers, at least 0. Raises UsageError for incompatible machines, disks, versions and
        networks.
        """
        self.check_nodes(nodes)
        machine = machine_of(options, choose_machine)
        require_supported(machine)
        check_forced(options.gpus_per_node)
        if machine.name.startswith(NOT_ON_DEMAND) and not (options.spot or options.capacity_reservation):
            raise UsageError(
                f"AWS does not sell {machine.name} on demand.",
                hint="--spot, or --capacity-reservation cr-… of a Capacity Block for ML: "
                "aws ec2 describe-capacity-block-offerings",
            )
        if not SMALLEST_DISK <= options.disk_size <= 16384:
            raise UsageError(f"--disk-size {options.disk_size}: from {SMALLEST_DISK} to 16384 GB.")
        if options.kubernetes_version and not re.fullmatch(r"1\.\d{2}", options.kubernetes_version):
            raise UsageError(
                f'--kubernetes-version "{options.kubernetes_version}" is not of the form X.Y.',
                hint="EKS chooses the patch: --kubernetes-version 1.34",
            )
        options = _with_first_zone(options)
        _check_network(options, machine)
        region = region_of(options.region, options.zone)
        details = {
            "nodes": nodes,
            "region": region,
            "location": options.zone or region,
            "options": asdict(options),
            "node_selector": {ROLE_LABEL: WORKER},
            **_machine_details(options, machine),
            **registry_details(options.registry),
        }
        return Cluster(name, self.name, "creating", details=details, location=region)

    def describe_machines(self, cluster: Cluster) -> Cluster:
        """The cluster with the GPUs, EFA cards and vCPUs of its machine type, as reported by EC2."""
        options = read_options(cluster, EksOptions)
        machine = _recorded_machine(cluster, options)
        told = describe_machine(aws_in(_region(cluster)), machine)
        machine = settle_gpus(
            told or machine,
            None if told is None else (told.gpu, told.gpus),
            forced=options.gpus_per_node,
            asked=options.num_gpus,
            is_gpu_family=is_gpu_family(machine.name),
        )
        require_supported(machine)
        _require_efa(options, machine)
        return msgspec.structs.replace(cluster, details={**cluster.details, **_machine_details(options, machine)})

    def find_account(self, cluster: Cluster) -> str:
        """The account number of the credentials, from AWS. Raises CredentialError without credentials."""
        return account_of(aws_in(_region(cluster)))

    def plan(self, cluster: Cluster) -> Plan:
        """The plan: what will be created, with prices per hour. Checks quotas with read-only calls."""
        options, groups = read_options(cluster, EksOptions), self.groups(cluster)
        machine = _recorded_machine(cluster, options)
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
            check_public_access(aws, groups)
        # The system's machines are in the zone of the workers.
        zones_for(aws, list(groups[0].types), zone, "--system-machine-type")
        if workers.reservation:  # already granted: vCPU quotas do not apply to blocks
            warnings += check_reservation(
                find_reservation(aws, workers.reservation), workers.types[0], workers.count, options.zone
            )
        else:
            warnings += check_vcpus(aws, groups, machine)
        warnings += _fabric_warnings(options, workers, machine)
        if options.spot and len(workers.types) > 1:
            warnings.append(f"You may get any of these machines, of one type or mixed: {', '.join(workers.types)}.")
        workers_line = price_spot(aws, workers, zone)
        return _price(groups, aws.region, zone, warnings, workers_line, is_given=bool(given), ask=True)

    def fill_place(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with a region, which otherwise comes from environment or profile."""
        if options.get("region") or options.get("zone") or any(os.environ.get(name) for name in REGION_VARIABLES):
            return dict(options)
        return {**options, "region": "us-east-1"}

    def sketch(self, cluster: Cluster) -> Plan:
        """Sizes and prices for users without an account. Makes no calls."""
        options, groups = read_options(cluster, EksOptions), self.groups(cluster)
        machine = _recorded_machine(cluster, options)
        workers = groups[1]
        line = None
        if workers.spot:
            line = PlanLine(f"worker {workers.types[0]} (spot)", workers.count, None)
        warnings = [warn_unchecked("aws configure or aws sso login"), *_fabric_warnings(options, workers, machine)]
        zone = options.zone or cluster.location
        return _price(groups, cluster.location, zone, warnings, line, is_given=bool(options.subnets))

    def groups(self, cluster: Cluster) -> tuple[Group, Group]:
        """The groups of system machines and workers."""
        options = read_options(cluster, EksOptions)
        machine = _recorded_machine(cluster, options)
        types = require_equivalent(machine, options.spot_type) if options.spot_type else equivalent_types(machine)
        system = Group(
            f"{cluster.name}-system",
            (options.system_machine_type,),
            SYSTEM_MACHINES,
            SYSTEM_DISK,
            worker=False,
            private=options.private_nodes,
        )
        workers = Group(
            worker_group(cluster),
            tuple(types) if options.spot and not options.efa else (machine.name,),
            ClusterDetails.of(cluster).nodes or 0,
            options.disk_size,
            gpu=machine.gpu is not None,
            spot=options.spot,
            zone=options.zone,
            zones=split_zones(options.zones),
            reservation=options.capacity_reservation,
            private=_private(options, machine),
            efa=options.efa,
            system=options.node_image,
        )
        return system, workers

    def resources(self, cluster: Cluster) -> Sequence[Resource]:
        """The resources in the order of creation: the cluster's stack, those of its machines, device plugins."""
        options = read_options(cluster, EksOptions)
        machine = _recorded_machine(cluster, options)
        system, workers = self.groups(cluster)
        plane = self._plane(cluster)
        base, working = NodeStack(plane, system), NodeStack(plane, workers, machine if options.efa else None)
        found: list[Resource] = [plane, base, working]
        # A cluster of which only the name is known may have any of the optional resources.
        if ClusterDetails.of(cluster).registry_made or not cluster.details:
            found.append(ImageRepository(plane))
        if not options.no_volumes:
            found.append(StorageClass(plane.access, f"{plane.name}/{CLASS}", (plane,), plane))
        found += timers(ClusterDetails.of(cluster), [base, working])
        if not workers.count:
            return found
        details = ClusterDetails.of(cluster)
        gpus, cards = details.gpus_per_node or 0, details.devices_per_node.get(EFA, 0)
        needs: list[Resource] = [working]
        if gpus and options.node_image != BOTTLEROCKET:
            needs.append(DevicePlugin(plane.access, "GPU", "nvidia-device-plugin", (plane, working), working))
        if cards:
            needs.append(DevicePlugin(plane.access, "EFA", "efa-device-plugin", (plane, working), working))
        devices = {NVIDIA_GPU: gpus, EFA: cards}
        ready = ReadyMachines(plane.access, plane.name, workers.count, devices, needs, working)
        found += [*needs[1:], ready]
        if gpus and options.probe_image != NONE:
            found.append(GpuProbe(plane.access, options.probe_image or PROBE_IMAGE, gpus, (ready,), working))
        return found

    def list_zones(self, cluster: Cluster) -> Sequence[str]:
        """The zones of --zones."""
        return split_zones(read_options(cluster, EksOptions).zones)

    def place_workers(self, cluster: Cluster, zone: str) -> Cluster:
        """The cluster with its node group in `zone`; network and control plane are unchanged."""
        options = {**ClusterDetails.of(cluster).options, "zone": zone}
        return msgspec.structs.replace(cluster, details={**cluster.details, "options": options, "location": zone})

    def fetch_registry_login(self, cluster: Cluster) -> tuple[str, str]:
        """The login for ECR, valid for twelve hours."""
        return fetch_login(aws_in(_region(cluster)))

    def extend(self, cluster: Cluster) -> Sequence[Resource]:
        """The resources that store the cluster's expiry: the tag and a timer per node group, to be updated."""
        plane, groups = self._plane(cluster), self.groups(cluster)
        expires = ClusterDetails.of(cluster).expires or 0
        return [EndTag(plane), *(EndTimer(NodeStack(plane, group), expires, ()) for group in groups)]

    def describe_end(self, cluster: Cluster) -> str:
        """Describe what AWS removes by itself at the expiry, and what remains and costs money."""
        has_gateway = self.groups(cluster)[1].private and not read_options(cluster, EksOptions).subnets
        gateway = " and NAT gateway" if has_gateway else ""
        price = ClusterDetails.of(cluster).describe_rest("system machine ", "GB of disk", "public address")
        return (
            f"Then AWS terminates the machines. The control plane{gateway} will remain{price} until mlbench gc "
            "--expired or mlbench delete-cluster."
        )

    def discover(self, scope: Mapping[str, str]) -> list[Cluster]:
        """Find the clusters with our tag in the region of `scope["location"]`, or in all regions in use."""
        return discover_clusters(scope.get("location"))

    def check_account(self, project: str | None, location: str | None) -> Iterator[Check]:
        """The lines of `mlbench doctor eks`."""
        return check_account(project, location)

    def connect(self, cluster: Cluster) -> Access:
        """Connect to the cluster's API with a token of the caller's AWS identity.

        Raises NotFoundError if it does not exist.
        """
        return access_to(aws_in(_region(cluster)), cluster.name)

    def list_orphans(self, cluster: Cluster, objects: Sequence[WorkloadObject]) -> list[OrphanedResource]:
        """Load balancers and disks that the cluster's workloads have left."""
        return discover.list_orphans(cluster, objects)

    def orphan_command(self, cluster: Cluster, item: WorkloadObject | None) -> str:
        """The command that finds and deletes the resource of `item`, or any leftovers of the cluster."""
        return discover.orphan_command(cluster, item)

    def _plane(self, cluster: Cluster) -> ClusterStack:
        _, workers = self.groups(cluster)
        return ClusterStack(cluster, aws_in(_region(cluster)), read_options(cluster, EksOptions), workers)


def _machine_details(options: EksOptions, machine: Machine) -> dict[str, object]:
    """The workers' machine details for the record and for runs."""
    details: dict[str, object] = {
        "gpus_per_node": machine.gpus,
        "gpu": machine.gpu,
        "machine_type": machine.name,
        "arm": False,  # `find_machine` rejects such types
        "machine": asdict(machine),
    }
    if machine.fabric_gbits:
        details["fabric"] = {"name": "EFA", "gbits": machine.fabric_gbits}
    if options.efa:
        # The image with EFA's driver has 5,128 of these pages; NCCL's plugin uses them for its buffers.
        pages = {HUGE_PAGES: 5120 << 20} if options.node_image == AL2023 else {}
        details["devices_per_node"] = {EFA: machine.efa, **pages}
    return details


def _recorded_machine(cluster: Cluster, options: EksOptions) -> Machine:
    """The workers' machine as recorded when the cluster was planned; for older records, from today's table."""
    facts = EksDetails.of(cluster).machine
    known = {item.name for item in fields(Machine)}
    return (
        Machine(**{key: facts[key] for key in known & set(facts)})
        if "name" in facts
        else machine_of(options, choose_machine)
    )


def _require_efa(options: EksOptions, machine: Machine) -> None:
    if options.efa and not machine.efa:
        raise UsageError(
            f"{machine.name} has no EFA network interface.",
            hint="Remove --efa, or choose a larger machine, e.g. g5.8xlarge or p4d.24xlarge.",
        )


def _with_first_zone(options: EksOptions) -> EksOptions:
    """The options with the workers in the first of --zones."""
    zones = split_zones(options.zones)
    if not zones:
        return options
    if options.zone or options.capacity_reservation:
        other = "--zone" if options.zone else "--capacity-reservation"
        raise UsageError(f"--zones and {other} exclude each other: {other} is in one zone.")
    if len(zones) > MAX_ZONES:
        raise UsageError(f"--zones names {len(zones)} zones: the network of a cluster can have at most {MAX_ZONES}.")
    return replace(options, zone=zones[0])


def _check_network(options: EksOptions, machine: Machine) -> None:
    if machine.gpus or not is_gpu_family(machine.name):  # of others EC2 is asked
        _require_efa(options, machine)
    if options.node_image not in IMAGES:
        raise UsageError(
            f'--node-image "{options.node_image}" is not one of {", ".join(IMAGES)}.'
            f"{did_you_mean(options.node_image, list(IMAGES))}"
        )
    if options.capacity_reservation and not re.fullmatch(r"cr-[0-9a-f]{8,17}", options.capacity_reservation):
        raise UsageError(
            f'--capacity-reservation "{options.capacity_reservation}" is not the ID of one.',
            hint="For example cr-0123456789abcdef0: aws ec2 describe-capacity-reservations",
        )
    if options.capacity_reservation and options.spot:
        raise UsageError("--capacity-reservation and --spot exclude each other.")
    if options.capacity_reservation and options.placement_group:
        raise UsageError(
            "--capacity-reservation and --placement-group exclude each other: machines of a reservation are close to "
            "each other if it was made so.",
            hint="Leave out --placement-group.",
        )
    if options.capacity_reservation and not options.zone:
        raise UsageError(
            "--capacity-reservation needs its --zone.",
            hint="aws ec2 describe-capacity-reservations   shows the zone",
        )
    if options.spot_type and not options.spot:
        raise UsageError("--spot-type needs --spot: other machines have only one type.")
    if options.spot_type and options.efa:
        raise UsageError("--efa needs machines of a single type.")
    if options.spot_type:
        require_equivalent(machine, options.spot_type)
    if find_machine(options.system_machine_type).gpu:
        raise UsageError("--system-machine-type: system pods need no GPU.")
    for arn in options.admin:
        if not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:(user|role)/.+", arn):
            raise UsageError(
                f'--admin "{arn}" is not the ARN of a user or role.', hint="aws sts get-caller-identity shows yours"
            )
    split_subnets(options.subnets)
    if options.zones and options.subnets:
        raise UsageError("--zones and --subnets exclude each other: the workers are in the first subnet, or in --zone.")
    boundary = options.permissions_boundary
    if boundary and not re.fullmatch(r"arn:aws[a-z-]*:iam::(\d{12}|aws):policy/.+", boundary):
        raise UsageError(
            f'--permissions-boundary "{boundary}" is not the ARN of a policy.',
            hint="For example arn:aws:iam::123456789012:policy/boundary: aws iam list-policies --scope Local",
        )
    check_ranges(options.allow_from, is_public=True)
    check_tags(options.tag, r"[\w .:/+@-]{1,128}", r"[\w .:/=+@-]{0,256}", "aws:")


def _private(options: EksOptions, machine: Machine) -> bool:
    """Whether machines are private, also because EC2 assigns no public address to machines with several interfaces."""
    return options.private_nodes or (options.efa and machine.efa > 1)


def _region(cluster: Cluster) -> str:
    return cluster.location or ClusterDetails.of(cluster).region or region_of(None)


# --- the plan: parts, prices, and whether AWS will allow it ---------------------------------------------------------


EFA_WARNING = (
    "--efa: every worker of a run gets its machine's EFA cards; only an image with libfabric and NCCL's plugin for it "
    "uses them (mlbench images push --base efa); all others go over TCP, and results are labeled slow_network."
)


def _fabric_warnings(options: EksOptions, workers: Group, machine: Machine) -> list[str]:
    """What to know of the machines' fast network before money is spent."""
    if options.efa:
        return [EFA_WARNING]
    gbits = machine.fabric_gbits
    if not gbits or workers.count < 2:
        return []
    return [warn_slow_network(workers.types[0], f"{gbits} Gbit/s of EFA", " (--efa)")]


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
    prices = load_prices("eks")
    if ask:
        machines = [system.types[0], *([] if workers_line else [workers.types[0]])]
        asked = dict.fromkeys((machine, False) for machine in machines)
        prices = prices.ask_missing(list(asked), region, lambda machine, spot: ask_price(machine, region))
    if workers_line and workers_line.price is None:
        workers_line = prices.line(workers_line.what, workers.count, workers.types[0], region, spot=True)
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
