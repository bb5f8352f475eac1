"""Device plugins, places in the network and prices on EKS, and the fast networks of GKE."""

import contextlib
import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UnreachableError, UsageError
from mlbench_cli.kube.gpudirect import choose_release
from mlbench_cli.model.run import Cluster
from providers.base import Readiness, ResourceStatus, TransientError
from providers.eks import devices, prices, topology
from providers.eks.devices import DevicePlugin, gpu_device, network_card_device
from providers.eks.machines import GPU_MACHINES
from providers.eks.topology import NodeTopology
from providers.gke.fabric import NcclInstaller, NetworkObjects
from providers.gke.families import FabricKind

DENIED = CredentialError("denied")

# --- EKS: device plugins --------------------------------------------------------------------------------------------


def plugin(device: devices.Device, count: int = 2, needs: Any = ()) -> Any:
    plane: Any = SimpleNamespace(name="demo-2", access=None)
    return DevicePlugin(plane, "workers", count, device, needs)  # type: ignore[arg-type]


def test_a_device_plugin_goes_with_the_workers_and_has_a_name_that_tells_it() -> None:
    found = plugin(gpu_device(4))
    assert (found.kind, found.goes_with) == ("GPU device plugin", "workers")
    assert found.needs[1] == "workers"
    assert found.name == found.documents()[0]["metadata"]["name"]
    assert plugin(network_card_device(1)).kind == "EFA device plugin"
    assert plugin(network_card_device(1), needs=("size",)).needs == ("size",)


def test_a_plugin_of_the_image_is_only_waited_for() -> None:
    found = plugin(gpu_device(4, built_in=True))
    assert (found.kind, found.name, found.documents(), found.find()) == ("GPU devices", "demo-2/2", [], None)


def nodes(*gpus: int) -> list[Any]:
    return [{"status": {"allocatable": {"nvidia.com/gpu": str(number)}}} for number in gpus]


@pytest.mark.parametrize(
    ("shown", "is_ready", "count"),
    [([4, 4], True, 2), ([4, 3], False, 1), ([4], False, 1), ([], False, 0), ([4, 4, 0], True, 2)],
)
def test_devices_are_ready_when_all_workers_show_all_of_them(
    monkeypatch: pytest.MonkeyPatch, shown: list[int], is_ready: bool, count: int
) -> None:
    monkeypatch.setattr(devices, "list_workers", lambda connect: nodes(*shown))
    reason = f"{count} of 2 machines show 4 × nvidia.com/gpu"
    assert plugin(gpu_device(4)).poll() == Readiness(is_ready, reason)


def test_a_cluster_that_is_not_there_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise NotFoundError("no cluster")

    monkeypatch.setattr(devices, "list_workers", missing)
    monkeypatch.setattr("providers.kubernetes_calls.ClusterObjects.create", missing)
    assert plugin(gpu_device(4)).poll() == Readiness(False, "the cluster cannot be reached yet")
    with pytest.raises(TransientError, match="The EKS cluster demo-2 cannot be reached yet"):
        plugin(gpu_device(4)).create()


# --- EKS: places in the network -------------------------------------------------------------------------------------

LAYER = "topology.k8s.aws/network-node-layer-"


class Kube:
    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.patches: list[tuple[str, Any]] = []

    @contextlib.contextmanager
    def opened(self, connect: Any) -> Iterator["Kube"]:
        yield self

    def get(self, path: str, labelSelector: str) -> Any:
        assert (path, labelSelector) == ("/api/v1/nodes", "mlbench-role=worker")
        return {"items": self.items}

    def patch(self, path: str, body: Any) -> None:
        self.patches.append((path, body))


def node(name: str, provider: str | None = None, **labels: str) -> Any:
    return {"metadata": {"name": name, "labels": labels or None}, "spec": {"providerID": provider}}


def label_nodes(monkeypatch: pytest.MonkeyPatch, items: list[Any], answer: Any) -> tuple[Any, Kube, list[Any]]:
    kube, asked = Kube(items), []

    def call(service: str, operation: str, **given: Any) -> Any:
        asked.append((service, operation, given))
        if isinstance(answer, Exception):
            raise answer
        return {"Instances": answer}

    monkeypatch.setattr(topology, "open_young_cluster", kube.opened)
    plane: Any = SimpleNamespace(name="demo-2", access=None, aws=SimpleNamespace(call=call))
    return NodeTopology(plane, "workers"), kube, asked  # type: ignore[arg-type]


def test_nodes_get_the_labels_of_the_network_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [
        node("a", "aws:///eu-west-1a/i-1"),
        node("b", "aws:///eu-west-1a/i-2"),
        node("c", "aws:///eu-west-1a/i-3", **{f"{LAYER}1": "nn-1"}),
        node("d"),
        node("e", "gce://x/i-5"),
    ]
    told = [{"InstanceId": "i-1", "NetworkNodes": ["nn-1", "nn-2", "nn-3"]}, {"InstanceId": "i-2", "NetworkNodes": []}]
    place, kube, asked = label_nodes(monkeypatch, items, told)
    place.create()
    assert asked == [("ec2", "describe_instance_topology", {"InstanceIds": ["i-1", "i-2"]})]
    labels = {f"{LAYER}{number}": f"nn-{number}" for number in (1, 2, 3)}
    assert kube.patches == [("/api/v1/nodes/a", {"metadata": {"labels": labels}})]
    problem = "EC2 does not report the position of 1 of 5 machines."
    assert place.poll() == Readiness(True, facts={"topology_problem": problem})
    assert (place.name, place.needs, place.goes_with, place.find()) == (
        "demo-2/topology",
        ("workers",),
        "workers",
        None,
    )


def test_nodes_that_have_their_labels_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    place, _, asked = label_nodes(monkeypatch, [node("a", "aws:///x/i-1", **{f"{LAYER}1": "nn-1"})], [])
    place.create()
    assert asked == []
    assert place.poll() == Readiness(True, facts={"topology_problem": None})


@pytest.mark.parametrize("error", [DENIED, UsageError("not in this region")])
def test_places_that_ec2_does_not_tell_are_a_problem_of_the_record(
    monkeypatch: pytest.MonkeyPatch, error: MlbenchError
) -> None:
    place, _, _ = label_nodes(monkeypatch, [node("a", "aws:///x/i-1")], error)
    place.create()
    assert place.poll().facts == {"topology_problem": error.message}


@pytest.mark.parametrize(
    "error", [TransientError("throttled"), NotFoundError("no such instance"), CapacityError("odd")]
)
def test_ec2_is_asked_for_a_minute(monkeypatch: pytest.MonkeyPatch, error: MlbenchError) -> None:
    now = [50.0]
    monkeypatch.setattr(topology, "time", SimpleNamespace(monotonic=lambda: now[0]))
    place, _, _ = label_nodes(monkeypatch, [node("a", "aws:///x/i-1")], error)
    for now[0] in (50.0, 109.9):
        with pytest.raises(TransientError, match=error.message):
            place.create()
    now[0] = 110.0
    place.create()
    assert place.poll().facts == {"topology_problem": error.message}


# --- EKS: prices ----------------------------------------------------------------------------------------------------


def product(*dimensions: Any, kind: str = "OnDemand") -> str:
    return json.dumps({"terms": {kind: {"t": {"priceDimensions": dict(enumerate(dimensions))}}}})


def dimension(amount: str | None, unit: str = "Hrs") -> Any:
    return {"unit": unit, "pricePerUnit": {} if amount is None else {"USD": amount}}


class PriceList:
    """AWS' price list: products by machine."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.asked: list[dict[str, Any]] = []

    def pages(self, service: str, operation: str, key: str, ServiceCode: str, Filters: Any) -> Any:
        assert (service, operation, key, ServiceCode) == ("pricing", "get_products", "PriceList", "AmazonEC2")
        assert {item["Type"] for item in Filters} == {"TERM_MATCH"}
        filters = {item["Field"]: item["Value"] for item in Filters}
        self.asked.append(filters)
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers.get(filters["instanceType"], [])


@pytest.mark.parametrize(
    ("products", "price"),
    [
        ([product(dimension("1.006"))], 1.006),
        ([product(dimension("1.0"), dimension("2.0"))], 2.0),
        ([product(dimension("1.0")), product(dimension("3.0"))], 3.0),
        ([product(dimension("0.0"))], None),
        ([product(dimension(None))], None),
        ([product(dimension("5.0", "Quantity"))], None),
        ([product(dimension("5.0"), kind="Reserved")], None),
        (["{}"], None),
        ([], None),
    ],
)
def test_a_machine_costs_the_highest_hourly_price_of_its_products(
    monkeypatch: pytest.MonkeyPatch, products: list[str], price: float | None
) -> None:
    found = PriceList({"g5.xlarge": products})
    monkeypatch.setattr(prices, "aws_in", lambda region: found if region == "us-east-1" else None)
    assert prices.ask_price("g5.xlarge", "eu-west-1") == price
    assert found.asked == [
        {
            "serviceCode": "AmazonEC2",
            "preInstalledSw": "NA",
            "operatingSystem": "Linux",
            "capacitystatus": "Used",
            "marketoption": "OnDemand",
            "tenancy": "Shared",
            "productFamily": "Compute Instance",
            "regionCode": "eu-west-1",
            "instanceType": "g5.xlarge",
        }
    ]
    monkeypatch.setattr(prices, "aws_in", lambda region: PriceList(DENIED))
    assert prices.ask_price("g5.xlarge", "eu-west-1") is None


def test_all_machines_of_the_table_are_asked_for_in_each_region(monkeypatch: pytest.MonkeyPatch) -> None:
    found = PriceList({"g5.xlarge": [product(dimension("1.0"))], "t3.medium": [product(dimension("0.1"))]})
    monkeypatch.setattr(prices, "Aws", lambda region: found if region == "us-east-1" else None)
    fetched = prices.fetch_prices(["eu-west-1", "us-west-2"])
    each = {"g5.xlarge": 1.0, "t3.medium": 0.1}
    assert (fetched.provider, fetched.source) == ("eks", "AWS Price List")
    assert (fetched.on_demand, fetched.spot) == ({"eu-west-1": each, "us-west-2": each}, {})
    assert {item["instanceType"] for item in found.asked} > set(GPU_MACHINES)


COLUMNS = [
    "TermType",
    "Unit",
    "Currency",
    "Product Family",
    "Operating System",
    "Pre Installed S/W",
    "CapacityStatus",
    "Tenancy",
]
GOOD = ["OnDemand", "Hrs", "USD", "Compute Instance", "Linux", "NA", "Used", "Shared"]


def offers(*rows: list[str]) -> list[str]:
    header = [*COLUMNS, "Instance Type", "PricePerUnit"]
    return [f"about {number}" for number in range(5)] + [",".join(row) for row in (header, *rows)]


def test_an_offer_file_has_five_lines_before_its_header() -> None:
    rows = [
        [*GOOD, "g5.xlarge", "1.006"],
        [*GOOD, "g5.xlarge", "0.5"],
        [*GOOD, "t3.medium", "0.0"],
        [*GOOD, "z9.unknown", "7"],
        [*GOOD, "g5.2xlarge"],
    ]
    assert prices.read_offers(offers(*rows)) == {"g5.xlarge": 1.006}
    with pytest.raises(KeyError):
        prices.read_offers(offers()[1:])


@pytest.mark.parametrize("column", range(len(COLUMNS)))
def test_another_offer_for_the_same_machine_is_left_out(column: int) -> None:
    other = ["x" if number == column else value for number, value in enumerate(GOOD)]
    assert prices.read_offers(offers([*other, "g5.xlarge", "9"])) == {}


def test_without_credentials_the_public_files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, Any] = {
        "eu-west-1": "\n".join(offers([*GOOD, "g5.xlarge", "1.006"])).encode(),
        "eu-west-9": HTTPError("u", 404, "none", {}, None),  # type: ignore[arg-type]
        "eu-west-2": "\n".join(offers()).encode(),
    }
    base = "https://pricing.us-east-1.amazonaws.com/offers/v1.0/aws/AmazonEC2/current"

    def urlopen(url: str, timeout: float) -> Any:
        region = url.split("/")[-2]
        assert url == f"{base}/{region}/index.csv"
        if isinstance(files[region], Exception):
            raise files[region]
        return io.BytesIO(files[region])

    unknown = CredentialError("none", details={"configured": False})
    monkeypatch.delenv("MLBENCH_AWS_PRICES_ENDPOINT", raising=False)
    monkeypatch.setattr(prices, "Aws", lambda region: PriceList(unknown))
    monkeypatch.setattr(prices, "urlopen", urlopen)
    fetched = prices.fetch_prices(["eu-west-1", "eu-west-9", "eu-west-2"])
    assert (fetched.source, fetched.on_demand) == ("AWS price list file", {"eu-west-1": {"g5.xlarge": 1.006}})
    for error in (HTTPError("u", 503, "busy", {}, None), URLError("no network"), KeyError("Unit")):  # type: ignore[arg-type]
        files["eu-west-1"] = error
        with pytest.raises(UnreachableError, match="eu-west-1"):
            prices.fetch_prices(["eu-west-1"])


def test_credentials_that_are_rejected_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "Aws", lambda region: PriceList(DENIED))
    with pytest.raises(CredentialError):
        prices.fetch_prices(["eu-west-1"])


# --- GKE: fast networks ---------------------------------------------------------------------------------------------


def gke_plane(**details: Any) -> Any:
    return SimpleNamespace(name="demo-2", access=None, cluster=Cluster("demo-2", "gke", details=details))


def condition(status: str, message: str | None = None) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": "Ready", "status": status, "message": message}]}}


def test_each_fast_network_has_two_objects_of_kubernetes() -> None:
    objects = NetworkObjects(gke_plane(), FabricKind.TCPX, ())
    found = [(item["kind"], item["metadata"]["name"]) for item in objects.documents()]
    assert sorted(found) == sorted(
        (kind, f"vpc{number}") for number in (1, 2, 3, 4) for kind in ("GKENetworkParamSet", "Network")
    )
    assert objects.networks["vpc1"] == "mlbench-demo-2-net1"
    assert objects.name == "demo-2/vpc1…vpc4"
    assert len(NetworkObjects(gke_plane(), FabricKind.TCPXO, ()).documents()) == 16


def test_networks_are_ready_when_gke_has_accepted_every_one() -> None:
    objects = NetworkObjects(gke_plane(), FabricKind.TCPX, ())
    shown: dict[str, Any] = {}
    objects.read = lambda document: shown.get(document["metadata"]["name"])  # type: ignore[method-assign]
    assert objects.poll() == Readiness(False, "vpc1 is not ready: GKE has not processed it yet")
    shown |= {f"vpc{number}": condition("True") for number in (1, 2, 3)}
    shown["vpc4"] = condition("False", "no such subnet")
    assert objects.poll() == Readiness(False, "vpc4 is not ready: no such subnet")
    shown["vpc4"] = condition("True")
    assert objects.poll() == Readiness(True)


def installer(kind: FabricKind = FabricKind.TCPX, report: Any = None, count: int = 2, **details: Any) -> Any:
    probe: Any = None if report is None else SimpleNamespace(report=report)
    return NcclInstaller(gke_plane(**details), kind, count, "pool", probe)  # type: ignore[arg-type]


def test_nccls_plugin_is_that_of_the_driver_that_the_probe_found() -> None:
    assert installer().branch is None
    assert installer(report={"driver": "580.1"}).branch == 580
    assert installer(report={}, gpu_probe={"driver": "535.2"}).branch == 535
    assert installer(report={"driver": "580.1"}, gpu_probe={"driver": "535.2"}).branch == 580
    assert installer().needs == ("pool",)
    assert len(installer(report={}).needs) == 2
    assert installer(report={"driver": "580.1"}).release == choose_release(FabricKind.TCPX, 580)


def test_an_installer_of_another_plugin_is_replaced() -> None:
    found = installer()
    document = found.documents()[-1]
    found.read = lambda wanted: document
    assert found.find() == ResourceStatus("there")
    other = json.loads(json.dumps(document))
    other["spec"]["template"]["spec"]["initContainers"][0]["image"] += "-old"
    found.read = lambda wanted: other
    assert found.find() is None
    found.read = lambda wanted: None
    assert found.find() is None


def test_the_plugin_is_awaited_on_every_worker() -> None:
    found = installer()
    ready: dict[str, int] = {}

    def read(document: Any) -> Any:
        name = document["metadata"]["name"]
        return {"status": {"numberReady": ready[name]}} if name in ready else None

    found.read = read
    names = [document["metadata"]["name"] for document in found.documents() if document["kind"] == "DaemonSet"]
    assert found.poll() == Readiness(False, f"{names[0]} is ready on 0 of 2 machines")
    ready |= dict.fromkeys(names, 2)
    ready[names[-1]] = 1
    assert found.poll() == Readiness(False, f"{names[-1]} is ready on 1 of 2 machines")
    ready[names[-1]] = 2
    assert found.poll() == Readiness(True)


def test_only_cards_that_pods_reach_by_the_injector_need_it() -> None:
    kinds = {kind: len(installer(kind).documents()) for kind in FabricKind}
    assert kinds[FabricKind.GIB] < kinds[FabricKind.TCPX] == kinds[FabricKind.TCPXO]
