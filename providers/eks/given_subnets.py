"""Existing subnets (`--subnets`), as described by EC2."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlbench_cli.errors import NotFoundError, UsageError
from providers.eks.api import Aws

PATTERN = r"subnet-[0-9a-f]{8,17}"
BLOCK = "aws ec2 describe-subnets --query 'Subnets[].[SubnetId,VpcId,AvailabilityZone,AvailableIpAddressCount]'"


@dataclass(frozen=True)
class Subnets:
    """The given subnets by zone, in the given order, with their properties."""

    vpc: str
    by_zone: dict[str, str]
    public: frozenset[str]  # zones whose machines get public addresses
    free: dict[str, int]  # free addresses by zone


def split_subnets(text: str | None) -> tuple[str, ...]:
    """The IDs of --subnets. Raises UsageError for invalid IDs, or fewer than two."""
    names = tuple(part.strip() for part in (text or "").split(",") if part.strip())
    wrong = [name for name in names if not re.fullmatch(PATTERN, name)]
    if wrong or len(set(names)) != len(names) or len(names) == 1:
        what = f'"{wrong[0]}" is not the ID of a subnet' if wrong else "EKS needs at least two subnets, in two zones"
        raise UsageError(f"--subnets: {what}.", hint=f"For example --subnets subnet-0a1b2c3d,subnet-4e5f6a7b\n{BLOCK}")
    return names


def find_subnets(aws: Aws, names: Sequence[str]) -> Subnets:
    """Look up the subnets. Raises UsageError unless they belong to one network and are in different zones."""
    try:
        answer = aws.call("ec2", "describe_subnets", SubnetIds=list(names))
    except NotFoundError as error:
        raise NotFoundError(error.message, hint=f"Subnets belong to one region and account: {BLOCK}") from None
    found = {item["SubnetId"]: item for item in answer["Subnets"]}
    subnets = [found[name] for name in names]
    by_zone = {item["AvailabilityZone"]: item["SubnetId"] for item in subnets}
    vpcs = sorted({item["VpcId"] for item in subnets})
    if len(vpcs) > 1 or len(by_zone) < len(names):
        what = f"are of the networks {' and '.join(vpcs)}" if len(vpcs) > 1 else "share a zone"
        raise UsageError(f"--subnets: they {what}; it takes one subnet per zone, all in one network.", hint=BLOCK)
    return Subnets(
        vpcs[0],
        by_zone,
        frozenset(item["AvailabilityZone"] for item in subnets if item.get("MapPublicIpOnLaunch")),
        {item["AvailabilityZone"]: int(item["AvailableIpAddressCount"]) for item in subnets},
    )
