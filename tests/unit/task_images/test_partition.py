"""Every sample exactly once, equally many non-empty steps for every rank, whatever the numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_images.contract import TaskUsageError
from task_images.data import Partition, shard


@given(samples=st.integers(0, 5000), shards=st.integers(1, 60))
def test_shards_cover_everything_once_and_differ_by_at_most_one(samples: int, shards: int) -> None:
    parts = [shard(samples, shards, index) for index in range(shards)]

    assert [sample for part in parts for sample in part] == list(range(samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(
    samples=st.integers(1, 700),
    batch_size=st.integers(1, 40),
    ranks=st.integers(1, 24),
    seed=st.integers(0, 2**40),
    epoch=st.integers(1, 100),
)
def test_an_epoch_gives_every_sample_to_exactly_one_rank(
    samples: int, batch_size: int, ranks: int, seed: int, epoch: int
) -> None:
    if samples < ranks:
        with pytest.raises(TaskUsageError):
            Partition(samples, batch_size, ranks, seed)
        return
    partition = Partition(samples, batch_size, ranks, seed)

    shares = [list(partition.shares(epoch, rank)) for rank in range(ranks)]

    assert {len(own) for own in shares} == {partition.steps}
    assert sorted(int(index) for own in shares for share in own for index in share.indices) == list(range(samples))
    for step in zip(*shares, strict=True):
        sizes = [len(share.indices) for share in step]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert {share.total for share in step} == {sum(sizes)}
        assert max(sizes) <= batch_size + 1


@pytest.mark.parametrize(("ranks", "steps"), [(1, 391), (2, 196), (4, 98), (8, 49), (16, 25), (32, 13)])
def test_steps_of_an_epoch_are_those_of_the_official_image_classification(ranks: int, steps: int) -> None:
    assert Partition(50000, 128, ranks, 42).steps == steps


def test_a_step_has_the_same_samples_however_many_ranks_share_its_global_batch() -> None:
    alone = Partition(1003, 48, 1, 7)
    for ranks in (2, 3, 4):
        together = Partition(1003, 48 // ranks, ranks, 7)
        for whole, *parts in zip(alone.shares(2, 0), *(together.shares(2, r) for r in range(ranks)), strict=True):
            assert np.array_equal(whole.indices, np.concatenate([part.indices for part in parts]))


def test_every_epoch_is_shuffled_anew_and_can_be_repeated() -> None:
    partition = Partition(500, 10, 2, 42)
    assert np.array_equal(partition.permutation(1), Partition(500, 25, 4, 42).permutation(1))
    assert not np.array_equal(partition.permutation(1), partition.permutation(2))
    assert not np.array_equal(partition.permutation(1), Partition(500, 10, 2, 43).permutation(1))
