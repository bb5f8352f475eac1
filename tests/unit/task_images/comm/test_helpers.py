"""Small decisions of the methods: neighbors, strategies, what a self-check compares, states of other ranks, bytes."""

from typing import Any

import pytest

from task_images.comm.base import has_own_parts
from task_images.comm.drifting import ChocoGossip, Gossip, LocalSteps, PostLocalSteps, find_neighbors, make_drifting
from task_images.comm.presets import resolve
from task_images.comm.reducer import needs_profile


@pytest.mark.parametrize(
    ("rank", "size", "peers"),
    [(0, 1, []), (0, 2, [1]), (1, 2, [0]), (0, 3, [1, 2]), (2, 3, [0, 1]), (1, 5, [2, 0]), (4, 5, [0, 3])],
)
def test_neighbors_on_a_ring_are_the_next_and_the_previous_rank(rank: int, size: int, peers: list[int]) -> None:
    assert find_neighbors(rank, size) == peers


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dpsgd", Gossip), ("choco", ChocoGossip), ("localsgd", LocalSteps), ("postlocalsgd", PostLocalSteps)],
)
def test_methods_that_drift_have_their_strategies(name: str, kind: type) -> None:
    made = make_drifting(resolve(name), 1)
    assert type(made) is kind
    assert not made.traits.identical
    assert not made.traits.gradients_agree


@pytest.mark.parametrize(
    ("plan", "order", "agreement", "is_needed"),
    [
        ("tensor", "fifo", "static", False),
        ("mgwfbp", "fifo", "static", True),
        ("optimal", "deferred", "static", True),
        ("tensor", "priority", "static", True),
        ("tensor", "priority", "leader", False),
        ("mgwfbp", "priority", "leader", True),
    ],
)
def test_backward_passes_are_measured_for_plans_and_orders_that_depend_on_them(
    plan: str, order: str, agreement: str, is_needed: bool
) -> None:
    assert needs_profile(resolve("fusion", {"plan": plan, "order": order, "agreement": agreement})) is is_needed


# --- the base -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "has"),
    [
        ({}, False),
        ({"update": 3}, False),
        ({"ranks": []}, False),
        ({"ranks": [None]}, True),
        ({"optimizers": [1]}, True),
    ],
)
def test_states_with_parts_of_ranks(state: Any, has: bool) -> None:
    assert has_own_parts(state) is has


# --- the self-check -------------------------------------------------------------------------------------------------


# --- links ----------------------------------------------------------------------------------------------------------
