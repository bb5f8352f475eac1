"""Synchronous SGD with one message (Chen et al. 2016), and gradients in another number format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from task_images.methods import torch
from task_images.methods.base import Method

if TYPE_CHECKING:
    from torch import Tensor, nn


class Bsp(Method):
    """All gradients are sent after the backward pass, weighted by batch size, so unequal batches are exact.

    Gradients are views into one flat buffer per type, so packing is free unless autograd replaces them. A missing
    gradient counts as zeros.
    """

    name = "bsp"
    summary = "one message with all gradients after the backward pass"
    source = "Valiant 1990; Chen et al. 2016, arXiv:1604.00981"
    exact = True

    def __init__(self, wire: torch.dtype | None = None, **given: str) -> None:
        """`wire`: number format of the messages, if not that of the gradients."""
        super().__init__(**given)
        self._wire = wire

    def start(self) -> None:
        """Create the buffers."""
        self.keeps_gradients = True
        self._buffers: list[Tensor] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for group in groups.values():
            flat = torch.zeros(sum(item.numel() for item in group), dtype=group[0].dtype, device=group[0].device)
            self._buffers.append(flat)
            place = 0
            for parameter in group:
                # With the parameter's own strides, which do not follow from its shape with channels-last memory.
                view = flat.as_strided(parameter.size(), parameter.stride(), place)
                parameter.grad = view
                self._views.append((parameter, view))
                place += parameter.numel()

    def reduce(self) -> None:
        """Sum the buffers over ranks."""
        for parameter, view in self._views:
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        for flat in self._buffers:
            flat.mul_(self.share)  # before summing, so that half precision does not overflow
            if self._wire is None:
                self.link.all_reduce(flat)
            else:
                flat.copy_(self.link.all_reduce(flat.to(self._wire)))


class MeanOfWeights(Method):
    """Each rank updates with its own gradients, then the weights are averaged with equal weight per rank.

    Equal to Bsp for plain SGD with equal batches. The original logistic regression works this way.
    """

    name = "weights"

    def reduce(self) -> None:
        """Nothing is sent: only the number of samples is divided out."""
        self.scale_gradients(self.world.size * self.share)

    def agree(self, finite: bool) -> bool:
        """Each rank has its own gradients."""
        return self.world.size == 1 or self.world.max([0.0 if finite else 1.0])[0] == 0

    def mix(self, rate: float) -> None:
        """Average the weights."""
        self.write_weights(self.average(self.read_weights()))


class Noop(Method):
    """Nothing is sent."""

    name = "noop"
    summary = "no communication: measures the time of a step without it"
    source = "measurement"
    formula = "0"
    note = "Replicas diverge. The exposed communication of a method is its step time minus that of noop."
    reaches_goals = False
    identical = False
    collective = "none"

    def reduce(self) -> None:
        """Only the number of samples is divided out."""
        self.scale_gradients(self.world.size * self.share)

    def check_replicas(self) -> float | None:
        """The distance of the replicas from their mean."""
        if self.world.size > 1:
            self.measure_distance()
        return self._distance
