"""The finding that follows from a search among pairs of ranks, also from details that were made up."""

from typing import Any

import pytest

from mlbench_cli.results.archive.fabric import find_slow_links


def search(**changes: Any) -> dict[str, Any]:
    verdict = {"kind": "node", "ranks": [2], "slow": [[0, 2], [1, 2]], **changes.pop("verdict", {})}
    return {
        "search": {"verdict": verdict, "reason": "all pairs of rank 2 are slow", "hosts": ["a", "b", "c"], **changes}
    }


def test_a_slow_node_is_named_with_the_command_that_labels_it() -> None:
    found = find_slow_links(search())
    assert found is not None
    assert found.code == "slow_node"
    assert "rank 2 on c" in found.summary
    assert "kubectl label node c mlbench.io/suspect=node" in str(found.hint)


def test_a_slow_link_is_named_by_both_ends() -> None:
    found = find_slow_links(search(verdict={"kind": "link", "ranks": [0, 1]}))
    assert found is not None
    assert (found.code, "rank 0 on a and rank 1 on b" in found.summary) == ("slow_link", True)


@pytest.mark.parametrize(
    "details",
    [
        {},
        {"search": None},
        {"search": {"verdict": "node"}},
        search(verdict={"kind": "none", "ranks": []}),
        search(verdict={"ranks": ["2"]}),
        search(verdict={"kind": ["node"]}),
    ],
)
def test_nothing_slow_is_no_finding(details: dict[str, Any]) -> None:
    assert find_slow_links(details) is None


def test_ranks_beyond_the_hosts_have_no_name() -> None:
    found = find_slow_links(search(verdict={"ranks": [7]}, hosts="nobody"))
    assert found is not None
    assert found.summary.startswith("rank 7: slow")


@pytest.mark.parametrize(
    ("kind", "ranks", "code", "what"),
    [
        ("node", [1], "slow_node", "rank 1 on b: slow"),
        ("several", [0, 2], "slow_nodes", "rank 0 on a, rank 2 on c: slow"),
        ("link", [0, 1], "slow_link", "The link between rank 0 on a and rank 1 on b is slow"),
        ("node", [-1], "slow_node", "rank -1: slow"),
        ("node", [3], "slow_node", "rank 3: slow"),
    ],
)
def test_the_whole_finding(kind: str, ranks: list[int], code: str, what: str) -> None:
    found = find_slow_links(search(verdict={"kind": kind, "ranks": ranks}, reason="a\nb" + "x" * 300))
    assert found is not None
    names = [dict(enumerate("abc")).get(rank, "") for rank in ranks]
    first = next((name for name in names if name), None)
    label = f"; on Kubernetes: kubectl label node {first} mlbench.io/suspect={kind}" if first else ""
    assert found.to_dict() == {
        "code": code,
        "summary": f"{what}: a b{'x' * 197}.",
        "hint": f"Exclude the machine and run again{label}.",
        "retryable": False,
        "permanent": False,
        "evidence": {"ranks": ranks, "hosts": names, "slow": [[0, 2], [1, 2]]},
    }


def test_of_many_slow_nodes_the_first_sixteen_are_named() -> None:
    hosts = [f"{number}" + "n" * 100 for number in range(20)]
    found = find_slow_links(search(verdict={"kind": "several", "ranks": list(range(20))}, hosts=hosts))
    assert found is not None
    assert found.evidence["ranks"] == list(range(16))
    assert found.evidence["hosts"] == [host[:80] for host in hosts[:16]]
    assert "rank 16" not in found.summary


@pytest.mark.parametrize("ranks", [[True], [1.0], "1", None])
def test_ranks_are_whole_numbers(ranks: Any) -> None:
    assert find_slow_links(search(verdict={"ranks": ranks})) is None
