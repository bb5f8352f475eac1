"""The search for a bad node or link: rounds in which all pairs meet once, and verdicts on made-up times."""

import random
from itertools import combinations

import pytest

from task_images.allreduce.pairs import judge_pairs, make_rounds


@pytest.mark.parametrize("ranks", range(2, 18))
def test_every_two_ranks_meet_once_and_nobody_twice_in_a_round(ranks: int) -> None:
    rounds = make_rounds(ranks)
    assert len(rounds) == (ranks - 1 if ranks % 2 == 0 else ranks)
    assert sorted(pair for each in rounds for pair in each) == [*combinations(range(ranks), 2)]
    for each in rounds:
        met = [rank for pair in each for rank in pair]
        assert len(met) == len({*met})


def times(
    ranks: int, generator: random.Random, slow: float = 0.0, *bad: tuple[int, ...]
) -> dict[tuple[int, int], float]:
    """Pairs that take a second, give or take 10 %; `slow` times as long if `bad` names a rank of theirs, or both."""
    found = {}
    for pair in combinations(range(ranks), 2):
        is_bad = any(each[0] in pair if len(each) == 1 else each == pair for each in bad)
        found[pair] = generator.uniform(0.9, 1.1) * (slow if is_bad else 1)
    return found


@pytest.mark.parametrize("ranks", [4, 5, 8, 16])
def test_a_bad_node_and_a_bad_link_are_named_and_good_ones_are_not(ranks: int) -> None:
    generator = random.Random(ranks)
    for _ in range(50):
        good = judge_pairs(times(ranks, generator), ranks)
        assert (good.kind, good.ranks) == ("none", ())
        rank = generator.randrange(ranks)
        node = judge_pairs(times(ranks, generator, 2.0, (rank,)), ranks)
        assert (node.kind, node.ranks) == ("node", (rank,))
        a, b = sorted(generator.sample(range(ranks), 2))
        link = judge_pairs(times(ranks, generator, 2.0, (a, b)), ranks)
        assert (link.kind, link.ranks) == ("link", (a, b))


def test_two_bad_nodes_of_eight() -> None:
    found = judge_pairs(times(8, random.Random(1), 3.0, (2,), (5,)), 8)
    assert (found.kind, found.ranks) == ("several", (2, 5))


def test_two_ranks_cannot_tell() -> None:
    assert judge_pairs({(0, 1): 9.0}, 2).kind == "cannot_tell"
