"""What mlbench puts on a cluster and waits for there: machines, the GPU probe, the end, and what workloads leave."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import MlbenchError
from mlbench_cli.kube.api import ObjectNotFound, error_of
from mlbench_cli.model.run import Cluster
from mlbench_cli.util.times import timestamp
from providers import cluster_end, gpu_probe, ready_machines
from providers.base import BusyError, TransientError
from providers.cluster_end import WorkerHold
from providers.gpu_probe import GpuProbe, _waiting_reason, find_driver_problem
from providers.kubernetes_calls import apply_object, open_young_cluster, path_of
from providers.ready_machines import ReadyMachines
from providers.workload_cleanup import CleanupSnapshot, WorkloadCleanup, _handle, _owner
from providers.workloads import WorkloadObject

GPU = "nvidia.com/gpu"


class Api:
    """An API server as a table: path -> object. Notes the requests."""

    def __init__(self, found: dict[str, Any] | None = None) -> None:
        self.found = found or {}
        self.requests: list[tuple[str, str]] = []
        self.more: list[dict[str, Any]] = []

    def get(self, path: str, **_: Any) -> Any:
        if path not in self.found:
            raise ObjectNotFound("none", status=404)
        return self.found[path]

    def request(self, method: str, path: str, **more: Any) -> Any:
        self.requests.append((method, path))
        self.more.append(more)
        return self.found.get(path, {})

    @contextmanager
    def opened(self, *_: Any) -> Iterator["Api"]:
        yield self


# --- a young cluster ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "passes"),
    [*((status, True) for status in (0, 401, 403, 429, 500, 503)), *((status, False) for status in (400, 404, 409))],
)
def test_a_young_cluster_refuses_for_a_while_what_it_allows_later(status: int, passes: bool) -> None:
    def ask() -> None:
        with open_young_cluster(lambda: SimpleNamespace(client=Api().opened)):  # type: ignore[arg-type,return-value]
            raise error_of(status, b'{"message": "words"}', "GET /version")

    with pytest.raises(MlbenchError, match="words") as caught:
        ask()
    assert isinstance(caught.value, TransientError) is passes


@pytest.mark.parametrize(
    ("version", "kind", "path"),
    [
        ("v1", "Namespace", "/api/v1/namespaces/x"),
        ("batch/v1", "CronJob", "/apis/batch/v1/namespaces/n/cronjobs/x"),
        ("networking.k8s.io/v1", "Ingress", "/apis/networking.k8s.io/v1/namespaces/n/ingresses/x"),
        ("storage.k8s.io/v1", "StorageClass", "/apis/storage.k8s.io/v1/storageclasses/x"),
    ],
)
def test_the_path_of_an_object_is_that_of_the_api_reference(version: str, kind: str, path: str) -> None:
    metadata = {"name": "x", **({"namespace": "n"} if "/namespaces/n/" in path else {})}
    assert path_of({"apiVersion": version, "kind": kind, "metadata": metadata}) == path


def test_objects_are_applied_on_the_server_even_where_another_manager_set_a_field() -> None:
    """Without `force`, server-side apply answers such a conflict with 409."""
    api = Api()
    apply_object(api, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x"}})  # type: ignore[arg-type]
    assert api.more[0]["params"] == {"fieldManager": "mlbench", "force": True}
    assert api.more[0]["content_type"] == "application/apply-patch+yaml"


# --- machines and their GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "is_ready", "says"),
    [
        ([8, 8], True, ""),
        ([8, 8, 8], True, ""),
        ([8], False, "1 of 2 machines have joined"),
        ([8, 7], False, "1 of 2 machines show their GPUs"),
        ([0, 0], False, "0 of 2 machines show their GPUs"),
    ],
)
def test_workers_are_ready_when_all_have_joined_and_show_all_gpus(
    monkeypatch: pytest.MonkeyPatch, shown: list[int], is_ready: bool, says: str
) -> None:
    nodes = [{"status": {"allocatable": {GPU: str(number)}}} for number in shown]
    monkeypatch.setattr(ready_machines, "list_ready_workers", lambda connect: nodes)
    progress = ReadyMachines(lambda: None, "rel-2", 2, 8, (), None).poll()  # type: ignore[arg-type,return-value]
    assert progress.ready is is_ready
    assert says in progress.reason


# NVIDIA's table of CUDA's compatibility: CUDA 13 needs the branch 580.
@pytest.mark.parametrize(
    ("driver", "torch", "has_problem"),
    [("580.65.06", "", False), ("579.1", "", True), ("595.58", "", False), ("535.1", "2.9", False), ("", "", False)],
)
def test_the_driver_of_the_workers_is_new_enough_for_the_images(driver: str, torch: str, has_problem: bool) -> None:
    assert (find_driver_problem({"driver": driver, "torch": torch}) is not None) is has_problem


@pytest.mark.parametrize(
    ("reason", "words", "is_final"),
    [
        ("ImagePullBackOff", "manifest unknown", True),
        ("ErrImagePull", "403 Forbidden", True),
        ("ErrImagePull", "dial tcp: i/o timeout", False),
        ("CreateContainerError", "file not found", False),
        ("ContainerCreating", "", False),
    ],
)
def test_only_a_pull_that_can_never_work_ends_the_wait(reason: str, words: str, is_final: bool) -> None:
    status = {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": words}}}]}
    if is_final:
        with pytest.raises(MlbenchError, match="cannot pull the image x"):
            _waiting_reason(status, "x")
    else:
        assert _waiting_reason(status, "x").startswith(reason)


def test_a_probe_that_no_node_takes_is_given_up_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    pending = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
    api = Api({f"{gpu_probe.PODS}/{gpu_probe.NAME}": {"status": {"conditions": [pending]}}})
    monkeypatch.setattr(gpu_probe, "open_young_cluster", api.opened)
    monkeypatch.setattr("providers.gpu_probe.time.monotonic", lambda: now[0])
    probe = GpuProbe(lambda: None, "x", 1, (), None)  # type: ignore[arg-type,return-value]
    for moment in (100.0, 159.9):
        now[0] = moment
        assert "no worker takes its pod" in probe.poll().reason
    now[0] = 160.0
    with pytest.raises(MlbenchError, match="No worker can run the GPU probe"):
        probe.poll()


# --- the end --------------------------------------------------------------------------------------------------------


class Hold(WorkerHold):
    """A hold on no cloud."""

    image = "pause"

    def let_shrink(self) -> None:
        pass

    def poll_shrinking(self) -> Any:
        pass


def hold_until(expires: float) -> Hold:
    cluster = Cluster("rel-2", "gke", details={"expires": int(expires)})
    return Hold(cluster, lambda: None, "n", 2, None, (), None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("began", "ends", "seconds"), [(None, 600, 600), (None, -600, 60), (-300, 600, 900), (-300, -100, 360)]
)
def test_a_hold_lasts_to_the_end_of_the_cluster_and_for_a_minute_at_least(
    began: int | None, ends: int, seconds: int
) -> None:
    """The deadline of a Job counts from its start, and must be above 0."""
    now = time.time()
    hold = hold_until(now + ends)
    hold._started = None if began is None else timestamp(now + began)
    deadline = hold.documents()[-1]["spec"]["activeDeadlineSeconds"]
    assert abs(deadline - seconds) <= 2


@pytest.mark.parametrize(
    ("kind", "status", "is_recreated"),
    [("Failed", "True", True), ("Complete", "True", True), ("Failed", "False", False), ("Suspended", "True", False)],
)
def test_a_hold_whose_job_has_ended_is_created_again(
    monkeypatch: pytest.MonkeyPatch, kind: str, status: str, is_recreated: bool
) -> None:
    hold = hold_until(time.time() + 600)
    path = path_of(hold.documents()[-1])
    api = Api({path: {"status": {"conditions": [{"type": kind, "status": status}]}}})
    monkeypatch.setattr(cluster_end, "open_young_cluster", api.opened)
    monkeypatch.setattr("providers.kubernetes_calls.open_young_cluster", api.opened)
    if is_recreated:
        with pytest.raises(BusyError, match="creating it again"):
            hold.create()
    else:
        hold.create()
    assert (("DELETE", path) in api.requests) is is_recreated


# --- what workloads leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "document", "handle"),
    [
        ("Service", {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}, "192.0.2.1"),
        ("Ingress", {"status": {"loadBalancer": {"ingress": [{"hostname": "lb", "ip": "192.0.2.1"}]}}}, "lb"),
        ("Service", {"status": {"loadBalancer": {}}}, ""),
        ("Gateway", {"status": {"addresses": [{"value": "192.0.2.2"}]}}, "192.0.2.2"),
        ("PersistentVolume", {"spec": {"csi": {"volumeHandle": "vol-1"}}}, "vol-1"),
        ("PersistentVolumeClaim", {"spec": {"volumeName": "pv"}}, ""),
    ],
)
def test_the_cloud_knows_a_load_balancer_by_its_address_and_a_disk_by_its_handle(
    kind: str, document: dict[str, Any], handle: str
) -> None:
    """An ELB has a name, and its addresses change."""
    assert _handle(kind, document) == handle


def owned_by(kind: str, name: str, *, controller: bool = True) -> dict[str, Any]:
    return {"metadata": {"ownerReferences": [{"kind": kind, "name": name, "controller": controller}]}}


def test_the_deployment_behind_a_replica_set_is_what_makes_a_pod() -> None:
    api: Any = Api(
        {
            "/apis/apps/v1/namespaces/n/replicasets/r": owned_by("Deployment", "d"),
            "/apis/apps/v1/namespaces/n/deployments/d": {"metadata": {}},
        }
    )
    assert _owner(api, "n", owned_by("ReplicaSet", "r")) == "/apis/apps/v1/namespaces/n/deployments/d"
    assert _owner(api, "n", owned_by("ReplicaSet", "r", controller=False)) is None
    assert _owner(api, "n", owned_by("Unheard", "r")) is None
    assert _owner(api, "n", {"metadata": {}}) is None


@pytest.mark.parametrize(
    ("policy", "claim", "is_left"),
    [("Delete", {"name": "c"}, False), ("Retain", {"name": "c"}, True), ("Recycle", {"name": "c"}, True)],
)
def test_a_disk_goes_with_its_claim_only_by_the_policy_delete(policy: str, claim: Any, is_left: bool) -> None:
    provider = SimpleNamespace(list_orphans=list, orphan_command=str)
    cleanup = WorkloadCleanup(Cluster("rel-2", "gke"), provider, ())
    volume = {"metadata": {"name": "pv"}, "spec": {"claimRef": claim, "persistentVolumeReclaimPolicy": policy}}
    api: Any = SimpleNamespace(
        request=lambda method, path, **_: {"items": [volume] if path.endswith("/persistentvolumes") else []}
    )
    seen = cleanup._snapshot_from(api)
    assert [bool(seen.items), bool(seen.retained)] == [not is_left, is_left]


def test_of_many_objects_three_are_named() -> None:
    items = [WorkloadObject("Service", "n", str(number)) for number in range(4)]
    assert str(CleanupSnapshot(items[:3], {})) == "Service n/0, Service n/1, Service n/2"
    assert str(CleanupSnapshot(items, {})) == "Service n/0, Service n/1, Service n/2 and 1 more"
