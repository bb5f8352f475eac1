"""The self-check of a method before the clock starts, on a model of its own: nccl-tests' "#wrong" for training.

Dense methods are held to the exact sum of integer gradients, bit by bit. Lossy ones are held to conservation: what the
model got plus what the residuals keep is what all ranks put in. All of them to agreement of the ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from task_images.comm.base import Placement, Strategy
from task_images.comm.choose import make_strategy
from task_images.comm.methods import Method
from task_images.comm.reducer import Reducer
from task_images.harness.errors import DivergedError, WrongResultError

STEPS = 4
SHAPES = {"first": (48, 32), "second": (48,), "third": (7, 5, 3), "fourth": (1,), "last": (96, 40)}
TOLERANCE = 1e-4
HINT = "Do not trust results of this method here. Choose another one with --method, or report this."
LOSSY = ("sign", "topk", "randomk", "qsgd")


class MethodWrongError(WrongResultError):
    """The method does not compute what it should."""


class Probe(nn.Module):
    """A model whose gradients can be chosen: the loss is the sum of parameters times given numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Layer(shape) for name, shape in SHAPES.items()})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        """The loss (a scalar) whose gradients are `gradients`, by the layers' names."""
        return torch.stack([layer(gradients[name]) for name, layer in self.layers.items()]).sum()


class Layer(nn.Module):
    """One parameter of a given shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: Tensor) -> Tensor:
        """The sum of the parameter times `gradient`, of the same shape."""
        return (self.weight * gradient).sum()


def check_method(
    place: Placement, method: Method, prepare: Callable[[Strategy], None] | None = None
) -> dict[str, float]:
    """Run `STEPS` updates of `method` on `Probe`. Returns what was found: largest error, and steps.

    Collective. Raises MethodWrongError, on every rank, saying what is wrong. `prepare` gets the attached strategy
    before its first update, for tests that break it.
    """
    if place.size == 1 or method.transport == "noop":
        return {"steps": 0.0, "error": 0.0}
    world, device = place.world, place.world.device
    strategy = make_strategy(method)
    model = Probe().to(device)
    module = strategy.attach(place, model, lambda probe: torch.optim.SGD(probe.parameters(), 1.0))
    if prepare is not None:
        prepare(strategy)
    # Ranks count alike, and their sum is what arrives: of integers, so that every order of summing is exact.
    share = 1.0 if strategy.traits.gradients_agree else float(place.size)
    sums = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        strategy.begin(1.0, share)
        with strategy.last_pass():
            module(_gradients(place.rank, step, device)).backward()
        strategy.step(1.0)
        for rank in range(place.size):
            for name, gradient in _gradients(rank, step, device).items():
                sums[name] += gradient
    with strategy.consensus():
        try:
            strategy.check_replicas()
        except DivergedError as found:
            raise MethodWrongError(f"the self-check of the method {method.name} failed: {found}", HINT) from None
        error = _measure_error(place, strategy, method, model, sums)
    strategy.close()
    worst = world.max([error])[0]
    if not worst <= _tolerance(method):
        raise MethodWrongError(
            f"the self-check of the method {method.name} failed: after {STEPS} updates parameters differ by {worst:g} "
            f"from the sum of what {place.size} ranks put in",
            HINT,
        )
    return {"steps": float(STEPS), "error": worst}


def _tolerance(method: Method) -> float:
    return 0.0 if is_exact(method) else TOLERANCE


def is_exact(method: Method) -> bool:
    """Whether integers arrive as their exact sum, whatever the order of summing."""
    return method.codec in ("none", "fp16", "bf16") and method.transport != "gossip" and method.sync == "every"


def _measure_error(
    place: Placement, strategy: Strategy, method: Method, model: Probe, sums: dict[str, Tensor]
) -> float:
    """Greatest difference between what should have arrived and what did, relative to the greatest number for lossy
    methods; 0 for those that give no sum back (momentum correction, signs without feedback, random rounding)."""
    if method.momentum != "none" or (method.codec_name in LOSSY and method.feedback == "none"):
        return 0.0
    residuals = strategy._own_state()["residual"] if isinstance(strategy, Reducer) else {}
    greatest, error = 1.0, 0.0
    for name, layer in model.layers.items():
        weight = layer.get_parameter("weight").detach()
        arrived = -(weight.full_tensor() if isinstance(weight, DTensor) else weight)
        kept = residuals.get(f"layers.{name}.weight")
        if kept is not None:
            arrived = arrived + place.world.all_reduce(kept.to(arrived).clone()).view_as(arrived)
        expected = sums[name] / (1 if strategy.traits.gradients_agree else place.size)
        error = max(error, float((arrived - expected).abs().max()))
        greatest = max(greatest, float(expected.abs().max()))
    return error if is_exact(method) else error / greatest


def _gradients(rank: int, step: int, device: torch.device) -> dict[str, Tensor]:
    """Small integers, different for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randint(-4, 5, shape, generator=generator).float().to(device) for name, shape in SHAPES.items()}
