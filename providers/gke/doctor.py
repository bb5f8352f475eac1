"""Checks a Google project before a cluster is created in it."""

from collections.abc import Iterator
from typing import Any

from providers import doctor
from providers.doctor import Check, Checklist, load_policy
from providers.gke import api
from providers.gke.api import Gke, Project
from providers.gke.discover import discover_clusters
from providers.gke.options import DEFAULT_ZONE
from providers.gke.quota import ALL_GPUS, QUOTA_OF, Compute
from providers.gke.repository import node_account

# Roles with which machines can pull from the project's registries and write logs: GKE's own, and the one that older
# organizations grant automatically.
NODE_ROLES = {"roles/container.defaultNodeServiceAccount", "roles/editor", "roles/owner"}
# Quotas that every cluster uses, in addition to those of GPUs.
COMMON_QUOTAS = ("CPUS", "IN_USE_ADDRESSES", "SSD_TOTAL_GB")


def run_checks(project: str | None, location: str | None) -> Iterator[Check]:
    """Check library, credentials, both APIs, permissions, quotas and prices, in this order; yields one line per check.

    Stops at the first failed check on which the next ones depend. Read-only.
    """
    checklist = Checklist("gke")
    yield (found := doctor.check_library(checklist, "google-cloud-container", "2.65", "gke"))
    if found.state == "failed":
        return
    zone = location or DEFAULT_ZONE
    name = yield from checklist.ask("credentials", lambda: _signed_in(project))
    if name is None:
        return
    yield checklist.result("credentials", f"{_kind()}, project {name}")
    gke = Gke(name, zone)
    wanted = load_policy("gke")["includedPermissions"]
    granted = yield from checklist.ask("rights", lambda: Project(gke).list_granted(wanted), optional=True)
    if granted is not None:
        denied = [right for right in wanted if right not in granted]
        yield checklist.rights(denied, f"IAM grants all {len(wanted)} permissions", "IAM would deny")
    yield from _check_node_account(checklist, gke)
    yield from _cluster_manager(checklist, gke)
    yield from _compute(checklist, Compute(name), zone)
    yield from doctor.check_prices(checklist, "gke", api.region_of(zone))
    yield doctor.check_program(checklist, "gcloud", "hints name its commands")


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
    config = yield from checklist.ask("API container", lambda: gke.call("get_server_config", name=gke.parent))
    if config is None:
        return
    yield checklist.result("API container", f"enabled and responding for {gke.location}")
    yield checklist.result("Kubernetes", _versions(config))
    yield from doctor.check_clusters(checklist, lambda: discover_clusters(gke.project, "-"))


def _versions(config: Any) -> str:
    regular = next((item for item in config.channels if item.channel.name == "REGULAR"), None)
    valid = list(regular.valid_versions if regular is not None else config.valid_master_versions)
    default = (regular.default_version if regular is not None else "") or config.default_cluster_version
    versions = ", ".join(dict.fromkeys(".".join(version.split(".")[:2]) for version in valid))
    return f"{versions} in the channel regular{f', {default} by default' if default else ''}"


def _compute(checklist: Checklist, compute: Compute, place: str) -> Iterator[Check]:
    """compute.googleapis.com: whether it is enabled, the GPUs of the zone, and remaining quotas."""
    quotas = yield from checklist.ask("API compute", lambda: compute.quotas(api.region_of(place)))
    if quotas is None:
        return
    yield checklist.result("API compute", "enabled")
    yield doctor.check_clock(checklist, compute.date, compute.asked)
    zone = yield from checklist.ask("GPUs", lambda: compute.gpus(place), optional=True)
    if zone is not None:
        yield checklist.result("GPUs", f"in {place}: {', '.join(zone) or 'none'}", missing=not zone)
    yield from _quotas(checklist, compute.project, quotas)


def _quotas(checklist: Checklist, project: str, quotas: dict[str, Any]) -> Iterator[Check]:
    gpus = [name for name in QUOTA_OF.values() if name in quotas]
    spot = [f"PREEMPTIBLE_{name}" for name in gpus if f"PREEMPTIBLE_{name}" in quotas]
    for name in [*(name for name in COMMON_QUOTAS if name in quotas), ALL_GPUS, *gpus, *spot]:
        if name not in quotas:
            continue
        left = quotas[name]["limit"] - quotas[name]["usage"]
        hint = f"Ask for more at {api.QUOTAS}{project}"
        yield checklist.result(
            f"quota {name}", f"{left:g} of {quotas[name]['limit']:g} left", hint, missing=left <= 0, optional=True
        )
    if not gpus:
        hint = f"A request for GPUs may still fail: {api.QUOTAS}{project}"
        yield checklist.result("quota of GPUs", "the project has none", hint, missing=True)
