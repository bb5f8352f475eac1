"""What stays behind where several runs are started with --detach on this machine: they are to run one after the other,
or they would share its cores and no time would mean anything. One process starts each when the one before has ended.

The runs themselves are detached: killed, this process leaves the one that runs alone; those after it never start.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.engines.local.state import stand_in_line
from mlbench_cli.errors import MlbenchError
from mlbench_cli.isolation import ROOT, protected_path
from mlbench_cli.model import Run, RunState
from mlbench_cli.runs import supervise
from mlbench_cli.store import Store


def start(runs: Sequence[Run]) -> None:
    """Have `runs`, which are recorded, started one after the other by a process that outlives this one."""
    log = runs[0].folder / ".state" / "background.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [*_command(), *(run.id for run in runs)]
    with open(log, "ab") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    assert process.stdin is not None
    for run in runs:
        stand_in_line(run, process.pid)
    # It waits for this word: a client that is killed before has started nothing.
    process.stdin.write(b"go\n")
    process.stdin.close()


def _command() -> list[str]:
    """An interpreter for `main` that finds the modules that this process finds: mlbench_cli where it was loaded, and
    nothing in the current folder or PYTHONPATH. The variables themselves stay, for commands of users.
    """
    code = (
        f"import sys; sys.path.append({ROOT!r}); import mlbench_cli; "
        f"sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); from {__name__} import main; main(sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, os.pathsep.join(protected_path())]


def main(ids: Sequence[str]) -> None:
    if sys.stdin.readline() != "go\n":
        return
    store = Store()
    engine = LocalEngine(report=lambda sentence: print(sentence, flush=True))
    for run_id in ids:
        # Looked up each time: it may have been deleted or cancelled meanwhile.
        row = next((row for row in store.runs() if row.run.id == run_id), None)
        if row is None or row.state == "finished":
            continue
        run = row.run
        try:
            engine.submit(run, engine.render(run.spec), detach=True)
            store.update_run(run, RunState.RUNNING)
            supervise.follow(run, engine, store)
        except MlbenchError as error:
            print(f"{run.name}: {error.message}", flush=True)
