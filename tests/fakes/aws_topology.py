"""EC2's instances of the AWS double, as nodes have them, and their places in its network.

Rules (`Base.rules`): topology_labels (false: the cloud controller was throttled, and labels no node), topology_region
(false: the region does not tell), booting (instances that do not run yet). Sources: EC2's API reference, AWS' page on
the prerequisites of the instance topology, kubernetes/cloud-provider-aws; docs/clouds-assumptions.md.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.fakes.aws_answers import Answer, ApiError, xml_answer
from tests.fakes.aws_base import Base, Request

EC2_SPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
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


class TopologyRules(Base):
    def instances_of(self, region: str, cluster: Any) -> list[Instance]:
        def zone_of(group: Any) -> str:
            return str(self._subnet(region, group.subnets[0]).availability_zone)

        return list(list_instances(region, cluster, zone_of))

    def _ec2_DescribeInstanceTopology(self, request: Request) -> Answer:
        """The words of the refusals are ASSUMED."""
        given = request.parameters
        if not self.rules.get("topology_region", True):
            raise ApiError("UnsupportedOperation", "The operation is not supported in this Region.")
        asked = [value for key, value in given.items() if key.startswith("InstanceId.")]
        if len(asked) > 100:
            raise ApiError("InvalidParameterValue", "The maximum number of instance IDs is 100.")
        if asked and "MaxResults" in given:
            raise ApiError("InvalidParameterCombination", "MaxResults and InstanceId exclude each other.")
        size = int(given.get("MaxResults", 20))
        if not 1 <= size <= 100:
            raise ApiError("InvalidParameterValue", "MaxResults has to be from 1 to 100.")
        clusters = self._eks(request.region).clusters.values()
        there = {item.identifier: item for cluster in clusters for item in self.instances_of(request.region, cluster)}
        if unknown := set(asked) - set(there):
            raise ApiError("InvalidInstanceID.NotFound", f"The instance ID '{min(unknown)}' does not exist")
        found = [item for item in there.values() if item.layers and (not asked or item.identifier in asked)]
        start = int(given.get("NextToken", 0))
        page = found if asked else found[start : start + size]
        more = "" if asked or start + size >= len(found) else f"<nextToken>{start + size}</nextToken>"
        booting = int(self.rules.get("booting", 0))
        items = "".join(_item(item, is_running=item.number >= booting) for item in page)
        return xml_answer("DescribeInstanceTopologyResponse", EC2_SPACE, f"<instanceSet>{items}</instanceSet>{more}")


def _item(instance: Instance, *, is_running: bool) -> str:
    layers = "".join(f"<item>{layer}</item>" for layer in instance.layers) if is_running else ""
    return (
        f"<item><instanceId>{instance.identifier}</instanceId><instanceType>{instance.machine}</instanceType>"
        f"<networkNodeSet>{layers}</networkNodeSet><availabilityZone>{instance.zone}</availabilityZone></item>"
    )
