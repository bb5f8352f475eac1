"""What the reducer makes of a model: groups and messages, what is sent when, what updates share, and what it keeps."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from task_images.comm import reducer
from task_images.comm.choose import make_strategy
from task_images.comm.plans import Cost
from task_images.comm.presets import resolve
from task_images.comm.reducer import MEASURED_UPDATES, SKIPPED_UPDATES, Reducer
from task_images.harness.distributed import World
from task_images.harness.errors import TaskUsageError
from task_images.harness.precision import LossScale
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


class Layer(nn.Module):
    """Numbers whose gradient is what the layer is called with."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, gradient: float) -> Tensor:
        return gradient * self.weight.sum()


class Layers(nn.Module):
    """Layers that are called from the first to the last, so that the last one's gradient is ready first."""

    def __init__(self, *sizes: int, dtypes: tuple[torch.dtype, ...] = ()) -> None:
        super().__init__()
        kinds = dtypes or (torch.float32,) * len(sizes)
        self.layers = nn.ModuleList([Layer(size, kind) for size, kind in zip(sizes, kinds, strict=True)])

    def forward(self, *gradients: float | None) -> Tensor:
        total = torch.zeros(())
        for layer, gradient in zip(self.layers, gradients, strict=True):
            if gradient is not None:
                total = total + layer(gradient)
        return total


def make_sgd(module: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1, momentum)


def attach(
    world: World, name: str, model: nn.Module, make_optimizer: Any = make_sgd, **axes: str
) -> tuple[Any, nn.Module]:
    strategy: Any = make_strategy(resolve(name, axes))
    return strategy, strategy.attach(world, model, make_optimizer)


def update(strategy: Any, module: nn.Module, *gradients: float | None, rate: float = 1.0) -> None:
    strategy.begin(1.0, float(strategy.world.size))
    with strategy.last_pass():
        module(*gradients).backward()
    strategy.step(rate)


def read(model: nn.Module) -> list[float]:
    """The first number of every layer."""
    return [layer.weight[0].item() for layer in model.layers]  # type: ignore[union-attr]


# --- groups and messages --------------------------------------------------------------------------------------------


def describe(
    world: ThreadWorld, name: str, model: nn.Module, axes: dict[str, str]
) -> tuple[list[int], list[list[int]]]:
    """Bytes of each group, and elements of each of its messages."""
    strategy, _ = attach(world, name, model, **axes)
    sizes = [[message.flat.numel() for message in group.messages] for group in strategy._groups]
    strategy.close()
    return strategy.bucket_bytes(), sizes


@pytest.mark.parametrize(
    ("name", "axes", "groups", "messages"),
    [
        ("bsp", {}, [52], [[13]]),
        ("wfbp", {}, [12, 8, 32], [[3], [2], [8]]),
        ("fusion", {"plan": "threshold:16"}, [20, 32], [[5], [8]]),
        ("wfbp", {"partition": "12"}, [12, 8, 32], [[3], [2], [3, 3, 2]]),
        ("wfbp", {"partition": "15"}, [12, 8, 32], [[3], [2], [3, 3, 2]]),
        ("bsp", {"partition": "20"}, [52], [[5, 5, 3]]),
        ("wfbp", {"partition": "1"}, [12, 8, 32], [[1] * 3, [1] * 2, [1] * 8]),
    ],
)
def test_gradients_are_grouped_in_the_order_in_which_they_are_ready_and_cut_into_messages(
    name: str, axes: dict[str, str], groups: list[int], messages: list[list[int]]
) -> None:
    """A parameter of 8, one of 2 and one of 3 numbers of 4 bytes; the last one's gradient comes first."""
    found = run_ranks(2, lambda world: describe(world, name, Layers(8, 2, 3), axes))
    assert found == [(groups, messages)] * 2


def test_numbers_of_several_types_share_no_message() -> None:
    """A group follows the last of its gradients: float64's is that of the first layer."""
    kinds = (torch.float64, torch.float32, torch.float64, torch.float32)
    found = run_ranks(2, lambda world: describe(world, "bsp", Layers(5, 4, 3, 2, dtypes=kinds), {}))
    assert found[0] == ([24, 64], [[6], [8]])


def test_parameters_that_are_not_trained_are_not_sent() -> None:
    def body(world: ThreadWorld) -> list[int]:
        model = Layers(5, 4)
        model.layers[0].weight.requires_grad_(False)
        return describe(world, "bsp", model, {})[0]

    assert run_ranks(2, body) == [[16], [16]]


@pytest.mark.parametrize(
    ("scope", "plan", "parts"),
    [
        ("tensor", "all", [[(3, 2), (5,), (4,)]]),
        ("tensor", "tensor", [[(3,)], [(2,)], [(5,), (4,)]]),
        ("message", "all", [[(), (), ()]]),
    ],
)
def test_codecs_compress_the_part_of_each_tensor_that_is_in_a_message(
    scope: str, plan: str, parts: list[list[tuple[int, ...]]]
) -> None:
    """Tensors of 3, 2 and 9 numbers in messages of at most 5."""

    def body(world: ThreadWorld) -> Any:
        strategy, _ = attach(world, "eftopk", Layers(9, 2, 3), plan=plan, scope=scope, partition="20")
        found = [[tuple(message.codec.sizes) for message in group.messages] for group in strategy._groups]
        strategy.close()
        return found

    assert run_ranks(2, body)[0] == parts


def test_messages_are_numbered_through_all_groups() -> None:
    def body(world: ThreadWorld) -> list[int]:
        strategy, _ = attach(world, "wfbp", Layers(4, 3, 2), partition="8")
        strategy.close()
        return [message.number for group in strategy._groups for message in group.messages]

    assert run_ranks(2, body)[0] == [0, 1, 2, 3, 4]


def test_powersgd_knows_the_matrices_of_its_messages() -> None:
    def body(world: ThreadWorld) -> list[Any]:
        strategy, _ = attach(world, "powersgd", nn.Linear(3, 4), plan="all")
        strategy.close()
        [message] = strategy._groups[0].messages
        return [(one.name, one.start, one.rows, one.columns) for one in message.matrices]

    assert run_ranks(2, body)[0] == [("bias", 0, 1, 4), ("weight", 4, 4, 3)]


def test_with_a_leader_the_first_layers_messages_are_the_most_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "Leader", lambda world: None)

    def body(world: ThreadWorld) -> list[int]:
        strategy, _ = attach(world, "bytescheduler", Layers(8, 2, 3), agreement="leader", partition="8")
        order = [message.flat.numel() for _, message in strategy._sender._order]
        strategy.close()
        return order

    assert run_ranks(2, body)[0] == [2, 2, 2, 2, 2, 2, 1]


def test_second_halves_are_gathered_for_the_first_layers_first() -> None:
    def body(world: ThreadWorld) -> tuple[list[int], list[int]]:
        strategy, _ = attach(world, "dear", Layers(8, 2, 3), plan="tensor")
        sender = strategy._sender
        strategy.close()
        first, second = ([message.flat.numel() for _, message in order] for order in (sender._order, sender._forward))
        return first, second

    assert run_ranks(2, body)[0] == ([3, 2, 8], [8, 2, 3])


# --- what is sent when ----------------------------------------------------------------------------------------------


def watch(strategy: Any) -> list[list[int]]:
    """Elements of the groups of each release."""
    released: list[list[int]] = []
    release = strategy._sender.release

    def note(groups: list[Any]) -> None:
        released.append([group.flat.numel() for group in groups])
        release(groups)

    strategy._sender.release = note
    return released


@pytest.mark.parametrize(("order", "expected"), [("fifo", [[3], [2], [8], []]), ("deferred", [[3, 2, 8]])])
def test_groups_are_released_as_soon_as_they_are_full_or_all_after_the_backward_pass(
    order: str, expected: list[list[int]]
) -> None:
    def body(world: ThreadWorld) -> list[list[int]]:
        model = Layers(8, 2, 3)
        strategy, module = attach(world, "wfbp", model, order=order)
        released = watch(strategy)
        update(strategy, module, 1.0, 2.0, 3.0)
        strategy.close()
        return released

    assert run_ranks(2, body)[0] == expected


def test_gradients_that_a_rank_lacks_count_as_zeros() -> None:
    def body(world: ThreadWorld) -> tuple[list[float], list[list[int]]]:
        model = Layers(2, 2, 2)
        strategy, module = attach(world, "wfbp", model)
        released = watch(strategy)
        gradients = (1.0, None, 4.0) if world.rank else (3.0, 8.0, None)
        update(strategy, module, *gradients)
        update(strategy, module, None, None, 1.0)
        strategy.close()
        return read(model), released

    (first, _), (second, _) = run_ranks(2, body)
    assert first == second == [-2.0, -4.0, -3.0]


def test_only_the_last_of_several_passes_sends() -> None:
    def body(world: ThreadWorld) -> tuple[list[float], int]:
        model = Layers(2, 2)
        strategy, module = attach(world, "wfbp", model)
        strategy.begin(1.0, 4.0, 2)
        module(1.0, 2.0).backward()
        before = strategy.stats()["messages"]
        with strategy.last_pass():
            module(3.0, 4.0 * world.rank).backward()
        module(100.0, 100.0)  # not armed any more
        strategy.step(1.0)
        strategy.close()
        assert before == 0
        return read(model), int(strategy.stats()["messages"])

    # Sums over passes and ranks, divided by 4: 2 (1 + 3) and 2 x 2 + 4.
    assert run_ranks(2, body) == [([-2.0, -2.0], 2)] * 2


@pytest.mark.parametrize(("name", "expected"), [("bsp", [-1.5, -1.5]), ("noop", [-1.0, -2.0])])
def test_without_communication_each_rank_updates_with_its_own_gradients(name: str, expected: list[float]) -> None:
    def body(world: ThreadWorld) -> float:
        model = Layers(2)
        strategy, module = attach(world, name, model)
        update(strategy, module, 1.0 + world.rank)
        strategy.close()
        return read(model)[0]

    assert run_ranks(2, body) == expected


def test_weights_of_ranks_count() -> None:
    def body(world: ThreadWorld) -> float:
        model = Layers(2)
        strategy, module = attach(world, "bsp", model)
        strategy.begin(3.0 if world.rank else 1.0, 4.0)
        with strategy.last_pass():
            module(8.0 if world.rank else 4.0).backward()
        strategy.step(0.5)
        strategy.close()
        return read(model)[0]

    assert run_ranks(2, body) == [-0.5 * (4 + 3 * 8) / 4] * 2


# --- without a barrier ----------------------------------------------------------------------------------------------


def test_without_a_barrier_a_layer_is_updated_right_before_it_is_used() -> None:
    def body(world: ThreadWorld) -> list[list[float]]:
        model = Layers(1, 1)
        strategy, module = attach(world, "dear", model)
        seen: list[list[float]] = []
        update(strategy, module, 1.0, 2.0)
        seen.append(read(model))
        with torch.no_grad():
            module(0.0, 0.0)  # an evaluation must not update
        seen.append(read(model))
        model.layers[0](0.0)
        seen.append(read(model))
        with strategy.consensus():
            seen.append(read(model))
        with strategy.consensus():
            seen.append(read(model))
        strategy.close()
        return seen

    found = run_ranks(2, body)
    assert found[0] == found[1] == [[0.0, 0.0], [0.0, 0.0], [-1.0, 0.0], [-1.0, -2.0], [-1.0, -2.0]]


def test_the_rate_of_an_update_holds_when_the_layer_is_updated_later() -> None:
    def body(world: ThreadWorld) -> list[float]:
        model = Layers(1, 1)
        strategy, module = attach(world, "dear", model, partial(make_sgd, momentum=0.5))
        for rate in (0.5, 0.25, 1.0):
            update(strategy, module, 1.0, 2.0, rate=rate)
        with strategy.consensus():
            found = read(model)
        strategy.close()
        return found

    # Velocities 1, 1.5 and 1.75 times the gradient.
    moved = 0.5 + 0.25 * 1.5 + 1.75
    assert run_ranks(2, body)[0] == [-moved, -2 * moved]


def test_a_parameter_of_two_modules_is_updated_before_the_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(1), Layer(1)])
            self.layers[1].weight = self.layers[0].weight

        def forward(self, first: float, second: float) -> Tensor:
            weight: Any = self.layers[0].weight
            self.seen: float = weight.item()
            one, other = self.layers
            found: Tensor = one(first) + other(second)
            return found

    def body(world: ThreadWorld) -> float:
        model = Tied()
        strategy, module = attach(world, "dear", model)
        update(strategy, module, 1.0, 2.0)
        module(0.0, 0.0)
        strategy.close()
        return model.seen

    assert run_ranks(2, body) == [-3.0, -3.0]


@pytest.mark.parametrize("name", ["dear", "bytescheduler"])
def test_without_a_barrier_neither_clipping_nor_a_loss_scale_is_possible(name: str) -> None:
    def body(world: ThreadWorld) -> None:
        strategy, module = attach(world, name, Layers(2))
        with pytest.raises(ValueError, match="an overflow cannot be detected before the update"):
            strategy.begin(1.0, 2.0, 1, LossScale(8.0))
        strategy.begin(1.0, 2.0)
        with strategy.last_pass():
            module(1.0).backward()
        with pytest.raises(ValueError, match="gradients cannot be clipped by their norm"):
            strategy.step(1.0, math.inf)
        strategy.step(1.0)
        strategy.close()

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["dear", "bsp", "dgc", "eftopk"])
def test_one_rank_clips_and_scales_and_has_nothing_to_send(name: str) -> None:
    def body(world: ThreadWorld) -> tuple[float, Any, Any, dict[str, float]]:
        model = Layers(1)
        strategy, module = attach(world, name, model, lambda net: torch.optim.SGD(net.parameters(), 1.0))
        strategy.begin(1.0, 2.0)
        with strategy.last_pass():
            module(8.0).backward()
        assert strategy.step(1.0, 2.0)
        with strategy.consensus():
            found = read(model)[0]
        assert strategy.check_replicas() is None
        strategy.load_method_state({"update": 3, "ranks": [1]})
        strategy.close()
        return found, strategy.bucket_bytes(), strategy.method_state(), strategy.stats()

    [(moved, sizes, state, figures)] = run_ranks(1, body)
    assert moved == pytest.approx(-2.0)
    assert (sizes, state) == ([], {})
    assert figures == {"updates": 1.0, "messages": 0.0, "bytes": 0.0}


# --- momentum, state and figures ------------------------------------------------------------------------------------


def test_a_method_with_momentum_takes_over_that_of_sgd_and_of_no_other_optimizer() -> None:
    def take(world: ThreadWorld) -> Any:
        strategy, _ = attach(
            world, "dgc", Layers(4), lambda net: torch.optim.SGD(net.parameters(), 0.1, 0.9, nesterov=True)
        )
        strategy.close()
        return [(group["momentum"], group["nesterov"]) for group in strategy.optimizer.param_groups]

    assert run_ranks(2, take) == [[(0.0, False)]] * 2

    def refuse(world: ThreadWorld) -> None:
        attach(world, "dgc", Layers(4), lambda net: torch.optim.AdamW(net.parameters()))

    with pytest.raises(TaskUsageError, match="dgc replaces SGD's momentum by its own, so it cannot use AdamW") as error:
        run_ranks(2, refuse)
    assert "--method eftopk" in str(error.value.hint)


@pytest.mark.parametrize(("name", "kinds"), [("bsp", []), ("eftopk", ["residual"]), ("dgc", ["residual", "velocity"])])
def test_a_state_has_what_the_method_keeps_by_the_names_of_parameters(name: str, kinds: list[str]) -> None:
    def body(world: ThreadWorld) -> Any:
        strategy, module = attach(world, name, Layers(4, 300), partition="40")
        update(strategy, module, 1.0, 2.0)
        state = strategy.method_state()
        strategy.close()
        return state

    for rank, state in enumerate(run_ranks(2, body)):
        assert state["update"] == 1
        if not kinds:
            assert state["ranks"] == []
            continue
        assert [own is not None for own in state["ranks"]] == [rank == 0, rank == 1]
        own = state["ranks"][rank]
        for kind in ("residual", "velocity"):
            shapes = {name: tuple(tensor.shape) for name, tensor in own[kind].items()}
            expected = {"layers.0.weight": (4,), "layers.1.weight": (300,)} if kind in kinds else {}
            assert shapes == expected, kind


@pytest.mark.parametrize("name", ["eftopk", "dgc", "powersgd"])
def test_a_state_goes_back_to_the_messages_it_came_from(name: str) -> None:
    """Also if another plan cuts them differently."""

    def body(world: ThreadWorld) -> None:
        plans = ({"plan": "all"}, {"plan": "tensor"})
        if name != "powersgd":
            plans = ({"plan": "all", "partition": "28"}, {"plan": "tensor"})
        first, other = (attach(world, name, nn.Linear(12, 12), **axes)[0] for axes in plans)
        generator = torch.Generator().manual_seed(world.rank)
        for group in first._groups:
            for message in group.messages:
                for part in (message.residual, message.velocity):
                    if part is not None:
                        part.copy_(torch.randn(part.shape, generator=generator))
                message.factors = {
                    one.name: torch.randn(one.columns, 2, generator=generator) for one in message.matrices
                }
        first._update = 7
        state = first.method_state()
        other.load_method_state(state)
        assert other._update == 7
        found = other.method_state()["ranks"][world.rank]
        for kind, tensors in state["ranks"][world.rank].items():
            assert list(found[kind]) == list(tensors)
            for key, tensor in tensors.items():
                assert torch.equal(found[kind][key], tensor), (kind, key)
        other.load_method_state({})
        assert other._update == 7
        for one in (first, other):
            one.close()

    run_ranks(2, body)


def test_figures_of_a_run() -> None:
    def body(world: ThreadWorld) -> dict[str, float]:
        strategy, module = attach(world, "wfbp", Layers(8, 2), partition="16")
        for _ in range(2):
            update(strategy, module, 1.0, 1.0)
        strategy._sender.communication_seconds, strategy._sender.exposed_seconds = 5.0, 2.0
        strategy._sender.queue_seconds = 0.5
        figures: dict[str, float] = strategy.stats()
        strategy._sender.exposed_seconds = 6.0
        assert strategy.stats()["hidden_seconds"] == 0.0
        strategy.close()
        return figures

    assert run_ranks(2, body)[1] == {
        "updates": 2.0,
        "messages": 6.0,  # 2 + 1 of each update
        "bytes": 80.0,
        "wire_bytes": 80.0,  # an all-reduce of two ranks sends as many as it sums
        "groups": 2.0,
        "queue_seconds": 0.5,
        "communication_seconds": 5.0,
        "exposed_seconds": 2.0,
        "hidden_seconds": 3.0,
    }


@pytest.mark.parametrize(("name", "identical", "agree", "barrier"), [
    ("bsp", True, True, True),
    ("dear", True, True, False),
    ("noop", False, False, True),
])  # fmt: skip
def test_what_a_training_loop_may_rely_on(name: str, identical: bool, agree: bool, barrier: bool) -> None:
    traits = make_strategy(resolve(name)).traits
    assert (traits.identical, traits.gradients_agree, traits.barrier) == (identical, agree, barrier)


def test_replicas_without_communication_are_as_far_apart_as_they_are() -> None:
    def body(world: ThreadWorld) -> Any:
        model = Layers(1)
        strategy, module = attach(world, "noop", model)
        update(strategy, module, -1.0 - 2.0 * world.rank)
        with strategy.consensus():
            return strategy.check_replicas()

    # 1 and 3: each is 1 from the mean, 2.
    assert run_ranks(2, body) == [pytest.approx(0.5)] * 2


# --- measured plans -------------------------------------------------------------------------------------------------


class Clocked(Reducer):
    """A reducer that reads the time of a gradient from a table, by update."""

    times: Callable[[int, int], float]
    _read = 0

    def _now(self) -> float:
        number, self._read = self._read, self._read + 1
        return self.times(self._update, number)

    def _measure_cost(self) -> Cost:
        return Cost(1e-3, 0.0)


@pytest.mark.parametrize("name", ["mgwfbp", "optfusion"])
def test_a_plan_is_made_after_the_skipped_and_the_measured_updates(name: str) -> None:
    """Until then there is one message, so that many of them do not slow the measured passes."""

    def body(world: ThreadWorld) -> list[int]:
        strategy: Any = Clocked(resolve(name), 0)
        clock = [0.0]

        def tick(update: int, number: int) -> float:
            clock[0] += 1.0
            return clock[0]

        strategy.times = tick
        model = Layers(2, 3, 4)
        module = strategy.attach(world, model, make_sgd)
        counts = []
        for _ in range(SKIPPED_UPDATES + MEASURED_UPDATES + 1):
            update(strategy, module, 1.0, 1.0, 1.0)
            counts.append(len(strategy.bucket_bytes()))
        strategy.close()
        assert read(model) == [-9.0] * 3
        return counts

    # Gradients a second apart, and messages of a millisecond.
    assert run_ranks(2, body)[0] == [1] * 7 + [3, 3]


def test_what_codecs_had_left_out_is_not_lost_when_the_plan_is_made() -> None:
    """Entries are chosen per tensor, so the plan does not change what is trained."""

    def body(world: ThreadWorld, plan: str) -> list[float]:
        strategy: Any = Clocked(resolve("eftopk", {"codec": "topk:0.1", "plan": plan}), 0)
        clock = iter(range(10**6))
        strategy.times = lambda update, number: float(next(clock))
        model, first = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=first)
        module = strategy.attach(world, model, make_sgd)
        generator = torch.Generator().manual_seed(world.rank)
        for _ in range(12):
            strategy.begin(1.0, 2.0)
            with strategy.last_pass():
                module(torch.randn(3, 6, generator=generator)).square().mean().backward()
            strategy.step(0.1)
        strategy.close()
        return torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()

    one, other = (run_ranks(2, partial(body, plan=plan))[0] for plan in ("tensor", "optimal"))
    assert one == other


def test_the_costs_of_messages_are_fitted_to_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def measure(link: Any, sizes: tuple[int, ...]) -> list[float]:
        asked.append(tuple(sizes))
        return [1e-3 + 2e-9 * 4 * size for size in sizes]

    monkeypatch.setattr(reducer, "measure_cost", measure)

    def body(world: ThreadWorld) -> Any:
        strategy, _ = attach(world, "mgwfbp", Layers(2))
        strategy.close()
        return strategy._cost

    for cost in run_ranks(2, body):
        assert (cost.alpha, cost.beta) == (pytest.approx(1e-3), pytest.approx(2e-9))
    assert len(asked) == 2
    assert asked[0] == asked[1]


def test_tensors_are_sorted_by_when_their_gradients_were_ready() -> None:
    """Layer 2 is the first in every pass, then 0, then 1; a layer without a gradient counts as the last one."""

    def body(world: ThreadWorld) -> list[str]:
        strategy: Any = Clocked(resolve("mgwfbp"), 0)
        strategy.times = lambda update, number: 0.0
        model = Layers(1, 1, 1, 1)
        strategy.attach(world, model, make_sgd)
        seconds = {"layers.2.weight": 0.1, "layers.0.weight": 0.2, "layers.1.weight": 0.3}
        late = dict.fromkeys(seconds, 9.0)  # of a pass that was slow
        strategy._seconds = [late] * SKIPPED_UPDATES + [dict(seconds)] * (MEASURED_UPDATES - 1)
        strategy._times = [{}]
        strategy._read_times = lambda moments: dict(seconds)
        strategy._plan_again()
        names = [name for name, _ in strategy._named]
        strategy.close()
        return names

    found = run_ranks(2, body)
    assert found[0] == found[1]
    # Layer 3 comes before layer 1 in a backward pass.
    assert found[0] == [f"layers.{number}.weight" for number in (2, 0, 3, 1)]
