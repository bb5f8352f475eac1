"""One update of the model from many passes: how many of what size, and the exact mean of their gradients."""

import contextlib
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor

from task_images.comm.base import Strategy
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
        strategy: Strategy,
        tracker: Tracker,
        precision: Precision,
        clip: float | None = None,
    ) -> None:
        self._strategy = strategy
        self._tracker = tracker
        self._precision = precision
        self._clip = math.inf if clip is None else clip
        self.skipped = 0  # updates left out because of fp16 overflow

    def begin(self, terms: float, passes: int) -> None:
        """Before the first of `passes` passes; `terms` is what the gradients' sum over ranks is divided by."""
        self._strategy.begin(1.0, terms, passes)

    def in_pass(self, last: bool) -> AbstractContextManager[object]:
        """The context of one pass, forward and backward."""
        return self._strategy.last_pass() if last else contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, a sum over terms."""
        with self._tracker.section("backward"):
            (loss * self._precision.factor).backward()  # type: ignore[no-untyped-call]

    def apply(self, rate: float) -> bool:
        """Update the model at learning rate `rate`. False if fp16 overflowed and the model stayed as it was. Raises
        DivergedError where that has no remedy."""
        applied = self._strategy.step(rate, self._clip, self._precision.scale)
        if not applied.updated and self._precision.scale is None:
            raise DivergedError(
                f"the norm of the gradient is {applied.norm}: the training has diverged",
                "A lower learning rate may help.",
            )
        self.skipped += not applied.updated
        return applied.updated


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Number of scalars in `parameters`; those on the meta device count too."""
    return sum(parameter.numel() for parameter in parameters)
