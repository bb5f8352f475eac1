"""Finds GKE clusters with mlbench's tags, also those created on other machines."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlbench_cli.errors import CredentialError
from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import parse_timestamp
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
from providers.gke.api import Gke, Message, region_of
from providers.gke.families import fabric_facts
from providers.gke.networks import LOCATION_TAG, NetworkMark, find_marks
from providers.gke.repository import list_repositories, registry_of
from providers.gke.resources import WORKER_POOL

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
            f"Image repositories of deleted clusters are unknown: {error.message}", [*found, *remains]
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
