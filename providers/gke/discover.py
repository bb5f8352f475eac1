"""What there is in a project: mlbench's clusters, also those created on other machines, what workloads have left there,
and whether a cluster can be created (`mlbench doctor gke`).
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from msgspec.structs import replace

from mlbench_cli.errors import CredentialError, NotFoundError
from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import parse_timestamp
from providers import doctor, machines
from providers.base import (
    AUTO,
    CLUSTER_TAG,
    FABRIC_TAG,
    ROLE_LABEL,
    WORKER,
    PartialSearchError,
    details_from_tags,
    registry_details,
)
from providers.doctor import Check, Checklist, Topic, load_policy
from providers.gke import api
from providers.gke.api import Gke, Message, Project, region_of
from providers.gke.options import DEFAULT_ZONE, FabricKind, GkeDetails, fabric_facts
from providers.gke.quota import ALL_GPUS, QUOTA_OF, Compute
from providers.gke.resources import (
    LOCATION_TAG,
    WORKER_POOL,
    NetworkMark,
    find_marks,
    list_repositories,
    node_account,
    registry_of,
)
from providers.machines import Quota
from providers.workloads import OrphanedResource, WorkloadObject

YOUNG_SECONDS = 900.0  # within which a cluster appears after its networks
STATES = {"PROVISIONING": "creating", "STOPPING": "deleting", "ERROR": "failed"}


def discover_clusters(project: str, location: str) -> list[Cluster]:
    """All clusters of a project, in one location or everywhere ("-"), including those of which only networks remain.

    Raises PartialSearchError if a zone does not respond.
    """
    answer = Gke(project, location).call("list_clusters", parent=f"projects/{project}/locations/{location}")
    found = [_cluster(item, project) for item in answer.clusters if item.resource_labels.get(CLUSTER_TAG) == item.name]
    if answer.missing_zones:  # clusters there may own networks that seem to have none
        missing = ", ".join(answer.missing_zones)
        raise PartialSearchError(f"Google did not answer for {missing}, so clusters there are unknown.", found)
    # Also clusters of others: a network has the name of a cluster that mlbench created, or was about to create.
    there = {(item.name, item.location) for item in answer.clusters}
    try:
        repositories = list_repositories(project)
    except CredentialError as error:
        remains = list(_list_remains(project, location, there, []))
        raise PartialSearchError(
            f"Image repositories of deleted clusters, which roles/artifactregistry.reader shows, are unknown: "
            f"{error.message}",
            [*found, *remains],
        ) from None
    return [*found, *_list_remains(project, location, there, repositories)]


def _list_remains(
    project: str, location: str, there: set[tuple[str, str]], repositories: Sequence[Message]
) -> Iterator[Cluster]:
    """Clusters that do not exist, found by their remaining (or not yet used) networks and image repositories."""
    listed: set[tuple[str, str]] = set()
    for found in repositories:
        tags = found["labels"]
        identity = name, place = tags[CLUSTER_TAG], tags.get(LOCATION_TAG) or str(found["name"]).split("/")[3]
        if identity in there | listed or location not in ("-", place):
            continue
        listed.add(identity)
        details = {**details_from_tags(tags), **registry_details(AUTO, registry_of(project, place, name))}
        remains = _remains(name, project, place, details, registry=AUTO)
        yield replace(remains, created=str(found.get("createTime") or ""))
    for mark in find_marks(project):
        identity = name, place = mark.tags[CLUSTER_TAG], mark.tags.get(LOCATION_TAG, "")
        if identity in there | listed or location not in ("-", place):
            continue
        listed.add(identity)
        remains = _remains(name, project, place, details_from_tags(mark.tags), fast_network=True)
        yield replace(remains, state="creating" if _is_young(mark) else "failed", created=mark.created)


def _remains(name: str, project: str, place: str, details: Mapping[str, object], **options: object) -> Cluster:
    """The record of a cluster of which only other resources are found, with what they tell."""
    located = {"region" if region_of(place) == place else "zone": place, "project": project, **options}
    known = {"project": project, "location": place, "nodes": 0, "options": located, **details}
    return Cluster(name, "gke", "failed", details=known, account=project, location=place)


def _is_young(mark: NetworkMark) -> bool:
    """Whether the network is so new that its cluster may still be being created."""
    try:
        return time.time() - parse_timestamp(mark.created) < YOUNG_SECONDS
    except ValueError:
        return False


def _cluster(found: Any, project: str) -> Cluster:
    pool = next((pool for pool in found.node_pools if pool.name == WORKER_POOL), None)
    place = "region" if region_of(found.location) == found.location else "zone"
    options: dict[str, Any] = {place: found.location, "project": project}
    details: dict[str, Any] = {
        "project": project,
        "location": found.location,
        "nodes": 0,
        "gpus_per_node": 0,
        "options": options,
        **details_from_tags(found.resource_labels),
    }
    state = STATES.get(found.status.name, "ready")
    if pool is None:
        state = "failed" if state == "ready" else state
    else:
        accelerator = pool.config.accelerators[0] if pool.config.accelerators else None
        options["worker_zone"] = tuple(pool.locations)
        system = sum(other.initial_node_count for other in found.node_pools if other.name != WORKER_POOL)
        details["nodes"] = max(0, found.current_node_count - system)
        details["node_selector"] = {ROLE_LABEL: WORKER}
        details["gpu"] = accelerator.accelerator_type if accelerator else None
        details["gpus_per_node"] = int(accelerator.accelerator_count) if accelerator else 0
        details["machine_type"] = options["machine_type"] = pool.config.machine_type
        options["spot"] = bool(pool.config.spot)
        setup = found.resource_labels.get(FABRIC_TAG)
        options["fast_network"] = bool(setup)
        details["fabric"] = fabric_facts(pool.config.machine_type, setup)
        if pool.status.name in ("ERROR", "RUNNING_WITH_ERROR"):
            state = "failed"
    return Cluster(found.name, "gke", state, found.create_time, details, project, found.location)


# --- disks, load balancers and networks that workloads or GKE have left ---------------------------------------------


BALANCER_RULE, MACHINE_TAG = "k8s-fw-", r"gke-(.+)-[0-9a-f]{8}-node"  # names of firewall rules, tags of machines
LABEL, PLACE_LABEL = "goog-k8s-cluster-name", "goog-k8s-cluster-location"  # labels of disks


def list_orphans(cluster: Cluster, objects: Sequence[WorkloadObject]) -> list[OrphanedResource]:
    """The resources that still exist. Raises MlbenchError if Google cannot be asked."""
    compute = Compute(_project(cluster))
    orphans = []
    paths = {item.handle.partition("/zones/")[2] for item in objects if item.kind == "PersistentVolume"}
    for disk in [
        *_list_labeled_disks(compute, cluster),
        *(_find_disk(compute, f"/zones/{path}") for path in paths if path),
    ]:
        if disk is not None:
            zone = str(disk["zone"]).rpartition("/")[2]
            remove = f"gcloud compute disks delete {disk['name']} --zone {zone} --project {_project(cluster)}"
            orphans.append(
                OrphanedResource("disk", str(disk["name"]), f"{disk.get('sizeGb')} GB, {disk.get('status')}", remove)
            )
    if GkeDetails.of(cluster).fabric.get("setup") == FabricKind.GIB:
        orphans += _list_gke_networks(compute, cluster)
    named = [name for name, owner in list_balancers(_project(cluster)).items() if owner == cluster.name]
    for name in named:
        orphans += _list_forwarding_rules(compute, cluster, "name", name)
    for address in {item.handle for item in objects if item.kind != "PersistentVolume" and item.handle}:
        orphans += _list_forwarding_rules(compute, cluster, "IPAddress", address)
    return list({(item.kind, item.name): item for item in orphans}.values())


def orphan_command(cluster: Cluster, item: WorkloadObject | None) -> str:
    """The `gcloud` command that deletes the disk or finds the load balancer; without an item, lists all candidates."""
    project = _project(cluster)
    if item is not None and item.kind == "PersistentVolume" and "/zones/" in item.handle:
        zone, _, disk = item.handle.partition("/zones/")[2].partition("/disks/")
        return f"gcloud compute disks delete {disk} --zone {zone} --project {project}"
    if item is not None and item.handle:
        return f"gcloud compute forwarding-rules list --project {project} --filter IPAddress={item.handle}"
    return (
        f"gcloud compute disks list --project {project} --filter labels.{LABEL}={cluster.name}; "
        f"gcloud compute forwarding-rules list --project {project}"
    )


def _list_labeled_disks(compute: Compute, cluster: Cluster) -> list[dict[str, Any]]:
    """Disks in all zones (a regional cluster has machines in several), but not those of a cluster with the same name
    elsewhere."""
    wanted = f"(labels.{LABEL}={cluster.name}) (labels.{PLACE_LABEL}={_location(cluster)})"
    zones = [page.get("items") or {} for page in compute.pages(f"/aggregated/disks?filter={quote(wanted)}")]
    return [disk for page in zones for found in page.values() for disk in found.get("disks") or ()]


def _list_gke_networks(compute: Compute, cluster: Cluster) -> list[OrphanedResource]:
    """RDMA networks that GKE created for the cluster and did not delete with it.

    Only those newer than the cluster, because a user's network may have such a name.
    """
    wanted = quote(f'name eq "gke-{cluster.name}-.*"')
    orphans = []
    for found in compute.list_all(f"/global/networks?filter={wanted}"):
        if cluster.created and parse_timestamp(str(found["creationTimestamp"])) < parse_timestamp(cluster.created):
            continue
        remove = f"gcloud compute networks delete {found['name']} --project {_project(cluster)}"
        reason = "GKE created it and has not deleted it; it is free, but counts toward the quota NETWORKS"
        orphans.append(OrphanedResource("network", str(found["name"]), reason, remove))
    return orphans


def _find_disk(compute: Compute, path: str) -> dict[str, object] | None:
    try:
        return compute.get(path)
    except NotFoundError:
        return None


def list_balancers(project: str) -> dict[str, str]:
    """Names of Services' load balancers -> names of their clusters.

    Their parts have no labels, but a firewall rule has both names: in its own name and in the machines' tag. It
    outlives the cluster. Source: docs/development/clouds-assumptions.md.
    """
    wanted = quote(f'name eq "{BALANCER_RULE}.*"')
    rules = Compute(project).list_all(f"/global/firewalls?filter={wanted}")
    marks = {str(rule["name"]): re.fullmatch(MACHINE_TAG, tag) for rule in rules for tag in rule.get("targetTags", ())}
    return {name.removeprefix(BALANCER_RULE): mark[1] for name, mark in marks.items() if mark}


def _list_forwarding_rules(compute: Compute, cluster: Cluster, key: str, value: str) -> list[OrphanedResource]:
    """Forwarding rules: the part of a load balancer that has an address and costs money."""
    region = api.region_of(_location(cluster))
    orphans = []
    for place, flag in ((f"/regions/{region}", f"--region {region}"), ("/global", "--global")):
        for rule in compute.list_all(f"{place}/forwardingRules?filter={quote(f'{key}={value}')}"):
            remove = f"gcloud compute forwarding-rules delete {rule['name']} {flag} --project {_project(cluster)}"
            orphans.append(
                OrphanedResource("load balancer", str(rule["name"]), str(rule.get("IPAddress") or value), remove)
            )
    return orphans


def _project(cluster: Cluster) -> str:
    return cluster.account or GkeDetails.of(cluster).project or api.project_of(None)


def _location(cluster: Cluster) -> str:
    return cluster.location or GkeDetails.of(cluster).location or ""


# --- mlbench doctor gke -----------------------------------------------------------------------------------------------

# Roles with which machines can pull from the project's registries and write logs: GKE's own, and the one that older
# organizations grant automatically.
NODE_ROLES = {"roles/container.defaultNodeServiceAccount", "roles/editor", "roles/owner"}
# Quotas that every cluster uses, in addition to those of GPUs.
COMMON_QUOTAS = ("CPUS", "IN_USE_ADDRESSES", "SSD_TOTAL_GB")


def check_account(project: str | None, location: str | None) -> Iterator[Check]:
    """Check library, credentials, both APIs, permissions, quotas and prices, in this order; yields one line per check.

    Stops at the first failed check on which the next ones depend. Read-only.
    """
    checklist = Checklist("gke")
    yield (found := doctor.check_library(checklist, "google-cloud-container", "2.65", "gke"))
    if found.state == "failed":
        return
    zone = location or DEFAULT_ZONE
    name = yield from checklist.ask(Topic.CREDENTIALS, lambda: _signed_in(project))
    if name is None:
        return
    yield checklist.result(Topic.CREDENTIALS, f"{_kind()}, project {name}")
    gke = Gke(name, zone)
    wanted = load_policy("gke")["includedPermissions"]
    granted = yield from checklist.ask(Topic.RIGHTS, lambda: Project(gke).list_granted(wanted), optional=True)
    if granted is not None:
        denied = [right for right in wanted if right not in granted]
        yield checklist.rights(denied, f"IAM grants all {len(wanted)} permissions", "IAM would deny")
    yield from _check_node_account(checklist, gke)
    yield from _cluster_manager(checklist, gke)
    yield from _compute(checklist, Compute(name), zone)
    yield from machines.check_prices(checklist, "gke", api.region_of(zone))
    yield doctor.check_program(checklist, "gcloud")


def _signed_in(project: str | None) -> str:
    """The project, after obtaining a token with the credentials."""
    name = api.project_of(project)
    api.token()()
    return name


def _kind() -> str:
    found = api.credentials()[0]
    account = getattr(found, "service_account_email", None) or getattr(found, "account", None)
    return f"{type(found).__module__.rpartition('.')[2].replace('_', ' ')}{f' {account}' if account else ''}"


def _check_node_account(checklist: Checklist, gke: Gke) -> Iterator[Check]:
    """Check that the machines' default account has a role for pulling images and writing logs."""
    project = Project(gke)
    policy = yield from checklist.ask("default node account", project.read_policy, optional=True)
    if policy is None:
        return
    account = node_account(gke, None)
    member = f"serviceAccount:{account}"
    roles = {item["role"] for item in policy.get("bindings", []) if member in item["members"]}
    enough = sorted(roles & NODE_ROLES)
    hint = (
        f"gcloud projects add-iam-policy-binding {gke.project} --member {member} --role "
        "roles/container.defaultNodeServiceAccount   or --service-account of another; --registry auto lets it pull"
    )
    found = f"{account} has {', '.join(enough)}" if enough else f"{account} has no node role"
    yield checklist.result("default node account", found, None if enough else hint, missing=not enough, optional=True)


def _cluster_manager(checklist: Checklist, gke: Gke) -> Iterator[Check]:
    """container.googleapis.com: whether it is enabled and allowed, its Kubernetes versions, and mlbench's clusters."""
    config = yield from checklist.ask(Topic.API, lambda: gke.call("get_server_config", name=gke.parent), of="container")
    if config is None:
        return
    yield checklist.result(Topic.API, f"enabled and responding for {gke.location}", of="container")
    yield checklist.result(Topic.KUBERNETES, _versions(config))
    yield from doctor.check_clusters(checklist, lambda: discover_clusters(gke.project, "-"))


def _versions(config: Any) -> str:
    regular = next((item for item in config.channels if item.channel.name == "REGULAR"), None)
    valid = list(regular.valid_versions if regular is not None else config.valid_master_versions)
    default = (regular.default_version if regular is not None else "") or config.default_cluster_version
    versions = ", ".join(dict.fromkeys(".".join(version.split(".")[:2]) for version in valid))
    return f"{versions} in the channel regular{f', {default} by default' if default else ''}"


def _compute(checklist: Checklist, compute: Compute, place: str) -> Iterator[Check]:
    """compute.googleapis.com: whether it is enabled, the GPUs of the zone, and remaining quotas."""
    quotas = yield from checklist.ask(Topic.API, lambda: compute.quotas(api.region_of(place)), of="compute")
    if quotas is None:
        return
    yield checklist.result(Topic.API, "enabled", of="compute")
    yield doctor.check_clock(checklist, compute.date, compute.asked)
    zone = yield from checklist.ask(Topic.GPUS, lambda: compute.gpus(place), optional=True)
    if zone is not None:
        yield checklist.result(Topic.GPUS, f"in {place}: {', '.join(zone) or 'none'}", missing=not zone)
    yield from _quotas(checklist, compute.project, quotas)


def _quotas(checklist: Checklist, project: str, quotas: dict[str, Quota]) -> Iterator[Check]:
    gpus = [name for name in QUOTA_OF.values() if name in quotas]
    names = [*COMMON_QUOTAS, ALL_GPUS, *gpus, *(f"PREEMPTIBLE_{name}" for name in gpus)]
    known = [quotas[name] for name in names if name in quotas]
    yield from machines.check_quotas(checklist, known, f"Ask for more at {api.QUOTAS}{project}")
    if not gpus:
        hint = f"A request for GPUs may still fail: {api.QUOTAS}{project}"
        yield checklist.result(Topic.QUOTA, "the project has none", hint, of="of GPUs", missing=True)
