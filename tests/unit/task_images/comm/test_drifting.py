"""Replicas that drift: when they are averaged, what a validation sees, what they keep, and how far apart they are."""

from typing import Any

import pytest
import torch

from task_images.comm.choose import make_strategy
from task_images.comm.presets import resolve
from task_images.harness.precision import LossScale
from tests.unit.task_images.comm.given_gradients import Numbers, update
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


def attach(world: ThreadWorld, name: str, **axes: str) -> tuple[Any, Numbers]:
    strategy, model = make_strategy(resolve(name, axes)), Numbers(4)
    strategy.attach(world, model, lambda net: torch.optim.SGD(net.parameters(), 1.0))
    return strategy, model


def test_weights_are_averaged_after_every_so_many_updates() -> None:
    """Rank 0 falls by 1 in each update, rank 1 by 3."""

    def body(world: ThreadWorld) -> list[float]:
        strategy, model = attach(world, "localsgd", sync="local:2")
        found = [update(strategy, model, 1.0 + 2 * world.rank) for _ in range(5)]
        strategy.close()
        return found

    assert run_ranks(2, body) == [[0.0, -3.0, -4.0, -7.0, -8.0], [-2.0, -3.0, -6.0, -7.0, -10.0]]


def test_gradients_are_averaged_first_and_weights_from_an_update_on() -> None:
    """Mean gradients in two updates; then weights are averaged after every second one."""

    def body(world: ThreadWorld) -> list[float]:
        strategy, model = attach(world, "postlocalsgd", sync="postlocal:2,2")
        found = [update(strategy, model, 1.0 + 2 * world.rank) for _ in range(7)]
        strategy.close()
        return found

    assert run_ranks(2, body) == [
        [-1.0, -3.0, -4.0, -7.0, -8.0, -11.0, -12.0],
        [-1.0, -3.0, -6.0, -7.0, -10.0, -11.0, -14.0],
    ]


@pytest.mark.parametrize(("name", "sync"), [("localsgd", "local:3"), ("postlocalsgd", "postlocal:0,3")])
def test_a_validation_averages_for_good_and_only_if_there_is_something_to_average(name: str, sync: str) -> None:
    def body(world: ThreadWorld) -> tuple[list[float], list[float], list[Any]]:
        strategy, model = attach(world, name, sync=sync)
        weights, messages, distances = [], [], [strategy.check_replicas()]

        def look() -> None:
            before = strategy.stats()["messages"]
            with strategy.consensus():
                weights.append(model.weight[0].item())
                distances.append(strategy.check_replicas())
            messages.append(strategy.stats()["messages"] - before)

        look()
        update(strategy, model, 1.0 + 2 * world.rank)
        look()
        look()
        for _ in range(2):
            update(strategy, model, 1.0 + 2 * world.rank)
        look()  # the third update averaged
        weights.append(model.weight[0].item())
        assert strategy.stats()["distance"] == distances[-1]
        strategy.close()
        return weights, messages, distances

    for weights, messages, distances in run_ranks(2, body):
        assert weights == [1.0, -1.0, -1.0, -5.0, -5.0]
        assert messages == [0, 1, 0, 0]
        # 0 and -2: each is 1 per number from their mean, -1.
        assert distances == [None, 0.0, pytest.approx(1.0), 0.0, 0.0]


@pytest.mark.parametrize("name", ["dpsgd", "dpsgd-atc", "choco"])
def test_neighbors_show_a_validation_their_mean_and_go_on_with_their_own_weights(name: str) -> None:
    def body(world: ThreadWorld) -> tuple[list[float], float]:
        strategy, model = attach(world, name)
        assert strategy.check_replicas() is None
        assert "distance" not in strategy.stats()
        own = update(strategy, model, 2.0 * world.rank)
        with strategy.consensus():
            inside = model.weight[0].item()
            distance = strategy.check_replicas()
        after = model.weight[0].item()
        strategy.close()
        return [own, inside, after], distance

    found = run_ranks(3, body)
    mean = sum(values[0] for values, _ in found) / 3
    for (own, inside, after), distance in found:
        assert after == own
        assert inside == pytest.approx(mean)
        squares = sum(4 * (values[0] - mean) ** 2 for values, _ in found)
        # Relative to the norm of the mean of four equal numbers; the first update of choco sends one of them.
        if name != "choco":
            assert distance == pytest.approx((squares / 3) ** 0.5 / (4 * mean**2) ** 0.5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Before the step: the mean of equal weights, and the own step.
        ("dpsgd", [[1.0, 0.0], [-1.0, -2.0]]),
        # After it: the mean of 1 and -1, and of what follows.
        ("dpsgd-atc", [[0.0, -1.0], [0.0, -1.0]]),
    ],
)
def test_neighbors_mix_before_or_after_their_steps(name: str, expected: list[list[float]]) -> None:
    """Rank 0 has gradients of 0 and 0, rank 1 of 2 and 2."""

    def body(world: ThreadWorld) -> list[float]:
        strategy, model = attach(world, name)
        found = [update(strategy, model, 2.0 * world.rank) for _ in range(2)]
        assert strategy.stats()["messages"] == 2
        assert strategy.stats()["bytes"] == 2 * 16
        strategy.close()
        return found

    assert run_ranks(2, body) == expected


@pytest.mark.parametrize("name", ["localsgd", "dpsgd", "choco", "slowmo", "async-ps"])
def test_one_rank_trains_alone_and_has_no_distance(name: str) -> None:
    def body(world: ThreadWorld) -> tuple[float, Any, Any]:
        strategy, model = attach(world, name)
        found = update(strategy, model, 2.0)
        with strategy.consensus():
            distance = strategy.check_replicas()
        state = strategy.method_state()
        strategy.load_method_state(state)
        strategy.close()
        return found, distance, strategy.stats()["messages"]

    assert run_ranks(1, body) == [(-1.0, None, 0.0)]


@pytest.mark.parametrize(("name", "sync"), [("localsgd", "local:9"), ("postlocalsgd", "postlocal:0,9")])
def test_a_rank_skips_its_own_overflow_without_asking_the_others(name: str, sync: str) -> None:
    def body(world: ThreadWorld) -> tuple[bool, float, float]:
        strategy, model = attach(world, name, sync=sync)
        scale = LossScale(8.0)
        strategy.begin(1.0, 2.0, 1, scale)
        with strategy.last_pass():
            model(8.0 * (float("inf") if world.rank else 2.0)).backward()
        made = strategy.step(1.0)
        strategy.close()
        return made, model.weight[0].item(), scale.value

    assert run_ranks(2, body) == [(True, -1.0, 8.0), (False, 1.0, 4.0)]


@pytest.mark.parametrize("name", ["localsgd", "postlocalsgd", "dpsgd", "choco"])
def test_batches_of_other_sizes_than_the_mean_count_with_their_share(name: str) -> None:
    """Three of four samples are rank 1's: its mean gradient counts one and a half times, rank 0's half."""

    def body(world: ThreadWorld) -> float:
        axes = {"sync": "postlocal:0,9"} if name == "postlocalsgd" else {}
        strategy, model = attach(world, name, **axes)
        strategy.begin(3.0 if world.rank else 1.0, 4.0)
        with strategy.last_pass():
            model(2.0).backward()
        strategy._reduce()
        assert model.weight.grad is not None
        found = model.weight.grad[0].item()
        strategy._exchange = lambda updated, rate: None
        strategy.close()
        return found

    assert run_ranks(2, body) == [1.0, 3.0]


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpsgd", "dpsgd-atc", "choco", "localsgd"])
def test_ranks_resume_with_their_own_weights_or_from_the_mean_if_their_number_differs(name: str) -> None:
    def train(world: ThreadWorld) -> Any:
        strategy, model = attach(world, name)
        for _ in range(2):
            update(strategy, model, 1.0 + world.rank)
        own = model.weight.detach().clone()
        with strategy.consensus():
            state = {**strategy.state_dict()}
            state["model"] = {key: value.clone() for key, value in state["model"].items()}
        strategy.close()
        return state, own

    saved = run_ranks(2, train)
    mean = saved[0][0]["model"]["weight"]

    def resume(world: ThreadWorld) -> Any:
        strategy, model = attach(world, name)
        state = dict(saved[0][0])
        if world.size == 2:
            state["method"] = saved[world.rank][0]["method"]
        else:
            state["method"] = {
                "update": 2,
                "ranks": [one["method"]["ranks"][rank] for rank, (one, _) in enumerate(saved)],
            }
        strategy.load_state_dict(state)
        found = model.weight.detach().clone()
        assert strategy._update == 2
        strategy.close()
        return found

    for rank, weights in enumerate(run_ranks(2, resume)):
        expected = mean if name == "localsgd" else saved[rank][1]
        assert torch.equal(weights, expected), rank
    for weights in run_ranks(3, resume):
        assert torch.equal(weights, mean)


def test_compressed_gossip_keeps_what_neighbors_believe() -> None:
    def train(world: ThreadWorld) -> Any:
        strategy, model = attach(world, "choco", codec="topk:0.5")
        for _ in range(3):
            update(strategy, model, 1.0 + world.rank)
        state = strategy.method_state()
        other, _ = attach(world, "choco", codec="topk:0.5")
        other.load_method_state(state)
        same = torch.equal(other._believed, strategy._believed) and torch.equal(other._mixed, strategy._mixed)
        own = state["ranks"][world.rank]
        for one in (strategy, other):
            one.close()
        return same, sorted(own), strategy._step_size

    assert run_ranks(2, train) == [(True, ["believed", "mixed", "optimizer", "weights"], 0.5)] * 2


@pytest.mark.parametrize(("density", "step"), [("0.1", 0.2), ("0.25", 0.5), ("1", 0.5), ("0.05", 0.1)])
def test_the_step_towards_the_neighbors_is_twice_the_density_and_at_most_a_half(density: str, step: float) -> None:
    def body(world: ThreadWorld) -> float:
        strategy, _ = attach(world, "choco", codec=f"topk:{density}")
        strategy.close()
        return strategy._step_size  # type: ignore[no-any-return]

    assert run_ranks(2, body) == [pytest.approx(step)] * 2


def test_a_resumed_phase_of_local_steps_begins_where_it_was() -> None:
    def train(world: ThreadWorld) -> tuple[list[float], Any]:
        strategy, model = attach(world, "postlocalsgd", sync="postlocal:2,2")
        for _ in range(3):
            update(strategy, model, 1.0 + 2 * world.rank)
        with strategy.consensus():
            state = strategy.state_dict()
        other, twin = attach(world, "postlocalsgd", sync="postlocal:2,2")
        other.load_state_dict(state)
        assert (other._count_updates, other._averaged_at) == (3, 3)
        found = [update(other, twin, 1.0 + 2 * world.rank) for _ in range(2)]
        other.load_method_state({})
        kept = [own is not None for own in state["method"]["optimizers"]]
        for one in (strategy, other):
            one.close()
        return found, (state["method"]["count"], kept)

    first, second = run_ranks(2, train)
    # The mean after three updates is -5; the fourth update averages, the fifth does not.
    assert first == ([-7.0, -8.0], (3, [True, False]))
    assert second == ([-7.0, -10.0], (3, [False, True]))
