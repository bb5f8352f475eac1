"""Checkpoints whose methods keep something of each rank."""

import threading
from pathlib import Path

import torch

from task_images.checkpoint import load_checkpoint, save_checkpoint
from tests.unit.task_images.threads import ThreadWorld, run_ranks


def test_the_checkpoint_is_there_only_after_the_parts_of_all_ranks(tmp_path: Path) -> None:
    """A kill in between leaves the earlier one."""
    path, written = tmp_path / "checkpoint.pt", threading.Event()

    def body(world: ThreadWorld) -> float:
        own = [torch.tensor(1.0 * rank) if rank == world.rank else None for rank in range(2)]
        state = {"position": {"total": 3}, "method": {"ranks": own}}
        if world.rank == 1:  # is late with its part
            assert not written.wait(0.5)
            assert not path.exists()
        save_checkpoint(world, path, "task", state)
        found = load_checkpoint(world, path, "task", {})
        return float(found["method"]["ranks"][world.rank])

    assert run_ranks(2, body) == [0.0, 1.0]
