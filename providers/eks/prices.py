"""Prices of AWS from its price list service, for plans of machines that the table does not price."""

import json
from collections.abc import Iterator
from typing import Any

from mlbench_cli.errors import MlbenchError
from providers.eks.api import Aws, aws_in

SERVICE_REGION = "us-east-1"  # the price list is served in few regions, for all of them
# Linux, shared tenancy, nothing preinstalled. Source: Karpenter's pricing provider.
FILTERS = {
    "serviceCode": "AmazonEC2",
    "preInstalledSw": "NA",
    "operatingSystem": "Linux",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
    "tenancy": "Shared",
    "productFamily": "Compute Instance",
}


def ask_price(machine: str, region: str) -> float | None:
    """The on-demand price of one machine per hour, for a plan; None if it is unknown or cannot be looked up."""
    try:
        return _ask_product(aws_in(SERVICE_REGION), machine, region)
    except MlbenchError:
        return None


def _ask_product(aws: Aws, machine: str, region: str) -> float | None:
    filters = {**FILTERS, "regionCode": region, "instanceType": machine}
    entries = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in filters.items()]
    found = aws.pages("pricing", "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=entries)
    return max((amount for text in found for amount in _hourly_prices(json.loads(text))), default=None)


def _hourly_prices(product: dict[str, Any]) -> Iterator[float]:
    """The on-demand prices of one product in USD, except 0, which marks unavailable offers."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            amount = float(dimension["pricePerUnit"].get("USD", 0))
            if dimension["unit"] == "Hrs" and amount > 0:
                yield amount
