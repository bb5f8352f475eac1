"""The slowest of many ranks, against drawn ones, and which methods wait for it."""

import math
import random
from dataclasses import replace

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.simulator.calibration import Calibration
from mlbench_cli.simulator.stragglers import find_slowdown, find_slowest, measure_spread, parse_spread
from mlbench_cli.simulator.workload import Tensor, Workload
from task_images.comm.presets import resolve

STEP = Workload((Tensor("w", 4, 1.0),), 0.4, 1.0)
LOW, HIGH = STEP.scale(math.exp(-0.128155)), STEP.scale(math.exp(0.128155))
CALIBRATION = Calibration(2, "gloo", 2.0, 1, 32, STEP, LOW, HIGH, ())


@pytest.mark.parametrize(("ranks", "spread"), [(2, 0.1), (16, 0.2), (256, 0.05)])
def test_the_slowest_is_the_median_of_what_is_drawn(ranks: int, spread: float) -> None:
    draw = random.Random(1).lognormvariate
    slowest = sorted(max(draw(0.0, spread) for _ in range(ranks)) for _ in range(801))
    assert find_slowest(ranks, spread) == pytest.approx(slowest[400], rel=0.1 * spread)


def test_more_ranks_and_more_spread_never_make_a_step_faster() -> None:
    found = [find_slowest(ranks, 0.1) for ranks in (1, 2, 8, 64, 10_000)]
    assert found == sorted(found)
    assert found[0] == 1.0
    assert find_slowest(64, 0.0) == 1.0


def test_methods_wait_for_the_slowest_as_often_as_they_meet() -> None:
    every = find_slowdown(resolve("bsp"), 64, 0.1)
    assert every == find_slowest(64, 0.1)
    assert find_slowdown(resolve("async-ps"), 64, 0.1) == find_slowdown(resolve("noop"), 64, 0.1) == 1.0
    local = replace(resolve("bsp"), sync="local:4")
    assert find_slowdown(local, 64, 0.1) == find_slowest(64, 0.05)


def test_a_spread_is_measured_or_given() -> None:
    assert measure_spread(CALIBRATION) == pytest.approx(0.1, rel=1e-4)
    assert parse_spread("measured", CALIBRATION) == measure_spread(CALIBRATION)
    assert [parse_spread(text, CALIBRATION) for text in (None, "0.2", "5%")] == [0.0, 0.2, 0.05]
    for text in ("much", "-1%", "nan", "300%"):
        with pytest.raises(UsageError, match="not a spread"):
            parse_spread(text, CALIBRATION)
