"""Scripts of faults: what they mean, what is refused, and the plan that follows from a seed."""

import itertools
import math

import pytest

from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.model.faults import best_interval, parse_every, parse_faults, read_faults

WHOLE = """
at 120s kill rank 3; every ~600s kill any rank   # of the published rates
at 60s for 60s slow rank 2 to 50% cpu
at 1m for 20s link 2 down; at 90s for 60s link 2 10mbit; at 90s link any loss 2%
at 3s for 2s stop rank 0; seed 7; anyway
"""


def test_a_script_is_written_one_way() -> None:
    script = parse_faults(WHOLE)
    assert parse_faults(str(script)) == script
    assert str(script).split("; ")[:3] == [
        "at 120s kill rank 3",
        "every ~600s kill any rank",
        "at 60s for 60s slow rank 2 to 50% cpu",
    ]
    assert (script.seed, script.is_forced, script.mtbf) == (7, True, 600)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("at 5s kill", "names no rank"),
        ("at 5s kill rank x", "names no rank"),
        ("kill rank 1", "neither when nor how often"),
        ("every 9s at 2s kill rank 1", "both a moment and an interval"),
        ("at 60s for 3s kill rank 1", "does not come back"),
        ("at 3s killl rank 1", 'Did you mean "kill"?'),
        ("at 5s slow rank 1 to 0% cpu", "from 1% to 99%"),
        ("at 5s link 1 up", "not a number with a unit"),
        ("at 5s link 1 loss 0%", "above 0%"),
        ("at 5s node 1 gone", "the loss of a machine ends the run"),
        ("at 5s pod 1 deleted", "a pod has no permission to delete another one"),
        ("at 5s job requeued", "starts from the beginning as another run"),
        ("at 5s disk full", "does not fill disks"),
        ("at 5s slow storage of rank 1 to 5MB/s", "names no rank"),
        ("at x kill rank 1", '"x" is not a time'),
        ("every 0s kill any rank", "interval is below"),
        ("seed many; at 1s kill rank 0", "a seed is one number"),
        ("  ", "holds no fault"),
        ("no-such-file", "there is no file"),
    ],
)
def test_what_is_wrong_is_quoted_with_an_example(text: str, reason: str) -> None:
    with pytest.raises(MlbenchError) as error:
        read_faults(text)
    assert reason in error.value.message
    assert error.value.hint


def test_a_rank_that_the_run_does_not_have_is_refused() -> None:
    parse_faults("at 5s kill rank 3").check(ranks=4, workers=2)
    with pytest.raises(UsageError, match="no rank 4; the run has 4"):
        parse_faults("at 5s kill rank 4").check(ranks=4, workers=2)
    with pytest.raises(UsageError, match="no link 2; the run has 2"):
        parse_faults("at 5s link 2 down").check(ranks=4, workers=2)


def test_the_plan_follows_from_the_seed() -> None:
    script = parse_faults("every ~10s kill any rank; at 25s stop rank 1")

    def plan(seed: int) -> list[str]:
        return [f"{fault.at} {fault}" for fault in itertools.islice(script.plan(seed, 4, 4), 50)]

    assert plan(1) == plan(1) != plan(2)
    assert [fault.at for fault in itertools.islice(script.plan(1, 4, 4), 50)] == sorted(
        fault.at for fault in itertools.islice(script.plan(1, 4, 4), 50)
    )
    fixed = parse_faults("every ~10s kill any rank; seed 5")
    assert [*itertools.islice(fixed.plan(1, 4, 4), 9)] == [*itertools.islice(fixed.plan(2, 4, 4), 9)]


def test_random_faults_have_the_mean_that_was_asked_for_and_hit_all_ranks_alike() -> None:
    faults = [*itertools.islice(parse_faults("every ~10s kill any rank").plan(3, 4, 4), 4000)]
    gaps = [after.at - before.at for before, after in itertools.pairwise(faults)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert abs(mean - 10) < 0.5  # three standard errors
    assert abs(deviation - 10) < 0.8  # exponential: as large as the mean
    assert all(900 < sum(fault.target == rank for fault in faults) < 1100 for rank in range(4))


@pytest.mark.parametrize(
    ("cost", "mtbf", "interval"),
    # arXiv 2410.21680: 128 and 2048 nodes at 6.5 failures in 1000 node-days, and two small runs.
    [(300, 103680, 7900), (300, 6490, 1980), (1, 600, 35), (5, 600, 77)],
)
def test_the_best_interval_between_checkpoints(cost: float, mtbf: float, interval: float) -> None:
    best = best_interval(cost, mtbf)
    young = math.sqrt(2 * cost * mtbf)
    assert abs(young - interval) < 0.02 * interval
    assert young - cost < best < young  # Daly's correction


@pytest.mark.parametrize(("text", "value"), [("30s", (30.0, None)), ("2m", (120.0, None)), ("200", (None, 200))])
def test_checkpoints_by_time_or_by_updates(text: str, value: tuple[float | None, int | None]) -> None:
    assert parse_every(text) == value


@pytest.mark.parametrize("text", ["0", "0s", "often", "-1", "1.5", "3d"])
def test_no_interval(text: str) -> None:
    with pytest.raises(UsageError, match="neither a time nor a number"):
        parse_every(text)
