"""Which HTTP status an error of mlbench is."""

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

# The first kind that fits counts.
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
    """The status of an answer that explains the error."""
    return next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
