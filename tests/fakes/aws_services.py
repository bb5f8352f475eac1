"""What EC2, auto scaling, IAM and quotas do in the AWS double beyond what moto does."""

import base64
import json
import re
import time
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moto.backends import get_backend

from tests.fakes.aws_answers import Answer, ApiError, json_answer, xml_answer
from tests.fakes.aws_base import ACCOUNT, Base, Request

QUOTAS = {"L-DB2E81BA": 64.0, "L-3819A6DF": 64.0, "L-417A185B": 0.0, "L-7212CCBC": 0.0, "L-1216C47A": 256.0}
# P5 and later have a spot quota of their own, by default 0 as of all GPUs.
QUOTAS |= {"L-C4BD4855": 0.0}
QUOTAS |= {"L-34B43A08": 256.0, "L-F678F1CE": 5.0, "L-0263D0A3": 5.0, "L-1194D53C": 100.0}
SPOT_PRICES = (
    ("g4dn.xlarge", "2026-11-20T10:00:00Z", "0.300000"),
    ("g4dn.xlarge", "2026-11-21T10:00:00Z", "0.210000"),
    ("g4dn.2xlarge", "2026-11-21T09:00:00Z", "0.250000"),
)
ON_DEMAND_PRICES = {
    ("eu-west-1", "g5.xlarge"): ("1.1230000000", "0.0000000000"),
    ("eu-west-1", "m5.large"): ("0.1070000000",),
    ("us-east-1", "p5e.48xlarge"): ("0.0000000000",),  # sold as a capacity block or spot only
}
PRICE_FILTERS = {"operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used"}
HANDLERS = json.loads(Path(__file__).with_name("cloudformation_handlers.json").read_text("utf-8"))
# Newer than moto's data: vCPUs, GPU, number, EFA interfaces, Gbit/s. Source: AWS' pages on instance types, as public
# Terraform modules and installers of 2026-09 have their cards and GPUs (p6, g7e); Gbit/s and vCPUs recalled.
NEWER = {
    "g7.12xlarge": (48, "RTX PRO 4500", 2, 1, 100),
    "g7e.2xlarge": (8, "RTX PRO Server 6000", 1, 0, 50),
    "g7e.24xlarge": (96, "RTX PRO Server 6000", 4, 2, 800),
    "g7e.48xlarge": (192, "RTX PRO Server 6000", 8, 4, 1600),
    "p6-b200.48xlarge": (192, "B200", 8, 8, 3200),
    "p6-b300.48xlarge": (192, "B300", 8, 16, 6400),
    "p6e-gb200.36xlarge": (144, "GB200", 4, 17, 1600),
}
ARM = ("p6e-gb200.36xlarge",)  # Grace: EKS's user guide on UltraServers
PLAIN_FIRST = ("p6-b300.48xlarge",)  # 17 cards, the first without EFA: aws-parallelcluster 7143
REGIONS = ("eu-west-1", "eu-central-1", "eu-north-1", "us-west-2")
ASG_SPACE = "http://autoscaling.amazonaws.com/doc/2011-01-01/"
EC2_SPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"


class ServiceRules(Base):
    def _stack(self, region: str, name: str | None) -> Any:
        stacks = get_backend("cloudformation")[ACCOUNT][region].stacks.values()
        return next((stack for stack in stacks if stack.name == name), None)

    def _autoscaling_DescribeScalingActivities(self, request: Request) -> Answer:
        member, started = "", ""
        if self.rules.get("started"):  # the newest: a machine that was had
            fields = {"ActivityId": "2", "AutoScalingGroupName": "asg", "Cause": "a user asked"}
            fields |= {"StatusCode": "Successful", "StartTime": "2026-11-21T00:00:01Z"}
            started = "<member>" + "".join(f"<{key}>{value}</{key}>" for key, value in fields.items()) + "</member>"
        if said := self.rules.get("launch_fails"):
            fields = {"ActivityId": "1", "AutoScalingGroupName": "asg", "Cause": "a user asked", "StatusCode": "Failed"}
            fields |= {"StartTime": "2026-11-21T00:00:00Z", "StatusMessage": said}
            member = "<member>" + "".join(f"<{key}>{value}</{key}>" for key, value in fields.items()) + "</member>"
        return xml_answer("DescribeScalingActivitiesResponse", ASG_SPACE, f"<Activities>{started}{member}</Activities>")

    def _autoscaling_PutScheduledUpdateGroupAction(self, request: Request) -> Answer:
        given = request.parameters
        start = datetime.fromisoformat(given["StartTime"].replace("Z", "+00:00")).timestamp()
        if start <= time.time():
            raise ApiError("ValidationError", "Given start time is in the past")
        self.schedules[(request.region, given["AutoScalingGroupName"])] = start
        return xml_answer("PutScheduledUpdateGroupActionResponse", ASG_SPACE)

    def _autoscaling_DescribeScheduledActions(self, request: Request) -> Answer:
        name = request.parameters["AutoScalingGroupName"]
        start = self.schedules.get((request.region, name))
        member = ""
        if start is not None:
            moment = datetime.fromtimestamp(start, UTC).isoformat().replace("+00:00", "Z")
            fields = {"AutoScalingGroupName": name, "ScheduledActionName": "mlbench-end", "StartTime": moment}
            fields |= {"MinSize": "0", "MaxSize": "0", "DesiredCapacity": "0"}
            member = "<member>" + "".join(f"<{key}>{value}</{key}>" for key, value in fields.items()) + "</member>"
        body = f"<ScheduledUpdateGroupActions>{member}</ScheduledUpdateGroupActions>"
        return xml_answer("DescribeScheduledActionsResponse", ASG_SPACE, body)

    def fire_schedules(self, later: float) -> list[str]:
        """What AWS has done `later` seconds from now: the groups whose machines are taken away."""
        due = {name for (_, name), start in self.schedules.items() if start <= time.time() + later}
        ended = []
        for region in {region for region, _ in self.schedules}:
            for cluster in self._eks(region).clusters.values():
                for group in cluster.nodegroups.values():
                    if group.resources["autoScalingGroups"][0]["name"] in due:
                        group.scaling_config = {"minSize": 0, "maxSize": 0, "desiredSize": 0}
                        ended.append(group.nodegroup_name)
        return ended

    def _autoscaling_DescribeAutoScalingGroups(self, request: Request) -> Answer:
        """The machines that are there while others cannot be had: `started` of the rules."""
        name = request.parameters.get("AutoScalingGroupNames.member.1", "asg")
        machines = "".join(
            f"<member><InstanceId>i-{number:08x}</InstanceId><LifecycleState>InService</LifecycleState></member>"
            for number in range(int(self.rules.get("started", 0)))
        )
        body = f"<member><AutoScalingGroupName>{name}</AutoScalingGroupName><Instances>{machines}</Instances></member>"
        answer = f"<AutoScalingGroups>{body}</AutoScalingGroups>"
        return xml_answer("DescribeAutoScalingGroupsResponse", ASG_SPACE, answer)

    # --- EC2 and quotas: what moto has not ------------------------------------------------------------------------

    def _ec2_DescribeSpotPriceHistory(self, request: Request) -> Answer:
        wanted = [value for key, value in request.parameters.items() if key.startswith("InstanceType.")]
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><spotPrice>{price}</spotPrice><timestamp>{when}</timestamp></item>"
            for kind, when, price in SPOT_PRICES
            if kind in wanted
        )
        body = f"<spotPriceHistorySet>{items}</spotPriceHistorySet>"
        return xml_answer("DescribeSpotPriceHistoryResponse", EC2_SPACE, body)

    def _ec2_DescribeCapacityReservations(self, request: Request) -> Answer:
        """Those of the rule `reservations`, by ID: the fields of EC2's answer."""
        wanted = request.parameters.get("CapacityReservationId.1", "")
        fields = self.rules.get("reservations", {}).get(wanted)
        if fields is None:
            message = f"The capacity reservation '{wanted}' does not exist."
            raise ApiError("InvalidCapacityReservationId.NotFound", message)
        body = "".join(f"<{key}>{value}</{key}>" for key, value in {"capacityReservationId": wanted, **fields}.items())
        items = f"<capacityReservationSet><item>{body}</item></capacityReservationSet>"
        return xml_answer("DescribeCapacityReservationsResponse", EC2_SPACE, items)

    def _ec2_DescribeInstanceTypeOfferings(self, request: Request) -> Answer:
        """moto's own, or those of the rule `offered`: pairs of type and zone. The system's are in all of its zones."""
        offered = self.rules.get("offered")
        if not offered:
            return self._pass(request)
        offered = [*offered, *(["t3.medium", zone] for zone in dict.fromkeys(zone for _, zone in offered))]
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><location>{zone}</location></item>" for kind, zone in offered
        )
        answer = f"<instanceTypeOfferingSet>{items}</instanceTypeOfferingSet>"
        return xml_answer("DescribeInstanceTypeOfferingsResponse", EC2_SPACE, answer)

    def _sts_GetCallerIdentity(self, request: Request) -> Answer:
        """moto's own, or the first of the rule `caller`: the ARN that STS reports, and that of the user or role."""
        if not (caller := self.rules.get("caller")):
            return self._pass(request)
        fields = f"<Arn>{caller[0]}</Arn><UserId>AIDA</UserId><Account>{ACCOUNT}</Account>"
        return xml_answer("GetCallerIdentityResponse", "https://sts.amazonaws.com/doc/2011-06-15/", fields)

    def _ec2_GetConsoleOutput(self, request: Request) -> Answer:
        """What the rule `console` says, in base64."""
        text = base64.b64encode(str(self.rules.get("console", "")).encode()).decode()
        body = f"<instanceId>{request.parameters['InstanceId']}</instanceId><output>{text}</output>"
        return xml_answer("GetConsoleOutputResponse", EC2_SPACE, body)

    def _ec2_DescribeInstanceTypes(self, request: Request) -> Answer:
        """moto's own, or one of the newer types, in the form of EC2's answer."""
        wanted = request.parameters.get("InstanceType.1", "")
        if wanted not in NEWER:
            return self._pass(request)
        vcpus, gpu, count, efa, speed = NEWER[wanted]
        gpus = f"<gpus><item><name>{gpu}</name><manufacturer>NVIDIA</manufacturer><count>{count}</count></item></gpus>"
        cards = f"<efaSupported>{'true' if efa else 'false'}</efaSupported>"
        cards += f"<efaInfo><maximumEfaInterfaces>{efa}</maximumEfaInterfaces></efaInfo>" if efa else ""
        cards += f"<maximumNetworkCards>{max(1, efa) + (wanted in PLAIN_FIRST)}</maximumNetworkCards>"
        network = f"<networkPerformance>{speed} Gigabit</networkPerformance>{cards}"
        item = (
            f"<instanceType>{wanted}</instanceType><vCpuInfo><defaultVCpus>{vcpus}</defaultVCpus></vCpuInfo>"
            f"<processorInfo><supportedArchitectures><item>{'arm64' if wanted in ARM else 'x86_64'}</item>"
            f"</supportedArchitectures></processorInfo><gpuInfo>{gpus}</gpuInfo><networkInfo>{network}</networkInfo>"
        )
        answer = f"<instanceTypeSet><item>{item}</item></instanceTypeSet>"
        return xml_answer("DescribeInstanceTypesResponse", EC2_SPACE, answer)

    def _ec2_DescribeRegions(self, request: Request) -> Answer:
        """A few of them: moto takes its time with each that is asked for the first time."""
        items = "".join(f"<item><regionName>{name}</regionName></item>" for name in REGIONS)
        return xml_answer("DescribeRegionsResponse", EC2_SPACE, f"<regionInfo>{items}</regionInfo>")

    def _ec2_CreatePlacementGroup(self, request: Request) -> Answer:
        given = request.parameters
        count = sum(1 for name in given if re.fullmatch(r"TagSpecification\.1\.Tag\.\d+\.Key", name))
        tag = "TagSpecification.1.Tag.{}.{}"
        tags = {given[tag.format(n, "Key")]: given[tag.format(n, "Value")] for n in range(1, count + 1)}
        key = (request.region, given["GroupName"])
        self.placements[key] = {"name": key[1], "tags": tags}
        return xml_answer("CreatePlacementGroupResponse", EC2_SPACE, _placement(self.placements[key], "placementGroup"))

    def _ec2_DescribePlacementGroups(self, request: Request) -> Answer:
        field, value = request.parameters["Filter.1.Name"], request.parameters["Filter.1.Value.1"]
        found = [
            item
            for (region, _), item in self.placements.items()
            if region == request.region
            and (value in item["tags"] if field == "tag-key" else item["tags"].get(field.removeprefix("tag:")) == value)
        ]
        items = "".join(_placement(item, "item") for item in found)
        body = f"<placementGroupSet>{items}</placementGroupSet>"
        return xml_answer("DescribePlacementGroupsResponse", EC2_SPACE, body)

    def _ec2_DeletePlacementGroup(self, request: Request) -> Answer:
        name = request.parameters["GroupName"]
        if self.placements.pop((request.region, name), None) is None:
            raise ApiError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
        return xml_answer("DeletePlacementGroupResponse", EC2_SPACE, "<return>true</return>")

    def _pricing_GetProducts(self, request: Request) -> Answer:
        """The form is that of a real answer: texts of JSON in a list, a term without a price, numbers as texts."""
        wanted = {item["Field"]: item["Value"] for item in request.parameters["Filters"]}
        if not PRICE_FILTERS.items() <= wanted.items():
            raise ApiError("InvalidParameterException", "The double knows Linux machines of shared tenancy only.")
        machine, region = wanted["instanceType"], wanted["regionCode"]
        amounts = ON_DEMAND_PRICES.get((region, machine), ())
        listed = []
        for number, amount in enumerate(amounts):
            dimension = {"unit": "Hrs", "pricePerUnit": {"USD": amount}, "description": f"$ per {machine}"}
            term = {"offerTermCode": "JRTCKXETXF", "priceDimensions": {f"SKU{number}.JRTCKXETXF.6YS6EN2CT7": dimension}}
            attributes = {"instanceType": machine, "regionCode": region, "vcpu": "4"}
            product = {"product": {"attributes": attributes}, "terms": {"OnDemand": {f"SKU{number}.JRTCKXETXF": term}}}
            listed.append(json.dumps(product))
        return json_answer({"FormatVersion": "aws_v1", "PriceList": listed})

    def _iam_SimulatePrincipalPolicy(self, request: Request) -> Answer:
        """Allows all but the actions of the rule `denied_actions`, to users and roles; sessions have no policies.

        With the rule `policy`, what that policy allows on the resources and in the context of the request. Without
        ResourceArns the resource is "*". Source: botocore's documentation of SimulatePrincipalPolicy.
        """
        given = request.parameters
        source = given["PolicySourceArn"]
        if ":assumed-role/" in source:
            raise ApiError("InvalidInput", "Invalid Entity Arn: sessions cannot be simulated")
        known = {role.arn for role in get_backend("iam")[ACCOUNT]["aws"].roles.values()}
        if any(arn.endswith(f"/{source.rpartition('/')[2]}") for arn in known) and source not in known:
            raise ApiError("NoSuchEntity", f"The role {source} cannot be found.", 404)
        names = [value for key, value in given.items() if key.startswith("ActionNames.member.")]
        resources = [value for key, value in given.items() if key.startswith("ResourceArns.member.")] or ["*"]
        context = given.get("ContextEntries.member.1.ContextKeyValues.member.1")
        denied = self.rules.get("denied_actions", [])
        members = "".join(
            f"<member><EvalActionName>{name}</EvalActionName>"
            f"<EvalDecision>{'allowed' if decision else 'implicitDeny'}</EvalDecision></member>"
            for name in names
            for decision in [name not in denied and all(self._allows(name, item, context) for item in resources)]
        )
        body = f"<EvaluationResults>{members}</EvaluationResults><IsTruncated>false</IsTruncated>"
        return xml_answer("SimulatePrincipalPolicyResponse", "https://iam.amazonaws.com/doc/2010-05-08/", body)

    def _allows(self, action: str, resource: str, context: str | None = None) -> bool:
        """Whether the rule `policy`, if there is one, allows an action on a resource."""
        policy = self.rules.get("policy")
        if policy is None:
            return True
        for statement in policy["Statement"]:
            listed = statement["Action"]
            values = next(iter(statement.get("Condition", {}).get("StringEquals", {}).values()), None)
            if (
                any(fnmatchcase(action, item) for item in ([listed] if isinstance(listed, str) else listed))
                and (statement["Resource"] == "*" or fnmatchcase(resource, statement["Resource"]))
                and (values is None or context in values)
            ):
                return True
        return False

    def _denied_by_handlers(self, stack: Any, *steps: str) -> str | None:
        """The first action of a resource of the stack that the caller has no right to: CloudFormation acts by them.

        Source: the handlers of CloudFormation's registry schemas; those of EIP, NatGateway, Route, Subnet and
        VPCGatewayAttachment are recalled.
        """
        kinds = {item.cf_resource_type for item in stack.resource_map.values() if hasattr(item, "cf_resource_type")}
        for kind in sorted(kinds):
            for action in (name for step in steps for name in HANDLERS[kind][step]):
                is_service_role = action == "iam:CreateServiceLinkedRole"
                is_role = action.startswith("iam:") and not is_service_role
                resource = f"arn:aws:iam::{ACCOUNT}:role/{stack.name}-Role" if is_role else "*"
                if not self._allows(action, resource, "eks.amazonaws.com" if is_service_role else None):
                    return f"User is not authorized to perform: {action} on resource: {resource} ({kind})"
        return None

    def _servicequotas_GetServiceQuota(self, request: Request) -> Answer:
        code = request.parameters["QuotaCode"]
        values = {**QUOTAS, **self.rules.get("quotas", {})}
        if code not in values:
            raise ApiError(
                "NoSuchResourceException", "The request failed because the specified service does not exist."
            )
        return json_answer(
            {"Quota": {"QuotaCode": code, "QuotaName": f"Running instances ({code})", "Value": values[code]}}
        )


def _placement(item: dict[str, Any], element: str) -> str:
    tags = "".join(f"<item><key>{key}</key><value>{value}</value></item>" for key, value in item["tags"].items())
    body = f"<groupName>{item['name']}</groupName><state>available</state><strategy>cluster</strategy>"
    return f"<{element}>{body}<tagSet>{tags}</tagSet></{element}>"
