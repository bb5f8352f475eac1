"""The engine against a server that keeps its objects: every step may be the client's last, and may come twice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.base import FoundRun, UnreadableRun
from mlbench_cli.engines.follow import watch
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine, discover_runs
from mlbench_cli.engines.kubernetes.manifests import (
    CREATED_ANNOTATION,
    FETCHED_ANNOTATION,
    HASH_LABEL,
    ID_ANNOTATION,
    STOPPED_ANNOTATION,
    TOKEN_ANNOTATION,
)
from mlbench_cli.engines.kubernetes.workers import INDEX_LABEL
from mlbench_cli.errors import CleanupError, UsageError
from mlbench_cli.kube.api import Api, ApiError
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.storage.run_folder import RunFolder
from tests.fakes.kube_api import Fault, KubeApi

KINDS = ("jobs", "configmaps", "services", "networkpolicies", "jobs")
JOB = ("jobs", "r-2")
NAMES = ("r-2", "r-2", "r-2", "r-2", "r-2-head")


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


def a_run(folder: Path, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "name": "r-2",
        "cluster": "c",
        "engine": "kubernetes",
        "task": "custom",
        "preset": "custom",
        "argv": ("true",),
        "backend": "gloo",
        "workers": 2,
        "image": "image:1",
    }
    return Run(folder.name, RunSpec(**{**fields, **changes}), folder, "2026-01-01T00:00:00Z")


def submit(server: KubeApi, run: Run) -> None:
    engine = KubernetesEngine(server.access)
    engine.submit(run, engine.render(run.spec))


def put_pod(server: KubeApi, index: int, **status: Any) -> None:
    labels = {"mlbench/run": "r-2", INDEX_LABEL: str(index)}
    server.put("pods", {"metadata": {"name": f"r-2-{index}-x", "labels": labels}, "spec": {}, "status": status})


def terminated_pod(code: int) -> dict[str, Any]:
    state = {
        "terminated": {"exitCode": code, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:09Z"}
    }
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"name": "main", "state": state}]}


RUNNING = {
    "phase": "Running",
    "containerStatuses": [{"name": "main", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}],
}


def job_of(server: KubeApi) -> dict[str, Any]:
    return server.objects["jobs", "r-2"]


def test_what_is_submitted_is_what_was_printed(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    submit(server, run)
    documents = KubernetesEngine(server.access).render(run.spec).documents
    uid = job_of(server)["metadata"]["uid"]
    for kind, name, document in zip(KINDS, NAMES, documents, strict=True):
        stored = json.loads(json.dumps(server.objects[kind, name]))
        for added in ("uid", "resourceVersion", "creationTimestamp"):
            del stored["metadata"][added]
        if document is not documents[0]:
            (owner,) = stored["metadata"].pop("ownerReferences")
            # Kueue queues a Job by itself unless its controller is a Job of a queue (GetControllerOf).
            assert (owner["kind"], owner["uid"], owner["controller"]) == ("Job", uid, name == "r-2-head")
        else:
            assert stored["spec"].pop("suspend") is False
            assert stored["metadata"]["annotations"].pop(ID_ANNOTATION) == run.id
            assert stored["metadata"]["annotations"].pop(CREATED_ANNOTATION) == run.created
            document = {**document, "spec": {key: value for key, value in document["spec"].items() if key != "suspend"}}
        if name == "r-2-head":
            assert stored["spec"]["template"]["metadata"]["annotations"].pop(TOKEN_ANNOTATION) == uid
        assert stored == document
    assert sorted(path.name for path in (tmp_path / "manifests").iterdir()) == [
        "configmap.yaml",
        "head.yaml",
        "job.yaml",
        "networkpolicy.yaml",
        "service.yaml",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("step", range(6))
def test_a_client_that_dies_between_two_steps(server: KubeApi, tmp_path: Path, step: int) -> None:
    run = a_run(tmp_path)
    kinds = ["jobs", "configmaps", "services", "networkpolicies", "jobs"]
    requests = [*(f"POST .*{kind}" for kind in kinds), "PATCH .*jobs"]
    if step == 4:  # the second POST of a Job is the head's
        server.faults.append(Fault("POST .*jobs", times=1))
    server.faults.append(Fault(requests[step], times=1000, status=500))
    with pytest.raises(ApiError):
        submit(server, run)
    assert len(server.objects) == step
    assert all(item["spec"]["suspend"] for (kind, name), item in server.objects.items() if (kind, name) == JOB)
    server.faults.clear()
    submit(server, run)
    assert job_of(server)["spec"]["suspend"] is False
    assert set(server.objects) == set(zip(KINDS, NAMES, strict=True))
    before = dict(server.objects)
    submit(server, run)
    assert server.objects == before


OVER_QUOTA = 'jobs.batch "r-2" is forbidden: exceeded quota: q, requested: count/jobs.batch=1, used: count/jobs.batch=4'


@pytest.mark.parametrize("first", [0, 1], ids=["the workers' Job", "the head's Job"])
@pytest.mark.parametrize("message", [OVER_QUOTA, 'admission webhook "x" denied the request: no', "no such right"])
def test_a_refused_run_leaves_nothing_in_the_cluster_and_was_never_started(
    server: KubeApi, tmp_path: Path, first: int, message: str
) -> None:
    run = a_run(tmp_path)
    server.faults += [Fault("POST .*jobs")] * first + [Fault("POST .*jobs", status=403, message=message)]
    with pytest.raises(ApiError, match=message.partition(":")[2] or message):
        submit(server, run)
    assert not server.objects  # a suspended Job would count toward the quota, and never expire
    assert look(server, run).ended == "never_started"
    submit(server, run)
    assert set(server.objects) == set(zip(KINDS, NAMES, strict=True))


def test_whoever_follows_a_half_submitted_run_completes_it(server: KubeApi, tmp_path: Path) -> None:
    server.faults.append(Fault("POST .*services", times=1000, status=500))
    with pytest.raises(ApiError):
        submit(server, a_run(tmp_path / "a"))
    server.faults.clear()
    engine, run = KubernetesEngine(server.access), replace(a_run(tmp_path / "a"), folder=tmp_path / "b")
    first = engine.look(run)
    assert [finding.code for finding in first.findings] == ["suspended"]
    assert job_of(server)["spec"]["suspend"] is True  # a look changes nothing
    engine.resume(run)
    assert job_of(server)["spec"]["suspend"] is False
    assert ("services", "r-2") in server.objects


def test_a_run_that_is_canceled_while_it_is_submitted_does_not_start(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ask = a_run(tmp_path), server.fault

    def cancel_first(request: str) -> Fault | None:
        if request.startswith("PATCH"):  # the release of the Job is on its way
            monkeypatch.undo()
            KubernetesEngine(server.access).cancel(run)
        return ask(request)

    monkeypatch.setattr(server, "fault", cancel_first)
    submit(server, run)
    assert job_of(server)["spec"]["parallelism"] == 0  # it is released to have no pods, and to expire
    assert KubernetesEngine(server.access).look(run).ended == "canceled"


def test_another_run_of_that_name_is_refused(server: KubeApi, tmp_path: Path) -> None:
    submit(server, a_run(tmp_path / "a"))
    with pytest.raises(UsageError, match="with other settings") as caught:
        submit(server, a_run(tmp_path / "b", seed=7))
    assert "delete r-2" in str(caught.value.hint)


@pytest.mark.parametrize(("kind", "name"), list(zip(KINDS, NAMES, strict=True)))
def test_foreign_objects_are_not_touched(server: KubeApi, tmp_path: Path, kind: str, name: str) -> None:
    foreign = server.put(kind, {"metadata": {"name": name}})
    with pytest.raises(UsageError, match="not mlbench's"):
        submit(server, a_run(tmp_path))
    assert server.objects[kind, name] == foreign


def test_objects_applied_by_hand_are_adopted(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    for kind, document in zip(KINDS, KubernetesEngine(server.access).render(run.spec).documents, strict=True):
        server.put(kind, dict(document))
    submit(server, run)
    uid = job_of(server)["metadata"]["uid"]
    assert job_of(server)["spec"]["suspend"] is False
    for key in list(zip(KINDS, NAMES, strict=True))[1:]:
        assert server.objects[key]["metadata"]["ownerReferences"][0]["uid"] == uid
    # Applied by hand, the head did not know the run's token.
    template = server.objects["jobs", "r-2-head"]["spec"]["template"]
    assert template["metadata"]["annotations"][TOKEN_ANNOTATION] == uid


def test_a_run_that_its_queue_takes_from_its_machines_does_not_start_again(server: KubeApi, tmp_path: Path) -> None:
    """Kueue suspends the Job, and would start it again later, when nobody waits for it any more."""
    run = a_run(tmp_path, kubernetes=KubernetesOptions(queue="team"))
    submit(server, run)
    job = job_of(server)
    job["spec"]["suspend"] = False
    engine = KubernetesEngine(server.access)
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    for worker in range(2):
        put_pod(server, worker, phase="Running", containerStatuses=[{"name": "main", "state": running}])
    assert engine.look(run).ended is None
    job["spec"]["suspend"] = True
    for worker in range(2):
        del server.objects["pods", f"r-2-{worker}-x"]
    seen = engine.look(run)
    assert (seen.ended, [finding.code for finding in seen.findings]) == ("failed", ["preempted"])
    engine.head(run).fetch()
    assert JOB not in server.objects  # suspended as it is, it would never expire


def test_a_queue_releases_the_job_itself(server: KubeApi, tmp_path: Path) -> None:
    submit(server, a_run(tmp_path, kubernetes=KubernetesOptions(queue="q")))
    assert job_of(server)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert job_of(server)["spec"]["suspend"] is True


def test_other_machines_find_the_runs(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path, parameters={"x": [1, "é"]}, env={"A": "b"})
    submit(server, run)
    server.put("jobs", {"metadata": {"name": "foreign"}})
    assert discover_runs(server.access) == [FoundRun(run.id, run.created, run.spec, False)]
    assert job_of(server)["metadata"]["labels"][HASH_LABEL] == run.spec.hash


def test_a_run_that_this_version_cannot_read_is_named_and_hides_no_other(server: KubeApi, tmp_path: Path) -> None:
    submit(server, a_run(tmp_path))
    newer = {"mlbench/spec": json.dumps({**a_run(tmp_path).spec.to_dict(), "newfield": 1})}
    labels = {"app.kubernetes.io/managed-by": "mlbench", "mlbench/run": "newer-1"}
    server.put("jobs", {"metadata": {"name": "newer-1", "labels": labels, "annotations": newer}})
    found = discover_runs(server.access)
    assert [item.name for item in found if isinstance(item, UnreadableRun)] == ["newer-1"]
    assert [item.spec.name for item in found if isinstance(item, FoundRun)] == ["r-2"]


def test_runs_of_an_older_version_have_the_same_id_on_every_machine(server: KubeApi, tmp_path: Path) -> None:
    submit(server, a_run(tmp_path))
    annotations = job_of(server)["metadata"]["annotations"]
    del annotations[ID_ANNOTATION], annotations[CREATED_ANNOTATION]
    first, second = discover_runs(server.access), discover_runs(server.access)
    assert first == second
    assert isinstance(first[0], FoundRun)
    assert first[0].created == job_of(server)["metadata"]["creationTimestamp"]


@pytest.mark.parametrize(
    ("minor", "refused"), [("30", True), ("30+", True), ("31", False), ("34", False), ("x", False)]
)
def test_an_old_cluster_is_refused_before_anything_is_made(
    server: KubeApi, tmp_path: Path, minor: str, refused: bool
) -> None:
    server.version = {"major": "1", "minor": minor}
    if refused:
        with pytest.raises(UsageError, match=r"runs Kubernetes 1\.30; runs need 1\.31"):
            submit(server, a_run(tmp_path))
        assert not server.objects
    else:
        submit(server, a_run(tmp_path))


# --- look -----------------------------------------------------------------------------------------------------------


def look(server: KubeApi, run: Run) -> Any:
    return next(watch(KubernetesEngine(server.access), run))


def test_one_look_tells_a_run_that_has_ended(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    submit(server, run)
    put_pod(server, 0, **terminated_pod(0))
    put_pod(server, 1, **terminated_pod(0))
    seen = look(server, run)
    assert (seen.ended, [worker.exit_code for worker in seen.workers]) == ("exited", [0, 0])


@pytest.mark.parametrize("death", [False, True])
def test_the_head_of_a_run_in_a_queue_is_not_below_it(server: KubeApi, tmp_path: Path, death: bool) -> None:
    """Also if the client dies before it has set the head free, and Kueue suspends it: 0.17 does so to Jobs that a Job
    of a queue controls (pkg/controller/jobframework/reconciler.go, shouldSuspendChildJob)."""
    run = a_run(tmp_path, kubernetes=KubernetesOptions(queue="batch"))
    if death:
        server.faults.append(Fault("PATCH .*jobs/r-2-head", times=1000, status=500))
        with pytest.raises(ApiError):
            submit(server, run)
        server.faults.clear()
        head = server.objects["jobs", "r-2-head"]
        assert [item["controller"] for item in head["metadata"]["ownerReferences"]] == [True]
        head["spec"]["suspend"] = True
    submit(server, run)
    head = server.objects["jobs", "r-2-head"]
    (owner,) = head["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (job_of(server)["metadata"]["uid"], False)
    assert head["spec"]["suspend"] is False


def test_machines_are_booked_before_the_workers_are_released(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path, kubernetes=KubernetesOptions(provisioning_class="queued-provisioning.gke.io"))
    submit(server, run)
    booking, template = server.objects["provisioningrequests", "r-2"], server.objects["podtemplates", "r-2"]
    uid = job_of(server)["metadata"]["uid"]
    for item in (booking, template):  # both go with the run
        assert [owner["uid"] for owner in item["metadata"]["ownerReferences"]] == [uid]
    created = [request for request in server.requests if "provisioningrequests" in request or "PATCH" in request]
    assert "provisioningrequests" in created[0]
    assert job_of(server)["spec"]["suspend"] is False
    assert (tmp_path / "manifests" / "provisioningrequest.yaml").is_file()


def test_what_was_seen_of_the_end_outlives_the_objects(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    submit(server, run)
    put_pod(server, 0, **terminated_pod(3))
    put_pod(server, 1, **terminated_pod(0))
    seen = look(server, run)
    assert (seen.ended, seen.first_failed) == ("failed", 0)
    RunFolder(run.folder).write_observation(seen)  # as whoever finalizes the run does first
    server.remove("jobs", "r-2")
    server.remove("pods", "r-2-0-x")
    assert look(server, run) == seen
    # Another machine finds what is left.
    assert look(server, a_run(tmp_path / "other")).ended == "never_started"


def test_a_run_that_was_deleted_is_lost(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert look(server, run).ended == "never_started"
    submit(server, run)
    server.remove("jobs", "r-2")
    seen = look(server, run)
    assert (seen.ended, seen.findings[0].code) == ("lost", "run_gone")


def test_the_number_of_requests_does_not_grow_with_the_workers(server: KubeApi, tmp_path: Path) -> None:
    counts = []
    for workers in (2, 200):
        run = a_run(tmp_path / str(workers), workers=workers, name=f"r-{workers}")
        submit(server, run)
        server.requests.clear()
        observations = watch(KubernetesEngine(server.access), run)
        next(observations)
        next(observations)
        observations.close()
        counts.append(sum(server.requests.values()))
    assert abs(counts[0] - counts[1]) < 20  # a look, of a few requests, may come once more in between


# --- end ------------------------------------------------------------------------------------------------------------


def test_cancel_says_so_in_the_cluster_once(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    engine = KubernetesEngine(server.access)
    engine.cancel(run)  # nothing there
    submit(server, run)
    engine.cancel(run)
    job = job_of(server)
    assert (job["spec"]["suspend"], job["spec"]["activeDeadlineSeconds"]) == (False, 1)
    assert STOPPED_ANNOTATION in job["metadata"]["annotations"]
    engine.cancel(run)
    assert job_of(server) == job
    assert look(server, run).ended == "canceled"
    submit(server, run)
    assert job_of(server) == job  # nobody starts it again


def test_a_run_that_has_taken_the_name_of_a_deleted_one_is_left_alone(server: KubeApi, tmp_path: Path) -> None:
    first, second = a_run(tmp_path / "1"), a_run(tmp_path / "2")
    submit(server, first)
    engine = KubernetesEngine(server.access)
    assert engine.look(first).ended is None
    with pytest.raises(UsageError, match='has another run "r-2"'):
        submit(server, second)
    server.remove("jobs", "r-2")  # by somebody else, who starts another one
    submit(server, second)
    put_pod(server, 0, **RUNNING)
    before = dict(server.objects)
    assert (engine.look(first).ended, look(server, first).ended) == ("lost", "lost")
    engine.cancel(first)
    engine.resume(first)
    engine.head(first).fetch()
    engine.delete(first, force=True)
    assert server.objects == before
    assert look(server, second).workers[0].phase == "running"


def test_pods_of_an_earlier_job_of_that_name_are_none_of_a_run(server: KubeApi, tmp_path: Path) -> None:
    """They may take a while to end when their Job is deleted, and another client submits a run by that name."""
    run = a_run(tmp_path)
    submit(server, run)
    for worker in (0, 1):
        put_pod(server, worker, **terminated_pod(1))
    job = job_of(server)
    server.objects["jobs", "r-2"] = {**job, "metadata": {**job["metadata"], "uid": "another"}}
    seen = look(server, run)
    assert (seen.ended, [worker.phase for worker in seen.workers]) == (None, ["pending"] * 2)


def test_a_run_that_takes_the_name_while_another_one_is_deleted_stays(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path / "1")
    submit(server, run)
    remove, other = server.remove, a_run(tmp_path / "2")

    def remove_and_take_the_name(kind: str, name: str) -> Any:
        server.remove = remove  # type: ignore[method-assign]
        found = remove(kind, name)
        submit(server, other)
        return found

    server.remove = remove_and_take_the_name  # type: ignore[method-assign]
    KubernetesEngine(server.access).delete(run, force=True)
    assert sorted(server.objects) == sorted(zip(KINDS, NAMES, strict=True))


def test_a_head_that_another_client_releases_is_not_made_again(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, get = a_run(tmp_path), Api.get
    submit(server, run)
    engine, other = KubernetesEngine(server.access), KubernetesEngine(server.access)

    def release_then_get(api: Api, path: str, **params: Any) -> Any:
        if path.endswith("/jobs/r-2-head"):
            monkeypatch.setattr(Api, "get", get)
            other.head(run).fetch()
        return get(api, path, **params)

    monkeypatch.setattr(Api, "get", release_then_get)
    engine.resume(run)
    assert ("jobs", "r-2-head") not in server.objects


def test_delete_refuses_what_would_be_lost(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    engine = KubernetesEngine(server.access)
    submit(server, run)
    with pytest.raises(UsageError, match="still running"):
        engine.delete(run)
    failed = {"startTime": "2026-01-01T00:00:00Z", "conditions": [{"type": "Failed", "status": "True"}]}
    server.put("jobs", {**job_of(server), "status": failed})
    with pytest.raises(UsageError, match="have not been fetched"):
        engine.delete(run)
    annotated = {**job_of(server)["metadata"]["annotations"], FETCHED_ANNOTATION: "2026"}
    server.put("jobs", {**job_of(server), "metadata": {**job_of(server)["metadata"], "annotations": annotated}})
    engine.delete(run)
    assert not server.objects
    assert not run.folder.exists()
    engine.delete(run)  # done already


def test_forced_delete_leaves_nothing_of_the_run_and_all_else(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    submit(server, run)
    put_pod(server, 0, phase="Running")
    server.put("pods", {"metadata": {"name": "other", "labels": {"mlbench/run": "r-20"}}})
    KubernetesEngine(server.access).delete(run, force=True)
    assert set(server.objects) == {("pods", "other")}


def test_a_delete_that_a_finalizer_holds_up_names_it(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "run")
    submit(server, run)
    metadata = server.objects["configmaps", "r-2"]["metadata"]
    server.put("configmaps", {"metadata": {**metadata, "ownerReferences": [], "finalizers": ["corp.example/keep"]}})
    server.faults.append(Fault("DELETE .*configmaps", times=1000, status=404))
    monkeypatch.setattr("mlbench_cli.engines.kubernetes.engine.GONE_SECONDS", 0.1)
    with pytest.raises(CleanupError, match=r"ConfigMap r-2 \(kept by corp.example/keep\)"):
        KubernetesEngine(server.access).delete(run, force=True)
    assert run.folder.exists()
