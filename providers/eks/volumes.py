"""Volumes on EKS: a new cluster has neither a driver nor a default class, so that a claim would wait for ever.

The driver of EBS is an add-on of EKS. It acts by a role of the stack, which EKS Pod Identity gives to its service
account: pods do not reach the machines' own role, because the metadata of AL2023 machines is one network hop away only.
Sources: EKS' user guide (Pod Identity, EBS CSI driver), Kubernetes' storage classes.
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
    # A disk is in one zone, that of its pod: it is made once the pod has one.
    "volumeBindingMode": "WaitForFirstConsumer",
    "allowVolumeExpansion": True,
    "reclaimPolicy": "Delete",
}


class StorageClass(ClusterObjects):
    """The default class of claims."""

    kind = "storage class"

    def documents(self) -> Sequence[Document]:
        return [MANIFEST]


def volume_resources(plane: ControlPlane, machines: Resource) -> list[Resource]:
    """What claims need, in the order of creation; `machines` are those that the driver's pods run on."""
    agent = AddOn(plane, AGENT)  # a DaemonSet: it is ACTIVE without machines, and made while these come
    driver = AddOn(plane, DRIVER, (plane, agent, machines), account=DRIVER_ACCOUNT)
    return [agent, driver, StorageClass(plane.access, f"{plane.name}/{CLASS}", (plane,), plane)]
