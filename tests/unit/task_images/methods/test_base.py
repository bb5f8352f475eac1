"""Sizes as users write them, how far replicas are apart, and the threads of each rank."""

import pytest
import torch

from task_images.contract import Contract
from task_images.methods.base import LossScale, parse_size
from task_images.world import cpu_threads, measure_distance
from tests.unit.task_images.threads import run_ranks


@pytest.mark.parametrize(("text", "size"), [("7", 7), ("2KB", 2000), ("2KiB", 2048), ("1.5MB", 1_500_000)])
def test_sizes_are_decimal_unless_they_say_otherwise(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_the_distance_of_replicas_is_the_mean_one_from_their_mean() -> None:
    found = run_ranks(2, lambda world: measure_distance(world, [torch.full((4,), 2.0 * world.rank)]))
    assert found == [1.0, 1.0]  # from 1 by 1


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpu_threads(Contract({"LOCAL_WORLD_SIZE": "100000"})) == 1


def test_a_loss_scale_grows_to_its_limit() -> None:
    scale = LossScale(8.0, window=1, largest=16.0)
    for _ in range(3):
        scale.observe(True)
    assert scale.value == 16.0
