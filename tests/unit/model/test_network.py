"""The network by its two figures: read, refused, written one way, and held against what a probe measured."""

from collections.abc import Mapping
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.network import (
    NetworkShape,
    find_deviations,
    parse_network,
)


@pytest.mark.parametrize(
    ("text", "shape", "canonical"),
    [
        ("1gbit,5ms", NetworkShape(1e9, 0.005), "1gbit,5ms"),
        ("1000mbit, 5000us", NetworkShape(1e9, 0.005), "1gbit,5ms"),
        ("100Mbit/s", NetworkShape(1e8), "100mbit"),
        ("0.5gbit,0.2ms", NetworkShape(5e8, 2e-4), "500mbit,200us"),
        ("2.5gbit,0s", NetworkShape(2.5e9), "2.5gbit"),
        ("model:10gbit,50µs", NetworkShape(1e10, 5e-5, is_modeled=True), "model:10gbit,50us"),
    ],
)
def test_a_network_has_one_canonical_text(text: str, shape: NetworkShape, canonical: str) -> None:
    assert parse_network(text) == shape
    assert str(shape) == canonical
    assert parse_network(canonical) == shape


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1gbps", "not a number with a unit of kbit"),
        ("1gbit,5", "not a number with a unit of us"),
        ("", 'the rate ""'),
        ("1gbit,5ms,loss=1%", "loss is not supported"),
        ("1gbit,jitter=1ms", "jitter is not supported"),
        ("1gbit,5ms,5ms", "more than a rate and a delay"),
        ("1kbit", "from 100kbit"),
        ("1gbit,1000s", "at most 10s"),
        ("nan,5ms", 'the rate "nan"'),
        ("1e9,5ms", 'the rate "1e9"'),
    ],
)
def test_what_is_no_network_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_network(text)


def link(**changes: Any) -> Mapping[str, Any]:
    figures = {"rtt_p50_seconds": 0.0104, "alone_bits_per_second": 0.97e9, "together_bits_per_second": 0.97e9}
    return {"from": 0, "to": 1, **figures, **changes}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"rtt_p50_seconds": 0.0003}, ["its round trip is 300 us instead of 10 ms"]),
        ({"together_bits_per_second": 0.5e9}, ["it carries 500 Mbit/s with all ranks sending"]),
        ({"first_bits_per_second": 9.4e9}, ["it lets the first MiB after a pause through at 9.4 Gbit/s"]),
    ],
)
def test_a_probe_tells_a_shaped_network_from_another(changes: Mapping[str, Any], found: list[str]) -> None:
    assert find_deviations(NetworkShape(1e9, 0.005), {"links": [link(**changes)]}) == found


def test_a_slow_link_takes_milliseconds_for_a_ping() -> None:
    """It was refused on every machine: at 100 kbit/s a packet of 53 bytes takes 4 ms."""
    slow = parse_network("100kbit,1ms")
    links = [{"alone_bits_per_second": 96.5e3, "rtt_p50_seconds": 0.0106}]
    assert find_deviations(slow, {"links": links}) == []
    links[0]["rtt_p50_seconds"] = 0.012
    assert find_deviations(slow, {"links": links}) == ["its round trip is 12 ms instead of 2 ms"]


def test_a_network_that_was_not_measured_does_not_hold() -> None:
    assert find_deviations(NetworkShape(1e9), {"links": []}) == ["it could not be measured: no links"]
    assert find_deviations(NetworkShape(1e9), {"error": "refused"}) == ["it could not be measured: refused"]


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ([0.95e9, 0.95e9, 0.2e9], []),
        ([0.949e9], ["it carries 949 Mbit/s alone"]),
        ([1.02e9], []),
        ([1.021e9], ["it carries 1.02 Gbit/s alone"]),
        ([0.1e9, 0.5e9, 0.99e9], ["it carries 500 Mbit/s alone"]),
        ([0.5e9, 0.97e9], []),
    ],
)
def test_the_median_of_the_links_counts(rates: list[float], found: list[str]) -> None:
    links = [{"alone_bits_per_second": rate} for rate in rates]
    assert find_deviations(NetworkShape(1e9), {"links": links}) == found


@pytest.mark.parametrize(
    ("delay", "trip", "holds"),
    [
        (0.0, 0.00039, True),
        (0.0, 0.00041, False),
        (0.001, 0.00239, True),
        (0.001, 0.00241, False),
        (0.05, 0.1099, True),
        (0.05, 0.1101, False),
        (0.05, 0.0901, True),
        (0.05, 0.0899, False),
    ],
)
def test_a_round_trip_may_be_off_by_a_tenth_or_four_tenths_of_a_millisecond(
    delay: float, trip: float, holds: bool
) -> None:
    links = [{"rtt_p50_seconds": trip}, {"rtt_p50_seconds": None}]
    assert (find_deviations(NetworkShape(1e12, delay), {"links": links}) == []) is holds


@pytest.mark.parametrize(("first", "holds"), [(None, True), (0.0, True), (1.1e9, True), (1.101e9, False)])
def test_a_burst_is_more_than_a_tenth_above_the_rate_on_any_link(first: float | None, holds: bool) -> None:
    links = [{"first_bits_per_second": 1e9}, {"first_bits_per_second": first}]
    assert (find_deviations(NetworkShape(1e9), {"links": links}) == []) is holds
