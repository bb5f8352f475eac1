"""The pods of a run, without what nothing is derived from."""

from collections.abc import Mapping
from typing import Any

from mlbench_cli.kube.api import Api

PAGE = 100  # pods per answer: 250 complete pods take 15 MB
GONE = "mlbenchGone"  # set in a pod that was there, and has been deleted
KEPT_METADATA = ("name", "uid", "labels", "creationTimestamp", "deletionTimestamp")


def list_pods(api: Api, namespace: str, selector: str) -> list[dict[str, Any]]:
    """List the pods with `selector` once, page by page, because 1,000 complete pods take 50 MB."""
    found: list[dict[str, Any]] = []
    token: str | None = ""
    while token is not None:
        params = {"labelSelector": selector, "limit": PAGE, "continue": token or None}
        page = api.request("GET", f"/api/v1/namespaces/{namespace}/pods", params=params)
        found += [_trim(item) for item in page.get("items", ())]
        token = page.get("metadata", {}).get("continue") or None
    return found


def _trim(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the fields needed for diagnosis, about a fifth of a pod."""
    metadata, spec = pod.get("metadata", {}), pod.get("spec", {})
    return {
        "metadata": {key: metadata[key] for key in KEPT_METADATA if key in metadata},
        "spec": {key: spec[key] for key in ("nodeName",) if key in spec},
        "status": {key: value for key, value in pod.get("status", {}).items() if key not in ("podIPs", "hostIPs")},
    }
