"""How a run is stopped, deleted and found on a cluster; and what a missing Job means."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.engines.base import FoundRun, UnreadableRun
from mlbench_cli.engines.kubernetes import engine as kubernetes
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine, save_manifests
from mlbench_cli.errors import CleanupError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Ending, Finding, Observation, Run, WorkerState
from mlbench_cli.model.spec import KubernetesOptions, RunSpec, canonical_json
from tests.unit.engines.kubernetes.memory_api import MemoryApi

JOBS = "/apis/batch/v1/namespaces/team/jobs"
SPEC = RunSpec("x-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2, image="i")


def a_run(folder: Path, servers: int = 0, **options: Any) -> Run:
    method = {"name": "ps", "servers": str(servers)} if servers else {}
    spec = replace(SPEC, method=method, kubernetes=KubernetesOptions(namespace="team", **options))
    return Run("abc", spec, folder, "2027-01-15T08:00:00Z")


def a_job(name: str = "x-2", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "annotations": more.pop("annotations", None)}
    return {"kind": "Job", "metadata": {**metadata, **more.pop("metadata", {})}, "spec": {}, **more}


DONE = {"conditions": [{"type": "Complete", "status": "True"}]}


def engine() -> KubernetesEngine:
    return KubernetesEngine(Access("https://nowhere.invalid", "default"))


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "spec"), [({}, {"suspend": True}), ({"queue": "batch"}, {"activeDeadlineSeconds": 1})]
)
def test_a_run_is_stopped_by_its_jobs_which_say_why(tmp_path: Path, options: dict[str, str], spec: Any) -> None:
    api = MemoryApi({f"{JOBS}/x-2": a_job(), f"{JOBS}/x-2-servers": a_job("x-2-servers")})
    engine()._stop(api.api, a_run(tmp_path, 1, **options), "cancelled")
    job = api.objects[f"{JOBS}/x-2"]
    assert job["spec"] == api.objects[f"{JOBS}/x-2-servers"]["spec"] == spec
    word, moment = job["metadata"]["annotations"]["mlbench/stopped"].split(" ")
    assert (word, moment[:2], moment[-1]) == ("cancelled", "20", "Z")


@pytest.mark.parametrize("job", [a_job(status=DONE), a_job(annotations={"mlbench/stopped": "failed 2027"}), None])
def test_a_run_that_has_ended_or_was_stopped_is_not_stopped_again(tmp_path: Path, job: dict[str, Any] | None) -> None:
    api = MemoryApi({f"{JOBS}/x-2": job} if job else {})
    engine()._stop(api.api, a_run(tmp_path), "cancelled")
    assert api.writes == []
    servers = MemoryApi({f"{JOBS}/x-2-servers": a_job(status=DONE)})
    engine()._stop(servers.api, a_run(tmp_path, 1), "cancelled")
    assert servers.writes == []


# --- deleting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "is_fetched", "words"),
    [
        (a_job(), False, "is still running"),
        (a_job(), True, None),
        (a_job(status=DONE), False, None),  # it never started
        (a_job(status={**DONE, "startTime": "2027"}), False, "have not been fetched"),
        (a_job(status={**DONE, "startTime": "2027"}), True, None),
        (a_job(status={**DONE, "startTime": "2027"}, annotations={"mlbench/fetched": "2027"}), False, None),
        (a_job(status={"startTime": "2027"}, annotations={"mlbench/stopped": "x"}), False, "have not been fetched"),
    ],
)
def test_results_that_exist_nowhere_else_are_not_deleted(
    tmp_path: Path, job: dict[str, Any], is_fetched: bool, words: str | None
) -> None:
    run = a_run(tmp_path)
    if is_fetched:
        (tmp_path / ".state").mkdir()
        (tmp_path / ".state" / "fetched-0.json").touch()
    if words is None:
        kubernetes._refuse_loss(run, job)
        return
    with pytest.raises(UsageError, match=words):
        kubernetes._refuse_loss(run, job)


KINDS = ("configmaps", "services", "pods")
LISTS = (JOBS, *(f"/api/v1/namespaces/team/{kind}" for kind in KINDS))
POLICIES = "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies"


class Emptying(MemoryApi):
    """A namespace with one pod, which goes at the second deletion."""

    def __init__(self, refusals: int = 1) -> None:
        super().__init__({path: {"items": []} for path in (*LISTS, POLICIES)})
        self.objects[f"{LISTS[3]}"] = {"items": [{"metadata": {"name": "x-2-0"}}]}
        self.left = refusals

    def delete(self, path: str, **params: Any) -> bool:
        """Remember the call."""
        self._record("DELETE", path, params)
        if path.endswith("/pods/x-2-0"):
            self.left -= 1
            if self.left < 0:
                self.objects[LISTS[3]] = {"items": []}
        return True


def test_everything_of_a_run_is_deleted_until_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(kubernetes, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda s: None))
    api = Emptying()
    kubernetes._remove(api.api, "team", SPEC)
    assert api.writes == [f"DELETE {JOBS}/x-2", *[f"DELETE {LISTS[3]}/x-2-0"] * 2]
    grace = [body for call, body in zip(api.calls, api.bodies, strict=True) if call.endswith("/pods/x-2-0")]
    assert grace == [{"grace": 1}, {"grace": 1}]
    in_set = Emptying()
    in_set.objects["/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"] = {"items": []}
    kubernetes._remove(in_set.api, "team", replace(SPEC, kubernetes=KubernetesOptions(job_set=True)))
    assert in_set.writes[0] == "DELETE /apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/x-2"


def test_what_does_not_go_in_two_minutes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += 30.0

    monkeypatch.setattr(kubernetes, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with pytest.raises(CleanupError, match='objects of the run "x-2" still exist: Pod x-2-0') as caught:
        kubernetes._remove(Emptying(99).api, "team", SPEC)
    assert caught.value.hint == "mlbench delete x-2"
    assert clock[0] == 150.0


# --- finding ---------------------------------------------------------------------------------------------------------


def test_runs_are_found_by_what_their_jobs_say() -> None:
    text = canonical_json(SPEC.to_dict()).decode()
    known = {"mlbench/spec": text, "mlbench/run-id": "abc", "mlbench/run-created": "2026", "mlbench/fetched": "2027"}
    times = {"creationTimestamp": "2027-01-15T08:00:00Z", "uid": "u"}
    assert kubernetes._found_run(a_job(annotations=known, metadata=times)) == FoundRun("abc", "2026", SPEC, True)
    by_hand = kubernetes._found_run(a_job(annotations={"mlbench/spec": text}, metadata=times))
    made = hashlib.sha256(b"u").hexdigest()[:12]
    assert by_hand == FoundRun(made, "2027-01-15T08:00:00Z", SPEC, False)
    foreign = kubernetes._found_run(a_job(annotations={"mlbench/spec": json.dumps({"a": 1})}, metadata=times))
    assert isinstance(foreign, UnreadableRun)
    assert foreign.name == "x-2"


def test_jobs_of_keepers_and_servers_are_no_runs() -> None:
    def job(name: str, created: str, role: str | None = None) -> dict[str, Any]:
        labels = {"mlbench/role": role} if role else {}
        return a_job(name, metadata={"creationTimestamp": created, "labels": labels})

    items = [job("b", "2027"), job("b-keeper", "2027", "keeper"), job("a", "2026"), job("a-servers", "2026", "server")]
    api = MemoryApi({JOBS: {"items": items}})
    assert [found["metadata"]["name"] for found in kubernetes._run_jobs(api.api, "team")] == ["a", "b"]
    assert api.bodies == [{"labelSelector": "app.kubernetes.io/managed-by=mlbench"}]


# --- a missing Job ---------------------------------------------------------------------------------------------------


def seen(*codes: int | None) -> Observation:
    return Observation(
        1.0, tuple(WorkerState(rank, exit_code=code) for rank, code in enumerate(codes)), (Finding("a", "b"),)
    )


def test_a_run_whose_job_is_missing_was_not_submitted_or_is_lost(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    never = kubernetes._without_job(run, seen(0, None))
    assert (never.ended, [finding.code for finding in never.findings]) == (Ending.NEVER_STARTED, ["not_started"])
    (tmp_path / "manifests").mkdir()
    lost = kubernetes._without_job(run, seen(0, 3))
    assert (lost.ended, [finding.code for finding in lost.findings]) == (Ending.LOST, ["a", "job_gone"])
    done = kubernetes._without_job(run, seen(0, 0))
    assert (done.ended, [finding.code for finding in done.findings]) == (Ending.EXITED, ["a"])


def test_workers_and_servers_are_named_by_their_first_ranks(tmp_path: Path) -> None:
    run = a_run(tmp_path, 2)
    pairs = replace(run, spec=replace(run.spec, processes_per_worker=2))
    assert kubernetes._ranks(pairs) == [0, 2, 4, 5]
    running, waiting = {"status": {"phase": "Running"}}, {"status": {"phase": "Pending"}}
    assert kubernetes._all_run(run, dict.fromkeys(range(4), running))
    assert not kubernetes._all_run(run, dict.fromkeys(range(3), running))
    assert not kubernetes._all_run(run, {**dict.fromkeys(range(3), running), 3: waiting})


def test_the_objects_of_a_run_are_kept_as_they_were_submitted(tmp_path: Path) -> None:
    run = a_run(tmp_path, 1)
    save_manifests(run, engine().render(run.spec))
    assert {path.name for path in (tmp_path / "manifests").iterdir()} == {
        *("job.yaml", "configmap.yaml", "service.yaml", "networkpolicy.yaml", "keeper.yaml", "servers.yaml")
    }
