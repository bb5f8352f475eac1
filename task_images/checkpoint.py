"""Checkpoints: written atomically, and readable with any number of ranks.

A checkpoint has the state needed to resume training exactly: parameters, optimizer, loss scale, position in the data.
Rank 0 writes it. The method's state of rank N (e.g. residuals) is in checkpoint-UPDATE-rank-N.pt, written by that rank.
No random states are saved, because permutations and dropout are functions of seed and position.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from task_images.contract import EnvironmentUnfitError, TaskUsageError
from task_images.elastic import refuse_other_run, replace_file
from task_images.methods.base import MethodState, join_method_states
from task_images.world import World

FORM = 3
OWN = "{}-{}-rank-{}.pt"  # stem of the checkpoint, update, rank


def save_checkpoint(world: World, path: Path, task: str, state: Mapping[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings, lists and dictionaries of these) to `path` on rank 0, and each rank's
    part of its entry `method` to a file next to that rank's `path`. An existing checkpoint is replaced only after the
    new one is on disk. Collective if there are per-rank files."""
    own = None
    if (state.get("method") or MethodState()).get("ranks"):
        own = path.with_name(OWN.format(path.stem, state["position"]["total"], world.rank))
        save_own_checkpoint(own, task, {"method": state["method"]})
        state = {**state, "method": {}, "method_ranks": world.size}
        world.barrier()  # all per-rank files exist before the checkpoint that needs them
    if world.is_first:
        save_own_checkpoint(path, task, state)
    if own is not None:
        world.barrier()
        for old in path.parent.glob(OWN.format(path.stem, "*", world.rank)):
            if old != own:
                old.unlink()


def save_own_checkpoint(path: Path, task: str, state: Mapping[str, Any]) -> None:
    """Write `state` to `path`, from any rank and thread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        torch.save({"form": FORM, "task": task, **state}, file)


def share_file(world: World, path: Path) -> bool:
    """Copy a file from the first rank that has it to those that do not, on other machines; False if none has it.
    Collective."""
    holders = [rank for rank, (has_it,) in enumerate(world.gather([float(path.exists())])) if has_it]
    if not holders or len(holders) == world.size:
        return bool(holders)
    source = holders[0]
    data = path.read_bytes() if world.rank == source else b""
    size = int(world.max([len(data)])[0])
    content = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    content = world.broadcast(content.to(world.device if world.backend == "nccl" else "cpu"), source)
    if world.rank not in holders:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{world.rank}")  # another rank of this machine may write the same file
        with replace_file(own) as file:
            file.write(content.cpu().numpy().tobytes())
        own.replace(path)
    return True


def load_checkpoint(world: World, path: Path, task: str, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state in `path` and in this rank's own file, with tensors on the CPU. Only data are unpickled, no code.

    `expected`: see `refuse_other_run`. Raises EnvironmentUnfitError if a file is missing or damaged, TaskUsageError if
    it belongs to another run.
    """
    state = _read(world, path, task)
    refuse_other_run(path, state, expected)
    if not state.get("method_ranks"):
        return state

    def read(rank: int) -> MethodState:
        found: MethodState = _read(world, find_own(path, state["position"]["total"], rank), task)["method"]
        return found

    return {**state, "method": join_method_states(read, state["method_ranks"], world.rank, world.size)}


def find_own(path: Path, update: int, rank: int) -> Path:
    """The file of rank `rank` for the checkpoint `path`: in the same folder, or in that rank's output folder, whose
    name ends with the rank instead of 0."""
    name = OWN.format(path.stem, update, rank)
    beside = path.with_name(name)
    return beside if beside.exists() else path.parent.with_name(path.parent.name.removesuffix("0") + str(rank)) / name


def _read(world: World, path: Path, task: str) -> Mapping[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise EnvironmentUnfitError(
            f"rank {world.rank} finds no checkpoint {path}",
            "Every worker needs a copy of checkpoint.pt and, beside it, of what the method kept of its rank.",
        ) from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = " ".join(str(error).split())[:200]
        raise EnvironmentUnfitError(f"{path} cannot be read as a checkpoint: {why}", "Use an earlier one.") from None
    if not isinstance(state, dict) or state.get("form") != FORM or state.get("task") != task:
        raise TaskUsageError(f"{path} is not a checkpoint of {task} in the form {FORM}")
    return state
