"""Brings a run's results from its pods into its folder, and only then lets go of the pods."""

import json
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlbench_cli.engines import fetch
from mlbench_cli.engines.base import Fetched
from mlbench_cli.engines.fetch import FetchError
from mlbench_cli.engines.kubernetes.ending import active, will_be_stopped
from mlbench_cli.engines.kubernetes.fetch import (
    ARCHIVE,
    HeldArchive,
    acknowledge,
    download,
    parse_held_archive,
    read_summary,
    split_output,
)
from mlbench_cli.engines.kubernetes.follower import RunFollower
from mlbench_cli.engines.kubernetes.keeper import Keeper, KeptWorker, kept_file, why_gone
from mlbench_cli.engines.kubernetes.logs import log_gap, position_file, read_position, samples_file, times_file
from mlbench_cli.engines.kubernetes.manifests import FETCHED_ANNOTATION, GRACE_SECONDS, holders, job_name
from mlbench_cli.engines.kubernetes.workers import Pod, Summary, has_ended, has_started, last_words
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api, ApiError, NodeUnreachable, ObjectNotFound
from mlbench_cli.kube.objects import object_path
from mlbench_cli.model.run import Finding, Run
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import size_of, write_atomically
from mlbench_cli.util.times import now

MAX_PARALLEL_FETCHES = 4  # files fetched at the same time
LOG_SECONDS = GRACE_SECONDS + 30.0  # in which stopped workers have ended, and their logs are here
KEPT_LOG_SECONDS = 5.0  # for which a node is asked for a log that the keeper has, too
HANDOVER_RATE = 2 << 20  # bytes a second that a worker hands over, at least
FIRST_LIST_SECONDS = 60.0
LOOK_SECONDS = 0.3


@dataclass(frozen=True)
class Source:
    """Where a worker's archive is: a file of a pod. `what` is None if the worker has packed nothing."""

    pod: str
    path: str
    what: HeldArchive | None


class Results:
    """Fetches the results of one run. `keeper` is None if the run has none; `stop` stops workers that would wait."""

    def __init__(
        self,
        access: Access,
        api: Api,
        namespace: str,
        run: Run,
        following: RunFollower,
        keeper: Keeper | None,
        stop: Callable[[], None],
    ) -> None:
        self._access = access
        self._api = api
        self._namespace = namespace
        self._run = run
        self._following = following
        self._keeper = keeper
        self._stop = stop
        self._stopping = False
        self._findings: list[Finding] = []
        self._ranks = [run.spec.ranks_of(unit)[0] for unit in range(run.spec.unit_count)]
        self._state = run.folder / ".state"

    def fetch(self) -> Fetched:
        """Archives and what the keeper has of the logs, then let go of keeper and workers, then the other logs."""
        self._following.watch.wait(0, FIRST_LIST_SECONDS)
        self._stopping = self._stop_those_who_wait()
        with ThreadPoolExecutor(MAX_PARALLEL_FETCHES) as pool:
            brought = list(pool.map(self._bring, holders(self._run.spec)))
        self._take_kept_logs()
        self._release()
        late = self._wait_for_logs(LOG_SECONDS)
        self._write_resources()
        complete = all(item is not None for item in brought)
        found = [item for item in brought if item is not None]
        collector = self._following.collector
        gaps = log_gap(collector.gaps, self._ranks, late, collector.refusals)
        return Fetched(
            sum(files for files, _ in found), sum(size for _, size in found), complete, (*self._findings, *gaps)
        )

    def _stop_those_who_wait(self) -> bool:
        """Stop the workers that would run forever, if nobody else does. True if workers are being stopped."""
        pods, summaries = self._following.pods(), self._following.summaries()
        only_waiting = not self._run.spec.run_on_all and 0 in summaries  # they end when worker 0 is let go
        if only_waiting or not active(pods, summaries):
            return False
        if not will_be_stopped(pods, summaries):
            self._stop()
        return True

    # --- archives -------------------------------------------------------------------------------------------------

    def _bring(self, worker: int) -> tuple[int, int] | None:
        """Files and bytes of one worker's output, in the run's folder; None if it is lost."""
        if (known := fetch.read_fetched(self._fetched_file(worker))) is not None:
            return known
        for _ in range(2):  # a worker that held may hand over while it is being fetched from
            source = self._find_source(worker)
            if source is None or source.what is None:
                return self._missing(worker)
            part = self._state / f"output-{self._ranks[worker]}-{source.what.sha256[:16]}.tar"
            try:
                download(self._access, self._namespace, source.pod, source.what, part, source.path)
            except ApiError as error:
                if error.status not in (400, 404) and not isinstance(error, NodeUnreachable):
                    raise
                continue  # the container has ended, or its pod is being given up with its node
            return self._unpack(worker, part)
        return self._missing(worker)

    def _unpack(self, worker: int, part: Path) -> tuple[int, int]:
        split = partial(split_output, ranks=self._run.spec.ranks_of(worker))
        resources, marker = self._resources_file(worker), self._fetched_file(worker)
        return fetch.unpack(part, self._run.folder, split, resources, marker=marker, first=worker == 0)

    def _find_source(self, worker: int) -> Source | None:
        """Who has a worker's archive: the keeper, or the worker that holds it.

        A worker that is being stopped, or hands over, is waited for.
        """
        end = time.monotonic() + GRACE_SECONDS
        while True:
            pod, looked = self._following.pods().get(worker), time.monotonic()
            keeper = self._keeper.read(looked) if self._keeper else None
            if keeper and worker in keeper.workers:
                return self._kept_source(worker, pod, keeper.pod, keeper.workers[worker])
            if pod is None or has_ended(pod):
                return None
            summary = self._last_word(worker, pod)
            if summary is not None and not (keeper and _hands_over(summary, end)):
                return Source(pod["metadata"]["name"], ARCHIVE, parse_held_archive(summary))
            if summary is None and not self._following.collector.summary(worker):
                if not self._stopping or not has_started(pod) or time.monotonic() > end:
                    return None
            elif summary is None and time.monotonic() > end:
                return None  # it has spoken its last word, and cannot be reached
            time.sleep(LOOK_SECONDS)

    def _last_word(self, worker: int, pod: Pod) -> Summary | None:
        """From the worker's own file if there is a keeper, since only that says whether it still hands over."""
        known = None if self._keeper else self._following.collector.summary(worker)
        if known is not None:
            return known
        try:
            return read_summary(self._access, self._namespace, pod["metadata"]["name"])
        except ApiError:
            return None

    def _kept_source(self, worker: int, pod: Pod | None, keeper: str, kept: KeptWorker) -> Source | None:
        """The keeper's copy, if it is what the worker itself says that it packed."""
        own = self._following.collector.summary(worker) or (last_words({worker: pod}, {}).get(worker) if pod else None)
        said = parse_held_archive(own)
        if said is not None and said != kept.archive:
            self._findings.append(
                Finding(
                    "results_replaced",
                    f"The keeper's copy of the output of worker {worker} differs from what the worker packed, so "
                    "it was rejected.",
                    hint="Check who can reach the run's pods.",
                    evidence={"worker": worker, "packed": said.sha256, "kept": kept.archive and kept.archive.sha256},
                )
            )
            return None
        return Source(keeper, kept_file(worker, "archive.tar"), kept.archive)

    def _missing(self, worker: int) -> tuple[int, int] | None:
        """(0, 0) for a worker that never ran, None for one whose output is lost; then a finding says why."""
        if not self._has_run(worker):
            return 0, 0
        if self._keeper and not any(finding.code == "results_replaced" for finding in self._findings):
            self._findings.append(self._loss(worker))
        return None

    def _loss(self, worker: int) -> Finding:
        pod = self._following.pods().get(worker)
        summary = self._following.collector.summary(worker) or {}
        last = {**summary, **(last_words({worker: pod}, {}).get(worker, {}) if pod else {})}
        handover = last.get("handover")
        pods = self._keeper.pods() if self._keeper else []
        if handover == "kept":
            text = f"The keeper lost the output of worker {worker}: {why_gone(pods)}."
        elif self._keeper and self._keeper.is_given_up:
            text = f"The output of worker {worker} cannot be reached: {why_gone(pods)}."
        elif last:
            text = f"Worker {worker} could not hand over its output ({handover or 'it was stopped'}), and has ended."
        else:
            text = f"Worker {worker} ended without packing its output."
        evidence = {"worker": worker, "handover": handover, "keeper": [why_gone([item]) for item in pods]}
        return Finding("results_lost", text, hint="Run it again.", evidence=evidence)

    def _has_run(self, worker: int) -> bool:
        pod = self._following.pods().get(worker)
        log = read_position(position_file(self._run.folder, self._ranks[worker]))
        return (log is not None and bool(log.last)) or (pod is not None and has_started(pod))

    def _release(self) -> None:
        """Say in the cluster that the results are fetched, then end the hold and the keeper."""
        path = object_path("Job", self._namespace, job_name(self._run.spec))
        try:
            self._api.patch(path, {"metadata": {"annotations": {FETCHED_ANNOTATION: now()}}})
        except ObjectNotFound:
            return
        for worker in holders(self._run.spec):
            pod = self._following.pods().get(worker)
            if pod is not None and not has_ended(pod) and self._following.collector.summary(worker):
                acknowledge(self._access, self._namespace, pod["metadata"]["name"])
        if self._keeper:
            self._keeper.release()

    # --- logs -----------------------------------------------------------------------------------------------------

    def _take_kept_logs(self) -> None:
        """The logs that the keeper has and the nodes have not, or not whole."""
        results = self._keeper.read(time.monotonic()) if self._keeper else None
        if results is None:
            return
        ours = {worker: item for worker, item in results.workers.items() if worker < len(self._ranks)}
        kept = {worker: item.log for worker, item in ours.items() if item.log}
        late = self._wait_for_logs(KEPT_LOG_SECONDS, kept)
        # Copied or handed over, a whole log has the same bytes.
        logs = [RunFolder(self._run.folder).log(rank) for rank in self._ranks]
        wanted = [worker for worker, item in kept.items() if worker in late or size_of(logs[worker]) < item.size]
        with ThreadPoolExecutor(MAX_PARALLEL_FETCHES) as pool:
            for _ in pool.map(lambda worker: self._take_log(worker, results.pod, ours[worker]), wanted):
                pass

    def _take_log(self, worker: int, pod: str, kept: KeptWorker) -> None:
        """One worker's log, and its samples of resources if there are none yet.

        What the node gave stays if the keeper has gone. Raises FetchError.
        """
        try:
            if kept.log:
                part = self._state / f"log-{worker}-{kept.log.sha256[:16]}.part"
                download(self._access, self._namespace, pod, kept.log, part, kept_file(worker, "log"))
                if not self._following.collector.install(worker, part, kept.truncated, kept.summary):
                    raise FetchError(
                        f'Another client is copying the logs of the run "{self._run.name}" into {self._run.folder}.',
                        hint="Try again later; the results stay on the cluster for now.",
                    )
            if kept.samples and not self._resources_file(worker).exists():
                part = self._state / f"samples-{worker}-{kept.samples.sha256[:16]}.part"
                download(self._access, self._namespace, pod, kept.samples, part, kept_file(worker, "resources.jsonl"))
                part.replace(self._resources_file(worker))
        except ApiError as error:
            if error.status not in (400, 404) and not isinstance(error, NodeUnreachable):
                raise

    def _wait_for_logs(self, seconds: float, workers: Collection[int] | None = None) -> list[int]:
        """Wait until these logs are copied to their ends; all if None. Returns the workers whose logs are not."""
        end = time.monotonic() + seconds
        collector = self._following.collector
        workers = range(self._run.spec.unit_count) if workers is None else workers
        while True:
            if collector.failure:
                raise collector.failure
            late = [worker for worker in workers if not collector.complete(worker)]
            if not late or time.monotonic() >= end:
                return late
            collector.wait(LOOK_SECONDS)

    def _write_resources(self) -> None:
        """resources.jsonl: what the fetched workers sampled each second, and of the others what their logs say; and
        the sizes of the logs over time, by the nodes' time stamps of their lines."""
        lines = []
        for worker in range(self._run.spec.unit_count):
            told = samples_file(self._run.folder, self._ranks[worker])
            sampled = _lines(self._resources_file(worker)) or _lines(told)
            last = (self._following.collector.summary(worker) or {}).get("resources")
            lines += sampled or ([json.dumps(last, separators=(",", ":"))] if isinstance(last, dict) else [])
            lines += _lines(times_file(self._run.folder, self._ranks[worker]))
        if lines:
            write_atomically(self._run.folder / "resources.jsonl", ("\n".join(lines) + "\n").encode())

    def _fetched_file(self, worker: int) -> Path:
        return self._state / f"fetched-{worker}.json"

    def _resources_file(self, worker: int) -> Path:
        return self._state / f"resources-{worker}.jsonl"


def _hands_over(summary: Summary, end: float) -> bool:
    """Whether a worker is about to end because the keeper takes its results."""
    if summary.get("handover") not in (None, "kept"):
        return False
    archive = parse_held_archive(summary)
    return time.monotonic() < end + (archive.size if archive else 0) / HANDOVER_RATE


def is_fetched(run: Run) -> bool:
    """Whether this folder has the results of every worker that held some."""
    return all((run.folder / ".state" / f"fetched-{worker}.json").exists() for worker in holders(run.spec))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
