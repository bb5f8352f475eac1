"""What the pods of a run say about its workers: states, reasons, endings and who failed first."""

from typing import Any

import pytest

from mlbench_cli.agent.messages import pending_facts
from mlbench_cli.engines.kubernetes import workers
from mlbench_cli.engines.kubernetes.workers import (
    NodeEnd,
    find_end,
    first_failed,
    was_stopped,
    why_gone,
    worker_state,
    worker_states,
)
from mlbench_cli.engines.observe import NodeReport
from mlbench_cli.kube.api import GONE
from mlbench_cli.model.run import Ending, WorkerState

START, END = "2027-01-15T08:00:00Z", "2027-01-15T08:00:50.5Z"
RUNNING = {"running": {"startedAt": START}}
STOPPED = NodeEnd(Ending.CANCELED, 143)


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


def test_the_end_of_a_pod_is_that_of_all_its_ranks_by_one_clock() -> None:
    ranks = [
        {**pending_facts(0), "started": 105.0, "finished": 109.0, "exit_code": 0},
        {**pending_facts(1), "started": 104.0, "finished": 108.0, "exit_code": 137, "out_of_memory": "cgroup"},
    ]
    state = {"ended": "failed", "first_failed": 1, "ranks": ranks, "started": 103.0, "finished": 110.0}
    end = find_end(NodeReport(state, {}))
    assert end == NodeEnd(Ending.EXITED, 137, 104.0, 109.0, is_out_of_memory=True)
    (found,) = worker_states(1, {0: a_pod(RUNNING)}, {0: end})  # whose clock is far ahead of the agent's
    assert (found.exit_code, found.started, found.finished) == (137, 104.0, 109.0)


def test_why_a_head_is_gone_is_told_by_its_last_pod() -> None:
    pods = [a_pod(ended(1, "Error", message="no space")), a_pod(ended(137, "OOMKilled"))]
    assert why_gone(pods) == "OOMKilled"


# --- who failed ------------------------------------------------------------------------------------------------------


def job(kind: str = "", why: str = "", value: str = "True") -> dict[str, Any]:
    return {"status": {"conditions": [is_(kind, value, why)] if kind else []}}


@pytest.mark.parametrize(
    ("pod", "end", "stopped"),
    [
        (a_pod(RUNNING), STOPPED, True),
        (a_pod(RUNNING), NodeEnd(Ending.EXITED, 0), False),
        (a_pod(RUNNING, conditions=(is_("DisruptionTarget"),)), STOPPED, False),
        (a_pod(RUNNING, conditions=(is_("DisruptionTarget", "False"),)), STOPPED, True),
        (a_pod(RUNNING, status={"reason": "NodeShutdown"}), STOPPED, False),
        (a_pod(RUNNING, status={"reason": "Other"}), STOPPED, True),
        (None, STOPPED, True),
        (None, None, False),
        (a_pod(ended(137, "OOMKilled"), deletionTimestamp=END), None, False),
        (a_pod(ended(143, "Error"), deletionTimestamp=END), None, True),
        (a_pod(ended(143, "Error"), gone=True), None, True),
        (a_pod(ended(143, "Error")), None, False),
    ],
)
def test_whether_a_worker_was_stopped_with_its_run(
    pod: dict[str, Any] | None, end: NodeEnd | None, stopped: bool
) -> None:
    assert was_stopped(pod, end) is stopped


def state(rank: int, phase: str, finished: float | None = None) -> WorkerState:
    return WorkerState(rank, phase, finished=finished)


@pytest.mark.parametrize(
    ("found", "states", "ends", "worker"),
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
    found: dict[str, Any], states: list[WorkerState], ends: dict[int, NodeEnd], worker: int | None
) -> None:
    assert first_failed(found, states, {}, ends) == worker
