"""Clusters before they are made, and when they are changed: records, ends, charts, sizes, and what is refused."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.clusters import changes, manage
from mlbench_cli.clusters.manage import CreationRequest, PlannedCluster, Ttl, plan_cluster, sketch_cluster
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers import registry
from providers.base import Plan, PlanLine

NOW = 1_767_225_600.5


@dataclass(frozen=True)
class Options:
    """Options of the provider below."""

    zone: str = "near"


class Provider:
    """A provider that makes clusters without asking a cloud."""

    name, summary, options = "kind", "", Options

    def new_cluster(self, name: str, nodes: int, options: Options) -> Cluster:
        return Cluster(name, "kind", location=options.zone, details={"nodes": nodes})

    def plan(self, cluster: Cluster) -> Plan:
        return Plan((PlanLine("worker", 2, 0.5),), "near")

    def resources(self, cluster: Cluster) -> Sequence[Any]:
        return [SimpleNamespace(kind="pool", name=f"{cluster.name}-pool")]

    def discover(self, scope: Any) -> Sequence[Cluster]:
        return []

    def connect(self, cluster: Cluster) -> Any: ...


class Cloud(Provider):
    """One with accounts, machines to describe, and plans without an account."""

    def find_account(self, cluster: Cluster) -> str:
        return "me"

    def describe_machines(self, cluster: Cluster) -> Cluster:
        return replace(cluster, details={**cluster.details, "gpus_per_node": 4})

    def fill_place(self, options: Any) -> dict[str, Any]:
        return {"zone": "anywhere", **options}

    def sketch(self, cluster: Cluster) -> Plan:
        return Plan((PlanLine("worker", 2, None),), cluster.location)


class Scalable(Provider):
    """One whose clusters can grow, and which ends them itself."""

    def scale(self, cluster: Cluster, nodes: int) -> Sequence[Any]:
        return [f"{nodes} machines"]

    def extend(self, cluster: Cluster) -> Sequence[Any]:
        return [f"a timer at {cluster.details['expires']}"]

    def describe_end(self, cluster: Cluster) -> str:
        return "Its cloud deletes it."


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr("getpass.getuser", lambda: "eva")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def request(provider: Any = None, **changes: Any) -> CreationRequest:
    fields: dict[str, Any] = {"provider": provider or Provider(), "nodes": 2, "release": "lab", "options": {}}
    return CreationRequest(**{**fields, **changes})


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_planned_cluster_has_its_owner_its_plan_and_its_end(store: Store) -> None:
    with plan_cluster(store, request(options={"zone": "far"}, ttl=Ttl("2h", 7200.0))) as planned:
        assert (planned.cluster.name, planned.cluster.location, planned.cluster.account) == ("lab-2", "far", "")
        assert planned.cluster.details == {
            "nodes": 2, "owner": "eva", "plan": planned.plan.to_dict(), "expires": int(NOW) + 7200, "ttl": "2h"
        }  # fmt: skip
        assert planned.resources == [{"kind": "pool", "name": "lab-2-pool"}]
        assert (planned.keeps_end, planned.moves_end) == (False, False)
    assert [cluster.name for cluster in store.clusters()] == ["local"]  # nothing is recorded


def test_a_planned_cluster_without_a_time_to_live_does_not_end(store: Store) -> None:
    with plan_cluster(store, request()) as planned:
        assert not {"expires", "ttl", "helm_charts"} & planned.cluster.details.keys()
        assert planned.with_ttl(None) is planned
        moved = planned.with_ttl(Ttl("90m", 5400.0))
        assert (moved.cluster.details["expires"], moved.cluster.details["ttl"]) == (int(NOW) + 5400, "90m")


def test_account_and_machines_are_those_that_the_cloud_tells(store: Store) -> None:
    with plan_cluster(store, request(Cloud())) as planned:
        assert (planned.cluster.account, planned.cluster.details["gpus_per_node"]) == ("me", 4)


@pytest.mark.parametrize("name", ["Lab", "1lab", "lab_", "-lab"])
def test_a_name_must_be_a_label(store: Store, name: str) -> None:
    with pytest.raises(UsageError, match="cluster name"), plan_cluster(store, request(release=name)):
        pass
    with pytest.raises(UsageError, match="cluster name"):
        sketch_cluster(request(Cloud(), release=name))


def test_a_name_that_is_taken_is_refused_before_the_plan(store: Store) -> None:
    store.record_cluster(Cluster("lab-2", "gke", location="far"))
    with pytest.raises(UsageError, match='There is already a cluster "lab-2"'), plan_cluster(store, request()):
        pass


def test_charts_of_a_cluster_that_exists_are_kept_and_replaced_by_release(store: Store) -> None:
    known = [{"release": "a", "version": "1"}, {"release": "b", "version": "1"}]
    store.record_cluster(Cluster("lab-2", "kind", location="near", details={"helm_charts": known}))
    with plan_cluster(store, request()) as planned:
        assert planned.cluster.details["helm_charts"] == known
    installation: Any = SimpleNamespace(
        record=lambda: {"release": "a", "version": "2"}, chart=SimpleNamespace(name="c")
    )
    recorded = store.cluster("lab-2")
    with_chart = manage._with_charts(Cluster("lab-2", "kind"), recorded, installation)
    assert with_chart.details["helm_charts"] == [known[1], {"release": "a", "version": "2"}]
    planned = PlannedCluster(Cluster("lab-2", "kind"), Plan((), "x"), cast(Any, Provider()), installation)
    assert planned.resources[-1] == {"kind": "Helm release", "name": "c"}


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, None),
        ({"chart_location": "c"}, ("c", (), 600.0)),
        ({"custom_values": ["a=1"]}, (None, ["a=1"], 600.0)),
        ({"chart_seconds": 0.0}, (None, (), 0.0)),
    ],
)
def test_a_chart_is_prepared_if_anything_is_asked_of_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], asked: Any
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("providers.helm.install.WAIT_SECONDS", 600.0)
    monkeypatch.setattr("providers.helm.install.prepare_chart", lambda *words: found.append(words))
    manage._prepare_chart(request(**options))
    assert found == ([] if asked is None else [asked])


def test_a_sketch_needs_no_account(store: Store) -> None:
    sketch = sketch_cluster(request(Cloud(), ttl=Ttl("2h", 7200.0)))
    assert sketch is not None
    assert (sketch.cluster.location, sketch.cluster.account, sketch.plan.total) == ("anywhere", "", None)
    assert (sketch.cluster.details["owner"], sketch.cluster.details["ttl"]) == ("eva", "2h")
    assert sketch.cluster.details["plan"]["price_per_hour"] is None
    assert sketch_cluster(request()) is None


@pytest.mark.parametrize(
    ("known", "expires", "moves"),
    [
        (None, 7, False),
        ({}, 7, True),
        ({"expires": 7}, 7, False),
        ({"expires": 6}, 7, True),
        ({"expires": 6}, None, False),
    ],
)
def test_an_end_is_moved_if_the_cluster_existed_with_another(
    monkeypatch: pytest.MonkeyPatch, store: Store, known: dict[str, Any] | None, expires: int | None, moves: bool
) -> None:
    made = Cluster("lab-2", "kind", location="near", details={} if expires is None else {"expires": expires})
    if known is not None:
        store.record_cluster(replace(made, details=known))
    created: list[Any] = []

    def create(provider: Any, cluster: Cluster, known: Any, create: Any, warn: Any) -> Cluster:
        created.append((cluster, known))
        return store.record_cluster(cluster)

    monkeypatch.setattr(manage, "create_in_first_zone", create)
    planned = PlannedCluster(made, Plan((), "x"), cast(Any, Provider()), None)
    assert planned.create(store, lambda step: None, lambda text: None).name == "lab-2"
    assert planned.moves_end is moves
    assert (created[0][1] is None) == (known is None)
    assert store.current_cluster.name == "lab-2"


def test_a_cluster_that_exists_keeps_its_end_and_its_words(store: Store) -> None:
    with plan_cluster(store, request()) as planned:
        assert (planned.keeps_end, planned.moves_end, planned.chart_notes) == (False, False, "")
        known = Cluster("lab-2", "kind", details={"expires": 5, "ttl": "2h", "nodes": 9})
        kept = planned.with_end_of(known)
        assert (kept.keeps_end, kept.moves_end) == (True, False)
        assert kept.cluster.details == {**planned.cluster.details, "expires": 5, "ttl": "2h"}
        assert planned.with_end_of(Cluster("lab-2", "kind")).cluster == planned.cluster
        assert planned.with_ttl(None) is planned


# --- changes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Sequence[Any], str]]:
    """The details and resources of each change of a cluster, and where its times are kept."""
    changed: list[Any] = []

    def up(cluster: Cluster, resources: Sequence[Any], store: Store, *, report: Any, times: str) -> Cluster:
        changed.append((dict(cluster.details), list(resources), times))
        return store.record_cluster(cluster)

    monkeypatch.setattr("providers.lifecycle.up", up)
    monkeypatch.setattr(registry, "load", lambda name: Scalable())
    return changed


def tell(step: Any) -> None: ...


@pytest.mark.parametrize(
    ("expires", "end"),
    [(int(NOW) + 60, int(NOW) + 660), (int(NOW) - 60, int(NOW + 600)), (NOW, int(NOW + 600))],
)
def test_an_end_is_moved_from_itself_or_from_now(store: Store, done: list[Any], expires: float, end: int) -> None:
    store.record_cluster(Cluster("lab-2", "kind", details={"expires": expires, "nodes": 2}))
    extended = changes.extend_cluster(store, Cluster("lab-2", "kind"), 600.0, tell)
    assert extended.details["expires"] == end
    assert done == [({"expires": end, "nodes": 2}, [f"a timer at {end}"], "scaling")]


def test_a_cluster_without_an_end_has_none_to_move(store: Store, done: list[Any]) -> None:
    store.record_cluster(Cluster("lab-2", "kind"))
    with pytest.raises(UsageError, match='The cluster "lab-2" does not expire'):
        changes.extend_cluster(store, Cluster("lab-2", "kind"), 600.0, tell)
    assert done == []


def test_a_cluster_is_scaled_as_it_is_recorded_now(store: Store, done: list[Any]) -> None:
    store.record_cluster(Cluster("lab-2", "kind", details={"nodes": 2, "owner": "eva"}))
    scaled = changes.scale_cluster(store, Cluster("lab-2", "kind"), 4, tell)
    assert scaled.details == {"nodes": 4, "owner": "eva"}
    assert done == [({"nodes": 4, "owner": "eva"}, ["4 machines"], "scaling")]


@pytest.mark.parametrize("change", [changes.scale_cluster, changes.extend_cluster])
def test_a_cluster_that_was_deleted_in_the_meantime_is_not_changed(store: Store, done: list[Any], change: Any) -> None:
    with pytest.raises(NotFoundError, match='The cluster "lab-2" was deleted in the meantime'):
        change(store, Cluster("lab-2", "kind"), 4, tell)
    assert done == []


@pytest.mark.parametrize(
    ("provider", "hint"),
    [
        (Provider(), "mlbench delete-cluster kind lab-2, then mlbench create-cluster kind 4 RELEASE"),
        (SimpleNamespace(), None),
    ],
)
def test_machines_that_mlbench_cannot_add(monkeypatch: pytest.MonkeyPatch, provider: Any, hint: str | None) -> None:
    monkeypatch.setattr(registry, "load", lambda name: provider)
    with pytest.raises(UsageError, match='The cluster "lab-2" cannot be scaled: kind has no machines') as caught:
        changes.plan_scaling(Cluster("lab-2", "kind"), 4)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("provider", "expires", "words"),
    [
        (Scalable(), None, None),
        (Scalable(), 7, "Its cloud deletes it."),
        (Provider(), 7, "It does not delete itself when it expires: run mlbench gc --expired."),
    ],
)
def test_who_ends_a_cluster(
    monkeypatch: pytest.MonkeyPatch, provider: Any, expires: int | None, words: str | None
) -> None:
    monkeypatch.setattr(registry, "load", lambda name: provider)
    assert changes.describe_end(Cluster("lab-2", "kind", details={"expires": expires})) == words


@pytest.mark.parametrize("warnings", [[], ["Something may be left."]])
@pytest.mark.parametrize("keep", [False, True])
def test_a_cluster_is_deleted_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch, store: Store, warnings: list[str], keep: bool
) -> None:
    monkeypatch.setattr(registry, "load", lambda name: Provider())
    store.record_cluster(Cluster("lab-2", "kind", details={"nodes": 2}))
    deleted: list[Any] = []
    checked: list[Any] = []
    told: list[str] = []
    cleanup = SimpleNamespace(warnings=warnings, raise_for_orphans=lambda error: None, close=lambda: None)
    monkeypatch.setattr("providers.workload_cleanup.WorkloadCleanup", lambda *words: cleanup)
    monkeypatch.setattr(
        "providers.lifecycle.down", lambda cluster, parts, store, report: deleted.append((cluster, parts))
    )
    certain = changes.delete_cluster(
        store, Cluster("lab-2", "kind"), tell, told.append, keep_images=keep, check=checked.append
    )
    ((cluster, parts),) = deleted
    assert cluster.details == {"nodes": 2, **({"keeps_images": True} if keep else {})}
    assert parts[-1] is cleanup
    assert len(parts) == 2
    assert [each.details for each in checked] == [{"nodes": 2}]
    assert (certain, told) == (not warnings, warnings)


def test_an_attached_cluster_is_only_forgotten(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    monkeypatch.setattr(registry, "load", lambda name: SimpleNamespace())
    store.record_cluster(Cluster("lab", "hosts"))

    def refuse(cluster: Cluster) -> None:
        raise UsageError("It has runs.")

    with pytest.raises(UsageError, match="It has runs"):
        changes.delete_cluster(store, Cluster("lab", "hosts"), tell, lambda text: None, check=refuse)
    assert len(store.clusters()) == 2
    assert changes.delete_cluster(store, Cluster("lab", "hosts"), tell, lambda text: None)
    assert [cluster.name for cluster in store.clusters()] == ["local"]
    assert not changes.was_deleted(store, "lab-9")
