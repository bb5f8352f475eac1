"""HTTP statuses of mlbench's errors."""

from collections.abc import Mapping

from mlbench_cli.errors import (
    CannotTellError,
    CapacityError,
    CleanupError,
    CredentialError,
    DeadlineError,
    MlbenchError,
    NotFoundError,
    StoreError,
    StoreLockedError,
    UnreachableError,
    UsageError,
)
from mlbench_cli.server.live import TooManyFollowers

# The first matching class counts.
_STATUS: Mapping[type[MlbenchError], int] = {
    StoreError: 503,
    StoreLockedError: 503,
    UsageError: 400,
    NotFoundError: 404,
    CredentialError: 502,
    CapacityError: 503,
    UnreachableError: 502,
    DeadlineError: 504,
    CleanupError: 500,
    CannotTellError: 409,
    TooManyFollowers: 503,
}


def status_of(error: MlbenchError) -> int:
    """The HTTP status for an error."""
    return next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
