"""The API client: finds, starts and follows the runs that this machine knows."""

import inspect
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.api.experiments import ExperimentHandle
from mlbench_cli.api.launches import API_COMMAND, Launch, make_launch
from mlbench_cli.api.repetition import AuthorsProgram, Place, refuse_program, repeat_archive, reproduce_archives
from mlbench_cli.api.runs import RunHandle, Runs
from mlbench_cli.api.sources import find_archives
from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.model.run import Cluster, JsonObject
from mlbench_cli.results.analysis.published import select_series
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.runs import launch as launches
from mlbench_cli.runs.connect import Workspace
from mlbench_cli.runs.defaults import default_cluster, with_defaults
from mlbench_cli.runs.discovery import Discovered, discover_runs, list_unknown_folders
from mlbench_cli.runs.experiment import expand, request_of
from mlbench_cli.runs.experiment_file import expand_file, find_file, parse_experiment_file, read_experiment_file
from mlbench_cli.runs.matrix import MAX_MEMBERS
from mlbench_cli.runs.questions import Questions, ask_questions, remember
from mlbench_cli.runs.request import (
    OPTIONS,
    Request,
    equivalent_command,
    matrix_of,
    merge,
    parse_mapping,
    request_document,
)
from mlbench_cli.runs.select import Filter, select
from mlbench_cli.runs.snapshot import RunStatus, read_states
from mlbench_cli.runs.views import runs_document
from mlbench_cli.util.text import counted


class Chosen(Struct, frozen=True):
    """The runs selected by names and filters, without duplicates, and the experiments that were named as a whole."""

    runs: tuple[RunHandle, ...]
    experiments: tuple[ExperimentHandle, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        return [run.name for run in self.runs]


class Client(Workspace):
    """The runs, experiments and clusters that this machine knows. `home` is the data folder; default: as the commands'.

    `notice` gets the sentences that the commands print on stderr.
    """

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<mlbench client of {self.store.folder}: {counted(self.count_runs(), 'run')}>"

    # --- starting ---------------------------------------------------------------------------------------------------

    def run(
        self, name: str, workers: int | Sequence[int] = 1, *, require_goal: bool = False, **options: Any
    ) -> ExperimentHandle:
        """Start an experiment and return at once: `mlbench run NAME WORKERS... --detach`.

        `options` are those of `mlbench run` with underscores: task, preset, command, backend, repeat, matrix, set, ...
        Interrupted and missing members of an experiment of that name are started; finished ones stay. Raises
        UsageError for options that contradict each other, and what the engine raises.
        """
        sizes = (workers,) if isinstance(workers, int) else tuple(workers)
        known = [*Request.__struct_fields__]
        unknown = sorted(set(options) - set(known))
        if unknown:
            word = unknown[0][:60]
            raise UsageError(
                f"{word} is not an option of a run.{did_you_mean(word, known)}", hint="mlbench run --help-all"
            )
        request = parse_mapping(request_document(Request(name=name, workers=sizes, **options)))  # checks the types
        return self.submit(request, require_goal=require_goal)

    def questions(self) -> Questions:
        """The questions of `mlbench run` and their possible answers, e.g. for a form."""
        taken = [row.run.name for row in self.store.iterate_runs()]
        return ask_questions(self.store.clusters(), default_cluster(self.store).name, taken)

    def remember(self, request: Request) -> None:
        """Remember the answers in a `Request` as defaults for later questions, as the wizard does."""
        if problem := remember(request):
            self.notify(problem)

    def plan(self, request: Request) -> JsonObject:
        """Describe what a `Request` would start, checked as far as possible without starting it: "runs" by name, and
        "command", the equivalent command line.
        """
        launch = self.prepare(request)
        launch.render()
        return {"runs": [spec.name for spec in launch.specs], "command": equivalent_command(launch.request)}

    def prepare(
        self,
        request: Request,
        *,
        require_goal: bool = False,
        most: int | None = None,
        new_cluster: Cluster | None = None,
    ) -> Launch:
        """The runs that a `Request` asks for, with its defaults; nothing is recorded or started.

        `new_cluster` is the one that its `create` describes, whether or not it exists yet. Raises UsageError or
        NotFoundError for runs that cannot work, and for more than `most` of them (default: what `mlbench run` starts
        without a question).
        """
        if request.create and new_cluster is None:
            problem = "A cluster is created only by a command that stays to delete it."
            raise UsageError(problem, hint=equivalent_command(request))
        request, cluster = self.complete(request, new_cluster)
        candidates = expand(
            request,
            cluster,
            find_cluster=self.store.cluster,
            with_defaults=with_defaults,
            most=MAX_MEMBERS if most is None else most,
        )
        return make_launch(self, request, candidates, require_goal=require_goal, new_cluster=new_cluster)

    def complete(self, request: Request, new_cluster: Cluster | None = None) -> tuple[Request, Cluster]:
        """Complete a request with defaults from the environment and the config file, and find its cluster.

        If the matrix names the clusters, the options of each point are completed later. Raises NotFoundError.
        """
        cluster = new_cluster or self.cluster(request.cluster)
        if matrix_of(request).keys() & {"cluster"}:
            return request, cluster
        request = with_defaults(request, cluster)
        if cluster.provider != "local" and request.cluster is None and not request.create:
            request = replace(request, cluster=cluster.name)
        return request, cluster

    def recall(self, request: Request) -> Request:
        """For a request that only names an experiment: the request of that experiment, with the changes of this one.

        Any other request is returned as it is.
        """
        if request.name is None or request.workers or request.task is not None or request.command is not None:
            return request
        experiment = self.store.find_experiment(request.name)
        return request if experiment is None else merge(request_of(experiment), request)

    def prepare_repetition(
        self,
        source: str,
        request: Request,
        *,
        require_goal: bool = False,
        signers: Path | None = None,
        agree: Callable[[AuthorsProgram], None] | None = None,
    ) -> Launch:
        """Repeat the run of an archive (folder, zip, or run name) exactly; `request` may only contain its name.

        Commands, images, mounts and permissions chosen by the archive's author are passed to `agree`, which raises to
        reject them. By default they are rejected, unless this machine started that run. `signers` is a file of allowed
        signers. Raises UsageError or NotFoundError with the reason if it cannot be repeated here exactly.
        """
        return repeat_archive(
            self, source, request, require_goal=require_goal, signers=signers, agree=agree or refuse_program
        )

    def prepare_reproduction(
        self,
        original: Sequence[Archive],
        *,
        name: str | None = None,
        repeats: int,
        cluster: str | None = None,
        data_dir: str | None = None,
        agree: Callable[[AuthorsProgram], None] | None = None,
    ) -> Launch:
        """Prepare `repeats` further runs of verified archives with new seeds. Nothing is started.

        They run on this machine, or on `cluster`; `data_dir` is where the data are there. `agree` is as for
        `prepare_repetition`. Judge them with `mlbench_cli.api.judge_reproduction`. Raises UsageError or NotFoundError
        if they cannot be repeated here.
        """
        return reproduce_archives(self, original, name, repeats, Place(cluster, data_dir), agree)

    def fetch_archive(self, url: str) -> Path:
        """Fetch the zip at `url` into the data folder; its path. Open it with `open_archive`, which verifies it."""
        from mlbench_cli.api.remote_archives import fetch_archive  # urllib and ssl take 10 ms

        return fetch_archive(url, self)

    def submit(
        self, request: Request, *, require_goal: bool = False, command_line: Sequence[str] = API_COMMAND
    ) -> ExperimentHandle:
        """Start what a `Request` asks for, detached; the experiment."""
        launch = self.prepare(request, require_goal=require_goal)
        launch.render()
        return launch.start(command_line)

    def prepare_file(
        self,
        file: str,
        *,
        clusters: Sequence[str] = (),
        most: int | None = None,
        only_list: bool = False,
    ) -> Launch:
        """The runs of an experiment file: its path, the name of a shipped one, or that of an experiment which a file
        described; nothing is recorded or started.

        Given options override those in the file. With `only_list`, runs for GPUs are listed on a machine without any,
        where they cannot be started. Raises UsageError that names file and key, NotFoundError.
        """
        known = self.store.find_experiment(file)
        if known is not None and "runs" in known.request and not Path(file).is_file():
            found = parse_experiment_file(dict(known.request), file)
        else:
            found = read_experiment_file(find_file(file))
        found = replace(found, clusters=tuple(clusters or found.clusters))
        select_series(found.published)
        chosen = [self.store.cluster(name) for name in found.clusters] or [default_cluster(self.store)]
        machine = launches.local_machine()
        if only_list and not machine.gpus:
            machine = replace(machine, gpus=launches.MAX_LOCAL_RANKS)
        limit = MAX_MEMBERS if most is None else most
        candidates = expand_file(found, chosen, machine, with_defaults=with_defaults, most=limit)
        return make_launch(self, replace(found.common, name=found.name), candidates, found.to_document())

    # --- finding ----------------------------------------------------------------------------------------------------

    def runs(
        self,
        *,
        states: Collection[str] = (),
        tasks: Collection[str] = (),
        contains: str = "",
        limit: int | None = None,
        offset: int = 0,
    ) -> Runs:
        """The runs, newest first. `states` are states or outcomes as the store knows them, `tasks` names, of which one
        may be given alone; `contains` is a part of the name. `limit` and `offset` page through those that match."""
        end = None if limit is None else offset + limit
        return Runs(islice(self.iterate_runs(states=states, tasks=tasks, contains=contains), offset, end))

    def iterate_runs(
        self,
        *,
        states: Collection[str] = (),
        tasks: Collection[str] = (),
        contains: str = "",
        shown_as: str | None = None,
    ) -> Iterator[RunHandle]:
        """The same as an iterator, which reads runs when they are needed.

        `shown_as` leaves out runs that `read_states` cannot show with that state or outcome: they ended with another.
        """
        one, other = ((words,) if isinstance(words, str) else tuple(words) for words in (states, tasks))
        keep = Filter(one, other)
        moment = time.time()
        words = keep.words if shown_as is None else {shown_as}
        found = self.store.iterate_runs(contains=contains, words=words, tasks=keep.tasks, live=shown_as is not None)
        return (RunHandle(self, row) for row in found if not keep or keep.keeps(row, moment))

    def count_runs(self) -> int:
        """The number of runs in the store."""
        return self.store.count_runs()

    def find_run(self, name: str) -> RunHandle:
        """The run of that name. Raises NotFoundError with the nearest name."""
        return RunHandle(self, self.store.run(name))

    def find_run_by_id(self, run_id: str) -> RunHandle:
        """The run with that id. Raises NotFoundError."""
        row = self.store.find_run(run_id)
        if row is None:
            raise NotFoundError(f'There is no run with the id "{run_id[:60]}".', hint="mlbench status")
        return RunHandle(self, row)

    def experiments(self, *, limit: int | None = None) -> list[ExperimentHandle]:
        """All experiments, or the newest `limit`, newest first."""
        found = self.store.experiments() if limit is None else self.store.newest_experiments(limit)
        return [ExperimentHandle(self, item) for item in reversed(found)]

    def find_experiment(self, name: str) -> ExperimentHandle:
        """The experiment of that name. Raises NotFoundError."""
        found = self.store.find_experiment(name)
        if found is None:
            raise NotFoundError(f'There is no experiment "{name[:60]}".', hint="mlbench status")
        return ExperimentHandle(self, found)

    def cluster(self, reference: str | None = None) -> Cluster:
        """The cluster that is called NAME or NAME@LOCATION; without a name the one that commands use by default.

        Raises NotFoundError with the nearest name, UsageError if the name is ambiguous.
        """
        return self.store.cluster(reference) if reference else default_cluster(self.store)

    def find_cluster(self, name: str) -> Cluster:
        """The record of a cluster, even a deleted one. Raises NotFoundError, or UsageError if the name is ambiguous."""
        return self.store.last_record(name)

    def clusters(self) -> list[Cluster]:
        """The clusters that this machine knows, including `local`."""
        return self.store.clusters()

    def select(
        self,
        names: Sequence[str] = (),
        *,
        all_runs: bool = False,
        filter: Filter | None = None,
        readable: bool = True,
        repeats: bool = False,
    ) -> Chosen:
        """The named runs (by run, experiment, or common name of repeats), or all of them, that pass a filter.

        With `repeats`, a run whose name stands for its repeats, too, means all of them. Raises NotFoundError with the
        nearest name; UsageError without names and filters and, with `readable`, for a run that a newer mlbench wrote.
        """
        rows, experiments = select(
            self.store, names, all_runs=all_runs, filter=filter, readable=readable, repeats=repeats
        )
        return Chosen(
            tuple(RunHandle(self, row) for row in rows),
            tuple(ExperimentHandle(self, experiment) for experiment in experiments),
        )

    def find_archives(self, words: Sequence[str] = ()) -> list[Path]:
        """The archives of named runs, experiments, folders and zips, each once; without names those of all runs.

        For experiments only runs that have ended count. Raises NotFoundError, or UsageError if none has.
        """
        return find_archives(words, self.store, self.notice)

    # --- how things stand -------------------------------------------------------------------------------------------

    def read_states(self, runs: Iterable[RunHandle]) -> Iterator[RunStatus]:
        """Yield the current state of each run. A run or cluster that does not answer affects only its own rows."""
        return read_states((run.row for run in runs), self.engine_of)

    def status(self, runs: Iterable[RunHandle], experiments: Sequence[ExperimentHandle] = ()) -> JsonObject:
        """The runs as they are now: the document of `mlbench status -o json`, with experiments if there are any."""
        states = list(self.read_states(runs))
        return runs_document(self.store, states, [experiment.read_status(states) for experiment in experiments])

    def list_unknown_folders(self) -> list[Path]:
        """The sealed folders in the data folder whose runs the store does not know."""
        return list_unknown_folders(self.store)

    def discover(self, cluster: str, namespace: str | None = None) -> list[Discovered]:
        """Record the runs of a cluster that another machine started, under the ids that they have there.

        "local" means the runs whose sealed folders the store does not know, e.g. because it was emptied. Raises
        NotFoundError for an unknown cluster.
        """
        return discover_runs(self.store.cluster(cluster), self.store, namespace, self.notice)


def _complete_options() -> None:
    """Let notebooks and other IPython shells complete the options of `Client.run`."""
    own = inspect.signature(Client.run)
    options = [
        inspect.Parameter(
            item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Request.__annotations__[item.name]
        )
        for item in OPTIONS
    ]
    fixed = [item for item in own.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    Client.run.__signature__ = own.replace(parameters=[*fixed, *options])  # type: ignore[attr-defined]


if "IPython" in sys.modules:
    _complete_options()
