"""Small decisions of the methods: neighbors, strategies, what a self-check compares, states of other ranks, bytes."""

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from task_images.comm import link as link_module
from task_images.comm.base import LOOK_EVERY, NormWatch, has_own_parts, join_method_states, keep_own, set_rate
from task_images.comm.drifting import ChocoGossip, Gossip, LocalSteps, PostLocalSteps, find_neighbors, make_drifting
from task_images.comm.link import Link, LinkPool, open_link
from task_images.comm.presets import resolve
from task_images.comm.reducer import _matrix, _size, needs_profile, pick_state
from task_images.comm.selfcheck import (
    LAYERS,
    RATES,
    Probe,
    _compare,
    _compare_states,
    _flatten,
    _integers,
    _is_free,
    _name_sums,
    _norm,
    _rate,
    is_exact,
)
from task_images.contract import Contract
from task_images.harness.distributed import World

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rank", "size", "peers"),
    [(0, 1, []), (0, 2, [1]), (1, 2, [0]), (0, 3, [1, 2]), (2, 3, [0, 1]), (1, 5, [2, 0]), (4, 5, [0, 3])],
)
def test_neighbors_on_a_ring_are_the_next_and_the_previous_rank(rank: int, size: int, peers: list[int]) -> None:
    assert find_neighbors(rank, size) == peers


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dpsgd", Gossip), ("choco", ChocoGossip), ("localsgd", LocalSteps), ("postlocalsgd", PostLocalSteps)],
)
def test_methods_that_drift_have_their_strategies(name: str, kind: type) -> None:
    made = make_drifting(resolve(name), 1)
    assert type(made) is kind
    assert not made.traits.identical
    assert not made.traits.gradients_agree


def test_steps_between_averages_are_the_last_number_of_the_axis() -> None:
    local: Any = make_drifting(resolve("localsgd", {"sync": "local:7"}), 1)
    later: Any = make_drifting(resolve("postlocalsgd", {"sync": "postlocal:30,5"}), 1)
    assert local._steps == 7
    assert (later._begins_at, later._steps) == (30, 5)


@pytest.mark.parametrize(
    ("plan", "order", "agreement", "is_needed"),
    [
        ("tensor", "fifo", "static", False),
        ("mgwfbp", "fifo", "static", True),
        ("optimal", "deferred", "static", True),
        ("tensor", "priority", "static", True),
        ("tensor", "priority", "leader", False),
        ("mgwfbp", "priority", "leader", True),
    ],
)
def test_backward_passes_are_measured_for_plans_and_orders_that_depend_on_them(
    plan: str, order: str, agreement: str, is_needed: bool
) -> None:
    assert needs_profile(resolve("fusion", {"plan": plan, "order": order, "agreement": agreement})) is is_needed


def test_another_number_of_ranks_shares_what_was_kept_equally() -> None:
    ranks: list[Any] = [
        {
            "residual": {"w": torch.full((2,), float(rank))},
            "velocity": {"w": torch.ones(2)},
            "factor": {"w": torch.ones(1)},
        }
        for rank in (1, 2, 3)
    ]
    assert pick_state(ranks, 1, 3)["residual"]["w"].tolist() == [2.0, 2.0]
    found = pick_state(ranks, 1, 2)
    assert found["residual"]["w"].tolist() == [3.0, 3.0]  # (1 + 2 + 3) / 2
    assert found["velocity"]["w"].tolist() == [1.5, 1.5]
    assert found["factor"]["w"].tolist() == [1.0]
    assert ranks[0]["residual"]["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "rows", "columns"), [((3, 4), 3, 4), ((3, 4, 2, 2), 3, 16), ((5,), 1, 5), ((), 1, 1)]
)
def test_a_parameter_is_a_matrix_of_its_first_dimension(shape: tuple[int, ...], rows: int, columns: int) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    slot: Any = SimpleNamespace(parameter=parameter, name="w", start=7)
    found = _matrix(slot)
    assert (found.name, found.start, found.rows, found.columns) == ("w", 7, rows, columns)
    assert _size(parameter) == 4 * rows * columns
    assert _size(parameter.to(torch.float16)) == 2 * rows * columns


# --- the base -------------------------------------------------------------------------------------------------------


def test_a_groups_rate_has_its_factor() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "rate_factor": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_rate(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_on_a_gpu_are_looked_at_every_50_updates_and_a_bad_one_is_not_lost(bad: float) -> None:
    watch = NormWatch(torch.device("cuda"))
    found = [watch.add(torch.tensor(bad if update == 3 else 1.0)) for update in range(1, LOOK_EVERY + 2)]
    assert LOOK_EVERY == 50
    assert [update for update, is_good in enumerate(found, 1) if not is_good] == [50]
    assert watch.look()
    watch.add(torch.tensor(bad))
    assert not watch.look()
    cpu = NormWatch(CPU)
    assert [cpu.add(torch.tensor(value)) for value in (1.0, bad, 1.0)] == [True, False, True]


def test_each_rank_keeps_its_own_entry() -> None:
    world = World(Contract({"RANK": "1", "WORLD_SIZE": "3"}), CPU, 1, grouped=False)
    assert keep_own(world, "own") == [None, "own", None]


@pytest.mark.parametrize(
    ("state", "has"),
    [
        ({}, False),
        ({"update": 3}, False),
        ({"ranks": []}, False),
        ({"ranks": [None]}, True),
        ({"optimizers": [1]}, True),
    ],
)
def test_states_with_parts_of_ranks(state: Any, has: bool) -> None:
    assert has_own_parts(state) is has


def test_states_of_other_numbers_of_ranks_are_joined_by_rank() -> None:
    states: list[Any] = [
        {"update": 5, "ranks": ["r0", None], "optimizers": ["o0", None], "count": 5},
        {"update": 5, "ranks": [None, "r1"], "optimizers": [None, "o1"], "count": 5},
    ]
    assert join_method_states(states.__getitem__, 2, 1, 2) is states[1]
    assert join_method_states(states.__getitem__, 2, 0, 3) == {
        "update": 5,
        "ranks": ["r0", "r1"],
        "optimizers": ["o0", "o1"],
        "count": 5,
    }
    assert join_method_states(states.__getitem__, 0, 0, 3) == {}
    assert states[0]["ranks"] == ["r0", None]


# --- the self-check -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "exact", "free", "sums"),
    [
        ("bsp", True, False, "exact"),
        ("fp16", True, False, "exact"),
        ("bsp-ps", True, False, "exact"),
        ("ddp", True, False, "exact"),
        ("async-ps", False, False, "the mean equals that of all gradients"),
        ("localsgd", False, False, "the mean equals that of all gradients"),
        ("dpsgd", False, False, "the mean equals that of all gradients"),
        ("eftopk", False, False, "received values plus residuals equal the sum of all gradients"),
        ("powersgd", False, False, "received values plus residuals equal the sum of all gradients"),
        ("topk", False, True, "not compared, only that ranks agree"),
        ("qsgd", False, True, "not compared, only that ranks agree"),
        ("signsgd-mv", False, True, "not compared, only that ranks agree"),
        ("dgc", False, True, "not compared, only that ranks agree"),
        ("choco", False, True, "not compared"),
        ("slowmo", False, True, "not compared"),
        ("onebit-adam", False, True, "not compared, only that ranks agree"),
    ],
)
def test_what_the_sums_of_a_method_can_prove(name: str, exact: bool, free: bool, sums: str) -> None:
    method = resolve(name)
    assert (is_exact(method), _is_free(method), _name_sums(method)) == (exact, free, sums)


def test_differences_count_relative_to_the_change() -> None:
    start = {"a": torch.zeros(2), "b": torch.zeros(1)}
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([10.0])}
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([10.5])}
    assert _compare(found, expected, start) == pytest.approx(0.1)  # 0.5 of 5, and 0.5 of 10
    assert _compare(expected, expected, start) == 0
    assert _compare({**found, "a": torch.tensor([math.nan, 0.0])}, expected, start) == math.inf


def test_states_are_compared_relative_to_their_size() -> None:
    one = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    assert _compare_states({**one, "a": torch.tensor([3.0, 3.0])}, one) == pytest.approx(0.2)
    assert _compare_states({**one, "b": torch.tensor([1e-7])}, one) == pytest.approx(0.1)
    assert _compare_states({"a": one["a"]}, one) == math.inf
    assert _compare_states({}, {}) == 0
    assert _norm(torch.tensor([3.0, -4.0])) == 5.0


def test_tensors_of_a_state_are_found_by_their_path_without_steps() -> None:
    state = {
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2), "n": torch.ones(2).int()}}},
        "x": 1,
    }
    found = _flatten(state)
    assert list(found) == [".optimizer.state.0.m"]
    found[".optimizer.state.0.m"].fill_(5.0)
    assert _flatten(state)[".optimizer.state.0.m"].tolist() == [1.0, 1.0]


def test_the_last_rate_holds_for_an_additional_update() -> None:
    assert [_rate(update) for update in range(1, len(RATES) + 3)] == [*RATES, RATES[-1], RATES[-1]]


def test_integers_are_exact_in_half_precision_and_differ_between_ranks_and_steps() -> None:
    drawn = {(rank, step): _integers(rank, step, CPU) for rank in (0, 1) for step in (0, 1)}
    for name, (shape, magnitude) in LAYERS.items():
        numbers = [one[name] for one in drawn.values()]
        for one in numbers:
            assert one.shape == shape
            whole = one / magnitude
            assert torch.equal(whole, whole.round())
            assert float(whole.abs().max()) <= 4
            assert torch.equal(one.half().float(), one)
        if numbers[0].numel() > 10:
            assert len({tuple(one.flatten().tolist()) for one in numbers}) == 4


def test_the_probes_gradients_are_those_given() -> None:
    probe = Probe(seed=0)
    given = _integers(0, 0, CPU)
    probe(given).backward()
    for name, layer in probe.layers.items():
        assert torch.equal(layer.get_parameter("weight").grad, given[name])  # type: ignore[arg-type]
    assert all(not weight.any() for weight in Probe().read().values())
    read = probe.read()
    read["first"].zero_()
    assert probe.read()["first"].any()


# --- links ----------------------------------------------------------------------------------------------------------


def make_link(size: int, rank: int = 0, backend: str = "nccl", delay: Any = None) -> Link:
    contract = Contract({"RANK": str(rank), "WORLD_SIZE": str(size), "MLBENCH_BACKEND": backend})
    world = World(contract, CPU, 1, grouped=False)
    group: Any = None
    return Link(world, group, delay, LinkPool(world))


def test_a_ring_sends_twice_all_but_one_part_and_a_broadcast_along_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "broadcast", "send", "recv"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    numbers = torch.zeros(100)  # 400 bytes

    def count(call: Any, size: int = 4, rank: int = 0, backend: str = "nccl") -> tuple[int, int, float]:
        link = make_link(size, rank, backend)
        call(link)
        return link.messages, link.bytes, link.wire_bytes

    assert count(lambda link: link.all_reduce(numbers)) == (1, 400, 600.0)
    assert count(lambda link: link.reduce_scatter(numbers)) == (1, 400, 300.0)
    assert count(lambda link: link.reduce_scatter(numbers), backend="gloo") == (1, 400, 600.0)
    assert count(lambda link: link.all_gather_into(numbers, numbers[:25])) == (1, 400, 300.0)
    assert count(lambda link: link.all_gather(numbers[:25])) == (1, 100, 300.0)
    assert count(lambda link: link.all_to_all(numbers)) == (1, 400, 300.0)
    assert count(lambda link: link.send(numbers, 1)) == (1, 400, 400.0)
    assert count(lambda link: link.receive(numbers, 1)) == (0, 0, 0.0)
    # Five ranks: 0 sends to 1, 2 and 4; 1 to 3; the others to nobody.
    for rank, sends in enumerate([3, 1, 0, 0, 0]):
        expected = (1, 400, 400.0 * sends) if sends else (0, 0, 0.0)
        assert count(lambda link: link.broadcast(numbers), 5, rank) == expected
        root = count(lambda link: link.broadcast(numbers, 2), 5, (rank + 2) % 5)
        assert root == expected


def test_a_delay_grows_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    link = make_link(2, delay=(0.5, 0.01))
    link.book(torch.zeros(25), 1)
    assert slept == [0.5 + 0.01 * 100]
    with link.leave_out():
        link.book(torch.zeros(25), 1)
    assert (link.messages, link.bytes, link.wire_bytes) == (1, 100, 100.0)


@pytest.mark.parametrize(("axis", "delay"), [("none", None), ("0.5,1e-9", (0.5, 1e-9)), ("0,0", (0.0, 0.0))])
def test_links_of_a_world_share_a_pool(axis: str, delay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Contract({"WORLD_SIZE": "2"}), CPU, 1, grouped=False)
    monkeypatch.setattr(LinkPool, "take", lambda pool, delay: (pool, delay))
    first: Any = open_link(world, axis)
    second: Any = open_link(world, axis)
    assert first[1] == second[1] == delay
    assert first[0] is second[0]
    assert world.companions == [first[0]]


def test_a_cost_is_what_one_more_message_of_a_burst_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of n messages takes 10 + 3 n seconds here."""
    asked: list[tuple[int, int]] = []

    def burst(link: object, size: int, count: int) -> float:
        asked.append((size, count))
        return 10.0 + 3.0 * count

    monkeypatch.setattr(link_module, "measure_burst", burst)
    link: Any = None
    assert link_module.measure_cost(link, [1, 5]) == [3.0, 3.0]
    assert asked == [(1, 12), (1, 2), (5, 12), (5, 2)]


def test_a_burst_is_timed_behind_two_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = [0.0], []

    class Counting:
        device = CPU

        def all_reduce(self, tensor: Tensor) -> None:
            now[0] += 100.0
            seen.append("warm")

        def start_all_reduce(self, tensor: Tensor) -> Any:
            assert tensor.numel() == 6
            now[0] += 1.0
            seen.append("start")
            return SimpleNamespace(wait=lambda: seen.append("wait"))

        def synchronize(self) -> None: ...

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    link: Any = Counting()
    assert link_module.measure_burst(link, 6, 3) == 3.0
    assert seen == ["warm"] * 2 + ["start"] * 3 + ["wait"] * 3
