"""When a cluster on AKS is of use: its workers have joined, a container has used their GPUs, its end is in its tags."""

from collections.abc import Sequence

from mlbench_cli.errors import NotFoundError
from providers.aks.errors import Message
from providers.aks.resources import ROLE_LABEL, WORKER, ControlPlane, ResourceGroup
from providers.base import Readiness, Resource, ResourceStatus, ownership_tags
from providers.gpu_probe import GpuProbe
from providers.kubernetes_calls import apply_object, open_young_cluster
from providers.pins import require_pin
from templates import documents

SPOT = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Exists", "effect": "NoSchedule"}
DAEMON_SETS = "/apis/apps/v1/namespaces/kube-system/daemonsets"


class EndTags(Resource):
    """The tag of the group that tells `mlbench gc` of every machine when the cluster ends."""

    kind = "tag of the end"
    create_seconds = 600.0

    def __init__(self, group: ResourceGroup) -> None:
        self.group = group
        self.name = f"{group.name}/expires"
        self.goes_with = group

    def find(self) -> ResourceStatus | None:
        """Compare the tags of the group with those wanted. Raises NotFoundError if the group does not exist."""
        wanted = ownership_tags(self.group.cluster)
        return ResourceStatus("set") if wanted.items() <= self._tags().items() else None

    def create(self) -> None:
        """Add the ownership tags, with the new end, to those that the group has."""
        tags = {**self._tags(), **ownership_tags(self.group.cluster)}
        self.group.azure.change("PATCH", self.group.path, f"tag the group {self.group.name}", {"tags": tags})

    def poll(self) -> Readiness:
        """Ready when Azure shows the new tags."""
        return Readiness(self.find() is not None, "Azure does not show it yet")

    def delete(self) -> None:
        """Do nothing: the tags go with the group."""
        return

    def _tags(self) -> dict[str, str]:
        found = self.group.find_raw()
        if found is None:
            raise NotFoundError(f'There is no resource group "{self.group.name}".')
        return dict(found.get("tags") or {})


class DevicePlugin(Resource):
    """NVIDIA's device plugin, which shows the GPUs to Kubernetes: AKS installs the driver only."""

    kind = "GPU device plugin"
    create_seconds = 600.0

    def __init__(self, plane: ControlPlane, needs: Sequence[Resource]) -> None:

        (self.manifest,) = documents(
            "kubernetes/nvidia-device-plugin.yaml", {"image": require_pin("devices", "nvidia-device-plugin")}
        )
        _adapt_plugin(self.manifest)
        self.plane = plane
        self.name = str(self.manifest["metadata"]["name"])
        self.needs = tuple(needs)
        self.goes_with = plane.group

    def find(self) -> ResourceStatus | None:
        """Look for the DaemonSet; None if it, or the cluster, does not exist."""
        try:
            with open_young_cluster(self.plane.access) as kubernetes:
                kubernetes.get(f"{DAEMON_SETS}/{self.name}")
        except NotFoundError:
            return None
        return ResourceStatus("there")

    def create(self) -> None:
        """Apply the DaemonSet on the server's side."""
        with open_young_cluster(self.plane.access) as kubernetes:
            apply_object(kubernetes, f"{DAEMON_SETS}/{self.name}", self.manifest)

    def poll(self) -> Readiness:
        """Ready as soon as it is there; its effect is waited for with the machines."""
        return Readiness(self.find() is not None, "the DaemonSet is not there yet")

    def delete(self) -> None:
        """Do nothing: it goes with the cluster."""
        return


def gpu_probe(plane: ControlPlane, gpus: int, image: str, needs: Sequence[Resource]) -> GpuProbe:
    """The proof that containers on the workers can use their GPUs."""
    return GpuProbe(plane.access, image, gpus, {ROLE_LABEL: WORKER}, needs, plane.group, [SPOT])


def _adapt_plugin(manifest: Message) -> None:
    """Let the plugin run on spot machines, too."""
    spec = manifest["spec"]["template"]["spec"]
    spec["tolerations"] = [*spec.get("tolerations", []), SPOT]
