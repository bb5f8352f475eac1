"""API paths of a run's objects, and status conditions."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

PREFIXES = {
    "Job": ("/apis/batch/v1", "jobs"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Service": ("/api/v1", "services"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PodTemplate": ("/api/v1", "podtemplates"),
    "ProvisioningRequest": ("/apis/autoscaling.x-k8s.io/v1", "provisioningrequests"),
    "ResourceClaimTemplate": ("/apis/resource.k8s.io/v1", "resourceclaimtemplates"),
    "Secret": ("/api/v1", "secrets"),
    "Pod": ("/api/v1", "pods"),
    "Event": ("/api/v1", "events"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
}

# Why a container waits for its image (pkg/kubelet/images), and the words of registries and runtimes that trying again
# does not change. A "content digest" that is not found is missing on the node, not in the registry: containerd 3604.
PULL_REASONS = (
    *("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "InvalidImageName", "ErrImageNeverPull"),
    *("RegistryUnavailable", "SignatureValidationFailed"),
)
FINAL_PULL = re.compile(
    r"(?<!content digest sha256:[0-9a-f]{64}: )not found|manifest unknown|does not exist|denied|unauthorized"
    r"|authentication required|invalid reference|no basic auth credentials|short[- ]name"
    r"|no match for platform|\b40[13]\b",
    re.IGNORECASE,
)


def collection_path(kind: str, namespace: str) -> str:
    """The path of all objects of that kind in a namespace."""
    prefix, plural = PREFIXES[kind]
    return f"{prefix}/namespaces/{namespace}/{plural}"


def object_path(kind: str, namespace: str, name: str) -> str:
    """The path of one object."""
    return f"{collection_path(kind, namespace)}/{name}"


def condition(owner: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The condition of this type in a Job's, pod's or node's status; empty if there is none."""
    conditions: Sequence[Mapping[str, Any]] = (owner.get("status") or {}).get("conditions") or ()
    return next((item for item in conditions if item.get("type") == kind), {})


def is_true(item: Mapping[str, Any]) -> bool:
    """Whether a condition of a pod, Job or node has the status "True"."""
    return item.get("status") == "True"
