"""Finds disks and load balancers left by a cluster's workloads, and networks left by GKE."""

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import parse_timestamp
from providers.gke import api
from providers.gke.compute import Compute
from providers.gke.families import FabricKind
from providers.gke.options import GkeDetails
from providers.workloads import OrphanedResource, WorkloadObject

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
    zones = compute.get(f"/aggregated/disks?filter={quote(wanted)}").get("items") or {}
    return [disk for found in zones.values() for disk in found.get("disks") or ()]


def _list_gke_networks(compute: Compute, cluster: Cluster) -> list[OrphanedResource]:
    """RDMA networks that GKE created for the cluster and did not delete with it.

    Only those newer than the cluster, because a user's network may have such a name.
    """
    wanted = quote(f'name eq "gke-{cluster.name}-.*"')
    orphans = []
    for found in compute.get(f"/global/networks?filter={wanted}").get("items") or ():
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
    outlives the cluster. Source: docs/clouds-assumptions.md.
    """
    wanted = quote(f'name eq "{BALANCER_RULE}.*"')
    rules = Compute(project).get(f"/global/firewalls?filter={wanted}").get("items") or ()
    marks = {str(rule["name"]): re.fullmatch(MACHINE_TAG, tag) for rule in rules for tag in rule.get("targetTags", ())}
    return {name.removeprefix(BALANCER_RULE): mark[1] for name, mark in marks.items() if mark}


def _list_forwarding_rules(compute: Compute, cluster: Cluster, key: str, value: str) -> list[OrphanedResource]:
    """Forwarding rules: the part of a load balancer that has an address and costs money."""
    region = api.region_of(_location(cluster))
    orphans = []
    for place, flag in ((f"/regions/{region}", f"--region {region}"), ("/global", "--global")):
        rules = compute.get(f"{place}/forwardingRules?filter={quote(f'{key}={value}')}")
        for rule in rules.get("items") or ():
            remove = f"gcloud compute forwarding-rules delete {rule['name']} {flag} --project {_project(cluster)}"
            orphans.append(
                OrphanedResource("load balancer", str(rule["name"]), str(rule.get("IPAddress") or value), remove)
            )
    return orphans


def _project(cluster: Cluster) -> str:
    return cluster.account or GkeDetails.of(cluster).project or api.project_of(None)


def _location(cluster: Cluster) -> str:
    return cluster.location or GkeDetails.of(cluster).location or ""
