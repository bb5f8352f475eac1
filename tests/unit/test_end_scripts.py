"""The scripts that end a cluster from within: when they act, what they send, and what an error means."""

import importlib
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs

import pytest

NOW = 1_795_262_400.0


class Web:
    """The servers that the scripts talk to: answers by host; a status is an error."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []

    @contextmanager
    def open(self, request: urllib.request.Request, timeout: float) -> Iterator[io.BytesIO]:
        assert 0 < timeout < 240  # the deadline of the CronJob's pods
        data = parse_qs(request.data.decode()) if isinstance(request.data, bytes) else None
        self.requests.append((request.get_method(), request.full_url, dict(request.header_items()), data))
        answer = self.answers.get(request.host, {})
        if isinstance(answer, int):
            body = io.BytesIO(b"in the cloud's words")
            raise urllib.error.HTTPError(request.full_url, answer, "refused", {}, body)  # type: ignore[arg-type]
        yield io.BytesIO(json.dumps(answer).encode())


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    found = Web()
    monkeypatch.setattr(urllib.request, "urlopen", found.open)
    monkeypatch.setattr(time, "time", lambda: NOW)
    for name in ("GCE_METADATA_HOST", "MLBENCH_GKE_REST_ENDPOINT", "AZURE_AUTHORITY_HOST", "MLBENCH_AZURE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def gke(web: Web, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("MLBENCH_CLUSTER_PATH", "projects/p/locations/l/clusters/c")
    web.answers["metadata.google.internal"] = {"access_token": "t"}
    return importlib.import_module("templates.kubernetes.gke_end")


@pytest.fixture
def aks(web: Web, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    (tmp_path / "token").write_text("the pod's token")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
    monkeypatch.setenv("MLBENCH_GROUP_PATH", "/subscriptions/s/resourcegroups/g")
    web.answers["login.microsoftonline.com"] = {"access_token": "t"}
    return importlib.import_module("templates.kubernetes.aks_end")


@pytest.mark.parametrize("cloud", ["gke", "aks"])
@pytest.mark.parametrize(("expires", "acts"), [(NOW + 1, False), (NOW, True), (NOW - 9, True)])
def test_a_cluster_is_deleted_at_its_end_and_not_before(
    request: pytest.FixtureRequest,
    web: Web,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cloud: str,
    expires: float,
    acts: bool,
) -> None:
    monkeypatch.setenv("MLBENCH_EXPIRES", str(int(expires)))
    assert request.getfixturevalue(cloud).main() == 0
    said = capsys.readouterr().out
    assert ("DELETE" in [method for method, _, _, _ in web.requests]) is acts
    assert ("deletes the cluster" in said) is acts
    assert ("1 s are left" in said) is not acts
    assert bool(web.requests) is acts


def test_google_is_asked_with_the_token_of_the_pods_account(
    web: Web, gke: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's metadata server answers only with its header."""
    monkeypatch.setenv("MLBENCH_EXPIRES", "0")
    gke.main()
    (token, delete) = web.requests
    assert token[:3] == (
        "GET",
        "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token",
        {"Metadata-flavor": "Google"},
    )
    assert delete[:3] == (
        "DELETE",
        "https://container.googleapis.com/v1/projects/p/locations/l/clusters/c",
        {"Authorization": "Bearer t"},
    )


def test_azure_is_asked_with_the_identity_that_trusts_the_pods_account(
    web: Web, aks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form is that of Microsoft's page on client credentials with a federated credential."""
    monkeypatch.setenv("MLBENCH_EXPIRES", "0")
    aks.main()
    (token, delete) = web.requests
    assert token[:2] == ("POST", "https://login.microsoftonline.com/tenant/oauth2/v2.0/token")
    assert token[3] == {
        "grant_type": ["client_credentials"],
        "client_id": ["client"],
        "client_assertion_type": ["urn:ietf:params:oauth:client-assertion-type:jwt-bearer"],
        "client_assertion": ["the pod's token"],
        "scope": ["https://management.azure.com/.default"],
    }
    assert delete[:3] == (
        "DELETE",
        "https://management.azure.com/subscriptions/s/resourcegroups/g?api-version=2021-04-01",
        {"Authorization": "Bearer t"},
    )


@pytest.mark.parametrize(
    ("cloud", "host", "status", "code"),
    [
        ("gke", "container.googleapis.com", 404, 0),
        ("gke", "container.googleapis.com", 403, 1),
        ("gke", "container.googleapis.com", 409, 1),
        ("gke", "container.googleapis.com", 503, 1),
        ("aks", "management.azure.com", 404, 0),
        ("aks", "management.azure.com", 409, 0),
        ("aks", "management.azure.com", 403, 1),
        ("aks", "login.microsoftonline.com", 401, 1),
    ],
)
def test_what_is_already_gone_is_a_success_and_the_rest_is_tried_again(
    request: pytest.FixtureRequest,
    web: Web,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cloud: str,
    host: str,
    status: int,
    code: int,
) -> None:
    """Azure answers 409 while it is already deleting the group."""
    script = request.getfixturevalue(cloud)
    monkeypatch.setenv("MLBENCH_EXPIRES", "0")
    web.answers[host] = status
    assert script.main() == code
    captured = capsys.readouterr()
    assert captured.err == f"{status}: in the cloud's words\n"
    assert "deletes the cluster" not in captured.out
