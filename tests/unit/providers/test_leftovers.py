"""Which leftovers of others and of workloads are deleted, waited for, or left alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CleanupError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers.aks.identities import assign_role, name_assignment
from providers.base import BusyError
from providers.eks import leftovers, orphans
from providers.workload_cleanup import CleanupSnapshot, WorkloadCleanup, _claims_of, _item
from providers.workloads import OrphanedResource, WorkloadObject
from tests.fakes.aws_operations import check_operation


class Ec2:
    """EC2 with these lists; notes what is changed."""

    region = "eu-west-1"

    def __init__(self, refuses: MlbenchError | None = None, **lists: list[Any]) -> None:
        self.lists = lists
        self.refuses = refuses
        self.changed: list[tuple[str, Any]] = []

    def pages(self, service: str, operation: str, key: str, **_: Any) -> list[Any]:
        check_operation(service, operation)
        return list(self.lists.get(key, []))

    def call(self, service: str, operation: str, **parameters: Any) -> None:
        check_operation(service, operation)
        self.changed.append((operation, parameters))
        if self.refuses is not None:
            raise self.refuses


def endpoint(state: str) -> dict[str, str]:
    return {"VpcEndpointId": f"vpce-{state}", "State": state, "ServiceName": "guardduty-data"}


def interface(status: str, **more: str) -> dict[str, str]:
    return {"NetworkInterfaceId": f"eni-{status}", "Status": status, **more}


@pytest.mark.parametrize(
    ("state", "is_deleted", "is_awaited"),
    [("Available", True, True), ("pending", True, True), ("Deleting", False, True), ("deleted", False, False)],
)
def test_endpoints_are_deleted_once_and_awaited_until_they_are_gone(
    state: str, is_deleted: bool, is_awaited: bool
) -> None:
    ec2: Any = Ec2(VpcEndpoints=[endpoint(state)])
    if is_awaited:
        with pytest.raises(BusyError, match=rf"The endpoint vpce-{state} \(guardduty-data\) is being deleted"):
            leftovers.clear_network(ec2, ["vpc-1"])
    else:
        leftovers.clear_network(ec2, ["vpc-1"])
    wanted = [("delete_vpc_endpoints", {"VpcEndpointIds": [f"vpce-{state}"]})] if is_deleted else []
    assert ec2.changed == wanted


def test_interfaces_in_use_are_awaited_after_the_others_are_deleted() -> None:
    ec2: Any = Ec2(
        NetworkInterfaces=[interface("in-use"), interface("available")], SecurityGroups=[{"GroupId": "sg-1"}]
    )
    with pytest.raises(BusyError, match="The network interface eni-in-use is in-use"):
        leftovers.clear_network(ec2, ["vpc-1"])
    assert ec2.changed == [("delete_network_interface", {"NetworkInterfaceId": "eni-available"})]


@pytest.mark.parametrize(
    ("item", "is_listed"),
    [
        (interface("available"), True),
        (interface("available", InterfaceType="interface", Description="aws-K8S-i-1"), True),
        (interface("in-use", InterfaceType="nat_gateway"), False),
        (interface("in-use", InterfaceType="vpc_endpoint"), False),
        (interface("in-use", InterfaceType="interface_endpoint"), False),
        (interface("in-use", Description="VPC Endpoint Interface vpce-1"), False),
    ],
)
def test_interfaces_that_go_with_their_owner_are_left_to_it(item: dict[str, str], is_listed: bool) -> None:
    ec2: Any = Ec2(NetworkInterfaces=[item])
    assert bool(leftovers.list_interfaces(ec2, ["vpc-1"])) is is_listed
    assert leftovers.list_interfaces(ec2, []) == []


@pytest.mark.parametrize(
    ("status", "is_in_use"), [("in-use", True), ("attaching", True), ("available", False), ("detaching", False)]
)
def test_an_attached_interface_is_in_use(status: str, is_in_use: bool) -> None:
    assert leftovers.is_in_use(interface(status)) is is_in_use


def test_security_groups_lose_the_rules_between_them_first_and_the_default_group_stays() -> None:
    pairs = [{"GroupId": "sg-2"}]
    rule = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "UserIdGroupPairs": pairs}
    open_rule = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}], "UserIdGroupPairs": []}
    groups = [
        {
            "GroupId": "sg-1",
            "GroupName": "eks",
            "IpPermissions": [{**rule, "IpRanges": [{"CidrIp": "10.0.0.0/8"}]}, open_rule],
            "IpPermissionsEgress": [{"IpProtocol": "-1", "UserIdGroupPairs": pairs}],
        },
        {"GroupId": "sg-0", "GroupName": "default", "IpPermissions": [rule]},
    ]
    ec2: Any = Ec2(SecurityGroups=groups)
    leftovers.clear_network(ec2, ["vpc-1"])
    egress = [{"IpProtocol": "-1", "UserIdGroupPairs": pairs}]
    assert ec2.changed == [
        ("revoke_security_group_ingress", {"GroupId": "sg-1", "IpPermissions": [rule]}),
        ("revoke_security_group_egress", {"GroupId": "sg-1", "IpPermissions": egress}),
        ("revoke_security_group_ingress", {"GroupId": "sg-0", "IpPermissions": [rule]}),
        ("delete_security_group", {"GroupId": "sg-1"}),
    ]


def test_a_group_in_use_is_busy_and_the_others_are_tried_all_the_same() -> None:
    groups = [{"GroupId": f"sg-{number}", "GroupName": "eks"} for number in (1, 2)]
    ec2: Any = Ec2(UsageError("in use"), SecurityGroups=groups)
    with pytest.raises(BusyError, match="in use"):
        leftovers.clear_network(ec2, ["vpc-1"])
    assert [parameters["GroupId"] for _, parameters in ec2.changed] == ["sg-1", "sg-2"]
    leftovers.clear_network(Ec2(NotFoundError("gone"), SecurityGroups=groups), ["vpc-1"])  # type: ignore[arg-type]


def test_without_a_network_nothing_is_asked_or_deleted() -> None:
    ec2: Any = Ec2(VpcEndpoints=[endpoint("available")])
    leftovers.clear_network(ec2, [])
    assert ec2.changed == []


def test_interfaces_of_a_cluster_in_a_network_of_others_are_deleted_when_they_are_free() -> None:
    ec2: Any = Ec2(NetworkInterfaces=[interface("available"), interface("in-use")])
    with pytest.raises(BusyError, match="The network interface eni-in-use is in-use"):
        leftovers.clear_cluster(ec2, "demo")
    assert ec2.changed == [("delete_network_interface", {"NetworkInterfaceId": "eni-available"})]


@pytest.mark.parametrize(
    ("state", "is_left"), [("available", True), ("in-use", True), ("deleting", False), ("deleted", False)]
)
def test_a_volume_is_left_until_it_is_being_deleted(state: str, is_left: bool) -> None:
    ec2: Any = Ec2(Volumes=[{"VolumeId": "vol-1", "State": state, "Size": 8}])
    found = orphans._list_volumes(ec2, "demo", [WorkloadObject("PersistentVolume", "", "pv", "vol-1")])
    assert [(item.kind, item.name, item.reason) for item in found] == (
        [("volume", "vol-1", f"8 GB, {state}")] if is_left else []
    )


def test_a_role_is_assigned_under_a_name_that_is_found_again() -> None:
    sent: list[Any] = []
    azure: Any = SimpleNamespace(root="/subscriptions/s", change=lambda *request: sent.append(request))
    name = name_assignment("/scope", "Seed")
    assert name == name_assignment("/scope", "seed") != name_assignment("/scope", "other")
    assert name.startswith("/scope/providers/Microsoft.Authorization/roleAssignments/")
    assign_role(azure, name, "role-id", "principal", "assign it")
    definition = "/subscriptions/s/providers/Microsoft.Authorization/roleDefinitions/role-id"
    properties = {
        "roleDefinitionId": definition,
        "principalId": "principal",
        "principalType": "ServicePrincipal",
    }
    assert sent == [("PUT", name, "assign it", {"properties": properties})]


def test_a_snapshot_names_namespaces_before_objects() -> None:
    seen = CleanupSnapshot([WorkloadObject("Service", "n", "s")], {"a": False, "b": True})
    assert str(seen) == "namespace a, namespace b, Service n/s"
    assert bool(CleanupSnapshot([], {"a": True}))
    assert not CleanupSnapshot([], {}, [WorkloadObject("PersistentVolume", "", "pv")])


def test_claims_of_a_pod_are_those_of_its_volumes() -> None:
    volumes = [{"name": "a", "persistentVolumeClaim": {"claimName": "c"}}, {"name": "b", "emptyDir": {}}]
    assert _claims_of({"spec": {"volumes": volumes}}) == {"c"}
    assert _claims_of({"spec": {}}) == set()


def test_an_object_that_is_being_deleted_is_known_by_its_timestamp() -> None:
    metadata = {"name": "s", "namespace": "n"}
    assert _item("Service", {"metadata": metadata}) == WorkloadObject("Service", "n", "s", "", deleting=False)
    assert _item("Service", {"metadata": {**metadata, "deletionTimestamp": "x"}}).deleting
    assert _item("PersistentVolume", {"metadata": {"name": "pv"}}).namespace == ""


def cleanup(left: Any) -> WorkloadCleanup:
    def list_orphans(_cluster: Any, _objects: Any) -> Any:
        if isinstance(left, Exception):
            raise left
        return left

    provider: Any = SimpleNamespace(list_orphans=list_orphans, orphan_command=lambda _cluster, item: f"look for {item}")
    return WorkloadCleanup(Cluster("demo", "gke"), provider, ())


LEFT = OrphanedResource("disk", "d", "8 GB", "rm d")


def test_what_workloads_left_is_listed_after_the_deletion_with_commands() -> None:
    with pytest.raises(CleanupError) as caught:
        cleanup([LEFT]).raise_for_orphans()
    assert caught.value.message == (
        'The cluster "demo" is deleted.\nResources that its workloads or its cloud created remain:\n'
        "  disk d: 8 GB\n    rm d"
    )
    assert caught.value.hint == "Delete each with the command below it."
    entry = {"kind": "disk", "name": "d", "reason": "8 GB", "command": "rm d"}
    assert caught.value.details == {"leftovers": [entry]}


def test_what_workloads_left_is_added_to_what_the_deletion_left() -> None:
    error = CleanupError("A network remains.", hint="again", details={"leftovers": [{"kind": "network"}]})
    with pytest.raises(CleanupError, match="A network remains") as caught:
        cleanup([LEFT]).raise_for_orphans(error)
    assert [item["kind"] for item in caught.value.details["leftovers"]] == ["network", "disk"]
    assert caught.value.hint == "again"
    with pytest.raises(CleanupError) as same:
        cleanup([]).raise_for_orphans(error)
    assert same.value is error


def test_nothing_left_is_no_error_and_no_warning() -> None:
    clean = cleanup([])
    clean.raise_for_orphans()
    assert clean.warnings == []
    unasked = cleanup(CredentialError("no right"))
    unasked.raise_for_orphans()
    assert unasked.warnings == []  # there never were any objects


def test_a_cloud_that_cannot_be_asked_is_warned_of_where_there_were_objects() -> None:
    doubtful = cleanup(CredentialError("no right"))
    doubtful._seen[("Service", "n", "s")] = WorkloadObject("Service", "n", "s")
    doubtful.raise_for_orphans()
    assert doubtful.warnings == ["Cannot check whether load balancers or disks remain: no right"]


@pytest.mark.parametrize(
    ("item", "path", "words"),
    [
        (WorkloadObject("Service", "n", "s"), "/api/v1/namespaces/n/services/s", "Service n/s"),
        (
            WorkloadObject("Ingress", "n", "i"),
            *("/apis/networking.k8s.io/v1/namespaces/n/ingresses/i", "Ingress n/i"),
        ),
        (
            WorkloadObject("Gateway", "n", "g"),
            *("/apis/gateway.networking.k8s.io/v1/namespaces/n/gateways/g", "Gateway n/g"),
        ),
        (WorkloadObject("PersistentVolume", "", "pv"), "/api/v1/persistentvolumes/pv", "PersistentVolume pv"),
    ],
)
def test_an_object_of_a_workload_has_the_path_of_the_api_reference(item: WorkloadObject, path: str, words: str) -> None:
    assert (item.path, str(item)) == (path, words)
