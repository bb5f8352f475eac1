"""What workloads left is deleted before the cluster: which objects count, their order, and when the wait ends."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CleanupError, CredentialError, MlbenchError, UsageError
from mlbench_cli.kube.api import ApiError, ObjectNotFound
from mlbench_cli.model.run import Cluster
from providers import workload_cleanup
from providers.base import ResourceStatus, TransientError
from providers.helm import tool
from providers.helm.tool import Helm
from providers.workload_cleanup import WorkloadCleanup, _handle
from providers.workloads import OrphanedResource, WorkloadObject

SERVICES, PODS = "/api/v1/services", "/api/v1/namespaces/n/pods"
CLAIMS, VOLUMES = "/api/v1/persistentvolumeclaims", "/api/v1/persistentvolumes"
SPACES = "/api/v1/namespaces"


class Api:
    """The cluster's objects by path; deletions are recorded and have no effect of their own."""

    def __init__(self) -> None:
        self.lists: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        self.deleted: list[str] = []
        self.asked: list[tuple[str, Any, float]] = []
        self.broken: MlbenchError | None = None

    @contextlib.contextmanager
    def client(self) -> Iterator["Api"]:
        if self.broken is not None:
            raise self.broken
        yield self

    def request(self, method: str, path: str, params: Any, retry_seconds: float) -> Any:
        self.asked.append((path, params, retry_seconds))
        found = self.lists.get(path, [])
        if isinstance(found, Exception):
            raise found
        return {"items": found}

    def get(self, path: str) -> Any:
        if path == PODS:
            return {"items": self.lists.get(path, [])}
        if path not in self.objects:
            raise ObjectNotFound("none", status=404)
        return self.objects[path]

    def delete(self, path: str, grace: int | None = None) -> None:
        self.deleted.append(path if grace is None else f"{path} in {grace} s")


class Local:
    """A provider without a cloud, such as KIND."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def connect(self, cluster: Cluster) -> Api:
        return self.api


class Cloud(Local):
    """A provider whose cluster's objects stand for something that costs money."""

    left: Any = ()

    def list_orphans(self, cluster: Cluster, objects: Any) -> list[OrphanedResource]:
        self.objects = list(objects)
        if isinstance(self.left, Exception):
            raise self.left
        return list(self.left)

    def orphan_command(self, cluster: Cluster, item: WorkloadObject | None) -> str:
        return f"rm {item.name if item else 'all'}"


def named(name: str, deleting: bool = False, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "n", **({"deletionTimestamp": "x"} if deleting else {})}
    return {"metadata": metadata, **more}


def service(name: str, kind: str = "LoadBalancer", deleting: bool = False, address: str | None = None) -> Any:
    ingress = [{"ip": address}] if address else None
    return named(name, deleting, spec={"type": kind}, status={"loadBalancer": {"ingress": ingress}})


def volume(name: str, policy: str = "Delete", claimed: bool = True) -> Any:
    claim = {"claimRef": {"name": "c"}} if claimed else {}
    spec = {"persistentVolumeReclaimPolicy": policy, "csi": {"volumeHandle": f"vol-{name}"}, **claim}
    return {"metadata": {"name": name}, "spec": spec}


class Owned:
    goes_with = None

    def __init__(self, found: Any = ResourceStatus("there")) -> None:
        self.found = found

    def find(self) -> Any:
        return self.found


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [1000.0]
    monkeypatch.setattr(workload_cleanup, "time", SimpleNamespace(monotonic=lambda: found[0]))
    monkeypatch.setattr(tool, "find_helm", lambda: None)
    return found


def cleanup(api: Api, kind: type[Local] = Cloud, resources: Any = None, **more: Any) -> Any:
    owned = [Owned()] if resources is None else resources
    return WorkloadCleanup(Cluster("demo-2", "gke"), kind(api), owned, **more)  # type: ignore[arg-type]


# --- which objects count --------------------------------------------------------------------------------------------


def test_objects_that_stand_for_something_in_the_cloud_are_found(api: Api) -> None:
    api.lists = {
        SERVICES: [service("front"), service("inner", "ClusterIP")],
        "/apis/networking.k8s.io/v1/ingresses": [named("web")],
        "/apis/gateway.networking.k8s.io/v1/gateways": ObjectNotFound("no gateways", status=404),
        CLAIMS: [named("data")],
        VOLUMES: [volume("a"), volume("b", claimed=False), volume("c", "Retain")],
    }
    what = cleanup(api)
    assert what.find() == ResourceStatus("Service n/front, Ingress n/web, PersistentVolumeClaim n/data and 1 more")
    assert [item.name for item in what._retained] == ["c"]
    assert {seconds for _, _, seconds in api.asked} == {10.0}
    assert (SPACES, {"labelSelector": "mlbench-cluster=demo-2"}, 10.0) in api.asked


def test_without_a_cloud_volumes_are_folders_and_only_what_listens_counts(api: Api) -> None:
    api.lists = {CLAIMS: [named("data")], VOLUMES: [volume("a")], SPACES: [named("old", deleting=True)]}
    assert cleanup(api, Local).find() is None
    assert {path for path, _, _ in api.asked} & {CLAIMS, VOLUMES} == set()
    assert {seconds for _, _, seconds in api.asked} == {0.0}
    api.lists = {SERVICES: [service("front")]}
    assert cleanup(api, Local).find() == ResourceStatus("Service n/front")


def test_namespaces_of_charts_count_until_they_are_gone(api: Api) -> None:
    api.lists = {SPACES: [named("mlbench-web", deleting=True)]}
    assert cleanup(api).find() == ResourceStatus("namespace mlbench-web")


@pytest.mark.parametrize(
    ("resources", "is_ours"),
    [
        ([], False),
        ([Owned(None)], False),
        ([Owned(ResourceStatus("there", ours=False))], False),
        ([Owned(), Owned(ResourceStatus("there", ours=False))], False),
        ([Owned(), Owned(None)], True),
    ],
)
def test_only_a_cluster_of_mlbenchs_own_is_looked_into(api: Api, resources: Any, is_ours: bool) -> None:
    api.lists = {SERVICES: [service("front")]}
    assert (cleanup(api, resources=resources).find() is not None) is is_ours
    assert bool(api.asked) is is_ours


def test_parts_of_other_resources_do_not_tell_whose_the_cluster_is(api: Api) -> None:
    part: Any = Owned(ResourceStatus("there", ours=False))
    part.goes_with = "the cluster"
    api.lists = {SERVICES: [service("front")]}
    assert cleanup(api, resources=[Owned(), part]).find() is not None


@pytest.mark.parametrize(
    ("kind", "document", "handle"),
    [
        ("Service", {"status": {"loadBalancer": {"ingress": [{"hostname": "a.elb", "ip": "192.0.2.1"}]}}}, "a.elb"),
        ("Ingress", {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}, "192.0.2.1"),
        ("Service", {"status": {"loadBalancer": {}}}, ""),
        ("Service", {}, ""),
        ("Gateway", {"status": {"addresses": [{"value": "192.0.2.1"}]}}, "192.0.2.1"),
        ("Gateway", {"status": {"addresses": []}}, ""),
        ("PersistentVolume", {"spec": {"csi": {"volumeHandle": "vol-1"}}}, "vol-1"),
        ("PersistentVolume", {"spec": {"hostPath": {"path": "/x"}}}, ""),
        ("PersistentVolumeClaim", {"spec": {"csi": {"volumeHandle": "vol-1"}}}, ""),
    ],
)
def test_the_handle_of_an_object_is_what_the_cloud_calls_it(kind: str, document: Any, handle: str) -> None:
    assert _handle(kind, document) == handle


# --- until when they are waited for ---------------------------------------------------------------------------------


def test_objects_are_deleted_again_until_they_are_gone(api: Api) -> None:
    api.lists = {SERVICES: [service("front")]}
    what = cleanup(api)
    what.delete()
    assert what.find() == ResourceStatus("Service n/front", deleting=True)
    assert api.deleted == ["/api/v1/namespaces/n/services/front"] * 2
    api.lists = {}
    assert what.find() is None
    api.lists = {SERVICES: [service("front")]}
    assert what.find() is None  # the wait is over


@pytest.mark.parametrize(("waited", "is_over"), [(600.0, False), (600.1, True)])
def test_what_stays_after_ten_minutes_is_kept_and_the_cluster_deleted(
    api: Api, now: list[float], waited: float, is_over: bool
) -> None:
    api.lists = {SERVICES: [service("front")]}
    what = cleanup(api)
    what.delete()
    now[0] += waited
    kept = "still there after 600 s: Service n/front" if is_over else None
    assert what.find() == ResourceStatus("Service n/front", deleting=not is_over, kept=kept)
    assert [item.name for item in what._late] == (["front"] if is_over else [])
    # The life-cycle waits longer, so that this end comes first.
    assert what.delete_seconds > what.seconds == 600.0


def test_an_api_that_stops_to_answer_is_waited_for_in_the_middle_and_not_at_the_beginning(
    api: Api, now: list[float]
) -> None:
    api.lists = {SERVICES: [service("front")]}
    what = cleanup(api, seconds=50.0)
    what.delete()
    api.broken = ApiError("refused", status=0)
    assert what.find() == ResourceStatus("the cluster's API has stopped responding", deleting=True)
    api.broken = None
    assert what.find() == ResourceStatus("Service n/front", deleting=True)
    api.broken = ApiError("refused", status=0)
    now[0] += 50.1
    assert what.find() is None
    silent = cleanup(api)
    assert silent.find() is None
    assert silent._unseen == "refused"


@pytest.mark.parametrize(
    ("error", "is_doubtful"),
    [
        (ApiError("refused", status=503), True),
        (CredentialError("denied"), True),
        (ObjectNotFound("no such cluster", status=404), False),
        (UsageError("it has no API yet"), False),
    ],
)
def test_an_api_that_cannot_be_asked_leaves_a_doubt_unless_there_is_none(
    api: Api, error: MlbenchError, is_doubtful: bool
) -> None:
    api.broken = error
    what = cleanup(api)
    assert what.find() is None
    what.raise_for_orphans()
    assert bool(what.warnings) is is_doubtful
    if is_doubtful:
        assert what.warnings[0].startswith(f"The cluster's API did not answer ({error.message}), so")
        assert what.warnings[0].endswith("See: rm all")


def test_a_cloud_that_is_busy_is_asked_again(api: Api) -> None:
    api.broken = TransientError("late")
    with pytest.raises(TransientError):
        cleanup(api).find()


def test_workloads_create_the_objects_and_not_mlbench(api: Api) -> None:
    for call in (cleanup(api).create, cleanup(api).poll):
        with pytest.raises(NotImplementedError):
            call()


# --- how they are deleted -------------------------------------------------------------------------------------------


def pod(name: str, *claims: str, owner: Any = None, deleting: bool = False) -> Any:
    volumes = [{"persistentVolumeClaim": {"claimName": claim}} for claim in claims] + [{"emptyDir": {}}]
    found = named(name, deleting, spec={"volumes": volumes})
    if owner:
        found["metadata"]["ownerReferences"] = [{"kind": owner[0], "name": owner[1], "controller": True}]
    return found


SET = "/apis/apps/v1/namespaces/n/statefulsets/db"


def test_pods_with_a_claim_are_stopped_after_what_creates_them(api: Api) -> None:
    api.lists = {
        CLAIMS: [named("data")],
        PODS: [
            pod("db-0", "data", owner=("StatefulSet", "db")),
            pod("web", "other"),
            pod("old", "data", deleting=True),
        ],
    }
    api.objects[SET] = named("db")
    cleanup(api).delete()
    assert api.deleted == [SET, f"{PODS}/db-0 in 10 s", "/api/v1/namespaces/n/persistentvolumeclaims/data"]


def test_what_is_being_deleted_is_not_deleted_again_and_volumes_go_with_their_claims(api: Api) -> None:
    api.lists = {SERVICES: [service("front", deleting=True)], VOLUMES: [volume("a")]}
    what = cleanup(api)
    what.delete()
    assert api.deleted == []


class Call:
    """A helm of the test."""

    started: list[list[str]]
    code: int | None = None

    def __init__(self, helm: Helm, words: list[str], access: Any) -> None:
        self.started.append(words)
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> type[Call]:
    kind = type("Call", (Call,), {"started": []})
    monkeypatch.setattr(workload_cleanup, "HelmCall", kind)
    monkeypatch.setattr(tool, "find_helm", lambda: Helm("/bin/helm", "v3.19.0"))
    return kind


def secret(release: str) -> Any:
    return {"metadata": {"labels": {"name": release}}}


def test_releases_are_uninstalled_before_their_namespace_is_deleted(api: Api, call: type[Call]) -> None:
    api.lists = {
        SPACES: [named("web"), named("plain"), named("going", deleting=True)],
        f"{SPACES}/web/secrets": [secret("web"), secret("db"), secret("web")],
        f"{SPACES}/going/secrets": [secret("old")],
    }
    what = cleanup(api)
    what.delete()
    assert call.started == [["uninstall", "db", "web", "--namespace", "web", "--timeout", "180s"]]
    assert api.deleted == [f"{SPACES}/plain"]
    assert (f"{SPACES}/web/secrets", {"labelSelector": "owner=helm"}, 10.0) in api.asked
    what.find()
    assert api.deleted == [f"{SPACES}/plain"] * 2
    assert len(call.started) == 1
    call.code = 1  # whatever helm says, the namespace is deleted next
    what.find()
    assert f"{SPACES}/web" in api.deleted
    what.close()
    assert what._calls["web"].stopped


@pytest.mark.parametrize("error", [None, UsageError("helm is too old")])
def test_without_helm_the_namespaces_of_releases_are_deleted(
    monkeypatch: pytest.MonkeyPatch, api: Api, call: type[Call], error: Exception | None
) -> None:
    def find_helm() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(tool, "find_helm", find_helm)
    api.lists = {SPACES: [named("web")], f"{SPACES}/web/secrets": [secret("web")]}
    what = cleanup(api)
    what.delete()
    assert api.deleted == [f"{SPACES}/web"]
    assert call.started == []
    cleanup(api).close()


# --- what remains at the end ----------------------------------------------------------------------------------------


def test_the_cloud_is_asked_about_all_objects_that_there_ever_were(api: Api) -> None:
    api.lists = {SERVICES: [service("front")], VOLUMES: [volume("a"), volume("kept", "Retain")]}
    what = cleanup(api)
    what.find()
    api.lists = {SERVICES: [service("front", address="192.0.2.1")], VOLUMES: [volume("kept", "Retain")]}
    what.delete()
    api.lists = {SERVICES: [service("front")]}
    what.find()
    what.raise_for_orphans()
    assert [(item.name, item.handle) for item in what.provider.objects] == [("front", "192.0.2.1"), ("a", "vol-a")]
    assert what.warnings == [
        "The disk of PersistentVolume kept remains because of its reclaim policy Retain, and costs money: rm kept"
    ]


def test_a_disk_that_is_to_stay_is_no_leftover(api: Api) -> None:
    api.lists = {VOLUMES: [volume("kept", "Retain")]}
    what = cleanup(api)
    what.find()
    what.provider.left = [OrphanedResource("disk", "vol-kept", "8 GB", "rm")]
    what.raise_for_orphans()
    what.provider.left = [OrphanedResource("disk", "vol-a", "8 GB", "rm vol-a")]
    with pytest.raises(CleanupError, match="disk vol-a: 8 GB"):
        what.raise_for_orphans()


def test_a_cloud_that_cannot_be_asked_leaves_what_was_still_there(api: Api, now: list[float]) -> None:
    api.lists = {SERVICES: [service("front")]}
    what = cleanup(api)
    what.delete()
    now[0] += 601.0
    what.find()
    what.provider.left = CredentialError("denied")
    with pytest.raises(CleanupError) as caught:
        what.raise_for_orphans()
    assert caught.value.details["leftovers"] == [
        {
            "kind": "Service",
            "name": "Service n/front",
            "reason": "it still existed when the cluster was deleted",
            "command": "rm front",
        }
    ]
    assert what.warnings == []


def test_without_a_cloud_nothing_can_remain(api: Api) -> None:
    api.lists = {SERVICES: [service("front")]}
    what = cleanup(api, Local)
    what.find()
    what.raise_for_orphans()
    with pytest.raises(CleanupError, match="first"):
        what.raise_for_orphans(CleanupError("first"))
