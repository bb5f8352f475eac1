"""NVIDIA's device plugin on AKS."""

from collections.abc import Sequence

from providers.kubernetes_calls import ClusterObjects, Document
from providers.pins import require_pin
from templates import documents

PLUGIN = "nvidia-device-plugin"
SPOT = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Exists", "effect": "NoSchedule"}


class DevicePlugin(ClusterObjects):
    """NVIDIA's device plugin, which shows the GPUs to Kubernetes: AKS installs the driver only.

    It is ready as soon as it is there; its effect is waited for with the machines.
    """

    kind = "GPU device plugin"

    def documents(self) -> Sequence[Document]:
        """The DaemonSet, which runs on spot machines, too."""
        (manifest,) = documents("kubernetes/nvidia-device-plugin.yaml", {"image": require_pin("devices", PLUGIN)})
        spec = manifest["spec"]["template"]["spec"]
        spec["tolerations"] = [*spec.get("tolerations", []), SPOT]
        return [manifest]
