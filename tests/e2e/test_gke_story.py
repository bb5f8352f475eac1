"""From "no cluster" to a verified archive on GKE's double, with a real Kubernetes behind its door.

Google's side (cluster manager, sign-in, quotas) is tests/fakes/gke; the cluster that it hands out is a KIND cluster
that asks for Google's token and shows a certificate of the double's CA.
"""

import shutil
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
