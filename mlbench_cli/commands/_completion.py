"""What shells complete after options of `mlbench run`: methods, settings, axes of a matrix, providers."""

import typer

from mlbench_cli.commands._common import beginning
from mlbench_cli.runs.request import OPTIONS, RARE
from mlbench_cli.tasks.catalog import load_catalog
from providers import registry
from task_images.methods import FILES
from task_images.methods.catalog import find_class

COMM = "comm."


def complete_methods(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of methods that begin with `incomplete`."""
    return beginning(FILES, incomplete)


def complete_settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """What --set changes: parameters of the task, options of the method, rare settings of the run."""
    return beginning([*_parameters(ctx), *_rare(ctx, incomplete)], incomplete)


def complete_axes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys of --matrix: options of `mlbench run`, and set.NAME."""
    names = [f"{item.name}=" for item in OPTIONS if not item.rare and item.kind != "pairs"]
    return beginning([*names, *(f"set.{name}" for name in _parameters(ctx))], incomplete)


def complete_providers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Providers that create clusters."""
    return beginning(registry.creators(), incomplete)


def _parameters(ctx: typer.Context) -> list[str]:
    task = load_catalog().get(ctx.params.get("task") or "")
    return [f"{name}=" for name in (task.parameters if task else ())]


def _rare(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names after "comm." and "run." only once these are typed: they are many, and rarely wanted."""
    method = ctx.params.get("method")
    if incomplete.startswith(COMM) and method in FILES:
        return [f"{COMM}{name}=" for name in find_class(method).list_options()]
    if incomplete.startswith(RARE):
        return [f"{RARE}{item.name}=" for item in OPTIONS if item.rare]
    return [*([COMM] if method else []), RARE]
