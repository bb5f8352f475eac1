"""How a run's objects are created: in which order, by whom they are owned, and what is adopted, replaced or refused."""

from typing import Any

import pytest

from mlbench_cli.engines.kubernetes import submit as submitting
from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.engines.kubernetes.submit import check_version, complete, create_owned, read_job, submit
from mlbench_cli.errors import UsageError
from mlbench_cli.kube.api import AccessDenied, ApiError, ObjectNotFound, RequestRejected, ServerUnreachable
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from tests.unit.engines.kubernetes.memory_api import MemoryApi

JOBS, CORE = "/apis/batch/v1/namespaces/team/jobs", "/api/v1/namespaces/team"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies"
SETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"
JOB, KEEPER, SERVERS = f"{JOBS}/demo-2", f"{JOBS}/demo-2-keeper", f"{JOBS}/demo-2-servers"


def a_spec(servers: int = 0, network: str | None = None, **options: Any) -> RunSpec:
    names = ("demo-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2)
    method = {"name": "ps", "servers": str(servers)} if servers else {}
    return RunSpec(*names, image="i", method=method, network=network, kubernetes=KubernetesOptions(**options))


def documents(spec: RunSpec) -> tuple[dict[str, Any], ...]:
    return manifests(spec, "team")


class Clock:
    """A clock that only `sleep` moves."""

    def __init__(self, now: list[float]) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now[0]

    def sleep(self, seconds: float) -> None:
        self._now[0] += seconds


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only `sleep` moves; how far it has come, in seconds."""
    clock = [0.0]
    monkeypatch.setattr(submitting, "time", Clock(clock))
    return clock


def owner_of(api: MemoryApi, path: str) -> list[tuple[str, str, str, bool, bool]]:
    return [
        (item["apiVersion"], item["kind"], item["name"], item["controller"], item["blockOwnerDeletion"])
        for item in api.objects[path]["metadata"]["ownerReferences"]
    ]


# --- a whole submission ----------------------------------------------------------------------------------------------


def test_the_job_comes_first_and_is_released_last() -> None:
    api = MemoryApi()
    job = submit(api.api, documents(a_spec(servers=1)), {"mlbench/run-id": "abc"})
    assert api.writes == [
        f"POST {JOBS}",
        f"POST {CORE}/configmaps",
        f"POST {CORE}/services",
        f"POST {POLICIES}",
        f"POST {JOBS}",
        f"POST {JOBS}",
        f"PATCH {SERVERS}",
        f"PATCH {JOB}",
    ]
    assert job["spec"]["suspend"] is False
    assert api.objects[SERVERS]["spec"]["suspend"] is False
    annotations = job["metadata"]["annotations"]
    assert (set(annotations), annotations["mlbench/run-id"]) == ({"mlbench/spec", "mlbench/run-id"}, "abc")


def test_everything_goes_when_the_job_goes_and_the_keeper_is_controlled_by_it() -> None:
    api = MemoryApi()
    submit(api.api, documents(a_spec(servers=1)))
    for path in (f"{CORE}/configmaps/demo-2", f"{CORE}/services/demo-2", f"{POLICIES}/demo-2", SERVERS):
        assert owner_of(api, path) == [("batch/v1", "Job", "demo-2", False, False)]
    assert owner_of(api, KEEPER) == [("batch/v1", "Job", "demo-2", True, False)]
    for path in (KEEPER, SERVERS):  # by which their pods prove that they belong to the run
        template = api.objects[path]["spec"]["template"]["metadata"]
        assert template["annotations"]["mlbench/run-uid"] == "uid of demo-2"
    assert "mlbench/run-uid" not in str(api.objects[f"{CORE}/configmaps/demo-2"])


def test_a_queue_releases_its_jobs_itself_and_has_no_hold_of_the_keeper() -> None:
    api = MemoryApi()
    job = submit(api.api, documents(a_spec(servers=1, queue="batch")))
    assert job["spec"]["suspend"] is True
    assert api.objects[SERVERS]["spec"]["suspend"] is True
    assert owner_of(api, KEEPER) == [("batch/v1", "Job", "demo-2", False, False)]
    assert api.objects[KEEPER]["spec"]["suspend"] is False
    assert [call for call in api.writes if call.startswith("PATCH")] == [f"PATCH {KEEPER}"]


def test_objects_of_chaos_mesh_wait_until_pods_run() -> None:
    api = MemoryApi()
    submit(api.api, documents(a_spec(network="1gbit", network_method="chaos-mesh")))
    assert not any("chaos" in call for call in api.calls)


def test_a_released_run_is_left_alone() -> None:
    api = MemoryApi()
    made = documents(a_spec())
    submit(api.api, made)
    before = len(api.writes)
    submit(api.api, made)
    assert api.writes[before:] == [f"POST {JOBS}"]


def test_a_submission_whose_client_died_is_completed() -> None:
    api = MemoryApi()
    first, *_ = made = documents(a_spec())
    job = api.api.create(JOBS, first)
    done = complete(api.api, job, made)
    assert done["spec"]["suspend"] is False
    assert KEEPER in api.objects


def test_a_run_that_was_stopped_before_its_release_is_not_released() -> None:
    api = MemoryApi()
    first, *rest = documents(a_spec())
    stopped = {**first, "metadata": {**first["metadata"], "annotations": {"mlbench/stopped": "cancelled 2027"}}}
    job = complete(api.api, api.api.create(JOBS, stopped), [stopped, *rest])
    assert job["spec"]["suspend"] is True
    assert not any(call.startswith("PATCH") for call in api.writes)


# --- JobSets ---------------------------------------------------------------------------------------------------------

WORKERS = f"{JOBS}/demo-2-workers-0"


def test_the_workers_of_a_job_set_control_the_keeper_until_its_queue_cannot_suspend_it() -> None:
    workers = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "demo-2-workers-0", "uid": "w"}}
    api = MemoryApi({WORKERS: workers})
    found = submit(api.api, documents(a_spec(servers=1, job_set=True, queue="batch")), {"mlbench/run-id": "abc"})
    assert found["kind"] == "JobSet"
    assert found["metadata"]["annotations"]["mlbench/run-id"] == "abc"
    parts = [part["template"]["metadata"]["annotations"] for part in found["spec"]["replicatedJobs"]]
    assert ["mlbench/run-id" in part for part in parts] == [True, False]
    created = next(body for body in api.bodies if isinstance(body, dict) and "keeper" in str(body.get("metadata")))
    owners = created["metadata"]["ownerReferences"]
    assert [(item["kind"], item["uid"], item["controller"]) for item in owners] == [
        ("JobSet", "uid of demo-2", False),
        ("Job", "w", True),
    ]
    assert owner_of(api, KEEPER) == [("jobset.x-k8s.io/v1alpha2", "JobSet", "demo-2", False, False)]


def test_a_keeper_waits_twenty_seconds_for_the_workers_of_a_job_set(no_waits: list[float]) -> None:
    api = MemoryApi()
    submit(api.api, documents(a_spec(servers=1, job_set=True, queue="batch")))
    assert 20.0 < no_waits[0] <= 21.0
    assert len(owner_of(api, KEEPER)) == 1


def test_the_job_of_a_run_is_that_of_its_workers_or_the_set_until_there_is_one() -> None:
    alone, in_set = a_spec(), a_spec(job_set=True)
    api = MemoryApi({JOB: {"kind": "Job"}, f"{SETS}/demo-2": {"kind": "JobSet"}})
    assert read_job(api.api, "team", alone)["kind"] == "Job"
    assert read_job(api.api, "team", in_set)["kind"] == "JobSet"
    api.objects[WORKERS] = {"kind": "Job"}
    assert read_job(api.api, "team", in_set)["kind"] == "Job"
    with pytest.raises(ObjectNotFound):
        read_job(MemoryApi({f"{SETS}/demo-2": {}}).api, "team", alone)


# --- what is there already -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"mlbench/run": "demo-2", "mlbench/spec-hash": "other"}, 'a run "demo-2" with other settings'),
        ({"mlbench/run": "demo-2"}, 'a run "demo-2" with other settings'),
        ({}, 'a Job "demo-2" that is not mlbench\'s'),
        (None, 'a Job "demo-2" that is not mlbench\'s'),
    ],
)
def test_a_job_of_something_else_is_not_touched(labels: dict[str, str] | None, words: str) -> None:
    api = MemoryApi({JOB: {"kind": "Job", "metadata": {"name": "demo-2", "labels": labels}}})
    with pytest.raises(UsageError) as caught:
        submit(api.api, documents(a_spec()))
    assert words in caught.value.message
    assert api.writes == [f"POST {JOBS}"]


def test_a_job_that_is_being_deleted_is_waited_for(no_waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    going = {"name": "demo-2", "labels": {"mlbench/run": "demo-2"}, "deletionTimestamp": "2027-01-15T08:00:00Z"}
    api = MemoryApi({JOB: {"kind": "Job", "metadata": going}})

    class Going(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.monotonic() >= 3.0:
                api.objects.pop(JOB, None)

    monkeypatch.setattr(submitting, "time", Going(no_waits))
    assert submit(api.api, documents(a_spec()))["spec"]["suspend"] is False
    assert no_waits[0] == 3.0


def test_a_job_that_does_not_go_in_a_minute_and_a_half_is_a_job_of_that_name(no_waits: list[float]) -> None:
    going = {"name": "demo-2", "labels": {"mlbench/run": "demo-2"}, "deletionTimestamp": "2027-01-15T08:00:00Z"}
    with pytest.raises(UsageError, match="with other settings"):
        submit(MemoryApi({JOB: {"kind": "Job", "metadata": going}}).api, documents(a_spec()))
    assert no_waits[0] == 90.0


def test_a_missing_namespace_is_named() -> None:
    api = MemoryApi()
    api.answers["POST"] = [ObjectNotFound('namespaces "team" not found', status=404)]
    with pytest.raises(UsageError, match='no namespace "team"') as caught:
        submit(api.api, documents(a_spec()))
    assert caught.value.hint == "kubectl create namespace team"
    api.answers["POST"] = [ObjectNotFound("the server could not find the requested resource", status=404)]
    with pytest.raises(ObjectNotFound):
        submit(api.api, documents(a_spec()))


@pytest.mark.parametrize("path", [JOBS, f"{CORE}/services"])
def test_other_refusals_of_the_server_are_passed_on(path: str) -> None:
    api = MemoryApi()
    api.answers[f"POST {path}"] = [RequestRejected("is invalid", status=422)]
    with pytest.raises(RequestRejected, match="is invalid"):
        submit(api.api, documents(a_spec()))


# --- objects that belong to the Job ----------------------------------------------------------------------------------

OWNER = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "demo-2", "namespace": "team", "uid": "u"}}
SERVICE = f"{CORE}/services/demo-2"


def service(**metadata: Any) -> dict[str, Any]:
    return {"kind": "Service", "metadata": {"name": "demo-2", "labels": {"mlbench/run": "demo-2"}, **metadata}}


def create_service(api: MemoryApi) -> None:
    create_owned(api.api, documents(a_spec())[2], OWNER)


def test_an_object_of_this_very_job_is_kept() -> None:
    api = MemoryApi({SERVICE: service(ownerReferences=[{"uid": "other"}, {"uid": "u"}])})
    create_service(api)
    assert api.writes == [f"POST {CORE}/services"]


def test_an_object_of_something_else_is_not_touched() -> None:
    api = MemoryApi({SERVICE: service(labels={"mlbench/run": "other-2"})})
    with pytest.raises(UsageError, match='a Service "demo-2" that is not mlbench\'s'):
        create_service(api)
    api = MemoryApi({SERVICE: service(labels=None)})
    with pytest.raises(UsageError, match="that is not mlbench's"):
        create_service(api)


def test_an_object_that_was_applied_by_hand_gets_its_owner() -> None:
    api = MemoryApi({SERVICE: service()})
    create_service(api)
    assert api.writes == [f"POST {CORE}/services", f"PATCH {SERVICE}"]
    (owner,) = api.objects[SERVICE]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", "demo-2", "u")


@pytest.mark.parametrize(
    "metadata", [{"ownerReferences": [{"uid": "earlier"}]}, {"deletionTimestamp": "2027-01-15T08:00:00Z"}]
)
def test_an_object_of_an_earlier_job_is_replaced(metadata: dict[str, Any]) -> None:
    api = MemoryApi({SERVICE: service(**metadata)})
    create_service(api)
    assert api.writes == [f"POST {CORE}/services", f"DELETE {SERVICE}", f"POST {CORE}/services"]


def test_an_object_of_an_earlier_job_that_does_not_go_is_named(
    no_waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = MemoryApi({SERVICE: service(ownerReferences=[{"uid": "earlier"}])})
    monkeypatch.setattr(api, "delete", lambda path: True)
    with pytest.raises(UsageError, match='The Service "demo-2" of an earlier run still exists') as caught:
        create_service(api)
    assert caught.value.hint == "mlbench delete demo-2"
    assert no_waits[0] == 90.5


def test_an_object_that_goes_while_it_is_looked_at_is_created() -> None:
    api = MemoryApi()
    api.answers["POST"] = [RequestRejected("exists", status=409)]
    create_service(api)
    assert api.writes == [f"POST {CORE}/services"] * 2


# --- the server's version --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version",
    [
        {"major": "1", "minor": "31"},
        {"major": "1", "minor": "31+"},
        {"major": "2", "minor": "0"},
        {"major": "1"},
        {"major": "", "minor": ""},
        {"major": "1", "minor": "x"},
    ],
)
def test_a_new_or_unknown_version_is_taken(version: dict[str, str]) -> None:
    check_version(MemoryApi({"/version": version}).api)


@pytest.mark.parametrize(("minor", "shown"), [("30", "1.30"), ("29+", "1.29")])
def test_a_server_that_would_drop_fields_is_refused(minor: str, shown: str) -> None:
    with pytest.raises(UsageError, match=rf"runs Kubernetes {shown}; runs need 1\.31"):
        check_version(MemoryApi({"/version": {"major": "1", "minor": minor}}).api)


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [
        (AccessDenied("no", status=401), True),
        (ServerUnreachable("no", status=0), True),
        (AccessDenied("no", status=403), False),
        (ApiError("no", status=500), False),
    ],
)
def test_a_server_that_does_not_say_its_version_is_taken(error: ApiError, is_raised: bool) -> None:
    api = MemoryApi()
    api.answers["GET /version"] = [error]
    if not is_raised:
        check_version(api.api)
        return
    with pytest.raises(ApiError):
        check_version(api.api)
