"""From a request to its experiment: check it, record it, then start and follow its runs."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.api.experiments import ExperimentHandle
from mlbench_cli.api.runs import RunHandle
from mlbench_cli.engines.base import Submission
from mlbench_cli.model.run import Cluster, Experiment, JsonObject, Run, RunRow, RunState
from mlbench_cli.model.spec import RunSpec, repeat_of
from mlbench_cli.runs import queue, supervise
from mlbench_cli.runs.connect import EnginesByCluster, Workspace, connect_renderer
from mlbench_cli.runs.experiment import Candidate, Plan, absolute_paths
from mlbench_cli.runs.preflight import check_backend
from mlbench_cli.runs.queue import QueueLease
from mlbench_cli.runs.recording import document_writer, plan_experiment, record
from mlbench_cli.runs.request import Request, request_document
from mlbench_cli.util.times import now

API_COMMAND = ("mlbench.api",)  # command line in the provenance of runs that a program starts


class Launch(Struct, frozen=True):
    """The runs of a request, checked as far as possible without starting them. Nothing is recorded yet.

    `request` has its defaults. `experiment` is what would be recorded; with `is_known` an experiment of that name
    exists, and its finished runs stay. `new_cluster` may not exist yet. `folder` is where commands of this machine
    start; None: the current one.
    """

    workspace: Workspace
    request: Request
    candidates: tuple[Candidate, ...]
    experiment: Experiment
    is_known: bool
    new_cluster: Cluster | None = None
    folder: Path | None = None

    @property
    def specs(self) -> list[RunSpec]:
        """The spec of each run, in order."""
        return [candidate.spec for candidate in self.candidates]

    def render(self, *, offline: bool = False) -> list[Submission]:
        """The submission of each run. Raises if any run is rejected.

        With `offline` no cluster is reached and no credentials are needed, as for `mlbench run --dry-run`.
        """
        workspace = self.workspace
        engines = workspace.engine_of
        if offline and self.new_cluster is not None:
            renderer = connect_renderer(self.new_cluster)
            return [renderer.render(spec) for spec in self.specs]
        if offline:
            engines = EnginesByCluster(
                workspace.store, connect=lambda cluster: connect_renderer(cluster, workspace.notice)
            )
        return [engines.of_cluster(spec.cluster).render(spec) for spec in self.specs]

    def render_one_each(self) -> list[Submission]:
        """What would be submitted for one run of each entry of a file on each cluster, without reaching a cluster."""
        by_entry = {(item.point.get("runs"), item.spec.cluster): item for item in self.candidates}
        return replace(self, candidates=tuple(by_entry.values())).render(offline=True)

    @property
    def handle(self) -> ExperimentHandle:
        """A handle to the experiment as it would be recorded: its existing members, with the current request."""
        return ExperimentHandle(self.workspace, self.experiment)

    def plan(self, *, retry_failed: bool = False) -> Plan:
        """The new and remaining runs of the experiment. New runs get new ids with every call."""
        return plan_experiment(self.experiment, self.candidates, self.workspace.store, retry_failed=retry_failed)

    def run_all(self, *, retry_failed: bool = False) -> None:
        """Record the experiment, then start and follow what is left, one run at a time. Raises UsageError if another
        process is the queue."""
        with self.open(retry_failed=retry_failed) as opened:
            opened.record()
            for run in opened.left:
                if not run.is_finished:
                    opened.start_run(run)
                run.wait()

    @contextmanager
    def open(
        self, command_line: Sequence[str] = API_COMMAND, *, retry_failed: bool = False
    ) -> "Iterator[OpenExperiment]":
        """Become the queue of the experiment and record it; the caller starts the remaining runs.

        `command_line` goes into the provenance of new runs. Raises UsageError if another process is the queue.
        """
        with (
            chdir(self.folder) if self.folder else nullcontext(),
            queue.hold(self.experiment, self.workspace.store) as held,
        ):
            yield OpenExperiment(self.workspace, self.plan(retry_failed=retry_failed), held, tuple(command_line))

    def start(self, command_line: Sequence[str] = API_COMMAND) -> ExperimentHandle:
        """Record the experiment, hand its remaining runs to a background process, and return at once."""
        with self.open(command_line) as opened:
            opened.record()
            if opened.plan.left:
                opened.hand_over()
            return opened.handle


class OpenExperiment(Struct, frozen=True):
    """An experiment whose queue this process is."""

    workspace: Workspace
    plan: Plan
    held: QueueLease
    command_line: tuple[str, ...] = API_COMMAND

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.plan.experiment.name

    @property
    def handle(self) -> ExperimentHandle:
        """The experiment as it is recorded."""
        return ExperimentHandle(self.workspace, self.plan.experiment)

    @property
    def runs(self) -> list[RunHandle]:
        """All requested runs in order, including finished ones."""
        return [self._handle_of(run) for run in self.plan.runs]

    @property
    def left(self) -> list[RunHandle]:
        """The runs to start or to follow, in their order."""
        return [self._handle_of(run) for run in self.plan.left]

    def _handle_of(self, run: Run) -> RunHandle:
        return RunHandle(self.workspace, self.workspace.store.find_run(run.id) or RunRow(run, RunState.QUEUED, None))

    def record(self) -> None:
        """Record the experiment with its new runs, all of it or nothing. Raises UsageError for a name that is taken, or
        for a run whose packages are missing here."""
        for run in self.plan.left:
            if run.spec.runs_task_program:
                check_backend(run.spec, self.workspace.store.cluster)
        experiment = self.plan.experiment
        repeats = max((repeat_of(run.name) for run in self.plan.runs), default=1)
        write = document_writer(self.command_line, experiment, repeats, self.workspace.notify)
        record(experiment, self.plan.new, self.workspace.store, write)

    @property
    def runs_here(self) -> bool:
        """Whether a remaining run is on this machine, so that Ctrl-C cancels it."""
        return any(run.spec.engine == "local" for run in self.plan.left)

    def start_run(self, run: RunHandle) -> None:
        """Hand a run to its engine. A rejected run stays recorded."""
        workspace = self.workspace
        engine = workspace.engine_of(run.run)
        supervise.start_member(run.run, engine, workspace.store)

    def hand_over(self) -> int:
        """Hand the remaining runs to a process that outlives this one. Returns its process ID."""
        return supervise.hand_over(self.plan.experiment, self.plan.left, self.workspace.store.folder, self.held)


def make_launch(
    workspace: Workspace,
    request: Request,
    candidates: Sequence[Candidate],
    document: Mapping[str, object] | None = None,
    *,
    require_goal: bool = False,
    new_cluster: Cluster | None = None,
) -> Launch:
    """The launch of `candidates`. An existing experiment is continued. `document` is what is recorded of the request;
    default: the request itself."""
    name = str(request.name)
    known = workspace.store.find_experiment(name)
    experiment = known or Experiment(id=os.urandom(6).hex(), name=name, created=now(), request={})
    recorded: JsonObject = dict(request_document(absolute_paths(request)) if document is None else document)
    experiment = replace(
        experiment,
        request=recorded,
        require_goal=require_goal or experiment.require_goal,
        parallel=request.parallel or experiment.parallel,
    )
    return Launch(workspace, request, tuple(candidates), experiment, known is not None, new_cluster)
