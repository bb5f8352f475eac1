"""The networks of ImageNet: their published sizes, any classes and images, and normalization without a batch."""

from functools import cache

import pytest
import torch
from torch import nn

from task_images.models.imagenet import MODELS, imagenet_model
from task_images.models.resnet import make_norm, resnet, widen

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


@pytest.mark.parametrize(("channels", "groups"), [(16, 8), (64, 32), (256, 32), (1000, 25), (7, 1), (1, 1)])
def test_groups_divide_the_channels(channels: int, groups: int) -> None:
    norm = make_norm("group")(channels)
    assert norm.num_groups == groups
    norm(torch.zeros(1, channels, 2, 2))


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="resnet19"):
        imagenet_model("resnet19")
    with pytest.raises(ValueError, match="layer"):
        imagenet_model("resnet18", norm="layer")


@cache
def describe(name: str, width: float = 1.0) -> nn.Module:
    """The model without memory."""
    with torch.device("meta"):
        return imagenet_model(name, width=width).eval()


@pytest.mark.parametrize("name", ["resnet50"])
def test_a_width_of_8_has_eight_times_the_channels_of_the_published_network(name: str) -> None:
    """Channels are multiples of 8, which at width 1 hides a table that is off by a few channels."""
    pairs = list(zip(describe(name).parameters(), describe(name, 8.0).parameters(), strict=True))
    for number, (one, other) in enumerate(pairs):
        inputs = 1 if number == 0 else 8  # images have three channels in both
        factor = 8 * inputs if one.dim() > 1 else 8
        if number >= len(pairs) - 2:  # both have 1000 classes
            factor //= 8
        assert other.numel() == factor * one.numel(), (number, one.shape, other.shape)


@pytest.mark.parametrize(("channels", "width", "wide"), [(64, 1.0, 64), (64, 0.5, 32), (20, 1.0, 16), (4, 0.1, 8)])
def test_channels_are_the_nearest_multiple_of_8(channels: int, width: float, wide: int) -> None:
    assert widen(channels, width) == wide


@pytest.mark.parametrize("depth", [2, 7, 9, 19, 21])
def test_small_resnets_have_a_depth_of_6n_plus_2(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth 6n\\+2, not {depth}"):
        resnet(depth)
    assert count(resnet(8)) < count(resnet(14))


def test_classifiers_begin_small_and_without_bias() -> None:
    """He et al. and Goyal et al. 2017, section 5.1: a standard deviation of 0.01."""
    torch.manual_seed(0)
    model = imagenet_model("resnet18", width=0.25)
    weight, bias = model.get_parameter("classifier.weight"), model.get_parameter("classifier.bias")
    assert weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert not bias.any()
