"""NVIDIA's device plugin on AKS."""

from collections.abc import Sequence

from providers.kubernetes_calls import ClusterObjects, Document
from providers.pins import require_pin
from templates import documents

PLUGIN = "nvidia-device-plugin"
SPOT = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Exists", "effect": "NoSchedule"}


class DevicePlugin(ClusterObjects):
    """NVIDIA's device plugin, which registers GPUs with Kubernetes: AKS installs only the driver.

    It is ready once it exists; waiting for the machines includes waiting for their GPUs.
    """

    kind = "GPU device plugin"

    def documents(self) -> Sequence[Document]:
        """The DaemonSet, which also runs on spot machines."""
        (manifest,) = documents("kubernetes/nvidia-device-plugin.yaml", {"image": require_pin("devices", PLUGIN)})
        spec = manifest["spec"]["template"]["spec"]
        spec["tolerations"] = [*spec.get("tolerations", []), SPOT]
        return [manifest]
