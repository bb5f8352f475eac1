"""Replicas that drift: when they are averaged, what a validation sees, what they keep, and how far apart they are."""

from typing import Any

import pytest
import torch

from task_images.comm.choose import make_strategy
from task_images.comm.presets import resolve
from tests.unit.task_images.comm.given_gradients import Numbers, update
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


def attach(world: ThreadWorld, name: str, **axes: str) -> tuple[Any, Numbers]:
    strategy, model = make_strategy(resolve(name, axes)), Numbers(4)
    strategy.attach(world, model, lambda net: torch.optim.SGD(net.parameters(), 1.0))
    return strategy, model


@pytest.mark.parametrize(("name", "sync"), [("localsgd", "local:3"), ("postlocalsgd", "postlocal:0,3")])
def test_a_validation_averages_for_good_and_only_if_there_is_something_to_average(name: str, sync: str) -> None:
    def body(world: ThreadWorld) -> tuple[list[float], list[float], list[Any]]:
        strategy, model = attach(world, name, sync=sync)
        weights, messages, distances = [], [], [strategy.check_replicas()]

        def look() -> None:
            before = strategy.stats()["messages"]
            with strategy.consensus():
                weights.append(model.weight[0].item())
                distances.append(strategy.check_replicas())
            messages.append(strategy.stats()["messages"] - before)

        look()
        update(strategy, model, 1.0 + 2 * world.rank)
        look()
        look()
        for _ in range(2):
            update(strategy, model, 1.0 + 2 * world.rank)
        look()  # the third update averaged
        weights.append(model.weight[0].item())
        assert strategy.stats()["distance"] == distances[-1]
        strategy.close()
        return weights, messages, distances

    for weights, messages, distances in run_ranks(2, body):
        assert weights == [1.0, -1.0, -1.0, -5.0, -5.0]
        assert messages == [0, 1, 0, 0]
        # 0 and -2: each is 1 per number from their mean, -1.
        assert distances == [None, 0.0, pytest.approx(1.0), 0.0, 0.0]


@pytest.mark.parametrize("name", ["dpsgd", "dpsgd-atc", "choco"])
def test_neighbors_show_a_validation_their_mean_and_go_on_with_their_own_weights(name: str) -> None:
    def body(world: ThreadWorld) -> tuple[list[float], float]:
        strategy, model = attach(world, name)
        assert strategy.check_replicas() is None
        assert "distance" not in strategy.stats()
        own = update(strategy, model, 2.0 * world.rank)
        with strategy.consensus():
            inside = model.weight[0].item()
            distance = strategy.check_replicas()
        after = model.weight[0].item()
        strategy.close()
        return [own, inside, after], distance

    found = run_ranks(3, body)
    mean = sum(values[0] for values, _ in found) / 3
    for (own, inside, after), distance in found:
        assert after == own
        assert inside == pytest.approx(mean)
        squares = sum(4 * (values[0] - mean) ** 2 for values, _ in found)
        # Relative to the norm of the mean of four equal numbers; the first update of choco sends one of them.
        if name != "choco":
            assert distance == pytest.approx((squares / 3) ** 0.5 / (4 * mean**2) ** 0.5)


@pytest.mark.parametrize("name", ["localsgd", "dpsgd", "choco", "slowmo", "async-ps"])
def test_one_rank_trains_alone_and_has_no_distance(name: str) -> None:
    def body(world: ThreadWorld) -> tuple[float, Any, Any]:
        strategy, model = attach(world, name)
        found = update(strategy, model, 2.0)
        with strategy.consensus():
            distance = strategy.check_replicas()
        state = strategy.method_state()
        strategy.load_method_state(state)
        strategy.close()
        return found, distance, strategy.stats()["messages"]

    assert run_ranks(1, body) == [(-1.0, None, 0.0)]


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Before the step: the mean of equal weights, and the own step.
        ("dpsgd", [[1.0, 0.0], [-1.0, -2.0]]),
        # After it: the mean of 1 and -1, and of what follows.
        ("dpsgd-atc", [[0.0, -1.0], [0.0, -1.0]]),
    ],
)
def test_two_neighbors_mix_before_or_after_their_steps(name: str, expected: list[list[float]]) -> None:
    """Rank 0 has gradients of 0 and 0, rank 1 of 2 and 2; each is the other's only neighbor."""

    def body(world: ThreadWorld) -> list[float]:
        strategy, model = attach(world, name)
        found = [update(strategy, model, 2.0 * world.rank) for _ in range(2)]
        assert (strategy.stats()["messages"], strategy.stats()["bytes"]) == (2, 2 * 16)
        strategy.close()
        return found

    assert run_ranks(2, body) == expected
