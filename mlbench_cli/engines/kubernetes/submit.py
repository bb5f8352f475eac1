"""Creates a run's objects in the cluster, in steps: the client may die after any of them.

The Job comes first, suspended; then what belongs to it and is owned by it, so that Kubernetes deletes it with the Job;
then the Job is released. Repeating the steps finds what exists and continues.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlbench_cli.engines.kubernetes.ending import is_suspended, is_unreleased
from mlbench_cli.engines.kubernetes.manifests import (
    HASH_LABEL,
    ID_ANNOTATION,
    TOKEN_ANNOTATION,
    queue_of,
    role_of,
)
from mlbench_cli.engines.kubernetes.pods import HEAD, RUN_LABEL
from mlbench_cli.errors import UsageError
from mlbench_cli.kube.api import AccessDenied, Api, ApiError, ObjectNotFound, QuotaExceeded, RequestRejected
from mlbench_cli.kube.objects import collection_path, object_path
from mlbench_cli.model.run import Run

GOING_SECONDS = 90.0  # time for an object that is being deleted to disappear
LOOK_SECONDS = 0.5
CONTROLLER_LABEL = "batch.kubernetes.io/controller-uid"  # of a pod: the uid of its Job

Object = Mapping[str, Any]


def submit(api: Api, documents: Sequence[Object], annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Create or adopt the Job and all else, and release it. Returns the Job.

    `annotations` are added to the Job's. Raises UsageError if objects of another run have these names, ApiError if the
    cluster refuses. Whatever was created is deleted again if the cluster refuses the rest.
    """
    job = _create_job(api, _annotate(documents[0], annotations or {}))
    try:
        return complete(api, job, documents)
    except (AccessDenied, QuotaExceeded, UsageError):
        metadata = job["metadata"]
        with suppress(ApiError):  # a suspended Job never expires, and counts toward the namespace's quota
            api.delete(object_path("Job", metadata["namespace"], metadata["name"]), uid=metadata["uid"])
        raise


class NameTaken(ObjectNotFound):
    """The run's Job has been deleted, and another run has its name."""


def read_job(api: Api, namespace: str, run: Run) -> dict[str, Any]:
    """The Job of a run's workers. Raises ObjectNotFound, or NameTaken."""
    job = api.get(object_path("Job", namespace, run.name))
    if _id_of(job) not in (None, run.id):
        raise NameTaken(f'The Job "{run.name}" is that of another run.', status=404)
    return job


def find_job(api: Api, namespace: str, run: Run) -> dict[str, Any] | None:
    """The Job of a run's workers; None if there is none. Raises NameTaken."""
    try:
        return read_job(api, namespace, run)
    except NameTaken:
        raise
    except ObjectNotFound:
        return None


def _id_of(job: Object) -> str | None:
    """The id of the run whose Job this is; None for one that was applied by hand."""
    found: str | None = (job["metadata"].get("annotations") or {}).get(ID_ANNOTATION)
    return found


def pods_of(job: Object, pods: Iterable[Object]) -> list[Object]:
    """Those of the pods that are this Job's, and not those of an earlier one of the same name."""
    uid = job["metadata"]["uid"]
    return [pod for pod in pods if (pod["metadata"].get("labels") or {}).get(CONTROLLER_LABEL) == uid]


def patch_job(api: Api, job: Object, change: Object) -> dict[str, Any]:
    """Change this very Job: the server refuses if another one has its name by now. Raises ObjectNotFound."""
    metadata = {**change.get("metadata", {}), "uid": job["metadata"]["uid"]}
    path = object_path("Job", job["metadata"]["namespace"], job["metadata"]["name"])
    return api.patch(path, {**change, "metadata": metadata})


def _annotate(item: Object, annotations: Mapping[str, str]) -> dict[str, Any]:
    metadata = item["metadata"]
    return {**item, "metadata": {**metadata, "annotations": {**metadata["annotations"], **annotations}}}


def complete(api: Api, job: dict[str, Any], documents: Sequence[Object]) -> dict[str, Any]:
    """Do what is left once the Job exists."""
    if not is_suspended(job):
        return job
    for document in documents[1:]:
        create_owned(api, document, job)
    if not is_unreleased(job):
        return job  # its queue releases it
    return patch_job(api, job, {"spec": {"suspend": False}})


def _create_job(api: Api, document: Object) -> dict[str, Any]:
    namespace, name = document["metadata"]["namespace"], document["metadata"]["name"]
    kind = document["kind"]
    path = collection_path(kind, namespace)
    end = time.monotonic() + GOING_SECONDS
    while True:
        try:
            # By default the server drops fields that it does not know, such as a misspelled one of --pod-patch.
            return api.create(path, document, fieldValidation="Strict")
        except ObjectNotFound as error:
            if "namespaces" not in error.message:
                raise
            raise UsageError(
                f'The cluster has no namespace "{namespace}".', hint=f"kubectl create namespace {namespace}"
            ) from None
        except RequestRejected as error:
            if error.status != 409:
                error.hint = "Check --pod-patch and the options of the run."
                raise
        try:
            found = api.get(object_path(kind, namespace, name))
        except ObjectNotFound:
            continue
        if "deletionTimestamp" in found["metadata"] and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            continue
        return _adopt_job(found, document)


def _adopt_job(found: dict[str, Any], document: Object) -> dict[str, Any]:
    """The Job that is there, if it is of this very run, or was applied by hand from its manifests."""
    wanted, labels = document["metadata"]["labels"], found["metadata"].get("labels") or {}
    name = found["metadata"]["name"]
    is_same = labels.get(HASH_LABEL) == wanted[HASH_LABEL]
    if is_same and _id_of(found) in (None, _id_of(document)):
        return found
    if RUN_LABEL not in labels:
        raise UsageError(
            f'The namespace has a Job "{name}" that is not mlbench\'s; it is not touched.', hint="Choose another name."
        )
    raise UsageError(
        f'The cluster has {"another run" if is_same else "a run"} "{name}"{"" if is_same else " with other settings"}.',
        hint=f"Choose another name, or: mlbench status --refresh, then mlbench delete {name}",
    )


def _owner(job: Object, is_controller: bool) -> dict[str, Any]:
    metadata = job["metadata"]
    return {
        "apiVersion": job.get("apiVersion", "batch/v1"),
        "kind": job.get("kind", "Job"),
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": is_controller,
        "blockOwnerDeletion": False,
    }


def create_owned(api: Api, document: Object, job: Object) -> None:
    """Create an object that Kubernetes deletes with the Job. Waits while one of an earlier Job of the same name is
    being deleted."""
    # Kueue puts a new Job into the namespace's queue "default" unless a Job controls it; a head that it queued might
    # never start.
    is_head = role_of(document) == HEAD
    owners = [_owner(job, is_controller=is_head)]
    metadata = {**document["metadata"], "ownerReferences": owners}
    document = {**document, "metadata": metadata}
    if role_of(document):
        document = _with_token(document, job["metadata"]["uid"])
    kind, namespace, name = document["kind"], metadata["namespace"], metadata["name"]
    end = time.monotonic() + GOING_SECONDS
    while True:
        try:
            api.create(collection_path(kind, namespace), document)
            break
        except RequestRejected as error:
            if error.status != 409:
                raise
        try:
            found = api.get(object_path(kind, namespace, name))["metadata"]
        except ObjectNotFound:
            continue
        known = {reference["uid"] for reference in found.get("ownerReferences") or ()}
        if job["metadata"]["uid"] in known:
            break
        if (found.get("labels") or {}).get(RUN_LABEL) != metadata["labels"][RUN_LABEL]:
            raise UsageError(
                f'The namespace has a {kind} "{name}" that is not mlbench\'s; it is not touched.',
                hint="Choose another name for the run.",
            )
        if not known and "deletionTimestamp" not in found and not role_of(document):
            # Applied by hand from the printed manifests: from now on it belongs to the Job.
            api.patch(object_path(kind, namespace, name), {"metadata": {"ownerReferences": owners}})
            return
        if time.monotonic() > end:
            raise UsageError(f'The {kind} "{name}" of an earlier run still exists.', hint=f"mlbench delete {name}")
        api.delete(object_path(kind, namespace, name))
        time.sleep(LOOK_SECONDS)
    if is_head and queue_of(job):
        # Kueue suspends Jobs below one that it has not admitted, and again when that has ended (shouldSuspendChildJob
        # of Kueue 0.17): the head would lose the results. From now on no Job controls it.
        free = {"ownerReferences": [_owner(job, is_controller=False)]}
        api.patch(object_path(kind, namespace, name), {"metadata": free, "spec": {"suspend": False}})


def _with_token(job: Object, uid: str) -> Object:
    """The Job of a head with the uid of the run's Job, by which workers prove that they belong to it."""
    spec, template = job["spec"], job["spec"]["template"]
    metadata = template["metadata"]
    annotations = {**(metadata.get("annotations") or {}), TOKEN_ANNOTATION: uid}
    template = {**template, "metadata": {**metadata, "annotations": annotations}}
    return {**job, "spec": {**spec, "template": template}}
