"""The self-check of a method, on a small model before the clock starts: like nccl-tests' "#wrong", but for training.

Integer gradients are summed by plain SGD: methods that are `exact` must produce their sum bit by bit, and those with
error feedback must conserve it (received sum + residuals = sum of what the ranks put in). Then the gradients of one
update overflow under a loss scale: it must be skipped on all ranks, and the next one made. All ranks must agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from task_images.contract import DivergedError, WrongResultError
from task_images.methods.base import LossScale, Method
from task_images.methods.catalog import read_method
from task_images.methods.compressed import Compressed

if TYPE_CHECKING:
    from task_images.world import World

STEPS = 4
LATE = 2  # of options that delay something by a number of updates
# Shape of each layer and magnitude of its gradients, powers of 2 so that sums are exact.
LAYERS = {
    "first": ((48, 32), 1.0),
    "second": ((48,), 2.0**-10),
    "third": ((7, 5, 3), 2.0**-5),
    "fourth": ((1,), 1.0),
    "last": ((96, 40), 0.25),
}
TOLERANCE = 1e-4
HINT = "Do not trust results of this method here. Choose another one with --method, or report this."


@dataclass(frozen=True)
class Checked:
    """What a self-check compared.

    sums       how the sum of integers was checked; error: its largest error, relative if values are only conserved
    overflow   whether an update with infinite gradients was skipped
    shortened  options that were lowered so that late phases are covered
    """

    sums: str
    overflow: bool = False
    updates: int = 0
    error: float = 0.0
    shortened: str = ""

    def __str__(self) -> str:
        overflow = ", an overflow is skipped" if self.overflow else ""
        return f"sums: {self.sums}{overflow}" + (f"; checked with {self.shortened}" if self.shortened else "")


class Probe(nn.Module):
    """A model with prescribed gradients: its loss is the sum of parameters times given numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Layer(shape) for name, (shape, _) in LAYERS.items()})

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The scalar loss whose gradients are `gradients`, by layer name."""
        return torch.stack([layer(gradients[name]) for name, layer in self.layers.items()]).sum()

    def read(self) -> dict[str, Tensor]:
        """All weights, unsharded, by layer name."""
        weights = {name: layer.get_parameter("weight").detach() for name, layer in self.layers.items()}
        return {name: (one.full_tensor() if isinstance(one, DTensor) else one).clone() for name, one in weights.items()}


class Layer(nn.Module):
    """One parameter."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: Tensor) -> Tensor:
        """The sum of the parameter times `gradient`, of the same shape."""
        return (self.weight * gradient).sum()


def read_checked(world: World) -> Method:
    """The run's method after its self-check. Collective.

    The check starts after all ranks have loaded their data, because its collectives have a shorter timeout. Raises
    TaskUsageError for an invalid method, and WrongResultError for one that computes a wrong result.
    """
    method = read_method(world.contract)
    world.await_loading()
    begin = time.perf_counter()
    found = check_method(world, method)
    if world.is_first:
        seconds = time.perf_counter() - begin
        print(f"method: {method.name}; its self-check passed in {seconds:.2f} s: {found}", flush=True)
    method.checked = asdict(found)
    return method


def check_method(world: World, method: Method, prepare: Callable[[Method], None] | None = None) -> Checked:
    """Train `Probe` with a copy of `method`, and compare. Collective.

    Raises WrongResultError, on every rank, saying what is wrong. `prepare` is called with the attached copy before its
    first update, so that tests can break it.
    """
    if world.size == 1 or method.collective == "none":
        return Checked("no communication")
    late = {name: str(min(method.values[name], LATE)) for name in method.late_options}
    shortened = ", ".join(f"{name}={text}" for name, text in late.items() if text != method.given[name])
    short, model = type(method)(**{**method.given, **late}), Probe().to(world.device)
    make: Any = getattr(torch.optim, short.optimizers[0] if short.optimizers else "SGD")
    module = short.attach(world, model, lambda probe: make(probe.parameters(), 1.0))
    if prepare is not None:
        prepare(short)
    steps = STEPS + short.settling
    sums = {name: torch.zeros(shape, device=world.device) for name, (shape, _) in LAYERS.items()}
    # Equal weights, so that the sum of integers arrives, which is exact in any order of summing.
    total = 1.0 if short.identical else float(world.size)
    for step in range(steps):
        _update(short, module, _integers(world.rank, step, world.device), total)
        for rank in range(world.size):
            for name, gradient in _integers(rank, step, world.device).items():
                sums[name] += gradient
    with short.consensus():
        _check_agreement(short)
        how, error = _compare(short, model, sums)
        before = model.read()
    worst = world.max([error])[0]
    if not worst <= (0.0 if short.exact else TOLERANCE):
        raise WrongResultError(
            f"the self-check of the method {short.name} failed: after {steps} updates, parameters differ by {worst:g} "
            f"from the sum of the gradients of {world.size} ranks",
            HINT,
        )
    if not short.gates:
        _check_overflow(short, module, model, before, steps, total)
    short.close()
    return Checked(how, not short.gates, steps + 2 * (not short.gates), worst, shortened)


def _update(
    method: Method, module: nn.Module, gradients: dict[str, Tensor], total: float, scale: LossScale | None = None
) -> bool:
    method.begin(1.0, total, scale=scale)
    (module(gradients) * (scale.value if scale else 1.0)).backward()
    return method.step(1.0)


def _compare(method: Method, model: Probe, sums: Mapping[str, Tensor]) -> tuple[str, float]:
    """What is compared, and the largest difference between the expected and the received sum."""
    # The velocities of dgc are not conserved.
    feeds_back = isinstance(method, Compressed) and method.feeds_back and "velocity" not in method.state
    if not (method.exact or feeds_back):
        return "not compared, only that ranks agree" if method.identical else "not compared", 0.0
    error = 0.0
    for name, weight in model.read().items():
        arrived, scale = -weight, 1.0
        if isinstance(method, Compressed) and feeds_back:
            kept = method.state["residual"][f"layers.{name}.weight"]
            arrived = arrived + method.world.all_reduce(kept.clone()).view_as(arrived)
            scale = max(float(sums[name].abs().max()), 1e-30)
        error = max(error, _or_infinity(float((arrived - sums[name]).abs().max()) / scale))
    return "received values plus residuals equal the sum of all gradients" if feeds_back else "exact", error


def _check_overflow(
    method: Method, module: nn.Module, model: Probe, before: Mapping[str, Tensor], steps: int, total: float
) -> None:
    world, scale = method.world, LossScale(2.0**6)
    gradients = _integers(world.rank, steps, world.device)
    # Ranks that train independently skip updates independently.
    if world.rank == world.size - 1 or not method.identical:
        gradients["first"].view(-1)[5] = math.inf
    was_made = _update(method, module, gradients, total, scale)
    with method.consensus():
        is_changed = method.identical and any(not torch.equal(one, before[name]) for name, one in model.read().items())
    makes_next = _update(method, module, _integers(world.rank, steps + 1, world.device), total, scale)
    with method.consensus():
        is_finite = all(bool(weight.isfinite().all()) for weight in model.read().values())
        _check_agreement(method)
    if world.max([float(was_made or is_changed or not makes_next or not is_finite)])[0]:
        raise WrongResultError(
            f"the self-check of the method {method.name} failed: an update whose gradients overflow must be skipped, "
            "and the next one made",
            HINT,
        )


def _check_agreement(method: Method) -> None:
    try:
        method.check_replicas()
    except DivergedError as found:
        raise WrongResultError(f"the self-check of the method {method.name} failed: {found}", HINT) from None


def _or_infinity(number: float) -> float:
    return number if math.isfinite(number) else math.inf


def _integers(rank: int, step: int, device: torch.device) -> dict[str, Tensor]:
    """Small integers times the layers' magnitudes, different for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: (magnitude * torch.randint(-4, 5, shape, generator=generator).float()).to(device)
        for name, (shape, magnitude) in LAYERS.items()
    }
