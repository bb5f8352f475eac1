"""Rules about clusters that need no cloud: zones to try, owners, what an attached cluster has, what checks report."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.clusters import manage
from mlbench_cli.clusters.changes import describe_end
from mlbench_cli.clusters.zone_failover import create_in_first_zone
from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.kube.api import AccessDenied
from mlbench_cli.model.run import Cluster
from providers.attached import (
    NodeFacts,
    _absolute_kubeconfig,
    check_rights,
    is_kind,
    read_node_facts,
    read_queue_facts,
    require_version,
)
from providers.doctor import Checklist, check_clock, check_clusters, check_library, check_prices
from providers.gke import GkeProvider
from providers.gke.options import GkeOptions

# --- zones and owners -----------------------------------------------------------------------------------------------


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Tries the zones b, c and d of a cluster on GKE, each of which fails for a reason or succeeds (""); the tried."""

    def run(reasons: dict[str, str], known: Cluster | None = None) -> list[str]:
        zones = ",".join(f"europe-west1-{letter}" for letter in reasons)
        cluster = GkeProvider().new_cluster("rel-2", 2, GkeOptions(project="p", zones=zones))
        tried: list[str] = []

        def create(placed: Cluster) -> Cluster:
            zone = placed.details["location"][-1]
            tried.append(zone)
            if reasons[zone]:
                raise CapacityError("Refused.", details={"reason": reasons[zone]})
            return placed

        try:
            create_in_first_zone(GkeProvider(), cluster, known, create, lambda words: None)
        except CapacityError as error:
            tried.append("all" if "zones" in error.details else "refused")
        return tried

    return run


@pytest.mark.parametrize(
    ("reasons", "tried"),
    [
        ({"b": "", "c": ""}, ["b"]),
        ({"b": "stock_out", "c": "", "d": ""}, ["b", "c"]),
        ({"b": "stock_out", "c": "stock_out"}, ["b", "c", "all"]),
        ({"b": "quota", "c": ""}, ["b", "refused"]),
        ({"b": "reservation", "c": ""}, ["b", "refused"]),
    ],
)
def test_the_next_zone_is_tried_only_where_it_can_help(
    attempt: Callable[..., list[str]], reasons: dict[str, str], tried: list[str]
) -> None:
    """Quotas and reservations of Compute Engine are the same in all zones of a region, or in one zone only."""
    assert attempt(reasons) == tried


def test_the_zone_of_an_earlier_attempt_comes_first(attempt: Callable[..., list[str]]) -> None:
    known = Cluster("rel-2", "gke", details={"location": "europe-west1-c"})
    assert attempt({"b": "", "c": "stock_out", "d": ""}, known) == ["c", "b"]


@pytest.mark.parametrize(
    ("login", "owner"),
    [("ada", "ada"), ("Ada.Lovelace@x", "ada-lovelace-x"), ("a" * 70, "a" * 63), ("a_b-1", "a_b-1")],
)
def test_the_login_is_a_value_that_labels_of_all_clouds_accept(
    monkeypatch: pytest.MonkeyPatch, login: str, owner: str
) -> None:
    """Google's labels: at most 63 lower case letters, digits, dashes and underscores."""
    monkeypatch.setattr("mlbench_cli.clusters.manage.getpass.getuser", lambda: login)
    assert manage.owner_name() == owner


def test_a_cluster_on_a_provider_without_timer_says_who_deletes_it() -> None:
    assert describe_end(Cluster("rel-2", "kind", details={})) is None
    said = describe_end(Cluster("rel-2", "kind", details={"expires": 5}))
    assert said is not None
    assert "mlbench gc --expired" in said


# --- attached clusters ----------------------------------------------------------------------------------------------


def access_to(answers: dict[str, Any], created: list[Any] | None = None) -> Any:
    """Access to an API server with these answers to GET, by path; others are refused."""

    def get(path: str, **_: Any) -> Any:
        if path not in answers:
            raise AccessDenied("forbidden", status=403)
        return answers[path]

    def create(path: str, body: Any) -> Any:
        (created if created is not None else []).append(body)
        return answers.get(f"POST {path}", {})

    return SimpleNamespace(
        client=lambda: SimpleNamespace(get=get, create=create), server="https://c", namespace="default"
    )


@pytest.mark.parametrize(
    ("major", "minor", "is_new_enough"),
    [("1", "31", True), ("1", "31+", True), ("1", "30", False), ("1", "9", False), ("2", "0", True)],
)
def test_runs_need_kubernetes_1_31(major: str, minor: str, is_new_enough: bool) -> None:
    """The first version in which success policies of Jobs need no feature gate. Clouds write "31+"."""
    access = access_to({"/version": {"major": major, "minor": minor, "gitVersion": "v"}})
    if is_new_enough:
        assert require_version(access) == "v"
        return
    with pytest.raises(UsageError, match=r"runs need 1\.31 or later"):
        require_version(access)


def test_a_server_that_hides_its_version_is_not_refused() -> None:
    assert require_version(access_to({})) == ""


def node(name: str, labels: dict[str, str] | None = None, provider: str = "", **allocatable: Any) -> dict[str, Any]:
    offered = {key.replace("__", "/").replace("_", "."): value for key, value in allocatable.items()}
    metadata = {"name": name, "labels": labels or {}}
    return {"metadata": metadata, "spec": {"providerID": provider}, "status": {"allocatable": offered}}


def test_an_attached_cluster_has_the_most_gpus_of_a_node_and_devices_of_plugins() -> None:
    nodes = [
        node("a", {"nvidia.com/gpu.product": "T4"}, nvidia_com__gpu="1", cpu="4", rdma__hca="1"),
        node("b", {"nvidia.com/gpu.product": "H100"}, nvidia_com__gpu="8", kubernetes_io__x="1", sgx__epc="0"),
    ]
    facts = read_node_facts(access_to({"/api/v1/nodes": {"items": nodes}}))
    assert facts == NodeFacts(2, 8, "H100", "nvidia.com/gpu", ("rdma/hca",))
    assert read_node_facts(access_to({})) is None


@pytest.mark.parametrize(("name", "is_autopilot"), [("gk3-x", True), ("gke-x", False)])
def test_autopilot_is_known_by_the_names_of_its_nodes(name: str, is_autopilot: bool) -> None:
    facts = read_node_facts(access_to({"/api/v1/nodes": {"items": [node(name)]}}))
    assert facts is not None
    assert facts.autopilot is is_autopilot


@pytest.mark.parametrize(("provider", "found"), [("kind://docker/rel/a", True), ("gce://p/z/a", False), ("", False)])
def test_kind_is_known_by_the_provider_of_its_nodes(provider: str, found: bool) -> None:
    assert is_kind(access_to({"/api/v1/nodes": {"items": [node("a", provider=provider)]}})) is found
    assert not is_kind(access_to({}))


def test_rights_to_job_sets_are_asked_about_only_where_there_are_job_sets() -> None:
    asked: list[Any] = []
    check_rights(access_to({}, asked))
    resources = [item["spec"]["resourceAttributes"] for item in asked]
    assert not [item for item in resources if item["resource"] == "jobsets"]
    log = next(item for item in resources if item.get("subresource") == "log")
    assert (log["resource"], log["verb"]) == ("pods", "get")
    asked.clear()
    group = {"preferredVersion": {"groupVersion": "jobset.x-k8s.io/v1alpha2"}}
    check_rights(access_to({"/apis/jobset.x-k8s.io": group}, asked))
    assert [item for item in asked if item["spec"]["resourceAttributes"]["resource"] == "jobsets"]


@pytest.mark.parametrize("suspends", [True, False])
def test_kueue_tells_on_a_dry_run_whether_a_job_needs_a_queue(suspends: bool) -> None:
    answers = {
        "/apis/kueue.x-k8s.io": {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta1"}},
        "/apis/kueue.x-k8s.io/v1beta1/namespaces/default/localqueues": {"items": [{"metadata": {"name": "q"}}]},
        "POST /apis/batch/v1/namespaces/default/jobs?dryRun=All": {"spec": {"suspend": suspends}},
    }
    facts = read_queue_facts(access_to(answers))
    assert (facts.queues, facts.needs_queue) == (("q",), suspends)


def test_the_kubeconfig_of_kubectl_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _absolute_kubeconfig(None) == tmp_path / ".kube" / "config"
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/a:{tmp_path}/b")
    assert _absolute_kubeconfig(None) is None
    assert _absolute_kubeconfig(Path("~/c")) == tmp_path / "c"


# --- checks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead", "state"), [(60, "ok"), (-60, "ok"), (61, "failed"), (-61, "failed")])
def test_a_clock_may_be_a_minute_off(ahead: float, state: str) -> None:
    date = "Sat, 21 Nov 2026 12:00:00 GMT"
    found = check_clock(Checklist("eks"), date, 1795262400.0 + ahead)
    assert found.state == state
    if state == "failed":
        assert ("ahead of" if ahead > 0 else "behind") in found.found


@pytest.mark.parametrize(
    ("version", "floor", "state"), [("2.65.0", "2.65", "ok"), ("2.100", "2.65", "ok"), ("2.9", "2.65", "failed")]
)
def test_versions_of_libraries_are_compared_by_number(
    monkeypatch: pytest.MonkeyPatch, version: str, floor: str, state: str
) -> None:
    monkeypatch.setattr("providers.doctor.metadata.version", lambda package: version)
    assert check_library(Checklist("gke"), "x", floor, "gke").state == state


@pytest.mark.parametrize(("known", "state"), [(1, "missing"), (2, "ok")])
def test_a_region_with_nothing_but_a_control_plane_has_no_prices(
    monkeypatch: pytest.MonkeyPatch, known: int, state: str
) -> None:
    table = SimpleNamespace(count_prices=lambda region: known, source="s")
    monkeypatch.setattr("providers.pricing.load_prices", lambda provider: table)
    (found,) = check_prices(Checklist("gke"), "gke", "r")
    assert found.state == state


def test_ten_missing_rights_are_named() -> None:
    rights = [f"r{number}" for number in range(11)]
    assert Checklist("gke").rights(rights[:10], "all", "without").found.endswith("r9")
    assert Checklist("gke").rights(rights, "all", "without").found.endswith("r9 and 1 more")
    assert Checklist("gke").rights([], "all", "without").state == "ok"


@pytest.mark.parametrize(
    ("ends", "cluster_state", "command"),
    [
        (None, "ready", None),
        (600, "ready", None),
        (-600, "ready", "mlbench gc --expired   removes a"),
        (600, "failed", "mlbench gc   removes a"),
        (-600, "failed", "mlbench gc   removes a"),
    ],
)
def test_clusters_that_should_be_gone_are_named_with_the_command(
    ends: float | None, cluster_state: str, command: str | None
) -> None:
    details = {} if ends is None else {"expires": int(time.time() + ends)}
    (found,) = check_clusters(Checklist("gke"), lambda: [Cluster("a", "gke", cluster_state, details=details)])
    assert (found.state, found.hint) == ("missing" if command else "ok", command)


# --- garbage collection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "ends", "options", "reason"),
    [
        ("ready", -5, {}, "expired"),
        ("ready", -5, {"only_expired": True}, "expired"),
        ("ready", 600, {}, None),
        ("ready", None, {}, None),
        ("failed", 600, {}, "partly created"),
        ("failed", 600, {"only_expired": True}, None),
        ("deleting", None, {}, "partly deleted"),
        ("creating", None, {}, None),
        ("ready", None, {"include_unknown": True}, "unknown here"),
        ("ready", None, {"include_unknown": True, "only_expired": True}, None),
        ("known", None, {"include_unknown": True}, None),
    ],
)
def test_gc_deletes_what_has_expired_or_is_incomplete_and_the_rest_on_request(
    state: str, ends: float | None, options: dict[str, bool], reason: str | None
) -> None:
    details = {} if ends is None else {"expires": int(time.time() + ends)}
    cluster = Cluster("a-1", "gke", state, details=details)
    known = [cluster.identity] if state == "known" else []
    asked = {"only_expired": False, "include_unknown": False, **options}
    assert manage.removal_reason(cluster, known, **asked) == reason


@pytest.mark.parametrize(
    ("scope", "is_meant"),
    [
        ({}, True),
        ({"location": "eu-west-1"}, True),
        ({"location": "eu-west-1a"}, True),
        ({"location": "eu-west-2a"}, False),
        ({"project": "p"}, True),
        ({"project": "q"}, False),
    ],
)
def test_a_place_on_the_command_line_selects_a_cluster(scope: dict[str, str], is_meant: bool) -> None:
    """A zone of AWS is the region's name and a letter."""
    assert manage._in_scope(Cluster("a-1", "x", account="p", location="eu-west-1"), scope) is is_meant
