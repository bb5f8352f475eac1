"""Peak rates: the table of datasheets against a second source."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from task_images.harness import peak
from task_images.harness.peak import (
    DATASHEET,
    Peak,
    Utilization,
    count_flops,
    datasheet_peak,
    find_datasheet,
    find_peak,
)

# The rates that torchtitan (tools/utils.py, get_peak_flops) and the model-serving tool LLMRoofline (hardware_dict.py)
# divide by, in TFLOP/s. Both name dense bf16.
ELSEWHERE = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H20": 148,
    "NVIDIA B200": 2250,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "AMD Instinct MI300X": 1300,
    "AMD Instinct MI325X": 1300,
    "AMD Instinct MI355X": 2500,
}


@pytest.mark.parametrize(("name", "rate"), ELSEWHERE.items())
def test_the_peak_of_a_device_is_what_others_divide_by(name: str, rate: float) -> None:
    assert find_datasheet(name) == pytest.approx(rate * 1e12, rel=0.01)


def test_a_device_that_is_not_in_the_table_has_no_peak() -> None:
    assert find_datasheet("NVIDIA GeForce RTX 4090") is None


def test_a_longer_name_is_not_hidden_by_a_shorter_one_before_it() -> None:
    """The first word that fits counts, so "L40" before "L40S" would give every L40S half its rate."""
    words = [word for word, _rate, _source in DATASHEET]
    for number, word in enumerate(words):
        assert not [earlier for earlier in words[:number] if earlier in word], word


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "precision", "rate"),
    [(GPU, "bf16", 989e12), (GPU, "fp16", 989e12), (GPU, "fp32", None), (CPU, "bf16", None)],
)
def test_datasheets_are_about_half_precision_on_gpus(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, precision: str, rate: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert datasheet_peak(device, precision) == rate


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_a_product_in_the_trainings_format_is_as_large_as_fits(
    monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    tried: list[Any] = []

    def time_product(device: torch.device, kind: torch.dtype, size: int) -> float:
        tried.append((kind, size))
        if size > 2048:
            raise torch.OutOfMemoryError
        return 0.5

    monkeypatch.setattr(peak, "_time_product", time_product)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = find_peak(GPU, precision)
    assert tried == [(dtype, size) for size in (8192, 4096, 2048)]
    # A multiplication and an addition for each of 2048 terms of each of 2048 x 2048 numbers.
    assert found == Peak(2 * 2048**3 / 0.5, None if precision == "fp32" else 989e12)
    tried.clear()
    assert find_peak(CPU, precision).measured == 2 * 768**3 / 0.5
    assert tried == [(dtype, 768)]


def test_the_fastest_product_counts_and_draws_no_number_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 1.0, 1.4, 0.1, 2.0, 2.25, 0.2, 3.0, 3.5, 0.31])
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    state = torch.get_rng_state()
    assert peak._time_product(CPU, torch.float32, 2) == 0.25
    assert torch.equal(torch.get_rng_state(), state)


def test_the_share_of_the_peak_is_that_of_one_rank() -> None:
    base = {"flops_formula": "by hand", "flops_per_update": 600.0}
    known, unknown = Peak(200.0, 400.0), Peak(200.0, None)
    assert Utilization(600.0, "by hand", known, 0.5, 3).to_dict() == {
        **base,
        "peak_flops": {"measured": 200.0, "datasheet": 400.0},
        "model_flops_per_second_per_rank": 100.0,
        "mfu_of_measured_peak": 0.5,
        "mfu": 0.25,
    }
    assert Utilization(600.0, "by hand", unknown, 0.5, 3).to_dict() == {
        **base,
        "peak_flops": {"measured": 200.0, "datasheet": None},
        "model_flops_per_second_per_rank": 100.0,
        "mfu_of_measured_peak": 0.5,
    }
    assert Utilization(600.0, "by hand", known, None, 3).to_dict() == {
        **base,
        "peak_flops": {"measured": 200.0, "datasheet": 400.0},
    }


def test_a_pass_counts_forward_once_and_backward_for_weights_and_inputs() -> None:
    """[5, 3] x [3, 4] and [5, 4] x [4, 2], two operations per term; the first inputs have no gradient."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    first, second = 2 * 5 * 3 * 4, 2 * 5 * 4 * 2
    assert count_flops(lambda: layers(torch.ones(5, 3)).sum()) == 2 * first + 3 * second
