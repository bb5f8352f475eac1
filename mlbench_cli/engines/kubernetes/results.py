"""Brings a run's results from its pods into its folder, and only then lets go of the pods."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlbench_cli.engines.base import Fetched
from mlbench_cli.engines.kubernetes.ending import active, will_be_stopped
from mlbench_cli.engines.kubernetes.fetch import acknowledge, download, held, read_summary, unpack
from mlbench_cli.engines.kubernetes.follower import Following
from mlbench_cli.engines.kubernetes.logs import log_gap, position_file, read_position, samples_file
from mlbench_cli.engines.kubernetes.manifests import FETCHED_ANNOTATION, GRACE_SECONDS, holders
from mlbench_cli.engines.kubernetes.workers import Pod, Summary, has_ended, has_started
from mlbench_cli.files import write_atomically
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api, ApiError, ObjectNotFound
from mlbench_cli.kube.objects import object_path
from mlbench_cli.model import Run
from mlbench_cli.times import now

AT_ONCE = 4  # workers fetched at the same time
LOG_SECONDS = GRACE_SECONDS + 30.0  # in which stopped workers have ended, and their logs are here
FIRST_LIST_SECONDS = 60.0
LOOK_SECONDS = 0.3


class Results:
    """The results of one run on their way home."""

    def __init__(
        self, access: Access, api: Api, namespace: str, run: Run, following: Following, stop: Callable[[], None]
    ) -> None:
        self._access = access
        self._api = api
        self._namespace = namespace
        self._run = run
        self._following = following
        self._stop = stop
        self._stopping = False
        self._ranks = [worker * run.spec.processes_per_worker for worker in range(run.spec.workers)]
        self._state = run.folder / ".state"

    def fetch(self) -> Fetched:
        """Archives, then logs of what has ended, then acknowledge, then the logs of what was stopped by that."""
        self._following.watch.wait(0, FIRST_LIST_SECONDS)
        self._stopping = self._stop_those_who_wait()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            brought = list(pool.map(self._bring, holders(self._run.spec)))
        self._release()
        self._wait_for_logs()
        self._write_resources()
        complete = all(item is not None for item in brought)
        found = [item for item in brought if item is not None]
        findings = tuple(log_gap(self._following.collector.gaps, self._ranks))
        return Fetched(sum(files for files, _ in found), sum(size for _, size in found), complete, findings)

    def _stop_those_who_wait(self) -> bool:
        """Stop the workers that would go on for ever, if nobody else does. True where workers are being stopped."""
        pods, summaries = self._following.pods(), self._following.summaries()
        only_waiting = not self._run.spec.run_on_all and 0 in summaries  # they end when worker 0 is let go
        if only_waiting or not active(pods, summaries):
            return False
        if not will_be_stopped(pods, summaries):
            self._stop()
        return True

    def _bring(self, worker: int) -> tuple[int, int] | None:
        """Files and bytes of one worker's output, in the run's folder; None where it is lost."""
        known = _read(self._fetched_file(worker))
        if known is not None:
            return int(known["files"]), int(known["bytes"])
        pod, summary = self._await_summary(worker)
        what = held(summary)
        if pod is None or what is None:
            return None if self._has_run(worker) else (0, 0)
        rank = self._ranks[worker]
        part = self._state / f"output-{rank}-{what.sha256[:16]}.tar"
        try:
            download(self._access, self._namespace, pod["metadata"]["name"], what, part)
        except ApiError as error:
            if error.status not in (400, 404):
                raise
            return None  # the container has ended: what it held is gone
        files, size = unpack(part, self._run.folder / "output" / f"rank-{rank}", self._resources_file(worker))
        write_atomically(self._fetched_file(worker), json.dumps({"files": files, "bytes": size}).encode())
        part.unlink()
        return files, size

    def _has_run(self, worker: int) -> bool:
        pod = self._following.pods().get(worker)
        log = read_position(position_file(self._run.folder, self._ranks[worker]))
        return (log is not None and bool(log.last)) or (pod is not None and has_started(pod))

    def _await_summary(self, worker: int) -> tuple[Pod | None, Summary | None]:
        """The running pod of a worker that holds its results. One that is just being stopped is waited for."""
        end = time.monotonic() + GRACE_SECONDS
        while True:
            pod = self._following.pods().get(worker)
            if pod is None or has_ended(pod) or time.monotonic() > end:
                return None, None
            summary = self._following.collector.summary(worker) or self._ask_summary(pod)
            if summary is not None:
                return pod, summary
            if not self._stopping or not has_started(pod):
                return None, None
            time.sleep(LOOK_SECONDS)

    def _ask_summary(self, pod: Pod) -> Summary | None:
        try:
            return read_summary(self._access, self._namespace, pod["metadata"]["name"])
        except ApiError:
            return None

    def _release(self) -> None:
        """Say in the cluster that the results are fetched, then end the hold."""
        path = object_path("Job", self._namespace, self._run.name)
        try:
            self._api.patch(path, {"metadata": {"annotations": {FETCHED_ANNOTATION: now()}}})
        except ObjectNotFound:
            return
        for worker in holders(self._run.spec):
            pod = self._following.pods().get(worker)
            if pod is not None and not has_ended(pod) and self._following.collector.summary(worker):
                acknowledge(self._access, self._namespace, pod["metadata"]["name"])

    def _wait_for_logs(self) -> None:
        end = time.monotonic() + LOG_SECONDS
        collector = self._following.collector
        while time.monotonic() < end:
            if collector.failure:
                raise collector.failure
            if all(collector.complete(worker) for worker in range(self._run.spec.workers)):
                return
            collector.wait(LOOK_SECONDS)

    def _write_resources(self) -> None:
        """resources.jsonl: what the fetched workers sampled each second, and of the others what their logs tell."""
        lines = []
        for worker in range(self._run.spec.workers):
            told = samples_file(self._run.folder, self._ranks[worker])
            sampled = _lines(self._resources_file(worker)) or _lines(told)
            last = (self._following.collector.summary(worker) or {}).get("resources")
            lines += sampled or ([json.dumps(last, separators=(",", ":"))] if isinstance(last, dict) else [])
        if lines:
            write_atomically(self._run.folder / "resources.jsonl", ("\n".join(lines) + "\n").encode())

    def _fetched_file(self, worker: int) -> Path:
        return self._state / f"fetched-{worker}.json"

    def _resources_file(self, worker: int) -> Path:
        return self._state / f"resources-{worker}.jsonl"


def is_fetched(run: Run) -> bool:
    """Whether this folder has the results of every worker that held some."""
    return all((run.folder / ".state" / f"fetched-{worker}.json").exists() for worker in holders(run.spec))


def remove_folder(folder: Path) -> None:
    """The run's folder, in one step out of sight."""
    if folder.is_dir() and not folder.is_symlink():
        hidden = folder.with_name(f".{folder.name}.deleted")
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
