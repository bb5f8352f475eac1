"""The exception tree is the exit-code table.

MlbenchError                1    internal
├── UsageError              2    wrong command line, spec file or configuration
│   ├── StoreError          2    the store is damaged, out of reach, or of a newer version
│   ├── DamagedRun          2    what a run's agents have written is damaged, or of another version
│   └── DamagedArchive      2    a file of an archive has changed since it was sealed
├── CredentialError         3    no credentials, or no permission
│   └── MissingRight        3    no permission, by a cluster that answers
├── NotFoundError           4    no such cluster, run, file
├── CapacityError           5    quota exceeded or nothing left to allocate
├── NeverStartedError       6    the workers never started
├── TaskFailedError         7    the task failed, or missed its goal under --require-goal, or a gate failed
├── CleanupError            8    the work is done but something could not be removed, or the archive is incomplete
├── CannotTellError         9    a gate or comparison has not enough evidence
│   └── UnprovenArchive     9    an archive is intact, but its results do not follow from its evidence
├── UnreachableError       10    a cluster or host does not answer
└── DeadlineError         124    a printed deadline has passed
    └── StoreLockedError  124    another process has kept the store locked
Stopped                          a person or another program ended this command; no `except Exception` catches it
├── Interrupted           130    SIGINT
└── Terminated            143    SIGTERM

Every error says what happened, why, and in `hint` which command to run next.
"""

from __future__ import annotations

import difflib
import errno
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Explanation(BaseException):
    """What a command says when it ends early.

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
        self.is_printed = False  # as a part of a JSON document

    def to_dict(self) -> dict[str, Any]:
        """The document that `-o json` prints for this error."""
        return {
            "error": {"code": self.code, "message": self.message, "hint": self.hint, "details": self.details},
            "schema_version": 1,
        }


class MlbenchError(Explanation, Exception):
    """Something went wrong that can be explained to a user in one paragraph."""


class UsageError(MlbenchError):
    """Wrong command line, spec file or configuration."""

    exit_code = 2
    code = "usage"


class StoreError(UsageError):
    """The store is damaged or out of reach, or a newer mlbench wrote it."""


class DamagedRun(UsageError):
    """What the agents of a run have written is damaged, or another version of mlbench wrote it."""

    code = "damaged_run"


class DamagedArchive(UsageError):
    """A file of an archive is missing, changed, unreadable or not what it must be. `details["file"]` names it."""

    code = "damaged_archive"

    def __init__(self, path: Path | str, file: str, message: str, *, problem: str = "damaged") -> None:
        where = f"{path}: {file}" if file else str(path)
        super().__init__(
            f"{where}: {message}",
            hint=f"mlbench verify {shlex.quote(str(path))}",
            details={"file": file, "problem": problem},
        )
        self.file = file
        self.problem = problem
        self.plain = message


class CredentialError(MlbenchError):
    """Credentials are missing, wrong or without a permission."""

    exit_code = 3
    code = "credentials"


class MissingRight(CredentialError):
    """A permission is missing that waiting does not bring: the cluster has answered other requests."""


class NotFoundError(MlbenchError):
    """The run, cluster, file or object does not exist."""

    exit_code = 4
    code = "not_found"


class CapacityError(MlbenchError):
    """A quota or a lack of machines refuses it."""

    exit_code = 5
    code = "capacity"


class NeverStartedError(MlbenchError):
    """The workers of a run never started."""

    exit_code = 6
    code = "never_started"


class TaskFailedError(MlbenchError):
    """The task failed, missed its goal with `--require-goal`, or a gate failed."""

    exit_code = 7
    code = "task_failed"


class CleanupError(MlbenchError):
    """The work is done, but cleaning up or the archive is incomplete."""

    exit_code = 8
    code = "cleanup_failed"


class CannotTellError(MlbenchError):
    """There is not enough evidence for a verdict."""

    exit_code = 9
    code = "cannot_tell"


class UnprovenArchive(CannotTellError):
    """An archive is intact, but its results do not all follow from its evidence, as far as this mlbench can tell."""

    code = "unproven_archive"

    def __init__(self, path: Path | str, reasons: Sequence[str], *, can_be_shown: bool = True) -> None:
        more = "; other commands show it, marked as unproven, with --unproven" if can_be_shown else ""
        super().__init__(
            f"{path}: not everything follows from the evidence. {reasons[0]}",
            hint=f"mlbench verify {shlex.quote(str(path))}{more}",
            details={"not_derived": list(reasons)},
        )


class UnreachableError(MlbenchError):
    """A cluster does not answer."""

    exit_code = 10
    code = "unreachable"


class RemoteError(MlbenchError):
    """A machine has understood a request and could not do it. `kind` is refused, timeout or system."""

    exit_code = 2
    code = "remote"

    def __init__(self, host: str, text: str, kind: str) -> None:
        hint = (
            "Free up space there, or fix the permissions; or attach the cluster with another folder (--shared, --dir)."
        )
        super().__init__(f"{host}: {text}.", hint=hint if kind == "system" else None)
        self.text = text
        self.kind = kind


class DeadlineError(MlbenchError):
    """A deadline has passed."""

    exit_code = 124
    code = "deadline"


class StoreLockedError(DeadlineError):
    """Another process has kept the store locked longer than this one waits."""


class Stopped(Explanation):
    """A signal or an answer at a prompt ended the command. Like KeyboardInterrupt it is no Exception: code that
    continues after errors must not continue after it.
    """


class Interrupted(Stopped):
    """Ctrl-C (SIGINT)."""

    exit_code = 130
    code = "interrupted"


class Terminated(Stopped):
    """SIGTERM."""

    exit_code = 143
    code = "terminated"


def explain_stop(stopped: BaseException, message: str, hint: str | None = None) -> Stopped:
    """The same kind of stop (Ctrl-C or SIGTERM) with a message that says what is true now."""
    kind = Terminated if isinstance(stopped, Terminated) else Interrupted
    return kind(message, hint=hint)


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """' Did you mean "x"?' for the known word nearest to `word`, or an empty string."""
    plain = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), plain, n=1, cutoff=0.5 if len(word) < 4 else 0.6)
    return f' Did you mean "{plain[near[0]]}"?' if near else ""


_WRONG_NAMES = (errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


@contextmanager
def naming_file_on_os_error(path: Path, action: str) -> Iterator[None]:
    """Convert an OSError in the block into an MlbenchError that names the file.

    Of a file that is written: exit code 5 for a full disk, 3 for a missing permission, 2 for a name that cannot be one.
    """
    try:
        yield
    except OSError as error:
        # Files are written under another name first.
        what = path if action == "written" else error.filename or path
        message = f"{what} cannot be {action}: {error.strerror or error}."
        if error.errno == errno.ENOENT and action != "written":
            raise NotFoundError(message) from None
        if error.errno in _WRONG_NAMES:
            raise UsageError(message) from None
        raise explain_os_error(error, message) from None


def explain_os_error(error: OSError, message: str) -> MlbenchError:
    """An error of the operating system, by what can be done about it: space, permissions, or nothing known."""
    details = {"errno": error.errno}
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free up disk space, or use another disk; MLBENCH_HOME names the folder of all runs."
        return CapacityError(message, hint=hint, details=details)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return CredentialError(message, details=details)
    return MlbenchError(message, details=details)
