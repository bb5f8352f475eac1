"""What a message costs in a plan, and what counts as sent."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from task_images.comm.link import Link, measure_burst, measure_cost


class Work:
    """A message under way, the last of which takes 20 seconds until all ranks are done."""

    def __init__(self, link: "SlowLink") -> None:
        self._link = link

    def wait(self) -> None:
        self._link.under_way -= 1
        if not self._link.under_way:
            self._link.now += 20.0


class SlowLink:
    """A link with a clock of its own: a message takes a second and a hundredth of one per number."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.now = 0.0
        self.under_way = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.start_all_reduce(tensor).wait()
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Work:
        self.under_way += 1
        self.now += 1.0 + 0.01 * tensor.numel()
        return Work(self)

    def synchronize(self) -> None:
        """A CPU has done what it was told."""


def test_costs_are_what_one_message_more_takes_and_not_what_a_burst_takes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else plans for many messages are predicted too slow: 65 of them on 4 ranks by a third."""
    link = SlowLink()
    monkeypatch.setattr(time, "perf_counter", lambda: link.now)
    assert measure_cost(cast(Link, link), sizes=(100, 400)) == [pytest.approx(2.0), pytest.approx(5.0)]
    assert measure_burst(cast(Link, link), size=100, count=3) == pytest.approx(26.0)


def test_messages_that_measure_the_network_are_left_out_of_the_figures() -> None:
    link = object.__new__(Link)
    link.messages, link.bytes, link.wire_bytes, link._delay = 1, 2, 3.0, None
    with link.leave_out():
        link.book(torch.zeros(10), 1.0)
        assert (link.messages, link.bytes) == (2, 42)
    assert (link.messages, link.bytes, link.wire_bytes) == (1, 2, 3.0)


class Received:
    """A receive that is recorded when it is waited for."""

    def __init__(self, calls: list[tuple[str, int]], peer: int) -> None:
        self._calls, self._peer = calls, peer

    def wait(self) -> None:
        self._calls.append(("received", self._peer))


@pytest.mark.parametrize(
    ("in_turns", "expected"),
    [
        (False, [("isend", 1), ("isend", 2), ("received", 1), ("received", 2)]),
        (True, [("send", 1), ("received", 2), ("send", 2), ("received", 1)]),
    ],
)
def test_a_swap_is_ready_to_receive_before_it_sends(
    in_turns: bool, expected: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo's "ready" for what comes would else wait behind what goes: two ranks took 2.2 times a message's time. Over
    gloo a rank sends to the next one of the ring, and receives from the previous one, before it sends back."""
    calls: list[tuple[str, int]] = []

    def start(name: str, peer: int) -> Received | None:
        calls.append((name, peer))
        return Received(calls, peer) if name == "irecv" else None

    for name in ("isend", "irecv", "send"):
        monkeypatch.setattr(dist, name, lambda tensor, peer, group, name=name: start(name, peer))
    link = object.__new__(Link)
    link.messages, link.bytes, link.wire_bytes, link._delay = 0, 0, 0.0, None
    link.host_pairs, link.device = False, torch.device("cpu")
    link._turns = ThreadPoolExecutor(1) if in_turns else None
    link.__dict__["group"] = None
    link.swap(torch.zeros(10), [1, 2])
    assert calls == [("irecv", 1), ("irecv", 2), *expected]
    assert link.wire_bytes == 80
