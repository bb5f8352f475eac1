"""Make a data folder ready for a task, before any run: `python -m task_images.harness.prepare TASK`.

What a run would do first is done once here: official archives are fetched if their licence allows it, or taken from
the folder; checked, converted, and kept in the cache that runs find. Progress goes to standard error, the result as one
JSON object to standard output. Interrupted, it goes on where it stopped when it is started again.

A task of the catalogue has `prepare_data(folder, parameters) -> DataIdentity` in its module `data`.
"""

import importlib
import json
import sys
from pathlib import Path

from task_images.contract import Contract
from task_images.harness.cache import data_folder
from task_images.harness.entry import run
from task_images.harness.errors import TaskUsageError


def main(contract: Contract) -> None:
    """Prepare the data of the task that the first argument names, in the run's data folder."""
    if len(sys.argv) not in (2, 3):
        raise TaskUsageError("the name of one task is needed", "python -m task_images.harness.prepare TASK [PACKAGE]")
    name, package = sys.argv[1], (sys.argv[2:] or [f"task_images.{sys.argv[1]}"])[0]
    try:
        module = importlib.import_module(f"{package}.data") if package.replace(".", "").isidentifier() else None
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.data"):
            raise
        module = None
    prepare = getattr(module, "prepare_data", None)
    if prepare is None:
        raise TaskUsageError(f"the task {name[:60]!r} has no data to prepare", "mlbench tasks shows all tasks.")
    folder = data_folder(contract)
    # Tasks print progress; the result alone belongs to standard output.
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        identity = prepare(folder, contract.parameters)
    finally:
        sys.stdout = out
    result = {"task": name, "folder": str(Path(folder).absolute()), "data_identity": identity.to_dict()}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run(main)
