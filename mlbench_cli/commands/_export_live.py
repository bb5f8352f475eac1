"""Exporting the metrics of runs while they run."""

import time
from collections.abc import Callable, Sequence

from mlbench_cli import console
from mlbench_cli.api import Client, RunHandle
from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.tables import MetricPoint
from mlbench_cli.results.archive.events import parse_metric
from mlbench_cli.results.exports.facts import RunFacts, Sink, describe_settings, summarize_result
from mlbench_cli.runs.progress import EventReader
from mlbench_cli.util.times import parse_timestamp

POLL_SECONDS = 1.0
SEAL_SECONDS = 60.0  # after the end of the ranks in which the archive may be sealed; it has the outcome


class _Followed:
    """One run, its events so far, and their sink."""

    def __init__(self, run: RunHandle, sink: Sink) -> None:
        self.run = run
        self.sink = sink
        self._engine = run.workspace.engine_of(run.run)
        self._reader = EventReader(self._engine, run.run, range(run.run.spec.world_size))
        self._ended_at: float | None = None  # by the monotonic clock

    def export_new(self) -> bool:
        """Export new metrics; return whether the run has ended and its outcome was exported, if it can be known."""
        finished = self.run.finished
        if finished is None and self._ended_at is None and self._engine.look(self.run.run).ended is not None:
            self._ended_at = time.monotonic()
        self.sink.add(self._read_points())
        if finished is None and (self._ended_at is None or time.monotonic() < self._ended_at + SEAL_SECONDS):
            return False
        result = finished.result if finished else None
        self.sink.close(summarize_result(result or {}), str(finished.outcome) if finished else None)
        return True

    def _read_points(self) -> list[MetricPoint]:
        events = (event for event in self._reader.poll() if event["event"] == "metric")
        rows = (row for event in events if (row := parse_metric(event)))
        points = (MetricPoint.parse(self.run.name, self.run.run.spec.workers, row) for row in rows)
        return sorted((point for point in points if point is not None), key=lambda point: point.time)


def follow_runs(names: Sequence[str], make_sink: Callable[[RunFacts], Sink]) -> list[str]:
    """Export metrics of runs until all have ended; the names of the runs. Ctrl-C ends the export, not the runs."""
    if not names:
        raise UsageError("--follow needs run or experiment names.", hint="mlbench status")
    runs = Client(notice=console.note).select(names).runs
    left: list[_Followed] = []  # those whose sinks are open
    try:
        for run in runs:
            left.append(_Followed(run, make_sink(_describe_run(run))))
        console.note(f"Following {', '.join(run.name for run in runs)}; Ctrl-C ends the export, not the runs.")
        while left:
            for followed in list(left):
                if followed.export_new():
                    left.remove(followed)
            if left:
                time.sleep(POLL_SECONDS)
    finally:
        for followed in left:
            followed.sink.close({}, None)
    return [run.name for run in runs]


def _describe_run(handle: RunHandle) -> RunFacts:
    run = handle.run
    created, settings = parse_timestamp(run.created), describe_settings(run.spec.to_dict())
    return RunFacts(run.name, run.id, run.spec.task, run.spec.workers, created, settings, {}, None)
