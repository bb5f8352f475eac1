"""Runs in a queue, with parameter servers in their pods, on a real Kubernetes with the controllers of Kueue."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.manifests import head_name
from mlbench_cli.engines.kubernetes.pods import ROLE_LABEL, WORKER
from mlbench_cli.kube.api import Api, ObjectNotFound
from mlbench_cli.kube.objects import collection_path, object_path
from mlbench_cli.model.run import Outcome, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs import supervise
from mlbench_cli.storage.store import Store
from providers.attached import read_queue_facts
from task_images.methods.catalog import describe, find_class
from tests.e2e import controllers
from tests.e2e.runs import Cluster, Runs, all_run, until

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(3600)]

KUEUE = "/apis/kueue.x-k8s.io/v1beta1"
QUEUE = "team"
ENOUGH, TOO_LITTLE = "250m", "150m"  # two workers ask for 200m, one for 100m

# The server gives each worker its greeting; so nobody ends unless all three run at the same time.
PROGRAM = """
import os, socket, sys, time
host = (sys.argv[1], 29777)
if os.environ.get("MLBENCH_ROLE") == "server":
    server = socket.create_server(("", host[1]))
    for _ in range(int(os.environ["WORLD_SIZE"])):
        connection, _ = server.accept()
        connection.sendall(b"hello")
        connection.close()
else:
    end = time.monotonic() + 120
    while True:
        try:
            with socket.create_connection(host, 5) as connection:
                print("rank", os.environ["RANK"], "got", connection.recv(5).decode(), flush=True)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[Api]:
    if missing := controllers.missing_tool():
        pytest.skip(f"{missing} is not on the path, so the controllers cannot be built and installed")
    with cluster.access.client() as api:
        node = api.get("/api/v1/nodes", labelSelector="node-role.kubernetes.io/control-plane")["items"][0]
        if not str(node["spec"].get("providerID")).startswith("kind://"):
            pytest.skip("there is no cluster of KIND's")
        name = node["metadata"]["name"].removesuffix("-control-plane")
        for controller in (controllers.KUEUE,):
            controllers.install(controller, api, cluster.kubeconfig, name)
        yield api


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "home").mkdir()
    store = Store(tmp_path / "home")
    yield store
    store.close()


@pytest.fixture
def set_quota(api: Api, cluster: Cluster) -> Iterator[Callable[[str], None]]:
    """Changes the CPUs of the queue, which has none at first."""
    namespace, name = cluster.access.namespace, f"e2e-{os.getpid()}"
    made = [
        ("resourceflavors", {"kind": "ResourceFlavor", "metadata": {"name": name}}),
        ("clusterqueues", {"kind": "ClusterQueue", "metadata": {"name": name}, "spec": _queue_spec(name, "0")}),
    ]
    version = {"apiVersion": KUEUE.removeprefix("/apis/")}
    for plural, body in made:
        _when_served(api, f"{KUEUE}/{plural}", {**version, **body})
    queues = f"{KUEUE}/namespaces/{namespace}/localqueues"
    queue = {"kind": "LocalQueue", "metadata": {"name": QUEUE}, "spec": {"clusterQueue": name}}
    _when_served(api, queues, {**version, **queue})

    def change(cpus: str) -> None:
        api.patch(f"{KUEUE}/clusterqueues/{name}", {"spec": _queue_spec(name, cpus)})

    yield change
    for path in (f"{queues}/{QUEUE}", *(f"{KUEUE}/{plural}/{name}" for plural, _ in reversed(made))):
        with suppress(ObjectNotFound):
            api.delete(path)


def _queue_spec(flavor: str, cpus: str) -> dict[str, Any]:
    quotas = [{"name": "cpu", "nominalQuota": cpus}, {"name": "memory", "nominalQuota": "64Gi"}]
    return {
        "namespaceSelector": {},
        "resourceGroups": [
            {"coveredResources": ["cpu", "memory"], "flavors": [{"name": flavor, "resources": quotas}]},
        ],
    }


def _when_served(api: Api, path: str, body: dict[str, Any]) -> None:
    """Create it as soon as Kueue's webhook answers."""
    end = time.monotonic() + 120
    while True:
        try:
            api.create(path, body)
            return
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(1)


def _spec(cluster: Cluster, name: str, seconds: float = 0.0) -> RunSpec:
    options: dict[str, Any] = {"queue": QUEUE, "memory": "64Mi"}
    options |= {"spread": False, "share_nodes": True}
    method = {**describe(find_class("bsp-ps")()), "servers": "1"}
    words = ("python3", "-c", PROGRAM, f"{name}-0.{name}", str(seconds))
    return cluster.spec(name, *words, options=options, method=method, cpus=0.1)


def _count_workers(api: Api, run: Run, namespace: str) -> int:
    """The run's pods that Kueue admits: all but the head's."""
    selector = f"mlbench/run={run.name},{ROLE_LABEL}={WORKER}"
    return len(api.get(collection_path("Pod", namespace), labelSelector=selector)["items"])


def _wait_for_workload(api: Api, run: Run, namespace: str) -> dict[str, Any]:
    """Kueue's record of the run, once it has one."""
    end = time.monotonic() + 120
    while True:
        for item in api.get(f"{KUEUE}/namespaces/{namespace}/workloads")["items"]:
            if any(owner["name"] == run.name for owner in item["metadata"]["ownerReferences"]):
                return dict(item)
        assert time.monotonic() < end, "Kueue does not know the run"
        time.sleep(0.5)


def test_a_second_run_starts_when_the_first_has_ended(
    runs: Runs, store: Store, api: Api, set_quota: Callable[[str], None]
) -> None:
    """Until then it has no pod, where one of its workers would find room."""
    cluster, namespace = runs.cluster, runs.cluster.access.namespace
    set_quota("350m")
    both = [store.record_run(_spec(cluster, name, seconds=60)) for name in ("one", "two")]
    for run in both:
        runs.started.append(run)
        cluster.engine.submit(run, cluster.engine.render(run.spec))
        _wait_for_workload(api, run, namespace)
    first, second = both
    end = time.monotonic() + 120
    while _count_workers(api, first, namespace) < 2:
        assert time.monotonic() < end
        time.sleep(0.5)
    assert _count_workers(api, second, namespace) == 0
    for run in both:
        finished = supervise.follow(run, cluster.engine, store, timeout=300)
        assert finished.outcome is Outcome.COMPLETED, finished.findings


def test_a_run_that_waits_or_runs_is_canceled(
    runs: Runs, store: Store, api: Api, set_quota: Callable[[str], None]
) -> None:
    cluster, namespace = runs.cluster, runs.cluster.access.namespace
    for name, cpus in (("waiting", TOO_LITTLE), ("running", ENOUGH)):
        set_quota(cpus)
        run = store.record_run(_spec(cluster, name, seconds=600))
        runs.started.append(run)
        cluster.engine.submit(run, cluster.engine.render(run.spec))
        _wait_for_workload(api, run, namespace)
        if name == "running":
            until(cluster.engine, run, all_run)
        cluster.engine.cancel(run)
        finished = supervise.follow(run, cluster.engine, store, timeout=300)
        assert finished.outcome is Outcome.CANCELED, finished.findings
        cluster.engine.delete(run, force=True)


def test_a_queue_for_all_jobs_of_the_namespace_leaves_the_head_alone(
    runs: Runs, store: Store, api: Api, set_quota: Callable[[str], None]
) -> None:
    """A Job that names no queue is put into the queue "default", if there is one."""
    cluster, namespace = runs.cluster, runs.cluster.access.namespace
    set_quota(ENOUGH)
    queues = f"{KUEUE}/namespaces/{namespace}/localqueues"
    spec = api.get(f"{queues}/{QUEUE}")["spec"]
    body = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "LocalQueue", "metadata": {"name": "default"}}
    api.create(queues, {**body, "spec": spec})
    try:
        assert read_queue_facts(cluster.access).needs_queue
        run = store.record_run(_spec(cluster, "kept", seconds=20))
        runs.started.append(run)
        cluster.engine.submit(run, cluster.engine.render(run.spec))
        until(cluster.engine, run, all_run)
        head = api.get(object_path("Job", namespace, head_name(run.name)))
        assert (head["spec"]["suspend"], head["status"].get("active")) == (False, 1)
        finished = supervise.follow(run, cluster.engine, store, timeout=300)
        assert finished.outcome is Outcome.COMPLETED, finished.findings
    finally:
        api.delete(f"{queues}/default")
