"""Build the images of tasks with the local Docker and push them to a registry.

The build context is a copy of the installed package `task_images`, so a checkout and a wheel build the same image. An
external task is built from its own Dockerfile, with the Dockerfile's folder as the context. Logins to cloud registries
go into a temporary Docker configuration; the user's is only read.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import task_images
from mlbench_cli import __version__
from mlbench_cli.errors import CredentialError, MlbenchError, UsageError
from mlbench_cli.model.run import JsonObject
from mlbench_cli.tasks.catalog import Task
from mlbench_cli.tasks.images import LOCAL_REGISTRY, name_image, parse_image
from mlbench_cli.tasks.registries import Login, Presence, docker_folder, find_image

BUILD_SECONDS = 3600.0
PUSH_SECONDS = 3600.0
DOCKERFILE = "Dockerfile"
INSTALL = "Install Docker: https://docs.docker.com/engine/install/"
# Docker's errors of pushes and builds without their case, which changes with versions, and their remedies. Sources:
# messages of ECR, Artifact Registry and GHCR.
_REMEDIES: tuple[tuple[tuple[str, ...], type[MlbenchError], str], ...] = (
    (
        ("no basic auth credentials", "denied:", "unauthorized", "403 forbidden", "authentication required"),
        CredentialError,
        "docker login REGISTRY, or ask for the right to push to it",
    ),
    (("name unknown", "does not exist in the registry"), UsageError, "Create the repository first, then repeat."),
    (
        ("cannot be overwritten because the repository is immutable", "tag invalid"),
        UsageError,
        "The registry has this version already: mlbench images",
    ),
    (("cannot connect to the docker daemon", "failed to connect to the docker api"), UsageError, "Start Docker."),
    (("unknown command: docker buildx", "'buildx' is not a docker command"), UsageError, "Install Docker's buildx."),
    (("no space left on device",), UsageError, "Free up disk space for Docker: docker system prune"),
)

Report = Callable[[str], None]


@dataclass(frozen=True)
class Build:
    """Build options: base image, package index for torch, and platforms (none: this machine's).

    `base` is an image, or the name of a variant: a file `task_images/base/NAME.Dockerfile`.
    """

    base: str | None = None
    index: str | None = None
    platforms: tuple[str, ...] = ()


def push_images(
    tasks: Sequence[Task], registry: str, build: Build, login: Login | None, report: Report
) -> dict[str, str]:
    """Build and push the images of the tasks. Returns their digests by "IMAGE:VERSION", or for external tasks by the
    full reference in its `TASK`.

    Raises MlbenchError with Docker's message, or if the image is not in the registry afterwards; UsageError for an
    external task without a Dockerfile.
    """
    digests: dict[str, str] = {}
    files = {task.image: find_dockerfile(task) for task in tasks if task.origin is not None}
    with _context() as folder, _docker_config(registry, login) as environment:
        has_own = any(task.origin is None for task in tasks)
        base = _build_base(folder, registry, build, environment, report) if has_own else ""
        for task in {task.image: task for task in tasks}.values():
            is_whole = task.image in files and "/" in task.image
            name = task.image if is_whole else name_image(registry, task.image, __version__)
            report(f"building {name}")
            if own := files.get(task.image):
                _run_build(own.parent, own, name, {}, build, environment)
            else:
                _build_image(folder, task, name, base, build, environment)
            if not build.platforms:
                report(f"pushing {name}")
                _docker(["push", name], PUSH_SECONDS, environment)
            finding = find_image(parse_image(name), login)
            if finding.presence is not Presence.PRESENT:
                raise MlbenchError(
                    f"{name} was pushed, but the registry does not show it: {finding.words or finding.presence.value}."
                )
            digests[name if is_whole else f"{task.image}:{__version__}"] = finding.digest
            report(f"pushed {name} {finding.digest}")
    return digests


def find_dockerfile(task: Task) -> Path:
    """The Dockerfile of an external task: in its folder or a parent, up to the folder of its
    pyproject.toml. Raises UsageError if there is none."""
    for folder in (task.folder, *task.folder.absolute().parents[:3]):
        if (folder / DOCKERFILE).is_file():
            return folder / DOCKERFILE
        if (folder / "pyproject.toml").is_file():
            break
    raise UsageError(
        f"The task {task.name} of {task.origin} has no {DOCKERFILE}, neither in {task.folder} nor above it.",
        hint="Copy the one in the guide to your own tasks next to your pyproject.toml.",
    )


def _build_base(folder: Path, registry: str, build: Build, environment: Mapping[str, str], report: Report) -> str:
    """Build the base image. For several platforms, it is also pushed."""
    name = name_image(registry if build.platforms else LOCAL_REGISTRY, "base", __version__)
    report(f"building {name}")
    own = build.base
    if own and (variant := folder / "task_images" / "base" / f"{Path(own).name}.Dockerfile").is_file():
        own = name_image(registry if build.platforms else LOCAL_REGISTRY, f"base-{build.base}", __version__)
        report(f"building {own}")
        _run_build(folder, variant, own, {}, build, environment)
    arguments = {"BASE": own, "INDEX": build.index}
    given = {key: text for key, text in arguments.items() if text}
    _run_build(folder, _dockerfile(folder, "base"), name, given, build, environment)
    return name


def _dockerfile(folder: Path, part: str) -> Path:
    return folder / "task_images" / part / DOCKERFILE


def _build_image(folder: Path, task: Task, name: str, base: str, build: Build, environment: Mapping[str, str]) -> None:
    parts = {"PACKAGES": " ".join(task.packages), "TASK": task.name}
    _run_build(folder, _dockerfile(folder, "."), name, {"BASE": base, **parts}, build, environment)


def _run_build(
    folder: Path, file: Path, name: str, arguments: Mapping[str, str], build: Build, environment: Mapping[str, str]
) -> None:
    dockerfile = str(file)
    given = [word for key, text in arguments.items() for word in ("--build-arg", f"{key}={text}")]
    if build.platforms:
        platforms = ",".join(build.platforms)
        command = ["buildx", "build", "--push", "--platform", platforms, "--file", dockerfile, "--tag", name]
        _docker([*command, *given, str(folder)], BUILD_SECONDS, environment)
        return
    # The classic builder accepts a base image that exists only locally, with any image store.
    classic = {**environment, "DOCKER_BUILDKIT": "0"}
    _docker(["build", "--quiet", "--file", dockerfile, "--tag", name, *given, str(folder)], BUILD_SECONDS, classic)


def _docker(words: Sequence[str], seconds: float, environment: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            ["docker", *words], capture_output=True, text=True, timeout=seconds, check=False, env=dict(environment)
        )
    except FileNotFoundError:
        raise UsageError("Images are built with Docker, which is not installed.", hint=INSTALL) from None
    except subprocess.TimeoutExpired:
        raise MlbenchError(f'"docker {words[0]}" was not done after {seconds:.0f} s.') from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-1500:] or f"exit code {done.returncode}"
        message = f'"docker {words[0]}" failed: {said}'
        for phrases, kind, hint in _REMEDIES:
            if any(phrase in said.lower() for phrase in phrases):
                raise kind(message, hint=hint)
        raise MlbenchError(message, hint="docker info")


@contextmanager
def _context() -> Iterator[Path]:
    """A temporary folder that contains only the package of the tasks."""
    source = Path(str(task_images.__file__)).parent
    with tempfile.TemporaryDirectory(prefix="mlbench-images-") as name:
        shutil.copytree(source, Path(name) / "task_images", ignore=shutil.ignore_patterns("__pycache__"))
        yield Path(name)


@contextmanager
def _docker_config(registry: str, login: Login | None) -> Iterator[dict[str, str]]:
    """The environment for Docker with the user's configuration plus this login, or unchanged without a login.

    The folder also links contexts, plugins and buildx builders, so that the same Docker builds.
    """
    if login is None:
        yield dict(os.environ)
        return
    own = docker_folder().absolute()
    with tempfile.TemporaryDirectory(prefix="mlbench-docker-") as name:
        file = os.open(Path(name) / "config.json", os.O_WRONLY | os.O_CREAT, 0o600)
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(_add_login(own, parse_image(registry.rstrip(":")).host, login), stream)
        for entry in own.iterdir() if own.is_dir() else ():
            if entry.name != "config.json":
                (Path(name) / entry.name).symlink_to(entry)
        yield {**os.environ, "DOCKER_CONFIG": name}


def _add_login(folder: Path, host: str, login: Login) -> JsonObject:
    """The user's settings plus this login; an empty helper keeps Docker from asking the user's helper."""
    try:
        config: JsonObject = {**json.loads((folder / "config.json").read_text("utf-8"))}
        auths, helpers = {**(config.get("auths") or {})}, {**(config.get("credHelpers") or {})}
    except (OSError, ValueError, TypeError):  # missing, or in another format
        config, auths, helpers = {}, {}, {}
    return {**config, "auths": {**auths, host: {"auth": login.basic}}, "credHelpers": {**helpers, host: ""}}
