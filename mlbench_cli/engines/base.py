"""What an engine is: it executes a run on a cluster, and says what it sees. It decides nothing about success."""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from mlbench_cli.model.run import Finding, Observation, Run
from mlbench_cli.model.spec import RunSpec

LOG_GAP = "log_gap"  # the code of the finding that lines of a log are missing
# Codes of the findings of `fetch` that say why output is missing.
LOSSES = ("results_lost", "results_replaced")


@dataclass(frozen=True)
class Submission:
    """What `submit` will hand over, unchanged: `--dry-run` prints exactly these documents."""

    spec: RunSpec
    documents: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Cursor:
    """A place in a rank's log: bytes already taken (local), or time stamp of the last line (kubernetes)."""

    offset: int = 0
    timestamp: str | None = None


@dataclass(frozen=True)
class LogLine:
    """One line of a rank's log, byte-exact, with its line end; the last one may lack it."""

    rank: int
    text: bytes
    cursor: Cursor


@dataclass(frozen=True)
class Fetched:
    """What `fetch` brought into the run's folder. `complete` is False if an archive had to be rebuilt from logs;
    `findings` are what else there is to say of it."""

    files: int
    bytes: int
    complete: bool = True
    findings: tuple[Finding, ...] = ()


class Engine(Protocol):
    """Executes runs on one cluster. Every method may be called from any process that knows the cluster."""

    # True if the run dies with an attached client, so that Ctrl-C cancels instead of detaching.
    dies_with_client: bool

    def render(self, spec: RunSpec) -> Submission:
        """Pure: no network, no clock, no random; the same spec gives the same bytes."""
        ...

    def submit(self, run: Run, submission: Submission, *, detach: bool = False) -> None:
        """Start the run. Called again for the same spec it adopts what is there, for another it refuses."""
        ...

    def resume(self, run: Run) -> None:
        """Go on with a submission whose client died halfway. Started already: nothing to do."""
        ...

    def look(self, run: Run) -> Observation:
        """The run as it is now. Reads only."""
        ...

    def watch(self, run: Run) -> Generator[Observation, None, None]:
        """Observations until one with `ended`, at least one a second or as something changes."""
        ...

    def logs(self, run: Run, rank: int, since: Cursor | None = None, follow: bool = False) -> Iterator[LogLine]:
        """The lines of one rank's log behind `since`; with `follow` until the rank has ended."""
        ...

    def log_gaps(self, run: Run) -> tuple[Finding, ...]:
        """What is known to be missing from the logs in the run's folder: findings with the code LOG_GAP."""
        ...

    def fetch(self, run: Run) -> Fetched:
        """Bring what is still outside into `run.folder` (logs/, output/), verified; then release the held worker."""
        ...

    def kept_until(self, run: Run) -> float | None:
        """Until when results outside of the run's folder are kept, seconds since 1970; None for none, or unknown."""
        ...

    def cancel(self, run: Run) -> None:
        """Stop the run and keep its partial results. Idempotent: a run that has ended is left as it is."""
        ...

    def delete(self, run: Run, *, force: bool = False) -> None:
        """Remove everything the run has on the cluster. Refuses unfetched results without `force`."""
        ...


@dataclass(frozen=True)
class FoundRun:
    """A run as its cluster describes it. `id` and `created` (RFC 3339) are the same on every machine."""

    id: str
    created: str
    spec: RunSpec
    is_fetched: bool


@dataclass(frozen=True)
class UnreadableRun:
    """A run of mlbench's on a cluster that cannot be read, by a newer version for example."""

    name: str
    reason: str


@runtime_checkable
class CanDiscover(Protocol):
    """An engine whose cluster knows the runs that other machines have started."""

    def discover(self, namespace: str | None = None) -> list[FoundRun | UnreadableRun]:
        """All runs on the cluster, oldest first, whoever started them."""
        ...
