"""The price tables: a person's own goes before the shipped one, and what nobody knows is unknown."""

from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from mlbench_cli.errors import UsageError
from providers.base import Plan, PlanLine
from providers.pricing import (
    DEFAULT_REGIONS,
    FetchedPrices,
    age_in_days,
    fetched_price_file,
    load_prices,
    update_prices,
    user_price_file,
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))


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


def test_another_table_has_another_version() -> None:
    shipped = load_prices("eks").version
    assert load_prices("eks").version == shipped
    assert shipped.startswith("20")
    user_price_file().write_text("[eks.on-demand.any]\nx = 1\n")
    first = load_prices("eks").version
    user_price_file().write_text("[eks.on-demand.any]\nx = 2\n")
    assert len({shipped, first, load_prices("eks").version}) == 3
    assert first.endswith(shipped)


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


def test_what_is_free_has_a_price() -> None:
    user_price_file().write_text("[eks.on-demand.a]\nx = 0\ny = 999999\n")
    assert load_prices("eks").price("x", "a") == 0
    assert load_prices("eks").price("y", "a") == 999999


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("2026-07-30", 2),
        ("2026-08-01", 0),
        ("2026-08-02", 0),
        ("2026", 212),
        ("2026-02-30", None),
        ("July", None),
        (None, None),
    ],
)
def test_a_price_is_as_old_as_its_date_and_one_of_a_year_as_its_first_day(text: str | None, days: int | None) -> None:
    assert age_in_days(text, date(2026, 8, 1)) == days


def test_prices_of_every_region_are_of_no_region() -> None:
    user_price_file().write_text("[eks.on-demand.any]\nx = 1\n[eks.on-demand.here]\ny = 1\n")
    prices = load_prices("eks")
    assert "any" not in prices.list_regions()
    assert "here" in prices.list_regions()
    assert prices.count_prices("here") == prices.count_prices("nowhere") + 1


# --- fetched prices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["gke", "eks", "aks"])
def test_prices_are_fetched_for_the_usual_regions_and_go_before_the_shipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, provider: str
) -> None:
    asked: list[tuple[str, ...]] = []

    def fetch_prices(regions: tuple[str, ...]) -> FetchedPrices:
        asked.append(regions)
        return FetchedPrices(provider, "the list", {regions[0]: {"control-plane": 7.0}}, {})

    monkeypatch.setattr(f"providers.{provider}.prices.fetch_prices", fetch_prices)
    monkeypatch.setattr("mlbench_cli.config.settings.config_dir", lambda: tmp_path / "none" / "yet")
    shipped = load_prices(provider)
    assert update_prices(provider, []).count == 1
    assert asked == [DEFAULT_REGIONS[provider]]
    found, region = load_prices(provider), DEFAULT_REGIONS[provider][0]
    assert found.price("control-plane", region) == 7.0
    assert found.price("control-plane", "elsewhere") == shipped.price("control-plane", "elsewhere")
    assert found.source.startswith("the list (20")
    assert found.version.endswith(f", then {shipped.version}")
    update_prices(provider, ["here"])
    assert asked[1] == ("here",)


def test_prices_of_before_stay_if_none_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.aks.prices.fetch_prices", lambda regions: FetchedPrices("aks", "the list", {}, {}))
    with pytest.raises(UsageError, match="the list has no prices of aks for nowhere, or-there"):
        update_prices("aks", ["nowhere", "or-there"])
    assert not fetched_price_file("aks").exists()


def test_ones_own_prices_go_before_those_that_were_fetched() -> None:
    fetched_price_file("eks").write_text(
        '[eks]\ndate = "2026-11-01"\nsource = "x"\n[eks.on-demand.a]\nm = 2.0\nn = 2.0\n'
    )
    user_price_file().write_text("[eks.on-demand.a]\nm = 1.0\n")
    found = load_prices("eks")
    assert [found.price(item, "a") for item in ("m", "n")] == [1.0, 2.0]
    assert found.source.startswith(f"{user_price_file()} (without a date), then x (2026-11-01), then ")
    fetched_price_file("eks").write_text("[eks.on-demand.a]\nm = -1\n")
    with pytest.raises(UsageError):
        load_prices("eks")


def test_a_price_that_was_asked_for_is_of_today() -> None:
    found = load_prices("eks").ask_missing([("m9.large", False)], "nowhere", lambda item, spot: 3.0)
    line = found.line("worker", 1, "m9.large", "nowhere")
    assert (line.price, line.as_of) == (3.0, f"{datetime.now(UTC):%Y-%m-%d}")
