"""Steps under methods: traces by hand, and what must hold for any workload and network."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbench_cli.errors import UsageError
from mlbench_cli.simulator.collectives import GlooCollectives, RingCollectives
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.simulator.step import Step, encoded_bytes, factor_bytes, group_by_bytes, measure_cost, simulate_step
from mlbench_cli.simulator.workload import CodecCost, Tensor, Workload
from task_images.comm.methods import Method
from task_images.comm.plans import Cost
from task_images.comm.presets import PRESETS, resolve

# Backward pass from 1 s on, gradients after 2, 3 and 4 s; an all-reduce of s bytes takes 1 + 0.1 s seconds.
WORK = Workload((Tensor("c", 10, 2.0), Tensor("b", 20, 3.0), Tensor("a", 30, 4.0)), 1.0, 4.0, optimizer=0.5)
RING = RingCollectives(2, alpha=0.5, beta=0.1)
UNKNOWN = ("zero1", "fsdp2", "hsdp", "ssp-ps")


def run(name: str, work: Workload = WORK, ring: RingCollectives = RING) -> Step:
    return simulate_step(work, resolve(name), ring)


def trace(step: Step) -> list[tuple[float, float]]:
    return [(round(sent.start, 6), round(sent.end, 6)) for sent in step.trace]


def test_one_message_after_the_backward_pass() -> None:
    step = run("bsp")
    assert trace(step) == [(4.0, 11.0)]
    assert (step.seconds, step.exposed, step.sent_bytes) == (11.5, 7.0, 60.0)


def test_a_message_for_each_tensor_as_soon_as_it_is_ready() -> None:
    step = run("wfbp")
    # Two are handed over at a time; the link carries them one after the other.
    assert trace(step) == [(2.0, 4.0), (3.0, 7.0), (4.0, 11.0)]
    assert step.communication == 9.0
    assert (step.seconds, step.messages, step.groups) == (11.5, 3, 3)


def test_the_best_plan_merges_where_a_message_would_wait_anyway() -> None:
    step = run("optfusion")
    assert trace(step) == [(2.0, 4.0), (4.0, 10.0)]
    assert step.seconds == 10.5
    assert run("mgwfbp").seconds == 10.5


def test_a_plan_is_made_from_what_one_more_message_of_a_burst_takes() -> None:
    """gloo carries two all-reduces at a time, so that one more of many costs half of the delay that one alone has."""
    link = Link(5e-3, 8e-8)
    cost = measure_cost(GlooCollectives(2, link))
    alone = GlooCollectives(2, link).all_reduce(4.0)
    assert 0.4 * alone < cost.alpha < 0.6 * alone
    assert measure_cost(RING) == pytest.approx(Cost(1.0, 0.1))
    # Layers 15 ms apart: waiting for the next one costs more than the delay that a common message saves.
    work = Workload(tuple(Tensor(str(n), 100_000, 0.015 * (n + 1)) for n in range(4)), 0.0, 0.06)
    assert simulate_step(work, resolve("mgwfbp"), GlooCollectives(2, link)).groups == 4


def test_without_communication_a_step_is_its_computation() -> None:
    assert run("noop").seconds == WORK.seconds == 4.5
    assert simulate_step(WORK, resolve("bsp"), RingCollectives(1, 1.0, 1.0)).seconds == 4.5


def test_priority_lets_the_first_layer_pass() -> None:
    """Without latency: 0.1 s per byte. c goes at 2, b at 3; a comes at 4, behind b. If c takes until 6, a passes b."""
    step = simulate_step(WORK, Method(plan="tensor", order="priority"), RingCollectives(2, 0.0, 0.1))
    assert trace(step) == [(2.0, 3.0), (3.0, 5.0), (4.0, 8.0)]
    late = Workload((Tensor("c", 40, 2.0), Tensor("b", 20, 3.0), Tensor("a", 30, 4.0)), 1.0, 4.0)
    step = simulate_step(late, Method(plan="tensor", order="priority"), RingCollectives(2, 0.0, 0.1))
    assert trace(step) == [(2.0, 6.0), (6.0, 11.0), (4.0, 9.0)]


def test_servers_take_and_give_at_the_same_time() -> None:
    """Two servers for two workers: each byte takes 0.1 s to a server and back, each way 0.5 s more, and what is pushed
    next does not wait for that."""
    step = simulate_step(WORK, Method(plan="tensor", transport="ps", servers="2"), RING)
    assert trace(step) == [(2.0, 5.0), (3.0, 8.0), (5.0, 12.0)]


def test_asynchronous_workers_take_turns_at_the_servers() -> None:
    """60 bytes take 6 s each way. Two workers never meet; eight keep a server's link busy for 48 s."""
    two, eight = (run("async-ps", ring=RingCollectives(ranks, alpha=0.5, beta=0.1)) for ranks in (2, 8))
    latency = 2 * RING.stream(60)[1]
    assert two.seconds == pytest.approx(4.0 + 6.0 + 6.0 + latency + WORK.optimizer)
    assert eight.seconds == pytest.approx(8 * 6.0)


def test_half_of_the_servers_are_twice_as_slow() -> None:
    ring = RingCollectives(4, 0.0, 0.1)
    one, two = (simulate_step(WORK, Method(plan="all", transport="ps", servers=count), ring) for count in ("2", "4"))
    assert one.exposed == pytest.approx(2 * two.exposed)


@pytest.mark.parametrize(("workers", "pulled"), [(2, 16_000), (4, 32_000), (16, 80_000)])
def test_servers_return_the_entries_that_all_workers_have_chosen(workers: int, pulled: int) -> None:
    """A tenth of 10,000 numbers, each with its place: 8,000 bytes from each worker, and at most all of them back."""
    work = Workload((Tensor("a", 40_000, 2.0),), 1.0, 2.0)
    method = Method(plan="all", transport="ps", servers=str(workers), codec="topk:0.1", feedback="ef")
    step = simulate_step(work, method, RingCollectives(workers, 0.0, 0.001))
    assert trace(step) == [(2.0, 2.0 + 8.0 + pulled / 1000)]


def test_computation_beside_messages_is_slowed_and_moves_them() -> None:
    """Half a second is lost for each of the two seconds of the backward pass with messages beside it, none after it."""
    slowed = replace(WORK, overlap=0.5)
    assert simulate_step(slowed, resolve("bsp"), RING) == simulate_step(WORK, resolve("bsp"), RING)
    plain, step = (simulate_step(work, resolve("wfbp"), RING) for work in (WORK, slowed))
    assert plain.hidden == 2.0
    assert step.compute == WORK.seconds
    assert step.trace[0].ready > plain.trace[0].ready
    assert plain.seconds < step.seconds < plain.seconds + 0.5 * plain.hidden
    # Slowed by f, the messages follow each other from 2 f on, so the step takes 9 + 2.5 f seconds. 4.5 f of these are
    # computation, hence 2 f are hidden, and f = 1 + 0.5 * 2 f / 4.5 = 9/7.
    assert step.seconds == pytest.approx(9 + 2.5 * 9 / 7, rel=1e-3)


def test_a_step_is_replayed_with_the_messages_that_the_run_had() -> None:
    """c and b in one message, a in the next one; sizes that are not this model's are no plan of it."""
    step = simulate_step(WORK, resolve("wfbp"), RING, buckets=(30, 30))
    assert trace(step) == [(3.0, 7.0), (4.0, 11.0)]
    assert simulate_step(WORK, resolve("wfbp"), RING, buckets=(500, 600)) == run("wfbp")
    assert group_by_bytes(WORK, (61,)) == []
    assert group_by_bytes(WORK, (10, 20, 30)) == [[0], [1], [2]]


def test_local_steps_share_one_average() -> None:
    assert run("localsgd").seconds == pytest.approx(4.5 + 7.0 / 4)


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        ("none", 4096.0),
        ("fp16", 2048.0),
        ("sign", 132.0),
        ("topk:0.01", 80.0),
        ("randomk:0.1", 408.0),
        ("qsgd:127", 1032.0),
        ("powersgd:4", 1024.0),
    ],
)
def test_codecs_send_fewer_bytes(codec: str, size: float) -> None:
    feedback = "ef" if codec.startswith(("sign", "powersgd")) else "none"
    assert encoded_bytes(replace(resolve("bsp"), codec=codec, feedback=feedback), [4096]) == size


def test_what_a_codec_computes_is_part_of_the_step() -> None:
    """0.1 s a byte to encode and 0.01 to decode on two ranks; on four, decoding takes twice as long."""
    costs = (CodecCost("eftopk", 2, 0.1, 0.01), CodecCost("eftopk", 4, 0.1, 0.02), CodecCost("fp16", 2, 0.1, 0.01))
    work = replace(WORK, codecs=costs)
    assert run("bsp", work) == run("bsp")
    for name in ("eftopk", "topk", "fp16"):  # topk by the codec of eftopk
        assert run(name, work).seconds - run(name).seconds == pytest.approx(60 * 0.11)
    assert run("qsgd", work) == run("qsgd")  # was not measured
    four = RingCollectives(4, alpha=0.5, beta=0.1)
    assert run("eftopk", work, four).seconds - run("eftopk", WORK, four).seconds == pytest.approx(60 * 0.12)
    slow = run("eftopk", work.scale(3)).seconds - run("eftopk", WORK.scale(3)).seconds
    assert slow == pytest.approx(3 * 60 * 0.11)
    beside = run("onebit-adam", replace(WORK, codecs=(CodecCost("onebit-adam", 2, 0.1, 0.0),)))
    assert beside.seconds - run("onebit-adam").seconds == pytest.approx(6.0)


def test_codecs_compress_each_tensor_by_itself_or_the_whole_message() -> None:
    """A tensor of 10 numbers has one entry of its own, and a scale."""
    assert encoded_bytes(resolve("eftopk"), [4096, 40]) == 80 + 8
    assert encoded_bytes(resolve("eftopk", {"scope": "message"}), [4096, 40]) == 80
    assert encoded_bytes(resolve("ef-signsgd"), [4096, 40]) == 130 + 2 * 4


def test_powersgd_takes_two_rounds_one_after_the_other() -> None:
    """What rank 1 does not make smaller by half travels in the first."""
    method = resolve("powersgd", {"codec": "powersgd:1"})
    assert factor_bytes(method, [4 * 1024, 40]) == (4 * 32 + 40, 4 * 32)


def test_powersgd_sends_factors_of_each_matrix_as_it_is() -> None:
    """A matrix 256 x 4, a vector of 1024, and a matrix 16 x 64, at rank 1."""
    method = resolve("powersgd", {"codec": "powersgd:1"})
    assert factor_bytes(method, [4096, 4096, 4096], [256, 1, 16]) == (4 * 256 + 4096 + 4 * 16, 4 * 4 + 4 * 64)


def test_neighbors_get_weights_over_one_link_and_two_ranks_are_one_neighbor_each() -> None:
    link = Link(0.01, 1e-6)
    steps = {ranks: simulate_step(WORK, resolve("dpsgd-atc"), GlooCollectives(ranks, link)) for ranks in (2, 3)}
    size = WORK.size
    assert [steps[ranks].sent_bytes for ranks in (2, 3)] == [size, 2 * size]
    for ranks, step in steps.items():
        exchange = 2 * link.alpha + 2 * link.overhead + (ranks - 1) * size * link.beta
        assert step.seconds == pytest.approx(WORK.seconds + exchange)


def test_weights_that_leave_before_the_forward_pass_hide_behind_the_step() -> None:
    step = simulate_step(WORK, resolve("dpsgd"), GlooCollectives(2, Link(0.01, 1e-6)))
    assert step.seconds == pytest.approx(WORK.seconds)
    assert step.communication > 0


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_no_model_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not simulated"):
        run(name)


WORKLOADS = st.lists(st.tuples(st.integers(1, 500_000), st.floats(0.001, 1.0)), min_size=1, max_size=9).flatmap(
    lambda rows: st.tuples(st.just(rows), st.floats(0.0, 1.0), st.floats(0.0, 0.1))
)
RINGS = st.builds(
    RingCollectives, st.integers(2, 16), st.sampled_from((0.0, 1e-4, 1e-2, 0.1)), st.sampled_from((0.0, 1e-8, 1e-7))
)
SIMULATED = sorted(set(PRESETS) - set(UNKNOWN))


def workload(drawn: tuple[list[tuple[int, float]], float, float]) -> Workload:
    rows, forward, optimizer = drawn
    now, tensors = forward, []
    for number, (elements, seconds) in enumerate(rows):
        now += seconds
        tensors.append(Tensor(str(number), 4 * elements, now))
    return Workload(tuple(tensors), forward, now, optimizer)


@settings(max_examples=60, deadline=None)
@given(drawn=WORKLOADS, ring=RINGS)
def test_plans_are_ordered(drawn: tuple[list[tuple[int, float]], float, float], ring: RingCollectives) -> None:
    work, slack = workload(drawn), 1e-9
    seconds = {name: run(name, work, ring).seconds for name in ("bsp", "wfbp", "mgwfbp", "optfusion")}
    assert seconds["optfusion"] <= seconds["mgwfbp"] + slack
    assert seconds["mgwfbp"] <= min(seconds["wfbp"], seconds["bsp"]) + slack
    if ring.alpha == 0:
        assert seconds["wfbp"] <= seconds["bsp"] + slack
        assert run("bytescheduler", work, ring).seconds <= seconds["wfbp"] + slack


@settings(max_examples=40, deadline=None)
@given(drawn=WORKLOADS, ring=RINGS, name=st.sampled_from(SIMULATED))
def test_no_method_beats_computation(
    drawn: tuple[list[tuple[int, float]], float, float], ring: RingCollectives, name: str
) -> None:
    work = workload(drawn)
    step = run(name, work, ring)
    assert step.seconds >= work.seconds - 1e-9
    assert 0 <= step.efficiency <= 1 + 1e-9
    if ring.alpha == ring.beta == 0:
        assert step.seconds == pytest.approx(work.seconds)


@settings(max_examples=40, deadline=None)
@given(drawn=WORKLOADS, ranks=st.integers(2, 6))
def test_every_byte_is_sent_once(drawn: tuple[list[tuple[int, float]], float, float], ranks: int) -> None:
    work = workload(drawn)
    expected = 2 * (ranks - 1) / ranks * work.size
    for name in ("bsp", "wfbp", "fusion", "mgwfbp", "optfusion", "bytescheduler", "dear", "ddp"):
        step = simulate_step(work, resolve(name), GlooCollectives(ranks, Link(1e-4, 1e-8)))
        # gloo's reduce-scatter is an all-reduce.
        assert step.sent_bytes == pytest.approx(expected * (1.5 if name == "dear" else 1)), name
