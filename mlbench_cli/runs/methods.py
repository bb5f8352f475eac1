"""Combine --method, run.servers and --set comm.OPTION=VALUE, and reject what a task does not support."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.network import parse_network
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import Task, load_catalog
from task_images.methods.base import Method, MethodError
from task_images.methods.catalog import describe, find_class, list_names, load_file, load_installed, make_method

PREFIX = "comm."


def split_set(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The entries of --set: parameters of the task, and options of the method without their prefix."""
    parameters = {name: value for name, value in given.items() if not name.startswith(PREFIX)}
    options = {name.removeprefix(PREFIX): str(value) for name, value in given.items() if name.startswith(PREFIX)}
    return parameters, options


def resolve_method(
    request: Request, task: Task, parameters: Mapping[str, Any], tasks: Mapping[str, Task] | None
) -> dict[str, str]:
    """The method of a run with all of its options; empty if it is the task's own. Raises UsageError."""
    options = split_set(request.set)[1]
    meant = {option: f'option "{option}"' for option in options}
    if request.servers is not None:
        options["servers"], meant["servers"] = str(request.servers), "parameter servers (--set run.servers)"
    if request.network is not None and (network := parse_network(request.network)).is_modeled:
        if "delay" in options:
            raise UsageError("--network model:... and --set comm.delay exclude each other.")
        options["delay"] = network.message_delay
        meant["delay"] = "messages of its own that --network model:... could delay; emulate a network, as 100mbit,5ms"
    if request.method is None and request.method_path is None and not options:
        return {}
    if task.method is None:
        able = ", ".join(other.name for other in (tasks or load_catalog()).values() if other.method is not None)
        own = "If its program uses prepare_method, add method={'own': 'bsp'} to its TASK. " if task.origin else ""
        raise UsageError(
            f'The task "{task.name}" has its own communication and does not support methods.',
            hint=f"{own}Tasks that support them: {able}",
        )
    file = None if request.method_path is None else str(Path(request.method_path).resolve())
    try:
        name = load_file(file).name if file is not None else request.method or task.method.own
        if request.method is not None and name != request.method:
            raise UsageError(f"--method-path has the method {name}, but --method names {request.method}.")
        _check_words(name, meant)
        method = find_class(name)(**options)
    except MethodError as error:
        raise _usage_error(request.method or "of --method-path", error) from None
    _check_task(task, task.method.refuses, method, parameters)
    document = describe(method, file)
    return {} if document == describe(find_class(task.method.own)()) else document


def check_method(spec: RunSpec) -> None:
    """Raise UsageError if the method cannot run with this number of ranks, or on this cluster."""
    name = spec.method["name"]
    try:
        make_method(spec.method).check(spec.world_size)
    except MethodError as error:
        raise _usage_error(name, error) from None
    if "file" in spec.method and spec.engine == "kubernetes":
        raise UsageError(
            f"The method {name} is in a file on this machine, which pods cannot read.",
            hint="Install it in the image, as a package with the entry point mlbench.methods.",
        )
    if name in ("fsdp2", "hsdp") and (spec.device, spec.backend) == ("gpu", "gloo"):
        raise UsageError(
            f"The method {name} shards parameters, which gloo cannot do on GPUs.",
            hint="--backend nccl, with a GPU for every rank; or --method zero1",
        )


def _check_words(name: str, meant: Mapping[str, str]) -> None:
    """Raise UsageError for a method that does not exist, or lacks an option; `meant`: what each option is in words."""
    if name not in list_names():
        load_installed()
    if name not in list_names():
        raise UsageError(f'There is no method "{name}".{did_you_mean(name, list_names())}', hint="mlbench methods")
    known = find_class(name).list_options()
    for option, words in meant.items():
        if option not in known:
            raise UsageError(
                f"The method {name} has no {words}.{did_you_mean(option, list(known))}",
                hint=f"mlbench methods {name}",
            )


def _check_task(task: Task, refuses: Mapping[str, str], method: Method, parameters: Mapping[str, Any]) -> None:
    kinds = [kind for kind in ("wraps", "gates") if getattr(method, kind)]
    for kind in (method.name, *kinds):
        if kind in refuses:
            raise UsageError(
                f'The task "{task.name}" does not support the method {method.name}: {refuses[kind]}.',
                hint=f"--method {task.method.own if task.method else 'bsp'}, or another one: mlbench methods",
            )
    if method.gates and (parameters.get("clip") or parameters.get("precision") == "fp16"):
        why = "clips gradients by their norm" if parameters.get("clip") else "checks all gradients for overflow"
        raise UsageError(
            f'The task "{task.name}" {why}, for which it needs all of them before the update. With the method '
            f"{method.name}, layers are updated one by one.",
            hint="--method fusion, or another one: mlbench methods",
        )


def _usage_error(name: str, error: MethodError) -> UsageError:
    return UsageError(f"The method {name} is invalid: {error.reason}.", hint=error.instead or f"mlbench methods {name}")
