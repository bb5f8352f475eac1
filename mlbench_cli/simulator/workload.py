"""What one rank computes and sends in a step: tensors in the order in which their gradients are ready."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tensor:
    """A parameter: its bytes as they travel, and when its gradient is ready, seconds after the step's start.

    `rows` of a matrix, 1 of a vector; 0: not known, as in calibrations made before they had it.
    """

    name: str
    size: int
    ready: float
    rows: int = 0


@dataclass(frozen=True)
class CodecCost:
    """What the preset `method` computes on `ranks` ranks, in seconds for each byte of gradients.

    before   until a message leaves; after: when its sum has come
    """

    method: str
    ranks: int
    before: float
    after: float


@dataclass(frozen=True)
class Workload:
    """A step without communication. Times are seconds after its start; `tensors` are in order of readiness.

    forward     when the backward pass begins
    backward    when it ends
    optimizer   seconds of the update
    other       seconds of the step besides: loading a batch
    overlap     seconds that computation loses for each second in which messages are under way beside it
    codecs      what methods compute to compress gradients, and how much longer that takes here; none in calibrations
                made before they had it
    """

    tensors: tuple[Tensor, ...]
    forward: float
    backward: float
    optimizer: float = 0.0
    other: float = 0.0
    overlap: float = 0.0
    codecs: tuple[CodecCost, ...] = ()
    codec_factor: float = 1.0

    @property
    def seconds(self) -> float:
        """What a step takes without communication."""
        return self.backward + self.optimizer + self.other

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    def scale(self, factor: float) -> "Workload":
        """The same on a machine that computes `factor` times as long."""
        tensors = tuple(replace(tensor, ready=tensor.ready * factor) for tensor in self.tensors)
        return replace(
            self,
            tensors=tensors,
            forward=self.forward * factor,
            backward=self.backward * factor,
            optimizer=self.optimizer * factor,
            other=self.other * factor,
            codec_factor=self.codec_factor * factor,
        )


def spread_backward(
    sizes: Sequence[tuple[str, int]], weights: Sequence[float], forward: float, backward: float, optimizer: float = 0.0
) -> Workload:
    """A workload from tensors in forward order, the backward pass divided in proportion to `weights`."""
    total = sum(weights) or 1.0
    now, tensors = forward, []
    for (name, size), weight in zip(reversed(sizes), reversed(weights), strict=True):
        now += (backward - forward) * weight / total
        tensors.append(Tensor(name, size, now))
    return Workload(tuple(tensors), forward, max(backward, now), optimizer)
