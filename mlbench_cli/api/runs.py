"""A run: its progress, metrics, logs and archive."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mlbench_cli.config.extras import load_library
from mlbench_cli.engines.base import LOG_GAP
from mlbench_cli.engines.follow import LogEntry, LogReader
from mlbench_cli.errors import CleanupError, DamagedArchive, DeadlineError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.goals import Goal
from mlbench_cli.model.methods import method_phrase
from mlbench_cli.model.run import Experiment, FindingDocument, JsonObject, Outcome, Phase, Run, RunRow, RunState
from mlbench_cli.results.analysis.figures import IN_DOUBT, figures, outcome_of
from mlbench_cli.results.analysis.tables import SETTINGS, MetricPoint, MetricTable, ResourceTable
from mlbench_cli.results.archive.evidence import find_events, parse_metric, read_last_samples, read_samples
from mlbench_cli.results.archive.files import Archive, pack
from mlbench_cli.results.archive.reseal import seal_partial
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.runs import supervise
from mlbench_cli.runs.connect import Workspace
from mlbench_cli.runs.finalize import FinishedRun, finalize, read_finished
from mlbench_cli.runs.progress import Progress, ProgressReader, ProgressTracker, find_goal
from mlbench_cli.runs.removal import delete_run
from mlbench_cli.runs.snapshot import describe_run
from mlbench_cli.runs.supervise import Report, is_waiting
from mlbench_cli.runs.views import run_details
from mlbench_cli.storage.run_folder import METRICS, RESOURCES, RunFolder
from mlbench_cli.util.files import size_of
from mlbench_cli.util.text import counted
from mlbench_cli.util.times import parse_timestamp

if TYPE_CHECKING:  # types of an optional library
    import pandas

STACKS_SECONDS = 3.0  # after which a program that could not print its stacks yet is asked again


class RunHandle(Struct, frozen=True):
    """A handle to a run. `row` is the store's entry when the handle was created."""

    workspace: Workspace
    row: RunRow

    @property
    def run(self) -> Run:
        """The run as recorded."""
        return self.row.run

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run.name

    @property
    def folder(self) -> Path:
        """The archive folder, even if incomplete."""
        return self.run.folder

    @property
    def is_sealed(self) -> bool:
        """Whether the folder is a complete archive."""
        return RunFolder(self.run.folder).is_sealed

    @property
    def finished(self) -> FinishedRun | None:
        """How the run ended, from its archive; None until the archive is complete."""
        return read_finished(self.run)

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended and has its documents."""
        return self.finished is not None

    @property
    def experiment(self) -> Experiment | None:
        """The record of the experiment that it is a member of."""
        return self.workspace.store.find_experiment_of(self.run)

    @property
    def goal(self) -> Goal | None:
        """The goal that the run was asked to reach."""
        return find_goal(self.run.spec)

    @property
    def runs_here(self) -> bool:
        """Whether the run is on this machine, so that Ctrl-C cancels it."""
        return self.run.spec.engine == "local"

    @property
    def is_started(self) -> bool:
        """Whether an engine has the run; until then it waits in the queue of its experiment."""
        return self._waits_for is None

    @property
    def _waits_for(self) -> str | None:
        """The name of the experiment in whose queue the run waits; None once it is submitted."""
        row = self.workspace.store.find_run(self.run.id)
        return row.queue.name if row is not None and row.queue is not None and is_waiting(row) else None

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the run; None until it has ended."""
        finished = self.finished
        return finished.outcome if finished else self.row.outcome

    @property
    def is_running(self) -> bool:
        """Whether the store has the run as running now and it has no documents yet."""
        row = self.workspace.store.find_run(self.run.id)
        return row is not None and row.state is RunState.RUNNING and not self.is_finished

    def describe(self) -> JsonObject:
        """The store's entry when the handle was created; does not look at the run's folder or cluster."""
        return describe_run(self.row)

    def __repr__(self) -> str:
        """One line about the run: task, size, method, network, state, and its result if it has ended."""
        spec = self.run.spec
        words = [f"{spec.title}, {counted(spec.workers, 'worker')}"]
        words += [method_phrase(spec.method)] if spec.runs_task_program else []
        words += [spec.network] if spec.network else []
        words += ["functional only"] if spec.functional_only else []
        words += [str(self.row.outcome or self.row.state)]
        return f"<run {self.name}: {', '.join(words)}>"

    def status(self) -> JsonObject:
        """The document of `mlbench status NAME -o json`."""
        row = self.workspace.store.find_run(self.run.id) or self.row
        return run_details(row, self.workspace.engine_of)

    # --- following --------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, *, report: Report | None = None) -> FinishedRun:
        """Wait until the run has ended, at most `timeout` seconds (DeadlineError), and complete its archive.

        `report` is called at least once a second with how far it is.
        """
        workspace = self.workspace
        engine = workspace.engine_of(self.run)
        return supervise.follow(
            self.run, engine, workspace.store, timeout=timeout, report=report, notice=workspace.notice
        )

    def watch(self, report: Report) -> None:
        """Wait until the run has ended, without changing the run or its archive."""
        supervise.watch(self.run, self.workspace.engine_of(self.run), self.workspace.store, report)

    def await_start(self) -> None:
        """Wait until the queue of its experiment has started the run. Raises NeverStartedError if that has ended."""
        if not self.is_started:
            self.workspace.notify(f"{self.name} has not been started yet; waiting for its experiment.")
            supervise.await_start(self.run, self.workspace.store)

    def complete(self) -> FinishedRun:
        """Fetch remaining results and complete the archive of a run that has ended.

        Raises UsageError if it has not been started or has not ended, CleanupError if something cannot be fetched.
        """
        if (known := self.finished) is not None:
            return known
        if (experiment := self._waits_for) is not None:
            raise UsageError(f'The run "{self.name}" has not been started.', hint=f"mlbench wait {experiment}")
        workspace = self.workspace
        workspace.notify(f"Fetching and sealing the results of {self.name} ...")
        finished = finalize(self.run, workspace.engine_of(self.run), workspace.store, notice=workspace.notice)
        if finished is None:
            raise UsageError(
                f'The run "{self.name}" has not ended yet.',
                hint=f"mlbench wait {self.name}, mlbench cancel {self.name}, or mlbench download {self.name} --partial",
            )
        if finished.result is None:
            raise CleanupError(finished.findings[-1].summary, hint=finished.findings[-1].hint)
        return finished

    def follow(self, poll: float = 1.0) -> Iterator[Progress]:
        """Yield the progress about every `poll` seconds until the run has ended. Changes nothing. Raises
        NeverStartedError if the queue of its experiment has ended before it started the run."""
        for observation in supervise.observe_queued(self.run, self.workspace.store):
            yield ProgressTracker.of(self.run.spec).progress(observation, parse_timestamp(self.run.created))
            time.sleep(poll)
        engine = self.workspace.engine_of(self.run)
        reader = ProgressReader(engine, self.run, seconds=0.0)
        while True:
            observation = engine.look(self.run)
            yield reader.read(observation)
            if observation.ended:
                return
            time.sleep(poll)

    def stacks(self, timeout: float = 20.0) -> dict[int, str]:
        """The stacks of the threads of every rank, by rank; they are in its log, too.

        Raises UsageError for a run that does not run, and if no rank can print its stacks within `timeout` seconds.
        """
        if self.is_finished:
            raise UsageError(f'The run "{self.name}" has ended.', hint=f"mlbench logs {self.name}")
        engine, folder = self.workspace.engine_of(self.run), RunFolder(self.folder)
        ranks = [worker.rank for worker in engine.look(self.run).workers if worker.phase == Phase.RUNNING]
        if not ranks:
            raise UsageError(f'No rank of "{self.name}" is running.', hint=f"mlbench status {self.name}")
        before = {rank: size_of(folder.log(rank)) for rank in ranks}
        end, found, ask_at = time.monotonic() + timeout, dict[int, str](), 0.0
        while time.monotonic() < end and len(found) < len(ranks):
            if time.monotonic() >= ask_at:  # again: a program that has just started cannot answer yet
                engine.head(self.run).print_stacks()
                ask_at = time.monotonic() + STACKS_SECONDS
            time.sleep(0.5)
            engine.look(self.run)  # brings what the logs have gained elsewhere
            for rank, size in before.items():
                text = ""
                with suppress(FileNotFoundError), open(folder.log(rank), "rb") as file:  # it has printed nothing yet
                    file.seek(size)
                    text = file.read(1 << 20).decode("utf-8", "replace")
                _, *prints = text.split("--- mlbench: stacks")  # of each of its processes, perhaps more than once
                last = {words.partition("\n")[0]: words for words in prints if 'File "' in words}
                if last:
                    found[rank] = "".join(f"--- mlbench: stacks{words}" for words in last.values())
        if not found:
            raise UsageError(
                f'No rank of "{self.name}" could print its stacks: they run no Python, or are stopped.',
                hint="Install py-spy where the ranks run; it reads the stacks of any Python process.",
            )
        return found

    def cancel(self, timeout: float | None = None) -> FinishedRun:
        """Stop the run and keep partial results. `timeout`: seconds to wait for its end; default: 10.

        Raises UsageError for a run of a cluster that its experiment has not started, DeadlineError if it does not end
        in time.
        """
        if (known := self.finished) is not None:
            return known
        if (experiment := self._waits_for) is not None and self.run.spec.engine != "local":
            raise UsageError(
                f'The run "{self.name}" has not been started; its experiment decides when.',
                hint=f"mlbench cancel {experiment}, or: mlbench delete {self.name}",
            )
        workspace = self.workspace
        seconds = supervise.CANCEL_SECONDS if timeout is None else timeout
        workspace.notify(f"Stopping {self.name}; waiting up to {seconds:g} s for it to end.")
        engine = workspace.engine_of(self.run)
        finished = supervise.cancel(self.run, engine, workspace.store, seconds=seconds, notice=workspace.notice)
        if finished is None:
            raise DeadlineError(
                f'The run "{self.name}" is being stopped, but has not ended yet.', hint=f"mlbench wait {self.name}"
            )
        return finished

    def delete(self, *, force: bool = False, warn: Callable[[str], None] = lambda text: None) -> None:
        """Remove the run and its results. `force` stops it if it is running; `warn` gets what could not be removed."""
        delete_run(self.run, self.workspace.store, force=force, notice=self.workspace.notice, warn=warn)

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
        """The metrics reported so far, in chronological order.

        `names` are exact; default: all. `since` is in seconds since 1970. `summarize` N means at most N points of each
        name and rank: means of groups of equal size, dated by their first (an incomplete last group is left out, as the
        original's API did). `last` N: the last N of each name and rank, after summarizing. 0 means no limit for both.
        """
        facts = self.describe()
        settings = {name: facts[name] or ("" if name != "seed" else 0) for name in SETTINGS}
        table = MetricTable(self._metric_points(ranks), {self.name: settings})
        return table.select(names, since=since, summarize=summarize, last=last)

    def _metric_points(self, ranks: Collection[int] | None) -> Iterator[MetricPoint]:
        workers = self.run.spec.workers
        if self.is_sealed:
            rows: Iterable[Mapping[str, Any]] = self._rows(METRICS)
        else:
            rows = self._reported_metrics()
        points = (MetricPoint.parse(self.name, workers, row) for row in rows)
        return (point for point in points if point is not None and (ranks is None or point.rank in ranks))

    def _reported_metrics(self) -> Iterator[Mapping[str, Any]]:
        """The metrics in the logs so far; without those of a log that cannot be read now."""
        log = self.open_log()
        for rank in range(self.run.spec.world_size):
            with suppress(MlbenchError):
                for event in (event for line in log.read_lines(rank) for event in find_events(line)):
                    if event["event"] == "metric" and (metric := parse_metric(event)):
                        yield metric

    def resources(self) -> ResourceTable:
        """Samples of CPU, memory and traffic of every rank, in chronological order."""
        if self.is_sealed:
            with Archive.open(self.run.folder) as archive:
                return ResourceTable.parse(self.name, archive.resources())
        return ResourceTable.parse(self.name, read_samples(self.run.folder / RESOURCES))

    def latest_samples(self) -> ResourceTable:
        """The last samples of the ranks, read from the end of the file: cheap for a run of any length."""
        return ResourceTable.parse(self.name, read_last_samples(self.run.folder / RESOURCES))

    def _rows(self, name: str) -> Iterator[JsonObject]:
        """The lines of a file of the complete archive."""
        with Archive.open(self.run.folder) as archive:
            yield from archive.rows(name)

    def logs(self, rank: int | None = None, *, tail: int | None = None, raw: bool = False) -> Iterator[LogEntry]:
        """The lines of one rank, or of all ranks one after the other, so far; without events unless `raw`.

        Raises NotFoundError for a rank that the run does not have.
        """
        yield from self.open_log(rank).read_entries(raw=raw, tail=tail)

    def open_log(self, rank: int | None = None) -> LogReader:
        """A reader of the lines of one rank, or of all ranks. Raises NotFoundError for an unknown rank."""
        size = self.run.spec.process_count
        if rank is not None and not 0 <= rank < size:
            raise NotFoundError(
                f'The run "{self.name}" has no rank {rank}, only 0 to {size - 1}.', hint=f"mlbench logs {self.name}"
            )
        # A complete archive is still available after the cluster is gone.
        engine = None if self.is_sealed else self.workspace.engine_of(self.run)
        return LogReader(self.run, engine, range(size) if rank is None else [rank], self.workspace.notice)

    def list_log_gaps(self) -> list[FindingDocument]:
        """The findings that lines of the log are missing, which the digests of the machines tell in the end."""
        if not self.is_sealed:
            return []
        with self.archive(verify=False) as archive:
            return [finding for finding in archive.findings if finding.get("code") == LOG_GAP]

    def figures(self) -> dict[str, float]:
        """The numbers of a run that has ended, by name, as in `mlbench compare`: times, throughput, cost, metrics.
        Empty without an archive that is complete and not in doubt."""
        with suppress(DamagedArchive, UsageError), self.archive(verify=False) as archive:
            if outcome_of(archive.result) != IN_DOUBT:
                return {name: found.value for name, found in figures(archive).items()}
        return {}

    def archive(self, *, verify: bool = True, unproven: bool = False) -> Archive:
        """The run's archive, as `open_archive` opens it. Raises UsageError as long as it is not complete."""
        return open_verified(self.results, unproven=unproven) if verify else Archive.open(self.results)

    def download(self, target: Path | str) -> Path:
        """Write the archive as a zip: the same archive gives the same bytes."""
        pack(self.results, Path(target))
        return Path(target)

    def download_partial(self, target: Path) -> Path:
        """Write a partial archive of a running run from the files on this machine; it is marked as partial.

        Raises UsageError if the run has not been started.
        """
        if self.finished is not None:
            return self.download(target)
        if not self.is_started:
            raise UsageError(f'The run "{self.name}" has not started yet.', hint=f"mlbench status {self.name}")
        observation = self.workspace.engine_of(self.run).look(self.run)
        if observation.ended is not None:
            self.complete()
            return self.download(target)
        if not any(worker.started for worker in observation.workers):
            raise UsageError(f'The run "{self.name}" has not started yet.', hint=f"mlbench status {self.name}")
        seal_partial(self.run, observation, target)
        return target

    @property
    def results(self) -> Path:
        """The folder of the complete archive. Raises UsageError as long as it is not complete."""
        if not self.is_sealed:
            raise UsageError(f'The run "{self.name}" has no results yet.', hint=f"mlbench wait {self.name}")
        return self.folder


class Runs(list[RunHandle]):
    """A list of runs."""

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per run: as in `mlbench status -o json`, then its figures. Raises UsageError without pandas."""
        rows = []
        for run in self:
            told = run.describe()
            rows.append(told | {name: value for name, value in run.figures().items() if name not in told})
        frame: pandas.DataFrame = load_library("pandas", "tables").DataFrame(rows)
        return frame
