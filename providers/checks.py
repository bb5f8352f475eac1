"""One line of what `mlbench doctor` prints about a cloud."""

from dataclasses import dataclass

from mlbench_cli.errors import UsageError


@dataclass(frozen=True)
class Check:
    """One line of the report. `state`: ok | missing (something optional is not there) | failed (it will not work).

    `exit_code` is that of the error behind a failure; `hint` the next command.
    """

    what: str
    state: str
    found: str
    hint: str | None = None
    exit_code: int = UsageError.exit_code
