"""The official validation sets of catalog tasks, for other programs that are measured by a task's goal."""

import importlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from task_images.harness.errors import TaskUsageError

Array = npt.NDArray[np.generic]


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
    try:
        found = getattr(importlib.import_module(f"task_images.{name}.data"), "validation_arrays", None)
    except ModuleNotFoundError as error:
        if error.name not in (f"task_images.{name}", f"task_images.{name}.data"):
            raise
        found = None
    if found is None:
        raise TaskUsageError(
            f"the task {task[:60]!r} has no validation set of arrays",
            "All tasks with a goal have one, except digits_resnet and bert_pretraining, whose sets depend on the seed.",
        )
    inputs, targets = found(Path(folder))
    return inputs, targets
