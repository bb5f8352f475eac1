"""Networks of a given rate between pods of a real cluster: shaped from the nodes, proved, or refused with reasons."""

import json
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mlbench_cli
from tests.e2e.conftest import CLUSTER, Mlbench

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

TASK = ("--task", "digits_resnet", "--preset", "tiny", "--set", "epochs=1", "--backend", "gloo", "--yes")
ONE_NODE = ("--no-spread", "--share-nodes")  # the servers of a run need a node of their own, too
IMAGE = f"localhost/mlbench/allreduce:{mlbench_cli.__version__}"
BARE = ("--command", "sh -c 'echo the command runs'", "--image", IMAGE, "--backend", "gloo", "--yes")
PLUGINS = "/usr/lib/cni"
# Sorts before the network's own file, so that containerd takes this one: the same, and the plugin "bandwidth" after it.
WITH_BANDWIDTH = r"""
set -e
cd /etc/cni/net.d
file=$(ls *.conflist | head -n 1)
plugin='{"type": "bandwidth", "capabilities": {"bandwidth": true}}'
sed "s/^\(.*\)\]}[[:space:]]*\$/\1, $plugin]}/" "$file" >00-test.conflist
grep -q bandwidth 00-test.conflist
"""


def on_node(node: str, script: str) -> str:
    words = ["docker", "exec", node, "sh", "-c", script]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def list_nodes() -> list[str]:
    words = ["kind", "get", "nodes", "--name", CLUSTER]
    nodes = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    return [node for node in nodes if "control-plane" not in node]


def documents(mlbench: Mlbench, name: str, folder: Path) -> dict[str, str]:
    archive = folder / f"{name}.zip"
    mlbench("download", name, "--output", str(archive))
    mlbench("verify", str(archive))
    with zipfile.ZipFile(archive) as file:
        return {Path(member).name: file.read(member).decode("utf-8", "replace") for member in file.namelist()}


def has_netem() -> bool:
    """Whether the kernel that all nodes share delays packets."""
    found = subprocess.run(
        ["docker", "exec", list_nodes()[0], "tc", "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "0us"],
        capture_output=True,
    )
    if found.returncode == 0:
        on_node(list_nodes()[0], "tc qdisc del dev lo root")
    return found.returncode == 0


def test_pods_train_over_the_rate_that_was_asked_for_and_nothing_is_left(mlbench: Mlbench, tmp_path: Path) -> None:
    mlbench("run", "shaped", "2", *TASK, "--network", "50mbit")
    found = documents(mlbench, "shaped-2", tmp_path)
    network = json.loads(found["network.json"])
    assert (network["asked"], network["method"], network["summary"]["held"]) == ("50mbit", "nsenter", True), network
    assert network["setup"]["discipline"] == ("netem" if has_netem() else "tbf")
    assert all(link["together_bits_per_second"] <= 51e6 for link in network["probes"][0]["links"])
    assert "Network between the ranks: emulated 50mbit (got " in found["official_result.txt"]
    assert json.loads(found["result.json"])["label"]["word"] == "functional"
    mlbench("delete", "shaped-2", "--yes")
    for node in list_nodes():
        assert not any(word in on_node(node, "tc qdisc show") for word in ("tbf", "netem"))


def test_parameter_servers_have_links_of_that_rate_too(mlbench: Mlbench, tmp_path: Path) -> None:
    mlbench("run", "served", "2", *TASK, "--method", "bsp-ps", "--servers", "1", *ONE_NODE, "--network", "50mbit")
    network = json.loads(documents(mlbench, "served-2", tmp_path)["network.json"])
    assert (network["method"], network["summary"]["held"], network["setup"]["links"]) == ("nsenter", True, 3), network
    assert network["probes"][0]["ranks"] == 3
    assert all(link["together_bits_per_second"] <= 51e6 for link in network["probes"][0]["links"])
    mlbench("delete", "served-2", "--yes")


def test_a_delay_is_shaped_by_the_kernel_or_refused_with_the_reason(mlbench: Mlbench, tmp_path: Path) -> None:
    if has_netem():
        mlbench("run", "delayed", "2", *BARE, "--network", "50mbit,20ms")
        network = json.loads(documents(mlbench, "delayed-2", tmp_path)["network.json"])
        assert network["summary"]["held"] is True
        assert 0.04 <= network["summary"]["rtt_seconds"] <= 0.044
    else:
        mlbench("run", "delayed", "2", *BARE, "--network", "50mbit,20ms", exit_code=5)
        status = mlbench.json("status", "delayed-2")
        assert status["outcome"] == "never_started"
        assert status["findings"][0]["code"] == "network_not_as_asked"
        assert "the kernel of the node has no netem" in status["findings"][0]["summary"]
        assert "the command runs" not in mlbench("logs", "delayed-2", "--rank", "0")
    mlbench("delete", "delayed-2", "--yes")


def test_an_annotation_that_nobody_reads_is_refused(mlbench: Mlbench) -> None:
    words = ("--network", "50mbit", "--network-method", "annotation")
    mlbench("run", "ignored", "2", *BARE, *words, exit_code=5)
    finding = mlbench.json("status", "ignored-2")["findings"][0]
    assert "the cluster's network plugin does not limit pods by their annotations" in finding["summary"]
    assert finding["evidence"]["report"]["drained_bytes"] >= 600 << 20
    mlbench("delete", "ignored-2", "--yes")


@contextmanager
def bandwidth_plugin() -> Iterator[None]:
    nodes = list_nodes()
    if any(subprocess.run(["docker", "exec", node, "test", "-x", f"{PLUGINS}/bandwidth"]).returncode for node in nodes):
        pytest.skip("the nodes have no CNI plugin bandwidth")
    try:
        for node in nodes:
            on_node(node, WITH_BANDWIDTH)
        yield
    finally:
        for node in nodes:
            on_node(node, "rm -f /etc/cni/net.d/00-test.conflist")


def test_an_annotation_behind_containerd_lets_bursts_pass_and_is_refused(mlbench: Mlbench) -> None:
    """Each pause fills the bucket again, so that the first MiB after it is not limited."""
    with bandwidth_plugin():
        words = ("--network", "100mbit", "--network-method", "annotation")
        mlbench("run", "bursts", "2", *BARE, *words, exit_code=5)
    finding = mlbench.json("status", "bursts-2")["findings"][0]
    report = finding["evidence"]["report"]
    assert report["drained_bytes"] > 500 << 20, finding
    assert report["drained_bits_per_second"] < 110e6  # the steady rate, once the bucket was empty
    assert "it lets the first MiB after a pause through at" in finding["summary"]
    assert "containerd's default" in finding["summary"]
    assert "does not limit pods" not in finding["summary"]
    mlbench("delete", "bursts-2", "--yes")


def test_a_cluster_without_chaos_mesh_is_refused_before_anything_is_made(mlbench: Mlbench) -> None:
    mlbench("run", "chaos", "2", *BARE, "--network", "50mbit", "--network-method", "chaos-mesh", exit_code=2)
