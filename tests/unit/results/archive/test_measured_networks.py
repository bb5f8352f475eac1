"""What a run's probes say of its network: traffic, losses, detours and the median trip, by hand."""

from typing import Any

import pytest

from mlbench_cli.results.archive.conditions import find_least_sent, network_document
from mlbench_cli.results.archive.documents import NetworkDocument
from tests.unit.results.runs import spec


def link(number: int = 0, **figures: float) -> dict[str, Any]:
    return {"from": number, "to": number + 1, **figures}


def counters(**growth: int) -> list[dict[str, Any]]:
    """Counters of two ranks; the second has counted twice as much."""
    return [{"interface": "eth0", **{name: scale * value for name, value in growth.items()}} for scale in (1, 2)]


def probe(stage: str = "before", **changes: Any) -> dict[str, Any]:
    facts = {"form": "full", "ranks": 2, "networks": 2, "links": [link()], "counters": counters(), "seconds": 1.5}
    return {"stage": stage, **facts, **changes}


def document(
    *events: dict[str, Any], asked: str | None = None, shaping: Any = None, sent: Any = None
) -> NetworkDocument:
    found = network_document(asked, events, shaping, sent)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (probe(networks=1), probe("after")),
        (probe(counters=[]), probe("after", counters=[])),
        (probe(counters=counters()[:1]), probe("after")),
        (probe(), probe("before")),
    ],
)
def test_without_counters_of_each_rank_there_is_no_traffic(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert document(before, after)["traffic"] is None


@pytest.mark.parametrize(
    ("sent", "counted", "problem"),
    [
        (10e6, 9.5e6, None),  # 95 % are enough
        (10e6, 9.4e6, "its links counted 9.4 MB, but the ranks sent 10.0 MB or more"),
        (None, 0.0, None),
        (10e6, None, None),
    ],
)
def test_data_that_bypassed_the_shaped_links_are_a_problem(
    sent: float | None, counted: float | None, problem: str | None
) -> None:
    task = None if counted is None else {"sent_bytes": [1.0, counted, "x"]}
    fast = link(rtt_p50_seconds=2e-3, together_bits_per_second=0.97e9)
    shaping = {"method": "packet", "probes": [probe(links=[fast])], "task": task}
    found = document(asked="1gbit,1ms", shaping=shaping, sent=sent)
    assert found["summary"]["problems"] == ([] if problem is None else [problem])
    assert found["summary"]["held"] is (problem is None)
    assert (found["method"], found["setup"]) == ("packet", {"method": "packet", "task": task})


@pytest.mark.parametrize(
    ("changes", "details", "sent"),
    [
        ({"workers": 4}, {"communication": {"bytes": 100}}, 75.0),
        ({"workers": 1}, {"communication": {"bytes": 100}}, 0.0),
        ({"workers": 4, "processes_per_worker": 2}, {"communication": {"bytes": 100}}, None),
        ({"workers": 4}, {"communication": {"bytes": "x"}}, None),
        ({"workers": 4}, {"communication": "x"}, None),
        ({"workers": 4}, {}, None),
    ],
)
def test_a_rank_sends_at_least_the_shares_of_the_others(
    changes: dict[str, Any], details: dict[str, Any], sent: float | None
) -> None:
    assert find_least_sent(spec(**changes), details) == sent
