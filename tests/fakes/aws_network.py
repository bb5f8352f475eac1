"""What stays in a network of the AWS double: endpoints, interfaces that detach slowly, groups that refer to each other.

Rules (`Base.rules`): guardduty, detach_looks, crossed_groups. Sources: docs/development/clouds-assumptions.md.
"""

from dataclasses import dataclass
from typing import Any

from moto.backends import get_backend

from tests.fakes.aws_answers import Answer, ApiError, xml_answer
from tests.fakes.aws_base import ACCOUNT, Base, Request

EC2_SPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
SERVICE = "com.amazonaws.eu-west-1.guardduty-data"


@dataclass
class Endpoint:
    vpc: str
    region: str
    interface: str
    state: str = "available"
    returns: bool = True  # GuardDuty makes it once more when it was deleted


class NetworkRules(Base):
    def __init__(self) -> None:
        super().__init__()
        self.endpoints: dict[str, Endpoint] = {}

    # --- what AWS' own services do --------------------------------------------------------------------------------

    def watch_network(self, region: str, vpc: str, *, returns: bool = True) -> None:
        """GuardDuty sees machines: it puts an endpoint with an interface and a group into their network."""
        if not self.rules.get("guardduty") or any(item.vpc == vpc for item in self.endpoints.values()):
            return
        ec2 = get_backend("ec2")[ACCOUNT][region]
        name = f"GuardDutyManagedSecurityGroup-{vpc}"
        if all(group.name != name for group in ec2.groups[vpc].values()):
            ec2.create_security_group(name, "Associated with VPC endpoint", vpc)
        subnet = next(item for zone in ec2.subnets.values() for item in zone.values() if item.vpc_id == vpc)
        identifier = f"vpce-{len(self.endpoints):08x}{abs(hash(vpc)) % 16**8:08x}"
        eni = ec2.create_network_interface(subnet, "", description=f"VPC Endpoint Interface {identifier}")
        eni.status = "in-use"
        self.endpoints[identifier] = Endpoint(vpc, region, eni.id, returns=returns)

    def cross_groups(self, region: str, vpc: str) -> None:
        """A load balancer's group and that of the control plane let each other's members in."""
        if not self.rules.get("crossed_groups"):
            return
        ec2 = get_backend("ec2")[ACCOUNT][region]
        own = next(group for group in ec2.groups[vpc].values() if group.name.startswith("eks-cluster-sg"))
        other = ec2.create_security_group("k8s-elb-a0", "of a load balancer", vpc)
        for group, source in ((own, other), (other, own)):
            pair = [{"GroupId": source.id}]
            ec2.authorize_security_group_ingress(group.id, "tcp", "30000", "32767", [], source_groups=pair)

    # --- requests -------------------------------------------------------------------------------------------------

    def _ec2_DescribeVpcBlockPublicAccessOptions(self, request: Request) -> Answer:
        mode = self.rules.get("public_access", "off")
        inner = f"<internetGatewayBlockMode>{mode}</internetGatewayBlockMode>"
        body = f"<vpcBlockPublicAccessOptions>{inner}</vpcBlockPublicAccessOptions>"
        return xml_answer("DescribeVpcBlockPublicAccessOptionsResponse", EC2_SPACE, body)

    def _ec2_DescribeVpcEndpoints(self, request: Request) -> Answer:
        wanted = [value for key, value in request.parameters.items() if key.startswith("Filter.1.Value.")]
        for identifier, item in list(self.endpoints.items()):
            if item.state == "deleting" and self._look(item.region, "endpoint", identifier):
                del self.endpoints[identifier]
                get_backend("ec2")[ACCOUNT][item.region].enis.pop(item.interface, None)
                if item.returns:
                    self.watch_network(item.region, item.vpc, returns=False)
        items = "".join(
            f"<item><vpcEndpointId>{key}</vpcEndpointId><vpcId>{item.vpc}</vpcId><state>{item.state}</state>"
            f"<vpcEndpointType>Interface</vpcEndpointType><serviceName>{SERVICE}</serviceName></item>"
            for key, item in self.endpoints.items()
            if item.vpc in wanted and item.region == request.region
        )
        return xml_answer("DescribeVpcEndpointsResponse", EC2_SPACE, f"<vpcEndpointSet>{items}</vpcEndpointSet>")

    def _ec2_DeleteVpcEndpoints(self, request: Request) -> Answer:
        for key, value in request.parameters.items():
            if key.startswith("VpcEndpointId") and value in self.endpoints:
                self.endpoints[value].state = "deleting"
                self._begin(request.region, "endpoint", value)
        return xml_answer("DeleteVpcEndpointsResponse", EC2_SPACE, "<unsuccessful/>")

    def _ec2_DescribeNetworkInterfaces(self, request: Request) -> Answer:
        for eni in get_backend("ec2")[ACCOUNT][request.region].enis.values():
            if eni.status == "detaching" and self._look(request.region, "eni", eni.id):
                eni.status = "available"
        return self._pass(request)

    def _ec2_DeleteNetworkInterface(self, request: Request) -> Answer:
        name = request.parameters["NetworkInterfaceId"]
        eni = get_backend("ec2")[ACCOUNT][request.region].enis.get(name)
        if eni is not None and eni.status != "available":
            raise ApiError("InvalidParameterValue", f"Network interface '{name}' is currently in use.")
        return self._pass(request)

    def _ec2_DeleteSecurityGroup(self, request: Request) -> Answer:
        ec2 = get_backend("ec2")[ACCOUNT][request.region]
        identifier = request.parameters["GroupId"]
        group = next((item for items in ec2.groups.values() for item in items.values() if item.id == identifier), None)
        if group is not None:
            others = [item for item in ec2.groups[str(group.vpc_id)].values() if item.id != identifier]
            sources = {
                source.get("GroupId") for item in others for rule in item.ingress_rules for source in _pairs(rule)
            }
            guarded = group.name.startswith("GuardDuty") and any(
                item.vpc == group.vpc_id for item in self.endpoints.values()
            )
            if identifier in sources or guarded:
                raise ApiError("DependencyViolation", f"resource {identifier} has a dependent object")
        return self._pass(request)

    def _release(self, eni: Any) -> None:
        """The machine has gone; its interface detaches in its own time."""
        if not (looks := int(self.rules.get("detach_looks", 0))):
            eni.status = "available"
            return
        eni.status = "detaching"
        thing = (eni.subnet.availability_zone[:-1], "eni", eni.id)
        self._begin(*thing)
        self.left[thing] = looks


def _pairs(rule: Any) -> list[dict[str, str]]:
    pairs: list[dict[str, str]] = list(rule.source_groups)
    return pairs
