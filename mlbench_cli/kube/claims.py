"""PersistentVolumeClaims for data sets: found, or created with a size and a storage class."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlbench_cli.errors import UsageError
from mlbench_cli.kube.api import Api, ObjectNotFound
from mlbench_cli.kube.objects import collection_path, object_path

KIND = "PersistentVolumeClaim"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
DEFAULT = "storageclass.kubernetes.io/is-default-class"
LABELS = {"app.kubernetes.io/managed-by": "mlbench"}
# Provisioners of volumes that only one node at a time can mount (from their documentation).
ONE_NODE = (
    *("pd.csi.storage.gke.io", "kubernetes.io/gce-pd", "ebs.csi.aws.com", "kubernetes.io/aws-ebs"),
    *("disk.csi.azure.com", "rancher.io/local-path", "hostpath.csi.k8s.io"),
)
MODES = {"rwx": "ReadWriteMany", "rwo": "ReadWriteOnce"}
_SIZE = re.compile(r"[1-9]\d*(\.\d+)?([kMGTP]i?)?")


class DataClaim(NamedTuple):
    """A claim, and whether it was just created. `is_shared`: workers on several nodes can mount it simultaneously."""

    name: str
    is_new: bool
    size: str
    storage_class: str
    is_shared: bool


def ensure_claim(
    api: Api, namespace: str, name: str, size: str, storage_class: str | None = None, mode: str | None = None
) -> DataClaim:
    """Find the claim, or create it with `size` (a quantity such as "200Gi").

    The default storage class is the cluster's; the default mode is ReadWriteMany unless the class is known for single-
    node volumes. Raises UsageError for an unknown class, and if the cluster has no default.
    """
    if not _SIZE.fullmatch(size):
        raise UsageError(f"--size {size[:60]}: a size is a number with a unit, such as 200Gi.")
    try:
        return _describe(api.get(object_path(KIND, namespace, name)), is_new=False)
    except ObjectNotFound:
        pass
    chosen = _choose_class(api.get(CLASSES).get("items") or [], storage_class)
    one_node = chosen.get("provisioner") in ONE_NODE
    access = MODES[mode] if mode else MODES["rwo" if one_node else "rwx"]
    body = {
        "apiVersion": "v1",
        "kind": KIND,
        "metadata": {"name": name, "labels": LABELS},
        "spec": {
            "accessModes": [access],
            "storageClassName": chosen["metadata"]["name"],
            "resources": {"requests": {"storage": size}},
        },
    }
    return _describe(api.create(collection_path(KIND, namespace), body), is_new=True)


def _choose_class(classes: list[Mapping[str, Any]], wanted: str | None) -> Mapping[str, Any]:
    names = {str(item["metadata"]["name"]): item for item in classes}
    known = f"The cluster has: {', '.join(names)}." if names else "The cluster has no storage class."
    if wanted is not None:
        if wanted not in names:
            raise UsageError(f'There is no storage class "{wanted[:60]}".', hint=known)
        return names[wanted]
    defaults = [item for item in classes if (item["metadata"].get("annotations") or {}).get(DEFAULT) == "true"]
    if len(defaults) == 1 or len(names) == 1:
        return (defaults or classes)[0]
    raise UsageError(
        f"The cluster has {len(defaults) or 'no'} default storage class{'es' if len(defaults) > 1 else ''}.",
        hint=f"--storage-class NAME. {known}",
    )


def _describe(claim: Mapping[str, Any], *, is_new: bool) -> DataClaim:
    spec = claim.get("spec") or {}
    return DataClaim(
        name=str(claim["metadata"]["name"]),
        is_new=is_new,
        size=str(((spec.get("resources") or {}).get("requests") or {}).get("storage") or "unknown"),
        storage_class=str(spec.get("storageClassName") or "default"),
        is_shared=any(mode in ("ReadWriteMany", "ReadOnlyMany") for mode in spec.get("accessModes") or ()),
    )
