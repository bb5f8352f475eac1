"""`mlbench doctor`: check what this machine has, and what is missing for which feature."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import typer

from mlbench_cli import __version__, console
from mlbench_cli.agent.lock import find_holder, probe_lock
from mlbench_cli.commands._clusters import Location, Project
from mlbench_cli.commands._common import Format, Output, one_of
from mlbench_cli.commands._machine_checks import KINDS, check_machines
from mlbench_cli.config import settings
from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import MlbenchError, UsageError, did_you_mean
from mlbench_cli.runs.launch import local_machine
from mlbench_cli.storage.store import Store
from mlbench_cli.util.text import counted
from providers import registry
from providers.doctor import Check
from providers.pins import SOON_DAYS, ends_soon, list_ends
from task_images.cores import cpu_quota

MIN_FREE = 2 << 30  # bytes; an archive is small, a task's checkpoints and data are not
MIN_SHM = 256 << 20
DOCKER_SECONDS = 10
DOCKER_HINT = "Start the Docker daemon, or give this user access to it: docker ps"
TORCH_SECONDS = 120
# Run in a separate process: importing torch takes seconds, and mlbench itself does not import it.
TORCH_PROBE = """
import torch, torch.distributed as d
backends = [name for name in ("gloo", "nccl", "mpi") if d.is_available() and d.is_backend_available(name)]
maker = "AMD (ROCm)" if torch.version.hip else "NVIDIA" if torch.version.cuda else "no"
print(torch.__version__, torch.cuda.device_count(), ",".join(backends) or "none", maker, sep="\t")
"""


def doctor(
    providers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROVIDER]...",
            help="check gke, eks, aks, slurm or hosts instead of this machine",
            autocompletion=one_of(*registry.PAID, *KINDS),
        ),
    ] = None,
    project: Project = None,
    location: Location = None,
    output: Output = Format.text,
) -> int:
    """Check this machine for what runs need, or check a cloud: credentials, permissions, quotas and versions.

    It changes nothing. The exit code is that of the first failed check, else 7 if something is missing in a cloud
    (but for quotas of single kinds of GPU and programs), else 0.
    """
    for name in providers or ():
        if name not in (*KINDS, *registry.PAID, *registry.ALIASES):
            known = [*registry.PAID, *KINDS]
            raise UsageError(
                f'There are no checks for "{name}".{did_you_mean(name, known)}',
                hint=f"mlbench doctor {'|'.join(known)}",
            )
    if providers:
        checks: list[Check] = []
        for name in providers:
            checks += check_machines(name) if name in KINDS else registry.load(name).check_account(project, location)
    else:
        checks = [check() for check in CHECKS]
    if output == Format.json:
        console.out_json({"checks": [_document(check) for check in checks]})
    else:
        rows = [[check.what, check.state, check.found] for check in checks]
        console.out_table(["CHECK", "STATE", "FOUND"], rows, wrap=True)
        hints = [f"{check.what}: {check.hint}" for check in checks if check.hint and check.state != "ok"]
        console.note("".join(f"\n{hint}" for hint in hints))
        if not providers:
            console.note("\nMore checks: mlbench doctor gke|eks|aks|slurm|hosts")
    codes = [check.exit_code for state in ("failed", "missing") for check in checks if check.state == state]
    return next((code for code in codes if code), 0) if providers else _first_failed(checks)


def _first_failed(checks: list[Check]) -> int:
    """On this machine, what is missing is needed by some runs only."""
    return next((check.exit_code for check in checks if check.state == "failed"), 0)


def _document(check: Check) -> dict[str, str | None]:
    return {"what": check.what, "state": check.state, "found": check.found, "hint": check.hint}


def _versions() -> Check:
    """The versions that mlbench chooses itself: which support has ended, or ends soon."""
    ending = [f"{what} ({day})" for what, day in list_ends().items() if ends_soon(day)]
    if not ending:
        return Check("versions", "ok", f"no support ends within {SOON_DAYS} days")
    found = f"support ends within {SOON_DAYS} days, or has ended: {', '.join(ending)}"
    return Check("versions", "old", found, "Update mlbench, or name another: create-cluster --kubernetes-version.")


def _python() -> Check:
    return Check("python", "ok", f"{sys.version.split()[0]} ({sys.executable}), mlbench {__version__}")


def _store() -> Check:
    try:
        store = Store(notice=console.note)
        runs, clusters = len(store.runs()), len(store.clusters())
    except MlbenchError as error:
        return Check("store", "failed", error.message, error.hint)
    return Check("store", "ok", f"{store.folder} (runs: {runs}, clusters: {clusters})")


def _disk() -> Check:
    try:
        free = shutil.disk_usage(settings.data_dir()).free
    except (OSError, MlbenchError) as error:
        return Check("disk", "failed", str(error))
    state = "ok" if free >= MIN_FREE else "missing"
    return Check(
        "disk", state, f"{console.size(free)} free", f"Runs need {console.size(MIN_FREE)} or more; free up disk space."
    )


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Check("shared memory", "missing", "no /dev/shm", "NCCL and data loaders need it.")
    state = "ok" if free >= MIN_SHM else "missing"
    return Check("shared memory", state, f"{console.size(free)} free in /dev/shm", "In a container: --shm-size=1g")


def _cores() -> Check:
    machine = local_machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    quota = cpu_quota()
    cores = f"{machine.cores} cores" if quota is None else f"{machine.cores} cores (CPU quota of {quota:g})"
    return Check("machine", "ok", f"{cores}, {counted(machine.gpus, 'GPU')}, {console.size(memory)} memory")


def _machine_lock() -> Check:
    path, problem = probe_lock()
    if problem is not None:
        return Check("machine lock", "missing", problem, "Runs do not wait for each other and are labeled as shared.")
    holder = find_holder()
    found = f"{path}: free" if holder is None else f"{path}: {holder.phrase}"
    return Check("machine lock", "ok", found)


def _torch() -> Check:
    hint = f"The tasks need torch on this machine: {install_hint('local')}"
    try:
        probe = subprocess.run(
            # -P: import nothing from the current folder, which may be untrusted.
            [sys.executable, "-P", "-c", TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            cwd="/",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("torch", "missing", str(error), hint)
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
        return Check("torch", "missing", last, hint)
    version, gpus, backends, maker = probe.stdout.strip().splitlines()[-1].split("\t")
    return Check("torch", "ok", f"{version}, backends {backends}, built for {maker} GPUs, {gpus} of them here")


def _package(what: str, package: str, extra: str, use: str) -> Callable[[], Check]:
    def check() -> Check:
        try:
            return Check(what, "ok", f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            return Check(what, "missing", f"no {package}", f"For {use}: {install_hint(extra)}")

    return check


def _program(program: str, use: str) -> Callable[[], Check]:
    def check() -> Check:
        path = shutil.which(program)
        if path is None:
            return Check(program, "missing", "not on PATH", f"Needed for {use}.")
        return Check(program, "ok", path)

    return check


def _docker() -> Check:
    """The client is useless without its daemon, so query the daemon's version."""
    found = _program("docker", "KIND clusters and building images")()
    if found.state != "ok":
        return found
    try:
        asked = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOCKER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("docker", "missing", f"{found.found}: {error}", DOCKER_HINT)
    if asked.returncode != 0:
        reason = (asked.stderr.strip().splitlines() or ["its daemon does not respond"])[-1]
        return Check("docker", "missing", f"{found.found}: {reason}", DOCKER_HINT)
    return Check("docker", "ok", f"{found.found}, daemon {asked.stdout.strip()}")


CHECKS: tuple[Callable[[], Check], ...] = (
    _python,
    _store,
    _disk,
    _shared_memory,
    _cores,
    _machine_lock,
    _torch,
    _package("mpi", "mpi4py", "mpi", "the backend mpi"),
    _package("charts", "matplotlib", "plots", "mlbench charts"),
    _package("clusters", "kubernetes", "k8s", "Kubernetes clusters"),
    _package("gke", "google-cloud-container", "gke", "GKE clusters"),
    _package("eks", "boto3", "eks", "EKS clusters"),
    _package("aks", "azure-identity", "aks", "AKS clusters"),
    _versions,
    _docker,
    _program("kind", "KIND clusters"),
    _program("kubectl", "using a cluster yourself"),
    _program("helm", "create-cluster --chart-location"),
)
