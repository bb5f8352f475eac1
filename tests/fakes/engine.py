"""An engine without a cluster, for tests of whatever follows, reads or finalizes runs.

It plays the observations that it was given, and its logs are lists of lines. What was asked of it is in `calls`.

    engine = FakeEngine([Observation(...), Observation(..., ended=Ending.EXITED)], logs={0: [b"hello\\n"]})
"""

from collections.abc import Generator, Iterable, Iterator, Mapping

from mlbench_cli.engines.base import Cursor, Fetched, LogLine, Submission
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import Ending, Observation, Run, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import RunFolder


class FakeEngine:
    """Plays `observations` in order; the last one stays. `fetch` writes `logs` into the run's folder.

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
        self._record("submit")

    def resume(self, run: Run) -> None:
        """Record the call; nothing is started."""
        self._record("resume")

    def look(self, run: Run) -> Observation:
        """The current observation. Raises `error` if it is set."""
        self._record("look")
        return self.observations[0]

    def watch(self, run: Run) -> Generator[Observation, None, None]:
        """Yield the observations in turn, the last one for ever, until one has ended. Raises `error` if it is set."""
        self._record("watch")
        while True:
            observation = self.observations[0]
            yield observation
            if observation.ended:
                return
            if len(self.observations) > 1:
                self.observations.pop(0)

    def logs(self, run: Run, rank: int, since: Cursor | None = None, follow: bool = False) -> Iterator[LogLine]:
        """The rank's lines from the cursor on; cursors count lines.

        Raises `error` before the next line if it is set.
        """
        begin = since.offset if since else 0
        for number, text in enumerate(self.lines.get(rank, ())[begin:], begin):
            if self.error is not None:
                raise self.error
            yield LogLine(rank, text, Cursor(number + 1))

    def print_stacks(self, run: Run) -> None:
        """Record the call."""
        self._record("print_stacks")

    def fetch(self, run: Run) -> Fetched:
        """Write all lines into the run's folder as its logs. Raises `error` if it is set."""
        self._record("fetch")
        for rank, lines in self.lines.items():
            path = RunFolder(run.folder).log(rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(lines))
        return self.fetched

    def cancel(self, run: Run) -> None:
        """End the run: the last observation becomes a cancelled one unless it has ended.

        Raises `error` if it is set.
        """
        self._record("cancel")
        last = self.observations[-1]
        if last.ended is None:
            self.observations = [Observation(last.time, last.workers, last.findings, Ending.CANCELLED)]

    def delete(self, run: Run, *, force: bool = False) -> None:
        """Record the call. Raises `error` if it is set."""
        self._record("delete")

    def _record(self, call: str) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(call)
