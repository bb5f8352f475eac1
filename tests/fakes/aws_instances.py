"""EC2's instances of the AWS double, as nodes have them, and their places in its network.

Sources: AWS' page on the prerequisites of the instance topology, kubernetes/cloud-provider-aws.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.fakes.aws_base import Base

THREE_LAYERS = re.compile(r"(g6e|g7e|hpc\d[a-z]+|p3dn|p4de?|p5|p5en?|trn\d[a-z]*)\..+")
FOUR_LAYERS = re.compile(r"(p6-b\d+|p6e-.+)\..+")
PER_SWITCH = 2  # instances below one network node of the last layer


class Instance(NamedTuple):
    identifier: str
    node: str
    machine: str
    zone: str
    labels: dict[str, str]
    number: int

    @property
    def layers(self) -> list[str]:
        """The network nodes above it, the farthest first; none of a type that EC2 tells nothing of."""
        count = 4 if FOUR_LAYERS.fullmatch(self.machine) else 3 if THREE_LAYERS.fullmatch(self.machine) else 0
        spine = [f"nn-{layer}{zlib.crc32(self.zone.encode()):08x}" for layer in range(1, count)]
        return [*spine, f"nn-{count}{self.number // PER_SWITCH:08x}"] if count else []


def list_instances(region: str, cluster: Any, zone_of: Any) -> Iterator[Instance]:
    """The machines of a cluster's node groups."""
    for group in cluster.nodegroups.values():
        if group.status not in ("ACTIVE", "UPDATING"):
            continue
        machine = next(iter(group.instance_types), getattr(group, "template_type", ""))
        for number in range(group.scaling_config["desiredSize"]):
            node = f"{group.nodegroup_name}-{number}"
            identifier = f"i-{zlib.crc32(f'{region}/{node}'.encode()):017x}"
            yield Instance(identifier, node, machine, zone_of(group), dict(group.labels), number)


class InstanceRules(Base):
    def instances_of(self, region: str, cluster: Any) -> list[Instance]:
        def zone_of(group: Any) -> str:
            return str(self._subnet(region, group.subnets[0]).availability_zone)

        return list(list_instances(region, cluster, zone_of))
