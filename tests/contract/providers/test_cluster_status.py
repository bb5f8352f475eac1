"""`mlbench status --cluster`, on KIND's stand-ins."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from tests.fakes.kind_tools import World

ROOT = Path(__file__).parents[3]
Command = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("world")  # no other Docker


def test_a_cluster_with_its_resources_price_and_end(command: Command) -> None:
    assert command("create-cluster", "kind", "2", "rel", "--ttl", "2h").code == 0
    document = command("status", "--cluster", "rel-2", "-o", "json").json
    assert document["cluster"]["state"] == "ready"
    assert document["cluster"]["functional_only"] is True
    assert document["cluster"]["expires"].startswith("20")
    assert document["price"]["per_hour"] == 0
    assert [item["state"] for item in document["resources"]] == ["ready", "ready"]
    assert document["provisioning_seconds"] == max(item["ready"] for item in document["resources"])
    assert document["removal_seconds"] is None
    text = command("status", "--cluster", "rel-2").out
    assert "KIND cluster   rel-2" in text
    assert "free" in text
    assert "Expires:  in " in text
    assert "REMOVAL" not in text


def test_the_cloud_says_what_is_there_now(command: Command, world: World) -> None:
    command("create-cluster", "kind", "2", "rel")
    found = command("status", "--cluster", "rel-2", "--cloud", "-o", "json").json
    assert {item["kind"]: item["found"] is not None for item in found["resources"]}["KIND cluster"]
    assert not [item for item in found["findings"] if item["code"] == "missing"]
    world.change(containers={})
    document = command("status", "--cluster", "rel-2", "--cloud", "-o", "json").json
    assert {item["kind"]: item["found"] for item in document["resources"]}["KIND cluster"] is None
    assert [item["code"] for item in document["findings"] if "KIND cluster" in item["summary"]] == ["missing"]


def test_one_that_was_not_finished_says_why(command: Command, world: World) -> None:
    world.change(trouble={"kind create": "fail"})
    command("create-cluster", "kind", "2", "rel")
    document = command("status", "--cluster", "rel-2", "-o", "json").json
    assert document["cluster"]["state"] == "failed"
    assert document["provisioning_seconds"] is None
    (finding,) = [item for item in document["findings"] if item["code"] != "planned"]
    assert finding["code"] == "usage"
    assert {item["state"] for item in document["resources"]} == {"ready", "not finished"}
    assert finding["summary"] in command("status", "--cluster", "rel-2").out


def test_one_that_nobody_goes_on_with_is_told(command: Command, world: World) -> None:
    command("create-cluster", "kind", "2", "rel", "--ttl", "0")
    store = Store()
    cluster = store.cluster("rel-2")
    store.record_cluster(replace(cluster, state="creating"))
    codes = {item["code"] for item in command("status", "--cluster", "rel-2", "-o", "json").json["findings"]}
    assert codes >= {"abandoned", "expired"}


def test_a_removed_cluster_is_still_a_result(command: Command) -> None:
    command("create-cluster", "kind", "2", "rel")
    command("delete-cluster", "rel-2", "--yes")
    document = command("status", "--cluster", "rel-2", "-o", "json").json
    assert document["cluster"]["state"] == "removed"
    assert document["cluster"]["removed"] > document["cluster"]["created"]
    assert {item["state"] for item in document["resources"]} == {"gone"}
    assert document["removal_seconds"] > 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["status", "--cluster", "rel-3"], 4, "no cluster"),
        (["status", "--cloud"], 2, "--cluster NAME"),
        (["status", "a-1", "--cluster", "local"], 2, "which are about runs"),
    ],
)
def test_wrong_words(command: Command, words: list[str], code: int, says: str) -> None:
    done = command(*words)
    assert (done.code, says in done.err) == (code, True), done.err


PROBE = """
import sys
from mlbench_cli.app import run
assert run(sys.argv[1:]) == 0
print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["list-clusters"],
        ["list-clusters", "-o", "json"],
        ["status", "--cluster", "far-2"],
        ["status", "--cluster", "wide-2", "-o", "json"],
        ["set-cluster", "far-2"],
    ],
    ids=" ".join,
)
def test_what_is_known_here_needs_no_clouds_library(tmp_path: Path, words: list[str]) -> None:
    store = Store(tmp_path)
    for name, provider in (("far-2", "gke"), ("wide-2", "eks")):
        store.record_cluster(Cluster(name, provider, details={"nodes": 2, "plan": {"price_per_hour": 1.5}}))
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words],
        env={"MLBENCH_HOME": str(tmp_path), "PATH": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = {name.split(".")[0] for name in done.stderr.splitlines()[-1].split()}
    assert not loaded & {"boto3", "botocore", "google", "grpc", "urllib3", "requests"}
