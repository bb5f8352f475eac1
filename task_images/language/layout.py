"""The layout of ranks, computed from sizes only. Standard library only, so that a run can be rejected before it starts.

Ranks form a mesh (replicas, shards, tensor), the last dimension varying fastest: tensor-parallel ranks are neighbors,
because they communicate most.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PARALLEL = ("ddp", "fsdp2", "hsdp", "tp", "tp+fsdp2")


class LayoutError(ValueError):
    """Incompatible sizes. `hint` says what to change."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Layout:
    """A mesh of `replicas` x `shards` x `tensor` ranks; with FSDP, `shards` ranks share one copy of the state.

    name   one of PARALLEL
    """

    name: str
    replicas: int
    shards: int
    tensor: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards * self.tensor

    @property
    def data(self) -> int:
        """Number of groups of ranks that train on different data."""
        return self.replicas * self.shards

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are split over ranks by FSDP."""
        return self.name in ("fsdp2", "hsdp", "tp+fsdp2")

    def data_rank(self, rank: int) -> int:
        """Which part of a global batch `rank` trains on, from 0 to data - 1."""
        return rank // self.tensor


def plan_layout(name: str, ranks: int, tensor: int = 0, replicas: int = 0, per_node: int = 1) -> Layout:
    """The mesh of `ranks` ranks for the parallelism `name`. Raises LayoutError if it does not fit.

    tensor     ranks that share each layer's matrices; 0: all with tp, 2 with tp+fsdp2
    replicas   copies of the sharded model with hsdp; 0: one per node, see `count_nodes`
    per_node   ranks per node
    """
    if name not in PARALLEL:
        raise LayoutError(f"the parallelism {name!r} is not one of {', '.join(PARALLEL)}", "--set parallel=ddp")
    if tensor and "tp" not in name:
        raise LayoutError(
            f"tensor_parallel={tensor} has no effect with parallel={name}", "--set parallel=tp or tp+fsdp2"
        )
    if replicas and name != "hsdp":
        raise LayoutError(f"replicas={replicas} has no effect with parallel={name}", "--set parallel=hsdp")
    if name == "ddp":
        return Layout(name, ranks, 1, 1)
    if name == "fsdp2":
        return Layout(name, 1, ranks, 1)
    if name == "hsdp":
        replicas = replicas or count_nodes(ranks, per_node)
        _require_divisor(ranks, replicas, "replicas", name)
        return Layout(name, replicas, ranks // replicas, 1)
    tensor = tensor or (ranks if name == "tp" else 2)
    _require_divisor(ranks, tensor, "tensor_parallel", name)
    rest = ranks // tensor
    if name == "tp" and rest != 1:
        raise LayoutError(
            f"parallel=tp with tensor_parallel={tensor} leaves {rest} groups of {ranks} ranks without a way to"
            " exchange gradients",
            f"--set parallel=tp+fsdp2, or tensor_parallel={ranks}",
        )
    return Layout(name, 1, rest, tensor)


def count_nodes(ranks: int, per_node: int) -> int:
    """Number of shard groups for hsdp: a group gathers parameters layer by layer, so it is placed on one node with fast
    links. Two if all ranks are on one node, or one per node."""
    nodes, rest = divmod(ranks, per_node)
    return 2 if per_node == 1 or nodes == 1 or rest else nodes


def _require_divisor(ranks: int, size: int, what: str, name: str) -> None:
    if ranks % size:
        fitting = [number for number in range(1, ranks + 1) if ranks % number == 0]
        raise LayoutError(
            f"a mesh with {what}={size} does not fit {ranks} ranks (parallel={name})",
            f"--set {what}={max((n for n in fitting if n <= size), default=1)}, or a multiple of {size} workers",
        )


def check_tensor_parallel(layout: Layout, *, heads: int, kv_heads: int, length: int, hidden: int) -> None:
    """Reject sizes that tensor-parallel ranks cannot share evenly: gloo would abort, or fail inside a view."""
    for what, size in (("heads", heads), ("kv_heads", kv_heads), ("sequence_length", length), ("hidden", hidden)):
        if size % layout.tensor:
            raise LayoutError(
                f"{what} is {size}, which {layout.tensor} tensor-parallel ranks cannot share evenly",
                f"--set tensor_parallel={max(n for n in range(1, layout.tensor + 1) if size % n == 0)}",
            )


def plan_accumulation(layout: Layout, global_batch: int, micro_batch: int) -> int:
    """Passes per update: global_batch / (micro_batch x data groups). Raises LayoutError unless it is an integer.

    micro_batch = 0: a single pass.
    """
    if micro_batch == 0:
        micro_batch = max(1, global_batch // layout.data)
    passes, rest = divmod(global_batch, micro_batch * layout.data)
    if rest or not passes:
        nearest = max(1, round(global_batch / (micro_batch * layout.data))) * micro_batch * layout.data
        raise LayoutError(
            f"a global batch of {global_batch} sequences cannot be split into micro batches of {micro_batch} on"
            f" {layout.data} data-parallel ranks",
            f"--set global_batch={nearest}, or another micro_batch or number of workers",
        )
    return passes


@dataclass(frozen=True)
class PretrainingPlan:
    """What follows from parameters and number of ranks: the model's shape, a dataclass with its number of `parameters`;
    `global_batch` sequences per update, of which each rank takes `micro_batch` in each of its `passes`."""

    shape: Any
    layout: Layout
    global_batch: int
    passes: int
    micro_batch: int


def plan_batch(layout: Layout, parameters: Mapping[str, Any]) -> tuple[int, int, int]:
    """Global batch, passes per update and micro batch, from the parameters batch_per_rank, global_batch, micro_batch.

    Raises LayoutError if they are incompatible.
    """
    per_rank = parameters["batch_per_rank"]
    global_batch = per_rank * layout.data if per_rank else parameters["global_batch"]
    passes = plan_accumulation(layout, global_batch, parameters["micro_batch"])
    return global_batch, passes, global_batch // (passes * layout.data)
