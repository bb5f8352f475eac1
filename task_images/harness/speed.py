"""Faster ways to compute the same: options of a task, all listed in its result."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from task_images.harness.precision import LossScale, Precision

# What overflows is noticed and left out; so begin high, where small gradients survive.
FIRST_LOSS_SCALE = 65536.0


@dataclass(frozen=True)
class SpeedOptions:
    """channels_last   memory format of images and convolutions
    compile            "no", "blocks" (torch.compile for each block of the model, so that gradients still appear one
                       after another), or "whole"
    precision          fp32; bf16 or fp16: mixed, with parameters in fp32
    loaders            threads that load data ahead
    """

    channels_last: bool
    compile: str
    precision: str
    loaders: int

    def apply(self, model: nn.Module) -> None:
        """Change memory format and code of `model` in place; parameters stay the same objects."""
        if self.channels_last:
            model.to(memory_format=torch.channels_last)
        if self.compile == "no":
            return
        blocks = [block for child in model.children() if isinstance(child, nn.Sequential) for block in child]
        for module in blocks if self.compile == "blocks" and blocks else [model]:
            module.compile()

    def make_precision(self, device: torch.device) -> Precision:
        return Precision(self.precision, device, LossScale(value=FIRST_LOSS_SCALE))

    def facts(self, precision: Precision) -> dict[str, Any]:
        """For the result: what was asked for and, where it differs, what was used."""
        return {
            "channels_last": self.channels_last,
            "compile": self.compile,
            "precision": precision.used,
            "loaders": self.loaders,
            "fused_optimizer": True,
            "gradients": "views into one buffer per collective",
        }
