"""The search for a bad node or link: rounds in which all pairs meet once, and verdicts on made-up times."""

import random
from itertools import combinations

import pytest

from task_images.allreduce.pairs import is_certain, judge_pairs, make_rounds


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


def search(ranks: int, busy: float, slow_rank: int | None, generator: random.Random, most: int = 12) -> tuple[str, int]:
    """The verdict, and its passes, on a machine whose pairs each look slow for a share `busy` of the time."""
    passes: list[dict[tuple[int, int], float]] = []
    while len(passes) < most:
        passes.append(
            {
                pair: generator.uniform(1, 1.1) * (4 if slow_rank in pair or generator.random() < busy else 1)
                for each in make_rounds(ranks)
                for pair in each
            }
        )
        least = {pair: min(seconds[pair] for seconds in passes) for pair in passes[0]}
        verdict = judge_pairs(least, ranks)
        if verdict.kind in ("none", "cannot_tell") or is_certain(passes, verdict.slow, ranks):
            return verdict.kind, len(passes)
    return "cannot_tell", most


@pytest.mark.parametrize("ranks", [4, 8])
def test_busy_moments_make_no_false_alarm(ranks: int) -> None:
    generator = random.Random(ranks)
    found = [search(ranks, 0.1, None, generator) for _ in range(1000)]
    assert sum(passes > 1 for _, passes in found) > 300  # the first pass alone would often name a good pair
    assert sum(kind not in ("none", "cannot_tell") for kind, _ in found) <= 3


@pytest.mark.parametrize(("ranks", "busy"), [(3, 0.0), (4, 0.0), (4, 0.1), (8, 0.1), (16, 0.1)])
def test_a_slow_node_is_found_on_busy_machines_too(ranks: int, busy: float) -> None:
    generator = random.Random(ranks)
    found = [search(ranks, busy, ranks - 1, generator) for _ in range(100)]
    assert {kind for kind, _ in found} == {"node"}
    assert max(passes for _, passes in found) < 12
