"""The interface of a communication strategy: it owns what updates the model, and a training loop drives it like this.

model = strategy.attach(Placement(world), model, make_optimizer, tracker=tracker)    # broadcast, optimiser, hooks
for each update:
    strategy.begin(weight, total, passes, scale)        # before the first forward pass
    for each pass but the last:  forward; loss.backward()
    with strategy.last_pass():   forward; loss.backward()
    strategy.step(rate, clip)             # wait for what is due, unscale, clip, update, clear the gradients
with strategy.consensus():                       # validation, checkpoints: all ranks have the same model
    ...
strategy.close()
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from task_images.harness.distributed import World
from task_images.harness.precision import LossScale
from task_images.harness.replicas import broadcast_state, check_identical
from task_images.harness.tracker import Tracker

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


@dataclass(frozen=True)
class Placement:
    """Who takes part. `world` holds the trainers only: its rank and size are what data, rates and batches count by.

    servers   global ranks of the parameter servers, which come after the trainers
    """

    world: World
    servers: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """This trainer among the trainers."""
        return self.world.rank

    @property
    def size(self) -> int:
        """How many trainers there are."""
        return self.world.size


@dataclass(frozen=True)
class Traits:
    """What a training loop may rely on.

    identical         all ranks have the same model after every update; otherwise only within `consensus`
    gradients_agree   all ranks update with the same gradients, so that they agree on overflow without asking
    barrier           `step` returns when the whole model is updated, so that gradients can be clipped by their norm
    servers           number of parameter servers that it needs
    """

    identical: bool = True
    gradients_agree: bool = True
    barrier: bool = True
    servers: int = 0


LOOK_EVERY = 50


class NormWatch:
    """Whether the norms of gradients have been finite. The host need not wait for the device in every update: on a GPU
    it looks every LOOK_EVERY of them."""

    def __init__(self, device: torch.device) -> None:
        self._every = LOOK_EVERY if device.type == "cuda" else 1
        self._sum: Tensor | None = None  # one that is not finite stays in a sum
        self._count = 0

    def add(self, norm: Tensor) -> bool:
        """Take the norm of an update; False if this one, or one since the last look, is known not to be finite."""
        self._sum = norm if self._sum is None else self._sum + norm
        self._count += 1
        return self._count < self._every or self.look()

    def look(self) -> bool:
        """Whether all norms since the last look are finite. Waits for the device."""
        found = self._sum is None or math.isfinite(float(self._sum))
        self._sum, self._count = None, 0
        return found


class Profile(NamedTuple):
    """What a plan is made from: seconds of the backward pass by parameter name, in the order in which gradients become
    ready, and the cost of a message, alpha + beta x bytes, in seconds."""

    backward_seconds: Mapping[str, float]
    alpha: float
    beta: float


class MethodState(TypedDict, total=False):
    """What methods keep besides model and optimiser.

    update       updates made, which random choices depend on
    ranks        by rank, what only that one has: residuals, momenta, factors, weights, ... by parameter name. A rank
                 gives its own, and None for the others: 64 ranks with residuals of 0.5 GB need not send them to one
    count        updates of a method that changes after some; optimizers: by rank, its optimizer's state, likewise
    """

    update: int
    ranks: list[Any]
    count: int
    optimizers: list[Any]


class StrategyState(TypedDict):
    """What a checkpoint holds of a strategy. `method`: residuals and the like, by parameter name."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    method: MethodState


def keep_own(world: World, own: object) -> list[Any]:
    """Only this rank's `own`, in its place among all ranks'. No message."""
    return [own if rank == world.rank else None for rank in range(world.size)]


def has_own_parts(state: MethodState) -> bool:
    """Whether ranks have something of their own in what a method keeps."""
    return bool(state.get("ranks") or state.get("optimizers"))


def join_method_states(read: Callable[[int], MethodState], count: int, rank: int, size: int) -> MethodState:
    """What rank `rank` of `size` goes on from, of the states that `count` ranks have kept, which `read` gives by rank:
    its own if there are as many ranks as then, else those of all."""
    if count == size:
        return read(rank)
    states = [read(number) for number in range(count)]
    found: MethodState = {**states[0]} if states else {}
    for key in ("ranks", "optimizers"):
        if found.get(key):
            found[key] = [state[key][number] for number, state in enumerate(states)]
    return found


class Strategy:
    """Base of all strategies: one model per rank, updated by an optimiser after the gradients have travelled.

    Subclasses override the steps that begin with an underscore. The gradient of a rank counts `weight` of `total`.
    """

    traits = Traits()
    _clear_to_none = False
    keeps_gradients = False  # gradients stay the same tensors from update to update, as CUDA graphs need them
    optimizer: torch.optim.Optimizer
    model: nn.Module  # as given to `attach`, without any wrapper
    place: Placement
    on_mean: Callable[[list[Tensor]], None] | None = None  # called in `step` with the gradients after the exchange
    checked: Mapping[str, Any] = MappingProxyType({})  # what its self-check has compared, for the result

    def attach(
        self,
        place: Placement,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        profile: Profile | None = None,
        tracker: Tracker | None = None,
    ) -> nn.Module:
        """Take over `model`, on its device: give every rank rank 0's parameters and buffers, make the optimiser, set
        up buffers and hooks. Return the module to train, which may be a wrapper around `model`.

        Collective. Times are booked in `tracker` as communication and optimizer.
        """
        self.place, self.model, self.profile, self._tracker = place, model, profile, tracker
        self._weight = self._total = 1.0
        self._scale: LossScale | None = None
        self._divisor = 1.0
        self._norms = NormWatch(place.world.device)
        self._stats = {"updates": 0.0, "messages": 0.0, "bytes": 0.0}
        broadcast_state(place.world, model)
        wrapped = self._prepare(model)
        self.optimizer = make_optimizer(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._connect()
        return wrapped

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Before the first forward pass of an update of `passes` passes.

        `weight` is how much this rank's gradients count (the number of samples that they are the mean of), `total` the
        sum of all ranks' weights. With gradients that are sums: weight 1, and `total` the number of all ranks' terms.
        `scale` is the factor on the losses, which is divided out; an overflow skips the update and lowers it.
        """
        self._weight, self._total, self._scale = weight, total, scale
        self._divisor = 1.0 if scale is None else scale.value

    def last_pass(self) -> AbstractContextManager[object]:
        """The context of forward and backward of an update's last pass: gradients may travel while it runs."""
        return contextlib.nullcontext()

    def step(self, rate: float, clip: float | None = None) -> bool:
        """Finish the update at learning rate `rate`. False if gradients were not finite: then the model stayed as it
        was, or has diverged in one of the last updates (without a scale, on a GPU; see `is_finite`).

        clip    greatest norm of the gradients; infinity: only measure it
        """
        is_alone = self.place.size == 1
        with NOTHING if is_alone else self._section("communication"):
            self._reduce()
        if self.on_mean is not None:
            with self._section("metrics"):
                self.on_mean(self._gradients())
        with self._section("optimizer"):
            updated = self._apply(rate, clip)
        with NOTHING if is_alone else self._section("communication"):
            self._exchange(updated, rate)
        self._stats["updates"] += 1
        return updated

    def is_finite(self) -> bool:
        """Whether the gradients of all updates so far were finite, as far as their norm was measured. Waits for the
        device."""
        return self._norms.look()

    def consensus(self) -> AbstractContextManager[object]:
        """The context of validation and checkpoints: nothing is under way, and all ranks have the same model."""
        return contextlib.nullcontext()

    @property
    def keeps_optimizer_state(self) -> bool:
        """Whether `optimizer` has the whole state on every rank. If not, it is in `method_state`."""
        return True

    def check_replicas(self) -> float | None:
        """Within `consensus`, after training: raise DivergedError if models that must be equal are not. Returns the
        distance that drifting replicas had, relative to their norm; None if they do not drift. Collective."""
        check_identical(self.place.world, self.model)
        return None

    def state_dict(self) -> StrategyState:
        """What training needs to go on. Collective, within `consensus`; of rank 0's the model and the optimizer are to
        be kept, and of every rank's the rest."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "method": self.method_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, which every rank has read."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_method_state(state.get("method") or MethodState())

    def method_state(self) -> MethodState:
        """The part of `state_dict` besides model and optimizer: this rank's residuals, momenta and the like, by
        parameter name. Empty if there is none. Every rank writes its own."""
        return {}

    def load_method_state(self, state: MethodState) -> None:
        """Go on from what `method_state` gave, after model and optimiser were loaded. Collective."""

    def stats(self) -> dict[str, float]:
        """What this rank sent since `attach`, for the result's details: updates, messages, bytes, ..."""
        return dict(self._stats)

    def bucket_bytes(self) -> list[int]:
        """Bytes of gradients in each message of a step, in the order in which they leave; empty: not known."""
        return []

    def close(self) -> None:
        """End threads and leave servers. Only after success."""

    def _prepare(self, model: nn.Module) -> nn.Module:
        """Wrap or change the model before its optimiser is made."""
        return model

    def _connect(self) -> None:
        """Make buffers and hooks. The optimiser exists."""

    def _reduce(self) -> None:
        """Make the gradients the weighted mean of all ranks' gradients."""

    def _exchange(self, updated: bool, rate: float) -> None:
        """After the optimizer: make the parameters what the next update should see. `updated`: the gradients were
        finite, and the optimizer has made its step at learning rate `rate`."""

    def _apply(self, rate: float, clip: float | None) -> bool:
        gradients, scale = self._gradients(), self._scale
        if self._divisor != 1:
            torch._foreach_mul_(gradients, 1 / self._divisor)
        finite = True
        if clip is not None or scale is not None:
            norm = nn.utils.get_total_norm(gradients)
            if clip is not None and math.isfinite(clip):
                nn.utils.clip_grads_with_norm_(self._parameters, clip, norm)
            if scale is not None or not self.traits.gradients_agree:
                finite = self._agree(math.isfinite(float(norm)))
            else:
                finite = self._norms.add(norm)
        if scale is not None:
            scale.observe(finite)
        if finite:
            self._step(rate)
        # A single rank sends nothing, so its gradients are no views. Dropping them saves zeroing them, and adding the
        # next ones to zeros.
        if self._clear_to_none or (self.place.size == 1 and not self.keeps_gradients):
            self.optimizer.zero_grad()
        elif gradients:  # in place: they may be views of the buffers that are sent
            torch._foreach_zero_(gradients)
        return finite

    def _step(self, rate: float) -> None:
        """Update the weights by their gradients."""
        set_rate(self.optimizer, rate)
        self.optimizer.step()

    def _agree(self, finite: bool) -> bool:
        """Whether the update is made: if the gradients of all ranks are finite. `finite`: this rank's are."""
        if self.traits.gradients_agree:
            return finite
        return self.place.world.max([0.0 if finite else 1.0])[0] == 0

    def _scale_alone(self) -> None:
        """What is left of the weighted mean on a single rank."""
        if self._total == self._weight:
            return
        if gradients := self._gradients():  # none if this rank had no pass and no update before
            torch._foreach_mul_(gradients, self._weight / self._total)

    def _gradients(self) -> list[Tensor]:
        """Gradients that are not None."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _count(self, tensor: Tensor) -> None:
        """Book one message."""
        self._stats["messages"] += 1
        self._stats["bytes"] += tensor.numel() * tensor.element_size()

    def _section(self, name: str) -> AbstractContextManager[object]:
        return NOTHING if self._tracker is None else self._tracker.section(name)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups; `rate_factor` is what a group has it multiplied by."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)
