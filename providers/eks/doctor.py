"""Checks an AWS account in one region before a cluster is created in it."""

import functools
import re
import time
from collections.abc import Iterator, Sequence
from typing import NotRequired, TypedDict

from mlbench_cli.errors import CredentialError, NotFoundError
from providers import doctor
from providers.doctor import Check, Checklist, load_policy, policy_file
from providers.eks.api import MORE_QUOTA, Aws, aws_in, region_of
from providers.eks.discover import discover_clusters
from providers.eks.options import GPU_MACHINES
from providers.eks.provider import QUOTAS

# A read request to each service that clusters need: without read permission, creating anything will fail, too.
SERVICES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("cloudformation", "describe_stacks", {}),
    ("eks", "list_clusters", {}),
    ("ec2", "describe_availability_zones", {}),
    ("autoscaling", "describe_scaling_activities", {"MaxRecords": 1}),
)
# Quotas for each cluster's network: its VPC, and the address of the NAT gateway for machines with several cards.
OTHER_QUOTAS = (
    ("VPCs", "vpc", "L-F678F1CE"),
    ("elastic addresses", "ec2", "L-0263D0A3"),
    ("EKS clusters", "eks", "L-1194D53C"),
)


SIMULATED_AT_ONCE = 50  # actions per request to the policy simulator


class _Condition(TypedDict, total=False):
    StringEquals: dict[str, list[str]]


class Statement(TypedDict):
    """One statement of an IAM policy."""

    Sid: str
    Action: str | list[str]
    Resource: str
    Condition: NotRequired[_Condition]


class Policy(TypedDict):
    """An IAM policy document, with AWS' names."""

    Version: str
    Statement: list[Statement]


def run_checks(project: str | None, location: str | None) -> Iterator[Check]:
    """Check library, region, credentials, permissions, quotas and prices, in this order; yields one line per check.

    Stops at the first failed check on which the next ones depend. Read-only.
    """
    checklist = Checklist("eks")
    yield (found := doctor.check_library(checklist, "boto3", "1.40", "eks"))
    if found.state == "failed":
        return
    region = yield from checklist.ask("region", lambda: region_of(*_place(location)))
    if region is None:
        return
    yield checklist.result("region", region)
    aws = aws_in(region)
    caller = yield from checklist.ask("credentials", lambda: aws.call("sts", "get_caller_identity"))
    if caller is None:
        return
    yield checklist.result("credentials", f"{caller['Arn']}, account {caller['Account']}")
    headers = (caller.get("ResponseMetadata") or {}).get("HTTPHeaders") or {}
    yield doctor.check_clock(checklist, headers.get("date"), time.time())
    yield from _services(checklist, aws)
    yield from _check_rights(checklist, aws, str(caller["Arn"]))
    yield from _check_offers(checklist, aws)
    yield from _quotas(checklist, aws)
    yield from doctor.check_clusters(checklist, lambda: discover_clusters(region))
    yield from doctor.check_prices(checklist, "eks", region)
    yield doctor.check_program(checklist, "aws", "hints name its commands")


def _place(location: str | None) -> tuple[str | None, str | None]:
    """Region and zone of a location; a zone ends with a letter."""
    return (None, location) if location and location[-1].isalpha() else (location, None)


def _check_rights(checklist: Checklist, aws: Aws, caller: str) -> Iterator[Check]:
    """Check every action of policy.json with IAM's policy simulator.

    Each statement is simulated with its own resources and conditions: the simulator's default resource is "*", which a
    permission for `role/mlbench-*` does not cover. It ignores policies of the organization.
    """
    statements = load_policy("eks")["Statement"]
    denied = yield from checklist.ask(
        "rights", lambda: _simulate(aws, find_principal(aws, caller), statements, caller), optional=True
    )
    if denied is None:
        return
    hint, partition = f"The policy to ask an administrator for: {policy_file('eks')}", caller.split(":")[1]
    if partition != "aws":
        hint += f", with arn:{partition}: in place of arn:aws:"
    count = len({action for statement in statements for action in _simulated_actions(statement)})
    found = f"IAM would deny {', '.join(sorted(denied))}" if denied else f"IAM allows all {count} actions"
    yield checklist.result("rights", found, hint if denied else None, missing=bool(denied))


def _simulate(aws: Aws, principal: str, statements: Sequence[Statement], caller: str) -> set[str]:
    """The actions that IAM would deny to the principal on mlbench's resources."""
    denied: set[str] = set()
    for statement in statements:
        actions = _simulated_actions(statement)
        for first in range(0, len(actions), SIMULATED_AT_ONCE):
            for context in _contexts(statement):
                results = aws.pages(
                    *("iam", "simulate_principal_policy", "EvaluationResults"),
                    PolicySourceArn=principal,
                    ActionNames=actions[first : first + SIMULATED_AT_ONCE],
                    ResourceArns=[_example_resource(statement["Resource"], aws.region, caller)],
                    ContextEntries=context,
                )
                denied |= {item["EvalActionName"] for item in results if item["EvalDecision"] != "allowed"}
    return denied


def _simulated_actions(statement: Statement) -> list[str]:
    return [action for action in list_actions(statement) if "*" not in action]


def _example_resource(pattern: str, region: str, caller: str) -> str:
    """An example of a resource that matches a statement's pattern, in the caller's account and partition."""
    if pattern == "*":
        return pattern
    _, partition, _, _, account, _ = caller.split(":", 5)
    _, _, service, place, _, name = pattern.split(":", 5)
    return f"arn:{partition}:{service}:{region if place else ''}:{account}:{name.replace('*', 'doctor')}"


def _contexts(statement: Statement) -> list[list[dict[str, object]]]:
    """Request contexts that satisfy the statement's condition, one list per value; a single empty list without
    conditions."""
    equals = statement.get("Condition", {}).get("StringEquals", {})
    found: list[list[dict[str, object]]] = [
        [{"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}]
        for key, values in equals.items()
        for value in values
    ]
    return found or [[]]


def find_principal(aws: Aws, caller: str) -> str:
    """The ARN whose policies to simulate: that of the session's role, else the caller's own.

    A session's ARN lacks the path of its role, which all roles of IAM Identity Center have, so it is looked up in IAM.
    """
    match = re.fullmatch(r"arn:(aws[a-z-]*):sts::(\d{12}):assumed-role/([^/]+)/.+", caller)
    if not match:
        return caller
    try:
        return str(aws.call("iam", "get_role", RoleName=match[3])["Role"]["Arn"])
    except (CredentialError, NotFoundError):
        return f"arn:{match[1]}:iam::{match[2]}:role/{match[3]}"


def list_actions(statement: Statement) -> list[str]:
    """The actions of one statement; a single action need not be in a list."""
    action = statement["Action"]
    return [action] if isinstance(action, str) else action


def _services(checklist: Checklist, aws: Aws) -> Iterator[Check]:
    for service, operation, parameters in SERVICES:
        question = functools.partial(aws.call, service, operation, **parameters)
        if (yield from checklist.ask(f"API {service}", question)) is not None:
            yield checklist.result(f"API {service}", "allowed")


def _check_offers(checklist: Checklist, aws: Aws) -> Iterator[Check]:
    """Check which Kubernetes versions and GPU machines are available."""
    question = ("eks", "describe_cluster_versions", "clusterVersions")
    versions = yield from checklist.ask("Kubernetes", lambda: aws.pages(*question))
    if versions is not None:
        standard = [item["clusterVersion"] for item in versions if item.get("versionStatus") == "STANDARD_SUPPORT"]
        default = next((item["clusterVersion"] for item in versions if item.get("defaultVersion")), None)
        by_default = f", {default} by default" if default else ""
        yield checklist.result("Kubernetes", f"{', '.join(sorted(standard))} with standard support{by_default}")
    filters = [{"Name": "instance-type", "Values": list(GPU_MACHINES)}]
    asked = ("ec2", "describe_instance_type_offerings", "InstanceTypeOfferings")
    offers = yield from checklist.ask("GPUs", lambda: aws.pages(*asked, Filters=filters), optional=True)
    if offers is None:
        return
    families = sorted({offer["InstanceType"].partition(".")[0] for offer in offers})
    hint = "Choose another --region."
    yield checklist.result("GPUs", f"machines of {', '.join(families) or 'no family'}", hint, missing=not families)


def _quotas(checklist: Checklist, aws: Aws) -> Iterator[Check]:
    by_code = {
        code: (f"{quota.name} vCPUs{way}", "ec2", code)
        for quota in QUOTAS
        for code, way in ((quota.on_demand, ""), (quota.spot, " spot"))
    }
    for name, service, code in [*by_code.values(), *OTHER_QUOTAS]:
        question = functools.partial(
            aws.call, "service-quotas", "get_service_quota", ServiceCode=service, QuotaCode=code
        )
        if answer := (yield from checklist.ask(f"quota {name}", question, optional=True)):
            value = answer["Quota"]["Value"]
            yield checklist.result(
                f"quota {name}", f"{value:g} in all ({code})", MORE_QUOTA, missing=value <= 0, optional=True
            )
