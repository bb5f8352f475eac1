"""Shaped networks on clusters: what the Job says of them, links that nodes shape, and objects of Chaos Mesh."""

import json
from typing import Any

import pytest

from mlbench_cli.engines.kubernetes.network.gate import network_findings, read_state
from mlbench_cli.engines.kubernetes.network.nodes import link_arguments
from mlbench_cli.model.network import parse_network


def job(state: Any) -> dict[str, Any]:
    text = state if isinstance(state, str) else json.dumps(state)
    return {"metadata": {"annotations": {"mlbench/network": text}}}


@pytest.mark.parametrize(
    "found",
    [
        None,
        {},
        {"metadata": {"annotations": None}},
        job("{"),
        job("[]"),
        job({"state": "open", "time": 5}),
        job({"state": "open", "time": None, "holder": "me"}),
    ],
)
def test_a_job_without_a_readable_note_says_nothing(found: dict[str, Any] | None) -> None:
    assert read_state(found) is None
    assert network_findings(found) == []


@pytest.mark.parametrize(
    ("network", "arguments"),
    [
        # Rate in bit/s, delay in µs; bucket of 1 ms and queue of 50 ms at this rate, in bytes.
        ("1gbit", ["1000000000", "0", "125000", "6250000"]),
        ("1gbit,5ms", ["1000000000", "5000", "125000", "6250000"]),
        # Eight times what is under way in one direction, 125 MB/s for 20 ms.
        ("1gbit,20ms", ["1000000000", "20000", "125000", "20000000"]),
        # Two packets and 256 KiB at least.
        ("1mbit", ["1000000", "0", "3000", "262144"]),
    ],
)
def test_the_sizes_of_a_shaped_link(network: str, arguments: list[str]) -> None:
    assert link_arguments(parse_network(network)) == arguments


# --- Chaos Mesh ------------------------------------------------------------------------------------------------------
