"""Options of tasks that compute the same faster, all listed in the result."""

import os
import shutil
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from task_images.contract import Contract, EnvironmentUnfitError, TaskUsageError
from task_images.methods.catalog import make_method
from task_images.parameters import SpeedSettings

# At most, per block: for the usual batch, and once more for other changes that torch detects.
COMPILATIONS = 2


def choose_compile(asked: str, contract: Contract) -> str:
    """What to compile on several ranks: `blocks` instead of `whole` for methods that shard a model, or hook single
    gradients, because the code of a whole model returns all gradients at once, after the backward pass. Only for its
    own DistributedDataParallel does torch split that code, at the buckets.

    Raises TaskUsageError for methods that hook single layers or change weights, which do not work in a graph replay.
    """
    if not contract.method:
        return asked
    method = make_method(contract.method)
    if asked == "graphs" and (method.gates or not method.identical or not method.replays):
        raise TaskUsageError(
            "compile=graphs replays the whole model, but this method uses its layers or moves its parameters",
            "--set compile=blocks, or a method that exchanges gradients before the update, such as bsp",
        )
    is_in_parts = contract.world_size > 1 and (method.hooks or method.is_sharded)
    return "blocks" if asked == "whole" and is_in_parts else asked


def apply_speed(settings: SpeedSettings, model: nn.Module) -> None:
    """Change memory format and code of `model` in place; parameters stay the same objects. Compiled code is used only
    for training batches of the usual size, see train.Samples."""
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)
    compile_modules(model, settings.compile, blocks_of(model))


def compile_modules(model: nn.Module, what: str, blocks: Sequence[nn.Module], is_full: bool = False) -> None:
    """Compile each block of the model, so that gradients still appear one after another; or the whole model; "graphs":
    all of it, and on a GPU the kernels of a pass are recorded once and replayed as CUDA graphs, so that small steps do
    not wait for kernel launches. `is_full`: fail if a part cannot be compiled."""
    if what == "no":
        return
    require_compiler(what)
    modules = (blocks if what == "blocks" else []) or [model]
    _allow_compilations(COMPILATIONS * len(modules))
    for module in modules:
        module.compile(fullgraph=is_full, mode="reduce-overhead" if what == "graphs" else None)


def compile_seconds() -> float:
    """Seconds this process has spent in torch.compile, forward and backward passes together."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


# The requirements of torch's CUDA graphs on a training loop (torch.compiler_cudagraph_trees in its documentation): a
# replay overwrites the memory of the previous one, so outputs and gradients are valid only within a pass. Every pass is
# announced, and gradients that persist across updates are accumulated in separate memory.


def allocate_gradients(parameters: Iterable[Tensor]) -> None:
    """Allocate missing gradients. Otherwise autograd would keep a graph's output as the gradient, and the next pass
    would add its gradients to themselves."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def are_graphs_replayed(device: torch.device) -> bool:
    """Whether all compiled code became graphs; never on a CPU. Torch gives the reason only in its log."""
    from torch._dynamo.utils import counters

    return device.type == "cuda" and not counters["inductor"]["cudagraph_skips"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a sequential forward pass, without single layers, which are hardly worth compiling."""
    parts = (part for child in model.children() if isinstance(child, nn.Sequential) for part in child)
    return [part for part in parts if any(True for _ in part.children())]


def _allow_compilations(number: int) -> None:
    """Raise torch's limit of compilations: blocks of a kind share code, and torch counts by code. Beyond its limit (8)
    it would run the rest uncompiled and only log that."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, number)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, number)


def require_compiler(compile: str) -> None:
    """Check that torch.compile finds a compiler: Inductor compiles C++ for CPUs, and Triton a C launcher for GPUs.

    Raises EnvironmentUnfitError (exit 78) with what to install.
    """
    wanted = (os.environ.get("CXX"), os.environ.get("CC"), "g++", "clang++", "gcc", "clang", "cc")
    if not any(name and shutil.which(name) for name in wanted):
        raise EnvironmentUnfitError(
            f"compile={compile} needs a C++ compiler, but there is none on PATH: install g++ (Debian: apt-get install "
            "g++), or run with --set compile=no"
        )
