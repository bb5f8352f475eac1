"""Frameworks other than torch whose collectives, or trainings, run between the ranks of a run."""

from __future__ import annotations

from typing import Any

from task_images.harness.framework_ranks import FrameworkRanks
from task_images.harness.jax_ranks import JaxRanks
from task_images.harness.tensorflow_ranks import TensorFlowRanks

FRAMEWORKS: dict[str, type[FrameworkRanks]] = {one.backend: one for one in (JaxRanks, TensorFlowRanks)}


def open_framework(world: Any) -> Any:
    """The ranks of the framework that the backend of `world` (distributed.World) names, once per world; they leave with
    it. Collective."""
    for companion in world.companions:
        if isinstance(companion, FrameworkRanks):
            return companion
    ranks = FRAMEWORKS[world.backend](world)
    world.companions.append(ranks)
    return ranks
