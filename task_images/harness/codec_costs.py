"""What methods compute to compress gradients: seconds of each rank's own work on a message, without a network.

The messages of a method are encoded, "exchanged" and decoded by the code that trains, over a link on which all other
ranks say the same as this one and nothing takes time.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
from torch import Tensor

from task_images.comm.door import read_options
from task_images.comm.exchange import Matrix, make_message, make_transport
from task_images.comm.methods import Method
from task_images.comm.presets import PRESETS, find_registered, resolve
from task_images.comm.registered import RegisteredRun
from task_images.comm.shipped import SHIPPED
from task_images.harness.distributed import World

MAX_NUMBERS = 1 << 20  # about so many has the message that is measured; larger ones take longer in proportion
SIZES = (2, 4)  # ranks: what decoding costs grows with them
WARM_UP, SAMPLES = 1, 5
LATE = 1 << 30  # an update after every warm-up of a method


class CodecTimes(TypedDict):
    """A method's own work on one message of `bytes` of gradients in fp32: the slowest rank's median of seconds.

    before   what precedes sending, or all of it where ranks exchange several times; after: what follows
    """

    method: str
    ranks: int
    bytes: int
    before: float
    after: float


class SilentLink:
    """The calls of `comm.link.Link` that methods make, with `size` ranks that all say the same."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.rank, self.device = size, 0, device

    def start_all_reduce(self, tensor: Tensor) -> Any:
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, own: Tensor) -> list[Tensor]:
        return [own] * self.size

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.chunk(self.size)[self.rank]] * self.size

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return tensor

    def receive(self, tensor: Tensor, peer: int) -> Tensor:
        return tensor.zero_()


def list_compressing() -> list[Method]:
    """The presets that compress gradients, in messages between all ranks or in every update.

    Of methods that came through the door only mlbench's own: others may need more than a silent link can do.
    """
    found = []
    for method in map(resolve, PRESETS):
        if method.engine == "registered":
            if type(find_registered(method)) in SHIPPED and all(
                each.every == 1 for each in find_registered(method).rounds(1, read_options(method.options))
            ):
                found.append(method)
        elif method.codec != "none" and method.transport not in ("gossip", "ps"):
            found.append(method)
    return found


def measure_codecs(world: World, shapes: Sequence[tuple[int, ...]]) -> list[CodecTimes]:
    """Time the work of every compressing method on tensors of `shapes`, with fewer rows if these are many. Collective:
    all ranks compute at once, as in a step."""
    kept = min(1.0, MAX_NUMBERS / sum(math.prod(shape) for shape in shapes))
    tensors: list[tuple[int, int]] = []  # rows and numbers
    for shape in shapes:
        rows = math.ceil(shape[0] * kept) if len(shape) > 1 else 1
        tensors.append((rows, rows * math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)))
    total = sum(numbers for _, numbers in tensors)
    cases = [(method, ranks) for method in list_compressing() for ranks in SIZES]
    seconds: list[float] = []
    with torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
        for method, ranks in cases:
            link = SilentLink(ranks, world.device)
            work = (_make_update if method.engine == "registered" else _make_exchange)(method, link, tensors)
            seconds += _time(world, work)
    slowest = [round(value, 7) for value in world.max(seconds)]
    return [
        {"method": method.name, "ranks": ranks, "bytes": 4 * total, "before": before, "after": after}
        for (method, ranks), before, after in zip(cases, slowest[::2], slowest[1::2], strict=True)
    ]


Work = Callable[[int], Callable[[], object]]  # does what precedes sending; what it returns does the rest


def _make_exchange(method: Method, link: SilentLink, tensors: Sequence[tuple[int, int]]) -> Work:
    """The work on a message of a method that is a point on the axes."""
    sizes = [numbers for _, numbers in tensors]
    flat = torch.randn(sum(sizes), device=link.device)
    matrices, start = [], 0
    for number, (rows, numbers) in enumerate(tensors):
        matrices.append(Matrix(str(number), start, rows, numbers // max(1, rows)))
        start += numbers
    message = make_message(method, 0, flat, link.rank, sizes, matrices)
    message.codec.update = LATE
    transport = make_transport(method, link)  # type: ignore[arg-type]

    def start_one(seed: int) -> Callable[[], object]:
        under_way = transport.start(message, seed)
        return under_way.finish if under_way is not None else lambda: None

    return start_one


def _make_update(method: Method, link: SilentLink, tensors: Sequence[tuple[int, int]]) -> Work:
    """The hooks of a method that came through the door, whose messages are part of its update."""
    registered = find_registered(method)
    parameters = [torch.nn.Parameter(torch.randn(numbers, device=link.device)) for _, numbers in tensors]
    run = RegisteredRun(method, registered)
    run.world = SimpleNamespace(size=link.size)  # type: ignore[assignment]
    run._parameters, run._link = parameters, link  # type: ignore[assignment]
    run.optimizer = getattr(torch.optim, (*registered.optimizers, "SGD")[0])(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    run.optimizer.step()
    run._update = LATE
    registered.start(run)

    def update(seed: int) -> Callable[[], object]:
        with torch.no_grad():
            registered.reduce(run)
            registered.step(run, 0.0)
            registered.exchange(run, 0.0)
        return lambda: None

    return update


def _time(world: World, work: Work) -> tuple[float, float]:
    """Medians of this rank's seconds before and after the exchange. All ranks begin together, then run alone."""
    before, after = [], []
    world.barrier()
    for number in range(WARM_UP + SAMPLES):
        world.synchronize()
        begun = time.perf_counter()
        finish = work(number + 1)
        world.synchronize()
        sent = time.perf_counter()
        finish()
        world.synchronize()
        before.append(sent - begun)
        after.append(time.perf_counter() - sent)
    return statistics.median(before[WARM_UP:]), statistics.median(after[WARM_UP:])
