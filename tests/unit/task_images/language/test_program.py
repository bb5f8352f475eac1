"""What a pretraining refuses before it begins, and the limits of layouts."""

import pytest

from task_images.language.layout import (
    LayoutError,
    count_nodes,
    plan_accumulation,
    plan_batch,
    plan_layout,
)

# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "per_node", "groups"), [(4, 1, 2), (8, 8, 2), (16, 8, 2), (24, 8, 3), (12, 8, 2), (64, 4, 16)]
)
def test_shard_groups_are_nodes_or_two(ranks: int, per_node: int, groups: int) -> None:
    assert count_nodes(ranks, per_node) == groups


@pytest.mark.parametrize(
    ("parameters", "plan"),
    [
        ({"batch_per_rank": 0, "global_batch": 32, "micro_batch": 2}, (32, 4, 2)),
        ({"batch_per_rank": 6, "global_batch": 32, "micro_batch": 2}, (24, 3, 2)),
        ({"batch_per_rank": 0, "global_batch": 32, "micro_batch": 0}, (32, 1, 8)),
    ],
)
def test_a_batch_is_global_or_per_rank(parameters: dict[str, int], plan: tuple[int, int, int]) -> None:
    assert plan_batch(plan_layout("ddp", 4), parameters) == plan


@pytest.mark.parametrize(
    ("batch", "micro", "nearest"), [(2, 1, 4), (30, 4, 32), (33, 4, 32), (3, 0, 4), (23, 4, 16), (25, 4, 32)]
)
def test_the_nearest_batch_is_named(batch: int, micro: int, nearest: int) -> None:
    with pytest.raises(LayoutError, match=f"a global batch of {batch} sequences cannot be split") as caught:
        plan_accumulation(plan_layout("ddp", 4), batch, micro)
    assert caught.value.hint.startswith(f"--set global_batch={nearest},")
