"""The engine that runs on a Kubernetes cluster: one Indexed Job for each run, and what belongs to it.

Every pod runs the agent; a pod of the run is its head, which the client reads through an exec. All state is in the
cluster or in the run's folder, not in this process, so any client with access can continue.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import templates
from mlbench_cli.engines.base import (
    FoundRun,
    Submission,
    UnreadableRun,
    refuse_running,
    refuse_unfetched,
)
from mlbench_cli.engines.kubernetes.channel import HeadMissing
from mlbench_cli.engines.kubernetes.ending import is_over, is_stopped, is_unreleased
from mlbench_cli.engines.kubernetes.head import KubernetesHead
from mlbench_cli.engines.kubernetes.manifests import (
    CREATED_ANNOTATION,
    FETCHED_ANNOTATION,
    ID_ANNOTATION,
    file_name,
    head_name,
    manifests,
    role_of,
    spec_of,
    with_files,
    without_code,
)
from mlbench_cli.engines.kubernetes.pods import HEAD, MANAGED_LABEL, RUN_LABEL
from mlbench_cli.engines.kubernetes.submit import (
    NameTaken,
    complete,
    create_owned,
    find_job,
    read_job,
    submit,
)
from mlbench_cli.engines.kubernetes.workers import is_cut_off
from mlbench_cli.errors import CleanupError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api, ObjectNotFound, list_pods, require_version
from mlbench_cli.kube.claims import DataClaim, ensure_claim
from mlbench_cli.kube.objects import collection_path, object_path
from mlbench_cli.model.run import Ending, Observation, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.run_folder import PODS_FILES, RunFolder
from mlbench_cli.util.files import remove_folder, write_atomically

LOOK_SECONDS = 0.5
GONE_SECONDS = 120.0  # time for deleted objects to disappear
QUIET_SECONDS = 5.0  # of which nothing is said
OWNED = ("ConfigMap", "Service", "NetworkPolicy")


class KubernetesEngine:
    """Executes runs on the cluster that `access` reaches. `report` gets a sentence when it has to wait."""

    def __init__(self, access: Access, report: Callable[[str], None] | None = None) -> None:
        self._access = access
        self._report = report or (lambda text: None)
        self._heads: dict[str, KubernetesHead] = {}

    def render(self, spec: RunSpec) -> Submission:
        """The suspended Job and its objects. `submit` adds the owner references to the Job."""
        return Submission(spec, manifests(spec, self._access.namespace))

    def submit(self, run: Run, submission: Submission) -> None:
        """Create the objects and release the Job; after an interruption, only what is missing."""
        with self._access.client() as api:
            require_version(api)
            submit(api, _with_files(run, submission), {ID_ANNOTATION: run.id, CREATED_ANNOTATION: run.created})
        _write_manifests(run, submission)  # their presence says that the cluster had the run

    def resume(self, run: Run) -> None:
        """Release the run's Job if its client died before doing so; make its head again if somebody has deleted it."""
        namespace = self._namespace(run)
        with self._access.client() as api, suppress(ObjectNotFound):
            job = read_job(api, namespace, run)
            if is_unreleased(job):
                complete(api, job, _with_files(run, self.render(run.spec)))
                return
            try:
                api.get(object_path("Job", namespace, head_name(run.name)))
            except ObjectNotFound:
                job = read_job(api, namespace, run)  # again: whoever releases a head says so before
                if FETCHED_ANNOTATION not in (job["metadata"].get("annotations") or {}):
                    (head,) = [item for item in self.render(run.spec).documents if role_of(item) == HEAD]
                    create_owned(api, head, job)

    # --- look -----------------------------------------------------------------------------------------------------

    def head(self, run: Run) -> KubernetesHead:
        """The pod that has the run's folder."""
        if run.id not in self._heads:
            self._heads[run.id] = KubernetesHead(
                self._access, self._namespace(run), run, lambda: _write_manifests(run, self.render(run.spec))
            )
        return self._heads[run.id]

    def look(self, run: Run, *, max_age: float = 0.0) -> Observation:
        """From what the agents say, and from the Job, its pods, events and nodes."""
        return self.head(run).observe(max_age=max_age)

    def kept_until(self, run: Run) -> float | None:
        """Until when the head keeps the results of an ended run, in seconds since 1970; None if it has none."""
        try:
            end = self.head(run).read_end("until")
        except HeadMissing:
            return None
        return float(end) if end else None

    # --- end ------------------------------------------------------------------------------------------------------

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
            self.head(run).stop(api, str(Ending.CANCELED))

    def delete(self, run: Run, *, force: bool = False) -> None:
        """Remove the run's objects, verified by their label, and its folder.

        Raises UsageError for a running run or one whose results nobody has fetched, unless `force`; CleanupError where
        something stays.
        """
        with self._access.client() as api, suppress(NameTaken):  # then nothing on the cluster is this run's
            self._delete_objects(api, run, force)
        if (head := self._heads.pop(run.id, None)) is not None:
            head.close()
        remove_folder(run.folder)

    def _delete_objects(self, api: Api, run: Run, force: bool) -> None:
        """See `delete`. Raises NameTaken if another run has the name of this one."""
        namespace = self._namespace(run)
        job = find_job(api, namespace, run)
        if job is not None and job["metadata"].get("labels", {}).get(RUN_LABEL) != run.name:
            raise UsageError(f'The Job "{run.name}" is not mlbench\'s; it is not touched.')
        if job is not None and not force:
            _refuse_loss(run, job)
        self._end_pods(api, namespace, run)
        _remove(api, namespace, run, self._report)

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


def _with_files(run: Run, submission: Submission) -> Sequence[Mapping[str, Any]]:
    """The documents of a run, with the files of its command if it brings any."""
    packed = RunFolder(run.folder).state / PODS_FILES
    return with_files(submission.documents, packed.read_bytes()) if packed.exists() else submission.documents


def _write_manifests(run: Run, submission: Submission) -> None:
    """KIND.yaml in the folder of manifests, as submitted. Of the code only the digest is kept."""
    folder = run.manifests
    folder.mkdir(parents=True, exist_ok=True)
    for document in submission.documents:
        write_atomically(folder / file_name(document), templates.dump([without_code(document)]).encode())


def _refuse_loss(run: Run, job: dict[str, Any]) -> None:
    annotations = job["metadata"].get("annotations") or {}
    is_fetched = FETCHED_ANNOTATION in annotations
    if not is_over(job) and not is_stopped(job) and not is_fetched:
        raise refuse_running(run)
    if not is_fetched and job.get("status", {}).get("startTime"):
        raise refuse_unfetched(run)


def _remove(api: Api, namespace: str, run: Run, report: Callable[[str], None]) -> None:
    """Delete everything with the run's label, and wait until it is gone. `report` gets what that takes long for.

    Raises NameTaken if another run has taken its name meanwhile; what is left of this one goes with its Job.
    """
    selector = f"{RUN_LABEL}={run.name}"
    begun, is_told = time.monotonic(), False
    while True:
        left = [(kind, item) for kind in ("Job", "Pod", *OWNED) for item in _list(api, kind, namespace, selector)]
        find_job(api, namespace, run)
        if not left:
            return
        waited = time.monotonic() - begun
        listed = ", ".join(f"{kind} {item['name']}{_holders(item)}" for kind, item in left)[:500]
        if waited > GONE_SECONDS:
            raise CleanupError(
                f'These objects of the run "{run.name}" still exist: {listed}', hint=f"mlbench delete {run.name}"
            )
        if waited > QUIET_SECONDS and not is_told:
            until = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() + GONE_SECONDS - waited))
            report(f"{run.name}: waiting until {until} for the cluster to delete {listed}.")
            is_told = True
        for kind, item in left:
            path = object_path(kind, namespace, item["name"])
            api.delete(path, grace=1 if kind == "Pod" else None, uid=item["uid"])
        time.sleep(LOOK_SECONDS)


def _holders(metadata: Mapping[str, Any]) -> str:
    """The finalizers that keep an object, in brackets; whoever has set them has to remove them."""
    found = metadata.get("finalizers")
    return f" (kept by {', '.join(found)})" if found else ""


def _list(api: Api, kind: str, namespace: str, selector: str) -> list[dict[str, Any]]:
    """The metadata of the objects of a kind."""
    items = api.get(collection_path(kind, namespace), labelSelector=selector).get("items", [])
    return [item["metadata"] for item in items]
