"""Plans against brute force and their own limits."""

import itertools
import random
from collections.abc import Sequence

import pytest

from task_images.methods.plans import Cost, Groups, find_optimum, fit, merge_greedily, simulate_order, threshold

Case = tuple[list[int], list[float], Cost]


def make_case(seed: int) -> Case:
    generator = random.Random(seed)
    count = generator.randint(1, 8)
    sizes = [generator.choice([4, 64, 4096, 2**20]) * generator.randint(1, 9) for _ in range(count)]
    ready, now = [], 0.0
    for _ in sizes:
        now += generator.uniform(0, 3e-3)
        ready.append(now)
    return sizes, ready, Cost(generator.choice([0.0, 1e-4, 2e-3]), generator.choice([0.0, 1e-9, 1e-8]))


def all_groupings(count: int) -> list[Groups]:
    found = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        groups = [[0]]
        for number, cut in enumerate(cuts, 1):
            if cut:
                groups.append([number])
            else:
                groups[-1].append(number)
        found.append(groups)
    return found


def predict_end(groups: Groups, sizes: Sequence[int], ready: Sequence[float], cost: Cost) -> float:
    """When the last message has been sent, in seconds from the same moment as `ready`: the model of the plans."""
    end = 0.0
    for group in groups:
        end = max(end, ready[group[-1]]) + cost.time(sum(sizes[number] for number in group))
    return end


@pytest.mark.parametrize("seed", range(60))
def test_the_optimum_is_that_of_brute_force_and_the_others_are_no_better(seed: int) -> None:
    sizes, ready, cost = make_case(seed)
    best = min(predict_end(groups, sizes, ready, cost) for groups in all_groupings(len(sizes)))
    assert predict_end(find_optimum(sizes, ready, cost), sizes, ready, cost) == pytest.approx(best)
    greedy = predict_end(merge_greedily(sizes, ready, cost), sizes, ready, cost)
    for limit in (1, float("inf")):
        assert greedy <= predict_end(threshold(sizes, limit), sizes, ready, cost) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_every_tensor_is_in_exactly_one_group(seed: int) -> None:
    sizes, ready, cost = make_case(seed)
    plans = [threshold(sizes, limit) for limit in (1, 64, 2**20)]
    for groups in (*plans, merge_greedily(sizes, ready, cost), find_optimum(sizes, ready, cost)):
        assert [number for group in groups for number in group] == list(range(len(sizes)))


def test_a_threshold_closes_a_group_when_it_is_reached() -> None:
    assert threshold([4, 4, 4, 20, 1], 10) == [[0, 1, 2], [3], [4]]
    assert threshold([4, 4, 4], 2**30) == [[0, 1, 2]]
    assert threshold([4, 4], 1) == [[0], [1]]


def test_free_messages_are_never_worse_than_one_each_and_dear_ones_are_merged() -> None:
    sizes, ready, _ = make_case(3)
    expensive = Cost(100.0, 1e-9)
    assert merge_greedily(sizes, ready, expensive) == find_optimum(sizes, ready, expensive) == [list(range(len(sizes)))]
    free = Cost(0.0, 1e-8)
    each = predict_end([[number] for number in range(len(sizes))], sizes, ready, free)
    assert predict_end(merge_greedily(sizes, ready, free), sizes, ready, free) == pytest.approx(each)


def test_costs_are_found_again_in_exact_times() -> None:
    cost = fit([(size, 3e-4 + 2e-9 * size) for size in (1e3, 1e5, 1e6, 4e6)])
    assert cost.alpha == pytest.approx(3e-4)
    assert cost.beta == pytest.approx(2e-9)
    falling = fit([(1e3, 1e-3), (1e6, 0.5e-3)])
    assert falling.beta == 0
    assert falling.alpha == pytest.approx(0.75e-3)


def test_the_simulated_order_takes_the_first_layer_among_what_is_ready() -> None:
    # Four messages of one second; the last to be ready has the first layer.
    order = simulate_order([1, 1, 1, 1], [0.0, 0.1, 0.2, 0.3], [3, 2, 1, 0], Cost(1.0, 0.0))
    assert order == [0, 3, 2, 1]
    assert simulate_order([1, 1], [0.0, 5.0], [1, 0], Cost(1.0, 0.0)) == [0, 1]


@pytest.mark.parametrize("seed", range(40))
def test_each_message_of_the_simulated_order_is_the_most_urgent_of_its_moment(seed: int) -> None:
    sizes, ready, cost = make_case(seed)
    generator = random.Random(seed)
    generator.shuffle(ready)
    priorities = [generator.randint(0, 3) for _ in sizes]
    order = simulate_order(sizes, ready, priorities, cost)
    assert sorted(order) == list(range(len(sizes)))
    now = 0.0
    for position, chosen in enumerate(order):
        waiting = order[position:]
        now = max(now, min(ready[number] for number in waiting))
        able = [number for number in waiting if ready[number] <= now]
        assert chosen == min(able, key=lambda number: (priorities[number], number))
        now += cost.time(sizes[chosen])
