"""Checks an Azure subscription before a cluster is created in it."""

import fnmatch
from collections.abc import Iterator, Sequence

from providers import doctor
from providers.aks import api
from providers.aks.api import Azure
from providers.aks.discover import discover_clusters
from providers.aks.errors import QUOTAS, Message, register_command
from providers.aks.options import DEFAULT_REGION, GPU_MACHINES
from providers.aks.provider import list_versions
from providers.aks.quota import ALL_CPUS, SPOT_CPUS, list_offers, list_quotas
from providers.doctor import Check, Checklist, load_policy

# Services that must be registered in a subscription, and what they are for.
SERVICES = {
    "Microsoft.ContainerService": "clusters",
    "Microsoft.Compute": "machines",
    "Microsoft.Network": "the cluster's network",
    "Microsoft.ManagedIdentity": "the end of a cluster (--ttl)",
    "Microsoft.ContainerRegistry": "--registry auto",
}


def run_checks(project: str | None, location: str | None) -> Iterator[Check]:
    """Check library, credentials, permissions, services, quotas and prices, in this order; yields one line per check.

    Stops at the first failed check on which the next ones depend. Read-only.
    """
    checklist = Checklist("aks")
    yield (found := doctor.check_library(checklist, "azure-identity", "1.25", "aks"))
    if found.state == "failed":
        return
    region = location or DEFAULT_REGION
    azure = yield from checklist.ask("credentials", lambda: Azure(api.subscription_of(project), region))
    if azure is None:
        return
    account = yield from checklist.ask("credentials", lambda: azure.get(azure.root, "show the subscription"))
    if account is None:
        return
    state = str(account.get("state", "Enabled"))
    named = f'subscription {azure.subscription} "{account.get("displayName")}", {state}'
    yield checklist.result("credentials", named, missing=state != "Enabled")
    yield doctor.check_clock(checklist, azure.date, azure.asked)
    yield from _check_rights(checklist, azure)
    for service, use in SERVICES.items():
        yield from _check_service(checklist, azure, service, use)
    versions = yield from checklist.ask("Kubernetes", lambda: list_versions(azure))
    if versions is not None:
        listed = f"{', '.join(versions) or 'none'} in {azure.location}"
        yield checklist.result("Kubernetes", listed, missing=not versions)
    yield from doctor.check_clusters(checklist, lambda: discover_clusters(azure.subscription, None))
    yield from _check_compute(checklist, azure)
    yield from doctor.check_prices(checklist, "aks", region)
    yield doctor.check_program(checklist, "az", "hints name its commands")


def _check_rights(checklist: Checklist, azure: Azure) -> Iterator[Check]:
    """Compare the actions of all commands with those granted by the caller's roles in the subscription."""
    wanted = load_policy("aks")["Actions"]
    path = f"{azure.root}/providers/Microsoft.Authorization/permissions"
    granted = yield from checklist.ask("rights", lambda: azure.list_all(path, "list your permissions"), optional=True)
    if granted is not None:
        denied = list_denied(wanted, granted)
        yield checklist.rights(denied, f"your roles grant all {len(wanted)} actions", "your roles lack")


def _check_service(checklist: Checklist, azure: Azure, service: str, use: str) -> Iterator[Check]:
    path = f"{azure.root}/providers/{service}?api-version={api.VERSIONS['resourcegroups']}"
    found = yield from checklist.ask(service, lambda: azure.get(path, f"show the service {service}"), optional=True)
    if found is not None:
        state = str(found.get("registrationState"))
        hint = f"Needed for {use}: {register_command(service, azure.subscription)}"
        yield checklist.result(service, state, hint, missing=state != "Registered")


def _check_compute(checklist: Checklist, azure: Azure) -> Iterator[Check]:
    """Check the GPUs of the region, and remaining quotas."""
    offers = yield from checklist.ask("GPUs", lambda: list_offers(azure), optional=True)
    if offers is None:
        return
    known = [offer for name in GPU_MACHINES if (offer := offers.get(name.lower())) is not None]
    usable = [offer.name for offer in known if not offer.refused]
    refused = [offer.name for offer in known if offer.refused]
    words = f"in {azure.location}: {', '.join(usable) or 'none'}" + (
        f"; not for this subscription: {', '.join(refused)}" if refused else ""
    )
    yield checklist.result("GPUs", words, "Use another --region, or ask Azure support", missing=not usable)
    quotas = yield from checklist.ask("quotas", lambda: list_quotas(azure), optional=True)
    if quotas is None:
        return
    families = dict.fromkeys(offer.family for offer in known)
    for name in (ALL_CPUS, SPOT_CPUS, *families):
        quota = quotas.get(name.lower())
        if quota is None:
            continue
        left = int(quota["limit"]) - int(quota["currentValue"])
        found = f"{left} of {quota['limit']} vCPUs left"
        yield checklist.result(f"quota {name}", found, f"Request more at {QUOTAS}", missing=left <= 0, optional=True)


def list_denied(wanted: Sequence[str], granted: Sequence[Message]) -> list[str]:
    """The actions that are not allowed by any of the granted permissions (with `actions` and `notActions`)."""
    return [name for name in wanted if not any(_allows(permission, name) for permission in granted)]


def _allows(permission: Message, action: str) -> bool:
    def is_among(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns)

    return is_among(permission.get("actions") or ()) and not is_among(permission.get("notActions") or ())
