"""A parameter server's state without connections: weights, clocks, bounds, sums in the order of ranks, and its end."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from task_images.comm.server import ParameterServer, _add_in_order
from task_images.comm.wire import PUSH, SET, SUM, TURN, Frame
from task_images.harness.errors import PeerLostError

PULL = next(kind for kind in range(20) if kind not in (PUSH, SET, SUM, TURN))  # answered with the weights


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


def ask(
    server: ParameterServer, rank: int, kind: int, key: int, clock: int, *numbers: float
) -> tuple[int, list[float]]:
    answer = server.answer(rank, Frame(kind, key, clock, values(*numbers)))
    assert (answer.kind, answer.key) == (kind, key)
    return answer.clock, answer.tensor.tolist()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What calls in threads give, which may wait for each other."""
    found: list[Any] = [None] * len(calls)

    def run(number: int, call: Callable[[], Any]) -> None:
        found[number] = call()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_pushed_changes_add_up_and_are_answered_with_the_weights() -> None:
    server = ParameterServer(2, None)
    assert ask(server, 0, SET, 0, 5, 1.0, 2.0) == (0, [])
    assert ask(server, 0, PUSH, 0, 6, 0.5, 0.0) == (1, [1.5, 2.0])  # one update ahead of rank 1
    assert ask(server, 1, PUSH, 0, 6, 0.0, 1.0) == (0, [1.5, 3.0])
    assert ask(server, 1, PUSH, 0, 7, 0.0, 1.0) == (1, [1.5, 4.0])
    assert ask(server, 0, PUSH, 0, 9, 0.0, 0.0) == (2, [1.5, 4.0])
    # The one that is behind is ahead of nobody.
    assert ask(server, 1, PUSH, 0, 8, 0.0, 0.0) == (0, [1.5, 4.0])


def test_an_answer_is_a_copy() -> None:
    server = ParameterServer(1, None)
    given = values(1.0)
    server.answer(0, Frame(SET, 0, 0, given))
    given.fill_(9.0)
    first = server.answer(0, Frame(PUSH, 0, 1, values(0.0))).tensor
    assert first.tolist() == [1.0]
    first.fill_(7.0)
    assert server.answer(0, Frame(PUSH, 0, 2, values(0.0))).tensor.tolist() == [1.0]


def test_parts_of_an_earlier_model_are_forgotten() -> None:
    server = ParameterServer(1, None)
    for key in range(3):
        ask(server, 0, SET, key, 0, float(key))
    assert server.parts == 3
    ask(server, 0, SET, 0, 0, 5.0)
    assert server.parts == 1
    ask(server, 0, SET, 1, 0, 6.0)
    assert server.parts == 2


def test_a_turn_is_answered_as_it_is() -> None:
    frame = Frame(TURN, 3, 4, values(1.0))
    assert ParameterServer(1, None).answer(0, frame) is frame


@pytest.mark.parametrize(("bound", "clock", "waits"), [(0, 1, True), (0, 0, False), (2, 2, False), (2, 3, True)])
def test_a_trainer_waits_if_it_is_ahead_by_more_than_the_bound(bound: int, clock: int, waits: bool) -> None:
    server = ParameterServer(2, bound, seconds=0.01)
    ask(server, 0, SET, 0, 0, 1.0)
    if not waits:
        assert ask(server, 0, PUSH, 0, clock, 1.0) == (clock, [2.0])
        return
    words = rf"update {clock - bound} did not arrive from all trainers within 0\.01 s"
    with pytest.raises(TimeoutError, match=words):
        ask(server, 0, PUSH, 0, clock, 1.0)


def test_a_trainer_that_is_done_holds_nobody_back() -> None:
    server = ParameterServer(2, 0, seconds=0.01)
    ask(server, 0, SET, 0, 0, 1.0)
    server.finish(1)
    assert ask(server, 0, PUSH, 0, 3, 1.0) == (0, [2.0])


def test_sums_have_the_order_of_ranks_whoever_comes_first() -> None:
    """In another order the small number would be lost."""
    server = ParameterServer(3, None)
    numbers = [1e8, -1e8, 1.0]
    found = together(*(lambda rank=rank: ask(server, rank, SUM, 2, 7, numbers[rank]) for rank in (2, 0, 1)))
    assert found == [(7, [1.0])] * 3
    assert not server._rounds  # nothing is kept


def test_sums_of_half_precision_are_made_in_full() -> None:
    parts = {rank: torch.full((2,), 0.0004, dtype=torch.float16) for rank in range(1, 4)}
    parts[0] = torch.ones(2, dtype=torch.float16)
    found = _add_in_order(parts)
    assert found.dtype == torch.float16
    assert found.tolist() == torch.tensor([1 + 3 * float(parts[1][0])] * 2).half().tolist()
    assert float(found[0]) > 1.0  # each of them alone would be rounded away
    assert parts[0].tolist() == [1.0, 1.0]
    assert _add_in_order({3: torch.tensor([2.0], dtype=torch.float64)}).dtype == torch.float64


def test_a_sum_may_be_made_otherwise() -> None:
    server = ParameterServer(2, None, add=lambda parts: parts[0] * parts[1])
    assert (
        together(*(lambda rank=rank: ask(server, rank, SUM, 0, 1, rank + 2.0) for rank in (0, 1))) == [(1, [6.0])] * 2
    )


def test_a_part_that_does_not_come_is_named() -> None:
    server = ParameterServer(2, None, seconds=0.01)
    with pytest.raises(TimeoutError, match=r"part 3 of update 5 did not arrive from all trainers within 0\.01 s"):
        ask(server, 0, SUM, 3, 5, 1.0)


def test_the_first_failure_ends_the_server_and_all_who_wait() -> None:
    server = ParameterServer(2, None, seconds=30)
    server.fail("lost trainer 1: closed")
    server.fail("another")
    with pytest.raises(TimeoutError, match=r"^lost trainer 1: closed$"):
        ask(server, 0, SUM, 0, 1, 1.0)
    with pytest.raises(PeerLostError, match="the parameter server ends: lost trainer 1: closed") as caught:
        server.await_end()
    assert "trainers' logs" in str(caught.value.hint)


def test_a_server_ends_when_all_trainers_are_done() -> None:
    server = ParameterServer(2, None)
    server.finish(0)
    server.finish(0)
    ended = threading.Thread(target=server.await_end)
    ended.start()
    ended.join(0.02)
    assert ended.is_alive()
    server.finish(1)
    ended.join(30)
    assert not ended.is_alive()
