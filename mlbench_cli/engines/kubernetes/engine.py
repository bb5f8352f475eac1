"""The engine that runs on a Kubernetes cluster: one Indexed Job for each run, and what belongs to it.

All state is in the cluster or in the run's folder, not in this process, so any client with access can continue.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from mlbench_cli.engines.base import (
    Cursor,
    Fetched,
    FoundRun,
    LogLine,
    Submission,
    UnreadableRun,
    refuse_running,
    refuse_unfetched,
)
from mlbench_cli.engines.fetch import FetchError
from mlbench_cli.engines.follow import check_rank, follow_log
from mlbench_cli.engines.kubernetes.collector import LogCollector
from mlbench_cli.engines.kubernetes.ending import is_over, is_stopped, is_unreleased
from mlbench_cli.engines.kubernetes.fetch import acknowledge
from mlbench_cli.engines.kubernetes.follower import RunFollower
from mlbench_cli.engines.kubernetes.keeper import Keeper
from mlbench_cli.engines.kubernetes.logs import log_gap, position_file, read_position
from mlbench_cli.engines.kubernetes.manifests import (
    CREATED_ANNOTATION,
    FETCHED_ANNOTATION,
    ID_ANNOTATION,
    STOPPED_ANNOTATION,
    file_name,
    has_keeper,
    is_code,
    job_name,
    manifests,
    role_of,
    servers_name,
    spec_of,
)
from mlbench_cli.engines.kubernetes.observe import RunObserver, known_gaps, known_summaries
from mlbench_cli.engines.kubernetes.pods import MANAGED_LABEL, RUN_LABEL
from mlbench_cli.engines.kubernetes.results import Results, is_fetched
from mlbench_cli.engines.kubernetes.submit import check_version, complete, read_job, submit
from mlbench_cli.engines.kubernetes.workers import Pod, Summary, by_worker, has_ended, has_started, is_cut_off
from mlbench_cli.errors import CleanupError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api, ApiError, ObjectNotFound
from mlbench_cli.kube.claims import DataClaim, ensure_claim
from mlbench_cli.kube.objects import collection_path, object_path
from mlbench_cli.kube.watch import list_pods
from mlbench_cli.model.run import Ending, Finding, Observation, Phase, Run, WorkerState
from mlbench_cli.model.silence import Silence
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import remove_folder, write_atomically
from mlbench_cli.util.times import now

HEARTBEAT = 1.0  # seconds between two observations while nothing changes
TICK = 0.25
REST = 15  # sleep this many times the duration of an observation, because a thousand pods always have news
FIRST_LIST_SECONDS = 30.0
WATCH_RETRY_SECONDS = 2.0  # for which a request of a watch is repeated before observations say so
QUICK_POLL = 2.0  # seconds between two looks at Job and events while workers are not yet running
SLOW_POLL = 10.0
GONE_SECONDS = 120.0  # time for deleted objects to disappear
OWNED = ("ConfigMap", "Service", "NetworkPolicy")


class KubernetesEngine:
    """Executes runs on the cluster that `access` reaches.

    `report` gets the sentences for a person who follows a log while the cluster is silent.
    """

    dies_with_client = False

    def __init__(self, access: Access, report: Callable[[str], None] | None = None) -> None:
        self._access = access
        self._report = report
        self._lock = threading.Lock()
        self._followings: dict[str, RunFollower] = {}

    def render(self, spec: RunSpec) -> Submission:
        """The suspended Job and its objects. `submit` adds the owner references to the Job."""
        return Submission(spec, manifests(spec, self._access.namespace))

    def submit(self, run: Run, submission: Submission, *, detach: bool = False) -> None:
        """Create the objects and release the Job; after an interruption, only what is missing."""
        save_manifests(run, submission)
        with self._access.client() as api:
            check_version(api)
            submit(api, submission.documents, {ID_ANNOTATION: run.id, CREATED_ANNOTATION: run.created})

    # --- look -----------------------------------------------------------------------------------------------------

    def resume(self, run: Run) -> None:
        """Release the run's Job if its client died before doing so."""
        with self._access.client() as api, suppress(ObjectNotFound):
            job = read_job(api, self._namespace(run), run.spec)
            if is_unreleased(job):
                complete(api, job, self.render(run.spec).documents)

    def look(self, run: Run) -> Observation:
        """The current state of the run, or its first observation with an end."""
        if (observation := RunFolder(run.folder).read_observation()) is not None:
            return observation
        with self._access.client() as api:
            return self._look(run, self._observer(api, run))

    def watch(self, run: Run) -> Generator[Observation, None, None]:
        """The first observation is one look; whoever continues follows the run, and copies its logs.

        A cluster that does not answer is waited for; observations say so. Raises what it answered last if it stays
        silent for longer than the user's limit.
        """
        silence = Silence()
        with self._access.client(retry_seconds=WATCH_RETRY_SECONDS) as api:
            observer = self._observer(api, run)
            while (observation := self._first_look(run, observer, silence)) is None:
                yield _unknown(run, silence)
                time.sleep(silence.pause())
            yield observation
            if observation.ended:
                return
            with self._following(run) as following:
                yield from self._yield_observations(run, api, observer, following, silence, observation)

    def _look(self, run: Run, observer: RunObserver) -> Observation:
        pods = observer.pods()
        observer.refresh(pods)
        summaries = known_summaries(run, _ranks(run))
        gaps = known_gaps(run, _ranks(run))
        return self._observe(run, observer, pods, summaries | observer.probe(pods, summaries), gaps)

    def _first_look(self, run: Run, observer: RunObserver, silence: Silence) -> Observation | None:
        """As `look`; None if the cluster does not answer now."""
        if (observation := RunFolder(run.folder).read_observation()) is not None:
            return observation
        begun = time.monotonic()
        try:
            observation = self._look(run, observer)
        except ApiError as error:
            silence.bear(error, begun)
            return None
        silence.end()
        return observation

    def _yield_observations(
        self,
        run: Run,
        api: Api,
        observer: RunObserver,
        following: RunFollower,
        silence: Silence,
        seen: Observation,
    ) -> Iterator[Observation]:
        """Observations as something changes. The number of requests does not depend on that of the pods."""
        probed: dict[int, Summary] = {}
        spoken, next_poll, last = float("-inf"), 0.0, (-1, -1)
        listed_by = time.monotonic() + FIRST_LIST_SECONDS
        while True:
            version, pods = following.watch.version, following.pods()
            begun = time.monotonic()
            may_observe = version > 0 or begun >= listed_by  # until then, nobody knows whether there are pods
            try:
                if begun >= next_poll:
                    observer.refresh(pods)
                    probed |= observer.probe(pods, following.summaries() | probed)
                    next_poll = time.monotonic() + (SLOW_POLL if _all_run(run, pods) else QUICK_POLL)
                    silence.end()
                summaries = probed | following.summaries()
                is_news = last != (version, len(summaries)) or time.monotonic() >= spoken + HEARTBEAT
                if silence.is_broken and may_observe and is_news:
                    last, spoken, used = (version, len(summaries)), time.monotonic(), time.thread_time()
                    gaps = log_gap(following.collector.gaps, _ranks(run), refusals=following.collector.refusals)
                    seen = self._observe(run, observer, pods, summaries, gaps)
                    if seen.ended:
                        observer.refresh(pods)  # the Job may have newer information
                        seen = self._observe(run, observer, pods, summaries, gaps)
                    if seen.ended:
                        yield seen
                        return
                    used = time.thread_time() - used
                    yield seen
                    time.sleep(REST * used)
            except ApiError as error:
                silence.bear(error, begun)
                next_poll = time.monotonic() + silence.pause()
            if not silence.is_broken and time.monotonic() >= spoken + HEARTBEAT:
                spoken = time.monotonic()
                yield silence.observe(seen)
            following.watch.wait(version, TICK)

    def _observe(
        self,
        run: Run,
        observer: RunObserver,
        pods: Mapping[int, Pod],
        summaries: Mapping[int, Summary],
        gaps: Sequence[Finding],
    ) -> Observation:
        seen = observer.observation(pods, summaries)
        seen = replace(seen, findings=(*seen.findings, *gaps))
        return seen if observer.job is not None else _without_job(run, seen)

    def logs(self, run: Run, rank: int, since: Cursor | None = None, follow: bool = False) -> Iterator[LogLine]:
        """As the protocol says. The processes of one worker share a log, which is that of the first of them."""
        check_rank(run, rank)
        worker = run.spec.unit_of(rank)
        if rank != run.spec.ranks_of(worker)[0]:
            return
        if not follow:
            whole = self._catch_up(run, worker)
            yield from follow_log(run, rank, since, lambda: whole)
            return
        with self._following(run) as following:
            copied = partial(following.collector.complete, worker)
            yield from follow_log(run, rank, since, copied, lambda: following.wait(TICK, self._report))

    def _catch_up(self, run: Run, worker: int) -> bool:
        """Update the copy of a log, unless it is already being followed. True if the log is complete."""
        with self._lock:
            following = self._followings.get(run.id)
        if following is not None:
            return following.collector.complete(worker)
        position = read_position(position_file(run.folder, _ranks(run)[worker]))
        if position is not None and position.complete:
            return True
        with self._access.client() as api:
            pods = by_worker(list_pods(api, self._namespace(run), f"{RUN_LABEL}={run.name}"))
        collector = LogCollector(
            self._access, self._namespace(run), run.folder, _ranks(run), lambda: pods, lambda: False
        )
        try:
            collector.sweep([worker])
            return collector.complete(worker)
        finally:
            collector.close()

    def log_gaps(self, run: Run) -> tuple[Finding, ...]:
        """One finding for each rank of which the kubelet had dropped lines before they were copied."""
        return tuple(known_gaps(run, _ranks(run)))

    # --- end ------------------------------------------------------------------------------------------------------

    def fetch(self, run: Run) -> Fetched:
        """Output and logs into the run's folder; the held workers are let go when all is on disk.

        `complete` is False if a worker that held its output is gone: then the logs are all there is.
        """
        save_manifests(run, self.render(run.spec))
        seen = RunFolder(run.folder).read_observation()
        word = seen.ended if seen and seen.ended else "cancelled"
        with self._access.client() as api, self._following(run) as following:
            stop = partial(self._stop, api, run, word)
            keeper = self._keeper(api, run)
            return Results(self._access, api, self._namespace(run), run, following, keeper, stop).fetch()

    def kept_until(self, run: Run) -> float | None:
        """Until when the cluster keeps the results of an ended run, in seconds since 1970; None if it has none."""
        with self._access.client() as api:
            keeper = self._keeper(api, run)
            results = keeper.read(patience=0) if keeper else None
        return results.until if results else None

    def ensure_claim(self, name: str, size: str, storage_class: str | None, mode: str | None) -> DataClaim:
        """The claim for data sets of that name, made if there is none. Raises UsageError, ApiError."""
        with self._access.client() as api:
            return ensure_claim(api, self._access.namespace, name, size, storage_class, mode)

    def discover(self, namespace: str | None = None) -> list[FoundRun | UnreadableRun]:
        """All runs in the namespace, oldest first, whoever started them."""
        return discover_runs(self._access, namespace)

    def cancel(self, run: Run) -> None:
        """Stop the workers gracefully: each has time to pack its results, which can then be fetched."""
        with self._access.client() as api:
            self._stop(api, run, "cancelled")

    def _stop(self, api: Api, run: Run, word: str) -> None:
        """Let the Job controller stop all workers. `word`: the ending, recorded on the Job so that every client reports
        the same end.
        """
        stop = {"activeDeadlineSeconds": 1} if run.spec.kubernetes.queue else {"suspend": True}
        path = object_path("Job", self._namespace(run), job_name(run.spec))
        with suppress(ObjectNotFound):
            job = api.get(path)
            if not is_over(job) and not is_stopped(job):
                api.patch(path, {"metadata": {"annotations": {STOPPED_ANNOTATION: f"{word} {now()}"}}, "spec": stop})
        if run.spec.servers:
            path = object_path("Job", self._namespace(run), servers_name(run.spec))
            with suppress(ObjectNotFound):
                if not is_over(api.get(path)):
                    api.patch(path, {"spec": stop})

    def delete(self, run: Run, *, force: bool = False) -> None:
        """Remove the run's objects, verified by their label, and its folder.

        Raises UsageError for a running run or one whose results nobody has fetched, unless `force`; CleanupError where
        something stays.
        """
        namespace = self._namespace(run)
        with self._access.client() as api:
            try:
                job = read_job(api, namespace, run.spec)
            except ObjectNotFound:
                job = None
            if job is not None and job["metadata"].get("labels", {}).get(RUN_LABEL) != run.name:
                raise UsageError(f'The Job "{run.name}" is not mlbench\'s; it is not touched.')
            if job is not None and not force:
                _refuse_loss(run, job)
            self._let_go(api, namespace, run)
            _remove(api, namespace, run.spec)
        remove_folder(run.folder)

    def _let_go(self, api: Api, namespace: str, run: Run) -> None:
        """End a hold, which would otherwise last for a stopped worker's grace period, and stop the others at once."""
        for pod in list_pods(api, namespace, f"{RUN_LABEL}={run.name}"):
            name = pod["metadata"]["name"]
            if is_cut_off(pod):
                api.delete(object_path("Pod", namespace, name), grace=0)  # its node will not say that it has ended
            elif "deletionTimestamp" not in pod["metadata"]:
                api.delete(object_path("Pod", namespace, name), grace=1)
            elif has_started(pod) and not has_ended(pod):
                with suppress(ApiError, FetchError):
                    acknowledge(self._access, namespace, name)

    # --- plumbing -------------------------------------------------------------------------------------------------

    def _observer(self, api: Api, run: Run) -> RunObserver:
        return RunObserver(api, self._namespace(run), run, _ranks(run), self._keeper(api, run))

    def _keeper(self, api: Api, run: Run) -> Keeper | None:
        if not has_keeper(run.spec):
            return None
        seen = RunFolder(run.folder).read_observation()
        is_lost = seen is not None and any(worker.phase == Phase.LOST for worker in seen.workers)
        return Keeper(self._access, api, self._namespace(run), run.name, is_lost=is_lost)

    def _namespace(self, run: Run) -> str:
        return run.spec.kubernetes.namespace or self._access.namespace

    @contextmanager
    def _following(self, run: Run) -> Iterator[RunFollower]:
        with self._lock:
            following = self._followings.get(run.id)
            if following is None:
                following = RunFollower(self._access, self._namespace(run), run, _ranks(run))
                self._followings[run.id] = following
            following.users += 1
        try:
            yield following
        finally:
            with self._lock:
                following.users -= 1
                last = following.users == 0
                if last:
                    del self._followings[run.id]
            if last:
                following.close()


def discover_runs(access: Access, namespace: str | None = None) -> list[FoundRun | UnreadableRun]:
    """All runs in the namespace, oldest first, from what their Jobs say."""
    with access.client() as api:
        return [_found_run(job) for job in _run_jobs(api, namespace or access.namespace)]


def _run_jobs(api: Api, namespace: str) -> list[dict[str, Any]]:
    """The Jobs of runs, without those of their keepers and parameter servers, oldest first."""
    jobs = api.get(collection_path("Job", namespace), labelSelector=f"{MANAGED_LABEL}=mlbench").get("items", [])
    runs = [job for job in jobs if role_of(job) is None]
    return sorted(runs, key=lambda job: str(job["metadata"].get("creationTimestamp")))


def _found_run(job: dict[str, Any]) -> FoundRun | UnreadableRun:
    metadata = job["metadata"]
    annotations = metadata.get("annotations") or {}
    try:
        spec = spec_of(job)
    except UsageError as error:
        return UnreadableRun(str(metadata["name"]), error.message)
    created = annotations.get(CREATED_ANNOTATION) or str(metadata.get("creationTimestamp"))
    # Applied by hand or by an older version: an id derived from facts, the same on every machine.
    made = hashlib.sha256(str(metadata.get("uid")).encode()).hexdigest()[:12]
    return FoundRun(annotations.get(ID_ANNOTATION) or made, created, spec, FETCHED_ANNOTATION in annotations)


def save_manifests(run: Run, submission: Submission) -> None:
    """manifests/KIND.yaml in the run's folder, as submitted. Of the task's code only the digest is kept, in the Job."""
    import templates

    folder = run.folder / "manifests"
    folder.mkdir(parents=True, exist_ok=True)
    for document in submission.documents:
        if is_code(document):
            continue
        write_atomically(folder / file_name(document), templates.dump([document]).encode())


def _ranks(run: Run) -> list[int]:
    """The first rank of each worker, which names its log and its output; then the parameter servers."""
    return [run.spec.ranks_of(unit)[0] for unit in range(run.spec.unit_count)]


def _all_run(run: Run, pods: Mapping[int, Pod]) -> bool:
    return len(pods) == run.spec.unit_count and all(pod["status"].get("phase") == "Running" for pod in pods.values())


def _unknown(run: Run, silence: Silence) -> Observation:
    """The observation of a run whose cluster has not answered yet."""
    return silence.observe(Observation(time.time(), tuple(WorkerState(rank) for rank in _ranks(run))))


def _without_job(run: Run, seen: Observation) -> Observation:
    """How a run ended whose Job is not there: never submitted, or deleted, or its time in the cluster was up."""
    if all(worker.exit_code == 0 for worker in seen.workers):
        return replace(seen, ended=Ending.EXITED)
    if not (run.folder / "manifests").exists():
        finding = Finding(
            "not_started",
            "The run's Job is not in the cluster: it was not submitted, or has been deleted.",
            hint="Start it again.",
            retryable=True,
        )
        return replace(seen, ended=Ending.NEVER_STARTED, findings=(finding,))
    finding = Finding("job_gone", "The run's Job is not in the cluster: it was deleted or has expired.")
    return replace(seen, ended=Ending.LOST, findings=(*seen.findings, finding))


def _refuse_loss(run: Run, job: dict[str, Any]) -> None:
    if not is_over(job) and not is_stopped(job) and not is_fetched(run):
        raise refuse_running(run)
    annotations = job["metadata"].get("annotations") or {}
    if FETCHED_ANNOTATION not in annotations and not is_fetched(run) and job.get("status", {}).get("startTime"):
        raise refuse_unfetched(run)


def _remove(api: Api, namespace: str, spec: RunSpec) -> None:
    """Delete everything with the run's label, and wait until it is gone."""
    name = spec.name
    selector = f"{RUN_LABEL}={name}"
    end = time.monotonic() + GONE_SECONDS
    api.delete(object_path("Job", namespace, name))
    while True:
        left = {kind: _names(api, kind, namespace, selector) for kind in ("Job", "Pod", *OWNED)}
        if not any(left.values()):
            return
        if time.monotonic() > end:
            listed = ", ".join(f"{kind} {item}" for kind, items in left.items() for item in items)
            raise CleanupError(
                f'These objects of the run "{name}" still exist: {listed[:500]}', hint=f"mlbench delete {name}"
            )
        for kind, items in left.items():
            for item in items:
                api.delete(object_path(kind, namespace, item), grace=1 if kind == "Pod" else None)
        time.sleep(TICK)


def _names(api: Api, kind: str, namespace: str, selector: str) -> list[str]:
    items = api.get(collection_path(kind, namespace), labelSelector=selector).get("items", [])
    return [item["metadata"]["name"] for item in items]
