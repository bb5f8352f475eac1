"""The benchmark programs. A package that declares `TASK` is a task: read its `task.py` first. They share these modules:

contract     what the tool gives a task and takes from it, failures by exit code; all that the tool and its tasks share
train        the training loop: epochs, validation, goal, budget; `Trainer`; passes on batches; number formats
metrics      of a whole data set, and losses, over all ranks
classification   of images, from model and data to the result
methods      how gradients travel: a method is a file
run          `python -m task_images.run TASK` is a rank: contract in, exit code out
parameters   what a task declares of itself; describe: writes it to catalog.json, which the tool reads
world        the ranks: rendezvous, device, collectives; tensorflow_ranks: collectives of TensorFlow beside them
clock        time by category, and throughput in timed blocks; peak: FLOPs and the device's peak rate
report       data identity, goals, events and log lines
data         random streams, partition over ranks, batches from arrays; images: cropped, flipped, synthetic
cache        data converted once per machine; fetch: downloads; published: where data sets are; prepare: a program
checkpoint   folders to resume from, also after a restart by the agent; schedules, speed: what their names say
facts        machine and code, for the environment event; cores: usable CPUs; gpu: NCCL's choices and GPU samples
public       the stable interface for other people's tasks
language, translation, resnet     shared by the language tasks, the translation tasks and the image tasks
"""

import importlib
from typing import Any


class Lazy:
    """A module that is imported when one of its attributes is first used: not all ranks need it, or it takes long."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # the next access does not come here
        return value
