"""`mlbench doctor`: check what this machine has, and what is missing for which feature."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import __version__, console
from mlbench_cli.agent.lock import find_holder, probe_lock
from mlbench_cli.commands._clusters import Location, Project
from mlbench_cli.commands._common import Format, Output, Yes
from mlbench_cli.commands._machine_checks import KINDS, check_machines
from mlbench_cli.config import settings
from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import CleanupError, MlbenchError, UsageError
from mlbench_cli.runs.launch import local_machine
from mlbench_cli.storage.store import Store
from mlbench_cli.util.text import counted
from providers import registry
from providers.base import NamesRights
from providers.checks import Check
from task_images.harness.cores import cpu_quota

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


def _print_policy(providers: list[str] | None, command: str | None) -> None:
    names = [registry.ALIASES.get(name, name) for name in providers or ()]
    named = [registry.load(name) for name in names if name in registry.PROVIDERS]
    able = [provider for provider in named if isinstance(provider, NamesRights)]
    if len(names) != 1 or not able:
        raise UsageError(
            "--policy needs one provider: gke and aks have a role, eks has an IAM policy.",
            hint="mlbench doctor eks --policy",
        )
    console.out(json.dumps(able[0].compose_policy(command), indent=2))


def _spend_first_day(
    providers: list[str] | None, project: str | None, location: str | None, to: Path | None, yes: bool, output: Format
) -> int:
    """Plan, print the price, ask, run the steps, and print what they confirm."""
    from mlbench_cli.clusters.first_day import NAME, TABLE, TTL, FirstDay

    if len(providers or ()) != 1 or not providers:
        raise UsageError("--first-day needs one cloud: gke, eks or aks.", hint="mlbench doctor gke --first-day")
    cloud = registry.ALIASES.get(providers[0], providers[0])
    scope = _scope_options(cloud, project, location)
    day = FirstDay(cloud, (to or Path(f"first-day-{cloud}")).absolute(), scope)

    def tell(command: str) -> None:
        console.note(f"$ {command}")

    plan = day.plan(tell)
    price = plan["price_per_hour"]
    known = "an unknown price per hour" if price is None else f"{price:.2f} {plan['currency']}/h"
    console.note(
        f"\nThe first day creates {NAME}, 1 worker ({' '.join(day.machine)}), for {known}. It takes about an hour "
        f"and deletes the cluster at the end. If this machine goes down, the cluster expires (--ttl {TTL})."
    )
    for step in day.steps():
        console.note(f"  {step.command}")
    console.confirm("Start the first day?", yes=yes)
    code = day.spend(tell)
    rows = day.judge()
    if output == Format.json:
        console.out((day.folder / "first-day.json").read_text("utf-8").rstrip())
    else:
        console.out_table(
            ["ASSUMPTION", "VERDICT", "EVIDENCE"],
            [[f"{proof.row}{f' ({proof.part})' if proof.part else ''}", *rest] for proof, *rest in rows],
            wrap=True,
        )
    console.note(f"Evidence is in {day.folder}; {TABLE} has the rows for docs/clouds-assumptions.md.")
    if left := day.left():
        raise CleanupError(
            f"Could not confirm that everything of {NAME} was deleted: {'; '.join(left)}.",
            hint=f"mlbench delete-cluster {cloud} {NAME} --yes; then mlbench gc {cloud}",
        )
    if refuted := [proof.row for proof, verdict, _ in rows if verdict == "refuted"]:
        console.warn(f"Refuted: {'; '.join(refuted)}. Please report it, with the folder.")
    return code


def _scope_options(cloud: str, project: str | None, location: str | None) -> list[str]:
    """Project and location as options that all commands of the first day take."""
    place = "--region" if cloud != "gke" or location is None or location.count("-") == 1 else "--zone"
    options = {"--subscription" if cloud == "aks" else "--project": project, place: location}
    return [word for flag, value in options.items() if value for word in (flag, value)]


def doctor(
    providers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROVIDER]...", help="check gke, eks, aks, slurm or hosts instead of this machine"),
    ] = None,
    project: Project = None,
    location: Location = None,
    policy: Annotated[
        bool,
        typer.Option("--policy", help="with gke, eks or aks: print the role or policy that mlbench needs, then exit"),
    ] = False,
    command: Annotated[
        str | None,
        typer.Option("--for", metavar="COMMAND", help="with --policy: only what this command needs, e.g. gc"),
    ] = None,
    first_day: Annotated[
        bool,
        typer.Option(
            "--first-day",
            help="with gke, eks or aks: create the cheapest cluster, run on it, delete it, and list what that confirms",
        ),
    ] = False,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="with --first-day: folder for its evidence")
    ] = None,
    yes: Yes = False,
    output: Output = Format.text,
) -> int:
    """Check this machine for what runs need, or check a cloud: credentials, permissions, quotas and versions.

    It changes nothing, except with --first-day, which asks before it spends money. The exit code is 0, or that of the
    first failed check.
    """
    if first_day:
        return _spend_first_day(providers, project, location, to, yes, output)
    if to is not None:
        raise UsageError("--to needs --first-day.", hint="mlbench doctor gke --first-day --to first-day")
    if policy:
        _print_policy(providers, command)
        return 0
    if command is not None:
        raise UsageError("--for needs --policy.", hint="mlbench doctor eks --policy --for list-clusters")
    if providers:
        from providers.doctor import run_checks

        checks = [
            check
            for name in providers
            for check in (check_machines(name) if name in KINDS else run_checks(name, project, location))
        ]
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
    return next((check.exit_code for check in checks if check.state == "failed"), 0)


def _document(check: Check) -> dict[str, str | None]:
    return {"what": check.what, "state": check.state, "found": check.found, "hint": check.hint}


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
    _package("jax", "jax", "jax", "the backend jax"),
    _package("charts", "matplotlib", "plots", "mlbench charts"),
    _package("clusters", "kubernetes", "k8s", "Kubernetes clusters"),
    _package("gke", "google-cloud-container", "gke", "GKE clusters"),
    _package("eks", "boto3", "eks", "EKS clusters"),
    _package("aks", "azure-identity", "aks", "AKS clusters"),
    _docker,
    _program("kind", "KIND clusters"),
    _program("kubectl", "using a cluster yourself: mlbench kubeconfig export"),
    _program("helm", "create-cluster --chart-location"),
)
