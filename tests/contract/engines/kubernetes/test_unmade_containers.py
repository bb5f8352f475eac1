"""Pods that a node does not admit, and containers that are never made: named by what happened, in the node's words."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.model.run import Finding
from mlbench_cli.runs import supervise
from mlbench_cli.storage.store import Store
from tests.contract.engines.kubernetes.test_engine import a_run, submit
from tests.fakes.kube_api import KubeApi

RUNC = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: "
)
HOOK = "error during container init: error running hook #0: error running hook: exit status 1, stdout: , stderr: "


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


def find(server: KubeApi, folder: Path, **status: Any) -> Finding:
    """The finding on the only worker, which is on the node gpu-7."""
    run = a_run(folder, workers=1)
    submit(server, run)
    labels = {"mlbench/run": "r-2", "batch.kubernetes.io/job-completion-index": "0"}
    pod = {"metadata": {"name": "r-2-0-x", "labels": labels}, "spec": {"nodeName": "gpu-7"}, "status": status}
    server.put("pods", pod)
    return KubernetesEngine(server.access).look(run).findings[0]


def container(kind: str, reason: str, message: str, code: int | None = None) -> dict[str, Any]:
    state: dict[str, Any] = {"reason": reason, "message": message} | ({} if code is None else {"exitCode": code})
    return {"containerStatuses": [{"name": "main", "state": {kind: state}}]}


# What kubelets may say of the containers of a pod that they have rejected. Source: kubernetes 133733 and 136592.
NEVER_CREATED = container("waiting", "ContainerCreating", "")
ENDED_UNKNOWN = container("terminated", "ContainerStatusUnknown", "The container could not be located", 137)


def test_an_image_that_is_still_being_pulled_is_named(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path, workers=1)
    submit(server, run)
    labels = {"mlbench/run": "r-2", "batch.kubernetes.io/job-completion-index": "0"}
    metadata = {"name": "r-2-0-x", "uid": "u", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    status = {"phase": "Pending", **NEVER_CREATED}
    server.put("pods", {"metadata": metadata, "spec": {"nodeName": "gpu-7"}, "status": status})
    assert not KubernetesEngine(server.access).look(run).findings
    for name, uid in (("a", "another"), ("b", "u")):
        about = {"metadata": {"name": name}, "type": "Normal", "involvedObject": {"uid": uid}}
        server.put("events", {**about, "reason": "Pulling", "message": 'Pulling image "image:1"'})
    (found,) = KubernetesEngine(server.access).look(run).findings
    assert found.code == "image_pull"
    assert all(words in found.summary for words in ("gpu-7", "image:1", "still"))


@pytest.mark.parametrize(
    ("reason", "message", "containers"),
    [
        ("TopologyAffinityError", "Resources cannot be allocated with Topology locality", {}),
        ("UnexpectedAdmissionError", "Allocate failed due to no healthy devices present", NEVER_CREATED),
        ("OutOfcpu", "Node didn't have enough resource: cpu", {}),
        ("SysctlForbidden", "forbidden sysctl: net.core.somaxconn not allowlisted", {}),
        ("SMTAlignmentError", "SMT Alignment Error: requested 3 cpus not multiple of 2", ENDED_UNKNOWN),
        ("PodFeatureUnsupported", "a reason of tomorrow", {}),
    ],
)
def test_a_pod_that_its_node_rejects_is_told_in_the_nodes_words(
    server: KubeApi, tmp_path: Path, reason: str, message: str, containers: dict[str, Any]
) -> None:
    found = find(server, tmp_path, phase="Failed", reason=reason, message=f"Pod was rejected: {message}", **containers)
    assert found.code == "device_admission"
    assert found.retryable
    assert all(words in found.summary for words in ("gpu-7", reason, message))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (
            "driver_mismatch",
            container("terminated", "StartError", RUNC + HOOK + "Auto-detected mode as 'legacy'\nnvidia-container-cli: "
                      "initialization error: nvml error: driver/library version mismatch: unknown", 128),
        ),
        (
            "driver_mismatch",
            container("terminated", "StartError", RUNC + HOOK + "nvidia-container-cli: requirement error: unsatisfied "
                      "condition: cuda>=12.6, please update your driver to a newer version: unknown", 128),
        ),
        (
            "driver_mismatch",
            container("terminated", "StartError", RUNC + "could not apply required modification to OCI specification: "
                      "failed to inject CDI devices: unresolvable CDI devices nvidia.com/gpu=0: unknown", 128),
        ),
        (
            "out_of_memory",
            container("terminated", "StartError", RUNC + "container init was OOM-killed (memory limit too low?)", 128),
        ),
        (
            "wrong_architecture",
            container("terminated", "StartError", RUNC + 'exec: "/mlbench/worker.sh": exec format error', 128),
        ),
        (
            "command_not_found",
            container("terminated", "StartError", RUNC + 'exec: "sh": executable file not found in $PATH', 127),
        ),
        (
            "container_not_created",
            container("terminated", "StartError", RUNC + "error mounting /dev/infiniband: no such file", 128),
        ),
        (
            "container_not_created",
            container("terminated", "StartError", "OCI runtime create failed: unable to retrieve OCI runtime error: "
                      'exec: "nvidia-container-runtime": executable file not found in $PATH: unknown', 128),
        ),
        (
            "container_lost",
            ENDED_UNKNOWN,
        ),
        (
            "wrong_architecture",
            container("waiting", "ErrImagePull", 'failed to pull and unpack image "registry.invalid/x:1": no match for '
                      "platform in manifest: not found"),
        ),
    ],
)  # fmt: skip
def test_a_container_that_was_never_made_is_told_by_its_cause(
    server: KubeApi, tmp_path: Path, code: str, status: dict[str, Any]
) -> None:
    phase = "Failed" if "terminated" in status["containerStatuses"][0]["state"] else "Pending"
    found = find(server, tmp_path, phase=phase, **status)
    assert found.code == code
    assert "gpu-7" in found.summary or code not in ("driver_mismatch", "container_not_created", "container_lost")


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("tls: failed to verify certificate: x509: certificate signed by unknown authority", "trust the registry"),
        ("http: server gave HTTP response to HTTPS client", "trust the registry"),
        ("429 Too Many Requests: toomanyrequests: You have reached your pull rate limit", "--pull-secret"),
        ("write /var/lib/containerd/x: no space left on device", "larger disks"),
        ("dial tcp: lookup registry.invalid: i/o timeout", "reach the registry"),
    ],
)
def test_a_pull_that_fails_comes_with_what_helps(server: KubeApi, tmp_path: Path, message: str, hint: str) -> None:
    found = find(server, tmp_path, phase="Pending", **container("waiting", "ErrImagePull", message))
    assert (found.code, found.permanent) == ("image_pull", False)
    assert hint in (found.hint or "")


def test_an_image_without_a_shell_has_no_duration_and_nobody_waits_for_its_head(
    server: KubeApi, tmp_path: Path
) -> None:
    """The head has the same image. A container that was not started has the times of 1970."""
    (tmp_path / "home").mkdir()
    with closing(Store(tmp_path / "home")) as store:
        run = store.record_run(a_run(tmp_path, workers=1).spec)
        submit(server, run)
        times = {"startedAt": "1970-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:09Z"}
        ended = {"reason": "StartError", "message": f'{RUNC}exec: "sh": executable file not found in $PATH', **times}
        labels = {"mlbench/run": "r-2", "mlbench/role": "head"}
        worker = {"mlbench/run": "r-2", "batch.kubernetes.io/job-completion-index": "0"}
        status = [{"name": "main", "state": {"terminated": {"exitCode": 128, **ended}}}]
        put = {"metadata": {"name": "r-2-0-x", "labels": worker}, "spec": {"nodeName": "n"}}
        server.put("pods", {**put, "status": {"phase": "Failed", "containerStatuses": status}})
        waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
        status = [{"name": "main", "state": waiting, "lastState": {"terminated": {"exitCode": 128, **ended}}}]
        put = {"metadata": {"name": "r-2-head-x", "labels": labels}, "spec": {"nodeName": "n"}}
        server.put("pods", {**put, "status": {"phase": "Running", "containerStatuses": status}})
        begun = time.monotonic()
        finished = supervise.follow(run, KubernetesEngine(server.access), store)
    assert time.monotonic() - begun < 60
    assert finished.outcome == "failed"
    assert 'exec: "sh": executable file not found' in finished.findings[0].summary
    assert finished.result is not None
    assert finished.result["wall_seconds"] is None
