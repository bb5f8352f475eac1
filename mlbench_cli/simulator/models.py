"""Tensors of the models that the published tables measured: names, numbers of elements, share of the arithmetic.

In the order of the forward pass. Multiply-adds are per sample and up to a factor that is the same for a model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mlbench_cli.simulator.workload import Workload, spread_backward

FORWARD_SHARE = 1 / 3  # of a training step: the backward pass computes two products for each of the forward pass
BYTES = 4


@dataclass(frozen=True)
class ModelParameter:
    """One tensor: elements, and multiply-adds of the forward pass that it takes part in."""

    name: str
    elements: int
    operations: float


def workload_of(parameters: Sequence[ModelParameter], seconds: float) -> Workload:
    """A step of `seconds` without communication, divided by the parameters' share of the arithmetic."""
    sizes = [(parameter.name, BYTES * parameter.elements) for parameter in parameters]
    weights = [parameter.operations for parameter in parameters]
    return spread_backward(sizes, weights, FORWARD_SHARE * seconds, seconds)


def resnet50() -> list[ModelParameter]:
    """torchvision's ResNet-50 for 224 x 224 images: 25 557 032 elements in 161 tensors."""
    return list(_resnet50())


def bert(layers: int, width: int) -> list[ModelParameter]:
    """BERT for pretraining with a vocabulary of 30 528, as ddl-benchmarks trains it; sequences of 64 tokens."""
    return list(_bert(layers, width))


def _resnet50() -> Iterator[ModelParameter]:
    yield from _convolution("conv1", 3, 64, 7, 112)
    inputs = 64
    for stage, (blocks, width, side) in enumerate(((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            # The first block of a stage halves the image in its second convolution.
            before = 2 * side if block == 0 and stage > 1 else side
            yield from _convolution(f"{name}.conv1", inputs, width, 1, before)
            yield from _convolution(f"{name}.conv2", width, width, 3, side)
            yield from _convolution(f"{name}.conv3", width, 4 * width, 1, side)
            if block == 0:
                yield from _convolution(f"{name}.downsample", inputs, 4 * width, 1, side)
            inputs = 4 * width
    yield ModelParameter("fc.weight", 1000 * inputs, 1000 * inputs)
    yield ModelParameter("fc.bias", 1000, 0.0)


def _convolution(name: str, inputs: int, outputs: int, kernel: int, side: int) -> Iterator[ModelParameter]:
    """A convolution without bias, and its batch normalization."""
    elements = inputs * outputs * kernel * kernel
    yield ModelParameter(f"{name}.weight", elements, float(elements * side * side))
    yield ModelParameter(f"{name}.norm.weight", outputs, 0.0)
    yield ModelParameter(f"{name}.norm.bias", outputs, 0.0)


def _bert(layers: int, width: int) -> Iterator[ModelParameter]:
    vocabulary, positions = 30_528, 512
    yield ModelParameter("embeddings.words", vocabulary * width, 0.0)
    yield ModelParameter("embeddings.positions", positions * width, 0.0)
    yield ModelParameter("embeddings.types", 2 * width, 0.0)
    yield from _norm("embeddings.norm", width)
    for layer in range(layers):
        name = f"layer.{layer}"
        for part in ("query", "key", "value", "output"):
            yield from _linear(f"{name}.{part}", width, width)
        yield from _norm(f"{name}.attention.norm", width)
        yield from _linear(f"{name}.intermediate", width, 4 * width)
        yield from _linear(f"{name}.dense", 4 * width, width)
        yield from _norm(f"{name}.norm", width)
    yield from _linear("pooler", width, width)
    yield ModelParameter("predictions.bias", vocabulary, 0.0)
    yield from _linear("predictions.transform", width, width)
    yield from _norm("predictions.norm", width)
    yield from _linear("seq_relationship", width, 2)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[ModelParameter]:
    yield ModelParameter(f"{name}.weight", inputs * outputs, float(inputs * outputs))
    yield ModelParameter(f"{name}.bias", outputs, 0.0)


def _norm(name: str, width: int) -> Iterator[ModelParameter]:
    yield ModelParameter(f"{name}.weight", width, 0.0)
    yield ModelParameter(f"{name}.bias", width, 0.0)


MODELS: Mapping[str, Callable[[], list[ModelParameter]]] = {
    "ResNet-50": resnet50,
    "BERT-Base": partial(bert, 12, 768),
    "BERT-Large": partial(bert, 24, 1024),
}
