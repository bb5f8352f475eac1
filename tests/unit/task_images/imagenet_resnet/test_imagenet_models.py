"""The networks of ImageNet: their published sizes, any classes and images, and normalization without a batch."""

import pytest
import torch
from torch import nn

from task_images.imagenet_resnet.model import MODELS, imagenet_model
from task_images.resnet import resnet

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg11": 132_863_336,
    "vgg11_bn": 132_868_840,
    "vgg13": 133_047_848,
    "vgg13_bn": 133_053_736,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "vgg19": 143_667_240,
    "vgg19_bn": 143_678_248,
    "densenet121": 7_978_856,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "inception3": 23_834_568,  # without the auxiliary classifier
}


def count(model: nn.Module) -> int:
    return sum(item.numel() for item in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        assert count(imagenet_model(name)) == PARAMETERS[name]
        if name.startswith("resnet"):
            assert count(imagenet_model(name, norm="group")) == PARAMETERS[name]


def test_the_stride_of_a_bottleneck_is_in_its_3x3_convolution() -> None:
    """What makes ResNet-50 version 1.5; 161 tensors of parameters, as published."""
    with torch.device("meta"):
        model = imagenet_model("resnet50")
    strided = [
        item.kernel_size
        for item in model.get_submodule("blocks").modules()
        if isinstance(item, nn.Conv2d) and item.stride == (2, 2)
    ]
    assert strided == [(3, 3), (1, 1)] * 3
    assert len(list(model.parameters())) == 161


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_narrow_ones_take_small_images_and_have_gradients_everywhere(name: str, norm: str) -> None:
    torch.manual_seed(0)
    model = imagenet_model(name, 7, width=0.125, norm=norm)
    outputs = model(torch.randn(2, 3, 40, 33))
    assert outputs.shape == (2, 7)
    outputs.square().sum().backward()
    assert all(item.grad is not None and bool(item.grad.isfinite().all()) for item in model.parameters())
    assert count(model) < 0.02 * PARAMETERS[name] + 1e6


def test_blocks_begin_as_the_identity_where_asked() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32)
    for zero in (True, False):
        model = imagenet_model("resnet18", 5, width=0.25, zero_init=zero)
        stem = model.get_submodule("pool")(model.get_submodule("stem")(images))
        assert torch.equal(model.get_submodule("blocks.0")(stem), stem) is zero


def test_group_norm_sees_no_other_image_and_batch_norm_does() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 32, 32)
    for norm, same in (("group", True), ("batch", False)):
        model = resnet(8, norm=norm)
        assert torch.allclose(model(images)[:2], model(images[:2]), atol=1e-5) is same
