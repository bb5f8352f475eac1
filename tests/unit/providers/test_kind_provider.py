"""KIND clusters: the record, what is refused, the plan with its warnings, and what Docker tells of other clusters."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Cluster
from providers import kind
from providers.base import PlanLine, TransientError
from providers.kind import KindOptions, KindProvider, image_of, kubeconfig_of
from providers.kind.resources import REGISTRY_LABEL


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with eight CPUs, 512 inotify instances and kind, without images."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(kind, "check_tools", lambda: "v0.32.0")
    monkeypatch.setattr(kind, "inspect", lambda what, name: None)
    monkeypatch.setattr(kind, "count_running_nodes", lambda: 0)
    monkeypatch.setattr(kind, "platform_of", lambda image: "linux/amd64")
    monkeypatch.setattr(kind, "_check_registry", lambda options: None)
    (tmp_path / "limit").write_text("512\n")
    monkeypatch.setattr(kind, "INOTIFY_LIMIT", tmp_path / "limit")


def new(nodes: int = 2, **options: Any) -> Cluster:
    return KindProvider().new_cluster("demo-2", nodes, KindOptions(**options))


def test_the_record_of_a_new_cluster_on_kind() -> None:
    details = {"nodes": 2, "gpus_per_node": 0, "functional_only": True, "options": asdict(KindOptions())}
    assert new() == Cluster("demo-2", "kind", "creating", "", details)
    assert new(registry_port=5001).details["registry"] == "localhost:5001"


@pytest.mark.parametrize(
    ("nodes", "options", "says"),
    [
        (0, {}, "0 workers: a KIND cluster can have 1 to 50"),
        (51, {}, "51 workers"),
        (2, {"num_gpus": 1}, "KIND clusters have no GPUs"),
        (2, {"image": "x", "kubernetes_version": "1.34"}, "exclude each other"),
        (2, {"registry_port": 0}, "--registry-port 0"),
        (2, {"registry_port": 65536}, "--registry-port 65536"),
        (2, {"num_cpus": 0}, "--num-cpus 0"),
        (2, {"num_cpus": 9}, "which has 8 CPUs"),
        (2, {"kubernetes_version": "1"}, "is not of the form"),
        (2, {"kubernetes_version": "1.34.1.2"}, "is not of the form"),
        (2, {"kubernetes_version": "1.x"}, "is not of the form"),
        (2, {"kubernetes_version": "1.99"}, "not known which node image kind published for Kubernetes 1.99"),
    ],
)
def test_options_that_kind_cannot_have_are_refused(nodes: int, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        new(nodes, **options)


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (1, {}),
        (50, {}),
        (2, {"registry_port": 1}),
        (2, {"registry_port": 65535}),
        (2, {"num_cpus": 1}),
        (2, {"num_cpus": 8}),
        (2, {"image": "kindest/node:v1.34.0"}),
    ],
)
def test_options_of_kind_at_their_limits_are_accepted(nodes: int, options: dict[str, Any]) -> None:
    assert new(nodes, **options).details["nodes"] == nodes


@pytest.mark.parametrize(
    ("options", "image"),
    [
        ({}, None),
        ({"image": "my/node"}, "my/node"),
        ({"kubernetes_version": "1.99.1"}, "kindest/node:v1.99.1"),
        ({"kubernetes_version": "v1.99.1"}, "kindest/node:v1.99.1"),
    ],
)
def test_a_version_is_that_of_a_node_image(options: dict[str, Any], image: str | None) -> None:
    assert image_of(KindOptions(**options)) == image


def test_a_pinned_version_has_the_digest_that_kind_published(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def find_pin(*words: str) -> str:
        asked.append(words)
        return "kindest/node:v1.34.1@sha256:1"

    monkeypatch.setattr(kind, "find_pin", find_pin)
    assert image_of(KindOptions(kubernetes_version="v1.34")) == "kindest/node:v1.34.1@sha256:1"
    assert asked == [("kind", "node", "1.34")]


def names(cluster: Cluster) -> list[str]:
    return [type(item).__name__ for item in KindProvider().resources(cluster)]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ["MarkerVolume", "KindCluster"]),
        ({"registry_port": 5001}, ["MarkerVolume", "KindCluster", "Registry", "RegistryEntry"]),
        (
            {"registry_port": 5001, "load": ("a", "b")},
            ["MarkerVolume", "KindCluster", "Registry", "RegistryEntry", "LoadedImage", "LoadedImage"],
        ),
    ],
)
def test_a_cluster_on_kind_consists_of_what_its_options_ask_for(options: dict[str, Any], found: list[str]) -> None:
    assert names(new(**options)) == found


@pytest.mark.parametrize(("num_cpus", "reserved"), [(None, 0), (8, 0), (3, 5)])
def test_cpus_that_pods_may_not_request_are_reserved(num_cpus: int | None, reserved: int) -> None:
    nodes: Any = KindProvider().resources(new(num_cpus=num_cpus))[1]
    assert reserved in vars(nodes).values()
    assert nodes.kubeconfig == kubeconfig_of(new())


def test_images_are_loaded_one_after_the_other_once_the_registry_is_known() -> None:
    resources = KindProvider().resources(new(registry_port=5001, load=("a", "b")))
    first, second = resources[4:]
    assert set(resources[2:4]) <= set(first.needs)
    assert first in second.needs


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_plan_of_kind_costs_nothing() -> None:
    plan = KindProvider().plan(new())
    assert plan.lines == (PlanLine("node container (the node image of kind v0.32.0)", 3, 0.0),)
    assert plan.location == "this machine"
    assert plan.warnings == ("Timings on KIND are meaningless, because all nodes share this machine.",)
    named = KindProvider().plan(new(image="my/node"))
    assert named.lines[0].what == "node container (my/node)"
    assert named.warnings[1:] == ("The node image my/node is not on this machine and will be pulled.",)
    registry = KindProvider().plan(new(registry_port=5001))
    assert registry.warnings[1:] == ("The registry's image registry:3 is not on this machine and will be pulled.",)


def test_images_that_are_there_are_not_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(kind, "inspect", lambda what, name: asked.append((what, name)) or {"Id": "x"})  # type: ignore[func-returns-value]
    assert len(KindProvider().plan(new(image="my/node", registry_port=5001)).warnings) == 1
    assert asked == [("image", "my/node"), ("image", "registry:3")]


@pytest.mark.parametrize(
    ("limit", "workers", "running", "says"),
    [
        (511, 3, 0, "4 nodes may run out of inotify instances"),
        (512, 3, 0, None),
        (128, 2, 0, None),
        (128, 2, 1, "3 nodes beside 1 of other clusters may run out"),
        (128, 1, 1, None),
    ],
)
def test_more_than_three_nodes_need_more_inotify_instances(
    monkeypatch: pytest.MonkeyPatch, limit: int, workers: int, running: int, says: str | None
) -> None:
    """kind's page on known issues: "too many open files" with the usual 128."""
    kind.INOTIFY_LIMIT.write_text(str(limit))
    monkeypatch.setattr(kind, "count_running_nodes", lambda: running)
    warnings = KindProvider().plan(new(workers)).warnings[1:]
    assert len(warnings) == (says is not None)
    assert says is None or (says in warnings[0] and "fs.inotify.max_user_instances=512" in warnings[0])
    kind.INOTIFY_LIMIT.unlink()
    assert KindProvider().plan(new(workers)).warnings[1:] == ()


# --- what is there --------------------------------------------------------------------------------------------------


def discover(monkeypatch: pytest.MonkeyPatch, states: dict[str, str], lock: int | None = 7, **labels: str) -> Cluster:
    owned = {"demo-2": {"created": "2026-11-21T12:00:00Z", **labels}}
    monkeypatch.setattr(kind, "list_owned_clusters", lambda: owned)
    monkeypatch.setattr(kind, "nodes_of", lambda name: states)
    monkeypatch.setattr(kind, "creation_lock", lambda name: nullcontext(lock))
    (found,) = KindProvider().discover({})
    return found


RUNNING = {"demo-2-control-plane": "running", "demo-2-worker": "running", "demo-2-worker2": "running"}


@pytest.mark.parametrize(
    ("states", "lock", "state"),
    [
        (RUNNING, 7, "ready"),
        (RUNNING, None, "creating"),
        ({}, None, "creating"),
        ({**RUNNING, "demo-2-worker": "exited"}, 7, "failed"),
        ({"demo-2-control-plane": "running"}, 7, "failed"),
        ({}, 7, "failed"),
    ],
)
def test_a_cluster_on_kind_is_ready_if_all_its_nodes_run(
    monkeypatch: pytest.MonkeyPatch, states: dict[str, str], lock: int | None, state: str
) -> None:
    found = discover(monkeypatch, states, lock, **{"mlbench-nodes": "3", "mlbench-owner": "me"})
    assert found == Cluster(
        "demo-2",
        "kind",
        state,
        "2026-11-21T12:00:00Z",
        {"nodes": 2, "gpus_per_node": 0, "functional_only": True, "options": {}, "owner": "me"},
    )


def test_a_registry_of_a_cluster_is_found_by_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    found = discover(monkeypatch, RUNNING, lock=7, **{"mlbench-nodes": "3", REGISTRY_LABEL: "my-registry"})
    assert found.details["options"] == {"registry_name": "my-registry", "registry_port": 0}
    assert "Registry" in names(found)
    assert discover(monkeypatch, {"x": "running"}).details["nodes"] == 1


@pytest.mark.parametrize(
    ("answer", "kind_of_error", "says"),
    [
        ("output", None, ""),
        (MlbenchError('"docker exec" failed: no such file'), CapacityError, "on the node demo-2-worker, no such file"),
        (MlbenchError("odd"), CapacityError, "on the node demo-2-worker, odd"),
        (UsageError("docker is missing"), UsageError, "docker is missing"),
        (CredentialError("denied"), CredentialError, "denied"),
    ],
)
def test_a_script_on_a_node_fails_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch, answer: Any, kind_of_error: type[MlbenchError] | None, says: str
) -> None:
    calls: list[tuple[list[str], str]] = []

    def call(argv: list[str], text: str) -> str:
        calls.append((argv, text))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(kind, "call", call)
    monkeypatch.setattr(kind, "nodes_of", lambda name: RUNNING)
    if kind_of_error is None:
        assert KindProvider().run_on_node(new(), "demo-2-worker", "echo $1", ["a"]) == "output"
        words = ["docker", "exec", "--interactive", "demo-2-worker", "sh", "-s", "--", "a"]
        assert calls == [(words, "echo $1")]
    else:
        with pytest.raises(kind_of_error, match=says):
            KindProvider().run_on_node(new(), "demo-2-worker", "echo $1", ["a"])
    with pytest.raises(NotFoundError, match="has no node other-worker on this machine"):
        KindProvider().run_on_node(new(), "other-worker", "x", [])


@pytest.mark.parametrize(
    ("error", "kind_of_error"),
    [(MlbenchError("x"), NotFoundError), (UsageError("x"), UsageError), (TransientError("x"), NotFoundError)],
)
def test_a_cluster_that_does_not_run_has_no_kubeconfig(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: MlbenchError, kind_of_error: type[MlbenchError]
) -> None:
    def call(argv: list[str]) -> str:
        assert argv == ["kind", "get", "kubeconfig", "--name", "demo-2"]
        raise error

    monkeypatch.setattr(kind, "call", call)
    monkeypatch.setattr(kind, "kubeconfig_of", lambda cluster: tmp_path / "none" / "kubeconfig")
    with pytest.raises(kind_of_error) as caught:
        KindProvider().connect(new())
    assert type(caught.value) is kind_of_error
    assert not (tmp_path / "none").exists()


def test_a_kubeconfig_that_is_missing_is_asked_for_and_kept_for_this_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "clusters" / "kubeconfig"
    opened: list[Any] = []
    monkeypatch.setattr(kind, "call", lambda argv: "text")
    monkeypatch.setattr(kind, "kubeconfig_of", lambda cluster: path)
    monkeypatch.setattr(Access, "from_kubeconfig", opened.append)
    for _ in range(2):
        KindProvider().connect(new())
    assert path.read_text() == "text"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["kubeconfig"]
    assert opened == [path, path]
