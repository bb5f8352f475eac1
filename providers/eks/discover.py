"""What there is in an account: mlbench's clusters, by their tags, in one region or in all regions that it uses; what
workloads have left there, and whether a cluster can be created (`mlbench doctor eks`).
"""

import functools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NotRequired, TypedDict

from mlbench_cli.errors import CredentialError, MlbenchError, NotFoundError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers import doctor, machines
from providers.base import (
    CLUSTER_TAG,
    EXPIRES_TAG,
    ROLE_LABEL,
    WORKER,
    PartialSearchError,
    RightsError,
    details_from_tags,
    expiry_of,
)
from providers.doctor import Check, Checklist, Topic, load_policy
from providers.eks.api import ALWAYS_ON, Aws, account_of, aws_in, default_region, find_raw_cluster, region_of, tags_of
from providers.eks.options import GPU_MACHINES
from providers.eks.quota import QUOTAS, raise_quota
from providers.eks.resources import find_raw_group, worker_group
from providers.workloads import OrphanedResource, WorkloadObject

MAX_PARALLEL_REGIONS = 8


def discover_clusters(region: str | None) -> list[Cluster]:
    """All clusters whose tag is on any resource. Skips regions that the account may not use.

    Raises the error of a single region, or of the caller's own; PartialSearchError if others failed.
    """
    if region:
        return _search_region(aws_in(region_of(region)))
    own = aws_in(region_of(default_region() or ALWAYS_ON))  # credentials without a region may have clusters, too
    regions = [item["RegionName"] for item in own.call("ec2", "describe_regions")["Regions"]]
    # Create the clients one after the other: boto3's sessions are not thread-safe.
    searched = [_with_clients(own.region), *(_with_clients(name) for name in regions if name != own.region)]
    with ThreadPoolExecutor(MAX_PARALLEL_REGIONS) as pool:
        answers = list(pool.map(lambda aws: _search_if_allowed(aws, own.region), searched))
    found = [cluster for answer in answers if not isinstance(answer, MlbenchError) for cluster in answer]
    silent = [
        (aws.region, error) for aws, error in zip(searched, answers, strict=True) if isinstance(error, MlbenchError)
    ]
    if silent:
        names = ", ".join(region for region, _ in silent)
        error = silent[0][1]
        raise PartialSearchError(f"AWS did not answer for {names}: {error.message}", found, hint=error.hint)
    return found


def _with_clients(region: str) -> Aws:
    aws = aws_in(region)
    for service in ("cloudformation", "eks", "ec2"):
        aws.client(service)
    return aws


def _search_if_allowed(aws: Aws, own: str) -> list[Cluster] | MlbenchError:
    """The clusters of a region, or its error. Raises the error of the caller's own region."""
    try:
        return _search_region(aws)
    except MlbenchError as error:
        if aws.region == own:
            raise
        return [] if isinstance(error, CredentialError) else error


def _search_region(aws: Aws) -> list[Cluster]:
    """The clusters of a region. Stacks are created first and deleted last; other resources reveal clusters whose stack
    was deleted manually."""
    tags_by_cluster: dict[str, dict[str, str]] = {}
    whole: dict[str, dict[str, Any]] = {}
    stacks = {stack["StackName"]: stack for stack in aws.pages("cloudformation", "describe_stacks", "Stacks")}
    for stack in stacks.values():
        _note(tags_by_cluster, tags_of(stack.get("Tags")))
    for name in aws.pages("eks", "list_clusters", "clusters"):
        try:
            described = find_raw_cluster(aws, name)
        except RightsError:
            continue  # somebody else's
        if described and CLUSTER_TAG in (described.get("tags") or {}):
            whole[name] = described
            _note(tags_by_cluster, described["tags"])
    filters = [{"Name": "tag-key", "Values": [CLUSTER_TAG]}]
    kinds = (("describe_vpcs", "Vpcs"), ("describe_launch_templates", "LaunchTemplates"))
    for operation, key in kinds:
        for item in aws.pages("ec2", operation, key, Filters=filters):
            _note(tags_by_cluster, tags_of(item.get("Tags")))
    for group in aws.call("ec2", "describe_placement_groups", Filters=filters)["PlacementGroups"]:
        _note(tags_by_cluster, tags_of(group.get("Tags")))
    account = account_of(aws) if tags_by_cluster else ""
    return [
        _to_cluster(aws, account, name, tags, whole.get(name), stacks) for name, tags in sorted(tags_by_cluster.items())
    ]


def _note(tags_by_cluster: dict[str, dict[str, str]], tags: Mapping[str, str]) -> None:
    if name := tags.get(CLUSTER_TAG):
        known = tags_by_cluster.setdefault(name, dict(tags))
        # Repeating `create-cluster` with another --ttl changes only the EKS cluster's tag, so the latest expiry counts.
        if (expiry_of(tags) or 0) > (expiry_of(known) or 0):
            known[EXPIRES_TAG] = tags[EXPIRES_TAG]


def _to_cluster(
    aws: Aws, account: str, name: str, tags: Mapping[str, str], plane: dict[str, Any] | None, stacks: Mapping[str, Any]
) -> Cluster:
    details: dict[str, Any] = {"region": aws.region, "location": aws.region, **details_from_tags(tags)}
    stack = stacks.get(f"mlbench-{name}", {})
    created = stack.get("CreationTime") or (plane or {}).get("createdAt")
    group = _workers(aws, name) if plane else None
    if group:
        details |= group
    ready = bool(plane and plane["status"] == "ACTIVE" and group)
    stamp = created.isoformat(timespec="seconds").replace("+00:00", "Z") if created else ""
    state = "ready" if ready else "failed"
    return Cluster(name, "eks", state, stamp, details, account, aws.region)


def _workers(aws: Aws, name: str) -> dict[str, Any] | None:
    group = find_raw_group(aws, name, worker_group(Cluster(name, "eks")))
    if group is None or group["status"] not in ("ACTIVE", "UPDATING", "DEGRADED"):
        return None
    machine = (group.get("instanceTypes") or [""])[0]
    known = GPU_MACHINES.get(machine)
    return {
        "nodes": group["scalingConfig"]["desiredSize"],
        "machine_type": machine,
        "gpus_per_node": known.gpus if known else 0,
        "gpu": known.gpu if known else None,
        "node_selector": {ROLE_LABEL: WORKER},
    }


# --- volumes and load balancers that workloads have left, by Kubernetes' tags ---------------------------------------


MAX_BALANCERS_PER_CALL = 20  # load balancers per request for tags


def list_orphans(cluster: Cluster, objects: Sequence[WorkloadObject]) -> list[OrphanedResource]:
    """The resources that still exist. Raises MlbenchError if AWS cannot be asked."""
    region = _region(cluster)
    aws = aws_in(region)
    return [
        *_list_volumes(aws, cluster.name, objects),
        *_list_balancers(aws, cluster.name),
        *_list_classic_balancers(aws, cluster.name),
    ]


def orphan_command(cluster: Cluster, item: WorkloadObject | None) -> str:
    """The `aws` command that deletes the volume or lists the load balancer; without an item, lists all candidates."""
    region = _region(cluster)
    if item is not None and item.kind == "PersistentVolume" and item.handle:
        return _delete_volume(region, item.handle)
    if item is not None and item.handle:
        query = f"LoadBalancers[?DNSName=='{item.handle}'].LoadBalancerArn"
        return f'aws elbv2 describe-load-balancers --region {region} --query "{query}"'
    filters = f"Name=tag-key,Values=kubernetes.io/cluster/{cluster.name}"
    return (
        f"aws ec2 describe-volumes --region {region} --filters {filters}; "
        f"aws elbv2 describe-load-balancers --region {region}; aws elb describe-load-balancers --region {region}"
    )


def _list_volumes(aws: Aws, name: str, objects: Sequence[WorkloadObject]) -> list[OrphanedResource]:
    handles = [item.handle for item in objects if item.kind == "PersistentVolume" and item.handle.startswith("vol-")]
    filters: list[dict[str, Any]] = [{"Name": "tag-key", "Values": [f"kubernetes.io/cluster/{name}"]}]
    found = aws.pages("ec2", "describe_volumes", "Volumes", Filters=filters)
    if handles:
        filters = [{"Name": "volume-id", "Values": handles}]
        found += aws.pages("ec2", "describe_volumes", "Volumes", Filters=filters)
    volumes = {volume["VolumeId"]: volume for volume in found if volume["State"] not in ("deleting", "deleted")}
    return [
        OrphanedResource("volume", volume, f"{raw['Size']} GB, {raw['State']}", _delete_volume(aws.region, volume))
        for volume, raw in volumes.items()
    ]


def _list_balancers(aws: Aws, name: str) -> list[OrphanedResource]:
    found = {item["LoadBalancerArn"]: item for item in aws.pages("elbv2", "describe_load_balancers", "LoadBalancers")}
    orphans = []
    for tagged in _list_tagged(aws, name, "elbv2", "ResourceArns", list(found)):
        arn = tagged["ResourceArn"]
        remove = f"aws elbv2 delete-load-balancer --region {aws.region} --load-balancer-arn {arn}"
        orphans.append(OrphanedResource("load balancer", found[arn]["LoadBalancerName"], found[arn]["Type"], remove))
    return orphans


def _list_classic_balancers(aws: Aws, name: str) -> list[OrphanedResource]:
    found = aws.pages("elb", "describe_load_balancers", "LoadBalancerDescriptions")
    orphans = []
    for tagged in _list_tagged(aws, name, "elb", "LoadBalancerNames", [item["LoadBalancerName"] for item in found]):
        balancer = tagged["LoadBalancerName"]
        remove = f"aws elb delete-load-balancer --region {aws.region} --load-balancer-name {balancer}"
        orphans.append(OrphanedResource("load balancer", balancer, "classic", remove))
    return orphans


def _list_tagged(aws: Aws, name: str, service: str, key: str, balancers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The tag descriptions of `balancers` with the cluster's tag, with as few calls as possible."""
    for first in range(0, len(balancers), MAX_BALANCERS_PER_CALL):
        answer = aws.call(service, "describe_tags", **{key: balancers[first : first + MAX_BALANCERS_PER_CALL]})
        for tagged in answer["TagDescriptions"]:
            if _is_of(name, tags_of(tagged.get("Tags"))):
                yield tagged


def _is_of(name: str, tags: Mapping[str, str]) -> bool:
    """Whether a tag of Kubernetes' controller, AWS' controller, or EKS Auto Mode names the cluster."""
    return f"kubernetes.io/cluster/{name}" in tags or name in (
        tags.get("elbv2.k8s.aws/cluster"),
        tags.get("eks:eks-cluster-name"),
    )


def _delete_volume(region: str, volume: str) -> str:
    return f"aws ec2 delete-volume --region {region} --volume-id {volume}"


def _region(cluster: Cluster) -> str:
    return cluster.location or ClusterDetails.of(cluster).region or region_of(None)


# --- mlbench doctor eks -----------------------------------------------------------------------------------------------

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


def check_account(project: str | None, location: str | None) -> Iterator[Check]:
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
    caller = yield from checklist.ask(Topic.CREDENTIALS, lambda: aws.call("sts", "get_caller_identity"))
    if caller is None:
        return
    yield checklist.result(Topic.CREDENTIALS, f"{caller['Arn']}, account {caller['Account']}")
    headers = (caller.get("ResponseMetadata") or {}).get("HTTPHeaders") or {}
    yield doctor.check_clock(checklist, headers.get("date"), time.time())
    yield from _services(checklist, aws)
    yield from _check_rights(checklist, aws, str(caller["Arn"]))
    yield from _check_offers(checklist, aws)
    yield from _quotas(checklist, aws)
    yield from doctor.check_clusters(checklist, lambda: discover_clusters(region))
    yield from machines.check_prices(checklist, "eks", region)
    yield doctor.check_program(checklist, "aws")


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
        Topic.RIGHTS, lambda: _simulate(aws, find_principal(aws, caller), statements, caller), optional=True
    )
    if denied is None:
        return
    partition = caller.split(":")[1]
    note = "" if partition == "aws" else f", with arn:{partition}: in place of arn:aws:"
    count = len({action for statement in statements for action in _simulated_actions(statement)})
    yield checklist.rights(sorted(denied), f"IAM allows all {count} actions", "IAM would deny", note)


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
    except (RightsError, NotFoundError):
        return f"arn:{match[1]}:iam::{match[2]}:role/{match[3]}"


def list_actions(statement: Statement) -> list[str]:
    """The actions of one statement; a single action need not be in a list."""
    action = statement["Action"]
    return [action] if isinstance(action, str) else action


def _services(checklist: Checklist, aws: Aws) -> Iterator[Check]:
    for service, operation, parameters in SERVICES:
        question = functools.partial(aws.call, service, operation, **parameters)
        if (yield from checklist.ask(Topic.API, question, of=service)) is not None:
            yield checklist.result(Topic.API, "allowed", of=service)


def _check_offers(checklist: Checklist, aws: Aws) -> Iterator[Check]:
    """Check which Kubernetes versions and GPU machines are available."""
    question = ("eks", "describe_cluster_versions", "clusterVersions")
    versions = yield from checklist.ask(Topic.KUBERNETES, lambda: aws.pages(*question))
    if versions is not None:
        standard = [item["clusterVersion"] for item in versions if item.get("versionStatus") == "STANDARD_SUPPORT"]
        default = next((item["clusterVersion"] for item in versions if item.get("defaultVersion")), None)
        by_default = f", {default} by default" if default else ""
        yield checklist.result(Topic.KUBERNETES, f"{', '.join(sorted(standard))} with standard support{by_default}")
    filters = [{"Name": "instance-type", "Values": list(GPU_MACHINES)}]
    asked = ("ec2", "describe_instance_type_offerings", "InstanceTypeOfferings")
    offers = yield from checklist.ask(Topic.GPUS, lambda: aws.pages(*asked, Filters=filters), optional=True)
    if offers is None:
        return
    families = sorted({offer["InstanceType"].partition(".")[0] for offer in offers})
    hint = "Choose another --region."
    yield checklist.result(Topic.GPUS, f"machines of {', '.join(families) or 'no family'}", hint, missing=not families)


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
        if answer := (yield from checklist.ask(Topic.QUOTA, question, of=name, optional=True)):
            quota = machines.Quota(name, answer["Quota"]["Value"], None)
            yield from machines.check_quotas(checklist, [quota], raise_quota(aws, service, code, "N"))
