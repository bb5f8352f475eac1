"""`mlbench delete`: remove runs from the cluster, the disk and the store, in this order."""

from collections.abc import Sequence
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, Yes
from mlbench_cli.commands._selection import All, Names, NewerThan, OlderThan, States, Tasks, make_filter
from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.model import Experiment, Run, RunRow
from mlbench_cli.queue_folder import QueueFolder, QueueState
from mlbench_cli.runs import queue
from mlbench_cli.runs.finished import read_finished
from mlbench_cli.runs.removal import delete_run
from mlbench_cli.runs.select import select
from mlbench_cli.store import Store


def delete(
    names: Names = None,
    force: Annotated[
        bool, typer.Option("--force", help="stop it if it is running; discard results that were not fetched")
    ] = False,
    all_runs: All = False,
    states: States = None,
    tasks: Tasks = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    yes: Yes = False,
    output: Output = Format.text,
) -> None:
    """Remove runs, or experiments with all their runs, and their results. Zip files that were downloaded stay."""
    store = Store()
    filter = make_filter(states, tasks, older_than, newer_than)
    chosen = select(store, names or (), all_runs=all_runs, filter=filter, readable=False)
    if not chosen.rows:
        console.note("There is no such run: nothing to delete.")
    else:
        console.confirm(_question(chosen.rows), yes=yes)
    for experiment in chosen.experiments:
        if force:
            queue.stop(experiment, store.folder, "mlbench delete stopped it", notice=console.note)
        elif _is_under_way(experiment, chosen.rows, store):
            raise UsageError(
                f'The experiment "{experiment.name}" is under way.',
                hint=f"mlbench cancel {experiment.name}, then: mlbench delete {experiment.name}",
            )
    deleted: list[Run] = []
    problems: list[MlbenchError] = []
    for row in chosen.rows:
        try:
            delete_run(row.run, store, force=force, notice=console.note, warn=console.warn)
            deleted.append(row.run)
        except MlbenchError as error:
            if len(chosen.rows) == 1:
                raise
            console.warn(f"{row.run.name}: {error.message}")
            problems.append(error)
    if output == Format.json:
        runs = [{"run": run.name, "id": run.id, "deleted": True, "folder": str(run.folder)} for run in deleted]
        console.out_json({"runs": runs})
    else:
        for run in deleted:
            console.out(f"{run.name} is deleted.")
    if problems:
        raise max(problems, key=lambda error: error.exit_code)


def _is_under_way(experiment: Experiment, rows: Sequence[RunRow], store: Store) -> bool:
    """Whether its queue still has something to start or to follow."""
    ids = {member.run_id for member in experiment.members}
    is_left = any(row.run.id in ids and read_finished(row.run) is None for row in rows)
    return is_left and QueueFolder.of(store.folder, experiment.id).find_state() is QueueState.ALIVE


def _question(rows: Sequence[RunRow]) -> str:
    if len(rows) == 1:
        run = rows[0].run
        return f"Remove {run.name} and its results in {run.folder}?"
    names = ", ".join(row.run.name for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
    return f"Remove {len(rows)} runs and their results ({names})?"
