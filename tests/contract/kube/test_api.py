"""The API client against a server that misbehaves: what may pass is retried, the rest is reported in its own words."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import ApiError, Expired, error_of, list_pods
from mlbench_cli.kube.credentials import Token
from tests.contract.kube.exec import execute
from tests.fakes.kube_api import Fault, KubeApi

PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        server.put("pods", {"metadata": {"name": "a"}})
        yield server


@pytest.mark.parametrize(
    "fault",
    [
        Fault(PODS, times=2, status=500),
        Fault(PODS, times=2, status=503),
        Fault(PODS, times=1, status=429, retry_after="0.1"),
        Fault(PODS, times=2, cut=10),
    ],
)
def test_what_passes_is_tried_again(server: KubeApi, fault: Fault) -> None:
    times = fault.times
    server.faults.append(fault)
    with server.access.client() as api:
        assert [item["metadata"]["name"] for item in api.get(PODS)["items"]] == ["a"]
    assert server.requests[f"GET {PODS}"] == times + 1


def test_a_busy_server_is_asked_again_when_it_said(server: KubeApi) -> None:
    server.faults.append(Fault(PODS, times=1, status=429, retry_after="1.5"))
    begun = time.monotonic()
    with server.access.client() as api:
        assert api.get(PODS)["items"]
    assert time.monotonic() - begun >= 1.5  # without it, after 0.3 s at most


def test_more_pods_than_fit_into_an_answer_are_all_listed(server: KubeApi) -> None:
    for number in range(250):
        server.put("pods", {"metadata": {"name": f"p-{number}", "labels": {"run": "x"}}})
    with server.access.client() as api:
        names = [pod["metadata"]["name"] for pod in list_pods(api, "default", "run=x")]
    assert sorted(names) == sorted(f"p-{number}" for number in range(250))


def test_no_longer_than_told(server: KubeApi) -> None:
    server.faults.append(Fault(PODS, times=100, status=503))
    with server.access.client() as api, pytest.raises(ApiError, match="as the test wants it"):
        api.request("GET", PODS, retry_seconds=0.5)
    server.faults[:] = [Fault(PODS, times=100, status=429, retry_after="3600")]
    with server.access.client() as api, pytest.raises(ApiError, match="429"):
        api.get(PODS)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (403, CredentialError),
        (404, NotFoundError),
        (409, UsageError),
        (422, UsageError),
        (410, Expired),
        (400, UsageError),
    ],
)
def test_a_refusal_is_told_once_in_the_servers_words(server: KubeApi, status: int, kind: type[Exception]) -> None:
    server.faults.append(Fault(PODS, times=100, status=status))
    with server.access.client() as api, pytest.raises(kind, match="as the test wants it") as caught:
        api.get(PODS)
    assert isinstance(caught.value, ApiError)
    assert caught.value.status == status
    assert server.requests[f"GET {PODS}"] == 1


def test_nobody_in_particular_is_told_to_log_in() -> None:
    words = {"message": 'pods is forbidden: User "system:anonymous" cannot list resource "pods"'}
    assert "Log in" in str(error_of(403, json.dumps(words), "GET /").hint)


@pytest.mark.parametrize(
    ("status", "words", "hint"),
    [
        (
            403,
            'jobs.batch is forbidden: User "me" cannot create resource "jobs" in API group "batch"',
            "attach-cluster NAME -n team --role",
        ),
        (
            422,
            "jobs.batch \"r\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no",
            "policy",
        ),
        (403, 'admission webhook "validation.gatekeeper.sh" denied the request: [team-label] no label', "policy"),
        (400, 'admission webhook "validate.kyverno.svc-fail" denied the request: exec is not allowed', "policy"),
    ],
)
def test_a_policy_is_told_from_a_right_that_is_missing(status: int, words: str, hint: str) -> None:
    request = "POST /apis/batch/v1/namespaces/team/jobs"
    error = error_of(status, json.dumps({"message": words, "reason": "Forbidden"}), request)
    assert error.exit_code == 3
    assert hint in str(error.hint)


def test_a_webhook_that_does_not_answer_may_answer_later() -> None:
    words = 'Internal error occurred: failed calling webhook "x": failed to call webhook: context deadline exceeded'
    error = error_of(500, json.dumps({"message": words, "reason": "InternalError"}), "POST x")
    assert error.exit_code == 10


def test_a_used_up_quota_is_want_of_capacity() -> None:
    words = '{"message": "pods \\"x\\" is forbidden: exceeded quota: q", "reason": "Forbidden"}'
    error = error_of(403, words, "POST /api/v1/namespaces/team/pods")
    assert isinstance(error, CapacityError)
    assert "resourcequota -n team" in str(error.hint)


def test_answers_that_are_no_json_are_quoted_in_part() -> None:
    error = error_of(502, "<html>" + "x" * 10_000, "GET x")
    assert "<html>" in error.message
    assert len(error.message) < 500


def test_nobody_there() -> None:
    with Access("http://127.0.0.1:9").client() as api, pytest.raises(ApiError, match="does not answer") as caught:
        api.request("GET", PODS, retry_seconds=0)
    assert caught.value.hint


def test_a_token_that_expired_is_renewed_once_for_all() -> None:
    valid = {"first"}
    fetched = []

    def fetch() -> tuple[str, float | None]:
        fetched.append(1)
        return ("first", "second", "third")[len(fetched) - 1], time.time() + 3600

    with KubeApi(tokens=lambda: valid) as server:
        api = server.access_with(fetch).client()
        api.get(PODS)
        valid.clear()
        valid.add("second")
        assert api.get(PODS)["items"] == []
        assert len(fetched) == 2
        valid.clear()
        with pytest.raises(CredentialError) as caught:
            api.get(PODS)
        assert caught.value.exit_code == 3
        assert len(fetched) == 3


def test_secrets_are_not_shown() -> None:
    access = Access("https://x", ca=b"PEM", token=Token(lambda: ("SECRET", None)), key=b"SECRET")
    assert "SECRET" not in repr(access)
    assert "PEM" not in repr(access)


def test_delete_what_is_not_there(server: KubeApi) -> None:
    with server.access.client() as api:
        assert api.delete(f"{PODS}/a") is True
        assert api.delete(f"{PODS}/a") is False


def test_exec_renews_a_token_that_expired(tmp_path: Path) -> None:
    valid = {"second"}
    tokens = iter(("first", "second", "third"))
    with KubeApi(tokens=lambda: valid) as server:
        server.folders["p"] = tmp_path
        access = server.access_with(lambda: (next(tokens), time.time() + 3600))
        assert execute(access, "p", ["echo", "hello"]) == b"hello\n"
        valid.clear()
        with pytest.raises(CredentialError):
            execute(access, "p", ["echo", "hello"])
    assert next(tokens, None) is None
