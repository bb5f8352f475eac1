"""Follows a run: the watch on its pods and the copying of its logs, shared by all users in this process."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mlbench_cli.engines.kubernetes.collector import LogCollector
from mlbench_cli.engines.kubernetes.ending import is_over, is_stopped
from mlbench_cli.engines.kubernetes.pods import RUN_LABEL
from mlbench_cli.engines.kubernetes.submit import read_job
from mlbench_cli.engines.kubernetes.workers import Pod, Summary, by_worker
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import AccessDenied, Api, ObjectNotFound, ServerUnreachable
from mlbench_cli.kube.watch import PodWatch
from mlbench_cli.model.run import Run
from mlbench_cli.model.silence import Silence

JOB_SECONDS = 5.0  # from look to look at the Job, while a pod is missing


class RunFollower:
    """Watch and log collector of one run. Reference-counted: it ends when the last user closes it."""

    def __init__(self, access: Access, namespace: str, run: Run, ranks: Sequence[int]) -> None:
        self._api: Api = access.client()
        self._namespace, self._spec = namespace, run.spec
        self._lock = threading.Lock()
        self._by_worker: tuple[int, dict[int, Pod]] = (-1, {})
        self._over_since: float | None = None
        self._looked = float("-inf")
        self._silence = Silence()
        self.users = 0
        self.workers = len(ranks)
        self.watch = PodWatch(access, namespace, f"{RUN_LABEL}={run.name}")
        self.collector = LogCollector(access, namespace, run.folder, ranks, self.pods, self.over)
        self.collector.start()

    def pods(self) -> Mapping[int, Pod]:
        """By worker; computed once per change."""
        with self._lock:
            version = self.watch.version
            if version != self._by_worker[0]:
                self._by_worker = version, by_worker(self.watch.pods())
            return self._by_worker[1]

    def over(self) -> bool:
        """Whether no more pods will be created, and all existing ones are visible."""
        with self._lock:
            if self._over_since is not None:
                return self.watch.listed > self._over_since
            if time.monotonic() < self._looked + JOB_SECONDS:
                return False
            self._looked = asked = time.monotonic()
        try:
            job = read_job(self._api, self._namespace, self._spec)
            over = is_over(job) or is_stopped(job)
        except ObjectNotFound:
            over = True
        except (ServerUnreachable, AccessDenied):
            return False  # the watch knows of it
        if over:
            self._over_since = asked
            self.watch.relist()
        return False

    def summaries(self) -> dict[int, Summary]:
        """The final messages of worker.sh by worker, as far as written."""
        found = ((worker, self.collector.summary(worker)) for worker in range(self.workers))
        return {worker: summary for worker, summary in found if summary is not None}

    def wait(self, seconds: float, report: Callable[[str], None] | None = None) -> None:
        """Until something may have changed. `report` is told once of a cluster that is silent.

        Raises what has ended the watch or the copying, and the cluster's last trouble if it is silent for too long.
        """
        self.watch.wait(-1, 0)
        if self.collector.failure:
            raise self.collector.failure
        self._bear_silence(report)
        self.collector.wait(seconds)

    def _bear_silence(self, report: Callable[[str], None] | None) -> None:
        since, trouble = self.watch.silent_since, self.watch.trouble
        if since is None or trouble is None:
            self._silence.end()
            return
        self._silence.bear(trouble, since)
        self._silence.tell(report)

    def close(self) -> None:
        """Stop the copying and the watch, and drop the connections."""
        self.collector.close()
        self.watch.close()
        self._api.close()
