"""Distributed checkpoints (torch.distributed.checkpoint): every rank writes its part, any number of ranks can go on.

A checkpoint is a folder step-N with the parts and `mlbench.json`: position and clock of the training, and what must be
equal in the run that goes on from it.
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
FORM = 2  # 2: position and clock of the training, too


def save_step(
    world: World, target: Path, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
) -> None:
    """Write the folder `target`: parts of model and optimizer, and `facts` (what JSON can hold). Every rank must call
    it."""
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
        (partial / FACTS).write_text(json.dumps({"form": FORM, **facts}) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    world.barrier()


def load_step(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set model and optimizer to the checkpoint in `path`. Raises EnvironmentUnfitError if a part is damaged."""
    own, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": own, "optimizer": moments}  # words: ok
    try:
        with _without_single_process_warning():
            load(state, checkpoint_id=str(path))
    except Exception as error:  # damaged parts raise what their readers raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise EnvironmentUnfitError(f"{path} cannot be read as a checkpoint: {why}", "Take an earlier one.") from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def read_facts(path: Path, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `mlbench.json` says. Raises EnvironmentUnfitError if `path` is no checkpoint, TaskUsageError if it belongs
    to another task, model, batch or seed than `expected`."""
    try:
        found = json.loads((path / FACTS).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentUnfitError(
            f"{path} is no checkpoint: {error}", "Name a folder step-N, which every rank can read."
        ) from None
    if not isinstance(found, dict) or found.get("form") != FORM:
        raise EnvironmentUnfitError(f"{path / FACTS} is not of the form {FORM}", "Take another checkpoint.")
    for name, value in expected.items():
        if found.get(name) != value:
            raise TaskUsageError(
                f"{path} was made with {name} = {found.get(name)!r}, this run has {value!r}",
                "Resume with the parameters of the run that made it; number of workers and parallelism may differ.",
            )
    return found


class _without_single_process_warning(warnings.catch_warnings):
    """torch warns that a checkpoint without a process group is one of a single process: it is."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message=".*single process.*")
