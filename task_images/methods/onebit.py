"""1-bit Adam: after a warm-up the variance is frozen and momenta are sent as signs (Tang et al. 2021, algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from task_images.methods import torch
from task_images.methods.base import Method, Option, Round, Sent
from task_images.methods.compressed import pack_bits, unpack_signs


class OneBitAdam(Method):
    """For `warmup_steps` updates this is the task's Adam on the mean gradient. Then each rank adds its own gradient to
    the momentum, sends signs and one scale per tensor with error feedback, and divides the mean by the root of the
    frozen variance.

    The paper's server compresses the mean again; here signs are all-gathered, and every rank computes their mean.
    """

    name = "onebit-adam"
    summary = "Adam; after a warm-up, sends one bit per element of the momentum and freezes the variance"
    source = "Tang et al. 2021, arXiv:2102.02888"
    formula = "2 (P-1)/P M during the warm-up, then (P-1) (ceil(d/8) + 4 per tensor)"
    options = {"warmup_steps": Option(100, 1, 10**9, "warm-up updates with plain Adam")}  # noqa: RUF012
    late_options = ("warmup_steps",)
    optimizers = ("AdamW",)
    overflows_apart = True
    note = "The task's optimizer must be AdamW; with any other, the run fails."

    def rounds(self, sent: Sent, ranks: int) -> Sequence[Round]:
        """One bit per number, as after the warm-up; scales are neglected."""
        return [Round("allgather", sent.parameters / 8)]

    def start(self) -> None:
        """Create the state: the compression error, the momentum, and the root of the frozen variance."""
        self._residual, self._momentum, self._root = (torch.zeros_like(self.read_weights()) for _ in range(3))

    @property
    def _is_warm(self) -> bool:
        return self.update > int(self.values["warmup_steps"])

    def reduce(self) -> None:
        """Average gradients during the warm-up."""
        self.scale_gradients(self.world.size * self.share / self.divisor)
        self.divisor = 1.0
        own = self.read_gradients()
        self.overflowed = self._scale is not None and not bool(own.isfinite().all())
        if not self._is_warm:
            self.write_gradients(self.average(own))

    def update_weights(self, rate: float) -> None:
        """After the warm-up, make Adam's step with the mean of compressed momenta."""
        if self.world.size == 1 or not self._is_warm:
            super().update_weights(rate)
            return
        group = self.optimizer.param_groups[0]
        first, second = group["betas"]
        if not self._root.any():
            self._momentum = self._read_optimizer("exp_avg")
            variance = self._read_optimizer("exp_avg_sq") / (1 - second ** self._read_optimizer("step").max())
            self._root = variance.sqrt() + group["eps"]
        own = first * self._momentum + (1 - first) * self.read_gradients() + self._residual
        self._momentum, sent = self._average_signs(own)
        self._residual = own - sent
        self.write_weights(self._decay_weights(rate) - rate * self._momentum / self._root)

    def _average_signs(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean over ranks of signs times the mean magnitude of each tensor, and this rank's own."""
        sizes = [parameter.numel() for parameter in self.parameters]
        scales = torch.stack([part.abs().mean(dtype=torch.float32) for part in torch.split(flat, sizes)])
        decoded = []
        for bits, scale in self.link.gather([pack_bits(flat < 0), scales]):
            parts = torch.split(unpack_signs(bits, flat), sizes)
            decoded.append(torch.cat([part * one for part, one in zip(parts, scale.to(flat.dtype), strict=True)]))
        return torch.stack(decoded).mean(0), decoded[self.world.rank]

    def _read_optimizer(self, key: str) -> torch.Tensor:
        return torch.cat([self.optimizer.state[item][key].reshape(-1) for item in self.parameters])

    def _decay_weights(self, rate: float) -> torch.Tensor:
        """All weights after AdamW's decoupled weight decay."""
        factors = {
            id(item): 1 - rate * group.get("weight_decay", 0.0)
            for group in self.optimizer.param_groups
            for item in group["params"]
        }
        return torch.cat([item.detach().reshape(-1) * factors[id(item)] for item in self.parameters])

    def own_state(self) -> dict[str, Any]:
        """What the method remembers."""
        return {"residual": self._residual.cpu(), "momentum": self._momentum.cpu(), "root": self._root.cpu()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        device = self.world.device
        self._residual, self._momentum, self._root = (
            state[name].to(device) for name in ("residual", "momentum", "root")
        )

    def load_other_states(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Momentum and variance are common; each rank takes an equal part of the sum of the compression errors."""
        errors = torch.stack([other["residual"] for other in ranks]).sum(0) / self.world.size
        self.load_own_state({**ranks[0], "residual": errors})
