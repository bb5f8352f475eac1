"""DenseNets with bottleneck and compression (Huang et al. 2017, table 1): each layer's input is the output of all
previous ones."""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from task_images.models.resnet import Norm, make_norm, widen

# Depth -> number of layers in each of the four dense blocks.
DENSENETS = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}
STEM = 64
GROWTH = 32
BOTTLENECK = 4


def densenet(depth: int, classes: int, width: float = 1.0, norm: str = "batch") -> nn.Module:
    """The DenseNet of `depth` in DENSENETS. Input of any size from 32x32, designed for 224x224.

    Initialization: convolutions Kaiming normal, the classifier's bias 0.
    """
    model = _DenseNet(DENSENETS[depth], classes, width, make_norm(norm))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    nn.init.zeros_(model.classifier.bias)
    return model


class _DenseNet(nn.Module):
    def __init__(self, layers: tuple[int, ...], classes: int, width: float, norm: Norm) -> None:
        super().__init__()
        channels, growth = widen(STEM, width), widen(GROWTH, width)
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False), norm(channels), nn.ReLU(True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip
        blocks: list[nn.Module] = []
        for block, number in enumerate(layers):
            if block:
                blocks.append(_transition(channels, channels // 2, norm))
                channels //= 2
            blocks += [_Dense(channels + index * growth, growth, norm) for index in range(number)]
            channels += number * growth
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm(channels)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = relu(self.norm(self.blocks(self.stem(images))), inplace=True)
        return self.classifier(features.mean((2, 3)))  # type: ignore[no-any-return]


class _Dense(nn.Module):
    """Norm - ReLU - 1x1 - norm - ReLU - 3x3; its outputs are put behind its inputs."""

    def __init__(self, inputs: int, growth: int, norm: Norm) -> None:
        super().__init__()
        inner = BOTTLENECK * growth
        self.branch = nn.Sequential(
            *(norm(inputs), nn.ReLU(True), nn.Conv2d(inputs, inner, 1, bias=False)),
            *(norm(inner), nn.ReLU(True), nn.Conv2d(inner, growth, 3, padding=1, bias=False)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.branch(x)], 1)


def _transition(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(norm(inputs), nn.ReLU(True), nn.Conv2d(inputs, outputs, 1, bias=False), nn.AvgPool2d(2))
