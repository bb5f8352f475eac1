"""What follows from the parameters of a pretraining and its number of ranks.

Standard library only, so that a run can be rejected before it starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from task_images.contract import TaskUsageError


class PlanError(TaskUsageError, ValueError):
    """Incompatible sizes."""


@dataclass(frozen=True)
class PretrainingPlan:
    """`shape` is a dataclass with the model's number of `parameters`. An update has `global_batch` sequences; each rank
    takes `micro_batch` of them in each of its `passes`. Of a sequence, `scored` tokens get logits (0: all)."""

    shape: Any
    global_batch: int
    passes: int
    micro_batch: int
    scored: int = 0


def plan_batch(ranks: int, parameters: Mapping[str, Any]) -> tuple[int, int, int]:
    """Global batch, passes per update and micro batch, from the parameters batch_per_rank, global_batch, micro_batch.

    Raises PlanError if they are incompatible.
    """
    global_batch = parameters["batch_per_rank"] * ranks or parameters["global_batch"]
    micro_batch = parameters["micro_batch"] or max(1, global_batch // ranks)
    passes, rest = divmod(global_batch, micro_batch * ranks)
    if rest or not passes:
        nearest = max(1, round(global_batch / (micro_batch * ranks))) * micro_batch * ranks
        raise PlanError(
            f"a global batch of {global_batch} sequences cannot be split into micro batches of {micro_batch} on {ranks}"
            " ranks",
            f"--set global_batch={nearest}, or another micro_batch or number of workers",
        )
    return global_batch, passes, micro_batch
