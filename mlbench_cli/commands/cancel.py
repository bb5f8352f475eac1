"""`mlbench cancel`: stop a run, keep what there is."""

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, RunName, engine_of_run, sealed
from mlbench_cli.errors import DeadlineError
from mlbench_cli.runs import supervise
from mlbench_cli.store import Store


def cancel(name: RunName, output: Output = Format.text) -> None:
    """Stop a run and keep what it has brought so far. A run that has ended stays as it is."""
    store = Store()
    run = store.run(name).run
    over = sealed(run)
    outcome = supervise.cancel(run, engine_of_run(run, store), store)
    if outcome is None:
        raise DeadlineError(f'The run "{name}" was told to stop but has not ended yet.', hint=f"mlbench wait {name}")
    if output == Format.json:
        console.out_json({"run": name, "outcome": outcome.word, "folder": str(run.folder)})
        return
    console.out(f"{name} had ended already: {outcome.word}." if over else outcome.summary)
    console.note(f"What there is, is in {run.folder}.\nNext: mlbench logs {name}, or mlbench delete {name}")
