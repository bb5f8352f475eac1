"""What workloads leave in a cloud: the objects of the cluster that stand for it, and what outlives the cluster."""

from msgspec import Struct

APPS, BATCH, CORE = "/apis/apps/v1", "/apis/batch/v1", "/api/v1"
# Of each kind: where they are listed.
BALANCERS = {
    "Service": f"{CORE}/services",
    "Ingress": "/apis/networking.k8s.io/v1/ingresses",
    "Gateway": "/apis/gateway.networking.k8s.io/v1/gateways",
}
DISKS = {
    "PersistentVolumeClaim": f"{CORE}/persistentvolumeclaims",
    "PersistentVolume": f"{CORE}/persistentvolumes",
}
KINDS = {**BALANCERS, **DISKS}


class WorkloadObject(Struct, frozen=True):
    """An object that stands for something in the cloud. `handle` is what the cloud calls that, as far as is known."""

    kind: str
    namespace: str
    name: str
    handle: str = ""
    deleting: bool = False

    @property
    def path(self) -> str:
        """The object's path in the Kubernetes API."""
        base, _, plural = KINDS[self.kind].rpartition("/")
        return (
            f"{base}/namespaces/{self.namespace}/{plural}/{self.name}"
            if self.namespace
            else f"{base}/{plural}/{self.name}"
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


class OrphanedResource(Struct, frozen=True):
    """Something in the cloud that nobody will remove any more, and how a person does."""

    kind: str
    name: str
    reason: str
    command: str
