"""Objects of runs with queues, booked machines, shaped networks and JobSets; and the names of a run's objects."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.manifests import (
    file_name,
    has_chaos,
    has_keeper,
    holders,
    job_name,
    keeper_name,
    manifests,
    queue_of,
    role_of,
    servers_name,
    spec_of,
    workers_of_set,
)
from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import KubernetesOptions, RunSpec

DAY = 86400


def a_spec(options: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    names = ("demo-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2)
    kubernetes = KubernetesOptions(**(options or {}))
    return replace(RunSpec(*names, image="example.com/image:1", timeout=600.0, kubernetes=kubernetes), **changes)


def objects(spec: RunSpec) -> dict[str, Any]:
    """The run's objects by the names of their files."""
    return {file_name(document): document for document in manifests(spec, "team")}


def variables(document: Any) -> dict[str, Any]:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return {item["name"]: item.get("value") for item in container["env"]}


SERVED = {"method": {"name": "ps", "servers": "2"}}
SHAPED: dict[str, Any] = {"network": "1gbit,5ms"}
CHAOS = {"network_method": "chaos-mesh"}

# --- which objects there are, and their names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (a_spec(), ["job", "configmap", "service", "networkpolicy", "keeper"]),
        (a_spec({"keep_seconds": 0}), ["job", "configmap", "service", "networkpolicy"]),
        (a_spec({"keep_seconds": 1}), ["job", "configmap", "service", "networkpolicy", "keeper"]),
        (a_spec({"network_policy": False}), ["job", "configmap", "service", "keeper"]),
        (
            a_spec({"provisioning_class": "q"}),
            ["job", "configmap", "service", "networkpolicy", "podtemplate", "provisioningrequest", "keeper"],
        ),
        # Kueue books the machines of its queues.
        (a_spec({"provisioning_class": "q", "queue": "q"}), ["job", "configmap", "service", "networkpolicy", "keeper"]),
        (
            a_spec({"fabric": {"setup": "gib"}}, gpus_per_worker=8),
            ["job", "configmap", "service", "networkpolicy", "resourceclaimtemplate", "keeper"],
        ),
        (
            a_spec(CHAOS, **SHAPED),
            [
                *("job", "configmap", "service", "networkpolicy", "keeper"),
                *("networkchaos-bandwidth", "networkchaos-delay"),
            ],
        ),
        (
            a_spec(CHAOS, network="1gbit"),
            ["job", "configmap", "service", "networkpolicy", "keeper", "networkchaos-bandwidth"],
        ),
        (a_spec(**SERVED), ["job", "configmap", "service", "networkpolicy", "keeper", "servers"]),
    ],
)
def test_a_run_has_the_objects_that_it_needs(spec: RunSpec, names: list[str]) -> None:
    assert list(objects(spec)) == [f"{name}.yaml" for name in names]


def test_names_of_a_runs_jobs() -> None:
    alone, in_set = a_spec(), a_spec({"job_set": True})
    assert (job_name(alone), servers_name(alone)) == ("demo-2", "demo-2-servers")
    assert (job_name(in_set), servers_name(in_set)) == ("demo-2-workers-0", "demo-2-servers-0")
    assert (workers_of_set("x-1"), keeper_name("x-1")) == ("x-1-workers-0", "x-1-keeper")


@pytest.mark.parametrize(
    ("labels", "queue", "role"),
    [
        (None, None, None),
        ({"mlbench/role": "keeper"}, None, "keeper"),
        ({"kueue.x-k8s.io/queue-name": "a"}, "a", None),
        ({"mlbench/queue": "b", "mlbench/role": "server"}, "b", "server"),
        ({"kueue.x-k8s.io/queue-name": "a", "mlbench/queue": "b"}, "a", None),
    ],
)
def test_the_labels_of_a_job_say_its_queue_and_role(
    labels: dict[str, str] | None, queue: str | None, role: str | None
) -> None:
    job = {"metadata": {"labels": labels}}
    assert (queue_of(job), role_of(job)) == (queue, role)
    assert (queue_of({}), role_of({})) == (None, None)


@pytest.mark.parametrize(
    ("spec", "workers"),
    [
        (a_spec(), (0,)),
        (a_spec({"collect": "all"}), (0, 1)),
        (a_spec({"collect": "all"}, run_on_all=False), (0,)),
    ],
)
def test_workers_whose_output_is_kept_hold_it(spec: RunSpec, workers: tuple[int, ...]) -> None:
    assert holders(spec) == workers
    assert variables(objects(spec)["job.yaml"])["MLBENCH_COLLECT"] == ("all" if len(workers) > 1 else "rank0")


@pytest.mark.parametrize(
    ("changes", "options", "shaped"),
    [
        (SHAPED, CHAOS, True),
        (SHAPED, {"network_method": "annotation"}, False),
        (SHAPED, {}, False),
        ({}, CHAOS, False),
        ({**SHAPED, "workers": 1}, CHAOS, False),
    ],
)
def test_chaos_mesh_shapes_only_what_it_was_asked_for(
    changes: dict[str, Any], options: dict[str, Any], shaped: bool
) -> None:
    assert has_chaos(a_spec(options, **changes)) is shaped


def test_a_keeper_that_keeps_for_no_time_is_left_out() -> None:
    assert [has_keeper(a_spec({"keep_seconds": seconds})) for seconds in (0, 1, DAY)] == [False, True, True]


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"metadata": {"name": "x"}},
        {"metadata": {"name": "x", "annotations": {"mlbench/spec": "{"}}},
        {"metadata": {"name": "x", "annotations": {"mlbench/spec": None}}},
    ],
)
def test_a_job_without_a_spec_does_not_name_its_run(job: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="does not name its run"):
        spec_of(job)


# --- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "deadline", "keeper", "ttl"),
    [
        # Twice the timeout, once to be scheduled and once to run; the hold; two minutes. And a day of the keeper.
        (a_spec(), 2220, 2220 + DAY, 7 * DAY),
        (a_spec({"hold_seconds": 0}), 1320, 1320 + DAY, 7 * DAY),
        (a_spec(timeout=0.5), 1022, 1022 + DAY, 7 * DAY),
        (a_spec({"keep_seconds": 6 * DAY}), 2220, 2220 + 6 * DAY, 7 * DAY),
        (a_spec({"keep_seconds": 8 * DAY}), 2220, 2220 + 8 * DAY, 9 * DAY),
        (a_spec({"queue": "q"}), 2220, 2220 + DAY + 7 * DAY, 7 * DAY),  # it may wait there for a week
    ],
)
def test_the_deadlines_of_a_runs_jobs(spec: RunSpec, deadline: int, keeper: int, ttl: int) -> None:
    found = objects(spec)
    assert found["job.yaml"]["spec"]["activeDeadlineSeconds"] == deadline
    assert found["keeper.yaml"]["spec"]["activeDeadlineSeconds"] == keeper
    assert found["job.yaml"]["spec"]["ttlSecondsAfterFinished"] == ttl


@pytest.mark.parametrize(("timeout", "seconds"), [(600.0, "2220"), (6 * DAY, "604800")])
def test_machines_are_booked_for_as_long_as_a_run_may_take_within_a_week(timeout: float, seconds: str) -> None:
    """A week is the most that Google's flex-start gives."""
    spec = a_spec({"provisioning_class": "q"}, timeout=timeout)
    request = objects(spec)["provisioningrequest.yaml"]["spec"]
    assert request == {
        "provisioningClassName": "q",
        "parameters": {"maxRunDurationSeconds": seconds},
        "podSets": [{"count": 2, "podTemplateRef": {"name": "demo-2"}}],
    }
    queued = replace(spec, kubernetes=replace(spec.kubernetes, queue="batch"))
    annotations = objects(queued)["job.yaml"]["metadata"]["annotations"]
    assert annotations["provreq.kueue.x-k8s.io/maxRunDurationSeconds"] == seconds


def test_pods_take_the_machines_that_were_booked_for_their_run() -> None:
    def of_pods(spec: RunSpec) -> Any:
        return objects(spec)["job.yaml"]["spec"]["template"]["metadata"]["annotations"]

    safe = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    assert of_pods(a_spec()) == safe
    assert of_pods(a_spec({"provisioning_class": "q"})) == {
        **safe,
        "autoscaling.x-k8s.io/consume-provisioning-request": "demo-2",
        "autoscaling.x-k8s.io/provisioning-class-name": "q",
    }
    assert of_pods(a_spec({"provisioning_class": "q", "queue": "batch"})) == safe
    job = objects(a_spec({"queue": "batch"}))["job.yaml"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "batch"
    assert list(job["metadata"]["annotations"]) == ["mlbench/spec"]


# --- shaped networks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "limit", "buffer"),
    [
        # A queue of 50 ms and a bucket of 1 ms at this rate.
        ("1gbit", 6_250_000, 125_000),
        # A queue of two one-way delays, because bytes under way for so long must fit.
        ("1gbit,100ms", 25_000_000, 125_000),
        ("1gbit,25ms", 6_250_000, 125_000),
        # Two packets at least, ten times as many in the queue; and what the objects' fields can hold at most.
        ("1mbit", 30_000, 3_000),
        ("100tbit", 4_294_967_295, 4_294_967_295),
    ],
)
def test_queue_and_bucket_of_a_network_shaped_by_chaos_mesh(network: str, limit: int, buffer: int) -> None:
    bandwidth = objects(a_spec(CHAOS, network=network))["networkchaos-bandwidth.yaml"]["spec"]["bandwidth"]
    assert (bandwidth["limit"], bandwidth["buffer"]) == (limit, buffer)


def test_the_objects_of_chaos_mesh() -> None:
    found = objects(a_spec(CHAOS, **SHAPED))
    common = {
        "mode": "all",
        "selector": {
            "namespaces": ["team"],
            "labelSelectors": {"mlbench/run": "demo-2"},
            "expressionSelectors": [{"key": "mlbench/role", "operator": "In", "values": ["worker", "server"]}],
        },
        "direction": "to",
        "duration": "2220s",
    }
    bandwidth, delay = found["networkchaos-bandwidth.yaml"], found["networkchaos-delay.yaml"]
    assert bandwidth["metadata"] == {
        "name": "demo-2-bandwidth",
        "namespace": "team",
        "labels": {"mlbench/run": "demo-2", "app.kubernetes.io/managed-by": "mlbench"},
    }
    assert bandwidth["spec"] == {
        **common,
        "action": "bandwidth",
        "bandwidth": {"rate": "1025000000bit", "limit": 6_250_000, "buffer": 125_000},  # 2.5 % for headers
    }
    assert delay["spec"] == {
        **common,
        "action": "delay",
        "delay": {"latency": "5000us", "jitter": "0ms", "correlation": "0"},
    }


@pytest.mark.parametrize(
    ("options", "changes", "rate"),
    [
        ({"network_method": "annotation"}, {"network": "1gbit"}, "1025000000"),
        ({"network_method": "nsenter"}, {"network": "1gbit"}, None),
        ({"network_method": "annotation"}, {}, None),
        ({"network_method": "annotation"}, {"network": "1gbit", "workers": 1}, None),
    ],
)
def test_the_plugin_bandwidth_is_asked_by_annotations(
    options: dict[str, Any], changes: dict[str, Any], rate: str | None
) -> None:
    for name, document in objects(a_spec(options, **SERVED, **changes)).items():
        if name in ("job.yaml", "servers.yaml"):
            annotations = document["spec"]["template"]["metadata"]["annotations"]
            assert annotations.get("kubernetes.io/ingress-bandwidth") == rate
            assert annotations.get("kubernetes.io/egress-bandwidth") == rate


@pytest.mark.parametrize(
    ("method", "drain"), [("chaos-mesh", "1000000000"), ("annotation", "1000000000"), ("nsenter", "0"), (None, "0")]
)
def test_pods_wait_for_a_shaped_network_and_drain_buckets_that_are_not_ours(method: str | None, drain: str) -> None:
    found = variables(objects(a_spec({"network_method": method}, network="1gbit", **SERVED))["job.yaml"])
    assert {name: value for name, value in found.items() if "NETWORK" in name or "PROBE" in name or "PODS" in name} == {
        "MLBENCH_NETWORK": "1gbit",
        "MLBENCH_NETWORK_GATE": "1",
        "MLBENCH_PODS": "4",
        "MLBENCH_PROBE_PORT": "29601",
        "MLBENCH_PROBE_DRAIN": drain,
    }


def test_only_pods_of_a_shaped_network_have_the_files_of_the_probe() -> None:
    files = {f"probe-{name}.py": f"task_images/{path}{name}.py" for name, path in (("contract", ""),)}
    files |= {f"probe-{name}.py": f"task_images/harness/{name}.py" for name in ("network", "network_probe")}
    found = objects(a_spec(**SHAPED))
    assert set(files) < set(found["configmap.yaml"]["data"])
    volumes = {volume["name"]: volume for volume in found["job.yaml"]["spec"]["template"]["spec"]["volumes"]}
    paths = {item["key"]: item["path"] for item in volumes["worker"]["configMap"]["items"]}
    assert paths == {"worker.sh": "worker.sh", "keeper.py": "keeper.py", **files}
    plain = objects(a_spec())["configmap.yaml"]["data"]
    assert sorted(plain) == ["keeper.py", "worker.sh"]
    assert not any("NETWORK" in name for name in variables(objects(a_spec())["job.yaml"]))


# --- servers, JobSets and faults -------------------------------------------------------------------------------------


def test_a_queue_admits_workers_and_servers_as_one_job_set() -> None:
    spec = a_spec({"job_set": True, "queue": "batch"}, **SERVED)
    found = objects(spec)
    assert list(found) == ["jobset.yaml", "configmap.yaml", "service.yaml", "networkpolicy.yaml", "keeper.yaml"]
    job_set = found["jobset.yaml"]
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job_set["metadata"]["name"] == "demo-2"
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "batch"
    assert spec_of(job_set) == spec
    parts = job_set["spec"].pop("replicatedJobs")
    assert job_set["spec"] == {
        "suspend": True,
        "network": {"enableDNSHostnames": False},
        "ttlSecondsAfterFinished": 7 * DAY,
    }
    assert [part["name"] for part in parts] == ["workers", "servers"]
    for part, first in zip(parts, (None, "2"), strict=True):
        template = part["template"]
        assert template["metadata"]["labels"]["mlbench/queue"] == "batch"
        assert "kueue.x-k8s.io/queue-name" not in template["metadata"]["labels"]
        assert template["spec"]["completions"] == 2
        pod = template["spec"]["template"]
        assert pod["metadata"]["labels"].get("mlbench/first-unit") == first
        (container,) = pod["spec"]["containers"]
        environment = {item["name"]: item for item in container["env"]}
        assert environment["MLBENCH_JOB"]["value"] == "demo-2-workers-0"
        assert environment["MASTER_ADDR"]["value"] == "demo-2-workers-0-0.demo-2"
        field = environment["MLBENCH_KEEPER_TOKEN"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert field == "metadata.annotations['jobset.sigs.k8s.io/jobset-uid']"
    assert "MLBENCH_JOB" not in variables(objects(a_spec())["job.yaml"])


def test_servers_in_a_queue_wait_in_the_same_queue() -> None:
    found = objects(a_spec({"queue": "batch"}, **SERVED))
    labels = {name: found[name]["metadata"]["labels"] for name in ("job.yaml", "servers.yaml", "keeper.yaml")}
    queues = {name: queue_of(found[name]) for name in labels}
    assert queues == {"job.yaml": "batch", "servers.yaml": "batch", "keeper.yaml": None}
    assert labels["servers.yaml"] == {
        "mlbench/run": "demo-2",
        "app.kubernetes.io/managed-by": "mlbench",
        "mlbench/role": "server",
        "kueue.x-k8s.io/queue-name": "batch",
    }


def test_runs_with_faults_have_an_agent_that_knows_them() -> None:
    spec = a_spec(faults="at 60s kill rank 1", on_failure="restart", checkpoint_every="30s", detect_seconds=9.0)
    found = objects(spec)
    environment = variables(found["job.yaml"])
    assert json.loads(environment["MLBENCH_FAULTS"]) == {
        "script": "at 60s kill rank 1",
        "seed": 42,
        "ranks": 2,
        "workers": 2,
        "policy": "restart",
        "checkpoint_every": "30s",
        "checkpoint_copy": None,
        "detect_seconds": 9.0,
        "from_start": True,
    }
    assert environment["MLBENCH_AGENT_PORT"] == "29602"
    assert "agent.zip" in found["configmap.yaml"].get("binaryData", {})
    plain = objects(a_spec())
    assert "agent.zip" not in plain["configmap.yaml"].get("binaryData", {})
    assert not {"MLBENCH_FAULTS", "MLBENCH_AGENT_PORT"} & set(variables(plain["job.yaml"]))


@pytest.mark.parametrize(
    ("spec", "figures"),
    [
        (
            a_spec({"hold_seconds": 60}, timeout=600.5),
            {"TIMEOUT": "601", "HOLD": "60", "WORKERS": "2", "RUN_ON_ALL": "1", "WORK_DIR": "/results"},
        ),
        (a_spec({"hold_seconds": 0}, run_on_all=False), {"TIMEOUT": "600", "HOLD": "0", "RUN_ON_ALL": "0"}),
        (a_spec(), {"KEEPER": "demo-2-keeper.demo-2:29600", "JOB": None, "FIRST_UNIT": None}),
        (a_spec({"keep_seconds": 0}), {"KEEPER": None}),
    ],
)
def test_what_a_worker_is_told(spec: RunSpec, figures: dict[str, str | None]) -> None:
    environment = variables(objects(spec)["job.yaml"])
    assert {name: environment.get(f"MLBENCH_{name}") for name in figures} == figures


def test_runs_on_the_hosts_network_have_ports_of_their_own() -> None:
    ports = {
        variables(objects(a_spec({"host_network": True}, seed=seed))["job.yaml"])["MASTER_PORT"] for seed in (1, 2)
    }
    assert len(ports) == 2
    assert all(20000 <= int(port) < 30000 for port in ports)
    assert variables(objects(a_spec())["job.yaml"])["MASTER_PORT"] == "29500"


def test_tasks_of_the_catalog_run_only_the_code_of_their_image() -> None:
    safe = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
    task: dict[str, Any] = {"task": "digits_resnet", "preset": "tiny"}
    assert variables(objects(a_spec(**task))["job.yaml"]).items() >= safe.items()
    assert not set(safe) & set(variables(objects(a_spec())["job.yaml"]))
    foreign = {"env": {"PYTHONPATH": "/mine"}}
    assert variables(objects(a_spec(foreign))["job.yaml"])["PYTHONPATH"] == "/mine"
    with pytest.raises(UsageError, match="--env PYTHONPATH: a built-in task runs only the code in its image"):
        manifests(a_spec(foreign, **task), "team")


@pytest.mark.parametrize(
    ("keep_storage", "size"),
    [("10Gi", (10 << 30) - (64 << 20)), ("65Mi", 1 << 20), ("1G", 10**9 - (64 << 20))],
)
def test_a_keeper_leaves_a_part_of_its_disk_free(keep_storage: str, size: int) -> None:
    (container,) = objects(a_spec({"keep_storage": keep_storage}))["keeper.yaml"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert str(size) in json.dumps(container)


@pytest.mark.parametrize(
    "options", [{"run_as_user": 2**31 - 1}, {"keep_seconds": 30 * DAY}, {"memory": "1e9"}, {"shm": "0.5Gi"}]
)
def test_what_kubernetes_just_allows_is_not_refused(options: dict[str, Any]) -> None:
    manifests(a_spec(options), "team")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run_as_user": 2**31}, "--run-as-user 2147483648: the number must be from 0 to 2147483647."),
        ({"keep_seconds": 30 * DAY + 1}, "the maximum is 30 days"),
        ({"keep_seconds": -1}, "--keep: -1 seconds"),
        ({"memory": "9GB"}, '--memory "9GB" is not a quantity of Kubernetes.'),
    ],
)
def test_what_kubernetes_just_refuses_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        manifests(a_spec(options), "team")
    assert words in caught.value.message


def test_a_keeper_that_is_left_out_needs_no_disk() -> None:
    with pytest.raises(UsageError, match="must be above 64 MiB"):
        manifests(a_spec({"keep_storage": "1Mi"}), "team")
    manifests(a_spec({"keep_storage": "1Mi", "keep_seconds": 0}), "team")
