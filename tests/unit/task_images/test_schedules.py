"""Learning rates against the figures of the original's own tests and of the specification."""

import math

import pytest

from task_images.schedules import (
    Constant,
    Cosine,
    LinearWarmup,
    MultiStep,
    PerEpoch,
    PerUpdate,
    Plateau,
    log2_warmup,
)
from task_images.wmt17_transformer.task import WarmupInverseSqrt


def test_multistep_with_warmup() -> None:
    rate = MultiStep(10, (7, 8), 0.5, warmup=5)
    assert [rate(t) for t in range(9)] == pytest.approx([0, 2, 4, 6, 8, 10, 10, 5, 2.5])


@pytest.mark.parametrize(("workers", "epochs"), [(1, 0), (2, 1), (3, 1), (4, 2), (8, 3), (16, 4), (32, 5)])
def test_the_official_warmup_takes_log2_of_the_workers(workers: int, epochs: int) -> None:
    assert log2_warmup(workers) == epochs


def test_the_original_logistic_regression_falls_after_one_bad_epoch_to_its_floor() -> None:
    schedule, rates = Plateau(8, 8, 0, factor=0.75, patience=0, threshold=0.01, floor=4), []
    for _ in range(5):
        schedule.after_epoch(0.5)
        rates.append(schedule.rate(0))
    assert rates == [8, 6, 4.5, 4, 4]


def test_transformer_warms_up_and_decays_with_the_square_root() -> None:
    rate = WarmupInverseSqrt(1.976e-3, 1000)
    assert (rate(0), rate(500), rate(1000)) == pytest.approx((0, 0.988e-3, 1.976e-3))
    assert rate(4000) == pytest.approx(0.988e-3)


def test_a_formula_of_updates_or_of_epochs() -> None:
    by_update, by_epoch = PerUpdate(LinearWarmup(0, 10, 5)), PerEpoch(MultiStep(10, (1,), 0.5))
    assert [by_update.rate(2), by_epoch.rate(2)] == pytest.approx([4, 10])
    by_update.after_epoch(math.nan)
    by_epoch.after_epoch(math.nan)
    assert [by_update.rate(2), by_epoch.rate(2)] == pytest.approx([4, 5])
    assert PerUpdate(Constant(3)).rate(10**9) == 3


@pytest.mark.parametrize(
    ("update", "rate"), [(0, 0.5), (5, 1.25), (10, 2.0), (60, 1.0), (85, 0.2929), (110, 0.0), (200, 0.0)]
)
def test_a_cosine_begins_after_the_warm_up_and_ends_at_0(update: int, rate: float) -> None:
    assert Cosine(2.0, end=110, warmup=10, start=0.5)(update) == pytest.approx(rate, abs=1e-4)
