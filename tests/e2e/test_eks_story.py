"""From "no cluster" to a verified archive on the double of AWS, with a real Kubernetes behind its door.

AWS' side (stack, roles, EKS, EC2, quotas) is tests/fakes/aws; the cluster that it hands out is a KIND cluster behind a
door that asks for EKS' token, whose signature it checks as STS would, and shows a certificate of the double's CA.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.errors import CredentialError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Token
from tests.e2e.real import SHELL_IMAGE, mlbench, story
from tests.fakes.aws_kube import refusal_of
from tests.fakes.aws_server import AwsServer
from tests.fakes.certificates import write_certificate
from tests.fakes.kube_gate import KubeGate

MACHINE = "g4dn.8xlarge"  # the smallest that has a GPU and a network card with EFA
PLUGINS = "/apis/apps/v1/namespaces/kube-system/daemonsets"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (shutil.which("kind") and shutil.which("docker")), reason="needs kind and Docker"),
    pytest.mark.skipif(SHELL_IMAGE is None, reason="needs an image with a shell: MLBENCH_TEST_LOAD_IMAGE"),
]


@pytest.fixture
def aws() -> Iterator[AwsServer]:
    server = AwsServer()
    yield server
    server.stop()


def test_create_run_download_delete(aws: AwsServer, kubernetes: Access, tmp_path: Path) -> None:
    ca = write_certificate(tmp_path / "door.pem", "EKS double")
    gate = KubeGate(
        kubernetes, tmp_path / "door.pem", lambda authorization: refusal_of(authorization, "eks-story-2") is None
    )
    environment = {**aws.environment("story"), "MLBENCH_HOME": str(tmp_path / "home")}
    aws.rules(endpoint=f"https://127.0.0.1:{gate.port}", ca=ca.decode())
    try:
        create = ("create-cluster", "eks", "2", "eks-story", "-t", MACHINE, "--efa", "--yes")
        mlbench(environment, *create, "--probe-image", "none")  # the machines have no real GPU to be tried
        with kubernetes.client() as api:
            applied = {item["metadata"]["name"] for item in api.get(PLUGINS)["items"]}
        assert applied >= {"mlbench-nvidia-device-plugin", "mlbench-efa-device-plugin"}
        # The nodes here have none of the huge pages that AWS' image for EFA sets aside.
        patch = tmp_path / "patch.yaml"
        patch.write_text("spec: {containers: [{name: main, resources: {limits: {hugepages-2Mi: null}}}]}")
        archive = story(environment, "eks-story-2", tmp_path, "--gpu", "--pod-patch", str(patch))
        assert archive["run.json"]["spec"]["kubernetes"]["devices"]["vpc.amazonaws.com/efa"] == "1"
        assert archive["result.json"]["price"]["per_hour"] is None  # nobody knows it in this region, and so it says
        _refuses_strangers(gate, ca)
        mlbench(environment, "delete-cluster", "eks", "eks-story-2", "--yes")
        assert aws.list_left("eks-story-2") == []
        removed = json.loads(mlbench(environment, "status", "--cluster", "eks-story-2", "-o", "json"))
        assert removed["removal_seconds"] > 0
    finally:
        gate.close()


def _refuses_strangers(gate: KubeGate, ca: bytes) -> None:
    for token in (None, Token(lambda: ("k8s-aws-v1.bm8", None))):
        with (
            Access(f"https://127.0.0.1:{gate.port}", ca=ca, token=token).client() as stranger,
            pytest.raises(CredentialError, match="Unauthorized"),
        ):
            stranger.get("/api/v1/nodes")
    assert gate.refused >= 2
