"""Checkpoints: written whole or not at all, by rank 0, and readable with any number of ranks.

A checkpoint holds what training needs to go on as if it had not stopped: parameters, optimiser, loss scale, position in
the data. No generator's state is in it, since permutations and dropout are functions of the seed and that position.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from task_images.harness.array_checkpoint import refuse_other_run
from task_images.harness.distributed import World
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.files import replace_file

FORM = 2  # 2: the strategy's own state


def save_checkpoint(world: World, path: Path, task: str, state: Mapping[str, Any]) -> None:
    """Write `state` (tensors, numbers, texts, lists and dictionaries of these) to `path`. Rank 0 writes; a checkpoint
    that is there already is replaced only when the new one is safely on the disk."""
    if world.is_first:
        save_own_checkpoint(path, task, state)


def save_own_checkpoint(path: Path, task: str, state: Mapping[str, Any]) -> None:
    """As `save_checkpoint`, on any rank and in any thread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        torch.save({"form": FORM, "task": task, **state}, file)


def share_file(world: World, path: Path) -> None:
    """Give rank 0's file to the ranks that do not have it, because they are on other machines. Collective."""
    if not world.sum([0.0 if path.exists() else 1.0])[0]:
        return
    data = path.read_bytes() if world.is_first and path.exists() else b""
    size = int(world.agree(len(data)))
    if not size:
        return
    content = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    content = world.broadcast(content.to(world.device if world.backend == "nccl" else "cpu"))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            file.write(content.cpu().numpy().tobytes())


def load_checkpoint(world: World, path: Path, task: str, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state in `path`, tensors on the CPU. Nothing but data is unpickled.

    `expected`: see `refuse_other_run`. Raises EnvironmentUnfitError if the file is missing or damaged, TaskUsageError
    if it belongs to something else.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise EnvironmentUnfitError(
            f"rank {world.rank} finds no checkpoint {path}", "Every worker needs a copy of it."
        ) from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = " ".join(str(error).split())[:200]
        raise EnvironmentUnfitError(f"{path} cannot be read as a checkpoint: {why}", "Take an earlier one.") from None
    if not isinstance(state, dict) or state.get("form") != FORM or state.get("task") != task:
        raise TaskUsageError(f"{path} is not a checkpoint of {task} in the form {FORM}")
    refuse_other_run(path, state, expected)
    return state
