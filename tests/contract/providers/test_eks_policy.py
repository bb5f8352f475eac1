"""The IAM policy that mlbench prints is enough: every call that the commands make is one that it allows."""

import json
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

import templates
from mlbench_cli.errors import MlbenchError
from providers import eks
from providers.eks.aws import aws_in
from providers.eks.doctor import find_principal, list_actions, load_policy, policy_of
from providers.eks.options import EksOptions
from providers.rights import load_rights
from tests.contract.providers.eks_world import make, remove
from tests.fakes.aws_server import AwsClient
from tests.fakes.aws_services import HANDLERS
from tests.fakes.registry import FakeDocker, FakeRegistry

COMMANDS = (
    ("create-cluster", "eks", "1", "rights", "-t", "g4dn.xlarge", "--ttl", "2h", "--yes"),
    ("scale-cluster", "rights-1", "2", "--yes"),
    ("extend", "rights-1", "1h"),
    ("list-clusters", "--cloud"),
    ("gc", "eks", "--dry-run"),
    ("delete-cluster", "eks", "rights-1", "--yes"),
    ("doctor", "eks"),
    ("prices", "update", "eks"),
)


def allowed_actions() -> list[str]:
    actions: list[str] = []
    for statement in load_policy()["Statement"]:
        action = statement["Action"]
        actions += [action] if isinstance(action, str) else action
    return actions


def refused_calls(aws: AwsClient) -> list[str]:
    allowed = allowed_actions()
    calls = {entry["action"] for entry in aws.log("me")}
    return sorted(call for call in calls if not any(fnmatchcase(call, pattern) for pattern in allowed))


@pytest.mark.slow
def test_every_call_of_every_command_is_allowed(command: Callable[..., Any], aws: AwsClient) -> None:
    for words in COMMANDS:
        aws.calm("me")
        result = command(*words)
        assert result.code == 0 or words[0] == "doctor", result.err
        assert aws.log("me"), words
        assert refused_calls(aws) == [], words
        assert {entry["action"] for entry in aws.log("me")} <= set(load_rights("eks")[words[0]]), words


def test_calls_of_fast_networks_and_of_what_others_left_are_allowed(aws: AwsClient, tmp_path: Path) -> None:
    aws.rules(guardduty=True, crossed_groups=True, topology_labels=False)
    rights = load_rights("eks")
    arn = "arn:aws:iam::123456789012:role/ci"
    try:
        options = EksOptions(machine_type="p4d.24xlarge", efa=True, admin=(arn,), registry="auto")
        make("wide-2", tmp_path / "home", options)
        assert "ec2:DescribeInstanceTopology" in {entry["action"] for entry in aws.log("me")}
        assert {entry["action"] for entry in aws.log("me")} <= set(rights["create-cluster"])
        aws.calm("me")
        remove("wide-2", tmp_path / "empty")
        assert {entry["action"] for entry in aws.log("me")} <= set(rights["delete-cluster"])
    finally:
        aws.rules(guardduty=False, crossed_groups=False, topology_labels=True)
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


def test_pushing_images_and_running_are_allowed(
    command: Callable[..., Any], aws: AwsClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Calls of AWS' API, and the requests that Docker and mlbench send to the registry, both recorded."""
    create = ("create-cluster", "eks", "1", "use", "-t", "m5.large", "--registry", "auto", "--yes")
    registry = FakeRegistry()
    monkeypatch.setenv("MLBENCH_REGISTRY_ENDPOINT", registry.url)
    monkeypatch.setenv("PATH", str(FakeDocker(tmp_path / "programs").folder))
    rights = load_rights("eks")
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
        assert sorted((calls | used) - set(rights["images"])) == []
        for words in (
            ("run", "r", "1", "--task", "allreduce", "--cluster", "use-1", "--dry-run"),
            ("run", "r", "1", "--task", "allreduce", "--cluster", "use-1", "--detach"),
            ("kubeconfig", "token"),
            ("status", "--cluster", "use-1"),
        ):
            aws.calm("me")
            registry.world.log.clear()
            command(*words)
            calls = {entry["action"] for entry in aws.log("me")} | registry_actions(registry)
            assert sorted(calls - set(rights["run"])) == [], words
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
    assert "doctor eks --policy" in checks["eks rights"]["hint"]
    assert "IAM allows all" in command("doctor", "eks").out


def test_doctor_finds_exactly_the_printed_policy_enough(command: Callable[..., Any], aws: AwsClient) -> None:
    aws.rules(policy=load_policy())
    try:
        assert "IAM allows all" in command("doctor", "eks").out
        smaller = load_policy()
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


def test_the_policy_has_what_cloudformation_does_with_the_parts_of_the_stack() -> None:
    template = (Path(templates.__file__).parent / "cloudformation" / "network.yaml").read_text("utf-8")
    kinds = set(re.findall(r"Type: (AWS::(?:EC2|IAM)::\w+)\n", template))
    assert kinds == set(HANDLERS)
    rights = load_rights("eks")
    for handlers in HANDLERS.values():
        assert {*handlers["create"], *handlers["read"], *handlers["delete"]} <= set(rights["create-cluster"])
        for name in ("delete-cluster", "gc"):
            assert {*handlers["read"], *handlers["delete"]} <= set(rights[name])


def test_the_printed_policy_makes_and_removes_the_stack(aws: AwsClient, tmp_path: Path) -> None:
    aws.rules(policy=load_policy())
    try:
        make("least-1", tmp_path / "home", EksOptions(machine_type="m5.large"), nodes=1)
        smaller = json.loads(json.dumps(load_policy()).replace("iam:ListRolePolicies", "iam:Nothing"))
        aws.rules(policy=smaller)
        with pytest.raises(MlbenchError, match="iam:ListRolePolicies"):
            remove("least-1", tmp_path / "empty")
        aws.rules(policy=load_policy())
        remove("least-1", tmp_path / "empty")
    finally:
        aws.rules(policy=None)
    assert aws.list_left("least-1") == []


def test_every_call_in_the_code_is_in_some_command_s_rights() -> None:
    """Also those that no double answers, such as the tags of load balancers."""
    services = {"elb": "elasticloadbalancing", "elbv2": "elasticloadbalancing", "service-quotas": "servicequotas"}
    rights = {action for actions in load_rights("eks").values() for action in actions}
    called = set()
    for path in Path(eks.__file__).parent.glob("*.py"):
        for service, operation in re.findall(r'"([a-z0-9-]+)",\s*"([a-z]+(?:_[a-z]+)+)"', path.read_text("utf-8")):
            called.add(f"{services.get(service, service)}:{''.join(map(str.capitalize, operation.split('_')))}")
    known = {name.partition(":")[0] for name in rights}
    assert 'aws.call(service, "describe_tags"' in (Path(eks.__file__).parent / "orphans.py").read_text("utf-8")
    called.add("elasticloadbalancing:DescribeTags")
    assert {item for item in called if item.partition(":")[0] in known} - rights == set()


def test_the_policy_is_printed(command: Callable[..., Any]) -> None:
    result = command("doctor", "eks", "--policy")
    assert result.code == 0
    assert result.json == load_policy()


def test_each_command_has_a_policy_of_its_own_that_is_part_of_the_whole(command: Callable[..., Any]) -> None:
    whole = {statement["Sid"]: statement for statement in load_policy()["Statement"]}
    for name, actions in load_rights("eks").items():
        policy = policy_of(name)
        given = [action for statement in policy["Statement"] for action in list_actions(statement)]
        assert sorted(set(given)) == sorted(actions), name  # nothing that the whole policy lacks
        for statement in policy["Statement"]:
            assert {**statement, "Action": None} == {**whole[statement["Sid"]], "Action": None}
    looking = command("doctor", "eks", "--policy", "--for", "list-clusters")
    assert looking.code == 0
    assert not any("Create" in action or "Delete" in action for action in looking.json["Statement"][0]["Action"])
    assert len(looking.json["Statement"]) == 1
    for words in (("--policy", "--for", "list-cluster"), ("--for", "gc")):
        refused = command("doctor", "eks", *words)
        assert refused.code == 2, refused.err
