"""The KIND provider with the real `kind` and `docker`: made, used, killed half-way, removed from nothing.

MLBENCH_TEST_NODE_IMAGE names a node image if kind's own cannot be pulled, and
MLBENCH_TEST_LOAD_IMAGE an image with a shell to put on the nodes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.kube.access import Access

NODE_IMAGE = os.environ.get("MLBENCH_TEST_NODE_IMAGE")
LOAD_IMAGE = os.environ.get("MLBENCH_TEST_LOAD_IMAGE")
NAMES = ("mlbench-test-1", "mlbench-half-1")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (shutil.which("kind") and shutil.which("docker")), reason="needs kind and Docker"),
]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    for name in NAMES:
        subprocess.run(["kind", "delete", "cluster", "--name", name], check=False, capture_output=True)
        subprocess.run(["docker", "volume", "rm", "-f", f"mlbench-{name}"], check=False, capture_output=True)


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "mlbench_cli", *words]


def _mlbench(home: Path, *words: str, code: int = 0) -> str:
    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    done = subprocess.run(_command(*words), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


def _create_words(release: str, *more: str) -> list[str]:
    image = ["--image", NODE_IMAGE] if NODE_IMAGE else []
    return ["create-cluster", "kind", "1", release, *image, *more]


def list_left_in_docker(name: str) -> list[str]:
    containers = ["docker", "ps", "-aq", "--filter", f"label=io.x-k8s.kind.cluster={name}"]
    volumes = ["docker", "volume", "ls", "-q", "--filter", f"label=mlbench-cluster={name}"]
    return [line for command in (containers, volumes) for line in subprocess.check_output(command, text=True).split()]


def _get(home: Path, name: str, path: str) -> dict[str, Any]:
    file = home / f"{name}.yaml"
    subprocess.run(["kind", "export", "kubeconfig", "--name", name, "--kubeconfig", str(file)], check=True)
    with Access.from_kubeconfig(file).client() as api:
        return api.get(path)


def test_make_use_and_remove(tmp_path: Path) -> None:
    load = ["--load", LOAD_IMAGE] if LOAD_IMAGE else []
    users = tmp_path / "users-kubeconfig"
    os.environ["KUBECONFIG"] = str(users)
    try:
        made = json.loads(_mlbench(tmp_path, *_create_words("mlbench-test", *load, "--num-cpus", "1", "-o", "json")))
        name = made["cluster"]["name"]
        assert made["cluster"]["details"]["functional_only"] is True
        nodes = _get(tmp_path, name, "/api/v1/nodes")["items"]
        ready = {
            node["metadata"]["name"]: next(c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready")
            for node in nodes
        }
        assert ready == {f"{name}-control-plane": "True", f"{name}-worker": "True"}
        assert {node["status"]["allocatable"]["cpu"] for node in nodes} == {"1"}
        if LOAD_IMAGE:
            node = f"{name}-worker"
            subprocess.run(["docker", "exec", node, "crictl", "inspecti", LOAD_IMAGE], check=True, capture_output=True)
        again = json.loads(_mlbench(tmp_path, *_create_words("mlbench-test", *load, "-o", "json")))  # adopted as it is
        assert again["cluster"]["details"]["provisioning"] == made["cluster"]["details"]["provisioning"]
        # From another data folder, twice.
        _mlbench(tmp_path / "other", "delete-cluster", "kind", name, "--yes")
        assert list_left_in_docker(name) == []
        _mlbench(tmp_path / "other", "delete-cluster", "kind", name, "--yes")
        assert not users.exists(), "the user's kubeconfig was written"
    finally:
        del os.environ["KUBECONFIG"]


def test_killed_half_way_nothing_leaks(tmp_path: Path) -> None:
    environment = {**os.environ, "MLBENCH_HOME": str(tmp_path / "first")}
    client = subprocess.Popen(_command(*_create_words("mlbench-half")), env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not any(len(item) == 12 for item in list_left_in_docker("mlbench-half-1")) and time.monotonic() < deadline:
        time.sleep(0.2)
    client.send_signal(signal.SIGKILL)
    client.wait()
    assert list_left_in_docker("mlbench-half-1")
    # kind goes on without its client; the removal waits for it.
    _mlbench(tmp_path / "second", "delete-cluster", "kind", "mlbench-half-1", "--yes")
    assert list_left_in_docker("mlbench-half-1") == []
    time.sleep(3)
    assert list_left_in_docker("mlbench-half-1") == []
