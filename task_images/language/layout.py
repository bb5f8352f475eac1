"""The layout of ranks, computed from sizes only. Standard library only, so that a run can be rejected before it starts.

Ranks form a mesh (replicas, shards), the last dimension varying fastest: ranks that share a copy of the state are
neighbors, because they communicate most.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from task_images.contract import TaskUsageError

PARALLEL = ("ddp", "fsdp2", "hsdp")


class LayoutError(TaskUsageError, ValueError):
    """Incompatible sizes."""


@dataclass(frozen=True)
class Layout:
    """A mesh of `replicas` x `shards` ranks; with FSDP, `shards` ranks share one copy of the state.

    name   one of PARALLEL
    """

    name: str
    replicas: int
    shards: int

    @property
    def ranks(self) -> int:
        """Number of ranks, each of which trains on its own part of a global batch."""
        return self.replicas * self.shards

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are split over ranks by FSDP."""
        return self.name != "ddp"


def plan_layout(name: str, ranks: int, replicas: int = 0, per_node: int = 1) -> Layout:
    """The mesh of `ranks` ranks for the parallelism `name`. Raises LayoutError if it does not fit.

    replicas   copies of the sharded model with hsdp; 0: one per node, see `count_nodes`
    per_node   ranks per node
    """
    if name not in PARALLEL:
        raise LayoutError(f"the parallelism {name!r} is not one of {', '.join(PARALLEL)}", "--set parallel=ddp")
    if replicas and name != "hsdp":
        raise LayoutError(f"replicas={replicas} has no effect with parallel={name}", "--set parallel=hsdp")
    if name == "ddp":
        return Layout(name, ranks, 1)
    if name == "fsdp2":
        return Layout(name, 1, ranks)
    replicas = replicas or count_nodes(ranks, per_node)
    if ranks % replicas:
        fitting = max(number for number in range(1, replicas) if ranks % number == 0)
        raise LayoutError(
            f"a mesh with replicas={replicas} does not fit {ranks} ranks (parallel={name})",
            f"--set replicas={fitting}, or a multiple of {replicas} workers",
        )
    return Layout(name, replicas, ranks // replicas)


def count_nodes(ranks: int, per_node: int) -> int:
    """Number of shard groups for hsdp: a group gathers parameters layer by layer, so it is placed on one node with fast
    links. Two if all ranks are on one node, or one per node."""
    nodes, rest = divmod(ranks, per_node)
    return 2 if per_node == 1 or nodes == 1 or rest else nodes


def plan_accumulation(layout: Layout, global_batch: int, micro_batch: int) -> int:
    """Passes per update: global_batch / (micro_batch x ranks). Raises LayoutError unless it is an integer.

    micro_batch = 0: a single pass.
    """
    if micro_batch == 0:
        micro_batch = max(1, global_batch // layout.ranks)
    passes, rest = divmod(global_batch, micro_batch * layout.ranks)
    if rest or not passes:
        nearest = max(1, round(global_batch / (micro_batch * layout.ranks))) * micro_batch * layout.ranks
        raise LayoutError(
            f"a global batch of {global_batch} sequences cannot be split into micro batches of {micro_batch} on"
            f" {layout.ranks} data-parallel ranks",
            f"--set global_batch={nearest}, or another micro_batch or number of workers",
        )
    return passes


@dataclass(frozen=True)
class PretrainingPlan:
    """What follows from parameters and number of ranks: the model's shape, a dataclass with its number of `parameters`;
    `global_batch` sequences per update, of which each rank takes `micro_batch` in each of its `passes`; of a sequence,
    `scored` tokens get logits (0: all)."""

    shape: Any
    layout: Layout
    global_batch: int
    passes: int
    micro_batch: int
    scored: int = 0


def plan_batch(layout: Layout, parameters: Mapping[str, Any]) -> tuple[int, int, int]:
    """Global batch, passes per update and micro batch, from the parameters batch_per_rank, global_batch, micro_batch.

    Raises LayoutError if they are incompatible.
    """
    per_rank = parameters["batch_per_rank"]
    global_batch = per_rank * layout.ranks if per_rank else parameters["global_batch"]
    passes = plan_accumulation(layout, global_batch, parameters["micro_batch"])
    return global_batch, passes, global_batch // (passes * layout.ranks)
