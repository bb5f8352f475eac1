"""An engine without a cluster, for tests of whatever follows, reads or finalizes runs.

It plays the observations that it was given, and its logs are lists of lines. What was asked of it is in `calls`.

    engine = FakeEngine([Observation(...), Observation(..., ended=Ending.EXITED)], logs={0: [b"hello\\n"]})
"""

from collections.abc import Iterable, Mapping

from mlbench_cli.engines.base import Fetched, Submission
from mlbench_cli.engines.observe import NodeReport, Snapshot
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Ending, Observation, Run, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import RunFolder


class FakeEngine:
    """Plays `observations` in order; the last one stays. Its head writes `logs` into the run's folder.

    `error` is raised by every call that would ask a cluster, as if it did not answer; None lets them pass.
    """

    def __init__(
        self, observations: Iterable[Observation] = (), logs: Mapping[int, Iterable[bytes]] | None = None
    ) -> None:
        self.observations = list(observations) or [Observation(0.0, (WorkerState(0),))]
        self.lines = {rank: list(lines) for rank, lines in (logs or {}).items()}
        self.fetched = Fetched(files=0, bytes=0)
        self.error: MlbenchError | None = None
        self.calls: list[str] = []

    def render(self, spec: RunSpec) -> Submission:
        """One object of kind FakeRun that names the run."""
        return Submission(spec, ({"kind": "FakeRun", "name": spec.name},))

    def submit(self, run: Run, submission: Submission) -> None:
        """Record the call; nothing is started."""
        self.record("submit")

    def resume(self, run: Run) -> None:
        """Record the call; nothing is started."""
        self.record("resume")

    def look(self, run: Run, *, max_age: float = 0.0) -> Observation:
        """The current observation. Raises `error` if it is set."""
        self.record("look")
        return self.observations[0]

    def head(self, run: Run) -> "FakeHead":
        """A head that has the lines."""
        return FakeHead(self, run)

    def cancel(self, run: Run) -> None:
        """End the run: the last observation becomes a canceled one unless it has ended.

        Raises `error` if it is set.
        """
        self.record("cancel")
        last = self.observations[-1]
        if last.ended is None:
            self.observations = [Observation(last.time, last.workers, last.findings, Ending.CANCELED)]

    def delete(self, run: Run, *, force: bool = False) -> None:
        """Record the call. Raises `error` if it is set."""
        self.record("delete")

    def record(self, call: str) -> None:
        """Note a call. Raises `error` if it is set."""
        if self.error is not None:
            raise self.error
        self.calls.append(call)


class FakeHead:
    """Has the lines of its engine. Whoever waits gets its next observation."""

    poll_seconds = 0.0

    def __init__(self, engine: FakeEngine, run: Run) -> None:
        self._engine = engine
        self._run = run

    def read(self, *, max_age: float = 0.0) -> Snapshot:
        """Write all lines into the run's folder as its logs. Raises `error` if it is set."""
        if self._engine.error is not None:
            raise self._engine.error
        for rank, lines in self._engine.lines.items():
            path = RunFolder(self._run.folder).log(rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(lines))
        return Snapshot(0.0, {0: NodeReport()})

    def wait(self, seconds: float) -> None:
        """The next observation is there at once."""
        if len(self._engine.observations) > 1:
            self._engine.observations.pop(0)

    def fetch(self) -> Fetched:
        """Like `read`."""
        self._engine.record("fetch")
        self.read()
        return self._engine.fetched

    def print_stacks(self) -> None:
        """Record the call."""
        self._engine.record("print_stacks")
