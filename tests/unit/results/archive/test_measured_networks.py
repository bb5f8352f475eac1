"""What a run's probes say of its network: traffic, losses, detours and the median trip, by hand."""

from typing import Any

import pytest

from mlbench_cli.results.archive.network import (
    MAX_LINKS,
    NetworkDocument,
    find_least_sent,
    network_document,
    parse_probe,
)
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


def test_a_probe_has_every_field_and_no_other() -> None:
    full = probe("after", links=[{**link(1, rtt_p50_seconds=1.0, first_bytes=5), "x": 1}], error="a\nb", more=1)
    full |= {
        "drained_bytes": 7,
        "drained_bits_per_second": 8.0,
        "counters": [{"interface": "e", "tx_bytes": 1, "y": 2}],
    }
    assert parse_probe(full) == {
        "stage": "after",
        "form": "full",
        "ranks": 2,
        "networks": 2,
        "links": [{"from": 1, "to": 2, "rtt_p50_seconds": 1.0, "first_bytes": 5}],
        "counters": [{"interface": "e", "tx_bytes": 1}],
        "seconds": 1.5,
        "error": "a b",
        "drained_bytes": 7,
        "drained_bits_per_second": 8.0,
    }
    assert parse_probe({"stage": "odd", "ranks": -1, "networks": 1.5, "form": 3}) == {
        "stage": "before",
        "form": None,
        "ranks": 0,
        "networks": 0,
        "links": [],
        "counters": [],
        "seconds": None,
        "error": None,
    }
    assert len(parse_probe(probe(links=[link(n) for n in range(MAX_LINKS + 1)]))["links"]) == MAX_LINKS


def test_the_summary_has_the_slowest_link_and_the_median_trip() -> None:
    links = [
        link(
            0, rtt_p50_seconds=3.0, alone_bits_per_second=9.0, together_bits_per_second=5.0, first_bits_per_second=8.0
        ),
        link(1, rtt_p50_seconds=1.0, alone_bits_per_second=7.0),
        link(2, rtt_p50_seconds=2.0, together_bits_per_second=4.0),
        link(3),
    ]
    assert document(probe(links=links), probe("after"))["summary"] == {
        "asked": None,
        "method": "none",
        "networks": 2,
        "rtt_seconds": 2.0,
        "alone_bits_per_second": 7.0,
        "together_bits_per_second": 4.0,
        "first_bits_per_second": 8.0,
        "held": None,
        "problems": [],
    }
    only_after = document(probe("after", links=links))["summary"]
    assert (only_after["networks"], only_after["rtt_seconds"]) == (None, None)


def test_traffic_is_the_growth_of_counters_between_the_probes() -> None:
    before = counters(tx_bytes=100, rx_bytes=50, tx_dropped=1, rx_dropped=2, retransmits=3)
    after = counters(tx_bytes=1100, rx_bytes=40, tx_dropped=4, rx_dropped=7, retransmits=5)
    found = document(probe(counters=before), probe("after", counters=after), probe("after", counters=before))
    assert found["traffic"] == {
        "max_sent_bytes": 2000,
        "max_received_bytes": 0,  # a counter that was reset is no negative traffic
        "dropped_packets": 3 + 6 + 5 + 10,
        "retransmitted_segments": 2 + 4,
    }


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


def test_a_requested_network_that_was_not_measured_did_not_hold() -> None:
    found = document(asked="1gbit,1ms")
    assert (found["method"], found["probes"], found["summary"]["held"]) == ("none", [], False)
    assert found["summary"]["problems"] == ["it was not measured"]
    assert "setup" not in found


def test_one_fitting_probe_of_a_stage_is_enough() -> None:
    good, bad = link(together_bits_per_second=0.97e9), link(together_bits_per_second=0.1e9)
    held = document(probe(links=[bad]), probe(links=[good]), asked="1gbit")
    assert held["summary"]["problems"] == []
    broken = document(probe(links=[good]), probe("after", links=[bad]), asked="1gbit")
    assert [text.rpartition(" (")[2] for text in broken["summary"]["problems"]] == ["after the task)"]


def test_how_a_cluster_was_shaped_is_in_its_own_event() -> None:
    setup = {"stage": "setup", "setup": {"method": "tc", "problems": ["a\nb", 5]}}
    fast = link(together_bits_per_second=0.97e9)
    found = document(setup, probe(links=[fast]), asked="1gbit")
    assert (found["method"], len(found["probes"])) == ("tc", 1)
    assert found["summary"]["problems"] == ["a b", "5"]


def test_of_many_problems_of_a_cluster_the_first_eight_are_told() -> None:
    setup = {"stage": "setup", "setup": {"method": "tc", "problems": [f"p{number}" for number in range(20)]}}
    found = document(setup, probe(links=[link(together_bits_per_second=0.97e9)]), asked="1gbit")
    assert found["summary"]["problems"] == [f"p{number}" for number in range(8)]
    assert found["setup"]["problems"] == [f"p{number}" for number in range(20)]


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
