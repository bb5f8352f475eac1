"""The image networks layer by layer: forward passes written down again with torch's functions; initial values."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task_images.harness.models import densenet as densenets
from task_images.harness.models import imagenet_resnet as resnets
from task_images.harness.models import inception as inceptions
from task_images.harness.models import vgg as vggs
from task_images.harness.models.counting import count_parameters
from task_images.harness.models.densenet import densenet
from task_images.harness.models.imagenet_resnet import imagenet_resnet
from task_images.harness.models.layers import make_norm, widen
from task_images.harness.models.resnet import resnet
from task_images.harness.models.resnet_jax import make_resnet
from task_images.harness.models.vgg import vgg

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


@pytest.mark.parametrize("depth", [18, 50])
def test_a_resnet_of_imagenet(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """He et al. 2015, table 1; a bottleneck has its stride in the 3x3 convolution (version 1.5)."""
    stages = (1, 2, 1, 2)
    monkeypatch.setitem(resnets.RESNETS, depth, (depth == 50, stages))
    model = spread(imagenet_resnet(depth, 5, width=0.125))
    state = model.state_dict()
    x = F.relu(normalize(state, "stem.1", F.conv2d(images(), state["stem.0.weight"], None, 2, 3)))
    x = F.max_pool2d(x, 3, 2, 1)
    number = 0
    for stage, count in enumerate(stages):
        for index in range(count):
            name, stride = f"blocks.{number}", 2 if stage and not index else 1
            y = x
            kinds = ((0, 1), (3, stride), (6, 1)) if depth == 50 else ((0, stride), (3, 1))
            for place, (layer, step) in enumerate(kinds):
                y = F.relu(y) if place else y
                y = convolve(state, f"{name}.branch.{layer}", y, step)
                y = normalize(state, f"{name}.branch.{layer + 1}", y)
            if f"{name}.shortcut.0.weight" in state:
                assert not index
                x = normalize(state, f"{name}.shortcut.1", convolve(state, f"{name}.shortcut.0", x, stride))
            x = F.relu(x + y)
            number += 1
    torch.testing.assert_close(model(images()), classify(state, x), rtol=1e-3, atol=1e-3)


def test_a_densenet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Huang et al. 2017: every layer sees all earlier ones; between blocks channels and sides are halved."""
    monkeypatch.setitem(densenets.DENSENETS, 121, (2, 1, 3))
    model = spread(densenet(121, 5, width=0.25))
    state = model.state_dict()
    x = F.relu(normalize(state, "stem.1", F.conv2d(images(), state["stem.0.weight"], None, 2, 3)))
    x = F.max_pool2d(x, 3, 2, 1)
    place = 0
    for block, layers in enumerate((2, 1, 3)):
        if block:
            y = F.relu(normalize(state, f"blocks.{place}.0", x))
            x = F.avg_pool2d(convolve(state, f"blocks.{place}.2", y), 2)
            assert x.shape[1] == y.shape[1] // 2
            place += 1
        for _ in range(layers):
            name = f"blocks.{place}.branch"
            y = convolve(state, f"{name}.2", F.relu(normalize(state, f"{name}.0", x)))
            assert y.shape[1] == 4 * 8  # four times the growth
            x = torch.cat([x, convolve(state, f"{name}.5", F.relu(normalize(state, f"{name}.3", y)))], 1)
            place += 1
    x = F.relu(normalize(state, "norm", x))
    torch.testing.assert_close(model(images()), classify(state, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [None, "batch"])
def test_a_vgg(norm: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simonyan and Zisserman 2014: 3x3 convolutions, a pool after every stage, three linear layers on a 7x7 grid."""
    monkeypatch.setitem(vggs.VGGS, 11, (1, 2, 1, 1, 1))
    monkeypatch.setattr(vggs, "HIDDEN", 64)
    model = spread(vgg(11, 5, 0.125, norm))
    state, x = model.state_dict(), images()
    for stage, count in enumerate((1, 2, 1, 1, 1)):
        step = 3 if norm else 2
        for index in range(count):
            x = convolve(state, f"stages.{stage}.{step * index}", x)
            if norm:
                x = normalize(state, f"stages.{stage}.{step * index + 1}", x)
            x = F.relu(x)
        x = F.max_pool2d(x, 2)
    x = F.adaptive_avg_pool2d(x, 7).flatten(1)
    for layer in (0, 3, 6):
        x = F.linear(F.relu(x) if layer else x, state[f"classifier.{layer}.weight"], state[f"classifier.{layer}.bias"])
    torch.testing.assert_close(model(images()), x, rtol=1e-4, atol=1e-4)


# --- initial values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "fan_out"),
    [
        (lambda: resnet(8), True),
        (lambda: resnet(8, 2), True),
        (lambda: imagenet_resnet(18, 5, 0.25), True),
        (lambda: vgg(11, 5, 0.125), True),
        (lambda: densenet(121, 5, 0.25), False),
        (lambda: nn.Sequential(*(inceptions._convolution(make_norm("batch"), 1.0, 32, 48, 3) for _ in "123")), False),
    ],
)
def test_convolutions_keep_the_variance_of_one_direction(
    make: Callable[[], nn.Module], fan_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He et al. 2015: a variance of 2 / (kernel x channels), of outputs or of inputs."""
    monkeypatch.setitem(densenets.DENSENETS, 121, (2, 1, 3))
    torch.manual_seed(0)
    ratios = []
    for module in make().modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 2000:
            outputs, inputs, height, width = module.weight.shape
            fan = height * width * (outputs if fan_out else inputs)
            ratios.append(float(module.weight.detach().var()) * fan / 2)
    assert len(ratios) >= 3
    assert ratios == pytest.approx([1.0] * len(ratios), rel=0.2)


def test_linear_layers_of_vgg_begin_small_and_all_biases_with_zero() -> None:
    torch.manual_seed(0)
    model = vgg(11, 50, 0.125, "batch")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert float(module.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
        if isinstance(module, nn.Conv2d | nn.Linear):
            assert module.bias is not None
            assert not module.bias.any()


@pytest.mark.parametrize("zero", [True, False])
def test_the_last_scale_of_every_block_begins_with_0_or_1(zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goyal et al. 2017, section 5.1."""
    monkeypatch.setitem(resnets.RESNETS, 50, (True, (1, 1, 2, 1)))
    model = imagenet_resnet(50, 5, 0.125, zero_init=zero)
    scales = {name: value for name, value in model.named_parameters() if value.dim() == 1 and "weight" in name}
    last = {name for name in scales if name.endswith("branch.7.weight")}
    assert len(last) == 5
    for name, value in scales.items():
        assert set(value.tolist()) == {0.0 if zero and name in last else 1.0}, name


@pytest.mark.parametrize(
    ("channels", "width", "wide"),
    [(64, 0.0625, 8), (64, 0.19, 16), (64, 0.18, 8), (192, 0.125, 24), (64, 8.0, 512), (3, 1.0, 8), (28, 1.0, 32)],
)
def test_widths_are_rounded_to_eights(channels: int, width: float, wide: int) -> None:
    assert widen(channels, width) == wide


def test_parameters_without_memory_count_too() -> None:
    assert count_parameters([torch.empty(3, 4), torch.empty(5, device="meta")]) == 17
    assert count_parameters([]) == 0


# --- in JAX ---------------------------------------------------------------------------------------------------------


def convolve_as_jax(x: Any, kernel: Any, strides: Any, padding: Any, dimension_numbers: Any) -> Any:
    assert dimension_numbers == ("NCHW", "OIHW", "NCHW")
    assert padding[0] == padding[1] == (padding[0][0],) * 2
    return F.conv2d(torch.from_numpy(x), torch.from_numpy(kernel), None, strides, padding[0][0]).numpy()


def log_softmax(x: Any) -> Any:
    return torch.from_numpy(x).log_softmax(-1).numpy()


# What the program uses of JAX, by numpy and torch.
JAX: Any = SimpleNamespace(
    numpy=np,
    nn=SimpleNamespace(relu=lambda x: np.maximum(x, 0), log_softmax=log_softmax),
    lax=SimpleNamespace(conv_general_dilated=convolve_as_jax),
)


@pytest.mark.parametrize("depth", [8, 14])
def test_a_resnet_in_jax_computes_what_torch_computes(depth: int) -> None:
    model = spread(resnet(depth, channels=3, classes=10))
    parameters = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    buffers = {
        name: value.numpy().copy() for name, value in model.named_buffers() if not name.endswith("batches_tracked")
    }
    program = make_resnet(JAX)
    labels = torch.tensor([3, 7])
    found = program.evaluate(parameters, buffers, images(8).numpy())
    with torch.no_grad():
        np.testing.assert_allclose(found, model(images(8)), rtol=1e-3, atol=1e-3)
        loss, (outputs, changed) = program.train(parameters, buffers, images(8).numpy(), labels.numpy())
        wanted = model.train()(images(8))
    np.testing.assert_allclose(outputs, wanted, rtol=1e-3, atol=1e-3)
    assert float(loss) == pytest.approx(float(F.cross_entropy(wanted, labels)), rel=1e-3)
    after = dict(model.named_buffers())
    for name, value in changed.items():
        np.testing.assert_allclose(value, after[name], rtol=1e-3, atol=1e-3, err_msg=name)
    assert not np.allclose(buffers["stem.1.running_mean"], changed["stem.1.running_mean"])
    batch = (torch.zeros(4, 3, 8, 8), torch.zeros(4))
    inputs, weight, samples = program.unpack(batch)
    assert (inputs is batch, weight, samples) == (True, 1.0, 4.0)
