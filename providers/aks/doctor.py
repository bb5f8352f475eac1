"""What can be known of an Azure subscription before a cluster is made in it."""

from collections.abc import Iterator

from providers import doctor
from providers.aks import api
from providers.aks.api import Azure
from providers.aks.compute import ALL_CPUS, SPOT_CPUS, Offer, list_offers, list_quotas
from providers.aks.discovery import discover_clusters
from providers.aks.errors import QUOTAS, Message, register_command
from providers.aks.machines import GPU_MACHINES
from providers.aks.options import DEFAULT_REGION
from providers.aks.plan import list_versions
from providers.aks.rights import list_denied, role_of
from providers.checks import Check
from providers.doctor import Checklist

# Services that have to be registered in a subscription, and what of a cluster needs each.
SERVICES = {
    "Microsoft.ContainerService": "clusters",
    "Microsoft.Compute": "machines",
    "Microsoft.Network": "the cluster's network",
    "Microsoft.ManagedIdentity": "the end of a cluster (--ttl)",
    "Microsoft.ContainerRegistry": "--registry auto",
}


def run_checks(project: str | None, location: str | None) -> Iterator[Check]:
    """Check library, credentials, rights, services, quotas and prices, in this order; yields one line per check.

    Stops at the first check without which the next ones mean nothing. Reads only.
    """
    checklist = Checklist("aks")
    yield (found := doctor.check_library(checklist, "azure-identity", "1.25", "aks"))
    if found.state == "failed":
        return
    region = location or DEFAULT_REGION
    azure = checklist("credentials", lambda: Azure(api.subscription_of(project), region))
    account = checklist("credentials", lambda: azure.get(azure.root, "show the subscription")) if azure else None
    if azure is None or account is None:
        yield checklist.failed or found
        return
    state = str(account.get("state", "Enabled"))
    named = f'subscription {azure.subscription} "{account.get("displayName")}", {state}'
    yield checklist.result("credentials", named, missing=state != "Enabled")
    yield doctor.check_clock(checklist, azure.date, azure.asked)
    yield _check_rights(checklist, azure)
    for service, use in SERVICES.items():
        yield _check_service(checklist, azure, service, use)
    yield _check_versions(checklist, azure)
    yield doctor.check_clusters(checklist, lambda: discover_clusters(azure.subscription, None))
    yield from _check_compute(checklist, azure)
    yield doctor.check_prices(checklist, "aks", region)
    yield doctor.check_program(checklist, "az", "hints name its commands")


def _check_rights(checklist: Checklist, azure: Azure) -> Check:
    """Compare the actions of all commands with those that the caller's roles grant in the subscription."""
    wanted = role_of(None)["Actions"]
    path = f"{azure.root}/providers/Microsoft.Authorization/permissions"
    granted = checklist("rights", lambda: azure.list_all(path, "list your permissions"), optional=True)
    if granted is None:
        return checklist.failed or checklist.result("rights", "Azure does not say", missing=True)
    denied = list_denied(wanted, granted)
    if not denied:
        return checklist.result("rights", f"your roles grant all {len(wanted)} actions")
    listed = ", ".join(denied[:10]) + (f" and {len(denied) - 10} more" if len(denied) > 10 else "")
    hint = "As a role for an administrator: mlbench doctor aks --policy   For one command: --policy --for list-clusters"
    return checklist.result("rights", f"your roles lack {listed}", hint, missing=True)


def _check_service(checklist: Checklist, azure: Azure, service: str, use: str) -> Check:
    path = f"{azure.root}/providers/{service}?api-version={api.VERSIONS['resourcegroups']}"
    found = checklist(service, lambda: azure.get(path, f"show the service {service}"), optional=True)
    if found is None:
        return checklist.failed or checklist.result(service, "Azure does not say", missing=True)
    state = str(found.get("registrationState"))
    hint = f"Needed for {use}: {register_command(service, azure.subscription)}"
    return checklist.result(service, state, hint, missing=state != "Registered")


def _check_versions(checklist: Checklist, azure: Azure) -> Check:
    found = checklist("Kubernetes", lambda: list_versions(azure))
    if found is None:
        return checklist.failed or checklist.result("Kubernetes", "Azure does not say", missing=True)
    return checklist.result("Kubernetes", f"{', '.join(found) or 'none'} in {azure.location}", missing=not found)


def _check_compute(checklist: Checklist, azure: Azure) -> Iterator[Check]:
    """The GPUs of the region, and how much of each quota is left."""
    offers = checklist("GPUs", lambda: list_offers(azure), optional=True)
    if offers is None:
        if checklist.failed:
            yield checklist.failed
        return
    known = [offer for name in GPU_MACHINES if (offer := offers.get(name.lower())) is not None]
    usable = [offer.name for offer in known if not offer.refused]
    refused = [offer.name for offer in known if offer.refused]
    words = f"in {azure.location}: {', '.join(usable) or 'none'}" + (
        f"; not for this subscription: {', '.join(refused)}" if refused else ""
    )
    yield checklist.result("GPUs", words, "Use another --region, or ask Azure support", missing=not usable)
    quotas = checklist("quotas", lambda: list_quotas(azure), optional=True)
    if quotas is None:
        if checklist.failed:
            yield checklist.failed
        return
    yield from _list_quotas(checklist, known, quotas)


def _list_quotas(checklist: Checklist, known: list[Offer], quotas: dict[str, Message]) -> Iterator[Check]:
    families = dict.fromkeys(offer.family for offer in known)
    for name in (ALL_CPUS, SPOT_CPUS, *families):
        quota = quotas.get(name.lower())
        if quota is None:
            continue
        left = int(quota["limit"]) - int(quota["currentValue"])
        found = f"{left} of {quota['limit']} vCPUs left"
        yield checklist.result(f"quota {name}", found, f"Request more at {QUOTAS}", missing=left <= 0)
