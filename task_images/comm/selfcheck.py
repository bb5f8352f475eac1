"""The self-check of a method, on a small model before the clock starts: like nccl-tests' "#wrong", but for training.

Two trainings. The first sums integer gradients by plain SGD: dense methods must produce the exact sum, bit by bit, and
lossy ones must conserve it, tensor by tensor (received sum + residuals = sum of what the ranks put in). The second
trains like tasks, by SGD with momentum and by AdamW, with weight decay, clipping and a loss scale that grows and
overflows: see `Training`. Phases of methods are shortened so that both trainings cover them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from task_images.comm.base import Strategy
from task_images.comm.choose import make_strategy
from task_images.comm.door import Invariant, read_options
from task_images.comm.methods import Method
from task_images.comm.presets import find_registered
from task_images.comm.reducer import MEASURED_UPDATES, SKIPPED_UPDATES, Reducer, needs_profile
from task_images.harness.distributed import World
from task_images.harness.errors import DivergedError, WrongResultError
from task_images.harness.precision import LossScale

STEPS = 4
LATE = 2  # first update of late phases, and updates between two averages (shortened from the training's)
# Shape of each layer and magnitude of its gradients, powers of 2 so that sums are exact.
LAYERS = {
    "first": ((48, 32), 1.0),
    "second": ((48,), 2.0**-10),
    "third": ((7, 5, 3), 2.0**-5),
    "fourth": ((1,), 1.0),
    "last": ((96, 40), 0.25),
}
TOLERANCE = 1e-4
# Half precision rounds, and asynchronous workers apply each other's weight decay.
TRAINING_TOLERANCES = {"fp16": 1e-2, "bf16": 5e-2, "asynchronous": 0.1}
RATES = (0.02, 0.02, 0.02, 0.01, 0.01, 0.01)
OVERFLOW = 3  # update of the second training in which one gradient entry of the last rank is infinite
MOMENTUM, DECAY, CLIP = 0.9, 0.1, 8.0
HINT = "Do not trust results of this method here. Choose another one with --method, or report this."
LOSSY = ("sign", "topk", "randomk", "qsgd")


class MethodWrongError(WrongResultError):
    """The method computes a wrong result."""


@dataclass(frozen=True)
class Checked:
    """A description of what a self-check compared.

    sums        how the sum of integers was checked
    training    how a training with momentum, AdamW, decay, clipping and a loss scale was checked
    settings    the settings that it covered
    error       largest error of the sums: absolute for exact methods, relative for others
    shortened   axes whose values were lowered to cover late phases
    """

    sums: str
    training: str = "not compared"
    settings: tuple[str, ...] = ()
    updates: int = 0
    error: float = 0.0
    shortened: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For the result's details."""
        return {**asdict(self), "settings": list(self.settings)}

    def __str__(self) -> str:
        with_settings = f" ({', '.join(self.settings)})" if self.settings else ""
        shortened = f"; checked with {self.shortened}" if self.shortened else ""
        return f"sums: {self.sums}; training: {self.training}{with_settings}{shortened}"


class Probe(nn.Module):
    """A model with prescribed gradients: its loss is the sum of parameters times given numbers."""

    def __init__(self, seed: int | None = None) -> None:
        """Weights are zeros, or random with a `seed`."""
        super().__init__()
        drawn = _draw(seed) if seed is not None else {name: torch.zeros(shape) for name, (shape, _) in LAYERS.items()}
        self.layers = nn.ModuleDict({name: Layer(weight) for name, weight in drawn.items()})

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The scalar loss whose gradients are `gradients`, by layer name."""
        return torch.stack([layer(gradients[name]) for name, layer in self.layers.items()]).sum()

    def read(self) -> dict[str, Tensor]:
        """All weights, unsharded, by layer name."""
        found = {}
        for name, layer in self.layers.items():
            weight = layer.get_parameter("weight").detach()
            found[name] = (weight.full_tensor() if isinstance(weight, DTensor) else weight).clone()
        return found


class Layer(nn.Module):
    """One parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, gradient: Tensor) -> Tensor:
        """The sum of the parameter times `gradient`, of the same shape."""
        return (self.weight * gradient).sum()


def check_method(world: World, method: Method, prepare: Callable[[Strategy], None] | None = None) -> Checked:
    """Train `Probe` with `method`, and compare. Returns a description of what was compared.

    Collective. Raises MethodWrongError, on every rank, saying what is wrong. `prepare` is called with each attached
    strategy before its first update, so that tests can break it.
    """
    if world.size == 1 or method.transport == "noop":
        return Checked("no communication")
    short = shorten(method)
    steps = STEPS + (SKIPPED_UPDATES + MEASURED_UPDATES if needs_profile(method) else 0)
    error = _check_sums(world, short, steps, prepare)
    training = Training(world, short, prepare)
    training.check()
    different = {axis: value for axis, value in short.axes().items() if value != getattr(method, axis)}
    return Checked(
        _name_sums(short),
        training.goal,
        tuple(training.settings),
        steps + training.updates,
        error,
        ", ".join(f"{axis}={value}" for axis, value in different.items()),
    )


def shorten(method: Method) -> Method:
    """The method with all of its phases shortened to a few updates."""
    if method.sync.startswith("postlocal:"):
        return replace(method, sync=f"postlocal:{LATE},{LATE}")
    if method.sync.startswith("local:"):
        return replace(method, sync=f"local:{min(LATE, int(method.sync.partition(':')[2]))}")
    if method.warmup_updates:
        return replace(method, warmup=str(LATE))
    if method.engine == "registered":
        late = find_registered(method).late_options
        options = {
            name: min(value, LATE) if name in late else value for name, value in read_options(method.options).items()
        }
        return replace(method, options=",".join(f"{name}={value:g}" for name, value in options.items()) or "none")
    return method


def _check_sums(world: World, method: Method, steps: int, prepare: Callable[[Strategy], None] | None) -> float:
    """The largest error of the sums after `steps` updates with integers."""
    device = world.device
    strategy, model = make_strategy(method), Probe().to(device)
    module = strategy.attach(world, model, lambda probe: _optimizer_class(method)(probe.parameters(), 1.0))
    if prepare is not None:
        prepare(strategy)
    # Equal weights, so that the sum of integers arrives, which is exact in any order of summing.
    share = 1.0 if strategy.traits.gradients_agree else float(world.size)
    sums = {name: torch.zeros(shape, device=device) for name, (shape, _) in LAYERS.items()}
    for step in range(steps):
        strategy.begin(1.0, share)
        with strategy.last_pass():
            module(_integers(world.rank, step, device)).backward()
        strategy.step(1.0)
        for rank in range(world.size):
            for name, gradient in _integers(rank, step, device).items():
                sums[name] += gradient
    with strategy.consensus():
        _check_agreement(strategy, method)
        error = _measure_error(world, strategy, method, model, sums)
    strategy.close()
    worst = world.max([error])[0]
    if not worst <= (0.0 if is_exact(method) else TOLERANCE):
        raise MethodWrongError(
            f"the self-check of the method {method.name} failed: after {steps} updates, parameters differ by {worst:g} "
            f"from the sum of the gradients of {world.size} ranks",
            HINT,
        )
    return worst


def _check_agreement(strategy: Strategy, method: Method) -> None:
    try:
        strategy.check_replicas()
    except DivergedError as found:
        raise MethodWrongError(f"the self-check of the method {method.name} failed: {found}", HINT) from None


def _optimizer_class(method: Method) -> Callable[..., torch.optim.Optimizer]:
    """SGD, whose steps are sums that can be checked, unless the method needs another optimizer."""
    names = find_registered(method).optimizers if method.engine == "registered" else ()
    found: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, names[0] if names else "SGD")
    return found


def is_exact(method: Method) -> bool:
    """Whether integers arrive as their exact sum, whatever the order of summing."""
    if method.engine == "registered":
        return find_registered(method).invariant is Invariant.exact_sum
    if method.staleness != "sync":  # dividing by the number of workers rounds
        return False
    return method.codec in ("none", "fp16", "bf16") and method.transport != "gossip" and method.sync == "every"


def _is_free(method: Method) -> bool:
    """Whether the sum cannot be checked: momentum correction, signs without feedback, random rounding."""
    if method.engine == "registered":
        return find_registered(method).invariant is Invariant.none
    return method.momentum != "none" or (method.codec_name in LOSSY and method.feedback == "none")


def _name_sums(method: Method) -> str:
    """Describe what `_check_sums` compared."""
    if _is_free(method):
        return "not compared, only that ranks agree" if _is_identical(method) else "not compared"
    if is_exact(method):
        return "exact"
    if method.codec == "none":
        return "the mean equals that of all gradients"
    return "received values plus residuals equal the sum of all gradients"


def _is_identical(method: Method) -> bool:
    if method.engine == "registered":
        return find_registered(method).identical
    return method.transport != "gossip" and method.sync == "every" and method.staleness == "sync"


def _measure_error(world: World, strategy: Strategy, method: Method, model: Probe, sums: dict[str, Tensor]) -> float:
    """Largest difference between the expected and the received sum; for lossy methods, relative to the largest number
    of the tensor. 0 for methods whose sum cannot be checked."""
    if _is_free(method):
        return 0.0
    residuals = strategy._own_state()["residual"] if isinstance(strategy, Reducer) else {}
    error = 0.0
    for name, weight in model.read().items():
        arrived = -weight
        kept = residuals.get(f"layers.{name}.weight")
        if kept is not None:
            arrived = arrived + world.all_reduce(kept.to(arrived).clone()).view_as(arrived)
        expected = sums[name] / (1 if strategy.traits.gradients_agree else world.size)
        greatest = 1.0 if is_exact(method) else max(LAYERS[name][1], float(expected.abs().max()))
        error = max(error, float((arrived - expected).abs().max()) / greatest)
    return error


class Training:
    """Trains the probe like a task, and compares with torch's optimizers on one process where possible.

    If all ranks use the mean gradient, it is compared with the mean of different gradients. If ranks train
    independently, all get the same gradients, so averaging changes nothing. For lossy and custom methods, training with
    a growing loss scale and a final overflow must give the same weights and state as without.
    """

    def __init__(self, world: World, method: Method, prepare: Callable[[Strategy], None] | None = None) -> None:
        self._world, self._method, self._prepare = world, method, prepare
        self._has_barrier = method.barrier == "step"
        self._is_sum = is_exact(method)
        self._is_alone = method.engine != "registered" and not _is_identical(method)
        self.updates = 0
        self.settings = self._list_settings()
        self.goal = self._name_goal()

    def _list_settings(self) -> dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]]:
        """Constructors of optimizers by their description."""
        more = ", clip, loss scale" if self._has_barrier else ""
        # Methods with their own momentum disable the optimizer's.
        factor = 0.0 if self._method.momentum != "none" else MOMENTUM
        own = {
            f"SGD with momentum, decay{more}": lambda items: torch.optim.SGD(items, 1.0, factor, weight_decay=DECAY),
            f"AdamW with decay{more}": lambda items: torch.optim.AdamW(items, weight_decay=DECAY),
        }
        names = find_registered(self._method).optimizers if self._method.engine == "registered" else ()
        if self._method.momentum != "none":
            names = ("SGD",)
        return {text: make for text, make in own.items() if not names or text.split()[0] in names}

    def _name_goal(self) -> str:
        if not self.settings:
            return "not compared"
        if self._is_sum:
            return "as torch's optimizer with the mean gradient"
        if self._method.staleness != "sync":
            return "about as torch's optimizer alone, with the same gradients on all ranks"
        if self._is_alone:
            return "as torch's optimizer alone, with the same gradients on all ranks"
        return "the same weights and state with and without a growing loss scale, and after an overflow"

    def check(self) -> None:
        """Raise MethodWrongError, on every rank, if a training is not what it should be."""
        for text, make in self.settings.items():
            error = self._compare_with_torch(make) if self._is_sum or self._is_alone else self._compare_scales(make)
            worst = self._world.max([error])[0]
            kind = "asynchronous" if self._method.staleness != "sync" else self._method.codec
            if not worst <= TRAINING_TOLERANCES.get(kind, TOLERANCE):
                raise MethodWrongError(
                    f"the self-check of the method {self._method.name} failed: training by {text} must be "
                    f"{self.goal}, and differs by {100 * worst:.3g} % of its change",
                    HINT,
                )

    def _compare_with_torch(self, make: Callable[..., torch.optim.Optimizer]) -> float:
        scale = LossScale(2.0**6, window=2) if self._has_barrier else None
        overflow = OVERFLOW if scale else 0
        found, _ = self._train(make, scale, overflow)
        expected = self._train_alone(make, overflow)
        return _compare(found, expected, {name: weight.to(expected[name]) for name, weight in _draw(0).items()})

    def _compare_scales(self, make: Callable[..., torch.optim.Optimizer]) -> float:
        found, state = self._train(make, LossScale(2.0**6, window=2), len(RATES) + 1)
        expected, wanted = self._train(make, None, 0)
        start = {name: weight.to(expected[name]) for name, weight in _draw(0).items()}
        return max(_compare(found, expected, start), _compare_states(state, wanted))

    def _train(
        self, make: Callable[..., torch.optim.Optimizer], scale: LossScale | None, overflow: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and the method's state after the updates. An overflow after the last update is one more update."""
        world, device = self._world, self._world.device
        strategy, model = make_strategy(self._method), Probe(seed=0).to(device)
        module = strategy.attach(world, model, lambda probe: make(list(probe.parameters())))
        if self._prepare is not None:
            self._prepare(strategy)
        wrong = 0.0
        for update in range(1, max(len(RATES), overflow) + 1):
            self.updates += 1
            gradients = self._gradients(world.rank, update)
            # Ranks that train independently skip updates independently.
            if update == overflow and (world.rank == world.size - 1 or not _is_identical(self._method)):
                gradients["first"].view(-1)[5] = math.inf
            strategy.begin(1.0, float(world.size), scale=scale)
            with strategy.last_pass():
                (module(gradients) * (scale.value if scale else 1.0)).backward()
            made = strategy.step(_rate(update), CLIP if self._has_barrier else None)
            if made is (update == overflow):
                wrong = float(update)
        if found := world.max([wrong])[0]:
            problem = "overflow, and the update was made" if found == overflow else "are finite, and it was skipped"
            raise MethodWrongError(
                f"the self-check of the method {self._method.name} failed: gradients of update {found:.0f} {problem}",
                HINT,
            )
        state = _flatten(getattr(strategy, "_own_state", dict)()) if not (self._is_sum or self._is_alone) else {}
        with strategy.consensus():
            _check_agreement(strategy, self._method)
            weights = model.read()
        strategy.close()
        return weights, state

    def _train_alone(self, make: Callable[..., torch.optim.Optimizer], overflow: int) -> dict[str, Tensor]:
        """Train with torch's optimizer and the mean of all ranks' gradients."""
        model = Probe(seed=0).to(self._world.device)
        items = list(model.parameters())
        optimizer = make(items)
        for update in range(1, len(RATES) + 1):
            if update == overflow:
                continue
            ranks = [self._gradients(rank, update) for rank in range(self._world.size)]
            for name, layer in model.layers.items():
                layer.get_parameter("weight").grad = torch.stack([own[name] for own in ranks]).mean(0)
            if self._has_barrier:
                nn.utils.clip_grad_norm_(items, CLIP)
            for group in optimizer.param_groups:
                group["lr"] = _rate(update)
            optimizer.step()
        return model.read()

    def _gradients(self, rank: int, update: int) -> dict[str, Tensor]:
        """Gradients with a common part and, unless all ranks need the same ones, a part that differs between ranks."""
        device = self._world.device
        common, own = _draw(1000 + update), _draw(100_000 * (rank + 1) + update)
        factor = 0.0 if self._is_alone else 1.0
        return {name: (LAYERS[name][1] * (common[name] + factor * own[name])).to(device) for name in LAYERS}


def _rate(update: int) -> float:
    return RATES[min(update, len(RATES)) - 1]


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """The largest norm of a tensor's difference, relative to the norm of its change in training."""
    return max(
        _norm(found[name] - expected[name]) / max(_norm(expected[name] - start[name]), 1e-12) for name in expected
    )


def _compare_states(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest norm of a tensor's difference, relative to the tensor's norm."""
    if found.keys() != expected.keys():
        return math.inf
    return max((_norm(found[name] - expected[name]) / max(_norm(expected[name]), 1e-6) for name in expected), default=0)


def _flatten(state: Any, name: str = "") -> dict[str, Tensor]:
    """Copies of the tensors in a state, by path, without step counts."""
    if isinstance(state, Tensor):
        return {name: state.detach().float().clone()} if state.is_floating_point() and state.numel() > 1 else {}
    if not isinstance(state, Mapping):
        return {}
    return {key: part for word, inner in state.items() for key, part in _flatten(inner, f"{name}.{word}").items()}


def _norm(tensor: Tensor) -> float:
    """The norm; infinite if an element is NaN."""
    found = float(tensor.norm())
    return found if math.isfinite(found) else math.inf


def _draw(seed: int) -> dict[str, Tensor]:
    """Normally distributed numbers in the layers' shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in LAYERS.items()}


def _integers(rank: int, step: int, device: torch.device) -> dict[str, Tensor]:
    """Small integers times the layers' magnitudes, different for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: (magnitude * torch.randint(-4, 5, shape, generator=generator).float()).to(device)
        for name, (shape, magnitude) in LAYERS.items()
    }
