"""The training loss, independent of the framework: its mean over ranks and updates, and the guard against NaN."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from task_images.harness.errors import DivergedError
from task_images.harness.ranks import Ranks

# Maximum number of losses that stay on the device to be read together.
MAX_HELD = 64


class TrainingLoss:
    """Losses of this rank's passes; their means are over all ranks.

    A loss may be a scalar on a device. It stays there until a mean is requested, or until there are MAX_HELD; then
    `read` returns all values in one transfer. All ranks must request means after the same updates.
    """

    def __init__(self, read: Callable[[list[Any]], list[float]]) -> None:
        self._read = read
        self._held: list[Any] = []
        self._weights: list[float] = []
        self._recent, self._whole = (0.0, 0.0), (0.0, 0.0)  # weighted sum and weight

    def add(self, mean: Any, weight: float) -> None:
        """Add this rank's mean loss over `weight` samples (or tokens)."""
        self._held.append(mean)
        self._weights.append(weight)
        if len(self._held) == MAX_HELD:
            self._fold()

    def collect_recent(self, world: Ranks, epoch: int, step: int) -> float:
        """The mean since the last call; one collective. Raises DivergedError, on every rank, if it is not finite."""
        self._fold()
        loss, self._recent = _average(world, self._recent), (0.0, 0.0)
        if not math.isfinite(loss):
            raise make_divergence_error(f"the training loss is {loss} in epoch {epoch}, at step {step}")
        return loss

    def collect_whole(self, world: Ranks) -> float:
        """The mean since the last call of this method, NaN if nothing was added; one collective."""
        self._fold()
        loss, self._whole = _average(world, self._whole), (0.0, 0.0)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This rank's sums that are not yet part of a mean."""
        self._fold()
        return {"recent": list(self._recent), "whole": list(self._whole)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums of `state_dict`."""
        self._recent, self._whole = (state["recent"][0], state["recent"][1]), (state["whole"][0], state["whole"][1])

    def _fold(self) -> None:
        if not self._held:
            return
        means, weights = self._read(self._held), self._weights
        total, weight = sum(mean * each for mean, each in zip(means, weights, strict=True)), sum(weights)
        self._recent = (self._recent[0] + total, self._recent[1] + weight)
        self._whole = (self._whole[0] + total, self._whole[1] + weight)
        self._held, self._weights = [], []


def _average(world: Ranks, own: tuple[float, float]) -> float:
    total, weight = world.sum(own)
    return total / weight if weight else math.nan


def check_finite(values: Mapping[str, float], epoch: int) -> dict[str, float]:
    """Check and return the `values` of a validation. Raises DivergedError if their loss is not finite: the last update
    may have broken a model whose training loss was still finite."""
    if not math.isfinite(values["loss"]):
        raise make_divergence_error(f"the validation loss is {values['loss']} in epoch {epoch}")
    return dict(values)


def make_divergence_error(what: str) -> DivergedError:
    """The error for a non-finite figure named `what`."""
    return DivergedError(f"{what}: the training has diverged", "A lower learning rate may help.")
