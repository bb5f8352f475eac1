"""Paths of a run's objects in the API."""

PREFIXES = {
    "Job": ("/apis/batch/v1", "jobs"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Service": ("/api/v1", "services"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PodTemplate": ("/api/v1", "podtemplates"),
    "ProvisioningRequest": ("/apis/autoscaling.x-k8s.io/v1", "provisioningrequests"),
    "Secret": ("/api/v1", "secrets"),
    "Pod": ("/api/v1", "pods"),
    "Event": ("/api/v1", "events"),
}


def collection_path(kind: str, namespace: str) -> str:
    """The path of all objects of that kind in a namespace."""
    prefix, plural = PREFIXES[kind]
    return f"{prefix}/namespaces/{namespace}/{plural}"


def object_path(kind: str, namespace: str, name: str) -> str:
    """The path of one object."""
    return f"{collection_path(kind, namespace)}/{name}"
