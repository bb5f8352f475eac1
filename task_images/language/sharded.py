"""Updates of sharded models, as a method.

FSDP2 and tensor parallelism exchange gradients within the backward pass. This method does the rest: the mean, the
norm over all shards, and the optimizer.
"""

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from task_images.clock import Tracker
from task_images.language.layout import Layout
from task_images.language.parallel import clip_gradients, set_last_pass
from task_images.methods.base import MakeOptimizer, Method, MethodState, NormWatch, set_rate
from task_images.precision import LossScale
from task_images.world import World


class ShardedUpdate(Method):
    """The method for a model that `parallel.spread` has distributed over the ranks of `layout`.

    Gradients are means over the data-parallel ranks; `begin` gives the wanted divisor.
    """

    mixed = ("forward", "backward")
    wraps = True

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def attach(
        self,
        world: World,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        tracker: Tracker | None = None,
    ) -> nn.Module:
        """Create the optimizer; all ranks already have their parts of the same initial values."""
        self.world, self.model, self._tracker = world, model, tracker
        if tracker is not None and world.size > 1:
            tracker.mix(self.mixed)
        self.update = self._updates = 0
        self.share = 1.0
        self._norms = NormWatch(world.device)
        self.optimizer = make_optimizer(model)
        return model

    def check_replicas(self) -> None:
        """Does nothing: shards are not replicated."""

    def stats(self) -> dict[str, float]:
        """torch counts no messages."""
        return {"updates": float(self._updates)}

    def method_state(self) -> MethodState:
        """Nothing: all is in the shards."""
        return {}

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update of `passes` passes; only the last one exchanges gradients."""
        super().begin(weight, total, passes, scale)
        set_last_pass(self.model, passes == 1)

    def last_pass(self) -> AbstractContextManager[object]:
        """A context for the last pass, in which gradients are exchanged."""
        return self._exchange_gradients()

    @contextlib.contextmanager
    def _exchange_gradients(self) -> Iterator[None]:
        set_last_pass(self.model, True)
        yield

    def step(self, rate: float, clip: float | None = None) -> bool:
        """Clip by the norm over all shards of all ranks, and update. There is no loss scale, because fp16 is not
        supported."""
        with self.section("optimizer"):
            parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            factor = self.share * self._layout.data
            torch._foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], factor)
            is_finite = self._norms.add(clip_gradients(parameters, math.inf if clip is None else clip))
            if is_finite:
                set_rate(self.optimizer, rate)
                self.optimizer.step()
            self.optimizer.zero_grad()
        self._updates += 1
        return is_finite
