"""Errors of tasks, by exit code. Raise these on a rank; `run.run` prints them and exits."""

import importlib.util

from task_images.contract import EXIT_ENVIRONMENT, EXIT_RETRYABLE, EXIT_USAGE, EXIT_WRONG


def install_hint(extra: str) -> str:
    """The command that installs an extra of mlbench in the environment of this task."""
    return f"pip install '.[{extra}]' in a checkout of mlbench, for the Python that runs the task"


class TaskError(Exception):
    """The task failed (exit 1). The message says what happened and why; `hint` what to do next."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class TaskUsageError(TaskError):
    """The parameters or variables given to the task are wrong (exit 64)."""

    exit_code = EXIT_USAGE


class PeerLostError(TaskError):
    """Another rank never arrived or has gone (exit 75, so that the exit code of the failed rank stands out)."""

    exit_code = EXIT_RETRYABLE


class EnvironmentUnfitError(TaskError):
    """The task cannot run here: no such backend, device or data (exit 78)."""

    exit_code = EXIT_ENVIRONMENT


class WrongResultError(TaskError):
    """Communication gave a wrong result (exit 70). No figure of such a run can be trusted."""

    exit_code = EXIT_WRONG


class DivergedError(TaskError):
    """The loss became NaN or infinite, or the replicas differ (exit 1). Never counts as a goal."""


def need(*packages: str) -> None:
    """Raises EnvironmentUnfitError naming the first of `packages` that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise EnvironmentUnfitError(f"the package {package} is not installed", install_hint("language"))
