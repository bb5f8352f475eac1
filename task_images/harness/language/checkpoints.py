"""Distributed checkpoints (torch.distributed.checkpoint): every rank writes its part, any number of ranks can go on.

A checkpoint is a folder step-N with the parts and `mlbench.json`: what must be equal in the run that goes on from it.
It gets its name only when all ranks have written their part, so a folder with that name is whole. The folder must be
the same for all ranks: on several machines, on a shared file system.
"""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from task_images.harness.distributed import World
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError

FACTS = "mlbench.json"


def save_step(
    world: World, folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
) -> Path:
    """Write `folder`/step-N after `step` updates. Every rank must call it."""
    target = folder / f"step-{step}"
    partial = target.with_name(f"{target.name}.partial")
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    own, moments = get_state_dict(model, optimizer)
    with _without_single_process_warning():
        save({"model": own, "optimizer": moments}, checkpoint_id=str(partial))
    world.barrier()
    if world.is_first:
        (partial / FACTS).write_text(json.dumps({"step": step, **facts}) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    world.barrier()
    return target


def load_step(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> int:
    """Set model and optimizer to the checkpoint in `path`; returns its step. Raises EnvironmentUnfitError if it is
    missing or damaged, TaskUsageError if it belongs to another model, batch or seed."""
    found = read_facts(path)
    for name, value in facts.items():
        if found.get(name) != value:
            raise TaskUsageError(
                f"{path} was made with {name} = {found.get(name)!r}, this run has {value!r}",
                "Resume with the parameters of the run that made it; number of workers and parallelism may differ.",
            )
    own, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": own, "optimizer": moments}  # words: ok
    try:
        with _without_single_process_warning():
            load(state, checkpoint_id=str(path))
    except Exception as error:  # damaged parts raise what their readers raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise EnvironmentUnfitError(f"{path} cannot be read as a checkpoint: {why}", "Take an earlier one.") from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(found["step"])


def read_facts(path: Path) -> Mapping[str, Any]:
    """What `mlbench.json` says. Raises EnvironmentUnfitError if `path` is no checkpoint."""
    try:
        found = json.loads((path / FACTS).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentUnfitError(
            f"{path} is no checkpoint: {error}", "Name a folder step-N, which every rank can read."
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        raise EnvironmentUnfitError(f"{path / FACTS} does not say after which step it was made", "Take another one.")
    return found


class _without_single_process_warning(warnings.catch_warnings):
    """torch warns that a checkpoint without a process group is one of a single process: it is."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message=".*single process.*")
