"""Distributed checkpoints (torch.distributed.checkpoint): every rank writes its part, any number of ranks can go on.

A checkpoint is a folder step-N with the parts and `mlbench.json`: position and clock of the training, and what must be
equal in the run that goes on from it. What a method keeps of a rank is in `method-RANK.pt`, and `rank-RANK.sha256` has
the digests of the files that a rank has written, for `sha256sum -c`, too: nothing is collected on one rank.
It gets its name only when all ranks have written their part, so a folder with that name is whole. The folder must be
the same for all ranks: on several machines, on a shared file system.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from task_images.comm.base import MethodState, has_own_parts, join_method_states
from task_images.harness.distributed import World
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError

FACTS = "mlbench.json"
METHOD = "method-{}.pt"  # of a rank
DIGESTS = "rank-{}.sha256"  # of what a rank has written
FORM = 3  # 2: position and clock of the training, too; 3: a file per rank of what methods keep, and digests


def save_step(
    world: World,
    target: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    facts: Mapping[str, Any],
    method_state: MethodState | None = None,
) -> None:
    """Write the folder `target`: parts of model and optimizer, and `facts` (what JSON can hold). Every rank must call
    it.

    `method_state` is what `comm.base.Strategy.method_state` gave, for `load_method_state` to read.
    `optimizer` is None if its state is in there.
    """
    partial = target.with_name(f"{target.name}.partial")
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    with _without_single_process_warning():
        save(_collect(model, optimizer), checkpoint_id=str(partial))
    own = sorted(partial.glob(f"__{world.rank}_*.distcp"))
    if method_state and (world.is_first or has_own_parts(method_state)):
        own.append(partial / METHOD.format(world.rank))
        torch.save({**method_state}, own[-1])
    sums = "".join(f"{_digest(file)}  {file.name}\n" for file in own)
    (partial / DIGESTS.format(world.rank)).write_text(sums)
    world.barrier()
    if world.is_first:
        place = {} if optimizer is not None else {"optimizer": "method"}
        (partial / FACTS).write_text(json.dumps({"form": FORM, **place, **facts}) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    world.barrier()


def load_step(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Set model and optimizer to the checkpoint in `path`. `optimizer` is None if the method has its state. Raises
    EnvironmentUnfitError if a part is damaged, TaskUsageError if the optimizer's state is in the other place."""
    if (read_facts(path, {}).get("optimizer") == "method") != (optimizer is None):
        raise TaskUsageError(
            f"{path} has its optimizer's state in another form than this method, which keeps it in parts or whole",
            "Resume with the method that made it.",
        )
    state = _collect(model, optimizer)
    try:
        with _without_single_process_warning():
            load(state, checkpoint_id=str(path))
    except Exception as error:  # damaged parts raise what their readers raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise EnvironmentUnfitError(f"{path} cannot be read as a checkpoint: {why}", "Take an earlier one.") from None
    optimizers = () if optimizer is None else (optimizer,)
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state.get("optimizer") or {})


def _collect(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """What a checkpoint has of this rank: the model, and the optimizer's state unless the method has it."""
    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    own, moments = get_state_dict(model, optimizer)
    return {"model": own, "optimizer": moments}


def load_method_state(path: Path, rank: int, size: int) -> MethodState:
    """The method's state in the checkpoint; empty if it has none. Of as many ranks as wrote it each gets its own, in
    its place; of another number each gets all. Raises EnvironmentUnfitError if it is damaged."""
    files = [path / METHOD.format(number) for number in range(len(list(path.glob(METHOD.format("*")))))]
    return join_method_states(lambda number: _read_method_state(files[number]), len(files), rank, size)


def _read_method_state(file: Path) -> MethodState:
    try:
        found: MethodState = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises what its reader raises
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise EnvironmentUnfitError(f"{file} cannot be read: {why}", "Take an earlier checkpoint.") from None
    return found


def check_digests(world: World, path: Path) -> None:
    """Raise EnvironmentUnfitError, on every rank, if a file of the checkpoint is not as it was written. Each rank reads
    its share of the files. Collective."""
    lines = [line for one in sorted(path.glob(DIGESTS.format("*"))) for line in one.read_text("utf-8").splitlines()]
    wrong = []
    for line in lines[world.rank :: world.size]:
        digest, _, name = line.partition("  ")
        try:
            if _digest(path / name) != digest:
                wrong.append(f"{name} has changed since it was written")
        except OSError as error:
            wrong.append(str(error))
    if world.max([float(len(wrong))])[0]:
        why = wrong[0] if wrong else "another rank has found a damaged file"
        raise EnvironmentUnfitError(f"{path} is damaged: {why}", "Take an earlier checkpoint.")


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_facts(path: Path, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `mlbench.json` says. Raises EnvironmentUnfitError if `path` is no checkpoint, TaskUsageError if it belongs
    to another task, model or seed than `expected`, or was made with other `parameters`."""
    try:
        found = json.loads((path / FACTS).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentUnfitError(
            f"{path} is no checkpoint: {error}", "Name a folder step-N, which every rank can read."
        ) from None
    if not isinstance(found, dict) or found.get("form") != FORM:
        raise EnvironmentUnfitError(f"{path / FACTS} is not of the form {FORM}", "Take another checkpoint.")
    made, own = ({**facts, **facts.get("parameters", {})} for facts in (found, expected))
    for name, value in own.items():
        if name != "parameters" and made.get(name) != value:
            raise TaskUsageError(
                f"{path} was made with {name} = {made.get(name)!r}, this run has {value!r}",
                "Resume with the parameters of the run that made it; number of workers and parallelism may differ.",
            )
    return found


class _without_single_process_warning(warnings.catch_warnings):
    """torch warns that a checkpoint without a process group is one of a single process: it is."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message=".*single process.*")
