"""What EKS does in the AWS double: control planes, node groups, add-ons, access entries, and what they leave behind."""

import base64
import time
from collections.abc import Mapping
from typing import Any

from moto.backends import get_backend

from tests.fakes.aws_answers import Answer, ApiError, json_answer
from tests.fakes.aws_base import ACCOUNT, Base, Request
from tests.fakes.aws_services import PLAIN_FIRST

# Days that are left of standard support; below 0 it is over. `rules["support_days"]` changes them.
SUPPORT_DAYS = {"1.34": 100, "1.35": 200, "1.36": 320, "1.30": -100}
DEFAULT_VERSION = "1.35"
# Newest first, and whether it is EKS' default. Numbers that public reports of 2026-09 name; which is the default is not
# known of all.
ADDON_VERSIONS = {
    "vpc-cni": (("v1.23.1-eksbuild.1", True), ("v1.22.4-eksbuild.3", False)),
    "eks-pod-identity-agent": (("v1.3.10-eksbuild.3", True),),
    "aws-ebs-csi-driver": (("v1.66.0-eksbuild.1", False), ("v1.63.1-eksbuild.1", True)),
}
# Add-ons whose versions belong to a version of Kubernetes.
VERSIONED_ADDONS = {
    ("kube-proxy", "1.34"): (("v1.34.6-eksbuild.29", True),),
    ("kube-proxy", "1.35"): (("v1.35.3-eksbuild.30", True), ("v1.35.3-eksbuild.29", False)),
    ("kube-proxy", "1.36"): (("v1.36.0-eksbuild.25", True), ("v1.36.0-eksbuild.21", False)),
    ("coredns", "1.34"): (("v1.13.2-eksbuild.24", True),),
    ("coredns", "1.35"): (("v1.14.3-eksbuild.3", True), ("v1.13.2-eksbuild.31", False)),
    ("coredns", "1.36"): (("v1.14.3-eksbuild.23", True), ("v1.14.3-eksbuild.16", False)),
}
# Add-ons whose pods wait for machines without a taint.
ON_MACHINES = ("coredns", "aws-ebs-csi-driver")


def _addon_versions(addon: str, kubernetes: str) -> tuple[tuple[str, bool], ...]:
    return VERSIONED_ADDONS.get((addon, kubernetes)) or ADDON_VERSIONS.get(addon, ())


class EksRules(Base):
    # --- EKS: control plane ---------------------------------------------------------------------------------------

    def create_cluster(self, region: str, given: Mapping[str, Any]) -> None:
        # ASSUMED wording of both.
        if given.get("version") and given["version"] not in SUPPORT_DAYS:
            raise ApiError("InvalidParameterException", f"unsupported Kubernetes version {given['version']}")
        self._check_role(given["roleArn"])
        if given["name"] in self._eks(region).clusters:
            raise ApiError("ResourceInUseException", f"Cluster already exists with name: {given['name']}", 409)
        subnets = [self._subnet(region, name) for name in given["resourcesVpcConfig"]["subnetIds"]]
        if len({subnet.availability_zone for subnet in subnets}) < 2:
            raise ApiError("InvalidParameterException", "Subnets specified must be in at least two different AZs")
        cluster = self._eks(region).create_cluster(
            given["name"],
            given["roleArn"],
            dict(given["resourcesVpcConfig"]),
            given.get("version", DEFAULT_VERSION),
            tags=dict(given.get("tags", {})),
        )
        cluster.status = "CREATING"
        cluster.endpoint = self.rules.get("endpoint") or f"http://127.0.0.1:{self.port}/k8s/{region}/{cluster.name}"
        ca = str(self.rules.get("ca") or "CA")
        cluster.certificate_authority = {"data": base64.b64encode(ca.encode()).decode()}
        vpc = subnets[0].vpc_id
        ec2 = get_backend("ec2")[ACCOUNT][region]
        tags = {"aws:eks:cluster-name": cluster.name}
        name = f"eks-cluster-sg-{cluster.name}-1"
        group = ec2.create_security_group(name, "EKS created security group", vpc, tags=tags)
        found = {"clusterSecurityGroupId": group.id, "vpcId": vpc}
        cluster.resources_vpc_config = {**given["resourcesVpcConfig"], **found}
        for subnet in subnets:
            self._interface(ec2, subnet, f"Amazon EKS {cluster.name}", used=True)
        if caller := self.rules.get("caller"):  # its creator is an administrator by itself
            self.entries[(region, cluster.name, caller[1])] = []
        self._begin(region, "cluster", cluster.name)

    def look_at_cluster(self, region: str, name: str) -> Any:
        """The cluster, one look later; None without one."""
        cluster = self._eks(region).clusters.get(name)
        if cluster and self._look(region, "cluster", name):
            if cluster.status == "CREATING":
                cluster.status = "ACTIVE"
                self.cross_groups(region, cluster.resources_vpc_config["vpcId"])
            elif cluster.status == "DELETING":
                self.end_cluster(cluster, region)
        return self._eks(region).clusters.get(name)

    def _eks_CreateCluster(self, request: Request) -> Answer:
        self.create_cluster(request.region, request.parameters)
        return json_answer({"cluster": {"name": request.parameters["name"], "status": "CREATING"}})

    def _eks_DescribeCluster(self, request: Request) -> Answer:
        self.look_at_cluster(request.region, request.parts[0])
        return self._pass(request)

    def _eks_TagResource(self, request: Request) -> Answer:
        (arn,) = request.parts
        self._cluster(request.region, arn.rpartition("/")[2]).tags.update(request.parameters["tags"])
        return json_answer({})

    def _eks_DeleteCluster(self, request: Request) -> Answer:
        (name,) = request.parts
        cluster = self._cluster(request.region, name)
        if cluster.nodegroups:
            raise ApiError("ResourceInUseException", "Cluster has nodegroups attached", 409)
        cluster.status = "DELETING"
        self._begin(request.region, "cluster", name)
        return json_answer({"cluster": {"name": name, "status": "DELETING"}})

    def end_cluster(self, cluster: Any, region: str) -> None:
        """The control plane goes with its interfaces; its security group stays behind, as it sometimes does."""
        ec2 = get_backend("ec2")[ACCOUNT][region]
        for eni in list(ec2.enis.values()):
            if eni.description == f"Amazon EKS {cluster.name}":
                del ec2.enis[eni.id]
        self._eks(region).delete_cluster(cluster.name)
        for addon in [key for key in self.addons if key[:2] == (region, cluster.name)]:
            del self.addons[addon]
        for entry in [key for key in self.entries if key[:2] == (region, cluster.name)]:
            del self.entries[entry]
        self.forget_kube(cluster.name)

    def _eks_DescribeClusterVersions(self, request: Request) -> Answer:
        """With the end of each version's standard support. Source: the API's model in botocore."""
        left = {**SUPPORT_DAYS, **self.rules.get("support_days", {})}
        return json_answer(
            {
                "clusterVersions": [
                    {
                        "clusterVersion": version,
                        "versionStatus": "STANDARD_SUPPORT" if days > 0 else "EXTENDED_SUPPORT",
                        "defaultVersion": version == DEFAULT_VERSION,
                        "endOfStandardSupportDate": time.time() + days * 86400,
                    }
                    for version, days in left.items()
                ]
            }
        )

    # --- EKS: node groups -----------------------------------------------------------------------------------------

    def create_group(self, region: str, name: str, given: Mapping[str, Any]) -> None:
        cluster = self._cluster(region, name)
        self._check_role(given["nodeRole"])
        kind = self._check_template(region, given)
        misplaced = self._is_misplaced(region, given)
        self._check_addresses(region, given)
        if given["nodegroupName"] in cluster.nodegroups:
            raise ApiError("ResourceInUseException", "NodeGroup already exists", 409)
        group = self._eks(region).create_nodegroup(
            name,
            given["nodeRole"],
            given["nodegroupName"],
            list(given["subnets"]),
            dict(given["scalingConfig"]),
            given.get("diskSize"),
            [] if kind else list(given["instanceTypes"]),  # EKS does not show what the template has
            given["amiType"],
            None,
            dict(given["labels"]),
            list(given.get("taints", ())),
            dict(given.get("tags", {})),
            capacity_type=given["capacityType"],
        )
        group.status = "CREATING"
        group.health = {"issues": []}
        group.misplaced = misplaced
        cards = self._template(region, given).get("NetworkInterfaces") or []
        group.has_efa = any(str(card.get("InterfaceType")).startswith("efa") for card in cards)
        if kind:
            group.instance_types, group.template_type = [], kind
        self._begin(region, "group", name, group.nodegroup_name)
        self._interfaces_of(group, region)

    def look_at_group(self, region: str, name: str, group_name: str) -> Any:
        """The node group, one look later; None without one."""
        cluster = self._eks(region).clusters.get(name)
        group = cluster.nodegroups.get(group_name) if cluster else None
        if group is not None and self._look(region, "group", name, group_name):
            if group.status in ("CREATING", "UPDATING"):
                self._make_group(group)
                self.watch_network(region, self._subnet(region, group.subnets[0]).vpc_id)
            elif group.status == "DELETING":
                self.end_group(group, region)
                return None
        return group

    def _eks_CreateNodegroup(self, request: Request) -> Answer:
        self.create_group(request.region, request.parts[0], request.parameters)
        return json_answer({"nodegroup": {"nodegroupName": request.parameters["nodegroupName"], "status": "CREATING"}})

    def _check_template(self, region: str, given: Mapping[str, Any]) -> str | None:
        """The machine type that the launch template names, which the node group may not name, too.

        Source: EKS' user guide on launch templates and on capacity blocks; the words are ASSUMED.
        """
        data = self._template(region, given)
        kind: str | None = data.get("InstanceType")
        market = (data.get("InstanceMarketOptions") or {}).get("MarketType")
        if kind and given.get("instanceTypes"):
            raise ApiError(
                "InvalidParameterException",
                "You cannot specify an instance type in both the launch template and the node group",
            )
        cards: list[Mapping[str, Any]] = data.get("NetworkInterfaces") or []
        first: Mapping[str, Any] = next(iter(cards), {})
        if first.get("InterfaceType") == "efa-only":
            raise ApiError("InvalidParameterException", "The primary network interface must not be EFA-only.")
        if len({(card.get("NetworkCardIndex"), card.get("DeviceIndex")) for card in cards}) < len(cards):
            raise ApiError("InvalidParameterException", "Two network interfaces have the same card and device index.")
        if {kind, *(given.get("instanceTypes") or ())} & {*PLAIN_FIRST} and first.get("InterfaceType") == "efa":
            raise ApiError("InvalidParameterException", "The network card at index 0 does not support EFA.")
        if (given.get("capacityType") == "CAPACITY_BLOCK") != (market == "capacity-block"):
            raise ApiError(
                "InvalidParameterException", "CAPACITY_BLOCK and the market type of the launch template do not match"
            )
        return kind

    def _check_addresses(self, region: str, given: Mapping[str, Any]) -> None:
        """Machines of a subnet whose way out is an internet gateway need public addresses, or they do not join.

        Source: EKS' user guide, `Ec2SubnetInvalidConfiguration`; several network cards: EC2's user guide on EFA.
        """
        ec2 = get_backend("ec2")[ACCOUNT][region]
        subnet = self._subnet(region, given["subnets"][0])
        tables = [item for item in ec2.route_tables.values() if subnet.id in item._associations.values()]
        ways = [route.gateway for table in tables for route in table._routes.values() if route.gateway]
        cards = self._template(region, given).get("NetworkInterfaces") or []
        is_public = str(subnet.map_public_ip_on_launch).lower() == "true" and len(cards) < 2
        is_blocked = self.rules.get("public_access") == "block-bidirectional" or (
            self.rules.get("public_access") == "block-ingress" and is_public
        )
        if any(str(way.id).startswith("igw-") for way in ways) and (not is_public or is_blocked):
            raise ApiError(
                "InvalidRequestException",
                f"One or more Amazon EC2 Subnets of [{subnet.id}] for node group {given['nodegroupName']} does not "
                "automatically assign public IP addresses to instances launched into it.",
            )

    def _is_misplaced(self, region: str, given: Mapping[str, Any]) -> bool:
        """Whether machines of a reservation are asked for in a placement group that the reservation is not in.

        EC2 then has no capacity for them, whatever the reservation has left. Sources: EC2's user guide on capacity
        blocks ("no need to use a cluster placement group"), aws-parallelcluster `ec2_validators.py`, eksctl 7949.
        """
        data = self._template(region, given)
        group = (data.get("Placement") or {}).get("GroupName")
        target = (data.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}
        fields = self.rules.get("reservations", {}).get(target.get("CapacityReservationId"))
        own = (fields or {}).get("placementGroupArn", "").partition("placement-group/")[2]
        return fields is not None and (group or "") != own

    def _template(self, region: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data of the launch template that a node group names; empty without one."""
        identifier = (given.get("launchTemplate") or {}).get("id")
        if not identifier:
            return {}
        found = get_backend("ec2")[ACCOUNT][region].get_launch_template(identifier).default_version().data
        return found if isinstance(found, Mapping) else {}

    def _eks_DescribeNodegroup(self, request: Request) -> Answer:
        self.look_at_group(request.region, *request.parts)
        return self._pass(request)

    def _eks_DeleteNodegroup(self, request: Request) -> Answer:
        name, group_name = request.parts
        cluster = self._cluster(request.region, name)
        if group_name not in cluster.nodegroups:
            raise ApiError("ResourceNotFoundException", f"No node group found for name: {group_name}.", 404)
        group = cluster.nodegroups[group_name]
        group.status = "DELETING"
        self._begin(request.region, "group", name, group_name)
        return json_answer({"nodegroup": {"nodegroupName": group_name, "status": "DELETING"}})

    def _make_group(self, group: Any) -> None:
        zone = self._subnet(group.region, group.subnets[0]).availability_zone
        gone = self.rules["no_capacity"]  # TYPE, or TYPE@ZONE
        if getattr(group, "misplaced", False):
            gone = group.instance_types = [getattr(group, "template_type", "")]
        lacking = [kind for kind in group.instance_types if kind in gone or f"{kind}@{zone}" in gone]
        if lacking and len(lacking) == len(group.instance_types) and group.scaling_config["desiredSize"]:
            group.status = "CREATE_FAILED"
            said = (
                "Could not launch On-Demand Instances. InsufficientInstanceCapacity - We currently do not have "
                f"sufficient {lacking[0]} capacity in the Availability Zone you requested."
            )
            group.health = {"issues": [{"code": "AsgInstanceLaunchFailures", "message": said, "resourceIds": ["asg"]}]}
            return
        if self.rules.get("unjoined"):
            group.status = "CREATE_FAILED"
            said = "Instances failed to join the kubernetes cluster"
            group.health = {"issues": [{"code": "NodeCreationFailure", "message": said, "resourceIds": ["i-1"]}]}
            return
        group.status = "ACTIVE"

    def end_group(self, group: Any, region: str) -> None:
        """The machines go; the interfaces that the network plugin gave them stay, unattached, as is well known."""
        ec2 = get_backend("ec2")[ACCOUNT][region]
        for eni in ec2.enis.values():
            if eni.description == f"aws-K8S-{group.cluster_name}-{group.nodegroup_name}":
                self._release(eni)
        self._eks(region).delete_nodegroup(group.cluster_name, group.nodegroup_name)

    def _interfaces_of(self, group: Any, region: str) -> None:
        ec2 = get_backend("ec2")[ACCOUNT][region]
        description = f"aws-K8S-{group.cluster_name}-{group.nodegroup_name}"
        mark = {"cluster.k8s.amazonaws.com/name": group.cluster_name}  # as the network plugin marks those it makes
        self._interface(ec2, self._subnet(region, group.subnets[0]), description, used=True, **mark)

    # --- EKS: add-ons and access ----------------------------------------------------------------------------------

    def create_addon(self, region: str, name: str, given: Mapping[str, Any]) -> None:
        cluster = self._cluster(region, name)
        if cluster.status != "ACTIVE":
            raise ApiError("InvalidRequestException", f"Cluster '{name}' is not in ACTIVE status")  # ASSUMED
        offered = _addon_versions(given["addonName"], cluster.version)
        if given.get("addonVersion") not in (None, *dict(offered)):
            raise ApiError("InvalidParameterException", "Addon version specified is not supported")
        for association in given.get("podIdentityAssociations", ()):
            self._check_role(association["roleArn"])
            if (region, name, "eks-pod-identity-agent") not in self.addons:
                message = "The EKS Pod Identity Agent add-on is not installed"  # ASSUMED
                raise ApiError("InvalidParameterException", message)
        key = (region, name, given["addonName"])
        if key in self.addons:
            raise ApiError("ResourceInUseException", "Addon already exists.", 409)
        default = next((version for version, is_default in offered if is_default), "v1")
        self.addons[key] = {
            "addonName": key[2],
            "clusterName": name,
            "status": "CREATING",
            "health": {"issues": []},
            "addonVersion": given.get("addonVersion") or default,
            "configurationValues": given.get("configurationValues", ""),
            "podIdentityAssociations": [item["serviceAccount"] for item in given.get("podIdentityAssociations", ())],
        }
        self._begin(region, "addon", *key[1:])

    def look_at_addon(self, region: str, name: str, addon: str) -> dict[str, Any]:
        """The add-on, one look later."""
        key = (region, name, addon)
        self._cluster(region, name)
        if key not in self.addons:
            raise ApiError("ResourceNotFoundException", f"No addon: {addon} found in cluster: {name}", 404)
        found = self.addons[key]
        if self._look(region, "addon", name, addon):
            found["status"] = "DEGRADED" if addon in ON_MACHINES else "ACTIVE"
        if found["status"] == "DEGRADED" and self._has_machines(region, name):
            found["status"] = "ACTIVE"
        return found

    def _eks_DescribeAddonVersions(self, request: Request) -> Answer:
        """Those of one add-on, with the default of the cluster's Kubernetes marked."""
        kubernetes = request.query.get("kubernetesVersion", DEFAULT_VERSION)
        versions = [
            {"addonVersion": version, "compatibilities": [{"clusterVersion": kubernetes, "defaultVersion": is_default}]}
            for version, is_default in _addon_versions(request.query.get("addonName", ""), kubernetes)
        ]
        return json_answer({"addons": [{"addonName": request.query.get("addonName"), "addonVersions": versions}]})

    def _eks_DescribeAddon(self, request: Request) -> Answer:
        return json_answer({"addon": self.look_at_addon(request.region, *request.parts)})

    def create_entry(self, region: str, name: str, given: Mapping[str, Any]) -> None:
        self._cluster(region, name)
        key = (region, name, given["principalArn"])
        if key in self.entries:
            raise ApiError("ResourceInUseException", "The specified access entry resource is already in use", 409)
        self.entries[key] = [policy["policyArn"] for policy in given["accessPolicies"]]

    def _eks_ListAssociatedAccessPolicies(self, request: Request) -> Answer:
        return json_answer({"associatedAccessPolicies": [{"policyArn": arn} for arn in self._entry(request)]})

    def _entry(self, request: Request) -> list[str]:
        self._cluster(request.region, request.parts[0])
        key = (request.region, request.parts[0], request.parts[1])
        if key not in self.entries:
            raise ApiError("ResourceNotFoundException", "The specified principalArn could not be found", 404)
        return self.entries[key]

    def _has_machines(self, region: str, name: str) -> bool:
        """Whether there is a machine that coredns may run on."""
        groups = self._cluster(region, name).nodegroups.values()
        tolerated = ("CriticalAddonsOnly",)
        return any(
            group.status == "ACTIVE" and all(taint["key"] in tolerated for taint in group.taints) for group in groups
        )
