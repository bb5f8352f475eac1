"""Updates of models whose parameters are shards: what `comm.base.Strategy` is for models that every rank has whole.

FSDP2 and tensor parallelism exchange gradients themselves, within the backward pass. What is left is the mean, the norm
over all shards, and the optimizer.
"""

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from task_images.comm.base import MakeOptimizer, NormWatch, Placement, Profile, Strategy, set_rate
from task_images.harness.language.layout import Layout
from task_images.harness.language.parallel import clip_gradients, set_last_pass
from task_images.harness.precision import LossScale
from task_images.harness.tracker import Tracker


class ShardedUpdate(Strategy):
    """The strategy interface for a model that `parallel.spread` has spread over the ranks of `layout`.

    Gradients are the mean over the data-parallel ranks by now; `begin` says what they should be divided by instead.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def attach(
        self,
        place: Placement,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        profile: Profile | None = None,
        tracker: Tracker | None = None,
    ) -> nn.Module:
        """Make the optimizer; all ranks have their parts of the same initial values already."""
        self.place, self.model, self.profile, self._tracker = place, model, profile, tracker
        self._weight = self._total = 1.0
        self._norms = NormWatch(place.world.device)
        self._stats = {"updates": 0.0}
        self.optimizer = make_optimizer(model)
        return model

    def check_replicas(self) -> None:
        """Shards have no replicas to compare them with."""

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update of `passes` passes; only the last one exchanges gradients."""
        super().begin(weight, total, passes, scale)
        set_last_pass(self.model, passes == 1)

    def last_pass(self) -> AbstractContextManager[object]:
        """The block of the last backward pass, in which gradients are exchanged."""
        return self._exchange_gradients()

    @contextlib.contextmanager
    def _exchange_gradients(self) -> Iterator[None]:
        set_last_pass(self.model, True)
        yield

    def step(self, rate: float, clip: float | None = None) -> bool:
        """Clip by the norm over all shards of all ranks, and update. There is no loss scale: fp16 is not offered."""
        with self._section("optimizer"):
            parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            factor = self._weight * self._layout.data / self._total
            torch._foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], factor)
            is_finite = self._norms.add(clip_gradients(parameters, math.inf if clip is None else clip))
            if is_finite:
                set_rate(self.optimizer, rate)
                self.optimizer.step()
            self.optimizer.zero_grad()
        self._stats["updates"] += 1
        return is_finite
