"""Volumes on EKS: a new cluster has neither a driver nor a default class, so that a claim would wait for ever.

The driver of EBS is an add-on of EKS. It acts by a role of the stack, which EKS Pod Identity gives to its service
account: pods do not reach the machines' own role, because the metadata of AL2023 machines is one network hop away only.
Sources: EKS' user guide (Pod Identity, EBS CSI driver), Kubernetes' storage classes.
"""

from mlbench_cli.errors import NotFoundError
from providers.base import Readiness, Resource, ResourceStatus
from providers.eks.control_plane import AddOn, ControlPlane
from providers.kubernetes_calls import apply_object, open_young_cluster

AGENT, DRIVER = "eks-pod-identity-agent", "aws-ebs-csi-driver"
DRIVER_ACCOUNT = "ebs-csi-controller-sa"
CLASS = "mlbench-gp3"
PATH = f"/apis/storage.k8s.io/v1/storageclasses/{CLASS}"
MANIFEST = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {
        "name": CLASS,
        "labels": {"app.kubernetes.io/managed-by": "mlbench"},
        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
    },
    "provisioner": "ebs.csi.aws.com",
    "parameters": {"type": "gp3"},
    # A disk is in one zone, that of its pod: it is made once the pod has one.
    "volumeBindingMode": "WaitForFirstConsumer",
    "allowVolumeExpansion": True,
    "reclaimPolicy": "Delete",
}


class StorageClass(Resource):
    """The default class of claims. It goes with the cluster."""

    kind = "storage class"
    create_seconds = 300.0

    def __init__(self, plane: ControlPlane, needs: tuple[Resource, ...] = ()) -> None:
        self.plane = plane
        self.name = f"{plane.name}/{CLASS}"
        self.needs = (plane, *needs)
        self.goes_with = plane

    def find(self) -> ResourceStatus | None:
        try:
            with open_young_cluster(self.plane.access) as kubernetes:
                kubernetes.get(PATH)
        except NotFoundError:
            return None
        return ResourceStatus("there")

    def create(self) -> None:
        with open_young_cluster(self.plane.access) as kubernetes:
            apply_object(kubernetes, PATH, MANIFEST)

    def poll(self) -> Readiness:
        return Readiness(self.find() is not None, "the cluster does not show it yet")

    def delete(self) -> None:
        return


def volume_resources(plane: ControlPlane, machines: Resource) -> list[Resource]:
    """What claims need, in the order of creation; `machines` are those that the driver's pods run on."""
    agent = AddOn(plane, AGENT)  # a DaemonSet: it is ACTIVE without machines, and made while these come
    driver = AddOn(plane, DRIVER, (plane, agent, machines), account=DRIVER_ACCOUNT)
    return [agent, driver, StorageClass(plane)]
