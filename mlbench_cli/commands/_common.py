"""Shared parts of commands: options, and the engine of a run."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.console import Format as Format
from mlbench_cli.errors import MlbenchError, naming_file_on_os_error
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import BACKENDS, load_catalog


def print_answer(output: Format, document: Mapping[str, object], text: str) -> None:
    """The answer of a command on stdout: the document for `-o json`, else the text."""
    if output == Format.json:  # some callers pass a str instead of a Format
        console.out_json(document)
    else:
        console.out(text)


# --- completion -----------------------------------------------------------------------------------------------------

COMPLETION_SECONDS = 0.5  # maximum wait of completion for a store that another process has locked


def make_folder(folder: Path) -> Path:
    """Create the folder if it is missing, and return it. Raises MlbenchError if it cannot be created."""
    with naming_file_on_os_error(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_quietly(read: Callable[[Store], list[str]]) -> list[str]:
    """Names in the store for shell completion; empty if the store cannot be read, because completion must not print
    errors.
    """
    try:
        return read(Store(patience=COMPLETION_SECONDS))
    except MlbenchError:
        return []


def complete_clusters(incomplete: str) -> list[str]:
    """For the shell: names of clusters that begin with `incomplete`."""
    names = read_quietly(lambda store: [cluster.name for cluster in store.clusters()])
    return beginning(names, incomplete)


def complete_tasks(incomplete: str) -> list[str]:
    """For the shell: names of tasks that begin with `incomplete`."""
    return beginning(load_catalog(), incomplete)


def complete_presets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Presets of the task that the line names; of all tasks if it names none."""
    tasks = load_catalog()
    task = tasks.get(ctx.params.get("task") or "")
    found = [task] if task else list(tasks.values())
    return beginning(dict.fromkeys(preset for item in found for preset in item.presets), incomplete)


def complete_backends(ctx: typer.Context, incomplete: str) -> list[str]:
    """For the shell: backends of the task on the command line, or all, that begin with `incomplete`."""
    task = load_catalog().get(ctx.params.get("task") or "")
    return beginning([*(task.backends if task else BACKENDS), "custom:"], incomplete)


def complete_experiments(incomplete: str) -> list[str]:
    """For the shell: names of experiments, which `mlbench run NAME` resumes."""
    return beginning(read_quietly(lambda store: [each.name for each in store.experiments()]), incomplete)


def one_of(*words: str) -> Callable[[str], list[str]]:
    """For the shell: those of fixed words that begin with what is typed."""
    return lambda incomplete: beginning(words, incomplete)


def beginning(names: Iterable[str], incomplete: str) -> list[str]:
    """The names that begin with what is typed."""
    return [name for name in names if name.startswith(incomplete)]


# --- options and arguments ------------------------------------------------------------------------------------------


def output_option(panel: str | None = None) -> Any:
    """`--output`."""
    return typer.Option("--output", "-o", help="text, or one JSON document", rich_help_panel=panel)


def yes_option(panel: str | None = None) -> Any:
    """`--yes`."""
    return typer.Option("--yes", "-y", help="answer yes to every question", rich_help_panel=panel)


Output = Annotated[Format, output_option()]
Yes = Annotated[bool, yes_option()]


def require_goal_option(panel: str | None = None) -> Any:
    """`--require-goal`."""
    return typer.Option("--require-goal", help="exit with 7 if the goal is not reached", rich_help_panel=panel)


RequireGoal = Annotated[bool, require_goal_option()]
UnreachableTimeout = Annotated[
    str | None,
    typer.Option(
        "--unreachable-timeout",
        metavar="DURATION",
        help="how long to wait for a cluster that does not answer (default: 15m); the run continues there",
    ),
]
