"""Frameworks other than torch whose collectives, or trainings, run between the ranks of a run.

torch's gloo keeps the ranks together outside the clock (rendezvous, barriers, what ranks tell each other), so figures
differ by what the framework does alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from task_images.harness import jax_ranks, tensorflow_ranks
from task_images.harness.ranks import Ranks

# By the name of the backend. Each has find(), facts() and connect(world).
FRAMEWORKS: dict[str, ModuleType] = {module.NAME: module for module in (jax_ranks, tensorflow_ranks)}


class FrameworkRanks(Protocol):
    """This process among those of a framework.

    collectives  what it has, by the names of the task allreduce; in_place: of these, what can change its input
    """

    title: str
    collectives: Collection[str]
    in_place: Collection[str]

    def put(self, host: Tensor) -> Any:
        """A copy of this rank's data (1-D) as the framework's array."""

    def get(self, array: Any) -> Tensor:
        """This rank's data of an array."""

    def collective(self, name: str, *, donate: bool) -> Callable[[Any], Any]:
        """The collective from array to array, which returns when it is done. `donate`: the input may be overwritten."""

    def close(self) -> None:
        """Leave together with the others."""


class World(Ranks, Protocol):
    """Ranks with companions, which leave with them."""

    companions: list[Any]


def open_framework(world: World) -> Any:
    """The ranks of the framework that the run's backend names, once per world; they leave with it. Collective."""
    for companion in world.companions:
        if hasattr(companion, "collectives"):
            return companion
    ranks = FRAMEWORKS[world.backend].connect(world)
    world.companions.append(ranks)
    return ranks
