"""Messages and transports with one rank: what is kept, what powersgd compresses, and what a ring moves."""

import pytest
import torch
from torch import Tensor

from task_images.comm.codecs import Codec, TopK, make_codec
from task_images.comm.exchange import (
    AllGather,
    AllReduce,
    GlobalTopK,
    Matrix,
    Message,
    NoExchange,
    PowerSgd,
    ScatterGather,
    VoteByShards,
    make_message,
    make_transport,
)
from task_images.comm.methods import Method
from task_images.comm.plans import Cost, build, find_optimum, fit, merge_greedily, simulate_order, threshold
from task_images.comm.presets import resolve


class Alone:
    """A link of one rank that notes what it sums."""

    size, rank = 1, 0

    def __init__(self) -> None:
        self.sent: list[int] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sent.append(tensor.numel())
        return tensor


def numbers(size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bsp", AllReduce),
        ("fp16", AllReduce),
        ("randomk", AllReduce),
        ("dear", ScatterGather),
        ("eftopk", AllGather),
        ("gtopk", GlobalTopK),
        ("powersgd", PowerSgd),
        ("noop", NoExchange),
    ],
)
def test_each_method_has_its_transport(name: str, kind: type) -> None:
    assert type(make_transport(resolve(name), Alone())) is kind  # type: ignore[arg-type]
    assert type(make_transport(resolve("signsgd-mv", {"transport": "a2a"}), Alone())) is VoteByShards  # type: ignore[arg-type]


def test_without_a_barrier_the_second_half_of_an_all_reduce_waits() -> None:
    later = make_transport(resolve("dear"), Alone())  # type: ignore[arg-type]
    at_once = make_transport(resolve("dear", {"barrier": "step"}), Alone())  # type: ignore[arg-type]
    assert isinstance(later, ScatterGather)
    assert isinstance(at_once, ScatterGather)
    assert (later._split, at_once._split) == (True, False)


@pytest.mark.parametrize(
    ("name", "residual", "velocity"), [("topk", False, False), ("eftopk", True, False), ("dgc", True, True)]
)
def test_a_message_has_the_state_that_its_method_needs(name: str, residual: bool, velocity: bool) -> None:
    made = make_message(resolve(name), 3, torch.ones(8), 0, [8], [])
    assert (made.number, made.size, made.kept) == (3, 32, None)
    assert (made.residual is not None, made.velocity is not None) == (residual, velocity)
    for part in (made.residual, made.velocity):
        assert part is None or part.tolist() == [0.0] * 8


def test_momentum_correction_accumulates_velocities_and_masks_what_was_sent() -> None:
    """Lin et al. 2018, algorithm 1: u <- m u + g, v <- v + u; entries that are sent are cleared in both."""
    message = Message(0, torch.tensor([1.0, 3.0]), TopK(0.5), torch.zeros(2), torch.zeros(2))
    assert [part.tolist() for part in message.encode(1, 0.5)] == [[1], [3.0]]
    assert message.residual is not None
    assert message.velocity is not None
    assert (message.residual.tolist(), message.velocity.tolist()) == ([1.0, 0.0], [1.0, 0.0])
    message.flat.copy_(torch.tensor([1.0, 2.0]))
    # u = [1.5, 2], v = [2.5, 2]: the first entry is the larger one now.
    assert [part.tolist() for part in message.encode(2, 0.5)] == [[0], [2.5]]
    assert (message.residual.tolist(), message.velocity.tolist()) == ([0.0, 2.0], [0.0, 2.0])


def test_a_skipped_update_leaves_no_trace_in_the_state() -> None:
    message = Message(0, torch.tensor([1.0, 3.0]), TopK(0.5), torch.zeros(2), torch.ones(2))
    message.factors = {"a": torch.ones(2)}
    message.keep()
    message.encode(1, 0.5)
    message.factors["b"] = torch.ones(2)
    message.restore()
    assert message.residual is not None
    assert message.velocity is not None
    assert (message.residual.tolist(), message.velocity.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    assert list(message.factors) == ["a"]
    plain = Message(0, torch.ones(2), Codec())
    plain.keep()
    plain.restore()
    assert plain.residual is None


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "worth"),
    [
        (16, 16, 4, False),  # (16 + 16) 4 2 = 256 = 16 x 16: no gain by the factor 2
        (16, 17, 4, True),
        (16, 16, 3, True),
        (1, 100, 4, False),  # rank 1 would send more than the vector
        (2, 3, 4, True),  # full rank is exact
        (2, 2, 2, True),
        (2, 2, 1, False),
        (100, 100, 1, True),
    ],
)
def test_powersgd_compresses_matrices_that_shrink_to_less_than_half_or_have_full_rank(
    rows: int, columns: int, rank: int, worth: bool
) -> None:
    transport = PowerSgd(Alone(), rank, 0)  # type: ignore[arg-type]
    assert transport._is_worth_it(Matrix("m", 0, rows, columns)) is worth


def test_powersgd_sends_two_factors_and_the_rest_uncompressed() -> None:
    link = Alone()
    flat = torch.cat([numbers(20 * 30, 1), numbers(5, 2)])
    matrices = [Matrix("m", 0, 20, 30), Matrix("b", 600, 1, 5)]
    message = make_message(resolve("powersgd"), 0, flat.clone(), 0, [600, 5], matrices)
    PowerSgd(link, 4, 0).start(message, 1)  # type: ignore[arg-type]
    assert link.sent == [20 * 4 + 5, 30 * 4]
    assert torch.equal(message.flat[600:], flat[600:])
    assert torch.linalg.matrix_rank(message.flat[:600].view(20, 30)) == 4
    assert message.residual is not None
    torch.testing.assert_close(message.flat + message.residual, flat, rtol=1e-5, atol=1e-5)
    assert message.factors["m"].shape == (30, 4)
    assert list(message.factors) == ["m"]


def test_powersgd_sends_everything_in_its_warm_up() -> None:
    link, flat = Alone(), numbers(600)
    message = make_message(resolve("powersgd"), 0, flat.clone(), 0, [600], [Matrix("m", 0, 20, 30)])
    transport = PowerSgd(link, 4, 2)  # type: ignore[arg-type]
    for update, sent in ((1, [600]), (2, [600]), (3, [80, 120])):
        link.sent.clear()
        message.codec.update = update
        message.flat.copy_(flat)
        transport.start(message, update)
        assert link.sent == sent
        assert torch.equal(message.flat, flat) is (update < 3)


def test_merging_two_lists_adds_equal_places_and_keeps_what_it_drops() -> None:
    """Shi et al. 2019: the merged list has the largest k of the sum, the rest goes to the residual."""
    residual = torch.zeros(10)
    own = [torch.tensor([2, 5], dtype=torch.int32), torch.tensor([1.0, 4.0])]
    other = [torch.tensor([2, 7], dtype=torch.int32), torch.tensor([2.0, -3.5])]
    places, values = GlobalTopK(Alone())._merge(own, other, residual)  # type: ignore[arg-type]
    assert dict(zip(places.tolist(), values.tolist(), strict=True)) == {5: 4.0, 7: -3.5}
    assert residual.tolist() == [0, 0, 3.0, 0, 0, 0, 0, 0, 0, 0]


def test_nothing_is_exchanged_by_noop() -> None:
    message = Message(0, torch.ones(3), make_codec(Method(), 0))
    assert NoExchange().start(message, 1) is None
    assert message.flat.tolist() == [1.0, 1.0, 1.0]


# --- plans by hand --------------------------------------------------------------------------------------------------


def test_a_group_of_the_threshold_is_full_when_it_has_exactly_its_bytes() -> None:
    assert threshold([5, 5, 5, 4, 1, 1], 10) == [[0, 1], [2, 3, 4], [5]]
    assert threshold([], 10) == []
    assert build("all", [], [], Cost(0, 0)) == []
    assert build("tensor", [1, 2], [0, 1], Cost(0, 0)) == [[0], [1]]


@pytest.mark.parametrize(
    ("ready", "groups"),
    [
        ([0.0, 0.5], [[0, 1]]),  # half a second of waiting saves a second of start-up
        ([0.0, 1.0], [[0], [1]]),  # nothing would be saved
        ([0.0, 0.999], [[0, 1]]),
        ([0.0, 5.0], [[0], [1]]),
        ([3.0, 3.5], [[0, 1]]),
    ],
)
def test_greedy_merging_waits_for_less_than_a_start_up(ready: list[float], groups: list[list[int]]) -> None:
    assert merge_greedily([10, 10], ready, Cost(1.0, 0.1)) == groups


def test_greedy_merging_begins_when_the_link_is_free() -> None:
    """The first message is under way until second 6, so that the others have gathered by then."""
    assert merge_greedily([50, 10, 10, 10], [0.0, 2.0, 4.0, 5.5], Cost(1.0, 0.1)) == [[0], [1, 2, 3]]


def test_the_optimum_prefers_few_messages_if_times_are_equal_only_by_their_end() -> None:
    assert find_optimum([], [], Cost(1.0, 1.0)) == []
    assert find_optimum([4], [0.0], Cost(1.0, 1.0)) == [[0]]
    # Two messages end at max(1 + 1, 4) + 2 = 6, one at 4 + 3 = 7.
    assert find_optimum([1, 2], [0.0, 4.0], Cost(0.0, 1.0)) == [[0], [1]]


def test_a_fit_of_equal_sizes_has_a_start_up_alone() -> None:
    assert fit([(10.0, 2.0), (10.0, 4.0)]) == Cost(3.0, 0.0)
    assert fit([(0.0, 0.0), (10.0, 5.0), (20.0, 10.0)]) == Cost(0.0, 0.5)
    # A start-up below zero is no start-up.
    assert fit([(10.0, 0.0), (20.0, 10.0)]).alpha == 0.0
    assert Cost(1.0, 0.5).time(4) == 3.0


def test_equal_priorities_go_in_order_and_a_message_that_is_ready_in_the_same_moment_counts() -> None:
    assert simulate_order([1, 1, 1], [0.0, 0.0, 0.0], [1, 1, 0], Cost(1.0, 0.0)) == [2, 0, 1]
    # The second one is ready just when the first has been sent, and more urgent than the third.
    assert simulate_order([1, 1, 1], [0.0, 1.0, 0.5], [0, 0, 1], Cost(1.0, 0.0)) == [0, 1, 2]
    assert simulate_order([], [], [], Cost(1.0, 0.0)) == []
    assert simulate_order([4, 1, 1], [0.0, 1.0, 3.0], [2, 1, 0], Cost(0.0, 1.0)) == [0, 2, 1]
