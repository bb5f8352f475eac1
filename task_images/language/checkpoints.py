"""Distributed checkpoints (torch.distributed.checkpoint): every rank writes its part, any number of ranks can resume.

A checkpoint is a folder step-N with the parts and `mlbench.json`: position and clock of the training, and settings that
must match in the run that resumes from it. A rank's state of the method is in `method-RANK.pt`, and `rank- RANK.sha256`
has the digests of the files written by a rank, in the format of `sha256sum -c`: nothing is gathered on one rank. The
folder is renamed when all ranks have written their parts, so a folder with that name is complete. All ranks must use
the same folder: with several machines, on a shared file system.
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from task_images.contract import EnvironmentUnfitError, TaskUsageError
from task_images.methods.base import MethodState, join_method_states
from task_images.world import World

FACTS = "mlbench.json"
METHOD = "method-{}.pt"  # per rank
DIGESTS = "rank-{}.sha256"  # digests of the files written by a rank
FORM = 3  # 2: with position and clock of the training; 3: a file per rank with the method's state, and digests


def save_step(
    world: World,
    target: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    facts: Mapping[str, Any],
    method_state: MethodState | None = None,
) -> None:
    """Write the folder `target`: parts of model and optimizer, and `facts` (a JSON object). Every rank must call this.

    `method_state` is that of the method, to be read by `load_method_state`. `optimizer` is None if its state is in
    there.
    """
    partial = target.with_name(f"{target.name}.partial")
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    with _without_single_process_warning():
        save(_collect(model, optimizer), checkpoint_id=str(partial))
    own = sorted(partial.glob(f"__{world.rank}_*.distcp"))
    if method_state and (world.is_first or method_state.get("ranks")):
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
    """Restore model and optimizer from the checkpoint in `path`. `optimizer` is None if the method has its state.
    Raises EnvironmentUnfitError if a part is damaged, TaskUsageError if the optimizer's state is stored in the other
    way."""
    if (read_facts(path, {}).get("optimizer") == "method") != (optimizer is None):
        raise TaskUsageError(
            f"{path} has its optimizer's state in another form than this method needs (sharded or whole)",
            "Resume with the method that made it.",
        )
    state = _collect(model, optimizer)
    try:
        with _without_single_process_warning():
            load(state, checkpoint_id=str(path))
    except (Exception, CheckpointException) as error:  # readers of damaged parts may raise anything
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise EnvironmentUnfitError(f"{path} cannot be read as a checkpoint: {why}", "Use an earlier one.") from None
    optimizers = () if optimizer is None else (optimizer,)
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state.get("optimizer") or {})


def _collect(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """This rank's part of a checkpoint: the model, and the optimizer's state unless the method has it."""
    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    own, moments = get_state_dict(model, optimizer)
    return {"model": own, "optimizer": moments}


def load_method_state(path: Path, rank: int, size: int) -> MethodState:
    """The method's state in the checkpoint; empty if there is none. With the same number of ranks, each rank reads its
    own part; with another number, each reads all parts. Raises EnvironmentUnfitError if it is damaged."""
    files = [path / METHOD.format(number) for number in range(len(list(path.glob(METHOD.format("*")))))]
    return join_method_states(lambda number: _read_method_state(files[number]), len(files), rank, size)


def _read_method_state(file: Path) -> MethodState:
    try:
        found: MethodState = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # readers of damaged files may raise anything
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise EnvironmentUnfitError(f"{file} cannot be read: {why}", "Use an earlier checkpoint.") from None
    return found


def check_digests(world: World, path: Path) -> None:
    """Raises EnvironmentUnfitError, on every rank, if a file of the checkpoint does not match its digest. Each rank
    checks its share of the files. Collective."""
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
        raise EnvironmentUnfitError(f"{path} is damaged: {why}", "Use an earlier checkpoint.")


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_facts(path: Path, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """The contents of `mlbench.json`. Raises EnvironmentUnfitError if `path` is not a checkpoint, TaskUsageError if it
    belongs to another task, model or seed than `expected`, or was made with other `parameters`."""
    try:
        found = json.loads((path / FACTS).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentUnfitError(
            f"{path} is not a checkpoint: {error}", "Name a folder step-N that every rank can read."
        ) from None
    if not isinstance(found, dict) or found.get("form") != FORM:
        raise EnvironmentUnfitError(f"{path / FACTS} is not of the form {FORM}", "Use another checkpoint.")
    made, own = ({**facts, **facts.get("parameters", {})} for facts in (found, expected))
    for name, value in own.items():
        if name != "parameters" and made.get(name) != value:
            raise TaskUsageError(
                f"{path} was made with {name} = {made.get(name)!r}, this run has {value!r}",
                "Resume with the parameters of the run that made it; number of workers and parallelism may differ.",
            )
    return found


class _without_single_process_warning(warnings.catch_warnings):
    """Suppresses torch's warning that a checkpoint without a process group is from a single process, which is
    intended."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message=".*single process.*")
