"""What every cloud keeps, the toy cloud of docs/development/new-cloud.md among them: its files, and clusters that are
known by their tags on every machine, belong to those who created them, and leave nothing."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import providers
from mlbench_cli.app import run
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.storage.store import Store
from providers import registry
from providers.base import OWNER_TAG, Provider
from tests.contract.providers.conftest import Told
from tests.contract.providers.eks_world import REGION
from tests.documentation import ROOT, read_blocks

PAGE = ROOT / "docs" / "development" / "new-cloud.md"
ROLES = {"provider", "options", "api", "resources", "quota", "discover"}
FOREIGN = '{"Resources": {"Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.0.0.0/16"}}}}'
Command = Callable[..., Told]


@dataclass(frozen=True)
class Cloud:
    """A cloud with its fake server. `left` lists what is there of a cluster; `put_foreign` makes a thing of that name
    without tags."""

    name: str
    words: tuple[str, ...]
    left: Callable[[str], list[str]]
    put_foreign: Callable[[str], object]
    folder: Path


def _kind(request: pytest.FixtureRequest) -> Cloud:
    world = request.getfixturevalue("world")
    node = {"state": "running", "files": {}, "images": [], "finished": True}

    def put(name: str) -> None:
        world.change(containers={f"{name}-{part}": {**node, "cluster": name} for part in ("control-plane", "worker")})

    return Cloud("kind", (), lambda name: world.left, put, _folder("kind"))


def _gke(request: pytest.FixtureRequest) -> Cloud:
    world, command = request.getfixturevalue("gke_world"), request.getfixturevalue("command")

    def put(name: str) -> None:
        release, _, count = name.rpartition("-")
        assert command("create-cluster", "gke", count, release, "-t", "n1-standard-4", "--yes").code == 0
        Store().forget_cluster(Store().cluster(name))
        world.find_cluster(name).resource_labels = {"team": "production"}

    return Cloud("gke", ("-t", "n1-standard-4"), lambda name: [*world.clusters], put, _folder("gke"))


def _eks(request: pytest.FixtureRequest) -> Cloud:
    from providers.eks.api import aws_in

    aws = request.getfixturevalue("aws")

    def put(name: str) -> None:
        stack = {"StackName": f"mlbench-{name}", "TemplateBody": FOREIGN, "Capabilities": ["CAPABILITY_IAM"]}
        aws_in(REGION).call("cloudformation", "create_stack", **stack)

    return Cloud("eks", ("-t", "m5.large", "--region", REGION), aws.list_left, put, _folder("eks"))


def _aks(request: pytest.FixtureRequest) -> Cloud:
    world = request.getfixturevalue("azure_world")

    def put(name: str) -> None:
        world.put_group(f"mlbench-{name}-eastus", {"location": "eastus", "tags": {"team": "production"}})

    return Cloud("aks", (), lambda name: [*world.groups, *world.clusters, *world.others], put, _folder("aks"))


def _toy(request: pytest.FixtureRequest) -> Cloud:
    toy: Path = request.getfixturevalue("toy")

    def put(name: str) -> None:
        (toy / f"plane-{name}.json").write_text(json.dumps({"name": name, "tags": {"team": "production"}}))

    return Cloud("toy", (), lambda name: sorted(path.name for path in toy.iterdir()), put, toy.parent / "code" / "toy")


CLOUDS = {"kind": _kind, "gke": _gke, "eks": _eks, "aks": _aks, "toy": _toy}


def _folder(name: str) -> Path:
    return Path(providers.__path__[0]) / name


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The toy cloud as the page describes it: its files beside the registered clouds, and its price rows."""
    for block in read_blocks(PAGE):
        if block.title:
            path = tmp_path / "code" / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setitem(registry.PROVIDERS, "toy", "toy.provider:ToyProvider")
    monkeypatch.setattr(registry, "PAID", (*registry.PAID, "toy"))
    (tmp_path / "cloud").mkdir()
    monkeypatch.setenv("TOY_CLOUD", str(tmp_path / "cloud"))
    monkeypatch.setenv("MLBENCH_CONNECT_TIMEOUT", "1s")
    yield tmp_path / "cloud"
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
        del sys.modules[name]


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest, move: Callable[[str], None]) -> Cloud:
    made = CLOUDS[request.param](request)
    move("home")
    return made


@pytest.fixture
def move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """To a machine with a data folder of its own."""

    def go(name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / name))
        for block in read_blocks(PAGE):
            if block.title == "machines.csv":
                (tmp_path / name / block.title).write_text(block.text)

    return go


def test_a_cloud_has_six_files_with_the_same_names(cloud: Cloud) -> None:
    assert {path.stem for path in cloud.folder.glob("*.py")} - {"__init__"} == ROLES
    made = registry.load(cloud.name)
    assert isinstance(made, Provider)
    assert made.summary
    assert made.minutes != Provider.minutes


def test_a_cluster_is_known_by_its_tags_and_goes_from_any_machine(
    cloud: Cloud, command: Command, move: Callable[[str], None]
) -> None:
    words = (cloud.name, "2", "rel", *cloud.words)
    planned = command("create-cluster", *words, "--dry-run", "-o", "json")
    assert planned.code == 0, planned.err
    assert planned.json["plan"]["lines"]
    assert cloud.left("rel-2") == []
    ttl = ("--ttl", "2h") if cloud.name in registry.PAID else ()
    made = command("create-cluster", *words, *ttl, "--yes", "-o", "json")
    assert made.code == 0, made.err
    here = made.json["cluster"]
    assert here["state"] == "ready"
    assert here["details"]["provisioning"]
    again = command("create-cluster", *words, *ttl, "--yes", "-o", "json")
    assert again.code == 0, again.err
    made_when = [
        [(entry["name"], entry["accepted"], entry["ready"]) for entry in one.json["cluster"]["details"]["provisioning"]]
        for one in (made, again)
    ]
    assert made_when[0] == made_when[1]  # all of it is there
    move("elsewhere")
    (there,) = _list_clusters(command)
    same = ("name", "provider", "account", "location")
    assert [there[key] for key in same] == [here[key] for key in same]
    (found,) = registry.load(cloud.name).discover({"location": there["location"]} if there["location"] else {})
    tagged, told = ClusterDetails.of(found), here["details"]
    assert (tagged.owner, tagged.nodes, tagged.machine_type) == (told["owner"], 2, told.get("machine_type"))
    assert (tagged.expires is not None) == bool(ttl)
    assert command("gc", cloud.name, "--dry-run").out == "Nothing to delete.\n"
    removed = command("delete-cluster", cloud.name, "rel-2", "--yes")
    assert removed.code == 0, removed.err
    assert cloud.left("rel-2") == []
    move("home")  # where it was created, and nobody has told that it is gone
    assert [(item["name"], item["state"]) for item in _list_clusters(command)] == [("rel-2", "gone")]
    forgotten = command("gc", cloud.name)
    assert (forgotten.code, "its record is removed" in forgotten.err) == (0, True), forgotten.err
    assert [item.name for item in Store().clusters() if item.name == "rel-2"] == []


def test_a_cluster_of_an_older_version_is_shown_and_deleted(cloud: Cloud, command: Command) -> None:
    """Its record lacks what is recorded today, and has an option that has gone since."""
    assert command("create-cluster", cloud.name, "2", "old", *cloud.words, "--yes").code == 0
    store = Store()
    cluster = store.cluster("old-2")
    old = ("nodes", "machine_type", "project", "subscription", "location", "expires")
    known = {key: cluster.details[key] for key in old if key in cluster.details}
    kept = {key: value for key, value in cluster.details["options"].items() if value and key in ("zone", "region")}
    store.record_cluster(replace(cluster, details={**known, "options": {**kept, "an_option_that_has_gone": True}}))
    assert "old-2" in command("list-clusters", "--cloud").out
    deleted = command("delete-cluster", cloud.name, "old-2", "--yes")
    assert deleted.code == 0, deleted.err
    assert cloud.left("old-2") == []


def _list_clusters(command: Command) -> list[Any]:
    """Those that the clouds show, without this machine."""
    listed = command("list-clusters", "--cloud", "-o", "json").json["clusters"]
    return [item for item in listed if item["name"] != "local"]


def test_a_thing_of_somebody_else_is_left_alone(cloud: Cloud, command: Command) -> None:
    cloud.put_foreign("theirs-2")
    before = cloud.left("theirs-2")
    assert before
    refused = command("create-cluster", cloud.name, "2", "theirs", *cloud.words, "--yes")
    assert (refused.code, "not created by mlbench" in refused.err) == (2, True), refused.err
    assert command("delete-cluster", cloud.name, "theirs-2", "--yes").code != 0
    collected = command("gc", cloud.name, "--all", "--everybody", "--yes")
    assert collected.out == "Nothing to delete.\n", collected.err
    assert cloud.left("theirs-2") == before


# --- the toy cloud alone: what the page says of kills, refusals, prices and doctor ------------------------------------


def _die_at(call: int, words: tuple[str, ...]) -> bool:
    """Run a command in a process that is killed at that call of the cloud's API, and whether it was."""
    child = os.fork()
    if not child:
        import toy.api  # type: ignore[import-not-found]

        count = iter(range(1_000_000))

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def asked(*args: Any, **more: Any) -> Any:
                answer = function(*args, **more)
                if next(count) == call:
                    os.kill(os.getpid(), signal.SIGKILL)  # the request has arrived, its answer has not
                return answer

            return asked

        for name in ("find", "create", "delete", "list_all"):
            setattr(toy.api, name, counted(getattr(toy.api, name)))
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os._exit(run(list(words)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("words", [("create-cluster", "toy", "2", "rel"), ("delete-cluster", "toy", "rel-2")])
def test_a_client_killed_at_any_call_leaves_nothing_that_is_not_found(
    words: tuple[str, ...], toy: Path, command: Command, move: Callable[[str], None]
) -> None:
    for call in range(100):
        move(f"home-{call}")
        if words[0] == "delete-cluster":
            assert command("create-cluster", "toy", "2", "rel", "--yes").code == 0
        if not _die_at(call, (*words, "--yes")):
            break
        move(f"elsewhere-{call}")
        if left := list(toy.iterdir()):
            assert [item["name"] for item in _list_clusters(command)] == ["rel-2"], left
            assert all(OWNER_TAG in json.loads(path.read_text())["tags"] for path in left)
            assert command("delete-cluster", "toy", "rel-2", "--yes").code == 0
        assert list(toy.iterdir()) == []
    assert call > 5
    assert command("delete-cluster", "toy", "rel-2", "--yes").code in (0, 4)
    assert list(toy.iterdir()) == []


def test_the_toy_cloud_has_prices_refusals_and_checks(
    toy: Path, command: Command, move: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    move("home")
    planned = command("create-cluster", "toy", "2", "rel", "--dry-run", "-o", "json")
    assert planned.json["plan"]["price_per_hour"] == pytest.approx(0.2)
    unknown = command("create-cluster", "toy", "2", "rel", "-t", "toy.large", "--dry-run", "-o", "json")
    assert unknown.json["plan"]["price_per_hour"] is None
    assert command("create-cluster", "toy", "9", "rel", "--yes").code == 5
    assert command("create-cluster", "toy", "2", "rel", "-t", "big", "--yes").code == 2
    assert command("doctor", "toy").code == 0
    monkeypatch.delenv("TOY_CLOUD")
    assert command("doctor", "toy").code == 3
    assert command("create-cluster", "toy", "2", "rel", "--yes").code == 3
    assert list(toy.iterdir()) == []
