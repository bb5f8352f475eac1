"""Checks of a run before it starts: run.pin, --network, the number of workers, and the task's own check of its
parameters.

A task may name a module (`preflight`) with one function:

    make_plan(parameters, ranks)

`parameters` are the run's, `ranks` the number of its ranks. What cannot work raises ValueError with a message and, as
`hint`, what to change. The module imports the standard library only.
"""

import sys
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.cluster_details import MachineDetails
from mlbench_cli.model.network import MODEL, is_modeled, parse_network
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import Task, WorkersRule, load_task
from mlbench_cli.util.text import shorten

NETWORKED_BACKENDS = ("gloo", "grpc")  # that use the network even between ranks on one machine


def check_run(task: Task, spec: RunSpec) -> None:
    """Reject a run that its task's own check rules out. Raises UsageError, NotFoundError for a checkpoint."""
    path = spec.parameters.get("resume")
    if spec.engine == "local" and isinstance(path, str) and path and not Path(path).exists():
        raise NotFoundError(
            f'{spec.name}: the checkpoint "{path}" does not exist.',
            hint="Runs with --set checkpoint_every=UPDATES write checkpoints.",
        )
    if task.preflight is None:
        return
    try:
        import_module(task.preflight).make_plan(spec.parameters, spec.world_size)
    except ValueError as error:
        raise UsageError(f"{spec.name}: {error}.", hint=getattr(error, "hint", None)) from None


# Backend -> the package that it needs, and the extra of mlbench that has it. The others come with torch.
_PACKAGES = {"mpi": ("mpi4py", "mpi"), "grpc": ("tensorflow", "tensorflow")}

_GPU_BUILD = "torch for GPUs"
IN_PUBLIC_IMAGE = ("torch", _GPU_BUILD)  # of the packages that backends need, those in PyTorch's public image


def find_missing_package(backend: str, installed: Collection[str] | None = None) -> str | None:
    """The package that a Python lacks for a backend of a packaged task, e.g. "mpi4py"; None if it lacks none.
    `installed`: what a cluster's Python has, as `agent.serve.PACKAGES` lists it; None: look at this Python."""
    has = _is_installed if installed is None else installed.__contains__
    needed = [_PACKAGES[backend][0]] if backend in _PACKAGES else []
    needed += ["torch", *([_GPU_BUILD] if backend == "nccl" else [])]
    return next((name for name in needed if not has(name)), None)


def _is_installed(name: str) -> bool:
    if name != _GPU_BUILD:
        return find_spec(name) is not None
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return torch is not None
    libraries = Path(next(iter(torch.submodule_search_locations)), "lib")
    return any((libraries / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip"))


def check_backend(spec: RunSpec, find_cluster: Callable[[str], Cluster]) -> None:
    """Refuse a run of a task whose backend the Python of the ranks lacks, here or on hosts and nodes, as far as it is
    known since they were attached. Raises UsageError."""
    if spec.image is not None or spec.engine == "kubernetes":
        return
    task = load_task(spec.task)
    details = None if spec.engine == "local" else MachineDetails.of(find_cluster(spec.cluster))
    if task.origin is not None or (details is not None and details.packages is None):
        return
    missing = find_missing_package(spec.backend, None if details is None else details.packages)
    if missing is None:
        return
    if details is not None:
        raise UsageError(
            f"The backend {spec.backend} needs {missing}, which {details.python} on {spec.cluster} did not have when "
            "it was attached.",
            hint=f"Install it there and attach the cluster again: mlbench attach-{spec.engine} {spec.cluster} ...",
        )
    raise UsageError(
        f"The backend {spec.backend} needs {missing}, which this Python lacks: {sys.executable}.",
        hint=install_hint("tensorflow" if missing == "tensorflow" else _PACKAGES.get(spec.backend, ("", "local"))[1])
        if missing != _GPU_BUILD
        else "Install the build of torch for your GPUs: https://pytorch.org/get-started/locally",
    )


def check_pinning(spec: RunSpec, cluster: Cluster, cores: int | None) -> None:
    """Refuse run.pin if somebody else starts the ranks, or if this machine has fewer usable cores (None: not known)
    than processes. Raises UsageError."""
    if cluster.provider not in ("local", "hosts"):
        raise UsageError(
            f"run.pin works on this machine and hosts; {cluster.provider} binds ranks itself.",
            hint="Leave it out.",
        )
    if cores is not None and spec.process_count > cores:
        raise UsageError(
            f"run.pin: {spec.process_count} processes need one CPU each, but this machine has {cores}.",
            hint="Use fewer workers, or remove --set run.pin.",
        )


def find_too_many_workers(specs: Iterable[RunSpec]) -> dict[WorkersRule, list[str]]:
    """The names of runs with more ranks than make sense for a training of their task to its goal, by its rule."""
    found: dict[WorkersRule, list[str]] = {}
    for spec in specs:
        rule = load_task(spec.task).workers if spec.runs_task_program else None
        if rule is not None and spec.world_size > rule.sensible and not spec.parameters.get("blocks"):
            found.setdefault(rule, []).append(spec.name)
    return found


def resolve_network(request: Request, asked: str) -> str:
    """The canonical text of the network that was asked for."""
    shape = parse_network(asked)
    if shape.is_modeled and (request.task is None or request.command is not None):
        raise UsageError(
            f"--network {shorten(asked)}: modeled networks delay the gradients of tasks, not of your own command.",
            hint=f"--network {str(shape).removeprefix(MODEL)} emulates a real one.",
        )
    return str(shape)


def check_network(spec: RunSpec, network: str) -> None:
    """Refuse a shaped network for a run whose ranks would not use it."""
    if spec.engine != "local":
        raise UsageError(
            "--network emulates a network between processes of this machine only. Machines of a cluster are joined by "
            "a network that mlbench does not control.",
            hint="Leave out --network, or --cluster local.",
        )
    if is_modeled(network):
        return
    if sys.platform != "linux":
        raise UsageError("--network needs Linux network namespaces.", hint="Leave out --network.")
    if spec.backend not in NETWORKED_BACKENDS and not (spec.device == "gpu" and spec.backend == "nccl"):
        raise UsageError(
            f"--network: ranks on the backend {spec.backend} may communicate through shared memory instead.",
            hint=f"Choose --backend {NETWORKED_BACKENDS[0]}.",
        )
