"""Parameters that tasks share: groups of task_images/parameters.yaml, whose defaults a test compares with these."""

from dataclasses import dataclass

from task_images.harness.throughput import Protocol

CUDNN = ("default", "deterministic", "benchmark")


@dataclass(frozen=True)
class TrainingSettings:
    """Group `training`: how long a training goes on, and whether its speed is measured instead."""

    budget_seconds: float = 0.0
    blocks_after: int = 10
    blocks: int = 0
    block_updates: int = 10

    @property
    def protocol(self) -> Protocol:
        return Protocol(self.blocks_after, self.blocks, self.block_updates)


@dataclass(frozen=True)
class CudaSettings:
    """Group `cuda`: arithmetic on NVIDIA GPUs (precision.set_arithmetic)."""

    tf32: bool = False
    cudnn: str = "default"


@dataclass(frozen=True)
class UpdateSettings:
    """Group `updates`: trainings that count in updates rather than in epochs."""

    report_every: int = 25
    checkpoint_every: int = 0
    resume: str = ""
