"""`mlbench doctor gke|eks` against the doubles: what is missing is named with the next command, nothing is written.

And clouds that take a request and never answer: every kind of call ends by itself.
"""

import datetime
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, DeadlineError, UnreachableError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.base import TransientError
from providers.doctor import Checklist, check_clock, check_library
from providers.eks.provider import EksProvider
from providers.gke.provider import GkeProvider
from providers.lifecycle import down
from tests.contract.providers.eks_world import REGION, forget
from tests.fakes.aws_server import AwsClient
from tests.fakes.gke import World
from tests.fakes.gke_facts import PROJECT, ZONE
from tests.fakes.silent import Silent

Command = Callable[..., Any]


def checks_of(done: Any) -> dict[str, dict[str, Any]]:
    return {check["what"]: check for check in done.json["checks"]}


# --- GKE --------------------------------------------------------------------------------------------------------------


def test_all_that_a_google_project_has(command: Command, gke_world: World) -> None:
    done = command("doctor", "gcloud", "-o", "json")
    assert done.code == 0
    checks = checks_of(done)
    assert PROJECT in checks["gke credentials"]["found"]
    assert "tester@demo-project" in checks["gke credentials"]["found"]
    assert "1.36, 1.35, 1.33 in the channel regular, 1.35.5-gke.200 by default" in checks["gke Kubernetes"]["found"]
    assert checks["gke GPUs"]["found"] == f"in {ZONE}: nvidia-tesla-t4, nvidia-l4"
    assert checks["gke quota NVIDIA_L4_GPUS"]["found"] == "8 of 8 left"
    assert checks["gke clock"]["state"] == "ok"
    assert all(line.startswith(("Get", "List", "PolicyPOST")) for line in gke_world.log)
    assert "mlbench doctor gke" not in command("doctor", "gke").err


def test_what_a_google_project_lacks(command: Command, gke_world: World) -> None:
    gke_world.quotas = {"NVIDIA_L4_GPUS": 0}
    checks = checks_of(command("doctor", "gke", "-o", "json"))
    assert checks["gke quota NVIDIA_L4_GPUS"]["state"] == "missing"
    assert "iam-admin/quotas?project=demo-project" in checks["gke quota NVIDIA_L4_GPUS"]["hint"]
    gke_world.trouble = {"GetServerConfig": "DISABLED-before", "ListClusters": "DISABLED-before"}
    done = command("doctor", "gke", "-o", "json")
    assert done.code == CredentialError.exit_code
    assert checks_of(done)["gke API container"]["hint"] == (
        "gcloud services enable container.googleapis.com --project demo-project   switches the API on; "
        "it takes a few minutes"
    )
    assert checks_of(done)["gke API compute"]["state"] == "ok"  # it goes on


@pytest.mark.parametrize(
    ("spoil", "what", "code", "hint"),
    [
        ({"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere.json"}, "credentials", CredentialError.exit_code, "gcloud auth"),
        ({"MLBENCH_GKE_ENDPOINT": "127.0.0.1:9"}, "API container", UnreachableError.exit_code, None),
        ({"MLBENCH_COMPUTE_ENDPOINT": "http://127.0.0.1:9"}, "API compute", UnreachableError.exit_code, None),
    ],
)
def test_what_fails_at_google_is_named(
    command: Command,
    gke_world: World,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Any,
    what: str,
    code: int,
    hint: str | None,
) -> None:
    for key, value in spoil.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MLBENCH_CALL_SECONDS", "2")
    done = command("doctor", "gke", "-o", "json")
    assert done.code == code, done.out
    assert checks_of(done)[f"gke {what}"]["state"] == "failed"
    assert (hint or "") in (checks_of(done)[f"gke {what}"]["hint"] or "")


def test_clusters_that_are_forgotten_are_named(command: Command, gke_world: World) -> None:
    assert command("create-cluster", "gke", "1", "old", "--ttl", "1h", "--yes").code == 0
    gke_world.find_cluster("old-1").resource_labels["mlbench-expires"] = "1000000000"
    done = command("doctor", "gke", "-o", "json")
    check = checks_of(done)["gke clusters"]
    assert done.code == 7
    assert (check["state"], check["found"]) == ("missing", "old-1")
    assert check["hint"] == "mlbench gc --expired   removes old-1"


# --- EKS --------------------------------------------------------------------------------------------------------------


def test_all_that_an_account_has(command: Command, aws: AwsClient) -> None:
    done = command("doctor", "aws", "--zone", "eu-west-1a", "-o", "json")
    assert done.code == 0
    checks = checks_of(done)
    assert checks["eks region"]["found"] == REGION
    assert "account 123456789012" in checks["eks credentials"]["found"]
    assert checks["eks Kubernetes"]["found"] == "1.34, 1.35, 1.36 with standard support, 1.35 by default"
    assert "g4dn" in checks["eks GPUs"]["found"]
    assert checks["eks quota P vCPUs"]["state"] == "missing"
    assert checks["eks quota VPCs"]["found"].startswith("5 in all")
    verbs = {entry["action"].partition(":")[2] for entry in aws.log("me")}
    assert all(verb.startswith(("Get", "Describe", "List", "Simulate")) for verb in verbs)


@pytest.mark.parametrize(
    ("kind", "action", "what", "code", "hint"),
    [
        ("expired", "sts:.*", "credentials", CredentialError.exit_code, "aws sso login"),
        ("skew", "sts:.*", "credentials", CredentialError.exit_code, "clock"),
        ("deny", "cloudformation:.*", "API cloudformation", CredentialError.exit_code, "another profile"),
        ("quota", "eks:ListClusters.*", "API eks", CapacityError.exit_code, "servicequotas"),
        ("deny", "eks:DescribeClusterVersions.*", "Kubernetes", CredentialError.exit_code, "another profile"),
        ("error", "ec2:DescribeAvailabilityZones.*", "API ec2", DeadlineError.exit_code, None),
    ],
)
def test_what_fails_at_aws_is_named(
    command: Command, aws: AwsClient, kind: str, action: str, what: str, code: int, hint: str | None
) -> None:
    aws.order("me", kind, action=action, times=1)
    done = command("doctor", "eks", "-o", "json")
    assert done.code == code, done.out
    assert checks_of(done)[f"eks {what}"]["state"] == "failed"
    assert (hint or "") in (checks_of(done)[f"eks {what}"]["hint"] or "")


def test_a_quota_that_may_not_be_read_is_no_failure(command: Command, aws: AwsClient) -> None:
    aws.order("me", "deny", action="servicequotas:.*", times=99)
    done = command("doctor", "eks", "-o", "json")
    assert done.code == 0
    assert checks_of(done)["eks quota P vCPUs"]["state"] == "missing"
    assert "is not authorized" in checks_of(done)["eks quota P vCPUs"]["found"]


def test_no_region_and_no_such_cloud(command: Command, aws: AwsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    done = command("doctor", "eks", "-o", "json")
    assert done.code == UsageError.exit_code
    assert "--region" in checks_of(done)["eks region"]["hint"]
    done = command("doctor", "oracle")
    assert (done.code, "gke|eks|aks" in done.err) == (2, True)


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_a_clock_is_judged_by_the_clouds_own() -> None:
    moment = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)
    date = moment.strftime("%a, %d %b %Y %H:%M:%S GMT")
    assert check_clock(Checklist("eks"), date, moment.timestamp() + 30).state == "ok"
    late = check_clock(Checklist("eks"), date, moment.timestamp() - 400)
    assert (late.state, late.found, late.exit_code) == ("failed", "400 s behind the cloud's", 3)
    assert "timedatectl" in (late.hint or "")
    assert check_clock(Checklist("eks"), None, 0.0).found == "the cloud sent no date"


def test_a_library_that_is_missing_or_old_is_named() -> None:
    missing = check_library(Checklist("gke"), "no-such-package", "1.0", "gke")
    assert re.fullmatch(r"pip install '\S+\[gke\]'", missing.hint or "")  # from wherever this mlbench came
    old = check_library(Checklist("eks"), "boto3", "99.0", "eks")
    assert old.state == "failed"
    assert re.fullmatch(r"pip install --upgrade '\S+\[eks\]'", old.hint or "")


# --- clouds that never answer -----------------------------------------------------------------------------------------


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    server = Silent()
    monkeypatch.setenv("MLBENCH_CALL_SECONDS", "2")  # in which the other servers of a busy machine answer
    yield server
    server.close()


@pytest.mark.parametrize("what", ["cluster manager", "sign-in", "Compute Engine"])
def test_google_that_never_answers_is_not_waited_for(
    command: Command, gke_world: World, silent: Silent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "cluster manager":
        monkeypatch.setenv("MLBENCH_GKE_ENDPOINT", f"127.0.0.1:{silent.port}")
    elif what == "Compute Engine":
        monkeypatch.setenv("MLBENCH_COMPUTE_ENDPOINT", silent.url)
    else:
        key = json.loads(Path(os.environ["GOOGLE_APPLICATION_CREDENTIALS"]).read_text())
        (tmp_path / "key.json").write_text(json.dumps({**key, "token_uri": f"{silent.url}/token"}))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    done = command("create-cluster", "gke", "1", "never", "--yes")
    assert done.code == UnreachableError.exit_code, done.err
    assert silent.connections
    assert not any(line.startswith("Create") for line in gke_world.log)
    if what == "cluster manager":
        cluster = Cluster("never-1", "gke", details={"project": PROJECT, "location": ZONE, "options": {"zone": ZONE}})
        with pytest.raises(Exception, match="unknown: Google refused to get cluster"):
            down(cluster, GkeProvider().resources(cluster), Store(), patience=0.1)
        with pytest.raises(TransientError):
            GkeProvider().discover({"project": PROJECT})
        with pytest.raises(TransientError):
            GkeProvider().connect(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("service", ["sts", "ec2", "cloudformation", "eks", "service_quotas"])
def test_aws_that_never_answers_is_not_waited_for(
    command: Command,
    aws: AwsClient,
    silent: Silent,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    service: str,
) -> None:
    monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service.upper()}", silent.url)
    request.addfinalizer(forget)
    forget()
    if service in ("sts", "ec2", "service_quotas"):  # what is asked before anything is made
        done = command("create-cluster", "eks", "1", "never", "-t", "g4dn.xlarge", "--yes")
        assert done.code == UnreachableError.exit_code, done.err
        assert "no usable answer" in done.err
        assert aws.list_left("never-1") == []
    else:
        with pytest.raises(TransientError, match="no usable answer"):
            EksProvider().discover({"location": REGION})
    assert silent.connections


def test_a_wrong_limit_is_told(command: Command, gke_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_CALL_SECONDS", "soon")
    done = command("create-cluster", "gke", "1", "never", "--yes")
    assert (done.code, "MLBENCH_CALL_SECONDS" in done.err) == (2, True)
