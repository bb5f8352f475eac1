"""Prices of AWS for `mlbench prices update`: from its price list service, or without credentials from the public file
of each region, which is hundreds of megabytes long and read line by line.
"""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.client import HTTPException
from itertools import islice
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from mlbench_cli.errors import CredentialError, MlbenchError, UnreachableError
from providers.base import call_timeout
from providers.eks.aws import Aws, aws_in
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

# The offer file (AWS Billing, "Getting price list files manually"): five lines about the file, then the header.
FILES = "https://pricing.us-east-1.amazonaws.com"
FILE = "{}/offers/v1.0/aws/AmazonEC2/current/{}/index.csv"
FILE_SOURCE = "AWS price list file"
LINES_BEFORE_HEADER = 5
COLUMNS = {
    "TermType": "OnDemand",
    "Unit": "Hrs",
    "Currency": "USD",
    "Product Family": FILTERS["productFamily"],
    "Operating System": FILTERS["operatingSystem"],
    "Pre Installed S/W": FILTERS["preInstalledSw"],
    "CapacityStatus": FILTERS["capacitystatus"],
    "Tenancy": FILTERS["tenancy"],
}


def fetch_prices(regions: Sequence[str]) -> FetchedPrices:
    """On-demand prices per hour of all machines of the table in the regions, except those without a price."""
    try:
        aws = Aws(SERVICE_REGION)
        prices: dict[str, dict[str, float]] = {}
        for region in regions:
            for machine in (*GPU_MACHINES, *OTHER_MACHINES):
                if (amount := _ask_product(aws, machine, region)) is not None:
                    prices.setdefault(region, {})[machine] = amount
        return FetchedPrices("eks", SOURCE, prices, {})
    except CredentialError as error:
        if error.details.get("configured", True):
            raise
    return FetchedPrices("eks", FILE_SOURCE, dict(_read_files(regions)), {})


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


def _read_files(regions: Sequence[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Prices of each region with a file. Raises UnreachableError if it cannot be read."""
    base = os.environ.get("MLBENCH_AWS_PRICES_ENDPOINT", FILES)
    for region in regions:
        try:
            with urlopen(FILE.format(base, region), timeout=call_timeout()) as answer:
                prices = read_offers(line.decode("utf-8", "replace") for line in answer)
        except HTTPError as error:
            if error.code in (403, 404):  # a region that does not exist
                continue
            raise UnreachableError(f"AWS' price list file for {region} cannot be downloaded: {error}") from None
        except (OSError, HTTPException, csv.Error, KeyError, ValueError) as error:
            raise UnreachableError(f"AWS' price list file of {region} cannot be read: {error!r}") from None
        if prices:
            yield region, prices


def read_offers(lines: Iterable[str]) -> dict[str, float]:
    """Hourly prices of the table's machines in the lines of an offer file. Raises KeyError without a column."""
    rows = csv.reader(islice(lines, LINES_BEFORE_HEADER, None))
    header = {name: place for place, name in enumerate(next(rows, ()))}
    wanted: Mapping[int, str] = {header[name]: value for name, value in COLUMNS.items()}
    machine, price = header["Instance Type"], header["PricePerUnit"]
    known = {*GPU_MACHINES, *OTHER_MACHINES}
    found: dict[str, float] = {}
    for row in rows:
        if len(row) < len(header) or row[machine] not in known:
            continue
        if all(row[place] == value for place, value in wanted.items()) and (amount := float(row[price])) > 0:
            found[row[machine]] = max(amount, found.get(row[machine], 0.0))
    return found
