"""What one message costs and sends by each transport, by hand, and orders of several messages."""

from dataclasses import replace

import pytest

from mlbench_cli.simulator.collectives import GlooCollectives, RingCollectives
from mlbench_cli.simulator.gloo import LAUNCH_SECONDS, Link
from mlbench_cli.simulator.step import Step, factor_bytes, find_codec_seconds, group_by_bytes, simulate_step
from mlbench_cli.simulator.workload import CodecCost, Tensor, Workload
from task_images.comm.methods import Method
from task_images.comm.presets import resolve

# 200 numbers are ready after 4 s. A message of s bytes to one rank takes 0.5 + s / 100 seconds, and an all-gather of s
# bytes in all among four ranks three of s / 4.
WORK = Workload((Tensor("a", 800, 4.0),), 1.0, 4.0, optimizer=0.5)
RING = RingCollectives(4, alpha=0.5, beta=0.01)


def method(**axes: str) -> Method:
    return replace(resolve("bsp"), plan="all", **axes)


def simulate(ring: RingCollectives = RING, work: Workload = WORK, servers: int | None = None, **axes: str) -> Step:
    return simulate_step(work, method(**axes), ring, servers)


@pytest.mark.parametrize(
    ("transport", "ranks", "seconds", "sent"),
    [
        ("allreduce", 4, 2 * 3 * 2.5, 2 * 3 * 200),
        ("rsag", 4, 2 * 3 * 2.5, 2 * 3 * 200),
        ("allgather", 4, 3 * 8.5, 3 * 800),  # the payloads of all
        ("a2a", 4, 2 * 3 * 2.5, 2 * 3 * 200),
        ("gtopk", 4, 2 * 2 * 8.5, 2 * 2 * 800),  # a tree of two levels, up and down
        ("gtopk", 5, 2 * 3 * 8.5, 2 * 3 * 800),
        ("gossip", 4, 0.5 + 16, 1600),  # two neighbors over one link
        ("gossip", 2, 0.5 + 8, 800),
    ],
)
def test_a_message_takes_and_sends_what_its_transport_does(
    transport: str, ranks: int, seconds: float, sent: float
) -> None:
    # Weights that neighbors get leave after the backward pass only if they are deferred.
    order = "deferred" if transport == "gossip" else "fifo"
    step = simulate(RingCollectives(ranks, 0.5, 0.01), transport=transport, order=order)
    assert step.communication == pytest.approx(seconds)
    assert step.seconds == pytest.approx(4.5 + seconds)
    assert step.sent_bytes == pytest.approx(sent)
    assert (step.messages, step.groups) == (1, 1)


def test_gloos_reduce_scatter_sends_as_much_as_an_all_reduce() -> None:
    gloo = GlooCollectives(4, Link(1e-3, 1e-8))
    step = simulate_step(WORK, method(transport="rsag"), gloo)
    assert step.sent_bytes == pytest.approx((1.5 + 0.75) * 800)


@pytest.mark.parametrize("transport", ["allreduce", "rsag", "allgather", "a2a"])
def test_each_transport_takes_what_its_own_collectives_take(transport: str) -> None:
    """On gloo, whose all-gather is not half of its all-reduce as that of the textbook's ring is."""
    gloo = GlooCollectives(4, Link(1e-3, 1e-6, 2e-4))
    reduce, gather = gloo.all_reduce(800), gloo.all_gather(800)  # without the launch
    seconds = {
        "allreduce": reduce + LAUNCH_SECONDS,
        "rsag": reduce + gather,
        "allgather": gloo.all_gather(4 * 800),
        "a2a": 2 * gather,
    }
    assert len({*seconds.values()}) == 4
    step = simulate_step(WORK, method(transport=transport), gloo)
    assert step.communication == pytest.approx(seconds[transport])


@pytest.mark.parametrize(("servers", "share"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_workers_share_the_links_of_their_servers(servers: int, share: int) -> None:
    step = simulate(transport="ps", servers=servers)
    assert step.communication == pytest.approx(2 * share * 8 + 2 * 0.5)
    assert step.sent_bytes == 800


@pytest.mark.parametrize(
    ("codec", "feedback", "pushed", "pulled"),
    [
        ("fp16", "none", 400, 400),
        ("qsgd:127", "none", 204 + 16, 800),  # one byte for each number; the sum comes whole
        ("topk:0.1", "ef", 160, 4 * 160),  # 20 values with their places, of each worker others
        ("topk:0.5", "ef", 800, 1600),  # but no more than all of them with their places
    ],
)
def test_servers_return_sums_in_their_shortest_exact_form(
    codec: str, feedback: str, pushed: float, pulled: float
) -> None:
    step = simulate(transport="ps", servers=4, codec=codec, feedback=feedback)
    assert step.communication == pytest.approx(pushed / 100 + pulled / 100 + 1.0, rel=0.02)
    assert step.sent_bytes == pytest.approx(pushed, rel=0.1)


def test_local_steps_send_their_share_of_an_average() -> None:
    step = simulate_step(WORK, replace(resolve("localsgd"), sync="local:8"), RING)
    assert step.sent_bytes == pytest.approx(2 * 3 * 200 / 8)
    assert step.communication == pytest.approx(15 / 8)
    assert (step.messages, step.groups) == (1, 1)


@pytest.mark.parametrize("ranks", [1, 4])
def test_nothing_is_sent_by_one_rank_or_without_communication(ranks: int) -> None:
    transport = "allreduce" if ranks == 1 else "noop"
    step = simulate(RingCollectives(ranks, 0.5, 0.01), transport=transport)
    assert (step.seconds, step.communication, step.sent_bytes, step.messages, step.groups) == (4.5, 0, 0, 0, 0)


# --- codecs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "rows", "first", "second"),
    [
        (2, 10, 4 * 2 * 10, 4 * 2 * 20),  # 10 x 20: 60 numbers instead of 200
        (2, 2, 4 * 2 * 2, 4 * 2 * 100),  # as many columns of factors as the matrix has rows: exact
        (3, 10, 4 * 3 * 10, 4 * 3 * 20),  # 90 of 200
        (4, 10, 800, 0),  # 120 of 200: not half as many
        (1, 1, 800, 0),  # a vector
    ],
)
def test_powersgd_sends_factors_where_they_are_half_as_large(rank: int, rows: int, first: int, second: int) -> None:
    assert factor_bytes(method(codec=f"powersgd:{rank}", feedback="ef"), [800], [rows]) == (first, second)


def test_powersgd_without_known_rows_takes_a_square() -> None:
    assert factor_bytes(method(codec="powersgd:2", feedback="ef"), [1600]) == (4 * 2 * 20, 4 * 2 * 20)


def cost(name: str, ranks: int, before: float, after: float) -> CodecCost:
    return CodecCost(name, ranks, before, after)


def test_what_codecs_compute_grows_with_the_ranks_as_measured() -> None:
    dgc = resolve("dgc")
    work = replace(WORK, codecs=(cost("dgc", 2, 1.0, 2.0), cost("dgc", 4, 1.5, 6.0), cost("qsgd", 2, 9.0, 9.0)))
    assert find_codec_seconds(work, dgc, 2) == (1.0, 2.0)
    assert find_codec_seconds(work, dgc, 3) == (1.25, 4.0)
    assert find_codec_seconds(work, dgc, 6) == (2.0, 10.0)
    assert find_codec_seconds(replace(work, codec_factor=0.5), dgc, 2) == (0.5, 1.0)


def test_more_ranks_never_make_a_codec_cheaper_and_fewer_cost_at_least_nothing() -> None:
    work = replace(WORK, codecs=(cost("dgc", 3, 1.0, 2.0), cost("dgc", 4, 0.5, 9.0)))
    assert find_codec_seconds(work, resolve("dgc"), 8) == (1.0, 2.0 + 5 * 7.0)
    assert find_codec_seconds(work, resolve("dgc"), 2) == (1.0, 0.0)


def test_a_method_without_a_measured_codec_takes_that_of_one_with_the_same() -> None:
    alike = next(name for name in ("dgc", "eftopk", "gtopk") if resolve(name).codec_name == "topk")
    work = replace(WORK, codecs=(cost(alike, 2, 1.0, 2.0),))
    other = replace(resolve(alike), name="mine", codec="topk:0.5")
    assert find_codec_seconds(work, other, 2) == (1.0, 2.0)
    assert find_codec_seconds(work, resolve("bsp"), 2) == (0.0, 0.0)
    assert find_codec_seconds(work, resolve("qsgd"), 2) == (0.0, 0.0)


# --- several messages -----------------------------------------------------------------------------------------------

# Three layers whose gradients are ready after 2, 3 and 4 s; the last one is the first of the forward pass.
LAYERS = Workload((Tensor("c", 100, 2.0), Tensor("b", 100, 3.0), Tensor("a", 100, 4.0)), 1.0, 4.0)
PAIR = RingCollectives(2, alpha=0.5, beta=0.01)


def starts(step: Step) -> dict[str, float]:
    return {"cba"[sent.group]: sent.start for sent in step.trace}


def test_of_waiting_messages_that_of_the_first_layer_goes_first() -> None:
    axes = {"plan": "tensor", "transport": "allgather"}
    fifo, priority = (
        simulate_step(LAYERS, replace(resolve("bsp"), order=order, **axes), RingCollectives(2, 0.5, 0.02))
        for order in ("fifo", "priority")
    )
    # Each takes 2.5 s: when the first one ends at 4.5 s, both others wait.
    assert starts(fifo) == {"c": 2.0, "b": 4.5, "a": 7.0}
    assert starts(priority) == {"c": 2.0, "a": 4.5, "b": 7.0}
    assert fifo.seconds == priority.seconds == 9.5


def test_deferred_messages_leave_when_the_backward_pass_ends() -> None:
    axes = {"plan": "tensor", "order": "deferred", "transport": "allgather"}
    step = simulate_step(LAYERS, replace(resolve("bsp"), **axes), PAIR)
    assert starts(step) == {"c": 4.0, "b": 5.5, "a": 7.0}


def test_halves_of_dear_fill_the_backward_pass_and_the_next_forward_pass() -> None:
    step = simulate_step(
        replace(
            LAYERS,
            forward=3.0,
            backward=6.0,
            tensors=tuple(replace(tensor, ready=tensor.ready + 2) for tensor in LAYERS.tensors),
        ),
        resolve("dear"),
        PAIR,
    )
    # Both halves of all three messages, 3 · 2 s, fit beside six seconds of computing but for the last layer's half.
    assert step.sent_bytes == pytest.approx(300)
    assert step.communication >= 3.0
    assert 6.0 < step.seconds < 6.0 + 3 * 2.0


@pytest.mark.parametrize(
    ("buckets", "groups"),
    [
        ((150, 150), [[0], [1, 2]]),  # the middle of the second tensor is the border
        ((151, 149), [[0, 1], [2]]),
        ((300,), [[0, 1, 2]]),
        ((303,), [[0, 1, 2]]),  # padded by one percent
        ((304,), []),
        ((297,), [[0, 1, 2]]),
        ((296,), []),
        ((), []),
        ((1, 299), [[0, 1, 2]]),  # none without tensors
    ],
)
def test_tensors_belong_to_the_bucket_that_holds_their_middle(
    buckets: tuple[int, ...], groups: list[list[int]]
) -> None:
    assert group_by_bytes(LAYERS, buckets) == groups


# --- registered methods ---------------------------------------------------------------------------------------------


def test_an_average_every_so_many_updates_is_shared_by_them() -> None:
    step = simulate_step(WORK, resolve("slowmo"), RING)  # an all-reduce of everything in one of four updates
    assert step.seconds == pytest.approx(4.5 + 15 / 4)
    assert step.communication == pytest.approx(15 / 4)
    assert step.sent_bytes == pytest.approx(2 * 3 * 200 / 4)


def test_signs_are_gathered_from_all_ranks_in_each_update() -> None:
    step = simulate_step(WORK, resolve("onebit-adam"), RING)  # 200 signs are 25 bytes
    assert step.communication == pytest.approx(3 * (0.5 + 25 / 100))
    assert step.sent_bytes == pytest.approx(3 * 25)
    assert (step.messages, step.groups) == (1, 1)


def test_what_a_registered_method_computes_is_part_of_its_step() -> None:
    work = replace(WORK, codecs=(cost("onebit-adam", 4, 0.001, 0.002), cost("slowmo", 4, 9.0, 9.0)))
    step = simulate_step(work, resolve("onebit-adam"), RING)
    assert step.communication == pytest.approx(3 * 0.75 + 800 * 0.003)


def test_only_what_is_not_hidden_is_exposed() -> None:
    assert Step(7.0, 4.5, 3.0, 1, 0.0, 1).exposed == 2.5
    assert Step(4.0, 4.5, 3.0, 1, 0.0, 1).exposed == 0.0
