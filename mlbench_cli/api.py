"""The public Python API: what the commands do, as objects.

    from mlbench_cli.api import Client, open_archive

    client = Client()
    experiment = client.run("demo", [1, 2], task="digits_resnet", preset="tiny")
    for run in experiment.runs():
        run.wait()
        table = run.metrics(["val_global_Prec@1"])
        print(run.name, run.outcome, table[-1].value)

Names without an underscore in this module follow semantic versioning. Errors are those of `mlbench_cli.errors`, whose
tree is the table of exit codes. Nothing is printed. `to_pandas`, `to_polars` and `to_arrow` need these libraries;
without them everything is a dataclass of plain values. A client may be used by one thread; make one per thread.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_cli.archives import compare, judge, metrics_of, open_archive, report, resources_of, series
from mlbench_cli.errors import DeadlineError, NotFoundError, UsageError
from mlbench_cli.model import Cluster, Experiment, ExperimentState, JsonObject, Outcome, Run, RunRow, RunState
from mlbench_cli.results.analysis.tables import MetricPoint, MetricTable, ResourceTable
from mlbench_cli.run_folder import METRICS, RESOURCES, RUN, RunFolder
from mlbench_cli.store import Store

if TYPE_CHECKING:
    from mlbench_cli.engines.base import Engine
    from mlbench_cli.goals import Goal
    from mlbench_cli.results.archive.reader import Archive
    from mlbench_cli.runs.experiment import Plan
    from mlbench_cli.runs.finished import FinishedRun
    from mlbench_cli.runs.log_reader import LogEntry
    from mlbench_cli.runs.progress import Progress
    from mlbench_cli.runs.snapshot import RunStatus

__all__ = [
    "Client",
    "ExperimentHandle",
    "MetricPoint",
    "MetricTable",
    "ResourceTable",
    "RunHandle",
    "compare",
    "judge",
    "metrics_of",
    "open_archive",
    "report",
    "resources_of",
    "series",
]

Notice = Callable[[str], None]


class Client:
    """The runs, experiments and clusters that this machine knows. `home` is the data folder; default: as the commands'.

    `notice` gets the sentences that the commands print on stderr.
    """

    def __init__(self, home: Path | None = None, *, notice: Notice | None = None) -> None:
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
        self.store = Store(home)
        self.notice = notice

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store. The client is not used after that."""
        self.store.close()

    @cached_property
    def engine_of(self) -> "Callable[[Run], Engine]":
        """A function from a run to the engine that executes it; one engine per cluster."""
        from mlbench_cli.runs.views import EngineCache

        return EngineCache(self.store, self.notice)

    # --- starting ---------------------------------------------------------------------------------------------------

    def run(
        self, name: str, workers: int | Sequence[int] = 1, *, require_goal: bool = False, **options: Any
    ) -> "ExperimentHandle":
        """Start an experiment and return at once: `mlbench run NAME WORKERS... --detach`.

        `options` are those of `mlbench run` with underscores: task, preset, command, backend, repeat, matrix, set, ...
        Interrupted and missing members of an experiment of that name are started; finished ones stay. Raises
        UsageError for options that contradict each other, and what the engine raises.
        """
        from mlbench_cli.runs.request import Request

        sizes = (workers,) if isinstance(workers, int) else tuple(workers)
        unknown = sorted(set(options) - set(Request.__dataclass_fields__))
        if unknown:
            raise UsageError(f"{unknown[0][:60]} is no option of a run.", hint="mlbench run --help")
        return self.submit(Request(name=name, workers=sizes, **options), require_goal=require_goal)

    def submit(
        self, request: Any, *, require_goal: bool = False, command_line: Sequence[str] = ("mlbench.api",)
    ) -> "ExperimentHandle":
        """Start what a `Request` asks for, detached; the experiment."""
        from mlbench_cli.runs import queue
        from mlbench_cli.runs.defaults import default_cluster, with_defaults
        from mlbench_cli.runs.experiment import absolute_paths, expand
        from mlbench_cli.runs.recording import record
        from mlbench_cli.runs.request import request_document
        from mlbench_cli.runs.start import document_writer, plan_experiment
        from mlbench_cli.runs.views import EngineCache
        from mlbench_cli.times import now

        cluster: Cluster = self.store.cluster(request.cluster) if request.cluster else default_cluster(self.store)
        request = with_defaults(request, cluster)
        candidates = expand(request, cluster, find_cluster=self.store.cluster, with_defaults=with_defaults)
        engines = EngineCache(self.store, self.notice)
        for candidate in candidates:
            # Refuses what cannot be submitted before anything is recorded.
            engines.of_cluster(candidate.spec.cluster).render(candidate.spec)
        known = self.store.find_experiment(request.name)
        experiment = Experiment(
            id=known.id if known else os.urandom(6).hex(),
            name=request.name,
            created=known.created if known else now(),
            request=request_document(absolute_paths(request)),
            members=known.members if known else (),
            require_goal=require_goal or bool(known and known.require_goal),
            parallel=request.parallel or (known.parallel if known else 1),
        )
        with queue.hold(experiment, self.store) as held:
            plan: Plan = plan_experiment(experiment, candidates, self.store)
            record(plan.experiment, plan.new, self.store, document_writer(command_line))
            if plan.left:
                queue.start(plan.experiment, plan.left, self.store.folder, held)
        return ExperimentHandle(self, plan.experiment)

    # --- finding ----------------------------------------------------------------------------------------------------

    def runs(
        self,
        *,
        states: Collection[str] = (),
        tasks: Collection[str] = (),
        contains: str = "",
        limit: int | None = None,
        offset: int = 0,
    ) -> "list[RunHandle]":
        """The runs, newest first. `states` are states or outcomes as the store knows them; `contains` is a part of the
        name. `limit` and `offset` page through those that match."""
        from mlbench_cli.runs.select import Filter

        keep = Filter(tuple(states), tuple(tasks))
        moment = time.time()
        found = self.store.iterate_runs(contains=contains, words=keep.words)
        rows = (row for row in found if not keep or keep.keeps(row, moment))
        return [RunHandle(self, row) for row in islice(rows, offset, None if limit is None else offset + limit)]

    def find_run(self, name: str) -> "RunHandle":
        """The run of that name. Raises NotFoundError with the nearest name."""
        return RunHandle(self, self.store.run(name))

    def find_run_by_id(self, run_id: str) -> "RunHandle":
        """The run with that id. Raises NotFoundError."""
        row = self.store.find_run(run_id)
        if row is None:
            raise NotFoundError(f'There is no run with the id "{run_id[:60]}".', hint="mlbench status")
        return RunHandle(self, row)

    def experiments(self, *, limit: int | None = None) -> "list[ExperimentHandle]":
        """All experiments, or the newest `limit`, newest first."""
        found = self.store.experiments() if limit is None else self.store.newest_experiments(limit)
        return [ExperimentHandle(self, item) for item in reversed(found)]

    def find_experiment(self, name: str) -> "ExperimentHandle":
        """The experiment of that name. Raises NotFoundError."""
        found = self.store.find_experiment(name)
        if found is None:
            raise NotFoundError(f'There is no experiment "{name[:60]}".', hint="mlbench status")
        return ExperimentHandle(self, found)

    def clusters_of(self, archives: "Iterable[Archive]") -> list[Cluster]:
        """The records of the clusters that runs were on, also of removed ones; this machine and what is not known here
        are left out."""
        from mlbench_cli.clusters import find_record

        found = []
        for name in dict.fromkeys(str(archive.run["spec"]["cluster"]) for archive in archives):
            try:
                cluster = find_record(self.store, name)
            except (NotFoundError, UsageError):
                continue
            found += [] if cluster.provider == "local" else [cluster]
        return found

    def status(self, runs: "Sequence[RunHandle]") -> JsonObject:
        """The runs as they are now: the document of `mlbench status -o json`."""
        from mlbench_cli.runs.snapshot import read_states
        from mlbench_cli.runs.views import runs_document

        return runs_document(list(read_states([run.row for run in runs], self.engine_of)))


@dataclass(frozen=True)
class ExperimentHandle:
    """An experiment, and what can be asked of it."""

    client: Client
    experiment: Experiment

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.experiment.name

    def runs(self) -> "list[RunHandle]":
        """Its runs in their order; those that were deleted are left out."""
        from mlbench_cli.runs.select import members

        return [RunHandle(self.client, row) for row in members(self.client.store, self.experiment)]

    def status(self) -> JsonObject:
        """State, progress, time left and queue: an entry of "experiments" of `mlbench status NAME -o json`."""
        from mlbench_cli.runs.experiment_status import experiment_status
        from mlbench_cli.runs.snapshot import read_states

        client = self.client
        states: list[RunStatus] = list(read_states([run.row for run in self.runs()], client.engine_of))
        return experiment_status(self.experiment, states, client.store, client.engine_of).to_dict()

    @property
    def campaign(self) -> str | None:
        """Name of the campaign file whose command started its first run; None for an experiment of its own."""
        from mlbench_cli.runs.campaign import campaign_of

        for run in self.runs()[:1]:
            document = RunFolder(run.folder).read_json(RUN) or {}
            return campaign_of((document.get("provenance") or {}).get("command_line") or ())
        return None

    @property
    def state(self) -> ExperimentState:
        """How far the experiment is now."""
        return ExperimentState(self.status()["state"])

    def wait(self, timeout: float | None = None) -> "list[FinishedRun]":
        """Wait for all runs to end, at most `timeout` seconds (DeadlineError); as they ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        left: list[FinishedRun] = []
        for run in self.runs():
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            left.append(run.wait(seconds))
        return left

    def cancel(self) -> None:
        """Start nothing further, and stop the runs that are under way."""
        from mlbench_cli.runs import queue

        queue.stop(self.experiment, self.client.store.folder, "the API stopped it", self.client.notice)
        for run in self.runs():
            if run.is_started and not run.is_finished:
                run.cancel()

    def archives(self) -> "list[Archive]":
        """The verified archives of its finished runs."""
        return [run.archive() for run in self.runs() if run.is_sealed]


@dataclass(frozen=True)
class RunHandle:
    """A run, and what can be asked of it. `row` is what the store knew when the handle was made."""

    client: Client
    row: RunRow

    @property
    def run(self) -> Run:
        """The run as it was recorded."""
        return self.row.run

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run.name

    @property
    def folder(self) -> Path:
        """The archive, also while it is under construction."""
        return self.run.folder

    @property
    def is_sealed(self) -> bool:
        """Whether the folder is a complete archive."""
        return RunFolder(self.run.folder).is_sealed

    @property
    def finished(self) -> "FinishedRun | None":
        """How the run ended, as its archive has it; None as long as that is not complete."""
        from mlbench_cli.runs.finished import read_finished

        return read_finished(self.run)

    @property
    def is_finished(self) -> bool:
        """Whether the run is over and has its documents."""
        return self.finished is not None

    @property
    def goal(self) -> "Goal | None":
        """The goal that the run was asked to reach."""
        from mlbench_cli.runs.progress import find_goal

        return find_goal(self.run.spec)

    @property
    def is_started(self) -> bool:
        """Whether an engine has it; until then it waits in the queue of its experiment."""
        from mlbench_cli.queue_folder import read_queued

        note = read_queued(self.run.folder)
        return note is None or note.is_starting

    @property
    def outcome(self) -> Outcome | None:
        """What came of the run; None as long as it has not ended."""
        finished = self.finished
        return finished.outcome if finished else self.row.outcome

    @property
    def is_running(self) -> bool:
        """Whether the store has the run as running now and it has no documents yet."""
        row = self.client.store.find_run(self.run.id)
        return row is not None and row.state is RunState.RUNNING and not self.is_finished

    def describe(self) -> JsonObject:
        """What the store knew when the handle was made, without a look at the run's folder or cluster."""
        from mlbench_cli.runs.snapshot import describe_run

        return describe_run(self.row)

    def _repr_html_(self) -> str:
        """Name, state and outcome, for notebooks."""
        from mlbench_cli.results.report.display import display_table

        known = self.describe()
        names = ("name", "task", "workers", "backend", "cluster", "state", "outcome", "created")
        return display_table(names, [[known[name] for name in names]])

    def status(self) -> JsonObject:
        """The document of `mlbench status NAME -o json`."""
        from mlbench_cli.runs.views import run_details

        row = self.client.store.find_run(self.run.id) or self.row
        return run_details(row, self.client.engine_of)

    # --- following --------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> "FinishedRun":
        """Wait until the run has ended, at most `timeout` seconds (DeadlineError), and complete its archive."""
        from mlbench_cli.runs import supervise

        client = self.client
        return supervise.follow(
            self.run, client.engine_of(self.run), client.store, timeout=timeout, notice=client.notice
        )

    def follow(self, poll: float = 1.0) -> "Iterator[Progress]":
        """How far the run is, about every `poll` seconds, until it has ended. Changes nothing."""
        from mlbench_cli.runs.progress import EventReader, ProgressTracker
        from mlbench_cli.times import parse_timestamp

        engine = self.client.engine_of(self.run)
        reader, tracker = EventReader(engine, self.run), ProgressTracker.of(self.run.spec)
        while True:
            observation = engine.look(self.run)
            for event in reader.poll():
                tracker.take(event)
            yield tracker.progress(observation, parse_timestamp(self.run.created))
            if observation.ended:
                return
            time.sleep(poll)

    def cancel(self) -> "FinishedRun":
        """Stop the run and keep what it has left. Raises DeadlineError if it does not end in time."""
        from mlbench_cli.runs import supervise

        client = self.client
        finished = supervise.cancel(self.run, client.engine_of(self.run), client.store, notice=client.notice)
        if finished is None:
            raise DeadlineError(
                f'The run "{self.name}" is being stopped, but has not ended yet.', hint=f"mlbench wait {self.name}"
            )
        return finished

    def delete(self, *, force: bool = False) -> None:
        """Remove the run and its results. `force` stops it if it is running."""
        from mlbench_cli.runs.removal import delete_run

        delete_run(self.run, self.client.store, force=force, notice=self.client.notice)

    # --- reading ----------------------------------------------------------------------------------------------------

    def metrics(
        self,
        names: Collection[str] | None = None,
        *,
        since: float | None = None,
        last: int | None = None,
        summarize: int | None = None,
        ranks: Collection[int] | None = None,
    ) -> MetricTable:
        """What the ranks have reported so far, in the order of time.

        `names` are exact; default: all. `since` is in seconds since 1970. `summarize` N means at most N points of each
        name and rank: means of groups of equal size, dated by their first (an incomplete last group is left out, as the
        original's API did). `last` N: the last N of each name and rank, after summarizing. 0 means no limit for both.
        """
        table = MetricTable(self._metric_points(ranks))
        return table.select(names, since=since, summarize=summarize, last=last)

    def _metric_points(self, ranks: Collection[int] | None) -> Iterator[MetricPoint]:
        from mlbench_cli.results.archive.events import parse_metric
        from mlbench_cli.runs.progress import EventReader

        workers = self.run.spec.workers
        if self.is_sealed:
            rows: Iterable[Mapping[str, Any]] = self._rows(METRICS)
        else:
            reader = EventReader(self.client.engine_of(self.run), self.run, range(self.run.spec.world_size))
            events = (event for event in reader.poll() if event["event"] == "metric")
            rows = (metric for event in events if (metric := parse_metric(event)))
        points = (MetricPoint.parse(self.name, workers, row) for row in rows)
        return (point for point in points if point is not None and (ranks is None or point.rank in ranks))

    def resources(self) -> ResourceTable:
        """The samples of CPU, memory and traffic of every rank, in the order of time."""
        if self.is_sealed:
            return ResourceTable.parse(self.name, self._rows(RESOURCES))
        from mlbench_cli.results.archive.evidence import read_samples

        return ResourceTable.parse(self.name, read_samples(self.run.folder / RESOURCES))

    def latest_samples(self) -> ResourceTable:
        """The last samples of the ranks, as far as the end of their file has them: cheap for a run of any length."""
        from mlbench_cli.results.archive.evidence import read_last_samples

        return ResourceTable.parse(self.name, read_last_samples(self.run.folder / RESOURCES))

    def _rows(self, name: str) -> Iterator[JsonObject]:
        """The lines of a file of the complete archive."""
        from mlbench_cli.results.archive.reader import Archive

        with Archive.open(self.run.folder) as archive:
            yield from archive.rows(name)

    def logs(
        self, rank: int | None = None, *, since: float | None = None, tail: int | None = None, raw: bool = False
    ) -> "Iterator[LogEntry]":
        """The lines of one rank, or of all ranks merged by time, as they are now; without events unless `raw`.

        Raises NotFoundError for a rank that the run does not have.
        """
        from mlbench_cli.runs.log_reader import LogReader, select_entries

        size = self.run.spec.world_size
        if rank is not None and not 0 <= rank < size:
            raise NotFoundError(f'The run "{self.name}" has no rank {rank}, only 0 to {size - 1}.')
        engine = None if self.is_sealed else self.client.engine_of(self.run)
        reader = LogReader(self.run, engine, range(size) if rank is None else [rank])
        yield from select_entries(reader.read_blocks(), raw=raw, since=since, tail=tail)

    def archive(self, *, verify: bool = True) -> "Archive":
        """The run's archive. Raises UsageError as long as it is not complete."""
        if not self.is_sealed:
            raise UsageError(f'The run "{self.name}" has no results yet.', hint=f"mlbench wait {self.name}")
        return open_archive(self.run.folder, verify=verify)

    def download(self, target: Path) -> Path:
        """Write the archive as a zip: the same archive gives the same bytes."""
        from mlbench_cli.results.archive.pack import pack

        if not self.is_sealed:
            raise UsageError(f'The run "{self.name}" has no results yet.', hint=f"mlbench wait {self.name}")
        pack(self.run.folder, target)
        return target
