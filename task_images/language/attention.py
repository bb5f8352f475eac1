"""Selects torch's implementation of attention, and reports which one is used."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from task_images.contract import TaskUsageError

Options = dict[str, object]

ATTENTION: dict[str, SDPBackend | None] = {
    "auto": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def choose_attention(name: str, sizes: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> Options:
    """Restrict torch to the implementation `name` in this process. Returns options for the result, with the
    implementation that torch selects for causal attention of `sizes` (sequences, heads, tokens, channels per head).

    Raises TaskUsageError if the device does not support it. A context around the forward pass would not be enough,
    because activation checkpointing recomputes blocks in the backward pass.
    """
    wanted = ATTENTION[name]
    torch.backends.cuda.enable_flash_sdp(wanted in (None, SDPBackend.FLASH_ATTENTION))  # these apply to CPUs, too
    torch.backends.cuda.enable_cudnn_sdp(wanted in (None, SDPBackend.CUDNN_ATTENTION))
    torch.backends.cuda.enable_mem_efficient_sdp(wanted in (None, SDPBackend.EFFICIENT_ATTENTION))
    torch.backends.cuda.enable_math_sdp(wanted in (None, SDPBackend.MATH))
    sample = torch.empty(sizes, device=device, dtype=dtype, requires_grad=True)
    kernel = find_kernel(sample, sample, sample, is_causal=True)
    if kernel is None:
        raise TaskUsageError(
            f"no implementation of attention called {name} computes heads of {sizes[-1]} channels in {dtype} here",
            "--set attention=auto",
        )
    return {"attention": name, "attention_kernel": kernel}


def find_kernel(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool = False) -> str | None:
    """The implementation that torch selects for these tensors; None if no allowed one supports them."""
    try:
        found = torch._fused_sdp_choice(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa)
    except RuntimeError:
        return None
    return next((name for name, backend in ATTENTION.items() if backend is not None and backend.value == found), None)
