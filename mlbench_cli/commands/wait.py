"""`mlbench wait`: follow runs to their end."""

import time
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client, RunHandle
from mlbench_cli.commands._common import Format, Output, RequireGoal, UnreachableTimeout
from mlbench_cli.commands._report import Ended, Reporter, Unanswered, report_ended
from mlbench_cli.commands._selection import All, Names, NewerThan, OlderThan, States, Tasks, make_filter
from mlbench_cli.config.settings import set_unreachable_timeout
from mlbench_cli.errors import DamagedArchive, MlbenchError, Stopped, explain_stop
from mlbench_cli.util.durations import parse_duration


def wait(
    names: Names = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="how long to wait, e.g. 15m")
    ] = None,
    unreachable: UnreachableTimeout = None,
    require_goal: RequireGoal = False,
    all_runs: All = False,
    states: States = None,
    tasks: Tasks = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    output: Output = Format.text,
) -> int:
    """Wait for runs to end and print their results. The exit code is the highest of all runs, or 124 after --timeout.

    Ctrl-C stops waiting, not the runs. Runs that were started with --require-goal exit with 7 if they miss the
    goal.
    """
    set_unreachable_timeout(unreachable)
    seconds = None if timeout is None else parse_duration(timeout)
    client = Client(notice=console.note)
    chosen = client.select(names or (), all_runs=all_runs, filter=make_filter(states, tasks, older_than, newer_than))
    if not chosen.runs:
        console.note("No such run: nothing to wait for.")
    deadline = None if seconds is None else time.monotonic() + seconds
    experiments = client.store.experiments_of([run.run.id for run in chosen.runs])
    demanding = {member.run_id for each in experiments if each.require_goal for member in each.members}
    ended: list[Ended] = []
    unanswered: list[Unanswered] = []
    for run in chosen.runs:
        try:
            ended.append(_wait_for(run, seconds, deadline, require_goal or run.run.id in demanding))
        except MlbenchError as error:
            unanswered.append(Unanswered(run.run, error))
            if len(chosen.runs) > 1:
                damaged = f"{run.name} is damaged: " if isinstance(error, DamagedArchive) else ""
                console.warn(damaged + error.message + (f" Next: {error.hint}" if error.hint else ""))
    if unanswered and not ended:
        raise max(unanswered, key=lambda item: item.error.exit_code).error
    report_ended(ended, output, unanswered=unanswered, names=names or ())
    codes = [item.exit_code for item in ended] + [item.error.exit_code for item in unanswered]
    return max(codes, default=0)


def _wait_for(run: RunHandle, seconds: float | None, deadline: float | None, require_goal: bool) -> Ended:
    if not run.is_finished:
        limit = (
            f"this command waits at most {console.duration(seconds)}" if seconds else "this command waits until then"
        )
        console.note(f"{run.name} times out {console.duration(run.run.spec.timeout)} after its start; {limit}.")
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        with Reporter(run) as report:
            finished = run.wait(left, report=report)
    except (KeyboardInterrupt, Stopped) as stopped:
        raise explain_stop(
            stopped, f"Stopped waiting for {run.name}; the run continues.", f"mlbench wait {run.name}"
        ) from None
    return Ended(finished, finished.exit_code(require_goal=require_goal))
