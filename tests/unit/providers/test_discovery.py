"""The clusters that a search finds in a cloud: documents from tags, and what remains of clusters that are gone."""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from mlbench_cli.errors import CredentialError, DeadlineError, NotFoundError
from mlbench_cli.model.run import Cluster
from providers.aks import discovery as aks
from providers.base import PartialSearchError, TransientError
from providers.eks import discovery as eks
from providers.gke import discovery as gke
from providers.gke.networks import NetworkMark
from tests.fakes.aws_operations import check_operation

NOW = 1_795_262_400.0  # 2026-11-21T12:00:00Z
DENIED = CredentialError("denied")


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)


def answer(found: Any) -> Any:
    if isinstance(found, Exception):
        raise found
    return found


# --- AKS ------------------------------------------------------------------------------------------------------------

SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
TAGS = {
    "mlbench-cluster": "demo-2",
    "mlbench-owner": "me",
    "mlbench-expires": "1795270000",
    "mlbench-created": "1795262000",
}


def group(name: str = "mlbench-demo-2-eastus", region: str = "eastus", state: str = "Succeeded", **tags: str) -> Any:
    return {"name": name, "location": region, "tags": {**TAGS, **tags}, "properties": {"provisioningState": state}}


def plane(*pools: Any, state: str = "Succeeded") -> Any:
    """A cluster in Azure, which writes names of groups in another case than mlbench."""
    group = f"/subscriptions/{SUBSCRIPTION}/resourcegroups/MLBENCH-demo-2-eastus"
    path = f"{group}/providers/Microsoft.ContainerService/managedClusters/demo-2"
    return {"id": path, "name": "demo-2", "properties": {"provisioningState": state, "agentPoolProfiles": list(pools)}}


def pool(**more: Any) -> Any:
    return {"name": "workers", "vmSize": "standard_nc4as_t4_v3", "count": 3, "provisioningState": "Succeeded", **more}


class Azure:
    groups: Sequence[Any] = ()
    planes: Sequence[Any] = ()
    asked: ClassVar[list[str]] = []

    def __init__(self, subscription: str, location: str) -> None:
        self.root = f"/subscriptions/{subscription}"

    def list_all(self, path: str, what: str) -> list[Any]:
        Azure.asked.append(path)
        return list(self.planes if "managedClusters" in path else self.groups)


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> type[Azure]:
    monkeypatch.setattr(aks, "Azure", Azure)
    Azure.groups, Azure.planes, Azure.asked = [group()], [plane({"name": "system", "vmSize": "x"}, pool())], []
    return Azure


def find_aks(location: str | None = None) -> list[Cluster]:
    return aks.discover_clusters(SUBSCRIPTION, location)


DETAILS = {
    "subscription": SUBSCRIPTION,
    "location": "eastus",
    "nodes": 3,
    "gpus_per_node": 1,
    "options": {
        "region": "eastus",
        "subscription": SUBSCRIPTION,
        "machine_type": "Standard_NC4as_T4_v3",
        "spot": False,
        "compact_placement": False,
    },
    "owner": "me",
    "expires": 1795270000,
    "node_selector": {"mlbench-role": "worker"},
    "machine_type": "Standard_NC4as_T4_v3",
    "gpu": "t4",
}


def test_a_cluster_on_aks_is_recorded_from_its_group_and_its_pool(azure: type[Azure]) -> None:
    (found,) = find_aks()
    assert found == Cluster("demo-2", "aks", "ready", "2026-11-21T11:53:20.000Z", DETAILS, SUBSCRIPTION, "eastus")
    assert azure.asked == [
        f"/subscriptions/{SUBSCRIPTION}/resourcegroups?$filter=tagName%20eq%20%27mlbench-cluster%27",
        f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.ContainerService/managedClusters",
    ]


@pytest.mark.parametrize(
    ("more", "details"),
    [
        ({"count": None}, {"nodes": 0}),
        ({"vmSize": "Standard_X9_v9"}, {"machine_type": "Standard_X9_v9", "gpu": None, "gpus_per_node": 0}),
        ({"availabilityZones": ["2", "3"]}, {"location": "eastus-2"}),
        (
            {"scaleSetPriority": "Spot"},
            {"tolerations": ["kubernetes.azure.com/scalesetpriority=spot:NoSchedule"]},
        ),
        (
            {"vmSize": "standard_nd96isr_h100_v5"},
            {
                "machine_type": "Standard_ND96isr_H100_v5",
                "gpu": "h100",
                "gpus_per_node": 8,
                "fabric": {"name": "InfiniBand", "gbits": 3200},
            },
        ),
    ],
)
def test_a_pool_of_aks_tells_what_its_machines_are(azure: type[Azure], more: Any, details: Any) -> None:
    azure.planes = [plane(pool(**more))]
    (found,) = find_aks()
    assert {**found.details, "options": None} == {**DETAILS, **details, "options": None}
    assert found.details["options"]["spot"] == (more.get("scaleSetPriority") == "Spot")


def test_a_pool_in_a_placement_group_is_compact(azure: type[Azure]) -> None:
    azure.planes = [plane(pool(proximityPlacementGroupID="/x"))]
    assert find_aks()[0].details["options"]["compact_placement"] is True


@pytest.mark.parametrize(
    ("group_state", "state", "pool_state", "expected"),
    [
        ("Succeeded", "Succeeded", "Succeeded", "ready"),
        ("Succeeded", "Updating", "Updating", "ready"),
        ("Succeeded", "Creating", "Creating", "creating"),
        ("Succeeded", "Succeeded", "Creating", "creating"),
        ("Succeeded", "Succeeded", "Failed", "failed"),
        ("Succeeded", "Succeeded", "Canceled", "failed"),
        ("Succeeded", "Failed", "Succeeded", "failed"),
        ("Succeeded", "Deleting", "Succeeded", "deleting"),
        ("Deleting", "Succeeded", "Succeeded", "deleting"),
        ("Succeeded", "Succeeded", None, "failed"),
        ("Succeeded", "Creating", None, "creating"),
    ],
)
def test_a_cluster_on_aks_is_as_ready_as_its_worst_part(
    azure: type[Azure], group_state: str, state: str, pool_state: str | None, expected: str
) -> None:
    pools = [pool(provisioningState=pool_state)] if pool_state else []
    azure.groups, azure.planes = [group(state=group_state)], [plane(*pools, state=state)]
    assert find_aks()[0].state == expected


@pytest.mark.parametrize(
    ("created", "state", "stamp"),
    [
        (str(int(NOW) - 899), "creating", "2026-11-21T11:45:01.000Z"),
        (str(int(NOW) - 900), "failed", "2026-11-21T11:45:00.000Z"),
        ("soon", "failed", ""),
    ],
)
def test_a_group_without_a_cluster_is_young_for_a_quarter_of_an_hour(
    azure: type[Azure], created: str, state: str, stamp: str
) -> None:
    azure.groups, azure.planes = [group(**{"mlbench-created": created})], []
    (found,) = find_aks()
    assert (found.state, found.created, found.details["nodes"]) == (state, stamp, 0)
    assert "node_selector" not in found.details


def test_aks_own_group_with_inherited_tags_is_no_cluster(azure: type[Azure]) -> None:
    azure.groups = [group(), group("MC_mlbench-demo-2-eastus_demo-2_eastus")]
    assert len(find_aks()) == 1
    azure.groups = [{"name": "mlbench-demo-2-eastus", "location": "eastus"}]
    assert find_aks() == []


def test_names_of_groups_are_compared_without_their_case(azure: type[Azure]) -> None:
    azure.groups = [group("Mlbench-DEMO-2-eastus")]
    assert find_aks()[0].state == "ready"


def test_a_search_of_one_region_leaves_out_the_others(azure: type[Azure]) -> None:
    azure.groups = [group(), group("mlbench-demo-2-westus", "westus")]
    assert [found.location for found in find_aks("westus")] == ["westus"]
    assert [found.location for found in find_aks(None)] == ["eastus", "westus"]


def test_without_groups_no_clusters_are_asked_for(azure: type[Azure]) -> None:
    azure.groups = []
    assert find_aks() == []
    assert len(azure.asked) == 1


IMAGES = "mlbench-demo-2-eastus-images"


def test_a_registry_outlives_its_cluster_and_is_found_as_its_remains(azure: type[Azure]) -> None:
    azure.groups = [group(IMAGES)]
    (found,) = find_aks()
    assert (found.name, found.state, found.location) == ("demo-2", "failed", "eastus")
    assert found.details["registry_made"] is True
    assert found.details["registry"].startswith("mlbench")
    assert found.details["registry"].endswith(".azurecr.io/mlbench")
    assert find_aks("westus") == []
    assert len(find_aks("eastus")) == 1


def test_a_registry_whose_cluster_exists_or_that_was_kept_is_not_listed(azure: type[Azure]) -> None:
    azure.groups = [group(), group(IMAGES)]
    assert [found.state for found in find_aks()] == ["ready"]
    azure.groups = [group(IMAGES, **{"mlbench-kept": "true"})]
    assert find_aks() == []


# --- EKS ------------------------------------------------------------------------------------------------------------

CREATED = datetime.datetime(2026, 11, 21, 11, 53, 20, 999, tzinfo=datetime.UTC)


def tag_list(**tags: str) -> list[dict[str, str]]:
    named = {"mlbench-cluster": "demo-2", **{f"mlbench-{key}": value for key, value in tags.items()}}
    return [{"Key": key, "Value": value} for key, value in named.items()]


def tag_dict(**tags: str) -> dict[str, str]:
    return {item["Key"]: item["Value"] for item in tag_list(**tags)}


class Aws:
    """One region: answers by operation."""

    def __init__(self, region: str = "eu-west-1", **answers: Any) -> None:
        self.region = region
        self.answers: dict[str, Any] = {
            "describe_placement_groups": {"PlacementGroups": []},
            "get_caller_identity": {"Account": "123456789012"},
            **answers,
        }
        self.calls: list[tuple[str, str, Any]] = []

    def client(self, service: str) -> None:
        self.calls.append((service, "client", None))

    def call(self, service: str, operation: str, **parameters: Any) -> Any:
        check_operation(service, operation)
        self.calls.append((service, operation, parameters))
        return answer(self.answers[operation])

    def pages(self, service: str, operation: str, key: str, **parameters: Any) -> list[Any]:
        check_operation(service, operation)
        self.calls.append((service, operation, parameters))
        return list(answer(self.answers.get(operation, [])))

    def find(self, service: str, operation: str, key: str, **parameters: Any) -> Any:
        try:
            return self.call(service, operation, **parameters)[key]
        except (KeyError, NotFoundError):
            return None


STACK = {"StackName": "mlbench-demo-2", "CreationTime": CREATED, "Tags": tag_list(owner="me", expires="1795270000")}
PLANE = {"status": "ACTIVE", "tags": tag_dict(owner="me", expires="1795270000"), "createdAt": CREATED}
GROUP = {"status": "ACTIVE", "instanceTypes": ["g5.12xlarge", "g6.12xlarge"], "scalingConfig": {"desiredSize": 3}}


def whole(**answers: Any) -> Aws:
    """A region with one complete cluster."""
    return Aws(
        **{
            "describe_stacks": [STACK],
            "list_clusters": ["demo-2"],
            "describe_cluster": {"cluster": PLANE},
            "describe_nodegroup": {"nodegroup": GROUP},
            **answers,
        }
    )


def search(aws: Aws) -> list[Cluster]:
    return eks._search_region(aws)  # type: ignore[arg-type]


def test_a_cluster_on_eks_is_recorded_from_its_stack_and_its_workers() -> None:
    aws = whole()
    (found,) = search(aws)
    assert found == Cluster(
        "demo-2",
        "eks",
        "ready",
        "2026-11-21T11:53:20Z",
        {
            "region": "eu-west-1",
            "location": "eu-west-1",
            "owner": "me",
            "expires": 1795270000,
            "nodes": 3,
            "machine_type": "g5.12xlarge",
            "gpus_per_node": 4,
            "gpu": "A10G",
            "node_selector": {"mlbench-role": "worker"},
        },
        "123456789012",
        "eu-west-1",
    )
    (asked,) = [each for _, name, each in aws.calls if name == "describe_nodegroup"]
    assert asked == {"clusterName": "demo-2", "nodegroupName": "demo-2-workers"}


@pytest.mark.parametrize(
    ("answers", "state", "nodes"),
    [
        ({}, "ready", 3),
        ({"describe_nodegroup": {"nodegroup": {**GROUP, "status": "UPDATING"}}}, "ready", 3),
        ({"describe_nodegroup": {"nodegroup": {**GROUP, "status": "DEGRADED"}}}, "failed", None),
        ({"describe_nodegroup": NotFoundError("none")}, "failed", None),
        ({"describe_cluster": {"cluster": {**PLANE, "status": "UPDATING"}}}, "failed", 3),
        ({"describe_cluster": NotFoundError("none")}, "failed", None),
        ({"list_clusters": []}, "failed", None),
        ({"describe_stacks": []}, "ready", 3),
    ],
)
def test_a_cluster_on_eks_is_ready_with_control_plane_and_workers(
    answers: dict[str, Any], state: str, nodes: int | None
) -> None:
    (found,) = search(whole(**answers))
    assert (found.state, found.details.get("nodes")) == (state, nodes)
    assert found.created == "2026-11-21T11:53:20Z"


def test_workers_of_a_type_without_gpus_or_without_a_type() -> None:
    (found,) = search(whole(describe_nodegroup={"nodegroup": {**GROUP, "instanceTypes": ["m5.xlarge"]}}))
    assert [found.details[key] for key in ("machine_type", "gpus_per_node", "gpu")] == ["m5.xlarge", 0, None]
    (found,) = search(whole(describe_nodegroup={"nodegroup": {**GROUP, "instanceTypes": None}}))
    assert found.details["machine_type"] == ""


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        ("describe_vpcs", [{"Tags": tag_list(owner="me")}]),
        ("describe_launch_templates", [{"Tags": tag_list(owner="me")}]),
        ("describe_placement_groups", {"PlacementGroups": [{"Tags": tag_list(owner="me")}]}),
        ("describe_stacks", [{"StackName": "other", "Tags": tag_list(owner="me")}]),
    ],
)
def test_any_part_with_the_tag_reveals_a_cluster_whose_stack_is_gone(operation: str, found: Any) -> None:
    aws = Aws(**{operation: found})
    assert search(aws) == [
        Cluster(
            "demo-2",
            "eks",
            "failed",
            "",
            {"region": "eu-west-1", "location": "eu-west-1", "owner": "me"},
            "123456789012",
            "eu-west-1",
        )
    ]
    if operation != "describe_stacks":
        filters = {name: each["Filters"] for _, name, each in aws.calls if each and "Filters" in each}
        assert filters[operation] == [{"Name": "tag-key", "Values": ["mlbench-cluster"]}]


def test_what_has_no_tag_of_mlbench_is_left_out_and_no_account_is_asked_for() -> None:
    aws = Aws(
        describe_stacks=[{"StackName": "mlbench-x", "Tags": []}],
        list_clusters=["other"],
        describe_cluster={"cluster": {"status": "ACTIVE"}},
    )
    assert search(aws) == []
    assert not any(name == "get_caller_identity" for _, name, _ in aws.calls)


def test_clusters_of_a_region_are_sorted_by_name() -> None:
    stacks = [{"StackName": name, "Tags": [{"Key": "mlbench-cluster", "Value": name}]} for name in ("b-1", "a-1")]
    assert [found.name for found in search(Aws(describe_stacks=stacks))] == ["a-1", "b-1"]


@pytest.mark.parametrize(
    ("stack", "tags", "expires"),
    [
        ({"expires": "1000"}, {"expires": "2000"}, 2000),
        ({"expires": "2000"}, {"expires": "1000"}, 2000),
        ({"expires": "2000"}, {}, 2000),
        ({}, {"expires": "2000"}, 2000),
        ({"expires": "never"}, {"expires": "2000"}, 2000),
        ({"expires": "2000"}, {"expires": "never"}, 2000),
        ({}, {}, None),
    ],
)
def test_the_latest_end_in_the_tags_of_a_cluster_counts(
    stack: dict[str, str], tags: dict[str, str], expires: int | None
) -> None:
    """`mlbench extend` and `create-cluster --ttl` change only the tag of the control plane."""
    (found,) = search(
        whole(
            describe_stacks=[{**STACK, "Tags": tag_list(**stack)}],
            describe_cluster={"cluster": {**PLANE, "tags": tag_dict(**tags)}},
        )
    )
    assert found.details.get("expires") == expires


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Aws]:
    """Three regions, each with a stack; the caller's own is the second."""
    names = ("ap-south-1", "eu-west-1", "us-east-1")
    found = {
        name: Aws(
            name, describe_stacks=[{"StackName": "s", "Tags": [{"Key": "mlbench-cluster", "Value": f"at-{name}"}]}]
        )
        for name in names
    }
    found["eu-west-1"].answers["describe_regions"] = {"Regions": [{"RegionName": name} for name in names]}
    monkeypatch.setattr(eks, "aws_in", lambda region: found[region])
    monkeypatch.setattr(eks, "region_of", lambda asked: asked or "eu-west-1")
    return found


def test_all_regions_of_the_account_are_searched_and_the_own_one_first(regions: dict[str, Aws]) -> None:
    found = eks.discover_clusters(None)
    assert [(item.name, item.location) for item in found] == [
        ("at-eu-west-1", "eu-west-1"),
        ("at-ap-south-1", "ap-south-1"),
        ("at-us-east-1", "us-east-1"),
    ]
    for aws in regions.values():
        assert [service for service, name, _ in aws.calls if name == "client"] == ["cloudformation", "eks", "ec2"]


def test_a_search_of_one_region_asks_no_other(regions: dict[str, Aws]) -> None:
    assert [item.name for item in eks.discover_clusters("us-east-1")] == ["at-us-east-1"]
    assert regions["eu-west-1"].calls == []


def test_a_region_that_the_account_may_not_use_is_skipped(regions: dict[str, Aws]) -> None:
    regions["us-east-1"].answers["describe_stacks"] = DENIED
    assert [item.location for item in eks.discover_clusters(None)] == ["eu-west-1", "ap-south-1"]


def test_regions_that_do_not_answer_are_named_with_what_the_others_have(regions: dict[str, Aws]) -> None:
    regions["us-east-1"].answers["describe_stacks"] = TransientError("late", hint="repeat")
    regions["ap-south-1"].answers["describe_stacks"] = TransientError("slow", hint="wait")
    with pytest.raises(PartialSearchError) as caught:
        eks.discover_clusters(None)
    assert caught.value.message == "AWS did not answer for ap-south-1, us-east-1: slow"
    assert caught.value.hint == "wait"
    assert [item.location for item in caught.value.found] == ["eu-west-1"]


@pytest.mark.parametrize("error", [DENIED, TransientError("late")])
def test_an_error_of_the_own_region_is_the_searchs_error(regions: dict[str, Aws], error: Exception) -> None:
    regions["eu-west-1"].answers["describe_stacks"] = error
    with pytest.raises(type(error), match=str(error)):
        eks.discover_clusters(None)


# --- GKE ------------------------------------------------------------------------------------------------------------


def gke_pool(name: str = "workers", count: int = 3, state: str = "RUNNING", gpu: Any = None, **config: Any) -> Any:
    accelerators = [SimpleNamespace(accelerator_type=gpu, accelerator_count=2)] if gpu else []
    machine = {"machine_type": "n1-standard-8", "spot": False, "accelerators": accelerators, **config}
    return SimpleNamespace(
        name=name,
        initial_node_count=count,
        locations=["europe-west1-b"],
        status=SimpleNamespace(name=state),
        config=SimpleNamespace(**machine),
    )


def gke_cluster(
    *pools: Any, name: str = "demo-2", location: str = "europe-west1-b", state: str = "RUNNING", **labels: str
) -> Any:
    return SimpleNamespace(
        name=name,
        location=location,
        status=SimpleNamespace(name=state),
        node_pools=list(pools),
        current_node_count=5,
        create_time="2026-11-21T11:53:20+00:00",
        resource_labels={"mlbench-cluster": name, **{f"mlbench-{key}": value for key, value in labels.items()}},
    )


class Google:
    """A project: clusters, and what other services tell of clusters that are gone."""

    def __init__(self) -> None:
        self.clusters: list[Any] = [gke_cluster(gke_pool("system", 2), gke_pool())]
        self.missing: list[str] = []
        self.repositories: Any = []
        self.marks: list[NetworkMark] = []
        self.ended: set[str] = set()
        self.disks: Any = []
        self.balancers: Any = {}
        self.places: Any = {}
        self.asked: list[Any] = []


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Google:
    world = Google()

    class Gke:
        def __init__(self, project: str, location: str) -> None:
            self.project, self.location = project, location

        def call(self, method: str, **request: Any) -> Any:
            world.asked.append((method, request))
            return SimpleNamespace(clusters=world.clusters, missing_zones=world.missing)

    monkeypatch.setattr(gke, "Gke", Gke)
    monkeypatch.setattr(gke, "list_repositories", lambda project: answer(world.repositories))
    monkeypatch.setattr(gke, "find_marks", lambda project: world.marks)
    monkeypatch.setattr(gke, "find_ended", lambda found: world.ended)
    monkeypatch.setattr(gke, "list_claimed_disks", lambda project: answer(world.disks))
    monkeypatch.setattr(gke, "list_balancers", lambda project: answer(world.balancers))
    monkeypatch.setattr(gke, "list_places", lambda project, balancers: answer(world.places))
    return world


def find_gke(location: str = "-") -> list[Cluster]:
    return gke.discover_clusters("demo", location)


GKE_DETAILS: dict[str, Any] = {
    "project": "demo",
    "location": "europe-west1-b",
    "nodes": 3,
    "gpus_per_node": 0,
    "options": {
        "zone": "europe-west1-b",
        "project": "demo",
        "worker_zone": ("europe-west1-b",),
        "machine_type": "n1-standard-8",
        "spot": False,
        "fast_network": False,
    },
    "owner": None,
    "node_selector": {"mlbench-role": "worker"},
    "gpu": None,
    "machine_type": "n1-standard-8",
    "fabric": {},
}
FOUND = Cluster("demo-2", "gke", "ready", "2026-11-21T11:53:20+00:00", GKE_DETAILS, "demo", "europe-west1-b")


def test_a_cluster_on_gke_is_recorded_from_its_labels_and_its_pools(google: Google) -> None:
    assert find_gke() == [FOUND]
    assert google.asked == [("list_clusters", {"parent": "projects/demo/locations/-"})]


def test_labels_of_a_cluster_on_gke_tell_owner_end_registry_and_network(google: Google) -> None:
    machines = gke_pool(gpu="nvidia-h100-80gb", machine_type="a3-highgpu-8g", spot=True)
    google.clusters = [gke_cluster(machines, owner="me", expires="1795270000", registry="auto", fabric="tcpx")]
    (found,) = find_gke()
    options = {**GKE_DETAILS["options"], "machine_type": "a3-highgpu-8g", "spot": True, "fast_network": True}
    assert found.details == {
        **GKE_DETAILS,
        "nodes": 5,
        "owner": "me",
        "expires": 1795270000,
        "registry_made": True,
        "gpu": "nvidia-h100-80gb",
        "gpus_per_node": 2,
        "machine_type": "a3-highgpu-8g",
        "options": options,
        "fabric": {"name": "GPUDirect-TCPX", "gbits": 800, "setup": "tcpx"},
    }


def test_a_regional_cluster_has_a_region_instead_of_a_zone(google: Google) -> None:
    google.clusters = [gke_cluster(gke_pool(), location="europe-west1")]
    (found,) = find_gke()
    assert found.details["options"]["region"] == found.location == "europe-west1"
    assert "zone" not in found.details["options"]


def test_clusters_of_others_are_left_out(google: Google) -> None:
    """A copy of a cluster may have its labels, but never its name."""
    google.clusters[0].resource_labels = {"mlbench-cluster": "another"}
    assert find_gke() == []
    google.clusters[0].resource_labels = {}
    assert find_gke() == []


@pytest.mark.parametrize(
    ("state", "pool_state", "expected"),
    [
        ("RUNNING", "RUNNING", "ready"),
        ("RECONCILING", "RUNNING", "ready"),
        ("DEGRADED", "RUNNING", "ready"),
        ("PROVISIONING", "PROVISIONING", "creating"),
        ("STOPPING", "STOPPING", "deleting"),
        ("ERROR", "RUNNING", "failed"),
        ("RUNNING", "ERROR", "failed"),
        ("RUNNING", "RUNNING_WITH_ERROR", "failed"),
        ("RUNNING", None, "failed"),
        ("PROVISIONING", None, "creating"),
    ],
)
def test_a_cluster_on_gke_is_as_ready_as_its_worst_part(
    google: Google, state: str, pool_state: str | None, expected: str
) -> None:
    pools = [gke_pool(state=pool_state)] if pool_state else [gke_pool("system", 2)]
    google.clusters = [gke_cluster(*pools, state=state)]
    (found,) = find_gke()
    assert found.state == expected
    assert found.details["nodes"] == (5 if pool_state else 0)


def test_a_cluster_that_shrinks_has_no_fewer_than_zero_workers(google: Google) -> None:
    google.clusters[0].current_node_count = 1
    assert find_gke()[0].details["nodes"] == 0


def test_zones_that_do_not_answer_are_named_with_what_the_others_have(google: Google) -> None:
    google.missing, google.marks = ["us-east1-b", "us-east1-c"], [mark()]
    with pytest.raises(PartialSearchError, match="did not answer for us-east1-b, us-east1-c, so") as caught:
        find_gke()
    assert caught.value.found == [FOUND]


def mark(name: str = "gone-1", place: str = "us-east1-b", created: str = "2026-11-21T11:00:00Z") -> NetworkMark:
    return NetworkMark({"mlbench-cluster": name, "mlbench-location": place, "mlbench-expires": "1795270000"}, created)


def remains(created: str, details: dict[str, Any], state: str = "failed", **options: Any) -> Cluster:
    located = {"project": "demo", "location": "us-east1-b", "nodes": 0}
    placed = {"zone": "us-east1-b", "project": "demo", **options}
    return Cluster("gone-1", "gke", state, created, {**located, "options": placed, **details}, "demo", "us-east1-b")


def test_networks_without_a_cluster_are_its_remains(google: Google) -> None:
    google.clusters, google.marks = [], [mark(), mark()]
    details = {"owner": None, "expires": 1795270000}
    assert find_gke() == [remains("2026-11-21T11:00:00Z", details, fast_network=True)]
    assert find_gke("us-east1-b") == find_gke()
    assert find_gke("us-east1-c") == []


@pytest.mark.parametrize(
    ("created", "state"),
    [
        ("2026-11-21T11:45:01Z", "creating"),
        ("2026-11-21T11:45:00Z", "failed"),
        ("2026-11-21T03:45:01.000-08:00", "creating"),
        ("unknown", "failed"),
    ],
)
def test_a_network_waits_a_quarter_of_an_hour_for_its_cluster(google: Google, created: str, state: str) -> None:
    google.clusters, google.marks = [], [mark(created=created)]
    assert [(item.state, item.created) for item in find_gke()] == [(state, created)]


def repository(**labels: str) -> dict[str, Any]:
    return {
        "name": "projects/demo/locations/us-east1/repositories/mlbench-gone-1",
        "createTime": "2026-11-20T00:00:00Z",
        "labels": {"mlbench-cluster": "gone-1", "mlbench-owner": "me", **labels},
    }


def test_a_repository_without_a_cluster_is_its_remains(google: Google) -> None:
    google.clusters, google.repositories = [], [repository(**{"mlbench-location": "us-east1-b"})]
    google.marks = [mark()]
    registry = "us-east1-docker.pkg.dev/demo/mlbench-gone-1"
    details = {"owner": "me", "registry_made": True, "registry": registry}
    assert find_gke() == [remains("2026-11-20T00:00:00Z", details, registry="auto")]
    assert find_gke("us-east1-c") == []


def test_a_repository_without_a_place_is_where_its_path_says(google: Google) -> None:
    google.clusters, google.repositories = [], [repository()]
    (found,) = find_gke()
    assert found.location == found.details["options"]["region"] == "us-east1"


def test_what_belongs_to_a_cluster_that_exists_is_not_listed_alone(google: Google) -> None:
    there = gke_cluster(gke_pool(), name="gone-1", location="us-east1-b")
    google.clusters, google.marks = [there], [mark()]
    google.repositories = [repository(**{"mlbench-location": "us-east1-b"})]
    assert [(item.name, item.state) for item in find_gke()] == [("gone-1", "ready")]


def test_remains_after_those_of_other_places_are_found(google: Google) -> None:
    google.clusters, google.ended = [], {"gone-1", "gone-2", "gone-3"}
    google.repositories = [repository(**{"mlbench-location": "us-west1-b"}), repository()]
    google.marks = [mark("gone-2", "us-west1-b"), mark("gone-2", "us-east1")]
    google.disks = [disk("a-other"), disk("gone-3", "us-east1"), disk("gone-3", "us-east1-b")]
    assert [item.name for item in find_gke("us-east1")] == ["gone-1", "gone-3", "gone-2"]


def test_the_places_of_other_clusters_load_balancers_are_not_asked_for(google: Google) -> None:
    google.clusters, google.ended = [], {"gone-1"}
    google.balancers, google.places = {"a1": "another"}, DeadlineError("not asked")
    assert find_gke() == []


def test_a_cluster_on_gke_without_a_pool_for_workers_has_none(google: Google) -> None:
    google.clusters = [gke_cluster(gke_pool("system", 2))]
    (found,) = find_gke()
    assert found.details == {
        "project": "demo",
        "location": "europe-west1-b",
        "nodes": 0,
        "gpus_per_node": 0,
        "options": {"zone": "europe-west1-b", "project": "demo"},
        "owner": None,
    }


def test_repositories_that_may_not_be_listed_leave_the_rest_found(google: Google) -> None:
    google.repositories, google.marks = DENIED, [mark()]
    with pytest.raises(PartialSearchError, match="repositories of deleted clusters are unknown: denied") as caught:
        find_gke()
    assert [item.name for item in caught.value.found] == ["demo-2", "gone-1"]


def disk(name: str = "gone-1", place: str = "us-east1-b") -> dict[str, Any]:
    return {"labels": {"goog-k8s-cluster-name": name, "goog-k8s-cluster-location": place}}


def test_a_disk_tells_of_a_cluster_that_deleted_itself(google: Google) -> None:
    google.clusters, google.ended = [], {"gone-1"}
    google.disks = [disk(), disk(), disk("another"), {}]
    assert find_gke() == [remains("", {"expires": int(NOW) - 1})]
    assert find_gke("us-east1-b") == find_gke()
    assert find_gke("us-east1-c") == []


def test_a_load_balancer_tells_only_the_region_so_a_disk_goes_first(google: Google) -> None:
    google.clusters, google.ended = [], {"gone-1"}
    google.balancers, google.places = {"a1": "gone-1"}, {"a1": "us-east1"}
    assert [item.location for item in find_gke()] == ["us-east1"]
    google.disks = [disk()]
    assert [item.location for item in find_gke()] == ["us-east1-b"]
    google.disks = [disk(place="us-west1-b")]
    assert [item.location for item in find_gke()] == ["us-east1", "us-west1-b"]


def test_disks_of_clusters_that_did_not_delete_themselves_are_others(google: Google) -> None:
    google.clusters, google.disks = [], [disk()]
    google.balancers, google.places = {"a1": "gone-1"}, {"a1": "us-east1"}
    assert find_gke() == []
    google.ended, google.marks = {"gone-1"}, []
    google.repositories = [repository(**{"mlbench-location": "us-east1-b"})]
    assert len(find_gke()) == 1  # the repository has already told of it


@pytest.mark.parametrize("denied", ["disks", "balancers", "places"])
def test_what_may_not_be_listed_hides_only_itself(google: Google, denied: str) -> None:
    google.clusters, google.ended = [], {"gone-1"}
    google.disks, google.balancers, google.places = [disk()], {"a1": "gone-1"}, {"a1": "us-west1"}
    setattr(google, denied, DENIED)
    expected = {"disks": ["us-west1"], "balancers": ["us-east1-b"], "places": ["us-east1-b"]}
    assert [item.location for item in find_gke()] == expected[denied]


def test_an_error_other_than_a_missing_right_ends_the_search(google: Google) -> None:
    google.ended, google.disks = {"gone-1"}, DeadlineError("late")
    with pytest.raises(DeadlineError, match="late"):
        find_gke()
    google.ended = set()
    assert find_gke() == [replace(FOUND)]
