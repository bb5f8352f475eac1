"""The commands that mlbench gives to docker and kind, and what it decides from what they print."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, UsageError
from mlbench_cli.model.run import Cluster
from providers.base import TransientError
from providers.kind import resources, tools
from providers.kind.resources import KindCluster, LoadedImage, MarkerVolume, Registry, RegistryEntry

CLUSTER = Cluster("demo", "kind", details={"nodes": 2})


class FakeTools:
    """Answers commands by the beginning of their words, the longest first, and records them with their input."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.calls: list[tuple[list[str], str]] = []

    def __call__(self, argv: Sequence[str], *, text: str = "", **options: Any) -> str:
        self.calls.append((list(argv), text))
        words = " ".join(argv)
        for start in sorted(self.answers, key=len, reverse=True):
            if words.startswith(start):
                if isinstance(self.answers[start], Exception):
                    raise self.answers[start]
                return str(self.answers[start])
        return ""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeTools:
    """The tools without a process, and the creation lock free."""
    fake = FakeTools({})
    for module in (tools, resources):
        monkeypatch.setattr(module, "call", fake)
    monkeypatch.setattr(resources, "creation_lock", lambda name: nullcontext(7))
    monkeypatch.delenv("KIND_EXPERIMENTAL_PROVIDER", raising=False)
    monkeypatch.delenv("KIND_EXPERIMENTAL_DOCKER_NETWORK", raising=False)
    return fake


NODES = "demo-control-plane\trunning\ndemo-worker\trunning\ndemo-worker2\trunning\n"
ABSENT = MlbenchError("Error: No such volume: x")


def volume(**labels: str) -> str:
    return json.dumps([{"Labels": labels, "CreatedAt": "2026-01-01"}])


OURS = volume(**{"mlbench-cluster": "demo", "mlbench-nodes": "3"})


def test_the_volume_is_created_with_the_tags_and_the_number_of_nodes(run: FakeTools) -> None:
    MarkerVolume(CLUSTER, "kind-registry").create()
    labels = ("mlbench-cluster=demo", "mlbench-nodes=3", "mlbench-registry=kind-registry")
    flags = [part for label in labels for part in ("--label", label)]
    assert run.calls == [(["docker", "volume", "create", *flags, "mlbench-demo"], "")]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"docker volume inspect": ABSENT}, None),
        ({"docker volume inspect": ABSENT, "docker ps": NODES}, (False, None)),
        ({"docker volume inspect": OURS}, (True, None)),
        ({"docker volume inspect": volume(**{"mlbench-nodes": "3"})}, (False, None)),
        (
            {"docker volume inspect": volume(**{"mlbench-cluster": "demo", "mlbench-nodes": "2"})},
            (True, "2 nodes, the control plane among them, instead of 3"),
        ),
    ],
)
def test_nodes_without_the_volume_belong_to_somebody_else(
    run: FakeTools, answers: dict[str, Any], expected: tuple[bool, str | None] | None
) -> None:
    run.answers = answers
    found = MarkerVolume(CLUSTER).find()
    assert (None if found is None else (found.ours, found.differs)) == expected


def make_nodes(folder: Path = Path("/nowhere"), **options: Any) -> KindCluster:
    return KindCluster(CLUSTER, MarkerVolume(CLUSTER), folder / "demo" / "kubeconfig", **options)


ALL_READY = "a Ready x\nb Ready x\nc Ready x\n"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"docker ps": NODES, "docker exec": ALL_READY}, ("running", None, None)),
        (
            {"docker ps": NODES.replace("worker2\trunning", "worker2\texited"), "docker exec": ALL_READY},
            ("stopped", None, "nodes are stopped (docker start demo-worker2)"),
        ),
        ({"docker ps": "demo-control-plane\trunning\n"}, ("running", "1 of 3 nodes were created", None)),
        ({"docker ps": NODES, "docker exec": "a Ready x\nb Ready x\n"}, ("running", "2 of 3 nodes have joined", None)),
        (
            {"docker ps": NODES, "docker exec": MlbenchError("failed: exit code 44")},
            ("running", "the control plane was never finished", None),
        ),
        ({"docker ps": NODES, "docker exec": MlbenchError("failed: busy")}, ("running", None, None)),
    ],
)
def test_the_status_of_the_nodes(run: FakeTools, answers: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """A control plane that does not answer may be busy; one without admin.conf was never finished."""
    run.answers = {"docker volume inspect": OURS, **answers}
    found = make_nodes().find()
    assert found is not None
    assert (found.state, found.broken, found.differs, found.ours) == (*expected, True)


def test_nodes_are_busy_while_another_process_works_on_them(run: FakeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    run.answers = {"docker volume inspect": OURS}
    monkeypatch.setattr(resources, "creation_lock", lambda name: nullcontext(None))
    nodes = make_nodes()
    found = nodes.find()
    assert found is not None
    assert found.busy == "another process is still creating or deleting it"
    assert nodes.poll().ready is False
    nodes.delete()
    assert not any(argv[0] == "kind" for argv, _ in run.calls)


@pytest.mark.parametrize(
    ("listed", "dns", "ready", "reason"),
    [
        (ALL_READY, "1", True, "DNS is starting"),
        (ALL_READY, "0", False, "DNS is starting"),
        (ALL_READY, "", False, "DNS is starting"),
        ("a Ready x\nb NotReady x\nc Ready x\n", "1", False, "2 of 3 nodes are ready"),
        (MlbenchError("refused"), "1", False, "the API server does not respond: refused"),
    ],
)
def test_a_cluster_is_ready_when_its_nodes_and_dns_are(
    run: FakeTools, listed: Any, dns: str, ready: bool, reason: str
) -> None:
    shell = "docker exec demo-control-plane sh -c "
    run.answers = {"docker ps": NODES, shell + "test": listed, shell + "kubectl": dns}
    progress = make_nodes().poll()
    assert (progress.ready, progress.reason) == (ready, reason)
    run.answers = {}
    with pytest.raises(MlbenchError, match='containers of the KIND cluster "demo" are gone'):
        make_nodes().poll()


def test_kind_creates_a_worker_for_each_node_but_the_control_plane(run: FakeTools, tmp_path: Path) -> None:
    stale = tmp_path / "demo" / "kubeconfig"
    stale.parent.mkdir()
    stale.write_text("of an earlier cluster")
    make_nodes(tmp_path, image="kindest/node:v1").create()
    (argv, config) = run.calls[-1]
    start = ["kind", "create", "cluster", "--name", "demo", "--config", "-", "--kubeconfig", str(stale)]
    assert argv == [*start, "--image", "kindest/node:v1"]
    assert (config.count("role: worker"), config.count("role: control-plane")) == (2, 1)
    assert not stale.exists()


@pytest.mark.parametrize(
    ("state", "port", "labels", "expected"),
    [
        ("running", "5001", {"mlbench-registry": "r"}, (None, None, None)),
        ("exited", "5001", {"mlbench-registry": "r"}, ("it is stopped", None, None)),
        ("running", "5001", None, (None, None, "it was not created by mlbench")),
        ("exited", "5001", None, (None, "it is stopped (docker start r)", "it was not created by mlbench")),
        ("running", "5002", {"mlbench-registry": "r"}, (None, "it is published on port 5002 instead of 5001", None)),
        ("running", None, {"mlbench-registry": "r"}, (None, "it is published on port none instead of 5001", None)),
    ],
)
def test_the_status_of_a_registry(
    run: FakeTools, state: str, port: str | None, labels: dict[str, str] | None, expected: tuple[Any, ...]
) -> None:
    bindings = {"5000/tcp": [{"HostPort": port}]} if port else None
    container = {"State": {"Status": state}, "HostConfig": {"PortBindings": bindings}, "Config": {"Labels": labels}}
    run.answers = {"docker container inspect": json.dumps([container])}
    found = Registry(CLUSTER, MarkerVolume(CLUSTER), "r", 5001, "registry:2").find()
    assert found is not None
    assert (found.broken, found.differs, found.kept) == expected


def test_a_registry_that_another_cluster_uses_is_kept(run: FakeTools) -> None:
    container = {"State": {"Status": "running"}, "HostConfig": {}, "Config": {"Labels": {"mlbench-registry": "r"}}}
    marks = [{"Labels": {"mlbench-cluster": name}, "CreatedAt": ""} for name in ("demo", "other")]
    run.answers = {
        "docker container inspect": json.dumps([container]),
        "docker volume ls --quiet --filter label=mlbench-registry=r": "mlbench-demo\nmlbench-other\n",
        "docker volume inspect": json.dumps(marks),
    }
    found = Registry(CLUSTER, MarkerVolume(CLUSTER), "r", 5001, "registry:2").find()
    assert found is not None
    assert found.kept == "used by other"


def test_a_registry_listens_on_this_machine_alone(run: FakeTools) -> None:
    Registry(CLUSTER, MarkerVolume(CLUSTER), "r", 5001, "registry:2").create()
    options = ["--detach", "--restart", "always", "--publish", "127.0.0.1:5001:5000", "--label", "mlbench-registry=r"]
    assert run.calls == [(["docker", "run", *options, "--name", "r", "registry:2"], "")]


def test_every_node_learns_of_the_registry_as_kinds_page_on_registries_says(run: FakeTools) -> None:
    registry = Registry(CLUSTER, MarkerVolume(CLUSTER), "r", 5001, "registry:2")
    run.answers = {"docker ps": NODES, "docker container inspect": '[{"NetworkSettings": {"Networks": {}}}]'}
    entry = RegistryEntry(make_nodes(), registry)
    assert entry.find() is None
    entry.create()
    assert (["docker", "network", "connect", "kind", "r"], "") in run.calls
    written = [argv[3] for argv, text in run.calls if text == '[host."http://r:5000"]\n']
    assert written == ["demo-control-plane", "demo-worker", "demo-worker2"]
    assert entry.file == "/etc/containerd/certs.d/localhost:5001/hosts.toml"
    assert "local-registry-hosting" in run.calls[-1][1]
    run.answers["docker container inspect"] = '[{"NetworkSettings": {"Networks": {"kind": {}}}}]'
    assert entry.find() is not None
    run.answers["docker exec demo-worker2"] = MlbenchError("1")
    assert entry.find() is None


def test_an_image_is_loaded_onto_the_workers_and_again_when_it_was_rebuilt(run: FakeTools) -> None:
    image = '[{"Id": "sha256:1", "Os": "linux", "Architecture": "arm64"}]'
    run.answers = {"docker ps": NODES, "docker image inspect": image, "docker info": "io.containerd.snapshotter.v1"}
    loaded = LoadedImage(make_nodes(), "task:1")
    assert loaded.find() is not None
    assert (["docker", "exec", "demo-worker", "crictl", "inspecti", "sha256:1"], "") in run.calls
    run.answers["docker exec demo-worker2"] = MlbenchError("no such image")
    assert loaded.find() is None
    assert (loaded.poll().ready, loaded.poll().reason) == (False, "it is not yet on demo-worker2")
    loaded.create()
    (save,) = (argv for argv, _ in run.calls if argv[1] == "save")
    load = run.calls[-1][0]
    assert [*save[:3], *save[4:]] == ["docker", "save", "--output", "--platform", "linux/arm64", "task:1"]
    assert load[-4:] == ["--name", "demo", "--nodes", "demo-worker,demo-worker2"]


@pytest.mark.parametrize(
    ("words", "kind", "hint"),
    [
        ("Cannot connect to the Docker daemon at unix", UsageError, "systemctl start docker"),
        ("permission denied while trying to connect to the Docker daemon", CredentialError, "usermod -aG docker"),
        ("too many open files", CapacityError, "fs.inotify"),
        ("write: no space left on device", CapacityError, "docker system prune"),
        ("Bind for 0.0.0.0:5000 failed: port is already allocated", UsageError, "docker ps"),
        ("something else", MlbenchError, "kind version"),
    ],
)
def test_what_a_tool_says_is_quoted_and_classified(words: str, kind: type[MlbenchError], hint: str) -> None:
    error = tools.tool_error(["docker", "run", "x", "y"], words, 1)
    assert type(error) is kind
    assert error.message == f'"docker run x" failed: {words}'
    assert hint in str(error.hint)
    assert tools.tool_error(["kind"], " \n", 3).message == '"kind" failed: exit code 3'


def test_only_a_missing_tool_or_a_silent_one_is_an_error_for_a_question(run: FakeTools) -> None:
    assert tools.succeeds(["x"])
    run.answers = {"x": MlbenchError("1")}
    assert not tools.succeeds(["x"])
    for error in (UsageError("x"), CredentialError("x"), TransientError("x")):
        run.answers = {"x": error}
        with pytest.raises(type(error)):
            tools.succeeds(["x"])


@pytest.mark.parametrize("words", ["No such volume", "no such volume", "volume not known", "no volume with name x"])
def test_docker_podman_and_nerdctl_say_in_their_own_words_that_something_is_absent(run: FakeTools, words: str) -> None:
    run.answers = {"docker volume inspect": MlbenchError(words)}
    assert tools.inspect("volume", "x") is None
    run.answers = {"docker volume inspect": MlbenchError("busy")}
    with pytest.raises(MlbenchError, match="busy"):
        tools.inspect("volume", "x")


def test_other_programs_than_docker_are_named_by_kinds_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIND_EXPERIMENTAL_PROVIDER", "podman")
    assert tools.container_program() == "podman"
    monkeypatch.setenv("KIND_EXPERIMENTAL_PROVIDER", "podmann")
    with pytest.raises(UsageError, match='"podmann", which kind does not support'):
        tools.container_program()
    monkeypatch.delenv("KIND_EXPERIMENTAL_PROVIDER")
    assert tools.container_program() == "docker"


def test_deletions_name_what_they_delete(run: FakeTools, tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path)
    nodes.kubeconfig.parent.mkdir()
    nodes.kubeconfig.touch()
    nodes.delete()
    MarkerVolume(CLUSTER).delete()
    Registry(CLUSTER, MarkerVolume(CLUSTER), "r", 5001, "registry:2").delete()
    assert [argv for argv, _ in run.calls] == [
        ["kind", "delete", "cluster", "--name", "demo", "--kubeconfig", str(nodes.kubeconfig)],
        ["docker", "volume", "rm", "--force", "mlbench-demo"],
        ["docker", "rm", "--force", "--volumes", "r"],
    ]
    assert not nodes.kubeconfig.parent.exists()


@pytest.mark.parametrize(("details", "nodes"), [({"nodes": 2}, 3), ({"nodes": 0}, 1), ({}, 1)])
def test_a_cluster_has_one_node_more_than_workers(details: dict[str, int], nodes: int) -> None:
    assert resources.nodes_in(Cluster("demo", "kind", details=details)) == nodes


@pytest.mark.parametrize(
    ("listed", "workers"),
    [
        (NODES, ["demo-worker", "demo-worker2"]),
        ("demo-control-plane\trunning\n", ["demo-control-plane"]),
        ("", []),
    ],
)
def test_runs_are_on_the_workers_or_on_a_control_plane_that_is_alone(
    run: FakeTools, listed: str, workers: list[str]
) -> None:
    run.answers = {"docker ps --all --filter label=io.x-k8s.kind.cluster=demo": listed}
    assert resources.workers_of("demo") == workers


@pytest.mark.parametrize(
    ("program", "driver", "is_kept"),
    [("docker", "io.containerd.snapshotter.v1", True), ("docker", "overlay2", False), ("podman", "x", False)],
)
def test_only_docker_keeps_images_in_containerd(
    run: FakeTools, monkeypatch: pytest.MonkeyPatch, program: str, driver: str, is_kept: bool
) -> None:
    monkeypatch.setenv("KIND_EXPERIMENTAL_PROVIDER", program)
    run.answers = {"docker info --format {{json .DriverStatus}}": driver}
    assert resources.keeps_images_in_containerd() is is_kept


def test_the_volume_and_the_registry_are_ready_when_docker_shows_them(run: FakeTools) -> None:
    mark = MarkerVolume(CLUSTER)
    registry = Registry(CLUSTER, mark, "kind-registry", 5001, "registry:3")
    run.answers = {
        "docker volume inspect": ABSENT,
        "docker container inspect": MlbenchError("Error: No such container: x"),
    }
    assert not mark.poll().ready
    assert not registry.poll().ready
    container = {
        "State": {"Status": "running"},
        "HostConfig": {"PortBindings": {"5000/tcp": [{"HostPort": "5001"}]}},
        "Config": {"Labels": {}},
    }
    run.answers = {"docker volume inspect": OURS, "docker container inspect": json.dumps([container])}
    assert mark.poll().ready
    assert registry.poll().ready


def test_the_folder_of_a_kubeconfig_is_made_for_this_user_alone(run: FakeTools, tmp_path: Path) -> None:
    nodes = KindCluster(CLUSTER, MarkerVolume(CLUSTER), tmp_path / "clusters" / "demo" / "kubeconfig")
    nodes.create()
    assert nodes.kubeconfig.parent.stat().st_mode & 0o777 == 0o700
    nodes.kubeconfig.write_text("of an earlier cluster")
    nodes.create()
    assert not nodes.kubeconfig.exists()


def test_tools_learn_of_the_registry_by_an_object_of_the_cluster(run: FakeTools, tmp_path: Path) -> None:
    """kind's page on local registries: a ConfigMap that KEP-1755 describes."""
    nodes = KindCluster(CLUSTER, MarkerVolume(CLUSTER), tmp_path / "kubeconfig")
    run.answers = {"docker container inspect": '[{"NetworkSettings": {"Networks": {"kind": {}}}}]'}
    RegistryEntry(nodes, Registry(CLUSTER, nodes.mark, "kind-registry", 5001, "registry:3")).create()
    words, text = run.calls[-1]
    assert words[:6] == ["docker", "exec", "--interactive", "demo-control-plane", "sh", "-c"]
    assert words[6].endswith("apply -f -")
    assert "local-registry-hosting" in text
    assert "localhost:5001" in text
