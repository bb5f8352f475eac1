"""The image classification networks of ImageNet by name: ResNet, VGG, DenseNet and Inception, any number of classes.

Written here and not taken from torchvision, whose releases fit one release of torch each (or a few) and come from the
same package index; and every normalisation layer and width can be chosen. At width 1 with batch normalisation they are
the published models: so many parameters, the same outputs from the same weights.
"""

from torch import nn

from task_images.harness.models.densenet import DENSENETS, densenet
from task_images.harness.models.imagenet_resnet import RESNETS, imagenet_resnet
from task_images.harness.models.inception import INCEPTIONS, inception
from task_images.harness.models.vgg import VGGS, vgg

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
    zero_init   ResNets only: blocks begin as the identity, since the scale of their last normalisation is 0

    Raises ValueError for another name.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}, only {', '.join(MODELS)}")
    if name.startswith("resnet"):
        return imagenet_resnet(int(name.removeprefix("resnet")), classes, width, norm, zero_init)
    if name.startswith("densenet"):
        return densenet(int(name.removeprefix("densenet")), classes, width, norm)
    if name.startswith("inception"):
        return inception(int(name.removeprefix("inception")), classes, width, norm)
    depth, _, normalised = name.removeprefix("vgg").partition("_")
    return vgg(int(depth), classes, width, norm if normalised else None)
