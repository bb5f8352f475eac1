"""Custom methods (`door`) as a strategy."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from task_images.comm.base import Strategy, Traits
from task_images.comm.codecs import Sign, join_payload, split_payload
from task_images.comm.door import RegisteredMethod, read_options
from task_images.comm.drifting import Drifting
from task_images.comm.link import Link
from task_images.comm.methods import Method
from task_images.harness.errors import TaskUsageError


class RegisteredRun(Drifting):
    """Calls the hooks of a custom method, and implements `door.Run` for them."""

    def __init__(self, method: Method, registered: RegisteredMethod) -> None:
        super().__init__(method)
        self._registered = registered
        self.options = read_options(method.options)
        self.state: dict[str, Tensor] = {}
        self.traits = Traits(identical=registered.identical, gradients_agree=registered.identical)

    @property
    def update(self) -> int:
        """The number of this update, from 1."""
        return self._update + 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def link(self) -> Link:
        """Collectives between the ranks."""
        return self._link

    @property
    def weights(self) -> Tensor:
        """A copy of this rank's weights."""
        return self._collect()  # torch.cat copies

    @weights.setter
    def weights(self, flat: Tensor) -> None:
        self._distribute(flat)

    @property
    def gradients(self) -> Tensor:
        """A copy of this rank's gradients: those of its own batch until `reduce` assigns others."""
        return torch.cat(
            [
                torch.zeros_like(item).reshape(-1) if item.grad is None else item.grad.reshape(-1)
                for item in self._parameters
            ]
        )

    @gradients.setter
    def gradients(self, flat: Tensor) -> None:
        parts = torch.split(flat, [item.numel() for item in self._parameters])
        for item, part in zip(self._parameters, parts, strict=True):
            item.grad = part.view_as(item).clone()

    def average(self, flat: Tensor) -> Tensor:
        """The mean of all ranks' `flat`."""
        return self._link.all_reduce(flat / self.size)

    def average_signs(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Compress each rank's `flat` to signs times the mean magnitude per tensor. Returns the mean over ranks and
        this rank's compressed tensor."""
        codec = Sign(True, [item.numel() for item in self._parameters])
        payload = codec.encode(flat, self.update)
        rows = self._link.all_gather(join_payload(payload))
        total = codec.aggregate([split_payload(row, payload) for row in rows], flat, self.update)
        return total / self.size, codec.decode(payload, flat, self.update)

    def optimizer_state(self, key: str) -> Tensor:
        """A copy of the optimizer's state `key` (e.g. exp_avg) of all parameters: [d], or one number per parameter."""
        return torch.cat([self.optimizer.state[item][key].reshape(-1) for item in self._parameters])

    def decayed_weights(self, rate: float) -> Tensor:
        """All weights after decoupled weight decay like AdamW's: [d]."""
        parts = []
        for group in self.optimizer.param_groups:
            factor = 1 - rate * group.get("weight_decay", 0.0) * bool(group.get("decoupled_weight_decay"))
            parts += [(item, factor) for item in group["params"]]
        factors = {id(item): factor for item, factor in parts}
        return torch.cat([item.detach().reshape(-1) * factors[id(item)] for item in self._parameters])

    def _connect(self) -> None:
        super()._connect()
        self._is_skipped = False
        if self.size > 1:
            found, possible = type(self.optimizer).__name__, self._registered.optimizers
            if possible and found not in possible:
                raise TaskUsageError(
                    f"{self.method.name} needs the optimizer {' or '.join(possible)}; the task has {found}",
                    "another method: mlbench methods",
                )
            self._registered.start(self)

    def _reduce(self) -> None:
        super()._reduce()
        if self.size == 1:
            return
        gradients = self._gradients()
        if self._divisor != 1:
            torch._foreach_mul_(gradients, 1 / self._divisor)
            self._divisor = 1.0
        self._is_skipped = False
        if self._scale is not None:
            own = all(bool(gradient.isfinite().all()) for gradient in gradients)
            # Decide before the hook, so that the hook never has to undo an overflow.
            self._is_skipped = not (super()._agree(own) if not self.traits.identical else self._ask_all(own))
        if not self._is_skipped:
            self._registered.reduce(self)

    def _ask_all(self, finite: bool) -> bool:
        return self.world.max([0.0 if finite else 1.0])[0] == 0

    def _agree(self, finite: bool) -> bool:
        return finite and not self._is_skipped

    def _step(self, rate: float) -> None:
        if self.size == 1 or not self._registered.step(self, rate):
            super()._step(rate)

    def _exchange(self, updated: bool, rate: float) -> None:
        if self.size > 1:
            self._registered.exchange(self, rate)
        self._update += 1

    def consensus(self) -> AbstractContextManager[object]:
        """Within the block the model has the mean of all ranks' weights; nothing to do if they are equal."""
        return nullcontext() if self.traits.identical else super().consensus()

    def check_replicas(self) -> float | None:
        """Check that models are equal if the method keeps them equal; else return the last measured distance."""
        return Strategy.check_replicas(self) if self.traits.identical else super().check_replicas()

    def _own_state(self) -> dict[str, Any]:
        kept = {name: tensor.cpu() for name, tensor in self.state.items()}
        return {**super()._own_state(), "weights": self._own_weights(), "state": kept}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        super()._load_own_state(state)
        self._distribute(state["weights"].to(self.world.device))
        self.state = {name: tensor.to(self.world.device) for name, tensor in state["state"].items()}
