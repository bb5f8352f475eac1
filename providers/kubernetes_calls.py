"""The Kubernetes API of a cluster that was created a moment ago: objects that mlbench puts there, device plugins, and
waiting for machines."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mlbench_cli.errors import MlbenchError, NotFoundError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api
from mlbench_cli.kube.objects import condition, is_true
from providers.base import ROLE_LABEL, WORKER, Part, Readiness, Resource, ResourceStatus, TransientError
from providers.pins import require_pin
from templates import documents

Connect = Callable[[], Access]
Document = Mapping[str, Any]  # an object of Kubernetes


@contextmanager
def open_young_cluster(connect: Connect) -> Iterator[Api]:
    """A client. Raises TransientError for what passes by itself soon after a cluster's start.

    The endpoint's DNS name, the caller's rights (401, 403) and the API server itself take a while to be known
    everywhere. Raises NotFoundError, as `connect` does, if there is no cluster.
    """
    access = connect()
    try:
        with access.client() as api:
            yield api
    except MlbenchError as error:
        status = error.details.get("status")
        if status is not None and (status in (0, 401, 403, 429) or status >= 500):
            raise TransientError(error.message, hint=error.hint) from None
        raise


def path_of(document: Document) -> str:
    """The path of an object, by its version, kind, namespace and name."""
    version, kind, metadata = document["apiVersion"], document["kind"].lower(), document["metadata"]
    root = "/api/v1" if version == "v1" else f"/apis/{version}"
    place = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    return f"{root}{place}/{kind}{'es' if kind.endswith('s') else 's'}/{metadata['name']}"


def apply_object(api: Api, document: Document) -> None:
    """Create an object, or set its fields to those of the document: server-side apply, as mlbench."""
    api.request(
        "PATCH",
        path_of(document),
        params={"fieldManager": "mlbench", "force": True},
        body=document,
        content_type="application/apply-patch+yaml",
    )


def list_workers(connect: Connect) -> list[dict[str, Any]]:
    """The nodes of the workers. Raises NotFoundError if the cluster does not exist."""
    with open_young_cluster(connect) as api:
        nodes: list[dict[str, Any]] = api.get("/api/v1/nodes", labelSelector=f"{ROLE_LABEL}={WORKER}")["items"]
        return nodes


class ClusterObjects(Part):
    """Objects that mlbench applies on a cluster and that go with it."""

    create_seconds = 900.0
    missing = "the cluster does not show it yet"

    def __init__(self, connect: Connect, name: str, needs: Sequence[Resource], goes_with: Resource) -> None:
        self.connect = connect
        self.name = name
        self.needs = tuple(needs)
        self.goes_with = goes_with

    @abstractmethod
    def documents(self) -> Sequence[Document]:
        """The objects, in the order in which they are applied."""

    def find(self) -> ResourceStatus | None:
        """Look for the last of the objects; None if it is missing, or with it the cluster."""
        return ResourceStatus("there") if self.read(self.documents()[-1]) is not None else None

    def create(self) -> None:
        """Apply the objects on the server's side. Raises TransientError while the cloud does not show the cluster."""
        with _expect_cluster(), open_young_cluster(self.connect) as api:
            for document in self.documents():
                apply_object(api, document)

    def read(self, document: Document) -> dict[str, Any] | None:
        """The object of the cluster that the document names; None if it is missing, or with it the cluster."""
        try:
            with open_young_cluster(self.connect) as api:
                found: dict[str, Any] = api.get(path_of(document))
                return found
        except NotFoundError:
            return None


@contextmanager
def _expect_cluster() -> Iterator[None]:
    """Turn NotFoundError into TransientError: objects come after their cluster, which a cloud may not show at once."""
    try:
        yield
    except NotFoundError as error:
        raise TransientError(error.message, hint=error.hint) from None


# --- device plugins, and waiting for machines -------------------------------------------------------------------------


class DevicePlugin(ClusterObjects):
    """A device plugin, which shows a machine's GPUs or network cards to Kubernetes.

    It is ready once it exists: waiting for the machines includes waiting for their devices.
    """

    def __init__(
        self,
        connect: Connect,
        words: str,
        plugin: str,
        needs: Sequence[Resource],
        goes_with: Resource,
        tolerations: Sequence[Document] = (),
    ) -> None:
        """`plugin` names the template and the pinned image; `tolerations` are added to those of the template."""
        super().__init__(connect, f"mlbench-{plugin}", needs, goes_with)
        self.kind = f"{words} device plugin"
        self.plugin = plugin
        self.tolerations = tolerations

    def documents(self) -> Sequence[Document]:
        """The DaemonSet."""
        values = {"image": require_pin("devices", self.plugin)}
        (manifest,) = documents(f"kubernetes/{self.plugin}.yaml", values)
        manifest["spec"]["template"]["spec"]["tolerations"].extend(self.tolerations)
        return [manifest]


class ReadyMachines(Part):
    """Waits until every worker has joined and shows its devices."""

    kind = "node registration"
    create_seconds = 1200.0

    def __init__(
        self,
        connect: Connect,
        cluster: str,
        count: int,
        devices: Mapping[str, int],
        needs: Sequence[Resource],
        goes_with: Resource,
    ) -> None:
        """`devices`: how many of each every worker has, by Kubernetes' names."""
        self.connect = connect
        self.count = count
        self.devices = devices
        self.name = cluster
        self.needs = tuple(needs)
        self.goes_with = goes_with

    def find(self) -> ResourceStatus | None:
        """Always None: it is only a wait."""
        return None

    def create(self) -> None:
        """Do nothing: the pool brings the machines."""

    def poll(self) -> Readiness:
        """Count the workers that are Ready and show their devices; ready when `count` do."""
        with _expect_cluster():
            ready = list_ready_workers(self.connect)
        if len(ready) < self.count:
            return Readiness(False, f"{len(ready)} of {self.count} machines have joined")
        for device, each in self.devices.items():
            shown = sum(1 for node in ready if count_allocatable(node, device) >= each)
            if shown < self.count:
                return Readiness(False, f"{shown} of {self.count} machines show {each} × {device}")
        return Readiness(True)


def list_ready_workers(connect: Connect) -> list[dict[str, Any]]:
    """The nodes of the workers that are Ready. Raises NotFoundError if the cluster does not exist."""
    return [node for node in list_workers(connect) if is_true(condition(node, "Ready"))]


def count_allocatable(node: Mapping[str, Any], resource: str) -> int:
    """How many of a device a node offers to pods; 0 until its plugin has shown them."""
    return int(((node.get("status") or {}).get("allocatable") or {}).get(resource, 0))
