"""What there is in a subscription: mlbench's clusters, by the tags of their resource groups, also those made on other
machines, and whether a cluster can be created (`mlbench doctor aks`).
"""

import time
from collections.abc import Iterator

from msgspec.structs import replace

from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import timestamp
from providers import doctor, machines
from providers.aks import api
from providers.aks.api import QUOTAS, Azure, Message, register_command
from providers.aks.options import DEFAULT_REGION, FABRICS, GPU_MACHINES, MACHINES
from providers.aks.quota import (
    ALL_CPUS,
    SERVICES,
    SPOT_CPUS,
    list_denied,
    list_offers,
    list_quotas,
    list_versions,
    read_registration,
)
from providers.aks.resources import (
    CREATED_TAG,
    IMAGES_SUFFIX,
    SPOT_TOLERATION,
    WORKER_POOL,
    group_of,
    registry_of,
    state_of,
)
from providers.base import AUTO, CLUSTER_TAG, KEPT_TAG, ROLE_LABEL, WORKER, details_from_tags, registry_details
from providers.doctor import Check, Checklist, Topic, load_policy

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


# --- mlbench doctor aks -----------------------------------------------------------------------------------------------


def check_account(project: str | None, location: str | None) -> Iterator[Check]:
    """Check library, credentials, permissions, services, quotas and prices, in this order; yields one line per check.

    Stops at the first failed check on which the next ones depend. Read-only.
    """
    checklist = Checklist("aks")
    yield (found := doctor.check_library(checklist, "azure-identity", "1.25", "aks"))
    if found.state == "failed":
        return
    region = location or DEFAULT_REGION
    azure = yield from checklist.ask(Topic.CREDENTIALS, lambda: Azure(api.subscription_of(project), region))
    if azure is None:
        return
    account = yield from checklist.ask(Topic.CREDENTIALS, lambda: azure.get(azure.root, "show the subscription"))
    if account is None:
        return
    state = str(account.get("state", "Enabled"))
    named = f'subscription {azure.subscription} "{account.get("displayName")}", {state}'
    yield checklist.result(Topic.CREDENTIALS, named, missing=state != "Enabled")
    yield doctor.check_clock(checklist, azure.date, azure.asked)
    yield from _check_rights(checklist, azure)
    for service, use in SERVICES.items():
        yield from _check_service(checklist, azure, service, use)
    versions = yield from checklist.ask(Topic.KUBERNETES, lambda: list_versions(azure))
    if versions is not None:
        listed = f"{', '.join(versions) or 'none'} in {azure.location}"
        yield checklist.result(Topic.KUBERNETES, listed, missing=not versions)
    yield from doctor.check_clusters(checklist, lambda: discover_clusters(azure.subscription, None))
    yield from _check_compute(checklist, azure)
    yield from machines.check_prices(checklist, "aks", region)
    yield doctor.check_program(checklist, "az")


def _check_rights(checklist: Checklist, azure: Azure) -> Iterator[Check]:
    """Compare the actions of all commands with those granted by the caller's roles in the subscription."""
    wanted = load_policy("aks")["Actions"]
    denied = yield from checklist.ask(Topic.RIGHTS, lambda: list_denied(azure, wanted), optional=True)
    if denied is not None:
        yield checklist.rights(denied, f"your roles grant all {len(wanted)} actions", "your roles lack")


def _check_service(checklist: Checklist, azure: Azure, service: str, use: str) -> Iterator[Check]:
    state = yield from checklist.ask(Topic.API, lambda: read_registration(azure, service), of=service, optional=True)
    if state is not None:
        hint = f"Needed for {use}: {register_command(service, azure.subscription)}"
        yield checklist.result(Topic.API, state, hint, of=service, missing=state != "Registered")


def _check_compute(checklist: Checklist, azure: Azure) -> Iterator[Check]:
    """Check the GPUs of the region, and remaining quotas."""
    offers = yield from checklist.ask(Topic.GPUS, lambda: list_offers(azure), optional=True)
    if offers is None:
        return
    known = [offer for name in GPU_MACHINES if (offer := offers.get(name.lower())) is not None]
    usable = [offer.name for offer in known if not offer.refused]
    refused = [offer.name for offer in known if offer.refused]
    words = f"in {azure.location}: {', '.join(usable) or 'none'}" + (
        f"; not for this subscription: {', '.join(refused)}" if refused else ""
    )
    yield checklist.result(Topic.GPUS, words, "Use another --region, or ask Azure support", missing=not usable)
    quotas = yield from checklist.ask(Topic.QUOTA, lambda: list_quotas(azure), optional=True)
    if quotas is None:
        return
    names = dict.fromkeys([ALL_CPUS, SPOT_CPUS, *(offer.family.lower() for offer in known)])
    yield from machines.check_quotas(
        checklist, [quotas[name] for name in names if name in quotas], f"Request more at {QUOTAS}"
    )
