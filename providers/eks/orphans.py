"""Finds volumes and load balancers left in AWS by a cluster's workloads, by Kubernetes' tags."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.eks.aws import Aws, aws_in, region_of, tags_of
from providers.workloads import OrphanedResource, WorkloadObject

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
