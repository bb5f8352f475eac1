"""The kubernetes engine on a real cluster with two worker nodes, in a namespace where Pod Security is restricted."""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mlbench_cli.engines.follow import read_log
from mlbench_cli.engines.kubernetes.ending import is_over
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.errors import UsageError
from mlbench_cli.kube.api import Api, ApiError, ObjectNotFound, RequestRejected
from mlbench_cli.kube.credentials import Token
from mlbench_cli.kube.objects import object_path
from mlbench_cli.runs import supervise
from mlbench_cli.storage.store import Store
from tests.e2e.kills import KILLS, survive
from tests.e2e.runs import Runs, all_run, has_ended, log, until
from tests.fakes.cutting_proxy import CuttingProxy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
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
MPI = """
import os, shutil, torch, torch.distributed as dist
from task_images.mpi import group as mpi
torch.set_num_threads(1)
dist.init_process_group(mpi.register())
x = torch.full((200_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
words = (f"sum {x[0].item()} {x[-1].item()}", mpi.facts()["library"], mpi.facts()["launcher"], str(shutil.which("ssh")))
os.write(1, (", ".join(words) + "\\n").encode())
dist.destroy_process_group()
"""


# --- what goes well -------------------------------------------------------------------------------------------------


def test_a_shell_script_on_two_nodes(runs: Runs, tmp_path: Path) -> None:
    script = (
        'echo "I am {rank} of {hosts}"; mkdir "$MLBENCH_OUTPUT_DIR/d"; echo $((6*7)) > "$MLBENCH_OUTPUT_DIR/d/answer"'
    )
    engine, run = runs.start(runs.cluster.spec("shell-2", "sh", "-c", f"{script}; sleep 2; printf 'no end'"), tmp_path)
    seen = until(engine, run, has_ended)
    assert (seen.ended, [worker.exit_code for worker in seen.workers]) == ("exited", [0, 0])
    assert len({worker.node for worker in seen.workers}) == 2
    fetched = engine.head(run).fetch()
    assert fetched.complete
    assert log(run, 1) == "I am 1 of shell-2-0.shell-2,shell-2-1.shell-2\nno end"
    assert (tmp_path / "output/rank-0/d/answer").read_text() == "42\n"
    assert not (tmp_path / "output/rank-1").exists()
    sampled = [json.loads(line).get("rank") for line in (tmp_path / "resources.jsonl").read_text().splitlines()]
    assert min(sampled.count(0), sampled.count(1)) >= 3  # one a second, also of the worker that is not held
    engine.delete(run)


def test_an_image_with_nothing_but_busybox(runs: Runs, tmp_path: Path) -> None:
    name, busybox = os.environ.get("LAB_CLUSTER"), shutil.which("busybox")
    if not (os.environ.get("MLBENCH_E2E_KUBECONFIG") and name and busybox and shutil.which("kind")):
        pytest.skip("an image can be made and loaded only if LAB_CLUSTER names the kind cluster and busybox is here")
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
    fetched = engine.head(run).fetch()
    assert (fetched.complete, [finding.code for finding in fetched.findings]) == (False, ["results_lost"])
    assert "no Python" in fetched.findings[0].summary
    assert log(run, 0).startswith("here\n")


def test_torch_reduces_over_two_nodes_and_collects_from_all(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec(
        "gloo-2", "python3", "-c", GLOO, image=runs.cluster.torch_image, options={"collect": "all"}
    )
    engine, run = runs.start(spec, tmp_path)
    assert until(engine, run, has_ended).ended == "exited"
    assert engine.head(run).fetch().complete
    for rank in (0, 1):
        assert "sum 3.0 3.0" in log(run, rank)
        assert (tmp_path / f"output/rank-{rank}/sum.txt").read_text() == "3.0"


def test_two_processes_on_each_node(runs: Runs, tmp_path: Path) -> None:
    # The image has only python3, as many have.
    spec = runs.cluster.spec("two-2", "python", "-c", GLOO, image=runs.cluster.torch_image, processes_per_worker=2)
    engine, run = runs.start(spec, tmp_path)
    assert until(engine, run, has_ended).ended == "exited"
    engine.head(run).fetch()
    assert [log(run, rank).count("sum 10.0") for rank in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("processes", [1, 2])
def test_mpi_between_two_nodes_without_ssh(runs: Runs, tmp_path: Path, processes: int) -> None:
    if "allreduce" not in runs.cluster.torch_image:
        pytest.skip("the image has no task_images")
    spec = runs.cluster.spec(
        f"mpi{processes}-2", "python3", "-c", MPI, image=runs.cluster.torch_image, backend="mpi",
        processes_per_worker=processes,
    )  # fmt: skip
    engine, run = runs.start(spec, tmp_path)
    seen = until(engine, run, has_ended)
    engine.head(run).fetch()
    total = {1: 3.0, 2: 10.0}[processes]
    for rank in range(2 * processes):
        said = log(run, rank)
        assert said.count(f"sum {total} {total}, MPICH Version: 5") == 1, said
        assert said.count(", none, None\n") == 1
    assert seen.ended == "exited"
    assert len({worker.node for worker in seen.workers}) == 2


def test_only_worker_0_runs_the_command(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec("single-2", "sh", "-c", "echo here; sleep 1", run_on_all=False)
    engine, run = runs.start(spec, tmp_path)
    assert until(engine, run, has_ended).ended == "exited"
    engine.head(run).fetch()
    assert (log(run, 0), log(run, 1)) == ("here\n", "")


def test_logs_come_while_the_run_goes_on(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec("follow-1", "sh", "-c", "for i in 1 2 3; do echo $i; sleep 1; done", workers=1)
    engine, run = runs.start(spec, tmp_path)
    first = until(engine, run, lambda seen: all_run(seen))
    assert first.ended is None
    assert [line.text for line in read_log(engine, run, 0, follow=True)] == [b"1\n", b"2\n", b"3\n"]
    engine.head(run).fetch()


def test_names_that_come_late_are_waited_for(runs: Runs, tmp_path: Path) -> None:
    """The cluster has no DNS when the workers start; that is no finding."""
    with runs.cluster.access.client() as api, without_dns(api):
        spec = runs.cluster.spec("dns-2", "python3", "-c", GLOO, image=runs.cluster.torch_image)
        engine, run = runs.start(spec, tmp_path)
        assert until(engine, run, all_run).findings == ()
        time.sleep(5)
        assert until(engine, run, lambda seen: True).findings == ()
    assert until(engine, run, has_ended).ended == "exited"
    engine.head(run).fetch()
    assert "sum 3.0 3.0" in log(run, 0)


@contextmanager
def without_dns(api: Api) -> Iterator[None]:
    path = "/apis/apps/v1/namespaces/kube-system/deployments/coredns"
    before = api.get(path)["spec"]["replicas"]
    try:
        api.patch(path, {"spec": {"replicas": 0}})
        while api.get("/api/v1/namespaces/kube-system/pods", labelSelector="k8s-app=kube-dns")["items"]:
            time.sleep(0.5)
        yield
    finally:
        api.patch(path, {"spec": {"replicas": before}})


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
    assert engine.head(run).fetch().complete
    assert (tmp_path / "output/rank-0/partial").read_text() == "part\n"
    assert "stopped\n" in log(run, 0)


def test_a_crash_of_the_worker_that_holds_stops_the_others(runs: Runs, tmp_path: Path) -> None:
    script = "if [ $RANK = 0 ]; then sleep 1; exit 9; fi; trap 'echo stopped; exit 3' TERM; while :; do sleep 0.2; done"
    engine, run = runs.start(runs.cluster.spec("crash0-2", "sh", "-c", script), tmp_path)
    seen = until(engine, run, has_ended)
    assert (seen.ended, seen.first_failed, seen.workers[0].exit_code) == ("failed", 0, 9)
    assert engine.head(run).fetch().complete
    assert "stopped\n" in log(run, 1)


def test_what_can_never_start_is_given_up(runs: Runs, tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = store.record_run(runs.cluster.spec("hopeless-1", "true", image="A b:1", workers=1))
    runs.started.append(run)
    engine = runs.cluster.engine
    engine.submit(run, engine.render(run.spec))
    finished = supervise.follow(run, engine, store)
    assert (finished.outcome, finished.exit_code()) == ("never_started", 6)
    assert finished.findings[0].code == "image_name_invalid"


# --- interruptions --------------------------------------------------------------------------------------------------


def test_cancel_keeps_what_there_is(runs: Runs, tmp_path: Path) -> None:
    script = 'echo half > "$MLBENCH_OUTPUT_DIR/part"; echo begun; sleep 100'
    engine, run = runs.start(runs.cluster.spec("cancel-2", "sh", "-c", script), tmp_path)
    until(engine, run, all_run)
    time.sleep(1)
    engine.cancel(run)
    assert until(engine, run, has_ended).ended == "canceled"
    assert engine.head(run).fetch().complete
    assert (tmp_path / "output/rank-0/part").read_text() == "half\n"
    assert log(run, 0).startswith("begun\n")
    # The Job ends, and so it expires; a suspended one would stay for ever.
    access, end = runs.cluster.access, time.monotonic() + 120
    with access.client() as api:
        while not is_over(api.get(object_path("Job", access.namespace, run.name))):
            assert time.monotonic() < end
            time.sleep(0.5)


def test_delete_refuses_results_that_nobody_has_fetched(runs: Runs, tmp_path: Path) -> None:
    engine, run = runs.start(runs.cluster.spec("kept-1", "true", workers=1), tmp_path)
    until(engine, run, has_ended)
    with pytest.raises(UsageError, match=r"still running|not been fetched"):
        engine.delete(run)
    engine.head(run).fetch()
    engine.delete(run)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same-folder", "another-folder"])
@pytest.mark.parametrize(("event", "number"), KILLS)
def test_a_client_killed_at_any_step(runs: Runs, tmp_path: Path, event: str, number: int, elsewhere: bool) -> None:
    survived = survive(runs, tmp_path, event, number, elsewhere)
    assert survived.well, survived
    # Only who has brought the output home and was killed then has it, when another one goes on.
    assert survived.output == "here" or elsewhere


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
        assert engine.head(run).fetch().complete
        assert proxy.cuts > 3
    assert log(run, 0) == "".join(f"line {number}\n" for number in range(1, 30001))
    noise = tmp_path / "output/rank-0/noise"
    digest = subprocess.run(["sha256sum"], stdin=noise.open("rb"), capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "output/rank-0/sum").read_text() == digest


def test_two_clients_follow_one_run(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec("shared-1", "sh", "-c", "for i in 1 2 3 4; do echo $i; sleep 0.7; done", workers=1)
    engine, run = runs.start(spec, tmp_path)
    lines: list[bytes] = []
    other = KubernetesEngine(engine._access)
    reader = threading.Thread(target=lambda: lines.extend(line.text for line in read_log(other, run, 0, follow=True)))
    reader.start()
    assert until(engine, run, has_ended).ended == "exited"
    engine.head(run).fetch()
    reader.join(30)
    assert lines == [b"1\n", b"2\n", b"3\n", b"4\n"]
    assert log(run, 0) == "1\n2\n3\n4\n"


# --- rights ---------------------------------------------------------------------------------------------------------


def test_the_least_rights_are_enough(runs: Runs, tmp_path: Path) -> None:
    """A service account with the role that `attach-cluster` prints does a whole run, and may not look at nodes."""
    from providers.attached import role_manifests

    access, namespace = runs.cluster.access, runs.cluster.access.namespace
    rules, binding = role_manifests(namespace)
    binding["subjects"] = [{"kind": "ServiceAccount", "name": "least", "namespace": namespace}]
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    with access.client() as api:
        for path, body in (
            (accounts, {"metadata": {"name": "least"}}),
            (f"{rbac}/roles", rules),
            (f"{rbac}/rolebindings", binding),
        ):
            with suppress(RequestRejected):
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
    assert engine.head(run).fetch().complete
    engine.cancel(run)
    engine.delete(run)
    with pytest.raises(ObjectNotFound), access.client() as api:
        api.get(object_path("Job", namespace, "least-2"))
