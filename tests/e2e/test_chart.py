"""The dashboard's Helm chart on a real cluster: it answers, its token and limits hold, and it keeps its runs.

Like a user of the chart, with docker, kind, helm and kubectl: build the image, install, forward the port, start a run.
"""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlbench_cli.results.archive.verify import find_problems

ROOT = Path(__file__).parents[2]
NODE_IMAGE = os.environ.get("MLBENCH_TEST_NODE_IMAGE")
BASE = os.environ.get("MLBENCH_TEST_LOAD_IMAGE") or "python:3.12-slim-bookworm"  # with Python and pip
IMAGE = "localhost/mlbench-dashboard:e2e"
CLUSTER, SPACE, RELEASE = "mlbench-e2e-chart", "team", "front"
TOKEN = "t" * 24
DEPLOYMENT = f"deployment/{RELEASE}-dashboard"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in ("kind", "docker", "helm", "kubectl")),
        reason="needs kind, Docker, helm and kubectl",
    ),
]


def call(*words: str, folder: Path = ROOT, stdin: bytes | None = None, **more: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **more}, input=stdin, capture_output=True, check=False, timeout=900
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout.decode()}\n{done.stderr.decode()}"
    return done.stdout.decode()


@dataclass(frozen=True)
class Team:
    """A cluster with the chart, and a machine that knows none of its runs."""

    folder: Path
    port: int

    def kubectl(self, *words: str) -> str:
        return call("kubectl", "--namespace", SPACE, *words, KUBECONFIG=str(self.folder / "kubeconfig"))

    def open_volume(self) -> None:
        """Let other users write into the folder of the volume.

        Kubernetes' own host-path provisioner makes it for root alone, and fsGroup does not apply to such folders.
        """
        claim = f"persistentvolumeclaim/{RELEASE}-dashboard"
        self.kubectl("wait", claim, "--for=jsonpath={.status.phase}=Bound", "--timeout=120s")
        volume = self.kubectl("get", claim, "--output=jsonpath={.spec.volumeName}")
        folder = self.kubectl("get", f"persistentvolume/{volume}", "--output=jsonpath={.spec.hostPath.path}")
        call("docker", "exec", f"{CLUSTER}-control-plane", "sh", "-c", f"mkdir -p {folder}; chmod 0777 {folder}")

    def wait_until_ready(self) -> None:
        try:
            self.kubectl("rollout", "status", DEPLOYMENT, "--timeout=180s")
        except AssertionError as error:
            pods, log = self.kubectl("describe", "pods"), self.kubectl("logs", DEPLOYMENT, "--tail=30")
            raise AssertionError(f"{error}\n{pods}\n{log}") from None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The dashboard at 127.0.0.1, as the chart's notes tell."""
        words = ["kubectl", "--namespace", SPACE, "port-forward", f"service/{RELEASE}-dashboard", str(self.port)]
        environment = {**os.environ, "KUBECONFIG": str(self.folder / "kubeconfig")}
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "Forwarding from" in line, line
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
            process.communicate()

    def ask(self, path: str, method: str = "GET", body: object = None, token: str = TOKEN) -> tuple[int, bytes]:
        """An answer of the REST API."""
        headers = {"Authorization": f"Bearer {token}"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def wait_for(self, run: str) -> str:
        """The outcome of a run, once it has one."""
        limit = time.monotonic() + 600
        while time.monotonic() < limit:
            status, text = self.ask(f"/api/v1/runs/{run}")
            if status == 200 and (outcome := json.loads(text)["outcome"]):
                return str(outcome)
            time.sleep(2)
        raise AssertionError(f"{run} did not end")


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("team")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    made = Team(folder, port)
    source = folder / "source"  # what git has, without the builds of this checkout
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(source)], input=archive, check=True)
    words = ("docker", "build", "-f", "charts/mlbench/Dockerfile", "--build-arg", f"BASE={BASE}", "-t", IMAGE, ".")
    call(*words, folder=source, DOCKER_BUILDKIT="0")
    kubeconfig = str(folder / "kubeconfig")
    try:
        image = ("--image", NODE_IMAGE) if NODE_IMAGE else ()
        call("kind", "create", "cluster", "--name", CLUSTER, "--kubeconfig", kubeconfig, "--wait", "180s", *image)
        call("kind", "load", "docker-image", IMAGE, "--name", CLUSTER)
        made.kubectl("create", "namespace", SPACE)
        made.kubectl("label", "namespace", SPACE, "pod-security.kubernetes.io/enforce=restricted")
        repository, _, tag = IMAGE.rpartition(":")
        values = {
            "master.image.repository": repository,
            "master.image.tag": tag,
            "token.text": TOKEN,
            "limits.workers": "2",
            "service.port": str(port),
        }
        settings = [word for item in values.items() for word in ("--set", "=".join(item))]
        call("helm", "install", RELEASE, "charts/mlbench", "--namespace", SPACE, *settings, KUBECONFIG=kubeconfig)
        made.open_volume()
        made.wait_until_ready()
        yield made
        removal = ("helm", "uninstall", RELEASE, "--namespace", SPACE, "--wait", "--cascade", "foreground")
        call(*removal, KUBECONFIG=kubeconfig)
        left = json.loads(made.kubectl("get", "pods,services,secrets,pvc", "--output", "json"))["items"]
        names = [item["metadata"]["name"] for item in left if RELEASE in item["metadata"]["name"]]
        assert names == [f"{RELEASE}-dashboard"]  # the volume with the results
    finally:
        subprocess.run(["kind", "delete", "cluster", "--name", CLUSTER], check=False, capture_output=True)


def test_a_team_shares_the_dashboard_of_the_chart(team: Team, tmp_path: Path) -> None:
    asked = {
        "name": "there",
        "workers": [2],
        "spread": False,
        "command": "sh -c 'echo rank {rank} is here'",
        "image": IMAGE,
    }
    with team.forward():
        assert team.ask("/api/v1/clusters", token="x" * 24)[0] == 401
        assert b'"here"' in team.ask("/api/v1/clusters")[1]
        assert team.ask("/api/v1/runs", "POST", {**asked, "name": "big", "workers": [3]})[0] == 400
        assert team.ask("/api/v1/runs", "POST", asked)[0] == 201
        assert team.wait_for("there-2") == "completed"
        assert b"rank 1 is here" in team.ask("/api/v1/runs/there-2/logs?rank=1")[1]
        (tmp_path / "there.zip").write_bytes(team.ask("/api/v1/runs/there-2/archive")[1])
    assert find_problems(tmp_path / "there.zip") == []


def test_a_new_pod_has_the_runs_of_the_one_before(team: Team) -> None:
    team.kubectl("rollout", "restart", DEPLOYMENT)
    team.wait_until_ready()
    with team.forward():
        assert team.wait_for("there-2") == "completed"


def test_get_dashboard_url_finds_it(team: Team) -> None:
    homes = {"MLBENCH_HOME": str(team.folder / "home"), "KUBECONFIG": str(team.folder / "kubeconfig")}
    for words in (["attach-cluster", "shared", "--namespace", SPACE], ["set-cluster", "shared"]):
        call(sys.executable, "-m", "mlbench_cli", *words, folder=ROOT, stdin=None, **homes)
    found = call(sys.executable, "-m", "mlbench_cli", "get-dashboard-url", folder=ROOT, stdin=None, **homes)
    assert found == f"http://127.0.0.1:{team.port}/\n"
