"""The image classification networks of ImageNet by name, any number of classes.

ResNets (He et al. 2015, table 1; ResNet-50 and deeper in version 1.5: the 3x3 convolution has the stride) are here,
because their normalization and width are configurable: with width 1 and batch normalization they have the published
number of parameters. The others are torchvision's.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from task_images.contract import EnvironmentUnfitError, install_hint
from task_images.resnet import Norm, make_norm, widen

# Depth -> whether blocks have a bottleneck, and their number in each of the four stages.
RESNETS = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}
STEM = 64
EXPANSION = 4  # of a bottleneck's output channels


# Name -> torchvision's function.
OTHERS = {
    **{f"vgg{depth}{norm}": f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")},
    **{f"densenet{depth}": f"densenet{depth}" for depth in (121, 169, 201)},
    "inception3": "inception_v3",
}
MODELS = (*(f"resnet{depth}" for depth in RESNETS), *OTHERS)


def imagenet_model(
    name: str, classes: int = 1000, *, width: float = 1.0, norm: str = "batch", zero_init: bool = False
) -> nn.Module:
    """The network `name`, one of MODELS; input [n, 3, height, width], output [n, classes] (logits).

    width, norm, zero_init   ResNets only, see `imagenet_resnet`

    Raises ValueError for unknown names, and EnvironmentUnfitError without torchvision.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}, only {', '.join(MODELS)}")
    if name.startswith("resnet"):
        return imagenet_resnet(int(name.removeprefix("resnet")), classes, width, norm, zero_init)
    try:
        from torchvision import models
    except (ImportError, OSError, RuntimeError) as error:
        raise EnvironmentUnfitError(
            f"the model {name} needs torchvision: {error}", install_hint("torchvision")
        ) from None
    # Without the auxiliary classifier, whose loss the published comparisons do not have.
    options = {"aux_logits": False, "init_weights": True} if name.startswith("inception") else {}
    model: nn.Module = getattr(models, OTHERS[name])(num_classes=classes, **options)
    return model


def imagenet_resnet(
    depth: int, classes: int, width: float = 1.0, norm: str = "batch", zero_init: bool = True
) -> nn.Module:
    """The ResNet of `depth` in RESNETS. Input of any size from 32x32, designed for 224x224.

    Initialization: convolutions Kaiming normal (fan out), classifier normal with standard deviation 0.01 and bias 0;
    `zero_init` sets the last scale of every block to 0 (Goyal et al. 2017, section 5.1). `width` is a factor on all
    inner channels, which stay multiples of 8; `norm`: see make_norm.
    """
    bottleneck, blocks = RESNETS[depth]
    make = make_norm(norm)
    model = _ResNet(_Bottleneck if bottleneck else _Basic, blocks, classes, widen(STEM, width), make)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, _Block) and zero_init:
            nn.init.zeros_(module.branch[-1].weight)  # type: ignore[arg-type]
    return model


class _ResNet(nn.Module):
    def __init__(
        self,
        block: Callable[[int, int, int, Norm], "_Block"],
        blocks: tuple[int, ...],
        classes: int,
        stem: int,
        norm: Norm,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 7, stride=2, padding=3, bias=False), norm(stem), nn.ReLU(True))
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        layers: list[_Block] = []
        inputs = stem
        for stage, number in enumerate(blocks):
            for index in range(number):
                layers.append(block(inputs, stem << stage, 2 if stage and not index else 1, norm))
                inputs = layers[-1].outputs
        self.blocks = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, classes)
        nn.init.normal_(self.classifier.weight, 0.0, 0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.blocks(self.pool(self.stem(images)))
        return self.classifier(features.mean((2, 3)))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """A residual block: the input, projected if shapes differ, plus `branch`, which ends with a normalization."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, *branch: nn.Module) -> None:
        super().__init__()
        self.outputs = outputs
        self.branch = nn.Sequential(*branch)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return relu(torch.add(self.branch(x), self.shortcut(x)), inplace=True)


class _Basic(_Block):
    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        first = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        super().__init__(inputs, width, stride, norm, first, norm(width), nn.ReLU(True), second, norm(width))


class _Bottleneck(_Block):
    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        outputs = EXPANSION * width
        narrow = nn.Conv2d(inputs, width, 1, bias=False)
        middle = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        wide = nn.Conv2d(width, outputs, 1, bias=False)
        branch = (narrow, norm(width), nn.ReLU(True), middle, norm(width), nn.ReLU(True), wide, norm(outputs))
        super().__init__(inputs, outputs, stride, norm, *branch)
