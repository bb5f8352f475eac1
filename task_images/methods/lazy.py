"""torch, imported when it is first used: the command line reads the files of methods, and must not wait for it."""

import importlib
from typing import TYPE_CHECKING, Any


class Lazy:
    """A module that is imported when one of its attributes is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # the next access does not come here
        return value


if TYPE_CHECKING:
    import torch as torch
    import torch.distributed as dist
    from torch import nn as nn

    from task_images import world as replicas
else:
    torch, dist, nn = Lazy("torch"), Lazy("torch.distributed"), Lazy("torch.nn")
    replicas = Lazy("task_images.world")

__all__ = ["Lazy", "dist", "nn", "replicas", "torch"]
