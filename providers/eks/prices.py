"""Prices of AWS from its price list service, for `mlbench prices update`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from providers.eks.aws import Aws
from providers.eks.machines import GPU_MACHINES
from providers.pricing import FetchedPrices

SERVICE_REGION = "us-east-1"  # the price list is served in few regions, for all of them
SOURCE = "AWS Price List"
OTHER_MACHINES = ("t3.medium", "t3.large", "m5.large", "m5.xlarge", "m5.2xlarge", "m5.4xlarge")
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


def fetch_prices(regions: Sequence[str]) -> FetchedPrices:
    """On-demand prices per hour of all machines of the table in the regions. A machine without a price is left out."""
    aws = Aws(SERVICE_REGION)
    prices: dict[str, dict[str, float]] = {}
    for region in regions:
        for machine in (*GPU_MACHINES, *OTHER_MACHINES):
            filters = {**FILTERS, "regionCode": region, "instanceType": machine}
            entries = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in filters.items()]
            found = aws.pages("pricing", "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=entries)
            if amounts := [amount for text in found for amount in _hourly_prices(json.loads(text))]:
                prices.setdefault(region, {})[machine] = max(amounts)
    return FetchedPrices("eks", SOURCE, prices, {})


def _hourly_prices(product: dict[str, Any]) -> Iterator[float]:
    """The on-demand prices of one product in USD. Those of 0 are of something that cannot be bought so."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            amount = float(dimension["pricePerUnit"].get("USD", 0))
            if dimension["unit"] == "Hrs" and amount > 0:
                yield amount
