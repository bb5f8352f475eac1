"""Shaping by Chaos Mesh: objects of its kind NetworkChaos, created once the pods run, deleted when they have ended."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlbench_cli.engines.kubernetes.manifests import CHAOS
from mlbench_cli.engines.kubernetes.pods import RUN_LABEL
from mlbench_cli.engines.kubernetes.submit import create_owned
from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.kube.api import Api, ObjectNotFound
from mlbench_cli.kube.objects import collection_path, condition, is_true, object_path

INJECT_SECONDS = 60.0
LOOK_SECONDS = 1.0
INJECTED = "AllInjected"

Object = Mapping[str, Any]


def require_chaos_mesh(api: Api, namespace: str) -> None:
    """Raise UsageError if the cluster does not know the kind NetworkChaos, CredentialError without the right to it."""
    try:
        api.get(collection_path(CHAOS, namespace), limit=1)
    except ObjectNotFound:
        raise UsageError(
            "--network-method chaos-mesh: the cluster has no NetworkChaos resource, so Chaos Mesh is not installed.",
            hint="Install Chaos Mesh (https://chaos-mesh.org/docs), or choose --network-method annotation.",
        ) from None


def inject(api: Api, documents: Sequence[Object], job: Object, seconds: float = INJECT_SECONDS) -> list[str]:
    """Create the objects, owned by the Job, and wait until all are injected; their names.

    Raises CapacityError with the object's own words after `seconds`.
    """
    for document in documents:
        create_owned(api, document, job)
    deadline = time.monotonic() + seconds
    for document in documents:
        metadata = document["metadata"]
        path = object_path(CHAOS, metadata["namespace"], metadata["name"])
        while not is_true(condition(found := api.get(path), INJECTED)):
            if time.monotonic() > deadline:
                raise CapacityError(
                    f"Chaos Mesh has not injected {metadata['name']} within {seconds:g} s: {_find_reason(found)}"
                )
            time.sleep(LOOK_SECONDS)
    return [document["metadata"]["name"] for document in documents]


def remove_chaos(api: Api, namespace: str, run_name: str) -> None:
    """Delete the objects of a run; those of a cluster without Chaos Mesh are not there."""
    with suppress(ObjectNotFound):
        found = api.get(collection_path(CHAOS, namespace), labelSelector=f"{RUN_LABEL}={run_name}")
        for item in found.get("items", []):
            api.delete(object_path(CHAOS, namespace, item["metadata"]["name"]))


def _find_reason(item: Object) -> str:
    """Why an object is not injected, as far as it says: the last failed event of a pod, or its conditions."""
    status = item.get("status") or {}
    for record in (status.get("experiment") or {}).get("containerRecords") or ():
        for event in reversed(record.get("events") or ()):
            if event.get("type") == "Failed" and event.get("message"):
                return " ".join(str(event["message"]).split())[:300]
    met = ", ".join(f"{each.get('type')} is {each.get('status')}" for each in status.get("conditions") or ())
    return met or "it has no status, so its controller is not running"
