"""Charts from create-cluster to delete-cluster, on GKE's double: a cluster with an API of its own, a helm with rules.

The real helm on a real cluster is in tests/e2e/test_helm_charts.py.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.errors import CleanupError
from mlbench_cli.storage.store import Store
from providers.base import CLUSTER_TAG
from providers.gke import api
from providers.gke.provider import GkeProvider
from providers.lifecycle import down
from providers.workload_cleanup import WorkloadCleanup
from tests import NIGHTLY
from tests.contract.terminal import Terminal
from tests.fakes.chart_repository import write_chart
from tests.fakes.gke import Google, World
from tests.fakes.gke_facts import PROJECT
from tests.fakes.helm_tool import HelmTool
from tests.fakes.kube_workloads import Workloads
from tests.fakes.zygote import Zygote

CREATE = ("create-cluster", "gke", "1", "rel", "--yes")
DELETE = ("delete-cluster", "gke", "rel-1", "--yes")
DISK = f"projects/{PROJECT}/zones/europe-west1-b/disks/pvc-1"


@dataclass
class Place:
    """A cloud, the Kubernetes API of its clusters, a helm, a chart; and a machine with mlbench."""

    google: Google
    world: World
    kube: Workloads
    helm: HelmTool
    chart: Path
    home: Path
    environment: dict[str, str]
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    def start(self, *words: str, home: str = "home", program: str = "mlbench_cli") -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", program, *words],
            env={**self.environment, "MLBENCH_HOME": str(self.home / home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def mlbench(self, *words: str, code: int = 0, home: str = "home") -> tuple[str, str]:
        """What a command says to stdout and to stderr."""
        for cached in (api.client, api.credentials, api.token):
            cached.cache_clear()
        self.patch.setenv("MLBENCH_HOME", str(self.home / home))
        got = run(list(words))
        out, err = self.capture.readouterr()
        assert got == code, f"{got}: {err}{out}"
        assert "Traceback" not in err
        return out, err

    def create(self, *values: str, code: int = 0, more: tuple[str, ...] = ()) -> tuple[str, str]:
        return self.mlbench(*self.words(*values), *more, code=code)

    def words(self, *values: str) -> list[str]:
        given = [word for value in values for word in ("--custom-value", value)]
        return [*CREATE, "--chart-location", str(self.chart), *given]

    @property
    def statuses(self) -> list[str]:
        """Of the release's revisions."""
        known = list(self.kube.objects.items())  # which the server changes meanwhile
        secrets = [item for (kind, _, _), item in known if kind == "secrets"]
        return [item["metadata"]["labels"]["status"] for item in secrets]

    def until(self, wanted: Callable[[], Any], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not wanted() and time.monotonic() < end:
            time.sleep(0.02)
        assert wanted()


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Google]:
    servers = Google(tmp_path_factory.mktemp("google"))
    yield servers
    servers.close()


@pytest.fixture
def place(
    google: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Place]:
    world = google.reset(looks=1)
    kube = Workloads(google.pem, world.knows)
    kube.nodes = world.nodes
    world.kube_port, world.outside = kube.port, kube.outside
    helm = HelmTool(tmp_path / "bin")
    (tmp_path / "tmp").mkdir()
    environment = {
        **google.environment,
        "PATH": f"{helm.folder}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path / "tmp"),
        "HELM_NAMESPACE": "of-the-user",
        "KUBECONFIG": "/of-the-user",
    }
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("tempfile.tempdir", environment["TMPDIR"])  # tempfile looks at TMPDIR only once in a process
    yield Place(google, world, kube, helm, write_chart(tmp_path / "web"), tmp_path, environment, monkeypatch, capsys)
    kube.close()
    # Charts, kubeconfigs and values are gone; the lock's folder stays.
    assert os.listdir(tmp_path / "tmp") in ([], [f"mlbench-helm-{os.getuid()}"])


# --- installing -----------------------------------------------------------------------------------------------------


def test_a_chart_comes_with_the_cluster(place: Place) -> None:
    _, printed = place.create("image.tag=v2", "auth.password=hunter2")
    assert "Helm release web is ready" in printed
    assert "web 1.2.3 is there." in printed
    space = place.kube.objects["namespaces", "", "mlbench-web"]
    assert space["metadata"]["labels"][CLUSTER_TAG] == "rel-1"
    [rendered, upgrade] = place.helm.calls
    assert rendered["argv"][:2] == ["template", "web"]
    assert upgrade["argv"][:3] == ["upgrade", "--install", "web"]
    assert upgrade["argv"][upgrade["argv"].index("--timeout") + 1] == "600s"
    assert "--wait" in upgrade["argv"]
    assert upgrade["values"] == {"image": {"tag": "v2"}, "auth": {"password": "hunter2"}}
    # Access and values are on no disk and no command line, and nothing of the user's own settings counts.
    assert all(file["mode"] == "0o600" and "memfd" in file["link"] for file in upgrade["files"].values())
    assert "hunter2" not in json.dumps(upgrade["argv"])
    assert upgrade["environment"] == ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"]
    store = Store(place.home / "home")
    [record] = store.cluster("rel-1").details["helm_charts"]
    assert record["custom_values"] == ["image.tag", "auth.password"]
    assert record["digest"].startswith("sha256:")
    assert "hunter2" not in (place.home / "home/mlbench.sqlite").read_bytes().decode("latin-1")
    planned, _ = place.create("image.tag=v3", more=("--dry-run", "-o", "json"))
    [upgraded] = json.loads(planned)["cluster"]["details"]["helm_charts"]
    assert upgraded["custom_values"] == ["image.tag"]
    kept, _ = place.mlbench(*CREATE, "--dry-run", "-o", "json")
    assert json.loads(kept)["cluster"]["details"]["helm_charts"] == [record]
    journal = [entry.action for entry in store.journal_of("rel-1") if entry.kind == "Helm release"]
    assert journal[0] == "intent"
    assert journal[-1] == "ready"


@pytest.mark.slow
def test_a_chart_comes_with_the_cluster_from_a_mac_too(place: Place) -> None:
    """It has no files in memory, so access and values are in a folder of this user for as long as helm runs."""
    process = place.start(*place.words("auth.password=hunter2"), program="tests.fakes.mac")
    _, shown = process.communicate()
    assert process.returncode == 0, shown
    assert "Helm release web is ready" in shown
    upgrade = place.helm.calls[-1]
    assert upgrade["values"] == {"auth": {"password": "hunter2"}}
    assert all(file["mode"] == "0o600" for file in upgrade["files"].values())
    assert "hunter2" not in json.dumps(upgrade["argv"])


@pytest.mark.slow
def test_twice_nothing_is_done_and_other_values_are_an_upgrade(place: Place) -> None:
    place.create("image.tag=v2")
    place.create("image.tag=v2")
    assert place.statuses == ["deployed"]
    place.create("image.tag=v3")
    assert place.statuses == ["deployed", "deployed"]
    (place.chart / "templates/config.yaml").write_text("other: 1")
    place.create("image.tag=v3")
    assert len(place.statuses) == 3


def test_dry_run_shows_and_makes_nothing(place: Place) -> None:
    out, _ = place.create("ports[1].port=81", more=("--dry-run", "-o", "json"))
    chart = json.loads(out)["helm_chart"]
    assert (chart["release"], chart["version"], chart["namespace"]) == ("web", "1.2.3", "mlbench-web")
    assert chart["values"]["ports"] == [{"name": "http", "port": 80}, {"name": "admin", "port": 81}]
    assert chart["values"]["image"] == {"repository": "web", "tag": "v1"}
    out, printed = place.create("imgae.tag=v2", more=("--dry-run",))
    assert "Helm release" in out
    assert "tag: v2" in out
    assert "sha256:" in printed
    assert 'Did you mean "image"?' in printed
    assert place.world.clusters == {}
    assert not (place.home / "home/clusters").exists()


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("no helm", 2, "helm template RELEASE"),
        ("old helm", 2, "3.13 or later is needed"),
        ("mad helm", 2, "did not print its version"),
        ("schema", 2, "cannot be rendered with these values: Error: values don't meet"),
        ("no chart", 4, "does not exist"),
        ("bad path", 2, "cannot be read from"),
        ("no location", 2, "--custom-value needs a Helm chart"),
        ("repository", 2, "is not a chart repository"),
    ],
)
def test_known_before_anything_is_made(place: Place, name: str, code: int, says: str) -> None:
    words = place.words()
    if name == "no helm":
        (place.helm.folder / "helm").unlink()
    elif name.endswith("helm"):
        (place.helm.folder / "version").write_text("v3.12.9" if name == "old helm" else "what?")
    elif name == "schema":
        words = place.words("trouble=schema")
    elif name == "no chart":
        words = [*CREATE, "--chart-location", str(place.home / "nope")]
    elif name == "bad path":
        words = place.words("a..b=2")
    elif name == "no location":
        words = [*CREATE, "--custom-value", "a=1"]
    else:
        server = place.google.environment["MLBENCH_COMPUTE_ENDPOINT"]
        words = [*CREATE, "--chart-location", f"{server}/charts/web@1.2.3"]
    _, printed = place.mlbench(*words, code=code)
    assert says in printed
    assert place.world.clusters == {}
    assert [cluster.name for cluster in Store(place.home / "home").clusters()] == ["local"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "code", "says"),
    [
        ("fail", 2, 'Error: Deployment.apps "web" is invalid: spec.replicas'),
        ("deadline", 124, "Not ready: pod web-0: ImagePullBackOff no"),
    ],
)
def test_a_failed_installation_is_told_in_helms_words_and_can_be_repeated(
    place: Place, trouble: str, code: int, says: str
) -> None:
    _, printed = place.create(f"trouble={trouble}", code=code)
    assert says in printed
    assert "goexit" not in printed
    assert "mlbench delete-cluster gke rel-1" in printed
    assert place.statuses == ["failed"]
    place.create()
    assert place.statuses == ["failed", "deployed"]


@pytest.mark.slow
def test_a_terminal_shows_what_helm_says_and_ctrl_c_stops_it(place: Place) -> None:
    terminal = Terminal(*place.words("trouble=hang"), home=place.home / "home", columns=200, starts_anew=True)
    terminal.expect("creating Helm release web: Deployment is not ready: web. 0 out of 1 expected pods are ready")
    terminal.type("\x03")
    assert terminal.finish()[0] == 130
    assert place.statuses == ["failed"]
    place.create()
    assert place.statuses == ["failed", "deployed"]


def _kill_client_of_helm(place: Place) -> None:
    process = place.start(*place.words("trouble=orphan"))
    place.until(lambda: place.statuses == ["pending-install"])
    process.kill()
    process.communicate()
    for folder in [*place.home.glob("tmp/mlbench-chart-*"), *place.home.glob("tmp/mlbench-helm-????????")]:
        # A kill leaves the chart, and nothing confidential.
        assert not [path for path in folder.rglob("*") if path.is_file() and "token" in path.read_text()]
        shutil.rmtree(folder)


@pytest.mark.slow
def test_killed_the_orphan_is_waited_for(place: Place) -> None:
    _kill_client_of_helm(place)
    _, printed = place.create("trouble=orphan")
    assert "Helm release web exists already" in printed
    assert place.statuses == ["deployed"]
    assert len([call for call in place.helm.calls if call["argv"][0] == "upgrade"]) == 1


@pytest.mark.slow
def test_what_a_killed_helm_left_is_made_anew(place: Place) -> None:
    place.create()
    [secret] = [item for (kind, _, _), item in place.kube.objects.items() if kind == "secrets"]
    secret["metadata"]["labels"]["status"] = "pending-upgrade"
    _, printed = place.create()
    assert "has to be recreated: an earlier helm was interrupted" in printed
    assert place.statuses == ["deployed"]


def test_a_namespace_of_somebody_else_is_not_touched(place: Place) -> None:
    place.kube.put("namespaces", "mlbench-web")
    _, printed = place.create(code=2)
    assert "was not created by mlbench" in printed
    assert [call["argv"][0] for call in place.helm.calls] == ["template"]


# --- removing -------------------------------------------------------------------------------------------------------


def test_from_an_empty_data_directory_nothing_is_left(place: Place) -> None:
    place.create("service=LoadBalancer")
    place.kube.balancer("by-hand")
    place.kube.stateful("db", DISK)
    place.kube.deployment("web", f"{DISK}3")
    place.kube.disk("unused", f"{DISK}2")
    place.kube.outside.add("192.0.2.9")
    _, printed = place.mlbench(*DELETE, home="empty")
    assert place.kube.outside == set()
    assert place.world.clusters == {}
    assert "workload resources of rel-1 is deleted" in printed
    assert place.helm.calls[-1]["argv"][:2] == ["uninstall", "web"]
    assert place.kube.names("namespaces") == ["mlbench-end"]  # goes with the cluster itself


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
def test_killed_at_every_change_the_next_one_finishes_it(place: Place, stride: int) -> None:
    """From an empty data folder each time."""
    place.mlbench(*CREATE)
    made = deepcopy(place.world.clusters)
    (place.helm.folder / "helm").unlink()
    place.kube.victim = place.home / "pid"
    zygote = Zygote(
        "mlbench_cli.app", "mlbench_cli.commands.delete_cluster", "providers.workload_cleanup", "providers.gke"
    )
    try:
        number = stride // 3
        while number < 20:
            place.world.clusters, place.world.operations = deepcopy(made), {}
            place.kube.put("namespaces", "mlbench-web", metadata={"labels": {CLUSTER_TAG: "rel-1"}})
            place.kube.balancer("web", space="mlbench-web")
            place.kube.balancer("by-hand", "192.0.2.8")
            place.kube.stateful("db", DISK)
            place.kube.changes, place.kube.kill_at = [], number
            environment = {**place.environment, "MLBENCH_HOME": str(place.home / f"killed-{number}")}
            code, said = zygote.run([*DELETE], environment, place.kube.victim)
            if code == 0:
                break
            assert code == -signal.SIGKILL, said
            place.kube.kill_at = None
            place.mlbench(*DELETE, home=f"empty-{number}")
            assert place.kube.outside == set()
            assert place.world.clusters == {}
            number += stride
    finally:
        zygote.close()
    assert number >= 5, place.kube.changes


def test_a_retained_disk_stays_and_is_named(place: Place) -> None:
    place.mlbench(*CREATE)
    place.kube.disk("data", DISK, policy="Retain")
    _, printed = place.mlbench(*DELETE)
    assert place.world.clusters == {}
    assert "reclaim policy Retain" in printed
    assert f"gcloud compute disks delete pvc-1 --zone europe-west1-b --project {PROJECT}" in printed


def test_what_the_cloud_still_has_is_named_with_exit_code_8(place: Place) -> None:
    """The controllers said that it was gone, and it is not."""
    place.mlbench(*CREATE)
    place.kube.balancer("web")
    place.kube.disk("data", DISK)
    place.world.outside = {"192.0.2.7", DISK}
    _, printed = place.mlbench(*DELETE, code=8)
    assert place.world.clusters == {}
    assert f"gcloud compute disks delete pvc-1 --zone europe-west1-b --project {PROJECT}" in printed
    assert f"gcloud compute forwarding-rules delete 192.0.2.7 --region europe-west1 --project {PROJECT}" in printed
    out, _ = place.mlbench(*DELETE)
    assert "has already been deleted" in out


def test_what_does_not_go_in_time_does_not_hold_the_cluster(place: Place) -> None:
    place.mlbench(*CREATE)
    place.kube.balancer("web")
    place.kube.stuck = {"web"}
    store, provider = Store(place.home / "home"), GkeProvider()
    cluster = store.cluster("rel-1")
    resources = provider.resources(cluster)
    cleanup = WorkloadCleanup(cluster, provider, resources, seconds=0.3)
    printed: list[str] = []
    down(cluster, [*resources, cleanup], store, report=lambda step: printed.append(f"{step.action} {step.reason}"))
    assert place.world.clusters == {}
    assert "kept still there after 0.3 s: Service default/web" in printed
    with pytest.raises(CleanupError, match=r"load balancer 192\.0\.2\.7"):
        cleanup.raise_for_orphans()


def test_an_api_that_does_not_answer_does_not_hold_the_cluster(place: Place) -> None:
    place.mlbench(*CREATE)
    place.kube.balancer("web")
    place.kube.down = 403
    _, printed = place.mlbench(*DELETE)
    assert place.world.clusters == {}
    assert "The cluster's API did not answer" in printed
    assert "gcloud compute forwarding-rules list" in printed


def test_an_api_that_is_away_for_a_moment_is_waited_for(place: Place) -> None:
    place.mlbench(*CREATE)
    place.kube.balancer("web")
    place.kube.outage = 12
    out, _ = place.mlbench(*DELETE)
    assert place.kube.outside == set()
    assert "no resources remain" in out


def test_a_cluster_without_an_address_goes_at_once(place: Place) -> None:
    place.mlbench(*CREATE)
    place.world.find_cluster("rel-1").endpoint = ""
    out, printed = place.mlbench(*DELETE)
    assert "no resources remain" in out
    assert "may remain" not in printed


def test_a_foreign_cluster_keeps_its_balancers(place: Place) -> None:
    place.mlbench(*CREATE)
    place.kube.balancer("web")
    place.world.find_cluster("rel-1").resource_labels.clear()
    with contextlib.suppress(AssertionError):  # it is refused, whatever the code
        place.mlbench(*DELETE)
    assert "rel-1" in {cluster.name for cluster in place.world.clusters.values()}
    assert place.kube.outside == {"192.0.2.7"}
