"""Finds the clusters on GKE that bear our tags, whoever created them."""

from typing import Any

from mlbench_cli.model import Cluster
from providers.base import CLUSTER_TAG, TransientError, details_from_tags
from providers.gke.api import Gke, region_of
from providers.gke.resources import ROLE_LABEL, WORKER, WORKER_POOL

STATES = {"PROVISIONING": "creating", "STOPPING": "deleting", "ERROR": "failed"}


def discover_clusters(project: str, location: str) -> list[Cluster]:
    """All of a project, in one location or ("-") everywhere. Raises TransientError if a zone does not answer."""
    answer = Gke(project, location).call("list_clusters", parent=f"projects/{project}/locations/{location}")
    if answer.missing_zones:
        raise TransientError(
            f"Google has no answer from {', '.join(answer.missing_zones)}, so the clusters there are not known."
        )
    return [
        _cluster(found, project) for found in answer.clusters if found.resource_labels.get(CLUSTER_TAG) == found.name
    ]


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
        if pool.status.name in ("ERROR", "RUNNING_WITH_ERROR"):
            state = "failed"
    return Cluster(found.name, "gke", state, found.create_time, details, project, found.location)
