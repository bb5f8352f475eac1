"""Asynchronous parameter servers: what a worker sends and gets, by hand, with workers that take turns."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from task_images.comm.choose import make_strategy
from task_images.comm.presets import resolve
from tests.unit.task_images.comm.given_gradients import Numbers, update
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


def run_in_turns(
    body: Callable[[Any, Numbers, Callable[[int, Callable[[], Any]], Any]], Any], size: int = 2, **axes: str
) -> list[Any]:
    """`body(strategy, model, turn)` on all ranks; `turn(rank, call)` calls on one rank while the others wait."""
    method = resolve("async-ps", axes)

    def train(world: ThreadWorld) -> Any:
        strategy: Any = make_strategy(method)
        model = Numbers(5)
        strategy.attach(world, model, lambda net: torch.optim.SGD(net.parameters(), 1.0, 0.5))

        def turn(rank: int, call: Callable[[], Any]) -> Any:
            found = call() if world.rank == rank else None
            world.barrier()
            return found

        found = body(strategy, model, turn)
        strategy.close()
        return found

    return run_ranks(size, train, method)


def test_a_worker_adds_its_share_of_its_step_to_the_weights_of_all() -> None:
    def body(strategy: Any, model: Numbers, turn: Any) -> list[float]:
        seen = []
        for rank, gradient in ((0, 2.0), (1, 4.0), (0, 2.0)):
            turn(rank, lambda gradient=gradient: seen.append(update(strategy, model, gradient)))
        with strategy.consensus():
            seen.append(model.weight[0].item())
        seen.append(model.weight[0].item())
        return seen

    # 1 - 2/2; then 0 from rank 1's step of 4 from the first weights; then a velocity of 0.5 x 2 + 2.
    first, second = run_in_turns(body)
    assert first == [0.0, -3.5, -3.5, -3.5]
    assert second == [-2.0, -3.5, -3.5]


@pytest.mark.parametrize(
    ("partition", "messages", "size"), [("none", 1, 20), ("8", 3, 20), ("20", 1, 20), ("1", 5, 20)]
)
def test_changes_are_sent_in_parts(partition: str, messages: int, size: int) -> None:
    """Five numbers of 4 bytes. Rank 0 also sends the first weights; asking for weights is not counted."""

    def body(strategy: Any, model: Numbers, turn: Any) -> tuple[float, float, float]:
        turn(1, lambda: update(strategy, model, 1.0))
        with strategy.consensus():
            assert model.weight.tolist() == [0.5] * 5
        figures = strategy.stats()
        return figures["messages"], figures["bytes"], figures["updates"]

    first, second = run_in_turns(body, partition=partition)
    assert first == (messages, size, 0.0)
    assert second == (messages, size, 1.0)


def test_parts_are_spread_over_the_servers() -> None:
    def body(strategy: Any, model: Numbers, turn: Any) -> tuple[list[int], list[float]]:
        turn(1, lambda: update(strategy, model, 1.0))
        turn(0, lambda: update(strategy, model, 1.0))
        with strategy.consensus():
            return strategy._server_of, model.weight.tolist()

    for servers, weights in run_in_turns(body, servers="2", partition="8"):
        assert sorted(set(servers)) == [0, 1]
        assert weights == [0.0] * 5


def test_a_result_says_how_far_a_worker_was_ahead() -> None:
    def body(strategy: Any, model: Numbers, turn: Any) -> float:
        for rank in (0, 1, 0, 0, 0, 1):
            turn(rank, lambda: update(strategy, model, 1.0))
        found: float = strategy.stats()["most_updates_ahead"]
        return found

    first, second = run_in_turns(body)
    assert first >= 2.0
    assert second < first


def test_a_resumed_training_begins_with_the_weights_of_its_checkpoint_on_the_servers() -> None:
    def body(strategy: Any, model: Numbers, turn: Any) -> tuple[float, float, int]:
        turn(0, lambda: update(strategy, model, 1.0))
        with torch.no_grad():
            model.weight.fill_(10.0)
        state = strategy.method_state()
        state["update"] = 6
        strategy.load_method_state(state)
        turn(1, lambda: update(strategy, model, 4.0))
        with strategy.consensus():
            return model.weight[0].item(), strategy._base[0].item(), strategy._update

    first, second = run_in_turns(body)
    assert first == (8.0, 8.0, 6)
    assert second == (8.0, 8.0, 7)


def test_workers_wait_for_their_turn_only_after_they_have_met() -> None:
    def body(strategy: Any, model: Numbers, turn: Any) -> list[bool]:
        met = [strategy._met]
        for rank in (0, 1):
            turn(rank, lambda: update(strategy, model, 1.0))
        met.append(strategy._met)
        with strategy.consensus():
            met.append(strategy._met)
        return met

    assert run_in_turns(body) == [[True, False, True]] * 2
