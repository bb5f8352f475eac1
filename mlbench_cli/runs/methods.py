"""Combine --method, --servers and --set comm.AXIS=VALUE, and reject what a task does not support."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.network import parse_network
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import MethodRule, Task, load_catalog
from task_images.comm.door import REGISTERED, load_file
from task_images.comm.methods import AXES, Method, MethodError, check
from task_images.comm.presets import PRESETS, register, register_installed, resolve

PREFIX = "comm."


def split_set(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The entries of --set: parameters of the task, and axes of the method without their prefix."""
    parameters = {name: value for name, value in given.items() if not name.startswith(PREFIX)}
    axes = {name.removeprefix(PREFIX): str(value) for name, value in given.items() if name.startswith(PREFIX)}
    return parameters, axes


def resolve_method(
    request: Request, task: Task, parameters: Mapping[str, Any], tasks: Mapping[str, Task] | None
) -> dict[str, str]:
    """The method of a run, every axis with its value; empty if it is the task's own. Raises UsageError."""
    changes = split_set(request.set)[1]
    if request.servers is not None:
        changes["servers"] = str(request.servers)
    if request.network is not None and (network := parse_network(request.network)).is_modeled:
        if "delay" in changes:
            raise UsageError("--network model:... and --set comm.delay exclude each other.")
        changes["delay"] = network.message_delay
    if request.method is None and request.method_path is None and not changes:
        return {}
    if task.method is None:
        able = ", ".join(other.name for other in (tasks or load_catalog()).values() if other.method is not None)
        own = "If its program uses prepare_strategy, add method: {own: bsp} to its task.yaml. " if task.origin else ""
        raise UsageError(
            f'The task "{task.name}" has its own communication and does not support methods.',
            hint=f"{own}Tasks that support them: {able}",
        )
    try:
        name = use_method_file(request.method_path) or request.method or task.method.own
        if request.method is not None and name != request.method:
            raise UsageError(f"--method-path has the method {name}, but --method names {request.method}.")
        _check_words(name, changes)
        method = resolve(name, changes)
        check(method)
    except MethodError as error:
        raise _usage_error(request.method or "of --method-path", error) from None
    _check_task(task, task.method, method, parameters)
    return {} if method.axes() == resolve(task.method.own).axes() else method.to_dict()


def check_method(spec: RunSpec) -> None:
    """Raises UsageError if the method is not possible with this number of ranks, or on this cluster."""
    if not spec.method:
        return
    if spec.backend == "jax":
        raise UsageError(
            "--method: with the backend jax, JAX's own all-reduce sums the gradients.",
            hint="Leave out --method, or choose --backend gloo.",
        )
    try:
        check(Method.from_dict(spec.method), spec.world_size)
    except MethodError as error:
        raise _usage_error(spec.method["name"], error) from None
    if spec.method.get("file", "none") != "none" and spec.engine == "kubernetes":
        raise UsageError(
            f"The method {spec.method['name']} is in a file on this machine, which pods cannot read.",
            hint="Install it in the image, as a package with the entry point mlbench.methods.",
        )
    if spec.method.get("engine") in ("fsdp2", "hsdp") and (spec.device, spec.backend) == ("gpu", "gloo"):
        raise UsageError(
            f"The method {spec.method['name']} shards parameters, which gloo cannot do on GPUs.",
            hint="--backend nccl, with a GPU for every rank; or --method zero1",
        )


def refuse_method(request: Request) -> None:
    """Raises UsageError if a method is asked for."""
    if any(given is not None for given in (request.method, request.method_path, request.servers)):
        raise UsageError("--method, --method-path and --servers work only with tasks, not with your own command.")


def use_method_file(path: str | None) -> str | None:
    """The name of the method in the file of --method-path, which is registered; None without one. Raises
    MethodError."""
    if path is None:
        return None
    place = str(Path(path).resolve())
    method = load_file(place)
    register(method, place)
    return method.name


def _check_words(name: str, changes: Mapping[str, str]) -> None:
    if name not in PRESETS:
        register_installed()
    if name not in PRESETS:
        raise UsageError(f'There is no method "{name}".{did_you_mean(name, list(PRESETS))}', hint="mlbench methods")
    known = [*AXES, *(REGISTERED[name].options if name in REGISTERED else ())]
    for axis in changes:
        if axis not in known:
            raise UsageError(
                f'A method has no axis "{axis}".{did_you_mean(axis, known)}', hint=f"mlbench methods {name}"
            )


def _check_task(task: Task, rule: MethodRule, method: Method, parameters: Mapping[str, Any]) -> None:
    for axis, allowed in rule.limits.items():
        value = getattr(method, axis)
        if value.partition(":")[0] not in allowed:
            raise UsageError(
                f'The task "{task.name}" does not support comm.{axis}={value}, only {", ".join(allowed)}.',
                hint=f"--set comm.{axis}={allowed[0]}, or another method: mlbench methods",
            )
    if method.barrier == "none" and (parameters.get("clip") or parameters.get("precision") == "fp16"):
        why = "clips gradients by their norm" if parameters.get("clip") else "checks all gradients for overflow"
        raise UsageError(
            f'The task "{task.name}" {why}; that needs the barrier, which the method {method.name} does not have.',
            hint="--set comm.barrier=step",
        )


def _usage_error(name: str, error: MethodError) -> UsageError:
    return UsageError(f"The method {name} is invalid: {error.reason}.", hint=error.instead or f"mlbench methods {name}")
