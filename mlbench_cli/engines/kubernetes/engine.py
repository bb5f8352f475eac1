"""The engine that runs on a Kubernetes cluster: one Indexed Job for each run, and what belongs to it.

Every pod runs the agent; a pod of the run is its head, which the client reads through an exec. All state is in the
cluster or in the run's folder, not in this process, so any client with access can continue.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import templates
from mlbench_cli.agent.channel import Channel
from mlbench_cli.engines.base import (
    Fetched,
    FoundRun,
    Submission,
    UnreadableRun,
    refuse_running,
    refuse_unfetched,
)
from mlbench_cli.engines.head import HeadEngine
from mlbench_cli.engines.kubernetes.channel import HeadMissing, PodChannel
from mlbench_cli.engines.kubernetes.ending import active, is_over, is_stopped, is_unreleased
from mlbench_cli.engines.kubernetes.manifests import (
    CREATED_ANNOTATION,
    FETCHED_ANNOTATION,
    GRACE_SECONDS,
    ID_ANNOTATION,
    STOPPED_ANNOTATION,
    file_name,
    head_name,
    manifests,
    role_of,
    spec_of,
    without_code,
)
from mlbench_cli.engines.kubernetes.observe import RunObserver
from mlbench_cli.engines.kubernetes.pods import HEAD, MANAGED_LABEL, ROLE_LABEL, RUN_LABEL
from mlbench_cli.engines.kubernetes.submit import check_version, complete, create_owned, read_job, submit
from mlbench_cli.engines.kubernetes.workers import (
    by_worker,
    has_ended,
    has_started,
    is_cut_off,
    is_on_silent_node,
    why_gone,
)
from mlbench_cli.engines.observe import NodeReport, Snapshot
from mlbench_cli.engines.placement import NodeShare, share_nodes
from mlbench_cli.errors import CleanupError, MlbenchError, UnreachableError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api, ObjectNotFound
from mlbench_cli.kube.claims import DataClaim, ensure_claim
from mlbench_cli.kube.objects import collection_path, object_path
from mlbench_cli.kube.pods import list_pods
from mlbench_cli.model.run import Ending, Finding, Observation, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import remove_folder, write_atomically
from mlbench_cli.util.times import now

RUN_PLACE = "~/run"  # in the head's container
WATCH_RETRY_SECONDS = 2.0  # for which an observation retries a request before it reports the error
HEAD_SECONDS = 60.0  # when fetching, how long to wait for a head that is starting or was just moved
LOOK_SECONDS = 0.5
GONE_SECONDS = 120.0  # time for deleted objects to disappear
LOG_BYTES = 1 << 28  # maximum size of a log read from the API server
OWNED = ("ConfigMap", "Service", "NetworkPolicy")


class KubernetesEngine(HeadEngine):
    """Executes runs on the cluster that `access` reaches."""

    def __init__(self, access: Access, report: Callable[[str], None] | None = None) -> None:
        super().__init__(report)
        self._access = access
        self._channels: dict[str, PodChannel] = {}
        self._observers: dict[str, RunObserver] = {}

    def render(self, spec: RunSpec) -> Submission:
        """The suspended Job and its objects. `submit` adds the owner references to the Job."""
        return Submission(spec, manifests(spec, self._access.namespace))

    def submit(self, run: Run, submission: Submission) -> None:
        """Create the objects and release the Job; after an interruption, only what is missing."""
        save_manifests(run, submission)
        with self._access.client() as api:
            check_version(api)
            submit(api, submission.documents, {ID_ANNOTATION: run.id, CREATED_ANNOTATION: run.created})

    def resume(self, run: Run) -> None:
        """Release the run's Job if its client died before doing so; make its head again if somebody has deleted it."""
        namespace = self._namespace(run)
        with self._access.client() as api, suppress(ObjectNotFound):
            job = read_job(api, namespace, run.spec)
            if is_unreleased(job):
                complete(api, job, self.render(run.spec).documents)
            elif FETCHED_ANNOTATION not in (job["metadata"].get("annotations") or {}):
                (head,) = [item for item in self.render(run.spec).documents if role_of(item) == HEAD]
                try:
                    api.get(object_path("Job", namespace, head_name(run.name)))
                except ObjectNotFound:
                    create_owned(api, head, job)

    # --- look -----------------------------------------------------------------------------------------------------

    def _shares(self, spec: RunSpec) -> Sequence[NodeShare]:
        return share_nodes(spec)

    def _head(self, run: Run) -> Channel:
        channel = self._channels.get(run.id)
        if channel is None:
            find_pod = partial(self._find_head, run)
            channel = PodChannel(self._access, self._namespace(run), f"the head of {run.name}", find_pod)
            self._channels[run.id] = channel
        return channel

    def _run_place(self, run: Run) -> str:
        return RUN_PLACE

    def _find_head(self, run: Run) -> str | None:
        """The pod of the run's head; None while none is running."""
        with self._access.client(retry_seconds=WATCH_RETRY_SECONDS) as api:
            pods = self._head_pods(api, run)
        running = [
            pod
            for pod in pods
            if pod["status"].get("phase") == "Running" and not has_ended(pod) and not is_on_silent_node(pod)
        ]
        return str(running[-1]["metadata"]["name"]) if running else None

    def _head_pods(self, api: Api, run: Run) -> list[dict[str, Any]]:
        """The head's pods, also those that have ended, oldest first."""
        pods = list_pods(api, self._namespace(run), f"{RUN_LABEL}={run.name},{ROLE_LABEL}={HEAD}")
        return sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))

    def _ask(self, run: Run) -> Snapshot:
        """The head's snapshot; an empty one while it is not running: then the cluster is the only source."""
        try:
            try:
                return super()._ask(run)
            except HeadMissing:
                raise
            except UnreachableError:  # the pod that the channel led to may have been deleted, and another be there
                return super()._ask(run)
        except HeadMissing:
            known = self._synced.get(run.id)
            nodes = known[1].nodes if known else {worker: NodeReport() for worker in range(run.spec.workers)}
            return Snapshot(time.time(), nodes, is_served=False)

    def look(self, run: Run) -> Observation:
        """See `Engine.look`; queries the cluster now."""
        if (observer := self._observers.get(run.id)) is not None:
            observer.expire()
        return super().look(run)

    def _observe(self, run: Run, snapshot: Snapshot) -> Observation:
        observer = self._observers.get(run.id)
        if observer is None:
            api = self._access.client(retry_seconds=WATCH_RETRY_SECONDS)
            observer = self._observers[run.id] = RunObserver(api, self._namespace(run), run)
        seen = observer.observe(snapshot)
        if observer.job is None:
            seen = _without_job(run, seen)
        return seen

    # --- end ------------------------------------------------------------------------------------------------------

    def fetch(self, run: Run) -> Fetched:
        """Fetch output and logs into the run's folder; then release the head.

        `complete` is False if results that were not fetched are lost with the head.
        """
        seen = self._look(run)
        with self._access.client() as api:
            self._stop_those_who_wait(api, run, str(seen.ended or Ending.CANCELLED))
            snapshot = self._await_head(api, run)
            fetched = Fetched(0, 0)
            if snapshot.is_served:
                with suppress(HeadMissing):
                    fetched = self._fetch_all(run)
            missing = self._find_missing(run, snapshot, seen)
            if missing:
                self._save_manifests(run)
                lost = self._explain_loss(api, run, missing)
                fetched = replace(fetched, complete=False, findings=(*fetched.findings, lost))
            self._release(run)
            return fetched

    def _stop_those_who_wait(self, api: Api, run: Run, ending: str) -> None:
        """Stop workers that would otherwise run forever, unless the Job is over or stopped already."""
        pods = by_worker(list_pods(api, self._namespace(run), f"{RUN_LABEL}={run.name}"))
        if active(pods, {}):
            with suppress(ObjectNotFound):
                if not is_over(read_job(api, self._namespace(run), run.spec)):
                    self._stop(api, run, ending)

    def _await_head(self, api: Api, run: Run) -> Snapshot:
        """The head's snapshot, once everything that is still being sent has arrived there."""
        end = time.monotonic() + GRACE_SECONDS + HEAD_SECONDS
        while True:
            snapshot = self._sync(run)
            pods = by_worker(list_pods(api, self._namespace(run), f"{RUN_LABEL}={run.name}"))
            coming = [
                worker
                for worker, report in snapshot.nodes.items()
                if worker in pods and not has_ended(pods[worker]) and not report.is_over and has_started(pods[worker])
            ]
            heads = [pod for pod in self._head_pods(api, run) if not has_ended(pod)]
            if (not coming and (snapshot.is_served or not heads)) or time.monotonic() >= end:
                return snapshot
            time.sleep(LOOK_SECONDS)

    def _find_missing(self, run: Run, snapshot: Snapshot, seen: Observation) -> list[int]:
        """The workers that have run, but of which the head has nothing."""
        folder = RunFolder(run.folder)
        started = {run.spec.unit_of(each.rank) for each in seen.workers if each.started}
        return [
            worker
            for worker, report in snapshot.nodes.items()
            if worker in started and report.state is None and not (folder.state / f"fetched-{worker}.json").exists()
        ]

    def _explain_loss(self, api: Api, run: Run, missing: Sequence[int]) -> Finding:
        """Explain why output is missing, and read the logs from the API server as far as it has them."""
        heads = self._head_pods(api, run)
        ended = [pod for pod in heads if has_ended(pod) or is_on_silent_node(pod)]
        cause = why_gone(ended) if ended or not heads else "an earlier one was deleted with what it had"
        pods = by_worker(list_pods(api, self._namespace(run), f"{RUN_LABEL}={run.name}"))
        for worker in missing:
            log = RunFolder(run.folder).log(run.spec.ranks_of(worker)[0])
            if worker in pods and not log.exists():
                with suppress(MlbenchError):
                    pod = object_path("Pod", self._namespace(run), pods[worker]["metadata"]["name"])
                    self._copy_plain_log(api, pod, log)
        others = f" (And of {len(missing) - 1} others.)" if len(missing) > 1 else ""
        return Finding(
            "results_lost",
            f"The head of the run has no output of worker {missing[0]}: {cause}.{others} Logs come from the API, and "
            "may lack their beginnings.",
            hint="Run it again.",
            evidence={"workers": list(missing), "head": [why_gone([pod]) for pod in heads]},
        )

    def _copy_plain_log(self, api: Api, pod: str, log: Path) -> None:
        with api.stream(f"{pod}/log", read_seconds=30, container="main", limitBytes=LOG_BYTES) as answer:
            data = answer.read()
        log.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(log, data)

    def _save_manifests(self, run: Run) -> None:
        save_manifests(run, self.render(run.spec))

    def _release(self, run: Run) -> None:
        """Say in the cluster that the results are fetched, then end the head."""
        with suppress(MlbenchError):
            self._head(run).call("put", path=f"{RUN_PLACE}/fetched")
        self._forget(run)
        with self._access.client() as api:
            path = object_path("Job", self._namespace(run), run.name)
            with suppress(ObjectNotFound):
                api.patch(path, {"metadata": {"annotations": {FETCHED_ANNOTATION: now()}}})
            api.delete(object_path("Job", self._namespace(run), head_name(run.name)))

    def _forget(self, run: Run) -> None:
        """Drop the connections for a run."""
        if (channel := self._channels.pop(run.id, None)) is not None:
            channel.close()
        if (observer := self._observers.pop(run.id, None)) is not None:
            observer.close()

    def kept_until(self, run: Run) -> float | None:
        """Until when the head keeps the results of an ended run, in seconds since 1970; None if it has none."""
        try:
            answer, data = self._head(run).exchange("get", path=f"{RUN_PLACE}/until")
        except HeadMissing:
            return None
        return float(data) if answer["size"] else None

    def ensure_claim(self, name: str, size: str, storage_class: str | None, mode: str | None) -> DataClaim:
        """The claim for data sets of that name, made if there is none. Raises UsageError, ApiError."""
        with self._access.client() as api:
            return ensure_claim(api, self._access.namespace, name, size, storage_class, mode)

    def discover(self, namespace: str | None = None) -> list[FoundRun | UnreadableRun]:
        """All runs in the namespace, oldest first, whoever started them."""
        return discover_runs(self._access, namespace)

    def cancel(self, run: Run) -> None:
        """Stop the workers gracefully: their agents end the ranks and hand over the results."""
        with self._access.client() as api:
            self._stop(api, run, str(Ending.CANCELLED))

    def _stop(self, api: Api, run: Run, ending: str) -> None:
        """Let the Job controller stop all workers. `ending` is recorded on the Job, so that every client reports the
        same one.
        """
        stop = {"activeDeadlineSeconds": 1} if run.spec.pods.queue else {"suspend": True}
        path = object_path("Job", self._namespace(run), run.name)
        with suppress(ObjectNotFound):
            job = api.get(path)
            if not is_over(job) and not is_stopped(job):
                api.patch(path, {"metadata": {"annotations": {STOPPED_ANNOTATION: f"{ending} {now()}"}}, "spec": stop})

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
            self._end_pods(api, namespace, run)
            _remove(api, namespace, run.spec)
        self._forget(run)
        remove_folder(run.folder)

    def _end_pods(self, api: Api, namespace: str, run: Run) -> None:
        """Delete the pods at once: a stopped one would otherwise have its grace period."""
        for pod in list_pods(api, namespace, f"{RUN_LABEL}={run.name}"):
            # The node of a pod that is cut off cannot confirm that the pod has ended.
            api.delete(object_path("Pod", namespace, pod["metadata"]["name"]), grace=0 if is_cut_off(pod) else 1)

    # --- plumbing -------------------------------------------------------------------------------------------------

    def _namespace(self, run: Run) -> str:
        return run.spec.pods.namespace or self._access.namespace


def discover_runs(access: Access, namespace: str | None = None) -> list[FoundRun | UnreadableRun]:
    """All runs in the namespace, oldest first, from what their Jobs say."""
    with access.client() as api:
        return [_found_run(job) for job in _run_jobs(api, namespace or access.namespace)]


def _run_jobs(api: Api, namespace: str) -> list[dict[str, Any]]:
    """The Jobs of runs, without those of their heads, oldest first."""
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
    """KIND.yaml in the folder of manifests, as submitted. Of the code only the digest is kept."""
    folder = run.manifests
    folder.mkdir(parents=True, exist_ok=True)
    for document in submission.documents:
        write_atomically(folder / file_name(document), templates.dump([without_code(document)]).encode())


def _without_job(run: Run, seen: Observation) -> Observation:
    """How a run ended whose Job does not exist: it was never submitted, was deleted, or has expired."""
    if all(worker.exit_code == 0 for worker in seen.workers):
        return replace(seen, ended=Ending.EXITED)
    if not run.manifests.exists():
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
    annotations = job["metadata"].get("annotations") or {}
    is_fetched = FETCHED_ANNOTATION in annotations
    if not is_over(job) and not is_stopped(job) and not is_fetched:
        raise refuse_running(run)
    if not is_fetched and job.get("status", {}).get("startTime"):
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
        time.sleep(LOOK_SECONDS)


def _names(api: Api, kind: str, namespace: str, selector: str) -> list[str]:
    items = api.get(collection_path(kind, namespace), labelSelector=selector).get("items", [])
    return [item["metadata"]["name"] for item in items]
