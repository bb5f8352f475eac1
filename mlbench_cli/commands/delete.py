"""`mlbench delete`: remove runs from the cluster, the disk and the store, in this order."""

import shutil
from collections.abc import Sequence
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, Yes, engine_of
from mlbench_cli.commands._selection import All, Names, NewerThan, OlderThan, States, Tasks, make_filter
from mlbench_cli.errors import CleanupError, MlbenchError, NotFoundError, UnreachableError, UsageError
from mlbench_cli.model import Cluster, Experiment, Run, RunRow
from mlbench_cli.queue_folder import QueueFolder, QueueState, read_queued
from mlbench_cli.run_folder import RunFolder
from mlbench_cli.runs import queue
from mlbench_cli.runs.finished import read_finished
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
            _delete(row.run, store, force)
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


def _delete(run: Run, store: Store, force: bool) -> None:
    note = read_queued(run.folder)
    experiment = store.find_experiment_of(run)
    with RunFolder(run.folder).lock(notice=console.note):  # not while another command completes its archive
        if note is None or note.is_starting or run.spec.engine == "local":
            _delete_from_cluster(run, store, force)
        _remove_folder(run)
        store.forget_run(run)
    if experiment is not None and store.find_experiment(experiment.name) is None:
        shutil.rmtree(QueueFolder.of(store.folder, experiment.id).path, ignore_errors=True)


def _delete_from_cluster(run: Run, store: Store, force: bool) -> None:
    cluster = _cluster(run, store)
    if cluster is None:
        return
    try:
        engine_of(cluster).delete(run, force=force)
    except UnreachableError as error:
        if not force:
            raise
        console.warn(f"{error.message} What {run.name} has on {cluster.name} stays there until its time is up.")


def _remove_folder(run: Run) -> None:
    try:
        shutil.rmtree(run.folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CleanupError(
            f"The folder {run.folder} cannot be removed: {error.strerror}.", hint=f"mlbench delete {run.name} --yes"
        ) from None


def _cluster(run: Run, store: Store) -> Cluster | None:
    """The run's cluster; None if it was deleted, and everything on it."""
    try:
        return store.cluster(run.spec.cluster)
    except NotFoundError:
        return None
