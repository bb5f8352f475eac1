"""Volumes, disks and load balancers that workloads leave in AWS and Google Cloud: how they are found, and deleted."""

from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.run import Cluster
from providers.eks import orphans as eks
from providers.gke import orphans as gke
from providers.workloads import OrphanedResource, WorkloadObject
from tests.fakes.aws_operations import check_operation

# --- EKS ------------------------------------------------------------------------------------------------------------

EKS = Cluster("demo-2", "eks", location="eu-west-1")


class Aws:
    """One region: answers by service and operation."""

    region = "eu-west-1"

    def __init__(self) -> None:
        self.volumes: dict[str, list[Any]] = {"tag-key": [], "volume-id": []}
        self.balancers: list[Any] = []
        self.classic: list[Any] = []
        self.tags: dict[str, dict[str, str]] = {}
        self.calls: list[tuple[str, str, Any]] = []

    def pages(self, service: str, operation: str, key: str, **parameters: Any) -> list[Any]:
        check_operation(service, operation)
        self.calls.append((service, operation, parameters))
        if service == "ec2":
            assert (operation, key) == ("describe_volumes", "Volumes")
            return self.volumes[parameters["Filters"][0]["Name"]]
        assert operation == "describe_load_balancers"
        return {"LoadBalancers": self.balancers, "LoadBalancerDescriptions": self.classic}[key]

    def call(self, service: str, operation: str, **parameters: Any) -> Any:
        check_operation(service, operation)
        self.calls.append((service, operation, parameters))
        assert operation == "describe_tags"
        ((key, names),) = parameters.items()
        name = {"ResourceArns": "ResourceArn", "LoadBalancerNames": "LoadBalancerName"}[key]
        listed = [
            {name: item, "Tags": [{"Key": key, "Value": value} for key, value in self.tags.get(item, {}).items()]}
            for item in names
        ]
        return {"TagDescriptions": listed}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    found = Aws()
    monkeypatch.setattr(eks, "aws_in", lambda region: found if region == "eu-west-1" else None)
    return found


def volume(name: str, state: str = "available", size: int = 8) -> dict[str, Any]:
    return {"VolumeId": name, "State": state, "Size": size}


def claimed(handle: str, kind: str = "PersistentVolume") -> WorkloadObject:
    return WorkloadObject(kind, "", "pv", handle)


def test_volumes_are_found_by_the_clusters_tag_and_by_those_that_its_objects_name(aws: Aws) -> None:
    aws.volumes["tag-key"] = [volume("vol-1"), volume("vol-2", "deleting"), volume("vol-3", "deleted")]
    aws.volumes["volume-id"] = [volume("vol-1"), volume("vol-4", "in-use", 100)]
    objects = [claimed("vol-1"), claimed("vol-4"), claimed("fs-5"), claimed("vol-6", "Service")]
    remove = "aws ec2 delete-volume --region eu-west-1 --volume-id"
    assert eks.list_orphans(EKS, objects) == [
        OrphanedResource("volume", "vol-1", "8 GB, available", f"{remove} vol-1"),
        OrphanedResource("volume", "vol-4", "100 GB, in-use", f"{remove} vol-4"),
    ]
    filters = [each["Filters"] for _, name, each in aws.calls if name == "describe_volumes"]
    assert filters == [
        [{"Name": "tag-key", "Values": ["kubernetes.io/cluster/demo-2"]}],
        [{"Name": "volume-id", "Values": ["vol-1", "vol-4"]}],
    ]


def test_without_named_volumes_only_the_tag_is_searched(aws: Aws) -> None:
    assert eks.list_orphans(EKS, []) == []
    assert [name for _, name, _ in aws.calls] == [
        "describe_volumes",
        "describe_load_balancers",
        "describe_load_balancers",
    ]


@pytest.mark.parametrize(
    ("tags", "is_ours"),
    [
        ({"kubernetes.io/cluster/demo-2": "owned"}, True),
        ({"elbv2.k8s.aws/cluster": "demo-2"}, True),
        ({"eks:eks-cluster-name": "demo-2"}, True),
        ({"kubernetes.io/cluster/demo-20": "owned"}, False),
        ({"elbv2.k8s.aws/cluster": "demo"}, False),
        ({"Name": "demo-2"}, False),
        ({}, False),
    ],
)
def test_a_load_balancer_is_the_clusters_by_a_tag_of_any_controller(
    aws: Aws, tags: dict[str, str], is_ours: bool
) -> None:
    """Kubernetes' own controller, AWS Load Balancer Controller and EKS Auto Mode each have their tag."""
    aws.balancers = [{"LoadBalancerArn": "arn:1", "LoadBalancerName": "k8s-front", "Type": "network"}]
    aws.classic = [{"LoadBalancerName": "a1b2"}]
    aws.tags = {"arn:1": tags, "a1b2": tags}
    expected = [
        OrphanedResource(
            "load balancer",
            "k8s-front",
            "network",
            "aws elbv2 delete-load-balancer --region eu-west-1 --load-balancer-arn arn:1",
        ),
        OrphanedResource(
            "load balancer",
            "a1b2",
            "classic",
            "aws elb delete-load-balancer --region eu-west-1 --load-balancer-name a1b2",
        ),
    ]
    assert eks.list_orphans(EKS, []) == (expected if is_ours else [])


def test_tags_of_load_balancers_are_asked_for_20_at_a_time(aws: Aws) -> None:
    """Elastic Load Balancing: "You can specify up to 20 resources in a single call." """
    aws.balancers = [
        {"LoadBalancerArn": f"arn:{number}", "LoadBalancerName": f"b{number}", "Type": "network"}
        for number in range(41)
    ]
    aws.tags = {"arn:40": {"elbv2.k8s.aws/cluster": "demo-2"}}
    assert [item.name for item in eks.list_orphans(EKS, [])] == ["b40"]
    asked = [each["ResourceArns"] for service, _, each in aws.calls if "ResourceArns" in each]
    assert [len(item) for item in asked] == [20, 20, 1]
    assert len({name for item in asked for name in item}) == 41


@pytest.mark.parametrize(
    ("item", "command"),
    [
        (claimed("vol-1"), "aws ec2 delete-volume --region eu-west-1 --volume-id vol-1"),
        (
            WorkloadObject("Service", "default", "front", "front.elb.amazonaws.com"),
            "aws elbv2 describe-load-balancers --region eu-west-1 --query "
            "\"LoadBalancers[?DNSName=='front.elb.amazonaws.com'].LoadBalancerArn\"",
        ),
    ],
)
def test_the_command_for_an_object_of_eks_names_its_resource(item: WorkloadObject, command: str) -> None:
    assert eks.orphan_command(EKS, item) == command


@pytest.mark.parametrize("item", [None, claimed(""), WorkloadObject("Service", "default", "front")])
def test_without_a_handle_all_candidates_of_eks_are_listed(item: WorkloadObject | None) -> None:
    assert eks.orphan_command(EKS, item) == (
        "aws ec2 describe-volumes --region eu-west-1 --filters Name=tag-key,Values=kubernetes.io/cluster/demo-2; "
        "aws elbv2 describe-load-balancers --region eu-west-1; aws elb describe-load-balancers --region eu-west-1"
    )


@pytest.mark.parametrize(
    ("cluster", "region"),
    [
        (Cluster("a-1", "eks", details={"region": "us-east-1"}, location="eu-west-1"), "eu-west-1"),
        (Cluster("a-1", "eks", details={"region": "us-east-1"}), "us-east-1"),
        (Cluster("a-1", "eks"), "ap-south-1"),
    ],
)
def test_the_region_is_the_clusters_own_before_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, region: str
) -> None:
    monkeypatch.setattr(eks, "region_of", lambda asked: "ap-south-1")
    assert f"--region {region} " in eks.orphan_command(cluster, None)


# --- GKE ------------------------------------------------------------------------------------------------------------

GKE = Cluster("demo-2", "gke", account="demo", location="us-east1-b")


class Compute:
    """Compute Engine's answers by path, with the filter as a person reads it."""

    answers: dict[str, Any]

    def __init__(self, project: str) -> None:
        assert project == "demo"

    def get(self, path: str) -> Any:
        found = self.answers.get(unquote(path), {} if "?" in path or "aggregated" in path else NotFoundError("none"))
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(gke, "Compute", type("Compute", (Compute,), {"answers": found}))
    return found


def disk(name: str, zone: str = "us-east1-b", **more: Any) -> dict[str, Any]:
    return {"name": name, "zone": f"https://x/zones/{zone}", "sizeGb": "10", "status": "READY", **more}


LABELED = "/aggregated/disks?filter=(labels.goog-k8s-cluster-name=demo-2) (labels.goog-k8s-cluster-location=us-east1-b)"


def orphan(kind: str, name: str, reason: str, command: str) -> OrphanedResource:
    return OrphanedResource(kind, name, reason, f"gcloud compute {command} --project demo")


def test_disks_are_found_by_their_labels_and_by_those_that_objects_name(compute: dict[str, Any]) -> None:
    compute[LABELED] = {"items": {"zones/a": {"disks": [disk("pvc-1"), disk("pvc-2", "us-east1-c")]}, "zones/b": {}}}
    compute["/zones/us-east1-b/disks/pvc-1"] = disk("pvc-1")
    compute["/zones/us-east1-b/disks/pvc-3"] = disk("pvc-3", sizeGb=None)
    handles = [f"projects/demo/zones/us-east1-b/disks/pvc-{number}" for number in (1, 3, 4)]
    objects = [*map(claimed, handles), claimed("modeInstance/x"), claimed("")]
    assert sorted(gke.list_orphans(GKE, objects), key=lambda item: item.name) == [
        orphan("disk", "pvc-1", "10 GB, READY", "disks delete pvc-1 --zone us-east1-b"),
        orphan("disk", "pvc-2", "10 GB, READY", "disks delete pvc-2 --zone us-east1-c"),
        orphan("disk", "pvc-3", "None GB, READY", "disks delete pvc-3 --zone us-east1-b"),
    ]


RULES = '/global/firewalls?filter=name eq "k8s-fw-.*"'


def rule(name: str, *tags: str) -> dict[str, Any]:
    return {"name": name, "targetTags": list(tags)}


def test_the_cluster_of_a_load_balancer_is_in_the_tag_of_its_firewall_rule(compute: dict[str, Any]) -> None:
    compute[RULES] = {
        "items": [
            rule("k8s-fw-a1", "gke-demo-2-0a1b2c3d-node"),
            rule("k8s-fw-a2", "other", "gke-my-cluster-ffffffff-node"),
            rule("k8s-fw-a3", "gke-demo-2-0A1B2C3D-node"),
            rule("k8s-fw-a4", "gke-demo-2-node"),
            {"name": "k8s-fw-a5"},
        ]
    }
    assert gke.list_balancers("demo") == {"a1": "demo-2", "a2": "my-cluster"}
    compute.clear()
    assert gke.list_balancers("demo") == {}


def forwarding(name: str, address: str | None = "192.0.2.1") -> dict[str, Any]:
    return {"items": [{"name": name, "IPAddress": address}]}


def test_load_balancers_are_found_by_name_and_by_address_in_the_region_and_globally(compute: dict[str, Any]) -> None:
    compute[RULES] = {
        "items": [rule("k8s-fw-a1", "gke-demo-2-0a1b2c3d-node"), rule("k8s-fw-b1", "gke-b-0a1b2c3d-node")]
    }
    compute["/regions/us-east1/forwardingRules?filter=name=a1"] = forwarding("a1")
    compute["/regions/us-east1/forwardingRules?filter=name=b1"] = forwarding("b1")
    compute["/regions/us-east1/forwardingRules?filter=IPAddress=192.0.2.1"] = forwarding("a1")
    compute["/global/forwardingRules?filter=IPAddress=192.0.2.9"] = forwarding("ingress", None)
    objects = [
        WorkloadObject("Service", "default", "front", "192.0.2.1"),
        WorkloadObject("Ingress", "default", "web", "192.0.2.9"),
        WorkloadObject("Service", "default", "new"),
        claimed("192.0.2.5"),
    ]
    compute["/regions/us-east1/forwardingRules?filter=IPAddress=192.0.2.5"] = forwarding("of-a-disk")
    compute["/global/forwardingRules?filter=IPAddress="] = forwarding("of-nobody")
    assert gke.list_orphans(GKE, objects) == [
        orphan("load balancer", "a1", "192.0.2.1", "forwarding-rules delete a1 --region us-east1"),
        orphan("load balancer", "ingress", "192.0.2.9", "forwarding-rules delete ingress --global"),
    ]


def network(name: str, created: str) -> dict[str, Any]:
    return {"name": name, "creationTimestamp": created}


@pytest.mark.parametrize(
    ("setup", "created", "names"),
    [
        ("gib", "2026-11-21T12:00:00Z", ["gke-demo-2-new", "gke-demo-2-same"]),
        ("gib", "", ["gke-demo-2-old", "gke-demo-2-new", "gke-demo-2-same"]),
        ("tcpx", "2026-11-21T12:00:00Z", []),
        (None, "2026-11-21T12:00:00Z", []),
    ],
)
def test_rdma_networks_that_gke_left_are_newer_than_the_cluster(
    compute: dict[str, Any], setup: str | None, created: str, names: list[str]
) -> None:
    compute['/global/networks?filter=name eq "gke-demo-2-.*"'] = {
        "items": [
            network("gke-demo-2-old", "2026-11-21T03:59:59.000-08:00"),
            network("gke-demo-2-new", "2026-11-21T04:00:01.000-08:00"),
            network("gke-demo-2-same", "2026-11-21T04:00:00.000-08:00"),
        ]
    }
    cluster = Cluster("demo-2", "gke", "ready", created, {"fabric": {"setup": setup}}, "demo", "us-east1-b")
    found = gke.list_orphans(cluster, [])
    assert [item.name for item in found] == names
    if found:
        assert (found[0].kind, found[0].command) == (
            "network",
            f"gcloud compute networks delete {names[0]} --project demo",
        )


@pytest.mark.parametrize(
    ("item", "command"),
    [
        (
            claimed("projects/demo/zones/us-east1-c/disks/pvc-1"),
            "gcloud compute disks delete pvc-1 --zone us-east1-c --project demo",
        ),
        (
            WorkloadObject("Service", "default", "front", "192.0.2.1"),
            "gcloud compute forwarding-rules list --project demo --filter IPAddress=192.0.2.1",
        ),
        (
            None,
            "gcloud compute disks list --project demo --filter labels.goog-k8s-cluster-name=demo-2; "
            "gcloud compute forwarding-rules list --project demo",
        ),
        (
            claimed(""),
            "gcloud compute disks list --project demo --filter labels.goog-k8s-cluster-name=demo-2; "
            "gcloud compute forwarding-rules list --project demo",
        ),
    ],
)
def test_the_command_for_an_object_of_gke_names_its_resource(item: WorkloadObject | None, command: str) -> None:
    assert gke.orphan_command(GKE, item) == command


def test_disks_of_all_clusters_are_those_with_the_label(compute: dict[str, Any]) -> None:
    compute["/aggregated/disks?filter=labels.goog-k8s-cluster-name:*"] = {
        "items": {"zones/a": {"disks": [disk("pvc-1")]}, "zones/b": {"warning": {}}}
    }
    assert gke.list_claimed_disks("demo") == [disk("pvc-1")]
    compute.clear()
    assert gke.list_claimed_disks("demo") == []


def test_only_load_balancers_with_an_address_have_a_place(compute: dict[str, Any]) -> None:
    compute["/aggregated/forwardingRules"] = {
        "items": {
            "regions/us-east1": {
                "forwardingRules": [
                    {"name": "a1", "region": "https://x/regions/us-east1"},
                    {"name": "other", "region": "https://x/regions/us-east1"},
                ]
            },
            "global": {"forwardingRules": [{"name": "a2"}]},
            "regions/us-west1": {},
        }
    }
    assert gke.list_places("demo", {"a1": "x", "a2": "y"}) == {"a1": "us-east1"}


@pytest.mark.parametrize(
    ("cluster", "project"),
    [
        (Cluster("a-1", "gke", details={"project": "recorded"}, account="own"), "own"),
        (Cluster("a-1", "gke", details={"project": "recorded"}), "recorded"),
        (Cluster("a-1", "gke"), "of-the-credentials"),
    ],
)
def test_the_project_is_the_clusters_own_before_that_of_the_credentials(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, project: str
) -> None:
    monkeypatch.setattr(gke, "api", SimpleNamespace(project_of=lambda given: "of-the-credentials"))
    assert f"--project {project} " in gke.orphan_command(cluster, None)
