"""Going on after an interruption: what a training loop writes after every epoch, and how it reads that back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from task_images.comm.base import Strategy
from task_images.harness.checkpoint import load_checkpoint, save_checkpoint
from task_images.harness.distributed import World
from task_images.harness.schedules import Schedule

NAME = "checkpoint.pt"
OWN = {"form", "task", "model", "optimizer", "method", "schedule", "epoch", "updates"}


@dataclass(frozen=True)
class Progress:
    """How far the training in a checkpoint had come."""

    epoch: int = 0
    updates: int = 0


@dataclass(frozen=True)
class Resumption:
    """Where checkpoints of `task` go (`save`: a folder) and come from (`load`: a file); either may be None.

    `facts` must be the same on both sides: whatever decides the shape of the model and the order of the data.
    A checkpoint can be read with any number of ranks, but the same curve follows only with the same global batch.
    """

    task: str
    facts: dict[str, Any]
    save: Path | None = None
    load: Path | None = None

    def __post_init__(self) -> None:
        if taken := OWN & set(self.facts):
            raise ValueError(f"a checkpoint has entries of its own called {', '.join(sorted(taken))}")

    def restore(self, world: World, strategy: Strategy, schedule: Schedule) -> Progress:
        """Set all to what `load` holds. Raises EnvironmentUnfitError or TaskUsageError where it does not fit."""
        if self.load is None:
            return Progress()
        state = load_checkpoint(world, self.load, self.task, self.facts)
        strategy.load_state_dict(state)
        for name, value in state["schedule"].items():
            setattr(schedule, name, value)
        return Progress(state["epoch"], state["updates"])

    def store(self, world: World, strategy: Strategy, schedule: Schedule, progress: Progress) -> None:
        """Write `save`/checkpoint.pt, replacing the one before. Collective, within the strategy's consensus."""
        if self.save is None:
            return
        state = {
            **self.facts,
            **strategy.state_dict(),
            "schedule": {name: value for name, value in vars(schedule).items() if isinstance(value, int | float)},
            "epoch": progress.epoch,
            "updates": progress.updates,
        }
        save_checkpoint(world, self.save / NAME, self.task, state)
