"""CloudFormation in the AWS double: moto makes networks, roles and launch templates; this adds the types of EKS, states
that take some looks, what CloudFormation refuses, and its rollbacks.

Parts of EKS are made when those before them are there, by the same rules as EKS' own requests. ASSUMED is how an
event quotes EKS.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moto.backends import get_backend
from moto.core.common_models import CloudFormationModel
from moto.ec2.models.launch_templates import LaunchTemplate

from tests.fakes.aws_answers import Answer, ApiError, xml_answer
from tests.fakes.aws_base import ACCOUNT, TROUBLE, Request
from tests.fakes.aws_eks import EksRules
from tests.fakes.aws_services import ServiceRules

SPACE = "http://cloudformation.amazonaws.com/doc/2010-05-15/"


def _camel(given: Any) -> Any:
    """Properties in the words of EKS' own requests; labels stay as they are."""
    if isinstance(given, Mapping):
        return {key[0].lower() + key[1:]: value if key == "Labels" else _camel(value) for key, value in given.items()}
    return [_camel(item) for item in given] if isinstance(given, list) else given


class Part:
    """A part of a stack that moto does not know. `rank`: parts of lower ones come first."""

    rank = 0
    action: str
    key: str  # of what the request is about
    logical_resource_id: str
    cf_resource_type: str

    def __init__(self, name: str, given: dict[str, Any], region: str) -> None:
        self.name = name
        self.given = given
        self.region = region
        self.is_begun = False

    @property
    def physical_resource_id(self) -> str:
        return self.name

    @property
    def target(self) -> str:
        return str(self.given.get(self.key, self.name))

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return attr == "ClusterSecurityGroupId"

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Any, account_id: str, region_name: str, **_: Any
    ) -> Any:
        return cls(resource_name, _camel(cloudformation_json["Properties"]), region_name)

    def is_created(self) -> bool:
        return True

    def delete(self, account_id: str, region_name: str) -> None:
        return  # `StackRules` has removed it

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    def begin(self, double: "StackRules", tags: dict[str, str]) -> None:
        raise NotImplementedError

    def is_done(self, double: "StackRules") -> bool:
        """One look later. Raises ApiError for a part that has failed."""
        return True

    def remove(self, double: "StackRules") -> None:
        return


class ClusterPart(Part, CloudFormationModel):
    action = "eks:CreateCluster"
    key = "name"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EKS::Cluster"

    @property
    def physical_resource_id(self) -> str:
        return str(self.given["name"])

    def get_cfn_attribute(self, attribute: str) -> str:
        cluster = get_backend("eks")[ACCOUNT][self.region].clusters.get(self.given["name"])
        return str(cluster.resources_vpc_config["clusterSecurityGroupId"]) if cluster else ""

    def begin(self, double: "StackRules", tags: dict[str, str]) -> None:
        double.create_cluster(self.region, {**self.given, "tags": tags})

    def is_done(self, double: "StackRules") -> bool:
        cluster = double.look_at_cluster(self.region, self.given["name"])
        if cluster is None:
            raise ApiError("NotStabilized", "the cluster was deleted")
        return bool(cluster.status == "ACTIVE")

    def remove(self, double: "StackRules") -> None:
        cluster = double._eks(self.region).clusters.get(self.given["name"])
        if cluster is not None and cluster.nodegroups:
            raise ApiError("ResourceInUseException", "Cluster has nodegroups attached", 409)
        if cluster is not None:
            double.end_cluster(cluster, self.region)


class GroupPart(Part, CloudFormationModel):
    action = "eks:CreateNodegroup"
    key = "nodegroupName"
    rank = 1

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EKS::Nodegroup"

    def begin(self, double: "StackRules", tags: dict[str, str]) -> None:
        double.create_group(self.region, self.given["clusterName"], {**self.given, "tags": tags})

    def is_done(self, double: "StackRules") -> bool:
        group = double.look_at_group(self.region, self.given["clusterName"], self.given["nodegroupName"])
        if group is None:
            raise ApiError("NotStabilized", "the node group was deleted")
        if group.status == "CREATE_FAILED":
            issue = group.health["issues"][0]
            said = f"Code={issue['code']}, Message={issue['message']}, ResourceIds={issue['resourceIds']}"
            raise ApiError("NotStabilized", f"[Issue({said})]")
        return bool(group.status == "ACTIVE")

    def remove(self, double: "StackRules") -> None:
        cluster = double._eks(self.region).clusters.get(self.given["clusterName"])
        group = cluster.nodegroups.get(self.given["nodegroupName"]) if cluster else None
        if group is not None:
            double.end_group(group, self.region)


class AddonPart(Part, CloudFormationModel):
    action = "eks:CreateAddon"
    key = "addonName"
    rank = 2

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EKS::Addon"

    def begin(self, double: "StackRules", tags: dict[str, str]) -> None:
        double.create_addon(self.region, self.given["clusterName"], self.given)

    def is_done(self, double: "StackRules") -> bool:
        found = double.look_at_addon(self.region, self.given["clusterName"], self.given["addonName"])
        return bool(found["status"] == "ACTIVE")

    def remove(self, double: "StackRules") -> None:
        double.addons.pop((self.region, self.given["clusterName"], self.given["addonName"]), None)


class EntryPart(Part, CloudFormationModel):
    action = "eks:CreateAccessEntry"
    key = "principalArn"
    rank = 2

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EKS::AccessEntry"

    def begin(self, double: "StackRules", tags: dict[str, str]) -> None:
        double.create_entry(self.region, self.given["clusterName"], self.given)

    def remove(self, double: "StackRules") -> None:
        double.entries.pop((self.region, self.given["clusterName"], self.given["principalArn"]), None)


class PlacementPart(Part, CloudFormationModel):
    action = "ec2:CreatePlacementGroup"
    key = "groupName"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EC2::PlacementGroup"

    def begin(self, double: "StackRules", tags: dict[str, str]) -> None:
        double.placements[(self.region, self.name)] = {"name": self.name, "tags": tags}

    def remove(self, double: "StackRules") -> None:
        double.placements.pop((self.region, self.name), None)


class StackRules(EksRules, ServiceRules):
    def _cloudformation_CreateStack(self, request: Request) -> Answer:
        if not any(value == "CAPABILITY_IAM" for value in request.parameters.values()):
            raise ApiError("InsufficientCapabilitiesException", "Requires capabilities : [CAPABILITY_IAM]")
        answer = self._pass(request)
        if answer.status < 300:
            stack = self._stack(request.region, request.parameters["StackName"])
            stack.status = "CREATE_IN_PROGRESS"
            stack.client = f"{request.client}/cloudformation"
            self._begin(request.region, "stack", stack.name)
            for part in stack.resource_map.values():
                if isinstance(part, LaunchTemplate):
                    self._ask(stack, request.region, "ec2:CreateLaunchTemplate", part.name, part.versions[0].data)
        return answer

    def _cloudformation_DescribeStacks(self, request: Request) -> Answer:
        name = request.parameters.get("StackName")
        stack = self._stack(request.region, name) if name else None
        if stack and stack.status == "CREATE_IN_PROGRESS":
            self._advance(stack, request.region)
        elif stack and self._look(request.region, "stack", stack.name):
            if stack.status == "ROLLBACK_IN_PROGRESS":
                self._remove_parts(stack)
                stack.status = "ROLLBACK_COMPLETE"
            elif stack.status == "DELETE_IN_PROGRESS":
                self._delete_stack(stack, request.region)
        return self._pass(request)

    def _cloudformation_DeleteStack(self, request: Request) -> Answer:
        stack = self._stack(request.region, request.parameters["StackName"])
        if stack:
            stack.status = "DELETE_IN_PROGRESS"
            self._begin(request.region, "stack", stack.name)
        return xml_answer("DeleteStackResponse", SPACE)

    def _cloudformation_DescribeStackEvents(self, request: Request) -> Answer:
        stack = self._stack(request.region, request.parameters["StackName"])
        if getattr(stack, "failure", None) is None:
            return self._pass(request)
        logical, kind, reason = stack.failure
        fields = {"StackId": stack.stack_id, "EventId": "1", "StackName": stack.name, "LogicalResourceId": logical}
        fields |= {"ResourceType": kind, "Timestamp": "2026-11-21T00:00:00Z"}
        fields |= {"ResourceStatus": "CREATE_FAILED", "ResourceStatusReason": reason}
        text = "".join(f"<{key}>{value}</{key}>" for key, value in fields.items())
        return xml_answer("DescribeStackEventsResponse", SPACE, f"<StackEvents><member>{text}</member></StackEvents>")

    def _parts(self, stack: Any) -> Iterator[Part]:
        made = stack.resource_map._parsed_resources.values()
        yield from sorted((item for item in made if isinstance(item, Part)), key=lambda part: part.rank)

    def _advance(self, stack: Any, region: str) -> None:
        """One look at a stack in creation, and at each of its parts that can be made by now."""
        is_over = self._look(region, "stack", stack.name) or (region, "stack", stack.name) not in self.left
        if failure := self.rules.get("stack_fails") or self._denied_by_handlers(stack, "create", "read"):
            if is_over:
                self._roll_back(stack, region, "Vpc", "AWS::EC2::VPC", failure)
            return
        reached = 0
        for part in self._parts(stack):
            if part.rank > reached and not is_over:
                return
            try:
                if not part.is_begun:
                    part.is_begun = True
                    tags = dict(stack.tags)
                    self._ask(stack, region, part.action, part.target, {**part.given, "tags": tags})
                    part.begin(self, tags)
                    is_over = False
                elif not part.is_done(self):
                    is_over = False
            except ApiError as error:
                said = f'Resource handler returned message: "{error}" (HandlerErrorCode: GeneralServiceException)'
                self._roll_back(stack, region, part.logical_resource_id, part.cf_resource_type, said)
                return
            reached = part.rank
        if is_over:
            stack.status = "CREATE_COMPLETE"

    def _ask(self, stack: Any, region: str, action: str, target: str, parameters: Mapping[str, Any]) -> None:
        """What CloudFormation asks of other services in its client's name. Raises ApiError for trouble with it."""
        log = self.log.setdefault(stack.client, [])
        entry = {"number": len(log), "action": action, "target": target}
        log.append({**entry, "parameters": parameters})
        if trouble := self.find_trouble(stack.client, entry, region):
            code, message, status = TROUBLE[trouble["kind"]]
            raise ApiError(code, trouble.get("message", f"{message} ({code})"), status)

    def _roll_back(self, stack: Any, region: str, logical: str, kind: str, reason: str) -> None:
        stack.failure = (logical, kind, reason)
        stack.status = "ROLLBACK_IN_PROGRESS"
        stack.status_reason = f"The following resource(s) failed to create: [{logical}]."
        self._begin(region, "stack", stack.name)

    def _remove_parts(self, stack: Any) -> None:
        for part in reversed([*self._parts(stack)]):
            if part.is_begun:
                part.remove(self)

    def _delete_stack(self, stack: Any, region: str) -> None:
        if denied := self._denied_by_handlers(stack, "delete"):
            stack.status, stack.status_reason = "DELETE_FAILED", denied
            return
        try:
            self._remove_parts(stack)
        except ApiError as error:
            stack.status, stack.status_reason = "DELETE_FAILED", str(error)
            return
        # moto removes a network with interfaces in it; AWS does not.
        ec2 = get_backend("ec2")[ACCOUNT][region]
        vpcs = self._vpcs_of(stack.name.removeprefix("mlbench-"), region)
        held = [eni.id for eni in ec2.enis.values() if eni.subnet.vpc_id in vpcs]
        held += [group.id for vpc in vpcs for group in self._groups(ec2, vpc)]
        if held:
            stack.status = "DELETE_FAILED"
            stack.status_reason = f"The following resource(s) failed to delete: [Vpc]. {held[0]} depends on it."
            return
        for name, table in list(ec2.route_tables.items()):
            if table.vpc_id in vpcs and table.main_association_id is None:
                del ec2.route_tables[name]  # which moto forgets, and then the network will not go
        get_backend("cloudformation")[ACCOUNT][region].delete_stack(stack.name)
