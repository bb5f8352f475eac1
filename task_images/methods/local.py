"""Local steps, then an outer step on the mean of all ranks' weights. The methods differ in the outer step alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from task_images.methods import torch
from task_images.methods.base import NOTHING, Method, Option

STEPS = Option(4, 1, 10**6, "updates between averages")


class Drifting(Method):
    """Each rank updates with its own gradients, and clips and skips them without waiting for the others."""

    identical = False

    def start(self) -> None:
        """Nothing is in exchange yet."""
        self._own: torch.Tensor | None = None  # this rank's weights while the model has the mean

    def reduce(self) -> None:
        """No exchange: only the number of samples is divided out. A rank's share is 1/P if batches are equal."""
        self.scale_gradients(self.world.size * self.share)

    @contextlib.contextmanager
    def _on_average(self) -> Iterator[None]:
        self._own = own = self.read_weights()
        self.measure_distance()
        self.write_weights(self.average(own))
        try:
            yield
        finally:
            self.write_weights(own)
            self._own = None

    def consensus(self) -> AbstractContextManager[object]:
        """Within the block the model has the mean of all replicas; afterwards each rank has its own again."""
        return self._on_average() if self.world.size > 1 else NOTHING

    def own_state(self) -> dict[str, Any]:
        """Optimizer and weights of this rank."""
        own = self.read_weights() if self._own is None else self._own
        return {"optimizer": self.optimizer.state_dict(), "weights": own.cpu()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.write_weights(state["weights"].to(self.world.device))


class LocalSgd(Drifting):
    """Averages; the next steps go on from the mean."""

    name = "localsgd"
    summary = "workers train independently and average their weights every 4 steps"
    source = "Stich 2019, arXiv:1805.09767"
    formula = "2 (P-1)/P M / steps"
    options = {"steps": STEPS}  # noqa: RUF012
    late_options = ("steps",)

    def start(self) -> None:
        """All ranks start with the same weights."""
        super().start()
        self._averaged_at = 0

    def mix(self, rate: float) -> None:
        """Average every `steps` updates."""
        if self.update % self.values["steps"] == 0:
            self._average()

    def _average(self) -> None:
        self.write_weights(self.average(self.read_weights()))
        self._averaged_at = self.update

    def consensus(self) -> AbstractContextManager[object]:
        """Measure the distance, then average permanently. Rounding can change the mean of equal numbers, so weights
        that are already averaged are not averaged again."""
        if self.world.size > 1:
            self.measure_distance()
            if self._averaged_at != self.update:
                self._average()
        return NOTHING

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Checkpoints are made of averaged weights."""
        super().load_own_state(state)
        self._averaged_at = self.update


class SlowMo(Drifting):
    """Every `steps` updates, u <- beta u + (x_0 - mean x) / rate, and all ranks continue from x_0 - alpha rate u (Wang
    et al. 2020, algorithm 1)."""

    name = "slowmo"
    summary = "local steps with momentum on their averages"
    source = "Wang et al. 2020, arXiv:1910.00643"
    formula = "2 (P-1)/P M / steps"
    options = {  # noqa: RUF012
        "steps": STEPS,
        "beta": Option(0.5, 0, 0.999, "slow momentum"),
        "alpha": Option(1.0, 0.01, 10, "slow learning rate"),
    }
    late_options = ("steps",)

    def start(self) -> None:
        """Start with the common weights and zero slow momentum."""
        super().start()
        self._anchor = self.read_weights()
        self._momentum = self._anchor * 0

    def mix(self, rate: float) -> None:
        """The outer step after every `steps` updates."""
        if self.update % self.values["steps"] == 0:
            self.step_outside((self._anchor - self.average(self.read_weights())), rate)
            self.write_weights(self._anchor)

    def step_outside(self, change: torch.Tensor, rate: float) -> None:
        """Move the anchor by the mean change of all ranks, which is a descent direction."""
        self._momentum.mul_(self.values["beta"])
        if rate:
            self._momentum.add_(change / rate)
        self._anchor.sub_(self._momentum, alpha=self.values["alpha"] * rate)

    def own_state(self) -> dict[str, Any]:
        """The state of the outer step, too."""
        return {**super().own_state(), "anchor": self._anchor.cpu(), "momentum": self._momentum.cpu()}

    def take_model(self) -> None:
        """The outer step goes on from the common weights."""
        self._anchor.copy_(self.read_weights())

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        super().load_own_state(state)
        self._anchor.copy_(state["anchor"])
        self._momentum.copy_(state["momentum"])


class DiLoCo(SlowMo):
    """The mean change of all ranks is the gradient of an outer SGD with Nesterov momentum (Douillard et al. 2023,
    algorithm 1)."""

    name = "diloco"
    summary = "many local steps with the task's optimizer, then an outer step with Nesterov momentum"
    source = "Douillard et al. 2023, arXiv:2311.08105"
    options = {  # noqa: RUF012
        "steps": Option(50, 1, 10**6, "inner updates between outer steps"),
        "outer_rate": Option(0.7, 0.001, 10, "learning rate of the outer step"),
        "outer_momentum": Option(0.9, 0, 0.999, "Nesterov momentum of the outer step"),
    }
    note = "The paper takes 500 inner steps with AdamW; the default here is 50 steps with the task's optimizer."

    def step_outside(self, change: torch.Tensor, rate: float) -> None:
        """Nesterov momentum as in torch's SGD."""
        factor = self.values["outer_momentum"]
        self._momentum.mul_(factor).add_(change)
        self._anchor.sub_(change.add_(self._momentum, alpha=factor), alpha=self.values["outer_rate"])
