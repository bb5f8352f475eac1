"""`mlbench wait`: follow a run to its end."""

from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, RequireGoal, RunName, engine_of_run
from mlbench_cli.commands._report import Ended, Reporter, report_ended
from mlbench_cli.errors import Stopped, explain_stop
from mlbench_cli.runs import supervise
from mlbench_cli.runs.finished import read_finished
from mlbench_cli.runs.request import parse_duration
from mlbench_cli.store import Store


def wait(
    name: RunName,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="maximum time to wait, e.g. 15m")
    ] = None,
    require_goal: RequireGoal = False,
    output: Output = Format.text,
) -> int:
    """Wait for a run to end and print its result. The exit code is the run's; 124 where it has not ended in time.

    The run has a deadline of its own. Ctrl-C ends only the waiting.
    """
    seconds = None if timeout is None else parse_duration(timeout)
    store = Store()
    run = store.run(name).run
    if read_finished(run) is None:
        limit = f"this command waits at most {console.duration(seconds)}" if seconds else "this command waits as long"
        console.note(f"{name} is stopped {console.duration(run.spec.timeout)} after its start; {limit}.")
    try:
        with Reporter(run) as report:
            engine = engine_of_run(run, store)
            finished = supervise.follow(run, engine, store, timeout=seconds, report=report, notice=console.note)
    except (KeyboardInterrupt, Stopped) as stopped:
        raise explain_stop(
            stopped, f"Waiting for {name} was stopped; the run goes on.", f"mlbench wait {name}"
        ) from None
    ended = Ended(finished, finished.exit_code(require_goal=require_goal))
    report_ended([ended], output)
    return ended.exit_code
