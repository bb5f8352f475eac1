"""Options and arguments that select runs: names of runs and experiments, --all, filters."""

import time
from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

import typer

from mlbench_cli import console
from mlbench_cli.api import RunHandle
from mlbench_cli.commands._common import beginning, complete_tasks, one_of, read_quietly
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.spec import common_name
from mlbench_cli.runs.select import STATES, Filter
from mlbench_cli.storage.store import Store
from mlbench_cli.util.durations import parse_duration, parse_since

Result = TypeVar("Result")


def complete_names(incomplete: str) -> list[str]:
    """Names of runs and experiments, and those that repeats have in common, for the completion of shells."""
    return beginning(dict.fromkeys(read_quietly(_list_names)), incomplete)


def _list_names(store: Store) -> list[str]:
    names = [experiment.name for experiment in store.experiments()]
    for row in store.runs():
        names += [row.run.name, common_name(row.run.name) or row.run.name]
    return names


Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...", help="runs or experiments, as mlbench status shows them", autocompletion=complete_names
    ),
]
All = Annotated[bool, typer.Option("--all", help="all runs")]
States = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        metavar="STATE",
        help="only runs with this state or outcome, e.g. running or failed; repeatable",
        autocompletion=one_of(*STATES),
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="TASK", help="only runs of this task; repeatable", autocompletion=complete_tasks),
]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", metavar="DURATION", help="only runs older than this, e.g. 7d")
]
NewerThan = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="only runs created since this time, e.g. 2d or 2026-01-31T10:00:00Z"),
]


def make_filter(
    states: list[str] | None, tasks: list[str] | None, older_than: str | None, newer_than: str | None = None
) -> Filter:
    """The filter that the options mean. Raises UsageError that names a bad one."""
    return Filter(
        tuple(states or ()),
        tuple(tasks or ()),
        None if older_than is None else parse_duration(older_than, "--older-than"),
        None if newer_than is None else max(0.0, time.time() - parse_since(newer_than)),
    )


def act_on_each(
    runs: Iterable[RunHandle], act: "Callable[[RunHandle], Result]", *, is_only: bool
) -> tuple[list[Result], MlbenchError | None]:
    """What `act` returns for each run, and the worst error. An error is a warning, unless the run `is_only` one."""
    results, problems = list[Result](), list[MlbenchError]()
    for run in runs:
        try:
            results.append(act(run))
        except MlbenchError as error:
            if is_only:
                raise
            console.warn(f"{run.name}: {error.message}")
            problems.append(error)
    return results, max(problems, key=lambda error: error.exit_code, default=None)
