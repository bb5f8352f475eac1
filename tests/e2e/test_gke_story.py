"""From "no cluster" to a verified archive on GKE's double, with a real Kubernetes behind its door.

Google's side (cluster manager, sign-in, quotas) is tests/fakes/gke; the cluster that it hands out is a KIND cluster
that asks for Google's token and shows a certificate of the double's CA.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.kube.access import Access
from tests.fakes.gke import Google
from tests.fakes.kube_gate import KubeGate

NODE_IMAGE = os.environ.get("MLBENCH_TEST_NODE_IMAGE")
SHELL_IMAGE = os.environ.get("MLBENCH_TEST_LOAD_IMAGE")
NAME = "mlbench-gate-2"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (shutil.which("kind") and shutil.which("docker")), reason="needs kind and Docker"),
    pytest.mark.skipif(SHELL_IMAGE is None, reason="needs an image with a shell: MLBENCH_TEST_LOAD_IMAGE"),
]


def _mlbench(environment: dict[str, str], *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "mlbench_cli", *words]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Access]:
    environment = {"MLBENCH_HOME": str(tmp_path / "kind")}
    image = ["--image", NODE_IMAGE] if NODE_IMAGE else []
    try:
        _mlbench(environment, "create-cluster", "kind", "2", "mlbench-gate", "--load", str(SHELL_IMAGE), *image)
        file = tmp_path / "kind.yaml"
        _mlbench(environment, "kubeconfig", "export", NAME, "--file", str(file))
        yield Access.from_kubeconfig(file)
    finally:
        subprocess.run(["kind", "delete", "cluster", "--name", NAME], check=False, capture_output=True)
        subprocess.run(["docker", "volume", "rm", "-f", f"mlbench-{NAME}"], check=False, capture_output=True)


def test_create_run_download_delete(kubernetes: Access, tmp_path: Path) -> None:
    google = Google(tmp_path / "google")
    environment = {**google.environment, "MLBENCH_HOME": str(tmp_path / "home")}
    world = google.world
    gate = KubeGate(kubernetes, google.pem, lambda authorization: world.knows(authorization))
    try:
        _mlbench(environment, "create-cluster", "gke", "2", "rel", "--yes")
        # The machines have joined, as the double tells; now the real API takes its place.
        world.clusters["rel-2"].endpoint = f"127.0.0.1:{gate.port}"
        command = "sh -c 'echo rank $RANK of $WORLD_SIZE; echo done > $MLBENCH_OUTPUT_DIR/result'"
        words = ("--image", str(SHELL_IMAGE), "--command", command, "--backend", "gloo", "--no-spread", "--yes")
        told = json.loads(_mlbench(environment, "run", "story", "2", *words, "-o", "json"))
        assert told["runs"][0]["outcome"] == "completed"
        assert "rank 0 of 2" in _mlbench(environment, "logs", "story-2")
        archive = tmp_path / "story.zip"
        _mlbench(environment, "download", "story-2", "--output", str(archive))
        _mlbench(environment, "verify", str(archive))
        assert gate.passed > 0
        refused = Access(f"https://127.0.0.1:{gate.port}", ca=google.certificate).client()
        with pytest.raises(Exception, match="Unauthorized"):
            refused.get("/api/v1/nodes")
        assert gate.refused == 1
        _mlbench(environment, "delete-cluster", "gke", "rel-2", "--yes")
        assert world.clusters == {}
    finally:
        gate.close()
        google.close()
