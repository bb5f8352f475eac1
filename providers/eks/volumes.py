"""Volumes on EKS: a new cluster has neither a driver nor a default storage class, so claims would stay pending.

The EBS driver is an EKS add-on. Its service account gets a role of the stack through EKS Pod Identity: pods cannot use
the machines' role, because AL2023 machines limit metadata requests to one network hop. Sources: EKS' user guide (Pod
Identity, EBS CSI driver), Kubernetes' storage classes.
"""

from collections.abc import Sequence

from providers.base import Resource
from providers.eks.control_plane import AddOn, ControlPlane
from providers.kubernetes_calls import ClusterObjects, Document

AGENT, DRIVER = "eks-pod-identity-agent", "aws-ebs-csi-driver"
DRIVER_ACCOUNT = "ebs-csi-controller-sa"
CLASS = "mlbench-gp3"
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
    # A disk is in the zone of its pod, so it is created once the pod is scheduled.
    "volumeBindingMode": "WaitForFirstConsumer",
    "allowVolumeExpansion": True,
    "reclaimPolicy": "Delete",
}


class StorageClass(ClusterObjects):
    """The default storage class."""

    kind = "storage class"

    def documents(self) -> Sequence[Document]:
        return [MANIFEST]


def volume_resources(plane: ControlPlane, machines: Resource) -> list[Resource]:
    """The resources for claims, in the order of creation; the driver's pods run on `machines`."""
    agent = AddOn(plane, AGENT)  # a DaemonSet, ACTIVE without machines, so it is created while they start
    driver = AddOn(plane, DRIVER, (plane, agent, machines), account=DRIVER_ACCOUNT)
    return [agent, driver, StorageClass(plane.access, f"{plane.name}/{CLASS}", (plane,), plane)]
