"""Keeps the ranks' models equal: initial broadcast, averaged buffers, and a check for equality."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from task_images.harness.distributed import World
from task_images.harness.ranks import compare_checksums


def broadcast_state(world: World, model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers, so that equality does not depend on equal seeds."""
    if world.size == 1:
        return
    for tensors in _by_type([item.detach() for item in (*model.parameters(), *model.buffers())]).values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        unpack(world.broadcast(flat), tensors)


def average_buffers(world: World, model: nn.Module) -> None:
    """Replace floating-point buffers (the running statistics of BatchNorm) by their mean over ranks."""
    if world.size == 1:
        return
    buffers = [buffer.detach() for buffer in model.buffers() if buffer.is_floating_point()]
    for tensors in _by_type(buffers).values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) / world.size
        unpack(world.all_reduce(flat), tensors)


def check_identical(world: World, model: nn.Module) -> None:
    """Compare a checksum of all parameters. Raises DivergedError, on every rank, naming the ranks that differ."""
    if world.size == 1:
        return
    parameters = (parameter.detach().cpu().contiguous().reshape(-1) for parameter in model.parameters())
    compare_checksums(world, (parameter.view(torch.uint8).numpy().data for parameter in parameters))


def measure_distance(world: World, parameters: Iterable[Tensor]) -> float:
    """The distance between the ranks' parameters: the root mean squared distance from their mean, divided by the norm
    of the mean. Collective."""
    own = torch.cat([parameter.detach().reshape(-1).float() for parameter in parameters])
    mean = world.all_reduce(own / world.size)
    squares = world.sum([float((own - mean).square().sum())])[0] / world.size
    return float(squares**0.5 / max(float(mean.norm()), 1e-30))


def _by_type(tensors: list[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the numbers of a flat tensor into tensors that have as many together."""
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
