"""One update of the model from many passes: how many of what size, and the exact mean of their gradients."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from task_images.comm.base import Strategy
from task_images.harness.distributed import World
from task_images.harness.errors import DivergedError, TaskUsageError
from task_images.harness.precision import Precision
from task_images.harness.tracker import Tracker


class Passes(NamedTuple):
    """`number` forward and backward passes per update and rank, each on `size` samples (or tokens)."""

    number: int
    size: int


def plan_passes(global_batch: int, largest: int, ranks: int) -> Passes:
    """How each of `ranks` ranks gets through its part of `global_batch` with at most `largest` per pass.

    Raises TaskUsageError where that does not come out even.
    """
    number = max(1, -(-global_batch // (largest * ranks)))
    size, rest = divmod(global_batch, ranks * number)
    if rest or not size:
        even = max(1, round(global_batch / (ranks * number))) * ranks * number
        raise TaskUsageError(
            f"a global batch of {global_batch} cannot be shared evenly by {ranks} ranks with {number} passes each",
            f"Take another number of workers, or for instance --set global_batch={even}.",
        )
    return Passes(number, size)


class GradientUpdate:
    """Backward passes of losses that are *sums* over terms (samples, tokens), then one update with their exact mean.

    The mean is over the terms of all passes of all ranks, however unevenly they are spread; a rank may have none.
    The gradient's norm is clipped to `clip` after that, so that it does not depend on the number of ranks.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        tracker: Tracker,
        precision: Precision,
        clip: float | None = None,
    ) -> None:
        self._world = world
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._strategy = strategy
        self._tracker = tracker
        self._precision = precision
        self._clip = math.inf if clip is None else clip
        self.skipped = 0  # updates left out because of fp16 overflow
        strategy.attach(world, model)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, a sum over terms."""
        with self._tracker.section("backward"):
            (loss * self._precision.factor).backward()  # type: ignore[no-untyped-call]

    def apply(self, rate: float, terms: float) -> bool:
        """Update the model at learning rate `rate`; `terms` is what the gradients are divided by, after their sum over
        ranks. False if fp16 overflowed and the model stayed as it was. Raises DivergedError where that has no remedy.
        """
        with self._tracker.section("communication"):
            self._strategy.before_update(1.0, terms * self._precision.factor)
        with self._tracker.section("optimizer"):
            norm = float(nn.utils.clip_grad_norm_(self._parameters, self._clip))
            finite = math.isfinite(norm)
            if self._precision.scale:
                self._precision.scale.observe(finite)
            elif not finite:
                raise DivergedError(
                    f"the norm of the gradient is {norm}: the training has diverged", "A lower learning rate may help."
                )
            if finite:
                set_rate(self._optimizer, rate)
                self._optimizer.step()
            else:
                self.skipped += 1
            # In place: the strategy's buffers are the gradients' memory.
            self._optimizer.zero_grad(set_to_none=False)
        with self._tracker.section("communication"):
            self._strategy.after_update()
        return finite

    def sum_terms(self, terms: float) -> float:
        """The number of terms of all ranks. One small collective."""
        with self._tracker.section("communication"):
            return self._world.sum([terms])[0]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Number of scalars in `parameters`; those on the meta device count too."""
    return sum(parameter.numel() for parameter in parameters)
