"""Published measurements: their steps, and how predicted orders are counted, with cells made by hand."""

from typing import Any

import pytest

from mlbench_cli.simulator.published import (
    GPUS_PER_NODE,
    Order,
    PublishedCell,
    PublishedComparison,
    calibrate,
    compare_order,
    find_single_rate,
    load_cells,
    summarize,
)


def cell(method: str, rate: float, **changes: Any) -> PublishedCell:
    fields: dict[str, Any] = {"model": "m", "batch": 32, "network": "n", "gpus": 8, **changes}
    return PublishedCell(fields["model"], fields["batch"], fields["network"], method, fields["gpus"], rate)


def compared(method: str, rate: float, guess: float, calibration: bool = False, **where: Any) -> PublishedComparison:
    return PublishedComparison(cell(method, rate, **where), guess, calibration)


def test_a_step_takes_the_samples_of_all_gpus() -> None:
    assert cell("BSP-A2A", 512.0).seconds == 0.5
    assert compared("BSP-A2A", 200.0, 150.0).error == pytest.approx(-0.25)


def test_errors_are_by_method_and_without_calibration_cells() -> None:
    found = [
        compared("MG-WFBP", 100, 110),
        compared("MG-WFBP", 100, 70),
        compared("BSP-A2A", 100, 500, calibration=True),
        compared("WFBP-PS", 100, 100),
    ]
    assert [*summarize(found)] == [("MG-WFBP", 2, pytest.approx(0.2), pytest.approx(0.3)), ("WFBP-PS", 1, 0.0, 0.0)]


def test_an_order_is_counted_by_setting_and_by_pair() -> None:
    found = [
        # All in order.
        *(compared("BSP-A2A", 100, 100), compared("WFBP-A2A", 110, 120), compared("MG-WFBP", 130, 125)),
        # The fastest is right, and the others are exchanged; they are 10 % apart.
        *(compared("BSP-A2A", 100, 105, gpus=16), compared("WFBP-A2A", 110, 101, gpus=16)),
        compared("MG-WFBP", 130, 125, gpus=16),
        # Two that differ by less than 3 % are exchanged: no pair.
        *(compared("BSP-A2A", 100, 101, network="o"), compared("WFBP-A2A", 102, 100, network="o")),
    ]
    assert compare_order(found) == Order(settings=3, fastest=2, whole=1, right=5, pairs=6)
    assert compare_order(found, ("BSP-A2A", "WFBP-A2A")) == Order(settings=3, fastest=1, whole=1, right=1, pairs=2)
    assert compare_order([]) == Order(0, 0, 0, 0, 0)


@pytest.mark.parametrize(("rate", "pairs"), [(102.9, 0), (103.1, 1), (97.2, 0), (97.0, 1)])
def test_rates_within_three_percent_are_no_pair(rate: float, pairs: int) -> None:
    assert compare_order([compared("BSP-A2A", 100, 1), compared("WFBP-A2A", rate, 2)]).pairs == pairs


def test_cells_of_one_node_say_nothing_of_the_network() -> None:
    cells = load_cells()
    assert min(each.gpus for each in cells) > GPUS_PER_NODE
    assert find_single_rate("ResNet-50") > 0


def test_seconds_per_hop_from_elsewhere_leave_less_for_bytes() -> None:
    """Two phases of seven hops: 14 times the seconds per hop are taken from the time of 7/4 of the model's bytes."""
    cells = load_cells()
    network = cells[0].network
    without, given = calibrate(cells, network, 0.0), calibrate(cells, network, 1e-3)
    assert (without.alpha, given.alpha) == (0.0, 1e-3)
    size = 4 * 25_557_032  # bytes of ResNet-50
    assert (without.beta - given.beta) * 1.75 * size == pytest.approx(14e-3)
    fitted = calibrate(cells, network)
    assert fitted.beta == without.beta
    assert 0 < fitted.alpha < 5e-3
