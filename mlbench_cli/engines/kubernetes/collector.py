"""Copies the logs of all workers of a run into its folder during the run; only one process at a time does it."""

import errno
import fcntl
import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import IO, Any

from mlbench_cli.agent.lock import flock
from mlbench_cli.engines.kubernetes.logs import Copying, LogFile, LogRefused, Position, position_file, read_position
from mlbench_cli.engines.kubernetes.workers import Pod, Summary, has_ended, has_started, is_cut_off
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import ApiError, ServerUnreachable
from mlbench_cli.model.silence import STARTING_SECONDS

FOLLOWED = 48  # logs that are followed as they are written, if there are more than THREADS
THREADS = 64
REFUSED_SECONDS = 10.0  # in which a node may find the log of an ended container after all
AGAIN_SECONDS = 0.3  # from the end of a stream to the next, and from look to look at a pod that has not started
SWEEP_SECONDS = 30.0  # from look to look at a log that is not followed
INSTALL_SECONDS = 60.0  # in which another process has copied what it can
MOST_SECONDS = 5.0  # between tries
DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO})


class LogCollector:
    """`ranks[i]` names the log of worker i. `pods` gives the pods as they are now; if one is missing and the run is
    `over`, its log is complete.

    `run` copies in separate threads until closed or all is complete. Where another process holds the lock, it waits
    its turn and reads that one's progress from the folder.
    """

    def __init__(
        self,
        access: Access,
        namespace: str,
        folder: Path,
        ranks: Sequence[int],
        pods: Callable[[], Mapping[int, Pod]],
        over: Callable[[], bool],
    ) -> None:
        self._api = access.client()
        self._namespace = namespace
        self._folder = folder
        self._ranks = ranks
        self._pods = pods
        self._over = over
        self._summaries: dict[int, Summary] = {}
        self._complete: set[int] = set()
        self._gaps: dict[int, list[int]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._leading = False
        self._copying: dict[Copying, int] = {}  # and of which worker
        self._files = [threading.Lock() for _ in ranks]  # held while a worker's log is open
        self._due: list[tuple[float, int]] = []  # a heap: when to attend to which worker
        self._threads: list[threading.Thread] = []
        self._refused: dict[int, float] = {}  # workers whose nodes could not give the rest of an ended log, since when
        self._refusals: dict[int, str] = {}  # the nodes' words, of logs that were given up
        self._troubled = float("-inf")  # when the cluster did not answer last, on the monotonic clock
        self.failure: ApiError | OSError | None = None

    # --- ask ------------------------------------------------------------------------------------------------------

    def summary(self, worker: int) -> Summary | None:
        """What the worker said at its end, if it has."""
        self._recall(worker)
        return self._summaries.get(worker)

    def complete(self, worker: int) -> bool:
        """Whether the worker's log is copied completely."""
        self._recall(worker)
        return worker in self._complete

    @property
    def gaps(self) -> dict[int, list[int]]:
        """Workers whose logs have known gaps, with the positions of the gaps in the copy (bytes)."""
        return dict(self._gaps)

    @property
    def refusals(self) -> dict[int, str]:
        """What the nodes said instead of giving logs, by worker."""
        return dict(self._refusals)

    def wait(self, seconds: float) -> None:
        """Wait until something may have changed."""
        with self._changed:
            self._changed.wait(seconds)

    def _recall(self, worker: int) -> None:
        """Read the progress of another or an earlier process; this process knows its own."""
        if worker in self._complete or self._leading:
            return
        position = read_position(position_file(self._folder, self._ranks[worker]))
        if position is None:
            return
        self._take_in(worker, position)
        if position.complete:
            self._complete.add(worker)

    def _take_in(self, worker: int, position: Position) -> None:
        if position.summary:
            self._summaries[worker] = position.summary
        if position.gaps:
            self._gaps[worker] = position.gaps
        if position.refusal:
            self._refusals[worker] = position.refusal

    # --- copy -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Copy in a separate thread. Returns at once."""
        thread = threading.Thread(target=self._lead, name="logs", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Stop all copying, wait at most 5 s for each thread, and drop the connections."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            copying = list(self._copying)
        for copy in copying:
            copy.stop()
        for thread in list(self._threads):
            thread.join(5)
        self._api.close()

    def sweep(self, workers: Sequence[int]) -> bool:
        """Update these logs without following them. False if another process is copying."""
        lock = self._lock()
        if lock is None:
            return False
        with lock:
            for worker in workers:
                if not self.complete(worker):
                    self._attend(worker, follow=False)
        return True

    def install(self, worker: int, part: Path, truncated: bool, summary: Mapping[str, Any]) -> bool:
        """Use the file `part` as the worker's complete log. False if another process is copying."""
        lock, end = None, time.monotonic() + INSTALL_SECONDS
        while not self._leading and (lock := self._lock()) is None:
            if time.monotonic() >= end:
                return False
            time.sleep(AGAIN_SECONDS)
        with self._changed:
            running = [copying for copying, number in self._copying.items() if number == worker]
        for copying in running:
            copying.stop()
        with lock or nullcontext(), self._files[worker]:
            with closing(LogFile(self._folder, worker, self._ranks[worker])) as log:
                log.replace(part, truncated, dict(summary))
                self._gaps.pop(worker, None)
                self._take_in(worker, log.position)
            self._complete.add(worker)
        return True

    def _lead(self) -> None:
        """Wait for the lock, then copy until closed."""
        while (lock := self._lock()) is None:
            if self._sleep(AGAIN_SECONDS):
                return
        with lock:
            for worker in range(len(self._ranks)):
                self._recall(worker)
            self._leading = True
            self._due = [(0.0, worker) for worker in range(len(self._ranks)) if worker not in self._complete]
            count = min(len(self._ranks), THREADS)
            threads = [threading.Thread(target=self._serve, name=f"log {i}", daemon=True) for i in range(count)]
            self._threads += threads
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._leading = False

    def _lock(self) -> IO[str] | None:
        path = self._folder / ".state" / "logs.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115
        if flock(file.fileno(), fcntl.LOCK_EX):
            return file
        file.close()
        return None

    def _serve(self) -> None:
        """Thread body: serve whichever log is due."""
        failures = 0
        while (worker := self._next()) is not None:
            follow = len(self._ranks) <= THREADS or worker < FOLLOWED
            pause = AGAIN_SECONDS if follow else SWEEP_SECONDS
            try:
                self._attend(worker, follow)
                failures = 0
            except OSError as error:
                self._fail(error)
                return
            except ApiError as error:
                if error.status in (401, 403) and time.monotonic() > self._troubled + STARTING_SECONDS:
                    self._fail(error)
                    return
                if isinstance(error, ServerUnreachable):
                    self._troubled = time.monotonic()
                failures += 1
                pause = error.details.get("retry_after") or min(AGAIN_SECONDS * 2**failures, MOST_SECONDS)
            with self._changed:
                if worker not in self._complete:
                    heapq.heappush(self._due, (time.monotonic() + pause, worker))
                self._changed.notify_all()

    def _next(self) -> int | None:
        """The next worker whose log is due; None when all logs are complete."""
        with self._changed:
            while not self._closed and self.failure is None:
                if not self._due:
                    if len(self._complete) == len(self._ranks):
                        return None
                    self._changed.wait(1.0)
                    continue
                wait = self._due[0][0] - time.monotonic()
                if wait <= 0:
                    return heapq.heappop(self._due)[1]
                self._changed.wait(wait)
            return None

    def _attend(self, worker: int, follow: bool) -> None:
        """Copy the rest of one log as far as it is written. Raises ApiError for what is not a mere break."""
        pod = self._pods().get(worker)
        if pod is None:
            if self._over():
                self._finish(worker)
            return
        ended = has_ended(pod)
        if not has_started(pod) and not ended:
            return
        with self._files[worker]:
            if worker in self._complete:
                return
            with closing(LogFile(self._folder, worker, self._ranks[worker])) as log:
                whole = self._copy(pod, log, follow and not ended)
                self._take_in(worker, log.position)
                if log.position.summary or (ended and whole):
                    log.finish()
                    self._complete.add(worker)

    def _copy(self, pod: Pod, log: LogFile, follow: bool) -> bool:
        """Copy until the stream ends; False if it broke. Raises ApiError for what is not a mere break."""
        import urllib3

        copying = Copying(self._api, self._namespace)
        with self._changed:
            if self._closed:
                return False
            self._copying[copying] = log.worker
        try:
            log.start(pod["metadata"]["uid"])
            copying.run(pod["metadata"]["name"], log, follow)
            return not copying.stopped
        except LogRefused as refused:
            begun = self._refused.setdefault(log.worker, time.monotonic())
            if not has_ended(pod) or time.monotonic() < begun + REFUSED_SECONDS:
                return False
            log.position.refusal = str(refused)[:300]
            log.note_gap()
            return True
        except ApiError as error:
            if error.status not in (400, 404) and not is_cut_off(pod):
                raise
            # The container has not started yet; or the pod is gone, and with it what was not copied.
            if has_ended(pod) and has_started(pod):
                log.note_gap()
            return has_ended(pod)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            if isinstance(error, OSError) and error.errno in DISK:
                raise
            self._troubled = time.monotonic()
            if is_cut_off(pod):
                log.note_gap()
            return is_cut_off(pod)
        finally:
            with self._changed:
                self._copying.pop(copying, None)

    def _finish(self, worker: int) -> None:
        """There is no log, and there will be none."""
        with self._files[worker]:
            if worker in self._complete:
                return
            with closing(LogFile(self._folder, worker, self._ranks[worker])) as log:
                log.finish()
            self._complete.add(worker)

    def _fail(self, error: ApiError | OSError) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def _sleep(self, seconds: float) -> bool:
        """Whether the collector was closed while it slept."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, seconds)
