"""The head of a run on Kubernetes: a pod of the run, read through an exec, and what the cluster says of the others."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from msgspec.structs import replace

from mlbench_cli.engines import fetch
from mlbench_cli.engines.base import Fetched
from mlbench_cli.engines.head import RemoteHead
from mlbench_cli.engines.kubernetes.channel import HeadMissing, PodChannel, grant
from mlbench_cli.engines.kubernetes.ending import active, is_over, is_stopped, is_suspended
from mlbench_cli.engines.kubernetes.manifests import (
    FETCHED_ANNOTATION,
    GRACE_SECONDS,
    STOPPED_ANNOTATION,
    head_name,
    queue_of,
)
from mlbench_cli.engines.kubernetes.observe import RunObserver
from mlbench_cli.engines.kubernetes.pods import HEAD, ROLE_LABEL, RUN_LABEL
from mlbench_cli.engines.kubernetes.submit import NameTaken, find_job, patch_job, pods_of, read_job
from mlbench_cli.engines.kubernetes.workers import (
    Pod,
    by_worker,
    has_ended,
    has_started,
    is_cut_off,
    is_on_silent_node,
    seconds,
    why_gone,
)
from mlbench_cli.engines.observe import NodeReport, Snapshot, explain_absence
from mlbench_cli.engines.placement import share_nodes
from mlbench_cli.errors import MlbenchError, UnreachableError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import AccessDenied, Api, NodeUnreachable, ObjectNotFound, list_pods, read_log
from mlbench_cli.kube.objects import object_path
from mlbench_cli.model.run import Ending, Finding, Observation, Run
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import write_atomically
from mlbench_cli.util.text import counted
from mlbench_cli.util.times import now

RUN_PLACE = "~/run"  # in the containers of the head and of workers
WATCH_RETRY_SECONDS = 2.0  # for which an observation retries a request before it reports the error
HEAD_SECONDS = 60.0  # when fetching, how long to wait for a head that is starting or was just moved
LOOK_SECONDS = 0.5
LOG_BYTES = 1 << 28  # maximum size of a log read from the API server
MAX_PARALLEL = 32
UNSUITABLE_IMAGE = re.compile(r"no Python|exec format error")  # words of start.sh, and of the kernel


class KubernetesHead(RemoteHead):
    """The head of a run in `namespace`. While its pod is not running, the cluster is the only source."""

    def __init__(self, access: Access, namespace: str, run: Run, save_manifests: Callable[[], None]) -> None:
        channel = PodChannel(access, namespace, f"the head of {run.name}", self._find_pod)
        super().__init__(run, channel, RUN_PLACE, share_nodes(run.spec), save_manifests)
        self._access, self._namespace = access, namespace
        self._observer: RunObserver | None = None
        self._pods: list[Pod] = []  # of the head, as last seen
        self._copied: set[tuple[str, bool]] = set()  # pods whose logs were read from the API; whether after their end
        self._log_refusal = self._log_loss = ""  # of the API server, and of a node

    def _find_pod(self) -> str | None:
        """The pod of the run's head; None while none is running."""
        with self._access.client(retry_seconds=WATCH_RETRY_SECONDS) as api:
            self._pods = self._head_pods(api)
        running = [
            pod
            for pod in self._pods
            if pod["status"].get("phase") == "Running" and not has_ended(pod) and not is_on_silent_node(pod)
        ]
        return str(running[-1]["metadata"]["name"]) if running else None

    def _head_pods(self, api: Api) -> list[Pod]:
        """The head's pods, also those that have ended, oldest first."""
        pods = self._list_pods(api, f",{ROLE_LABEL}={HEAD}", head_name(self.run.name))
        return sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))

    def _list_workers(self, api: Api) -> dict[int, Pod]:
        """The newest pod of each worker, by number."""
        return by_worker(self._list_pods(api, "", self.run.name))

    def _list_pods(self, api: Api, selector: str, owner: str) -> Sequence[Pod]:
        """The pods of the run's Job `owner`; if that is gone, those which outlive it for a moment."""
        pods: Sequence[Pod] = list_pods(api, self._namespace, f"{RUN_LABEL}={self.run.name}{selector}")
        try:
            if not pods or (job := find_job(api, self._namespace, self.run)) is None:
                return pods
            if owner != self.run.name:
                job = api.get(object_path("Job", self._namespace, owner))
            return pods_of(job, pods)
        except NameTaken:
            return []
        except ObjectNotFound:
            return pods

    def _ask(self) -> Snapshot:
        """The head's snapshot; while it is not running, the last one that is known."""
        try:
            try:
                return super()._ask()
            except HeadMissing:
                raise
            except UnreachableError:  # the pod that the channel led to may have been deleted, and another be there
                return super()._ask()
        except HeadMissing:
            nodes = {worker: NodeReport() for worker in range(self.run.spec.workers)}
            return Snapshot(time.time(), self._last[1].nodes if self._last else nodes, is_served=False)

    def observe(self, *, max_age: float = 0.0) -> Observation:
        """See `Engine.look`."""
        if (kept := RunFolder(self.run.folder).read_observation()) is not None:
            return kept
        with self._lock:
            snapshot = self.read(max_age=max_age)
            if self._observer is None:
                api = self._access.client(retry_seconds=WATCH_RETRY_SECONDS)
                self._observer = RunObserver(api, self._namespace, self.run)
            elif not max_age:
                self._observer.expire()
            seen = self._observer.observe(snapshot)
            if not snapshot.is_served and (found := self._observer.explain_head(seen, self._pods)) is not None:
                seen = replace(seen, findings=(*seen.findings, found))
            if self._observer.job is not None:
                return seen
            if all(worker.exit_code == 0 for worker in seen.workers):
                return replace(seen, ended=Ending.EXITED)
            return explain_absence(self.run, seen, "The run's Job is not in the cluster")

    # --- end ------------------------------------------------------------------------------------------------------

    def fetch(self) -> Fetched:
        """Fetch output and logs into the run's folder; then release the head.

        `complete` is False if results that were not fetched are lost with the head.
        """
        seen = self.observe()
        with self._access.client() as api:
            self._stop_those_who_wait(api, str(seen.ended or Ending.CANCELED))
            snapshot = self._await_head(api)
            fetched = self._fetch_all()
            missing = self._find_missing(snapshot, seen)
            if missing:
                lost = self._explain_loss(api, missing)
                fetched = replace(fetched, complete=False, findings=(*fetched.findings, lost))
            self._release()
            return fetched

    def _stop_those_who_wait(self, api: Api, ending: str) -> None:
        """Stop workers that would otherwise run forever, or that a queue would start again, unless the Job is over or
        stopped already."""
        with suppress(ObjectNotFound):
            job = read_job(api, self._namespace, self.run)
            pods = self._list_workers(api)
            left = [pods[worker] for worker in active(pods, {})]
            # Their commands have ended: they are about to end by themselves, and so the Job is complete.
            are_done = ending == Ending.EXITED and all(map(has_started, left))
            if not is_over(job) and (is_suspended(job) or left):
                self.stop(api, ending, GRACE_SECONDS if are_done else 0)

    def _await_head(self, api: Api) -> Snapshot:
        """The head's snapshot, once everything that is still being sent has arrived there; while it is not running,
        what the workers' own pods have."""
        end = time.monotonic() + GRACE_SECONDS + HEAD_SECONDS
        while True:
            snapshot = self.read()
            pods = self._list_workers(api)
            if not snapshot.is_served:
                snapshot = self._ask_workers(api, pods)
            coming = [
                worker
                for worker, report in snapshot.nodes.items()
                if worker in pods and not has_ended(pods[worker]) and not report.is_over and has_started(pods[worker])
            ]
            heads = [pod for pod in self._head_pods(api) if has_started(pod) and not has_ended(pod)]
            if (not coming and (snapshot.is_served or not heads)) or time.monotonic() >= end:
                return snapshot
            time.sleep(LOOK_SECONDS)

    def _ask_workers(self, api: Api, pods: Mapping[int, Pod]) -> Snapshot:
        """What the workers' own pods have that can still be reached: their logs, and their output once it is packed."""
        nodes = dict(self.read().nodes)

        def ask(worker: int) -> NodeReport:
            pod, name = pods[worker], str(pods[worker]["metadata"]["name"])
            channel = PodChannel(self._access, self._namespace, name, lambda: None if has_ended(pod) else name)
            try:
                own = RemoteHead(self.run, channel, RUN_PLACE, self._shares, self._save_manifests)
                report = own.read().nodes[worker]
                if report.state is None:
                    raise HeadMissing(f"{name} has no agent.")
                own.fetch_node(worker, report)
                return report
            except fetch.FetchError:
                raise
            except MlbenchError:  # it has ended, or its image has no Python
                if (copy := (name, has_ended(pod))) not in self._copied:
                    try:
                        self._copy_plain_log(api, worker, pod)
                        self._copied.add(copy)
                    except AccessDenied as denied:
                        self._log_refusal = denied.message
                    except NodeUnreachable as lost:
                        self._log_loss = lost.message
                    except MlbenchError:
                        pass
                return replace(nodes[worker], alive=False) if has_ended(pod) else nodes[worker]
            finally:
                channel.close()  # of a thousand workers only a few are connected at a time

        reachable = [
            worker
            for worker, pod in pods.items()
            if has_started(pod) and not is_cut_off(pod) and not is_on_silent_node(pod)
        ]
        with ThreadPoolExecutor(MAX_PARALLEL) as pool:
            nodes.update(zip(reachable, pool.map(ask, reachable), strict=True))
        gone = [worker for worker in nodes if worker not in pods or is_cut_off(pods[worker])]
        nodes.update((worker, replace(nodes[worker], alive=False)) for worker in gone)
        snapshot = Snapshot(time.time(), nodes, is_served=False)
        self._last = time.monotonic(), snapshot
        return snapshot

    def fetch_node(self, node: int, report: NodeReport) -> Fetched:
        """See `RemoteHead`; incomplete where the output went with the head."""
        try:
            return super().fetch_node(node, report)
        except HeadMissing:
            return Fetched(0, 0, complete=False)

    def _check_logs(self, snapshot: Snapshot) -> list[Finding]:
        """See `RemoteHead`; a log whose source is gone stays as it is."""
        if snapshot.is_served:
            return super()._check_logs(snapshot)
        wrong, findings = fetch.check_logs(self.run, snapshot.nodes.values())
        return [*findings, fetch.explain_gap(wrong, "missing: the head that had them is gone")] if wrong else findings

    def _find_missing(self, snapshot: Snapshot, seen: Observation) -> list[int]:
        """The workers that have run, but of which nobody has anything any more."""
        folder = RunFolder(self.run.folder)
        started = {self.run.spec.unit_of(each.rank) for each in seen.workers if each.started}
        return [
            worker
            for worker, report in snapshot.nodes.items()
            if worker in started
            and (report.state is None or (not snapshot.is_served and not report.is_lost))
            and not (folder.state / f"fetched-{worker}.json").exists()
        ]

    def _explain_loss(self, api: Api, missing: Sequence[int]) -> Finding:
        """Explain why output is missing, and read the logs from the API server as far as it has them."""
        heads = self._head_pods(api)
        ended = [pod for pod in heads if has_ended(pod) or is_on_silent_node(pod)]
        cause = why_gone(ended) if ended or not heads else "an earlier one was deleted with what it had"
        self._ask_workers(api, self._list_workers(api))
        logs = self._log_loss or "Logs come from the API, and may lack their beginnings."
        hint = "Run it again."
        if UNSUITABLE_IMAGE.search(cause):
            hint = "Use an image that is made for the nodes and has Python 3.9 or later."
        if self._log_refusal:
            logs = "Logs that the API has cannot be read without the right to get pods/log."
            hint += f" To read logs: {grant('pods/log', 'get', self._namespace, self._log_refusal)}"
        others = f" (And of {counted(len(missing) - 1, 'other')}.)" if len(missing) > 1 else ""
        return Finding(
            "results_lost",
            f"The head of the run has no output of worker {missing[0]}: {cause}.{others} {logs}",
            hint=hint,
            evidence={"workers": list(missing), "head": [why_gone([pod]) for pod in heads]},
        )

    def _copy_plain_log(self, api: Api, worker: int, pod: Pod) -> None:
        """Copy what a worker's container has printed, as far as the API has it, if that continues what is here."""
        log = RunFolder(self.run.folder).log(self.run.spec.ranks_of(worker)[0])
        path = object_path("Pod", self._namespace, pod["metadata"]["name"])
        data = read_log(api, path, 30, limitBytes=LOG_BYTES)
        here = log.read_bytes() if log.exists() else b""
        # Of several ranks the container prints all lines, mixed.
        if not here or (len(data) > len(here) and data.startswith(here) and self.run.spec.processes_per_worker == 1):
            log.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(log, data)

    def _release(self) -> None:
        """Say in the cluster that the results are fetched, then end the head."""
        with suppress(MlbenchError):
            self.put("fetched")
        self.close()
        with self._access.client() as api, suppress(ObjectNotFound):  # the head goes with the run's Job
            job = read_job(api, self._namespace, self.run)
            if is_suspended(job):  # by its queue, which might start it again; it would never expire
                api.delete(object_path("Job", self._namespace, self.run.name), uid=job["metadata"]["uid"])
                return
            patch_job(api, job, {"metadata": {"annotations": {FETCHED_ANNOTATION: now()}}})
            api.delete(object_path("Job", self._namespace, head_name(self.run.name)))

    def stop(self, api: Api, ending: str, within: int = 0) -> None:
        """Let the Job controller end the Job `within` seconds; then it expires. `ending` is recorded on it, so that
        every client reports the same one.
        """
        with suppress(ObjectNotFound):
            job = read_job(api, self._namespace, self.run)
            if not is_over(job) and not is_stopped(job):
                with suppress(MlbenchError):
                    if not self.read().is_served:  # what pods have printed goes with them
                        self._ask_workers(api, self._list_workers(api))
                stopped = {"annotations": {STOPPED_ANNOTATION: f"{ending} {now()}"}}
                clock = time.time() + api.server_ahead
                lasted = clock - (seconds(job.get("status", {}).get("startTime")) or clock)
                change = {"activeDeadlineSeconds": max(1, round(lasted) + within) if within else 1}
                if is_suspended(job) and queue_of(job) is None:  # its deadline would not count
                    change |= {"suspend": False, "parallelism": 0}
                patch_job(api, job, {"metadata": stopped, "spec": change})

    def close(self) -> None:
        """Close the connections; a later request connects again."""
        self.channel.close()
        if self._observer is not None:
            self._observer.close()
            self._observer = None
