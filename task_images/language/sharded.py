"""Updates of sharded models, as a method.

FSDP2 and tensor parallelism exchange gradients within the backward pass, as in `methods.fsdp`. This method does the
rest: the mean, the norm over all shards, and the optimizer.
"""

import math

import torch
from torch import nn

from task_images.clock import Tracker
from task_images.language.layout import Layout
from task_images.language.parallel import clip_gradients
from task_images.methods.base import MakeOptimizer, NormWatch, set_rate
from task_images.methods.fsdp import Sharded
from task_images.world import World


class ShardedUpdate(Sharded):
    """The method for a model that `parallel.spread` has distributed over the ranks of `layout`.

    Gradients are means over the data-parallel ranks; `begin` gives the wanted divisor.
    """

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

    def step(self, rate: float, clip: float | None = None) -> bool:
        """Clip by the norm over all shards of all ranks, and update. There is no loss scale, because fp16 is not
        supported."""
        self.enter("optimizer")
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
