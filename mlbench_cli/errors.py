"""The exception tree is the exit-code table.

MlbenchError                1    internal
├── UsageError              2    wrong command line, spec file or configuration
├── CredentialError         3    no credentials, or no permission
├── NotFoundError           4    no such cluster, run, file
├── CapacityError           5    quota exceeded or nothing left to allocate
├── NeverStartedError       6    the workers never started
├── TaskFailedError         7    the task failed, or missed its goal under --require-goal
├── CleanupError            8    the work is done but something could not be removed
├── DeadlineError         124    a printed deadline has passed
├── InterruptedError_     130    SIGINT
└── TerminatedError       143    SIGTERM

Every error says what happened, why, and in `hint` which command to run next.
"""

from collections.abc import Mapping
from typing import Any


class MlbenchError(Exception):
    """Something went wrong that a user can be told in one paragraph.

    `message` says what happened and why (foreign words quoted), `hint` the next command, `details` the facts for
    `-o json`.
    """

    exit_code = 1
    code = "internal"

    def __init__(self, message: str, *, hint: str | None = None, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = dict(details or {})

    def to_dict(self) -> dict[str, Any]:
        return {
            "error": {"code": self.code, "message": self.message, "hint": self.hint, "details": self.details},
            "schema_version": 1,
        }


class UsageError(MlbenchError):
    exit_code = 2
    code = "usage"


class CredentialError(MlbenchError):
    exit_code = 3
    code = "credentials"


class NotFoundError(MlbenchError):
    exit_code = 4
    code = "not_found"


class CapacityError(MlbenchError):
    exit_code = 5
    code = "capacity"


class NeverStartedError(MlbenchError):
    exit_code = 6
    code = "never_started"


class TaskFailedError(MlbenchError):
    exit_code = 7
    code = "task_failed"


class CleanupError(MlbenchError):
    exit_code = 8
    code = "cleanup_failed"


class DeadlineError(MlbenchError):
    exit_code = 124
    code = "deadline"


class InterruptedError_(MlbenchError):
    exit_code = 130
    code = "interrupted"


class TerminatedError(MlbenchError):
    exit_code = 143
    code = "terminated"


def did_you_mean(word: str, known: "list[str] | tuple[str, ...]") -> str:
    """' Did you mean "x"?' for the known word nearest to `word`, or an empty string."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""
