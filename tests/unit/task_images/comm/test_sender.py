"""The communication thread: order of messages, failures, and what a GPU's streams have to wait for."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from task_images.comm import sender as module
from task_images.comm.choose import make_strategy
from task_images.comm.exchange import Message, ScatterGather, UnderWay
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


@pytest.mark.parametrize(
    ("credit", "steps"),
    [
        (16, ["start 0", "finish 0", "start 1", "finish 1", "start 2", "finish 2"]),
        (31, ["start 0", "finish 0", "start 1", "finish 1", "start 2", "finish 2"]),
        (32, ["start 0", "start 1", "finish 0", "start 2", "finish 1", "finish 2"]),
        (48, ["start 0", "start 1", "start 2", "finish 0", "finish 1", "finish 2"]),
        (1, ["start 0", "finish 0", "start 1", "finish 1", "start 2", "finish 2"]),
    ],
)
def test_as_many_bytes_are_in_flight_as_the_credit_allows(credit: int, steps: list[str]) -> None:
    """Messages of 16 bytes. One that is larger than the credit travels alone."""
    found: list[str] = []
    sender = Sender(Recorder(found), credit)
    send(sender, [a_group(0), a_group(1), a_group(2)])
    sender.close()
    assert found == steps


def test_every_message_of_every_update_has_a_seed_of_its_own_that_ranks_share() -> None:
    seeds: list[int] = []

    class Seeds:
        def start(self, message: Message, seed: int) -> None:
            seeds.append(seed)

    for _ in range(2):  # two ranks
        sender = Sender(Seeds(), credit=1 << 20)
        groups = [a_group(0), a_group(1)]
        sender.arrange([(group, group.messages[0]) for group in groups], [])
        for update in (1, 2, 10**12):
            for group in groups:
                group.pending, group.ready = 1, False
            sender.begin(update)
            sender.release(groups)
            sender.wait(groups)
        sender.close()
    assert seeds[:6] == seeds[6:]
    assert len(set(seeds[:6])) == 6
    assert all(0 <= seed < 2**40 for seed in seeds)  # generators take 64 bits, of which codecs multiply by 65 537


def test_the_second_halves_follow_in_their_own_order() -> None:
    steps: list[str] = []

    class Halves(ScatterGather):
        def __init__(self) -> None: ...

        def start(self, message: Message, seed: int) -> None:
            steps.append(f"scatter {message.number}")
            message.shard = message.flat

        def gather(self, message: Message) -> None:
            steps.append(f"gather {message.number}")
            message.shard = None

    sender = Sender(Halves(), credit=1 << 20)
    groups = [a_group(number) for number in range(3)]
    order = [(group, group.messages[0]) for group in groups]
    sender.arrange(order, order[::-1])
    sender.begin(1)
    sender.release(groups)
    sender.wait(groups)
    sender.close()
    assert steps == ["scatter 0", "scatter 1", "scatter 2", "gather 2", "gather 1", "gather 0"]
    assert [group.pending for group in groups] == [0, 0, 0]


def test_seconds_are_of_waiting_for_others_and_of_communicating(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message takes 3 s to start and 4 s to finish; the second waits for the first one's start."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    spans: list[Any] = []

    class Clocked:
        def start(self, message: Message, seed: int) -> UnderWay:
            now[0] += 3.0

            def finish() -> None:
                now[0] += 4.0

            return UnderWay(lambda: False, finish)

    timeline: Any = SimpleNamespace(add_message=spans.append)
    sender = Sender(Clocked(), 1 << 20, timeline)
    groups = [a_group(0), a_group(1)]
    sender.arrange([(group, group.messages[0]) for group in groups], [])
    sender.release(groups)
    sender.begin(1)
    sender.wait(groups)
    sender.close()
    assert sender.queue_seconds == 3.0
    assert sender.communication_seconds == 14.0
    # Number, bytes, ready, begun, summed.
    assert [tuple(span) for span in spans] == [(0, 16, 0.0, 0.0, 10.0), (1, 16, 0.0, 3.0, 14.0)]


class Leader:
    """Rank 0 of a dynamic order, or one that follows: `announced` are the indices that rank 0 has named."""

    def __init__(self, is_here: bool, announced: list[int]) -> None:
        self.is_here, self.announced = is_here, announced
        self.asked: list[int] = []

    def announce(self, index: int) -> int:
        self.asked.append(index)
        return index if self.is_here else self.announced.pop(0)


def test_rank_0_names_the_first_message_of_the_order_that_is_ready() -> None:
    steps: list[str] = []
    leader: Any = Leader(True, [])
    sender = Sender(Recorder(steps, is_fast=True), 1 << 20, None, leader)
    groups = [a_group(number) for number in range(3)]
    sender.arrange([(group, group.messages[0]) for group in groups], [])
    sender.release([groups[2]])
    sender.begin(1)
    sender.wait([groups[2]])
    sender.release(groups[:2])
    sender.wait(groups)
    sender.close()
    assert [step for step in steps if step.startswith("start")] == ["start 2", "start 0", "start 1"]
    assert leader.asked == [2, 0, 0]  # among those that are left


def test_the_other_ranks_take_what_rank_0_names() -> None:
    steps: list[str] = []
    leader: Any = Leader(False, [1, 1, 0])
    sender = Sender(Recorder(steps, is_fast=True), 1 << 20, None, leader)
    groups = [a_group(number) for number in range(3)]
    sender.arrange([(group, group.messages[0]) for group in groups], [])
    sender.release(groups)
    sender.begin(1)
    sender.wait(groups)
    sender.close()
    assert [step for step in steps if step.startswith("start")] == ["start 1", "start 2", "start 0"]
    assert leader.asked == [-1, -1, -1]


def test_a_sender_that_waits_for_gradients_can_be_ended() -> None:
    sender = Sender(Recorder([]), credit=1)
    groups = [a_group(0)]
    sender.arrange([(groups[0], groups[0].messages[0])], [])
    sender.begin(1)
    sender.close()
    assert not sender._thread.is_alive()
