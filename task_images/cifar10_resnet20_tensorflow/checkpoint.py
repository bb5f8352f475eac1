"""Checkpoints without torch: arrays in numpy's format, and other state as JSON."""

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from task_images.elastic import refuse_other_run, replace_file
from task_images.errors import EnvironmentUnfitError
from task_images.ranks import Ranks

FORM = 1

Arrays = Sequence[npt.NDArray[np.generic]]


def save_arrays(world: Ranks, path: Path, task: str, state: Mapping[str, Any], arrays: Arrays) -> None:
    """Write `arrays` and `state` (numbers, strings, lists and dictionaries of these) to `path`, on rank 0. An existing
    checkpoint is replaced only after the new one is on disk."""
    if not world.is_first:
        return
    facts = json.dumps({"form": FORM, "task": task, **state})
    named: dict[str, npt.ArrayLike] = {f"variable-{number}": item for number, item in enumerate(arrays)}
    with replace_file(path) as file:
        np.savez(file, facts=np.array(facts), **named)  # type: ignore[arg-type]


def load_arrays(path: Path, task: str, expected: Mapping[str, Any]) -> tuple[Mapping[str, Any], Arrays]:
    """Read state and arrays from `path`. `expected`: see `refuse_other_run`.

    Raises EnvironmentUnfitError if the file is missing or damaged, TaskUsageError if it belongs to another run.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            facts: Mapping[str, Any] = json.loads(str(stored["facts"]))
            arrays = [stored[f"variable-{number}"] for number in range(len(stored.files) - 1)]
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile) as error:
        why = " ".join(str(error).split())[:200]
        raise EnvironmentUnfitError(f"{path} cannot be read as a checkpoint: {why}", "Use another one.") from None
    refuse_other_run(path, facts, {"form": FORM, "task": task, **expected})
    return facts, arrays
