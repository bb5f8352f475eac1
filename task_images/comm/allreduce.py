"""Synchronous all-reduce: of gradients before the update (the official method), or of the weights after it."""

import time

import torch
from torch import Tensor, nn

from task_images.harness.distributed import World


class GradientAllReduce:
    """Every rank's gradients become their weighted mean over all ranks, exact for unequal batches.

    by_layer     one collective per tensor instead of one flat buffer (per data type) for the whole model
    probe_every  every so many updates a barrier before the collective tells waiting for slow peers from transfer
                 (stats: probes, waiting_seconds, transfer_seconds, both sums over the probes); 0: never

    Gradients are kept as views into the flat buffer, so packing costs nothing as long as the optimiser's gradients are
    zeroed in place (`zero_grad(set_to_none=False)`); new tensors are copied in. A missing gradient counts as zeros.
    """

    def __init__(self, by_layer: bool = False, probe_every: int = 20) -> None:
        self._by_layer = by_layer
        self._probe_every = probe_every
        self._stats = {"updates": 0.0, "messages": 0.0, "bytes": 0.0}
        if probe_every:
            self._stats.update(probes=0.0, waiting_seconds=0.0, transfer_seconds=0.0)

    def attach(self, world: World, model: nn.Module) -> None:
        self._world = world
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._buffers: list[Tensor] = []
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if world.size == 1:
            return
        groups: dict[object, list[nn.Parameter]] = {}
        for index, parameter in enumerate(self._trained):
            groups.setdefault(index if self._by_layer else (parameter.dtype, parameter.device), []).append(parameter)
        for group in groups.values():
            flat = torch.zeros(sum(item.numel() for item in group), dtype=group[0].dtype, device=group[0].device)
            self._buffers.append(flat)
            start = 0
            for parameter in group:
                # In the parameter's own memory format, which is not that of its shape where channels come last.
                view = flat.as_strided(parameter.size(), parameter.stride(), start)
                parameter.grad = view
                self._views.append((parameter, view))
                start += parameter.numel()

    def before_update(self, weight: float, total: float | None = None) -> None:
        self._stats["updates"] += 1
        if self._world.size == 1:
            self._scale_alone(weight, total)
            return
        if total is None:
            total = self._world.sum([weight])[0]
        self._pack()
        probe = self._probe_every and self._stats["updates"] % self._probe_every == 0
        if probe:
            self._wait_for_peers()
        begin = time.perf_counter()
        for flat in self._buffers:
            # Before the sum, not after it: keeps half precision from overflowing.
            flat.mul_(weight / total)
            self._world.all_reduce(flat)
            self._stats["messages"] += 1
            self._stats["bytes"] += flat.numel() * flat.element_size()
        if probe:
            self._world.synchronize()
            self._stats["transfer_seconds"] += time.perf_counter() - begin

    def after_update(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

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
        self._world.synchronize()
        begin = time.perf_counter()
        self._world.barrier()
        self._stats["probes"] += 1
        self._stats["waiting_seconds"] += time.perf_counter() - begin

    def _scale_alone(self, weight: float, total: float | None) -> None:
        if total is None or total == weight:
            return
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad.mul_(weight / total)


class WeightAllReduce:
    """Every rank updates with its own gradients; then all weights are averaged, all ranks counting the same.

    For plain SGD with equal batches the same as GradientAllReduce; what the original logistic regression did.
    """

    def __init__(self) -> None:
        self._stats = {"updates": 0.0, "messages": 0.0, "bytes": 0.0}

    def attach(self, world: World, model: nn.Module) -> None:
        self._world = world
        self._parameters = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]

    def before_update(self, weight: float, total: float | None = None) -> None:
        pass

    def after_update(self) -> None:
        self._stats["updates"] += 1
        if self._world.size == 1:
            return
        flat = torch.cat([parameter.reshape(-1) for parameter in self._parameters]).div_(self._world.size)
        self._world.all_reduce(flat)
        self._stats["messages"] += 1
        self._stats["bytes"] += flat.numel() * flat.element_size()
        start = 0
        for parameter in self._parameters:
            parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()

    def flush(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return dict(self._stats)
