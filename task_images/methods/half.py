"""Gradients in 16 bits: scaled first, so that the sum does not overflow, then converted, summed and converted back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from task_images.methods import torch
from task_images.methods.buckets import Finish, Message
from task_images.methods.scheduled import Fusion

if TYPE_CHECKING:
    from task_images.methods.base import Pending


class Fp16(Fusion):
    """Half precision."""

    name = "fp16"
    summary = "sends gradients as 16-bit floats"
    source = "common practice"
    formula = "(P-1)/P M"
    wire: ClassVar[str] = "float16"

    def send(self, message: Message) -> Finish:
        """Start to sum the converted message."""
        sent = message.flat.to(getattr(torch, self.wire))
        return partial(_take, message.flat, sent, self.link.start_all_reduce(sent))


class Bf16(Fp16):
    """The range of 32 bits, with 8 bits of precision."""

    name = "bf16"
    summary = "sends gradients as bfloat16"
    wire = "bfloat16"


def _take(flat: torch.Tensor, sent: torch.Tensor, pending: Pending) -> None:
    pending.wait()
    flat.copy_(sent)
