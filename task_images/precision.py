"""Number formats of training: fp32, or mixed precision with fp32 parameters (bf16; fp16 with a dynamic loss scale)."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from task_images.errors import DivergedError, TaskUsageError
from task_images.parameters import CUDNN, CudaSettings

FORMATS = ("fp32", "bf16", "fp16")
# Overflows are detected and skipped, so start high, where small gradients do not vanish.
FIRST_LOSS_SCALE = 65536.0


def set_arithmetic(settings: CudaSettings) -> None:
    """Use true fp32 on NVIDIA GPUs unless TF32 is requested; torch's default is TF32 in convolutions and RNNs.

    `cudnn`: "default" uses the algorithm that cuDNN proposes, "deterministic" a bitwise reproducible one, "benchmark"
    the fastest one tried.
    """
    if settings.cudnn not in CUDNN:
        raise TaskUsageError(f'the parameter "cudnn" is {settings.cudnn!r}, not {" or ".join(CUDNN)}')
    kind = "tf32" if settings.tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = kind
    torch.backends.cudnn.conv.fp32_precision = kind  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = kind  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = settings.cudnn == "deterministic"
    torch.backends.cudnn.benchmark = settings.cudnn == "benchmark"


def refuse_bf16_lstm(precision: str, device: torch.device) -> None:
    """Raises TaskUsageError for bf16 LSTMs on NVIDIA GPUs: torch.autocast runs them in fp16, in which small gradients
    vanish without a loss scale (ATen/native/cudnn/AutocastRNN.cpp)."""
    if precision == "bf16" and device.type == "cuda":
        raise TaskUsageError(
            "on GPUs, torch computes LSTMs in fp16 if bf16 is requested, without loss scaling",
            "--set precision=fp32, with --set tf32=true for speed; or fp16, if the task has it",
        )


@dataclass
class LossScale:
    """The factor on the loss that prevents small fp16 gradients from vanishing.

    Multiplied by `factor` after `window` consecutive updates without overflow, up to `largest`; divided by `factor`
    after an overflow, whose update is skipped.
    """

    value: float = 1.0
    factor: float = 2.0
    window: int = 2000
    largest: float = 2.0**24
    smallest: float = 1e-4
    good: int = field(default=0, init=False)  # updates since the scale last changed

    def observe(self, finite: bool) -> None:
        """Record one update. Raises DivergedError when the scale falls below `smallest`."""
        if not finite:
            self.value /= self.factor
            self.good = 0
            if self.value < self.smallest:
                raise DivergedError(
                    f"the gradients overflow even at a loss scale of {self.value:g}: the training has diverged",
                    "A lower learning rate may help, or the precision bf16 or fp32.",
                )
            return
        self.good += 1
        if self.good == self.window:
            self.value = min(self.value * self.factor, self.largest)
            self.good = 0


class Precision:
    """A number format: its autocast context and its loss scale (only for fp16, else None).

    `used` may differ from the request: fp16 is supported only on GPUs, and replaced by fp32 on CPUs. `casts` is False
    for models that cast themselves (FSDP).
    """

    def __init__(self, asked: str, device: torch.device, scale: LossScale | None = None, *, casts: bool = True) -> None:
        if asked not in FORMATS:
            raise ValueError(f"the precision {asked!r} is not one of {', '.join(FORMATS)}")
        self.used = "fp32" if asked == "fp16" and device.type == "cpu" else asked
        self.scale = (scale or LossScale()) if self.used == "fp16" else None
        self._device = device
        self._casts = casts

    @property
    def factor(self) -> float:
        """The factor on losses before the backward pass."""
        return self.scale.value if self.scale else 1.0

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast context for forward pass and loss."""
        if self.used == "fp32" or not self._casts:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16 if self.used == "bf16" else torch.float16)


def make_precision(precision: str, device: torch.device) -> Precision:
    """The precision on a device, with a fresh loss scale for float16."""
    return Precision(precision, device, LossScale(value=FIRST_LOSS_SCALE))
