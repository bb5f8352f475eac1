"""The dashboard that the Helm chart `charts/mlbench` has installed in a cluster."""

from dataclasses import dataclass

from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import AccessDenied

LABELS = "app.kubernetes.io/name=mlbench"


@dataclass(frozen=True)
class ClusterDashboard:
    """Where a dashboard answers. `forward` is the command that makes it reachable, if nothing outside the cluster is;
    `secret` has its token."""

    url: str
    namespace: str
    secret: str
    forward: str | None = None


def find_dashboard(access: Access) -> ClusterDashboard | None:
    """The dashboard of a cluster: in any namespace if these credentials may look, else in their own. None if there is
    none. Raises an MlbenchError if the cluster does not answer."""
    with access.client() as api:
        try:
            found = api.get("/apis/apps/v1/deployments", labelSelector=LABELS)
        except AccessDenied:
            found = api.get(f"/apis/apps/v1/namespaces/{access.namespace}/deployments", labelSelector=LABELS)
        for item in found["items"]:
            name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
            pod = item["spec"]["template"]["spec"]
            words = [word for container in pod["containers"] for word in container.get("args") or ()]
            public = next((word.partition("=")[2] for word in words if word.startswith("--public-url=")), "")
            volumes = {volume["name"]: volume for volume in pod.get("volumes") or ()}
            secret = (volumes.get("token", {}).get("secret") or {}).get("secretName", name)
            forward = None
            if "//127.0.0.1:" in public:
                port = public.rpartition(":")[2]
                forward = f"kubectl --namespace {namespace} port-forward service/{name} {port}"
            return ClusterDashboard(f"{public}/", namespace, secret, forward)
    return None
