"""`mlbench run --create`: from no cluster to verified archives in one command, and nothing left, whatever stops it.

KIND on stand-ins; the Kubernetes API and its nodes are doubles that run the real worker script. On the paid clouds the
plan, a refusal before anything costs money, and the deletion after runs that could not start.
"""

import json
import socket
import sysconfig
import time
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.storage.store import Store
from providers.pins import require_pin
from tests import NIGHTLY
from tests.contract.clients import finish, start
from tests.fakes.gke import World as GkeWorld
from tests.fakes.kind_tools import World
from tests.fakes.kube_api import KubeApi
from tests.fakes.kubelet import Kubelet

RUN = ("run", "big", "1", "2", "--image", "my/task:1", "--command", "sh -c 'echo hello'", "--set", "run.keep=0")
CREATE = (*RUN, "--create", "kind", "--yes")
ONE_RUN = tuple(word for word in CREATE if word != "1")
CLOUD = ("run", "big", "2", "--task", "allreduce", "--preset", "tiny", "--registry", "127.0.0.1:1/nobody")

# Lines of a .pth file that begin with "import" are run when Python starts (the documentation of `site`).
SLOW_PIP = (
    "import os, sys, time; "
    "time.sleep(20 if 'pip' in sys.orig_argv and os.environ.get('JOB_COMPLETION_INDEX') == '0' else 0)\n"
)


def outcomes(*names: str) -> dict[str, str]:
    return {row.run.name: str(row.outcome) for row in Store().runs() if not names or row.run.name in names}


def test_one_command_creates_runs_verifies_and_deletes(command: Any, world: World, nodes: KubeApi) -> None:
    done = command(*CREATE)
    assert done.code == 0, done.err
    for line in ("Steps: create big-2", "Verified 2 archives.", "The cluster big-2 is deleted; no resources remain."):
        assert line in done.err
    assert "--create kind" in done.err.rpartition("Repeat: ")[2]
    assert outcomes() == {"big-1": "completed", "big-2": "completed"}
    assert world.left == []
    assert [cluster.name for cluster in Store().clusters()] == ["local"]
    calls = len(world.state["log"])
    again = command("run", "big")  # all that was asked for is known by the name; all of it has ended
    assert again.code == 0, again.err
    assert [call for call in world.state["log"][calls:] if call.startswith("kind create")] == []


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_task_needs_no_image_of_its_own(command: Any, world: World, nodes: KubeApi) -> None:
    """The workers run the code that the run brings, in PyTorch's public image; the archive has both digests."""
    words = ("run", "d", "1", "--task", "allreduce", "--preset", "tiny", "--set", "run.keep=0", "--env", "LEVEL=info")
    done = command(*words, "--create", "kind", "--yes")
    assert done.code == 0, done.err
    (row,) = Store().runs()
    folder = row.run.folder
    run = json.loads((folder / "run.json").read_text())
    (rank,) = json.loads((folder / "environment.json").read_text())["ranks"].values()
    assert rank["code_digest"] == run["provenance"]["code"]["digest"]
    assert run["spec"]["image"] == require_pin("images", "torch")
    assert "code.tar.gz: sha256:" in (folder / "manifests" / "configmap.yaml").read_text()
    assert not any(path.stat().st_size > 100_000 for path in (folder / "manifests").iterdir())
    assert world.left == []


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_workers_install_what_their_image_lacks(command: Any, world: World, tmp_path: Path) -> None:
    """sacrebleu, of which pip finds a wheel in a folder. Without it, the run says what is missing and what to do."""
    python = make_image_without("sacrebleu", tmp_path)
    words = f"run t 1 --task wmt17_transformer --preset tiny --num-cpus 1 --env PIP_FIND_LINKS={tmp_path}".split()
    words += [
        "--set",
        "blocks=1",
        "--set",
        "block_updates=1",
        "--env",
        "PIP_NO_INDEX=1",
        "--set",
        "run.keep=0",
        "--yes",
    ]
    with KubeApi() as server, Kubelet(server, tmp_path / "pods", python=python):
        world.change(server=server.url)
        done = command(*words, "--create", "kind", "--keep-cluster")
        assert done.code == 0, done.err
        assert "Workers install sacrebleu>=2.4,<3 with pip when they start." in done.err
        (row,) = Store().runs()
        ranks = json.loads((row.run.folder / "environment.json").read_text())["ranks"]
        assert "sacrebleu" in ranks["0"]["packages"]
        next(tmp_path.glob("*.whl")).unlink()
        refused = {"PIP_NO_INDEX=1": "PIP_INDEX_URL=http://127.0.0.1:9/simple"}
        words = [refused.get(word, word) for word in words[3:]]
        slow = Path(sysconfig.get_path("purelib", vars={"base": str(python.parents[1])}), "slow.pth")
        slow.write_text(SLOW_PIP)  # the other worker fails first, and Kubernetes then stops this one
        done = command("run", "u", "2", *words, "--env", "PIP_RETRIES=1", "--cluster", row.run.spec.cluster)
        assert done.code == 6, done.err
        assert "pip could not install sacrebleu>=2.4,<3 in its image (No matching distribution found" in done.err
        assert "Connection refused" in done.err  # why no version was found
        assert "--image" in done.err
        assert "--env PIP_INDEX_URL=URL" in done.err
        slow.unlink()
        with socket.create_server(("127.0.0.1", 0)) as silent:  # an index that never answers
            index = f"PIP_INDEX_URL=http://127.0.0.1:{silent.getsockname()[1]}"
            words = [index if word.startswith("PIP_INDEX_URL=") else word for word in words]
            assert command("run", "v", "1", *words, "--cluster", row.run.spec.cluster, "--detach").code == 0
            silent.settimeout(60)
            silent.accept()  # pip asks
            assert command("cancel", "v-1").code == 0
        assert outcomes("v-1") == {"v-1": "canceled"}
        assert "pip" not in command("status", "v-1").out


def make_image_without(package: str, folder: Path) -> Path:
    """A Python that has all packages of this one but one, of which the folder gets a wheel that needs no others."""
    own = Path(sysconfig.get_path("purelib"))
    image = folder / "image"
    venv.create(image, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(image)}))
    for entry in own.iterdir():
        if not entry.name.startswith((package, "__editable__")):
            (site / entry.name).symlink_to(entry)
    with zipfile.ZipFile(folder / f"{package}-{version(package)}-py3-none-any.whl", "w") as wheel:
        for path in own.glob(f"{package}*/**/*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name, data = path.relative_to(own).as_posix(), path.read_bytes()
                if name.endswith(".dist-info/METADATA"):
                    data = b"".join(row for row in data.splitlines(True) if not row.startswith(b"Requires-Dist"))
                wheel.writestr(name, data)
    return image / "bin" / "python"


def test_a_worker_runs_no_code_but_that_of_its_run(command: Any, world: World, nodes: KubeApi) -> None:
    put = nodes.put

    def tamper(kind: str, document: dict[str, Any]) -> dict[str, Any]:
        if "binaryData" in document:
            document = {**document, "binaryData": {**document["binaryData"], "code.tar.gz": "bm8gY29kZQ=="}}
        return put(kind, document)

    nodes.put = tamper  # type: ignore[method-assign]
    done = command(
        "run", "d", "1", "--task", "allreduce", "--preset", "tiny", "--set", "run.keep=0", "--create", "kind", "--yes"
    )
    assert done.code == 7, done.err
    (row,) = Store().runs()
    assert "is not that of this run" in (row.run.folder / "logs" / "rank-0.log").read_text()
    assert world.left == []


@pytest.mark.slow
def test_a_failed_run_has_its_archive_and_the_cluster_goes(command: Any, world: World, nodes: KubeApi) -> None:
    words = [word.replace("echo hello", "exit 3") for word in CREATE]
    done = command(*words)
    assert done.code == 7, done.err
    assert outcomes() == {"big-1": "failed", "big-2": "failed"}
    assert world.left == []


def test_a_kept_cluster_serves_the_next_run_and_is_not_taken_by_another(
    command: Any, world: World, nodes: KubeApi
) -> None:
    assert command(*CREATE, "--keep-cluster").code == 0
    assert world.left != []
    other = command("create-cluster", "kind", "2", "mine")
    assert other.code == 0, other.err
    mine = command("run", "mine", "2", *RUN[4:], "--create", "kind", "--yes")
    assert (mine.code, 'was not made for "mine"' in mine.err) == (2, True)
    assert command(*RUN, "--create", "kind", "--yes", "--repeat", "1").code == 0
    assert [name for name in world.left if "big" in name] == []  # without --keep-cluster it goes
    assert [name for name in world.left if "mine" in name] != []


def test_a_creation_that_fails_leaves_nothing(command: Any, world: World, nodes: KubeApi) -> None:
    world.change(trouble={"kind create": "fail"})
    done = command(*CREATE)
    assert done.code not in (0, 8), done.err
    assert "no route to host" in done.err
    assert "resources exist" not in done.err
    assert world.left == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*RUN, "--create", "kindd"), 'Did you mean "kind"?'),
        ((*RUN, "--create", "kind", "--cluster", "lab"), "exclude each other"),
        ((*RUN, "--create", "kind", "--detach"), "nobody to delete the cluster"),
        ((*RUN, "--create", "kind", "--registry", "auto"), "empty registry"),
        ((*RUN, "--create", "kind", "--num-gpus", "1"), "KIND clusters have no GPUs"),
        ((*RUN, "--create", "kind", "--ttl", "soon"), "--ttl"),
        ((*RUN, "--create", "kind", "--gpu"), "has no GPUs"),
        ((*RUN, "--create", "gke", "--gpu"), "--gpu-type TYPE"),
        ((*RUN, "--create", "gke", "--gpu-type", "t4"), "Add --gpu"),
        ((*RUN, "--create", "gke", "--gpu", "--gpu-type", "t4", "--gpus-per-worker", "3"), "--gpus-per-worker 1"),
        ((*RUN, "--keep-cluster"), "works only with --create"),
        ((*RUN, "--create", "gke", "--gpu-tipe", "l4"), "--gpu-type"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    command: Any, world: World, words: tuple[str, ...], message: str
) -> None:
    done = command(*words, "--yes")
    assert done.code == 2, done.err
    assert message in done.err
    assert world.left == []
    assert outcomes() == {}


def test_a_spec_file_describes_the_cluster(command: Any, world: World, tmp_path: Path) -> None:
    file = tmp_path / "spec.yml"
    spec: dict[str, Any] = {"name": "big", "workers": [2], "image": "my/task:1", "command": "true"}
    file.write_text(json.dumps({**spec, "create": {"provider": "kind", "kubernetes-version": "1.34"}}))
    shown = command("run", "-f", str(file), "--dry-run")
    assert shown.code == 0, shown.err
    assert "kindest/node:v1.34" in shown.err
    own = command(*RUN, "--create", "kind", "--cluster-image", "mine/node:1", "--dry-run")
    assert "node container (mine/node:1)" in own.err
    assert "image: my/task:1" in own.out
    for wrong, message in (
        ({"provider": "kind", "kubernetes-verzion": "1.35"}, 'Did you mean "kubernetes-version"'),
        ({"provider": "kind", "num-cpus": "two"}, "not a whole number"),
        ({"gpu-type": "l4"}, '"provider"'),
    ):
        file.write_text(json.dumps({**spec, "create": wrong}))
        refused = command("run", "-f", str(file), "--dry-run")
        assert (refused.code, message in refused.err) == (2, True), refused.err
    assert world.left == []


# --- killed ---------------------------------------------------------------------------------------------------------


def kill_at(words: tuple[str, ...], world: World, nodes: KubeApi, moment: int, calls: int) -> None:
    """Kill the client with -9 at its `moment`-th call of docker or kind, or so many requests to the API after them."""
    if moment < calls:
        world.change(trouble={str(len(world.state["log"]) + moment): "kill-after"})
        finish(*words)
        world.change(trouble={})
        return
    before = sum(nodes.requests.values())
    client = start(*words)
    while client.poll() is None and sum(nodes.requests.values()) < before + 1 + 5 * (moment - calls):
        time.sleep(0.005)
    client.kill()
    client.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("words", "stride"), [(CREATE, 1) if NIGHTLY else (ONE_RUN, 11)], ids=[""])
def test_killed_at_any_moment_the_same_command_completes_it_and_nothing_leaks(
    world: World, nodes: KubeApi, words: tuple[str, ...], stride: int
) -> None:
    assert finish(*words).returncode == 0
    calls = len(world.state["log"])
    finish("delete", "big", "--yes", "--force")
    nodes.clear()
    for moment in range(0, calls + 12, stride):
        kill_at(words, world, nodes, moment, calls)
        if world.left:  # nothing exists that no command would show
            assert "big-2" in finish("list-clusters").stdout, moment
        done = finish(*words)
        assert done.returncode == 0, (moment, done.stderr)
        assert world.left == [], moment
        assert set(outcomes().values()) == {"completed"}, moment
        assert {(row.run.folder / "logs/rank-0.log").read_text() for row in Store().runs()} == {"hello\n"}, moment
        assert finish("delete", "big", "--yes", "--force").returncode == 0
        nodes.clear()


@pytest.mark.slow
def test_ctrl_c_leaves_the_cluster_to_its_run_and_delete_cluster_ends_both(world: World, nodes: KubeApi) -> None:
    words = [word.replace("echo hello", "sleep 600") for word in CREATE]
    client = start(*words, stderr=-1)
    while not any(kind == "pods" for kind, _ in nodes.objects):
        assert client.poll() is None, client.communicate()[1]
        time.sleep(0.05)
    client.send_signal(2)
    said = client.communicate(timeout=180)[1]
    assert client.returncode == 130, said
    assert "The cluster big-2 stays for its runs" in said
    assert finish("delete-cluster", "big-2", "--yes").returncode == 2  # results that were not fetched
    assert finish("delete-cluster", "big-2", "--yes", "--force").returncode == 0
    assert world.left == []


@pytest.mark.slow
def test_of_two_commands_at_once_one_does_the_work(world: World, nodes: KubeApi) -> None:
    both = [start(*ONE_RUN, stderr=-1) for _ in range(2)]
    said = [client.communicate(timeout=280)[1] for client in both]
    assert sorted(client.returncode for client in both) == [0, 2], said
    assert set(outcomes().values()) == {"completed"}
    assert world.left == []


# --- clouds ---------------------------------------------------------------------------------------------------------


def test_the_plan_names_cost_checks_and_end_and_nothing_is_made_without_a_yes(
    command: Any, gke_world: GkeWorld
) -> None:
    words = (*CLOUD, "--create", "gke", "--machine-type", "n1-standard-4", "--timeout", "2h")
    for done in (command(*words, "--dry-run"), command(*words)):
        for line in (
            "n1-standard-4",
            "permissions",
            "quotas",
            "at most 2 h",
            "per hour of the runs",
            "expires after 3h",
        ):
            assert line in done.err
        assert "Limit: " in done.err
        assert "Expected: " not in done.err  # no such run is known
    assert done.code == 2
    assert "Create the cluster big-2, run big-2 on it and delete it afterwards?" in done.err
    assert gke_world.clusters == {}


def test_where_a_spot_price_is_unknown_the_price_on_demand_is_the_limit(command: Any, gke_world: GkeWorld) -> None:
    words = (*CLOUD, "--create", "gke", "--machine-type", "g2-standard-4", "--gpu", "--timeout", "1h", "--dry-run")
    on_demand, spot = (command(*words, *more).err for more in ((), ("--spot",)))
    (cost,) = [line for line in on_demand.splitlines() if line.startswith("Cost: ")]
    per_hour = cost.partition(", and ")[2].partition(" USD")[0]
    assert f"and at most {per_hour} USD per hour of the runs, as on demand" in spot
    (total,) = [line for line in spot.splitlines() if line.split()[:1] == ["total"]]
    assert total.split()[1:] == ["at", "most", per_hour, "USD", "(on", "demand)"]
    assert [line for line in spot.splitlines() if line.startswith("Limit: ")] == [
        line for line in on_demand.splitlines() if line.startswith("Limit: ")
    ]


@pytest.mark.timeout(300)
def test_a_cluster_whose_runs_cannot_start_is_deleted(
    command: Any, gke_world: GkeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_UNREACHABLE_TIMEOUT", "1s")
    done = command(*CLOUD, "--create", "gke", "--machine-type", "n1-standard-4", "--yes")
    assert done.code != 0
    assert any(line.startswith("CreateCluster") for line in gke_world.log)
    assert gke_world.clusters == {}
    assert "The cluster big-2 is deleted" in done.err


@pytest.mark.timeout(300)
def test_a_cluster_that_cannot_be_deleted_at_the_end_is_named_with_its_command(
    command: Any, gke_world: GkeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials, such as those of a company's sign-in, expire during long runs."""
    monkeypatch.setenv("MLBENCH_UNREACHABLE_TIMEOUT", "1s")
    words = (*CLOUD, "--create", "gke", "--machine-type", "n1-standard-4", "--yes")
    gke_world.trouble["DeleteCluster"] = "UNAUTHENTICATED-before"
    done = command(*words)
    assert done.code == 8, done.err
    assert "node pool big-2/workers: it goes with the GKE cluster" in done.err
    assert "gcloud container clusters delete big-2 --location europe-west1-b --project demo-project" in done.err
    assert "gcloud auth application-default login" in done.err.rpartition("Next:")[2]
    gke_world.trouble["GetCluster"] = "UNAUTHENTICATED-before"
    done = command(*words)
    assert done.code == 8, done.err
    assert "The cluster big-2 stays and costs money" in done.err
    assert "gcloud auth application-default login" in done.err.rpartition("Next:")[2]
    assert "mlbench delete-cluster gke big-2" in done.err.rpartition("Next:")[2]
    gke_world.trouble.clear()
    assert command("delete-cluster", "gke", "big-2", "--yes", "--force").code == 0  # no run has begun
    assert gke_world.clusters == {}
