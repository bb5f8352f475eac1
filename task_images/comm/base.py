"""The interface of communication strategies, which own gradient exchange and optimizer. A training loop uses it like
this:

model = strategy.attach(world, model, make_optimizer, tracker)    # broadcast, optimizer, hooks for
                                                                                     each update:
    strategy.begin(weight, total, passes, scale)        # before the first forward pass
    for each pass but the last:  forward; loss.backward()
    with strategy.last_pass():   forward; loss.backward()
    strategy.step(rate, clip)             # wait for messages, unscale, clip, update, clear the gradients
with strategy.consensus():                       # validation, checkpoints: all ranks have the same model
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from task_images.harness.distributed import World
from task_images.harness.precision import LossScale
from task_images.harness.replicas import broadcast_state, check_identical
from task_images.harness.tracker import Tracker

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


@dataclass(frozen=True)
class Traits:
    """Guarantees of a strategy that a training loop may rely on.

    identical         all ranks have the same model after every update; otherwise only within `consensus`
    gradients_agree   all ranks update with the same gradients, so they detect an overflow without communicating
    barrier           `step` returns after the whole model is updated, so gradients can be clipped by their norm
    mixed             phases in which messages are sent, so that their time cannot be told from computing
    """

    identical: bool = True
    gradients_agree: bool = True
    barrier: bool = True
    mixed: tuple[str, ...] = ()


LOOK_EVERY = 50


class NormWatch:
    """Checks that the norms of gradients are finite. On a GPU only every LOOK_EVERY updates, because each check makes
    the host wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._every = LOOK_EVERY if device.type == "cuda" else 1
        self._sum: Tensor | None = None  # a sum stays non-finite after one non-finite term
        self._count = 0

    def add(self, norm: Tensor) -> bool:
        """Add the norm of an update. False if this norm, or one since the last check, is known to be non-finite."""
        self._sum = norm if self._sum is None else self._sum + norm
        self._count += 1
        return self._count < self._every or self.look()

    def look(self) -> bool:
        """Whether all norms since the last check are finite. Waits for the device."""
        found = self._sum is None or math.isfinite(float(self._sum))
        self._sum, self._count = None, 0
        return found


class MethodState(TypedDict, total=False):
    """State of a method besides model and optimizer.

    update       number of updates so far, which seeds random choices
    ranks        per-rank state (residuals, momenta, factors, weights, ... by parameter name). Each rank fills in its
                 own entry and None for the others, so that 64 ranks with residuals of 0.5 GB do not send them to one
    count        updates so far, if the method has phases; optimizers: per-rank state of the optimizer, likewise
    """

    update: int
    ranks: list[Any]
    count: int
    optimizers: list[Any]


class StrategyState(TypedDict):
    """A strategy's part of a checkpoint. `method`: residuals and the like, by parameter name."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    method: MethodState


def keep_own(world: World, own: object) -> list[Any]:
    """A list with one entry per rank: this rank's `own`, None for the others. Sends nothing."""
    return [own if rank == world.rank else None for rank in range(world.size)]


def has_own_parts(state: MethodState) -> bool:
    """Whether the state has per-rank parts."""
    return bool(state.get("ranks") or state.get("optimizers"))


def join_method_states(read: Callable[[int], MethodState], count: int, rank: int, size: int) -> MethodState:
    """The state with which rank `rank` of `size` resumes a training of `count` ranks. `read` returns the state saved by
    a rank: only its own is read if the number of ranks is unchanged, else all if they have parts of their own."""
    if count == size:
        return read(rank)
    if not count:
        return {}
    found: MethodState = {**read(0)}
    states = [found, *(read(number) for number in range(1, count))] if has_own_parts(found) else []
    for key in ("ranks", "optimizers"):
        if found.get(key):
            found[key] = [state[key][number] for number, state in enumerate(states)]
    return found


class Strategy:
    """Base of all strategies: one model per rank, updated by an optimizer after gradients are exchanged.

    Subclasses override the methods that begin with an underscore. A rank's gradient has the weight `weight` / `total`.
    """

    traits = Traits()
    _clear_to_none = False
    keeps_gradients = False  # gradients keep their storage across updates, as CUDA graphs require
    optimizer: torch.optim.Optimizer
    model: nn.Module  # as given to `attach`, without any wrapper
    world: World  # the trainers: parameter servers are not among them
    on_mean: Callable[[list[Tensor]], None] | None = None  # called in `step` with the gradients after the exchange
    checked: Mapping[str, Any] = MappingProxyType({})  # comparisons of the self-check, for the result

    def attach(
        self,
        world: World,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        tracker: Tracker | None = None,
    ) -> nn.Module:
        """Take over `model`, on its device: broadcast rank 0's parameters and buffers, make the optimizer, set up
        buffers and hooks. Returns the module to train, which may be a wrapper around `model`.

        Collective. `tracker` records times as communication and optimizer.
        """
        self.world, self.model, self._tracker = world, model, tracker
        if tracker is not None and world.size > 1:
            tracker.mix(self.traits.mixed)
        self._weight = self._total = 1.0
        self._scale: LossScale | None = None
        self._divisor = 1.0
        self._norms = NormWatch(world.device)
        self._stats = {"updates": 0.0, "messages": 0.0, "bytes": 0.0}
        broadcast_state(world, model)
        wrapped = self._prepare(model)
        self.optimizer = make_optimizer(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._connect()
        return wrapped

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Call before the first forward pass of an update that has `passes` passes.

        `weight` is the weight of this rank's gradients (the number of samples that they average), `total` the sum of
        all ranks' weights. If gradients are sums: weight 1, and `total` the number of terms of all ranks. `scale` is
        the loss scale, which is divided out; an overflow skips the update and lowers the scale.
        """
        self._weight, self._total, self._scale = weight, total, scale
        self._divisor = 1.0 if scale is None else scale.value

    def last_pass(self) -> AbstractContextManager[object]:
        """A context for forward and backward of an update's last pass: gradients may be sent while it runs."""
        return contextlib.nullcontext()

    def step(self, rate: float, clip: float | None = None) -> bool:
        """Finish the update at learning rate `rate`. False if gradients were not finite: the model is unchanged, or, on
        a GPU without a loss scale, has diverged in one of the last updates (see `is_finite`).

        clip    largest norm of the gradients; infinity: only measure it
        """
        is_alone = self.world.size == 1
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
        """Whether all norms of gradients measured so far were finite. Waits for the device."""
        return self._norms.look()

    def consensus(self) -> AbstractContextManager[object]:
        """A context for validation and checkpoints: no messages are in flight, and all ranks have the same model."""
        return contextlib.nullcontext()

    @property
    def keeps_optimizer_state(self) -> bool:
        """Whether `optimizer` has the full state on every rank. If not, it is in `method_state`."""
        return True

    def check_replicas(self) -> float | None:
        """Call within `consensus`, after training. Raises DivergedError if models that must be equal differ. Returns
        the distance between drifting replicas, relative to their norm; None if they do not drift. Collective."""
        check_identical(self.world, self.model)
        return None

    def state_dict(self) -> StrategyState:
        """The state needed to resume training. Collective, within `consensus`. Save model and optimizer of rank 0, and
        the rest of every rank."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "method": self.method_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, which every rank has read."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_method_state(state.get("method") or MethodState())

    def method_state(self) -> MethodState:
        """The part of `state_dict` besides model and optimizer: this rank's residuals, momenta and the like, by
        parameter name. Empty if there is none. Every rank saves its own."""
        return {}

    def load_method_state(self, state: MethodState) -> None:
        """Resume from a `method_state`, after model and optimizer were loaded. Collective."""

    def stats(self) -> dict[str, float]:
        """Counters of this rank since `attach`, for the result's details: updates, messages, bytes, ..."""
        return dict(self._stats)

    def bucket_bytes(self) -> list[int]:
        """Bytes of gradients in each message of a step, in the order of sending; empty if unknown."""
        return []

    def close(self) -> None:
        """End threads and disconnect from servers. Call only after success."""

    def _prepare(self, model: nn.Module) -> nn.Module:
        """Wrap or change the model before the optimizer is created."""
        return model

    def _connect(self) -> None:
        """Create buffers and hooks. The optimizer exists."""

    def _reduce(self) -> None:
        """Replace the gradients by the weighted mean over all ranks."""

    def _exchange(self, updated: bool, rate: float) -> None:
        """Called after the optimizer, to set the parameters for the next update. `updated`: gradients were finite, and
        the optimizer has made its step at learning rate `rate`."""

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
        # A single rank sends nothing, so its gradients are not views of buffers. Setting them to None is cheaper than
        # zeroing.
        if self._clear_to_none or (self.world.size == 1 and not self.keeps_gradients):
            self.optimizer.zero_grad()
        elif gradients:  # in place, because they may be views of message buffers
            torch._foreach_zero_(gradients)
        return finite

    def _step(self, rate: float) -> None:
        """Update the weights from their gradients."""
        set_rate(self.optimizer, rate)
        self.optimizer.step()

    def _agree(self, finite: bool) -> bool:
        """Whether to make the update: whether all ranks' gradients are finite. `finite`: whether this rank's are."""
        if self.traits.gradients_agree:
            return finite
        return self.world.max([0.0 if finite else 1.0])[0] == 0

    def _scale_alone(self) -> None:
        """The weighted mean on a single rank: a scaling."""
        if self._total == self._weight:
            return
        if gradients := self._gradients():  # empty before the first pass
            torch._foreach_mul_(gradients, self._weight / self._total)

    def _gradients(self) -> list[Tensor]:
        """Gradients that are not None."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _count(self, tensor: Tensor) -> None:
        """Count one message."""
        self._stats["messages"] += 1
        self._stats["bytes"] += tensor.numel() * tensor.element_size()

    def _section(self, name: str) -> AbstractContextManager[object]:
        return NOTHING if self._tracker is None else self._tracker.section(name)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups, times the group's `rate_factor` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)
