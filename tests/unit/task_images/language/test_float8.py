"""8-bit products against the same numbers multiplied in fp32; refused where a device has none."""

import pytest
import torch
from torch import Tensor, nn

from task_images.contract import TaskUsageError
from task_images.gpt_pretraining.head import Float8Linear, require_float8, use_float8

CPU = torch.device("cpu")


def round_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left of `tensor` in 8 bits with one scale for all."""
    scale = tensor.abs().max() / torch.finfo(dtype).max
    return (tensor / scale).to(dtype).float() * scale


def test_products_and_gradients_are_those_of_rounded_numbers() -> None:
    torch.manual_seed(0)
    layer = Float8Linear(32, 48)
    x = torch.randn(20, 32, requires_grad=True)  # 20 rows: no whole tile
    gradient = torch.randn(20, 48)
    result = layer(x)
    result.backward(gradient)
    rounded = round_to(x.detach(), torch.float8_e4m3fn), round_to(layer.weight.detach(), torch.float8_e4m3fn)
    back = round_to(gradient, torch.float8_e5m2)
    torch.testing.assert_close(result.detach(), rounded[0] @ rounded[1].t() + layer.bias.detach(), rtol=1e-3, atol=1e-3)
    assert x.grad is not None
    assert layer.weight.grad is not None
    torch.testing.assert_close(x.grad, back @ rounded[1], rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(layer.weight.grad, back.t() @ rounded[0], rtol=1e-3, atol=1e-2)
    assert layer.bias.grad is not None
    torch.testing.assert_close(layer.bias.grad, gradient.sum(0))


def test_layers_are_changed_in_place_and_keep_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 20), nn.ReLU())
    before = dict(model.named_parameters())
    use_float8(list(model))
    assert [type(part) for part in model] == [Float8Linear, nn.Linear, nn.ReLU]  # 20 outputs are no whole tile
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_a_device_without_8_bit_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(TaskUsageError, match="compute capability") as caught:
        require_float8(CPU)
    assert "float8=none" in str(caught.value.hint)
