"""`mlbench cancel`: stop a run and keep what it has brought so far."""

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, RunName, engine_of_run
from mlbench_cli.errors import DeadlineError
from mlbench_cli.runs import supervise
from mlbench_cli.runs.finished import read_finished
from mlbench_cli.store import Store


def cancel(name: RunName, output: Output = Format.text) -> None:
    """Stop a run and keep what it has brought so far. A run that has ended stays as it is."""
    store = Store()
    run = store.run(name).run
    was_over = read_finished(run) is not None
    if not was_over:
        console.note(f"Stopping {name}; this command waits at most {supervise.CANCEL_SECONDS:g} s for its end.")
    finished = supervise.cancel(run, engine_of_run(run, store), store, notice=console.note)
    if finished is None:
        raise DeadlineError(f'The run "{name}" is being stopped, but has not ended yet.', hint=f"mlbench wait {name}")
    if output == Format.json:
        console.out_json({"run": name, "outcome": str(finished.outcome), "folder": str(run.folder)})
        return
    console.out(f"{name} had ended already: {finished.outcome}." if was_over else finished.summary)
    console.note(f"Partial results are in {run.folder}.\nNext: mlbench logs {name}, or mlbench delete {name}")
