"""Number formats of training: fp32, or mixed precision with fp32 parameters (bf16; fp16 with a dynamic loss scale)."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from task_images.harness.errors import DivergedError

FORMATS = ("fp32", "bf16", "fp16")


@dataclass
class LossScale:
    """The factor on the loss that keeps small fp16 gradients from vanishing.

    Multiplied by `factor` after every `window` updates in a row without overflow, up to `largest`; divided by `factor`
    at an overflow, whose update is left out.
    """

    value: float = 1.0
    factor: float = 2.0
    window: int = 2000
    largest: float = 2.0**24
    smallest: float = 1e-4
    good: int = field(default=0, init=False)  # updates since the last change by overflow or growth

    def observe(self, finite: bool) -> None:
        """Take note of one update. Raises DivergedError when the scale falls below `smallest`."""
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
    """One format: its autocast context and its loss scale (None but for fp16).

    `used` may differ from what was asked for: fp16 is computed on GPUs only, on a CPU fp32 takes its place.
    `casts` is False for models that cast by themselves (FSDP).
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
        """What losses are multiplied by before the backward pass."""
        return self.scale.value if self.scale else 1.0

    def autocast(self) -> AbstractContextManager[object]:
        """The context of forward pass and loss."""
        if self.used == "fp32" or not self._casts:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16 if self.used == "bf16" else torch.float16)
