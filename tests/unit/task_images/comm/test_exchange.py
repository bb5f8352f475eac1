"""Messages and transports with one rank: what is kept, what powersgd compresses, and what a ring moves."""

import pytest
import torch

from task_images.comm.exchange import (
    make_message,
)
from task_images.comm.plans import Cost, merge_greedily
from task_images.comm.presets import resolve


@pytest.mark.parametrize(
    ("name", "residual", "velocity"), [("topk", False, False), ("eftopk", True, False), ("dgc", True, True)]
)
def test_a_message_has_the_state_that_its_method_needs(name: str, residual: bool, velocity: bool) -> None:
    made = make_message(resolve(name), 3, torch.ones(8), 0, [8], [])
    assert (made.number, made.size, made.kept) == (3, 32, None)
    assert (made.residual is not None, made.velocity is not None) == (residual, velocity)
    for part in (made.residual, made.velocity):
        assert part is None or part.tolist() == [0.0] * 8


# --- plans by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ready", "groups"),
    [
        ([0.0, 0.5], [[0, 1]]),  # half a second of waiting saves a second of start-up
        ([0.0, 1.0], [[0], [1]]),  # nothing would be saved
        ([0.0, 0.999], [[0, 1]]),
        ([0.0, 5.0], [[0], [1]]),
        ([3.0, 3.5], [[0, 1]]),
    ],
)
def test_greedy_merging_waits_for_less_than_a_start_up(ready: list[float], groups: list[list[int]]) -> None:
    assert merge_greedily([10, 10], ready, Cost(1.0, 0.1)) == groups
