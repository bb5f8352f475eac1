"""Parameters that tasks share, each declared once: name, type, default, range and help.

A class is a group that a task.yaml names under `groups`; the catalogue reads it with `describe`, and the task's own
Settings inherit from it. A task's preset `spec` may name another default. No torch: mlbench imports this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

CUDNN = ("default", "deterministic", "benchmark")


@dataclass(frozen=True)
class Protocol:
    """Updates of the warm-up, which are not timed; blocks; updates of each block. blocks = 0: no measurement."""

    warmup: int = 10
    blocks: int = 10
    updates: int = 10

    @property
    def is_on(self) -> bool:
        """Whether anything is measured."""
        return self.blocks > 0

    @property
    def total(self) -> int:
        """Updates of the whole run."""
        return self.warmup + self.blocks * self.updates


def parameter(
    default: Any,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of a group. `min` and `max` are for numbers, `choices` for texts."""
    limits = {"min": min, "max": max, "choices": list(choices)}
    return field(
        default=default,
        metadata={**{key: value for key, value in limits.items() if value not in (None, [])}, "help": help},
    )


def describe(group: type) -> dict[str, dict[str, Any]]:
    """The parameters of a group as a task.yaml writes them, with their defaults."""
    return {
        each.name: {"type": str(getattr(each.type, "__name__", each.type)), **each.metadata, "default": each.default}
        for each in fields(group)
    }


@dataclass(frozen=True)
class TrainingSettings:
    """Group `training`. Every training: how long it goes on, and whether its speed is measured instead."""

    budget_seconds: float = parameter(
        0.0,
        "train for this long, validation included, and report how far that comes (--budget); 0: to the goal",
        min=0,
        max=2592000,
    )
    blocks_after: int = parameter(10, "throughput: updates before the first block", min=0, max=1000000)
    blocks: int = parameter(0, "throughput: timed blocks, and no goal; 0: train to the goal", min=0, max=100000)
    block_updates: int = parameter(10, "throughput: updates of a block", min=1, max=1000000)

    @property
    def protocol(self) -> Protocol:
        return Protocol(self.blocks_after, self.blocks, self.block_updates)


@dataclass(frozen=True)
class CudaSettings:
    """Group `cuda`. Arithmetic on NVIDIA GPUs (precision.set_arithmetic); nothing changes on CPUs."""

    tf32: bool = parameter(False, "GPU: let fp32 products round their factors to 10 bits (TF32)")
    cudnn: str = parameter(
        "default",
        "GPU: how cuDNN chooses algorithms; deterministic: the same bits in every run; benchmark: try all, "
        "take the fastest",
        choices=CUDNN,
    )


@dataclass(frozen=True)
class AccuracyOnSettings:
    """Group `accuracy_on`. Which samples' accuracy is the goal."""

    goal_on: str = parameter(
        "validation",
        "samples whose accuracy the goal is; training: those of the epoch, as augmented and before the model "
        "learned from them",
        choices=("validation", "training"),
    )


@dataclass(frozen=True)
class SgdSettings:
    """Group `sgd`. SGD with momentum."""

    momentum: float = parameter(0.9, "momentum of SGD", min=0, max=1)
    nesterov: bool = parameter(True, "Nesterov momentum")
    weight_decay: float = parameter(0.0001, "weight decay on all parameters", min=0, max=1)


@dataclass(frozen=True)
class AccuracySettings:
    """Group `accuracy`. Goals of a classification."""

    goal_full: float = parameter(80.0, "Prec@1 in percent at which the clock stops", min=0, max=100)
    goal_light: float = parameter(70.0, "the easier goal", min=0, max=100)


@dataclass(frozen=True)
class CheckpointSettings:
    """Group `checkpoints`. Checkpoints of trainings that count in epochs."""

    checkpoint: bool = parameter(False, "write a checkpoint into the results after every epoch")
    resume: str = parameter("", "a checkpoint to go on from; every worker needs a copy")


@dataclass(frozen=True)
class SpeedSettings:
    """Group `speed`. Faster ways to compute the same (harness/speed.py); all are listed in the result."""

    channels_last: bool = parameter(True, "memory format of images and convolutions; the same mathematics")
    compile: str = parameter(
        "no",
        "torch.compile, for each block of the model or for all of it; graphs: all of it, replayed as CUDA "
        "graphs on a GPU; compiling counts as training",
        choices=("no", "blocks", "whole", "graphs"),
    )
    precision: str = parameter(
        "fp32", "bf16, fp16: mixed, with parameters in fp32 (fp16 on GPUs only)", choices=("fp32", "bf16", "fp16")
    )
    loaders: int = parameter(2, "threads that load and augment ahead", min=0, max=256)


@dataclass(frozen=True)
class UpdateSettings:
    """Group `updates`. Trainings that count in updates rather than in epochs."""

    report_every: int = parameter(25, "updates between reports of the training loss", min=1, max=1000000)
    checkpoint_every: int = parameter(0, "updates between checkpoints in the output; 0 never", min=0, max=1000000000)
    resume: str = parameter("", "path of the checkpoint to go on from; empty for none")


@dataclass(frozen=True)
class LayoutSettings:
    """Group `pretraining`. Pretraining of language models on any layout of ranks."""

    vocabulary: int = parameter(0, "tokens that the model knows; 0: those of the model's shape", min=0, max=4194304)
    synthetic_tokens: int = parameter(4194304, "tokens of synthetic data", min=1024, max=4294967296)
    global_batch: int = parameter(480, "sequences per update, all ranks together", min=1, max=1048576)
    batch_per_rank: int = parameter(
        0,
        "sequences per update and data-parallel rank, instead of global_batch (weak scaling); 0: global_batch",
        min=0,
        max=1048576,
    )
    micro_batch: int = parameter(
        12,
        "sequences per pass and data-parallel rank; 0: the whole part of a rank in one pass",
        min=0,
        max=65536,
    )
    steps: int = parameter(10000, "most updates; the learning rate ends there", min=1, max=100000000)
    learning_rate: float = parameter(0.0006, "highest rate of AdamW", min=0, max=100)
    warmup_steps: int = parameter(700, "updates of linear warm-up", min=0, max=10000000)
    schedule: str = parameter(
        "cosine",
        "after the warm-up; cosine: half a cosine down to final_rate; linear: the highest rate, then a line "
        "down to final_rate over the last decay_share of the updates",
        choices=("cosine", "linear"),
    )
    decay_share: float = parameter(0.7, "share of the updates in which schedule=linear goes down", min=1e-06, max=1)
    final_rate: float = parameter(0.1, "share of learning_rate at which the schedule ends", min=0, max=1)
    beta1: float = parameter(0.9, "of AdamW", min=0, max=1)
    beta2: float = parameter(0.95, "of AdamW", min=0, max=1)
    epsilon: float = parameter(1e-08, "of AdamW", min=0, max=1)
    weight_decay: float = parameter(0.1, "of matrices; scales, shifts and biases have none", min=0, max=10)
    clip: float = parameter(1.0, "greatest norm of the gradient; 0: no limit", min=0, max=1000000)
    evaluate_every: int = parameter(250, "updates between two validations", min=1, max=100000000)
    replicas: int = parameter(
        0,
        "copies of the sharded model with hsdp; 0: one on each node, or 2 if nodes have one rank each",
        min=0,
        max=65536,
    )
    reshard: bool = parameter(True, "FSDP frees gathered parameters after the forward pass")
    activation_checkpointing: str = parameter(
        "none",
        "what the backward pass computes again: nothing, all but matrix products and attention, or whole blocks",
        choices=("none", "selective", "full"),
    )
    precision: str = parameter(
        "bf16", "bf16: mixed, with parameters and sums of gradients in fp32", choices=("fp32", "bf16")
    )
    compile: str = parameter(
        "no",
        "torch.compile, for each block and the output with its loss, or for all of the model; graphs: all of "
        "it, replayed as CUDA graphs on a GPU; compiling counts as training",
        choices=("no", "blocks", "whole", "graphs"),
    )
    attention: str = parameter(
        "auto",
        "implementation of attention; auto: what torch chooses. The result names the one that was used",
        choices=("auto", "flash", "cudnn", "efficient", "math"),
    )
    checkpoint_every: int = parameter(0, "updates between two distributed checkpoints; 0: none", min=0, max=100000000)
    checkpoint_dir: str = parameter("", "folder for checkpoints that all ranks share")
    resume: str = parameter("", "a checkpoint (folder step-N) to go on from, on any number of ranks")
    goal_light: float = parameter(3.6, "the easier goal", min=0, max=1000)


GROUPS: Mapping[str, type] = {
    "training": TrainingSettings,
    "cuda": CudaSettings,
    "accuracy_on": AccuracyOnSettings,
    "sgd": SgdSettings,
    "accuracy": AccuracySettings,
    "checkpoints": CheckpointSettings,
    "speed": SpeedSettings,
    "updates": UpdateSettings,
    "pretraining": LayoutSettings,
}
