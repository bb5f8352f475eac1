"""What Docker is told to build and to push, and what its errors mean: with a `docker` that only notes its words."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import __version__
from mlbench_cli.errors import CredentialError, MlbenchError, UsageError
from mlbench_cli.tasks import image_builds
from mlbench_cli.tasks.catalog import Task, load_task
from mlbench_cli.tasks.image_builds import BUILD_SECONDS, PUSH_SECONDS, Build, find_dockerfile, push_images
from mlbench_cli.tasks.registries import FoundImage, Login, Presence

MNIST = replace(load_task("mnist"), packages=("a>=1", "b"), image="mnist", extends=None)
REGISTRY = "ghcr.io/me"
DIGEST = "sha256:" + "ab" * 32


class Docker:
    """Calls of Docker: words, timeout and environment, with the folder of the context cut off."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], float, Mapping[str, str]]] = []
        self.answer: Any = subprocess.CompletedProcess([], 0, "", "")
        self.config: Any = None

    def run(self, words: list[str], *, timeout: float, env: dict[str, str], **options: Any) -> Any:
        assert options == {"capture_output": True, "text": True, "check": False}  # what it says is explained
        place = next((word for word in words if "/mlbench-images-" in word and word == words[-1]), "/nowhere")
        self.calls.append(([word.replace(place, ".") for word in words], timeout, env))
        if folder := env.get("DOCKER_CONFIG"):
            self.config = json.loads((Path(folder) / "config.json").read_text())
            assert (Path(folder) / "config.json").stat().st_mode & 0o777 == 0o600  # it holds a password
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @property
    def words(self) -> list[str]:
        return [" ".join(words) for words, _, _ in self.calls]


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Docker:
    found = Docker()
    monkeypatch.setattr(subprocess, "run", found.run)
    monkeypatch.setattr(image_builds, "find_image", lambda *_: FoundImage(Presence.PRESENT, DIGEST))
    monkeypatch.setattr(shutil, "copytree", copy_dockerfiles)
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return found


def copy_dockerfiles(_: Path, target: Path, **__: Any) -> None:
    """A context with the files that matter: no copy of the package."""
    for name in ("Dockerfile", "base/Dockerfile", "base/jax.Dockerfile", "own/Dockerfile"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text("FROM scratch")


def push(*tasks: Task, build: Build = Build(), registry: str = REGISTRY, login: Login | None = None) -> Any:
    said: list[str] = []
    return push_images(tasks or (MNIST,), registry, build, login, said.append), said


def test_the_base_is_built_then_the_task_and_the_task_is_pushed(docker: Docker) -> None:
    digests, said = push()
    base, name = f"localhost/mlbench/base:{__version__}", f"ghcr.io/me/mnist:{__version__}"
    assert docker.words == [
        f"docker build --quiet --file ./task_images/base/Dockerfile --tag {base} .",
        f"docker build --quiet --file ./task_images/Dockerfile --tag {name} --build-arg BASE={base}"
        " --build-arg PACKAGES=a>=1 b --build-arg TASK=mnist --build-arg EXTENDS=mnist .",
        f"docker push {name}",
    ]
    assert [seconds for _, seconds, _ in docker.calls] == [BUILD_SECONDS, BUILD_SECONDS, PUSH_SECONDS]
    assert [environment.get("DOCKER_BUILDKIT") for _, _, environment in docker.calls] == ["0", "0", None]
    assert digests == {f"mnist:{__version__}": DIGEST}
    assert said == [f"building {base}", f"building {name}", f"pushing {name}", f"pushed {name} {DIGEST}"]


def test_a_base_an_index_and_a_parent_are_passed_on(docker: Docker) -> None:
    push(replace(MNIST, extends="digits"), build=Build("python:3.12", "https://index"))
    assert "--build-arg BASE=python:3.12 --build-arg INDEX=https://index ." in docker.words[0]
    assert "--build-arg TASK=mnist --build-arg EXTENDS=digits ." in docker.words[1]


def test_a_variant_of_the_base_is_built_first(docker: Docker) -> None:
    push(build=Build("jax"))
    variant = f"localhost/mlbench/base-jax:{__version__}"
    assert docker.words[0] == f"docker build --quiet --file ./task_images/base/jax.Dockerfile --tag {variant} ."
    assert docker.words[1].endswith(f"--build-arg BASE={variant} .")
    assert len(docker.words) == 4


def test_several_platforms_are_pushed_by_their_builds(docker: Docker) -> None:
    _, said = push(build=Build("jax", platforms=("linux/amd64", "linux/arm64")))
    base = f"ghcr.io/me/base:{__version__}"
    start = "docker buildx build --push --platform linux/amd64,linux/arm64 --file"
    assert docker.words[0] == f"{start} ./task_images/base/jax.Dockerfile --tag ghcr.io/me/base-jax:{__version__} ."
    assert docker.words[1].startswith(f"{start} ./task_images/base/Dockerfile --tag {base} --build-arg BASE=")
    assert docker.words[2].startswith(
        f"{start} ./task_images/Dockerfile --tag ghcr.io/me/mnist:{__version__} --build-arg"
    )
    assert len(docker.words) == 3
    assert not [line for line in said if line.startswith("pushing")]
    assert docker.calls[0][2].get("DOCKER_BUILDKIT") == os.environ.get("DOCKER_BUILDKIT")


def test_a_shipped_task_with_its_own_dockerfile_has_no_arguments(docker: Docker) -> None:
    push(replace(MNIST, name="own", image="own"))
    assert docker.words[1].endswith(f"./task_images/own/Dockerfile --tag ghcr.io/me/own:{__version__} .")


def test_tasks_with_a_common_image_are_built_once(docker: Docker) -> None:
    digests, _ = push(MNIST, replace(MNIST, name="mnist2"), replace(MNIST, name="c", image="c"))
    assert [*digests] == [f"mnist:{__version__}", f"c:{__version__}"]
    assert len(docker.words) == 1 + 2 * 2


@pytest.mark.parametrize(("image", "name"), [("mine", f"ghcr.io/me/mine:{__version__}"), ("q.io/x/y:3", "q.io/x/y:3")])
def test_an_external_task_is_built_in_its_own_folder_without_a_base(
    docker: Docker, tmp_path: Path, image: str, name: str
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch")
    digests, _ = push(replace(MNIST, origin="mine 1.0", folder=tmp_path, image=image))
    file = tmp_path / "Dockerfile"
    assert docker.words == [f"docker build --quiet --file {file} --tag {name} {tmp_path}", f"docker push {name}"]
    assert digests == {name if "/" in image else f"mine:{__version__}": DIGEST}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (FoundImage(Presence.ABSENT), "the registry does not show it: absent."),
        (FoundImage(Presence.HIDDEN, words="log in"), "the registry does not show it: log in."),
    ],
)
def test_a_push_is_checked(docker: Docker, monkeypatch: pytest.MonkeyPatch, found: FoundImage, words: str) -> None:
    monkeypatch.setattr(image_builds, "find_image", lambda *_: found)
    with pytest.raises(MlbenchError, match=words):
        push()
    assert docker.words[-1].startswith("docker push")


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "kind", "hint"),
    [
        ("no basic auth credentials", CredentialError, "docker login"),
        ("denied: Permission", CredentialError, "docker login"),
        ("unauthorized: log in", CredentialError, "docker login"),
        ("unexpected status: 403 Forbidden", CredentialError, "docker login"),
        ("authentication required", CredentialError, "docker login"),
        ("name unknown: x", UsageError, "Create the repository"),
        ("The repository with name x does not exist in the registry", UsageError, "Create the repository"),
        ("tag x cannot be overwritten because the repository is immutable", UsageError, "mlbench images"),
        ("tag invalid: x", UsageError, "mlbench images"),
        ("Cannot connect to the Docker daemon at unix:///", UsageError, "Start Docker"),
        ("failed to connect to the docker API", UsageError, "Start Docker"),
        ("unknown command: docker buildx", UsageError, "buildx"),
        ("write /var: no space left on device", UsageError, "docker system prune"),
        ("something else", MlbenchError, "docker info"),
    ],
)
def test_what_docker_says_is_quoted_with_a_remedy(
    docker: Docker, said: str, kind: type[MlbenchError], hint: str
) -> None:
    docker.answer = subprocess.CompletedProcess([], 1, "out", f"ERROR:\n  {said}")
    with pytest.raises(MlbenchError) as caught:
        push()
    assert type(caught.value) is kind
    assert caught.value.message == f'"docker build" failed: ERROR: {said}'
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("out", "err", "quoted"),
    [("out", "", "out"), ("", "", "exit code 3"), ("", "a" + "x" * 1500, "x" * 1500)],
)
def test_the_end_of_what_docker_says_is_quoted(docker: Docker, out: str, err: str, quoted: str) -> None:
    docker.answer = subprocess.CompletedProcess([], 3, out, err)
    with pytest.raises(MlbenchError) as caught:
        push()
    assert caught.value.message == f'"docker build" failed: {quoted}'


def test_without_docker_there_are_no_images(docker: Docker) -> None:
    docker.answer = FileNotFoundError("docker")
    with pytest.raises(UsageError, match="Docker, which is not installed") as caught:
        push()
    assert "https://docs.docker.com" in str(caught.value.hint)
    docker.answer = subprocess.TimeoutExpired("docker", 3600)
    with pytest.raises(MlbenchError, match='"docker build" was not done after 3600 s'):
        push()


# --- Dockerfiles of external tasks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["a/b/c/d/Dockerfile", "a/Dockerfile"], "a/b/c/d/Dockerfile"),
        (["a/b/c/Dockerfile"], "a/b/c/Dockerfile"),
        (["a/Dockerfile"], "a/Dockerfile"),
        (["Dockerfile"], None),
        (["a/b/pyproject.toml", "a/b/Dockerfile"], "a/b/Dockerfile"),
        (["a/b/pyproject.toml", "a/Dockerfile"], None),
        ([], None),
    ],
)
def test_a_dockerfile_is_looked_for_up_to_the_project(tmp_path: Path, files: list[str], found: str | None) -> None:
    folder = tmp_path / "a/b/c/d"
    folder.mkdir(parents=True)
    for file in files:
        (tmp_path / file).write_text("")
    task = replace(MNIST, name="mine", origin="pack 1.0", folder=folder)
    if found is not None:
        assert find_dockerfile(task) == tmp_path / found
        return
    with pytest.raises(UsageError, match=r"The task mine of pack 1\.0 has no Dockerfile"):
        find_dockerfile(task)


# --- logins -----------------------------------------------------------------------------------------------------------


def test_a_login_is_added_to_a_copy_of_the_users_settings(docker: Docker, tmp_path: Path) -> None:
    own = tmp_path / ".docker"
    (own / "contexts").mkdir(parents=True)
    settings = {
        "auths": {"q.io": {"auth": "x"}, "ghcr.io": {"auth": "old"}},
        "credHelpers": {"ecr": "ecr-login", "ghcr.io": "gh"},
        "currentContext": "remote",
    }
    (own / "config.json").write_text(json.dumps(settings))
    push(login=Login("me", "secret"))
    assert docker.config == {
        "auths": {"q.io": {"auth": "x"}, "ghcr.io": {"auth": "bWU6c2VjcmV0"}},
        "credHelpers": {"ecr": "ecr-login", "ghcr.io": ""},
        "currentContext": "remote",
    }
    assert json.loads((own / "config.json").read_text()) == settings
    folder = Path(docker.calls[0][2]["DOCKER_CONFIG"])
    assert not folder.exists()  # it held a password
    assert (own / "contexts").is_dir()


@pytest.mark.parametrize("text", [None, "no JSON", "[1]", '{"auths": 3}', '{"auths": null, "credHelpers": null}'])
def test_settings_in_another_format_are_left_out(docker: Docker, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / ".docker").mkdir()
        (tmp_path / ".docker" / "config.json").write_text(text)
    push(login=Login("me", "secret"), registry="1.dkr.ecr.eu.amazonaws.com/repo:")
    host = "1.dkr.ecr.eu.amazonaws.com"
    assert docker.config == {"auths": {host: {"auth": "bWU6c2VjcmV0"}}, "credHelpers": {host: ""}}


def test_without_a_login_dockers_own_settings_are_used(docker: Docker) -> None:
    push()
    assert all("DOCKER_CONFIG" not in environment for _, _, environment in docker.calls)
