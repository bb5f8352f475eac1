"""`create-cluster` from its plan to its result, and `attach-cluster`: what is printed, asked, recorded and refused."""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli import console
from mlbench_cli.api import calibrated
from mlbench_cli.clusters import manage
from mlbench_cli.clusters.manage import CreationRequest, PlannedCluster, Ttl
from mlbench_cli.commands import create_cluster as module
from mlbench_cli.commands._clusters import cluster_document, estimate_document
from mlbench_cli.commands.attach_cluster import attach_cluster
from mlbench_cli.commands.create_cluster import ProviderGroup, _estimate, _show_probe, create
from mlbench_cli.console import Format
from mlbench_cli.errors import CredentialError, Interrupted, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers import attached, registry
from providers.attached import NodeFacts, QueueFacts, Right
from providers.base import Plan, PlanLine
from tests.unit.commands.test_plan_answers import candidate

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(console, "interactive", lambda: True)
    return tmp_path


# --- create-cluster ---------------------------------------------------------------------------------------------------

CHART: Any = SimpleNamespace(name="mine", version="1.2", source="https://x/mine@1.2", digest="sha256:abc")


class Installation:
    """A Helm chart with a value."""

    chart, namespace, warnings = CHART, "mlbench-mine", ["It has no schema."]
    helm = SimpleNamespace(version="3.15")

    def record(self) -> dict[str, Any]:
        return {"release": "mine"}

    def merged_values(self) -> dict[str, Any]:
        return {"replicas": 2, "image": {"tag": "é"}}


class Provider:
    """A provider whose clusters have a network and a pool."""

    name, summary = "kind", "Containers"

    def resources(self, cluster: Cluster) -> list[Any]:
        return [SimpleNamespace(kind="network", name=f"{cluster.name}-net"), SimpleNamespace(kind="pool", name="a")]


@dataclass(frozen=True)
class NoOptions:
    """The options of a provider that has none."""


class World:
    """What `create` plans, and what was done."""

    def __init__(self) -> None:
        self.price: float | None = 1.0
        self.installation: Any = None
        self.notes = ""
        self.error: Exception | None = None
        self.requests: list[CreationRequest] = []
        self.done: list[Any] = []

    @contextmanager
    def plan(self, store: Any, request: CreationRequest) -> Iterator[PlannedCluster]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        yield self.planned(request)
        self.done.append("left")

    def planned(self, request: CreationRequest) -> PlannedCluster:
        plan = Plan((PlanLine("worker x", 2, self.price),), "near")
        cluster = Cluster(request.name, "kind", details={"owner": "eva"})
        return PlannedCluster(cluster, plan, request.provider, self.installation).with_ttl(request.ttl)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()

    def create_with_progress(store: Store, planned: PlannedCluster) -> Cluster:
        found.done.append("created")
        planned.chart_notes = found.notes
        return replace(planned.cluster, state="ready")

    def estimate(store: Any, planned: PlannedCluster, task: str | None) -> Any:
        return None if task is None else candidate(task=task)

    def confirm(question: str, *, yes: bool) -> None:
        found.done.append((question, yes))
        if not yes:
            raise Interrupted("Not confirmed.")

    monkeypatch.setattr(module, "plan_cluster", found.plan)
    monkeypatch.setattr(module, "create_with_progress", create_with_progress)
    monkeypatch.setattr(module, "_estimate", estimate)
    monkeypatch.setattr(console, "confirm", confirm)
    monkeypatch.setattr(manage, "sketch_cluster", lambda request: None)
    return found


def make(world: World, **changes: Any) -> None:
    options: dict[str, Any] = {
        "provider": Provider(), "nodes": 2, "release": "lab", "options": {"size": 3}, "chart_location": None,
        "custom_values": None, "chart_timeout": None, "ttl": None, "dry_run": False, "yes": True,
        "output": Format.text,
    }  # fmt: skip
    create(**{**options, **changes})


def test_a_cluster_is_planned_asked_for_and_created(world: World, capsys: Captured) -> None:
    make(world)
    (request,) = world.requests
    assert (request.nodes, request.release, request.options) == (2, "lab", {"size": 3})
    assert (request.chart_location, request.custom_values, request.chart_seconds, request.ttl) == (None, (), None, None)
    assert world.done == [("Create the cluster lab-2?", True), "created", "left"]
    err = capsys.readouterr().err
    assert err.index("worker x") < err.index("The cluster lab-2 is ready")
    assert "Notes of the Helm chart" not in err


def test_options_of_a_chart_and_an_end_are_parsed_before_anything_is_asked(world: World, capsys: Captured) -> None:
    world.notes = "Visit \x1b[31mme\nnow"
    make(world, chart_location="./mine", custom_values=["a=1"], chart_timeout="90s", ttl="2h")
    (request,) = world.requests
    assert (request.chart_location, request.custom_values) == ("./mine", ["a=1"])
    assert (request.chart_seconds, request.ttl) == (90.0, Ttl("2h", 7200.0))
    err = capsys.readouterr().err
    assert "It expires after 2h. " in err
    assert "Notes of the Helm chart:\nVisit " in err
    assert "\x1b" not in err
    for bad in ({"chart_timeout": "soon"}, {"ttl": "soon"}):
        with pytest.raises(UsageError, match="is not a duration"):
            make(world, **bad)
    assert len(world.requests) == 1


@pytest.mark.parametrize(("price", "asks"), [(1.0, True), (None, True), (0.0, False)])
def test_only_a_cluster_that_may_cost_money_is_asked_about(world: World, price: float | None, asks: bool) -> None:
    world.price = price
    if asks:
        with pytest.raises(Interrupted):
            make(world, yes=False)
        assert world.done == [("Create the cluster lab-2?", False)]
    else:
        make(world, yes=False)
        assert world.done == ["created", "left"]


def test_a_result_as_a_document(world: World, capsys: Captured) -> None:
    make(world, output=Format.json)
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "schema_version": 1,
        "cluster": cluster_document(Cluster("lab-2", "kind", details={"owner": "eva"})),
    }


def test_a_dry_run_prints_the_plan_and_creates_nothing(world: World, capsys: Captured) -> None:
    world.installation = Installation()
    make(world, dry_run=True, yes=False, ttl="90m", for_task="digits_resnet")
    assert world.done == ["left"]
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "RESOURCE      NAME",
        "network       lab-2-net",
        "pool          a",
        "Helm release  mine",
        "",
        "values:",
        "replicas: 2",
        "image:",
        "  tag: é",
    ]
    lines = printed.err.splitlines()
    assert lines[3].startswith("for digits_resnet: about 2 h ")
    assert lines[4:7] == [
        "Helm chart mine 1.2 of https://x/mine@1.2",
        "  sha256:abc, into the namespace mlbench-mine, by helm 3.15",
        "Warning: It has no schema.",
    ]
    assert lines[7].startswith("It ends after 90m. ")


def test_a_dry_run_as_a_document(world: World, capsys: Captured) -> None:
    make(world, dry_run=True, output=Format.json)
    plain = json.loads(capsys.readouterr().out)
    planned = world.planned(world.requests[0])
    assert plain == {
        "schema_version": 1,
        "cluster": cluster_document(planned.cluster),
        "plan": planned.plan.to_dict(),
        "resources": [{"kind": "network", "name": "lab-2-net"}, {"kind": "pool", "name": "a"}],
    }
    world.installation = Installation()
    make(world, dry_run=True, output=Format.json, for_task="digits_resnet")
    whole = json.loads(capsys.readouterr().out)
    assert whole == {
        **plain,
        "resources": [*plain["resources"], {"kind": "Helm release", "name": "mine"}],
        "estimate": json.loads(json.dumps(estimate_document(candidate(task="digits_resnet")))),
        "helm_chart": {
            "release": "mine",
            "values": {"replicas": 2, "image": {"tag": "é"}},
            "warnings": ["It has no schema."],
        },
    }


@pytest.mark.parametrize(
    ("error", "dry_run", "can_sketch", "is_sketched"),
    [
        (CredentialError("No credentials.", details={"configured": False}), True, True, True),
        (UsageError("No project.", details={"configured": False}), True, True, True),
        (CredentialError("No credentials.", details={"configured": False}), False, True, False),
        (CredentialError("No credentials.", details={"configured": False}), True, False, False),
        (CredentialError("Expired.", details={"configured": True}), True, True, False),
        (UsageError("Wrong."), True, True, False),
    ],
)
def test_without_an_account_the_plan_and_its_price_are_still_shown(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    error: Exception,
    dry_run: bool,
    can_sketch: bool,
    is_sketched: bool,
) -> None:
    world.error = error
    monkeypatch.setattr(manage, "sketch_cluster", lambda request: world.planned(request) if can_sketch else None)
    if is_sketched:
        make(world, dry_run=dry_run)
        assert "worker x" in capsys.readouterr().err
    else:
        with pytest.raises(type(error)) as caught:
            make(world, dry_run=dry_run)
        assert caught.value is error


def test_a_task_is_estimated_at_the_price_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def estimate_on_cluster(store: Any, task: str, cluster: Cluster, *, is_new: bool) -> str:
        asked.append((task, cluster.details, is_new))
        return "estimate"

    monkeypatch.setattr(calibrated, "estimate_on_cluster", estimate_on_cluster)
    plan = Plan((PlanLine("worker x", 2, 0.75),), "near")
    planned = PlannedCluster(Cluster("lab-2", "kind", details={"nodes": 2}), plan, Provider(), None)  # type: ignore[arg-type]
    store: Any = None
    assert _estimate(store, planned, None) is None
    found: Any = _estimate(store, planned, "mnist")
    assert found == "estimate"
    assert asked == [("mnist", {"nodes": 2, "plan": {"price_per_hour": 1.5}}, True)]


@pytest.mark.parametrize(("name", "found"), [("kind", True), ("google", True), ("local", False), ("attached", False)])
def test_sub_commands_are_the_providers_that_create(name: str, found: bool) -> None:
    name = (
        next((alias for alias, real in registry.ALIASES.items() if real == "gke"), "gke") if name == "google" else name
    )
    group = ProviderGroup()
    command = group.get_command(None, name)
    assert (command is not None) == found
    if command is not None:
        assert command.name == name
    assert set(group.list_commands(None)) == set(registry.creators())


def test_a_provider_that_creates_no_clusters_is_named_with_the_nearest() -> None:
    context: Any = None
    for word, near in (("kindd", ' Did you mean "kind"?'), ("local", "")):
        with pytest.raises(UsageError) as caught:
            ProviderGroup().resolve_command(context, [word, "2", "lab"])
        assert caught.value.message == f'There is no cluster provider "{word}".{near}'
        assert caught.value.hint is not None
        assert "mlbench attach-cluster NAME" in caught.value.hint


def test_help_lists_the_providers_with_their_summaries() -> None:
    written: list[Any] = []

    class Formatter:
        @contextmanager
        def section(self, name: str) -> Iterator[None]:
            written.append(name)
            yield

        def write_dl(self, rows: list[tuple[str, str]]) -> None:
            written.append(dict(rows))

    ProviderGroup().format_commands(None, Formatter())
    assert written == ["Providers", {name: each.summary for name, each in registry.creators().items()}]


def test_the_options_of_a_sub_command_are_what_create_takes() -> None:
    provider: Any = SimpleNamespace(options=NoOptions)
    parameters = inspect.signature(module._function(provider)).parameters
    assert set(parameters) == set(inspect.signature(create).parameters) - {"provider", "options"}


def test_the_registry_of_the_options_is_checked_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(module, "_check_registry", lambda provider, given: checked.append((provider.name, given)))
    make(world, options={"registry": "auto"})
    make(world)
    assert checked == [("kind", "auto"), ("kind", None)]


def test_the_result_has_the_gpus_that_a_worker_reported(capsys: Captured) -> None:
    report = {"gpus": "2", "gpu": "T4", "driver": "580.1"}
    module._print_result(Cluster("lab-2", "gke", details={"gpu_probe": report}), Format.text)
    assert "GPUs of a worker: 2 × T4, driver 580.1\n" in capsys.readouterr().err


def test_the_driver_of_a_probe_is_checked(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    report = {"gpus": "8", "gpu": "H100", "driver": "1.0"}
    monkeypatch.setattr("providers.gpu_probe.find_driver_problem", lambda found: "Too old.")
    monkeypatch.setattr("providers.gpu_probe.find_driver_branch", lambda found: 1)
    monkeypatch.setattr(module, "RELEASES", {"known": {}})
    monkeypatch.setattr(module, "explain_unknown_branch", lambda kind, branch: f"{kind} has no {branch}.")
    for setup, words in (
        ("known", ["Warning: Too old.", "Warning: known has no 1."]),
        ("other", ["Warning: Too old."]),
    ):
        _show_probe(ClusterDetails(gpu_probe=report, fabric={"setup": setup}))
        assert capsys.readouterr().err.splitlines()[1:] == words


# --- attach-cluster ---------------------------------------------------------------------------------------------------


def right(resource: str, allowed: bool = True, needed: bool = True, verb: str = "create", group: str = "") -> Right:
    return Right(group, resource, verb, needed, allowed)


POLICIES: dict[str, Any] = {"resource": "networkpolicies", "needed": False, "group": "networking.k8s.io"}
JOB_SETS: dict[str, Any] = {"resource": "jobsets", "needed": False, "group": "jobset.x-k8s.io"}
PLAIN = {"namespace": "bench", "server": "https://api", "context": "c"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets `attach-cluster` find a server with these facts."""

    def prepare(
        *rights: Right,
        version: str = "v1.34.1",
        queues: QueueFacts = QueueFacts(),
        nodes: NodeFacts | None = None,
        is_kind: bool = False,
    ) -> None:
        def new_cluster(name: str, kubeconfig: Any, context: Any, namespace: Any) -> Cluster:
            return Cluster(name, "attached", details=PLAIN)

        monkeypatch.setattr(attached, "new_attached_cluster", new_cluster)
        providers = {"attached": SimpleNamespace(connect=lambda cluster: "access")}
        monkeypatch.setattr(registry, "load", providers.__getitem__)
        monkeypatch.setattr(attached, "require_version", lambda access: version)
        monkeypatch.setattr(attached, "check_rights", lambda access: list(rights))
        monkeypatch.setattr(attached, "read_queue_facts", lambda access: queues)
        monkeypatch.setattr(attached, "read_node_facts", lambda access: nodes)
        monkeypatch.setattr(attached, "is_kind", lambda access: is_kind)

    return prepare


def attached_details(name: str = "mine") -> dict[str, Any]:
    return dict(Store().cluster(name).details)


def test_a_plain_cluster_is_attached_and_chosen(server: Any, capsys: Captured) -> None:
    server(right("jobs"))
    attach_cluster("mine")
    assert attached_details() == {**PLAIN, "version": "v1.34.1"}
    assert Store().current_cluster.name == "mine"
    printed = capsys.readouterr()
    assert printed.out == "The cluster mine is https://api, namespace bench; commands now use it.\n"
    assert printed.err == ""
    server(right("jobs"), version="")
    attach_cluster("mine")
    assert attached_details() == PLAIN


def test_what_a_cluster_offers_and_demands_is_recorded_and_told(server: Any, capsys: Captured) -> None:
    nodes = NodeFacts(2, 8, "H100", "nvidia.com/gpu", ("rdma/hca",), autopilot=True)
    server(
        right("jobs"),
        right(allowed=False, **POLICIES),
        right(**JOB_SETS),
        queues=QueueFacts(("team-a", "team-b"), needs_queue=True),
        nodes=nodes,
        is_kind=True,
    )
    attach_cluster("mine")
    assert attached_details() == {
        **PLAIN,
        "version": "v1.34.1",
        "network_policies": False,
        "queues": ["team-a", "team-b"],
        "needs_queue": True,
        "gpus_per_node": 8,
        "gpu": "H100",
        "gpu_resource": "nvidia.com/gpu",
        "autopilot": True,
        "functional_only": True,
    }
    assert capsys.readouterr().err.splitlines() == [
        "Warning: Missing permissions that only some runs need: create networkpolicies.networking.k8s.io.",
        "Warning: This is a KIND cluster, so results are functional, not a performance measurement.",
        "Kueue has the queues team-a, team-b there: runs need --queue NAME.",
        "This is GKE Autopilot, where pods get only what they request: runs need --num-cpus N --memory N.",
        "Its nodes have up to 8 GPUs each; runs with --gpu have one rank per GPU.",
        "Its nodes offer rdma/hca; request them with --device RESOURCE=N.",
    ]


@pytest.mark.parametrize(
    ("rights", "queues", "recorded"),
    [
        ([right(**JOB_SETS), right(verb="get", **JOB_SETS)], QueueFacts(), True),
        ([right(**JOB_SETS), right(verb="get", allowed=False, **JOB_SETS)], QueueFacts(), False),
        ([], QueueFacts(), False),
        ([right(**JOB_SETS)], QueueFacts(needs_queue=True), False),
        ([right(**JOB_SETS)], QueueFacts(("a",)), True),
    ],
)
def test_job_sets_are_used_with_all_rights_to_them_and_without_a_queue(
    server: Any, rights: list[Right], queues: QueueFacts, recorded: bool
) -> None:
    server(right("jobs"), *rights, queues=queues)
    attach_cluster("mine")
    assert attached_details().get("job_sets", False) is recorded


@pytest.mark.parametrize(
    ("queues", "words"),
    [
        (QueueFacts(), None),
        (QueueFacts(("a",)), "Kueue has the queues a there: runs may name --queue NAME."),
        (QueueFacts((), True), "Kueue has the queues (unknown) there: runs need --queue NAME."),
    ],
)
def test_queues_are_told(server: Any, capsys: Captured, queues: QueueFacts, words: str | None) -> None:
    server(right("jobs"), queues=queues)
    attach_cluster("mine")
    assert capsys.readouterr().err == (f"{words}\n" if words else "")


def test_nodes_without_gpus_have_nothing_to_record(server: Any, capsys: Captured) -> None:
    server(right("jobs"), nodes=NodeFacts(2, 0, None, None, ()))
    attach_cluster("mine")
    assert attached_details() == {**PLAIN, "version": "v1.34.1"}
    assert capsys.readouterr().err == ""


def test_rights_as_a_document(server: Any, capsys: Captured) -> None:
    server(right("jobs"), right(allowed=False, **POLICIES))
    attach_cluster("mine", output=Format.json)
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["cluster"]["details"] == attached_details()
    assert document["rights"] == [
        {"group": "", "resource": "jobs", "verb": "create", "needed": True, "allowed": True, "reason": ""},
        {
            "group": "networking.k8s.io", "resource": "networkpolicies", "verb": "create", "needed": False,
            "allowed": False, "reason": "",
        },
    ]  # fmt: skip
    assert printed.err == ""


def test_missing_rights_are_named_with_the_role_that_has_them(server: Any) -> None:
    server(right("jobs", allowed=False), right("pods/log", allowed=False), right(allowed=False, **POLICIES))
    with pytest.raises(CredentialError) as caught:
        attach_cluster("mine")
    assert caught.value.message == (
        "In the namespace bench of https://api, runs lack permission to create jobs, create pods/log."
    )
    assert caught.value.hint == "Ask for this Role: mlbench attach-cluster mine --namespace bench --role"
    assert caught.value.details == {"missing": ["create jobs", "create pods/log"]}
    assert [cluster.name for cluster in Store().clusters()] == ["local"]


def test_a_name_of_another_provider_is_taken(server: Any) -> None:
    server(right("jobs"))
    Store().record_cluster(Cluster("mine", "kind"))
    Store().record_cluster(Cluster("again", "attached", details={"namespace": "old"}))
    with pytest.raises(UsageError, match='There is already a cluster "mine" of the provider kind') as caught:
        attach_cluster("mine")
    assert caught.value.hint == "Choose another name."
    attach_cluster("again")
    assert attached_details("again")["namespace"] == "bench"


def test_the_role_is_printed_for_the_namespace(capsys: Captured) -> None:
    attach_cluster("Any Name", role=True)
    assert capsys.readouterr().out.count("namespace: default") == 2
    attach_cluster("mine", namespace="bench", role=True)
    printed = capsys.readouterr().out
    assert printed.count("namespace: bench") == 2
    assert not printed.endswith("\n\n")
    assert [cluster.name for cluster in Store().clusters()] == ["local"]
