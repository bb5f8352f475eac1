"""The GPU probe, workers that join, and the lock on a cluster's name."""

import contextlib
import os
from collections.abc import Iterator
from contextvars import Context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CleanupError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.api import AccessDenied, ApiError, ObjectNotFound
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers import gpu_probe, machines, ready_machines, registry
from providers.base import Readiness, ResourceStatus, TransientError
from providers.gpu_probe import GpuProbe, explain_failure, find_driver_branch, parse_report
from providers.kubernetes_calls import ClusterObjects, list_workers, open_young_cluster, path_of
from providers.operation_lock import hold_operation_lock, is_operation_running
from providers.ready_machines import ReadyMachines, count_allocatable

POD = "/api/v1/namespaces/default/pods/mlbench-gpu-probe"


class Api:
    """Kubernetes' objects by path; requests are recorded."""

    def __init__(self, objects: dict[str, Any] | None = None) -> None:
        self.objects = objects or {}
        self.requests: list[tuple[str, Any]] = []

    @contextlib.contextmanager
    def client(self) -> Iterator["Api"]:
        yield self

    def get(self, path: str, **parameters: str) -> Any:
        self.requests.append((path, parameters))
        found = self.objects.get(path, ObjectNotFound("none", status=404))
        if isinstance(found, Exception):
            raise found
        return found

    def create(self, path: str, body: Any) -> None:
        self.requests.append((f"POST {path}", body))

    def delete(self, path: str) -> None:
        self.requests.append((f"DELETE {path}", None))

    def request(self, method: str, path: str, **options: Any) -> None:
        self.requests.append((f"{method} {path}", options["body"]["kind"]))


def make_probe(pod: Any = None, image: str = "python:3", **more: Any) -> tuple[GpuProbe, Api]:
    api = Api({POD: pod} if pod is not None else {})
    return GpuProbe(lambda: api, image, 4, (), None, **more), api  # type: ignore[arg-type,return-value]


def pod(phase: str | None = None, image: str = "python:3", **status: Any) -> dict[str, Any]:
    shown = {**({"phase": phase} if phase else {}), **status}
    return {"metadata": {}, "spec": {"containers": [{"image": image}]}, "status": shown or None}


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (None, None),
        (pod(), ResourceStatus("Pending")),
        (pod("Running"), ResourceStatus("Running")),
        (pod("Succeeded"), ResourceStatus("Succeeded")),
        (pod("Failed"), ResourceStatus("Failed", broken="an earlier probe did not succeed")),
        (pod("Failed", "other:1"), ResourceStatus("Failed", broken="an earlier probe did not succeed")),
        (pod("Succeeded", "other:1"), ResourceStatus("Succeeded", broken="it is of another image")),
        (
            {**pod("Running"), "metadata": {"deletionTimestamp": "x"}},
            ResourceStatus("Terminating", deleting=True),
        ),
    ],
)
def test_an_earlier_probe_counts_if_it_succeeded_with_the_same_image(found: Any, status: ResourceStatus | None) -> None:
    assert make_probe(found)[0].find() == status


def test_the_pod_of_a_probe_asks_for_all_gpus_of_a_worker() -> None:
    spot = {"key": "spot", "operator": "Exists"}
    probe, api = make_probe(tolerations=[spot])
    probe.create()
    ((path, manifest),) = api.requests
    assert path == "POST /api/v1/namespaces/default/pods"
    assert manifest["metadata"]["name"] == "mlbench-gpu-probe"
    spec = manifest["spec"]
    (container,) = spec["containers"]
    assert container["image"] == "python:3"
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == "4"
    assert spec["nodeSelector"] == {"mlbench-role": "worker"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, spot]
    assert spec["activeDeadlineSeconds"] == probe.create_seconds == 900
    probe.delete()
    assert api.requests[-1] == (f"DELETE {POD}", None)


def ended(message: str | None) -> list[Any]:
    return [{"state": {"running": {}}}, {"state": {"terminated": {"message": message}}}]


def test_the_report_of_a_probe_is_recorded() -> None:
    message = "gpu=NVIDIA L4\ndriver=580.65.06\nnoise\nerror=a=b"
    probe, _ = make_probe(pod("Succeeded", containerStatuses=ended(message)))
    report = {"gpu": "NVIDIA L4", "driver": "580.65.06", "error": "a=b"}
    assert probe.poll() == Readiness(True, facts={"gpu_probe": report})
    assert probe.report == report
    assert make_probe(pod("Succeeded"))[0].poll() == Readiness(True, facts={"gpu_probe": {}})


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (pod(), "its pod is Pending"),
        (pod("Running"), "its pod is Running"),
        (
            pod("Pending", containerStatuses=[{"state": {"waiting": {"reason": "ContainerCreating"}}}]),
            "ContainerCreating",
        ),
        (
            pod(
                "Pending", containerStatuses=[{"state": {"waiting": {"reason": "ErrImagePull", "message": "timeout"}}}]
            ),
            "ErrImagePull: timeout",
        ),
        (pod("Pending", conditions=[{"type": "PodScheduled", "status": "True"}]), "its pod is Pending"),
        (
            pod("Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]),
            "no worker takes its pod: Unschedulable",
        ),
    ],
)
def test_a_probe_says_what_it_waits_for(found: Any, reason: str) -> None:
    assert make_probe(found)[0].poll() == Readiness(False, reason)


def test_a_probe_that_was_scheduled_in_between_gets_its_minute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(gpu_probe, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waiting = pod("Pending", conditions=[{"type": "PodScheduled", "status": "False", "message": "0/2"}])
    probe, api = make_probe(waiting)
    for now[0], found in ((0.0, waiting), (50.0, pod()), (70.0, waiting), (129.0, waiting)):
        api.objects[POD] = found
        assert not probe.poll().ready
    now[0] = 130.0
    with pytest.raises(MlbenchError, match='which asks for 4 GPUs: "0/2"'):
        probe.poll()


def test_a_probe_whose_node_is_gone_is_repeated_by_the_command() -> None:
    with pytest.raises(MlbenchError, match='"mlbench-gpu-probe" is gone') as caught:
        make_probe()[0].poll()
    assert "Repeat the create-cluster command" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({"containerStatuses": ended("error=no GPU"), "message": "x"}, "no GPU"),
        ({"containerStatuses": ended(None), "message": "evicted"}, "evicted"),
        ({}, "no message"),
    ],
)
def test_a_probe_that_failed_tells_why(status: Any, says: str) -> None:
    with pytest.raises(MlbenchError, match=f'a container cannot use them: "{says}"'):
        make_probe(pod("Failed", **status))[0].poll()


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("error=The NVIDIA driver on your system is too old", "--gpu-driver latest"),
        ("CUDA driver version is insufficient for CUDA runtime version", "--gpu-driver latest"),
        ("error=no kernel image is available for execution on the device", "newer --gpu-type"),
        ("libcuda.so.1: cannot open shared object file", "LD_LIBRARY_PATH"),
        ("sh: nvidia-smi: not found", "LD_LIBRARY_PATH"),
        ("error=out of memory", None),
    ],
)
def test_the_words_of_a_failed_probe_have_a_remedy(message: str, remedy: str | None) -> None:
    error = explain_failure(message)
    assert (remedy is None) == str(error.hint).startswith("Repeat the create-cluster command")
    assert remedy is None or remedy in str(error.hint)
    assert error.details == {"gpu_probe": parse_report(message)}


@pytest.mark.parametrize(("driver", "branch"), [("580.65.06", 580), ("535", 535), ("", None), ("unknown", None)])
def test_the_branch_of_a_driver_is_its_first_number(driver: str, branch: int | None) -> None:
    assert find_driver_branch({"driver": driver}) == branch
    assert find_driver_branch({}) is None


# --- workers --------------------------------------------------------------------------------------------------------


def node(name: str, ready: str = "True", **allocatable: str) -> Any:
    return {
        "metadata": {"name": name},
        "status": {"conditions": [{"type": "Ready", "status": ready}], "allocatable": allocatable},
    }


def test_only_nodes_of_workers_that_are_ready_are_counted() -> None:
    nodes = {"items": [node("a"), node("b", "False"), node("c", "Unknown"), {"metadata": {"name": "d"}}]}
    api = Api({"/api/v1/nodes": nodes})
    assert [item["metadata"]["name"] for item in ready_machines.list_ready_workers(lambda: api)] == ["a"]  # type: ignore[arg-type,return-value]
    assert api.requests == [("/api/v1/nodes", {"labelSelector": "mlbench-role=worker"})]
    wait = ReadyMachines(lambda: api, "demo-2", 2, 0, (), None)  # type: ignore[arg-type,return-value]
    assert wait.poll() == Readiness(False, "1 of 2 machines have joined (scale-cluster sets how many)")
    assert (wait.name, wait.find()) == ("demo-2/2", None)
    wait.create()
    api.objects["/api/v1/nodes"] = {"items": [node("a"), node("b")]}
    assert wait.poll().ready


@pytest.mark.parametrize(
    ("found", "count"),
    [
        ({"status": {"allocatable": {"nvidia.com/gpu": "8"}}}, 8),
        ({"status": {"allocatable": {"cpu": "8"}}}, 0),
        ({"status": {"allocatable": None}}, 0),
        ({"status": None}, 0),
        ({}, 0),
    ],
)
def test_a_node_offers_no_device_until_its_plugin_has_shown_it(found: Any, count: int) -> None:
    assert count_allocatable(found, "nvidia.com/gpu") == count


# --- objects on a young cluster -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_transient"),
    [
        (ApiError("x", status=0, hint="h"), True),
        (AccessDenied("x", status=401, hint="h"), True),
        (AccessDenied("x", status=403, hint="h"), True),
        (ApiError("x", status=429, hint="h"), True),
        (ApiError("x", status=500, hint="h"), True),
        (ApiError("x", status=499, hint="h"), False),
        (ApiError("x", status=422, hint="h"), False),
        (MlbenchError("x", hint="h"), False),
    ],
)
def test_what_a_young_cluster_refuses_is_asked_again(error: MlbenchError, is_transient: bool) -> None:
    with pytest.raises(MlbenchError) as caught, open_young_cluster(lambda: Api()):  # type: ignore[arg-type,return-value]
        raise error
    assert isinstance(caught.value, TransientError) is is_transient
    assert (caught.value.message, caught.value.hint) == ("x", "h")


class Objects(ClusterObjects):
    kind = "objects"

    def documents(self) -> Any:
        return [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}},
            {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "d", "namespace": "n"}},
        ]


def test_objects_are_applied_in_their_order_and_found_by_the_last() -> None:
    api = Api()
    objects = Objects(lambda: api, "x", (), None)  # type: ignore[arg-type,return-value]
    assert objects.poll() == Readiness(False, "the cluster does not show it yet")
    objects.create()
    assert [name for name, _ in api.requests][1:] == [
        "PATCH /api/v1/namespaces/n",
        "PATCH /apis/apps/v1/namespaces/n/daemonsets/d",
    ]
    api.objects["/apis/apps/v1/namespaces/n/daemonsets/d"] = {}
    assert objects.find() == ResourceStatus("there")
    assert objects.poll().ready


def test_objects_of_a_cluster_that_is_gone_are_gone() -> None:
    def connect() -> Any:
        raise NotFoundError("no cluster")

    assert Objects(connect, "x", (), None).find() is None  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        list_workers(connect)


@pytest.mark.parametrize(
    ("kind", "path"), [("Ingress", "/api/v1/namespaces/n/ingresses/x"), ("Pod", "/api/v1/namespaces/n/pods/x")]
)
def test_plurals_of_kinds_that_end_with_s_have_es(kind: str, path: str) -> None:
    assert path_of({"apiVersion": "v1", "kind": kind, "metadata": {"name": "x", "namespace": "n"}}) == path


# --- one operation at a time ----------------------------------------------------------------------------------------


def test_a_name_is_locked_for_other_processes_and_free_for_the_same_thread(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert not is_operation_running(store, "demo-2")
    with hold_operation_lock(store, "demo-2"):
        assert is_operation_running(store, "demo-2")
        assert not is_operation_running(store, "demo-3")
        with hold_operation_lock(store, "demo-2"):
            pass
        assert is_operation_running(store, "demo-2")  # the inner block does not release it

        def take() -> None:
            with hold_operation_lock(store, "demo-2"):
                raise AssertionError

        with pytest.raises(UsageError, match=rf'\(process {os.getpid()}\) is working on the cluster "demo-2"'):
            Context().run(take)
        with hold_operation_lock(store, "demo-3"):
            pass
    assert not is_operation_running(store, "demo-2")
    assert (tmp_path / "clusters").stat().st_mode & 0o777 == 0o700


def test_a_lock_is_released_by_an_error_and_names_its_newest_holder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(CleanupError), hold_operation_lock(store, "demo-2"):
        raise CleanupError("x")
    path = tmp_path / "clusters" / "demo-2.lock"
    path.write_text("123456789012345\n")
    with hold_operation_lock(store, "demo-2"):
        assert path.read_text() == f"{os.getpid()}\n"


# --- providers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(registry.PROVIDERS))
def test_a_provider_is_found_by_its_own_name(name: str) -> None:
    assert registry.load(name).name == name


@pytest.mark.parametrize(("alias", "name"), [("gcloud", "gke"), ("aws", "eks")])
def test_names_of_the_original_are_still_known(alias: str, name: str) -> None:
    assert registry.load(alias).name == name


def test_an_unknown_provider_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r'no provider "gkee", only local, kind, gke.*"gke"'):
        registry.load("gkee")


def test_clusters_are_created_by_clouds_and_kind_alone() -> None:
    assert set(registry.creators()) == {"kind", "gke", "eks", "aks"}
    assert set(registry.PAID) < set(registry.creators())


@pytest.mark.parametrize("kind", [machines.LocalProvider, machines.SlurmProvider, machines.HostsProvider])
def test_machines_without_kubernetes_are_neither_found_nor_opened(kind: Any) -> None:
    provider = kind()
    cluster = Cluster("lab", provider.name)
    assert (list(provider.resources(cluster)), provider.discover({})) == ([], [])
    with pytest.raises(UsageError, match=f'"lab" has no Kubernetes API: it is a {provider.name} cluster'):
        provider.connect(cluster)
