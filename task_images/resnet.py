"""ResNets for small images (He et al. 2015 section 4.2, and 2016 for version 2), any depth 6n+2.

Shortcuts at changes of width are 1x1 convolutions, as in the original benchmark, not He's zero padding: ResNet-20 v1
has 272,474 parameters with 3 input channels and 10 classes. Pooling is global, so any input size from 4x4 works.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from task_images.contract import TaskUsageError

Norm = Callable[[int], nn.Module]

NORMS = ("batch", "group")
MOST_GROUPS = 32


def make_norm(kind: str) -> Norm:
    """A function from the number of channels to a normalization layer with scale and shift per channel.

    "batch": BatchNorm, with statistics of this rank's batch, so the same global batch on more ranks is a different
    training. "group": GroupNorm (Wu and He 2018), independent of the batch, with the same number of parameters. Raises
    ValueError for other values.
    """
    if kind not in NORMS:
        raise ValueError(f"the normalization {kind!r} is not one of {', '.join(NORMS)}")
    return nn.BatchNorm2d if kind == "batch" else _group_norm


def _group_norm(channels: int) -> nn.Module:
    """GroupNorm with as many equal groups as possible: at most 32, each with at least two channels."""
    fitting = (groups for groups in range(min(MOST_GROUPS, channels // 2), 0, -1) if channels % groups == 0)
    return nn.GroupNorm(next(fitting, 1), channels)


def widen(channels: int, width: float) -> int:
    """`channels` times `width`, to the nearest multiple of 8; at least 8."""
    return max(8, 8 * round(channels * width / 8))


WIDTHS = (16, 32, 64)


def check_depth(depth: int) -> None:
    """Raises TaskUsageError for a depth that these ResNets cannot have."""
    if depth < 8 or (depth - 2) % 6:
        raise TaskUsageError(f"the depth {depth} is not of the form 6n+2", "--set depth=20, 32, 44, 56 or 110")


def resnet(
    depth: int = 20, version: int = 1, channels: int = 3, classes: int = 10, *, norm: str = "batch"
) -> nn.Module:
    """A ResNet of `depth` 20, 32, 44, 56, 110, ... Raises TaskUsageError for other depths, ValueError for other
    versions or norms.

    Version 1: convolution - BN - ReLU, activation after the sum, projection with BN where the width changes. Version 2:
    BN - ReLU - convolution, no BN after the stem, BN and ReLU at the end, projection without BN of the activated input
    in the first block of every stage. `norm` "group" replaces BN by GroupNorm (make_norm).

    Input [n, channels, height, width], output [n, classes] (logits). Initialization: convolutions Kaiming normal (fan
    out), BN 1 and 0, linear layer as in torch.
    """
    check_depth(depth)
    if version not in (1, 2):
        raise ValueError(f"ResNet version {version} is neither 1 nor 2")
    blocks = (depth - 2) // 6
    model = (_ResNetV1 if version == 1 else _ResNetV2)(blocks, channels, classes, make_norm(norm))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class _ResNetV1(nn.Module):
    def __init__(self, blocks: int, channels: int, classes: int, norm: Norm) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(channels, WIDTHS[0]), norm(WIDTHS[0]), nn.ReLU(inplace=True))
        self.stages = _stages(_BlockV1, blocks, norm)
        self.classifier = nn.Linear(WIDTHS[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.stages(self.stem(images))
        return self.classifier(features.mean((2, 3)))  # type: ignore[no-any-return]


class _BlockV1(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, first: bool, norm: Norm) -> None:
        super().__init__()
        self.convolution1 = _convolution(inputs, outputs, stride)
        self.norm1 = norm(outputs)
        self.convolution2 = _convolution(outputs, outputs)
        self.norm2 = norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_projection(inputs, outputs, stride), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.convolution1(x)), inplace=True)
        y = self.norm2(self.convolution2(y))
        return relu(torch.add(y, self.shortcut(x)), inplace=True)


class _ResNetV2(nn.Module):
    def __init__(self, blocks: int, channels: int, classes: int, norm: Norm) -> None:
        super().__init__()
        self.stem = _convolution(channels, WIDTHS[0])
        self.stages = _stages(_BlockV2, blocks, norm)
        self.norm = norm(WIDTHS[-1])
        self.classifier = nn.Linear(WIDTHS[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        features = relu(self.norm(self.stages(self.stem(images))))
        return self.classifier(features.mean((2, 3)))  # type: ignore[no-any-return]


class _BlockV2(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, first: bool, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(inputs)
        self.convolution1 = _convolution(inputs, outputs, stride)
        self.norm2 = norm(outputs)
        self.convolution2 = _convolution(outputs, outputs)
        self.projection = _projection(inputs, outputs, stride) if first else None

    def forward(self, x: Tensor) -> Tensor:
        activated = relu(self.norm1(x))
        shortcut = x if self.projection is None else self.projection(activated)
        y = self.convolution1(activated)
        y = self.convolution2(relu(self.norm2(y), inplace=True))
        return torch.add(y, shortcut)


def _stages(block: Callable[[int, int, int, bool, Norm], nn.Module], blocks: int, norm: Norm) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = WIDTHS[0]
    for stage, outputs in enumerate(WIDTHS):
        for index in range(blocks):
            stride = 2 if stage and not index else 1
            layers.append(block(inputs, outputs, stride, index == 0, norm))
            inputs = outputs
    return nn.Sequential(*layers)


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def _projection(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
