"""The image classification networks of ImageNet by name: ResNet, VGG, DenseNet and Inception, any number of classes.

Implemented here instead of using torchvision, because each torchvision release requires specific torch releases, and
because normalization and width are configurable here. With width 1 and batch normalization they are the published
models: the same number of parameters, and the same outputs for the same weights.
"""

from torch import nn

from task_images.models.densenet import DENSENETS, densenet
from task_images.models.imagenet_resnet import RESNETS, imagenet_resnet
from task_images.models.inception import INCEPTIONS, inception
from task_images.models.vgg import VGGS, vgg

MODELS = (
    *(f"resnet{depth}" for depth in RESNETS),
    *(f"vgg{depth}{norm}" for depth in VGGS for norm in ("", "_bn")),
    *(f"densenet{depth}" for depth in DENSENETS),
    *(f"inception{version}" for version in INCEPTIONS),
)


def imagenet_model(
    name: str, classes: int = 1000, *, width: float = 1.0, norm: str = "batch", zero_init: bool = False
) -> nn.Module:
    """The network `name`, one of MODELS; input [n, 3, height, width], output [n, classes] (logits).

    width       factor on all inner channels, which stay multiples of 8; 1: as published
    norm        "batch" or "group", see layers.make_norm
    zero_init   ResNets only: blocks start as the identity, with 0 as the scale of their last normalization

    Raises ValueError for unknown names.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}, only {', '.join(MODELS)}")
    if name.startswith("resnet"):
        return imagenet_resnet(int(name.removeprefix("resnet")), classes, width, norm, zero_init)
    if name.startswith("densenet"):
        return densenet(int(name.removeprefix("densenet")), classes, width, norm)
    if name.startswith("inception"):
        return inception(int(name.removeprefix("inception")), classes, width, norm)
    depth, _, normalized = name.removeprefix("vgg").partition("_")
    return vgg(int(depth), classes, width, norm if normalized else None)
