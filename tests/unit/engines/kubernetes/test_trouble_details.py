"""What findings on a trouble say: whole sentences with numbers, hints and evidence, and when they become permanent."""

from decimal import Decimal
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.diagnosis.crashes import crash
from mlbench_cli.engines.kubernetes.diagnosis.diagnose import diagnose
from mlbench_cli.engines.kubernetes.diagnosis.facts import Facts, evidence, when
from mlbench_cli.engines.kubernetes.diagnosis.scheduling import quantity
from mlbench_cli.model.run import Finding
from tests.unit.engines.kubernetes.test_diagnose import (
    AGO,
    GPUS,
    INITIALIZING,
    MANIFEST,
    NOW,
    a_job,
    a_node,
    a_pod,
    a_sidecar,
    an_event,
    disrupted_pod,
    terminated_container,
    unscheduled_pod,
    waiting,
)

RUNNING = {"running": {"startedAt": AGO}}


def only(*pods: dict[str, Any], **facts: Any) -> Finding:
    (finding,) = diagnose(**{"job": a_job(), **facts}, pods=pods, now=NOW)
    return finding


def before(seconds: float) -> str:
    """A time of Kubernetes so many seconds before NOW, 2027-01-15T08:00:00Z."""
    minutes, rest = divmod(int(seconds), 60)
    return f"2027-01-15T07:{59 - minutes if rest else 60 - minutes:02d}:{(60 - rest) % 60:02d}Z"


# --- pods that do not come to run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "code", "hint"),
    [
        ("exceeded quota: q, requested: pods=2", "quota_exceeded", "kubectl describe resourcequota"),
        ("failed quota: q: must specify limits.cpu for: main", "quota_exceeded", "--cpu-limit N"),
        (
            "failed quota: q: must specify limits.memory: main limits.cpu",
            "quota_exceeded",
            "kubectl describe resourcequota",
        ),
        ('violates PodSecurity "restricted"', "pod_security", "The namespace forbids such pods"),
        ("maximum memory usage per Container is 10Mi", "admission_denied", "kubectl describe limitrange"),
        ("minimum cpu usage per Pod is 1", "admission_denied", "kubectl describe limitrange"),
        ("autogke-disallow: denied the request", "admission_denied", "GKE Autopilot rejects"),
        ("denied the request: no", "admission_denied", "A policy of the cluster"),
        ("something else", "pods_not_created", None),
    ],
)
def test_pods_that_cannot_be_created(message: str, code: str, hint: str | None) -> None:
    old, new = an_event("FailedCreate", "old", "job", before(60)), an_event("FailedCreate", message, "job")
    found = only(a_pod(state=RUNNING), events=[new, old])
    assert (found.code, str(found.hint).startswith(str(hint))) == (code, True)
    assert found.evidence == {"message": message, "created": 1, "wanted": 2}
    assert found.permanent is (hint is not None if code != "quota_exceeded" else "must specify" in message)
    assert message in found.summary


def test_a_job_that_has_all_its_pods_is_not_refused() -> None:
    refusal = an_event("FailedCreate", "something else", "job")
    running = [a_pod(index, state=RUNNING) for index in (0, 1)]
    assert diagnose(a_job(), running, [refusal], now=NOW) == []
    assert diagnose(a_job(), running[:1], [an_event("FailedCreate", "x", "another")], now=NOW) == []


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ('secret "a" not found', "Create the secret in the run's namespace, or remove the option."),
        ("secret is there", None),
        ("configmap not found", None),
        (
            "container has runAsNonRoot and image will run as root",
            "Use an image that can run as a user other than root.",
        ),
        ("image has non-numeric user, cannot verify user is non-root", "Use an image that can run as a user"),
    ],
)
def test_a_container_that_cannot_be_created(message: str, hint: str | None) -> None:
    found = only(a_pod(state=waiting("CreateContainerConfigError", message)))
    assert found.summary == f"The container of worker 0 cannot be created: {message}"
    assert str(found.hint).startswith(str(hint))
    assert found.evidence == {"worker": 0, "pod": "r-0-x", "node": "n0", "message": message}
    assert only(a_pod(state=waiting("RunContainerError"))).summary.endswith("cannot be created: RunContainerError")


@pytest.mark.parametrize("state", [RUNNING, terminated_container(0)])
def test_a_container_that_was_made_is_not_held_up(state: Any) -> None:
    pod = a_pod(created=before(3000), state=state, initContainerStatuses=a_sidecar(waiting("CrashLoopBackOff"), 9))
    assert diagnose(a_job(1), [pod], [an_event("FailedMount", "x")], now=NOW) == []


@pytest.mark.parametrize(("age", "is_permanent"), [(180, False), (181, True)])
def test_a_registry_has_three_minutes_to_come_back(age: int, is_permanent: bool) -> None:
    found = only(a_pod(created=before(age), state=waiting("ErrImagePull", "i/o timeout")))
    assert (found.code, found.permanent, found.retryable) == ("image_pull", is_permanent, True)
    assert found.summary == 'The image "registry.invalid/x:1" was not pulled by n0: i/o timeout'


@pytest.mark.parametrize(("age", "is_told"), [(59, False), (60, True)])
def test_a_container_has_a_minute_to_be_made(age: int, is_told: bool) -> None:
    pod = a_pod(created=before(age), state=waiting("ContainerCreating"))
    events = [
        an_event("FailedMount", "old", at=before(30)),
        an_event("FailedAttachVolume", "disk in use"),
        an_event("FailedMount", "older", at=before(50)),
        an_event("Pulled", "no trouble"),
        an_event("FailedMount", "of another pod", uid="pod9"),
    ]
    found = diagnose(a_job(), [pod], events, now=NOW)
    assert [(item.code, item.summary) for item in found] == (
        [("volume_mount", "Worker 0 cannot start (ContainerCreating, FailedAttachVolume): disk in use")]
        if is_told
        else []
    )


def test_a_slow_start_without_events_is_no_finding() -> None:
    assert diagnose(a_job(), [a_pod(created=before(600), state=waiting("ContainerCreating"))], now=NOW) == []


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "Back-off"),
        ([an_event("Failed", "Failed to pull image: i/o timeout")], "Failed to pull image: i/o timeout"),
        ([an_event("Failed", "Error: ErrImagePull")], "Back-off"),
        (
            [an_event("Failed", "Failed to pull: old", at=before(50)), an_event("Failed", "Failed to pull: new")],
            "Failed to pull: new",
        ),
    ],
)
def test_why_an_image_does_not_come_is_in_the_events_of_its_pull(events: list[Any], words: str) -> None:
    found = only(a_pod(state=waiting("ImagePullBackOff", "Back-off")), events=events)
    assert found.summary.endswith(f"was not pulled by n0: {words}")


@pytest.mark.parametrize(
    "reason", ["ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "SignatureValidationFailed"]
)
def test_all_of_kubernetes_words_for_a_pull_that_failed(reason: str) -> None:
    found = only(a_pod(state=waiting(reason, MANIFEST)))
    assert (found.code, found.permanent) == ("image_not_found", True)
    assert found.summary == 'The image "registry.invalid/x:1" cannot be pulled: manifest unknown'


def test_images_with_impossible_names_or_policies() -> None:
    invalid = only(a_pod(state=waiting("InvalidImageName")))
    assert (invalid.code, invalid.hint, invalid.permanent) == ("image_name_invalid", "--image NAME:TAG", True)
    never = only(a_pod(state=waiting("ErrImageNeverPull")))
    assert (never.code, never.hint) == ("image_not_found", "Load it onto every node.")


@pytest.mark.parametrize(
    ("sidecar", "summary", "permanent"),
    [
        (
            a_sidecar(waiting("CrashLoopBackOff"), 2, exitCode=0, reason="Completed"),
            "keeps crashing: Completed with exit code 0.",
            False,
        ),
        (a_sidecar(waiting("CrashLoopBackOff"), 3), "keeps crashing: CrashLoopBackOff with exit code None.", True),
        (a_sidecar(None, 3, exitCode=1, reason="Error"), "keeps crashing: Error with exit code 1.", True),
    ],
)
def test_a_container_that_must_run_first_and_crashes(
    sidecar: list[dict[str, Any]], summary: str, permanent: bool
) -> None:
    found = only(a_pod(state=INITIALIZING, initContainerStatuses=sidecar))
    assert found.summary == f"The container tcpxo-daemon of worker 0, which must run before the task, {summary}"
    assert found.permanent is permanent
    assert str(found.hint).startswith("kubectl logs r-0-x -c tcpxo-daemon --previous")


@pytest.mark.parametrize(
    "sidecar",
    [
        a_sidecar(),
        a_sidecar(None, 1),
        [{**a_sidecar(None, 1, exitCode=1)[0], "started": True}],
        a_sidecar(waiting("ErrImagePull", "i/o timeout")),
    ],
)
def test_a_container_that_may_yet_run_is_no_finding(sidecar: list[dict[str, Any]]) -> None:
    assert diagnose(a_job(1), [a_pod(state=INITIALIZING, initContainerStatuses=sidecar)], now=NOW) == []


def test_a_node_that_is_silent_is_named_with_its_worker() -> None:
    found = only(a_pod(state=RUNNING), nodes=[a_node(ready="Unknown")])
    assert (found.summary, found.hint) == ("The node n0 of worker 0 is not responding.", "kubectl describe node n0")
    tainted = a_node()
    tainted["spec"] = {"taints": [{"key": "node.kubernetes.io/unreachable"}]}
    assert only(a_pod(state=RUNNING), nodes=[tainted]).code == "node_unreachable"
    for node in (a_node(ready="False"), a_node("n9", ready="Unknown")):
        assert diagnose(a_job(1), [a_pod(state=RUNNING)], nodes=[node], now=NOW) == []


# --- pods without a node ---------------------------------------------------------------------------------------------


def unscheduled(*nodes: Any, workers: int = 2, message: str = "0/3 nodes are available", **template: Any) -> Finding:
    pods = [unscheduled_pod(index, message=message) for index in range(workers)]
    return only(*pods, job=a_job(workers, **template), nodes=nodes)


SPREAD: dict[str, Any] = {
    "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": {}}]}
}


@pytest.mark.parametrize(
    ("nodes", "template", "why"),
    [
        ([], {}, "0/3 nodes are available"),
        ([a_node(cpu="2")], {"resources": {"requests": {"cpu": "2"}}}, "0/3 nodes are available"),
        (
            [a_node(cpu="2"), a_node("n1", cpu="1500m")],
            {"resources": {"requests": {"cpu": "2001m"}}},
            "each requests 2.001 cpu, and the largest of 2 nodes has 2",
        ),
        (
            [a_node(cpu="2", memory="1Gi"), a_node("n1", cpu="1", memory="2Gi")],
            {"resources": {"requests": {"cpu": "2", "memory": "2Gi"}}},
            "none of 2 nodes has everything that each requests",
        ),
        ([a_node(cpu="2")], {"affinity": SPREAD}, "2 workers need one node each, and 1 can take one (--no-spread lets"),
        ([a_node(), a_node("n1")], {"affinity": SPREAD}, "0/3 nodes are available"),
        (
            [a_node(labels={"pool": "b"})],
            {"nodeSelector": {"pool": "a"}},
            "none of the 1 nodes has the required labels",
        ),
        ([a_node(labels={"pool": "a"})], {"nodeSelector": {"pool": "a"}}, "0/3 nodes are available"),
    ],
)
def test_whether_nodes_can_ever_take_the_pods(nodes: list[Any], template: dict[str, Any], why: str) -> None:
    found = unscheduled(*nodes, **template)
    assert found.code == "unschedulable"
    assert found.summary.startswith(f"2 of 2 workers cannot be scheduled: {why}")
    assert found.permanent is (why != "0/3 nodes are available")
    assert found.evidence == {"workers": [0, 1], "waiting": 2, "message": "0/3 nodes are available"}


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "toleration", "is_tolerated"),
    [
        (TAINT, None, False),
        (TAINT, {"key": "gpu", "operator": "Exists"}, True),
        (TAINT, {"operator": "Exists"}, True),
        (TAINT, {"key": "other", "operator": "Exists"}, False),
        (TAINT, {"key": "gpu", "operator": "Equal", "value": "yes"}, True),
        (TAINT, {"key": "gpu", "value": "no"}, False),
        (TAINT, {"key": "other", "value": "yes"}, False),
        (TAINT, {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, True),
        (TAINT, {"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "gpu", "effect": "NoExecute"}, {"key": "gpu"}, True),
        ({"key": "gpu", "effect": "NoExecute"}, None, False),
        ({"key": "gpu", "effect": "PreferNoSchedule"}, None, True),  # only a wish
        ({"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}, None, True),  # it may pass
    ],
)
def test_taints_and_tolerations_as_kubernetes_defines_them(
    taint: dict[str, str], toleration: dict[str, str] | None, is_tolerated: bool
) -> None:
    node = a_node()
    node["spec"] = {"taints": [taint]}
    found = unscheduled(node, tolerations=[toleration] if toleration else [])
    assert found.permanent is not is_tolerated


@pytest.mark.parametrize(("count", "words"), [(1, "1 worker is waiting"), (2, "2 workers are waiting")])
def test_nodes_in_use_by_other_runs_are_waited_for(count: int, words: str) -> None:
    message = "0/3 nodes are available: 3 node(s) didn't match pod anti-affinity rules. preemption: none"
    found = unscheduled(workers=count, message=message)
    assert (found.code, found.permanent) == ("nodes_busy", False)
    assert found.summary.startswith(f"{words} for nodes that are in use by other runs.")
    assert "preemption" not in str(found.evidence["message"])


def test_what_an_autoscaler_says_is_evidence() -> None:
    found = only(unscheduled_pod(), events=[an_event("NotTriggerScaleUp", "2 max node group size reached")])
    assert found.evidence["autoscaler"] == "2 max node group size reached"
    assert "no node pool of the cluster fits (2 max node group size reached)" in found.summary
    failed = only(unscheduled_pod(), events=[an_event("FailedScaleUp", "no quota")])
    assert (failed.summary, failed.retryable) == ("The cluster cannot add a node: no quota", True)


def test_a_driver_that_is_not_ready_names_its_node() -> None:
    node = a_node("g1", labels={"nvidia.com/gpu.present": "true"})
    found = only(unscheduled_pod(), job=a_job(1, resources=GPUS), nodes=[node])
    assert found.summary == "The node g1 has GPUs, but its driver or device plugin is not ready."
    other = a_node("g1", labels={"nvidia.com/gpu.present": "false"})
    assert only(unscheduled_pod(), job=a_job(1, resources=GPUS), nodes=[other]).code == "unschedulable"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        ("1.5k", "1500"),
        ("1Ki", "1024"),
        ("1Mi", "1048576"),
        ("1Gi", "1073741824"),
        ("1Ti", "1099511627776"),
        ("1Pi", "1125899906842624"),
        ("2M", "2000000"),
        ("2G", "2000000000"),
        ("2T", "2000000000000"),
        ("2P", "2000000000000000"),
        ("1e3", "1000"),
        ("x", "0"),
        ("", "0"),
    ],
)
def test_quantities_of_kubernetes(text: str, number: str) -> None:
    assert quantity(text) == Decimal(number)


# --- workers that failed ---------------------------------------------------------------------------------------------


def failed(
    code: int = 1, reason: str = "Error", message: str = "", log: str = "", memory: str | None = None
) -> Finding:
    return crash("x-2", 3, code, reason, message, log, memory)


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (failed(137, "OOMKilled", memory="64Mi"), "out_of_memory", "more memory than its limit of 64Mi and was"),
        (failed(137, "OOMKilled"), "out_of_memory", "more memory than its limit and was killed."),
        (failed(126), "command_not_found", "could not be started: exit code 126"),
        (failed(127, log="sh: x: not found\n"), "command_not_found", "could not be started: sh: x: not found"),
        (failed(128, "StartError", 'OCI runtime create failed: runc: exec: "x": no: unknown'), "command_not_found",
         'could not be started: exec: "x": no'),
        (failed(1, "ContainerCannotRun"), "command_not_found", "could not be started: exit code 1"),
        (failed(127, log="exec format error"), "wrong_architecture", "a different CPU architecture than its node."),
        (failed(135), "shm_exhausted", "ran out of shared memory (/dev/shm)."),
        (failed(136), "rank_crashed", "Worker 3 was killed by SIGFPE."),
        (failed(log="No space left on device: /dev/shm/x"), "shm_exhausted", "ran out of shared memory"),
        (failed(log="OSError: Disk quota exceeded"), "disk_full", "ran out of disk space."),
        (failed(log="NVIDIA driver on your system is too old"), "driver_mismatch", "missing or too old for the image."),
        (failed(log="CUDA error: an illegal memory access"), "gpu_fault", "Worker 3 had a GPU fault."),
        (failed(message="uncorrectable ECC error"), "gpu_fault", "Worker 3 had a GPU fault."),
        (failed(3), "rank_crashed", "Worker 3 exited with 3."),
        (failed(200), "rank_crashed", "Worker 3 exited with 200."),
        (failed(137), "rank_crashed", "Worker 3 was killed by SIGKILL, possibly because memory ran out."),
    ],
)  # fmt: skip
def test_a_crash_in_words(found: Finding, code: str, words: str) -> None:
    assert found.code == code
    assert words in found.summary
    assert found.retryable is (code == "gpu_fault")


def test_the_evidence_of_a_crash() -> None:
    found = failed(3, "Error", "last words", "\n".join(f"line {number}" for number in range(50)))
    assert found.evidence == {
        "worker": 3,
        "exit_code": 3,
        "reason": "Error",
        "log": [f"line {number}" for number in range(10, 50)],
    }
    assert failed(3, "", "last words").evidence == {"worker": 3, "exit_code": 3, "reason": None, "log": ["last words"]}
    assert found.hint == "mlbench logs x-2 --rank 3"


@pytest.mark.parametrize(
    ("pod", "code", "words", "retryable"),
    [
        (disrupted_pod("TerminationByKubelet"), "evicted", "Worker 0 was evicted from n0: words of the cluster", False),
        (disrupted_pod("PreemptionByScheduler"), "preempted", "preempted by a pod with a higher priority", True),
        (disrupted_pod("EvictionByEvictionAPI"), "drained", "from n0 because the node was drained.", True),
        (disrupted_pod("DeletionByPodGC"), "node_lost", "The node n0 of worker 0 has stopped responding.", True),
        (a_pod(phase="Failed", reason="Evicted"), "evicted", "was evicted from n0: no reason given", False),
        (a_pod(phase="Failed", reason="Shutdown"), "node_shut_down", "The node n0 of worker 0 was shut down.", True),
        (a_pod(phase="Failed", message="imminent node shutdown"), "node_shut_down", "was shut down.", True),
        (a_pod(phase="Failed", reason="OutOfcpu"), "device_admission", "did not admit worker 0: OutOfcpu", True),
        (a_pod(phase="Failed", reason="UnexpectedAdmissionError", message="no device"), "device_admission",
         "did not admit worker 0: no device", True),
    ],
)  # fmt: skip
def test_what_was_done_to_a_worker_from_outside(pod: dict[str, Any], code: str, words: str, retryable: bool) -> None:
    found = only(pod)
    assert (found.code, found.retryable) == (code, retryable)
    assert words in found.summary


@pytest.mark.parametrize(("count", "words"), [(1, ""), (2, " (Also 1 other worker.)"), (3, " (Also 2 other workers.)")])
def test_what_concerns_many_workers_alike_is_one_finding(count: int, words: str) -> None:
    found = only(*(a_pod(index, phase="Failed", reason="Shutdown") for index in range(count)))
    assert found.summary == f"The node n0 of worker 0 was shut down.{words}"
    assert found.evidence.get("workers") == (list(range(count)) if count > 1 else None)


def test_a_deadline_says_whether_anything_had_started() -> None:
    late = a_job(failed="DeadlineExceeded")
    never = only(unscheduled_pod(), job=late)
    assert (never.summary, never.evidence) == (
        "The run reached its deadline before any worker started.",
        {"never_ran": True},
    )
    ran = only(a_pod(state=RUNNING), job=late)
    assert (ran.summary, ran.evidence) == ("The run was stopped at its deadline.", {"never_ran": False})
    summaries = {0: {"worker": 0, "reason": "deadline", "exit_code": 124}}
    assert only(a_pod(state=RUNNING), summaries=summaries).summary == "Worker 0 was stopped at its deadline."


# --- facts -----------------------------------------------------------------------------------------------------------


def test_facts_of_a_run() -> None:
    facts = Facts(a_job(), {0: a_pod(created=before(30))}, (), (), NOW)
    assert (facts.run, facts.image, facts.age(facts.pods[0])) == ("r", "registry.invalid/x:1", 30.0)
    empty = Facts({}, {}, (), (), NOW)
    assert (empty.run, empty.image, empty.states, dict(empty.template)) == ("", "", (), {})
    assert empty.age({"metadata": {}}) == 0.0


@pytest.mark.parametrize(
    ("event", "moment"),
    [
        ({"lastTimestamp": "2027-01-15T08:00:00Z", "eventTime": "2026-01-01T00:00:00Z"}, NOW),
        ({"series": {"lastObservedTime": "2027-01-15T08:00:00Z"}, "lastTimestamp": "2026-01-01T00:00:00Z"}, NOW),
        ({"lastTimestamp": None, "eventTime": "2027-01-15T08:00:00Z"}, NOW),
        ({}, 0.0),
    ],
)
def test_when_an_event_happened_last(event: dict[str, Any], moment: float) -> None:
    assert when(event) == moment


@pytest.mark.parametrize(
    ("labels", "is_spot"),
    [
        ({"cloud.google.com/gke-spot": "true"}, True),
        ({"cloud.google.com/gke-preemptible": "true"}, True),
        ({"cloud.google.com/gke-spot": "false"}, False),
        ({"eks.amazonaws.com/capacityType": "SPOT"}, True),
        ({"eks.amazonaws.com/capacityType": "ON_DEMAND"}, False),
        ({"kubernetes.azure.com/scalesetpriority": "spot"}, True),
        ({}, False),
    ],
)
def test_spot_machines_are_known_by_the_labels_of_their_cloud(labels: dict[str, str], is_spot: bool) -> None:
    facts = Facts({}, {}, (), [a_node(labels=labels)], NOW)
    assert facts.is_spot(a_pod()) is is_spot
    assert not facts.is_spot(a_pod(node="n9"))


def test_evidence_is_bounded() -> None:
    assert evidence(3, None) == {"worker": 3}
    found = evidence(3, a_pod(), "x" * 3000)
    assert (found["pod"], found["node"], len(found["message"])) == ("r-0-x", "n0", 2000)
