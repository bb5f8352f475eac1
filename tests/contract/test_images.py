"""Images of tasks: named, checked, built and pushed, on a registry of 127.0.0.1 and a `docker` that builds nothing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import task_images
from mlbench_cli import __version__
from mlbench_cli.app import run
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks import image_builds
from mlbench_cli.tasks.catalog import load_catalog
from mlbench_cli.tasks.images import name_image, parse_image
from mlbench_cli.tasks.registries import FoundImage, Login, Presence, find_docker_login, find_image
from providers.pins import require_pin
from tests.fakes.registry import FakeDocker, FakeRegistry

TASK = f"me/allreduce:{__version__}"


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRegistry]:
    server = FakeRegistry()
    monkeypatch.setenv("MLBENCH_REGISTRY_ENDPOINT", server.url)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker-config"))
    monkeypatch.delenv("MLBENCH_REGISTRY", raising=False)
    yield server
    server.close()


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDocker:
    program = FakeDocker(tmp_path / "programs")
    monkeypatch.setenv("PATH", f"{program.folder}{os.pathsep}{os.environ['PATH']}")
    return program


@pytest.fixture
def mlbench(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    return lambda *words: Answer(run(list(words)), *capsys.readouterr())


def record_cluster(folder: Path) -> None:
    """An attached cluster with a registry, which no request reaches."""
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        "clusters: [{name: c, cluster: {server: 'https://127.0.0.1:9'}}]\ncurrent-context: c\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {token: t}}]\n"
    )
    details = {"kubeconfig": str(kubeconfig), "context": "c", "server": "https://127.0.0.1:9", "registry": "ghcr.io/me"}
    Store().record_cluster(Cluster("far", "attached", details=details))


@pytest.mark.slow
def test_the_script_builds_every_image_as_the_command_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command reads the catalog as mlbench does, the script by a line of Python."""
    log = tmp_path / "log"
    log.mkdir()
    (tmp_path / "docker").write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump(sys.argv[1:], open({str(log)!r} + '/' + str(os.getpid()), 'w'))\n"
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("REGISTRY", "localhost/mlbench")
    monkeypatch.setattr(image_builds, "find_image", lambda image, login: FoundImage(Presence.PRESENT, "sha256:1"))
    for variable in ("BASE", "INDEX"):
        monkeypatch.delenv(variable, raising=False)
    tasks = list(load_catalog().values())
    subprocess.run(["sh", Path(task_images.__file__).parent / "build.sh"], check=True, capture_output=True, timeout=120)
    script = read_builds(log)
    image_builds.push_images(tasks, "localhost/mlbench", image_builds.Build(), None, lambda text: None)
    assert len(script) == 1 + len(tasks)
    assert script == read_builds(log)


def read_builds(log: Path) -> dict[str, tuple[str, dict[str, str]]]:
    """Image name -> Dockerfile and build arguments of the builds in the log, which is emptied."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for entry in sorted(log.iterdir()):
        words = json.loads(entry.read_text())
        entry.unlink()
        if words[0] == "build":
            pairs = [word.partition("=") for word in words[1:-1] if re.match("[A-Z]+=", word)]
            file = words[words.index("--file") + 1].partition("task_images/")[2].removeprefix("./")
            found[words[words.index("--tag") + 1]] = (file, {key: text for key, _, text in pairs})
    return found


def test_a_registry_is_a_prefix_or_one_repository_with_tags() -> None:
    assert name_image("ghcr.io/me/", "allreduce", "4.0.0") == "ghcr.io/me/allreduce:4.0.0"
    one = "1.dkr.ecr.eu-west-1.amazonaws.com/mlbench-x:"
    assert name_image(one, "allreduce", "4.0.0") == f"{one}allreduce-4.0.0"
    digests = {"allreduce:4.0.0": "sha256:1"}
    assert name_image(one, "allreduce", "4.0.0", digests) == f"{one[:-1]}@sha256:1"
    assert name_image(one, "allreduce", "4.0.1", digests) == f"{one}allreduce-4.0.1"
    for name in ("ghcr.io/me/a:1", "localhost:5001/a:1", "me/a:1", "ghcr.io/me/a@sha256:1", "a:latest"):
        assert parse_image(name).name == name
    assert parse_image("python").repository == "python"


@pytest.mark.parametrize("with_token", [False, True])
def test_what_a_registry_says_of_an_image(registry: FakeRegistry, with_token: bool, tmp_path: Path) -> None:
    world = registry.world
    image = parse_image(f"registry.example/{TASK}")
    assert find_image(image).presence is Presence.ABSENT
    world.manifests["me/allreduce"] = {__version__: "sha256:ab"}
    assert find_image(image).digest == "sha256:ab"
    world.users, world.with_token = {"me": "secret"}, with_token
    assert find_image(image).presence is Presence.HIDDEN
    assert find_image(image, Login("me", "secret")).digest == "sha256:ab"
    # Docker's own login, kept in its file or by a credential helper.
    folder = tmp_path / "docker-config"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"auths": {"registry.example": {"auth": Login("me", "secret").basic}}})
    )
    assert find_image(image).presence is Presence.PRESENT
    (folder / "config.json").write_text(json.dumps({"credsStore": "absent"}))
    assert find_image(image).presence is Presence.HIDDEN
    for damaged in ("{", "[]", '{"auths": []}', '{"auths": {"registry.example": "x"}}', '{"credsStore": 1}'):
        (folder / "config.json").write_text(damaged)
        assert find_docker_login("registry.example") is None


def test_an_image_without_a_registry_is_one_of_docker_s_own(registry: FakeRegistry) -> None:
    registry.world.manifests |= {"library/python": {"3.12": "sha256:ab"}, "me/python": {"3.12": "sha256:cd"}}
    names = ("python:3.12", "me/python:3.12")
    assert [find_image(parse_image(name)).digest for name in names] == ["sha256:ab", "sha256:cd"]


def test_the_helper_of_a_registry_goes_before_that_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("own", "common"):
        program = tmp_path / f"docker-credential-{name}"
        program.write_text(f'#!/bin/sh\necho \'{{"Username": "{name}", "Secret": "x"}}\'\n')
        program.chmod(0o755)
    config = {"credHelpers": {"registry.example": "own"}, "credsStore": "common"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    hosts = ("registry.example", "other.example")
    assert [find_docker_login(host) for host in hosts] == [Login("own", "x"), Login("common", "x")]


def test_a_registry_that_does_not_answer_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_REGISTRY_ENDPOINT", "http://127.0.0.1:9")
    assert find_image(parse_image("ghcr.io/me/a:1")).presence is Presence.UNKNOWN
    assert find_image(parse_image("ghcr.io/m e/a:1")).presence is Presence.UNKNOWN


def test_images_are_built_from_the_package_pushed_and_recorded_with_the_cluster(
    registry: FakeRegistry, docker: FakeDocker, mlbench: Callable[..., Answer], tmp_path: Path
) -> None:
    record_cluster(tmp_path)
    dry = ("run", "x", "2", "--task", "allreduce", "--cluster", "far", "--dry-run", "-o", "json")
    assert f"ghcr.io/{TASK}" in mlbench(*dry).out
    answer = mlbench("images", "push", "allreduce", "--cluster", "far", "-o", "json")
    assert answer.code == 0, answer.err
    digest = registry.world.manifests["me/allreduce"][__version__]
    assert json.loads(answer.out)["digests"] == {f"allreduce:{__version__}": digest}
    assert [call.words[0] for call in docker.calls] == ["build", "build", "push"]
    base, built, _ = docker.calls
    assert f"localhost/mlbench/base:{__version__}" in base.words
    assert f"BASE=localhost/mlbench/base:{__version__}" in built.words
    assert built.buildkit == "0"
    assert f"ghcr.io/me/allreduce@{digest}" in mlbench(*dry).out
    shown = mlbench("images", "--cluster", "far")
    assert f"ghcr.io/{TASK}" in shown.out
    assert digest in shown.out
    assert "absent" in shown.out


def test_several_platforms_are_built_by_buildx_with_the_base_in_the_registry(
    registry: FakeRegistry, docker: FakeDocker, mlbench: Callable[..., Answer]
) -> None:
    words = ("images", "push", "allreduce", "--registry", "ghcr.io/me", "--platform", "linux/amd64,linux/arm64")
    answer = mlbench(*words, "--base", "python:3.12", "--index", "https://example.com/cu126")
    assert answer.code == 0, answer.err
    assert set(registry.world.manifests) == {"me/base", "me/allreduce"}
    base, built = [call.words for call in docker.calls]
    assert {"--push", "linux/amd64,linux/arm64", "BASE=python:3.12"} <= set(base)
    assert f"BASE=ghcr.io/me/base:{__version__}" in built


@pytest.mark.parametrize(
    ("laptop", "arm_workers", "platform"),
    [("arm64", False, "linux/amd64"), ("x86_64", True, "linux/arm64"), ("x86_64", False, None)],
)
def test_images_for_a_cloud_are_built_for_its_workers(
    registry: FakeRegistry,
    docker: FakeDocker,
    mlbench: Callable[..., Answer],
    monkeypatch: pytest.MonkeyPatch,
    laptop: str,
    arm_workers: bool,
    platform: str | None,
) -> None:
    details = {"registry": "ghcr.io/me", "arm": arm_workers}
    Store().record_cluster(Cluster("rel-2", "eks", details=details))
    monkeypatch.setattr("mlbench_cli.commands.images.machine", lambda: laptop)
    answer = mlbench("images", "push", "allreduce", "--cluster", "rel-2", "--base", "python:3.12")
    assert answer.code == 0, answer.err
    used = {words[words.index("--platform") + 1] for call in docker.calls if "--platform" in (words := call.words)}
    assert used == ({platform} if platform else set())
    assert (f"Building images for {platform}" in answer.err) is bool(platform)


OWN_TASK = {
    "name": "line",
    "number": "0",
    "title": "A line",
    "command": ["python", "-m", "my_tasks.line"],
    "backends": ["gloo"],
    "devices": ["cpu"],
    "method": {"own": "bsp"},
    "data": "none",
    "parameters": {},
}


@pytest.mark.parametrize(
    ("image", "options", "pushed"),
    [
        ("line", ("--registry", "ghcr.io/me"), ("me/line", __version__)),
        ("registry.example/me/line:7", (), ("me/line", "7")),
        ("registry.example/me/line:7", ("--platform", "linux/arm64"), ("me/line", "7")),
    ],
)
def test_a_task_of_ones_own_is_built_by_its_own_dockerfile(
    own_tasks: None,
    registry: FakeRegistry,
    docker: FakeDocker,
    mlbench: Callable[..., Answer],
    tmp_path: Path,
    image: str,
    options: tuple[str, ...],
    pushed: tuple[str, str],
) -> None:
    project = tmp_path / "project"
    (project / "my_tasks" / "line").mkdir(parents=True)
    (project / "my_tasks" / "catalog.json").write_text(json.dumps({"tasks": [{**OWN_TASK, "image": image}]}))
    (project / "pyproject.toml").write_text("[project]\nname = 'my-tasks'\n")
    words = ("images", "push", "line", "--task-path", str(project / "my_tasks"), *options)
    answer = mlbench(*words)
    assert answer.code == 2
    assert "has no Dockerfile" in answer.err
    assert docker.calls == []
    (project / "Dockerfile").write_text("FROM scratch\n")
    answer = mlbench(*words)
    assert answer.code == 0, answer.err
    digest = registry.world.manifests[pushed[0]][pushed[1]]
    assert answer.out.split() == [f"{'ghcr.io' if image == 'line' else 'registry.example'}/{':'.join(pushed)}", digest]
    built = docker.calls[0].words
    assert built[-1] == str(project)
    assert built[built.index("--file") + 1] == str(project / "Dockerfile")
    assert not any("base" in word for call in docker.calls for word in call.words)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"users": {"me": "secret"}}, 3, "authentication required"),
        ({"repositories": set()}, 2, "name unknown"),
        ({"immutable": True, "manifests": {"me/allreduce": {__version__: "sha256:1"}}}, 2, "immutable"),
    ],
)
def test_what_a_registry_refuses_is_quoted_with_the_next_command(
    registry: FakeRegistry,
    docker: FakeDocker,
    mlbench: Callable[..., Answer],
    change: dict[str, Any],
    code: int,
    words: str,
) -> None:
    vars(registry.world).update(change)
    answer = mlbench("images", "push", "allreduce", "--registry", "ghcr.io/me")
    assert answer.code == code
    assert words in answer.err
    assert "Next:" in answer.err


def test_bad_input_of_images_ends_with_what_to_do(
    registry: FakeRegistry, mlbench: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = mlbench("images", "push")
    assert answer.code == 2
    assert "MLBENCH_REGISTRY=ghcr.io/me" in answer.err
    assert mlbench("images", "push", "alreduce", "--registry", "ghcr.io/me").code == 4
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = mlbench("images", "push", "allreduce", "--registry", "ghcr.io/me")
    assert answer.code == 2
    assert "Docker, which is not installed" in answer.err
    old = FakeDocker(tmp_path / "old", buildx=False)
    monkeypatch.setenv("PATH", str(old.folder))
    answer = mlbench("images", "push", "allreduce", "--registry", "ghcr.io/me", "--platform", "linux/arm64")
    assert answer.code == 2
    assert "Install Docker's buildx" in answer.err


def test_a_run_whose_image_does_not_exist_is_refused_before_it_is_recorded(
    registry: FakeRegistry, mlbench: Callable[..., Answer], tmp_path: Path
) -> None:
    record_cluster(tmp_path)
    answer = mlbench("run", "x", "2", "--task", "allreduce", "--cluster", "far", "--yes")
    assert answer.code == 2, answer.err
    assert f"The image ghcr.io/{TASK} does not exist" in answer.err
    assert "mlbench images push allreduce --cluster far" in answer.err
    assert Store().runs() == []


def test_the_images_of_all_clusters_of_a_matrix_are_looked_for(
    registry: FakeRegistry, mlbench: Callable[..., Answer], tmp_path: Path
) -> None:
    """The chosen cluster is this machine, which needs no images."""
    record_cluster(tmp_path)
    answer = mlbench("run", "x", "1", "--task", "allreduce", "--matrix", "cluster=local,far", "--yes")
    assert answer.code == 2, answer.err
    assert "mlbench images push allreduce --cluster far" in answer.err
    assert Store().runs() == []


def test_nothing_defaults_to_a_name_that_is_not_ours(registry: FakeRegistry, mlbench: Callable[..., Answer]) -> None:
    Store().record_cluster(Cluster("far", "attached"))
    Store().record_cluster(Cluster("here", "kind"))
    for task in ("allreduce", "wmt17_transformer"):
        shown = mlbench("run", "x", "2", "--task", task, "--cluster", "here", "--dry-run")
        assert f"image: {require_pin('images', 'torch')}" in shown.out  # PyTorch's own, by digest
    assert registry.world.log == []
