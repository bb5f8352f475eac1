"""How a run is stopped, deleted and found on a cluster; and what a missing Job means."""

import hashlib
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.engines.base import FoundRun, UnreadableRun
from mlbench_cli.engines.kubernetes import engine as kubernetes
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine, save_manifests
from mlbench_cli.errors import CleanupError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Ending, Finding, Observation, Run, WorkerState
from mlbench_cli.model.spec import KubernetesOptions, RunSpec, canonical_json
from mlbench_cli.storage.run_folder import RunFolder
from tests.unit.engines.kubernetes.memory_api import MemoryApi
from tests.unit.engines.kubernetes.test_worker_states import RUNNING, a_pod, ended, is_

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


# --- the engine's own calls ------------------------------------------------------------------------------------------

PODS = "/api/v1/namespaces/team/pods"


class Reachable(MemoryApi):
    """A namespace whose pods are listed, and from which everything that is deleted goes at once."""

    def __init__(self, *pods: dict[str, Any], **jobs: dict[str, Any]) -> None:
        super().__init__({f"{JOBS}/{name.replace('_', '-')}": job for name, job in jobs.items()})
        self.pods = list(pods)
        self.graces: dict[str, Any] = {}

    def get(self, path: str, **params: Any) -> Any:
        """Lists are empty but for the Jobs."""
        if path == JOBS:
            self._record("GET", path, params)
            return {"items": list(self.objects.values())} if "managed-by" in params["labelSelector"] else {"items": []}
        if path.split("/")[-2] == "team":
            return {"items": []}
        return super().get(path, **params)

    def request(self, method: str, path: str, **_: Any) -> Any:
        """The list of pods."""
        assert (method, path) == ("GET", PODS)
        return {"items": self.pods}

    def delete(self, path: str, grace: int | None = None, **params: Any) -> bool:
        """Remember with which grace."""
        self.graces[path] = grace
        return super().delete(path, **params)


def engine_of(api: MemoryApi) -> KubernetesEngine:
    access = SimpleNamespace(namespace="team", client=lambda **_: nullcontext(api))
    return KubernetesEngine(cast(Access, access))


OURS = {"labels": {"mlbench/run": "x-2"}}


def test_runs_of_a_cluster_are_discovered() -> None:
    text = canonical_json(SPEC.to_dict()).decode()
    metadata = {"creationTimestamp": "2027", "uid": "u"}
    api = Reachable(x_2=a_job(annotations={"mlbench/spec": text, "mlbench/run-id": "abc"}, metadata=metadata))
    assert engine_of(api).discover() == [FoundRun("abc", "2027", SPEC, False)]


def test_a_cancelled_run_says_that_it_was(tmp_path: Path) -> None:
    api = Reachable(x_2=a_job())
    engine_of(api).cancel(a_run(tmp_path))
    assert api.objects[f"{JOBS}/x-2"]["metadata"]["annotations"]["mlbench/stopped"].startswith("cancelled ")


@pytest.mark.parametrize(
    ("job", "force", "words"),
    [
        (a_job(), False, 'The Job "x-2" is not mlbench'),
        (a_job(), True, 'The Job "x-2" is not mlbench'),
        (a_job(metadata=OURS), False, "is still running"),
        (a_job(metadata=OURS), True, None),
        (a_job(metadata=OURS, status=DONE), False, None),
        (None, False, None),
    ],
)
def test_a_run_is_deleted_if_it_is_ours_and_nothing_is_lost(
    tmp_path: Path, job: dict[str, Any] | None, force: bool, words: str | None
) -> None:
    run = a_run(tmp_path / "run")
    run.folder.mkdir()
    api = Reachable(**({"x_2": job} if job else {}))
    if words is not None:
        with pytest.raises(UsageError, match=words):
            engine_of(api).delete(run, force=force)
        assert (api.writes, run.folder.exists()) == ([], True)
        return
    engine_of(api).delete(run, force=force)
    assert api.writes == [f"DELETE {JOBS}/x-2"]
    assert not run.folder.exists()


def test_pods_are_stopped_at_once_and_those_that_hold_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: dict[str, Any] = {"deletionTimestamp": "2027"}
    cut_off = (is_("DisruptionTarget", why="DeletionByTaintManager"),)
    pods = [
        a_pod(RUNNING),
        a_pod(RUNNING, **gone),
        a_pod(ended(0), "Succeeded", **gone),
        a_pod(None, "Pending", **gone),
        a_pod(RUNNING, conditions=cut_off, **gone),
    ]
    for number, pod in enumerate(pods):
        pod["metadata"]["name"] = f"p{number}"
    acknowledged: list[str] = []
    monkeypatch.setattr(kubernetes, "acknowledge", lambda access, namespace, name: acknowledged.append(name))
    api = Reachable(*pods)
    engine_of(api)._let_go(api.api, "team", a_run(tmp_path))
    assert api.graces == {f"{PODS}/p0": 1, f"{PODS}/p4": 0}
    assert acknowledged == ["p1"]


@pytest.mark.parametrize(("phase", "patience"), [("lost", 30.0), ("failed", 600.0), (None, 600.0)])
def test_a_keeper_of_a_run_that_lost_a_worker_is_worth_less_patience(
    tmp_path: Path, phase: str | None, patience: float
) -> None:
    run = a_run(tmp_path)
    if phase is not None:
        RunFolder(tmp_path).write_observation(Observation(1.0, (WorkerState(0, "succeeded"), WorkerState(1, phase))))
    found = engine()._keeper(MemoryApi().api, run)
    assert found is not None
    assert found._node_patience == patience
    assert engine()._keeper(MemoryApi().api, a_run(tmp_path, keep_seconds=0)) is None


def test_chaos_is_removed_only_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    monkeypatch.setattr(kubernetes, "remove_chaos", lambda api, namespace, name: removed.append(f"{namespace}/{name}"))
    plain = a_run(tmp_path, network_method="chaos-mesh")
    engine()._drop_chaos(MemoryApi().api, plain)
    engine()._drop_chaos(MemoryApi().api, replace(plain, spec=replace(plain.spec, network="1gbit")))
    assert removed == ["team/x-2"]


def test_a_run_that_was_not_released_is_released(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    api = MemoryApi()
    submission = engine().render(run.spec)
    api.api.create(JOBS, submission.documents[0])
    engine_of(api).resume(run)
    assert api.objects[f"{JOBS}/x-2"]["spec"]["suspend"] is False
    before = len(api.writes)
    engine_of(api).resume(run)
    engine_of(MemoryApi()).resume(run)
    assert len(api.writes) == before


def test_a_run_is_submitted_with_its_id_and_its_objects_are_kept(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    api = MemoryApi({"/version": {"major": "1", "minor": "34"}})
    engine_of(api).submit(run, engine().render(run.spec))
    annotations = api.objects[f"{JOBS}/x-2"]["metadata"]["annotations"]
    assert (annotations["mlbench/run-id"], annotations["mlbench/run-created"]) == ("abc", "2027-01-15T08:00:00Z")
    assert (tmp_path / "manifests" / "job.yaml").exists()
    shaped = replace(run, spec=replace(run.spec, network="1gbit", kubernetes=KubernetesOptions(
        namespace="team", network_method="chaos-mesh")))  # fmt: skip
    with pytest.raises(UsageError, match="Chaos Mesh is not installed"):
        engine_of(MemoryApi()).submit(shaped, engine().render(shaped.spec))
    old = MemoryApi({"/version": {"major": "1", "minor": "30"}})
    with pytest.raises(UsageError, match=r"runs need 1\.31"):
        engine_of(old).submit(run, engine().render(run.spec))
    assert old.writes == []


@pytest.mark.parametrize(
    ("network", "detach", "waits"), [("1gbit", True, True), ("1gbit", False, False), (None, True, False)]
)
def test_a_detached_client_shapes_the_network_before_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str | None, detach: bool, waits: bool
) -> None:
    plain = a_run(tmp_path)
    run = replace(plain, spec=replace(plain.spec, network=network))
    submitting = engine_of(MemoryApi({"/version": {"major": "1", "minor": "34"}}))
    states = iter([None, {"state": "shaping"}, {"state": "open"}, {"state": "open"}])
    seen: list[str] = []

    def watch(_: Run) -> Any:
        for number in range(9):
            seen.append(f"look {number}")
            yield None

    monkeypatch.setattr(submitting, "watch", watch)
    monkeypatch.setattr(kubernetes, "read_state", lambda job: next(states))
    submitting.submit(run, engine().render(run.spec), detach=detach)
    assert seen == (["look 0", "look 1", "look 2"] if waits else [])


def test_a_run_that_has_ended_is_read_from_its_folder(tmp_path: Path) -> None:
    known = Observation(1.0, (WorkerState(0, "succeeded", exit_code=0),), ended=Ending.EXITED)
    RunFolder(tmp_path).write_observation(known)
    api = MemoryApi()
    assert engine_of(api).look(a_run(tmp_path)) == known
    assert list(engine_of(api).watch(a_run(tmp_path))) == [known]
    assert api.calls == []
