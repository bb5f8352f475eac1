"""The throughput protocol: the slowest rank counts, and every sample is kept."""

import pytest
import torch

from task_images.clock import Throughput
from task_images.contract import Contract
from task_images.parameters import ThroughputProtocol
from task_images.world import World


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def a_world() -> World:
    return World(Contract({}), torch.device("cpu"), 1, grouped=False)


class TwoRanks(World):
    """This rank, and another one that takes twice as long."""

    def __init__(self) -> None:
        super().__init__(Contract({"WORLD_SIZE": "2"}), torch.device("cpu"), 1, grouped=False)

    def gather(self, values):  # type: ignore[no-untyped-def]
        return [list(values), [2 * value for value in values]]


def measure(world: World, protocol: ThroughputProtocol, seconds: list[float]) -> Throughput:
    clock = Clock()
    meter = Throughput(world, protocol, unit="images", clock=clock)
    for second in seconds:
        assert not meter.is_over
        clock.now += second
        meter.after_update(100)
    return meter


def test_the_warm_up_is_not_timed_and_blocks_follow_each_other() -> None:
    meter = measure(a_world(), ThroughputProtocol(2, 2, 3), [9, 9, 1, 1, 1, 2, 2, 2])
    assert meter.is_over
    found = meter.measurement()
    assert found.seconds == ((3.0,), (6.0,))
    assert found.rates == (100.0, 50.0)
    assert found.summary.mean == 75
    assert found.summary.spread == pytest.approx(1.96 * 25)


def test_the_slowest_rank_decides_and_the_times_of_all_are_kept() -> None:
    found = measure(TwoRanks(), ThroughputProtocol(0, 1, 2), [1, 1]).measurement()
    assert found.seconds == ((2.0, 4.0),)
    assert found.rates == (50.0,)
