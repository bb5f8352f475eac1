"""The interface of a communication strategy. A training loop calls it at four places and knows nothing else:

strategy.attach(world, model)             once, after the initial broadcast
loss.backward()
strategy.before_update(weight, total)     gradients are what the optimiser should see
optimizer.step()
strategy.after_update()                   parameters are what the next step should see
strategy.flush()                          before validation and at the end: the replicas are equal again
"""

from typing import Protocol

from torch import nn

from task_images.harness.distributed import World


class Strategy(Protocol):
    def attach(self, world: World, model: nn.Module) -> None:
        """Make buffers for `model`, whose parameters are equal on all ranks and stay the same objects."""
        ...

    def before_update(self, weight: float, total: float | None = None) -> None:
        """Between backward and the optimiser. `weight` is how much this rank's gradients count (the number of samples
        or tokens that they are the mean of), `total` the sum of all ranks' weights; None: not known here.

        With gradients that are sums instead of means: weight 1, and `total` the number of terms of all ranks.
        """
        ...

    def after_update(self) -> None:
        """After the optimiser."""
        ...

    def flush(self) -> None:
        """Finish what is under way, so that all ranks have the same model."""
        ...

    def stats(self) -> dict[str, float]:
        """What was sent by this rank since `attach`, for the result's details: updates, messages, bytes, ..."""
        ...
