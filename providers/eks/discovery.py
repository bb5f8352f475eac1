"""All that is marked as ours in AWS, in one region or in every one that the account uses."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlbench_cli.errors import CredentialError
from mlbench_cli.model import Cluster
from providers.base import MARK, from_marks
from providers.eks.aws import Aws, aws_in, region_of, tags_of
from providers.eks.nodes import worker_group

AT_ONCE = 8


def discovered(region: str | None) -> list[Cluster]:
    """Every cluster that has left a mark on anything. Regions that one may not use are left out.

    Raises the error of the only region asked for; of many, that of a region that did not answer.
    """
    if region:
        return _in(aws_in(region_of(region)))
    own = aws_in(region_of(None))
    regions = [item["RegionName"] for item in own.call("ec2", "describe_regions")["Regions"]]
    # Clients are made one after the other: boto3's sessions are not for several threads.
    searched = [_prepared(own.region), *(_prepared(name) for name in regions if name != own.region)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda aws: _allowed(aws, own.region), searched))
    return [cluster for clusters in found for cluster in clusters]


def _prepared(region: str) -> Aws:
    aws = aws_in(region)
    for service in ("cloudformation", "eks", "ec2"):
        aws.client(service)
    return aws


def _allowed(aws: Aws, own: str) -> list[Cluster]:
    try:
        return _in(aws)
    except CredentialError:
        if aws.region == own:
            raise
        return []


def _in(aws: Aws) -> list[Cluster]:
    """Stacks come first and go last, so they alone would do, but for one that a person has removed."""
    marks: dict[str, dict[str, str]] = {}
    whole: dict[str, dict[str, Any]] = {}
    stacks = {stack["StackName"]: stack for stack in aws.pages("cloudformation", "describe_stacks", "Stacks")}
    for stack in stacks.values():
        _note(marks, tags_of(stack.get("Tags")))
    for name in aws.pages("eks", "list_clusters", "clusters"):
        described = _described(aws, name)
        if described and MARK in (described.get("tags") or {}):
            whole[name] = described
            _note(marks, described["tags"])
    filters = [{"Name": "tag-key", "Values": [MARK]}]
    kinds = (("describe_vpcs", "Vpcs"), ("describe_launch_templates", "LaunchTemplates"))
    for operation, key in kinds:
        for item in aws.pages("ec2", operation, key, Filters=filters):
            _note(marks, tags_of(item.get("Tags")))
    for group in aws.call("ec2", "describe_placement_groups", Filters=filters)["PlacementGroups"]:
        _note(marks, tags_of(group.get("Tags")))
    return [_cluster(aws, name, tags, whole.get(name), stacks) for name, tags in sorted(marks.items())]


def _note(marks: dict[str, dict[str, str]], tags: Mapping[str, str]) -> None:
    if name := tags.get(MARK):
        marks.setdefault(name, dict(tags))


def _described(aws: Aws, name: str) -> dict[str, Any] | None:
    from providers.eks.control import described

    return described(aws, name)


def _cluster(
    aws: Aws, name: str, tags: Mapping[str, str], plane: dict[str, Any] | None, stacks: Mapping[str, Any]
) -> Cluster:
    details: dict[str, Any] = {"region": aws.region, "location": aws.region, **from_marks(tags)}
    stack = stacks.get(f"mlbench-{name}", {})
    created = stack.get("CreationTime") or (plane or {}).get("createdAt")
    group = _workers(aws, name) if plane else None
    if group:
        details |= group
    ready = bool(plane and plane["status"] == "ACTIVE" and group)
    stamp = created.isoformat(timespec="seconds").replace("+00:00", "Z") if created else ""
    return Cluster(name, "eks", "ready" if ready else "failed", stamp, details)


def _workers(aws: Aws, name: str) -> dict[str, Any] | None:
    from providers.eks.machines import GPU_MACHINES
    from providers.eks.nodes import described_group

    group = described_group(aws, name, worker_group(Cluster(name, "eks")))
    if group is None or group["status"] not in ("ACTIVE", "UPDATING"):
        return None
    machine = (group.get("instanceTypes") or [""])[0]
    known = GPU_MACHINES.get(machine)
    return {
        "nodes": group["scalingConfig"]["desiredSize"],
        "machine_type": machine,
        "gpus_per_node": known.gpus if known else 0,
        "gpu": known.gpu if known else None,
    }
