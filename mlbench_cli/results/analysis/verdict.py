"""What a gate decides, and what that means for exit codes."""

from collections.abc import Iterable
from enum import StrEnum

from mlbench_cli.errors import CannotTellError, TaskFailedError


class Verdict(StrEnum):
    """`mlbench gate` and `mlbench compare --fail-above` decide with the same three answers."""

    PASSED = "passed"
    FAILED = "failed"
    CANNOT_TELL = "cannot_tell"

    @property
    def exit_code(self) -> int:
        if self is Verdict.PASSED:
            return 0
        return TaskFailedError.exit_code if self is Verdict.FAILED else CannotTellError.exit_code

    @property
    def phrase(self) -> str:
        """For people: "cannot tell"."""
        return self.value.replace("_", " ")


def find_worst(verdicts: Iterable[Verdict]) -> Verdict:
    """One failure fails all; then one that cannot be decided decides. PASSED for none at all."""
    found = set(verdicts)
    return next((worst for worst in (Verdict.FAILED, Verdict.CANNOT_TELL) if worst in found), Verdict.PASSED)
