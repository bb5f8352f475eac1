"""Runs wait for a node as long as an autoscaler may still add it, on a real Kubernetes.

A thread plays the autoscalers: it writes the events of the real ones on pods that have no node, in their words, and
after three minutes labels a node as one of the pool that the pods want.
"""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlbench_cli.kube.api import Api
from mlbench_cli.kube.objects import collection_path, condition
from mlbench_cli.util.times import now
from tests.e2e.conftest import Mlbench, attach
from tests.e2e.runs import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NODE_AFTER = 180.0  # seconds; without an autoscaler, a run that fits no node is given up after one minute
POOL = "mlbench-e2e/pool"  # a label that no node has at first
NOT_TRIGGERED = "pod didn't trigger scale-up: "
# What is said of the pods of each run: the event's source, reason and message.
AUTOSCALERS = {
    "karpenter": ("karpenter", "Nominated", "Pod should schedule on: nodeclaim/default-8f2kq"),
    "backoff": ("cluster-autoscaler", "NotTriggerScaleUp", f"{NOT_TRIGGERED}1 in backoff after failed scale-up"),
    "maximum": ("cluster-autoscaler", "NotTriggerScaleUp", f"{NOT_TRIGGERED}1 max node group size reached"),
}
NEVER = "never"  # a run whose pool no autoscaler extends, though one says that it is at it


def test_runs_wait_for_nodes_that_autoscalers_may_add(cluster: Cluster, tmp_path: Path) -> None:
    mlbench = attach(cluster, tmp_path / "home")
    limits = {NEVER: ("--start-timeout", "90s")}
    begun = time.monotonic()
    with cluster.access.client() as api, playing_autoscalers(api, cluster.access.namespace):
        runs = {name: start(mlbench, cluster, name, *limits.get(name, ())) for name in (*AUTOSCALERS, NEVER)}
        assert runs[NEVER].wait(240) == 6
        assert 90 <= time.monotonic() - begun < NODE_AFTER
        for name in AUTOSCALERS:
            assert runs[name].poll() is None, (tmp_path / f"{name}.log").read_text()
            assert "(--start-timeout)" in " ".join(mlbench("status", f"{name}-1").split())
        for name in AUTOSCALERS:
            assert runs[name].wait(300) == 0, (tmp_path / f"{name}.log").read_text()
        assert time.monotonic() - begun >= NODE_AFTER
    for name in AUTOSCALERS:
        assert mlbench.json("status", f"{name}-1")["outcome"] == "completed"
        assert mlbench("logs", f"{name}-1") == "here\n"
    ended = mlbench.json("status", f"{NEVER}-1")
    assert (ended["outcome"], ended["findings"][0]["code"]) == ("never_started", "start_timeout")
    for name in runs:
        mlbench("delete", f"{name}-1", "--yes", "--force")


def start(mlbench: Mlbench, cluster: Cluster, name: str, *more: str) -> subprocess.Popen[bytes]:
    """A run of one worker that wants a node of its pool."""
    words = [
        "--command",
        "echo here",
        "--image",
        cluster.image,
        "--backend",
        "gloo",
        "--set",
        "run.spread=no",
        "--set",
        "run.share_nodes=yes",
    ]
    words += ["--node-selector", f"{POOL}-{name}=yes", "--yes", *more]
    return mlbench.start("run", name, "1", *words, log=mlbench.home.parent / f"{name}.log")


@contextmanager
def playing_autoscalers(api: Api, namespace: str) -> Iterator[None]:
    """Nodes have their labels of before when this ends."""
    nodes = api.get("/api/v1/nodes", labelSelector="!node-role.kubernetes.io/control-plane")["items"]
    node = f"/api/v1/nodes/{nodes[0]['metadata']['name']}"
    ended = threading.Event()
    player = threading.Thread(target=_play, args=(api, namespace, node, ended))
    player.start()
    try:
        yield
    finally:
        ended.set()
        player.join()
        api.patch(node, {"metadata": {"labels": {f"{POOL}-{name}": None for name in AUTOSCALERS}}})


def _play(api: Api, namespace: str, node: str, ended: threading.Event) -> None:
    begun, told = time.monotonic(), set()
    while not ended.wait(1.0):
        for pod in api.get(collection_path("Pod", namespace), labelSelector="mlbench/run")["items"]:
            metadata, name = pod["metadata"], pod["metadata"]["labels"]["mlbench/run"].removesuffix("-1")
            if condition(pod, "PodScheduled").get("reason") == "Unschedulable" and metadata["uid"] not in told:
                told.add(metadata["uid"])
                _write_event(api, namespace, metadata, *AUTOSCALERS.get(name, AUTOSCALERS["karpenter"]))
        if time.monotonic() - begun > NODE_AFTER:
            api.patch(node, {"metadata": {"labels": {f"{POOL}-{name}": "yes" for name in AUTOSCALERS}}})


def _write_event(api: Api, namespace: str, pod: dict[str, str], source: str, reason: str, message: str) -> None:
    api.create(
        collection_path("Event", namespace),
        {
            "kind": "Event",
            "metadata": {"name": f"{pod['name']}.{reason.lower()}"},
            "involvedObject": {"kind": "Pod", "namespace": namespace, "name": pod["name"], "uid": pod["uid"]},
            "type": "Normal",
            "reason": reason,
            "message": message,
            "source": {"component": source},
            "firstTimestamp": now(),
            "lastTimestamp": now(),
        },
    )
