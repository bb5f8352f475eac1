"""The handles that torch gets from the backend mpi, and the thread that runs a group's asynchronous collectives."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from task_images.comm.mpi_work import Awaited, Done, Message, Pending, Thread

LIMIT = 20.0  # seconds; nothing here takes one


class Status:
    """Where MPI notes who has sent."""

    source = -1

    def Get_source(self) -> int:
        return self.source


MPI: Any = SimpleNamespace(Status=Status)


class Request:
    """A message that has arrived after `tests` questions."""

    def __init__(self, tests: int, source: int = 3) -> None:
        self.tests, self.source = tests, source
        self.asked: list[str] = []

    def Wait(self, status: Status) -> None:
        self.asked.append("wait")
        status.source = self.source

    def Test(self, status: Status) -> bool:
        self.asked.append("test")
        status.source = self.source
        return len(self.asked) > self.tests


def test_a_synchronous_call_is_complete_and_has_its_tensors() -> None:
    tensors = [torch.ones(2)]
    done = Done(tensors)
    assert (done.wait(), done.is_completed(), done.is_success()) == (True, True, True)
    assert done.result() is tensors
    assert done.get_future().done()
    assert done.get_future().wait() is tensors
    assert Done().result() is None


def test_a_queued_call_is_complete_once_its_future_is() -> None:
    pending = Pending(["tensor"])
    assert (pending.is_completed(), pending.is_success()) == (False, False)
    assert pending.get_future() is pending.future
    pending.future.set_result("x")
    assert (pending.wait(), pending.is_completed(), pending.is_success()) == (True, True, True)
    assert pending.result() == ["tensor"]


def test_waiting_for_a_message_copies_it_once_and_names_its_sender() -> None:
    request, arrived = Request(0, source=5), [0]

    def arrive() -> None:
        arrived[0] += 1

    message = Message(MPI, request, [torch.ones(1)], arrive)
    assert message.wait()
    assert message.wait()
    assert message.is_completed()
    assert (request.asked, arrived) == (["wait"], [1])
    assert message.source_rank() == message._source_rank() == 5


def test_a_message_is_asked_for_without_waiting_until_it_has_arrived() -> None:
    request, arrived = Request(2), [0]

    def arrive() -> None:
        arrived[0] += 1

    message = Message(MPI, request, [], arrive)
    assert [message.is_completed(), message.is_success(), message.is_completed()] == [False, False, True]
    assert arrived == [1]
    assert message.is_success()
    assert message.wait()
    assert (request.asked, arrived) == (["test"] * 3, [1])


def test_the_future_of_a_message_waits_for_it() -> None:
    request = Request(9)
    message = Message(MPI, request, ["tensor"])  # type: ignore[list-item]
    future = message.get_future()
    assert request.asked == ["wait"]
    assert future.done()
    assert future.wait() == ["tensor"]


def make_awaited(answers: dict[int, int]) -> tuple[Awaited, list[int], list[object], list[str]]:
    """A message from any of the ranks 0, 2 and 4; rank N answers when it is asked for the `answers[N]`-th time."""
    asked: list[int] = []
    received: list[object] = []
    arrived: list[str] = []

    def ask(source: int) -> Any:
        asked.append(source)
        if asked.count(source) < answers.get(source, 10**6):
            return None

        def receive(buffer: object, status: Status) -> None:
            received.append(buffer)
            status.source = source

        return SimpleNamespace(Recv=receive)

    awaited = Awaited(MPI, ask, (0, 2, 4), [], "buffer", lambda: arrived.append("copied"))
    return awaited, asked, received, arrived


def test_a_message_from_anyone_is_received_from_whoever_sent_first_and_only_once() -> None:
    """Two have sent: the second message is another receive's."""
    awaited, asked, received, arrived = make_awaited({2: 2, 4: 2})
    assert not awaited.is_completed()
    assert asked == [0, 2, 4]
    assert (received, arrived) == ([], [])
    assert awaited.is_completed()
    assert asked == [0, 2, 4, 0, 2]
    assert awaited.is_completed()
    assert len(asked) == 5
    assert (received, arrived) == (["buffer"], ["copied"])
    assert awaited.source_rank() == 2


def test_waiting_for_anyone_asks_until_a_message_has_arrived() -> None:
    awaited, asked, received, arrived = make_awaited({4: 3})
    assert awaited.wait()
    assert asked == [0, 2, 4] * 3
    assert (received, arrived) == (["buffer"], ["copied"])
    assert awaited.wait()
    assert len(asked) == 9


def test_a_thread_runs_calls_one_after_another_in_their_order() -> None:
    order: list[tuple[int, str]] = []
    thread, gate = Thread(), threading.Event()
    assert vars(thread)["_thread"] is None  # no thread without asynchronous calls

    def call(number: int) -> None:
        gate.wait(LIMIT)
        order.append((number, threading.current_thread().name))

    works = [thread.submit(lambda number=number: call(number), [number]) for number in range(5)]  # type: ignore[misc]
    assert vars(thread)["last"] is works[-1]
    assert not any(work.is_completed() for work in works)
    gate.set()
    thread.drain()
    assert order == [(number, "mpi") for number in range(5)]
    assert [work.get_future().wait() for work in works] == [[number] for number in range(5)]
    assert thread.last is None
    thread.close()


def test_an_error_of_a_call_is_raised_where_it_is_awaited_and_later_calls_still_run() -> None:
    thread = Thread()

    def fail() -> None:
        raise ValueError("rank 3 is gone")

    bad = thread.submit(fail, [])
    good = thread.submit(lambda: None, ["tensor"])
    with pytest.raises(ValueError, match="rank 3 is gone"):
        bad.wait()
    assert good.get_future().wait() == ["tensor"]
    thread.close()


def test_a_call_of_the_thread_does_not_wait_for_itself() -> None:
    """As in a callback of DistributedDataParallel that calls a collective."""
    thread = Thread()
    work = thread.submit(thread.drain, [])
    assert work.wait()
    assert vars(thread)["last"] is work
    thread.drain()
    thread.drain()
    assert vars(thread)["last"] is None
    thread.close()


def test_closing_finishes_what_is_queued_and_a_later_call_starts_a_new_thread() -> None:
    ran: list[bool] = []
    thread = Thread()
    gate = threading.Event()
    thread.submit(lambda: ran.append(gate.wait(LIMIT)), [])
    thread.submit(lambda: ran.append(True), [])
    first: Any = thread._thread
    gate.set()
    thread.close()
    assert ran == [True, True]
    assert not first.is_alive()
    thread.close()
    assert thread.submit(lambda: ran.append(True), []).wait()
    assert len(ran) == 3
    thread.close()
