"""Run `docker` and `kind`, with timeouts and without a shell; errors quote the tool's message.

KIND_EXPERIMENTAL_PROVIDER, kind's variable, names a Docker-compatible program: podman, nerdctl.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, UsageError, did_you_mean
from providers.base import TransientError
from providers.file_locks import inheritable_lock

CALL_SECONDS = 60.0
KIND_LABEL = "io.x-k8s.kind.cluster"
# Replacements of Docker, and the message of `inspect` for an object that does not exist.
CONTAINER_PROGRAMS = ("docker", "finch", "nerdctl", "podman")  # in the order in which kind looks for them
ABSENT = ("o such {kind}", "{kind} not known", "no {kind} with name")
INSTALL = {
    "podman": "Install Podman: https://podman.io/docs/installation",
    "finch": "Install Finch: https://runfinch.com",
    "nerdctl": "Install nerdctl: https://github.com/containerd/nerdctl",
    "docker": "Install Docker: https://docs.docker.com/engine/install/",
    "kind": "Install kind: https://kind.sigs.k8s.io/docs/user/quick-start/#installation",
}
# Messages of the tools without their case, which changes with versions, and hints.
HINTS = (
    ("cannot connect to the docker daemon", UsageError, "Start Docker (systemctl start docker), then: docker info"),
    ("failed to connect to the docker api", UsageError, "Start Docker (systemctl start docker), then: docker info"),
    ("cannot connect to podman", UsageError, "Start Podman: podman machine start, or its socket; then: podman info"),
    (
        "permission denied while trying to connect to the docker",
        CredentialError,
        "Join the group docker (sudo usermod -aG docker $USER) and log in again, then: docker info",
    ),
    (
        "too many open files",
        CapacityError,
        "sudo sysctl fs.inotify.max_user_instances=512 fs.inotify.max_user_watches=524288",
    ),
    ("no space left on device", CapacityError, "Free up disk space for Docker: docker system prune"),
    ("port is already allocated", UsageError, "Choose another port, or stop the program that uses it: docker ps"),
    ("address already in use", UsageError, "Choose another port, or stop the program that uses it: docker ps"),
    ("toomanyrequests", CapacityError, "Docker Hub limits pulls: docker login, or repeat the command later."),
    ("failed to pull image", UsageError, "Use --image with a node image that can be pulled or is on this machine."),
    ("unable to find image", UsageError, "Use an image that can be pulled or is on this machine."),
)


# The first kind whose node images and `load` work with a Kubernetes, newest first.
KIND_FOR = (((1, 37), (0, 33)), ((1, 36), (0, 32)), ((1, 35), (0, 31)))


def call(argv: Sequence[str], *, seconds: float = CALL_SECONDS, text: str = "", keep_open: Sequence[int] = ()) -> str:
    """Run a command with `text` as stdin; returns its stdout. Raises an MlbenchError with the command's message.

    The command "docker" is replaced by `container_program`.
    """
    if argv[0] == "docker":
        argv = [container_program(), *argv[1:]]
    try:
        done = subprocess.run(
            argv, input=text.encode(), capture_output=True, timeout=seconds, check=False, pass_fds=tuple(keep_open)
        )
    except FileNotFoundError:
        raise UsageError(f"{argv[0]} is not installed, or not on the PATH.", hint=INSTALL.get(argv[0])) from None
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be run: {error.strerror}.", hint=INSTALL.get(argv[0])) from None
    except subprocess.TimeoutExpired:
        raise TransientError(f'"{" ".join(argv[:3])}" gave no answer within {seconds:.0f} s.') from None
    if done.returncode:
        raise tool_error(argv, done.stderr.decode("utf-8", "replace"), done.returncode)
    return done.stdout.decode("utf-8", "replace")


def tool_error(argv: Sequence[str], words: str, code: int) -> MlbenchError:
    """The error for a failed command, classified by its output."""
    quoted = words.strip()[-1500:] or f"exit code {code}"
    message = f'"{" ".join(argv[:3])}" failed: {quoted}'
    for phrase, error, hint in HINTS:
        if phrase in words.lower():
            return error(message, hint=hint)
    return MlbenchError(message, hint="docker info; kind version")


def succeeds(argv: Sequence[str]) -> bool:
    """Whether the command exits with 0. Raises as `call` does if the tool itself is missing or gives no answer."""
    try:
        call(argv)
    except (UsageError, CredentialError, TransientError):
        raise
    except MlbenchError:
        return False
    return True


def lines(argv: Sequence[str]) -> list[str]:
    """Run a command; returns its lines. Raises MlbenchError with its message."""
    return call(argv).splitlines()


def inspect(kind: str, name: str) -> object:
    """What `docker KIND inspect` says of one object, parsed, or None if there is none."""
    try:
        return json.loads(call(["docker", kind, "inspect", name]))[0]
    except MlbenchError as error:
        if any(words.format(kind=kind) in error.message for words in ABSENT):  # "No such" or "no such", by version
            return None
        raise


def container_program() -> str:
    """The program in KIND_EXPERIMENTAL_PROVIDER, else the first that is installed.

    Raises UsageError for one that kind does not support.
    """
    name = os.environ.get("KIND_EXPERIMENTAL_PROVIDER") or _found_program()
    if name not in CONTAINER_PROGRAMS:
        near = did_you_mean(name, CONTAINER_PROGRAMS)
        raise UsageError(
            f'KIND_EXPERIMENTAL_PROVIDER is "{name}", which kind does not support.{near}',
            hint=f"It may be {', '.join(CONTAINER_PROGRAMS)}.",
        )
    return name


def _found_program() -> str:
    """The program that kind itself would use: the first that is installed; Docker if none is."""
    return next((name for name in CONTAINER_PROGRAMS if shutil.which(name)), "docker")


def check_tools() -> str:
    """kind's version. Raises if kind or Docker is missing, or Docker does not run."""
    for program in (container_program(), "kind"):
        if shutil.which(program) is None:
            raise UsageError(
                f"KIND clusters need {program}, which is not installed, or not on the PATH.",
                hint=f"{INSTALL[program]}\nmlbench doctor   shows all that is missing",
            )
    program = container_program()
    call([program, "info"])
    return call(["kind", "version"]).split()[1]


def require_image_support(version: str, kubernetes: str) -> None:
    """Refuse a node image that this kind, or this machine, cannot run. Raises UsageError.

    Sources: release notes of kind 0.31 to 0.33; kubelet 1.35 does not start on cgroup v1 (kubernetes 134298).
    """
    minor = tuple(int(part) for part in re.findall(r"\d+", kubernetes)[:2])
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    needed = next((kind for least, kind in KIND_FOR if minor >= least), None)
    if needed and found and found < needed:
        raise UsageError(
            f"Kubernetes {kubernetes} needs kind {needed[0]}.{needed[1]} or later; this is kind {version}.",
            hint="Install a newer kind, or choose an older --kubernetes-version.",
        )
    if minor >= (1, 35) and "CgroupVersion: 1" in (said := _cgroups()):
        raise UsageError(
            f"Kubernetes {kubernetes} does not run on cgroup v1, which this machine has ({said}).",
            hint="Choose --kubernetes-version 1.34, or boot with systemd.unified_cgroup_hierarchy=1.",
        )


def _cgroups() -> str:
    try:
        return "CgroupVersion: " + call([container_program(), "info", "--format", "{{.CgroupVersion}}"]).strip()
    except MlbenchError:
        return ""  # podman and nerdctl have other fields


LOOKING_SECONDS = 2.0  # at most, in which a list of clusters looks at one


def creation_lock(name: str, *, shared: bool = False) -> AbstractContextManager[int | None]:
    """The lock on the containers of KIND cluster `name`; yields None if another process holds it. `shared`: to look.

    A child that inherits the descriptor keeps the lock, so `kind` holds it even if its client is killed.
    """
    return inheritable_lock("kind", name, shared=shared, patience=0.0 if shared else LOOKING_SECONDS)
