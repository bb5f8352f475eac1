"""Number formats, clocks and samples on a real GPU, each against what it stands for."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from task_images.clock import Tracker
from task_images.contract import Contract, TaskUsageError
from task_images.parameters import CudaSettings
from task_images.peak import find_peak
from task_images.train import refuse_bf16_lstm, set_arithmetic
from task_images.world import World, open_world, sample_gpu

GPU = torch.device("cuda")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return open_world(Contract({"MLBENCH_DEVICE": "gpu", "MLBENCH_OUTPUT_DIR": str(tmp_path)}))


@pytest.mark.parametrize(("tf32", "low", "high"), [(False, 0.0, 2e-6), (True, 5e-5, 5e-3)])
def test_fp32_means_fp32_unless_tf32_is_asked_for(tf32: bool, low: float, high: float) -> None:
    """Relative errors of a product and of a convolution against float64."""
    set_arithmetic(CudaSettings(tf32=tf32))
    torch.manual_seed(0)
    left, right = torch.randn(2, 1024, 1024, dtype=torch.float64, device=GPU)
    exact, found = left @ right, (left.float() @ right.float()).double()
    assert low <= float((found - exact).norm() / exact.norm()) <= high
    images, weights = torch.randn(8, 64, 28, 28, dtype=torch.float64), torch.randn(64, 64, 3, 3, dtype=torch.float64)
    exact = torch.nn.functional.conv2d(images, weights).to(GPU)
    found = torch.nn.functional.conv2d(images.float().to(GPU), weights.float().to(GPU)).double()
    assert low <= float((found - exact).norm() / exact.norm()) <= high
    set_arithmetic(CudaSettings())


def test_deterministic_convolutions_give_the_same_bits() -> None:
    set_arithmetic(CudaSettings(cudnn="deterministic"))
    torch.manual_seed(0)
    images, layer = torch.randn(64, 16, 32, 32, device=GPU), torch.nn.Conv2d(16, 16, 3, padding=1).to(GPU)

    def gradient() -> torch.Tensor:
        layer.zero_grad()
        layer(images).square().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(10))
    set_arithmetic(CudaSettings())


def test_bf16_lstms_would_be_fp16_and_are_refused() -> None:
    lstm = torch.nn.LSTM(8, 8).to(GPU)
    with torch.autocast("cuda", torch.bfloat16):
        assert lstm(torch.randn(2, 2, 8, device=GPU))[0].dtype == torch.float16
    with pytest.raises(TaskUsageError, match="fp16"):
        refuse_bf16_lstm("bf16", GPU)


def test_categories_have_the_time_of_the_device() -> None:
    """Work is given to the device in less time than it takes; the tracker tells the latter."""
    tracker = Tracker(GPU)
    matrix = torch.randn(4096, 4096, device=GPU)
    matrix @ matrix  # the first product loads a library
    torch.cuda.synchronize()
    begin = time.perf_counter()
    tracker.enter("forward")
    for _ in range(40):
        matrix @ matrix
    tracker.enter("other")
    given = time.perf_counter() - begin
    found = tracker.snapshot()
    taken = time.perf_counter() - begin
    assert given < 0.5 * taken
    assert found.seconds["forward"] == pytest.approx(taken, rel=0.2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_peak_is_below_the_datasheet(precision: str) -> None:
    state = torch.cuda.get_rng_state()
    peak = find_peak(GPU, precision)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    if peak.datasheet is not None:  # other tests may have the GPU, too
        assert 0.1 < peak.measured / peak.datasheet < 1.05


def test_a_gpu_is_sampled(world: World) -> None:
    pytest.importorskip("pynvml")
    with sample_gpu(world) as sampler:
        matrix, end = torch.randn(8192, 8192, device=GPU), time.monotonic() + 2.5
        while time.monotonic() < end:
            matrix @ matrix
            torch.cuda.synchronize()
    assert sampler is not None
    facts: Mapping[str, Any] = sampler.facts()
    assert facts["samples"] >= 3
    assert 20 < facts["power_watts"] < 1500
