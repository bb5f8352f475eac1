"""The image networks layer by layer: forward passes written down again with torch's functions; initial values."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task_images.models.layers import widen
from task_images.models.resnet import resnet
from task_images.models.vgg import vgg

State = dict[str, Tensor]


def spread(model: nn.Module) -> nn.Module:
    """Scales, shifts and statistics that say something."""
    stream = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.dim() == 1:
                noise = torch.rand(value.shape, generator=stream)
                value.copy_(noise + 0.5 if "running_var" in name or name.endswith("weight") else noise - 0.5)
    return model.eval()


def convolve(state: State, name: str, x: Tensor, stride: int = 1) -> Tensor:
    kernel = state[f"{name}.weight"]
    return F.conv2d(x, kernel, state.get(f"{name}.bias"), stride, kernel.shape[-1] // 2)


def normalize(state: State, name: str, x: Tensor) -> Tensor:
    mean, variance, scale, shift = (
        state[f"{name}.{kind}"][:, None, None] for kind in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (variance + 1e-5).sqrt() * scale + shift


def classify(state: State, x: Tensor) -> Tensor:
    return x.mean((2, 3)) @ state["classifier.weight"].T + state["classifier.bias"]


def images(side: int = 32) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("depth", [8, 14])
def test_a_small_resnet_of_version_1(depth: int) -> None:
    """He et al. 2015, figure 2: ReLU after the sum; projections with normalization where the width changes."""
    model = spread(resnet(depth))
    state, blocks = model.state_dict(), (depth - 2) // 6
    x = F.relu(normalize(state, "stem.1", convolve(state, "stem.0", images(8))))
    for number in range(3 * blocks):
        name, stride = f"stages.{number}", 2 if number in (blocks, 2 * blocks) else 1
        y = F.relu(normalize(state, f"{name}.norm1", convolve(state, f"{name}.convolution1", x, stride)))
        y = normalize(state, f"{name}.norm2", convolve(state, f"{name}.convolution2", y))
        if stride == 2:
            x = normalize(state, f"{name}.shortcut.1", convolve(state, f"{name}.shortcut.0", x, 2))
        else:
            assert f"{name}.shortcut.0.weight" not in state
        x = F.relu(x + y)
    torch.testing.assert_close(model(images(8)), classify(state, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [8, 14])
def test_a_small_resnet_of_version_2(depth: int) -> None:
    """He et al. 2016, figure 1b: normalization and ReLU before the convolutions; the first block of every stage
    projects what is activated, without normalization."""
    model = spread(resnet(depth, 2))
    state, blocks = model.state_dict(), (depth - 2) // 6
    x = convolve(state, "stem", images(8))
    for number in range(3 * blocks):
        name, stride = f"stages.{number}", 2 if number in (blocks, 2 * blocks) else 1
        activated = F.relu(normalize(state, f"{name}.norm1", x))
        y = convolve(state, f"{name}.convolution1", activated, stride)
        y = convolve(state, f"{name}.convolution2", F.relu(normalize(state, f"{name}.norm2", y)))
        is_first = number % blocks == 0
        assert (f"{name}.projection.weight" in state) is is_first
        x = y + (convolve(state, f"{name}.projection", activated, stride) if is_first else x)
    x = F.relu(normalize(state, "norm", x))
    torch.testing.assert_close(model(images(8)), classify(state, x), rtol=1e-4, atol=1e-4)


# --- initial values -------------------------------------------------------------------------------------------------


def test_linear_layers_of_vgg_begin_small_and_all_biases_with_zero() -> None:
    torch.manual_seed(0)
    model = vgg(11, 50, 0.125, "batch")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert float(module.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
        if isinstance(module, nn.Conv2d | nn.Linear):
            assert module.bias is not None
            assert not module.bias.any()


@pytest.mark.parametrize(
    ("channels", "width", "wide"),
    [(64, 0.0625, 8), (64, 0.19, 16), (64, 0.18, 8), (192, 0.125, 24), (64, 8.0, 512), (3, 1.0, 8), (28, 1.0, 32)],
)
def test_widths_are_rounded_to_eights(channels: int, width: float, wide: int) -> None:
    assert widen(channels, width) == wide
