"""`mlbench prices update` against answers in the clouds' own form: what has no price stays unknown."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mlbench_cli.config import settings
from providers.pricing import fetched_price_file, load_prices
from tests.contract.providers.eks_world import forget
from tests.fakes.aws_server import AwsClient
from tests.fakes.azure_arm import World as AzureWorld
from tests.fakes.gke import World

Command = Callable[..., Any]


def test_google_s_catalog_is_summed_to_machines(command: Command, gke_world: World) -> None:
    settings.config_dir().mkdir(parents=True, exist_ok=True)
    result = command("prices", "update", "gke", "--region", "us-central1")
    assert result.code == 0, result.err
    table = load_prices("gke")
    assert table.price("a2-highgpu-1g", "us-central1") == pytest.approx(12 * 0.031611 + 85 * 0.004237 + 2.933908)
    assert table.price("a2-highgpu-1g", "us-central1", spot=True) == pytest.approx(12 * 0.009 + 85 * 0.001 + 1.434)
    assert table.price("nvidia-tesla-t4", "us-central1") == 0.35
    assert table.price("nvidia-tesla-t4", "us-central1", spot=True) == 0.209
    assert table.line("x", 1, "n1-standard-4", "us-central1").as_of == fetched_date("gke")
    # A machine of which a part has no price keeps that of the shipped table, with its date.
    assert table.line("x", 1, "g2-standard-4", "us-central1").as_of != fetched_date("gke")
    assert table.price("a4-highgpu-8g", "us-central1") is None


def fetched_date(provider: str) -> str:
    text = fetched_price_file(provider).read_text()
    return text.partition('date = "')[2].partition('"')[0]


def test_aws_price_list_is_read_and_a_price_of_0_is_none(command: Command, aws: AwsClient) -> None:
    settings.config_dir().mkdir(parents=True, exist_ok=True)
    result = command("prices", "update", "eks", "--region", "eu-west-1", "-o", "json")
    assert result.code == 0, result.err
    assert result.json["eks"] == {"source": "AWS Price List", "prices": 2}
    table = load_prices("eks")
    assert table.price("g5.xlarge", "eu-west-1") == 1.123
    assert table.price("p5e.48xlarge", "us-east-1") is None
    assert table.price("g6.xlarge", "eu-west-1") is None
    assert "AWS Price List" in command("prices").err


def test_a_plan_asks_aws_for_the_price_that_the_table_has_not(command: Command, aws: AwsClient) -> None:
    aws.rules(offered=[["g5.xlarge", "eu-west-1a"], ["g6.xlarge", "eu-west-1a"]], quotas={"L-DB2E81BA": 99.0})
    words = ("create-cluster", "eks", "2", "priced", "--zone", "eu-west-1a", "--dry-run", "-o", "json")
    try:
        planned = command(*words, "-t", "g5.xlarge")
        (worker,) = [line for line in planned.json["plan"]["lines"] if "worker" in line["what"]]
        assert worker["price_per_hour"] == 1.123
        assert planned.json["plan"]["price_per_hour"] is None  # disks of the region have no price
        assert "mlbench prices update eks --region eu-west-1" in command(*words[:-2], "-t", "g6.xlarge").err
        aws.order("me", "deny", action="pricing:.*", times=9)
        planned = command(*words, "-t", "g5.xlarge")
        (worker,) = [line for line in planned.json["plan"]["lines"] if "worker" in line["what"]]
        assert (planned.code, worker["price_per_hour"]) == (0, None)
    finally:
        aws.calm("me")
        aws.rules(offered=[], quotas={})


def test_a_plan_asks_azure_for_a_spot_price(command: Command, azure_world: AzureWorld) -> None:
    words = ("create-cluster", "aks", "2", "priced", "-t", "Standard_NC4as_T4_v3", "--spot", "--dry-run", "-o", "json")
    (worker,) = [line for line in command(*words).json["plan"]["lines"] if "worker" in line["what"]]
    assert worker["price_per_hour"] == 0.1052


def test_a_region_without_prices_keeps_the_old_ones(command: Command, aws: AwsClient) -> None:
    result = command("prices", "update", "eks", "--region", "mars-1")
    assert (result.code, "has no prices of eks for mars-1" in result.err) == (2, True)
    assert not fetched_price_file("eks").exists()


def test_who_may_not_ask_is_refused_with_the_right(command: Command, aws: AwsClient) -> None:
    aws.order("me", "deny", action="pricing:.*", times=1)
    result = command("prices", "update", "eks", "--region", "eu-west-1")
    assert result.code == 3
    assert command("prices", "update", "kind").code == 2


def test_the_prices_of_the_originals_results_are_kept_and_used_by_no_plan(command: Any) -> None:
    shown = command("prices", "--archive", "-o", "json").json["prices"]
    by_item = {(item["table"], item["item"]): (item["on_demand"], item["spot"]) for item in shown}
    assert by_item == {
        ("mlbench-2020", "n1-standard-4"): (0.2092, 0.0440),
        ("mlbench-2020", "nvidia-tesla-t4"): (0.35, 0.11),
        ("mlbench-2018", "n1-standard-4"): (0.19, 0.04),
        ("mlbench-2018", "nvidia-tesla-k80"): (None, 0.135),
    }
    text = command("prices", "--archive").out
    assert "unknown" in text
    assert "mlbench-2020" not in str(command("prices", "-o", "json").json)


HEADER = (
    "SKU,TermType,Unit,PricePerUnit,Currency,Product Family,Instance Type,Operating System,Pre Installed S/W,"
    "CapacityStatus,Tenancy"
)
OFFERS = f"""FormatVersion,v1.0
Disclaimer,"This pricing list is for informational purposes only"
Publication Date,2026-11-20T00:00:00Z
Version,20261120000000
OfferCode,AmazonEC2
{HEADER}
A,OnDemand,Hrs,1.1230000000,USD,Compute Instance,g5.xlarge,Linux,NA,Used,Shared
B,OnDemand,Hrs,1.5000000000,USD,Compute Instance,g5.xlarge,Windows,NA,Used,Shared
C,OnDemand,Hrs,0.0000000000,USD,Compute Instance,g6.xlarge,Linux,NA,Used,Shared
D,Reserved,Hrs,0.7000000000,USD,Compute Instance,g6.xlarge,Linux,NA,Used,Shared
E,OnDemand,Hrs,9.0000000000,USD,Compute Instance,g5.xlarge,Linux,SQL Std,Used,Shared
F,OnDemand,Hrs,0.1070000000,USD,Compute Instance,m5.large,Linux,NA,Used,Shared
G,OnDemand,Hrs,0.2000000000,USD,Compute Instance,m5.large,Linux,NA,Used,Dedicated
H,OnDemand,Hrs,1.0000000000,USD,Compute Instance,m7i.large,Linux,NA,Used,Shared
"""


class OfferFiles(BaseHTTPRequestHandler):
    """The public server of price list files; one region has none, one a page of something else."""

    def do_GET(self) -> None:
        region = self.path.removeprefix("/offers/v1.0/aws/AmazonEC2/current/").removesuffix("/index.csv")
        self.send_response({"eu-west-1": 200, "page-1": 200, "down-1": 503}.get(region, 403))
        self.end_headers()
        self.wfile.write((OFFERS if region == "eu-west-1" else "<html>" * 9).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def without_account(aws: AwsClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(key, raising=False)
    forget()
    with ThreadingHTTPServer(("127.0.0.1", 0), OfferFiles) as server:
        monkeypatch.setenv("MLBENCH_AWS_PRICES_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield
        server.shutdown()
        thread.join()
    forget()


def test_aws_prices_need_no_account(command: Command, without_account: None) -> None:
    settings.config_dir().mkdir(parents=True, exist_ok=True)
    result = command("prices", "update", "eks", "--region", "eu-west-1", "--region", "mars-1", "-o", "json")
    assert result.code == 0, result.err
    assert result.json["eks"] == {"source": "AWS price list file", "prices": 2}
    table = load_prices("eks")
    assert (table.price("g5.xlarge", "eu-west-1"), table.price("m5.large", "eu-west-1")) == (1.123, 0.107)
    assert table.price("g6.xlarge", "eu-west-1") is None


@pytest.mark.parametrize(("region", "code"), [("mars-1", 2), ("page-1", 10), ("down-1", 10)])
def test_files_of_prices_that_cannot_be_had_are_said(
    command: Command, without_account: None, region: str, code: int
) -> None:
    result = command("prices", "update", "eks", "--region", region)
    assert (result.code, region in result.err) == (code, True)
    assert not fetched_price_file("eks").exists()
