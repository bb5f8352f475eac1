"""`mlbench wait`: follow a run to its end."""

from typing import Annotated

import typer

from mlbench_cli.commands._common import Format, Output, RequireGoal, RunName, engine_of_run
from mlbench_cli.commands._report import Ended, Reporter, report_ended
from mlbench_cli.runs import supervise
from mlbench_cli.runs.request import parse_duration
from mlbench_cli.store import Store


def wait(
    name: RunName,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="give up waiting after this time, as 15m")
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
    with Reporter(run) as report:
        outcome = supervise.follow(run, engine_of_run(run, store), store, timeout=seconds, report=report)
    ended = Ended.of(run, outcome, require_goal)
    report_ended([ended], output)
    return ended.exit_code
