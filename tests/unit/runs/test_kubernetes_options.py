"""Options of runs on Kubernetes: what they and the cluster's record become in the spec, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.runs.kubernetes_options import (
    check_mount_point,
    gpus_of_machine,
    join_servers,
    require_folder,
    require_queue,
    resolve_kubernetes,
)
from mlbench_cli.runs.request import Request

SPEC = RunSpec("x-2", "far", "kubernetes", "custom", "custom", ("true",), "gloo", 2)


def cluster(**details: Any) -> Cluster:
    return Cluster("far", "gke", details=details)


def resolve(details: dict[str, Any] | None = None, **options: Any) -> KubernetesOptions:
    return resolve_kubernetes(Request(**options), cluster(**(details or {})))


def test_a_plain_request_has_the_defaults_of_the_spec() -> None:
    assert resolve() == KubernetesOptions()


def test_every_option_of_a_request_gets_into_the_spec(tmp_path: Path) -> None:
    same: dict[str, Any] = {
        "namespace": "team",
        "memory": "8Gi",
        "server_cpus": 2,
        "server_memory": "4Gi",
        "shm": "2Gi",
        "node_selector": {"pool": "a"},
        "pull_secret": "login",
        "queue": "batch",
        "keep_storage": "50Gi",
        "collect": "all",
        "env": {"LEVEL": "debug"},
        "env_secret": "token",
        "data_claim": "datasets",
        "template_dir": str(tmp_path),
        "host_network": True,
        "spread": False,
        "share_nodes": True,
        "egress": False,
        "cpu_limit": 4,
        "writable_root": True,
        "priority_class": "high",
        "scheduler": "volcano",
        "network_policy": False,
    }
    found = resolve(
        **same,
        toleration=("gpu=yes:NoSchedule", "spot"),
        keep="2h",
        hold="90s",
        run_as_user="1000",
        device={"rdma/hca": "1", "hugepages-2Mi": "5Gi"},
        pod_label={"team": "a"},
        pod_annotation={"note": "some words"},
        registry="ghcr.io/me/",
    )
    assert found == KubernetesOptions(
        **same,
        tolerations=("gpu=yes:NoSchedule", "spot"),
        keep_seconds=7200,
        hold_seconds=90,
        run_as_user=1000,
        devices={"rdma/hca": "1", "hugepages-2Mi": "5Gi"},
        pod_labels={"team": "a"},
        pod_annotations={"note": "some words"},
        registry="ghcr.io/me",
    )


def test_what_is_known_of_a_cluster_gets_into_the_spec() -> None:
    fabric = {"setup": "tcpxo", "name": "GPUDirect-TCPXO", "gbits": 1800}
    known = {
        "node_selector": {"pool": "gpu", "disk": "ssd"},
        "tolerations": ["dedicated=bench:NoSchedule"],
        "devices_per_node": {"vpc.amazonaws.com/efa": 4},
        "fabric": fabric,
        "provisioning_class": "queued",
        "gpu_resource": "amd.com/gpu",
        "network_policies": False,
    }
    assert resolve(known) == KubernetesOptions(
        node_selector={"pool": "gpu", "disk": "ssd"},
        tolerations=("dedicated=bench:NoSchedule",),
        devices={"vpc.amazonaws.com/efa": "4"},
        fabric=fabric,
        provisioning_class="queued",
        gpu_resource="amd.com/gpu",
        network_policy=False,
        run_as_user=0,  # EFA's cards need locked memory
    )
    changed = resolve(known, node_selector={"pool": "mine"}, toleration=("spot",), network_policy=True)
    assert changed.node_selector == {"pool": "mine", "disk": "ssd"}
    assert changed.tolerations == ("dedicated=bench:NoSchedule", "spot")
    assert changed.network_policy


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({}, {"vpc.amazonaws.com/efa": "4"}),
        ({"spread": True}, {"vpc.amazonaws.com/efa": "4"}),
        ({"spread": False}, {}),  # workers that share a machine cannot each have all its cards
        ({"device": {"vpc.amazonaws.com/efa": "2"}}, {"vpc.amazonaws.com/efa": "2"}),
        ({"device": {"vpc.amazonaws.com/efa": "0"}}, {}),
        ({"device": {"rdma/hca": "1"}}, {"vpc.amazonaws.com/efa": "4", "rdma/hca": "1"}),
        ({"device": {"rdma/hca": "1"}, "spread": False}, {"rdma/hca": "1"}),
    ],
)
def test_a_worker_gets_the_devices_of_its_machine(options: dict[str, Any], devices: dict[str, str]) -> None:
    assert resolve({"devices_per_node": {"vpc.amazonaws.com/efa": 4}}, **options).devices == devices


@pytest.mark.parametrize(
    ("options", "fabric"),
    [
        ({}, {"setup": "gib", "name": "RoCE"}),
        ({"host_network": True}, {"name": "RoCE"}),
        ({"spread": False}, {"name": "RoCE"}),
    ],
)
def test_a_fast_network_is_set_up_only_for_pods_that_have_a_machine_and_a_network_for_themselves(
    options: dict[str, Any], fabric: dict[str, str]
) -> None:
    details = {"fabric": {"setup": "gib", "name": "RoCE"}}
    assert resolve(details, **options).fabric == fabric
    assert details == {"fabric": {"setup": "gib", "name": "RoCE"}}


@pytest.mark.parametrize(
    ("details", "options", "user"),
    [
        ({}, {}, 10001),
        ({}, {"run_as_user": "0"}, 0),
        ({}, {"run_as_user": "2147483647"}, 2147483647),
        ({}, {"device": {"rdma/hca": "1"}}, 0),
        ({}, {"device": {"hugepages-2Mi": "5Gi"}}, 10001),
        ({}, {"device": {"rdma/hca": "1"}, "run_as_user": "1000"}, 1000),
        ({"fabric": {"setup": "gib"}}, {}, 0),
        ({"fabric": {"setup": "gib"}}, {"host_network": True}, 10001),
        ({"fabric": {"name": "EFA"}}, {}, 10001),
        ({}, {"run_as_user": "none"}, 10001),
    ],
)
def test_ranks_are_root_only_if_asked_or_for_network_cards_that_lock_memory(
    details: dict[str, Any], options: dict[str, Any], user: int
) -> None:
    found = resolve(details, **options)
    assert found.run_as_user == user
    assert found.assigned_user is (options.get("run_as_user") == "none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpu_limit": 0}, "--cpu-limit 0: the minimum is 1."),
        ({"run_as_user": "root"}, '--run-as-user "root" is neither a user ID nor none.'),
        ({"run_as_user": "1" * 13}, "is neither a user ID nor none."),
        ({"collect": "rank1"}, '--collect "rank1" is neither rank0 nor all.'),
        ({"keep": "long"}, '--keep "long" is not a duration.'),
        ({"memory": "8 Gi"}, '--memory "8 Gi" is not a Kubernetes quantity.'),
        ({"memory": "٨Gi"}, "is not a Kubernetes quantity."),
        ({"keep_storage": "Gi"}, '--keep-storage "Gi" is not a Kubernetes quantity.'),
        ({"pull_secret": "-login"}, '--pull-secret "-login" is not a Kubernetes name'),
        ({"queue": "a" * 64}, "is not a Kubernetes name"),
        ({"toleration": ("a b",)}, '--toleration "a b" is not of the form KEY[=VALUE][:EFFECT].'),
        ({"toleration": ("gpu=1:Never",)}, "the effect is one of NoSchedule, PreferNoSchedule, NoExecute."),
        ({"device": {"amd.com/gpu": "8"}}, "--device amd.com/gpu: use --gpu and --gpus-per-worker for GPUs."),
        ({"device": {"rdma/": "1"}}, '--device "rdma/=1" is not of the form RESOURCE=N.'),
        ({"pod_label": {"team": "a" * 64}}, "is not valid in Kubernetes."),
        ({"pod_label": {"batch.kubernetes.io/x": "1"}}, "batch.kubernetes.io/x is reserved"),
        ({"pod_label": {"app.kubernetes.io/managed-by": "me"}}, "app.kubernetes.io/managed-by is reserved"),
        ({"pod_annotation": {"-x": "1"}}, '--pod-annotation "-x=1" is not valid in Kubernetes.'),
        ({"env": {"WORLD_SIZE": "3"}}, "--env: WORLD_SIZE is set by mlbench itself."),
        ({"env": {"MLBENCH_X": "3"}}, "--env: MLBENCH_X is set by mlbench itself."),
        ({"env": {"MY_API_KEY": "3"}}, "--env: MY_API_KEY looks like a secret"),
        ({"env": {"A-B": "3"}}, '--env: "A-B" is not the name of a variable.'),
    ],
)
def test_what_kubernetes_would_reject_is_refused_with_the_name_of_the_option(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(**options)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_limit": 1},
        {"queue": "a" * 63},
        {"namespace": "a"},
        {"scheduler": "my-scheduler.v2"},
        {"memory": "1.5Gi"},
        {"shm": "512M"},
        {"toleration": ("gpu:NoExecute", "gpu=:PreferNoSchedule", "example.com/gpu")},
        {"pod_label": {"team": "", "example.com/x": "a" * 63}},
        {"pod_annotation": {"note": "anything: at all, of any length " * 9}},
        {"env": {"_A1": "1", "RANKS": "1"}},
    ],
)
def test_what_kubernetes_allows_is_not_refused(options: dict[str, Any]) -> None:
    resolve(**options)


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ({}, True),
        ({"num_cpus": 8}, True),
        ({"memory": "32Gi"}, True),
        ({"num_cpus": 8, "memory": "32Gi"}, False),
    ],
)
def test_workers_on_autopilot_name_their_cpus_and_memory(options: dict[str, Any], is_refused: bool) -> None:
    resolve(**options)
    if not is_refused:
        resolve({"autopilot": True}, **options)
        return
    with pytest.raises(UsageError, match="far is GKE Autopilot") as caught:
        resolve({"autopilot": True}, **options)
    assert caught.value.hint == "For example --num-cpus 8 --memory 32Gi"


@pytest.mark.parametrize(
    ("details", "hint"),
    [
        ({"needs_queue": True, "queues": ["batch", "other"]}, "--queue batch"),
        ({"needs_queue": True}, "--queue NAME: kubectl get localqueues"),
        ({"needs_queue": False, "queues": ["batch"]}, None),
        ({}, None),
    ],
)
def test_a_run_names_a_queue_where_kueue_suspends_all_others(details: dict[str, Any], hint: str | None) -> None:
    require_queue(Request(queue="batch"), cluster(**details))
    if hint is None:
        require_queue(Request(), cluster(**details))
        return
    with pytest.raises(UsageError, match="Kueue on the cluster far releases only Jobs of its queues") as caught:
        require_queue(Request(), cluster(**details))
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("servers", "queue", "job_sets", "joined"),
    [("1", "q", True, True), ("0", "q", True, False), ("1", None, True, False), ("1", "q", False, False)],
)
def test_workers_and_servers_wait_together_in_a_queue_that_knows_job_sets(
    servers: str, queue: str | None, job_sets: bool, joined: bool
) -> None:
    spec = replace(SPEC, method={"servers": servers}, kubernetes=KubernetesOptions(queue=queue))
    found = join_servers(spec, cluster(job_sets=job_sets))
    assert found.kubernetes.job_set is joined
    assert replace(found, kubernetes=spec.kubernetes) == spec


@pytest.mark.parametrize(
    ("gpus", "options", "count"),
    [
        (8, {}, 8),
        (8, {"spread": True}, 8),
        (8, {"spread": False}, 1),
        (8, {"processes_per_worker": 2}, 1),
        (0, {}, 1),
        (None, {}, 1),
    ],
)
def test_a_worker_with_a_machine_for_itself_has_all_its_gpus(
    gpus: int | None, options: dict[str, Any], count: int
) -> None:
    assert gpus_of_machine(Request(**options), cluster(gpus_per_node=gpus)) == count


def test_folders_are_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert require_folder(None, "--template-dir") is None
    assert require_folder("templates", "--template-dir") == str(tmp_path / "templates")
    for path in ("nowhere", "file", "a\0b"):
        with pytest.raises(NotFoundError, match="--template-dir: the folder"):
            require_folder(path, "--template-dir")


@pytest.mark.parametrize(
    ("path", "normal"),
    [("/data", "/data"), ("/mnt/sets/", "/mnt/sets"), ("/data/../sets", "/sets"), ("/tmp/data", "/tmp/data")],
)
def test_data_can_be_mounted_at_an_absolute_path(path: str, normal: str) -> None:
    assert check_mount_point(path) == normal


@pytest.mark.parametrize(
    "path", ["data", "/", "/dev", "/dev/shm", "/mlbench", "/proc", "/results/", "/sys", "/tmp", "/data/.."]
)
def test_data_cannot_be_mounted_over_the_folders_of_a_run(path: str) -> None:
    with pytest.raises(UsageError, match="cannot be a data folder in a container"):
        check_mount_point(path)
