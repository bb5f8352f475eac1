"""The communication thread: order of messages, failures, and what a GPU's streams have to wait for."""

import threading

import pytest
import torch
from torch import nn

from task_images.comm import sender as module
from task_images.comm.choose import make_strategy
from task_images.comm.exchange import Message, UnderWay
from task_images.comm.presets import resolve
from task_images.comm.sender import Group, Sender
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


class Recorder:
    """A transport that notes what it is given, and does nothing."""

    def __init__(self, steps: list[str], failure: Exception | None = None, is_fast: bool = False) -> None:
        self.steps = steps
        self.failure = failure
        self.is_fast = is_fast

    def start(self, message: Message, seed: int) -> UnderWay:
        if self.failure:
            raise self.failure
        self.steps.append(f"start {message.number}")
        return UnderWay(lambda: self.is_fast, lambda: self.steps.append(f"finish {message.number}"))


def a_group(number: int) -> Group:
    flat = torch.zeros(4)
    return Group(flat, messages=[Message(number, flat, codec=None)], pending=1)  # type: ignore[arg-type]


def send(sender: Sender, groups: list[Group]) -> None:
    order = [(group, group.messages[0]) for group in groups]
    sender.arrange(order, order)
    sender.begin(1)
    sender.release(list(reversed(groups)))
    sender.wait(groups)


def test_messages_travel_in_the_arranged_order_whatever_is_ready_first() -> None:
    steps: list[str] = []
    sender = Sender(Recorder(steps), credit=1)
    send(sender, [a_group(0), a_group(1), a_group(2)])
    assert [step for step in steps if step.startswith("start")] == ["start 0", "start 1", "start 2"]
    sender.close()


@pytest.mark.parametrize("is_fast", [False, True])
def test_what_is_over_is_finished_before_the_next_is_sent(is_fast: bool) -> None:
    steps: list[str] = []
    sender = Sender(Recorder(steps, is_fast=is_fast), credit=1 << 20)
    send(sender, [a_group(0), a_group(1)])
    sender.close()
    both = ["start 0", "finish 0", "start 1", "finish 1"]
    assert steps == (both if is_fast else ["start 0", "start 1", "finish 0", "finish 1"])


def test_streams_wait_for_gradients_before_sending_and_for_sums_before_going_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[str] = []
    marks = iter(range(100))
    monkeypatch.setattr(module, "mark_stream", lambda flat: f"mark {next(marks)}")
    monkeypatch.setattr(module, "wait_for_event", lambda event, flat: steps.append(f"wait for {event}"))
    sender = Sender(Recorder(steps), credit=1 << 20)
    send(sender, [a_group(0)])
    assert steps == ["wait for mark 0", "start 0", "finish 0", "wait for mark 1"]
    sender.close()


def test_a_message_starts_as_soon_as_it_is_ready_while_others_are_under_way() -> None:
    """The first one ends only after the second has started, which is not ready yet when the first one starts."""
    started, second = threading.Event(), threading.Event()

    class Slow:
        def start(self, message: Message, seed: int) -> UnderWay:
            (second if message.number else started).set()

            def finish() -> None:
                assert second.wait(60), "the second message waits for the first one's end"

            return UnderWay(lambda: False, finish)

    groups = [a_group(0), a_group(1)]
    sender = Sender(Slow(), credit=1 << 20)
    order = [(group, group.messages[0]) for group in groups]
    sender.arrange(order, order)
    sender.begin(1)
    sender.release(groups[:1])
    assert started.wait(60)
    sender.release(groups[1:])
    sender.wait(groups)
    sender.close()


def test_a_failed_message_fails_the_training_thread() -> None:
    sender = Sender(Recorder([], OSError("gone")), credit=1)
    with pytest.raises(OSError, match="gone"):
        send(sender, [a_group(0)])


def test_on_a_gpu_no_seconds_are_given_since_the_host_only_hands_messages_over() -> None:
    def read_names(world: ThreadWorld) -> set[str]:
        strategy = make_strategy(resolve("bsp"))
        strategy.attach(world, nn.Linear(2, 2), lambda net: torch.optim.SGD(net.parameters(), 0.1))
        on_cpu = set(strategy.stats())
        world.device = torch.device("cuda")
        on_gpu = set(strategy.stats())
        world.device = torch.device("cpu")
        strategy.close()
        return on_cpu - on_gpu

    expected = {"queue_seconds", "communication_seconds", "exposed_seconds", "hidden_seconds"}
    assert run_ranks(2, read_names) == [expected] * 2
