"""Predictions from a calibration: how far it carries, with what interval, on what network, and what would help."""

import math
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.network import NetworkShape, parse_network
from mlbench_cli.simulator.calibration import Calibration
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.simulator.predict import MAX_RANKS, Advice, Prediction, Scenario, advise, predict
from mlbench_cli.simulator.step import Step
from mlbench_cli.simulator.workload import Tensor, Workload
from task_images.comm.presets import resolve

WORK = Workload((Tensor("b", 1 << 20, 0.06, 512), Tensor("a", 1 << 20, 0.1, 512)), 0.04, 0.1, 0.01)
LOW, HIGH = WORK.scale(0.9), WORK.scale(1.2)
LINK = Link(1e-3, 8e-9)
BSP, NOOP = resolve("bsp"), resolve("noop")
OTHER = NetworkShape(1e9, 1e-3)


def calibration(**changes: Any) -> Calibration:
    return replace(Calibration(4, "gloo", 8.0, 1, 32, WORK, LOW, HIGH, ()), **changes)


def scenario(ranks: int = 4, **changes: Any) -> Scenario:
    return Scenario(ranks, changes.pop("method", BSP), **changes)


def seconds(asked: Scenario, known: Calibration | None = None, link: Link = LINK) -> float:
    return predict(known or calibration(), link, 0.0, asked).step.seconds


@pytest.mark.parametrize(
    ("ranks", "changes", "basis"),
    [
        (4, {}, "replay"),
        (2, {}, "predicted"),
        (5, {}, "predicted"),
        (16, {}, "predicted"),
        (4, {"network": OTHER}, "predicted"),
        (4, {"probed": LINK}, "predicted"),
        (16, {"network": OTHER}, "predicted"),
        (17, {"network": OTHER}, "extrapolated"),
        (17, {"probed": LINK}, "extrapolated"),
        (1, {}, "predicted"),
    ],
)
def test_how_far_a_calibration_carries(ranks: int, changes: dict[str, Any], basis: str) -> None:
    assert predict(calibration(), LINK, 0.0, scenario(ranks, **changes)).basis == basis


@pytest.mark.parametrize(
    ("ranks", "network", "shorter", "longer"),
    [(4, None, 0.05, 0.05), (8, None, 0.1, 0.2), (64, OTHER, 0.15, 0.5)],
)
def test_the_interval_is_the_spread_of_the_calibration_and_the_models_error(
    ranks: int, network: NetworkShape | None, shorter: float, longer: float
) -> None:
    """Without messages a step is its computation: 0.9, 1.0 and 1.2 times 0.11 s."""
    found = predict(calibration(), LINK, 0.3, scenario(ranks, method=NOOP, network=network))
    assert found.step.seconds == pytest.approx(0.11)
    assert found.low == pytest.approx(0.099 * (1 - shorter))
    assert found.high == pytest.approx(0.132 * (1 + longer))


@pytest.mark.parametrize(("error", "faster"), [(0.0, 1.0), (0.25, 0.75), (0.9, 0.1), (5.0, 0.1)])
def test_the_models_error_widens_the_interval_by_faster_and_slower_links(error: float, faster: float) -> None:
    found = predict(calibration(low=WORK, high=WORK), LINK, error, scenario())
    scaled = [Link(LINK.alpha * x, LINK.beta * x, LINK.overhead * x) for x in (faster, 1 + error)]
    low, high = (seconds(scenario(), link=link) for link in scaled)
    assert (found.low, found.high) == pytest.approx((low * 0.95, high * 1.05))
    assert found.step.seconds == seconds(scenario())


@pytest.mark.parametrize("ranks", [0, -1, MAX_RANKS + 1])
def test_numbers_of_workers_have_a_range(ranks: int) -> None:
    with pytest.raises(UsageError, match=f"{ranks} workers: a prediction is for 1 to 10000"):
        predict(calibration(), LINK, 0.0, scenario(ranks, network=OTHER))


def test_the_largest_number_of_workers_is_predicted() -> None:
    assert predict(calibration(), LINK, 0.0, scenario(MAX_RANKS, method=NOOP, network=OTHER)).basis == "extrapolated"


def test_more_than_four_times_the_ranks_need_a_network() -> None:
    with pytest.raises(UsageError, match="17 workers are more than 4 times the 4 that were timed") as caught:
        seconds(scenario(17))
    assert "--network 10gbit,50us" in str(caught.value.hint)


def test_a_crowded_calibration_carries_no_prediction() -> None:
    assert seconds(scenario(), calibration(cores=4.0)) > 0
    with pytest.raises(UsageError, match=r"had 4 ranks of 2 threads on 7.5 cores"):
        seconds(scenario(), calibration(threads=2, cores=7.5))


def test_a_run_of_one_worker_needs_a_network() -> None:
    alone = calibration(ranks=1)
    for ranks in (1, 2):
        with pytest.raises(UsageError, match="one worker has no network"):
            seconds(scenario(ranks), alone)
    assert predict(alone, LINK, 0.0, scenario(1, network=OTHER)).basis == "predicted"


def test_nccl_needs_a_network() -> None:
    with pytest.raises(UsageError, match="NCCL on another topology needs its network") as caught:
        seconds(scenario(backend="nccl"))
    assert "--topology" in str(caught.value.hint)
    assert seconds(scenario(backend="nccl", network=OTHER)) > 0.11
    assert seconds(scenario(backend="nccl", probed=LINK)) > 0.11


def test_the_network_is_the_probed_one_then_the_named_one_then_that_of_the_run() -> None:
    slow, slower = NetworkShape(1e8, 0.0), Link(0.01, 8e-7)
    run, named, probed = (
        seconds(scenario(**changes)) for changes in ({}, {"network": slow}, {"network": slow, "probed": slower})
    )
    # An all-reduce of 2 MiB among four sends 2 * 3/4 of it: at 1 Gbit/s, 100 Mbit/s and 10 Mbit/s.
    sent = 1.5 * (2 << 20) * 8
    assert run - 0.11 == pytest.approx(sent / 1e9 + 12e-3, rel=0.2)
    assert named - 0.11 == pytest.approx(sent / 1e8, rel=0.05)
    assert probed - 0.11 == pytest.approx(sent / 1e7, rel=0.1)


def test_stragglers_lengthen_the_computation() -> None:
    """The slowest of two is exp(spread * quantile of sqrt(1/2)), 0.5450 by tables of the normal distribution."""
    still, spread = (seconds(scenario(2, spread=spread)) for spread in (0.0, 0.2))
    assert spread - still == pytest.approx(0.11 * (math.exp(0.2 * 0.5450) - 1), rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "as measured"),
        ({"network": parse_network("1gbit,5ms")}, "1gbit,5ms"),
        ({"probed": Link(0.005, 8e-9)}, "1 Gbit/s,5 ms (probed)"),
        ({"probed": Link(5e-5, 8e-8), "network": OTHER}, "100 Mbit/s,50 us (probed)"),
    ],
)
def test_a_network_in_words(changes: dict[str, Any], text: str) -> None:
    assert scenario(**changes).network_text == text
    assert scenario(**changes).is_elsewhere is bool(changes)


def test_the_document_of_a_prediction() -> None:
    step = Step(seconds=0.5, compute=0.4, communication=0.3, messages=7, sent_bytes=3e6, groups=7)
    assert Prediction(scenario(8, network=OTHER), step, 0.45, 0.6, "predicted", 32).to_dict() == {
        "method": "bsp",
        "workers": 8,
        "network": "1gbit,1ms",
        "step_seconds": 0.5,
        "low_seconds": 0.45,
        "high_seconds": 0.6,
        "efficiency": 0.8,
        "exposed_seconds": pytest.approx(0.1),
        "sent_bytes": 3e6,
        "messages": 7,
        "samples_per_second": 512.0,
        "basis": "predicted",
    }


# --- topologies -------------------------------------------------------------------------------------------------------


def test_ranks_of_a_single_node_use_its_own_links() -> None:
    """Two PCIe ranks of one node: 100 Gbit/s; over the network of 1 Gbit/s it is a hundred times slower."""
    inside = seconds(scenario(4, network=OTHER, nodes=1, per_node=4))
    assert inside < 0.11 + 2e-3
    assert seconds(scenario(4, network=OTHER, nodes=1, per_node=4, inside="nvlink")) < inside
    assert seconds(scenario(4, network=OTHER, per_node=4)) == inside
    across = seconds(scenario(4, network=OTHER))
    assert across > 0.13
    assert seconds(scenario(4, network=OTHER, nodes=2, per_node=2)) == across
    assert seconds(scenario(4, network=OTHER, nodes=4, per_node=1)) == across


def test_one_rank_alone_on_a_node_is_on_the_network() -> None:
    assert seconds(scenario(1, network=OTHER, nodes=1, per_node=1)) == pytest.approx(0.11)


@pytest.mark.parametrize(("nodes", "factor"), [(2, 1.0), (3, 4.0)])
def test_switches_are_shared_by_more_than_two_nodes(nodes: int, factor: float) -> None:
    full, shared = (
        seconds(scenario(nodes, network=NetworkShape(1e8, 0.0), nodes=nodes, per_node=1, oversubscription=each)) - 0.11
        for each in (1.0, 4.0)
    )
    assert shared / full == pytest.approx(factor, rel=0.05)


def test_nccl_on_a_node_takes_the_links_inside() -> None:
    nvlink, pcie = (
        seconds(scenario(4, network=OTHER, backend="nccl", nodes=1, per_node=4, inside=name)) - 0.11
        for name in ("nvlink", "pcie")
    )
    assert 0 < nvlink < pcie < 2e-3


# --- advice -----------------------------------------------------------------------------------------------------------


def advice(asked: Scenario | None = None, error: float = 0.0, link: Link = LINK, **changes: Any) -> dict[str, Advice]:
    return {each.change: each for each in advise(calibration(**changes), link, error, asked or scenario())}


def test_advice_is_sorted_and_gains_at_least_a_hundredth() -> None:
    found = list(advice().values())
    gains = [each.gain for each in found]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 0.01
    base = seconds(scenario())
    for each in found:
        work = 2 if each.change.startswith("twice") else 1
        assert each.gain == pytest.approx(base * work / each.seconds - 1)


def test_gains_within_the_models_error_are_left_out() -> None:
    certain = advice()
    error = sorted(each.gain for each in certain.values())[-2]
    assert [each.gain for each in advice(error=error).values()] == [max(each.gain for each in certain.values())]
    assert advice(error=10.0) == {}


def test_another_network_has_ten_times_the_rate_and_the_same_delay() -> None:
    found = advice()["a network of 10gbit,1ms"]
    assert found.command == "--network 10gbit,1ms"
    assert found.seconds == pytest.approx(seconds(scenario(network=NetworkShape(1e10, 1e-3))))
    assert "a network of 1gbit,2ms" in advice(scenario(network=NetworkShape(1e8, 2e-3)))
    # A delay that no calibration resolves is a microsecond.
    assert "a network of 1gbit,1us" in advice(scenario(probed=Link(0.0, 8e-8)))


def test_twice_the_samples_cost_twice_the_computation_and_one_update() -> None:
    found = advice()["twice the samples in each step"]
    assert found.command == "--set batch_size=…"
    message = seconds(scenario()) - 0.11
    assert found.seconds == pytest.approx(0.2 + message + 0.01)


def test_the_method_itself_is_not_advised() -> None:
    """Two tensors of 1 MiB on a slow network: to overlap them or to halve their bytes helps."""
    assert {"method fp16", "method wfbp"} <= {*advice()}
    assert advice()["method fp16"].command == "--method fp16"
    assert not [change for change in advice(scenario(method=resolve("fp16"))) if change == "method fp16"]


def test_advised_buckets_replace_those_of_the_run() -> None:
    found = advice(scenario(buckets=(2 << 20,)))
    assert found["buckets of 1MiB"].command == "--method fusion --set comm.plan=threshold:1MiB"
    assert found["buckets of 1MiB"].seconds == pytest.approx(
        seconds(scenario(method=replace(resolve("fusion"), plan="threshold:1MiB")))
    )
