"""EC2's instances of the AWS double, as nodes have them."""

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.fakes.aws_base import Base


class Instance(NamedTuple):
    identifier: str
    node: str
    zone: str
    labels: dict[str, str]


def list_instances(region: str, cluster: Any, zone_of: Any) -> Iterator[Instance]:
    """The machines of a cluster's node groups."""
    for group in cluster.nodegroups.values():
        if group.status not in ("ACTIVE", "UPDATING"):
            continue
        for number in range(group.scaling_config["desiredSize"]):
            node = f"{group.nodegroup_name}-{number}"
            identifier = f"i-{zlib.crc32(f'{region}/{node}'.encode()):017x}"
            yield Instance(identifier, node, zone_of(group), dict(group.labels))


class InstanceRules(Base):
    def instances_of(self, region: str, cluster: Any) -> list[Instance]:
        def zone_of(group: Any) -> str:
            return str(self._subnet(region, group.subnets[0]).availability_zone)

        return list(list_instances(region, cluster, zone_of))
