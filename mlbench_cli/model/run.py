"""The basic types of runs: states, outcomes, phases, findings, observations, experiments and clusters."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import asdict

from mlbench_cli.errors import CleanupError, DeadlineError, NeverStartedError, TaskFailedError
from mlbench_cli.model.spec import RunSpec

# A JSON document with a published schema, or passed on unchanged.
JsonObject = dict[str, Any]


DAMAGED = "damaged"  # shown as the state of a run whose sealed folder was changed


class RunState(StrEnum):
    """The last known state of a run, in the order in which a run passes through them: `Store.advance` moves it on.
    FINISHED runs have an `outcome`."""

    QUEUED = "queued"  # in the queue of its experiment; its engine does not know it
    SUBMITTED = "submitted"  # its engine may know it
    RUNNING = "running"
    FINISHED = "finished"


class Outcome(StrEnum):
    """The result of a run, as the judge derives it from the evidence."""

    GOAL_REACHED = "goal_reached"
    GOAL_MISSED = "goal_missed"
    BUDGET_SPENT = "budget_spent"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    DEADLINE = "deadline"
    NEVER_STARTED = "never_started"
    LOST = "lost"

    @property
    def is_success(self) -> bool:
        """Whether all ranks ended with exit code 0; this includes missed goals."""
        return self in _SUCCESSES

    @property
    def is_resumable(self) -> bool:
        """Whether the run was interrupted, so resuming its experiment starts it again."""
        return self in _INTERRUPTED

    @property
    def phrase(self) -> str:
        """The predicate of a sentence about the run."""
        return _PHRASES[self]

    def exit_code(self, *, require_goal: bool = False, goal_reached: bool = False, sealed: bool = True) -> int:
        """The exit code of mlbench for this outcome.

        With `require_goal` only a run whose goal was reached (`goal_reached`: result.json's goal.reached) passes.
        A canceled run gives 7 to commands that waited for it; a finished run without an archive gives 8.
        """
        if not self.is_success:
            return _FAILURE_CODES.get(self, TaskFailedError.exit_code)
        if require_goal and not goal_reached:
            return TaskFailedError.exit_code
        return 0 if sealed else CleanupError.exit_code


_SUCCESSES = frozenset({Outcome.GOAL_REACHED, Outcome.GOAL_MISSED, Outcome.BUDGET_SPENT, Outcome.COMPLETED})
_INTERRUPTED = frozenset({Outcome.CANCELED, Outcome.NEVER_STARTED, Outcome.LOST})
_FAILURE_CODES = {
    Outcome.NEVER_STARTED: NeverStartedError.exit_code,
    Outcome.DEADLINE: DeadlineError.exit_code,
}
_PHRASES = {
    Outcome.GOAL_REACHED: "reached its goal",
    Outcome.GOAL_MISSED: "ended without reaching its goal",
    Outcome.BUDGET_SPENT: "has spent its time budget",
    Outcome.COMPLETED: "completed",
    Outcome.FAILED: "failed",
    Outcome.CANCELED: "was canceled",
    Outcome.DEADLINE: "was stopped at its deadline",
    Outcome.NEVER_STARTED: "never started",
    Outcome.LOST: "was lost: nothing of it could be observed any more",
}


class Ending(StrEnum):
    """How the workers of a run ended, as observed by the engine."""

    EXITED = "exited"  # all ranks have exit codes
    FAILED = "failed"  # a rank failed, the others were stopped
    CANCELED = "canceled"
    DEADLINE = "deadline"
    NEVER_STARTED = "never_started"
    LOST = "lost"  # nothing remains to observe

    @property
    def outcome(self) -> Outcome | None:
        """The outcome implied by the ending alone; None if exit codes and results decide."""
        return _ENDING_OUTCOMES.get(self)


_ENDING_OUTCOMES = {
    Ending.CANCELED: Outcome.CANCELED,
    Ending.DEADLINE: Outcome.DEADLINE,
    Ending.NEVER_STARTED: Outcome.NEVER_STARTED,
    Ending.LOST: Outcome.LOST,
}


class Phase(StrEnum):
    """The phase of a worker's life."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        """Whether the phase is final."""
        return self in _FINAL_PHASES


_FINAL_PHASES = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.LOST})


class FindingDocument(TypedDict):
    """A finding in a JSON document."""

    code: str
    summary: str
    hint: str | None
    retryable: bool
    permanent: bool
    evidence: Mapping[str, Any]


class Finding(Struct, frozen=True, forbid_unknown_fields=True):
    """One diagnosed reason why something failed, is stuck, or limits what a result proves."""

    code: str  # snake_case, stable: rank_crashed, out_of_memory, unschedulable, image_not_found, deadline, ...
    summary: str
    hint: str | None = None
    retryable: bool = False
    permanent: bool = False  # waiting cannot help: fail fast
    evidence: Mapping[str, Any] = {}

    def to_dict(self) -> FindingDocument:
        """The finding as plain JSON values."""
        return cast(FindingDocument, to_builtins(self))


class WorkerState(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's process, or one worker's pod. Times are seconds since 1970; `exit_code` is 128+N for signal N.

    `image_digest` is reported by the kubelet; None for a process.
    """

    rank: int
    phase: str = Phase.PENDING
    reason: str | None = None
    node: str | None = None
    exit_code: int | None = None
    started: float | None = None
    finished: float | None = None
    restarts: int = 0
    image_digest: str | None = None
    seconds: float | None = None  # by a monotonic clock; None: unknown

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values; times in seconds since 1970. Unknown `seconds` are left out."""
        document = asdict(self)
        if self.seconds is None:
            del document["seconds"]
        return document


class NodeClock(Struct, frozen=True, forbid_unknown_fields=True):
    """By how much the wall clock of a node was set while the ranks ran: the sum of the absolute adjustments."""

    node: str | None
    stepped_seconds: float


class Observation(Struct, frozen=True, forbid_unknown_fields=True):
    """What is known about a run at `time` (seconds since 1970); `ended` is None while it runs."""

    time: float
    workers: tuple[WorkerState, ...]
    findings: tuple[Finding, ...] = ()
    ended: Ending | None = None
    first_failed: int | None = None  # rank that failed first
    # From the start of the first rank to the end of the last rank, by monotonic clocks; None: not measured.
    seconds: float | None = None
    clocks: tuple[NodeClock, ...] = ()

    @classmethod
    def of_waiting(
        cls,
        time: float,
        spec: RunSpec,
        reason: str | None = None,
        *,
        findings: tuple[Finding, ...] = (),
        ended: Ending | None = None,
    ) -> "Observation":
        """The observation of a run whose workers have not begun, each for this `reason`."""
        workers = tuple(WorkerState(rank, reason=reason) for rank in range(spec.process_count))
        return cls(time, workers, findings, ended)

    @property
    def is_absent(self) -> bool:
        """Whether its cluster has nothing of the run, which may also be about to be submitted."""
        nothing = self.ended in (Ending.NEVER_STARTED, Ending.LOST)
        return nothing and not any(worker.started for worker in self.workers)

    def to_dict(self) -> dict[str, Any]:
        """The observation as plain values; times in seconds since 1970. Unknown seconds and clocks are left out."""
        document = {**to_builtins(self), "workers": [worker.to_dict() for worker in self.workers]}
        for name in ("seconds", "clocks"):
            if document[name] in (None, ()):
                del document[name]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Observation":
        """The observation in a dictionary as `to_dict` makes it. Raises ValueError that names the wrong field."""
        try:
            return convert(document, cls)
        except ValidationError as error:
            raise ValueError(str(error)) from None


class Run(Struct, frozen=True):
    """A recorded run. `folder` becomes the archive; `created` is RFC 3339 UTC."""

    id: str
    spec: RunSpec
    folder: Path
    created: str

    @property
    def name(self) -> str:
        """The name that the spec has."""
        return self.spec.name

    @property
    def manifests(self) -> Path:
        """The folder for what was submitted, and where: part of the archive, but for an anonymous run, since it names
        machines and paths."""
        return self.folder / (".state/manifests" if self.spec.anonymous else "manifests")


class ExperimentName(NamedTuple):
    """An experiment, without its members."""

    id: str
    name: str


class RunRow(NamedTuple):
    """A run with its progress as known to the store.

    `problem` is the reason why its spec cannot be read completely, e.g. because a newer mlbench wrote it. Such a run
    can only be shown and deleted. `queue` is the experiment of a queued run.
    """

    run: Run
    state: RunState
    outcome: Outcome | None
    problem: str | None = None
    queue: "ExperimentName | None" = None


class ClusterIdentity(Struct, frozen=True, order=True):
    """The identity of a cluster. In clouds, a name is unique per account and location.

    `account` is an AWS account or a Google project, `location` a region or zone. Both are empty for providers that
    have none. `account` is also empty if unknown, e.g. in records of older versions.
    """

    provider: str
    account: str
    location: str
    name: str

    def matches(self, other: "ClusterIdentity") -> bool:
        """Whether both may be the same cluster: equal, but an unknown account matches every account."""
        same = (self.provider, self.location, self.name) == (other.provider, other.location, other.name)
        return same and (self.account == other.account or not self.account or not other.account)


class ExperimentState(StrEnum):
    """The state of an experiment, derived from its members."""

    PENDING = "pending"  # its queue has not started the first member yet
    RUNNING = "running"
    STOPPED = "stopped"  # members remain and nothing starts them; the same command line resumes it
    COMPLETED = "completed"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will run without a new command."""
        return self in (ExperimentState.COMPLETED, ExperimentState.FAILED)

    @classmethod
    def derive(cls, members: "Sequence[tuple[RunState, Outcome | None]]", *, is_queued: bool) -> "ExperimentState":
        """The state that follows from the state and outcome of each member.

        `is_queued`: a process is starting the remaining members.
        """
        states = {state for state, _ in members}
        if RunState.RUNNING in states or (is_queued and states == {RunState.QUEUED, RunState.FINISHED}):
            return cls.RUNNING
        if RunState.QUEUED in states:
            return cls.PENDING if is_queued else cls.STOPPED
        if any(outcome is not None and outcome.is_resumable for _, outcome in members):
            return cls.RUNNING if is_queued else cls.STOPPED
        return cls.COMPLETED if all(outcome and outcome.is_success for _, outcome in members) else cls.FAILED


class Member(Struct, frozen=True):
    """A run as a part of an experiment. `content_hash`: RunSpec.content_hash.

    `point` has the text of each matrix axis by its key ("backend", "set.batch_size"); empty without a matrix.
    """

    index: int
    run_id: str
    content_hash: str
    point: Mapping[str, str] = {}


class Experiment(Struct, frozen=True):
    """A request with sizes, repeats and a matrix, and its runs.

    `request` maps option names to values, as in a spec file. `require_goal` and `parallel` apply to whichever command
    waits for or resumes the experiment.
    """

    id: str
    name: str
    created: str  # RFC 3339
    request: Mapping[str, Any]
    members: tuple[Member, ...] = ()
    require_goal: bool = False
    parallel: int = 1


class Cluster(Struct, frozen=True):
    """A named set of machines. `state`: creating | ready | deleting | failed.

    `details` is the provider's stored record; `cluster_details.ClusterDetails` reads and checks it. `account` and
    `location` are those of the identity.
    """

    name: str
    provider: str
    state: str = "ready"
    created: str = ""
    details: Mapping[str, Any] = {}
    account: str = ""
    location: str = ""

    @property
    def engine(self) -> str:
        """The engine that executes its runs, as specs name it."""
        return self.provider if self.provider in ("local", "slurm", "hosts") else "kubernetes"

    @property
    def is_attached(self) -> bool:
        """Whether mlbench has only attached it: it was made by others, and stays."""
        return self.provider in ("attached", "slurm", "hosts")

    @property
    def identity(self) -> ClusterIdentity:
        """Provider, account, location and name."""
        return ClusterIdentity(self.provider, self.account, self.location, self.name)


LOCAL = Cluster("local", "local")
