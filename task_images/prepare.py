"""Prepare a data folder for a task: `python -m task_images.prepare TASK [PACKAGE [URL...]]`.

Does in advance what the first run would do: official archives are fetched if their license allows it, or taken from the
folder, then checked, converted and cached. Progress goes to standard error, the result as one JSON object to standard
output. After an interruption, downloads resume where they stopped.

Files at URLs (https://, s3://, gs://) are copied into the folder first.

Catalog tasks that read data have `prepare_data(folder, parameters) -> DataIdentity` in their module `data` or `task`.
Those with an official validation set also have `validation_arrays(folder)`, which `load_validation` finds.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from task_images.cache import data_folder, writable_folder
from task_images.contract import Contract, TaskUsageError
from task_images.fetch import Archive, fetch
from task_images.run import find_in, find_package, run

Array = npt.NDArray[np.generic]


def main(contract: Contract) -> None:
    """Prepare the data of the task named by the first argument, in the run's data folder."""
    if len(sys.argv) < 2:
        raise TaskUsageError("the name of a task is missing", "python -m task_images.prepare TASK [PACKAGE]")
    name, package, *urls = [*sys.argv[1:], *([f"task_images.{sys.argv[1]}"] if len(sys.argv) == 2 else [])]
    prepare = find_in(package, "prepare_data", "data", "task")
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


def load_validation(task: str, folder: str | Path) -> tuple[Array, Array]:
    """Inputs and targets of the whole validation set of a task, in their published order and unscaled.

    mnist, cifar10_resnet20 and its variants    images [n, channels, height, width] of bytes, labels [n]
    imagenet_resnet                             paths of images [n], labels [n]
    epsilon_logistic_regression                 features [n, d], labels [n], 0 or 1
    wikitext2_awd_lstm, gpt_pretraining         words or tokens [n], the next words or tokens [n]
    wmt16_gnmt, wmt17_transformer               sentences [n] and references [n], as strings

    `folder` has the data sets, as prepared by `mlbench data prepare`; images of MNIST and CIFAR-10 are fetched if
    missing. Raises TaskUsageError for a task without such a set, and errors of reading the data.
    """
    name = (task if task.isidentifier() else "_").removesuffix("_ddp").removesuffix("_tensorflow")  # the same data
    package = find_package(name)
    found = find_in(package, "validation_arrays", "data", "task") if package.startswith("task_images.") else None
    if found is None:
        raise TaskUsageError(
            f"the task {task[:60]!r} has no validation set of arrays",
            "All tasks with a goal have one, except digits_resnet and bert_pretraining, whose sets depend on the seed.",
        )
    inputs, targets = found(Path(folder))
    return inputs, targets


if __name__ == "__main__":
    run(main)
