"""The end of a cluster in each cloud: what is requested for it, what counts as armed, and what a refusal leaves."""

import datetime
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, CredentialError, DeadlineError, NotFoundError, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.aks.end_timer import AksEndIdentity, AksEndTimer, AksHold, EndTags, can_assign
from providers.aks.machines import Machine
from providers.base import Part, Readiness, ResourceStatus, TransientError
from providers.cluster_end import EndMark, EndTimer, WorkerHold, describe_hold
from providers.eks import end_timer as eks
from providers.gke import api as gke_api
from providers.gke import end_timer as gke
from providers.kubernetes_calls import ClusterObjects
from tests.fakes.aws_operations import check_operation
from tests.unit.providers.test_aks_requests import GROUP, SUBSCRIPTION, FakeAzure
from tests.unit.providers.test_aks_requests import make_plane as make_aks_plane
from tests.unit.providers.test_aks_requests import make_pool as make_aks_pool
from tests.unit.providers.test_gke_requests import FakeGke
from tests.unit.providers.test_gke_requests import make_plane as make_gke_plane

NOW = 1_795_262_400  # 2026-11-21T12:00:00Z
END = NOW + 3600
DENIED = CredentialError("denied")


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: float(NOW))


def utc(seconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


# --- EKS: machines --------------------------------------------------------------------------------------------------


class Aws:
    """Records calls; answers by operation and the name that is asked about."""

    region = "eu-west-1"

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def call(self, service: str, operation: str, **parameters: Any) -> Any:
        check_operation(service, operation)
        self.calls.append((service, operation, parameters))
        answer = self.answers.get(operation, {})
        if callable(answer):
            answer = answer(**parameters)
        if isinstance(answer, Exception):
            raise answer
        return answer


def actions(times: Mapping[str, int | None]) -> Any:
    """The scheduled action of each auto scaling group, by its time; None without one."""

    def describe(AutoScalingGroupName: str, ScheduledActionNames: list[str]) -> Any:
        assert ScheduledActionNames == ["mlbench-end"]
        time = times[AutoScalingGroupName]
        return {"ScheduledUpdateGroupActions": [] if time is None else [{"StartTime": utc(time)}]}

    return describe


def end_timer(aws: Aws, *groups: str, expires: float = END) -> eks.EndTimer:
    raw = {"resources": {"autoScalingGroups": [{"name": name} for name in groups]}} if groups else {}
    group: Any = SimpleNamespace(name="demo-2-workers", aws=aws, find_raw=lambda: raw)
    return eks.EndTimer(group, expires)


@pytest.mark.parametrize(
    ("times", "expires", "is_armed"),
    [
        ({"a": END}, END, True),
        ({"a": END}, END + 0.9, True),  # times are whole seconds
        ({"a": END + 1}, END, False),
        ({"a": None}, END, False),
        ({"a": END, "b": END}, END, True),
        ({"a": END, "b": None}, END, False),
        ({"a": END, "b": END + 1}, END, False),
        ({}, END, False),
        ({"a": NOW + 30}, NOW + 59, True),  # it ends at once, at a time that AWS accepts
        ({"a": NOW + 30}, NOW + 60, False),
        ({"a": None}, NOW - 5, False),
    ],
)
def test_the_end_of_machines_is_armed_if_every_group_has_it_at_the_right_time(
    times: dict[str, int | None], expires: float, is_armed: bool
) -> None:
    timer = end_timer(Aws(describe_scheduled_actions=actions(times)), *times, expires=expires)
    assert timer.find() == (ResourceStatus("scheduled") if is_armed else None)


@pytest.mark.parametrize(("expires", "start"), [(END, END), (NOW + 61, NOW + 61), (NOW + 59, NOW + 60), (0, NOW + 60)])
def test_machines_are_removed_by_a_size_of_zero_at_the_end(expires: int, start: int) -> None:
    """AWS rejects times that have passed: https://docs.aws.amazon.com/autoscaling/ec2/APIReference."""
    aws = Aws()
    end_timer(aws, "a", "b", expires=expires).create()
    request = {
        "ScheduledActionName": "mlbench-end",
        "StartTime": utc(start),
        "MinSize": 0,
        "MaxSize": 0,
        "DesiredCapacity": 0,
    }
    assert aws.calls == [
        ("autoscaling", "put_scheduled_update_group_action", {"AutoScalingGroupName": name, **request})
        for name in ("a", "b")
    ]


def test_a_node_group_without_its_auto_scaling_group_is_asked_about_again() -> None:
    with pytest.raises(TransientError, match="auto scaling group of demo-2-workers yet"):
        end_timer(Aws()).create()
    group: Any = SimpleNamespace(name="demo-2-workers", aws=Aws(), find_raw=lambda: None)
    assert eks.EndTimer(group, END).find() is None


def test_a_timer_goes_with_its_group_and_waits_for_it_unless_it_exists() -> None:
    group: Any = SimpleNamespace(name="demo-2-workers", aws=Aws(), find_raw=lambda: None)
    timer = eks.EndTimer(group, END)
    assert (timer.name, timer.needs, timer.goes_with) == ("demo-2-workers/mlbench-end", (group,), group)
    assert eks.EndTimer(group, END, ()).needs == ()
    (made,) = eks.timers(ClusterDetails(expires=END), [group])
    assert (made.group, made.expires) == (group, END)
    assert eks.timers(ClusterDetails(), [group]) == []


# --- EKS: the rest --------------------------------------------------------------------------------------------------

NAMES = ["mlbench-demo-2-end-0", "mlbench-demo-2-end-1", "mlbench-demo-2-end-plane", "mlbench-demo-2-end-nat"]


def plane_end(aws: Aws, nat: str = "nat-1", role: str = "role", expires: float = END, kind: Any = eks.PlaneEnd) -> Any:
    network = SimpleNamespace(nat=nat, end_role=role)
    stack: Any = SimpleNamespace(
        name="mlbench-demo-2", aws=aws, cluster=Cluster("demo-2", "eks"), network=lambda: network
    )
    return kind(stack, ["demo-2-system", "demo-2-workers"], expires, ())


def schedules(*names: str) -> Any:
    """Which of the schedules exist."""
    return lambda Name: {"Name": Name} if Name in names else NotFoundError("none")


def sent(aws: Aws) -> dict[str, tuple[str, Any]]:
    return {each["Name"]: (name, each) for _, name, each in aws.calls if name != "get_schedule"}


def test_schedules_delete_groups_control_plane_and_gateway_by_their_own_calls() -> None:
    """Scheduler's universal targets: arn:aws:scheduler:::aws-sdk:SERVICE:CALL, with the service's capitalized names."""
    aws = Aws(get_schedule=schedules())
    plane_end(aws).create()
    requests = sent(aws)
    assert {
        name: (request["Target"]["Arn"], json.loads(request["Target"]["Input"]))
        for name, (_, request) in requests.items()
    } == {
        NAMES[0]: (
            "arn:aws:scheduler:::aws-sdk:eks:deleteNodegroup",
            {"ClusterName": "demo-2", "NodegroupName": "demo-2-system"},
        ),
        NAMES[1]: (
            "arn:aws:scheduler:::aws-sdk:eks:deleteNodegroup",
            {"ClusterName": "demo-2", "NodegroupName": "demo-2-workers"},
        ),
        NAMES[2]: ("arn:aws:scheduler:::aws-sdk:eks:deleteCluster", {"Name": "demo-2"}),
        NAMES[3]: ("arn:aws:scheduler:::aws-sdk:ec2:deleteNatGateway", {"NatGatewayId": "nat-1"}),
    }
    call, request = requests[NAMES[2]]
    assert call == "create_schedule"
    assert {**request, "Target": request["Target"]["RoleArn"]} == {
        "Name": NAMES[2],
        "Description": "end of the mlbench cluster demo-2",
        "ScheduleExpression": "rate(10 minutes)",
        "StartDate": utc(END),
        "EndDate": utc(END + 12 * 3600),
        "ActionAfterCompletion": "DELETE",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "Target": "role",
    }


def test_a_schedule_that_exists_gets_its_new_time() -> None:
    aws = Aws(get_schedule=schedules(NAMES[2]))
    plane_end(aws).create()
    assert {name: call for name, (call, _) in sent(aws).items()} == {
        NAMES[0]: "create_schedule",
        NAMES[1]: "create_schedule",
        NAMES[2]: "update_schedule",
        NAMES[3]: "create_schedule",
    }


@pytest.mark.parametrize(("expires", "start"), [(NOW - 100, NOW + 60), (NOW + 60, NOW + 60), (NOW + 61, NOW + 61)])
def test_an_end_that_has_passed_begins_in_a_minute(expires: int, start: int) -> None:
    aws = Aws(get_schedule=schedules())
    plane_end(aws, expires=expires).create()
    assert sent(aws)[NAMES[0]][1]["StartDate"] == utc(start)


def test_without_a_gateway_there_are_three_schedules() -> None:
    aws = Aws(get_schedule=schedules())
    plane_end(aws, nat="").create()
    assert list(sent(aws)) == NAMES[:3]


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ((), None),
        (NAMES, ResourceStatus("scheduled")),
        (NAMES[:3], ResourceStatus("scheduled")),
        (
            NAMES[3:],
            ResourceStatus("scheduled", broken=f"{NAMES[0]}, {NAMES[1]}, {NAMES[2]} are missing"),
        ),
        ((NAMES[0], NAMES[2]), ResourceStatus("scheduled", broken=f"{NAMES[1]} are missing")),
    ],
)
def test_all_schedules_but_that_of_a_gateway_must_be_there(there: Any, found: ResourceStatus | None) -> None:
    assert plane_end(Aws(get_schedule=schedules(*there))).find() == found


@pytest.mark.parametrize(
    ("kind", "is_armed"), [(CredentialError, False), (CapacityError, False), (DeadlineError, None)]
)
def test_a_refusal_leaves_a_cluster_without_a_scheduled_deletion(kind: type[Exception], is_armed: bool | None) -> None:
    end = plane_end(Aws(get_schedule=schedules(), create_schedule=kind("no more schedules")))
    if is_armed is None:
        with pytest.raises(kind, match="no more"):
            end.create()
        return
    end.create()
    assert end.find() == ResourceStatus("not armed")
    assert end.poll() == Readiness(True, facts={"end_problem": "no more schedules"})


def test_an_older_stack_has_no_role_for_schedules() -> None:
    aws = Aws()
    end = plane_end(aws, role="")
    end.create()
    assert aws.calls == []
    assert "older version" in str(end.poll().facts["end_problem"])


def test_schedules_are_ready_when_shown_or_when_they_may_not_be_listed() -> None:
    end = plane_end(Aws(get_schedule=schedules()))
    assert end.poll() == Readiness(False, "AWS does not show them yet", {"end_problem": None})
    end = plane_end(Aws(get_schedule=schedules(*NAMES)))
    assert end.poll() == Readiness(True, "AWS does not show them yet", {"end_problem": None})
    end = plane_end(Aws(get_schedule=DENIED))
    assert end.poll().ready
    assert end.find() is None


def test_all_schedules_are_deleted_even_if_one_is_already_gone() -> None:
    aws = Aws(delete_schedule=lambda Name: NotFoundError("none") if Name == NAMES[0] else {})
    plane_end(aws).delete()
    assert [each["Name"] for _, _, each in aws.calls] == NAMES
    assert plane_end(aws).remove_command == (
        "aws scheduler list-schedules --region eu-west-1 --name-prefix mlbench-demo-2-end"
    )


def test_schedules_with_another_time_are_always_written_again() -> None:
    aws = Aws(get_schedule=schedules(*NAMES))
    moved = plane_end(aws, kind=eks.PlaneEndMoved)
    assert moved.find() is None
    moved.create()
    assert {call for call, _ in sent(aws).values()} == {"update_schedule"}
    assert moved.poll() == Readiness(True, facts={"end_problem": None})
    moved.delete()
    assert not any(name == "delete_schedule" for _, name, _ in aws.calls)
    moved.refused = "denied"
    assert moved.find() == ResourceStatus("not armed")
    assert moved.poll().facts == {"end_problem": "denied"}


def test_the_end_is_a_tag_of_the_control_plane() -> None:
    tags = {"mlbench-cluster": "demo-2", "mlbench-expires": str(END), "team": "x"}
    aws = Aws()
    described: Any = {"cluster": {"arn": "arn:x", "tags": tags}}
    aws.find = lambda service, operation, key, **_: described.get(key)  # type: ignore[attr-defined]
    cluster = Cluster("demo-2", "eks", details={"expires": END})
    tag = eks.EndTag(SimpleNamespace(cluster=cluster, name="demo-2", aws=aws))  # type: ignore[arg-type]
    assert tag.find() == ResourceStatus("set")
    tags["mlbench-expires"] = str(END - 1)
    assert tag.find() is None
    tag.create()
    wanted = {"mlbench-cluster": "demo-2", "mlbench-expires": str(END)}
    assert aws.calls == [("eks", "tag_resource", {"resourceArn": "arn:x", "tags": wanted})]
    described["cluster"].pop("tags")
    assert tag.read() == {}
    described.clear()
    with pytest.raises(UsageError, match="There is no EKS cluster demo-2 in eu-west-1"):
        tag.read()


# --- GKE ------------------------------------------------------------------------------------------------------------

MEMBER = (
    "principal://iam.googleapis.com/projects/12/locations/global/workloadIdentityPools/demo-project.svc.id.goog/"
    "subject/ns/mlbench-end-demo-2/sa/mlbench-end"
)
URL = "https://cloudresourcemanager.googleapis.com/v1/projects/demo-project"


class Manager:
    """Google's Resource Manager: one policy, and the permissions of the caller."""

    def __init__(self) -> None:
        self.policy: Any = {"etag": "e", "bindings": [{"role": "roles/viewer", "members": ["user:me"]}]}
        self.permissions: Any = list(gke.BINDING)
        self.write: Any = {}
        self.asked: list[tuple[str, str, Any]] = []

    def ask(self, service: str, method: str, url: str, what: str, project: str, body: Any, conflict: str) -> Any:
        self.asked.append((method, url, body))
        assert project == "demo-project"
        answers = {
            URL: {"projectNumber": 12},
            f"{URL}:getIamPolicy": self.policy,
            f"{URL}:setIamPolicy": self.write,
            f"{URL}:testIamPermissions": {"permissions": self.permissions},
        }
        found = self.permissions if url.endswith(":testIamPermissions") else answers[url]
        if isinstance(found, Exception):
            raise found
        return answers[url]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    found = Manager()
    monkeypatch.delenv("MLBENCH_RESOURCE_MANAGER_ENDPOINT", raising=False)
    monkeypatch.setattr(gke_api, "ask_rest", found.ask)
    return found


def test_the_account_of_the_clock_is_bound_to_the_role_of_administrators(manager: Manager) -> None:
    identity = gke.GkeEndIdentity(make_gke_plane())
    assert identity.find() is None
    identity.create()
    assert manager.asked[-1] == (
        "POST",
        f"{URL}:setIamPolicy",
        {
            "policy": {
                "etag": "e",
                "version": 3,
                "bindings": [
                    {"role": "roles/viewer", "members": ["user:me"]},
                    {"role": "roles/container.clusterAdmin", "members": [MEMBER]},
                ],
            }
        },
    )
    read = ("POST", f"{URL}:getIamPolicy", {"options": {"requestedPolicyVersion": 3}})
    assert read in manager.asked
    assert manager.asked.count(("GET", URL, None)) == 1  # the number of a project never changes


def test_a_project_without_bindings_gets_its_first(manager: Manager) -> None:
    manager.policy = {}
    gke.GkeEndIdentity(make_gke_plane()).grant()
    (binding,) = manager.asked[-1][2]["policy"]["bindings"]
    assert binding["members"] == [MEMBER]


@pytest.mark.parametrize(
    ("binding", "is_bound"),
    [
        ({"role": "roles/container.clusterAdmin", "members": ["user:me", MEMBER]}, True),
        ({"role": "roles/container.clusterAdmin", "members": [MEMBER], "condition": {"expression": "x"}}, False),
        ({"role": "roles/container.viewer", "members": [MEMBER]}, False),
        ({"role": "roles/container.clusterAdmin", "members": [MEMBER + "x"]}, False),
    ],
)
def test_only_the_role_without_a_condition_counts(manager: Manager, binding: Any, is_bound: bool) -> None:
    manager.policy["bindings"].append(binding)
    identity = gke.GkeEndIdentity(make_gke_plane())
    assert identity.find() == (ResourceStatus("bound") if is_bound else None)
    assert gke.find_ended(FakeGke()) == ({"demo-2"} if is_bound else set())


@pytest.mark.parametrize("error", [DENIED, NotFoundError("no project")])
def test_a_policy_that_may_not_be_read_binds_nothing(manager: Manager, error: Exception) -> None:
    manager.policy = error
    assert gke.GkeEndIdentity(make_gke_plane()).find() is None
    assert gke.find_ended(FakeGke()) == set()
    manager.policy = DeadlineError("late")
    with pytest.raises(DeadlineError):
        gke.GkeEndIdentity(make_gke_plane()).find()


def test_the_last_member_takes_its_binding_with_it(manager: Manager) -> None:
    manager.policy["bindings"].append({"role": "roles/container.clusterAdmin", "members": [MEMBER]})
    gke.GkeEndIdentity(make_gke_plane()).delete()
    assert manager.asked[-1][2]["policy"]["bindings"] == [{"role": "roles/viewer", "members": ["user:me"]}]


def test_a_binding_that_may_not_be_removed_stays_and_costs_nothing(manager: Manager) -> None:
    manager.policy["bindings"].append({"role": "roles/container.clusterAdmin", "members": [MEMBER]})
    manager.write = DENIED
    identity = gke.GkeEndIdentity(make_gke_plane())
    assert identity.find() == ResourceStatus("bound")
    identity.delete()
    manager.policy["bindings"].append({"role": "roles/container.clusterAdmin", "members": [MEMBER]})
    assert identity.find() == ResourceStatus("bound", kept="denied It costs nothing.")


def test_a_caller_who_may_not_bind_leaves_the_cluster_without_a_clock(manager: Manager) -> None:
    manager.write = DENIED
    identity = gke.GkeEndIdentity(make_gke_plane())
    identity.create()
    assert identity.poll() == Readiness(True, facts={"end_problem": "denied"})
    assert identity.has_right is False


def test_an_identity_is_ready_when_the_cloud_shows_its_right(manager: Manager) -> None:
    identity = gke.GkeEndIdentity(make_gke_plane())
    assert identity.poll() == Readiness(False, "the cloud does not show its right yet", {"end_problem": None})
    manager.policy["bindings"].append({"role": "roles/container.clusterAdmin", "members": [MEMBER]})
    assert identity.poll().ready
    assert identity.has_right is True


@pytest.mark.parametrize(
    ("permissions", "can"),
    [
        (list(gke.BINDING), True),
        (list(gke.BINDING)[:1], False),
        (None, False),
        (DENIED, None),
    ],
)
def test_binding_needs_to_read_and_to_write_the_policy(manager: Manager, permissions: Any, can: bool | None) -> None:
    manager.permissions = permissions
    assert gke.can_bind(FakeGke()) is can


def test_the_end_is_a_label_of_the_cluster_and_the_other_labels_stay() -> None:
    labels = {"team": "x", "mlbench-expires": "1"}
    fake = FakeGke(get_cluster=SimpleNamespace(resource_labels=labels, label_fingerprint="f"))
    plane = make_gke_plane(fake)
    plane.cluster = Cluster("demo-2", "gke", details={"expires": END})
    mark = gke.EndLabel(plane)
    assert mark.find() is None
    mark.create()
    wanted = {"team": "x", "mlbench-cluster": "demo-2", "mlbench-expires": str(END)}
    assert fake.calls[-1] == (
        "set_labels",
        {"name": plane.path, "resource_labels": wanted, "label_fingerprint": "f"},
    )
    labels.update(wanted)
    assert mark.find() == ResourceStatus("set")
    assert (mark.name, mark.goes_with) == ("demo-2/expires", plane)


def test_the_clock_of_gke_knows_the_path_of_its_cluster() -> None:
    plane = make_gke_plane()
    timer = gke.GkeEndTimer(plane)
    assert timer.environment() == {
        "MLBENCH_CLUSTER_PATH": "projects/demo-project/locations/europe-west1-b/clusters/demo-2"
    }
    assert (timer.namespace, timer.needs, timer.goes_with) == ("mlbench-end-demo-2", (plane,), plane)
    identity = gke.GkeEndIdentity(plane)
    assert gke.GkeEndTimer(plane, identity).needs == (plane, identity)


def test_a_hold_of_gke_counts_one_zone_for_a_pool_that_is_gone() -> None:
    fake = FakeGke()
    plane: Any = make_gke_plane(fake)
    pool: Any = SimpleNamespace(plane=plane, count=0, path="p", find_raw=lambda: None)
    hold = gke.GkeHold(pool)
    assert hold.needs == ()
    hold.let_shrink()
    limits = {"enabled": True, "min_node_count": 0, "max_node_count": 1}
    assert fake.calls == [("set_node_pool_autoscaling", {"name": "p", "autoscaling": limits})]
    asked: list[Any] = []

    def poll_operation(*what: Any) -> Readiness:
        asked.append(what)
        return Readiness(True)

    pool.poll_operation = poll_operation
    assert hold.poll_shrinking().ready
    assert asked == [("operation-1", "scaled down automatically")]
    identity = gke.GkeEndIdentity(plane)
    assert gke.GkeHold(pool, identity).needs == (identity, pool)


# --- AKS ------------------------------------------------------------------------------------------------------------

ROOT = f"/subscriptions/{SUBSCRIPTION}"
IDENTITY = f"{GROUP}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/mlbench-end"


def aks_plane(answers: dict[str, Any] | None = None, **details: Any) -> Any:
    plane = make_aks_plane(FakeAzure(answers))
    plane.group.cluster = Cluster("demo-2", "aks", details=details, location="eastus")
    plane.cluster = plane.group.cluster
    return plane


def test_the_identity_of_the_end_may_only_change_the_clusters_group() -> None:
    plane = aks_plane({IDENTITY: {"properties": {"principalId": "p-1"}}})
    identity = AksEndIdentity(plane.group)
    identity.create()
    (make, assign) = plane.azure.changes
    assert make == ("PUT", IDENTITY, {"location": "eastus", "tags": {"mlbench-cluster": "demo-2"}})
    method, path, body = assign
    assert method == "PUT"
    assert path.startswith(f"{GROUP}/providers/Microsoft.Authorization/roleAssignments/")
    role = "b24988ac-6180-42a0-ab88-20f7382dd24c"  # Contributor, in Microsoft's list of built-in roles
    assert body == {
        "properties": {
            "roleDefinitionId": f"{ROOT}/providers/Microsoft.Authorization/roleDefinitions/{role}",
            "principalId": "p-1",
            "principalType": "ServicePrincipal",
        }
    }
    assert identity.find() is None
    plane.azure.answers[path] = {}
    assert identity.find() == ResourceStatus("has its role")
    del plane.azure.answers[IDENTITY]
    assert identity.find() is None
    identity.refused = "denied"
    assert identity.find() == ResourceStatus("without a role")
    assert (identity.needs, identity.goes_with) == ((plane.group,), plane.group)


ISSUER = {"properties": {"oidcIssuerProfile": {"issuerURL": "https://issuer"}}}


def test_the_identity_trusts_the_account_of_the_clock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Any] = []
    monkeypatch.setattr("providers.kubernetes_calls.ClusterObjects.create", lambda self: created.append(self))
    plane = aks_plane({f"{GROUP}/providers/Microsoft.ContainerService/managedClusters/demo-2": ISSUER}, expires=END)
    timer = AksEndTimer(plane)
    timer.create()
    assert plane.azure.changes == [
        (
            "PUT",
            f"{IDENTITY}/federatedIdentityCredentials/mlbench-end",
            {
                "properties": {
                    "issuer": "https://issuer",
                    "subject": "system:serviceaccount:mlbench-end:mlbench-end",
                    "audiences": ["api://AzureADTokenExchange"],
                }
            },
        )
    ]
    assert created == [timer]


@pytest.mark.parametrize("profile", [None, {}, {"issuerURL": ""}])
def test_a_cluster_without_an_issuer_is_asked_about_again(profile: Any) -> None:
    path = f"{GROUP}/providers/Microsoft.ContainerService/managedClusters/demo-2"
    plane = aks_plane({path: {"properties": {"oidcIssuerProfile": profile}}})
    with pytest.raises(TransientError, match="does not show the issuer"):
        AksEndTimer(plane).create()
    assert plane.azure.changes == []


def test_the_clock_of_aks_signs_in_as_the_identity() -> None:
    """The variables are those of Azure's workload identity."""
    plane = aks_plane({IDENTITY: {"properties": {"clientId": "c-1", "tenantId": "t-1"}}}, expires=END)
    timer = AksEndTimer(plane)
    assert timer.environment() == {
        "MLBENCH_GROUP_PATH": GROUP,
        "AZURE_CLIENT_ID": "c-1",
        "AZURE_TENANT_ID": "t-1",
        "AZURE_FEDERATED_TOKEN_FILE": "/var/run/secrets/azure/tokens/token",
    }
    job = timer.documents()[-1]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = job["containers"]
    (mount,) = container["volumeMounts"]
    token = job["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"]
    file = next(item["value"] for item in container["env"] if item["name"] == "AZURE_FEDERATED_TOKEN_FILE")
    assert f"{mount['mountPath']}/{token['path']}" == file
    assert token["audience"] == "api://AzureADTokenExchange"


def test_a_pool_of_aks_may_shrink_to_nothing_and_keeps_its_other_properties() -> None:
    pool = make_aks_pool(Machine("Standard_D4s_v5"), aks_plane())
    pool.azure.answers[pool.path] = {"properties": {"vmSize": "x", "count": 3}}  # type: ignore[attr-defined]
    hold = AksHold(pool)
    hold.let_shrink()
    properties = {"vmSize": "x", "count": 3, "enableAutoScaling": True, "minCount": 0, "maxCount": 3}
    assert pool.azure.changes == [("PUT", pool.path, {"properties": properties})]  # type: ignore[attr-defined]
    assert hold.needs == ()
    identity = AksEndIdentity(pool.plane.group)
    assert AksHold(pool, identity).needs == (identity, pool)
    pool.count = 0
    hold.let_shrink()
    assert pool.azure.changes[-1][2]["properties"]["maxCount"] == 1  # type: ignore[attr-defined]
    assert hold.poll_shrinking().ready


def test_the_end_is_a_tag_of_the_group_and_the_other_tags_stay() -> None:
    plane = aks_plane({GROUP: {"tags": {"team": "x"}}}, expires=END)
    mark = EndTags(plane.group)
    assert mark.find() is None
    mark.create()
    tags = {"team": "x", "mlbench-cluster": "demo-2", "mlbench-expires": str(END)}
    assert plane.azure.changes == [("PATCH", GROUP, {"tags": tags})]
    plane.azure.answers[GROUP] = {"tags": tags}
    assert mark.find() == ResourceStatus("set")
    plane.azure.answers[GROUP] = {}
    assert mark.read() == {}
    plane.azure.answers.clear()
    with pytest.raises(NotFoundError, match='no resource group "mlbench-demo-2-eastus"'):
        mark.read()


@pytest.mark.parametrize(
    ("granted", "can"),
    [
        ([{"actions": ["*"]}], True),
        ([{"actions": ["microsoft.authorization/*"]}], True),
        ([{"actions": ["*"], "notActions": ["Microsoft.Authorization/*/Write"]}], False),
        ([], False),
        (DENIED, None),
    ],
)
def test_assigning_the_role_needs_a_right_that_contributors_lack(granted: Any, can: bool | None) -> None:
    """The built-in role Contributor has the actions * without Microsoft.Authorization/*/Write."""
    path = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Authorization/permissions"
    assert can_assign(FakeAzure({path: granted})) is can


# --- what GKE and AKS share -----------------------------------------------------------------------------------------


class Api:
    """The cluster's objects by path; None as the whole if the cluster is gone."""

    def __init__(self, objects: dict[str, Any] | None) -> None:
        self.objects = objects
        self.asked: list[str] = []

    def read(self, document: Any) -> Any:
        self.asked.append(f"{document['kind']} {document['metadata']['namespace']}/{document['metadata']['name']}")
        return (self.objects or {}).get(document["kind"])


class Timer(EndTimer):
    image, script = "python:3", "gke_end.py"

    def environment(self) -> Mapping[str, str]:
        return {"MLBENCH_CLUSTER_PATH": "a/b"}


def timer_until(expires: float | None, cron_job: Any = None) -> tuple[Timer, Api]:
    cluster = Cluster("demo-2", "gke", details={} if expires is None else {"expires": expires})
    found = Timer(cluster, lambda: None, "space", None, (), None)  # type: ignore[arg-type,return-value]
    api = Api({"CronJob": cron_job})
    found.read = api.read  # type: ignore[method-assign]
    return found, api


def cron_job(expires: str | None) -> Any:
    return {"metadata": {"annotations": {"mlbench/expires": expires}} if expires else {}}


@pytest.mark.parametrize(
    ("found", "is_armed"),
    [
        (cron_job(str(END)), True),
        (cron_job(str(END + 1)), False),
        (cron_job(None), False),
        ({"metadata": {"annotations": None}}, False),
        (None, False),
    ],
)
def test_a_clock_is_armed_if_it_shows_the_right_time(found: Any, is_armed: bool) -> None:
    timer, api = timer_until(END + 0.5, found)
    assert timer.find() == (ResourceStatus("armed") if is_armed else None)
    assert api.asked == ["CronJob space/mlbench-end"]


def test_without_its_right_a_clock_is_not_looked_for() -> None:
    timer, api = timer_until(END)
    timer.identity = SimpleNamespace(refused="denied")  # type: ignore[assignment]
    assert timer.find() == ResourceStatus("not armed")
    assert api.asked == []
    timer.identity = SimpleNamespace(refused=None)  # type: ignore[assignment]
    assert timer.find() is None


def test_the_objects_of_a_clock_are_a_namespace_an_account_and_a_cron_job() -> None:
    space, account, job = timer_until(END)[0].documents()
    assert space["metadata"]["name"] == account["metadata"]["namespace"] == job["metadata"]["namespace"] == "space"
    assert account["metadata"]["name"] == job["metadata"]["name"] == "mlbench-end"
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "mlbench-end"
    assert pod["nodeSelector"] == {"mlbench-role": "system"}
    (container,) = pod["containers"]
    assert container["image"] == "python:3"
    assert container["env"] == [
        {"name": "MLBENCH_EXPIRES", "value": str(END)},
        {"name": "MLBENCH_CLUSTER_PATH", "value": "a/b"},
    ]
    assert container["command"][:2] == ["python3", "-c"]
    compile(container["command"][2], "gke_end.py", "exec")
    assert "volumes" not in pod
    assert job["metadata"]["annotations"] == {"mlbench/expires": str(END)}
    # The next run is due in 5 minutes, so one that hangs has to end before.
    assert job["spec"]["schedule"] == "*/5 * * * *"
    assert job["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"] < 300


def test_a_cluster_without_an_end_has_a_clock_at_zero() -> None:
    assert timer_until(None)[0].expires == 0


class Mark(EndMark):
    kind = "mark"

    def __init__(self, shown: dict[str, str], **details: Any) -> None:
        marked: Any = SimpleNamespace(name="demo-2")
        super().__init__(Cluster("demo-2", "gke", details=details), marked)
        self.shown = shown

    def read(self) -> Mapping[str, str]:
        return self.shown

    def write(self, tags: Mapping[str, str]) -> None:
        self.shown |= tags


@pytest.mark.parametrize(
    ("shown", "is_set"),
    [
        ({"mlbench-cluster": "demo-2", "mlbench-expires": str(END), "mlbench-owner": "me", "x": "y"}, True),
        ({"mlbench-cluster": "demo-2", "mlbench-expires": str(END)}, False),
        ({"mlbench-cluster": "demo-2", "mlbench-expires": "1", "mlbench-owner": "me"}, False),
        ({}, False),
    ],
)
def test_a_mark_is_set_if_the_cloud_shows_all_tags_of_the_cluster(shown: dict[str, str], is_set: bool) -> None:
    mark = Mark(shown, expires=END, owner="me")
    assert mark.find() == (ResourceStatus("set") if is_set else None)
    mark.create()
    assert mark.find() == ResourceStatus("set")
    assert isinstance(mark, Part)


class Hold(WorkerHold):
    image = "pause"
    shrunk = False

    def let_shrink(self) -> None:
        self.shrunk = True

    def poll_shrinking(self) -> Readiness:
        return Readiness(False, "it shrinks")


def make_hold(identity: Any = None, job: Any = None) -> tuple[Hold, Api]:
    cluster = Cluster("demo-2", "gke", details={"expires": END})
    hold = Hold(cluster, lambda: None, "space", 3, identity, (), None)  # type: ignore[arg-type,return-value]
    api = Api({"Job": job})
    hold.read = api.read  # type: ignore[method-assign]
    return hold, api


@pytest.mark.parametrize("identity", [None, SimpleNamespace(has_right=False)])
def test_workers_are_held_if_nobody_may_delete_the_cluster(identity: Any) -> None:
    hold, _ = make_hold(identity)
    assert hold.find() is None
    assert hold.poll() == Readiness(False, "it shrinks")


def test_workers_are_not_held_if_the_cluster_deletes_itself() -> None:
    hold, _ = make_hold(SimpleNamespace(has_right=True))
    assert hold.find() == ResourceStatus("not needed")
    assert hold.poll() == Readiness(True)


def test_a_hold_has_one_pod_on_each_worker_until_the_end() -> None:
    hold, _ = make_hold()
    job = hold.documents()[-1]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["activeDeadlineSeconds"]) == (3, 3, 3600)
    assert pod["nodeSelector"] == {"mlbench-role": "worker"}
    assert pod["containers"][0]["image"] == "pause"
    assert (job["metadata"]["name"], job["metadata"]["namespace"]) == ("mlbench-hold", "space")
    spread = pod["topologySpreadConstraints"][0]
    assert spread["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_a_hold_that_runs_keeps_its_start_and_the_pool_may_shrink_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    monkeypatch.setattr(ClusterObjects, "create", lambda self: made.append(self.shrunk))
    hold, api = make_hold(job={"status": {"startTime": "2026-11-21T11:50:00Z"}})
    hold.create()
    assert hold.documents()[-1]["spec"]["activeDeadlineSeconds"] == 3600 + 600
    assert (made, hold.shrunk) == ([False], True)
    assert api.asked == ["Job space/mlbench-hold"]


def test_what_a_held_cluster_costs_at_its_end_is_said() -> None:
    lines = [
        {"what": "GKE control plane", "count": 1, "price_per_hour": 0.1, "as_of": None},
        {"what": "worker n1-standard-4", "count": 2, "price_per_hour": 9.0, "as_of": None},
    ]
    words = describe_hold(Cluster("demo-2", "gke", details={"plan": {"lines": lines, "currency": "USD"}}), "Denied.")
    assert words.startswith("Denied. So only the workers expire")
    assert "remain and cost up to 0.10 USD/h until mlbench gc --expired or delete-cluster." in words
