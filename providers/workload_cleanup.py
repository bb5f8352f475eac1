"""Deletes load balancers and disks that workloads created outside the cluster: they cost money and outlive it.

So they are deleted first: Helm releases are uninstalled; Services of type LoadBalancer, Ingresses, Gateways and volume
claims are deleted; the controllers that clean up in the cloud are waited for. The cluster itself lists these objects;
no local record is needed. If its API does not answer, or an object is not deleted in time, the cluster is deleted all
the same, because it costs more. What may be left is reported, after a look into the cloud if that is possible.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from mlbench_cli.errors import CleanupError, CredentialError, MlbenchError
from mlbench_cli.kube.api import Api, ApiError, ObjectNotFound
from mlbench_cli.model.run import Cluster
from providers.base import CLUSTER_TAG, Provider, Readiness, Resource, ResourceStatus, TransientError
from providers.helm import tool as program
from providers.helm.tool import HelmCall
from providers.workloads import APPS, BALANCERS, BATCH, CORE, KINDS, OrphanedResource, WorkloadObject

CLEANUP_SECONDS = 600.0
UNINSTALL_SECONDS = 180
GRACE_SECONDS = 10  # that a pod with a volume has to end
RETRY_SECONDS = 10.0
# Controllers that create pods again and so keep their volumes in use.
OWNERS = {
    "ReplicaSet": (APPS, "replicasets"),
    "Deployment": (APPS, "deployments"),
    "StatefulSet": (APPS, "statefulsets"),
    "DaemonSet": (APPS, "daemonsets"),
    "Job": (BATCH, "jobs"),
    "CronJob": (BATCH, "cronjobs"),
}


@dataclass
class CleanupSnapshot:
    """The workload objects at one moment. `spaces` are namespaces of ours, `retained` volumes that are to stay."""

    items: list[WorkloadObject]
    spaces: dict[str, bool]  # by name: whether it is being removed
    retained: list[WorkloadObject] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.items or self.spaces)

    def __str__(self) -> str:
        names = [f"namespace {name}" for name in self.spaces] + [str(item) for item in self.items]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class WorkloadCleanup(Resource):
    """Removed before everything else of a cluster. Close it, and then ask `check` what remains."""

    kind = "workload resources of"

    def __init__(
        self, cluster: Cluster, provider: Provider, resources: Sequence[Resource], seconds: float = CLEANUP_SECONDS
    ) -> None:
        self.name = cluster.name
        self.cluster = cluster
        self.provider = provider
        self.resources = resources
        self.needs = tuple(resources)
        self.seconds = seconds
        self.delete_seconds = seconds + 120.0  # ours ends before the life-cycle's
        self.warnings: list[str] = []
        self._seen: dict[tuple[str, str, str], WorkloadObject] = {}  # all that there ever was
        self._late: list[WorkloadObject] = []
        self._retained: list[WorkloadObject] = []
        self._unseen: str | None = None
        self._began: float | None = None
        self._ours = False
        self._over = False
        self._calls: dict[str, HelmCall] | None = None  # by namespace

    # --- as the life-cycle sees it ------------------------------------------------------------------------------

    def find(self) -> ResourceStatus | None:
        """Look for objects that stand for something in the cloud; None when all have gone.

        After the deadline the rest is reported as kept. An API that no longer answers ends the wait, too.
        """
        if self._over:
            return None
        seen = self._take_snapshot()
        late = self._began is not None and time.monotonic() - self._began > self.seconds
        if not seen and self._unseen and self._began is not None and not late:
            return ResourceStatus("the cluster's API has stopped responding", deleting=True)
        if not seen:
            self._over = True
            return None
        if self._began is None:
            return ResourceStatus(str(seen))
        if late:
            self._over = True
            self._late = seen.items
            return ResourceStatus(str(seen), kept=f"still there after {self.seconds:g} s: {seen}")
        self._delete_objects(seen)  # controllers may have created some of it again
        return ResourceStatus(str(seen), deleting=True)

    def create(self) -> None:
        """Raise NotImplementedError: workloads create these objects."""
        raise NotImplementedError("created by workloads, not by mlbench")

    def poll(self) -> Readiness:
        """Raise NotImplementedError: workloads create these objects."""
        raise NotImplementedError("created by workloads, not by mlbench")

    def delete(self) -> None:
        """Uninstall releases and delete the objects; their controllers then delete what is in the cloud."""
        self._began = time.monotonic()
        if seen := self._take_snapshot():
            self._delete_objects(seen)

    def close(self) -> None:
        """End the helm programs that still run."""
        for call in (self._calls or {}).values():
            call.stop()

    # --- what remains at the end --------------------------------------------------------------------------------

    def raise_for_orphans(self, error: CleanupError | None = None) -> None:
        """Raise CleanupError for resources left in the cloud, or `error` if there is one; doubts go to `warnings`."""
        left = self._find_orphans()
        if not left and error is not None:
            raise error
        if left:
            lines = "\n".join(f"  {item.kind} {item.name}: {item.reason}\n    {item.command}" for item in left)
            before = f"{error.message}\n" if error else f'The cluster "{self.cluster.name}" is deleted.\n'
            known = error.details.get("leftovers", []) if error else []
            raise CleanupError(
                f"{before}Resources that its workloads or its cloud created remain:\n{lines}",
                hint=error.hint if error else "Delete each with the command below it.",
                details={"leftovers": [*known, *map(asdict, left)]},
            )

    def _find_orphans(self) -> list[OrphanedResource]:
        cloud = self.provider
        if not cloud.finds_orphans:
            return []
        for item in self._retained:
            self.warnings.append(
                f"The disk of {item} remains because of its reclaim policy Retain, and costs money: "
                f"{cloud.orphan_command(self.cluster, item)}"
            )
        try:
            left = cloud.list_orphans(
                self.cluster, [item for item in self._seen.values() if item not in self._retained]
            )
        except MlbenchError as error:
            left = [
                OrphanedResource(
                    item.kind,
                    str(item),
                    "it still existed when the cluster was deleted",
                    cloud.orphan_command(self.cluster, item),
                )
                for item in self._late
            ]
            if not left and (self._seen or self._unseen):
                self.warnings.append(f"Cannot check whether load balancers or disks remain: {error.message}")
        else:
            kept = {item.handle.rpartition("/")[2] for item in self._retained}
            left = [item for item in left if item.name not in kept]
        if self._unseen and not left:
            self.warnings.append(
                f"The cluster's API did not answer ({self._unseen}), so load balancers and disks that its workloads "
                f"created may remain. See: {cloud.orphan_command(self.cluster, None)}"
            )
        return left

    # --- looking ------------------------------------------------------------------------------------------------

    def _take_snapshot(self) -> CleanupSnapshot:
        """The objects that exist now; empty if there is no cluster, it is not ours, or it does not answer."""
        nothing = CleanupSnapshot([], {})
        self._ours = self._ours or self._is_ours()
        if not self._ours:
            return nothing
        try:
            with self.provider.connect(self.cluster).client() as api:
                seen = self._snapshot_from(api)
        except TransientError:
            raise
        except MlbenchError as error:
            if isinstance(error, ApiError | CredentialError) and not isinstance(error, ObjectNotFound):
                self._unseen = error.message
            return nothing  # nor if it has no API yet
        self._unseen = None
        for item in seen.items:
            key = (item.kind, item.namespace, item.name)
            if item.handle or key not in self._seen:
                self._seen[key] = item
        self._retained = seen.retained or self._retained
        return seen

    def _is_ours(self) -> bool:
        own = [resource for resource in self.resources if resource.goes_with is None]
        founds = [found for resource in own if (found := resource.find()) is not None]
        return bool(founds) and all(found.ours for found in founds)

    def _snapshot_from(self, api: Api) -> CleanupSnapshot:
        has_cloud = self.provider.finds_orphans
        items = {kind: self._list(api, path) for kind, path in (KINDS if has_cloud else BALANCERS).items()}
        found: list[WorkloadObject] = []
        retained: list[WorkloadObject] = []
        for kind, documents in items.items():
            for document in documents:
                item = _item(kind, document)
                if kind == "Service" and document["spec"].get("type") != "LoadBalancer":
                    continue
                if kind == "PersistentVolume":
                    if not document["spec"].get("claimRef"):
                        continue
                    if document["spec"].get("persistentVolumeReclaimPolicy") != "Delete":
                        retained.append(item)
                        continue
                found.append(item)
        spaces = self._list(api, f"{CORE}/namespaces", labelSelector=f"{CLUSTER_TAG}={self.cluster.name}")
        removed = {space["metadata"]["name"]: "deletionTimestamp" in space["metadata"] for space in spaces}
        if not has_cloud:  # on KIND, volumes are folders of the nodes
            removed = {name: going for name, going in removed.items() if not going}
        return CleanupSnapshot(found, removed, retained)

    def _list(self, api: Api, path: str, **params: Any) -> list[dict[str, Any]]:
        seconds = RETRY_SECONDS if self.provider.finds_orphans else 0.0
        try:
            return list(api.request("GET", path, params=params, retry_seconds=seconds).get("items") or ())
        except ObjectNotFound:  # Gateways are not known everywhere
            return []

    # --- sweeping -----------------------------------------------------------------------------------------------

    def _delete_objects(self, seen: CleanupSnapshot) -> None:
        """Request the deletion of all objects that are not being deleted yet."""
        try:
            access = self.provider.connect(self.cluster)
            with access.client() as api:
                if self._calls is None:
                    self._calls = self._start_uninstalls(api, seen)
                for space, going in seen.spaces.items():
                    call = self._calls.get(space)
                    if not going and (call is None or call.code is not None):
                        api.delete(f"{CORE}/namespaces/{space}")
                claims = [item for item in seen.items if item.kind == "PersistentVolumeClaim"]
                self._stop_pods_using(api, claims)
                for item in seen.items:
                    if not item.deleting and item.kind != "PersistentVolume":  # a volume goes with its claim
                        api.delete(item.path)
        except MlbenchError:
            return  # the next look tells

    def _start_uninstalls(self, api: Api, seen: CleanupSnapshot) -> dict[str, HelmCall]:
        """Start a helm for each release in our namespaces; without helm, only their namespaces are deleted."""
        try:
            helm = program.find_helm()
        except MlbenchError:
            helm = None
        calls: dict[str, HelmCall] = {}
        for space, going in seen.spaces.items():
            releases = self._list(api, f"{CORE}/namespaces/{space}/secrets", labelSelector="owner=helm")
            names = {secret["metadata"]["labels"]["name"] for secret in releases}
            if helm is None or going or not names:
                continue
            words = ["uninstall", *sorted(names), "--namespace", space, "--timeout", f"{UNINSTALL_SECONDS}s"]
            calls[space] = HelmCall(helm, words, access=self.provider.connect(self.cluster))
        return calls

    def _stop_pods_using(self, api: Api, claims: Sequence[WorkloadObject]) -> None:
        """Delete the pods that use a claim, after the controllers that would create them again."""
        names: dict[str, set[str]] = {}
        for claim in claims:
            names.setdefault(claim.namespace, set()).add(claim.name)
        for namespace, claimed in names.items():
            for pod in api.get(f"{CORE}/namespaces/{namespace}/pods")["items"]:
                if not claimed & _claims_of(pod):
                    continue
                owner = _owner(api, namespace, pod)
                if owner is not None:
                    api.delete(owner)
                if "deletionTimestamp" not in pod["metadata"]:
                    api.delete(f"{CORE}/namespaces/{namespace}/pods/{pod['metadata']['name']}", grace=GRACE_SECONDS)


def _item(kind: str, document: Mapping[str, Any]) -> WorkloadObject:
    metadata = document["metadata"]
    return WorkloadObject(
        kind,
        metadata.get("namespace", ""),
        metadata["name"],
        _handle(kind, document),
        deleting="deletionTimestamp" in metadata,
    )


def _handle(kind: str, document: Mapping[str, Any]) -> str:
    """The address of a load balancer, the cloud's name of a disk."""
    status, spec = document.get("status") or {}, document.get("spec") or {}
    if kind in ("Service", "Ingress"):
        points = (status.get("loadBalancer") or {}).get("ingress") or [{}]
        return str(points[0].get("hostname") or points[0].get("ip") or "")
    if kind == "Gateway":
        return str((status.get("addresses") or [{}])[0].get("value") or "")
    if kind == "PersistentVolume":
        return str((spec.get("csi") or {}).get("volumeHandle") or "")
    return ""


def _claims_of(pod: Mapping[str, Any]) -> set[str]:
    volumes = pod["spec"].get("volumes") or ()
    return {volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume}


def _owner(api: Api, namespace: str, document: Mapping[str, Any]) -> str | None:
    """The path of what, in the end, makes `document`; None if nothing does, or something unknown."""
    path = None
    for _ in range(3):  # a pod of a ReplicaSet of a Deployment
        owners = document["metadata"].get("ownerReferences") or ()
        owner = next((item for item in owners if item.get("controller") and item["kind"] in OWNERS), None)
        if owner is None:
            return path
        base, plural = OWNERS[owner["kind"]]
        path = f"{base}/namespaces/{namespace}/{plural}/{owner['name']}"
        try:
            document = api.get(path)
        except ObjectNotFound:
            return None
    return path
