"""What workloads on a cluster have left in AWS: volumes and load balancers, by the tags that Kubernetes gives them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlbench_cli.model import Cluster
from providers.eks.aws import Aws, aws_in, region_of, tags_of
from providers.leavings import Item, Leftover

AT_ONCE = 20  # load balancers whose tags are told in one answer


def left(cluster: Cluster, seen: Sequence[Item]) -> list[Leftover]:
    """What is there. Raises MlbenchError where AWS does not tell."""
    region = _region(cluster)
    aws = aws_in(region)
    return [*_volumes(aws, cluster.name, seen), *_balancers(aws, cluster.name), *_classic(aws, cluster.name)]


def command(cluster: Cluster, item: Item | None) -> str:
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


def _volumes(aws: Aws, name: str, seen: Sequence[Item]) -> list[Leftover]:
    handles = [item.handle for item in seen if item.kind == "PersistentVolume" and item.handle.startswith("vol-")]
    filters: list[dict[str, Any]] = [{"Name": "tag-key", "Values": [f"kubernetes.io/cluster/{name}"]}]
    found = aws.pages("ec2", "describe_volumes", "Volumes", Filters=filters)
    if handles:
        filters = [{"Name": "volume-id", "Values": handles}]
        found += aws.pages("ec2", "describe_volumes", "Volumes", Filters=filters)
    volumes = {volume["VolumeId"]: volume for volume in found if volume["State"] not in ("deleting", "deleted")}
    return [
        Leftover("volume", volume, f"{told['Size']} GB, {told['State']}", _delete_volume(aws.region, volume))
        for volume, told in volumes.items()
    ]


def _balancers(aws: Aws, name: str) -> list[Leftover]:
    found = {item["LoadBalancerArn"]: item for item in aws.pages("elbv2", "describe_load_balancers", "LoadBalancers")}
    told = []
    for tagged in _tagged(aws, name, "elbv2", "ResourceArns", list(found)):
        arn = tagged["ResourceArn"]
        remove = f"aws elbv2 delete-load-balancer --region {aws.region} --load-balancer-arn {arn}"
        told.append(Leftover("load balancer", found[arn]["LoadBalancerName"], found[arn]["Type"], remove))
    return told


def _classic(aws: Aws, name: str) -> list[Leftover]:
    found = aws.pages("elb", "describe_load_balancers", "LoadBalancerDescriptions")
    told = []
    for tagged in _tagged(aws, name, "elb", "LoadBalancerNames", [item["LoadBalancerName"] for item in found]):
        balancer = tagged["LoadBalancerName"]
        remove = f"aws elb delete-load-balancer --region {aws.region} --load-balancer-name {balancer}"
        told.append(Leftover("load balancer", balancer, "classic", remove))
    return told


def _tagged(aws: Aws, name: str, service: str, key: str, balancers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The descriptions of those `balancers` that bear the cluster's tag; so many are asked for at once as may be."""
    for first in range(0, len(balancers), AT_ONCE):
        answer = aws.call(service, "describe_tags", **{key: balancers[first : first + AT_ONCE]})
        for tagged in answer["TagDescriptions"]:
            if _is_of(name, tags_of(tagged.get("Tags"))):
                yield tagged


def _is_of(name: str, tags: Mapping[str, str]) -> bool:
    """By the tag of Kubernetes' own controller, of AWS' controller, or of EKS' auto mode."""
    return f"kubernetes.io/cluster/{name}" in tags or name in (
        tags.get("elbv2.k8s.aws/cluster"),
        tags.get("eks:eks-cluster-name"),
    )


def _delete_volume(region: str, volume: str) -> str:
    return f"aws ec2 delete-volume --region {region} --volume-id {volume}"


def _region(cluster: Cluster) -> str:
    return str(cluster.details.get("region") or region_of(None))
