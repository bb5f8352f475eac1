"""Compressed gradients: what a message sends of each tensor, and error feedback for what it leaves out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from task_images.methods import torch
from task_images.methods.base import LossScale
from task_images.methods.buckets import Bucketed, Finish, Message
from task_images.methods.scheduled import BUCKET

State = dict[str, dict[str, "torch.Tensor"]]  # by kind and name of the parameter
BITS = 8


class Compressed(Bucketed):
    """Methods that define `exchange`. It runs on one thread, message after message, while the backward pass goes on.

    feeds_back   what a rank does not send of its gradients is added to the next ones, in units of true gradients: a
                 changing loss scale does not touch it
    state        of this rank, by kind and parameter: residuals, and what else a method remembers. An overflow restores
                 it, and checkpoints include it
    """

    options = {"bucket": BUCKET}  # noqa: RUF012
    feeds_back: ClassVar[bool] = True
    collective = "allgather"
    overflows_apart = True

    def exchange(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], seed: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The sums over ranks of what each sends of `tensors` over `link`, and what this one sends, in the same shapes.

        tensors   [n] each, the flat gradients of the parameters `names` plus their residuals: not to be changed
        seed      differs for each update and message, and is the same on all ranks
        """
        raise NotImplementedError

    def accumulate(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Add a gradient to what was not sent so far; returns the sum, whose memory is that of the residual."""
        return self.state["residual"][name].add_(gradient)

    # --- the machinery ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Create the state and the thread."""
        super().start()
        self.link.has_thread = True
        named = {name: slot.parameter for name, slot in self._slots.items()}
        self.state: State = {}
        if self.feeds_back:
            self.state["residual"] = {
                name: torch.zeros(item.numel(), dtype=item.dtype, device=item.device) for name, item in named.items()
            }
        self._kept: State = {}
        device = self.world.device
        enter = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "communication", initializer=enter)

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update. The loss scale is divided out when gradients are taken."""
        super().begin(weight, total, passes, scale)
        if self.world.size > 1:
            self.share, self.divisor = self.share / self.divisor, 1.0
            if scale is not None:
                self._kept = {
                    kind: {name: tensor.clone() for name, tensor in found.items()} for kind, found in self.state.items()
                }

    def send(self, message: Message) -> Finish:
        """Give the message to the thread."""
        seed = ((self.seed * 1_000_003 + self.update) * 100_003 + message.number) % 2**40
        future = self._thread.submit(self._exchange, message, seed)

        def finish() -> None:
            begin = time.perf_counter()
            future.result()
            self.link.exposed += time.perf_counter() - begin

        return finish

    def _exchange(self, message: Message, seed: int) -> None:
        with torch.no_grad():
            flat, slots = message.flat, message.bucket.slots
            names, parts = [slot.name for slot in slots], torch.split(flat, [slot.parameter.numel() for slot in slots])
            if self._scale is not None and not bool(flat.isfinite().all()):
                self.overflowed = True
                flat.zero_()
            totals: Sequence[torch.Tensor] = parts
            if self.feeds_back:
                totals = [self.accumulate(name, part) for name, part in zip(names, parts, strict=True)]
            sums, own = self.exchange(names, totals, seed)
            for part, summed in zip(parts, sums, strict=True):
                part.copy_(summed)
            if self.feeds_back:
                for total, sent in zip(totals, own, strict=True):
                    total.sub_(sent)

    def undo(self) -> None:
        """Restore the state before the update."""
        self.state = self._kept

    def own_state(self) -> dict[str, Any]:
        """The state in host memory."""
        return {kind: {name: tensor.cpu() for name, tensor in found.items()} for kind, found in self.state.items()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        device = self.world.device
        self.state = {
            kind: {name: tensor.to(device, copy=True) for name, tensor in found.items()}
            for kind, found in state.items()
        }

    def load_other_states(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Residuals and velocities are shares of a sum over ranks: each rank takes an equal part of the sum of the old
        ones, so that nothing is lost. Other state is rank 0's."""
        found = {kind: dict(tensors) for kind, tensors in ranks[0].items()}
        for kind in ("residual", "velocity"):
            for name in found.get(kind, {}):
                found[kind][name] = torch.stack([other[kind][name] for other in ranks]).sum(0) / self.world.size
        self.load_own_state(found)

    def close(self) -> None:
        """End the thread."""
        if self.world.size > 1:
            self._thread.shutdown()


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """bits [n], bool -> [ceil(n/8)], uint8; the first bit is the lowest one, padding is 0."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % BITS)).view(-1, BITS)
    return (padded << torch.arange(BITS, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack_signs(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_bits`, in the size and type of `like`: -1 for set bits, else +1."""
    shifts = torch.arange(BITS, dtype=torch.uint8, device=packed.device)
    return 1 - 2 * ((packed.unsqueeze(1) >> shifts) & 1).view(-1)[: like.numel()].to(like.dtype)
