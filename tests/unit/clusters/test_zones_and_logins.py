"""Zones that are tried one after the other, with what is said about each; and the login to a cluster's registry."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.clusters.registry_login import find_registry_login, registry_of
from mlbench_cli.clusters.zone_failover import create_in_first_zone
from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.tasks.registries import Login
from providers import registry

LAB = Cluster("lab-2", "gke")
FULL = CapacityError(
    "No machines.\nOf the cluster this exists: network.", hint="Wait.", details={"reason": "stock_out"}
)


class Zones:
    """A provider that tries zones."""

    def __init__(self, *zones: str) -> None:
        self.zones = zones

    def list_zones(self, cluster: Cluster) -> tuple[str, ...]:
        return self.zones

    def place_workers(self, cluster: Cluster, zone: str) -> Cluster:
        return Cluster(cluster.name, cluster.provider, details={"location": zone})


def create(provider: Any, known: Cluster | None = None, **errors: Exception) -> tuple[Any, list[str], list[str]]:
    """The result, the zones that were tried, and the warnings."""
    tried: list[str] = []
    warnings: list[str] = []

    def make(cluster: Cluster) -> Cluster:
        zone = str(cluster.details.get("location"))
        tried.append(zone)
        if zone in errors:
            raise errors[zone]
        return cluster

    try:
        found: Any = create_in_first_zone(provider, LAB, known, make, warnings.append)
    except Exception as error:
        found = error
    return found, tried, warnings


@pytest.mark.parametrize("provider", [SimpleNamespace(), Zones()])
def test_without_a_choice_the_cluster_is_created_where_it_is(provider: Any) -> None:
    assert create(provider) == (LAB, ["None"], [])


def test_a_zone_without_machines_is_told_with_the_next_one() -> None:
    found, tried, warnings = create(Zones("a", "b", "c"), a=FULL)
    assert (found.details, tried) == ({"location": "b"}, ["a", "b"])
    assert warnings == ["a: No machines. Removing its partly created workers, then trying b."]


def test_the_last_zone_says_that_none_has_machines() -> None:
    found, tried, warnings = create(Zones("a", "b"), a=FULL, b=FULL)
    assert isinstance(found, CapacityError)
    assert found.message == f"None of the zones a, b has the machines. {FULL.message}"
    assert (found.hint, found.details) == ("Wait.", {"reason": "stock_out", "zones": ["a", "b"]})
    assert (tried, len(warnings)) == (["a", "b"], 1)


@pytest.mark.parametrize("reason", ["quota", "reservation"])
def test_another_zone_does_not_help_against_a_limit_of_the_region(reason: str) -> None:
    error = CapacityError("No quota.", details={"reason": reason})
    assert create(Zones("a", "b"), a=error) == (error, ["a"], [])
    other = UsageError("Wrong.")
    assert create(Zones("a", "b"), a=other) == (other, ["a"], [])


def test_the_zone_that_already_has_workers_comes_first() -> None:
    known = Cluster("lab-2", "gke", details={"location": "b"})
    assert create(Zones("a", "b", "c"), known, b=FULL)[1] == ["b", "a"]
    assert create(Zones("a", "b"), Cluster("lab-2", "gke"))[1] == ["a"]


# --- registries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "is_of_a_cloud"),
    [
        ("europe-docker.pkg.dev/project/repository", True),
        ("123.dkr.ecr.eu-west-1.amazonaws.com/mlbench:", True),
        ("mine.azurecr.io/mlbench", True),
        ("ghcr.io/me", False),
        ("pkg.dev.example.org/me", False),
    ],
)
def test_a_clouds_own_registry_has_its_login(monkeypatch: pytest.MonkeyPatch, place: str, is_of_a_cloud: bool) -> None:
    asked: list[str] = []

    class Provider:
        def fetch_registry_login(self, cluster: Cluster) -> tuple[str, str]:
            asked.append(cluster.name)
            return "me", "secret"

    monkeypatch.setattr(registry, "load", lambda name: Provider())
    assert find_registry_login(LAB, place) == (Login("me", "secret") if is_of_a_cloud else None)
    assert asked == (["lab-2"] if is_of_a_cloud else [])
    assert find_registry_login(None, place) is None
    monkeypatch.setattr(registry, "load", lambda name: SimpleNamespace())
    assert find_registry_login(LAB, place) is None


def test_the_registry_of_a_cluster_is_as_recorded() -> None:
    assert registry_of(LAB) is None
    assert registry_of(Cluster("lab", "kind", details={"registry": "ghcr.io/me"})) == "ghcr.io/me"
