"""What a message costs in a plan, and what counts as sent."""

from typing import cast

import torch
from torch import Tensor

from task_images.comm.link import Link, measure_cost


class Work:
    """A message under way; its end is noted."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def wait(self) -> None:
        self._notes.append("ended")


class Recorder:
    """A link that notes what is asked of it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.notes: list[str] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.notes.append("alone")
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Work:
        self.notes.append("begun")
        return Work(self.notes)

    def synchronize(self) -> None:
        """A CPU has done what it was told."""


def test_costs_are_those_of_messages_that_follow_each_other_without_waiting() -> None:
    """As the reducer sends gradients: the wait for one message's end is no cost of the next one."""
    link = Recorder()
    assert len(measure_cost(cast(Link, link), sizes=(4, 8), repeats=3)) == 2
    assert link.notes == 2 * (2 * ["alone"] + 3 * ["begun"] + 3 * ["ended"])


def test_messages_that_measure_the_network_are_left_out_of_the_figures() -> None:
    link = object.__new__(Link)
    link.messages, link.bytes, link.wire_bytes, link._delay = 1, 2, 3.0, None
    with link.leave_out():
        link.book(torch.zeros(10), 1.0)
        assert (link.messages, link.bytes) == (2, 42)
    assert (link.messages, link.bytes, link.wire_bytes) == (1, 2, 3.0)
