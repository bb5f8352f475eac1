"""What a pretraining refuses before it begins, and the limits of layouts."""

import pytest

from task_images.language.layout import (
    Layout,
    LayoutError,
    check_tensor_parallel,
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
    ("name", "is_sharded", "data"),
    [("ddp", False, 8), ("fsdp2", True, 8), ("hsdp", True, 8), ("tp", False, 1), ("tp+fsdp2", True, 4)],
)
def test_how_eight_ranks_share_data(name: str, is_sharded: bool, data: int) -> None:
    layout = plan_layout(name, 8)
    assert (layout.is_sharded, layout.data, layout.ranks) == (is_sharded, data, 8)


@pytest.mark.parametrize(
    ("sizes", "words", "hint"),
    [
        ({}, "", ""),
        ({"heads": 6}, "heads is 6, which 4 tensor-parallel ranks", "--set tensor_parallel=3"),
        ({"kv_heads": 2}, "kv_heads is 2, which 4", "--set tensor_parallel=2"),
        ({"length": 101}, "sequence_length is 101, which 4", "--set tensor_parallel=1"),
        ({"hidden": 10}, "hidden is 10, which 4", "--set tensor_parallel=2"),
    ],
)
def test_tensor_parallel_ranks_share_evenly(sizes: dict[str, int], words: str, hint: str) -> None:
    given = {"heads": 8, "kv_heads": 4, "length": 100, "hidden": 12, **sizes}
    layout = Layout("tp", 1, 1, 4)
    if not words:
        check_tensor_parallel(layout, **given)
        return
    with pytest.raises(LayoutError, match=words) as caught:
        check_tensor_parallel(layout, **given)
    assert caught.value.hint == hint


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
