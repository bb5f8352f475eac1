"""Synchronous all-reduce: of gradients before the update (the official method), or of the weights after it."""

import time

import torch
from torch import Tensor, nn

from task_images.comm.base import Strategy, Traits
from task_images.harness.replicas import unpack

PROBE_EVERY = 20


class GradientAllReduce(Strategy):
    """Average the gradients of all ranks, weighted by batch size, so unequal batches are exact.

    wire  data type of the messages if it differs from the gradients': converted, summed, converted back

    Every PROBE_EVERY updates, a barrier before the collective separates waiting for slow peers from transfer (stats:
    probes, waiting_seconds, transfer_seconds, summed over the probes).

    Gradients are views into the flat buffer, so packing is free unless autograd replaces them: new tensors are copied
    in. A missing gradient counts as zeros.
    """

    def __init__(self, wire: torch.dtype | None = None) -> None:
        self._wire = wire

    def _connect(self) -> None:
        self._stats.update(probes=0.0, waiting_seconds=0.0, transfer_seconds=0.0)
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._buffers: list[Tensor] = []
        if self.world.size == 1:
            return
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for group in groups.values():
            flat = torch.zeros(sum(item.numel() for item in group), dtype=group[0].dtype, device=group[0].device)
            self._buffers.append(flat)
            start = 0
            for parameter in group:
                # With the parameter's own strides, which do not follow from its shape with channels-last memory.
                view = flat.as_strided(parameter.size(), parameter.stride(), start)
                parameter.grad = view
                self._views.append((parameter, view))
                start += parameter.numel()

    def _reduce(self) -> None:
        if self.world.size == 1:
            self._scale_alone()
            return
        world = self.world
        self._pack()
        probe = (self._stats["updates"] + 1) % PROBE_EVERY == 0
        if probe:
            self._wait_for_peers()
        begin = time.perf_counter()
        for flat in self._buffers:
            # Scale before summing, so that half precision does not overflow.
            flat.mul_(self._weight / self._total)
            sent = flat if self._wire is None else flat.to(self._wire)
            world.all_reduce(sent)
            self._count(sent)
            if sent is not flat:
                flat.copy_(sent)
        if probe:
            world.synchronize()
            self._stats["transfer_seconds"] += time.perf_counter() - begin

    def _pack(self) -> None:
        for parameter, view in self._views:
            gradient = parameter.grad
            if gradient is view:
                continue
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
            parameter.grad = view

    def _wait_for_peers(self) -> None:
        world = self.world
        world.synchronize()
        begin = time.perf_counter()
        world.barrier()
        self._stats["probes"] += 1
        self._stats["waiting_seconds"] += time.perf_counter() - begin


class WeightAllReduce(Strategy):
    """Each rank updates with its own gradients, then the weights are averaged with equal weight per rank.

    Equivalent to GradientAllReduce for plain SGD with equal batches. The original logistic regression works this way.
    """

    traits = Traits(gradients_agree=False)

    def _exchange(self, updated: bool, rate: float) -> None:
        if self.world.size == 1:
            return
        weights = [parameter.detach() for parameter in self._parameters]
        flat = torch.cat([weight.reshape(-1) for weight in weights]).div_(self.world.size)
        self.world.all_reduce(flat)
        self._count(flat)
        unpack(flat, weights)
