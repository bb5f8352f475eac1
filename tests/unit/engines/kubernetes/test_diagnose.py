"""Every row of the table of troubles: recorded on a real cluster if it can be provoked, built by hand if not."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.diagnosis.diagnose import diagnose
from mlbench_cli.engines.kubernetes.diagnosis.facts import Facts
from mlbench_cli.engines.kubernetes.diagnosis.failures import ending
from mlbench_cli.engines.kubernetes.workers import (
    INDEX_LABEL,
    NodeEnd,
    by_worker,
    first_failed,
    terminated_state,
    worker_states,
)
from mlbench_cli.model.run import Ending, Finding

RECORDED = Path(__file__).parent / "recorded"
NOW = 1_800_000_000.0
AGO = "2027-01-15T07:59:50Z"  # ten seconds before NOW
LONG_AGO = "2027-01-15T07:50:00Z"


def load_recording(name: str) -> tuple[dict[str, Any], list[Finding]]:
    facts = json.loads((RECORDED / f"{name}.json").read_text())
    facts["ends"] = {}  # when this was recorded, the workers said them in the messages of their containers
    for worker, pod in by_worker(facts["pods"]).items():
        message = terminated_state(pod).get("message") or ""
        if message.startswith("{"):
            said = json.loads(message)
            ended = {"terminated": Ending.CANCELED, "deadline": Ending.DEADLINE}.get(said["reason"], Ending.EXITED)
            times = said.get("started"), said.get("ended")
            facts["ends"][worker] = NodeEnd(ended, said["exit_code"], *times, bool(said.get("memory_kills")))
    found = diagnose(
        *(facts[name] for name in ("job", "pods", "events", "nodes")), now=facts["now"], ends=facts["ends"]
    )
    return facts, found


@pytest.mark.parametrize(
    ("name", "code", "permanent", "retryable", "words"),
    [
        ("unschedulable_cpu", "unschedulable", True, False, "each requests 500 cpu, and the largest of 2 nodes has 2"),
        ("unschedulable_gpu", "unschedulable", True, False, "each requests 1 nvidia.com/gpu"),
        ("too_few_nodes", "unschedulable", True, False, "3 workers need one node each, and 2 can take one"),
        ("no_such_label", "unschedulable", True, False, "none of the 3 nodes has the required labels"),
        ("registry_unreachable", "image_pull", False, True, "no such host"),
        ("image_name_invalid", "image_name_invalid", True, False, '"A b:1" is not the name of an image'),
        ("missing_secret", "config_error", True, False, 'secret "nosuch" not found'),
        ("start_error", "command_not_found", False, False, 'exec: "nosuch": executable file not found in $PATH'),
        ("out_of_memory", "out_of_memory", False, False, "more memory than its limit of 64Mi"),
        ("evicted", "evicted", False, False, 'Usage of EmptyDir volume "tmp" exceeds the limit'),
        ("crash", "rank_crashed", False, False, "Worker 1 exited with 3"),
        ("deadline", "deadline", False, False, "stopped at its deadline"),
        ("pod_deleted", "pod_deleted", False, True, "worker 1 was deleted by someone else"),
        ("drained", "drained", False, True, "Worker 1 was evicted from"),
        ("preempted", "preempted", False, True, "Worker 1 was preempted"),
        ("device_admission", "device_admission", False, True, "didn't have enough resource: cpu"),
        ("node_lost", "node_lost", False, True, "has stopped responding"),
        ("pod_security", "pod_security", True, False, 'violates PodSecurity "restricted:latest"'),
        ("quota_exceeded", "quota_exceeded", True, True, "exceeded quota: q"),  # 2 workers, and 1 pod allowed
        ("quota_unsaid", "quota_exceeded", True, True, "must specify limits.memory"),
        ("limit_range", "admission_denied", True, False, "maximum memory usage per Container is 10Mi"),
    ],
)
def test_a_recorded_trouble_is_named(name: str, code: str, permanent: bool, retryable: bool, words: str) -> None:
    _, findings = load_recording(name)
    first = findings[0]
    assert [finding.code for finding in findings] == [code]
    assert (first.permanent, first.retryable) == (permanent, retryable)
    assert words in first.summary
    assert len(first.summary) < 600
    json.dumps(first.to_dict())


@pytest.mark.parametrize("name", ["evicted", "drained", "preempted"])
def test_it_is_named_also_before_the_job_controller_has_seen_it(name: str) -> None:
    """All workers have ended on being told to, and the Job does not yet say why."""
    facts = json.loads((RECORDED / f"{name}.json").read_text())
    job = {**facts["job"], "status": {"active": 2}}
    ends = dict.fromkeys((0, 1), NodeEnd(Ending.CANCELED, 143))
    found = diagnose(job, facts["pods"], facts["events"], facts["nodes"], now=facts["now"], ends=ends)
    assert [finding.code for finding in found] == [name]


@pytest.mark.parametrize("name", ["pod_deleted", "drained", "preempted", "node_lost", "crash"])
def test_the_worker_that_was_hit_is_the_first_failed(name: str) -> None:
    facts, _ = load_recording(name)
    pods = by_worker(facts["pods"])
    ends = facts["ends"]
    assert first_failed(facts["job"], worker_states(2, pods, ends), pods, ends) == 1


# --- what a test cluster cannot do --------------------------------------------------------------------------------


def a_job(workers: int = 2, suspend: bool = False, failed: str | None = None, **template: Any) -> dict[str, object]:
    resources = template.pop("resources", {})
    conditions = [{"type": "Failed", "status": "True", "reason": failed}] if failed else []
    container = {"name": "main", "image": "registry.invalid/x:1", "resources": resources}
    return {
        "metadata": {"name": "r", "uid": "job", "labels": {}},
        "spec": {
            "parallelism": workers,
            "suspend": suspend,
            "template": {"spec": {"containers": [container], **template}},
        },
        "status": {"conditions": conditions},
    }


def a_pod(
    index: int = 0,
    *,
    created: str = AGO,
    node: str | None = "n0",
    state: Any = None,
    deleted: bool = False,
    **status: Any,
) -> dict[str, object]:
    scheduled = {"type": "PodScheduled", "status": "True"}
    status = {"phase": "Pending" if state is None or "waiting" in state else "Running", **status}
    status["conditions"] = [*status.get("conditions", ()), *([scheduled] if node else [])]
    if state is not None:
        status["containerStatuses"] = [{"name": "main", "state": state, "restartCount": 0}]
    metadata = {"name": f"r-{index}-x", "uid": f"pod{index}", "creationTimestamp": created}
    if deleted:
        metadata["deletionTimestamp"] = AGO
    return {
        "metadata": {**metadata, "labels": {INDEX_LABEL: str(index)}},
        "spec": {"nodeName": node} if node else {},
        "status": status,
    }


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def terminated_container(code: int, reason: str = "Error", message: str = "", at: str = AGO) -> dict[str, object]:
    return {
        "terminated": {"exitCode": code, "reason": reason, "message": message, "startedAt": LONG_AGO, "finishedAt": at}
    }


def unscheduled_pod(
    index: int = 0, reason: str = "Unschedulable", message: str = "0/3 nodes are available"
) -> dict[str, object]:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return a_pod(index, node=None, conditions=[condition])


def an_event(reason: str, message: str, uid: str = "pod0", at: str = AGO) -> dict[str, object]:
    return {"reason": reason, "message": message, "involvedObject": {"uid": uid}, "lastTimestamp": at}


def a_node(name: str = "n0", labels: Any = None, ready: str = "True", **allocatable: str) -> dict[str, object]:
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {},
        "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": ready}]},
    }


def disrupted_pod(cause: str, **status: Any) -> dict[str, object]:
    target = {"type": "DisruptionTarget", "status": "True", "reason": cause, "message": "words of the cluster"}
    return a_pod(state=terminated_container(143), conditions=[target], phase="Failed", **status)


GPUS = {"limits": {"nvidia.com/gpu": "1"}}
GKE_SPOT = a_node(labels={"cloud.google.com/gke-spot": "true"})
EKS_SPOT = a_node(labels={"eks.amazonaws.com/capacityType": "SPOT"})
KARPENTER_SPOT = a_node(labels={"karpenter.sh/capacity-type": "spot"})
EKS_OTHER = a_node(labels={"eks.amazonaws.com/capacityType": "ON_DEMAND"})
KARPENTER_OTHER = a_node(labels={"karpenter.sh/capacity-type": "on-demand"})
AKS_SPOT = a_node(labels={"kubernetes.azure.com/scalesetpriority": "spot"})
MANIFEST = 'rpc error: code = NotFound desc = failed to pull and unpack image "x": manifest unknown'

# Why the API server does not create a pod, in the words of its admission plugins.
REFUSALS = {
    "a policy in CEL": "pods \"r-0-\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no",
    "a limit range": 'pods "r-0-" is forbidden: cpu max limit to request ratio per Container is 4, but provided ratio '
    "is 5",
    "a default limit": 'Pod "r-0-" is invalid: spec.containers[0].resources.requests: Invalid value: "500m": must be '
    "less than or equal to cpu limit of 200m",
    "its priority": 'pods "r-0-" is forbidden: no PriorityClass with name high was found',
    "its runtime": 'pods "r-0-" is forbidden: pod rejected: RuntimeClass "nvidia" not found',
}


def case(code: str, *pods: dict[str, Any], permanent: bool = False, **facts: Any) -> tuple[str, bool, dict[str, Any]]:
    return code, permanent, {"job": a_job(), **facts, "pods": pods}


def from_log(code: str, log: str) -> tuple[str, bool, dict[str, object]]:
    return case(code, a_pod(state=terminated_container(1)), logs={0: log})


def told_by_agent(code: str, end: NodeEnd) -> tuple[str, bool, dict[str, object]]:
    return case(code, a_pod(state={"running": {}}), ends={0: end})


QUEUED = {**a_job(suspend=True), "metadata": {"name": "r", "labels": {"kueue.x-k8s.io/queue-name": "q"}}}
SCALING, NO_SCALING = (
    an_event("TriggeredScaleUp", "pool 0->1"),
    an_event("NotTriggerScaleUp", "no group fits", at=LONG_AGO),
)
BACKING_OFF = [an_event("Failed", f"Failed to pull image: {MANIFEST}"), an_event("Failed", "Error: ErrImagePull")]
GKE_GPU = a_node(labels={"cloud.google.com/gke-accelerator": "nvidia-l4"})
AMD_GPUS = {"limits": {"amd.com/gpu": "8"}}
AMD_NODE = a_node(labels={"feature.node.kubernetes.io/amd-gpu": "true"})
AKS_GPU = a_node(labels={"kubernetes.azure.com/accelerator": "nvidia"})
SHUTDOWN = "Pod was terminated in response to imminent node shutdown."
CREATING = a_pod(created=LONG_AGO, state=waiting("ContainerCreating"))


def a_sidecar(waits: Any = None, restarts: int = 0, **ended: Any) -> list[dict[str, object]]:
    """The status of a container that has to run before the task's."""
    status = {"name": "tcpxo-daemon", "image": "d:1", "restartCount": restarts, "started": False}
    return [{**status, "state": waits or {"running": {}}, "lastState": {"terminated": ended} if ended else {}}]


INITIALIZING = waiting("PodInitializing")


def a_booking(kind: str, status: str = "True") -> dict[str, object]:
    """A ProvisioningRequest. Source of its conditions: Kueue's page on troubleshooting ProvisioningRequests."""
    accepted = {"type": "Accepted", "status": "True"}
    return {"status": {"conditions": [accepted, {"type": kind, "status": status, "message": "words"}]}}


def over_quota(gpus: int) -> list[dict[str, object]]:
    """The refusal of a pod with so many GPUs by a quota of four."""
    words = f"requested: pods=1,requests.nvidia.com/gpu={gpus}, used: pods=9,requests.nvidia.com/gpu=4"
    limits = "limited: pods=10,requests.nvidia.com/gpu=4"
    return [an_event("FailedCreate", f'pods "r-0-" is forbidden: exceeded quota: q, {words}, {limits}', "job")]


BUILT = {
    # On a machine that lacks its devices Google's program for TCPXO ends with 0, as if all were well.
    "sidecar that ends": case(
        "sidecar_failed",
        a_pod(
            state=INITIALIZING,
            initContainerStatuses=a_sidecar(waiting("CrashLoopBackOff"), 3, exitCode=0, reason="Completed"),
        ),
        permanent=True,
    ),
    "a webhook's container that fails before the task": case(
        "sidecar_failed",
        a_pod(
            state=INITIALIZING,
            phase="Failed",
            initContainerStatuses=a_sidecar({"terminated": {"exitCode": 255, "reason": "Error"}}),
        ),
    ),
    "sidecar that ended once": case(
        "sidecar_failed",
        a_pod(state=INITIALIZING, initContainerStatuses=a_sidecar(None, 1, exitCode=1, reason="Error")),
    ),
    "sidecar without image": case(
        "image_not_found",
        a_pod(state=INITIALIZING, initContainerStatuses=a_sidecar(waiting("ErrImagePull", MANIFEST))),
        permanent=True,
    ),
    "kueue": case("queued", job=QUEUED),
    "kueue, which took the machines of a run that had begun": case("preempted", job=QUEUED, is_begun=True),
    "booking under way": case("queued", unscheduled_pod(), booking=a_booking("Provisioned", "False")),
    "booking refused": case("scale_up_failed", unscheduled_pod(), booking=a_booking("Failed"), permanent=True),
    "booking expired": case("scale_up_failed", unscheduled_pod(), booking=a_booking("BookingExpired")),
    "booked machines are there": case("unschedulable", unscheduled_pod(), booking=a_booking("Provisioned")),
    "not released": case("suspended", job=a_job(suspend=True)),
    "gate": case("queued", unscheduled_pod(reason="SchedulingGated")),
    "full": case("unschedulable", unscheduled_pod()),
    "no such volume": case(
        "volume_missing",
        unscheduled_pod(message='0/3 nodes are available: persistentvolumeclaim "sets" not found. preemption: none'),
        permanent=True,
    ),
    "full but large enough": case(
        "unschedulable",
        unscheduled_pod(),
        job=a_job(1, resources={"requests": {"cpu": "500m"}}),
        nodes=[a_node(cpu="2")],
    ),
    "scaling up": case("scaling_up", unscheduled_pod(), events=[SCALING], nodes=[a_node(cpu="0")]),
    "scaled up after all": case("scaling_up", unscheduled_pod(), events=[SCALING, NO_SCALING]),
    "stock-out": case("scale_up_failed", unscheduled_pod(), events=[an_event("FailedScaleUp", "GCE out of resources")]),
    "driver not ready": case("driver_not_ready", unscheduled_pod(), job=a_job(1, resources=GPUS), nodes=[GKE_GPU]),
    "AMD driver not ready": case(
        "driver_not_ready", unscheduled_pod(), job=a_job(1, resources=AMD_GPUS), nodes=[AMD_NODE]
    ),
    "no AMD GPU": from_log("no_gpu", "RuntimeError: No HIP GPUs are available"),
    "AMD GPU memory": from_log("gpu_out_of_memory", "torch.OutOfMemoryError: HIP out of memory."),
    "AMD GPU fault": from_log(
        "gpu_fault", "Memory access fault by GPU node-4 (Agent handle: 0x55d) on address 0x7f2c. Reason: Unknown."
    ),
    "webhook": case(
        "admission_denied",
        events=[an_event("FailedCreate", 'admission webhook "x" denied the request: no', "job")],
        permanent=True,
    ),
    "OpenShift": case(
        "security_context",
        events=[
            an_event(
                "FailedCreate", "unable to validate against any security context constraint: [10001 is not]", "job"
            )
        ],
        permanent=True,
    ),
    "Autopilot": case(
        "admission_denied",
        events=[an_event("FailedCreate", 'admission webhook "warden-validating" denied the request: [denied]', "job")],
        permanent=True,
    ),
    "quota in use by others": case("quota_exceeded", events=over_quota(2)),
    "quota smaller than the run": case("quota_exceeded", events=over_quota(3), permanent=True),
    "quota made a moment ago": case(
        "quota_exceeded",
        events=[
            an_event("FailedCreate", 'pods "r-0-" is forbidden: status unknown for quota: q, resources: pods', "job")
        ],
    ),
    "unknown refusal": case("pods_not_created", events=[an_event("FailedCreate", "etcd: timed out", "job")]),
    **{
        f"refused by {who}": case("admission_denied", events=[an_event("FailedCreate", words, "job")], permanent=True)
        for who, words in REFUSALS.items()
    },
    "webhook that does not answer": case(
        "pods_not_created",
        events=[
            an_event(
                "FailedCreate",
                'Internal error occurred: failed calling webhook "mutate.kyverno.svc": failed to call webhook: Post '
                '"https://kyverno-svc.kyverno.svc:443/mutate/fail": context deadline exceeded',
                "job",
            )
        ],
    ),
    "image not found": case("image_not_found", a_pod(state=waiting("ErrImagePull", MANIFEST)), permanent=True),
    "image not found, backing off": case(
        "image_not_found", a_pod(state=waiting("ImagePullBackOff", "Back-off")), events=BACKING_OFF, permanent=True
    ),
    "image forbidden": case(
        "image_not_found", a_pod(state=waiting("ErrImagePull", "unexpected status: 403 Forbidden")), permanent=True
    ),
    "image without a login": case(
        "image_not_found",
        a_pod(state=waiting("ImagePullBackOff", 'Head "https://1.dkr.ecr.invalid/v2/x": no basic auth credentials')),
        permanent=True,
    ),
    "image without a registry": case(
        "image_not_found",
        a_pod(
            state=waiting(
                "ImageInspectError",
                'Failed to inspect image "": rpc error: code = Unknown desc = short '
                "name mode is enforcing, but image name x/y:1 returns ambiguous list",
            )
        ),
        permanent=True,
    ),
    "runtime too busy": case(
        "container_not_created",
        a_pod(state=waiting("CreateContainerError", 'failed to reserve container name "main": name is reserved')),
        permanent=True,  # if it lasts
    ),
    "image never pulled": case("image_not_found", a_pod(state=waiting("ErrImageNeverPull")), permanent=True),
    "layer that its node has lost": case(
        "image_pull",
        a_pod(state=waiting("ErrImagePull", f"failed to unpack: content digest sha256:{16 * 'ab12'}: not found")),
    ),
    "registry away": case("image_pull", a_pod(state=waiting("ErrImagePull", "i/o timeout"))),
    "registry away for long": case(
        "image_pull", a_pod(created=LONG_AGO, state=waiting("ErrImagePull", "i/o timeout")), permanent=True
    ),
    "image that takes long": case(
        "image_pull", CREATING, events=[an_event("Pulling", 'Pulling image "registry.invalid/x:1"', at=LONG_AGO)]
    ),
    "runs as root": case(
        "config_error", a_pod(state=waiting("CreateContainerConfigError", "image will run as root")), permanent=True
    ),
    "secrets that come late": case(
        "config_error",
        a_pod(
            state=waiting(
                "CreateContainerConfigError", "failed to sync secret cache: timed out waiting for the condition"
            )
        ),
    ),
    "volume": case("volume_mount", CREATING, events=[an_event("FailedMount", 'configmap "r" not found')]),
    "devices": case(
        "pod_sandbox",
        CREATING,
        events=[
            an_event("FailedPrepareDynamicResources", "NodePrepareResources: deadline exceeded", at=LONG_AGO),
            an_event("FailedScheduling", "0/3 nodes are available"),
        ],
    ),
    "sandbox": case("pod_sandbox", CREATING, events=[an_event("FailedCreatePodSandBox", "no IP addresses left")]),
    "node silent": case("node_unreachable", a_pod(state={"running": {}}), nodes=[a_node(ready="Unknown")]),
    "GKE spot": case("spot_lost", a_pod(phase="Failed", reason="Terminated", message=SHUTDOWN), nodes=[GKE_SPOT]),
    "GKE spot, since kubelets name the disruption": case(
        "spot_lost",
        disrupted_pod("TerminationByKubelet", reason="Terminated", message=SHUTDOWN),
        nodes=[GKE_SPOT],
    ),
    "AKS spot": case("spot_lost", disrupted_pod("EvictionByEvictionAPI"), nodes=[AKS_SPOT]),
    "driver not ready on AKS": case(
        "driver_not_ready", unscheduled_pod(), job=a_job(1, resources=GPUS), nodes=[AKS_GPU]
    ),
    "EKS spot": case("spot_lost", disrupted_pod("EvictionByEvictionAPI"), nodes=[EKS_SPOT]),
    "Karpenter's spot": case("spot_lost", disrupted_pod("EvictionByEvictionAPI"), nodes=[KARPENTER_SPOT]),
    "Karpenter's on demand": case("drained", disrupted_pod("EvictionByEvictionAPI"), nodes=[KARPENTER_OTHER]),
    "EKS on demand": case("drained", disrupted_pod("EvictionByEvictionAPI"), nodes=[EKS_OTHER]),
    "made room for a critical pod": case(
        "preempted",
        a_pod(
            phase="Failed",
            reason="Preempting",
            message="Preempted in order to admit critical pod",
            conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}],
        ),
    ),
    "node shut down": case("node_shut_down", a_pod(phase="Failed", reason="NodeShutdown")),
    "node shut down, since kubelets name the disruption": case(
        "node_shut_down", disrupted_pod("TerminationByKubelet", reason="Terminated", message=SHUTDOWN)
    ),
    "evicted by the kubelet": case("evicted", disrupted_pod("TerminationByKubelet")),
    "taken away from a broken device": case("drained", disrupted_pod("DeletionByDeviceTaintManager")),
    "GPU memory": case("gpu_out_of_memory", a_pod(state=terminated_container(1, message="CUDA out of memory."))),
    "GPU memory, in the log": from_log("gpu_out_of_memory", "x\ntorch.OutOfMemoryError: CUDA out of memory.\n"),
    "shm by signal": case("shm_exhausted", a_pod(state=terminated_container(135))),
    "shm by message": from_log("shm_exhausted", "RuntimeError: unable to write to file </torch_7_2>"),
    "shm of NCCL": from_log("shm_exhausted", "NCCL WARN Error: failed to extend /dev/shm/nccl-VKtBDk to 9637892 bytes"),
    "shm of workers": from_log("shm_exhausted", "possible that dataloader's workers are out of shared memory."),
    "architecture": from_log("wrong_architecture", "exec /bin/sh: exec format error"),
    "driver too old": from_log("driver_mismatch", "CUDA driver version is insufficient for CUDA"),
    "GPU fault": from_log("gpu_fault", "NVRM: Xid (PCI:0000): 79, GPU has fallen off the bus"),
    "disk": from_log("disk_full", "OSError: [Errno 28] No space left on device"),
    "usage": case("usage", a_pod(state=terminated_container(64))),
    "wrong results": case("wrong_result", a_pod(state=terminated_container(70))),
    "may be temporary": case("retryable", a_pod(state=terminated_container(75))),
    "environment": case("bad_environment", a_pod(state=terminated_container(78))),
    "not found in a shell": case("command_not_found", a_pod(state=terminated_container(127))),
    "killed": case("rank_crashed", a_pod(state=terminated_container(137))),
    "memory, told by the worker": told_by_agent("out_of_memory", NodeEnd(Ending.EXITED, 137, is_out_of_memory=True)),
    "deadline, told by the worker": told_by_agent("deadline", NodeEnd(Ending.DEADLINE, 124)),
    "deadline before any start": case("deadline", unscheduled_pod(), job=a_job(failed="DeadlineExceeded")),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_built_trouble_is_named(name: str) -> None:
    code, permanent, facts = BUILT[name]
    findings = diagnose(**facts, now=NOW)
    assert [finding.code for finding in findings] == [code]
    assert findings[0].permanent is permanent
    json.dumps(findings[0].to_dict())


def test_a_scheduler_that_looks_at_no_pod_is_named() -> None:
    pods, job = [a_pod(worker, node=None, created=LONG_AGO) for worker in range(2)], a_job(schedulerName="mine")
    (found,) = diagnose(job, pods, [], [a_node(cpu="2")], now=NOW)
    assert found.code == "unschedulable"
    assert 'scheduler "mine"' in found.summary
    assert not found.permanent
    just_now = [a_pod(node=None)]
    assert diagnose(job, just_now, [], [a_node(cpu="2")], now=NOW) == []


@pytest.mark.parametrize(
    "pods",
    [
        [],
        [a_pod()],
        [a_pod(state=waiting("ContainerCreating"))],
        [a_pod(created=LONG_AGO, state=waiting("ContainerCreating"))],  # a large image that is being pulled
        [a_pod(state={"running": {"startedAt": AGO}})],
        [a_pod(state=INITIALIZING, initContainerStatuses=a_sidecar())],  # its startup probe waits for its marker
        [a_pod(0, state=terminated_container(0, "Completed"), phase="Succeeded"), a_pod(1, state={"running": {}})],
    ],
)
def test_no_alarm_while_all_is_well(pods: list[dict[str, object]]) -> None:
    assert diagnose(a_job(), pods, [], [a_node(cpu="2")], now=NOW) == []


def test_those_who_fail_because_of_the_first_are_no_findings() -> None:
    pods = [
        a_pod(0, state=terminated_container(1, at="2027-01-15T07:59:52Z"), phase="Failed"),
        a_pod(1, state=terminated_container(7, at="2027-01-15T07:59:51Z"), phase="Failed"),
        a_pod(2, state=terminated_container(143, at="2027-01-15T07:59:50Z"), deleted=True, phase="Failed"),
    ]
    (finding,) = diagnose(a_job(3, failed="PodFailurePolicy"), pods, now=NOW, logs={1: "a\nb"})
    assert finding.evidence["worker"] == 1
    assert finding.evidence["exit_code"] == 7
    assert finding.evidence["log"] == ["a", "b"]


def test_a_workers_own_clock_decides_who_was_first() -> None:
    pods = [a_pod(index, state=terminated_container(index + 1), phase="Failed") for index in (0, 1)]
    ends = {
        index: NodeEnd(Ending.EXITED, index + 1, finished=NOW - 10 + delay) for index, delay in ((0, 0.9), (1, 0.2))
    }
    (finding,) = diagnose(a_job(), pods, now=NOW, ends=ends)
    assert finding.evidence["exit_code"] == 2


def test_like_troubles_are_one_finding() -> None:
    pods = [a_pod(index, state=waiting("ErrImagePull", MANIFEST)) for index in range(300)]
    (finding,) = diagnose(a_job(300), pods, now=NOW)
    assert "299 other workers" in finding.summary
    assert len(finding.evidence["workers"]) == 100


def test_foreign_objects_do_no_harm() -> None:
    assert diagnose(None, [], now=NOW) == []
    assert diagnose({}, [{"metadata": {"name": "x"}, "status": {}}], [{}], [{}], now=NOW) == []
    odd = a_pod(state=terminated_container(1, message='{"exit_code": "no number"'))
    assert [finding.code for finding in diagnose(a_job(), [odd], now=NOW)] == ["rank_crashed"]


@pytest.mark.parametrize(
    ("message", "cures"),
    [
        ("2 Insufficient nvidia.com/gpu", {"--gpus-per-worker", "scale up"}),
        ("1 node(s) had untolerated taint(s), 2 Insufficient cpu", {"--gpus-per-worker", "--pod-patch", "scale up"}),
        ("2 node(s) had untolerated taint {team: a}", {"--pod-patch", "scale up"}),
        ("2 node(s) didn't match Pod's node affinity/selector", {"--node-selector", "scale up"}),
        ("2 node(s) were unschedulable", {"uncordon", "scale up"}),
        ("1 node(s) had untolerated taint {node.kubernetes.io/disk-pressure: }", {"kubectl describe node", "scale up"}),
        ("2 node(s) had volume node affinity conflict", {"kubectl describe pvc"}),
        ("pod has unbound immediate PersistentVolumeClaims", {"kubectl describe pvc"}),
        ("words of tomorrow", {"--gpus-per-worker", "scale up"}),
    ],
)
def test_the_next_step_fits_what_the_scheduler_says(message: str, cures: set[str]) -> None:
    (finding,) = diagnose(a_job(1), [unscheduled_pod(message=f"0/3 nodes are available: {message}.")], now=NOW)
    every = {"--gpus-per-worker", "--pod-patch", "--node-selector", "uncordon", "kubectl describe node", "scale up"}
    every |= {"kubectl describe pvc"}
    assert {cure for cure in every if cure in str(finding.hint)} == cures


@pytest.mark.parametrize(
    ("pods", "ends", "words"),
    [
        ({}, {}, "was deleted by someone else; its exit code is unknown."),
        ({1: a_pod(1, state={"running": {}})}, {}, "was deleted by someone else; its exit code is unknown."),
        ({}, {1: NodeEnd(Ending.CANCELED, 143)}, "was deleted by someone else."),
        ({1: a_pod(1, state={"terminated": {"reason": "Error"}})}, {}, "Worker 1 exited with -1"),
    ],
)
def test_a_worker_without_an_exit_code_is_told_from_one_that_failed(
    pods: dict[int, Any], ends: dict[int, NodeEnd], words: str
) -> None:
    found = ending(Facts(a_job(), pods, (), (), NOW, ends), 1)
    assert words in found.summary
    assert (found.code, found.retryable) == ("rank_crashed" if "-1" in words else "pod_deleted", "-1" not in words)


@pytest.mark.parametrize(
    ("name", "command"),
    [("quota_exceeded", "kubectl -n team describe resourcequota"), ("node_lost", "kubectl describe node ")],
)
def test_the_next_command_names_the_namespace_of_the_run(name: str, command: str) -> None:
    facts, _ = load_recording(name)
    facts["job"]["metadata"]["namespace"] = "team"
    (finding,) = diagnose(*(facts[key] for key in ("job", "pods", "events", "nodes")), now=facts["now"])
    assert command in str(finding.hint)


def test_of_several_events_the_latest_one_is_told() -> None:
    """The API server gives them in no order."""
    events = [
        {
            "involvedObject": {"uid": "job"},
            "reason": "FailedCreate",
            "message": f"refusal of minute {minute}",
            "lastTimestamp": f"2027-01-15T07:5{minute}:00Z",
        }
        for minute in (2, 3, 1)
    ]
    [finding] = diagnose(a_job(), {}, events, (), now=NOW)
    assert "refusal of minute 3" in finding.summary
