"""The commands on clusters as a person types them: KIND on stand-ins, an attached cluster on a small API server."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.storage.store import Store
from tests.fakes.kind_tools import World
from tests.fakes.kube_api import Fault, KubeApi

pytestmark = pytest.mark.usefixtures("world")  # no other Docker


# --- KIND -----------------------------------------------------------------------------------------------------------


def test_create_shows_makes_and_chooses_the_cluster(command: Any, world: World) -> None:
    done = command("create-cluster", "kind", "2", "rel", "--ttl", "2h")
    assert done.code == 0
    assert "mlbench delete-cluster kind rel-2" in done.err
    assert "KIND cluster rel-2 is ready" in done.err
    assert "Timings on KIND are meaningless" in done.err
    store = Store()
    assert store.current_cluster.name == "rel-2"
    details = store.cluster("rel-2").details
    assert details["ttl"] == "2h"
    assert details["plan"]["price_per_hour"] == 0
    assert [entry["name"] for entry in details["provisioning"]] == ["mlbench-rel-2", "rel-2"]


@pytest.mark.slow
def test_nodes_of_all_clusters_count_for_what_the_kernel_allows(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "max_user_instances"
    monkeypatch.setattr("providers.kind.quota.INOTIFY_LIMIT", limit)
    limit.write_text("128\n")
    assert "inotify" not in command("create-cluster", "kind", "2", "first").err
    assert (
        "3 nodes beside 3 of other clusters may run out of inotify"
        in command("create-cluster", "kind", "2", "second").err
    )
    limit.write_text("1024\n")
    assert "inotify" not in command("create-cluster", "kind", "2", "third").err


def test_json_is_one_document_on_stdout(command: Any) -> None:
    done = command("create-cluster", "kind", "1", "rel", "-o", "json")
    assert done.json["cluster"]["name"] == "rel-1"
    assert done.json["cluster"]["state"] == "ready"
    done = command("create-cluster", "kind", "99", "rel", "-o", "json")
    assert done.code == 2
    assert done.json["error"]["code"] == "usage"


@pytest.mark.slow
def test_the_words_of_the_original_are_taken(command: Any, world: World) -> None:
    words = ("create-cluster", "kind", "2", "rel", "-k", "1.34", "--registry_name", "reg", "-p", "5001")
    assert command(*words).code == 0
    assert "reg" in world.left
    assert command("delete-cluster", "kind", "rel-2", "--yes").code == 0
    assert world.left == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["create-cluster", "kindd", "2", "rel"], 2, 'Did you mean "kind"?'),
        (["create-cluster", "local", "2", "rel"], 2, 'no cluster provider "local"'),
        (["create-cluster", "kind", "2"], 2, "RELEASE"),
        (["create-cluster", "kind", "two", "rel"], 2, "two"),
        (["create-cluster", "kind", "2", "Rel"], 2, "DNS label"),
        (["create-cluster", "kind", "2", "x" * 60], 2, "characters"),
        (["create-cluster", "kind", "2", "rel", "--ttl", "soon"], 2, "--ttl"),
        (["create-cluster", "kind", "2", "rel", "--num-gpus", "1"], 2, "no GPUs"),
        (["delete-cluster", "rel-2"], 4, "no cluster"),
        (["delete-cluster", "kind", "rel-2"], 4, "partly created"),
        (["delete-cluster", "local", "--yes"], 2, "this machine"),
        (["delete-cluster", "a", "b", "c"], 2, "3 words"),
        (["delete-cluster", "kindd", "rel-2"], 2, 'Did you mean "kind"?'),
        (["gc", "kindd"], 2, 'Did you mean "kind"?'),
        (["attach-cluster", "Bad_Name"], 2, "DNS label"),
    ],
)
def test_bad_input_is_told_in_one_paragraph(command: Any, words: Sequence[str], code: int, says: str) -> None:
    done = command(*words)
    assert done.code == code
    assert says in done.err
    assert "Traceback" not in done.err


def test_delete_asks_and_is_repeatable(command: Any, world: World) -> None:
    command("create-cluster", "kind", "2", "rel")
    done = command("delete-cluster", "rel-2")
    assert done.code == 2
    assert "--yes" in done.err
    assert command("delete-cluster", "rel-2", "--yes").code == 0
    assert world.left == []
    done = command("delete-cluster", "kind", "rel-2", "--yes")
    assert (done.code, done.out) == (0, "The cluster rel-2 has already been deleted.\n")


@pytest.mark.parametrize(
    ("cluster", "words", "question"),
    [
        (Cluster("c-1", "kind"), (), "Delete the cluster c-1 (kind), everything on it?"),
        (
            Cluster("c-1", "gke", location="europe-west4-a", details={"owner": "ada"}),
            (),
            "Delete the cluster c-1 of ada (gke, europe-west4-a), everything on it?",
        ),
        (
            Cluster("c-1", "eks", location="eu-west-1", details={"registry_made": True}),
            (),
            "Delete the cluster c-1 (eks, eu-west-1), everything on it and its image repository "
            "(--keep-images keeps that)?",
        ),
        (
            Cluster("c-1", "eks", location="eu-west-1", details={"registry_made": True}),
            ("--keep-images",),
            "Delete the cluster c-1 (eks, eu-west-1), everything on it?",
        ),
    ],
)
def test_the_question_before_a_deletion_names_all_that_goes(
    command: Any, cluster: Cluster, words: Sequence[str], question: str
) -> None:
    """Clusters of one name may be in several places: who answers must know which one it is."""
    Store().record_cluster(cluster)
    done = command("delete-cluster", "c-1", *words)
    assert done.code == 2
    assert f"Error: {question} There is no terminal to ask on." in " ".join(done.err.split())
    assert Store().cluster("c-1").state == "ready"


def test_a_cluster_that_is_only_removed_from_mlbench_is_removed_without_a_question(command: Any) -> None:
    for provider in ("attached", "slurm", "hosts"):
        Store().record_cluster(Cluster("c-1", provider))
        done = command("delete-cluster", "c-1")
        assert (done.code, done.out) == (
            0,
            "Removed the cluster c-1 from mlbench; the cluster itself is unchanged.\n",
        )


def test_delete_refuses_to_lose_results(command: Any, world: World) -> None:
    command("create-cluster", "kind", "2", "rel")
    spec = RunSpec("a-1", "rel-2", "kubernetes", "custom", "spec", ("true",), "gloo", 1)
    Store().record_run(spec)
    done = command("delete-cluster", "rel-2", "--yes")
    assert done.code == 2
    assert "a-1" in done.err
    assert command("delete-cluster", "rel-2", "--yes", "--force").code == 0


def test_gc_refuses_to_lose_results(command: Any, world: World) -> None:
    command("create-cluster", "kind", "1", "old", "--ttl", "0")
    Store().record_run(RunSpec("a-1", "old-1", "kubernetes", "custom", "spec", ("true",), "gloo", 1))
    result = command("gc", "--expired", "--yes")
    assert result.code == 8
    assert "old-1 has results that were not fetched" in result.err
    assert world.left
    assert command("gc", "--expired", "--yes", "--force").code == 0
    assert world.left == []


def test_what_cannot_be_removed_is_told_with_exit_code_8(command: Any, world: World) -> None:
    command("create-cluster", "kind", "2", "rel")
    containers = world.state["containers"]
    world.change(trouble={"kind delete": "fail"})
    done = command("delete-cluster", "rel-2", "--yes")
    assert done.code == 8
    assert "kind delete cluster --name rel-2" in done.err
    assert "not tried" in done.err  # the mark, without which the rest could not be found
    assert Store().cluster("rel-2").state == "deleting"
    assert set(world.state["containers"]) == set(containers)
    world.change(trouble={})
    assert command("delete-cluster", "rel-2", "--yes").code == 0
    assert world.left == []


def test_a_name_of_another_provider_is_taken(command: Any, tmp_path: Path, api: "Server") -> None:
    assert command("attach-cluster", "rel-2", "--kubeconfig", str(api.kubeconfig)).code == 0
    done = command("create-cluster", "kind", "2", "rel")
    assert done.code == 2
    assert "of the provider attached" in done.err
    done = command("delete-cluster", "kind", "rel-2")
    assert done.code == 2
    assert "not of kind" in done.err


def test_gc_takes_what_is_expired_half_made_or_unknown(
    command: Any, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("create-cluster", "kind", "2", "kept", "--ttl", "1h")
    command("create-cluster", "kind", "1", "old", "--ttl", "0")
    done = command("gc", "--dry-run", "-o", "json")
    assert [(item["name"], item["why"].split()[0]) for item in done.json["clusters"]] == [("old-1", "expired")]
    assert command("gc").code == 2  # nobody to ask
    assert command("gc", "--yes").code == 0
    assert sorted(world.left) == [
        *("kept-2-control-plane", "kept-2-worker", "kept-2-worker2", "mlbench-kept-2"),
    ]
    # Another data folder knows of none.
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "other"))
    assert command("gc", "--expired", "--yes").out == "Nothing to delete.\n"
    assert command("gc", "--yes").out == "Nothing to delete.\n"
    done = command("gc", "--all", "--yes")
    assert "unknown here" in done.out
    assert world.left == []


def test_gc_takes_what_was_left_half_made(command: Any, world: World) -> None:
    world.change(trouble={"kind create": "fail"})
    assert command("create-cluster", "kind", "2", "rel").code == 2
    assert world.left == ["mlbench-rel-2"]
    done = command("gc", "--yes")
    assert "partly created" in done.out
    assert world.left == []


def test_gc_leaves_what_others_own(command: Any, world: World) -> None:
    command("create-cluster", "kind", "1", "old", "--ttl", "0")
    volumes = world.state["volumes"]
    volumes["mlbench-old-1"]["Labels"]["mlbench-owner"] = "somebody"
    world.change(volumes=volumes)
    assert command("gc", "--yes").out == "Nothing to delete.\n"
    assert "old-1" in command("gc", "--yes", "--everybody").out
    assert world.left == []


def test_gc_says_what_it_could_not_search(command: Any, world: World) -> None:
    world.change(trouble={"docker": "down"})
    done = command("gc", "kind")
    assert done.code == 2
    assert "Start Docker" in done.err
    done = command("gc")
    assert done.code == 2
    assert "No provider can be searched" in done.err


# --- attached -------------------------------------------------------------------------------------------------------


class Server(KubeApi):
    """A cluster of the user's, with a kubeconfig of two contexts, whose token is right."""

    def __init__(self, folder: Path) -> None:
        super().__init__(lambda: {"right"})
        self.kubeconfig = folder / "users-kubeconfig"
        self.write_access("right")

    def write_access(self, token: str) -> None:
        contexts = [
            {"name": name, "context": {"cluster": "c", "user": "u", "namespace": name}} for name in ("first", "second")
        ]
        document = {
            "current-context": "first",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "contexts": contexts,
            "users": [{"name": "u", "user": {"token": token}}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(document))

    def add_node(self, provider_id: str, allocatable: dict[str, str], name: str = "n") -> None:
        labels = {
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            "amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM",
        }
        spec, status = {"providerID": provider_id}, {"allocatable": allocatable}
        self.put("nodes", {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status})


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as server:
        yield server


def test_attach_reads_only_and_keeps_the_context(command: Any, api: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
    before = api.kubeconfig.read_bytes()
    assert command("attach-cluster", "mine").code == 0
    assert api.kubeconfig.read_bytes() == before
    details = Store().cluster("mine").details
    assert (details["context"], details["namespace"]) == ("first", "first")
    assert details["kubeconfig"] == str(api.kubeconfig)
    assert {asked["namespace"] for asked in api.reviews} == {"first"}
    assert {"verb": "get", "resource": "pods", "subresource": "log", "group": "", "namespace": "first"} in api.reviews
    assert Store().current_cluster.name == "mine"
    assert "right" not in (Store().folder / "mlbench.sqlite").read_bytes().decode("latin-1").split("token")[-1]


def test_attach_takes_context_and_namespace(command: Any, api: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(api.kubeconfig.parent)
    words = ("--kubeconfig", api.kubeconfig.name, "--context", "second", "--namespace", "bench")
    assert command("attach-cluster", "mine", *words).code == 0
    details = Store().cluster("mine").details
    assert details["kubeconfig"] == str(api.kubeconfig)
    assert (details["context"], details["namespace"]) == ("second", "bench")


@pytest.mark.parametrize(
    ("provider_id", "labeled"),
    [("kind://docker/test-3/test-3-worker", True), ("aws:///eu-west-1a/i-0123", False), (None, False)],
)
def test_an_attached_kind_cluster_is_known_by_its_nodes(
    command: Any, api: Server, provider_id: str | None, labeled: bool
) -> None:
    if provider_id:
        api.add_node(provider_id, {})
    else:  # as is usual for who has rights in a namespace only
        api.faults.append(Fault("/api/v1/nodes", times=99, status=403))
    done = command("attach-cluster", "mine", "--kubeconfig", str(api.kubeconfig))
    assert done.code == 0
    assert ("not a performance measurement" in done.err) == labeled
    assert Store().cluster("mine").details.get("functional_only", False) is labeled
    shown = command("run", "r", "1", "--image", "i:1", "--command", "true", "--dry-run", "--yes", "-o", "json").json
    annotation = shown["submissions"][0]["documents"][0]["metadata"]["annotations"]["mlbench/spec"]
    assert (json.loads(annotation)["functional_only"] is not None) == labeled


def test_what_the_nodes_offer_is_discovered(command: Any, api: Server) -> None:
    api.version = {"major": "1", "minor": "34+", "gitVersion": "v1.34.2-eks"}
    api.add_node("aws:///a/i-1", {"cpu": "190", "nvidia.com/gpu": "8", "rdma/hca": "4", "hugepages-2Mi": "0"})
    api.add_node("aws:///a/i-2", {"cpu": "190", "nvidia.com/gpu": "8"}, "m")
    result = command("attach-cluster", "fleet", "--kubeconfig", str(api.kubeconfig))
    assert result.code == 0, result.err
    assert "up to 8 GPUs each" in result.err
    assert "rdma/hca. mlbench run --pod-patch FILE requests them" in result.err
    details = Store().cluster("fleet").details
    assert (details["gpus_per_node"], details["gpu"]) == (8, "NVIDIA-H100-80GB-HBM3")
    assert details["version"] == "v1.34.2-eks"


def test_shared_gpus_and_slices_of_gpus_are_named(command: Any, api: Server) -> None:
    shared = {"nvidia.com/gpu.shared": "4", "nvidia.com/mig-1g.10gb": "7"}
    api.add_node("aws:///a/i-1", {"cpu": "8", "nvidia.com/gpu": "0", **shared})
    result = command("attach-cluster", "fleet", "--kubeconfig", str(api.kubeconfig))
    assert "nodes offer nvidia.com/gpu.shared, nvidia.com/mig-1g.10gb" in result.err


def test_amd_gpus_of_the_nodes_are_asked_for_by_their_own_name(command: Any, api: Server) -> None:
    api.add_node("other://1", {"cpu": "190", "amd.com/gpu": "8"})
    assert command("attach-cluster", "fleet", "--kubeconfig", str(api.kubeconfig)).code == 0
    details = Store().cluster("fleet").details
    assert (details["gpus_per_node"], details["gpu"]) == (8, "AMD_Instinct_MI300X_OAM")
    run = ("run", "r", "2", "--image", "i:1", "--command", "true", "--gpu", "--dry-run", "--yes", "-o", "json")
    jobs = [one for one in command(*run).json["submissions"][0]["documents"] if one["kind"] == "Job"]
    pod = jobs[0]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["amd.com/gpu"] == "8"
    assert {"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_autopilot_is_known_by_its_nodes_and_its_runs_say_what_they_need(command: Any, api: Server) -> None:
    api.add_node("gce://p/z/gk3-fleet-pool-1-abcd", {}, "gk3-fleet-pool-1-abcd")
    done = command("attach-cluster", "fleet", "--kubeconfig", str(api.kubeconfig))
    assert "GKE Autopilot" in done.err
    run = ("run", "r", "1", "--image", "i:1", "--command", "true", "--dry-run", "--yes")
    for words in ((), ("--num-cpus", "8"), ("--memory", "32Gi")):
        refused = command(*run, *words)
        assert refused.code == 2
        assert "--num-cpus 8 --memory 32Gi" in refused.err
    assert command(*run, "--num-cpus", "8", "--memory", "32Gi").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("needs", [False, True])
def test_queues_of_kueue_are_told_and_asked_for_where_it_wants_one(command: Any, api: Server, needs: bool) -> None:
    api.groups, api.needs_queue = {"kueue.x-k8s.io": "v1beta2"}, needs
    api.put("localqueues", {"metadata": {"name": "team-a"}})
    done = command("attach-cluster", "queued", "--kubeconfig", str(api.kubeconfig))
    assert done.code == 0, done.err
    assert f"Kueue has the queues team-a there: runs {'need' if needs else 'may name'} --queue NAME" in done.err
    assert ("jobs", "mlbench-dry-run") not in api.objects
    details = Store().cluster("queued").details
    assert details.get("needs_queue", False) is needs
    words = ("run", "x", "1", "--task", "allreduce", "--image", "i:1", "--dry-run")
    refused = command(*words)
    assert (refused.code, "--queue team-a" in refused.err) == ((2, True) if needs else (0, False)), refused.err
    assert command(*words, "--queue", "team-a").code == 0


def test_a_server_that_is_too_old_is_refused_with_its_version(command: Any, api: Server) -> None:
    api.version = {"major": "1", "minor": "28+"}
    result = command("attach-cluster", "old", "--kubeconfig", str(api.kubeconfig))
    assert result.code == 2
    assert "runs Kubernetes 1.28; runs need 1.31 or later" in result.err
    assert [cluster.name for cluster in Store().clusters()] == ["local"]
    api.version = {"major": "1", "minor": "31"}
    assert command("attach-cluster", "old", "--kubeconfig", str(api.kubeconfig)).code == 0


def test_without_the_right_to_network_policies_runs_do_without(command: Any, api: Server) -> None:
    api.denied = {f"{verb} networkpolicies" for verb in ("create", "get", "list", "patch", "delete")}
    result = command("attach-cluster", "mine", "--kubeconfig", str(api.kubeconfig))
    assert result.code == 0, result.err
    words = ("run", "r", "2", "--image", "i:1", "--command", "true", "--dry-run", "--yes", "-o", "json")
    kinds = [item["kind"] for item in command(*words).json["submissions"][0]["documents"]]
    assert "NetworkPolicy" not in kinds


@pytest.mark.parametrize(
    ("there", "words", "expected"),
    [
        ("nvidia", ["--gpu"], "nvidia"),
        ("nvidia", [], None),
        ("nvidia", ["--gpu", "--runtime-class", "other"], "other"),
        (None, ["--gpu"], None),
    ],
)
def test_workers_with_gpus_get_the_runtime_class_of_the_cluster(
    command: Any, api: Server, there: str | None, words: list[str], expected: str | None
) -> None:
    if there:
        api.put("runtimeclasses", {"metadata": {"name": there}})
    api.add_node("aws:///a/i-1", {"cpu": "8", "nvidia.com/gpu": "1"})
    assert command("attach-cluster", "mine", "--kubeconfig", str(api.kubeconfig)).code == 0
    run = ("run", "r", "2", "--image", "i:1", "--command", "true", "--dry-run", "--yes", "-o", "json")
    job = command(*run, *words).json["submissions"][0]["documents"][0]
    assert job["spec"]["template"]["spec"].get("runtimeClassName") == expected


def test_gpus_that_are_offered_by_dynamic_resource_allocation_only_are_named(command: Any, api: Server) -> None:
    api.add_node("aws:///a/i-1", {"cpu": "8"})
    api.groups = {"resource.k8s.io": "v1"}
    for name in ("cpu.example.com", "gpu.nvidia.com"):
        api.put("deviceclasses", {"metadata": {"name": name}})
    done = command("attach-cluster", "mine", "--kubeconfig", str(api.kubeconfig))
    assert done.code == 0
    assert "offer GPUs only by dynamic resource allocation (gpu.nvidia.com)" in done.err
    api.add_node("aws:///a/i-1", {"cpu": "8", "nvidia.com/gpu": "1"})  # a device plugin beside it will do
    done = command("attach-cluster", "mine", "--kubeconfig", str(api.kubeconfig))
    assert "dynamic resource allocation" not in done.err


def test_missing_rights_are_named_and_the_role_is_offered(command: Any, api: Server) -> None:
    api.denied = {"create jobs", "delete jobs", "delete pods"}
    done = command("attach-cluster", "mine", "--kubeconfig", str(api.kubeconfig), "-o", "json")
    assert done.code == 3
    assert done.json["error"]["details"]["missing"] == ["create jobs.batch", "delete jobs.batch", "delete pods"]
    assert "permission to create, delete jobs.batch; delete pods." in done.json["error"]["message"]
    assert "--role" in done.json["error"]["hint"]
    assert "mine" not in {cluster.name for cluster in Store().clusters()}


def test_rights_that_only_some_runs_need_are_a_warning(command: Any, api: Server) -> None:
    api.denied = {"list events"}
    done = command("attach-cluster", "mine", "--kubeconfig", str(api.kubeconfig))
    assert done.code == 0
    assert "list events" in done.err


def test_the_role_holds_every_right_that_is_checked(command: Any, api: Server) -> None:
    role, binding = yaml.safe_load_all(command("attach-cluster", "mine", "--role", "-n", "bench").out)
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "bench"
    command("attach-cluster", "mine", "--kubeconfig", str(api.kubeconfig))
    granted = {(rule["resources"][0], verb) for rule in role["rules"] for verb in rule["verbs"]}
    asked = {(f"{item['resource']}/{item.get('subresource', '')}".rstrip("/"), item["verb"]) for item in api.reviews}
    assert asked == granted


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (lambda api: api.kubeconfig.unlink(), 4, "no kubeconfig"),
        (lambda api: api.kubeconfig.write_text("{"), 2, "not valid YAML"),
        (lambda api: api.write_access("wrong"), 3, "Unauthorized"),
    ],
)
def test_a_spoilt_kubeconfig_is_told(command: Any, api: Server, spoil: Any, code: int, says: str) -> None:
    spoil(api)
    done = command("attach-cluster", "mine", "--kubeconfig", str(api.kubeconfig))
    assert done.code == code
    assert says in done.err


def test_detaching_only_forgets(command: Any, api: Server) -> None:
    command("attach-cluster", "mine", "--kubeconfig", str(api.kubeconfig))
    asked = api.requests.total()
    assert command("delete-cluster", "attached", "mine").code == 0
    assert api.requests.total() == asked
    assert [cluster.name for cluster in Store().clusters()] == ["local"]
