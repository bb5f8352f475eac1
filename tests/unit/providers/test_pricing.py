"""The price tables: a person's own goes before the shipped one, and what nobody knows is unknown."""

import pytest

from mlbench_cli.errors import UsageError
from providers.base import Plan, PlanLine
from providers.pricing import (
    load_prices,
    user_price_file,
)


@pytest.mark.parametrize("provider", ["gke", "eks", "aks"])
def test_the_shipped_table_is_dated_and_of_prices(provider: str) -> None:
    prices = load_prices(provider)
    assert "table of 20" in prices.source
    assert prices.price("control-plane", "anywhere") == 0.10
    for kind in ("on-demand", "spot"):
        for entries in prices.layers[0].get(kind, {}).values():
            assert all(0 < amount < 200 for amount in entries.values())


def test_what_is_not_listed_is_unknown() -> None:
    prices = load_prices("eks")
    assert prices.price("g5.xlarge", "us-east-1") == 1.006
    assert prices.price("g5.xlarge", "eu-west-1") is None
    assert prices.price("g5.xlarge", "us-east-1", spot=True) is None


def test_ones_own_table_goes_before() -> None:
    user_price_file().write_text('[eks]\ndate = "2026-11-21"\n[eks.on-demand.us-east-1]\n"g5.xlarge" = 0.9\n')
    prices = load_prices("eks")
    assert prices.price("g5.xlarge", "us-east-1") == 0.9
    assert prices.price("g5.2xlarge", "us-east-1") == 1.212
    assert "2026-11-21" in prices.source
    assert str(user_price_file()) in prices.source
    assert load_prices("gke").price("control-plane", "x") == 0.10


def test_a_price_says_of_when_it_is() -> None:
    prices = load_prices("gke")
    assert prices.line("worker", 2, "a3-highgpu-1g", "us-central1") == PlanLine("worker", 2, 10.98, "2026-09-26")
    assert prices.line("GPU", 2, "nvidia-tesla-t4", "us-central1").as_of == "2025"
    assert prices.line("worker", 2, "n1-standard-4", "nowhere") == PlanLine("worker", 2, None, None)
    user_price_file().write_text('[gke]\ndate = "2026-11-21"\n[gke.on-demand.any]\nn1-standard-4 = 0.2\n')
    assert load_prices("gke").line("worker", 1, "n1-standard-4", "nowhere").as_of == "2026-11-21"


@pytest.mark.parametrize(
    "text",
    [
        "[eks",
        "[eks.on-demand]\nx = 1",
        '[eks.spot.a]\nx = "1"',
        "[eks.spot.a]\nx = -1",
        '[eks]\ncurrency = "EUR"',
        "eks = 1",
        "[eks.on-demand.a]\nx = true",
        "[eks.on-demand.a]\nx = 1e6",
    ],
)
def test_a_malformed_table_is_told(text: str) -> None:
    user_price_file().write_text(text)
    with pytest.raises(UsageError, match=r"prices\.toml"):
        load_prices("eks")


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    known = PlanLine("a", 2, 0.5)
    assert Plan((known,), "x").total == 1.0
    assert Plan((known, PlanLine("b", 1, None)), "x").total is None


# --- fetched prices -------------------------------------------------------------------------------------------------
