"""Runs on a cluster that breaks: each has the outcome it deserves and its whole logs, and leaves nothing behind."""

import base64
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.follow import UNREACHABLE
from mlbench_cli.engines.kubernetes.workers import INDEX_LABEL
from mlbench_cli.kube.api import Api, ApiError
from mlbench_cli.kube.objects import collection_path
from mlbench_cli.model.run import Outcome, Run
from mlbench_cli.runs import supervise
from mlbench_cli.runs.finalize import FinishedRun
from mlbench_cli.runs.progress import Progress
from mlbench_cli.storage.store import Store
from tests.e2e.runs import Cluster, Runs, log
from tests.e2e.test_kubernetes_engine import without_dns
from tests.e2e.troubles import nodes_can_be_paused, nodes_go_on
from tests.fakes.clock_shift import ClockShift

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

LINES = 75  # one a second: longer than each outage
COUNT = (
    f'i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); echo line $i; sleep 1; done; echo 42 >"$MLBENCH_OUTPUT_DIR/answer"'
)
WHOLE = "".join(f"line {number}\n" for number in range(1, LINES + 1))
AWAY_SECONDS = 40.0


@pytest.fixture(scope="module", autouse=True)
def _nodes_are_containers(cluster: Cluster) -> None:
    with cluster.access.client() as api:
        if not nodes_can_be_paused(api):
            pytest.skip("there is no cluster whose nodes are containers of this machine")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "home").mkdir()
    store = Store(tmp_path / "home")
    yield store
    store.close()


def docker(*words: str) -> None:
    subprocess.run(["docker", *words], check=True, capture_output=True, timeout=120)


def control_plane(api: Api) -> str:
    nodes = api.get("/api/v1/nodes", labelSelector="node-role.kubernetes.io/control-plane")["items"]
    return str(nodes[0]["metadata"]["name"])


def node_of(api: Api, namespace: str, selector: str) -> str:
    """The node of the only pod with these labels, once it has one."""
    while True:
        pods: list[dict[str, Any]] = api.get(collection_path("Pod", namespace), labelSelector=selector)["items"]
        if pods and pods[0]["spec"].get("nodeName") and pods[0]["status"]["phase"] == "Running":
            return str(pods[0]["spec"]["nodeName"])
        time.sleep(0.5)


@contextmanager
def mended(api: Api, namespace: str) -> Iterator[None]:
    """Afterwards all nodes run and are ready again."""
    names = [node["metadata"]["name"] for node in api.get("/api/v1/nodes")["items"]]
    try:
        with nodes_go_on(api, namespace):
            try:
                yield
            finally:
                for name in names:
                    for word in ("unpause", "start"):
                        subprocess.run(["docker", word, name], check=False, capture_output=True)
                wait_for_server(api)
    finally:
        wait_for_server(api)


def wait_for_server(api: Api) -> None:
    end = time.monotonic() + 180
    while True:
        try:
            api.get("/version")
            return
        except ApiError:
            assert time.monotonic() < end
            time.sleep(1)


def follow_through(
    runs: Runs,
    store: Store,
    name: str,
    fault: Callable[[Api, Run], None],
    script: str = COUNT,
) -> tuple[Run, FinishedRun, list[str]]:
    """Start a run, break the cluster as soon as all workers run, follow the run to its end; and what was said."""
    cluster, said = runs.cluster, list[str]()
    run = store.record_run(cluster.spec(name, "sh", "-c", script))
    runs.started.append(run)
    engine = cluster.engine
    engine.submit(run, engine.render(run.spec))
    begun: list[Future[None]] = []

    with (
        cluster.access.client() as api,
        mended(api, cluster.access.namespace),
        ThreadPoolExecutor(1) as pool,
    ):

        def report(progress: Progress) -> None:
            said.extend(finding.code for finding in progress.observation.findings)
            if not begun and all(worker.phase == "running" for worker in progress.observation.workers):
                begun.append(pool.submit(fault, api, run))

        finished = supervise.follow(run, engine, store, report=report, timeout=480)
        begun[0].result()
    return run, finished, said


def is_whole(run: Run, finished: FinishedRun) -> None:
    assert finished.outcome is Outcome.COMPLETED, finished.findings
    for rank in range(run.spec.workers):
        assert log(run, rank) == WHOLE
    assert (run.folder / "output/rank-0/answer").read_text() == "42\n"


def pause_control_plane(api: Api, run: Run) -> None:
    name = control_plane(api)
    docker("pause", name)
    time.sleep(AWAY_SECONDS)
    docker("unpause", name)


def kill_server_repeatedly(api: Api, run: Run) -> None:
    """The kubelet starts it again, later each time."""
    name = control_plane(api)
    for _ in range(2):
        subprocess.run(["docker", "exec", name, "pkill", "-KILL", "kube-apiserver"], check=False, capture_output=True)
        time.sleep(20)


def upgrade_control_plane(api: Api, run: Run) -> None:
    """What kubeadm's upgrade does to it: new certificates, then each part as a new pod."""
    name = control_plane(api)
    docker("exec", name, "kubeadm", "certs", "renew", "all")
    manifests = "/etc/kubernetes/manifests/*.yaml"
    docker("exec", name, "sh", "-c", f"sed -i '0,/^  labels:/s//  labels:\\n    upgraded: \"yes\"/' {manifests}")
    selector = "upgraded=yes,component=kube-apiserver"
    end = time.monotonic() + 180
    while time.monotonic() < end:
        with suppress(ApiError):
            if api.get("/api/v1/namespaces/kube-system/pods", labelSelector=selector)["items"]:
                return
        time.sleep(1)
    raise AssertionError("the API server did not come back as a new pod")


def drain(api: Api, node: str) -> None:
    """As an administrator does before maintenance."""
    words = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
    docker("exec", control_plane(api), "kubectl", "--kubeconfig=/etc/kubernetes/admin.conf", *words)


def restart(service: str, namespace: str) -> Callable[[Api, Run], None]:
    def fault(api: Api, run: Run) -> None:
        node = node_of(api, namespace, f"mlbench/run={run.name},{INDEX_LABEL}=1")
        docker("exec", node, "systemctl", "restart", service)

    return fault


def test_an_api_server_that_is_away_for_40_seconds_costs_a_run_nothing(runs: Runs, store: Store) -> None:
    run, finished, said = follow_through(runs, store, "away", pause_control_plane)
    is_whole(run, finished)
    assert UNREACHABLE in said


def test_an_api_server_that_is_killed_again_and_again(runs: Runs, store: Store) -> None:
    run, finished, _ = follow_through(runs, store, "killed", kill_server_repeatedly)
    is_whole(run, finished)


@pytest.mark.parametrize("service", ["kubelet", "containerd"])
def test_a_service_of_a_node_is_restarted(runs: Runs, store: Store, service: str) -> None:
    run, finished, _ = follow_through(
        runs, store, f"restart-{service}", restart(service, runs.cluster.access.namespace)
    )
    is_whole(run, finished)


@contextmanager
def cordoned(api: Api) -> Iterator[None]:
    """No node takes another pod meanwhile."""
    names = [node["metadata"]["name"] for node in api.get("/api/v1/nodes")["items"]]
    for name in names:
        api.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})
    try:
        yield
    finally:
        for name in names:
            api.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": None}})


@pytest.mark.parametrize("has_room", [True, False], ids=["another head", "no room for one"])
def test_a_node_that_is_gone_with_the_head_is_a_verdict_of_every_client(
    runs: Runs, store: Store, tmp_path: Path, has_room: bool
) -> None:
    """Its own client gives it; another one, with a folder of its own, too. What the other worker has written since
    comes home."""

    cluster = runs.cluster
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    second: list[FinishedRun] = []
    copies: list[Run] = []

    def kill_and_wait_elsewhere(api: Api, run: Run) -> None:
        other = Store(elsewhere)
        copies.append(other.record_run(run.spec, run_id=run.id, created=run.created))
        node = node_of(api, cluster.access.namespace, f"mlbench/run={run.name},mlbench/role=head")
        with nullcontext() if has_room else cordoned(api):
            docker("kill", node)
            second.append(supervise.follow(copies[0], cluster.engine, other, timeout=480))
        other.close()

    name, script = f"head-gone-{has_room}".lower(), f"trap 'echo stopped; exit 3' TERM; {COUNT}"
    run, finished, _ = follow_through(runs, store, name, kill_and_wait_elsewhere, script)
    for verdict in (finished, second[0]):
        assert verdict.outcome is Outcome.FAILED
        assert verdict.exit_code(require_goal=False) == 7
        assert {"node_lost", "spot_lost"} & {finding.code for finding in verdict.findings}
    # Whichever client is first brings everything home, and the head is released.
    places = [client.folder / f"logs/rank-{rank}.log" for client in (run, *copies) for rank in range(2)]
    texts = [place.read_text() for place in places if place.exists()]
    assert any(text.endswith("stopped\n") for text in texts), texts
    for text in texts:
        assert WHOLE.startswith(text.removesuffix("stopped\n"))


def test_a_control_plane_that_is_upgraded_and_has_new_certificates(runs: Runs, store: Store) -> None:
    run, finished, _ = follow_through(runs, store, "upgraded", upgrade_control_plane)
    is_whole(run, finished)


def test_a_node_that_is_drained_ends_the_run_with_what_was_said_so_far(runs: Runs, store: Store) -> None:
    """The head is on that node, too, and moves."""
    namespace = runs.cluster.access.namespace
    drained: list[str] = []

    def fault(api: Api, run: Run) -> None:
        drained.append(node_of(api, namespace, f"mlbench/run={run.name},mlbench/role=head"))
        time.sleep(5)
        drain(api, drained[0])

    try:
        run, finished, _ = follow_through(runs, store, "drained", fault)
    finally:
        with runs.cluster.access.client() as api:
            for node in drained:
                api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None}})
    assert finished.outcome is Outcome.FAILED
    assert finished.exit_code(require_goal=False) == 7
    assert "drained" in {finding.code for finding in finished.findings}
    for rank in range(run.spec.workers):
        assert log(run, rank).startswith("line 1\nline 2\n")
        assert WHOLE.startswith(log(run, rank))


def test_names_that_nobody_resolves_until_after_the_end(runs: Runs, store: Store) -> None:
    """Workers hand over their output while DNS is away."""

    def fault(api: Api, run: Run) -> None:
        with without_dns(api):
            time.sleep(LINES + 30)

    run, finished, _ = follow_through(runs, store, "nameless", fault)
    is_whole(run, finished)


@pytest.mark.parametrize("minutes", [10, -10])
def test_a_machine_whose_clock_is_off_by_ten_minutes(runs: Runs, store: Store, tmp_path: Path, minutes: int) -> None:
    """The wall clock of every program in the pod of worker 1 is off; nodes that are containers share one clock."""
    shift = ClockShift(tmp_path)
    library = base64.b64encode(shift.library.read_bytes()).decode()
    shim = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"clock{abs(minutes)}{minutes > 0}".lower()}}
    with runs.cluster.access.client() as api:
        api.create(
            collection_path("ConfigMap", runs.cluster.access.namespace),
            {**shim, "binaryData": {"clock_shim.so": library}},
        )
    patch = {
        "spec": {
            "containers": [{"name": "main", "volumeMounts": [{"name": "shim", "mountPath": "/shim"}]}],
            "volumes": [{"name": "shim", "configMap": shim["metadata"]}],
        }
    }
    env = {"LD_PRELOAD": "/shim/clock_shim.so", "CLOCK_SHIFT": str(60 * minutes), "CLOCK_SHIFT_WORKER": "1"}
    say_time = f'date +%s >"$MLBENCH_OUTPUT_DIR/time"; {COUNT}'
    options = {"pod_patch": patch, "collect": "all"}
    spec = runs.cluster.spec("clock", "sh", "-c", say_time, options=options, env=env)
    run = store.record_run(spec)
    runs.started.append(run)
    runs.cluster.engine.submit(run, runs.cluster.engine.render(spec))
    began = time.monotonic()
    finished = supervise.follow(run, runs.cluster.engine, store, timeout=480)
    is_whole(run, finished)
    assert time.monotonic() - began < LINES + 120  # the shifted clock ends no wait early or late
    first, second = (int((run.folder / f"output/rank-{rank}/time").read_text()) for rank in (0, 1))
    assert abs(second - first - 60 * minutes) < 30
    assert not [finding for finding in finished.findings if finding.code.startswith("implausible")]
