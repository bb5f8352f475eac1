"""What the models of both language tasks share: activation checkpointing, initial values, the choice of attention."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from task_images.contract import TaskUsageError
from task_images.data import generator

# --- activation checkpointing ---------------------------------------------------------------------------------------


def checkpoint_fully(block: nn.Module, *inputs: Any) -> Tensor:
    """The block's outputs; the backward pass recomputes the block from its inputs."""
    return cast("Tensor", checkpoint(block, *inputs, use_reentrant=False))


def checkpoint_selectively(block: nn.Module, *inputs: Any) -> Tensor:
    """Like `checkpoint_fully`, but stores the results of matrix products and attention, the most expensive ones."""
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    return cast("Tensor", checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts))


_KEPT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product", "_c10d_functional::")


def _keep_products(_context: object, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_kept = operation.name().startswith(_KEPT)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def choose_runner(checkpointing: str) -> Callable[..., Tensor] | None:
    """The function with which a model runs each of its blocks; None: directly. Modules are not wrapped, so parameters
    keep their names."""
    return {"none": None, "selective": checkpoint_selectively, "full": checkpoint_fully}[checkpointing]


# --- initial values -------------------------------------------------------------------------------------------------

DRAWN_ROWS = 64  # rows of a tensor drawn at a time
NO_ROWS: Mapping[str, int] = MappingProxyType({})


def materialize(
    model: nn.Module, deviation: Callable[[str], float], seed: int, unused_rows: Mapping[str, int], device: torch.device
) -> None:
    """Give a model on the meta device its parameters on `device`; tied parameters stay tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    fill_parameters(model, deviation, seed, unused_rows)


@torch.no_grad()
def fill_parameters(
    model: nn.Module, deviation: Callable[[str], float], seed: int, unused_rows: Mapping[str, int] = NO_ROWS
) -> None:
    """Set initial values: 1 for scales of norms, 0 for other vectors, and normal numbers for matrices, with a deviation
    by name. They do not depend on how the model is sharded, because each DRAWN_ROWS rows of a tensor have their own
    generator on the CPU. Unused rows at the end of a tensor are 0 and do not change the others.

    A rank draws only rows of which it has a part: with 8 billion numbers and 64 ranks, 125 million.
    """
    for name, parameter in model.named_parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.dim() < 2:
            own.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        own.zero_()
        rows, used = find_rows(parameter), parameter.shape[0] - unused_rows.get(name, 0)
        for block in range(rows.start // DRAWN_ROWS * DRAWN_ROWS, min(rows.stop, used), DRAWN_ROWS):
            drawn = torch.empty((min(DRAWN_ROWS, used - block), *parameter.shape[1:])).normal_(
                0.0, deviation(name), generator=generator(seed, "initial", name, block // DRAWN_ROWS)
            )
            begin, stop = max(block, rows.start), min(block + len(drawn), rows.stop)
            own[begin - rows.start : stop - rows.start].copy_(drawn[begin - block : stop - block])


def find_rows(parameter: Tensor) -> range:
    """The rows of a tensor that this rank has: its part of one that FSDP has sharded, else all."""
    count, mesh = parameter.shape[0], getattr(parameter, "device_mesh", None)
    if mesh is None:
        return range(count)
    step = -(-count // mesh.size(mesh.ndim - 1))  # like torch.chunk: the last ranks may have less, or nothing
    start = mesh.get_local_rank(mesh.ndim - 1) * step
    return range(min(start, count), min(start + step, count))


# --- attention --------------------------------------------------------------------------------------------------------


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
