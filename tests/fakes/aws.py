"""AWS as one local HTTP server: moto, behind a layer with what moto lacks. `python -m tests.fakes.aws` prints its port.

moto keeps networks, roles, stacks, clusters and node groups. The layer adds states that take some looks, add-ons,
access entries, versions, quotas, placement groups, what EKS and its machines leave in a network, the Kubernetes API of
each cluster (`aws_kube`), a log of requests, and trouble. One client of several is known by its access key.

Assumptions, none of them checked against the real thing, are marked with ASSUMED.
"""

import base64
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote

os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"

from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.fakes.aws_errors import Answer, error_answer, json_answer, xml_answer
from tests.fakes.aws_kube import KubeSide

ACCOUNT = "123456789012"
LOOKS = 1
SCOPE = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/")
EKS_ROUTES: tuple[tuple[str, str, str], ...] = (
    ("GET", r"/clusters", "ListClusters"),
    ("POST", r"/clusters", "CreateCluster"),
    ("GET", r"/cluster-versions", "DescribeClusterVersions"),
    ("GET", r"/clusters/([^/]+)", "DescribeCluster"),
    ("DELETE", r"/clusters/([^/]+)", "DeleteCluster"),
    ("POST", r"/clusters/([^/]+)/node-groups", "CreateNodegroup"),
    ("GET", r"/clusters/([^/]+)/node-groups/([^/]+)", "DescribeNodegroup"),
    ("DELETE", r"/clusters/([^/]+)/node-groups/([^/]+)", "DeleteNodegroup"),
    ("POST", r"/clusters/([^/]+)/node-groups/([^/]+)/update-config", "UpdateNodegroupConfig"),
    ("POST", r"/clusters/([^/]+)/addons", "CreateAddon"),
    ("GET", r"/clusters/([^/]+)/addons/([^/]+)", "DescribeAddon"),
    ("DELETE", r"/clusters/([^/]+)/addons/([^/]+)", "DeleteAddon"),
    ("POST", r"/clusters/([^/]+)/access-entries", "CreateAccessEntry"),
    ("POST", r"/clusters/([^/]+)/access-entries/([^/]+)/access-policies", "AssociateAccessPolicy"),
    ("GET", r"/clusters/([^/]+)/access-entries/([^/]+)/access-policies", "ListAssociatedAccessPolicies"),
)
VERSIONS = {
    "1.33": "STANDARD_SUPPORT",
    "1.34": "STANDARD_SUPPORT",
    "1.35": "STANDARD_SUPPORT",
    "1.30": "EXTENDED_SUPPORT",
}
QUOTAS = {"L-DB2E81BA": 64.0, "L-3819A6DF": 64.0, "L-417A185B": 0.0, "L-7212CCBC": 0.0, "L-1216C47A": 256.0}


class Refused(Exception):
    """An error that AWS would answer with."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


class Request:
    """One call, as far as the layer has to know it."""

    def __init__(self, environ: dict[str, Any]) -> None:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        self.body = environ["wsgi.input"].read(length) if length else b""
        self.environ = environ
        scope = SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
        self.client, self.region, self.service = scope.groups() if scope else ("?", "?", "?")
        self.path = environ.get("RAW_URI", environ["PATH_INFO"]).partition("?")[0]
        self.parts: list[str] = []
        self.parameters: dict[str, Any] = {}
        self.action = self._action()

    def _action(self) -> str:
        if self.service == "eks":
            if self.body:
                self.parameters = json.loads(self.body)
            for method, pattern, name in EKS_ROUTES:
                match = re.fullmatch(pattern, self.path)
                if match and method == self.environ["REQUEST_METHOD"]:
                    self.parts = [unquote(part) for part in match.groups()]
                    return name
        if "HTTP_X_AMZ_TARGET" in self.environ:
            self.parameters = json.loads(self.body or b"{}")
            return str(self.environ["HTTP_X_AMZ_TARGET"]).rpartition(".")[2]
        self.parameters = dict(parse_qsl(self.body.decode()))
        return str(self.parameters.get("Action", "?"))

    @property
    def target(self) -> str:
        """What the call is about, for the log."""
        keys = ("StackName", "LaunchTemplateName", "LaunchTemplateName.1", "GroupName", "Filter.1.Value.1")
        found = self.parameters.get("nodegroupName") or self.parameters.get("addonName") or self.parameters.get("name")
        return str(
            found or next((self.parameters[key] for key in keys if key in self.parameters), "/".join(self.parts))
        )


class AwsDouble:
    """The WSGI application. `looks`: how often something has to be asked for until it is made, or gone."""

    def __init__(self) -> None:
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.lock = threading.RLock()
        self.port = 0
        self.rules: dict[str, Any] = {"looks": LOOKS, "delete_while_creating": True, "no_capacity": []}
        self.log: dict[str, list[dict[str, Any]]] = {}
        self.trouble: dict[str, list[dict[str, Any]]] = {}
        self.left: dict[tuple[str, ...], int] = {}  # looks until a state ends, by thing
        self.addons: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.entries: dict[tuple[str, str, str], list[str]] = {}
        self.placements: dict[tuple[str, str], dict[str, Any]] = {}
        self.tokens: dict[str, Answer] = {}
        self.kube = KubeSide(self)

    # --- the way of a request -------------------------------------------------------------------------------------

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"]
        if path.startswith("/_double/"):
            with self.lock:
                answer = self._control(path.removeprefix("/_double/"), environ)
        elif path.startswith("/k8s/"):
            with self.lock:
                answer = self.kube.answer(environ)
        else:
            answer = self._aws(environ)
        if answer is None:  # cut off
            import socket

            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            answer = Answer(500, b"")
        start(f"{answer.status} .", [*answer.headers, ("Content-Length", str(len(answer.body)))])
        return [answer.body]

    def _aws(self, environ: dict[str, Any]) -> Answer | None:
        request = Request(environ)
        with self.lock:
            log = self.log.setdefault(request.client, [])
            entry = {"number": len(log), "action": f"{request.service}:{request.action}", "target": request.target}
            log.append({**entry, "parameters": request.parameters})
            trouble = self._trouble(request.client, entry)
            kind, _, when = trouble.get("kind", "").partition("-")
            if trouble and when != "after":
                return self._answer_trouble(request, kind, trouble)
            answer = self._done(request)
            return self._answer_trouble(request, kind, trouble) if trouble else answer

    def _trouble(self, client: str, entry: dict[str, Any]) -> dict[str, Any]:
        for trouble in self.trouble.get(client, []):
            number, action = trouble.get("number"), trouble.get("action")
            if number is not None and number != entry["number"]:
                continue
            if action is not None and not re.fullmatch(action, f"{entry['action']} {entry['target']}"):
                continue
            if trouble.get("once_each"):
                seen = trouble.setdefault("seen", [])
                key = f"{entry['action']} {entry['target']}"
                if key in seen:
                    continue
                seen.append(key)
            elif trouble.get("times", 1) <= 0:
                continue
            trouble["times"] = trouble.get("times", 1) - 1
            return trouble
        return {}

    def _answer_trouble(self, request: Request, kind: str, trouble: dict[str, Any]) -> Answer | None:
        if kind == "kill":
            os.kill(trouble["pid"], signal.SIGKILL)
            return None
        if kind == "cut":
            return None
        # The words are AWS' own where they are known, else ASSUMED.
        codes = {
            "throttle": ("ThrottlingException", "Rate exceeded", 429 if request.service == "eks" else 400),
            "error": ("InternalFailure", "An internal error has occurred", 500),
            "quota": ("LimitExceeded", "The maximum number of things has been reached.", 400),
            "deny": ("AccessDenied", "User: arn:aws:iam::123456789012:user/me is not authorized", 403),
            "expired": ("ExpiredToken", "The security token included in the request is expired", 403),
            "skew": ("SignatureDoesNotMatch", "Signature expired: 20261121T000000Z is now earlier than", 403),
        }
        code, message, status = codes[kind]
        return error_answer(request.service, trouble.get("code", code), trouble.get("message", message), status)

    def _done(self, request: Request) -> Answer:
        rule = getattr(self, f"_{request.service.replace('-', '_')}_{request.action}", None)
        token = request.parameters.get("clientRequestToken")
        try:
            if token and token in self.tokens:
                return self.tokens[token]
            answer = rule(request) if rule else self._pass(request)
        except Refused as error:
            return error_answer(request.service, error.code, str(error), error.status)
        if token and answer.status < 300:
            self.tokens[token] = answer
        return answer

    def _pass(self, request: Request) -> Answer:
        """moto's own answer."""
        import io

        environ = {**request.environ, "wsgi.input": io.BytesIO(request.body)}
        kept: dict[str, Any] = {}

        def start(status: str, headers: list[tuple[str, str]], *_: Any) -> None:
            kept.update(status=int(status.split()[0]), headers=headers)

        body = b"".join(self.moto(environ, start))
        headers = [(key, value) for key, value in kept["headers"] if key.lower() != "content-length"]
        return Answer(kept["status"], body, headers)

    # --- states that take time ------------------------------------------------------------------------------------

    def _begin(self, *thing: str) -> None:
        self.left[thing] = int(self.rules["looks"])

    def _look(self, *thing: str) -> bool:
        """One look more. True where the state that `thing` is in has ended with it."""
        if thing not in self.left:
            return False
        self.left[thing] -= 1
        if self.left[thing] >= 0:
            return False
        del self.left[thing]
        return True

    # --- CloudFormation -------------------------------------------------------------------------------------------

    def _cloudformation_CreateStack(self, request: Request) -> Answer:
        if not any(value == "CAPABILITY_IAM" for value in request.parameters.values()):
            raise Refused("InsufficientCapabilitiesException", "Requires capabilities : [CAPABILITY_IAM]")
        answer = self._pass(request)
        if answer.status < 300:
            stack = self._stack(request.region, request.parameters["StackName"])
            stack.status = "CREATE_IN_PROGRESS"
            self._begin(request.region, "stack", stack.name)
        return answer

    def _cloudformation_DescribeStacks(self, request: Request) -> Answer:
        name = request.parameters.get("StackName")
        stack = self._stack(request.region, name) if name else None
        if stack and self._look(request.region, "stack", stack.name):
            if stack.status == "CREATE_IN_PROGRESS":
                self._make_stack(stack, request.region)
            elif stack.status == "ROLLBACK_IN_PROGRESS":
                stack.status = "ROLLBACK_COMPLETE"
            elif stack.status == "DELETE_IN_PROGRESS":
                self._delete_stack(stack, request.region)
        return self._pass(request)

    def _cloudformation_DeleteStack(self, request: Request) -> Answer:
        stack = self._stack(request.region, request.parameters["StackName"])
        if stack:
            stack.status = "DELETE_IN_PROGRESS"
            self._begin(request.region, "stack", stack.name)
        return xml_answer("DeleteStackResponse", "http://cloudformation.amazonaws.com/doc/2010-05-15/")

    def _cloudformation_DescribeStackEvents(self, request: Request) -> Answer:
        stack = self._stack(request.region, request.parameters["StackName"])
        reason = getattr(stack, "failure", None)
        if reason is None:
            return self._pass(request)
        fields = {"StackId": stack.stack_id, "EventId": "1", "StackName": stack.name, "LogicalResourceId": "Vpc"}
        fields |= {"ResourceType": "AWS::EC2::VPC", "Timestamp": "2026-11-21T00:00:00Z"}
        fields |= {"ResourceStatus": "CREATE_FAILED", "ResourceStatusReason": reason}
        text = "".join(f"<{key}>{value}</{key}>" for key, value in fields.items())
        space = "http://cloudformation.amazonaws.com/doc/2010-05-15/"
        return xml_answer("DescribeStackEventsResponse", space, f"<StackEvents><member>{text}</member></StackEvents>")

    def _make_stack(self, stack: Any, region: str) -> None:
        if not self.rules.get("stack_fails"):
            stack.status = "CREATE_COMPLETE"
            return
        stack.failure = self.rules["stack_fails"]
        stack.status, stack.status_reason = "ROLLBACK_IN_PROGRESS", "The following resource(s) failed to create: [Vpc]."
        self._begin(region, "stack", stack.name)

    def _delete_stack(self, stack: Any, region: str) -> None:
        # moto removes a network with interfaces or clusters in it; AWS does not.
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

    def _stack(self, region: str, name: str | None) -> Any:
        stacks = get_backend("cloudformation")[ACCOUNT][region].stacks.values()
        return next((stack for stack in stacks if stack.name == name), None)

    # --- EKS: control plane ---------------------------------------------------------------------------------------

    def _eks_CreateCluster(self, request: Request) -> Answer:
        given = request.parameters
        # ASSUMED wording of both.
        if given.get("version") and given["version"] not in VERSIONS:
            raise Refused("InvalidParameterException", f"unsupported Kubernetes version {given['version']}")
        subnets = [self._subnet(request.region, name) for name in given["resourcesVpcConfig"]["subnetIds"]]
        if len({subnet.availability_zone for subnet in subnets}) < 2:
            raise Refused("InvalidParameterException", "Subnets specified must be in at least two different AZs")
        answer = self._pass(request)
        if answer.status < 300:
            cluster = self._eks(request.region).clusters[given["name"]]
            cluster.status = "CREATING"
            cluster.endpoint = f"http://127.0.0.1:{self.port}/k8s/{request.region}/{cluster.name}"
            cluster.certificate_authority = {"data": base64.b64encode(b"CA").decode()}
            vpc = subnets[0].vpc_id
            ec2 = get_backend("ec2")[ACCOUNT][request.region]
            group = ec2.create_security_group(f"eks-cluster-sg-{cluster.name}-1", "EKS created security group", vpc)
            cluster.resources_vpc_config = {
                **given["resourcesVpcConfig"],
                "clusterSecurityGroupId": group.id,
                "vpcId": vpc,
            }
            for subnet in subnets:
                self._interface(ec2, subnet, f"Amazon EKS {cluster.name}", used=True)
            self._begin(request.region, "cluster", cluster.name)
        return answer

    def _eks_DescribeCluster(self, request: Request) -> Answer:
        (name,) = request.parts
        cluster = self._eks(request.region).clusters.get(name)
        if cluster and self._look(request.region, "cluster", name):
            if cluster.status == "CREATING":
                cluster.status = "ACTIVE"
            elif cluster.status == "DELETING":
                self._end_cluster(cluster, request.region)
        return self._pass(request)

    def _eks_DeleteCluster(self, request: Request) -> Answer:
        (name,) = request.parts
        cluster = self._cluster(request.region, name)
        if cluster.nodegroups:
            raise Refused("ResourceInUseException", "Cluster has nodegroups attached", 409)
        if cluster.status == "CREATING" and not self.rules["delete_while_creating"]:
            raise Refused("ResourceInUseException", f"Cluster {name} is in CREATING status", 409)  # ASSUMED
        cluster.status = "DELETING"
        self._begin(request.region, "cluster", name)
        return json_answer({"cluster": {"name": name, "status": "DELETING"}})

    def _end_cluster(self, cluster: Any, region: str) -> None:
        """The control plane goes with its interfaces; its security group stays behind, as it sometimes does."""
        ec2 = get_backend("ec2")[ACCOUNT][region]
        for eni in list(ec2.enis.values()):
            if eni.description == f"Amazon EKS {cluster.name}":
                del ec2.enis[eni.id]
        self._eks(region).delete_cluster(cluster.name)
        for table in (self.addons, self.entries):
            for key in [key for key in table if key[:2] == (region, cluster.name)]:
                del table[key]  # type: ignore[attr-defined]
        self.kube.forget(cluster.name)

    def _eks_DescribeClusterVersions(self, request: Request) -> Answer:
        return json_answer(
            {"clusterVersions": [{"clusterVersion": key, "versionStatus": value} for key, value in VERSIONS.items()]}
        )

    # --- EKS: node groups -----------------------------------------------------------------------------------------

    def _eks_CreateNodegroup(self, request: Request) -> Answer:
        cluster = self._cluster(request.region, request.parts[0])
        answer = self._pass(request)
        if answer.status < 300:
            group = cluster.nodegroups[request.parameters["nodegroupName"]]
            group.status = "CREATING"
            group.health = {"issues": []}
            self._begin(request.region, "group", cluster.name, group.nodegroup_name)
            self._interfaces_of(group, request.region)
        return answer

    def _eks_DescribeNodegroup(self, request: Request) -> Answer:
        name, group_name = request.parts
        cluster = self._eks(request.region).clusters.get(name)
        group = cluster.nodegroups.get(group_name) if cluster else None
        if group is not None and self._look(request.region, "group", name, group_name):
            if group.status in ("CREATING", "UPDATING"):
                self._make_group(group)
            elif group.status == "DELETING":
                self._end_group(group, request.region)
        return self._pass(request)

    def _eks_DeleteNodegroup(self, request: Request) -> Answer:
        name, group_name = request.parts
        cluster = self._cluster(request.region, name)
        if group_name not in cluster.nodegroups:
            raise Refused("ResourceNotFoundException", f"No node group found for name: {group_name}.", 404)
        group = cluster.nodegroups[group_name]
        if group.status == "CREATING" and not self.rules["delete_while_creating"]:
            raise Refused("ResourceInUseException", f"Nodegroup {group_name} is in CREATING status", 409)  # ASSUMED
        group.status = "DELETING"
        self._begin(request.region, "group", name, group_name)
        return json_answer({"nodegroup": {"nodegroupName": group_name, "status": "DELETING"}})

    def _eks_UpdateNodegroupConfig(self, request: Request) -> Answer:
        answer = self._pass(request)
        if answer.status < 300:
            name, group_name = request.parts
            self._cluster(request.region, name).nodegroups[group_name].status = "UPDATING"
            self._begin(request.region, "group", name, group_name)
        return answer

    def _make_group(self, group: Any) -> None:
        lacking = [kind for kind in group.instance_types if kind in self.rules["no_capacity"]]
        if lacking and len(lacking) == len(group.instance_types) and group.scaling_config["desiredSize"]:
            group.status = "CREATE_FAILED"
            said = (
                "Could not launch On-Demand Instances. InsufficientInstanceCapacity - We currently do not have "
                f"sufficient {lacking[0]} capacity in the Availability Zone you requested."
            )
            group.health = {"issues": [{"code": "AsgInstanceLaunchFailures", "message": said, "resourceIds": ["asg"]}]}
            return
        group.status = "ACTIVE"

    def _end_group(self, group: Any, region: str) -> None:
        """The machines go; the interfaces that the network plugin gave them stay, unattached, as is well known."""
        ec2 = get_backend("ec2")[ACCOUNT][region]
        for eni in ec2.enis.values():
            if eni.description == f"aws-K8S-{group.cluster_name}-{group.nodegroup_name}":
                self._release(eni)
        self._eks(region).delete_nodegroup(group.cluster_name, group.nodegroup_name)

    def _interfaces_of(self, group: Any, region: str) -> None:
        ec2 = get_backend("ec2")[ACCOUNT][region]
        description = f"aws-K8S-{group.cluster_name}-{group.nodegroup_name}"
        self._interface(ec2, self._subnet(region, group.subnets[0]), description, used=True)

    def _autoscaling_DescribeScalingActivities(self, request: Request) -> Answer:
        member = ""
        if said := self.rules.get("launch_fails"):
            fields = {"ActivityId": "1", "AutoScalingGroupName": "asg", "Cause": "a user asked", "StatusCode": "Failed"}
            fields |= {"StartTime": "2026-11-21T00:00:00Z", "StatusMessage": said}
            member = "<member>" + "".join(f"<{key}>{value}</{key}>" for key, value in fields.items()) + "</member>"
        space = "http://autoscaling.amazonaws.com/doc/2011-01-01/"
        return xml_answer("DescribeScalingActivitiesResponse", space, f"<Activities>{member}</Activities>")

    # --- EKS: add-ons and access ----------------------------------------------------------------------------------

    def _eks_CreateAddon(self, request: Request) -> Answer:
        (name,) = request.parts
        cluster = self._cluster(request.region, name)
        if cluster.status != "ACTIVE":
            raise Refused("InvalidRequestException", f"Cluster '{name}' is not in ACTIVE status")  # ASSUMED
        given = request.parameters
        key = (request.region, name, given["addonName"])
        if key in self.addons:
            raise Refused("ResourceInUseException", "Addon already exists.", 409)
        self.addons[key] = {"addonName": given["addonName"], "clusterName": name, "status": "CREATING"}
        self.addons[key] |= {"tags": given.get("tags", {}), "health": {"issues": []}}
        self._begin(request.region, "addon", *key[1:])
        return json_answer({"addon": self.addons[key]})

    def _eks_DescribeAddon(self, request: Request) -> Answer:
        name, addon = request.parts
        found = self._addon(request)
        if self._look(request.region, "addon", name, addon):
            found["status"] = "DEGRADED" if addon == "coredns" else "ACTIVE"
        if found["status"] == "DEGRADED" and self._has_machines(request.region, name):
            found["status"] = "ACTIVE"
        return json_answer({"addon": found})

    def _eks_DeleteAddon(self, request: Request) -> Answer:
        found = self._addon(request)
        del self.addons[(request.region, *request.parts)]  # type: ignore[arg-type]
        return json_answer({"addon": found})

    def _eks_CreateAccessEntry(self, request: Request) -> Answer:
        (name,) = request.parts
        key = (request.region, name, request.parameters["principalArn"])
        self._cluster(request.region, name)
        if key in self.entries:
            raise Refused("ResourceInUseException", "The specified access entry resource is already in use", 409)
        self.entries[key] = []
        return json_answer({"accessEntry": {"clusterName": name, "principalArn": key[2]}})

    def _eks_AssociateAccessPolicy(self, request: Request) -> Answer:
        self._entry(request).append(request.parameters["policyArn"])
        return json_answer({"clusterName": request.parts[0], "principalArn": request.parts[1]})

    def _eks_ListAssociatedAccessPolicies(self, request: Request) -> Answer:
        return json_answer({"associatedAccessPolicies": [{"policyArn": arn} for arn in self._entry(request)]})

    def _entry(self, request: Request) -> list[str]:
        self._cluster(request.region, request.parts[0])
        key = (request.region, request.parts[0], request.parts[1])
        if key not in self.entries:
            raise Refused("ResourceNotFoundException", "The specified principalArn could not be found", 404)
        return self.entries[key]

    def _addon(self, request: Request) -> dict[str, Any]:
        self._cluster(request.region, request.parts[0])
        key = (request.region, request.parts[0], request.parts[1])
        if key not in self.addons:
            raise Refused("ResourceNotFoundException", f"No addon: {key[2]} found in cluster: {key[1]}", 404)
        return self.addons[key]

    def _has_machines(self, region: str, name: str) -> bool:
        """Whether there is a machine that coredns may run on."""
        groups = self._cluster(region, name).nodegroups.values()
        tolerated = ("CriticalAddonsOnly",)
        return any(
            group.status == "ACTIVE" and all(taint["key"] in tolerated for taint in group.taints) for group in groups
        )

    # --- EC2 and quotas: what moto has not ------------------------------------------------------------------------

    def _ec2_CreatePlacementGroup(self, request: Request) -> Answer:
        given = request.parameters
        key = (request.region, given["GroupName"])
        if key in self.placements:
            raise Refused("InvalidPlacementGroup.Duplicate", f"The placement group {key[1]} already exists.")
        count = sum(1 for name in given if re.fullmatch(r"TagSpecification\.1\.Tag\.\d+\.Key", name))
        tag = "TagSpecification.1.Tag.{}.{}"
        tags = {given[tag.format(n, "Key")]: given[tag.format(n, "Value")] for n in range(1, count + 1)}
        self.placements[key] = {"name": key[1], "tags": tags}
        return xml_answer("CreatePlacementGroupResponse", EC2_SPACE, _placement(self.placements[key], "placementGroup"))

    def _ec2_DescribePlacementGroups(self, request: Request) -> Answer:
        field, value = request.parameters["Filter.1.Name"], request.parameters["Filter.1.Value.1"]
        found = [
            item
            for (region, name), item in self.placements.items()
            if region == request.region and (name == value if field == "group-name" else value in item["tags"])
        ]
        items = "".join(_placement(item, "item") for item in found)
        body = f"<placementGroupSet>{items}</placementGroupSet>"
        return xml_answer("DescribePlacementGroupsResponse", EC2_SPACE, body)

    def _ec2_DeletePlacementGroup(self, request: Request) -> Answer:
        name = request.parameters["GroupName"]
        if self.placements.pop((request.region, name), None) is None:
            raise Refused("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
        return xml_answer("DeletePlacementGroupResponse", EC2_SPACE, "<return>true</return>")

    def _ec2_DeleteNetworkInterface(self, request: Request) -> Answer:
        name = request.parameters["NetworkInterfaceId"]
        eni = get_backend("ec2")[ACCOUNT][request.region].enis.get(name)
        if eni is not None and eni.status == "in-use":
            raise Refused("InvalidParameterValue", f"Network interface '{name}' is currently in use.")
        return self._pass(request)

    def _servicequotas_GetServiceQuota(self, request: Request) -> Answer:
        code = request.parameters["QuotaCode"]
        values = {**QUOTAS, **self.rules.get("quotas", {})}
        if code not in values:
            raise Refused("NoSuchResourceException", "The request failed because the specified service does not exist.")
        return json_answer(
            {"Quota": {"QuotaCode": code, "QuotaName": f"Running instances ({code})", "Value": values[code]}}
        )

    # --- plumbing -------------------------------------------------------------------------------------------------

    def _eks(self, region: str) -> Any:
        return get_backend("eks")[ACCOUNT][region]

    def _cluster(self, region: str, name: str) -> Any:
        cluster = self._eks(region).clusters.get(name)
        if cluster is None:
            raise Refused("ResourceNotFoundException", f"No cluster found for name: {name}.", 404)
        return cluster

    def _subnet(self, region: str, name: str) -> Any:
        return get_backend("ec2")[ACCOUNT][region].get_subnet(name)

    def _interface(self, ec2: Any, subnet: Any, description: str, used: bool) -> None:
        eni = ec2.create_network_interface(subnet, "", description=description)
        eni.status = "in-use" if used else "available"

    def _release(self, eni: Any) -> None:
        eni.status = "available"

    def _groups(self, ec2: Any, vpc: str) -> list[Any]:
        return [group for group in ec2.groups[vpc].values() if group.name != "default"]

    def _vpcs_of(self, name: str, region: str) -> list[str]:
        vpcs = get_backend("ec2")[ACCOUNT][region].vpcs
        marked = {"mlbench-cluster": name}.items()
        return [
            vpc for vpc, item in vpcs.items() if marked <= {tag["key"]: tag["value"] for tag in item.get_tags()}.items()
        ]

    # --- for tests ------------------------------------------------------------------------------------------------

    def _control(self, what: str, environ: dict[str, Any]) -> Answer:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        given = json.loads(environ["wsgi.input"].read(length)) if length else {}
        if what == "trouble":
            self.trouble.setdefault(given.pop("client"), []).append(given)
        elif what == "calm":
            self.trouble.pop(given["client"], None)
            self.log.pop(given["client"], None)
        elif what == "log":
            return json_answer(self.log.get(given["client"], []))
        elif what == "rules":
            self.rules.update(given)
        elif what == "left":
            return json_answer(self._left_of(given["name"], given["region"]))
        elif what == "state":
            return json_answer(self._state_of(given["name"], given["region"]))
        elif what == "copy":
            return json_answer(self._copy())
        return json_answer({})

    def _copy(self) -> dict[str, int]:
        """A second double in a process of its own, with all that is in this one now."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self.lock = threading.RLock()
            serve(self, lambda port: os.write(writer, f"{port}\n".encode()))
        os.close(writer)
        with open(reader) as answer:
            return {"port": int(answer.readline()), "pid": child}

    def _left_of(self, name: str, region: str) -> list[str]:
        """All that there is of a cluster of that name, marked or not."""
        ec2 = get_backend("ec2")[ACCOUNT][region]
        stacks = get_backend("cloudformation")[ACCOUNT][region].stacks.values()
        roles = get_backend("iam")[ACCOUNT]["aws"].roles.values()
        vpcs = self._vpcs_of(name, region)
        found = [f"stack {stack.name}" for stack in stacks if stack.name == f"mlbench-{name}"]
        found += [f"role {role.name}" for role in roles if role.name.startswith(f"mlbench-{name}-")]
        found += [f"vpc {vpc}" for vpc in vpcs]
        found += [
            f"interface {eni.id}"
            for eni in ec2.enis.values()
            if eni.description.startswith((f"aws-K8S-{name}-", f"Amazon EKS {name}"))
        ]
        found += [
            f"group {group.name}"
            for groups in ec2.groups.values()
            for group in groups.values()
            if group.name.startswith(f"eks-cluster-sg-{name}-")
        ]
        found += [f"template {item}" for item in ec2.launch_template_name_to_ids if item == f"mlbench-{name}"]
        found += [f"placement {item}" for where, item in self.placements if item == f"mlbench-{name}"]
        found += [f"cluster {item}" for item in self._eks(region).clusters if item == name]
        return found + [f"addon {key[2]}" for key in self.addons if key[1] == name]

    def _state_of(self, name: str, region: str) -> list[str]:
        """What distinguishes one situation of a cluster from another for somebody who is to remove it."""
        stack = self._stack(region, f"mlbench-{name}")
        found = [f"stack {stack.status}"] if stack else []
        if cluster := self._eks(region).clusters.get(name):
            found.append(f"cluster {cluster.status}")
            found += [f"{group.nodegroup_name} {group.status}" for group in cluster.nodegroups.values()]
        found += [f"{key[2]} {value['status']}" for key, value in self.addons.items() if key[1] == name]
        found += [item.split()[0] for item in self._left_of(name, region)]
        waits = [f"{thing[1]} {count}" for thing, count in self.left.items() if name in thing]
        return [item.replace(name, "NAME") for item in sorted(found + waits)]


EC2_SPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"


def _placement(item: dict[str, Any], element: str) -> str:
    tags = "".join(f"<item><key>{key}</key><value>{value}</value></item>" for key, value in item["tags"].items())
    body = f"<groupName>{item['name']}</groupName><state>available</state><strategy>cluster</strategy>"
    return f"<{element}>{body}<tagSet>{tags}</tagSet></{element}>"


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *_: Any, **__: Any) -> None:
        return

    def log(self, *_: Any, **__: Any) -> None:
        return


def serve(double: AwsDouble, tell: Callable[[int], object]) -> None:
    """Does not return: ends with whoever has started this process, however that ended."""
    parent = os.getppid()
    server = make_server("127.0.0.1", 0, double, threaded=True, request_handler=_Quiet)
    double.port = server.port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tell(server.port)
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


if __name__ == "__main__":
    serve(AwsDouble(), lambda port: print(port, flush=True))
