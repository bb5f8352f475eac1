"""Prices of Google's machines from items as the Cloud Billing catalog has them: descriptions and rates that public
programs have recorded."""

from typing import Any

import pytest

from providers.gke.prices import Sku, parse_skus, price_machines


def item(description: str, units: str, nanos: int, usage: str = "OnDemand") -> dict[str, Any]:
    rates = [{"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": units, "nanos": nanos}}]
    return {
        "description": description,
        "category": {"usageType": usage},
        "serviceRegions": ["us-central1"],
        "pricingInfo": [{"pricingExpression": {"tieredRates": rates}}],
    }


G4 = [
    item("G4 Instance Core running in Iowa", "0", 48_910_000),
    item("G4 Instance Ram running in Iowa", "0", 5_870_000),
    item("RTX 6000 96GB running in Iowa", "1", 95_650_000),
]


def price(items: list[dict[str, Any]], name: str) -> float | None:
    return price_machines({sku.name: sku.price for sku in parse_skus(items)}).get(name)


@pytest.mark.parametrize(
    ("name", "monthly"),
    [("g4-standard-48", 3292), ("g4-standard-96", 6570), ("g4-standard-192", 13140), ("g4-standard-384", 26280)],
)
def test_a_g4_machine_costs_what_public_lists_say(name: str, monthly: float) -> None:
    """Dollars per month of 730 hours in Iowa; the published sums are of rates rounded to a cent."""
    found = price(G4, name)
    assert found is not None
    assert 730 * found == pytest.approx(monthly, rel=3e-3)


@pytest.mark.parametrize("name", ["Nvidia H100 80GB Plus GPU", "Nvidia H100 80GB Mega GPU"])
def test_both_names_of_the_h100_of_a3_mega_are_known(name: str) -> None:
    parts = [
        item("A3Plus Instance Core running in Frankfurt", "0", 29_000_000),
        item("A3Plus Instance Ram running in Frankfurt", "0", 2_500_000),
        item(f"{name} running in Frankfurt", "10", 344_275_712),
    ]
    assert price(parts, "a3-megagpu-8g") == pytest.approx(208 * 0.029 + 1872 * 0.0025 + 8 * 10.344275712)


def test_spot_items_are_named_as_those_on_demand() -> None:
    description = "RTX 6000 96GB attached to Spot Preemptible VMs running in Belgium"
    assert list(parse_skus([item(description, "1", 720_000_000, "Preemptible")])) == [
        Sku("RTX 6000 96GB", ("us-central1",), "spot", 1.72)
    ]
