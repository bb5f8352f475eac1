"""The facts of a cluster's record: each with its type and its default, and what a damaged or newer record means."""

from dataclasses import dataclass, fields
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails, fact
from mlbench_cli.model.run import Cluster

TIMES = {"kind": "cluster", "name": "c", "began": 0.0, "ready": 5.0}
# Every fact of a record as it is stored, and a value of another type.
FACTS: dict[str, tuple[Any, Any]] = {
    "nodes": (3, "3"),
    "gpus_per_node": (8, 8.0),
    "gpu": ("nvidia-l4", 4),
    "gpu_resource": ("amd.com/gpu", True),
    "machine_type": ("g2-standard-4", []),
    "arm": (True, 1),
    "devices_per_node": ({"rdma/ib": 1}, ["rdma/ib"]),
    "gpu_probe": ({"driver": "570"}, "570"),
    "node_selector": ({"a": "b"}, []),
    "tolerations": (["spot"], "spot"),
    "fabric": ({"name": "EFA", "gbits": 3200}, "EFA"),
    "topology_problem": ("none", {}),
    "provisioning_class": ("q", 1),
    "network_policies": (False, "no"),
    "job_sets": (True, "yes"),
    "queues": (["q"], {"q": 1}),
    "needs_queue": (True, 0),
    "autopilot": (True, "x"),
    "functional_only": (True, "x"),
    "registry": ("ghcr.io/me", 5),
    "registry_problem": ("no right", []),
    "registry_made": (True, 1),
    "keeps_images": (True, "later"),
    "addons": ({"vpc-cni": "1"}, []),
    "images": ({"a:1": "sha256:0"}, []),
    "region": ("eu-west-1", 1),
    "location": ("europe-west1-b", 1),
    "owner": ("me", 1),
    "ttl": ("8h", 8),
    "expires": (5.5, "5"),
    "end_problem": ("no right", 1),
    "options": ({"spot": True}, []),
    "plan": ({"price_per_hour": 1.5, "lines": []}, []),
    "helm_charts": ([{"release": "a"}], {}),
    "provisioning": ([TIMES], {}),
    "scaling": ([TIMES], "x"),
    "removal": ([TIMES], 5),
    "failure": ({"code": "c", "message": "m", "hint": None}, "m"),
    "removed": ("2026-01-01T00:00:00.000Z", 5.0),
}


def read(cls: type[ClusterDetails] = ClusterDetails, **facts: Any) -> ClusterDetails:
    return cls.of(Cluster("c", "gke", details=facts))


def test_every_fact_has_a_case_here() -> None:
    assert set(FACTS) == {item.name for item in fields(ClusterDetails)}


def test_a_whole_record_is_read() -> None:
    stored = {name: value for name, (value, _) in FACTS.items()}
    found = read(**stored)
    assert {item.name: getattr(found, item.name) for item in fields(found)} == stored
    assert found == ClusterDetails(**stored)


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_of_another_type_is_refused_by_its_name(name: str) -> None:
    _, wrong = FACTS[name]
    with pytest.raises(UsageError, match=f'The record of the cluster "c" is damaged: its {name} is ') as caught:
        read(**{name: wrong})
    assert caught.value.hint == "mlbench delete-cluster gke c   deletes what exists of it"


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_that_is_not_known_has_its_default(name: str) -> None:
    facts: dict[str, Any] = {name: None}
    assert read(**facts) == ClusterDetails()


def test_only_policies_of_the_network_are_assumed_to_be_possible() -> None:
    default = ClusterDetails()
    values = {item.name: getattr(default, item.name) for item in fields(default)}
    assert [name for name, value in values.items() if value] == ["network_policies"]
    flags = ("arm", "job_sets", "needs_queue", "autopilot", "functional_only", "registry_made", "keeps_images")
    assert [name for name, value in values.items() if value is False] == list(flags)


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(UsageError) as caught:
        read(nodes="x" * 100)
    assert f"its nodes is '{'x' * 59}, not int." in caught.value.message


def test_a_provider_has_facts_of_its_own_and_those_of_all() -> None:
    @dataclass(frozen=True)
    class OwnDetails(ClusterDetails):
        zone: str | None = fact(str)
        share: float = fact(float, int, default=0.5)

    found = read(OwnDetails, zone="a", nodes=2, share=1)
    assert isinstance(found, OwnDetails)
    assert (found.zone, found.nodes, found.share, OwnDetails().share) == ("a", 2, 1, 0.5)
    with pytest.raises(UsageError, match="its share is True, not float or int"):
        read(OwnDetails, share=True)
    assert read(zone=5) == ClusterDetails()  # to other providers it is an unknown key


def test_records_do_not_share_their_lists() -> None:
    ClusterDetails().queues.append("x")
    assert ClusterDetails().queues == []
    assert ClusterDetails().plan == {}
