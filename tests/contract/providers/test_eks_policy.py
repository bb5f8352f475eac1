"""The IAM policy that mlbench prints is enough: every call that the commands make is one that it allows."""

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import MlbenchError
from providers.doctor import load_policy
from providers.eks.api import aws_in
from providers.eks.discover import find_principal
from providers.eks.options import EksOptions
from tests.contract.providers.eks_world import make, remove
from tests.fakes.aws_server import AwsClient
from tests.fakes.registry import FakeDocker, FakeRegistry

COMMANDS = (
    ("create-cluster", "eks", "1", "rights", "-t", "g4dn.xlarge", "--ttl", "2h", "--yes"),
    ("list-clusters", "--cloud"),
    ("gc", "eks", "--dry-run"),
    ("delete-cluster", "eks", "rights-1", "--yes"),
    ("doctor", "eks"),
)


def allowed_actions() -> list[str]:
    actions: list[str] = []
    for statement in load_policy("eks")["Statement"]:
        action = statement["Action"]
        actions += [action] if isinstance(action, str) else action
    return actions


def refused_calls(aws: AwsClient) -> list[str]:
    allowed = allowed_actions()
    calls = {entry["action"] for client in ("me", "me/cloudformation") for entry in aws.log(client)}
    return sorted(call for call in calls if not any(fnmatchcase(call, pattern) for pattern in allowed))


@pytest.mark.slow
def test_every_call_of_every_command_is_allowed(command: Callable[..., Any], aws: AwsClient) -> None:
    for words in COMMANDS:
        aws.calm("me")
        result = command(*words)
        assert result.code == 0 or words[0] == "doctor", result.err
        assert aws.log("me"), words
        assert refused_calls(aws) == [], words


@pytest.mark.slow
def test_calls_of_fast_networks_and_of_what_others_left_are_allowed(aws: AwsClient, tmp_path: Path) -> None:
    aws.rules(guardduty=True, crossed_groups=True)
    arn = "arn:aws:iam::123456789012:role/ci"
    try:
        options = EksOptions(machine_type="p4d.24xlarge", efa=True, admin=(arn,), registry="auto")
        make("wide-2", tmp_path / "home", options)
        aws.calm("me")
        remove("wide-2", tmp_path / "empty")
    finally:
        aws.rules(guardduty=False, crossed_groups=False)
    assert refused_calls(aws) == []
    assert aws.list_left("wide-2") == []


# The action of ECR that allows a request of the OCI distribution API. Source: ECR's guide on pushing images.
REGISTRY_ACTIONS = {
    ("HEAD", "blobs"): "ecr:BatchCheckLayerAvailability",
    ("POST", "blobs"): "ecr:InitiateLayerUpload",
    ("PATCH", "blobs"): "ecr:UploadLayerPart",
    ("PUT", "blobs"): "ecr:CompleteLayerUpload",
    ("PUT", "manifests"): "ecr:PutImage",
    ("HEAD", "manifests"): "ecr:BatchGetImage",
    ("GET", "manifests"): "ecr:BatchGetImage",
}


def registry_actions(registry: FakeRegistry) -> set[str]:
    requests = [line.split() for line in registry.world.log]
    return {REGISTRY_ACTIONS[method, "blobs" if "/blobs/" in path else "manifests"] for method, path in requests}


@pytest.mark.slow
def test_pushing_images_and_running_are_allowed(
    command: Callable[..., Any], aws: AwsClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Calls of AWS' API, and the requests that Docker and mlbench send to the registry, both recorded."""
    create = ("create-cluster", "eks", "1", "use", "-t", "m5.large", "--registry", "auto", "--yes")
    registry = FakeRegistry()
    monkeypatch.setenv("MLBENCH_REGISTRY_ENDPOINT", registry.url)
    monkeypatch.setenv("PATH", str(FakeDocker(tmp_path / "programs").folder))
    try:
        made = command(*create)
        assert made.code == 0, made.err
        aws.calm("me")
        pushed = command("images", "push", "allreduce")
        assert pushed.code == 0, pushed.err
        calls = {entry["action"] for entry in aws.log("me")}
        assert "ecr:GetAuthorizationToken" in calls
        used = registry_actions(registry)
        assert used == set(REGISTRY_ACTIONS.values())
        for words in (
            ("run", "r", "1", "--task", "allreduce", "--cluster", "use-1", "--dry-run"),
            ("run", "r", "1", "--task", "allreduce", "--cluster", "use-1", "--detach"),
            ("status", "--cluster", "use-1"),
        ):
            aws.calm("me")
            registry.world.log.clear()
            command(*words)
            calls = {entry["action"] for entry in aws.log("me")} | registry_actions(registry)
            assert refused_calls(aws) == []
    finally:
        registry.close()
        assert command("delete-cluster", "eks", "use-1", "--yes", "--force").code == 0


def test_doctor_asks_iam_for_every_right(command: Callable[..., Any], aws: AwsClient) -> None:
    aws.rules(denied_actions=["eks:CreateCluster", "ecr:PutImage"])
    try:
        checks = {item["what"]: item for item in command("doctor", "eks", "-o", "json").json["checks"]}
    finally:
        aws.rules(denied_actions=[])
    assert checks["eks rights"]["state"] == "missing"
    assert "IAM would deny ecr:PutImage, eks:CreateCluster" in checks["eks rights"]["found"]
    assert "policy.json" in checks["eks rights"]["hint"]
    assert "IAM allows all" in command("doctor", "eks").out


def test_doctor_finds_exactly_the_printed_policy_enough(command: Callable[..., Any], aws: AwsClient) -> None:
    aws.rules(policy=load_policy("eks"))
    try:
        assert "IAM allows all" in command("doctor", "eks").out
        smaller = load_policy("eks")
        smaller["Statement"] = [item for item in smaller["Statement"] if item["Sid"] != "RolesOfItsStacks"]
        aws.rules(policy=smaller)
        assert "IAM would deny iam:AttachRolePolicy, iam:CreateRole" in command("doctor", "eks").out
    finally:
        aws.rules(policy=None)


def test_a_session_is_simulated_as_its_role_with_its_path(aws: AwsClient) -> None:
    name, path = "AWSReservedSSO_Admin_1", "/aws-reserved/sso.amazonaws.com/eu-west-1/"
    client = aws_in("eu-west-1")
    client.call("iam", "create_role", RoleName=name, Path=path, AssumeRolePolicyDocument="{}")
    try:
        session = f"arn:aws:sts::123456789012:assumed-role/{name}/ada"
        assert find_principal(client, session) == f"arn:aws:iam::123456789012:role{path}{name}"
    finally:
        client.call("iam", "delete_role", RoleName=name)
    session = "arn:aws:sts::123456789012:assumed-role/ci/build-7"
    assert find_principal(client, session) == "arn:aws:iam::123456789012:role/ci"
    assert find_principal(client, "arn:aws:iam::123456789012:user/ada") == "arn:aws:iam::123456789012:user/ada"


@pytest.mark.slow
def test_the_printed_policy_makes_and_removes_the_stack(aws: AwsClient, tmp_path: Path) -> None:
    aws.rules(policy=load_policy("eks"))
    try:
        make("least-1", tmp_path / "home", EksOptions(machine_type="m5.large"), nodes=1)
        for right in ("eks:DeleteNodegroup", "iam:ListRolePolicies"):
            aws.rules(policy=json.loads(json.dumps(load_policy("eks")).replace(right, "iam:Nothing")))
            with pytest.raises(MlbenchError, match=right):
                remove("least-1", tmp_path / right)
            aws.rules(policy=load_policy("eks"))
        remove("least-1", tmp_path / "empty")
    finally:
        aws.rules(policy=None)
    assert aws.list_left("least-1") == []
