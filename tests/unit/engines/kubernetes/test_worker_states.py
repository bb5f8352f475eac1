"""What the pods of a run say about its workers: states, reasons, endings and who failed first."""

from typing import Any

import pytest

from mlbench_cli.engines.kubernetes import workers
from mlbench_cli.engines.kubernetes.workers import (
    failure_of,
    first_failed,
    has_ended,
    has_started,
    is_cut_off,
    is_on_silent_node,
    memory_limit,
    reason,
    seconds,
    was_stopped,
    worker_state,
)
from mlbench_cli.kube.pods import GONE
from mlbench_cli.model.run import WorkerState

START, END = "2027-01-15T08:00:00Z", "2027-01-15T08:00:50.5Z"
MOMENT = 1_800_000_000.0  # of START: date -d 2027-01-15T08:00:00Z +%s
RUNNING = {"running": {"startedAt": START}}


def ended(code: int, why: str = "Completed", **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": why, "startedAt": START, "finishedAt": END, **more}}


def a_pod(
    state: dict[str, Any] | None = None,
    phase: str = "Running",
    conditions: tuple[dict[str, str], ...] = (),
    status: dict[str, Any] | None = None,
    container: dict[str, Any] | None = None,
    gone: bool = False,
    **metadata: Any,
) -> dict[str, Any]:
    statuses = [{"name": "sidecar", "state": RUNNING}]
    if state is not None:
        statuses.append({"name": "main", "state": state, **(container or {})})
    return {
        "metadata": {"name": "x", **metadata},
        "spec": {"nodeName": "n1"},
        "status": {"phase": phase, "containerStatuses": statuses, "conditions": list(conditions), **(status or {})},
        **({GONE: True} if gone else {}),
    }


def is_(kind: str, value: str = "True", why: str = "") -> dict[str, str]:
    return {"type": kind, "status": value, "reason": why}


SCHEDULED = is_("PodScheduled")
CUT_OFF = is_("DisruptionTarget", why="DeletionByTaintManager")

# --- which pod is which worker ---------------------------------------------------------------------------------------


# --- the state of a worker -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "phase", "code"),
    [
        ({"metadata": {}}, "pending", None),
        (a_pod(None, "Pending"), "pending", None),
        (a_pod(None, "Pending", (is_("PodScheduled", "False"),)), "pending", None),
        (a_pod(None, "Pending", (SCHEDULED,)), "starting", None),
        (a_pod({"waiting": {}}, "Pending", (SCHEDULED,)), "starting", None),
        (a_pod(RUNNING), "running", None),
        (a_pod(RUNNING, gone=True), "lost", None),
        (a_pod(RUNNING, conditions=(CUT_OFF,)), "lost", None),
        (a_pod(None, "Failed"), "failed", None),
        (a_pod(None, "Succeeded", gone=True), "succeeded", None),
        (a_pod(ended(0), "Succeeded"), "succeeded", 0),
        (a_pod(ended(0), "Succeeded", gone=True), "succeeded", 0),
        (a_pod(ended(1), "Failed"), "failed", 1),
        (a_pod(ended(137, workers.UNKNOWN), "Failed"), "lost", None),  # the kubelet made the code up
    ],
)
def test_the_phase_of_a_worker(pod: dict[str, Any], phase: str, code: int | None) -> None:
    state = worker_state(0, pod)
    assert (state.phase, state.exit_code) == (phase, code)


@pytest.mark.parametrize(
    ("image", "digest"),
    [
        ("ghcr.io/me/image@sha256:abc", "sha256:abc"),
        ("docker-pullable://me/image@sha256:abc", "sha256:abc"),
        ("docker://sha256:abc", "sha256:abc"),
        ("sha256:abc", "sha256:abc"),
        ("", None),
        (None, None),
    ],
)
def test_the_digest_of_an_image_is_read_in_all_forms_of_the_kubelet(image: str | None, digest: str | None) -> None:
    assert worker_state(0, a_pod(RUNNING, container={"imageID": image})).image_digest == digest


@pytest.mark.parametrize(
    ("pod", "word"),
    [
        (a_pod(RUNNING), None),
        (a_pod(ended(0), "Succeeded"), None),  # "Completed" explains nothing
        (a_pod(ended(137, "OOMKilled"), status={"reason": "Evicted"}), "OOMKilled"),
        (a_pod(ended(0), status={"reason": "Evicted"}), "Evicted"),
        (a_pod(RUNNING, gone=True, deletionTimestamp=END), "Deleted"),
        (a_pod(RUNNING, deletionTimestamp=END), "Terminating"),
        (a_pod({"waiting": {"reason": "ImagePullBackOff"}}), "ImagePullBackOff"),
        (a_pod({"waiting": {"reason": "ImagePullBackOff"}}, deletionTimestamp=END), "Terminating"),
        (a_pod(None, conditions=(is_("PodScheduled", "False", "Unschedulable"),)), "Unschedulable"),
        (a_pod(None, conditions=(is_("PodScheduled", "True", "Scheduled"),)), None),
    ],
)
def test_the_reason_is_the_most_telling_word(pod: dict[str, Any], word: str | None) -> None:
    assert reason(pod) == word


# --- whether it has started or ended ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "started", "over"),
    [
        ({"metadata": {}}, False, False),
        (a_pod({"waiting": {"reason": "ContainerCreating"}}), False, False),
        (a_pod(RUNNING), True, False),
        (a_pod(ended(0)), True, True),
        (a_pod({"terminated": {"exitCode": 128, "startedAt": None}}), False, True),
        (a_pod(None, "Succeeded"), False, True),
        (a_pod(None, "Failed"), False, True),
        (a_pod(RUNNING, gone=True), True, True),
        (a_pod(RUNNING, conditions=(CUT_OFF,)), True, True),
    ],
)
def test_whether_a_worker_has_started_and_ended(pod: dict[str, Any], started: bool, over: bool) -> None:
    assert (has_started(pod), has_ended(pod)) == (started, over)


@pytest.mark.parametrize(
    ("target", "given_up"),
    [
        (CUT_OFF, True),
        (is_("DisruptionTarget", why="DeletionByPodGC"), True),
        (is_("DisruptionTarget", "False", "DeletionByTaintManager"), False),
        (is_("DisruptionTarget", why="PreemptionByScheduler"), False),  # its node still answers
        (is_("DisruptionTarget", why="EvictionByEvictionAPI"), False),
    ],
)
def test_only_pods_whose_node_is_gone_are_given_up(target: dict[str, str], given_up: bool) -> None:
    assert is_cut_off(a_pod(RUNNING, conditions=(target,))) is given_up


@pytest.mark.parametrize(
    ("pod", "silent"),
    [
        (a_pod(RUNNING, conditions=(is_("Ready", "False"),)), True),
        (a_pod(RUNNING, conditions=(is_("Ready"),)), False),
        (a_pod(RUNNING), False),
        (a_pod(RUNNING, "Pending", conditions=(is_("Ready", "False"),)), False),
        (a_pod({"waiting": {}}, conditions=(is_("Ready", "False"),)), False),
        (a_pod(RUNNING, conditions=(is_("Ready", "False"), CUT_OFF)), False),
        (a_pod(RUNNING, gone=True, conditions=(is_("Ready", "False"),)), False),
    ],
)
def test_a_running_pod_that_is_not_ready_is_on_a_silent_node(pod: dict[str, Any], silent: bool) -> None:
    assert is_on_silent_node(pod) is silent


# --- who failed ------------------------------------------------------------------------------------------------------


def job(kind: str = "", why: str = "", value: str = "True") -> dict[str, Any]:
    return {"status": {"conditions": [is_(kind, value, why)] if kind else []}}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (job(), None),
        (job("Failed", "PodFailurePolicy"), "PodFailurePolicy"),
        (job("FailureTarget", "BackoffLimitExceeded"), "BackoffLimitExceeded"),
        (job("Failed", "PodFailurePolicy", "False"), None),
        (job("Complete", "CompletionsReached"), None),
    ],
)
def test_why_a_job_failed(found: dict[str, Any], why: str | None) -> None:
    assert failure_of(found) == why


@pytest.mark.parametrize(
    ("pod", "summary", "stopped"),
    [
        (a_pod(RUNNING), {"reason": "terminated"}, True),
        (a_pod(RUNNING), {"reason": "exited"}, False),
        (a_pod(RUNNING, conditions=(is_("DisruptionTarget"),)), {"reason": "terminated"}, False),
        (a_pod(RUNNING, conditions=(is_("DisruptionTarget", "False"),)), {"reason": "terminated"}, True),
        (a_pod(RUNNING, status={"reason": "NodeShutdown"}), {"reason": "terminated"}, False),
        (a_pod(RUNNING, status={"reason": "Other"}), {"reason": "terminated"}, True),
        (None, {"reason": "terminated"}, True),
        (None, None, False),
        (a_pod(ended(137, "OOMKilled"), deletionTimestamp=END), None, False),
        (a_pod(ended(143, "Error"), deletionTimestamp=END), None, True),
        (a_pod(ended(143, "Error"), gone=True), None, True),
        (a_pod(ended(143, "Error")), None, False),
    ],
)
def test_whether_a_worker_was_stopped_with_its_run(
    pod: dict[str, Any] | None, summary: dict[str, Any] | None, stopped: bool
) -> None:
    assert was_stopped(pod, summary) is stopped


def state(rank: int, phase: str, finished: float | None = None) -> WorkerState:
    return WorkerState(rank, phase, finished=finished)


STOPPED = {"reason": "terminated", "exit_code": 143}


@pytest.mark.parametrize(
    ("found", "states", "summaries", "worker"),
    [
        (job(), [state(0, "succeeded", 1.0), state(1, "running")], {}, None),
        (job(), [state(0, "failed", 9.0), state(1, "failed", 5.0)], {}, 1),
        (job(), [state(0, "failed"), state(1, "lost", 5.0)], {}, 1),
        (job(), [state(0, "failed"), state(1, "failed")], {}, 0),
        # The others were stopped because of it, even if they were seen to end before.
        (job(), [state(0, "failed", 5.0), state(1, "failed", 9.0)], {0: STOPPED}, 1),
        (job(), [state(0, "failed", 5.0)], {0: STOPPED}, None),
        (job("Failed", "DeadlineExceeded"), [state(0, "failed", 5.0)], {0: STOPPED}, None),
        (job("Failed", "PodFailurePolicy"), [state(0, "failed", 5.0)], {0: STOPPED}, 0),
    ],
)
def test_the_worker_that_failed_first(
    found: dict[str, Any], states: list[WorkerState], summaries: dict[int, Any], worker: int | None
) -> None:
    assert first_failed(found, states, {}, summaries) == worker


# --- small things ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        (START, MOMENT),
        ("2027-01-15T09:00:00+01:00", MOMENT),
        (END, MOMENT + 50.5),
        ("", None),
        (None, None),
        ("x", None),
    ],
)
def test_times_of_kubernetes(text: str | None, moment: float | None) -> None:
    assert seconds(text) == moment


@pytest.mark.parametrize(
    ("asked", "given", "limit"),
    [
        ({"memory": "64Mi"}, {"memory": "128Mi"}, "64Mi"),
        ({"cpu": "1"}, {"memory": "128Mi"}, "128Mi"),
        (None, None, None),
    ],
)
def test_the_memory_limit_is_that_of_the_container_with_the_command(
    asked: dict[str, str] | None, given: dict[str, str] | None, limit: str | None
) -> None:
    pod = a_pod(RUNNING, container={"resources": {"limits": given}})
    other = {"name": "sidecar", "resources": {"limits": {"memory": "1Gi"}}}
    pod["spec"]["containers"] = [other, {"name": "main", "resources": {"limits": asked}}]
    assert memory_limit(pod) == limit
    assert memory_limit(None) is None
