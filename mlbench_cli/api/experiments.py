"""An experiment as an object: its runs, its progress, its end."""

import time
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.api.runs import RunHandle, Runs
from mlbench_cli.model.run import Experiment, ExperimentState, JsonObject
from mlbench_cli.results.analysis.published import select_series
from mlbench_cli.results.analysis.series import Row, make_rows, measure, name_settings
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.runs import queue
from mlbench_cli.runs.connect import Workspace
from mlbench_cli.runs.experiment_status import ExperimentStatus, experiment_status
from mlbench_cli.runs.finalize import FinishedRun
from mlbench_cli.runs.queue import QueueFolder
from mlbench_cli.runs.snapshot import RunStatus, read_states
from mlbench_cli.util.text import counted


class ExperimentHandle(Struct, frozen=True):
    """A handle to an experiment."""

    workspace: Workspace
    experiment: Experiment

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.experiment.name

    @property
    def title(self) -> str:
        """The headline of its table: the title that its file gives, else its name."""
        return str(self.experiment.request.get("title") or self.name)

    def runs(self) -> Runs:
        """Its runs in their order; those that were deleted are left out."""
        return Runs(RunHandle(self.workspace, row) for row in self.workspace.store.members(self.experiment))

    def __repr__(self) -> str:
        """Name and number of runs in one line."""
        count = len(self.runs())
        return f"<experiment {self.name}: {counted(count, 'run')}>"

    def read_status(self, states: Sequence[RunStatus] | None = None) -> ExperimentStatus:
        """State, progress, time left and queue. `states` are those of its runs, if they are known already."""
        workspace = self.workspace
        if states is None:
            states = list(read_states([run.row for run in self.runs()], workspace.engine_of))
        return experiment_status(self.experiment, states, workspace.store, workspace.engine_of)

    def status(self) -> JsonObject:
        """The same as an entry of "experiments" of `mlbench status NAME -o json`."""
        return self.read_status().to_dict()

    @property
    def is_under_way(self) -> bool:
        """Whether its queue still has something to start or to follow."""
        return any(not run.is_finished for run in self.runs()) and self._queue.is_held() is True

    @property
    def _queue(self) -> QueueFolder:
        return QueueFolder.of(self.workspace.store.folder, self.experiment.id)

    def read_queue_log(self) -> list[str]:
        """The output of its background queue; empty if it never had one."""
        return list(self._queue.read_log())

    @property
    def state(self) -> ExperimentState:
        """The current state."""
        return ExperimentState(self.status()["state"])

    def wait(self, timeout: float | None = None) -> list[FinishedRun]:
        """Wait for all runs to end, at most `timeout` seconds (DeadlineError). Returns how they ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        left: list[FinishedRun] = []
        for run in self.runs():
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            left.append(run.wait(seconds))
        return left

    def stop(self, reason: str = "the API stopped it") -> None:
        """Start no further runs. Running ones continue."""
        queue.stop(self.experiment, self.workspace.store.folder, reason, self.workspace.notice)

    def cancel(self) -> None:
        """Start no further runs, and stop the running ones."""
        self.stop()
        for run in self.runs():
            if run.is_started and not run.is_finished:
                run.cancel()

    def table(self) -> list[Row]:
        """The runs that have ended by their settings and number of workers, then the published rows that the file of
        the experiment names. Its `metric` is the value of a run."""
        points = {member.run_id: member.point for member in self.experiment.members}
        runs = self.runs()
        settings = name_settings([(run.run.spec.task, points[run.run.id]) for run in runs])
        measured = []
        for run, named in zip(runs, settings, strict=True):
            if run.is_sealed:
                with Archive.open(run.run.folder) as archive:
                    measured.append((named, replace(measure(archive), workers=run.run.spec.world_size)))
        # Runs alternate between the entries of a file, rows do not.
        order = {key: number for number, key in enumerate(dict.fromkeys(map(_entry_of, settings)))}
        measured.sort(key=lambda each: order[_entry_of(each[0])])
        request = self.experiment.request
        return make_rows(measured, request.get("metric"), select_series(request.get("published", ())))

    def archives(self) -> list[Archive]:
        """The verified archives of its finished runs."""
        return [run.archive() for run in self.runs() if run.is_sealed]


def _entry_of(settings: Mapping[str, str]) -> tuple[str | None, ...]:
    return settings["task"], settings.get("series"), settings.get("cluster")
