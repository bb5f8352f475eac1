"""`mlbench delete`: remove runs from the cluster, the disk and the store, in this order."""

from collections.abc import Sequence
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client, RunHandle
from mlbench_cli.commands._common import Format, Output, Yes
from mlbench_cli.commands._selection import All, Names, NewerThan, OlderThan, States, Tasks, act_on_each, make_filter
from mlbench_cli.errors import UsageError


def delete(
    names: Names = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="stop running runs; discard results that were not fetched; do without a cluster that is gone",
        ),
    ] = False,
    all_runs: All = False,
    states: States = None,
    tasks: Tasks = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    yes: Yes = False,
    output: Output = Format.text,
) -> None:
    """Delete runs or experiments and their results. Downloaded zip files are kept."""
    client = Client(notice=console.note)
    filter = make_filter(states, tasks, older_than, newer_than)
    chosen = client.select(names or (), all_runs=all_runs, filter=filter, readable=False)
    if not chosen.runs:
        console.note("No such run: nothing to delete.")
    else:
        console.confirm(_question(chosen.runs), yes=yes)
    for experiment in chosen.experiments:
        if force:
            experiment.stop("mlbench delete stopped it")
        elif experiment.is_under_way:
            raise UsageError(
                f'The experiment "{experiment.name}" is running.',
                hint=f"mlbench cancel {experiment.name}, then: mlbench delete {experiment.name}",
            )

    def delete_one(run: RunHandle) -> RunHandle:
        run.delete(force=force, warn=console.warn)
        return run

    deleted, worst = act_on_each(chosen.runs, delete_one, is_only=len(chosen.runs) == 1)
    if output == Format.json:
        runs = [{"name": run.name, "id": run.run.id, "deleted": True, "folder": str(run.folder)} for run in deleted]
        console.out_json({"runs": runs}, worst)
    else:
        for run in deleted:
            console.out(f"{run.name} is deleted.")
    if worst is not None:
        raise worst


def _question(runs: Sequence[RunHandle]) -> str:
    if len(runs) == 1:
        return f"Delete {runs[0].name} and its results?"
    names = ", ".join(run.name for run in runs[:5]) + (", ..." if len(runs) > 5 else "")
    return f"Delete {len(runs)} runs and their results ({names})?"
