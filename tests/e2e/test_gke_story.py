"""From "no cluster" to a verified archive on GKE's double, with a real Kubernetes behind its door.

Google's side (cluster manager, sign-in, quotas) is tests/fakes/gke; the cluster that it hands out is a KIND cluster
that asks for Google's token and shows a certificate of the double's CA.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlbench_cli.errors import CredentialError
from mlbench_cli.kube.access import Access
from tests.e2e.real import SHELL_IMAGE, mlbench, story
from tests.fakes.gke import Google
from tests.fakes.kube_gate import KubeGate

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (shutil.which("kind") and shutil.which("docker")), reason="needs kind and Docker"),
    pytest.mark.skipif(SHELL_IMAGE is None, reason="needs an image with a shell: MLBENCH_TEST_LOAD_IMAGE"),
]


@contextmanager
def gated(kubernetes: Access, google: Google) -> Iterator[KubeGate]:
    """The double hands out the real cluster behind a door that wants Google's token."""
    world = google.world
    gate = KubeGate(kubernetes, google.pem, lambda authorization: world.knows(authorization))
    world.kube_port = gate.port
    try:
        yield gate
    finally:
        gate.close()
        google.close()


def test_create_run_download_delete(kubernetes: Access, tmp_path: Path) -> None:
    google = Google(tmp_path / "google")
    environment = {**google.environment, "MLBENCH_HOME": str(tmp_path / "home")}
    world = google.world
    with gated(kubernetes, google) as gate:
        create = ("create-cluster", "gke", "2", "gke-story", "--gpu-type", "l4", "--spot", "--yes")
        mlbench(environment, *create, "--probe-image", "none")  # the machines have no real GPU to be tried
        assert gate.passed > 0  # that the machines have joined, with their GPUs, is what the real API says
        story(environment, "gke-story-2", tmp_path, "--gpu")
        with (
            Access(f"https://127.0.0.1:{gate.port}", ca=google.certificate).client() as stranger,
            pytest.raises(CredentialError, match="Unauthorized"),
        ):
            stranger.get("/api/v1/nodes")
        assert gate.refused == 1
        mlbench(environment, "delete-cluster", "gke", "gke-story-2", "--yes")
        assert world.clusters == {}


def test_the_kubernetes_half_of_a_first_day(kubernetes: Access, tmp_path: Path) -> None:
    """All steps but those that need Google's registry: without docker on PATH they are not tried."""
    google = Google(tmp_path / "google")
    google.world.quotas["NVIDIA_T4_GPUS"] = (
        0  # the machines have no real GPU for the probe, so the day goes on with CPUs
    )
    environment = {
        **google.environment,
        "MLBENCH_HOME": str(tmp_path / "home"),
        "PATH": str(Path(sys.executable).parent),
    }
    evidence = tmp_path / "evidence"
    with gated(kubernetes, google) as gate:
        words = ("doctor", "gke", "--first-day", "--to", str(evidence), "--project", "demo-project", "--yes")
        mlbench(environment, *words)
        assert gate.passed > 0
        assert (google.world.clusters, google.world.repositories) == ({}, {})
    report = json.loads((evidence / "first-day.json").read_text())
    assert report["left"] == []
    steps = {item["name"]: item["exit_code"] for item in report["steps"] if item["name"] not in ("push", "run")}
    assert steps["create"] == steps["extend"] == steps["list"] == steps["delete"] == steps["gone"] == steps["rest"] == 0
    verdicts = {item["row"]: item["verdict"] for item in report["assumptions"]}
    assert "refuted" not in verdicts.values()
    assert verdicts["A policy must be written with the etag it was read with; otherwise 409"] == "confirmed"
