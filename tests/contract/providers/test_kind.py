"""The KIND provider on stand-ins of `docker` and `kind` with a world of their own (tests/e2e has the real ones)."""

import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.kind import api
from providers.kind.options import KindOptions
from providers.kind.provider import KindProvider, kubeconfig_of
from providers.kind.quota import image_of
from providers.kind.resources import list_owned_clusters
from providers.lifecycle import down, hold_operation_lock, up
from tests import NIGHTLY
from tests.fakes.kind_tools import World

FULL = KindOptions(registry_port=5001, load=("my/task:1",))
# Calls that change the world; to be killed at another is to be killed after the last of these.
CHANGING = re.compile(
    r"docker (volume (create|rm)|run|rm|network connect|save|exec --interactive)|kind (create|delete|load)"
)


def _cluster(name: str = "demo-2", nodes: int = 1, options: KindOptions = FULL) -> Cluster:
    described = KindProvider().new_cluster(name, nodes, options)
    return Cluster(name, "kind", details={**described.details, "owner": "tester", "expires": 4102444800})


def _make(cluster: Cluster) -> Cluster:
    return up(cluster, KindProvider().resources(cluster), Store())


def _remove(cluster: Cluster) -> None:
    down(cluster, KindProvider().resources(cluster), Store())


def _remove_from_nothing() -> None:
    """Remove all that is marked, with an empty data folder."""
    for cluster in KindProvider().discover({}):
        _remove(cluster)


def _in_child(work: Callable[[], object]) -> int:
    """The signal that ended `work` in a process of its own, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.slow
def test_a_cluster_with_registry_and_images(world: World) -> None:
    cluster = _make(_cluster())
    state = world.state
    nodes = {name: item for name, item in state["containers"].items() if item.get("cluster") == "demo-2"}
    assert set(nodes) == {"demo-2-control-plane", "demo-2-worker"}
    for node in nodes.values():
        assert node["files"] == {
            "/etc/containerd/certs.d/localhost:5001/hosts.toml": '[host."http://kind-registry:5000"]\n'
        }
    assert [name for name, node in nodes.items() if "my/task:1" in node["images"]] == ["demo-2-worker"]
    assert state["containers"]["kind-registry"]["port"] == 5001
    assert state["networks"]["kind"] == ["kind-registry"]
    assert cluster.details["functional_only"] is True
    assert list_owned_clusters()["demo-2"]["mlbench-owner"] == "tester"
    kubeconfig = kubeconfig_of(cluster)
    assert kubeconfig.stat().st_mode & 0o777 == 0o600
    _remove(cluster)
    assert world.left == []
    assert not kubeconfig.parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["podman", "nerdctl"] if NIGHTLY else ["podman"])
def test_another_program_of_containers_is_named_by_kinds_own_variable(
    world: World, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    os.symlink(world.bin / "docker", world.bin / program)
    monkeypatch.setenv("KIND_EXPERIMENTAL_PROVIDER", program)
    assert KindProvider().plan(_cluster()).total == 0
    _make(_cluster())
    _remove(_cluster())
    assert world.left == []
    assert {call.split()[0] for call in world.state["log"]} == {program, "kind"}
    monkeypatch.setenv("KIND_EXPERIMENTAL_PROVIDER", "podmann")
    with pytest.raises(UsageError, match=r'which kind does not support\. Did you mean "podman"'):
        KindProvider().plan(_cluster())


def test_a_machine_with_cgroup_v1_is_told_which_kubernetes_runs_there(world: World) -> None:
    world.change(trouble={"cgroup": "1", "version": "v0.33.0"})
    with pytest.raises(UsageError, match="does not run on cgroup v1") as caught:
        KindProvider().plan(_cluster(options=KindOptions(kubernetes_version="1.36")))
    assert "--kubernetes-version 1.34" in str(caught.value.hint)
    assert world.left == []
    KindProvider().plan(_cluster(options=KindOptions(kubernetes_version="1.34")))


def test_every_version_has_a_node_image_by_digest() -> None:
    for version in ("1.34", "1.35", "1.36"):
        image = image_of(KindOptions(kubernetes_version=version))
        assert re.fullmatch(rf"kindest/node:v{version}\.\d+@sha256:[0-9a-f]{{64}}", str(image))


@pytest.mark.slow
def test_an_image_built_anew_is_loaded_again(world: World) -> None:
    _make(_cluster())
    world.change(images={**world.state["images"], "my/task:1": "sha256:04"})
    _make(_cluster())
    assert sum(call.startswith("kind load") for call in world.state["log"]) == 2


def test_images_of_the_containerd_store_are_saved_by_platform(world: World) -> None:
    world.change(store="containerd")
    _make(_cluster())
    [save] = [call for call in world.state["log"] if call.startswith("docker save")]
    assert "--platform linux/amd64" in save


def _kills(world: World, work: Callable[[], object]) -> list[tuple[int, str]]:
    """Where to kill `work`: before its first and after each changing call, by the log of one calm pass."""
    world.change(log=[])
    work()
    numbers = [number for number, call in enumerate(world.state["log"]) if CHANGING.match(call)]
    return [(numbers[0], "kill-before"), *((number, "kill-after") for number in numbers)]


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1 if NIGHTLY else 23])
def test_killed_at_every_change_of_making_nothing_leaks(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    kills = _kills(world, lambda: _make(_cluster()))
    assert len(kills) >= 9
    _remove(_cluster())
    for number, when in kills[::stride]:
        world.change(log=[], trouble={str(number): when})
        monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / f"home-{number}-{when}"))
        assert _in_child(lambda: _make(_cluster())) == signal.SIGKILL
        killed_at = world.state["log"][-1]
        world.change(trouble={})
        monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / f"empty-{number}-{when}"))
        _remove_from_nothing()
        assert world.left == [], f"{when} {killed_at}"


@pytest.mark.slow
@pytest.mark.parametrize("stride", (3, 1) if NIGHTLY else (3,))
def test_killed_at_every_change_of_removing_it_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    _make(_cluster())
    full = world.state
    kills = _kills(world, lambda: _remove(_cluster()))
    assert len(kills) == 4
    for number, when in kills[::stride]:
        world.change(**{**full, "log": [], "trouble": {str(number): when}})
        monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / f"home-{number}-{when}"))
        assert _in_child(_remove_from_nothing) == signal.SIGKILL
        world.change(trouble={})
        monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / f"empty-{number}-{when}"))
        _remove_from_nothing()
        assert world.left == []


@pytest.mark.slow
@pytest.mark.parametrize("call", ["docker save", "kind delete"])
def test_a_client_killed_with_files_of_a_cluster_leaves_none(world: World, tmp_path: Path, call: str) -> None:
    """The archive of an image may have gigabytes, and the kubeconfig gives access."""

    def make_and_remove() -> None:
        _make(_cluster())
        _remove(_cluster())

    make_and_remove()
    number = next(number for number, line in enumerate(world.state["log"]) if line.startswith(call))
    world.change(log=[], trouble={str(number): "kill-after"})
    assert _in_child(make_and_remove) == signal.SIGKILL
    world.change(trouble={})
    _remove(_cluster())
    assert world.left == []
    assert not kubeconfig_of(_cluster()).parent.exists()
    assert [name for name in os.listdir(tempfile.gettempdir()) if not name.startswith("mlbench-kind-")] == []


@pytest.mark.slow
def test_a_kind_that_outlives_its_client_is_waited_for(world: World) -> None:
    world.change(trouble={"kind create": "kill-during"})
    assert _in_child(lambda: _make(_cluster())) == signal.SIGKILL
    # Now kind goes on by itself. A removal must not overtake it.
    _remove_from_nothing()
    assert world.left == []
    time.sleep(0.6)
    assert world.left == []


@pytest.mark.slow
def test_a_removal_waits_for_a_kind_that_has_made_no_node_yet_and_for_no_list(world: World) -> None:
    assert _make(_cluster()).state == "ready"
    (whole,) = [item for item in KindProvider().resources(_cluster()) if item.kind == "KIND cluster"]
    with api.creation_lock("demo-2", shared=True):  # as another list has it
        found = whole.find()
        assert found is not None
        assert (found.state, found.busy) == ("running", None)
    world.change(containers={})
    with api.creation_lock("demo-2"):
        found = whole.find()
    assert found is not None
    assert found.busy == "another process is still creating or deleting it"


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["kill-both", "kill-both-later"])
def test_a_cluster_that_kind_left_half_made_is_made_anew(world: World, trouble: str) -> None:
    """Without its client kind goes on until it prints the next line, which nobody reads."""
    world.change(trouble={"kind create": trouble})
    assert _in_child(lambda: _make(_cluster())) == signal.SIGKILL
    assert [name for name in world.left if name.startswith("demo-2-")] == ["demo-2-control-plane"]
    world.change(trouble={"kind create": ""})
    assert _make(_cluster()).state == "ready"
    assert "kind delete cluster --name demo-2" in "\n".join(world.state["log"])


def test_a_failing_kind_is_quoted_and_leaves_only_its_mark(world: World) -> None:
    world.change(trouble={"kind create": "fail"})
    with pytest.raises(UsageError, match="no route to host") as caught:
        _make(_cluster())
    assert "--image" in (caught.value.hint or "")
    assert caught.value.details["exists"] == [{"kind": "Docker volume", "name": "mlbench-demo-2", "state": "ready"}]
    assert Store().cluster("demo-2").state == "failed"
    _remove_from_nothing()
    assert world.left == []


@pytest.mark.slow
def test_the_registry_stays_as_long_as_a_cluster_uses_it(world: World) -> None:
    _make(_cluster())
    _make(_cluster("other-1", 1))
    _remove(_cluster())
    assert "kind-registry" in world.left
    _remove(_cluster("other-1", 1))
    assert world.left == []


@pytest.mark.slow
def test_a_registry_that_a_person_made_is_used_and_stays(world: World) -> None:
    world.change(containers={"kind-registry": {"state": "running", "port": 5001}})
    _remove(_make(_cluster()))
    assert world.left == ["kind-registry"]


def test_a_registry_on_another_port_is_refused(world: World) -> None:
    world.change(containers={"kind-registry": {"state": "running", "port": 5555}})
    with pytest.raises(UsageError, match="port 5555 instead of 5001"):
        _make(_cluster())


@pytest.mark.slow
def test_stopped_nodes_are_refused_rather_than_replaced(world: World) -> None:
    _make(_cluster())
    containers = world.state["containers"]
    containers["demo-2-worker"]["state"] = "exited"
    world.change(containers=containers)
    with pytest.raises(UsageError, match="docker start demo-2-worker"):
        _make(_cluster())
    assert Store().cluster("demo-2").state == "ready"


@pytest.mark.slow
def test_the_kubeconfig_is_fetched_where_it_is_not_here(world: World) -> None:
    cluster = _make(_cluster())
    shutil.rmtree(kubeconfig_of(cluster).parent)
    access = KindProvider().connect(cluster)
    assert access.server == "https://127.0.0.1:6443"
    assert kubeconfig_of(cluster).stat().st_mode & 0o777 == 0o600
    _remove(cluster)
    with pytest.raises(NotFoundError, match="does not run"):
        KindProvider().connect(cluster)


@pytest.mark.parametrize(
    ("nodes", "values", "says"),
    [
        (0, {}, "can have 1 to 50"),
        (51, {}, "can have 1 to 50"),
        (2, {"num_gpus": 1}, "no GPUs"),
        (2, {"num_cpus": 0}, "at most|which has"),
        (2, {"num_cpus": 100_000}, "which has"),
        (2, {"image": "x", "kubernetes_version": "1.34"}, "exclude each other"),
        (2, {"registry_port": 70000}, "1 to 65535"),
        (2, {"kubernetes_version": "1.19"}, "not known which"),
        (2, {"kubernetes_version": "newest"}, "not of the form"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_called(nodes: int, values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        KindProvider().new_cluster("demo", nodes, KindOptions(**values))


def test_cpus_that_are_not_for_pods_are_in_the_kubelets_configuration() -> None:
    from templates import documents

    [config] = documents("kind/cluster.yaml.j2", {"name": "demo-2", "workers": 1, "reserved_cpus": 3})
    assert [node["role"] for node in config["nodes"]] == ["control-plane", "worker"]
    patch = yaml.safe_load(config["kubeadmConfigPatches"][0])
    assert patch == {"kind": "KubeletConfiguration", "systemReserved": {"cpu": "3"}}
    [config] = documents("kind/cluster.yaml.j2", {"name": "demo-2", "workers": 0, "reserved_cpus": 0})
    assert "kubeadmConfigPatches" not in config


def test_the_plan_checks_tools_and_images_and_makes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = KindProvider()
    plan = provider.plan(_cluster())
    assert plan.total == 0
    assert not [call for call in world.state["log"] if CHANGING.match(call)]
    with pytest.raises(UsageError, match='no image "absent"'):
        provider.plan(_cluster(options=KindOptions(load=("absent",))))
    world.change(trouble={"docker": "down"})
    with pytest.raises(UsageError, match="Cannot connect to the Docker daemon") as caught:
        provider.plan(_cluster())
    assert "Start Docker" in (caught.value.hint or "")
    (world.bin / "kind").unlink()
    with pytest.raises(UsageError, match="need kind, which is not installed") as caught:
        provider.plan(_cluster())
    assert "kind.sigs.k8s.io" in (caught.value.hint or "")


@pytest.mark.slow
def test_gc_deletes_what_a_killed_creation_left_and_its_record(world: World, command: Callable[..., Any]) -> None:
    store = Store()
    cluster = replace(_make(_cluster()), state="creating")
    store.record_cluster(cluster)
    store.record_cluster(replace(_cluster("gone-1"), state="creating"))  # killed before anything was made
    with hold_operation_lock(store, "demo-2"):  # somebody still works on it
        done = command("gc", "kind", "--everybody", "--yes")
        assert done.code == 0, done
        assert "gone-1" in done.out, done
    assert [item.name for item in store.clusters()] == ["local", "demo-2"]
    assert world.left != []
    assert command("gc", "kind", "--everybody", "--yes").code == 0
    assert [item.name for item in store.clusters()] == ["local"]
    assert world.left == []


@pytest.mark.parametrize(
    ("kind", "kubernetes", "says"),
    [("v0.30.0", "1.35", "needs kind 0.31"), ("v0.31.0", "1.36", "needs kind 0.32"), ("v0.32.0", "1.36", None)],
)
def test_a_kind_that_is_too_old_for_a_version_is_refused(kind: str, kubernetes: str, says: str | None) -> None:
    if says is None:
        api.require_image_support(kind, kubernetes)
        return
    with pytest.raises(UsageError, match=says):
        api.require_image_support(kind, kubernetes)


@pytest.mark.parametrize(
    ("said", "kind", "hint"),
    [
        ("permission denied while trying to connect to the docker API at unix:///x", CredentialError, "group docker"),
        ("permission denied while trying to connect to the Docker daemon socket", CredentialError, "group docker"),
        ("Cannot connect to Podman. Please verify your connection to the Linux system", UsageError, "podman machine"),
        (
            'failed to pull image "kindest/node:v1": Error response from daemon: toomanyrequests: You have '
            "reached your unauthenticated pull rate limit.",
            CapacityError,
            "docker login",
        ),
    ],
)
def test_what_the_tools_say_is_understood_in_all_their_versions(said: str, kind: type[MlbenchError], hint: str) -> None:
    error = api.tool_error(["docker", "info"], said, 1)
    assert type(error) is kind
    assert hint in str(error.hint)
