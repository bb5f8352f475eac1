"""A cluster on its page: facts, the ranks of its runs, and sums by node."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from mlbench_cli.errors import UnreachableError
from mlbench_cli.model.run import Cluster
from mlbench_cli.results.analysis.tables import ResourceSample
from mlbench_cli.server import clusters
from mlbench_cli.server.clusters import describe_cluster
from mlbench_cli.server.live import latest_resources


def described(runs: tuple[Any, ...] = (), **details: Any) -> dict[str, Any]:
    return describe_cluster(Cluster("c", "gke", "ready", details=details), runs, 0)


@pytest.mark.parametrize(
    ("details", "facts"),
    [
        ({}, []),
        ({"nodes": 2}, ["2 nodes"]),
        ({"nodes": 1, "location": "eu-b"}, ["eu-b", "1 node"]),
        ({"nodes": 0, "location": "eu-b"}, ["eu-b", "0 nodes"]),
        ({"nodes": None, "location": "eu-b"}, ["eu-b"]),
        ({"gpu": "L4", "machine_type": "g2", "location": "eu-b", "nodes": 3}, ["eu-b", "g2", "L4", "3 nodes"]),
        ({"gpu": "L4", "machine_type": None}, ["L4"]),
    ],
)
def test_the_facts_of_a_cluster(details: dict[str, Any], facts: list[str]) -> None:
    """A cluster in eu-b that was scaled to nothing was shown as "eu-b nodes"."""
    assert described(**details)["facts"] == facts


def test_a_cluster_without_runs() -> None:
    assert described(expires=0) == {
        "name": "c",
        "provider": "gke",
        "state": "ready",
        "facts": [],
        "expires": "1970-01-01T00:00:00.000Z",
        "runs": [],
        "ranks": [],
        "columns": [],
        "nodes": [],
        "figures": [],
    }
    assert described(expires="soon")["expires"] is None
    assert described()["expires"] is None


def run(name: str, *nodes: str | None) -> Any:
    ranks = [{"rank": rank, "node": node} for rank, node in enumerate(nodes)]
    return SimpleNamespace(name=name, status=lambda: {"ranks": ranks}, latest_samples=list)


def unreachable(name: str) -> Any:
    def status() -> Any:
        raise UnreachableError("gone")

    return SimpleNamespace(name=name, status=status, latest_samples=list)


def test_ranks_are_summed_by_node_and_gpus_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = {0: {"cpu": 1.0, "gpu": 50.0, "memory": 2.0}, 1: {"cpu": 0.5, "gpu": 100.0}, 2: {"cpu": 4.0}}
    monkeypatch.setattr(clusters, "use_now", lambda _: uses)
    found = described((run("b", "n1", "n1", "n1"), unreachable("x"), run("a", "n0")))
    assert found["runs"] == ["b", "x", "a"]
    assert [(rank["node"], rank["run"], rank["rank"]) for rank in found["ranks"]] == [
        ("n0", "a", 0),
        ("n1", "b", 0),
        ("n1", "b", 1),
        ("n1", "b", 2),
    ]
    assert found["nodes"] == [
        {"node": "n0", "runs": ["a"], "ranks": 1, "uses": {"cpu": 1.0, "gpu": 50.0, "memory": 2.0}},
        {"node": "n1", "runs": ["b"], "ranks": 3, "uses": {"cpu": 5.5, "gpu": 75.0, "memory": 2.0}},
    ]
    assert found["columns"] == ["cpu", "memory", "gpu"]


def test_ranks_without_a_node_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "use_now", lambda _: {})
    found = described((run("a", "n1", None),))
    assert [node["node"] for node in found["nodes"]] == [None, "n1"]
    assert found["columns"] == []
    assert found["ranks"][0] == {"rank": 1, "node": None, "run": "a", "uses": {}}


def sample(rank: int, **fields: Any) -> Any:
    names = ("cpu_seconds", "rss_bytes", "received_bytes", "sent_bytes")
    return SimpleNamespace(rank=rank, **{**dict.fromkeys(names), **fields})


def resources(*samples: Any) -> dict[int, Any]:
    handle: Any = SimpleNamespace(latest_samples=lambda: samples)
    return latest_resources(handle)


def test_the_latest_use_of_ranks_is_in_seconds_mebibytes_and_megabytes() -> None:
    found = resources(
        sample(0, cpu_seconds=1.0, rss_bytes=3 << 20, received_bytes=1e6, sent_bytes=5e5),
        sample(1, cpu_seconds=0.5, sent_bytes=2e6),
        sample(0, cpu_seconds=2.0, rss_bytes=0, received_bytes=2e6),
    )
    # A process that has ended has no memory any more: the largest of the last samples counts.
    assert found == {
        0: {"cpu": 2.0, "memory": 3.0, "traffic": 2.0},
        1: {"cpu": 0.5, "memory": None, "traffic": 2.0},
    }
    assert resources(sample(0), sample(0, rss_bytes=1 << 20), sample(0)) == {
        0: {"cpu": None, "memory": 1.0, "traffic": None}
    }
    assert resources() == {}


def test_samples_have_the_fields_that_are_shown() -> None:
    assert {"cpu_seconds", "rss_bytes", "received_bytes", "sent_bytes"} <= {*ResourceSample.__dataclass_fields__}
