"""A calibration read from its document, and the link that its collectives or its probe tell."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.simulator.calibration import (
    MIN_BYTES,
    Calibration,
    StepSample,
    find_link,
    model_error,
    parse_calibration,
    read_codec,
    read_probe,
    solve,
)
from mlbench_cli.simulator.gloo import Link, ring_seconds
from mlbench_cli.simulator.workload import CodecCost, Tensor, Workload

DOCUMENT: dict[str, Any] = {
    "schema_version": 1,
    "ranks": 2,
    "backend": "gloo",
    "cores": 2.5,
    "threads": 1,
    "batch": 32,
    "forward": [0.1, 0.2, 0.3],
    "backward": [1.0, 2.0, 3.0],
    "optimizer": [0.01, 0.02, 0.03],
    "data": [0.001, 0.002, 0.003],
    "tensors": [
        {"name": "b", "bytes": 8, "ready_p10": 0.4, "ready_p50": 0.8, "ready_p90": 1.2},
        {"name": "a", "bytes": 40, "rows": 5, "ready_p10": 0.9, "ready_p50": 1.9, "ready_p90": 2.9},
    ],
    "collectives": [{"bytes": 4096, "p10": 1e-4, "p50": 2e-4, "p90": 3e-4}],
    "overlap": {"alone": 1.0, "beside": 1.25, "communicated": 0.5},
    "codecs": [{"method": "fp16", "ranks": 2, "bytes": 100, "before": 5.0, "after": 2.0}],
    "buckets": [48, 16.0],
}
WORK = Workload((Tensor("w", 4, 1.0),), 0.4, 1.0)
LINK = Link(2e-3, 8e-9)


def parse(**changes: Any) -> Calibration:
    return parse_calibration(json.dumps(DOCUMENT | changes).encode())


def without(*names: str) -> Calibration:
    return parse_calibration(json.dumps({name: DOCUMENT[name] for name in DOCUMENT if name not in names}).encode())


def calibration(ranks: int = 2, link: Link = LINK, sizes: tuple[int, ...] = (4096, 65_536, 1 << 20)) -> Calibration:
    """A calibration whose collectives took what gloo's model says for the link."""
    samples = (StepSample(size, 0.0, ring_seconds(ranks, size, link), 0.0) for size in sizes)
    return Calibration(ranks, "gloo", 4.0, 1, 8, WORK, WORK, WORK, tuple(samples))


def test_a_document_is_read_at_three_percentiles() -> None:
    codec = (CodecCost("fp16", 2, 0.05, 0.02),)

    def workload(*times: float) -> Workload:
        b, a, forward, backward, optimizer, data = times
        tensors = (Tensor("b", 8, b), Tensor("a", 40, a, 5))
        return Workload(tensors, forward, backward, optimizer, data, 0.5, codec)

    assert parse() == Calibration(
        ranks=2,
        backend="gloo",
        cores=2.5,
        threads=1,
        batch=32,
        workload=workload(0.8, 1.9, 0.2, 2.0, 0.02, 0.002),
        low=workload(0.4, 0.9, 0.1, 1.0, 0.01, 0.001),
        high=workload(1.2, 2.9, 0.3, 3.0, 0.03, 0.003),
        collectives=(StepSample(4096, 1e-4, 2e-4, 3e-4),),
        buckets=(48, 16),
    )


def test_older_calibrations_without_later_keys_are_read() -> None:
    found = without("data", "overlap", "codecs", "buckets")
    assert found.buckets == ()
    for workload in (found.low, found.workload, found.high):
        assert (workload.other, workload.overlap, workload.codecs) == (0.0, 0.0, ())


@pytest.mark.parametrize("name", ["ranks", "backend", "cores", "threads", "batch", "tensors", "forward", "collectives"])
def test_a_key_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"is not a calibration: KeyError.'{name}'") as caught:
        without(name)
    assert "--calibrate" in str(caught.value.hint)


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b"null", b'"text"', b"\xff", b"{}"])
def test_what_is_no_calibration_is_refused(text: bytes) -> None:
    with pytest.raises(UsageError, match="is not a calibration"):
        parse_calibration(text)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_named(version: Any) -> None:
    with pytest.raises(UsageError, match=f"has version {version!r}; this mlbench reads 1"):
        parse(schema_version=version)


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), "1", None, True])
@pytest.mark.parametrize("name", ["cores", "forward", "optimizer", "data", "buckets"])
def test_amounts_are_finite_numbers_from_zero(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match="is not an amount"):
        parse(**{name: value if name == "cores" else [value] * 3})


def test_an_amount_may_be_zero() -> None:
    assert parse(optimizer=[0, 0, 0]).workload.optimizer == 0.0
    assert parse(cores=0).cores == 0.0


def test_two_percentiles_are_too_few() -> None:
    with pytest.raises(UsageError, match="IndexError"):
        parse(forward=[0.1, 0.2])


def test_readiness_never_falls_and_the_backward_pass_ends_with_the_last_gradient() -> None:
    rows = [{"name": str(p50), "bytes": 4, "ready_p10": 1, "ready_p50": p50, "ready_p90": 9} for p50 in (3.0, 2.0, 4.0)]
    found = parse(tensors=rows, backward=[0.5, 3.5, 10.0])
    assert [tensor.ready for tensor in found.workload.tensors] == [3.0, 3.0, 4.0]
    assert [found.low.backward, found.workload.backward, found.high.backward] == [1.0, 4.0, 10.0]


@pytest.mark.parametrize(
    ("alone", "beside", "communicated", "lost"),
    [(1.0, 1.2, 0.5, 0.4), (1.0, 0.9, 0.5, 0.0), (1.0, 3.0, 0.5, 1.0), (1.0, 1.5, 0.5, 1.0), (1.0, 1.2, 0.0, 0.0)],
)
def test_computation_loses_from_nothing_to_a_second_for_each_second_of_messages(
    alone: float, beside: float, communicated: float, lost: float
) -> None:
    found = parse(overlap={"alone": alone, "beside": beside, "communicated": communicated})
    assert found.workload.overlap == pytest.approx(lost)


@pytest.mark.parametrize(("size", "before"), [(0, 6.0), (0.5, 6.0), (1, 6.0), (2, 3.0), (12, 0.5)])
def test_the_cost_of_a_codec_is_for_a_byte(size: float, before: float) -> None:
    row = {"method": "topk", "ranks": 4, "bytes": size, "before": 6.0, "after": 0.0}
    assert read_codec(row) == CodecCost("topk", 4, before, 0.0)


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "crowded"), [(2, 1, 2, False), (2, 1, 1.9, True), (2, 2, 3, True)]
)
def test_ranks_are_crowded_with_more_threads_than_cores(ranks: int, threads: int, cores: float, crowded: bool) -> None:
    assert parse(ranks=ranks, threads=threads, cores=cores).is_crowded is crowded


PROBE = {"networks": 2, "rtt_seconds": 0.01, "together_bits_per_second": 8e8, "alone_bits_per_second": 1.6e9}


@pytest.mark.parametrize(
    ("changes", "link"),
    [
        ({}, Link(0.005, 1e-8)),
        ({"together_bits_per_second": None}, Link(0.005, 5e-9)),
        ({"together_bits_per_second": None, "alone_bits_per_second": None}, None),
        ({"networks": 1}, None),
        ({"networks": None}, None),
        ({"networks": 16}, Link(0.005, 1e-8)),
        ({"rtt_seconds": None}, None),
        ({"rtt_seconds": 0.0}, None),
    ],
)
def test_a_probe_gives_half_its_round_trip_and_its_rate_with_all_sending(
    changes: dict[str, Any], link: Link | None
) -> None:
    assert read_probe(PROBE | changes) == link


def test_a_result_without_a_network_has_no_probe() -> None:
    assert read_probe(None) is None
    assert read_probe({}) is None


def test_the_probe_counts_before_the_collectives() -> None:
    link, error = find_link(calibration(), PROBE)
    assert link == Link(0.005, 1e-8)
    assert error == model_error(calibration(), link) > 0.5


def test_without_a_probe_the_link_is_fitted_to_the_smallest_and_the_largest_collective() -> None:
    """The samples are those of a known link; the one between them does not count."""
    known = calibration()
    found, error = find_link(replace(known, collectives=known.collectives[::-1]), {"networks": 1})
    assert found.alpha == pytest.approx(LINK.alpha, rel=1e-3)
    assert found.beta == pytest.approx(LINK.beta, rel=1e-3)
    assert error == pytest.approx(0.0, abs=1e-3)
    small, middle, large = known.collectives
    disturbed = replace(known, collectives=(small, replace(middle, middle=2 * middle.middle), large))
    again, error = find_link(disturbed, None)
    assert again == found
    assert error == pytest.approx(0.25, abs=1e-3)  # half of one of the two that count


@pytest.mark.parametrize("sizes", [(), (4096,)])
def test_one_collective_is_too_few_to_fit_a_link(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="neither collectives nor a network") as caught:
        find_link(calibration(sizes=sizes), None)
    assert "--calibrate" in str(caught.value.hint)
    assert find_link(calibration(sizes=(4096, 8192)), None)[1] == 0.0


def test_the_error_is_the_mean_over_collectives_of_64_kib_and_more() -> None:
    seconds = ring_seconds(2, MIN_BYTES, LINK)
    samples = [(MIN_BYTES - 1, 9.0), (MIN_BYTES, seconds / 1.5), (MIN_BYTES, seconds * 2), (MIN_BYTES, 0.0)]
    found = replace(calibration(), collectives=tuple(StepSample(size, 0.0, middle, 0.0) for size, middle in samples))
    assert model_error(found, LINK) == pytest.approx((0.5 + 0.5) / 2)
    assert model_error(replace(found, collectives=()), LINK) == 0.0


@pytest.mark.parametrize(("target", "root"), [(2.0, 2**0.5), (0.25, 0.5), (9.0, 3.0), (-1.0, 0.0), (100.0, 4.0)])
def test_bisection_finds_roots_and_stops_at_the_ends(target: float, root: float) -> None:
    assert solve(lambda x: x * x, target, 0.0, 4.0) == pytest.approx(root, abs=1e-11)
