"""`mlbench cancel`: stop runs and keep what they have brought so far."""

from dataclasses import dataclass

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, engine_of_run
from mlbench_cli.commands._selection import All, Names, NewerThan, OlderThan, States, Tasks, make_filter
from mlbench_cli.errors import DeadlineError, MlbenchError, UsageError
from mlbench_cli.model import Run
from mlbench_cli.queue_folder import read_queued
from mlbench_cli.runs import queue, supervise
from mlbench_cli.runs.finished import read_finished
from mlbench_cli.runs.select import select
from mlbench_cli.store import Store


@dataclass(frozen=True)
class _Cancelled:
    """What became of a run. `outcome` is None for one that was not started and is left for later."""

    run: Run
    outcome: str | None
    text: str


def cancel(
    names: Names = None,
    all_runs: All = False,
    states: States = None,
    tasks: Tasks = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    output: Output = Format.text,
) -> None:
    """Stop runs and keep what they have brought so far. Runs that have ended stay as they are.

    Of an experiment nothing further is started; mlbench run NAME goes on with it.
    """
    store = Store()
    chosen = select(store, names or (), all_runs=all_runs, filter=make_filter(states, tasks, older_than, newer_than))
    for experiment in chosen.experiments:
        queue.stop(experiment, store.folder, "mlbench cancel stopped it", notice=console.note)
    whole = {member.run_id for experiment in chosen.experiments for member in experiment.members}
    is_only = len(chosen.rows) == 1
    cancelled, problems = [], []
    for row in chosen.rows:
        if not is_only and read_finished(row.run) is not None:
            continue
        try:
            cancelled.append(_cancel(row.run, store, is_whole=row.run.id in whole))
        except MlbenchError as error:
            if is_only:
                raise
            console.warn(f"{row.run.name}: {error.message}")
            problems.append(error)
    if output == Format.json:
        runs = [{"run": item.run.name, "outcome": item.outcome, "folder": str(item.run.folder)} for item in cancelled]
        console.out_json({"runs": runs})
    else:
        _show(cancelled, [experiment.name for experiment in chosen.experiments])
    if problems:
        raise max(problems, key=lambda error: error.exit_code)


def _show(cancelled: list[_Cancelled], experiments: list[str]) -> None:
    for item in cancelled:
        console.out(item.text)
    if not cancelled:
        console.note("Nothing is left to cancel: all these runs have ended.")
        return
    if any(item.outcome is None for item in cancelled):
        console.note(f"Next: {', '.join(f'mlbench run {name}' for name in experiments)} to go on")
    ended = [item for item in cancelled if item.outcome is not None]
    if ended:
        run = ended[0].run
        console.note(
            f"Partial results are in {run.folder}.\nNext: mlbench logs {run.name}, or mlbench delete {run.name}"
        )


def _cancel(run: Run, store: Store, *, is_whole: bool) -> _Cancelled:
    note = read_queued(run.folder)
    if is_whole and note is not None and not note.is_starting:
        return _Cancelled(run, None, f"{run.name} was not started.")
    if note is not None and not note.is_starting and run.spec.engine != "local":
        raise UsageError(
            f'The run "{run.name}" has not been started; its experiment decides when.',
            hint=f"mlbench cancel {note.experiment}, or: mlbench delete {run.name}",
        )
    if (known := read_finished(run)) is not None:
        return _Cancelled(run, str(known.outcome), f"{run.name} had ended already: {known.outcome}.")
    console.note(f"Stopping {run.name}; this command waits at most {supervise.CANCEL_SECONDS:g} s for its end.")
    finished = supervise.cancel(run, engine_of_run(run, store), store, notice=console.note)
    if finished is None:
        raise DeadlineError(
            f'The run "{run.name}" is being stopped, but has not ended yet.', hint=f"mlbench wait {run.name}"
        )
    return _Cancelled(run, str(finished.outcome), finished.summary)
