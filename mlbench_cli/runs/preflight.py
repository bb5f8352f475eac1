"""Checks of a run before anything is touched: run.pin, the number of workers, and the task's own of its parameters.

A task may name a module (`preflight`) with one function:

    check(parameters, ranks, per_machine) -> None

`parameters` are the run's, `ranks` the number of its ranks, `per_machine` of them on each machine. What cannot work
raises ValueError with a message and, as `hint`, what to change. The module imports the standard library only.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.tasks.catalog import Task, WorkersRule, load_task

Check = Callable[[Mapping[str, Any], int, int], None]


def check_run(task: Task, spec: RunSpec) -> None:
    """Refuse a run that its task knows cannot work. Raises UsageError, NotFoundError for a checkpoint."""
    path = spec.parameters.get("resume")
    if spec.engine == "local" and isinstance(path, str) and path and not Path(path).exists():
        raise NotFoundError(
            f'{spec.name}: the checkpoint "{path}" does not exist.',
            hint="Runs with --set checkpoint=true, checkpoint_every or checkpoint_dir write "
            "checkpoints; mlbench tasks TASK lists these options.",
        )
    if task.preflight is None:
        return
    check = cast("Check", import_module(task.preflight).check)
    per_machine = spec.world_size if spec.engine == "local" else spec.processes_per_worker
    try:
        check(spec.parameters, spec.world_size, per_machine)
    except ValueError as error:
        raise UsageError(f"{spec.name}: {error}.", hint=getattr(error, "hint", None)) from None


# Backend -> the package that it needs, and the extra of mlbench that has it. The others come with torch.
_PACKAGES = {"mpi": ("mpi4py", "mpi"), "grpc": ("tensorflow", "tensorflow")}


def find_missing_package(task: Task, backend: str) -> str | None:
    """What this Python lacks for a backend of a packaged task, e.g. "mpi4py"; None if it lacks nothing."""
    needed = [_PACKAGES[backend][0]] if backend in _PACKAGES else []
    needed += ["torch"] if backend != "grpc" and not task.name.endswith("_tensorflow") else []
    if missing := next((name for name in needed if find_spec(name) is None), None):
        return missing
    torch = find_spec("torch") if backend == "nccl" and "torch" in needed else None
    if torch is None or not torch.submodule_search_locations:
        return None
    libraries = Path(next(iter(torch.submodule_search_locations)), "lib")
    has_gpus = any((libraries / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip"))
    return None if has_gpus else "torch for GPUs"


def check_backend(spec: RunSpec) -> None:
    """Refuse a run on this machine whose backend the Python of the tasks lacks. Raises UsageError."""
    if spec.engine != "local" or not spec.runs_task_program:
        return
    task = load_task(spec.task)
    if task.origin is None and (missing := find_missing_package(task, spec.backend)) is not None:
        raise UsageError(
            f"The backend {spec.backend} needs {missing}, which this Python lacks: {sys.executable}.",
            hint=install_hint(_PACKAGES.get(spec.backend, ("", "local"))[1])
            if missing != "torch for GPUs"
            else "Install the build of torch for your GPUs: https://pytorch.org/get-started/locally",
        )


def check_pinning(spec: RunSpec, cluster: Cluster, cores: int | None) -> None:
    """Refuse run.pin if somebody else starts the ranks, or if this machine has fewer usable cores (None: not known)
    than processes. Raises UsageError."""
    if not spec.pin:
        return
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
