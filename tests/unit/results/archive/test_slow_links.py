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
