"""Options of `mlbench run`, which are declared as fields of Request, as parameters of commands."""

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from mlbench_cli.commands._common import complete_backends, complete_clusters, complete_presets, complete_tasks, one_of
from mlbench_cli.commands._completion import complete_axes, complete_methods, complete_providers, complete_settings
from mlbench_cli.model.faults import Policy
from mlbench_cli.runs.request import REPEATABLE, Option, flag


def add_request_options(command: Callable[..., Any], items: Iterable[Option]) -> None:
    """Declare `items` as options of `command`, which gets them as keyword arguments."""
    own = inspect.signature(command)
    command.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[
            *(entry for entry in own.parameters.values() if entry.kind is not inspect.Parameter.VAR_KEYWORD),
            *map(_request_parameter, items),
        ]
    )


def _request_parameter(item: Option) -> inspect.Parameter:
    """A field of Request as a parameter that Typer makes an option of."""
    repeated = item.kind in REPEATABLE
    kind: Any = {"integer": int, "switch": bool}.get(item.kind, list[str] if repeated else str)
    long = f"{flag(item.name)}/{flag('no_' + item.name)}" if item.kind == "switch" else flag(item.name)
    complete: dict[str, Callable[..., list[str]]] = {
        "task": complete_tasks,
        "preset": complete_presets,
        "backend": complete_backends,
        "cluster": complete_clusters,
        "method": complete_methods,
        "set": complete_settings,
        "matrix": complete_axes,
        "create": complete_providers,
        "on_failure": one_of(*map(str, Policy)),
    }
    option = typer.Option(
        *([long, f"-{item.letter}"] if item.letter else [long]),
        help=item.help,
        metavar=item.metavar or None,
        rich_help_panel=item.panel,
        autocompletion=complete.get(item.name),
    )
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
