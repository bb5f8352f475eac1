"""The user's command that runs at the end of each run: the setting `on-end`.

It gets facts as environment variables and as JSON on standard input, not as part of the command, so names cannot inject
code. Its output is in .state/on_end.log in the run's folder. It cannot change the run's outcome.
"""

import json
import os
import subprocess
from collections.abc import Callable

from mlbench_cli.config.file import find_default
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import JsonObject
from mlbench_cli.runs.finished import FinishedRun
from mlbench_cli.storage.run_folder import RunFolder

KEY = "on-end"
MAX_SECONDS = 60.0
LOG = "on_end.log"


def run_on_end(finished: FinishedRun, notice: Callable[[str], None] | None = None) -> None:
    """Run the configured command, if any, for at most MAX_SECONDS. It starts at most once per run.

    `notice` gets a sentence if it fails. Raises nothing: a run's results must not depend on it.
    """
    try:
        setting = find_default(KEY)
    except UsageError as error:
        _tell(notice, error.message)
        return
    if setting is None:
        return
    state = RunFolder(finished.run.folder).state
    try:
        with open(state / LOG, "xb") as log:  # the process that creates this file starts the command
            problem = _execute(setting.value, finished, log.fileno())
    except FileExistsError:
        return
    except OSError as error:
        problem = f"it could not be started: {error.strerror or error}"
    if problem:
        _tell(notice, f"The command of {setting.origin} for {finished.run.name}: {problem}; see {state / LOG}")


def _execute(command: str, finished: FinishedRun, log: int) -> str | None:
    """What went wrong, or None."""
    facts = describe_end(finished)
    variables = {f"MLBENCH_RUN_{name.upper()}": str(value) for name, value in facts.items() if value is not None}
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={**os.environ, **variables},
        cwd="/",
        start_new_session=True,
    )
    try:
        process.communicate(json.dumps(facts).encode(), timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return f"it did not end within {MAX_SECONDS:g} s and was stopped"
    return f"it ended with {process.returncode}" if process.returncode else None


def describe_end(finished: FinishedRun) -> JsonObject:
    """The facts that the command gets about a run."""
    spec, result = finished.run.spec, finished.result
    goal = result["goal"] if result else None
    return {
        "name": finished.run.name,
        "id": finished.run.id,
        "outcome": str(finished.outcome),
        "summary": finished.summary,
        "task": spec.task,
        "workers": spec.workers,
        "cluster": spec.cluster,
        "seconds": result["task_seconds"]["wall"] if result else None,
        "goal_value": goal["value"] if goal else None,
        "folder": str(finished.run.folder),
    }


def _tell(notice: Callable[[str], None] | None, text: str) -> None:
    if notice is not None:
        notice(f"Warning: {text}")
