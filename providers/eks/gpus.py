"""Makes GPUs known to Kubernetes: NVIDIA's device plugin, and the wait until every machine shows its GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlbench_cli.errors import MlbenchError, NotFoundError
from providers.base import Found, Progress, Resource, TransientError
from providers.eks.control import ControlPlane
from providers.eks.nodes import ROLE_LABEL, WORKER, NodeGroup

MANIFEST = "kubernetes/nvidia-device-plugin.yaml"
PATH = "/apis/apps/v1/namespaces/kube-system/daemonsets"
GPU = "nvidia.com/gpu"


class DevicePlugin(Resource):
    """Applied by us, since the machines' image brings the driver and not the plugin."""

    kind = "GPU device plugin"
    create_seconds = 900.0

    def __init__(
        self, plane: ControlPlane, workers: NodeGroup, count: int, gpus: int, needs: tuple[Resource, ...] = ()
    ) -> None:
        from templates import documents

        (self.manifest,) = documents(MANIFEST, {})
        self.plane = plane
        self.count = count
        self.gpus = gpus
        self.name = str(self.manifest["metadata"]["name"])
        self.needs = needs or (plane, workers)
        self.goes_with = workers

    def find(self) -> Found | None:
        with self._api() as api:
            if api is None:
                return None
            try:
                api.get(f"{PATH}/{self.name}")
            except NotFoundError:
                return None
        return Found("there")

    def create(self) -> None:
        with self._api() as api:
            if api is None:
                raise TransientError(f"The EKS cluster {self.plane.name} cannot be reached yet.")
            api.request(
                "PATCH",
                f"{PATH}/{self.name}",
                params={"fieldManager": "mlbench", "force": True},
                body=self.manifest,
                content_type="application/apply-patch+yaml",
            )

    def poll(self) -> Progress:
        with self._api() as api:
            if api is None:
                return Progress(False, "the cluster cannot be reached yet")
            nodes = api.get("/api/v1/nodes", labelSelector=f"{ROLE_LABEL}={WORKER}")["items"]
        shown = [_gpus(node) for node in nodes]
        ready = sum(1 for gpus in shown if gpus >= self.gpus)
        return Progress(ready >= self.count, f"{ready} of {self.count} machines show their {self.gpus} GPUs")

    def delete(self) -> None:
        return

    @contextmanager
    def _api(self) -> Iterator[Any]:
        """A client, or None where there is no cluster to talk to. Refusals soon after the start pass by themselves."""
        try:
            access = self.plane.access()
        except NotFoundError:
            yield None
            return
        try:
            with access.client() as api:
                yield api
        except MlbenchError as error:
            status = error.details.get("status")
            if status is not None and (status in (0, 401, 429) or status >= 500):
                raise TransientError(error.message, hint=error.hint) from None
            raise


def _gpus(node: dict[str, Any]) -> int:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    return int(allocatable.get(GPU, 0))
