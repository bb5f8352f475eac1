"""Faster ways to compute the same: options of a task, all listed in its result."""

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.precision import LossScale, Precision

# What overflows is noticed and left out; so begin high, where small gradients survive.
FIRST_LOSS_SCALE = 65536.0


# For each block, at most: the usual batch, and once more for whatever else torch finds changed.
COMPILATIONS = 2


@dataclass(frozen=True)
class SpeedOptions:
    """channels_last   memory format of images and convolutions
    compile            "no", "blocks" (torch.compile for each block of the model, so that gradients still appear one
                       after another), "whole", or "graphs": whole, and on a GPU the kernels of a pass are recorded once
                       and replayed as CUDA graphs, so that small steps do not wait for the host that launches them
                       (see `Graphs`); for training batches of the usual size, see training.SampleWork
    precision          fp32; bf16 or fp16: mixed, with parameters in fp32
    loaders            threads that load data ahead
    """

    channels_last: bool
    compile: str
    precision: str
    loaders: int

    def apply(self, model: nn.Module) -> None:
        """Change memory format and code of `model` in place; parameters stay the same objects."""
        if self.channels_last:
            model.to(memory_format=torch.channels_last)
        if self.compile == "no":
            return
        require_compiler(self.compile)
        modules = (blocks_of(model) if self.compile == "blocks" else []) or [model]
        _allow_compilations(COMPILATIONS * len(modules))
        for module in modules:
            module.compile(mode="reduce-overhead" if self.compile == "graphs" else None)

    @property
    def graphs(self) -> "Graphs | None":
        """What a training with CUDA graphs has to keep to; None without."""
        return Graphs() if self.compile == "graphs" else None

    def make_precision(self, device: torch.device) -> Precision:
        """The precision on a device, with a fresh loss scale for float16."""
        return Precision(self.precision, device, LossScale(value=FIRST_LOSS_SCALE))

    def facts(self) -> Mapping[str, object]:
        """For the result; what the trainer itself knows is not among them."""
        return {"channels_last": self.channels_last, "compile": self.compile, "loaders": self.loaders}


def compile_seconds() -> float:
    """Seconds this process has spent in torch.compile, forward and backward passes together."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


class Graphs:
    """What torch's CUDA graphs ask of a training loop (torch.compiler_cudagraph_trees in its documentation).

    A replay writes into the memory of the last one: its outputs and gradients do not outlive the pass. So every pass is
    announced, and gradients that stay from one update to the next are added up in memory of their own.
    """

    def prepare(self, parameters: Iterable[Tensor]) -> None:
        """Give gradients that are not there yet their own memory. Autograd would else keep what a graph wrote, and the
        next pass add its gradients to themselves."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def begin_pass(self) -> None:
        """Announce a pass: nothing that the graphs wrote before is needed any more."""
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def are_replayed(self, device: torch.device) -> bool:
        """Whether all that was compiled became graphs; never on a CPU. Torch says why not in its log only."""
        from torch._dynamo.utils import counters

        return device.type == "cuda" and not counters["inductor"]["cudagraph_skips"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The parts that the forward pass is a sequence of, without single layers, which are hardly worth compiling."""
    parts = (part for child in model.children() if isinstance(child, nn.Sequential) for part in child)
    return [part for part in parts if any(True for _ in part.children())]


def _allow_compilations(number: int) -> None:
    """Blocks of a kind share their code, and torch counts compilations by code: beyond its limit (8) it would go on
    without compiling the rest, and only say so in the log."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, number)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, number)


def require_compiler(compile: str) -> None:
    """Check that torch.compile finds a compiler: Inductor builds C++ for CPUs, and Triton a C launcher for GPUs.

    Raises EnvironmentUnfitError (exit 78) with what to install.
    """
    wanted = (os.environ.get("CXX"), os.environ.get("CC"), "g++", "clang++", "gcc", "clang", "cc")
    if not any(name and shutil.which(name) for name in wanted):
        raise EnvironmentUnfitError(
            f"compile={compile} needs a C++ compiler, and there is none on PATH: install g++ (Debian: apt-get install "
            "g++), or run with --set compile=no"
        )
