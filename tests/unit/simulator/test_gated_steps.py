"""Steps without a barrier, traced by hand: each layer's next forward pass waits for its own parameters only.

A step is in its steady state when the next one begins as long after it as it did after the one before.
"""

from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.simulator.collectives import RingCollectives
from mlbench_cli.simulator.step import Step, simulate_step
from mlbench_cli.simulator.workload import Tensor, Workload
from task_images.comm.presets import resolve

# Forward passes of 1 s each for a, b and c; then gradients of c, b and a after 4, 5 and 6 s. Among two ranks an
# all-reduce of a layer takes 2 s, a reduce-scatter or an all-gather 1 s; of a server's link it takes 1 s each way.
LAYERS = Workload((Tensor("c", 100, 4.0), Tensor("b", 100, 5.0), Tensor("a", 100, 6.0)), 3.0, 6.0)
PAIR = RingCollectives(2, alpha=0.5, beta=0.01)
FREE = RingCollectives(2, alpha=0.0, beta=0.0)


def gated(work: Workload = LAYERS, ring: RingCollectives = PAIR, servers: int | None = None, **axes: str) -> Step:
    method: Any = {"plan": "tensor", "barrier": "none", "partition": "none", "order": "fifo", **axes}
    return simulate_step(work, replace(resolve("bsp"), **method), ring, servers)


def periods(step: Step) -> dict[str, tuple[float, float]]:
    """When the message of each layer was handed over and ended, after the first of them was ready."""
    first = min(sent.ready for sent in step.trace)
    return {"cba"[sent.group]: (round(sent.start - first, 6), round(sent.end - first, 6)) for sent in step.trace}


def test_all_reduces_run_into_the_next_forward_pass() -> None:
    """They end 6, 8 and 10 s after the step has begun, so a comes last, and its forward pass begins at 10."""
    step = gated()
    assert step.seconds == 10.0
    assert (step.compute, step.exposed, step.communication, step.hidden) == (6.0, 4.0, 6.0, 2.0)
    assert periods(step) == {"c": (0.0, 2.0), "b": (1.0, 4.0), "a": (2.0, 6.0)}


def test_priority_gives_the_first_layer_a_start() -> None:
    """a goes before b, which waits: a's forward pass begins at 8, b's at 10, c's at 11; the step ends at 9."""
    step = gated(order="priority")
    assert step.seconds == 9.0
    assert {name: end for name, (_, end) in periods(step).items()} == {"c": 2.0, "a": 4.0, "b": 6.0}


def test_all_gathers_of_dear_follow_the_order_of_the_forward_pass() -> None:
    """The reduce-scatters end at 7, the all-gathers of a, b and c at 8, 9 and 10: none but the first is waited for."""
    step = gated(transport="rsag")
    assert step.seconds == 8.0
    assert periods(step) == {"c": (0.0, 6.0), "b": (1.0, 5.0), "a": (2.0, 4.0)}
    slow = gated(transport="rsag", ring=RingCollectives(2, alpha=1.0, beta=0.02))
    # Twice as slow: scattered from 4 to 10, then gathered until 12, 14 and 16, each before its layer's second.
    assert slow.seconds == 14.0


@pytest.mark.parametrize(("servers", "seconds"), [(2, 9.0), (1, 13.0)])
def test_servers_return_each_layer_by_itself(servers: int, seconds: float) -> None:
    """With two servers a is pushed until 7, and is back after two latencies and a pull at 9. One is twice as slow."""
    step = gated(transport="ps", servers=servers)
    assert step.seconds == seconds
    assert step.sent_bytes == 300


def test_messages_of_servers_in_their_order() -> None:
    step = gated(transport="ps", servers=2)
    assert periods(step) == {"c": (0.0, 3.0), "b": (1.0, 4.0), "a": (2.0, 5.0)}


def test_messages_with_other_transports_go_one_at_a_time() -> None:
    """An all-gather of 100 bytes of each of two ranks takes 0.5 + 1 s: c until 5.5, b until 7, a until 8.5."""
    step = gated(transport="allgather")
    assert periods(step) == {"c": (0.0, 1.5), "b": (1.5, 3.0), "a": (3.0, 4.5)}
    assert step.seconds == 8.5
    # With priorities a goes at 7 all the same, since b was under way when it came.
    assert gated(transport="allgather", order="priority").seconds == 8.5


def test_updates_and_the_rest_are_part_of_each_step() -> None:
    work = replace(LAYERS, optimizer=0.5, other=0.25)
    assert gated(work, FREE).seconds == 6.75
    # All-reduces hide the update and the rest, too: a is back at 10.25, and 10 s later once more.
    assert gated(work).seconds == 10.0


def test_forward_passes_are_divided_as_the_backward_pass_is() -> None:
    """a takes three quarters of both passes. c's parameters come 2 s after the step's end, a's 2 s later."""
    work = Workload((Tensor("c", 100, 5.0), Tensor("a", 100, 8.0)), 4.0, 8.0)
    step = gated(work)
    # c: 5 to 7, a: 8 to 10. The next step's forward pass begins at 10 with a, for 3 s, then c for 1.
    assert step.seconds == 10.0
    reverse = gated(Workload((Tensor("c", 100, 7.0), Tensor("a", 100, 8.0)), 4.0, 8.0))
    # c: 7 to 9, a: 8 to 11. It begins at 11.
    assert reverse.seconds == 11.0


@pytest.mark.parametrize("transport", ["allreduce", "rsag", "ps", "allgather"])
@pytest.mark.parametrize("order", ["fifo", "priority"])
def test_nothing_is_waited_for_on_a_network_without_costs(transport: str, order: str) -> None:
    step = gated(ring=FREE, transport=transport, order=order)
    assert (step.seconds, step.exposed) == (6.0, 0.0)
    assert (step.messages, step.groups) == (3, 3)


def test_parts_of_a_layer_are_messages_of_its_group() -> None:
    """100 bytes in parts of 40 are three messages, which a layer waits for all of."""
    step = gated(partition="40")
    assert (step.messages, step.groups) == (9, 3)
    assert [sent.size for sent in step.trace] == [40, 40, 20] * 3
    assert step.sent_bytes == pytest.approx(300)
    # Nine all-reduces cost a latency of 1 s each, and 3 s of bytes: the last one of a ends at 4 + 12.
    assert step.seconds == pytest.approx(16.0)
