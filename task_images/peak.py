"""The device's peak rate, and the share that a training uses (model FLOPs utilization, MFU)."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

# Dense bf16 and fp16 TFLOP/s with their sources, by a substring of torch's device name; the first match counts. If a
# datasheet gives the rate with 2:4 sparsity, the dense rate is half of it. The L40S's datasheet gives both.
DATASHEET = (
    ("GB300", 2500.0, "NVIDIA GB300 NVL72 datasheet, 5 PFLOP/s sparse"),
    ("GB200", 2500.0, "NVIDIA GB200 NVL72 datasheet, 5 PFLOP/s sparse"),
    ("B300", 2250.0, "NVIDIA HGX B300 datasheet, 4.5 PFLOP/s sparse"),
    ("B200", 2250.0, "NVIDIA HGX B200 datasheet, 4.5 PFLOP/s sparse"),
    ("GH200", 989.0, "NVIDIA GH200 datasheet, 1 979 TFLOP/s sparse"),
    ("H200", 989.0, "NVIDIA H200 datasheet, 1 979 TFLOP/s sparse"),
    ("H100 NVL", 835.0, "NVIDIA H100 datasheet, 1 671 TFLOP/s sparse"),
    ("H100 PCIe", 756.0, "NVIDIA H100 datasheet, 1 513 TFLOP/s sparse"),
    ("H100", 989.0, "NVIDIA H100 datasheet, SXM, 1 979 TFLOP/s sparse"),
    ("H20", 148.0, "NVIDIA H20, 148 TFLOP/s dense"),
    ("A100", 312.0, "NVIDIA A100 datasheet, 312 TFLOP/s dense, 624 sparse"),
    ("L40S", 362.05, "NVIDIA L40S datasheet, 362.05 TFLOP/s dense, 733 sparse"),
    ("L40", 181.05, "NVIDIA L40 datasheet, 181.05 TFLOP/s dense, 362.1 sparse"),
    ("MI355X", 2500.0, "AMD Instinct MI355X datasheet, 2.5 PFLOP/s dense"),
    ("MI325X", 1307.4, "AMD Instinct MI325X datasheet, 1 307.4 TFLOP/s dense"),
    ("MI300X", 1307.4, "AMD Instinct MI300X datasheet, 1 307.4 TFLOP/s dense"),
)
_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
SECONDS = 0.3
COUNTED = "forward and backward pass, counted by torch.utils.flop_counter"


@dataclass(frozen=True)
class Peak:
    """FLOPs per second of one device: measured with a large matrix product, and from the datasheet if known."""

    measured: float
    datasheet: float | None


def find_peak(device: torch.device, precision: str) -> Peak:
    """Multiply square matrices in the training's number format for a third of a second; the fastest product counts.

    The numbers are random, because a GPU draws less power for zeros and ones, and is then faster.
    """
    dtype = _FORMATS.get(precision, torch.float32)
    size = 8192 if device.type == "cuda" else 768
    while True:
        try:
            seconds = _time_product(device, dtype, size)
            break
        except torch.OutOfMemoryError:
            size //= 2
    return Peak(2.0 * size**3 / seconds, datasheet_peak(device, precision))


@dataclass(frozen=True)
class Utilization:
    """How much of the device's speed a training used. FLOPs are per update of all ranks, rates per rank.

    formula   how the number of FLOPs was derived
    """

    flops_per_update: float
    formula: str
    peak: Peak
    updates_per_second: float | None
    ranks: int

    def to_dict(self) -> dict[str, object]:
        """For the result's details; without a measured rate, only the reference numbers."""
        found: dict[str, object] = {
            "flops_formula": self.formula,
            "flops_per_update": self.flops_per_update,
            "peak_flops": asdict(self.peak),
        }
        if self.updates_per_second is None:
            return found
        flops = self.flops_per_update * self.updates_per_second / self.ranks
        found |= {"model_flops_per_second_per_rank": flops, "mfu_of_measured_peak": flops / self.peak.measured}
        if self.peak.datasheet is not None:
            found["mfu"] = flops / self.peak.datasheet
        return found


def count_flops(compute_loss: Callable[[], Tensor]) -> float:
    """FLOPs of one forward and backward pass; a multiplication and an addition count as two. Layers without a formula
    in torch (LSTMs on a CPU) count as 0."""
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        compute_loss().backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops())


def _time_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Shortest time in seconds of a product of two [size, size] matrices."""
    generator = torch.Generator(device).manual_seed(0)  # does not change the training's random state
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = _now(device)
        left @ right
        best = min(best, _now(device) - begin)
    return best


def datasheet_peak(device: torch.device, precision: str) -> float | None:
    """Dense FLOPs per second from the datasheet; None for formats and devices missing in the table."""
    if device.type != "cuda" or precision not in _FORMATS:
        return None
    name = torch.cuda.get_device_name(device)
    return find_datasheet(name)


def find_datasheet(name: str) -> float | None:
    """Dense FLOPs per second of the device with torch's name `name`; None if it is not in the table."""
    return next((1e12 * rate for word, rate, _source in DATASHEET if word.lower() in name.lower()), None)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def keep_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore parameters, buffers and random states after the block."""
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    devices = [device] if device.type == "cuda" else []
    was_training = model.training
    with torch.random.fork_rng(devices=devices):
        yield
    model.load_state_dict(kept)
    model.zero_grad(set_to_none=True)
    model.train(was_training)
