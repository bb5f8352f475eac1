"""`mlbench cancel`: stop runs and keep partial results."""

from dataclasses import dataclass

from mlbench_cli import console
from mlbench_cli.api import Client, RunHandle
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._selection import All, Names, NewerThan, OlderThan, States, Tasks, act_on_each, make_filter


@dataclass(frozen=True)
class _Canceled:
    """What happened to a run. `outcome` is None if it was not started and can be resumed later."""

    run: RunHandle
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
    """Stop runs and keep partial results. Finished runs are not changed.

    Canceling an experiment also cancels its queued runs. Resume it with mlbench run NAME.
    """
    client = Client(notice=console.note)
    chosen = client.select(names or (), all_runs=all_runs, filter=make_filter(states, tasks, older_than, newer_than))
    for experiment in chosen.experiments:
        experiment.stop("mlbench cancel stopped it")
    whole = {run.run.id for experiment in chosen.experiments for run in experiment.runs()}
    is_only = len(chosen.runs) == 1
    due = (run for run in chosen.runs if is_only or not run.is_finished)
    canceled, worst = act_on_each(due, lambda run: _cancel(run, is_whole=run.run.id in whole), is_only=is_only)
    if output == Format.json:
        runs = [{"name": item.run.name, "outcome": item.outcome, "folder": str(item.run.folder)} for item in canceled]
        console.out_json({"runs": runs}, worst)
    else:
        _show(canceled, [experiment.name for experiment in chosen.experiments])
    if worst is not None:
        raise worst


def _show(canceled: list[_Canceled], experiments: list[str]) -> None:
    for item in canceled:
        console.out(item.text)
    if not canceled:
        console.note("Nothing to cancel: all these runs have already ended.")
        return
    if any(item.outcome is None for item in canceled):
        console.note("What was not started can be resumed.")
        console.next_step(*(f"mlbench run {name}" for name in experiments))
    ended = [item for item in canceled if item.outcome is not None]
    if ended:
        run = ended[0].run
        console.note(f"Partial results are in {run.folder}.")
        console.next_step(f"mlbench logs {run.name}")


def _cancel(run: RunHandle, *, is_whole: bool) -> _Canceled:
    if is_whole and not run.is_started:
        return _Canceled(run, None, f"{run.name} was not started.")
    if (known := run.finished) is not None:
        return _Canceled(run, str(known.outcome), f"{run.name} had ended already: {known.outcome}.")
    finished = run.cancel()
    return _Canceled(run, str(finished.outcome), finished.summary)
