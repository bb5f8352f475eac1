"""Distribute a model over ranks: mesh, checkpointing, compilation, sharding, initial values.

The order matters, and is that of `spread`: compile blocks, shard them (FSDP2), allocate and fill all parameters. The
optimizer must be created last: otherwise it would have outdated parameters, and training would not learn anything.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from task_images.contract import TaskUsageError
from task_images.data import generator
from task_images.language.layout import Layout
from task_images.methods.fsdp import shard
from task_images.speed import require_compiler
from task_images.world import World, require_sharding

# name of a parameter -> standard deviation of its initial values; None: 1 for scales, 0 for the rest
Deviation = Callable[[str], float | None]
DRAWN_ROWS = 64  # rows of a tensor drawn at a time


@dataclass(frozen=True)
class SpreadOptions:
    """Options of `spread`.

    precision      fp32 or bf16, for FSDP's gathering and computing; gradients are summed in fp32
    reshard        whether FSDP frees gathered parameters after the forward pass (ZeRO-3) or keeps them (ZeRO-2)
    compile        what torch.compile compiles: "no", "blocks" (each of the modules given as `compiled`), "whole" or
                   "graphs" (the model, with CUDA graphs on a GPU)
    """

    precision: str = "fp32"
    reshard: bool = True
    compile: str = "no"


def make_mesh(world: World, layout: Layout) -> DeviceMesh | None:
    """The mesh (replicas, shards) of all ranks; None for one rank, or for plain replication."""
    if layout.ranks == 1 or layout.name == "ddp":
        return None
    require_sharding(world)
    sizes = (layout.replicas, layout.shards)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=("replicas", "shards"))


def spread(
    world: World,
    layout: Layout,
    options: SpreadOptions,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    *,
    deviation: Deviation,
    seed: int,
    compiled: Iterable[nn.Module] = (),
    apart: tuple[Sequence[nn.Module], Sequence[nn.Module]] = ((), ()),
    unused_rows: Mapping[str, int] = MappingProxyType({}),
) -> nn.Module:
    """Distribute `model`, created on the meta device, over all ranks, with initial values that depend only on `seed`.

    blocks        modules that FSDP gathers one at a time, and that are compiled
    compiled      additional modules to compile
    apart         modules before and after the blocks that FSDP gathers separately; all others are gathered first and
                  kept
    unused_rows   number of rows at the end of a parameter that stay 0, by parameter name
    """
    mesh = make_mesh(world, layout)
    blocks = list(blocks)
    if options.compile != "no":
        require_compiler(options.compile)
    if options.compile == "blocks":
        for block in (*blocks, *compiled):
            block.compile(fullgraph=True)
    elif options.compile != "no":
        model.compile(fullgraph=True, mode="reduce-overhead" if options.compile == "graphs" else None)
    if mesh is not None:
        _shard(mesh, layout, options, model, [*apart[0], *blocks, *apart[1]])
    allocate(model, world.device)
    fill_parameters(model, deviation, seed, unused_rows)
    return model


def _shard(
    mesh: DeviceMesh, layout: Layout, options: SpreadOptions, model: nn.Module, groups: Sequence[nn.Module]
) -> None:
    """Apply FSDP2 to every group, given in the order of the forward pass, and to the root, so that all other parameters
    are reduced, too. Each group is gathered while the previous one computes, in both directions."""
    dimensions = ("replicas", "shards") if layout.name == "hsdp" else ("shards",)
    shard(model, groups, mesh[dimensions], is_bf16=options.precision == "bf16", reshard=options.reshard)
    # The backward pass starts with the last group, so freeing it would only gather it again.
    cast("FSDPModule", groups[-1]).set_reshard_after_forward(False, recurse=False)
    for before, after in itertools.pairwise(groups):
        cast("FSDPModule", before).set_modules_to_forward_prefetch([cast("FSDPModule", after)])
        cast("FSDPModule", after).set_modules_to_backward_prefetch([cast("FSDPModule", before)])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"


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


# --- memory and initial values --------------------------------------------------------------------------------------


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a model on the meta device on `device`; tied parameters stay tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def fill_parameters(
    model: nn.Module, deviation: Deviation, seed: int, unused_rows: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Set initial values, which are the same for every layout, because each DRAWN_ROWS rows of a tensor have their own
    generator on the CPU. Unused rows are 0 and do not change the others.

    A rank draws only rows of which it has a part: with 8 billion numbers and 64 ranks, 125 million.
    """
    filled: set[int] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) in filled:
            continue
        filled.add(id(parameter))
        with torch.no_grad():
            used = parameter.shape[0] - unused_rows.get(name, 0) if parameter.dim() else 0
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            part = find_part(parameter)
            spread = deviation(name)
            if parameter.dim() < 2:
                local.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            local.zero_()
            for first, rows in draw_rows(
                name, part[0], used, parameter.shape[1:], 0.02 if spread is None else spread, seed
            ):
                for dim, (start, length) in enumerate(part[1:], 1):
                    rows = rows.narrow(dim, start, length)
                local[first - part[0][0] :][: len(rows)].copy_(rows)


def draw_rows(
    name: str, part: tuple[int, int], used: int, shape: Sequence[int], deviation: float, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the used rows of the tensor `name` in `part` (start, length) in pieces, each with the index of its first
    row. Rows have the given `shape`, and values that do not depend on `part`."""
    start, end = part[0], min(part[0] + part[1], used)
    for block in range(start // DRAWN_ROWS, -(-end // DRAWN_ROWS)):
        first, last = block * DRAWN_ROWS, min((block + 1) * DRAWN_ROWS, used)
        drawn = torch.empty((last - first, *shape)).normal_(
            0.0, deviation, generator=generator(seed, "initial", name, block)
        )
        begin, stop = max(first, start), min(last, end)
        yield begin, drawn[begin - first : stop - first]


def find_part(parameter: Tensor) -> list[tuple[int, int]]:
    """This rank's part of a tensor: start and length in each dimension."""
    part = [(0, size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return part
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            along: int = placement.dim  # type: ignore[attr-defined]
            start, length = part[along]
            size, index = parameter.device_mesh.size(dim), parameter.device_mesh.get_local_rank(dim)
            step = -(-length // size)  # like torch.chunk: the last ranks may have less, or nothing
            skipped = min(index * step, length)
            part[along] = start + skipped, min(step, length - skipped)
    return part


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
