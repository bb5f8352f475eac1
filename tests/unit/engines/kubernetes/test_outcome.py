"""When a run on a cluster has ended, and how."""

from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.kubernetes.ending import (
    SETTLE_SECONDS,
    STOP_SECONDS,
    decide_ending,
    start_limit,
)
from mlbench_cli.engines.kubernetes.manifests import KUEUE_LABEL, STOPPED_ANNOTATION
from mlbench_cli.engines.kubernetes.workers import NodeEnd, worker_states
from mlbench_cli.model.run import Ending
from mlbench_cli.model.spec import KubernetesOptions, RunSpec

NOW = 1_800_000_000.0
OK, BAD, LATE = NodeEnd(Ending.EXITED, 0), NodeEnd(Ending.EXITED, 3), NodeEnd(Ending.DEADLINE, 124)


def a_pod(state: str, code: int = 0, **metadata: str) -> dict[str, Any]:
    phase = {"running": "Running", "ended": "Failed" if code else "Succeeded"}.get(state, "Pending")
    details = {"exitCode": code, "startedAt": "2027-01-15T07:59:00Z", "finishedAt": "2027-01-15T07:59:50Z"}
    states = {"running": {"running": details}, "ended": {"terminated": details}}
    status = {"phase": phase, "containerStatuses": [{"name": "main", "state": states.get(state, {})}]}
    return {"metadata": {"name": "x", **metadata}, "spec": {}, "status": status}


def cut_off() -> dict[str, Any]:
    pod = a_pod("running", deletionTimestamp="2027-01-15T07:59:50Z")
    pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]
    return pod


def a_job(
    failed: str | None = None, stopped: str | None = None, start: str = "2027-01-15T07:59:00Z"
) -> dict[str, object]:
    conditions = [{"type": "Failed", "status": "True", "reason": failed}] if failed else []
    annotations = {STOPPED_ANNOTATION: f"{stopped} 2027"} if stopped else {}
    return {"metadata": {"annotations": annotations}, "status": {"startTime": start, "conditions": conditions}}


RUNNING, DONE, WAITING = a_pod("running"), a_pod("ended"), a_pod("waiting")
CRASHED = a_pod("ended", 5)


@pytest.mark.parametrize(
    ("job", "pods", "ends", "failing_for", "word"),
    [
        (a_job(), [], {}, None, None),
        (a_job(), [RUNNING, RUNNING], {}, None, None),
        (a_job(), [DONE, DONE], {}, None, "exited"),
        (a_job(), [DONE], {}, None, None),
        (a_job(), [RUNNING, DONE], {}, None, None),
        (a_job(), [RUNNING, DONE], {0: OK}, None, "exited"),
        (a_job(), [RUNNING, RUNNING], {0: OK}, None, None),
        # A crash: while the others are being stopped, and when they are not in time.
        (a_job(), [RUNNING, CRASHED], {}, STOP_SECONDS - 1, None),
        (a_job(), [RUNNING, CRASHED], {}, STOP_SECONDS + 1, "failed"),
        (a_job(), [RUNNING, CRASHED], {0: OK}, 0, "failed"),
        (a_job("PodFailurePolicy"), [DONE, CRASHED], {}, 0, "failed"),
        # A worker that failed and holds its results, or that is gone with its node: nobody stops the others.
        (a_job(), [RUNNING, RUNNING], {0: BAD}, SETTLE_SECONDS - 1, None),
        (a_job(), [RUNNING, RUNNING], {0: BAD}, SETTLE_SECONDS + 1, "failed"),
        (a_job(), [RUNNING, cut_off()], {}, SETTLE_SECONDS - 1, None),
        (a_job(), [RUNNING, cut_off()], {}, SETTLE_SECONDS + 1, "failed"),
        # Deadlines: a worker's own, the Job's, and one that passed before anything had started.
        (a_job(), [RUNNING, DONE], {0: LATE}, 0, "deadline"),
        (a_job("DeadlineExceeded"), [a_pod("ended", 143), a_pod("ended", 143)], {}, 0, "deadline"),
        (a_job(start="2027-01-15T07:00:00Z"), [RUNNING, RUNNING], {}, None, None),
        # Stopped by a client: over when the workers are.
        (a_job(stopped="canceled"), [RUNNING, DONE], {}, None, None),
        (a_job(stopped="canceled"), [RUNNING, DONE], {0: BAD}, 0, "canceled"),
        (a_job(stopped="canceled"), [], {}, None, "canceled"),
        (a_job(stopped="failed"), [], {}, None, "failed"),
    ],
)
def test_a_run_has_ended(
    job: Any, pods: list[Any], ends: dict[int, NodeEnd], failing_for: float | None, word: str | None
) -> None:
    spec = RunSpec("r-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2, image="i", timeout=600.0)
    by_worker = dict(enumerate(pods))
    states = worker_states(2, by_worker, ends)
    since = None if failing_for is None else NOW - failing_for
    assert decide_ending(spec, job, states, by_worker, ends, NOW, since) == word


@pytest.mark.parametrize(("since", "word"), [(1.0, None), (SETTLE_SECONDS + 1, "failed")])
def test_who_was_stopped_just_now_may_yet_show_why(since: float, word: str | None) -> None:
    """An evicted worker says its last word before its pod says that it was evicted."""
    pods = {0: RUNNING}
    ends = {0: NodeEnd(Ending.CANCELED, 143, finished=NOW - since)}
    spec = RunSpec(
        name="r-1", cluster="c", engine="kubernetes", task="custom", preset="custom", argv=("true",), backend="gloo",
        workers=1,
    )  # fmt: skip
    assert decide_ending(spec, a_job(), worker_states(1, pods, ends), pods, ends, NOW, None) == word


@pytest.mark.parametrize(("absent", "limit"), [(None, 600.0), (180.0, None)])
def test_only_a_run_that_needs_all_of_its_workers_is_given_up_for_one(
    absent: float | None, limit: float | None
) -> None:
    spec = RunSpec("r", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2, absent_seconds=absent)
    spec = replace(spec, kubernetes=KubernetesOptions(start_timeout=600))
    found = start_limit(spec, a_job(), worker_states(2, {0: a_pod("running"), 1: a_pod("pending")}, {}))
    assert found == (None if limit is None else NOW - 60 + limit)


def test_a_queue_may_take_longer_than_nodes() -> None:
    spec = RunSpec("r", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 1)
    spec = replace(spec, kubernetes=KubernetesOptions(start_timeout=7 * 86400, queue="q"))
    job: Any = a_job()
    job["metadata"] |= {"labels": {KUEUE_LABEL: "q"}, "creationTimestamp": "2027-01-15T07:00:00Z"}
    assert start_limit(spec, job, worker_states(1, {}, {})) == NOW - 3600 + 7 * 86400
