"""The public table of methods as check data: its models, its cells, and the errors of its prediction."""

from dataclasses import replace

import pytest

from mlbench_cli.simulator.models import MODELS
from mlbench_cli.simulator.published import (
    ALL_REDUCE,
    PublishedComparison,
    compare_order,
    compare_published,
    load_cells,
    summarize,
)


@pytest.fixture(scope="module")
def comparisons() -> list[PublishedComparison]:
    return compare_published()


@pytest.mark.parametrize(
    ("model", "elements", "tensors"),
    [("ResNet-50", 25_557_032, 161), ("BERT-Base", 110_111_042, 206), ("BERT-Large", 336_232_258, 398)],
)
def test_the_models_have_the_published_numbers_of_parameters(model: str, elements: int, tensors: int) -> None:
    parameters = MODELS[model]()
    assert (sum(parameter.elements for parameter in parameters), len(parameters)) == (elements, tensors)


def test_the_table_is_whole() -> None:
    cells = load_cells()
    assert len(cells) == 3 * 3 * 7 * 3
    assert {cell.gpus for cell in cells} == {8, 16, 32}
    assert next(cell.rate for cell in cells if (cell.method, cell.gpus) == ("MG-WFBP", 32)) == 6883.6


def test_two_cells_a_network_predict_the_others(comparisons: list[PublishedComparison]) -> None:
    errors = {method: (count, mean) for method, count, mean, _ in summarize(comparisons)}
    assert errors["BSP-A2A"][0] == 24
    assert errors["BSP-A2A"][1] <= 0.10
    assert errors["MG-WFBP"][0] == 27
    assert errors["MG-WFBP"][1] <= 0.15


def test_the_order_of_all_reduce_methods_is_predicted_and_that_of_all_methods_is_not(
    comparisons: list[PublishedComparison],
) -> None:
    found, whole = compare_order(comparisons, ALL_REDUCE), compare_order(comparisons)
    assert found.settings == whole.settings == 27
    assert found.fastest >= 22
    assert found.right >= 0.85 * found.pairs
    assert whole.right >= 0.65 * whole.pairs
    reversed_rates = [replace(item, predicted_rate=1 / item.predicted_rate) for item in comparisons]
    assert compare_order(reversed_rates, ALL_REDUCE).right == found.pairs - found.right


@pytest.mark.parametrize(
    "alpha",
    [pytest.param(0.0, id="none", marks=pytest.mark.nightly), pytest.param(1.4e-5, id="NCCL's constant of a hop")],
)
def test_one_cell_a_network_and_published_latencies_do_not_predict_fused_messages(alpha: float) -> None:
    """Its single message starts within 0.1 to 0.3 % of the step, which is less than the spread of the measurement."""
    errors = {method: mean for method, _, mean, _ in summarize(compare_published(alpha))}
    assert errors["BSP-A2A"] <= 0.10
    assert errors["MG-WFBP"] > 0.15


def test_the_cells_that_gave_the_constants_are_not_counted(comparisons: list[PublishedComparison]) -> None:
    used = [item for item in comparisons if item.is_calibration]
    assert len(used) == 6
    assert all(abs(item.error) < 0.005 for item in used)
