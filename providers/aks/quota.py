"""What Azure offers and allows: the VM sizes of a region with their restrictions, quotas and prices. Read-only."""

import fnmatch
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, UsageError
from providers.aks import api
from providers.aks.api import QUOTAS, Azure, Message
from providers.aks.options import Machine
from providers.base import RightsError, TransientError
from providers.machines import Quota, check_if_permitted, require_quotas

# Names of quotas other than those of families, in lowercase because Azure is inconsistent. Spot machines of all
# families share one per region.
ALL_CPUS, SPOT_CPUS, MACHINES_QUOTA = "cores", "lowprioritycores", "virtualmachines"


# Services that a subscription must have registered, and what they are for. A new subscription has none.
IDENTITIES, REGISTRIES = "Microsoft.ManagedIdentity", "Microsoft.ContainerRegistry"
SERVICES = {
    "Microsoft.ContainerService": "clusters",
    "Microsoft.Compute": "machines",
    "Microsoft.Network": "the cluster's network",
    IDENTITIES: "--subnet",
    REGISTRIES: "--registry auto",
}


@dataclass(frozen=True)
class Demand:
    """Machines needed by a cluster: size, number, and whether they are spot."""

    machine: Machine
    count: int
    spot: bool = False


@dataclass(frozen=True)
class Offer:
    """A region's offer of a VM size: quota of its family, vCPUs, GPUs, zones, and whether it can be spot."""

    name: str
    family: str
    vcpus: int
    gpus: int
    zones: tuple[str, ...]
    can_be_spot: bool
    refused: str | None = None  # why this subscription may not use it in the region
    refused_zones: tuple[str, ...] = ()
    is_arm: bool = False


def read_registration(azure: Azure, service: str) -> str:
    """Whether the subscription has registered a service, in Azure's words."""
    path = f"{azure.root}/providers/{service}?api-version={api.VERSIONS['resourcegroups']}"
    return str(azure.get(path, f"show the service {service}").get("registrationState"))


def require_services(azure: Azure, services: Sequence[str]) -> None:
    """Raise UsageError with the command that registers a service if the subscription has not: AKS finds out when it
    has made a part of the cluster."""
    for service in services:
        try:
            state = read_registration(azure, service)
        except RightsError:
            return
        if state != "Registered":
            raise UsageError(
                f"The subscription has not registered the service {service}, which is for {SERVICES[service]}: it is "
                f"{state}.",
                hint=api.register_command(service, azure.subscription),
            )


ASSIGN_ROLES = "Microsoft.Authorization/roleAssignments/write"


def require_role_assignments(azure: Azure) -> None:
    """Raise CredentialError if the caller may not give the machines a role, which comes after the cluster."""
    try:
        denied = list_denied(azure, [ASSIGN_ROLES])
    except RightsError:
        return
    if denied:
        raise CredentialError(
            "You may not assign roles in the subscription, so the cluster's machines could not pull images.",
            hint="Ask for a role that can assign roles, or use your own registry: --registry PREFIX",
        )


def list_denied(azure: Azure, wanted: Sequence[str]) -> list[str]:
    """The actions that none of the caller's roles in the subscription allows (`actions` without `notActions`)."""
    path = f"{azure.root}/providers/Microsoft.Authorization/permissions"
    granted = azure.list_all(path, "list your permissions")
    return [name for name in wanted if not any(_allows(permission, name) for permission in granted)]


def _allows(permission: Message, action: str) -> bool:
    def is_among(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns)

    return is_among(permission.get("actions") or ()) and not is_among(permission.get("notActions") or ())


def check_machines(azure: Azure, demands: Sequence[Demand], zones: Sequence[str]) -> list[str]:
    """Warnings about possible problems. Raises UsageError or CapacityError for certain ones.

    The last demand is for the workers, in one of `zones` (numbers) if given.
    """

    def check() -> list[str]:
        offers = list_offers(azure)
        flags = [*["--system-machine-type"] * (len(demands) - 1), "--machine-type"]
        found = [_require_offer(azure, offers, demand, flag) for demand, flag in zip(demands, flags, strict=True)]
        _check_zones(azure, found[-1], zones)
        _check_quotas(azure, demands, found, list_quotas(azure))
        return []

    return check_if_permitted(azure.location, check)


def list_offers(azure: Azure) -> dict[str, Offer]:
    """The VM sizes of the region, by lowercase name."""
    path = f"{azure.root}/providers/Microsoft.Compute/skus?$filter=location%20eq%20%27{azure.location}%27"
    items = azure.list_all(path, f"list the VM sizes of {azure.location}")
    return {item["name"].lower(): _offer(item) for item in items if item.get("resourceType") == "virtualMachines"}


def find_offer(azure: Azure, name: str) -> Offer | None:
    """The region's offer of a VM size; None if it has none, or the list of sizes may not be read."""
    try:
        return list_offers(azure).get(name.lower())
    except RightsError:
        return None


def list_quotas(azure: Azure) -> dict[str, Quota]:
    """The quotas of the region, by lowercase name; all but that of machines count vCPUs."""
    path = f"{azure.root}/providers/Microsoft.Compute/locations/{azure.location}/usages"
    found = {}
    for item in azure.list_all(path, f"list quotas of {azure.location}"):
        name, limit, used = item["name"]["value"], float(item["limit"]), float(item["currentValue"])
        unit = "" if name.lower() == MACHINES_QUOTA else "vCPUs"
        found[name.lower()] = Quota.of_use(name, limit, used, unit)
    return found


def _offer(item: Message) -> Offer:
    able = {entry["name"]: entry["value"] for entry in item.get("capabilities") or ()}
    refused: str | None = None
    zones: list[str] = []
    for entry in item.get("restrictions") or ():
        if entry.get("type") == "Location":
            refused = str(entry.get("reasonCode") or "restricted")
        else:
            zones += (entry.get("restrictionInfo") or {}).get("zones") or []
    places = [zone for place in item.get("locationInfo") or () for zone in place.get("zones") or ()]
    return Offer(
        item["name"],
        str(item.get("family") or ""),
        int(able.get("vCPUs") or 0),
        int(able.get("GPUs") or 0),
        tuple(sorted(set(places))),
        able.get("LowPriorityCapable") == "True",
        refused,
        tuple(zones),
        able.get("CpuArchitectureType") == "Arm64",
    )


def _require_offer(azure: Azure, offers: dict[str, Offer], demand: Demand, flag: str) -> Offer:
    """The offer of the machines, which `flag` chooses."""
    name = demand.machine.name
    found = offers.get(name.lower())
    listing = f"az vm list-skus --location {azure.location} --size {name} --all -o table"
    if found is None:
        raise UsageError(
            f"The region {azure.location} has no {name}.", hint=f"Use another --region or {flag}: {listing}"
        )
    if found.refused:
        raise CapacityError(
            f"The subscription may not use {name} in {azure.location}: {found.refused}.",
            hint=f"Choose another --region or {flag}, or ask Azure support for access: {listing}",
            details={"reason": "restricted"},
        )
    if demand.spot and not found.can_be_spot:
        raise UsageError(f"{name} is not sold as spot.", hint="Leave out --spot.")
    return found


def _check_zones(azure: Azure, offer: Offer, zones: Sequence[str]) -> None:
    for zone in zones:
        if zone not in offer.zones:
            offered = f"; it is in {', '.join(offer.zones)}" if offer.zones else ", or no zones at all for it"
            raise UsageError(f"{azure.location} has no {offer.name} in zone {zone}{offered}.", hint="--zones, or none")
        if zone in offer.refused_zones and len(zones) == 1:
            raise CapacityError(
                f"The subscription may not use {offer.name} in zone {zone} of {azure.location}.",
                hint=f"--zones {','.join(item for item in offer.zones if item not in offer.refused_zones) or '…'}",
                details={"reason": "restricted"},
            )


def _check_quotas(azure: Azure, demands: Sequence[Demand], offers: Sequence[Offer], quotas: dict[str, Quota]) -> None:
    """Raises CapacityError naming every quota that is too small."""
    needs: Counter[str] = Counter()
    for demand, offer in zip(demands, offers, strict=True):
        cpus = demand.count * offer.vcpus
        for name in (SPOT_CPUS,) if demand.spot else (offer.family.lower(), ALL_CPUS):
            needs[name] += cpus
        needs[MACHINES_QUOTA] += demand.count
    hint = f"Request more at {QUOTAS}, or use fewer or other machines, or another --region."
    require_quotas(f"the subscription in {azure.location}", +needs, quotas, lambda quota, needed: hint)


def list_versions(azure: Azure) -> dict[str, list[str]]:
    """The generally available minor versions of the region, with their patches."""
    path = f"{azure.root}/providers/Microsoft.ContainerService/locations/{azure.location}/kubernetesVersions"
    values = azure.get(path, f"list Kubernetes' versions in {azure.location}").get("values") or []
    plans = {item["version"]: (item.get("capabilities") or {}).get("supportPlan") or [] for item in values}
    return {
        item["version"]: list(item.get("patchVersions") or {})
        for item in values
        if not item.get("isPreview") and (not plans[item["version"]] or "KubernetesOfficial" in plans[item["version"]])
    }


# --- prices of machines that the table does not price, from Azure's public price list ---------------------------------

ENDPOINT = "https://prices.azure.com"
VERSION = "2023-01-01-preview"
# Other offers for the same machine, by words in the product and size names.
OTHER_PRODUCTS = ("windows", "cloud services")
OTHER_SIZES = ("low priority", "expired")


def ask_price(machine: str, region: str, spot: bool) -> float | None:
    """The price of one machine per hour, for a plan; None if it is unknown or cannot be looked up."""
    try:
        prices = [read_price(item) for item in _list_items(region, [machine]) if _is_spot(item) is spot]
    except MlbenchError:
        return None
    return next((price for price in prices if price is not None), None)


def read_price(item: Message) -> float | None:
    """USD per hour of a Linux machine; None for other offers and products."""
    product, size = str(item.get("productName")).lower(), str(item.get("skuName")).lower()
    if item.get("type") != "Consumption" or item.get("unitOfMeasure") != "1 Hour" or item.get("tierMinimumUnits"):
        return None
    if any(word in product for word in OTHER_PRODUCTS) or any(word in size for word in OTHER_SIZES):
        return None
    price = float(item.get("retailPrice") or 0)
    return price if price > 0 else None


def _is_spot(item: Message) -> bool:
    return str(item.get("skuName")).lower().endswith(" spot")


def _list_items(region: str, names: Sequence[str]) -> Iterator[Message]:
    sizes = " or ".join(f"armSkuName eq '{name}'" for name in names)
    wanted = f"serviceName eq 'Virtual Machines' and armRegionName eq '{region}' and ({sizes})"
    base = os.environ.get("MLBENCH_AZURE_PRICES_ENDPOINT", ENDPOINT)
    url: str | None = f"{base}/api/retail/prices?api-version={VERSION}&currencyCode=USD&$filter={quote(wanted)}"
    while url:
        page = _get(url)
        yield from page.get("Items") or ()
        url = page.get("NextPageLink") or None


def _get(url: str) -> Message:
    """One page. Raises UsageError for an unknown region, TransientError without a response."""
    answer = api.send_unsigned(api.new_request("GET", url), "Azure's price list")
    if answer.status_code >= 400:
        raise TransientError(f"Azure's price list answered with status {answer.status_code}: {answer.text()[:300]}")
    document: Message = json.loads(answer.content)
    return document
