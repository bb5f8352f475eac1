"""Prepare a data folder for a task: `python -m task_images.harness.prepare TASK [PACKAGE [URL...]]`.

Does in advance what the first run would do: official archives are fetched if their license allows it, or taken from the
folder, then checked, converted and cached. Progress goes to standard error, the result as one JSON object to standard
output. After an interruption, it resumes where it stopped.

Files at URLs (https://, s3://, gs://) are copied into the folder first.

Catalog tasks that read data have `prepare_data(folder, parameters) -> DataIdentity` in their module `data`.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from task_images.contract import Contract
from task_images.harness.cache import data_folder, writable_folder
from task_images.harness.datasets import Archive, fetch
from task_images.harness.entry import run
from task_images.harness.errors import TaskUsageError


def main(contract: Contract) -> None:
    """Prepare the data of the task named by the first argument, in the run's data folder."""
    if len(sys.argv) < 2:
        raise TaskUsageError("the name of a task is missing", "python -m task_images.harness.prepare TASK [PACKAGE]")
    name, package, *urls = [*sys.argv[1:], *([f"task_images.{sys.argv[1]}"] if len(sys.argv) == 2 else [])]
    try:
        module = importlib.import_module(f"{package}.data") if package.replace(".", "").isidentifier() else None
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.data"):
            raise
        module = None
    prepare = getattr(module, "prepare_data", None)
    folder = data_folder(contract)
    # Tasks print progress, but standard output is for the result only.
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        _copy(urls, folder)
        identity = prepare(folder, contract.parameters).to_dict() if prepare else None
    finally:
        sys.stdout = out
    result = {"task": name, "folder": str(Path(folder).absolute()), "data_identity": identity}
    print(json.dumps(result), flush=True)


def _copy(urls: Sequence[str], folder: Path) -> None:
    """Copy the files at `urls` into `folder` unless they exist there; resumes like other downloads."""
    for url in urls:
        archive = Archive(url.rpartition("/")[2], url, 0, "", is_mirrored=False)
        if not (folder / archive.name).exists():
            fetch(archive, writable_folder(folder), print)


if __name__ == "__main__":
    run(main)
