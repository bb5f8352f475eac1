"""The kubernetes engine on a real cluster with two worker nodes, in a namespace where Pod Security is restricted.

Cluster and images are those of MLBENCH_E2E_KUBECONFIG, LAB_TEST_IMAGE (sh) and LAB_TORCH_IMAGE (torch), which are on
its nodes; else the cluster that the other tests here make, with the image of the allreduce task.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import mlbench_cli
from mlbench_cli import supervise
from mlbench_cli.engines.base import Observation
from mlbench_cli.engines.kubernetes import KubernetesEngine, discover_runs
from mlbench_cli.errors import UsageError
from mlbench_cli.kube.access import Access, Token
from mlbench_cli.kube.api import ApiError, ObjectNotFound, Refused
from mlbench_cli.kube.objects import collection, named
from mlbench_cli.spec import KubernetesOptions, Run, RunSpec
from mlbench_cli.store import Store, now
from tests.fakes.cutting_proxy import CuttingProxy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
SIGKILLED = -signal.SIGKILL
GLOO = """
import os, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group(os.environ["MLBENCH_BACKEND"])
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
os.write(1, f"sum {x[0].item()} {x[-1].item()}\\n".encode())
open(os.environ["MLBENCH_OUTPUT_DIR"] + "/sum.txt", "w").write(str(x[0].item()))
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Cluster:
    access: Access
    image: str
    torch_image: str
    kubeconfig: Path

    @property
    def engine(self) -> KubernetesEngine:
        return KubernetesEngine(self.access)

    def spec(self, name: str, *argv: str, options: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
        fields: dict[str, Any] = {"workers": 2, "image": self.image, **changes}
        return RunSpec(
            name=name,
            cluster="c",
            engine="kubernetes",
            task="custom",
            preset="custom",
            argv=argv,
            backend="gloo",
            kubernetes=KubernetesOptions(**(options or {})),
            **fields,
        )


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    given = os.environ.get("MLBENCH_E2E_KUBECONFIG")
    if given:
        path = Path(given)
        if not path.exists():
            pytest.skip(f"there is no cluster: MLBENCH_E2E_KUBECONFIG names {path}, which does not exist")
        image, torch_image = os.environ.get("LAB_TEST_IMAGE"), os.environ.get("LAB_TORCH_IMAGE")
        if not image or not torch_image:
            pytest.skip("MLBENCH_E2E_KUBECONFIG is set, but not LAB_TEST_IMAGE and LAB_TORCH_IMAGE")
    else:
        if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
            pytest.skip("there is no cluster: MLBENCH_E2E_KUBECONFIG is not set, and no Docker answers to make one")
        command = request.getfixturevalue("mlbench")
        path = tmp_path_factory.mktemp("kube") / "config"
        command("kubeconfig", "export", "--file", str(path))
        image = torch_image = f"mlbench/allreduce:{mlbench_cli.__version__}"
    namespace = f"e2e-{os.getpid()}"
    access = Access.from_kubeconfig(path, namespace=namespace)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    with access.client() as api:
        try:
            api.create("/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": namespace, "labels": labels}})
        except ApiError as error:
            pytest.skip(f"the cluster of {path} cannot be used: {error.message}")
        yield Cluster(access, image, torch_image, path)
        api.delete(f"/api/v1/namespaces/{namespace}")


@pytest.fixture
def runs(cluster: Cluster) -> Iterator["Runs"]:
    runs = Runs(cluster)
    yield runs
    runs.remove()


class Runs:
    """Starts runs, and removes them after the test."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.started: list[Run] = []

    def start(self, spec: RunSpec, folder: Path, access: Access | None = None) -> tuple[KubernetesEngine, Run]:
        engine = KubernetesEngine(access or self.cluster.access)
        run = Run(f"id-{spec.name}", spec, folder, now())
        self.started.append(run)
        engine.submit(run, engine.render(spec))
        return engine, run

    def remove(self) -> None:
        for run in self.started:
            self.cluster.engine.delete(run, force=True)
        with self.cluster.access.client() as api:
            for kind in ("Job", "Pod", "Service", "NetworkPolicy"):
                left = api.get(collection(kind, self.cluster.access.namespace), labelSelector="mlbench/run")
                names = {item["metadata"]["labels"]["mlbench/run"] for item in left["items"]}
                assert not names & {run.name for run in self.started}


def until(engine: KubernetesEngine, run: Run, wanted: Callable[[Observation], bool]) -> Observation:
    """The first observation that is `wanted`, or the last one."""
    with closing(engine.observe(run)) as observations:  # type: ignore[type-var]
        for seen in observations:
            if wanted(seen):
                break
    return seen


def has_ended(seen: Observation) -> bool:
    return seen.ended is not None


def all_run(seen: Observation) -> bool:
    return all(worker.phase == "running" for worker in seen.workers)


def log(run: Run, rank: int) -> str:
    return (run.folder / "logs" / f"rank-{rank}.log").read_text()


# --- what goes well -------------------------------------------------------------------------------------------------


def test_a_shell_script_on_two_nodes(runs: Runs, tmp_path: Path) -> None:
    script = (
        'echo "I am {rank} of {hosts}"; mkdir "$MLBENCH_OUTPUT_DIR/d"; echo $((6*7)) > "$MLBENCH_OUTPUT_DIR/d/answer"'
    )
    engine, run = runs.start(runs.cluster.spec("shell-2", "sh", "-c", f"{script}; sleep 2; printf 'no end'"), tmp_path)
    seen = until(engine, run, has_ended)
    assert (seen.ended, [worker.exit_code for worker in seen.workers]) == ("exited", [0, 0])
    assert len({worker.node for worker in seen.workers}) == 2
    fetched = engine.fetch(run)
    assert fetched.complete
    assert log(run, 1) == "I am 1 of shell-2-0.shell-2,shell-2-1.shell-2\nno end"
    assert (tmp_path / "output/rank-0/d/answer").read_text() == "42\n"
    assert not (tmp_path / "output/rank-1").exists()
    assert {line.split('"rank":')[1][0] for line in (tmp_path / "resources.jsonl").read_text().splitlines()} == {
        "0",
        "1",
    }
    engine.delete(run)


def test_an_image_with_nothing_but_busybox(runs: Runs, tmp_path: Path) -> None:
    name, busybox = os.environ.get("LAB_CLUSTER"), shutil.which("busybox")
    if not (os.environ.get("MLBENCH_E2E_KUBECONFIG") and name and busybox and shutil.which("kind")):
        pytest.skip("an image can be made and loaded only where LAB_CLUSTER names the kind cluster and busybox is here")
    shutil.copy(busybox, tmp_path / "busybox")
    lines = ("FROM scratch", "COPY busybox /bin/busybox", 'RUN ["/bin/busybox", "--install", "/bin"]', "")
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    for words in (("docker", "build", "-t", "mlbench-e2e/busybox:1"), ("kind", "load", "docker-image", "--name", name)):
        last = str(tmp_path) if words[0] == "docker" else "mlbench-e2e/busybox:1"
        subprocess.run([*words, last], check=True, capture_output=True, env={**os.environ, "DOCKER_BUILDKIT": "0"})
    script = 'echo here; dd if=/dev/zero of="$MLBENCH_OUTPUT_DIR/zeros" bs=1048576 count=3; exit 5'
    spec = runs.cluster.spec("busybox-1", "sh", "-c", script, workers=1, image="mlbench-e2e/busybox:1")
    engine, run = runs.start(spec, tmp_path / "run")
    seen = until(engine, run, has_ended)
    assert (seen.ended, seen.workers[0].exit_code) == ("failed", 5)
    assert engine.fetch(run).complete
    assert log(run, 0).startswith("here\n")
    assert (tmp_path / "run/output/rank-0/zeros").stat().st_size == 3 << 20


def test_torch_reduces_over_two_nodes_and_collects_from_all(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec(
        "gloo-2", "python3", "-c", GLOO, image=runs.cluster.torch_image, options={"collect": "all"}
    )
    engine, run = runs.start(spec, tmp_path)
    assert until(engine, run, has_ended).ended == "exited"
    assert engine.fetch(run).complete
    for rank in (0, 1):
        assert "sum 3.0 3.0" in log(run, rank)
        assert (tmp_path / f"output/rank-{rank}/sum.txt").read_text() == "3.0"


def test_torchrun_with_two_processes_on_each_node(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec(
        "torchrun-2", "python3", "-c", GLOO, image=runs.cluster.torch_image, processes_per_worker=2
    )
    engine, run = runs.start(spec, tmp_path)
    assert until(engine, run, has_ended).ended == "exited"
    engine.fetch(run)
    assert log(run, 0).count("sum 10.0") == log(run, 2).count("sum 10.0") == 2


def test_only_worker_0_runs_the_command(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec("single-2", "sh", "-c", "echo here; sleep 1", run_on_all=False)
    engine, run = runs.start(spec, tmp_path)
    assert until(engine, run, has_ended).ended == "exited"
    engine.fetch(run)
    assert (log(run, 0), log(run, 1)) == ("here\n", "")


def test_logs_come_while_the_run_goes_on(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec("follow-1", "sh", "-c", "for i in 1 2 3; do echo $i; sleep 1; done", workers=1)
    engine, run = runs.start(spec, tmp_path)
    first = until(engine, run, lambda seen: all_run(seen))
    assert first.ended is None
    assert [line.text for line in engine.logs(run, 0, follow=True)] == [b"1\n", b"2\n", b"3\n"]
    engine.fetch(run)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_crash_brings_home_what_the_others_have(runs: Runs, tmp_path: Path) -> None:
    """Worker 1 dies; the Job controller stops worker 0, which still says its last and hands over its files."""
    script = """
        echo part > "$MLBENCH_OUTPUT_DIR/partial"
        trap 'echo stopped; exit 3' TERM
        if [ "$RANK" = 1 ]; then sleep 2; echo Traceback: boom; exit 5; fi
        while :; do sleep 0.2; done
    """
    engine, run = runs.start(runs.cluster.spec("crash-2", "sh", "-c", script), tmp_path)
    seen = until(engine, run, has_ended)
    assert (seen.ended, seen.first_failed) == ("failed", 1)
    assert [finding.code for finding in seen.findings] == ["rank_crashed"]
    assert "Traceback: boom" in seen.findings[0].evidence["log"]
    assert engine.fetch(run).complete
    assert (tmp_path / "output/rank-0/partial").read_text() == "part\n"
    assert "stopped\n" in log(run, 0)


def test_a_crash_of_the_worker_that_holds_stops_the_others(runs: Runs, tmp_path: Path) -> None:
    script = "if [ $RANK = 0 ]; then sleep 1; exit 9; fi; trap 'echo stopped; exit 3' TERM; while :; do sleep 0.2; done"
    engine, run = runs.start(runs.cluster.spec("crash0-2", "sh", "-c", script), tmp_path)
    seen = until(engine, run, has_ended)
    assert (seen.ended, seen.first_failed, seen.workers[0].exit_code) == ("failed", 0, 9)
    assert engine.fetch(run).complete
    assert "stopped\n" in log(run, 1)


EAT = "x = []\nwhile True: x.append(bytearray(b'x' * (1 << 20)))"
TROUBLES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "cpu": ("unschedulable", ("true",), {"cpus": 500.0}),
    "gpu": ("unschedulable", ("true",), {"gpus_per_worker": 1, "device": "gpu"}),
    "nodes": ("unschedulable", ("sleep", "100"), {"workers": 3}),
    "image": ("image_pull", ("true",), {"image": "nosuch.invalid/x:1"}),
    "image-name": ("image_name_invalid", ("true",), {"image": "A b:1"}),
    "host-network": ("pod_security", ("true",), {"options": {"host_network": True}}),
    "command": ("command_not_found", ("no-such-command",), {}),
    "memory": ("out_of_memory", ("python3", "-c", EAT), {"options": {"memory": "64Mi", "shm": "16Mi"}}),
    "deadline": ("deadline", ("sleep", "100"), {"timeout": 2.0}),
    "exit-64": ("usage", ("sh", "-c", "exit 64"), {}),
    "segv": ("rank_crashed", ("sh", "-c", "kill -SEGV $$"), {}),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_trouble_is_named(runs: Runs, tmp_path: Path, name: str) -> None:
    code, argv, changes = TROUBLES[name]
    engine, run = runs.start(runs.cluster.spec(name, *argv, **changes), tmp_path)
    seen = until(engine, run, lambda seen: bool(seen.findings) or has_ended(seen))
    assert seen.findings[0].code == code


def test_a_pod_that_is_deleted_from_outside(runs: Runs, tmp_path: Path) -> None:
    engine, run = runs.start(runs.cluster.spec("deleted-2", "sleep", "100"), tmp_path)
    until(engine, run, all_run)
    namespace = runs.cluster.access.namespace
    with runs.cluster.access.client() as api:
        pods = api.get(collection("Pod", namespace), labelSelector="batch.kubernetes.io/job-completion-index=1")
        api.delete(named("Pod", namespace, pods["items"][0]["metadata"]["name"]))
    seen = until(engine, run, has_ended)
    assert (seen.ended, seen.first_failed) == ("failed", 1)
    assert [finding.code for finding in seen.findings] == ["pod_deleted"]


def test_what_can_never_start_is_given_up(runs: Runs, tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = store.record_run(runs.cluster.spec("hopeless-1", "true", image="A b:1", workers=1))
    runs.started.append(run)
    engine = runs.cluster.engine
    engine.submit(run, engine.render(run.spec))
    outcome = supervise.follow(run, engine, store)
    assert (outcome.word, outcome.exit_code) == ("never_started", 6)
    assert outcome.findings[0].code == "image_name_invalid"


# --- interruptions --------------------------------------------------------------------------------------------------


def test_cancel_keeps_what_there_is(runs: Runs, tmp_path: Path) -> None:
    script = 'echo half > "$MLBENCH_OUTPUT_DIR/part"; echo begun; sleep 100'
    engine, run = runs.start(runs.cluster.spec("cancel-2", "sh", "-c", script), tmp_path)
    until(engine, run, all_run)
    time.sleep(1)
    engine.cancel(run)
    assert until(engine, run, has_ended).ended == "cancelled"
    assert engine.fetch(run).complete
    assert (tmp_path / "output/rank-0/part").read_text() == "half\n"
    assert log(run, 0).startswith("begun\n")


def test_delete_refuses_results_that_nobody_has_fetched(runs: Runs, tmp_path: Path) -> None:
    engine, run = runs.start(runs.cluster.spec("kept-1", "true", workers=1), tmp_path)
    until(engine, run, has_ended)
    with pytest.raises(UsageError, match=r"still running|not been fetched"):
        engine.delete(run)
    engine.fetch(run)
    engine.delete(run)


def test_results_that_are_gone_are_said_to_be(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec("gone-1", "sh", "-c", "echo told; sleep 1", workers=1, options={"hold_seconds": 0})
    engine, run = runs.start(spec, tmp_path / "none")
    with runs.cluster.access.client() as api:
        while not api.get(named("Job", runs.cluster.access.namespace, run.name)).get("status", {}).get("succeeded"):
            time.sleep(0.5)
    assert until(engine, run, has_ended).ended == "exited"
    assert engine.fetch(run).complete is False
    assert log(run, 0) == "told\n"


CLIENT = """
import os, signal, sys
from pathlib import Path
from mlbench_cli.engines.kubernetes import KubernetesEngine
from mlbench_cli.kube.access import Access
from mlbench_cli.spec import Run, RunSpec
import json
kubeconfig, namespace, folder, event, last, spec = sys.argv[1:]
seen = 0
def count(name, arguments):
    global seen
    if name == event:
        seen += 1
        if seen == int(last):
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
engine = KubernetesEngine(Access.from_kubeconfig(kubeconfig, namespace=namespace))
run = Run("id", RunSpec.from_dict(json.loads(spec)), Path(folder), "2026-01-01T00:00:00Z")
engine.submit(run, engine.render(run.spec))
for seen_now in engine.observe(run):
    pass
engine.fetch(run)
"""
# Requests before the n-th of which the client is killed, and connections: those of exec are the last ones.
KILLS = [("http.client.send", number) for number in (1, 2, 3, 4, 5, 6, 8, 10, 14)]
KILLS += [("socket.connect", number) for number in (4, 5, 6, 7, 8)]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same-folder", "another-folder"])
@pytest.mark.parametrize(("event", "number"), KILLS)
def test_a_client_killed_at_any_step(runs: Runs, tmp_path: Path, event: str, number: int, elsewhere: bool) -> None:
    import json

    script = 'i=0; while [ $i -lt 200 ]; do i=$((i+1)); echo line $i; done; echo 42 > "$MLBENCH_OUTPUT_DIR/answer"'
    name = f"kill-{event[0]}{number}-{'b' if elsewhere else 'a'}"
    spec = runs.cluster.spec(name, "sh", "-c", script, workers=1)
    words = [str(runs.cluster.kubeconfig), runs.cluster.access.namespace, str(tmp_path / "first"), event, str(number)]
    done = subprocess.run([sys.executable, "-c", CLIENT, *words, json.dumps(spec.to_dict())], check=False, timeout=120)
    assert done.returncode == SIGKILLED
    folder = tmp_path / ("second" if elsewhere else "first")
    run = Run("id", spec, folder, now())
    runs.started.append(run)
    engine = runs.cluster.engine
    if spec not in discover_runs(runs.cluster.access):
        engine.submit(run, engine.render(spec))  # nothing had been started
    assert until(engine, run, has_ended).ended == "exited"
    fetched = engine.fetch(run)
    assert log(run, 0) == "".join(f"line {number}\n" for number in range(1, 201))
    with runs.cluster.access.client() as api:
        acknowledged = (
            "mlbench/fetched" in api.get(named("Job", runs.cluster.access.namespace, name))["metadata"]["annotations"]
        )
    assert acknowledged
    if fetched.complete:
        assert (folder / "output/rank-0/answer").read_text() == "42\n"
    else:  # the first client had brought it home, and let go, before it was killed
        assert elsewhere
        assert (tmp_path / "first/output/rank-0/answer").read_text() == "42\n"


def test_a_network_that_breaks_all_the_time(runs: Runs, tmp_path: Path) -> None:
    """Every connection is cut after some 200 kB: 8 MiB of results and 30 000 lines arrive whole all the same."""
    script = """
        head -c 8388608 /dev/urandom > "$MLBENCH_OUTPUT_DIR/noise"
        sha256sum < "$MLBENCH_OUTPUT_DIR/noise" > "$MLBENCH_OUTPUT_DIR/sum"
        i=0; while [ $i -lt 30000 ]; do i=$((i+1)); echo "line $i"; [ $((i % 3000)) = 0 ] && sleep 1; done
    """
    upstream = urlsplit(runs.cluster.access.server)
    with CuttingProxy(str(upstream.hostname), upstream.port or 443, least=100_000, most=2_500_000) as proxy:
        access = replace(runs.cluster.access, server=f"https://127.0.0.1:{proxy.port}", server_name=upstream.hostname)
        engine, run = runs.start(runs.cluster.spec("cuts-1", "sh", "-c", script, workers=1), tmp_path, access)
        assert until(engine, run, has_ended).ended == "exited"
        assert engine.fetch(run).complete
        assert proxy.cuts > 3
    assert log(run, 0) == "".join(f"line {number}\n" for number in range(1, 30001))
    noise = tmp_path / "output/rank-0/noise"
    digest = subprocess.run(["sha256sum"], stdin=noise.open("rb"), capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "output/rank-0/sum").read_text() == digest


def test_two_clients_follow_one_run(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec("shared-1", "sh", "-c", "for i in 1 2 3 4; do echo $i; sleep 0.7; done", workers=1)
    engine, run = runs.start(spec, tmp_path)
    lines: list[bytes] = []
    reader = threading.Thread(
        target=lambda: lines.extend(line.text for line in KubernetesEngine(engine._access).logs(run, 0, follow=True))
    )
    reader.start()
    assert until(engine, run, has_ended).ended == "exited"
    engine.fetch(run)
    reader.join(30)
    assert lines == [b"1\n", b"2\n", b"3\n", b"4\n"]
    assert log(run, 0) == "1\n2\n3\n4\n"


# --- rights ---------------------------------------------------------------------------------------------------------


def test_the_least_rights_are_enough(runs: Runs, tmp_path: Path) -> None:
    """A service account with the role that `attach-cluster` prints does a whole run, and may not look at nodes."""
    from providers.attached import role

    access, namespace = runs.cluster.access, runs.cluster.access.namespace
    rules, binding = role(namespace)
    binding["subjects"] = [{"kind": "ServiceAccount", "name": "least", "namespace": namespace}]
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    with access.client() as api:
        for path, body in (
            (accounts, {"metadata": {"name": "least"}}),
            (f"{rbac}/roles", rules),
            (f"{rbac}/rolebindings", binding),
        ):
            with suppress(Refused):
                api.create(path, body)
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        token = api.create(f"{accounts}/least/token", request)["status"]["token"]
    least = replace(access, certificate=None, key=None, token=Token(lambda: (token, None)))
    with least.client() as api, pytest.raises(ApiError, match="forbidden"):
        api.get("/api/v1/nodes")
    script = 'echo x > "$MLBENCH_OUTPUT_DIR/y"'
    engine, run = runs.start(runs.cluster.spec("least-2", "sh", "-c", script), tmp_path, least)
    assert until(engine, run, has_ended).ended == "exited"
    assert engine.fetch(run).complete
    engine.cancel(run)
    engine.delete(run)
    with pytest.raises(ObjectNotFound), access.client() as api:
        api.get(named("Job", namespace, "least-2"))
