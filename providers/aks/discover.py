"""Finds AKS clusters by the tags of their resource groups, also those created on other machines."""

import time
from dataclasses import replace

from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import timestamp
from providers.aks.api import Azure
from providers.aks.errors import Message
from providers.aks.options import FABRICS, MACHINES
from providers.aks.repository import IMAGES_SUFFIX, registry_of
from providers.aks.resources import CREATED_TAG, SPOT_TOLERATION, WORKER_POOL, group_of, state_of
from providers.base import AUTO, CLUSTER_TAG, KEPT_TAG, ROLE_LABEL, WORKER, details_from_tags, registry_details

YOUNG_SECONDS = 900.0  # within which the cluster of a new group appears
STATES = {"Creating": "creating", "Deleting": "deleting", "Failed": "failed", "Canceled": "failed"}


def discover_clusters(subscription: str, location: str | None) -> list[Cluster]:
    """All clusters of a subscription, in one region or everywhere, including groups without a cluster (yet)."""
    azure = Azure(subscription, location or "")
    wanted = f"tagName eq '{CLUSTER_TAG}'".replace(" ", "%20").replace("'", "%27")
    groups = azure.list_all(f"{azure.root}/resourcegroups?$filter={wanted}", "list resource groups")
    path = f"{azure.root}/providers/Microsoft.ContainerService/managedClusters"
    planes = {_place_of(item): item for item in azure.list_all(path, "list clusters")} if groups else {}
    found = []
    there = {str(group["name"]).lower() for group in groups}
    for group in groups:
        name = (group.get("tags") or {}).get(CLUSTER_TAG, "")
        own = group_of(name, group["location"]).lower()
        # The cluster expired or was deleted elsewhere, but its registry still costs money.
        left = group["name"].lower() == f"{own}{IMAGES_SUFFIX}" and own not in there
        if left and KEPT_TAG not in (group.get("tags") or {}) and location in (None, group["location"]):
            found.append(_remains(group, name, subscription))
            continue
        # AKS' group for the machines may have inherited the tags.
        if group["name"].lower() != group_of(name, group["location"]).lower():
            continue
        if location in (None, group["location"]):
            found.append(_cluster(group, name, planes.get((group["name"].lower(), name)), subscription))
    return found


def _remains(group: Message, name: str, subscription: str) -> Cluster:
    """A deleted cluster with a remaining image registry."""
    region = str(group["location"])
    cluster = _cluster(group, name, None, subscription)
    details = {**cluster.details, **registry_details(AUTO, registry_of(subscription, region, name))}
    return replace(cluster, state="failed", details=details)


def _place_of(plane: Message) -> tuple[str, str]:
    """Resource group, in lowercase because Azure is inconsistent, and name."""
    parts = str(plane["id"]).split("/")
    return parts[4].lower(), str(plane["name"])


def _cluster(group: Message, name: str, plane: Message | None, subscription: str) -> Cluster:
    tags, region = group.get("tags") or {}, str(group["location"])
    created = int(tags[CREATED_TAG]) if tags.get(CREATED_TAG, "").isdecimal() else 0
    options: Message = {"region": region, "subscription": subscription}
    details: Message = {
        "subscription": subscription,
        "location": region,
        "nodes": 0,
        "gpus_per_node": 0,
        "options": options,
        **details_from_tags(tags),
    }
    if plane is None:
        state = "creating" if time.time() - created < YOUNG_SECONDS else "failed"
    else:
        state = _read_plane(plane, details, options)
    if state_of(group) == "Deleting":
        state = "deleting"
    return Cluster(name, "aks", state, timestamp(created) if created else "", details, subscription, region)


def _read_plane(plane: Message, details: Message, options: Message) -> str:
    """The state of the cluster; what is known of its workers goes into `details` and `options`."""
    state = STATES.get(state_of(plane), "ready")
    pools = (plane.get("properties") or {}).get("agentPoolProfiles") or []
    pool = next((item for item in pools if item["name"] == WORKER_POOL), None)
    if pool is None:
        return "failed" if state == "ready" else state
    sizes = {size.lower(): machine for size, machine in MACHINES.items()}
    machine = sizes.get(str(pool["vmSize"]).lower())
    details["nodes"] = int(pool.get("count") or 0)
    details["node_selector"] = {ROLE_LABEL: WORKER}
    details["machine_type"] = options["machine_type"] = machine.name if machine else pool["vmSize"]
    details["gpu"], details["gpus_per_node"] = (machine.gpu, machine.gpus) if machine else (None, 0)
    options["spot"] = pool.get("scaleSetPriority") == "Spot"
    options["compact_placement"] = bool(pool.get("proximityPlacementGroupID"))
    if options["spot"]:
        details["tolerations"] = [SPOT_TOLERATION]
    if fabric := FABRICS.get(details["machine_type"]):
        details["fabric"] = {"name": fabric.name, "gbits": fabric.gbits}
    if zones := pool.get("availabilityZones"):
        details["location"] = f"{details['location']}-{zones[0]}"
    pool_state = STATES.get(str(pool.get("provisioningState")), "ready")
    return pool_state if state == "ready" else state
