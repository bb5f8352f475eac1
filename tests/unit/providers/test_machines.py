"""machines.csv: what machines have and cost. A table of one's own goes first, and what nobody knows is unknown."""

import csv
from contextlib import nullcontext
from datetime import date
from pathlib import Path

import pytest

import providers
from mlbench_cli.errors import CapacityError, MlbenchError, UsageError
from providers.base import Plan, PlanLine, RightsError
from providers.gke.options import Machine
from providers.machines import (
    Quota,
    check_if_permitted,
    load_prices,
    load_shapes,
    require_quotas,
    settle_gpus,
    user_price_file,
)

TABLE = Path(providers.__file__ or "").with_name("machines.csv")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))


def test_the_shipped_table_is_dated_of_prices_and_says_the_same_of_a_machine_everywhere() -> None:
    shapes: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            shape = tuple(row[name] for name in ("gpu", "gpus", "vcpus", "network", "cards", "gbits"))
            shapes.setdefault((row["cloud"], row["item"]), set()).add(shape)
            for price, as_of in ((row["on_demand"], row["as_of"]), (row["spot"], row["spot_as_of"])):
                assert bool(price) == bool(as_of), row
                if price:
                    assert 0 < float(price) < 200
                    date.fromisoformat(as_of if len(as_of) > 4 else f"{as_of}-01-01")
    assert [key for key, found in shapes.items() if len(found) > 1] == []
    for cloud in ("gke", "eks", "aks"):
        assert load_prices(cloud).price("control-plane", "anywhere") == 0.10
        assert [shape.name for shape in load_shapes(cloud) if shape.gpu and not shape.gpus] == []


@pytest.mark.parametrize(
    ("cloud", "item", "region", "spot"),
    [
        ("gke", "n1-standard-4", "europe-west1", False),
        ("gke", "n1-standard-4", "europe-west1", True),
        ("gke", "nvidia-tesla-t4", "europe-west1", False),
        ("gke", "nvidia-tesla-t4", "us-central1", True),
        ("eks", "t2.medium", "eu-west-1", False),
    ],
)
def test_machines_of_mlbench_3_have_a_price_where_people_start(cloud: str, item: str, region: str, spot: bool) -> None:
    assert load_prices(cloud).price(item, region, spot=spot) is not None


def test_a_price_of_the_region_goes_before_one_for_any_region() -> None:
    user_price_file().parent.mkdir(parents=True, exist_ok=True)
    rows = ["cloud,item,region,on_demand,spot", "eks,mine,any,2,1", "eks,mine,eu-west-1,3,", "eks,mine,us-east-1,1,"]
    user_price_file().write_text("\n".join(rows))
    prices = load_prices("eks")
    assert [prices.price("mine", region) for region in ("eu-west-1", "us-east-1", "sa-east-1")] == [3, 1, 2]
    assert prices.price("mine", "eu-west-1", spot=True) == 1


def test_what_is_not_listed_is_unknown() -> None:
    prices = load_prices("eks")
    assert prices.price("g5.xlarge", "us-east-1") == 1.006
    assert prices.price("g5.xlarge", "eu-west-1") is None
    assert prices.price("g5.xlarge", "us-east-1", spot=True) is None
    line = prices.line("worker g5.xlarge (spot)", 2, "g5.xlarge", "us-east-1", spot=True)
    assert (line.price, line.on_demand) == (None, 1.006)
    assert Plan((line, PlanLine("other", 1, 0.5)), "x").total is None


def test_a_cloud_is_asked_for_each_price_that_no_table_has() -> None:
    items = [("g5.xlarge", False), ("g5.xlarge", True), ("new.large", False)]
    prices = load_prices("eks").ask_missing(items, "us-east-1", lambda item, spot: 9.0)
    assert [prices.price(item, "us-east-1", spot=spot) for item, spot in items] == [1.006, 9.0, 9.0]


def test_a_price_that_is_unknown_has_a_reason_and_a_row_to_add() -> None:
    prices = load_prices("gke")
    reserved = prices.line("worker", 1, "a4x-highgpu-4g", "us-central1")
    assert "lists no price on demand" in (reserved.why_unknown or "")
    spot = prices.line("worker", 1, "a4x-highgpu-4g", "us-central1", spot=True)
    assert "no table has a spot price for it and Google sells it" in (spot.why_unknown or "")
    user_price_file().write_text(f"cloud,item,region,on_demand,spot\n{spot.row.replace('PRICE', '40.5')}\n")
    assert load_prices("gke").line("worker", 1, "a4x-highgpu-4g", "us-central1", spot=True).price == 40.5
    assert load_prices("gke").price("a4x-highgpu-4g", "us-central1") is None
    assert load_prices("eks").line("worker", 1, "new.large", "us-east-1").why_unknown == "it is in no table"


def test_ones_own_table_goes_before() -> None:
    user_price_file().write_text("cloud,item,region,on_demand,as_of\neks,g5.xlarge,us-east-1,0.9,2026-11-21\n")
    prices = load_prices("eks")
    assert prices.line("worker", 1, "g5.xlarge", "us-east-1") == PlanLine("worker", 1, 0.9, "2026-11-21")
    assert prices.price("g5.2xlarge", "us-east-1") == 1.212
    assert prices.source.startswith("your machines.csv, then AWS'")
    assert load_prices("gke").price("control-plane", "x") == 0.10


@pytest.mark.parametrize(
    "text",
    [
        "cloud,item,region,on_demand\neks,x,a,one\n",
        "cloud,item,region,on_demand\neks,x,a,-1\n",
        "cloud,item,region,on_demand\neks,x,a,nan\n",
        "cloud,item,region,on_demand\neks,x,a,1e6\n",
        "cloud,item,region,on_demand\neks,x,a,1,2\n",
        "cloud,item,on_demand\neks,x,1\n",
        "cloud;item;region;on_demand\neks;x;a;1\n",
        '[eks.on-demand.a]\nx = "1"',
        "cloud,item\n\0",
    ],
)
def test_a_malformed_table_is_told(text: str) -> None:
    user_price_file().write_text(text)
    with pytest.raises(UsageError, match=r"machines\.csv"):
        load_prices("eks")


def test_a_quota_that_is_not_used_up_may_still_be_too_small() -> None:
    quotas = {name: Quota.of_use(name, 10, used) for name, used in (("a", 2), ("b", 7))}
    require_quotas("here", {"a": 8, "b": 3, "unknown": 9}, quotas, hint=lambda *_: "")
    with pytest.raises(CapacityError, match="b has 3 of 10 left, 4 needed"):
        require_quotas("here", {"a": 8, "b": 4}, quotas, hint=lambda *_: "")


@pytest.mark.parametrize(("error", "is_raised"), [(RightsError("no"), False), (CapacityError("full"), True)])
def test_what_is_known_to_be_wrong_is_no_warning(error: MlbenchError, is_raised: bool) -> None:
    def check() -> list[str]:
        raise error

    with pytest.raises(type(error)) if is_raised else nullcontext():
        assert ["could not be checked" in text for text in check_if_permitted("here", check)] == [True]


def test_a_number_of_gpus_that_is_forced_replaces_that_of_the_cloud() -> None:
    machine = Machine("a3-highgpu-8g", "nvidia-h100-80gb", 8)
    found = settle_gpus(machine, ("nvidia-h100-80gb", 8), forced=4, asked=None, is_gpu_family=True)
    assert found.gpus == 4
