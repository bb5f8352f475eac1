"""Prices of Azure's machines from its public retail price list."""

import json
import os
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import MlbenchError, UsageError
from providers.aks import api
from providers.aks.errors import Message
from providers.base import TransientError

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
    try:
        from azure.core.rest import HttpRequest
    except ImportError:
        raise UsageError("Prices of Azure need azure-core, which is not installed.", hint=install_hint("aks")) from None
    answer = api.send_unsigned(HttpRequest("GET", url), "Azure's price list")
    if answer.status_code >= 400:
        raise TransientError(f"Azure's price list answered with status {answer.status_code}: {answer.text()[:300]}")
    document: Message = json.loads(answer.content)
    return document
