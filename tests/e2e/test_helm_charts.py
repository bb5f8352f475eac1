"""Charts with the real helm on a real cluster: installed by create-cluster, and what they make removed before it goes.

KIND makes the cluster. To be removed it is also GKE's, whose side is a double before the same API, since on KIND there
is nothing outside of the cluster that could be left.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mlbench_cli
from mlbench_cli.errors import DeadlineError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import ObjectNotFound
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.base import ROLE_LABEL, WORKER
from providers.kubernetes_calls import DevicePlugin, ReadyMachines, path_of
from providers.lifecycle import up
from tests.fakes.chart_repository import pack_chart, serving, write_chart
from tests.fakes.gke import Google
from tests.fakes.kube_gate import KubeGate

NODE_IMAGE = os.environ.get("MLBENCH_TEST_NODE_IMAGE")
SHELL_IMAGE = os.environ.get("MLBENCH_TEST_LOAD_IMAGE") or f"localhost/mlbench/allreduce:{mlbench_cli.__version__}"
NAME = "mlbench-chart-1"
SPACE, ELSEWHERE = "/api/v1/namespaces/mlbench-web", "default"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (shutil.which("kind") and shutil.which("docker")), reason="needs kind and Docker"),
    pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm"),
]

TEMPLATES = {
    "values.yaml": """
image: nosuch.invalid/x:1
replicas: 1
name: text
ports: [{name: http, port: 80}, {name: admin, port: 81}]
deep: {er: {still: {x: 1, z: 2}}}
gone: here
""",
    "values.schema.json": '{"properties": {"replicas": {"type": "integer", "maximum": 3}}}',
    "templates/NOTES.txt": "{{ .Release.Name }} has {{ .Values.replicas }} replicas.",
    "templates/all.yaml": """
apiVersion: v1
kind: ConfigMap
metadata: {name: values}
data: {all: {{ toJson .Values | quote }}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: web}
spec:
  replicas: {{ .Values.replicas }}
  serviceName: web
  selector: {matchLabels: {app: web}}
  volumeClaimTemplates:
    - metadata: {name: data}
      spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Mi}}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
        - name: web
          image: {{ .Values.image | quote }}
          imagePullPolicy: IfNotPresent
          command: [sh, -c, "trap 'exit 0' TERM; sleep 1000 & wait"]
          volumeMounts: [{name: data, mountPath: /data}]
""",
}


@dataclass
class Kind:
    """A KIND cluster, and a machine with mlbench."""

    folder: Path

    def command(self, *words: str, home: str = "home", more: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        environment = {**os.environ, "MLBENCH_HOME": str(self.folder / home), **(more or {})}
        words = (sys.executable, "-m", "mlbench_cli", *words)
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def mlbench(
        self, *words: str, code: int = 0, home: str = "home", more: dict[str, str] | None = None
    ) -> tuple[str, str]:
        process = self.command(*words, home=home, more=more)
        try:
            out, err = process.communicate(timeout=1800)
        finally:
            process.kill()
        assert process.returncode == code, err + out
        assert "Traceback" not in err
        return out, err

    def create(self, location: str, *values: str, code: int = 0, more: tuple[str, ...] = ()) -> tuple[str, str]:
        return self.mlbench(*self.words(location, *values), *more, code=code)

    def words(self, location: str, *values: str) -> list[str]:
        image = ["--image", NODE_IMAGE] if NODE_IMAGE else []
        given = [word for value in values for word in ("--custom-value", value)]
        return ["create-cluster", "kind", "1", NAME[:-2], *image, "--chart-location", location, *given]

    @property
    def access(self) -> Access:
        file = self.folder / "kubeconfig"
        if not file.exists():
            subprocess.run(["kind", "export", "kubeconfig", "--name", NAME, "--kubeconfig", str(file)], check=True)
        return Access.from_kubeconfig(file)

    def get(self, path: str) -> Any:
        with self.access.client() as api:
            return api.get(path)

    @property
    def statuses(self) -> list[str]:
        """Of the release's revisions, as helm keeps them."""
        secrets = self.get(f"{SPACE}/secrets")["items"]
        labels = [item["metadata"]["labels"] for item in secrets if item["type"].startswith("helm.sh/")]
        return [item["status"] for item in sorted(labels, key=lambda item: int(item["version"]))]


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    if subprocess.run(["docker", "image", "inspect", SHELL_IMAGE], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no image {SHELL_IMAGE}; MLBENCH_TEST_LOAD_IMAGE may name another one with a shell")
    made = Kind(tmp_path_factory.mktemp("kind"))
    image = ["--image", NODE_IMAGE] if NODE_IMAGE else []
    try:
        made.mlbench("create-cluster", "kind", "1", NAME[:-2], *image, "--load", SHELL_IMAGE)
        yield made
        made.mlbench("delete-cluster", "kind", NAME, "--yes", home="other")
    finally:
        subprocess.run(["kind", "delete", "cluster", "--name", NAME], check=False, capture_output=True)
        subprocess.run(["docker", "volume", "rm", "-f", f"mlbench-{NAME}"], check=False, capture_output=True)


def test_from_a_repository_to_a_removal_that_leaves_nothing(kind: Kind, tmp_path: Path) -> None:
    files = {path.relative_to(tmp_path / "web").as_posix(): path.read_text() for path in _chart(tmp_path)}
    values = (f"image={SHELL_IMAGE}", "ports[1].port=8081", "deep.er.still.x=0.5", 'name="1.10"', "gone=null")
    with serving() as repository:
        repository.add(pack_chart(files))
        location = f"{repository.url}/web@1.2.3"
        kind.create(location, "replicas=7", code=2)  # the chart's schema, before anything is asked of the cluster
        _, told = kind.create(location, *values)
        assert "web has 1 replicas." in told
        seen = json.loads(kind.get(f"{SPACE}/configmaps/values")["data"]["all"])
        assert seen["deep"] == {"er": {"still": {"x": 0.5, "z": 2}}}
        assert seen["ports"] == [{"name": "http", "port": 80}, {"name": "admin", "port": 8081}]
        assert (seen["name"], "gone" in seen) == ("1.10", False)
        kind.create(location, *values)
        assert kind.statuses == ["deployed"]
        kind.create(location, *values, "replicas=2")
        assert kind.statuses == ["superseded", "deployed"]
    assert len(kind.get(f"{SPACE}/persistentvolumeclaims")["items"]) == 2
    with kind.access.client() as api:  # helm waits for its load balancer, and KIND makes none
        service = {"metadata": {"name": "web"}, "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]}}
        api.create(f"/api/v1/namespaces/{ELSEWHERE}/services", service)
    _remove_as_gke(kind, tmp_path)
    assert kind.get("/api/v1/persistentvolumes")["items"] == []
    for path in (SPACE, f"/api/v1/namespaces/{ELSEWHERE}/services/web"):
        with pytest.raises(ObjectNotFound):
            kind.get(path)


def test_deadline_interrupt_and_kill(kind: Kind, tmp_path: Path) -> None:
    _chart(tmp_path)
    chart = str(tmp_path / "web")
    _, told = kind.create(chart, code=124, more=("--chart-timeout", "4s"))
    assert "context deadline exceeded" in told
    assert "Not ready: pod web-0: " in told
    assert kind.statuses == ["failed"]
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = kind.command(*kind.words(chart, f"name={number.name}"))
        _until(lambda: any(status.startswith("pending") for status in kind.statuses))
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
        assert process.returncode == code, told
        assert number == signal.SIGKILL or not any(status.startswith("pending") for status in kind.statuses)
    orphan = _helms()
    assert len(orphan) == 1  # it goes on, until its time is over
    os.kill(orphan[0], signal.SIGKILL)
    _until(lambda: not _helms())
    _, told = kind.create(chart, f"image={SHELL_IMAGE}")
    assert "has to be recreated: an earlier helm was interrupted" in told
    assert kind.statuses == ["deployed"]


def test_the_device_plugin_is_applied_and_waited_for(kind: Kind, tmp_path: Path) -> None:
    tmp_path.joinpath("home").mkdir()
    store, cluster = Store(tmp_path / "home"), Cluster("gpus-1", "eks")
    plugin: Any = DevicePlugin(lambda: kind.access, "GPU", "nvidia-device-plugin", (), None)  # type: ignore[arg-type]
    ready: Any = ReadyMachines(lambda: kind.access, "gpus-1", 1, {"nvidia.com/gpu": 1}, (plugin,), plugin)
    ready.create_seconds = 3.0
    with pytest.raises(DeadlineError, match=r"not ready after 3 s: 0 of 1 machines have joined"):
        up(cluster, [plugin, ready], store)
    plugin.create()
    path = path_of(plugin.documents()[0])
    assert kind.get(path)["metadata"]["generation"] == 1
    assert kind.get(path)["metadata"]["managedFields"][0]["operation"] == "Apply"
    node = f"/api/v1/nodes/{NAME}-control-plane"
    with kind.access.client() as api:
        api.patch(node, {"metadata": {"labels": {ROLE_LABEL: WORKER}}})
        api.patch(f"{node}/status", {"status": {"capacity": {"nvidia.com/gpu": "1"}}})
    ready.create_seconds = 60.0
    assert up(cluster, [plugin, ready], store).state == "ready"


def _chart(folder: Path) -> list[Path]:
    """The files of a chart in `folder`/web."""
    chart = write_chart(folder / "web", **TEMPLATES)
    (chart / "templates/config.yaml").unlink()
    return [path for path in chart.rglob("*") if path.is_file()]


def _remove_as_gke(kind: Kind, folder: Path) -> None:
    google = Google(folder / "google")
    gate = KubeGate(kind.access, google.pem, google.world.knows)
    try:
        kind.mlbench("create-cluster", "gke", "1", NAME[:-2], "--yes", home="gke", more=google.environment)
        google.world.find_cluster(NAME).endpoint = f"127.0.0.1:{gate.port}"
        _, told = kind.mlbench("delete-cluster", "gke", NAME, "--yes", home="empty", more=google.environment)
        assert f"workload resources of {NAME} is deleted" in told
        assert google.world.clusters == {}
    finally:
        gate.close()
        google.close()


def _helms() -> list[int]:
    """Processes of helm that install our chart."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"/helm") and b"mlbench-web" in words:
            found.append(int(path.parent.name))
    return found


def _until(wanted: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not wanted() and time.monotonic() < end:
        time.sleep(0.2)
    assert wanted()
