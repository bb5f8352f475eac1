"""Linear layers with 8-bit products. Results differ from bf16, so this is an option with its own label.

Forward pass: features and weights in e4m3. Backward pass: gradients in e5m2, which has more range. Each tensor has one
scale, from its largest absolute value, so nothing overflows. The hardware accumulates in higher precision, and results
have the format of the features. Weights, their gradients and the optimizer stay in fp32.
"""

from typing import Any

import torch
from torch import Tensor, nn

from task_images.contract import TaskUsageError

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
TILE = 16  # torch._scaled_mm requires multiples in both dimensions of the second factor


class Float8Linear(nn.Linear):
    """A linear layer with 8-bit products. Parameters, names and initial values are those of nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        flat = input.flatten(0, -2)
        rows = flat.shape[0]
        if rows % TILE:  # the product of gradients and features sums over rows
            flat = nn.functional.pad(flat, (0, 0, 0, TILE - rows % TILE))
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        result: Tensor = _Product.apply(flat.to(dtype), self.weight)
        result = result[:rows].view(*input.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias.to(result.dtype)


class _Product(torch.autograd.Function):
    """features @ weight^T."""

    @staticmethod
    def forward(context: Any, features: Tensor, weight: Tensor) -> Tensor:
        left, left_scale = _round(features, FORWARD)
        right, right_scale = _round(weight, FORWARD)
        context.save_for_backward(left, left_scale, right, right_scale)
        context.dtype = features.dtype
        return torch._scaled_mm(left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=features.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        left, left_scale, right, right_scale = context.saved_tensors
        rounded, scale = _round(gradient, BACKWARD)
        # The second factor must be column-major.
        of_features = torch._scaled_mm(
            rounded, right.t().contiguous().t(), scale_a=scale, scale_b=right_scale, out_dtype=context.dtype
        )
        of_weight = torch._scaled_mm(
            rounded.t().contiguous(),
            left.t().contiguous().t(),
            scale_a=scale,
            scale_b=left_scale,
            out_dtype=torch.float32,
        )
        return of_features, of_weight


def _round(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`tensor` divided by its scale in 8 bits, and the scale."""
    largest = torch.finfo(dtype).max
    scale = (tensor.abs().amax().float() / largest).clamp(min=1e-12)
    return (tensor.float() / scale).clamp(-largest, largest).to(dtype), scale


def use_float8(modules: list[nn.Module]) -> None:
    """Make the linear layers among `modules` compute in 8 bits, with the same parameters."""
    for module in modules:
        if type(module) is nn.Linear and not (module.in_features % TILE or module.out_features % TILE):
            module.__class__ = Float8Linear


def require_float8(device: torch.device) -> None:
    """Raises TaskUsageError unless the device can multiply 8-bit matrices, which is tried."""
    try:
        one = torch.ones((), device=device)
        square = torch.ones(TILE, TILE, device=device).to(FORWARD)
        torch._scaled_mm(square, square.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise TaskUsageError(
            f"this device cannot multiply 8-bit floating-point numbers: {' '.join(str(error).split())[:200]}",
            "--set float8=none, or NVIDIA GPUs of compute capability 8.9 or later (L4, L40S, H100).",
        ) from None
