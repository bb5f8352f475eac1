"""Brings a run's objects into the cluster, in steps of which each may be the last that this client does.

The Job comes first, suspended; then what belongs to it and is owned by it, so that it goes when the Job goes; then the
Job is released. Whoever repeats the steps finds what is there and goes on.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.engines.kubernetes.ending import is_unreleased
from mlbench_cli.engines.kubernetes.manifests import HASH_LABEL, RUN_LABEL
from mlbench_cli.errors import UsageError
from mlbench_cli.kube.api import Api, ObjectNotFound, Refused
from mlbench_cli.kube.objects import collection_path, object_path

GOING_SECONDS = 90.0  # in which an object that is being deleted has gone
LOOK_SECONDS = 0.5

Object = Mapping[str, Any]


def submit(api: Api, documents: Sequence[Object]) -> dict[str, Any]:
    """Create or adopt the Job and all else, and release it. Returns the Job.

    Raises UsageError where objects of another run have these names, ApiError where the cluster refuses.
    """
    job = _create_job(api, next(document for document in documents if document["kind"] == "Job"))
    return complete(api, job, documents)


def complete(api: Api, job: dict[str, Any], documents: Sequence[Object]) -> dict[str, Any]:
    """What is left to do once the Job is there."""
    if not is_unreleased(job) and not job["spec"].get("suspend"):
        return job
    for document in documents:
        if document["kind"] != "Job":
            _create_owned(api, document, job)
    if not is_unreleased(job):
        return job
    metadata = job["metadata"]
    return api.patch(object_path("Job", metadata["namespace"], metadata["name"]), {"spec": {"suspend": False}})


def _create_job(api: Api, document: Object) -> dict[str, Any]:
    namespace, name = document["metadata"]["namespace"], document["metadata"]["name"]
    path = collection_path("Job", namespace)
    end = time.monotonic() + GOING_SECONDS
    while True:
        try:
            return api.create(path, document)
        except ObjectNotFound as error:
            if "namespaces" not in error.message:
                raise
            raise UsageError(
                f'The cluster has no namespace "{namespace}".', hint=f"kubectl create namespace {namespace}"
            ) from None
        except Refused as error:
            if error.status != 409:
                raise
        try:
            found = api.get(object_path("Job", namespace, name))
        except ObjectNotFound:
            continue
        if "deletionTimestamp" in found["metadata"] and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            continue
        return _adopted(found, document)


def _adopted(found: dict[str, Any], document: Object) -> dict[str, Any]:
    """The Job that is there, if it is of this very spec."""
    wanted, labels = document["metadata"]["labels"], found["metadata"].get("labels") or {}
    name = found["metadata"]["name"]
    if labels.get(HASH_LABEL) == wanted[HASH_LABEL]:
        return found
    if RUN_LABEL not in labels:
        raise UsageError(
            f'The namespace has a Job "{name}" that is not mlbench\'s; it is not touched.', hint="Choose another name."
        )
    raise UsageError(
        f'The cluster has a run "{name}" with other settings.', hint=f"Choose another name, or: mlbench delete {name}"
    )


def _create_owned(api: Api, document: Object, job: Object) -> None:
    """Create an object that goes when the Job goes. One of an earlier Job of that name is on its way out."""
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }
    metadata = {**document["metadata"], "ownerReferences": [owner]}
    kind, namespace, name = document["kind"], metadata["namespace"], metadata["name"]
    end = time.monotonic() + GOING_SECONDS
    while True:
        try:
            api.create(collection_path(kind, namespace), {**document, "metadata": metadata})
            return
        except Refused as error:
            if error.status != 409:
                raise
        try:
            found = api.get(object_path(kind, namespace, name))["metadata"]
        except ObjectNotFound:
            continue
        owners = {reference["uid"] for reference in found.get("ownerReferences") or ()}
        if owner["uid"] in owners:
            return
        if (found.get("labels") or {}).get(RUN_LABEL) != name:
            raise UsageError(
                f'The namespace has a {kind} "{name}" that is not mlbench\'s; it is not touched.',
                hint="Choose another name for the run.",
            )
        if not owners and "deletionTimestamp" not in found:
            # Applied by hand from the printed manifests: from now on it belongs to the Job.
            api.patch(object_path(kind, namespace, name), {"metadata": {"ownerReferences": [owner]}})
            return
        if time.monotonic() > end:
            raise UsageError(f'The {kind} "{name}" of an earlier run is still there.', hint=f"mlbench delete {name}")
        api.delete(object_path(kind, namespace, name))
        time.sleep(LOOK_SECONDS)
