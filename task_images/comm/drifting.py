"""Methods whose replicas drift apart: local steps with periodic averaging, and gossip with neighbors on a ring."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from task_images.comm.base import MethodState, Strategy, Traits, keep_own
from task_images.comm.codecs import join_payload, make_codec, split_payload
from task_images.comm.link import open_link
from task_images.comm.methods import Method
from task_images.comm.reducer import Reducer
from task_images.harness.precision import LossScale
from task_images.harness.replicas import measure_distance, unpack

# Consensus step size: its upper limit, and its value per density. Of the values tried on 2, 4 and 8 ranks these gave
# the smallest distance after 60 exchanges; larger ones diverge at small densities.
CHOCO_STEP, CHOCO_STEP_PER_DENSITY = 0.5, 2.0


class Drifting(Strategy):
    """Each rank updates with its own gradients; subclasses exchange weights after the update."""

    traits = Traits(identical=False, gradients_agree=False)

    def __init__(self, method: Method) -> None:
        self.method = method

    def _connect(self) -> None:
        self._update = 0
        self._distance: float | None = None
        self._own: Tensor | None = None  # this rank's weights while the model has the mean
        if self.world.size > 1:
            self._link = open_link(self.world, self.method.delay)

    def _reduce(self) -> None:
        """No exchange: only divide sums by the number of terms. A rank's share is 1/P if batches are equal."""
        share = self.world.size * self._weight / self._total
        if share != 1:
            torch._foreach_mul_([item.grad for item in self._parameters if item.grad is not None], share)

    def _agree(self, finite: bool) -> bool:
        """Each rank decides alone: a rank whose gradients overflow skips its own update, without communication."""
        return finite

    def check_replicas(self) -> float | None:
        """The distance of the replicas from their mean, as last measured; None before that."""
        return self._distance

    def close(self) -> None:
        """Return the link to the pool."""
        if self.world.size > 1:
            self._link.close()

    def stats(self) -> dict[str, float]:
        """The common figures, messages and bytes of this rank, and the distance of the replicas."""
        figures = super().stats()
        if self.world.size > 1:
            figures.update(
                messages=float(self._link.messages), bytes=float(self._link.bytes), wire_bytes=self._link.wire_bytes
            )
        if self._distance is not None:
            figures["distance"] = self._distance
        return figures

    @torch.no_grad()
    def _collect(self) -> Tensor:
        """All parameters (of one type) in one flat tensor."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters])

    @torch.no_grad()
    def _distribute(self, flat: Tensor) -> None:
        unpack(flat, self._parameters)

    def _own_weights(self) -> Tensor:
        """This rank's own weights in memory of the host, within `consensus`, too."""
        return (self._collect() if self._own is None else self._own).cpu()

    def _average(self) -> None:
        """Replace the weights by the mean over all ranks."""
        self._distribute(self._link.all_reduce(self._collect().div_(self.world.size)))

    @contextmanager
    def _on_average(self) -> Iterator[None]:
        """Within the block the model has the mean of all ranks' weights; afterwards each rank has its own again."""
        self._own = own = self._collect()
        self._distance = measure_distance(self.world, self._parameters)
        self._average()
        try:
            yield
        finally:
            self._distribute(own)
            self._own = None

    def consensus(self) -> AbstractContextManager[object]:
        """Within the block the model has the mean of all replicas."""
        return self._on_average() if self.world.size > 1 else nullcontext()

    def method_state(self) -> MethodState:
        if self.world.size == 1:
            return {}
        return {"update": self._update, "ranks": keep_own(self.world, self._own_state())}

    def load_method_state(self, state: MethodState) -> None:
        if self.world.size == 1 or not state:
            return
        self._update = int(state["update"])
        if len(state["ranks"]) == self.world.size:  # otherwise all resume from the mean
            self._load_own_state(state["ranks"][self.world.rank])

    def _own_state(self) -> dict[str, Any]:
        """This rank's own state."""
        return {"optimizer": self.optimizer.state_dict()}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


class LocalSteps(Drifting):
    """Weights are averaged every `steps` updates; `consensus` averages them permanently."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self._steps = int(method.sync.partition(":")[2].split(",")[-1])

    def _connect(self) -> None:
        super()._connect()
        self._averaged_at = 0

    def _exchange(self, updated: bool, rate: float) -> None:
        self._update += 1
        if self.world.size > 1 and self._update % self._steps == 0:
            self._average()
            self._averaged_at = self._update

    def consensus(self) -> AbstractContextManager[object]:
        """Measure the distance, then replace all weights by their mean permanently."""
        if self.world.size > 1:
            self._distance = measure_distance(self.world, self._parameters)
            # Rounding can change the mean of equal numbers, so weights that are already averaged are not averaged
            # again.
            if self._averaged_at != self._update:
                self._average()
                self._averaged_at = self._update
        return nullcontext()

    def load_method_state(self, state: MethodState) -> None:
        super().load_method_state(state)
        self._averaged_at = self._update


class PostLocalSteps(Reducer):
    """Gradients are averaged for the first `start` updates; after that, weights are averaged every `steps` updates."""

    def __init__(self, method: Method, seed: int) -> None:
        super().__init__(method, seed)
        start, steps = method.sync.partition(":")[2].split(",")
        self._begins_at, self._steps = int(start), int(steps)
        self.traits = Traits(identical=False, gradients_agree=False)
        self._count_updates = 0
        self._averaged_at = 0
        self._distance: float | None = None

    def _agree(self, finite: bool) -> bool:
        """No communication: gradients are the same on all ranks at first, and later each rank decides alone."""
        return finite

    @property
    def _is_local(self) -> bool:
        return self.world.size > 1 and self._count_updates >= self._begins_at

    def last_pass(self) -> AbstractContextManager[object]:
        """Arm the reducer, unless updates are already local."""
        return nullcontext() if self._is_local else super().last_pass()

    def _reduce(self) -> None:
        if not self._is_local:
            super()._reduce()
            return
        share = self.world.size * self._weight / self._total
        torch._foreach_mul_([item.grad for item in self._parameters if item.grad is not None], share)

    def _exchange(self, updated: bool, rate: float) -> None:
        local = self._is_local
        self._count_updates += 1
        if local and (self._count_updates - self._begins_at) % self._steps == 0:
            self._average()
        elif not local:
            self._averaged_at = self._count_updates  # all ranks had the same gradients

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self._parameters:
            self._link.all_reduce(parameter.detach().div_(self.world.size))
        self._averaged_at = self._count_updates

    def consensus(self) -> AbstractContextManager[object]:
        """Measure the distance, then replace all weights by their mean permanently."""
        if self.world.size > 1:
            self._distance = measure_distance(self.world, self._parameters)
            if self._averaged_at != self._count_updates:
                self._average()
        return nullcontext()

    def check_replicas(self) -> float | None:
        """The distance of the replicas from their mean, as last measured; None before that."""
        return self._distance

    def stats(self) -> dict[str, float]:
        """The figures of the reducer, and the distance of the replicas once it was measured."""
        return {**super().stats(), **({} if self._distance is None else {"distance": self._distance})}

    def method_state(self) -> MethodState:
        own = self.optimizer.state_dict()
        states = keep_own(self.world, own) if self.world.size > 1 else []
        return {**super().method_state(), "count": self._count_updates, "optimizers": states}

    def load_method_state(self, state: MethodState) -> None:
        if not state:
            return
        super().load_method_state(state)
        self._count_updates = self._averaged_at = int(state["count"])
        if self.world.size > 1 and len(state["optimizers"]) == self.world.size:
            self.optimizer.load_state_dict(state["optimizers"][self.world.rank])


class Gossip(Drifting):
    """Weights are averaged with those of the neighbors on a ring.

    With the order fifo, weights are sent before the forward pass, and each rank adds its own step to their mean (Lian
    et al. 2017, algorithm 1). With deferred they are sent after the step (adapt, then combine).
    """

    def _connect(self) -> None:
        super()._connect()
        self._peers = find_neighbors(self.world.rank, self.world.size)
        self._mixing = 1 / (1 + len(self._peers))
        self._before: tuple[Tensor, Callable[[], list[Tensor]]] | None = None

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update. With the order fifo, weights are sent now."""
        super().begin(weight, total, passes, scale)
        if self._peers and self.method.order != "deferred":
            own = self._collect()
            self._before = own, self._link.start_swap(own, self._peers)

    def _exchange(self, updated: bool, rate: float) -> None:
        self._update += 1
        if not self._peers:
            return
        step = None
        if self._before is None:
            own = self._collect()
            received = self._link.swap(own, self._peers)
        else:
            own, finish = self._before
            step, received = self._collect().sub_(own), finish()
            self._before = None
        mixed = torch.stack([own, *received]).sum(0).mul_(self._mixing)
        self._distribute(mixed if step is None else mixed.add_(step))

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "weights": self._own_weights()}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        super()._load_own_state(state)
        self._distribute(state["weights"].to(self.world.device))


class ChocoGossip(Gossip):
    """Gossip with compressed differences: neighbors keep an estimate of this rank's weights, and after every update
    this rank sends the largest entries of the difference (Koloskova et al. 2019)."""

    def _connect(self) -> None:
        super()._connect()
        sizes = [parameter.numel() for parameter in self._parameters]
        self._codec = make_codec(self.method, self.world.rank, sizes)
        self._step_size = min(CHOCO_STEP, CHOCO_STEP_PER_DENSITY * float(self.method.codec.partition(":")[2]))
        # All ranks start with the same weights.
        self._believed = self._collect()
        self._mixed = self._believed.clone()  # sum over neighbors and self: mixing weight x estimate

    def _exchange(self, updated: bool, rate: float) -> None:
        self._update += 1
        if not self._peers:
            return
        own = self._collect()
        payload = self._codec.encode(own - self._believed, self._update)
        message = join_payload(payload)
        payloads = [split_payload(other, payload) for other in self._link.swap(message, self._peers)]
        change = self._codec.decode(payload, own, self._update)
        self._believed += change
        self._mixed += change * self._mixing
        for other in payloads:
            self._mixed += self._codec.decode(other, own, self._update) * self._mixing
        self._distribute(own + self._step_size * (self._mixed - self._believed))

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "believed": self._believed.cpu(), "mixed": self._mixed.cpu()}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        super()._load_own_state(state)
        self._believed.copy_(state["believed"])
        self._mixed.copy_(state["mixed"])


def find_neighbors(rank: int, size: int) -> list[int]:
    """The next and the previous rank on a ring: none for 1 rank, one for 2.

    All ranks send to the next one first, so each link carries one message at a time. In ascending order, two of three
    ranks would begin with the same peer.
    """
    return list(dict.fromkeys(peer for peer in ((rank + 1) % size, (rank - 1) % size) if peer != rank))


def make_drifting(method: Method, seed: int) -> Strategy:
    """The strategy of a method with local steps or gossip."""
    if method.transport == "gossip":
        return Gossip(method) if method.codec == "none" else ChocoGossip(method)
    return LocalSteps(method) if method.sync.startswith("local:") else PostLocalSteps(method, seed)
