"""Prices of Compute Engine from the Cloud Billing catalog, for `mlbench prices update`.

Google bills vCPUs, memory and GPUs separately; a machine's price is their sum, without local SSDs of A3 and A4.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from providers.gke import api
from providers.gke.api import Message
from providers.gke.machines import SHAPED, Machine
from providers.pricing import FetchedPrices

ENDPOINT = "https://cloudbilling.googleapis.com"
COMPUTE_ENGINE = "6F81-5844-456A"  # service ID; a wrong one returns 200 with an empty list
SOURCE = "Cloud Billing catalog"
OTHER_MACHINES = (
    "e2-standard-2",
    "e2-standard-4",
    "n1-standard-4",
    "n1-standard-8",
    "n1-standard-16",
    "n1-standard-32",
)
# GiB of memory per vCPU, or per GPU for machines named by their GPUs.
MEMORY_PER_CPU = {"e2": 4.0, "n1": 3.75, "g2": 4.0, "g4": 3.75}
CPUS_PER_GPU = {"a2-highgpu": 12, "a2-megagpu": 6, "a2-ultragpu": 12, "a3-highgpu": 26, "a3-megagpu": 26}
MEMORY_PER_GPU = {"a2-highgpu": 85, "a2-megagpu": 85, "a2-ultragpu": 170, "a3-highgpu": 234, "a3-megagpu": 234}
# The catalog's names of GPUs, some of which differ between regions, and of a family's vCPUs and memory.
GPU_WORDS = {
    "nvidia-tesla-t4": ("Nvidia Tesla T4",),
    "nvidia-l4": ("Nvidia L4",),
    "nvidia-tesla-a100": ("Nvidia Tesla A100",),
    "nvidia-a100-80gb": ("Nvidia Tesla A100 80GB",),
    "nvidia-h100-80gb": ("Nvidia H100 80GB",),
    "nvidia-h100-mega-80gb": ("Nvidia H100 80GB Plus", "Nvidia H100 80GB Mega"),
    "nvidia-rtx-pro-6000": ("RTX 6000 96GB",),
}
FAMILY_WORDS = {
    "e2": "E2 Instance", "n1": "N1 Predefined Instance", "g2": "G2 Instance", "g4": "G4 Instance",
    "a2": "A2 Instance", "a3-highgpu": "A3 Instance", "a3-megagpu": "A3Plus Instance",
}  # fmt: skip
# Other offers for the same; those of DWS are described as on demand.
OTHER_OFFERS = re.compile(
    r"Commit|Sole Tenancy|Reserved|Custom|Premium|suspended|DWS|Calendar Mode|Defined Duration", re.IGNORECASE
)
USAGE = {"OnDemand": "on-demand", "Preemptible": "spot"}


@dataclass(frozen=True)
class Sku:
    """A billed item: its name without the location, regions, purchase type, and price in USD per hour (and GiB)."""

    name: str
    regions: tuple[str, ...]
    way: str
    price: float


def fetch_prices(regions: Sequence[str]) -> FetchedPrices:
    """Prices per hour of all machines of the table in the regions, except those with an unknown part."""
    skus = list(parse_skus(_list_skus()))
    tables: dict[str, dict[str, dict[str, float]]] = {"on-demand": {}, "spot": {}}
    for way, table in tables.items():
        for region in regions:
            parts = {sku.name: sku.price for sku in skus if sku.way == way and region in sku.regions}
            if prices := price_machines(parts):
                table[region] = prices
    return FetchedPrices("gke", SOURCE, tables["on-demand"], tables["spot"])


def price_machines(parts: Mapping[str, float]) -> dict[str, float]:
    """Prices of machines and attachable GPUs from the parts of one region."""
    prices = {}
    for machine in (*SHAPED.values(), *(Machine(name) for name in OTHER_MACHINES)):
        amount = _price_machine(machine, parts)
        if amount is not None:
            prices[machine.name] = round(amount, 6)
    if (t4 := _price_gpu("nvidia-tesla-t4", parts)) is not None:
        prices["nvidia-tesla-t4"] = t4
    return prices


def parse_skus(items: Sequence[Message]) -> Iterator[Sku]:
    """The catalog's items for vCPUs, memory and GPUs, on demand or spot."""
    for item in items:
        description = str(item["description"])
        way = USAGE.get(item.get("category", {}).get("usageType", ""))
        if way is None or OTHER_OFFERS.search(description):
            continue
        name = description.partition(" running in ")[0].removeprefix("Spot Preemptible ")
        name = name.removesuffix(" attached to Spot Preemptible VMs").removesuffix(" GPU")
        price = _unit_price(item)
        if price > 0:
            yield Sku(name, tuple(item.get("serviceRegions", ())), way, price)


def _unit_price(item: Message) -> float:
    """USD per hour. `units` is a string in JSON, and a free tier may come first."""
    rates = item["pricingInfo"][-1]["pricingExpression"]["tieredRates"]
    price = rates[-1]["unitPrice"]
    return int(price.get("units") or 0) + int(price.get("nanos") or 0) / 1e9


def _price_machine(machine: Machine, parts: Mapping[str, float]) -> float | None:
    family = machine.name.rpartition("-")[0]
    words = FAMILY_WORDS.get(family) or FAMILY_WORDS.get(machine.name.partition("-")[0])
    if machine.name.startswith(("a3-ultragpu", "a4-")) or words is None:
        return None
    if family in CPUS_PER_GPU:
        cpus, memory = machine.gpus * CPUS_PER_GPU[family], float(machine.gpus * MEMORY_PER_GPU[family])
    else:
        cpus = machine.vcpus or 0
        memory = cpus * MEMORY_PER_CPU.get(machine.name.partition("-")[0], 0)
    core, ram = parts.get(f"{words} Core"), parts.get(f"{words} Ram")
    gpu = _price_gpu(machine.gpu, parts) if machine.gpu else 0.0
    if core is None or ram is None or gpu is None or not cpus:
        return None
    return cpus * core + memory * ram + machine.gpus * gpu


def _price_gpu(gpu: str, parts: Mapping[str, float]) -> float | None:
    return next((parts[name] for name in GPU_WORDS.get(gpu, ()) if name in parts), None)


def _list_skus() -> list[Message]:
    base = os.environ.get("MLBENCH_BILLING_ENDPOINT", ENDPOINT)
    found: list[Message] = []
    token = ""
    while True:
        page = f"&pageToken={token}" if token else ""
        url = f"{base}/v1/services/{COMPUTE_ENGINE}/skus?currencyCode=USD&pageSize=5000{page}"
        document = api.ask_rest("Cloud Billing", "GET", url, "list prices", "")
        found += document.get("skus", [])
        token = document.get("nextPageToken", "")
        if not token:
            return found
