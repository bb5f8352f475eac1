"""The engine interface. An engine executes a run on a cluster and reports what it observes; it does not judge."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from mlbench_cli.engines.observe import Snapshot
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Finding, Observation, Run
from mlbench_cli.model.spec import RunSpec

LOG_GAP = "log_gap"  # code of the finding that log lines are missing
# Codes of findings of `fetch` about missing output.
LOSSES = ("results_lost", "results_replaced")


class Submission(Struct, frozen=True):
    """The documents that `submit` will pass on unchanged; `--dry-run` prints exactly these."""

    spec: RunSpec
    documents: tuple[Mapping[str, Any], ...]


class Cursor(Struct, frozen=True):
    """A place in a rank's log: how many bytes come before it."""

    offset: int = 0


class LogLine(Struct, frozen=True):
    """One line of a rank's log, byte-exact, with its line end; the last one may lack it."""

    rank: int
    text: bytes
    cursor: Cursor


class Fetched(Struct, frozen=True):
    """The result of `fetch`. `complete` is False if an archive had to be rebuilt from logs; `findings` are further
    facts.
    """

    files: int
    bytes: int
    complete: bool = True
    findings: tuple[Finding, ...] = ()


class Head(Protocol):
    """The folder of one run, wherever it is: what its agents have written, and its results."""

    poll_seconds: float  # between two looks at a growing log

    def read(self, *, max_age: float = 0.0) -> Snapshot:
        """What the agents have written, at most `max_age` seconds ago. New log lines are in `run.folder` afterwards.

        Raises UnreachableError if the head does not answer.
        """

    def wait(self, seconds: float) -> None:
        """Wait `seconds` for news, or as long as there is none where that costs nothing to see."""

    def fetch(self) -> Fetched:
        """Fetch remaining files into `run.folder` (logs/, output/) and verify them; then release the head."""

    def print_stacks(self) -> None:
        """Have the ranks write the stacks of their threads into their logs, soon after this returns."""


class Engine(Protocol):
    """Executes runs on one cluster. Every method may be called from any process that knows the cluster.

    `follow` has what is the same on every engine: watching a run to its end, and reading its logs.
    """

    def render(self, spec: RunSpec) -> Submission:
        """Pure: no network, no clock, no random; the same spec gives the same bytes."""

    def submit(self, run: Run, submission: Submission) -> None:
        """Start the run. A second call adopts what exists for the same spec, and rejects another spec."""

    def resume(self, run: Run) -> None:
        """Resume a submission whose client died. Does nothing if the run has started."""

    def head(self, run: Run) -> Head:
        """The run's folder. Sends no request yet."""

    def look(self, run: Run, *, max_age: float = 0.0) -> Observation:
        """The current state of the run, or that of `max_age` seconds ago: then a scheduler is not asked each time."""

    def cancel(self, run: Run) -> None:
        """Stop the run and keep its partial results. Idempotent: a run that has ended is unchanged."""

    def delete(self, run: Run, *, force: bool = False) -> None:
        """Remove everything the run has on the cluster. Refuses unfetched results without `force`."""


def refuse_running(run: Run) -> UsageError:
    """The error of deleting a running run."""
    return UsageError(
        f'The run "{run.name}" is still running.', hint=f"mlbench cancel {run.name}, then: mlbench delete {run.name}"
    )


def refuse_unfetched(run: Run) -> UsageError:
    """The error of deleting results that exist nowhere else."""
    return UsageError(
        f'The results of the run "{run.name}" have not been fetched.',
        hint=f"mlbench download {run.name}, or: mlbench delete {run.name} --force",
    )


class FoundRun(Struct, frozen=True):
    """A run as its cluster describes it. `id` and `created` (RFC 3339) are the same on every machine."""

    id: str
    created: str
    spec: RunSpec
    is_fetched: bool


class UnreadableRun(Struct, frozen=True):
    """An mlbench run on a cluster that cannot be read, e.g. of a newer version."""

    name: str
    reason: str


@runtime_checkable
class CanDiscover(Protocol):
    """An engine whose cluster can list the runs of other machines."""

    def discover(self, namespace: str | None = None) -> list[FoundRun | UnreadableRun]:
        """All runs on the cluster, oldest first, whoever started them."""


@runtime_checkable
class CanExpire(Protocol):
    """An engine whose cluster keeps results for a time only."""

    def kept_until(self, run: Run) -> float | None:
        """Until when results that were not fetched are kept, in seconds since 1970; None if there are none, or
        unknown.
        """
